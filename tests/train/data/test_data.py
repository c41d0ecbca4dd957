"""Batches: pure in (seed, step), complete in an epoch, and right token by token.

The reconstruction in `expected_rows` walks the stream one token at a time with Python lists and
shares nothing with the vectorized code.
"""

import dataclasses
import itertools
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import chex
import jaxtyping
import numpy as np
import pytest

from train.data import (
    BOS,
    BYTE_VOCAB_SIZE,
    BYTES,
    EOS,
    IGNORED,
    Corpus,
    PackedDataset,
    SyntheticDataset,
    packing,
    predicted_bytes,
    read_corpus,
    start_of_document,
    stdlib_corpus,
)


@pytest.fixture(scope="module")
def stdlib():
    return stdlib_corpus()


def make_documents(num_documents=17, max_bytes=60, seed=0):
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(num_documents):
        text = rng.integers(256, size=rng.integers(0, max_bytes + 1))
        documents.append(np.array([BOS, *text, EOS], np.uint16))
    return documents


def expected_rows(documents, sequence_length):
    stream = [(d, token) for d, document in enumerate(documents) for token in document.tolist()]
    rows = []
    start = 0
    while start + sequence_length + 1 <= len(stream):
        window = stream[start : start + sequence_length + 1]
        row = {"tokens": [], "labels": [], "segment_ids": [], "positions": []}
        segment, position, previous = 0, 0, None
        for (d, token), (next_d, next_token) in itertools.pairwise(window):
            if d != previous:
                segment, position, previous = segment + 1, 0, d
            row["tokens"].append(token)
            row["labels"].append(next_token if next_d == d else -100)
            row["segment_ids"].append(segment)
            row["positions"].append(position)
            position += 1
        rows.append(row)
        start += sequence_length
    return rows


def as_rows(batch):
    size = len(batch["tokens"])
    return [{name: array[i].tolist() for name, array in batch.items()} for i in range(size)]


def as_keys(batch):
    return [tuple(row["tokens"]) for row in as_rows(batch)]


# The lengths are 1, a prime, a power of two, and one above every document.
@pytest.mark.parametrize("sequence_length", [1, 2, 7, 16, 61, 97])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_rows_agree_with_a_token_by_token_reconstruction(sequence_length, batch_size):
    documents = make_documents()
    dataset = PackedDataset.from_documents(documents, sequence_length=sequence_length)
    expected = expected_rows(documents, sequence_length)
    assert dataset.num_rows == len(expected)

    batches = list(dataset.eval_batches(batch_size))
    rows = [row for batch in batches for row in as_rows(batch)]
    assert rows[: len(expected)] == expected
    for padding in rows[len(expected) :]:
        assert set(padding["labels"]) == {IGNORED}
        assert set(padding["segment_ids"]) == {0}
    for batch in batches:
        for array in batch.values():
            assert array.dtype == np.int32
            chex.assert_shape(array, (batch_size, sequence_length))


def test_every_token_but_bos_is_predicted_once():
    documents = make_documents()
    length = sum(map(len, documents))
    # 5 divides length - 1, so no token is in a dropped partial row.
    assert (length - 1) % 5 == 0
    dataset = PackedDataset.from_documents(documents, sequence_length=5)
    labels = np.concatenate([batch["labels"].ravel() for batch in dataset.eval_batches(4)])
    predicted = labels[labels != IGNORED].tolist()
    assert predicted == [t for d in documents for t in d.tolist() if t != BOS]


def test_held_out_limit_counts_batches():
    dataset = PackedDataset.from_documents(make_documents(), sequence_length=16)
    everything = list(dataset.eval_batches(3))
    assert list(dataset.eval_batches(3, 0)) == []
    chex.assert_trees_all_equal(list(dataset.eval_batches(3, 10**6)), everything)
    # Six rows of 40, at equal distances.
    assert dataset.num_rows == 40
    spread = [dataset.expand(np.array(rows)) for rows in ([0, 6, 13], [20, 26, 33])]
    chex.assert_trees_all_equal(list(dataset.eval_batches(3, 2)), spread)


