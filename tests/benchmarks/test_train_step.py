"""The variants of the benchmark of training steps."""

import dataclasses

import numpy as np
import pytest

from benchmarks.training.train_step import Way
from train.config import preset


@pytest.fixture
def base():
    config = preset("demo")
    data = dataclasses.replace(config.data, source="synthetic", batch_size=2, sequence_length=64)
    return dataclasses.replace(config, data=data)


def test_a_variant_has_rows_of_documents(base):
    """1 s."""
    whole = Way.parse(base, "scanned:minimal").batch()
    batch = Way.parse(base, "scanned:minimal:fp8=rowwise:documents=3").batch()
    assert set(whole) == {"tokens", "labels"}
    assert set(batch) == {*whole, "segment_ids", "positions"}
    np.testing.assert_array_equal(batch["tokens"], whole["tokens"])
    assert all(set(row) == {0, 1, 2} for row in np.asarray(batch["segment_ids"]))
    assert (np.asarray(batch["positions"]) == 0).sum(axis=1).tolist() == [3, 3]


@pytest.mark.parametrize(
    "word", ["document=3", "documents=1:documents=2", "fp9=rowwise", "attention"]
)
def test_an_unknown_word_raises(base, word):
    with pytest.raises(ValueError, match=r"must be \(scanned\|unrolled\):REMAT"):
        Way.parse(base, f"scanned:minimal:{word}")
