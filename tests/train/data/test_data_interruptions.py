"""Tokenizing that is interrupted, or that two processes do at once, leaves the same bytes."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.tokenizer_files import write_byte_level
from train import data
from train.config import DataConfig
from train.data import cache

ROOT = Path(data.__file__).parents[2]


def opened(config) -> Any:
    return data.open_files(config, vocab_size=320, evaluates=True)


def files_of(cache_dir):
    """All bytes of the cache."""
    paths = [
        path for path in sorted(cache_dir.rglob("*")) if path.is_file() and path.name != "lock"
    ]
    return {path.relative_to(cache_dir).as_posix(): path.read_bytes() for path in paths}


# It forks, because to import everything takes as long as all the rest.
CHILDREN = """
import dataclasses, json, os, signal, sys, time
from pathlib import Path
from train import data
from train.config import DataConfig
from train.data import cache

arguments = json.loads(sys.argv[1])
cache._COMMIT_SECONDS = 0
cache._BATCH_BYTES = 20_000
os.fsync = lambda file: None  # slow, and only power cuts need it
config = DataConfig(
    source="stdlib",
    path=(Path(arguments["path"]),),
    cache_dir=Path(arguments["killed"]),
    tokenizer=Path(arguments["tokenizer"]),
    sequence_length=16,
    batch_size=2,
)

def start():
    child = os.fork()
    if child == 0:
        data.open_files(config, vocab_size=320, evaluates=True)
        os._exit(0)
    return child

def committed():
    progress = list(config.cache_dir.glob("*/progress.json"))
    return json.loads(progress[0].read_text())["train"]["documents"] if progress else 0

for kill in range(4):
    before, child = committed(), start()
    while committed() <= before + 30:
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    print("killed after", committed(), flush=True)
assert os.waitpid(start(), 0)[1] == 0
config = dataclasses.replace(config, cache_dir=Path(arguments["together"]))
children = [start() for _ in range(2)]
assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """The configuration of a file of JSON lines, whose entry was made without interruption."""
    folder = tmp_path_factory.mktemp("corpus")
    rng = np.random.default_rng(0)
    lines = [{"text": f"the quick brown fox {i} " * int(rng.integers(1, 90))} for i in range(1200)]
    lines += [{"prompt": "p" * int(n), "completion": "c"} for n in rng.integers(1, 90, size=300)]
    (folder / "text.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_byte_level(folder / "tokenizer.json")
    config = DataConfig(
        source="stdlib",
        path=(folder / "text.jsonl",),
        cache_dir=folder / "cache",
        tokenizer=folder / "tokenizer.json",
        sequence_length=16,
        batch_size=2,
    )
    opened(config)
    return config


def test_kills_and_company_leave_the_same_bytes(corpus, tmp_path):
    arguments = {
        "path": str(corpus.path[0]),
        "killed": str(tmp_path / "killed"),
        "together": str(tmp_path / "together"),
        "tokenizer": str(corpus.tokenizer),
    }
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILDREN, json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("killed after") == 4
    # The line has "another process" if that process has not said yet which it is.
    assert len(re.findall(": waiting for (?:another )?process", result.stdout)) == 1
    assert result.stdout.count("held out; in") == 1 + 2
    for name in ("killed", "together"):
        assert files_of(tmp_path / name) == files_of(corpus.cache_dir)


def test_a_kill_at_any_write(corpus, tmp_path, monkeypatch):
    """Files grew after the last commit, and a commit was never renamed."""
    monkeypatch.setattr(cache, "_COMMIT_SECONDS", 0)
    monkeypatch.setattr(cache, "_BATCH_BYTES", 20_000)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # slow, and only power cuts need it
    config = dataclasses.replace(corpus, cache_dir=tmp_path / "cache")
    write, commit = cache._Writing._write, cache._Writing._commit
    for doomed in (1, 2, 7):
        calls = []

        def dies_after_writing(self, batch, files, calls=calls, doomed=doomed):
            write(self, batch, files)
            calls.append(None)
            if len(calls) == doomed:
                for file in files.values():
                    file.write(b"torn")
                raise KeyboardInterrupt

        monkeypatch.setattr(cache._Writing, "_write", dies_after_writing)
        with pytest.raises(KeyboardInterrupt):
            opened(config)
        (folder,) = config.cache_dir.iterdir()
        (folder / "progress.json.part").write_text("{torn")
    monkeypatch.setattr(cache._Writing, "_write", write)
    monkeypatch.setattr(cache._Writing, "_commit", commit)
    opened(config)
    assert files_of(config.cache_dir) == files_of(corpus.cache_dir)
