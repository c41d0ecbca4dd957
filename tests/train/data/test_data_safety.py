"""The folder of tokenized text: damage, links, other users, locks and errors of the system."""

import contextlib
import errno
import fcntl
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train import data
from train.config import DataConfig
from train.data import cache, folder, index, lock
from train.data.files import Reader

TEXT = b"a text that is long enough to make a few rows of sixteen tokens; " * 20
PAIRS = [{"prompt": f"question {i}", "completion": f" answer {i}"} for i in range(60)]


@pytest.fixture
def config(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    return DataConfig(
        source="stdlib",
        path=(text,),
        cache_dir=tmp_path / "cache",
        held_out_fraction=0.25,
        sequence_length=16,
        batch_size=2,
    )


@pytest.fixture
def entry(config):
    """The folder of a complete entry."""
    opened(config)
    (path,) = config.cache_dir.iterdir()
    return path


def opened(config) -> Any:
    return data.open_files(config, vocab_size=320, evaluates=True)


def refused(config, message):
    with pytest.raises(data.DataError, match=message) as error:
        opened(config)
    assert "\n" not in str(error.value)


def contents(path):
    return {file.name: file.read_bytes() for file in path.iterdir() if file.name != "lock"}


# Damage.


@pytest.mark.parametrize("part", ["tokens", "offsets", "prompts"])
@pytest.mark.parametrize("split", ["train", "held_out"])
def test_any_damaged_byte_is_found(split, part, config, entry):
    path = entry / f"{split}.{part}"
    content = path.read_bytes()
    for place in (0, len(content) // 2, len(content) - 1):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        refused(config, rf"/{split}\.{part} is damaged \(.*\); remove the folder {entry} to make")
    path.write_bytes(content)
    opened(config)


def test_ids_of_another_vocabulary_are_found(config, entry):
    """The ids are out of range although their checksum is right."""
    tokens = np.fromfile(entry / "train.tokens", "<u2")
    tokens[7] = 258
    tokens.tofile(entry / "train.tokens")
    content = json.loads((entry / "index.json").read_text())
    del content["checksum"]
    content["checksums"]["train.tokens"] = zlib.crc32(tokens.tobytes())
    with folder.OwnFolder(entry) as own:
        index.write(own, "index.json", content)
    refused(config, r"/train\.tokens is damaged \(token 258 at index 7 is not one of .* 258\)")


def test_a_large_file_is_checked_in_pieces(config, entry, monkeypatch, capsys):
    monkeypatch.setattr(index, "_PIECE_BYTES", 64)
    monkeypatch.setattr(index, "_ANNOUNCED_BYTES", 1000)
    opened(config)
    assert f"checking {entry / 'train.tokens'}, 0.0 GiB\n" in capsys.readouterr().out
    content = bytearray((entry / "train.tokens").read_bytes())
    content[201] = 255
    (entry / "train.tokens").write_bytes(content)
    refused(config, r"/train\.tokens is damaged \(token 65\d\d\d at index 100 ")


def interrupted(config, monkeypatch):
    """An entry with two batches of eight committed."""
    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(cache, "_BATCH_DOCUMENTS", 8)
        patch.setattr(cache, "_COMMIT_SECONDS", 0)
        write = cache._Writing._write

        def dies(self, batch, files):
            if self.counts["train"]["documents"] + self.counts["held_out"]["documents"] == 16:
                raise KeyboardInterrupt
            write(self, batch, files)

        patch.setattr(cache._Writing, "_write", dies)
        opened(config)
    (path,) = config.cache_dir.iterdir()
    assert (path / "progress.json").exists()
    return path


def test_damage_to_committed_text_is_found(config, monkeypatch):
    path = interrupted(config, monkeypatch) / "train.tokens"
    content = bytearray(path.read_bytes())
    content[10] ^= 4
    path.write_bytes(content)
    refused(config, r"/train\.tokens is damaged \(its checksum is \w+, but \w+ was written\)")


def test_a_position_in_no_file_is_named(config, monkeypatch):
    path = interrupted(config, monkeypatch)
    content = json.loads((path / "progress.json").read_text())
    del content["checksum"]
    content["position"]["file"] = 1
    with folder.OwnFolder(path) as own:
        index.write(own, "progress.json", content)
    refused(config, r"/progress\.json is damaged \(no file 1 of 1\)")


def without(name):
    return lambda content: content.pop(name)


def changed(*path, to):
    def change(content):
        for name in path[:-1]:
            content = content[name]
        content[path[-1]] = to

    return change


MALFORMED = {
    "no split": (without("held_out"), "no field held_out"),
    "no checksums": (without("checksums"), "no field checksums"),
    "no checksum": (without("checksum"), "no field checksum"),
    "no count": (lambda content: content["train"].pop("tokens"), r"no field train\.tokens"),
    "no position": (without("position"), "no field position"),
    "negative": (changed("train", "tokens", to=-1), r"train\.tokens is -1, not a whole number"),
    "huge": (changed("train", "tokens", to=10**30), r"train\.tokens is 1000.*, not a whole number"),
    "fraction": (changed("held_out", "documents", to=1.5), r"held_out\.documents is 1\.5, not"),
    "bool": (changed("train", "prompts", to=True), r"train\.prompts is True, not a whole number"),
    "text": (changed("position", "offset", to="3"), r"position\.offset is '3', not a whole"),
    "null": (changed("train", to=None), "train is None, not an object"),
    "list": (changed("position", to=[0] * 99), r"position is \[0, 0, .*\.\.\., not an object"),
    "hash": (changed("content_hash", to=3), "content_hash is 3, not a text"),
    "no hash": (changed("content_hash", to="xyz"), "non-hexadecimal"),
    # Each value is valid alone, but would drop, repeat or relabel text.
    "less": (changed("train", "tokens", to=20), "its checksum is wrong"),
    "no prompts": (changed("train", "prompts", to=0), "its checksum is wrong"),
    "elsewhere": (changed("position", "offset", to=40), "its checksum is wrong"),
}
UNREADABLE = {
    "empty": (b"", "Expecting value"),
    "cut": (b'{"train": ', "Expecting value"),
    "array": (b"[]", r"it is \[\], not an object"),
    "binary": (b'{"train": "\xff"}', "decode byte"),
    "nested": (b"[" * 50_000, "recursion"),
    "digits": (b"1" * 5_000, "digits"),
    "long": (b" " * 70_000, "it has more than 65,536 bytes"),
}


@pytest.mark.parametrize("name", ["index.json", "progress.json"])
def test_malformed_indexes_are_named(name, config, monkeypatch):
    path = interrupted(config, monkeypatch)
    if name == "index.json":
        opened(config)
    path = path / name
    content = path.read_bytes()
    cases = [*MALFORMED.values(), *UNREADABLE.values()]
    for change, message in cases:
        if isinstance(change, bytes):
            path.write_bytes(change)
        else:
            values = json.loads(content)
            change(values)
            path.write_text(json.dumps(values))
        refused(config, rf"/{name} is damaged \(.*{message}.*\); remove the folder {path.parent} ")
    path.write_bytes(content)
    opened(config)


@pytest.mark.parametrize("version", [1, 2])
def test_an_entry_of_an_earlier_version_is_made_again(version, config, entry, capsys):
    """The key has the version of the format, so the old entry is not opened. A line names it."""
    reader = Reader(
        files=config.path, text_field="text", token_dtype="uint16", vocab_size=258, end_of_text=257
    )
    fingerprint = cache._fingerprint(reader, data.BYTES, config.held_out_fraction)
    assert entry.name == cache._key(fingerprint)
    old = config.cache_dir / cache._key(fingerprint | {"version": version})
    entry.rename(old)
    capsys.readouterr()
    opened(config)
    line = f"{config.path[0]}: tokenizing again, because {old} is of version {version} of the "
    assert capsys.readouterr().out.startswith(line)
    assert contents(entry) == contents(old)
    opened(config)
    assert "again" not in capsys.readouterr().out


# Links, and other users.

FILES = ("lock", "train.tokens", "held_out.prompts", "progress.json", "index.json")


def fifo(path, victim):
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("plant", "found"),
    [
        (lambda path, victim: path.symlink_to(victim), "a link"),
        (lambda path, victim: path.symlink_to(victim.with_name("new")), "a link"),
        (lambda path, victim: path.hardlink_to(victim), "a file with a second name elsewhere"),
        (fifo, "a FIFO"),
        (lambda path, victim: path.mkdir(), "a folder"),
    ],
    ids=["link", "dangling link", "hard link", "fifo", "folder"],
)
def test_files_planted_in_an_entry_are_not_written_to(plant, found, config, entry, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in FILES:
        for file in entry.iterdir():
            file.unlink()
        plant(entry / name, victim)
        # Two of the files are only read. A second name of them does no harm, and their content is
        # no index.
        is_read = found.startswith("a file") and name.endswith(".json")
        refused(config, rf"/{name} is {'damaged' if is_read else found}.*; remove the folder")
        assert victim.read_bytes() == b"precious"
        assert not victim.with_name("new").exists()
        (entry / name).rmdir() if found == "a folder" else (entry / name).unlink()


def test_a_link_for_the_file_that_is_renamed_is_replaced(config, entry, tmp_path):
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for file in entry.iterdir():
        file.unlink()
    (entry / "progress.json.part").symlink_to(victim)
    opened(config)
    assert victim.read_bytes() == b"precious"
    assert not (entry / "progress.json.part").exists() and (entry / "index.json").is_file()


@pytest.mark.parametrize("complete", [True, False])
def test_a_link_for_an_entry_is_not_followed(complete, config, entry, tmp_path):
    target = entry.rename(tmp_path / "target")
    if not complete:
        (target / "index.json").rename(target / "progress.json")
    before = contents(target)
    entry.symlink_to(target)
    refused(config, rf"{entry} is a link, not a folder of the cache; remove it, or .*cache-dir")
    assert contents(target) == before
    entry.unlink()
    entry.write_text("")
    refused(config, rf"{entry} is a file, not a folder of the cache")


def test_an_entry_is_its_users_alone(config):
    before = os.umask(0)
    try:
        opened(config)
    finally:
        os.umask(before)
    (entry,) = config.cache_dir.iterdir()
    modes = {stat.S_IMODE(path.stat().st_mode) for path in entry.iterdir()}
    assert (stat.S_IMODE(entry.stat().st_mode), modes) == (0o700, {0o600})


def test_another_users_entry_is_refused(config, entry, monkeypatch):
    real = os.fstat

    def foreign(descriptor):
        found = real(descriptor)
        return os.stat_result([*found[:4], 12345, *found[5:]])

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", foreign)
        refused(config, rf"{entry} belongs to user 12345, .*--data\.cache-dir")


# Locks.


class Clock:
    """A clock that moves only in `sleep`, which calls the `ticks` one after the other."""

    def __init__(self, *ticks):
        self.now, self.ticks = 0.0, list(ticks)

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        if self.ticks:
            self.ticks.pop(0)()


@pytest.mark.parametrize("skew_s", [-(10**6), 10**6])
def test_a_lock_that_is_touched_is_waited_for_whatever_the_clocks_say(
    skew_s, tmp_path, monkeypatch, capsys
):
    """The holder's clock is eleven days off. It touches the lock every five of the ten minutes."""
    with folder.OwnFolder(tmp_path / "entry", make=True) as own:
        holder = own.open("lock", "append")
        fcntl.flock(holder, fcntl.LOCK_EX)
        touch = lambda i: lambda: os.utime(holder.fileno(), (0, 2 * 10**9 + skew_s + i))
        clock = Clock(*map(touch, range(20)), holder.close)
        monkeypatch.setattr(lock, "time", clock)
        monkeypatch.setattr(lock, "_POLL_S", 300)
        touch(-1)()
        with lock.locked(own, "text"):
            assert clock.now == 21 * 300
    assert capsys.readouterr().out.count("waiting for another process") == 1


@pytest.mark.parametrize("skew_s", [-(10**6), 10**6])
def test_a_lock_that_is_not_touched_is_given_up(skew_s, tmp_path, monkeypatch):
    with folder.OwnFolder(tmp_path / "entry", make=True) as own:
        holder = own.open("lock", "append")
        fcntl.flock(holder, fcntl.LOCK_EX)
        os.utime(holder.fileno(), (0, 2 * 10**9 + skew_s))
        clock = Clock()
        monkeypatch.setattr(lock, "time", clock)
        with (
            pytest.raises(data.DataError, match=r"no progress for 600 s; end it, or .*cache-dir"),
            lock.locked(own, "text"),
        ):
            pass
        assert 600 < clock.now < 601
        holder.close()


# Errors of the system.


@pytest.mark.parametrize(
    ("function", "code"),
    [
        ("mkdir", errno.EACCES),
        ("mkdir", errno.EROFS),
        ("mkdir", errno.ENOSPC),
        ("open", errno.EACCES),
        ("open", errno.ESTALE),
        ("fsync", errno.ENOSPC),
        ("fsync", errno.EIO),
        ("fsync", errno.EDQUOT),
        ("replace", errno.EACCES),
        ("flock", errno.ENOLCK),
    ],
)
def test_errors_of_the_system_name_folder_and_flag(function, code, config, monkeypatch):
    def fail(*args, **options):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl if function == "flock" else os, function, fail)
        refused(
            config,
            rf"the cache {config.cache_dir}/\w+ cannot be used \({os.strerror(code)}\); name "
            r"another folder with --data\.cache-dir",
        )
    opened(config)  # goes on where it was


def test_a_disk_that_fails_as_an_entry_is_read(config, entry, monkeypatch):
    def fail(*args, **options):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(index, "check_content", fail)
    refused(config, rf"the cache {entry} cannot be used \(Input/output error\)")


def test_a_user_without_a_home_must_name_a_folder(monkeypatch):
    def fail():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", fail)
    with pytest.raises(data.DataError, match=r"home directory\.\); name one with --data\.cache-d"):
        cache.default_cache_dir()
