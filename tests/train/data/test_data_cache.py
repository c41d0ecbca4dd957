"""Tokenized text: the cache holds it, and later runs read it from there."""

import dataclasses
import hashlib
import itertools
import json
import os
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import chex
import numpy as np
import pytest

from support.tokenizer_files import write_byte_level
from train import data
from train.config import DataConfig
from train.data import BOS, EOS, IGNORED, HuggingFaceTokenizer, cache, files, lock, progress
from train.data.folder import OwnFolder
from train.data.held_out import is_held_out

ROOT = Path(data.__file__).parents[2]


@pytest.fixture
def config(tmp_path):
    return DataConfig(
        source="stdlib",
        path=(tmp_path / "text",),
        cache_dir=tmp_path / "cache",
        held_out_fraction=0.25,
        sequence_length=16,
        batch_size=2,
    )


def write_texts(path, texts):
    path.mkdir(exist_ok=True)
    for index, text in enumerate(texts):
        (path / f"{index:03}.txt").write_bytes(text)


def texts_of(seed=0, number=60, most=60):
    rng = np.random.default_rng(seed)
    return [
        rng.integers(256, size=rng.integers(1, most), dtype=np.uint8).tobytes()
        for _ in range(number)
    ]


def opened(config, **options) -> Any:
    return data.open_files(config, **{"vocab_size": 320, "evaluates": True, **options})


def documents_of(dataset):
    """The documents of a stream of bytes."""
    stream, offsets = dataset.tokens.tolist(), [*dataset.document_offsets.tolist(), None]
    return [stream[a:b] for a, b in itertools.pairwise(offsets)]


def files_of(cache_dir):
    """All bytes of the cache."""
    paths = [
        path for path in sorted(cache_dir.rglob("*")) if path.is_file() and path.name != "lock"
    ]
    return {path.relative_to(cache_dir).as_posix(): path.read_bytes() for path in paths}


def test_every_document_is_on_one_side_by_its_hash(config):
    texts = texts_of()
    write_texts(
        config.path[0], [*texts, b"", *texts[:20]]
    )  # a third of them twice, and an empty one
    train_data, held_out, _ = opened(config)
    is_held_out = lambda text: (
        int.from_bytes(hashlib.blake2b(text, digest_size=16).digest()[:8]) < 2**62
    )
    sides = {False: [], True: []}
    for text in [*texts, *texts[:20]]:
        sides[is_held_out(text)].append([BOS, *text, EOS])
    assert documents_of(train_data) == sides[False]
    assert documents_of(held_out) == sides[True]
    assert len(sides[True]) > 5
    for name in ("tokens", "document_offsets"):
        assert isinstance(getattr(train_data, name), np.memmap)
    assert train_data.tokens.dtype == np.uint16


def test_rows_are_those_of_documents_in_memory(config):
    write_texts(config.path[0], texts_of())
    train_data, _, _ = opened(config)
    documents = [np.array(d, np.uint16) for d in documents_of(train_data)]
    in_memory = data.PackedDataset.from_documents(documents, sequence_length=16)
    for step in range(5):
        chex.assert_trees_all_equal(
            train_data.batch(step, batch_size=2, seed=1),
            in_memory.batch(step, batch_size=2, seed=1),
        )


def test_a_larger_share_holds_out_more_of_the_same(config):
    path = config.path[0].with_suffix(".jsonl")
    path.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(2000)))
    config = dataclasses.replace(config, path=(path,))
    held_out = [
        {
            tuple(d)
            for d in documents_of(opened(dataclasses.replace(config, held_out_fraction=f))[1])
        }
        for f in (0.1, 0.3, 0.9)
    ]
    assert held_out[0] < held_out[1] < held_out[2]
    assert [len(h) for h in held_out] == pytest.approx([200, 600, 1800], abs=60)


