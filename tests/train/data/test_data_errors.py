"""Errors in the data: one line names the file, the line in it, and the remedy."""

import dataclasses
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from support import tiny_run
from support.tokenizer_files import write_byte_level
from train import data
from train.__main__ import main
from train.config import DataConfig
from train.data import files, sources
from train.setup import open_datasets

TEXT = b"a text that is long enough to make a few rows of sixteen tokens; " * 20


def text(name="a.txt", content=TEXT):
    return lambda folder: (folder / name).write_bytes(content)


def lines(*values, name="a.jsonl"):
    content = "\n".join(v if isinstance(v, str) else json.dumps(v) for v in values)
    return text(name, content.encode())


def array(name, values, dtype):
    return lambda folder: np.save(folder / name, np.array(values, dtype))


def token_file(*values, dtype="<u2"):
    return text("a.bin", np.array(values, dtype).tobytes())


def parquet(**columns):
    def write(folder):
        pa = pytest.importorskip("pyarrow")
        pq = pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table(columns), folder / "a.parquet")

    return write


def latin_parquet(folder):
    """A file whose column claims to be UTF-8 and is not."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    latin = pa.array([b"caf\xe9"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": latin}), folder / "a.parquet")


NPY = "{'descr': '<u2', 'fortran_order': False, 'shape': ("


def npy_header(header):
    size = len(header).to_bytes(2, "little")
    return text("a.npy", b"\x93NUMPY\x01\x00" + size + header.encode() + bytes(16))


def tokenizer(**options):
    def write(folder):
        text()(folder)
        write_byte_level(folder / "tokenizer.json", **options)

    return write


def nothing(folder):
    pass


GOOD = {"text": TEXT.decode()}
# The files of the folder, the paths that are asked for, and the message.
CASES = {
    # Files
    "no such file": (nothing, {"path": "a.txt"}, r"/a\.txt does not exist; give the path"),
    "empty folder": (nothing, {}, r"folder has no file with text or tokens \(.*\.txt"),
    "unknown suffix": (
        text("a.doc"),
        {"path": "a.doc"},
        r"/a\.doc: .*suffix '\.doc' .* rename .*\.txt",
    ),
    "compressed": (
        text("a.jsonl.gz"),
        {"path": "a.jsonl.gz"},
        r"suffix '\.gz' is not known; decompress, convert or rename it to one of .*\.jsonl",
    ),
    "no suffix": (text("README"), {"path": "README"}, r"/README: .* rename .*\.md"),
    "empty file": (text(content=b""), {}, r"folder is empty: it has no text; name other"),
    "mark only": (
        text(content=b"\xef\xbb\xbf"),
        {},
        r"folder is empty: it has no text; name other",
    ),
    "dangling link": (
        lambda folder: (folder / "a.txt").symlink_to(folder / "b"),
        {"path": "a.txt"},
        r"/a\.txt does not exist",
    ),
    "not UTF-8": (
        lambda folder: (tokenizer()(folder), text("b.txt", TEXT + b"caf\xe9")(folder)),
        {"tokenizer": "tokenizer.json"},
        rf"/b\.txt: not UTF-8 at byte {len(TEXT) + 3}; convert .*without --data\.tokenizer",
    ),
    "not UTF-8 far inside": (
        lambda folder: (tokenizer()(folder), text("b.txt", TEXT * 200 + b"\n\xff")(folder)),
        {"tokenizer": "tokenizer.json"},
        rf"/b\.txt: not UTF-8 at byte {len(TEXT) * 200 + 1};",
    ),
    # Amounts
    "less than a row": (
        text(content=b"short"),
        {},
        r"folder: 7 tokens .* needs 17\); use more text or a shorter --data\.sequence-length",
    ),
    "fewer rows than a step": (
        text(),
        {"batch_size": 64, "accumulation_steps": 2},
        r"folder: \d+ rows of 16 tokens, fewer than the 128 rows of a step; .*--data\.batch-size",
    ),
    "fewer rows than a step in two files": (
        lambda folder: (text()(folder), text("b.txt", TEXT[1:])(folder)),
        {"path": ("a.txt", "b.txt"), "held_out_fraction": 0.0, "batch_size": 163},
        r"/a\.txt, .*/b\.txt: 162 rows of 16 tokens, fewer than the 163 rows of a step; ",
    ),
    "a file and its folder": (
        text(),
        {"path": (".", "a.txt")},
        r"/a\.txt is in .*folder and in .*/a\.txt of --data\.path, .* twice; leave one of them out",
    ),
    "a held-out file and a link to it": (
        lambda folder: (
            text()(folder),
            text("b.txt")(folder),
            (folder / "c.txt").symlink_to("b.txt"),
        ),
        {"path": "a.txt", "held_out_path": ("b.txt", "c.txt"), "evaluates": True},
        r"/c\.txt is in .*/b\.txt and in .*/c\.txt of --data\.held-out-path, .* twice; ",
    ),
    "nothing held out": (
        text(),
        {"held_out_fraction": 0.0, "evaluates": True},
        r"folder: no document is held out, of 1; raise --data\.held-out-fraction.*--eval-every 0",
    ),
    "all is held out": (
        text(),
        {"path": "a.txt", "held_out_fraction": 1 - 1e-9, "evaluates": True},
        r"all 1,302 tokens of .*/a\.txt are held out; name .*--data\.held-out-path, .*fraction 0",
    ),
    "held-out file is trained on": (
        text(),
        {"held_out_path": "a.txt", "evaluates": True},
        r"/a\.txt is in --data\.path and in --data\.held-out-path; leave it out of one",
    ),
    "held-out path is missing": (text(), {"held_out_path": "b.txt"}, r"/b\.txt does not exist"),
    "held-out path is short": (
        lambda folder: (text()(folder), text("b.md", b"short")(folder)),
        {"path": "a.txt", "held_out_path": "b.md", "evaluates": True},
        r"/b\.md, held out: 7 tokens .*; name more text with --data\.held-out-path, or leave it "
        r"out and turn evaluations off with --eval-every 0$",
    ),
    # JSON lines
    "broken JSON": (lines(GOOD, '{"text": "x"'), {}, r"/a\.jsonl:2: not JSON .*repair or remove"),
    "an array of JSON": (lines("[", GOOD, "]"), {}, r"/a\.jsonl:1: not JSON"),
    "two objects a line": (lines('{"text": "x"} {}'), {}, r"/a\.jsonl:1: not JSON \(Extra data"),
    "not an object": (lines(GOOD, "", [1, 2]), {}, r"/a\.jsonl:3: .* expected, not \[1, 2\];"),
    "nested for ever": (lines(GOOD, "[" * 100_000), {}, r"/a\.jsonl:2: "),
    "no field": (
        lines(GOOD, {"content": "x", "id": 1}),
        {},
        r"/a\.jsonl:2: no field 'text'.*\[\"content\", \"id\"\]; .*--data\.text-field",
    ),
    "other field": (lines(GOOD), {"text_field": "body"}, r"/a\.jsonl:1: no field 'body'"),
    "prompt alone": (lines({"prompt": "x"}), {}, r"/a\.jsonl:1: .* not both of 'prompt' and"),
    "null": (lines(GOOD, {"text": None}), {}, r"/a\.jsonl:2: 'text' is null, not a text;"),
    "number": (lines({"text": 3.5}), {}, r"/a\.jsonl:1: 'text' is 3\.5, not a text; repair"),
    "list": (lines({"text": ["x"] * 99}), {}, r"/a\.jsonl:1: 'text' is \[\"x\", .*\.\.\., not a"),
    "bad completion": (
        lines({"prompt": "x", "completion": 1}),
        {},
        r"/a\.jsonl:1: 'completion' is 1, not a text",
    ),
    "half a surrogate pair": (lines('{"text": "ab\\ud800"}'), {}, r"/a\.jsonl:1: .* character 2;"),
    "JSON in Latin-1": (
        text("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}\n'),
        {},
        r"/a\.jsonl:2: not UTF-8 at byte 13 of the line; convert",
    ),
    # Parquet
    "not parquet": (text("a.parquet"), {}, r"/a\.parquet is not a parquet file: .*; write it"),
    "empty parquet": (text("a.parquet", b""), {}, r"/a\.parquet is not a parquet file: .*; write"),
    "no column": (parquet(body=["x"]), {}, r"/a\.parquet: no field 'text'.*\[\"body\"\]"),
    "column of numbers": (parquet(text=[1]), {}, r"/a\.parquet:1: 'text' is 1, not a text"),
    "parquet in Latin-1": (
        latin_parquet,
        {},
        r"/a\.parquet holds text that is not UTF-8: .*; write it again",
    ),
    "null in parquet": (parquet(text=["x", None]), {}, r"/a\.parquet:2: 'text' is null, not a"),
    # Tokens
    "half a token": (
        text("a.bin", b"123"),
        {},
        r"/a\.bin: 3 bytes .* uint16; .*--data\.token-dtype",
    ),
    "unknown token": (
        token_file(*range(200), 258, 3),
        {},
        r"/a\.bin: token 258 at index 200 is not one of .* 258; .*--data\.tokenizer",
    ),
    "wrong width": (
        token_file(*range(200), dtype="<f8"),
        {},
        r"/a\.bin: token \d+ at index \d+ is not .*--data\.token-dtype",
    ),
    "no tokens": (text("a.bin", b""), {}, r"folder is empty: it has no text"),
    "negative token": (array("a.npy", [1, -100], "i4"), {}, r"/a\.npy: token -100 at index 1"),
    "floats": (array("a.npy", [1, 2], "f4"), {}, r"/a\.npy has .* dtype float32; write one axis"),
    "two axes": (array("a.npy", [[1], [2]], "u2"), {}, r"/a\.npy has shape \(2, 1\)"),
    "no tokens in .npy": (array("a.npy", [], "u2"), {}, r"folder is empty: it has no text"),
    "not .npy": (text("a.npy"), {}, r"/a\.npy is not an \.npy file of numbers"),
    "empty .npy": (text("a.npy", b""), {}, r"/a\.npy is not an \.npy file of numbers"),
    "header of code": (
        npy_header("(" * 300),
        {},
        r"/a\.npy is not an \.npy file of numbers: .*; write it again",
    ),
    "header of bytes": (npy_header("{'descr': \x01}"), {}, r"/a\.npy is not an \.npy file of"),
    "unhashable header": (npy_header("{[]: 1}"), {}, r"/a\.npy is not an \.npy file of numbers"),
    "huge .npy": (npy_header(f"{NPY}{10**30},)}}"), {}, r"/a\.npy is not an \.npy file of numbers"),
    "less than none": (npy_header(f"{NPY}-1,)}}"), {}, r"/a\.npy is not an \.npy file of numbers"),
    "shorter than it says": (npy_header(f"{NPY}99,)}}"), {}, r"/a\.npy is not an \.npy file of"),
    "objects": (array("a.npy", [{}], object), {}, r"/a\.npy is not an \.npy file of numbers"),
    # Tokenizers
    "no tokenizer": (
        text(),
        {"tokenizer": "tokenizer.json"},
        r"/tokenizer\.json cannot be read .*--data\.tokenizer names",
    ),
    "no tokenizer at all": (
        lambda folder: (text()(folder), text("t.json", b"{}")(folder)),
        {"tokenizer": "t.json"},
        r"/t\.json is not a tokenizer\.json",
    ),
    "large tokenizer": (
        tokenizer(vocab_size=340, special=("<s>", "</s>", *(f"<{i}>" for i in range(82)))),
        {"tokenizer": "tokenizer.json"},
        r"/tokenizer\.json has 340 tokens, more than .*vocab_size=320; .*--model\.vocab-size 340",
    ),
    "no end of text": (
        tokenizer(special=("<a>",)),
        {"tokenizer": "tokenizer.json"},
        r"/tokenizer\.json does not say .*--data\.eos-token",
    ),
    "unknown end of text": (
        tokenizer(),
        {"tokenizer": "tokenizer.json", "eos_token": "</s>"},
        r"/tokenizer\.json has no token '</s>'",
    ),
    "unknown begin of text": (
        tokenizer(),
        {"tokenizer": "tokenizer.json", "bos_token": "<s>"},
        r"/tokenizer\.json has no token '<s>'.*--data\.bos-token",
    ),
    "small model": (text(), {"vocab_size": 256}, r"byte vocabulary has 258 tokens, .*=256"),
    # The cache
    "cache in a file": (text(), {"cache_dir": "a.txt"}, r"cannot be used .*--data\.cache-dir"),
}


def open_case(tmp_path, write, options):
    folder = tmp_path / "folder"
    folder.mkdir(parents=True)
    write(folder)
    options = dict(options)
    arguments = {"vocab_size": options.pop("vocab_size", 320)}
    arguments["evaluates"] = options.pop("evaluates", False)
    for name in ("path", "held_out_path"):
        if name in options:
            names = options[name] if isinstance(options[name], tuple) else (options[name],)
            options[name] = tuple(folder / name for name in names)
    for name in ("tokenizer", "cache_dir"):
        if name in options:
            options[name] = folder / options[name]
    defaults = {
        "path": (folder,),
        "cache_dir": tmp_path / "cache",
        "sequence_length": 16,
        "batch_size": 2,
    }
    return data.open_files(DataConfig(source="stdlib", **(defaults | options)), **arguments)


@pytest.mark.parametrize("name", CASES)
def test_malformed_input(name, tmp_path):
    write, options, message = CASES[name]
    with pytest.raises(data.DataError, match=message) as error:
        open_case(tmp_path, write, options)
    assert "\n" not in str(error.value)


def test_files_that_may_not_be_read(tmp_path, monkeypatch):
    def fail(*args, **options):
        raise PermissionError(13, "Permission denied")

    def write(folder):
        text()(folder)
        (folder / "a.txt").chmod(0)
        if os.getuid() == 0:  # who may read everything
            monkeypatch.setattr(Path, "open", fail)

    with pytest.raises(data.DataError, match=r"/a\.txt cannot be read \(Permission denied\)"):
        open_case(tmp_path, write, {})


def test_read_errors_are_named(tmp_path, monkeypatch):
    """A broken disk may fail after the file was opened."""

    def fail(*args):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files, "_text", fail)
    with pytest.raises(data.DataError, match=r"/a\.txt cannot be read \(Input/output error\)"):
        open_case(tmp_path, text(), {})


def test_parquet_without_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(data.DataError, match=r"/a\.parquet: parquet needs pyarrow; run `pip inst"):
        open_case(tmp_path, text("a.parquet"), {})


def test_a_damaged_cache_is_named(tmp_path):
    config = DataConfig(
        source="stdlib",
        path=(tmp_path / "a.txt",),
        cache_dir=tmp_path / "cache",
        sequence_length=16,
        batch_size=2,
    )
    again = lambda: data.open_files(config, vocab_size=320, evaluates=False)
    text()(tmp_path)
    again()
    (index,) = (tmp_path / "cache").glob("*/index.json")
    tokens = index.parent / "train.tokens"
    content = tokens.read_bytes()
    damaged = r"/train\.tokens is damaged.* remove the folder"
    for damage in (lambda: tokens.write_bytes(content[:-2]), tokens.unlink):
        damage()
        with pytest.raises(data.DataError, match=damaged):
            again()
    # The entry is not complete, and has less text than was committed.
    progress = index.rename(index.with_name("progress.json"))
    with pytest.raises(data.DataError, match=damaged):
        again()
    progress.rename(index)
    tokens.write_bytes(content)
    again()
    index.write_text("{")
    with pytest.raises(
        data.DataError, match=r"/index\.json is damaged .*; remove the folder .* to make it again"
    ):
        again()


def test_a_line_without_an_end_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LINE_BYTES", 2000)
    write = lines(GOOD, "x" * 1999, name="b.jsonl")
    with pytest.raises(data.DataError, match=r"/b\.jsonl:2: not JSON"):
        open_case(tmp_path, write, {})
    message = r"/b\.jsonl:1: the line has more than 2,000 bytes; put each document on a line"
    with pytest.raises(data.DataError, match=message):
        open_case(tmp_path / "again", text("b.jsonl", b" " * 2000 + b"\n"), {})


@pytest.mark.parametrize(
    ("flag", "value", "name", "needed"),
    [
        ("token-dtype", "uint32", "a.npy", r"\.bin"),
        ("text-field", "body", "a.md", r"\.jsonl or \.parquet"),
    ],
)
def test_settings_that_no_file_needs_are_refused(flag, value, name, needed, tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    text(name)(folder)
    arguments = ["--data.path", str(folder), f"--data.{flag}", value]
    with pytest.raises(SystemExit):
        main(arguments)
    suffix = re.escape(Path(name).suffix)
    line = rf"error: --data\.{flag} {value} has no effect, .* {needed} \(there are {suffix}\); .*\n"
    assert re.fullmatch(line, capsys.readouterr().err)
    # A file of the format in any of the paths makes it useful.
    other = {"token-dtype": tmp_path / "a.bin", "text-field": tmp_path / "a.jsonl"}[flag]
    config = DataConfig(
        source="stdlib",
        path=(folder,),
        held_out_path=(other,),
        sequence_length=16,
        batch_size=2,
        **{flag.replace("-", "_"): value},
    )
    data.check_effects(config)


def test_folders_are_not_listed_without_such_settings(tmp_path, monkeypatch):
    """Every run checks its settings twice: at the command line, and before it opens the text."""
    listed = []
    monkeypatch.setattr(sources, "suffixes_in", lambda path: listed.append(path) or {".bin"})
    config = dataclasses.replace(tiny_run.ON_LIBRARY.data, path=(tmp_path,))
    data.check_effects(config, {"--data.path"})
    assert not listed
    data.check_effects(config, {"--data.path", "--data.token-dtype"})
    assert listed == [tmp_path]


def test_a_row_longer_than_the_held_out_part_of_the_library(monkeypatch):
    """The error names the remedies, and a run without evaluations needs no such part."""
    corpus = data.Corpus({f"{i}.py": b"x = 1\n" * 9 for i in range(40)})
    monkeypatch.setattr(data, "stdlib_corpus", lambda: corpus)
    length = 1 + sum(map(len, corpus.held_out))
    of_library = dataclasses.replace(tiny_run.ON_LIBRARY.data, sequence_length=length)
    model = dataclasses.replace(tiny_run.MODEL, max_position_embeddings=length)
    config = dataclasses.replace(tiny_run.ON_LIBRARY, data=of_library, model=model, eval_every=1)
    message = (
        rf"^the standard library, held out: {length - 1} .*--data\.path .*--eval-every 0 turns"
    )
    with pytest.raises(data.DataError, match=message):
        open_datasets(config)
    datasets = open_datasets(dataclasses.replace(config, eval_every=0))
    assert datasets.held_out is None and datasets.train.num_rows > 1


def test_the_command_prints_one_line_and_exits_with_2(tmp_path, capsys):
    lines(GOOD, "{")(tmp_path)
    arguments = ["--data.path", str(tmp_path / "a.jsonl"), "--runs-dir", str(tmp_path / "runs")]
    arguments += ["--data.cache-dir", str(tmp_path / "cache")]
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert re.fullmatch(r"error: .*/a\.jsonl:2: not JSON .*\n", error), error
    assert not (tmp_path / "runs").exists()
