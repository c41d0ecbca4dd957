"""Documents of every kind of file, read from any place, and errors in files."""

import dataclasses
import json
import os

import numpy as np
import pytest

from train.data.errors import DataError
from train.data.files import Position, Reader, find_files

EOT = 299


def reader(*files, **changes):
    options = {
        "text_field": "text",
        "token_dtype": "uint16",
        "vocab_size": 300,
        "end_of_text": EOT,
    }
    return Reader(files=files, **(options | changes))


def contents(documents):
    return [(d.prompt, d.text if d.tokens is None else d.tokens.tolist()) for d in documents]


@pytest.fixture
def folder(tmp_path):
    """Every kind of file, each with a document or two."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.md").write_text("# é\n")
    lines = ['{"text": "x"}', "", '{"prompt": "p", "completion": "q", "id": 3}', '  {"text": ""}\r']
    (tmp_path / "b" / "d.jsonl").write_text("\n".join(lines))
    table = pa.table({"text": ["r", "", "s"], "id": [1, 2, 3]})
    pq.write_table(table, tmp_path / "e.parquet", row_group_size=2)
    pq.write_table(pa.table({"prompt": ["t"], "completion": ["u"]}), tmp_path / "f.parquet")
    np.array([1, 2, EOT, EOT, 3, 4], "<u2").tofile(tmp_path / "g.bin")
    np.save(tmp_path / "h.npy", np.array([5, EOT], np.int64))
    (tmp_path / "i.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden.txt").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "no.txt").write_text("no")
    return tmp_path


EXPECTED = [
    *[(None, b"one\r\ntwo\n"), (None, "# é\n".encode())],
    *[(None, b"x"), (b"p", b"q"), (None, b"")],
    *[(None, b"r"), (None, b""), (None, b"s"), (b"t", b"u")],
    *[(None, [1, 2, EOT]), (None, [EOT]), (None, [3, 4]), (None, [5, EOT])],
]


def test_every_kind_of_file(folder):
    documents = list(reader(*find_files(folder)).documents())
    assert contents(documents) == EXPECTED
    wheres = [os.path.relpath(d.where, folder) for d in documents]
    assert wheres[2:6] == ["b/d.jsonl:1", "b/d.jsonl:3", "b/d.jsonl:4", "e.parquet:1"]


def test_reading_goes_on_after_any_document(folder):
    files = reader(*find_files(folder))
    documents = list(files.documents())
    for index, document in enumerate(documents):
        rest = list(files.documents(document.after))
        assert contents(rest) == EXPECTED[index + 1 :]
        assert [d.where for d in rest] == [d.where for d in documents[index + 1 :]]
        # The position for a progress bar never goes back or past the end of the file.
        assert document.after.num_bytes <= document.path.stat().st_size


def test_fields_of_several_kinds(tmp_path):
    path = tmp_path / "a.jsonl"
    fields = {"messages": [], "prompt": "p", "completion": "c", "text": "t"}
    without_text = {name: value for name, value in fields.items() if name != "text"}
    path.write_text(f"{json.dumps(fields)}\n{json.dumps(without_text)}\n")
    assert contents(list(reader(path).documents())) == [(None, b"t"), (b"p", b"c")]


def test_a_file_alone(folder):
    assert find_files(folder / "a.txt") == (folder / "a.txt",)
    assert find_files(folder / ".hidden.txt") == (folder / ".hidden.txt",)  # it was asked for


# Long text, with lines, with words alone, and with neither; é and 𝄞 must not be cut in two.
@pytest.mark.parametrize(
    "unit", ["a line of text\n", "word ", "é", "𝄞x", "\r\n", "\n" * 70_000 + "x"]
)
@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 200_000])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_long_text_is_cut_into_documents(unit, size, mark, tmp_path):
    content = (unit * (size // len(unit.encode()) + 1)).encode()[:size].decode(errors="ignore")
    path = tmp_path / "long.txt"
    path.write_bytes(mark + content.encode())
    documents = list(reader(path).documents())
    assert b"".join(d.text for d in documents).decode() == content
    assert [d.begins for d in documents] == [True, *[False] * (len(documents) - 1)]
    assert [d.ends for d in documents] == [*[False] * (len(documents) - 1), True]
    for document in documents:
        assert 0 < len(document.text) <= 65_536
        document.text.decode()
        if "\n" in unit[:20] and not document.ends:
            assert document.text.endswith(b"\n")
    for document in documents:
        rest = list(reader(path).documents(document.after))
        assert all(not d.begins for d in rest)
        position = documents.index(document) + 1
        assert [d.text for d in rest] == [d.text for d in documents[position:]]


def test_long_token_documents_are_cut(tmp_path):
    tokens = np.zeros(2**20 + 10, "<u4")
    tokens[-3] = EOT
    tokens.tofile(tmp_path / "x.bin")
    documents = list(reader(tmp_path / "x.bin", token_dtype="uint32").documents())
    assert [len(tokens) for _, tokens in contents(documents)] == [2**20, 8, 2]


def test_a_dtype_too_small_for_the_vocabulary_is_refused(tmp_path):
    """Tokens of uint32, read as uint16, would be two small ids each."""
    path = tmp_path / "x.bin"
    np.array([1, 2, 69_999], "<u4").tofile(path)
    assert reader(path, vocab_size=1 << 16)
    with pytest.raises(DataError, match=r"x\.bin: --data\.token-dtype uint16 cannot .* 65,537 tok"):
        reader(path, vocab_size=(1 << 16) + 1)
    (one,) = reader(path, vocab_size=70_000, token_dtype="uint32").documents()
    assert one.tokens is not None and one.tokens.tolist() == [1, 2, 69_999]
    assert reader(tmp_path / "x.npy", vocab_size=70_000)  # it has a dtype of its own


def test_any_integer_dtype(tmp_path):
    for dtype in ("u1", "<i2", ">i4", "<u8", "i8"):
        np.save(tmp_path / "x.npy", np.array([1, 2], dtype))
        assert contents(reader(tmp_path / "x.npy").documents()) == [(None, [1, 2])]


def test_documents_are_told_apart_by_their_content(tmp_path):
    """A document has one hash wherever it is, so duplicates are held out together."""
    (tmp_path / "a.txt").write_bytes(b"same text")
    lines = [{"text": "same text"}, {"prompt": "same", "completion": " text"}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    contents = {d.content for d in reader(tmp_path / "a.txt", tmp_path / "b.jsonl").documents()}
    assert contents == {b"same text"}
    np.array([1, 2], "<u2").tofile(tmp_path / "c.bin")
    np.save(tmp_path / "d.npy", np.array([1, 2], np.int64))
    (one,) = {d.content for d in reader(tmp_path / "c.bin", tmp_path / "d.npy").documents()}
    assert one not in contents


def test_positions_are_those_of_progress_json():
    position = Position(1, 2, 3, 4)
    assert Position(**json.loads(json.dumps(dataclasses.asdict(position)))) == position
