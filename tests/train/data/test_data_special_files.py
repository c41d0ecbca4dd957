"""FIFOs, sockets, devices and links in the place of text are refused before they are opened."""

import errno
import os
import socket

import pytest

from support.tokenizer_files import write_byte_level
from train import data
from train.config import DataConfig
from train.data.files import Reader, find_files

TEXT = b"a text that is long enough to make a few rows of sixteen tokens; " * 20


def config_of(path, folder):
    return DataConfig(
        source="stdlib",
        path=(path,),
        cache_dir=folder / "cache",
        sequence_length=16,
        batch_size=2,
    )


def refused(config, message):
    with pytest.raises(data.DataError, match=message) as error:
        data.open_files(config, vocab_size=320, evaluates=True)
    assert "\n" not in str(error.value)


def bind(path):
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 characters
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path.name)
    os.chdir(here)


SPECIAL = {
    "FIFO": (os.mkfifo, "a FIFO"),
    "socket": (bind, "a socket"),
    "device": (lambda path: path.symlink_to("/dev/zero"), "a character device"),
    "link to a link to itself": (lambda path: path.symlink_to(path), None),
    "dangling link": (lambda path: path.symlink_to("nothing"), None),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_files_are_refused_before_they_are_opened(name, tmp_path, capsys):
    make, found = SPECIAL[name]
    for suffix in (".txt", ".jsonl", ".parquet", ".npy", ".bin"):
        (tmp_path / suffix[1:]).mkdir()
        path = tmp_path / suffix[1:] / f"special{suffix}"
        make(path)
        message = {"link to a link to itself": "cannot be read", "dangling link": "does not exist"}
        message = message.get(name, f"is {found}, not a regular file; copy its")
        refused(config_of(path, tmp_path), rf"special{suffix} {message}")
        # The reader refuses it on its own.
        reader = Reader(
            files=(path,), text_field="text", token_dtype="uint16", vocab_size=9, end_of_text=8
        )
        with pytest.raises(data.DataError, match=rf"special{suffix} (is|cannot)"):
            list(reader.documents())
        # A folder leaves it out, with a line.
        (path.parent / "good.txt").write_bytes(TEXT)
        (path.parent / ".hidden.txt").symlink_to("nothing")
        assert find_files(path.parent) == (path.parent / "good.txt",)
        line = f"{path.parent}: 1 left out, the first: {path} is {found or 'a link to nothing'}\n"
        assert line in capsys.readouterr().out


def test_links_to_folders_are_left_out_with_a_line(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(TEXT)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b.txt").write_bytes(TEXT)
    (tmp_path / "sub" / "c.txt").symlink_to(tmp_path / "a.txt")  # to a file: it counts
    (tmp_path / "sub" / "up").symlink_to(tmp_path)
    (tmp_path / "sub" / ".up").symlink_to(tmp_path)
    found = [file.relative_to(tmp_path).as_posix() for file in find_files(tmp_path)]
    assert found == ["a.txt", "sub/b.txt", "sub/c.txt"]
    line = f"{tmp_path}: 1 left out, the first: {tmp_path / 'sub' / 'up'} is a link to a folder\n"
    assert capsys.readouterr().out == line


def test_files_of_other_types_are_left_out_with_a_line(tmp_path, capsys):
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.jsonl.gz", "sub/c.GZ", "d.json", "LICENSE", ".hidden.zst"):
        (tmp_path / name).write_bytes(TEXT)
    assert find_files(tmp_path) == (tmp_path / "a.txt",)
    assert (
        capsys.readouterr().out == f"{tmp_path}: 4 of other types left out: .GZ .gz .json LICENSE\n"
    )


def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch):
    (tmp_path / "texts" / "secret").mkdir(parents=True)
    (tmp_path / "texts" / "a.txt").write_bytes(TEXT)
    real = os.scandir

    def scandir(path):
        if str(path).endswith("secret"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    refused(
        config_of(tmp_path / "texts", tmp_path),
        r"/secret cannot be read \(Permission denied\); check permissions",
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("kind", ["FIFO", "socket", "device"])
def test_special_files_for_a_tokenizer(name, kind, tmp_path):
    make, found = SPECIAL[kind]
    if name != "tokenizer.json":
        write_byte_level(tmp_path / "tokenizer.json")
    make(tmp_path / name)
    with pytest.raises(data.DataError, match=rf"/{name} is {found}, not a regular file"):
        data.HuggingFaceTokenizer(tmp_path)