@pytest.mark.parametrize("batch_size", [1, 7, 13])
def test_an_epoch_visits_every_row_once_and_batches_cross_epochs(batch_size):
    dataset = PackedDataset.from_documents(make_documents(), sequence_length=13)
    rows = as_keys(next(dataset.eval_batches(dataset.num_rows)))
    assert len(set(rows)) == dataset.num_rows
    assert dataset.num_rows % batch_size or batch_size == 1  # so that batches do cross
    num_steps = 3 * dataset.num_rows // batch_size + 1
    walk = [
        row
        for step in range(num_steps)
        for row in as_keys(dataset.batch(step, batch_size=batch_size, seed=3))
    ]
    epochs = [walk[i * len(rows) : (i + 1) * len(rows)] for i in range(3)]
    assert all(sorted(epoch) == sorted(rows) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != rows


def test_a_batch_depends_on_seed_and_step_alone():
    documents = make_documents(40)
    kwargs: Any = {"batch_size": 4, "seed": 7}
    dataset = PackedDataset.from_documents(documents, sequence_length=11)
    forward = {step: dataset.batch(step, **kwargs) for step in range(30)}
    again = PackedDataset.from_documents(documents, sequence_length=11)
    for step in np.random.default_rng(0).permutation(30).tolist():
        chex.assert_trees_all_equal(again.batch(step, **kwargs), forward[step])
    # A step far ahead needs no walk to it.
    chex.assert_trees_all_equal(dataset.batch(10**9, **kwargs), again.batch(10**9, **kwargs))
    assert as_keys(forward[0]) != as_keys(forward[1])
    assert as_keys(forward[0]) != as_keys(dataset.batch(0, batch_size=4, seed=8))


def test_the_walk_does_not_depend_on_the_batch_size():
    dataset = PackedDataset.from_documents(make_documents(), sequence_length=9)
    ones = [as_keys(dataset.batch(step, batch_size=1, seed=0))[0] for step in range(24)]
    eights = [
        row for step in range(3) for row in as_keys(dataset.batch(step, batch_size=8, seed=0))
    ]
    assert ones == eights


def test_the_epoch_order_is_pinned():
    # Another order would silently change the rows of a resumed run.
    tokens = np.concatenate([np.arange(9), np.arange(9)]).astype(np.uint16)
    dataset = PackedDataset(tokens, np.array([0]), 2)
    batch = dataset.batch(0, batch_size=8, seed=0)
    assert batch["tokens"][:, 0].tolist() == [2, 0, 5, 4, 3, 6, 8, 1]


def test_a_caller_cannot_disturb_later_batches():
    dataset = PackedDataset.from_documents(make_documents(), sequence_length=8)
    first = dataset.batch(2, batch_size=4, seed=0)
    kept = {name: array.copy() for name, array in first.items()}
    for array in first.values():
        array[:] = -1
    chex.assert_trees_all_equal(dataset.batch(2, batch_size=4, seed=0), kept)


def test_batches_from_many_threads():
    dataset = PackedDataset.from_documents(make_documents(), sequence_length=5)
    build = lambda step: dataset.batch(step, batch_size=7, seed=1)
    alone = [build(step) for step in range(200)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(build, range(200)))
    chex.assert_trees_all_equal(together, alone)


def test_the_largest_batch_is_an_epoch():
    dataset = PackedDataset.from_documents(make_documents(), sequence_length=10)
    batch = dataset.batch(0, batch_size=dataset.num_rows, seed=0)
    assert len(set(as_keys(batch))) == dataset.num_rows
    with pytest.raises(
        ValueError, match=r"batch_size=66 .* 65, the number of rows .*sequence_length=10"
    ):
        dataset.batch(0, batch_size=66, seed=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        dataset.batch(0, batch_size=0, seed=0)
    with pytest.raises(ValueError, match="batch_size=0"):
        next(dataset.eval_batches(0))
    for step, seed in ((-1, 0), (0, -1), (0, 2**63)):
        with pytest.raises(ValueError, match=f"step={step} and seed={seed} must not be negative"):
            dataset.batch(step, batch_size=1, seed=seed)


def test_the_smallest_corpus():
    document = np.array([BOS, 65, EOS], np.uint16)
    one_row = PackedDataset.from_documents([document], sequence_length=2)
    assert as_rows(one_row.batch(0, batch_size=1, seed=0)) == [
        {"tokens": [BOS, 65], "labels": [65, EOS], "segment_ids": [1, 1], "positions": [0, 1]}
    ]
    with pytest.raises(
        ValueError, match=r"3 tokens in 1 document cannot .*sequence_length=3.* needs 4"
    ):
        PackedDataset.from_documents([document], sequence_length=3)
    with pytest.raises(ValueError, match="0 tokens in 0 documents"):
        PackedDataset.from_documents([], sequence_length=2)
    with pytest.raises(ValueError, match="sequence_length=0"):
        PackedDataset.from_documents([document], sequence_length=0)
    with pytest.raises(ValueError, match="leave out empty documents"):
        PackedDataset.from_documents([document, document[:0], document], sequence_length=2)
    with pytest.raises(ValueError, match="start at 0 and stay below 3"):
        PackedDataset(document, np.array([1]), 2)


def test_any_vocabulary_fits_the_stream():
    stream = np.array([128_000, 17, 128_001] * 2, np.uint32)
    sizes = np.ones(128_002, np.int32)
    dataset = PackedDataset(stream, np.array([0, 3]), 5, token_bytes=sizes)
    batch = dataset.batch(0, batch_size=1, seed=0)
    assert batch["tokens"].tolist() == [[128_000, 17, 128_001, 128_000, 17]]
    assert batch["labels"].tolist() == [[17, 128_001, IGNORED, 17, 128_001]]


@pytest.mark.parametrize(
    ("token", "dtype"), [(258, "u2"), (-1, "i4"), (2**31 + 5, "u4"), (2**32 + 5, "i8")]
)
def test_a_token_outside_of_the_vocabulary_is_refused(token, dtype):
    tokens = np.arange(40).astype(dtype)
    tokens[17] = token
    dataset = PackedDataset(tokens, np.array([0]), 4)
    message = rf"token {token} at index 17 of the stream is not one of the 258 of its vocabulary"
    for batch in (lambda: dataset.expand(np.array([0, 4])), lambda: list(dataset.eval_batches(2))):
        with pytest.raises(ValueError, match=message):
            batch()
    assert dataset.expand(np.array([0, 5]))["tokens"].tolist() == [[0, 1, 2, 3], [20, 21, 22, 23]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": np.arange(9.0)}, "tokens must be integers, got float64"),
        ({"tokens": np.ones(9, bool)}, "tokens must be integers, got bool"),
        ({"prompt_sizes": np.array([1], np.int32)}, "1 prompt_sizes for 2 documents"),
        (
            {"prompt_sizes": np.array([-1, 0], np.int32)},
            r"\[0\]=-1 must lie .* document's 4 tokens",
        ),
        ({"prompt_sizes": np.array([5, 0], np.int32)}, r"\[0\]=5 must lie .* document's 4 tokens"),
        ({"prompt_sizes": np.array([0, 6], np.int32)}, r"\[1\]=6 must lie .* document's 5 tokens"),
        ({"document_offsets": np.array([0, 0])}, "strictly increasing: document 0 has 0 tokens"),
        ({"document_offsets": np.array([0, 9])}, "start at 0 and stay below 9"),
    ],
)
@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_arguments_that_would_mislabel_a_stream_are_refused(changes, message, at_once, monkeypatch):
    monkeypatch.setattr(packing, "_OFFSETS_AT_ONCE", at_once)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # as it is outside of tests
    arrays = {
        "tokens": np.arange(9),
        "document_offsets": np.array([0, 4]),
        "sequence_length": 4,
        "prompt_sizes": np.array([4, 5], np.int32),
    }
    PackedDataset(**arrays)
    with pytest.raises(ValueError, match=message):
        PackedDataset(**(arrays | changes))


def test_predicted_bytes_counts_neither_eos_nor_ignored_labels():
    labels = np.array([[0, 255, BOS, EOS], [IGNORED, IGNORED, 65, EOS]], np.int32)
    assert predicted_bytes({"labels": labels}, BYTES.token_bytes) == 3


def test_predicted_bytes_of_a_corpus_are_its_bytes():
    documents = make_documents()
    num_bytes = sum(len(document) - 2 for document in documents)
    dataset = PackedDataset.from_documents(documents, sequence_length=5)
    batches = dataset.eval_batches(5)
    assert sum(predicted_bytes(batch, dataset.token_bytes) for batch in batches) == num_bytes


def test_encode_and_decode():
    text = "x = 'ö€'\n"
    tokens = start_of_document(text, BYTES)
    assert np.issubdtype(tokens.dtype, np.integer)
    assert tokens.tolist() == [BOS, *text.encode()]
    assert BYTES.decode(tokens) == text
    assert BYTES.decode([BOS, 0xC3, EOS]) == "\ufffd"
    assert start_of_document("", BYTES).tolist() == [BOS]
    assert BYTES.decode([]) == ""
    assert BYTE_VOCAB_SIZE == EOS + 1


def test_stdlib_corpus(stdlib):
    fingerprint = stdlib.fingerprint()
    assert fingerprint == stdlib_corpus().fingerprint()
    assert fingerprint["num_files"] == len(stdlib.files) > 400
    assert fingerprint["num_bytes"] > 5_000_000
    assert list(stdlib.files) == sorted(stdlib.files)
    assert {"json/decoder.py", "asyncio/tasks.py", "argparse.py"} <= stdlib.files.keys()
    root = Path(sysconfig.get_path("stdlib"))
    assert stdlib.files["argparse.py"] == (root / "argparse.py").read_bytes()
    for path in stdlib.files:
        assert path.endswith(".py")
        assert not {"test", "tests", "idlelib", "lib2to3", "site-packages"} & set(path.split("/"))
        assert "_sysconfigdata" not in path


def test_documents_are_files_between_bos_and_eos(stdlib):
    documents = stdlib.train + stdlib.held_out
    for document in documents:
        assert document.dtype == np.uint16
        assert (document[0], document[-1]) == (BOS, EOS)
        assert document[1:-1].max() < 256
    texts = [document[1:-1].astype(np.uint8).tobytes() for document in documents]
    assert sorted(texts) == sorted(stdlib.files.values())
    decoded = [BYTES.decode(document) for document in documents[:5]]
    assert decoded == [text.decode(errors="replace") for text in texts[:5]]


def test_no_training_document_is_held_out(stdlib):
    train = {document.tobytes() for document in stdlib.train}
    held_out = {document.tobytes() for document in stdlib.held_out}
    assert not train & held_out
    assert len(train) + len(held_out) == len(stdlib.files)
    assert 0.02 < len(held_out) / len(stdlib.files) < 0.10


def test_the_split_of_a_file_does_not_depend_on_the_others(stdlib):
    some = Corpus(dict(list(stdlib.files.items())[::3]))
    kept = {document.tobytes() for document in stdlib.held_out}
    assert {document.tobytes() for document in some.held_out} <= kept
    assert not {document.tobytes() for document in some.train} & kept


def test_neighbours_in_the_stream_come_from_different_packages(stdlib):
    order = {document.tobytes(): i for i, document in enumerate(stdlib.train)}
    encodings = [
        order[np.array([BOS, *content, EOS], np.uint16).tobytes()]
        for path, content in stdlib.files.items()
        if path.startswith("encodings/")
        and np.array([BOS, *content, EOS], np.uint16).tobytes() in order
    ]
    # One package has 100 of 480 documents. Alphabetical order would put them side by side.
    side_by_side = np.count_nonzero(np.diff(sorted(encodings)) == 1)
    assert side_by_side < len(encodings) / 2


def test_read_corpus_keeps_one_of_equal_files_and_no_empty_one(tmp_path):
    (tmp_path / "pkg" / "tests").mkdir(parents=True)
    (tmp_path / "a.py").write_text("same")
    (tmp_path / "b.py").write_text("same")
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "notes.txt").write_text("text")
    (tmp_path / "pkg" / "c.py").write_text("other")
    (tmp_path / "pkg" / "tests" / "d.py").write_text("a test")
    assert read_corpus(tmp_path).files == {"a.py": b"same", "pkg/c.py": b"other"}
    with pytest.raises(ValueError, match=r"no Python file under .*text; give another directory"):
        read_corpus(tmp_path / "text")


