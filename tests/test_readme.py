"""The README's Python runs, in the order in which it is read."""

import json
import re
import shlex
from pathlib import Path

import jax
import pytest

from models.llama_hf import config_to_hf
from models.presets import PRESETS
from support.tokenizer_files import write_byte_level
from train import data
from train.__main__ import main
from train.cli.command_line import parse_command_line

README = Path(__file__).parent.parent / "README.md"

pytestmark = pytest.mark.usefixtures("fast_compilation")


def test_python_blocks_run_and_their_assertions_hold():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    namespace = {"__name__": "readme"}
    # As a user has it; the other tests refuse to promote dtypes.
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, str(README), "exec"), namespace)


def test_commands_name_what_exists():
    text = README.read_text()
    root = README.parent
    makefile = (root / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (root / link).exists(), link


def training_commands():
    text = README.read_text()
    commands = re.findall(r'^make train ARGS="(.*)"', text, re.MULTILINE)
    assert len(commands) > 5
    return [command for command in commands if command != "--help"]


@pytest.mark.parametrize("command", training_commands())
def test_training_commands_are_understood_and_find_their_data(command, tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    text = [f"{i}: the quick brown fox jumps over the lazy dog\n" * 20 for i in range(600)]
    lines = "".join(json.dumps({"text": t}) + "\n" for t in text)
    chat = [{"prompt": t, "completion": t * 9} for t in text]
    for folder in ("notes", "Llama-3.2-1B"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notes" / "a.md").write_text("".join(text))
    (tmp_path / "book.txt").write_text("".join(text) * 4)
    (tmp_path / "web.jsonl").write_text(lines)
    (tmp_path / "dev.jsonl").write_text(lines)
    (tmp_path / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chat))
    pq.write_table(pa.table({"text": text}), tmp_path / "web.parquet")
    for folder in (".", "Llama-3.2-1B"):
        write_byte_level(tmp_path / folder / "tokenizer.json")
    hf_config = config_to_hf(PRESETS["demo"])
    (tmp_path / "Llama-3.2-1B" / "config.json").write_text(json.dumps(hf_config))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = parse_command_line(shlex.split(command))
    if config.data.path:
        train_data, held_out, _ = data.open_files(
            config.data, vocab_size=config.model.vocab_size, evaluates=config.eval_every > 0
        )
        assert held_out is not None
        rows = train_data.batch(0, batch_size=config.data.rows_per_step, seed=0)["tokens"]
        assert rows.shape == (config.data.rows_per_step, config.data.sequence_length)


def other_commands():
    pattern = r"^\.venv/bin/python -m train (export|eval|sample|compare) (.*?)(?: +#.*)?$"
    found = re.findall(pattern, README.read_text(), re.MULTILINE)
    assert {command for command, _ in found} == {"export", "eval", "sample", "compare"}
    return found


@pytest.mark.parametrize(("command", "arguments"), other_commands())
def test_other_commands_are_understood(command, arguments, tmp_path, monkeypatch, capsys):
    """Up to the run, which is not there."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([command, *shlex.split(arguments)])
    error = capsys.readouterr().err
    assert "runs/demo is " in error and "unrecognized" not in error and "usage" not in error