def test_a_held_out_path_leaves_the_other_whole(config, tmp_path):
    texts = texts_of()
    write_texts(config.path[0], texts[:40])
    write_texts(tmp_path / "other", texts[40:])
    config = dataclasses.replace(
        config, held_out_path=(tmp_path / "other",), held_out_fraction=DataConfig.held_out_fraction
    )
    train_data, held_out, fingerprint = opened(config)
    assert documents_of(train_data) == [[BOS, *text, EOS] for text in texts[:40]]
    assert documents_of(held_out) == [[BOS, *text, EOS] for text in texts[40:]]
    assert fingerprint["path"][0]["train"]["documents"] == 40
    assert fingerprint["held_out_path"][0]["held_out"]["documents"] == 20


def test_records_without_text_are_counted(config, tmp_path, capsys):
    records = [{"text": "some text " * 5}] * 9
    records += [{"text": ""}, {"prompt": "a question", "completion": ""}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = dataclasses.replace(config, path=(path,), held_out_fraction=0.0)
    for _ in range(2):  # the second time from the cache
        train_data, _, _ = opened(config, evaluates=False)
        assert len(documents_of(train_data)) == 9
        assert "a.jsonl: 2 records without text are left out\n" in capsys.readouterr().out
    path.write_text("".join(json.dumps(record) + "\n" for record in records[:10]))
    opened(config, evaluates=False)
    assert "a.jsonl: 1 record without text is left out\n" in capsys.readouterr().out
    path.write_text("".join(json.dumps(record) + "\n" for record in records[:9]))
    opened(config, evaluates=False)
    assert "left out" not in capsys.readouterr().out


def test_pieces_of_a_small_text_are_halved_until_one_is_held_out(config, tmp_path, capsys):
    """No piece of 64 KiB is held out. A run without evaluations keeps such pieces."""
    book = tmp_path / "book.txt"
    book.write_bytes(b"".join(b"line %d of the book\n" % line for line in range(15_000)))
    config = dataclasses.replace(config, path=(book,), held_out_fraction=0.05)
    train, held_out, identity = opened(config)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "pieces of" in line]
    match = re.fullmatch(rf"{book}: read in pieces of (\d+) KiB, because .*", line)
    assert match is not None
    size = int(match[1])
    assert size in (1, 2, 4, 8, 16, 32)
    documents = documents_of(train) + documents_of(held_out)
    assert max(map(len, documents)) <= (size << 10) + 2  # with the first and the last token
    text = sorted(bytes(t for t in document if t < BOS) for document in documents)
    assert sorted(b"".join(text).splitlines()) == sorted(book.read_bytes().splitlines())
    for document in documents_of(held_out):
        assert is_held_out(
            hashlib.blake2b(bytes(t for t in document if t < BOS), digest_size=16).digest(), 0.05
        )
    before = files_of(config.cache_dir)
    assert opened(config)[2] == identity and files_of(config.cache_dir) == before
    assert "pieces of" in capsys.readouterr().out
    plain, _, _ = opened(config, evaluates=False)
    assert len(documents_of(plain)) == -(-book.stat().st_size // (64 << 10))
    assert "pieces of" not in capsys.readouterr().out


def test_several_sources(config, tmp_path):
    texts = texts_of(number=90)
    paths = tmp_path / "one", tmp_path / "two"
    write_texts(paths[0], texts[:60])
    write_texts(paths[1], texts[30:])  # half of the first is in the second, too
    config = dataclasses.replace(config, path=paths)
    train_data, held_out, _ = opened(config)
    sides = [
        {tuple(d) for source in side.sources for d in documents_of(source)}
        for side in (train_data, held_out)
    ]
    assert not sides[0] & sides[1]
    assert len(sides[0] | sides[1]) == 90
    assert train_data.weights == tuple(source.num_rows for source in train_data.sources)
    weighted = opened(dataclasses.replace(config, weights=(1.0, 3.0)))
    assert weighted[0].weights == weighted[1].weights == (1.0, 3.0)
    # The cache has the tokens of a source once, for all mixtures.
    assert len(list(config.cache_dir.iterdir())) == 2


def test_text_in_the_cache_is_not_read_again(config, monkeypatch, capsys):
    write_texts(config.path[0], texts_of())
    first = opened(config)
    monkeypatch.setattr(cache, "_Writing", None)
    again = opened(config)
    assert again[2] == first[2]
    np.testing.assert_array_equal(again[0].tokens, first[0].tokens)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and lines[0] == lines[1]
    amount = r"[\d,]+ tokens in \d+ documents"
    held_out = r"[\d,]+ tokens \([\d.]+%\) in \d+ documents?"
    amounts = rf"{amount} for training, and {held_out} held out"
    assert re.search(rf"text: {amounts}; in .*cache", lines[0])
    # A read-only cache can be used.
    for path in config.cache_dir.rglob("*"):
        path.chmod(0o555)
    assert opened(config)[2] == first[2]


def test_the_key_is_all_that_tokens_depend_on(config, tmp_path):
    write_texts(config.path[0], texts_of())
    tokenizer = write_byte_level(tmp_path / "tokenizer.json")
    base = dataclasses.replace(config, tokenizer=tokenizer)
    ascii_texts = [f"the quick brown fox {i}".encode() for i in range(60)]
    write_texts(config.path[0], ascii_texts)

    def entries(config):
        before = set(config.cache_dir.glob("*"))
        opened(config)
        return len(set(config.cache_dir.glob("*")) - before)

    assert entries(base) == 1
    for changes in (
        {"tokenizer": None},
        {"eos_token": "t"},
        {"held_out_fraction": 0.3},
    ):
        assert entries(dataclasses.replace(base, **changes)) == 1, changes
    for changes in ({"sequence_length": 8}, {"batch_size": 4}, {"accumulation_steps": 2}):
        assert entries(dataclasses.replace(base, **changes)) == 0, changes
    (config.path[0] / "000.txt").write_bytes(b"changed")
    assert entries(base) == 1
    os.utime(config.path[0] / "001.txt", ns=(1, 1))
    assert entries(base) == 1
    (config.path[0] / "000.txt").rename(config.path[0] / "0.md")
    assert entries(base) == 1


def test_tokens_of_a_tokenizer(config, tmp_path):
    texts = [f"line {i}: the quick brown fox ö\r\n\n" for i in range(50)]
    write_texts(config.path[0], [text.encode() for text in texts])
    path = write_byte_level(tmp_path / "tokenizer.json")
    train_data, held_out, fingerprint = opened(dataclasses.replace(config, tokenizer=path))
    tokenizer = HuggingFaceTokenizer(path)
    documents = documents_of(train_data) + documents_of(held_out)
    assert sorted(tokenizer.decode(d) for d in documents) == sorted(texts)
    for document in documents:
        assert (document[0], document[-1]) == (tokenizer.bos, tokenizer.eos)
        assert document[1:-1] == tokenizer.encode([tokenizer.decode(document).encode()])[0].tolist()
    assert fingerprint["tokenizer"] == tokenizer.fingerprint


def test_bits_per_byte_count_the_bytes_that_are_predicted(config, tmp_path):
    """The rows hold all tokens except a last partial row, and no BOS. So they predict all bytes
    except those of each document's first token."""
    texts = [f"some text {i} — with the quick brown fox\n" * (1 + i % 3) for i in range(40)]
    write_texts(config.path[0], [text.encode() for text in texts])
    path = write_byte_level(tmp_path / "tokenizer.json")
    for tokenizer_path in (None, path):
        config = dataclasses.replace(config, tokenizer=tokenizer_path, sequence_length=1)
        _, held_out, _ = opened(config)
        tokenizer = data.load_tokenizer(config)
        predicted = sum(
            data.predicted_bytes(batch, held_out.token_bytes) for batch in held_out.eval_batches(8)
        )
        documents = documents_of(held_out)
        assert len(documents) > 3
        # BOS is never predicted, and every byte after it is.
        assert predicted == sum(len(tokenizer.decode(d).encode()) for d in documents)


def test_only_completions_are_learned(config, tmp_path):
    records = [{"prompt": f"q{i}?" * (i % 4), "completion": f" a{i}"} for i in range(30)]
    records += [{"text": f"plain {i}"} for i in range(30)]
    records += [{"prompt": "only a prompt", "completion": ""}]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    for length in (5, 64):
        some = dataclasses.replace(config, path=(path,), sequence_length=length)
        train_data, held_out, _ = opened(some)
        learned = b""
        for dataset in (train_data, held_out):
            for batch in dataset.eval_batches(4):
                labels = batch["labels"]
                learned += bytes(labels[(labels != IGNORED) & (labels < BOS)].astype(np.uint8))
        expected = sum(len(r.get("completion", "") + r.get("text", "")) for r in records)
        # Less than a row is dropped at the end of each stream.
        assert expected - 2 * length <= len(learned) <= expected
        assert b"q" not in learned and b"prompt" not in learned
        # The row has the BOS and the text of a prompt.
        assert bytes(np.concatenate(documents_of(train_data))[:9].astype(np.uint8))


def test_labels_of_prompts_token_by_token(config, tmp_path):
    records = [{"prompt": "ab" * (i % 5), "completion": "c" * (i % 3) + "d"} for i in range(40)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    config = dataclasses.replace(config, path=(path,), held_out_fraction=0.0, sequence_length=7)
    dataset = opened(config, evaluates=False)[0]
    # Pairs of the stream: a token, and whether it is predicted (all after the prompt, with EOS).
    stream = []
    for record in records:
        stream += [(BOS, False), *((byte, False) for byte in record["prompt"].encode())]
        stream += [*((byte, True) for byte in record["completion"].encode()), (EOS, True)]
    for row in range(dataset.num_rows):
        batch = dataset.expand(np.array([row]))
        window = stream[row * 7 : row * 7 + 8]
        assert batch["tokens"][0].tolist() == [token for token, _ in window[:-1]]
        expected = [token if predicted else IGNORED for token, predicted in window[1:]]
        assert batch["labels"][0].tolist() == expected


def test_tokens_of_others_are_taken_as_they_are(config, tmp_path):
    path = write_byte_level(tmp_path / "tokenizer.json")
    eos = HuggingFaceTokenizer(path).eos
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(2, 300, size=rng.integers(0, 40)).tolist(), eos] for _ in range(50)]
    stream = np.concatenate([np.array(d) for d in documents])
    stream.astype("<u2").tofile(tmp_path / "x.bin")
    stream.astype("<u4").tofile(tmp_path / "y.bin")
    np.save(tmp_path / "z.npy", stream)
    config = dataclasses.replace(config, tokenizer=path)
    found = []
    for name, dtype in (("x.bin", "uint16"), ("y.bin", "uint32"), ("z.npy", "uint16")):
        some = dataclasses.replace(config, path=(tmp_path / name,), token_dtype=dtype)
        train_data, held_out, _ = opened(some)
        found.append((documents_of(train_data), documents_of(held_out)))
    assert found[0] == found[1] == found[2]
    assert sorted(found[0][0] + found[0][1]) == sorted(documents)


