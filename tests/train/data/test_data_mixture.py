"""Rows by host and by source: every split gives the same global batch, with exact shares."""

import dataclasses

import chex
import numpy as np
import pytest

from train.data import BOS, EOS, MixtureDataset, PackedDataset, SyntheticDataset
from train.data.packing import permuted

LENGTH = 7


def make_source(first_byte, num_documents):
    """A source whose bytes tell it from others: all lie below `first_byte` + 50."""
    rng = np.random.default_rng(first_byte)
    documents = [
        np.array([BOS, *rng.integers(first_byte, first_byte + 50, size=20), EOS], np.uint16)
        for _ in range(num_documents)
    ]
    return PackedDataset.from_documents(documents, sequence_length=LENGTH)


SOURCES = make_source(0, 40), make_source(100, 23), make_source(200, 3)
MIXTURE = MixtureDataset(SOURCES, (5.0, 3.0, 2.0))


def sources_of(batch):
    """The source of each row."""
    values = np.where(batch["tokens"] < BOS, batch["tokens"], -1).max(axis=1)
    return np.searchsorted([50, 150, 250], values)


# Every kind of dataset has the same interface for hosts and restarts.
DATASETS = {
    "packed": SOURCES[0],
    "mixture": MIXTURE,
    "synthetic": SyntheticDataset(100, LENGTH),
}


@pytest.mark.parametrize("name", DATASETS)
@pytest.mark.parametrize(
    "num_hosts",
    [pytest.param(1, marks=pytest.mark.full), 2, 3, pytest.param(8, marks=pytest.mark.full), 24],
)
def test_hosts_together_make_the_global_batch(name, num_hosts):
    dataset = DATASETS[name]
    for step in (0, 1, 17, 10**6):
        whole = dataset.batch(step, batch_size=24, seed=5)
        for split in (
            np.split(np.arange(24), num_hosts),
            [np.arange(24)[h::num_hosts] for h in range(num_hosts)],
        ):
            parts = [dataset.batch(step, batch_size=24, seed=5, rows=rows) for rows in split]
            for rows, part in zip(split, parts, strict=True):
                chex.assert_trees_all_equal(part, {k: v[rows] for k, v in whole.items()})


@pytest.mark.parametrize("name", ["packed", "mixture"])
def test_rows_out_of_the_batch_are_refused(name):
    with pytest.raises(ValueError, match=r"must lie in \[0, batch_size=8\)"):
        DATASETS[name].batch(0, batch_size=8, seed=0, rows=np.array([3, 8]))
    with pytest.raises(ValueError, match="step=-1"):
        DATASETS[name].batch(-1, batch_size=8, seed=0)
    empty = DATASETS[name].batch(0, batch_size=8, seed=0, rows=np.arange(0))
    assert empty["tokens"].shape == (0, LENGTH)


@pytest.mark.parametrize("name", DATASETS)
def test_a_run_that_starts_later_has_the_same_batches(name):
    again = {
        "packed": make_source(0, 40),
        "mixture": MixtureDataset(SOURCES, (5.0, 3.0, 2.0)),
        "synthetic": SyntheticDataset(100, LENGTH),
    }[name]
    expected = [DATASETS[name].batch(step, batch_size=8, seed=3) for step in range(40)]
    for step in (39, 11, 12):
        chex.assert_trees_all_equal(again.batch(step, batch_size=8, seed=3), expected[step])
    other = DATASETS[name].batch(0, batch_size=8, seed=4)
    assert not np.array_equal(other["tokens"], expected[0]["tokens"])


@pytest.mark.parametrize(
    "weights", [(5.0, 3.0, 2.0), (1, 1, 1), (0.7, 0.2, 0.1), (0.98, 0.01, 0.01)]
)
def test_weights_hold_in_every_stretch(weights):
    mixture = MixtureDataset(SOURCES, tuple(map(float, weights)))
    shares = np.array(weights) / sum(weights)
    rows = sources_of(mixture.batch(0, batch_size=30_000, seed=0))
    counts = np.cumsum(rows[:, None] == np.arange(3), axis=0)
    expected = np.arange(1, len(rows) + 1)[:, None] * shares
    assert np.abs(counts - expected).max() < len(SOURCES)
    np.testing.assert_allclose(counts[9_999], 10_000 * shares, atol=1)
    np.testing.assert_array_equal(counts[29_999], 3 * counts[9_999])


def test_a_source_is_never_starved():
    mixture = MixtureDataset(SOURCES, (1.0, 1e-9, 1e-9))
    rows = sources_of(mixture.batch(0, batch_size=10_000, seed=0))
    assert np.bincount(rows).tolist() == [9_998, 1, 1]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1.0, float("nan"), 1.0), "must be positive, and their sum finite"),
        ((1.0, float("inf"), 1.0), "must be positive, and their sum finite"),
        ((1e308, 1e308, 1e308), "must be positive, and their sum finite"),
        ((1.0, -1.0, 1.0), "must be positive"),
        ((0.0, 0.0, 0.0), "must be positive"),
        ((1.0, 1.0), "2 weights for 3 sources"),
    ],
)
def test_weights_that_are_no_shares_are_refused(weights, message):
    with pytest.raises(ValueError, match=message):
        MixtureDataset(SOURCES, weights)