def test_the_fingerprint_sees_names_and_contents_apart():
    corpora = [
        Corpus({"a.py": b"xy"}),
        Corpus({"a.py": b"x"}),
        Corpus({"b.py": b"xy"}),
        Corpus({"a.pyx": b"y"}),
        Corpus({"a.py": b"x", "y": b"z"}),
    ]
    assert len({corpus.fingerprint()["sha256"] for corpus in corpora}) == len(corpora)
    assert Corpus({"b": b"2", "a": b"1"}).fingerprint() == (
        Corpus({"a": b"1", "b": b"2"}).fingerprint()
    )


@pytest.mark.parametrize("sequence_length", [1, 31])
def test_synthetic_batches(sequence_length):
    dataset = SyntheticDataset(1009, sequence_length)
    batch = dataset.batch(5, batch_size=3, seed=2)
    chex.assert_trees_all_equal(dataset.batch(5, batch_size=3, seed=2), batch)
    assert not np.array_equal(dataset.batch(6, batch_size=3, seed=2)["tokens"], batch["tokens"])
    assert not np.array_equal(dataset.batch(5, batch_size=3, seed=3)["tokens"], batch["tokens"])
    for array in batch.values():
        assert array.dtype == np.int32
        chex.assert_shape(array, (3, sequence_length))
    np.testing.assert_array_equal(batch["labels"][:, :-1], batch["tokens"][:, 1:])
    assert 0 <= batch["labels"].min() and batch["labels"].max() < 1009
    assert batch.keys() == {"tokens", "labels"}


@pytest.mark.parametrize("sequence_length", [1, 7, 16, 61])
def test_cut_records_are_those_with_predictions_in_several_rows(sequence_length, monkeypatch):
    monkeypatch.setattr(packing, "_OFFSETS_AT_ONCE", 3)
    documents = make_documents()
    dataset = PackedDataset.from_documents(documents, sequence_length=sequence_length)
    assert dataset.count_records() == (0, 0, 0)  # no prompts
    prompts = np.arange(len(documents), dtype=np.int32) % 3
    counts, position = [0, 0, 0], 0
    for document, prompt in zip(documents, prompts, strict=True):
        rows = {(position + i) // sequence_length for i in range(len(document) - 1)}
        longer = len(document) > sequence_length + 1
        assert len(rows) > 1 or not longer
        if prompt:
            counts = np.add(counts, [1, len(rows) > 1, longer])
        position += len(document)
    dataset = dataclasses.replace(dataset, prompt_sizes=prompts)
    assert dataset.count_records() == tuple(counts)


def test_synthetic_tokens_cover_the_vocabulary():
    batch = SyntheticDataset(11, 1000).batch(0, batch_size=4, seed=0)
    assert set(batch["labels"].ravel().tolist()) == set(range(11))