def test_a_document_of_one_token_and_one_longer_than_a_row(config):
    texts = [b"x", b"y" * 200, b"z"]
    write_texts(config.path[0], texts)
    train_data, _, _ = opened(dataclasses.replace(config, held_out_fraction=0.0), evaluates=False)
    assert train_data.num_rows == (202 + 6 - 1) // 16
    assert documents_of(train_data) == [[BOS, *text, EOS] for text in texts]


def test_a_corpus_of_one_row(config):
    write_texts(config.path[0], [b"fifteen bytes.\n"])
    config = dataclasses.replace(config, held_out_fraction=0.0, batch_size=1)
    train_data, held_out, _ = opened(config, evaluates=False)
    assert train_data.num_rows == 1 and held_out is None
    batch = train_data.batch(3, batch_size=1, seed=0)
    assert batch["tokens"].tolist() == [[BOS, *b"fifteen bytes.\n"]]
    assert batch["labels"].tolist() == [[*b"fifteen bytes.\n", EOS]]


def test_a_vocabulary_of_more_than_16_bits(config, tmp_path):
    write_texts(config.path[0], [b"the quick brown fox"] * 9)
    path = write_byte_level(tmp_path / "tokenizer.json")
    description = json.loads(path.read_text())
    description["added_tokens"] = [
        entry | {"id": 70_000} if entry["content"] == "<|end_of_text|>" else entry
        for entry in description["added_tokens"]
    ]
    description["model"]["vocab"]["<|end_of_text|>"] = 70_000
    path.write_text(json.dumps(description))
    config = dataclasses.replace(config, tokenizer=path, held_out_fraction=0.0)
    train_data, _, _ = opened(config, vocab_size=70_001, evaluates=False)
    assert train_data.tokens.dtype == np.uint32
    assert train_data.tokens[-1] == 70_000