def test_sources_that_do_not_fit_together_are_refused():
    with pytest.raises(ValueError, match="0 weights for 0 sources"):
        MixtureDataset((), ())
    longer = dataclasses.replace(SOURCES[1], sequence_length=LENGTH + 1)
    with pytest.raises(ValueError, match="the sources differ in sequence_length"):
        MixtureDataset((SOURCES[0], longer), (1.0, 1.0))
    other = dataclasses.replace(SOURCES[1], token_bytes=np.ones(300, np.int32))
    with pytest.raises(ValueError, match="the sources differ in token_bytes"):
        MixtureDataset((SOURCES[0], other), (1.0, 1.0))
    for sizes in ((0, 4), (4, 0)):
        with pytest.raises(ValueError, match="must be at least 1"):
            SyntheticDataset(*sizes)


def test_each_source_walks_through_its_own_epochs():
    """The mixture has the rows of a source in the order of its own walk, without a gap."""
    batch = MIXTURE.batch(0, batch_size=2000, seed=9)
    rows = sources_of(batch)
    for index, source in enumerate(SOURCES):
        mine = batch["tokens"][rows == index]
        num_epochs = len(mine) // source.num_rows
        assert num_epochs >= 3
        every_row = np.unique(source.expand(np.arange(source.num_rows))["tokens"], axis=0)
        for epoch in range(num_epochs):
            part = mine[epoch * source.num_rows : (epoch + 1) * source.num_rows]
            np.testing.assert_array_equal(np.unique(part, axis=0), every_row)


def test_the_mixture_does_not_depend_on_the_batch_size():
    ones = [MIXTURE.batch(step, batch_size=1, seed=0) for step in range(16)]
    eights = [MIXTURE.batch(step, batch_size=8, seed=0) for step in range(2)]
    for name in ("tokens", "labels", "segment_ids", "positions"):
        np.testing.assert_array_equal(
            np.concatenate([b[name] for b in ones]), np.concatenate([b[name] for b in eights])
        )


def test_held_out_rows_come_once_and_by_weight():
    batches = list(MIXTURE.eval_batches(16))
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    filled = np.concatenate([batch["segment_ids"] for batch in batches])[:, 0] > 0
    num_rows = sum(source.num_rows for source in SOURCES)
    assert filled.sum() == num_rows == filled[:num_rows].sum()
    assert all(batch["tokens"].shape == (16, LENGTH) for batch in batches)
    every_row = np.concatenate([s.expand(np.arange(s.num_rows))["tokens"] for s in SOURCES])
    np.testing.assert_array_equal(np.unique(tokens[filled], axis=0), np.unique(every_row, axis=0))
    # The smallest source ends after its 9 rows.
    head = sources_of({"tokens": tokens[:40]})
    assert np.abs(np.bincount(head) - np.array([20, 12, 8])).max() <= 1
    assert list(MIXTURE.eval_batches(16, 0)) == []
    chex.assert_trees_all_equal(list(MIXTURE.eval_batches(16, 10**6)), batches)


def test_a_few_held_out_rows_are_from_everywhere():
    (batch,) = MIXTURE.eval_batches(20, 1)
    rows = sources_of(batch)
    assert np.bincount(rows).tolist() == [10, 6, 4]
    for index, (source, count) in enumerate(zip(SOURCES, (10, 6, 4), strict=True)):
        expected = source.expand(np.arange(count) * source.num_rows // count)
        mine = {name: array[rows == index] for name, array in batch.items()}
        chex.assert_trees_all_equal(mine, expected)
    with pytest.raises(ValueError, match="batch_size=0"):
        next(MIXTURE.eval_batches(0))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 63, 64, 65, 1000])
def test_permutations_are_permutations(size):
    epochs = np.repeat(np.arange(50), size)
    positions = np.tile(np.arange(size), 50)
    rows = permuted(positions, size, seed=0, epochs=epochs).reshape(50, size)
    np.testing.assert_array_equal(np.sort(rows, axis=1), np.tile(np.arange(size), (50, 1)))
    assert size < 63 or len({row.tobytes() for row in rows}) == 50


def test_permutations_are_uniform():
    """A row's place and its successor are random: chi-squared with 63 and 62 degrees of freedom."""
    size, num_epochs = 64, 6400
    epochs = np.repeat(np.arange(num_epochs), size)
    positions = np.tile(np.arange(size), num_epochs)
    rows = permuted(positions, size, seed=7, epochs=epochs).reshape(num_epochs, size)
    for values, bins in (
        (rows[:, 0], 64),
        (rows[:, 40], 64),
        ((rows[:, 1] - rows[:, 0]) % 64 - 1, 63),
    ):
        counts = np.bincount(values, minlength=bins)
        expected = num_epochs / bins
        # One in 100,000 random orders exceeds this bound.
        assert ((counts - expected) ** 2 / expected).sum() < 120


def test_no_row_of_a_huge_corpus_is_out_of_reach():
    size = 10**12 + 39
    positions = np.array([0, 1, size - 1])
    rows = permuted(positions, size, seed=0, epochs=np.zeros(3, np.int64))
    assert len(set(rows.tolist())) == 3 and rows.min() >= 0 and rows.max() < size