def test_memory_does_not_grow_with_the_text(config, tmp_path):
    """The peak of allocations by Python and NumPy, for text of 8 and of 64 batches."""
    peaks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "_BATCH_BYTES", 1 << 16)
        for size in (8, 64):
            path = tmp_path / f"{size}.txt"
            path.write_bytes(b"a line of text\n" * (size * (1 << 16) // 15))
            tracemalloc.start()
            opened(dataclasses.replace(config, path=(path,)), evaluates=False)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    assert peaks[1] < 1.3 * peaks[0]


def test_text_that_changes_while_it_is_read_is_noticed(config, monkeypatch):
    write_texts(config.path[0], texts_of())
    write = cache._Writing._write

    def meanwhile(self, *args):
        (config.path[0] / "000.txt").write_bytes(b"other text")
        write(self, *args)

    monkeypatch.setattr(cache._Writing, "_write", meanwhile)
    with pytest.raises(data.DataError, match="text changed while it was read; start again"):
        opened(config)


def test_a_lock_that_is_held_for_ever_is_named(config, monkeypatch):
    write_texts(config.path[0], texts_of())
    monkeypatch.setattr(lock, "_TIMEOUT_S", 0.3)
    monkeypatch.setattr(lock, "_POLL_S", 0.01)
    opened(config)
    (folder,) = config.cache_dir.iterdir()
    (folder / "index.json").unlink()
    start = time.monotonic()
    with OwnFolder(folder) as own, lock.locked(own, "text"):
        message = rf"lock is held by process {os.getpid()} on .*no progress .*--data\.cache-dir"
        with pytest.raises(data.DataError, match=message):
            opened(config)
    assert time.monotonic() - start < 10
    opened(config)  # after it was given back


def test_progress_where_there_is_no_terminal(config, monkeypatch, capsys):
    write_texts(config.path[0], texts_of(number=300))
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    monkeypatch.setattr(cache, "_BATCH_DOCUMENTS", 100)
    opened(config)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tokenizing")]
    assert len(lines) == 3
    assert re.search(r"text: \d\d%  [\d.k]+ tokens", lines[0])
    assert re.search(r"text: 100%  [\d.k]+ tokens  [\d.kM]+ tok/s  eta 0:00$", lines[2])


def test_a_file_that_vanishes_before_it_is_read_is_named(tmp_path):
    reader = files.Reader(
        files=(tmp_path / "a.txt",),
        text_field="text",
        token_dtype="uint16",
        vocab_size=data.BYTES.vocab_size,
        end_of_text=data.BYTES.vocab_size - 1,
    )
    with pytest.raises(data.DataError, match=r"a\.txt cannot be read \(No such .*; check the file"):
        cache._fingerprint(reader, data.BYTES, 0.0)
