"""The variants of the benchmark of training steps."""

import dataclasses

import numpy as np
import pytest

from benchmarks.training.train_step import Way, speed_cells
from pallas_kernels import hardware
from train.config import preset
from train.reporting.metrics import flops_per_token


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


def test_mfu_counts_the_attention_in_a_window(base, monkeypatch):
    device = hardware.lookup("NVIDIA H200")
    assert device is not None
    monkeypatch.setattr(hardware, "lookup", lambda kind: device)
    model = dataclasses.replace(base.model, sliding_window=2)
    cell = speed_cells(dataclasses.replace(base, model=model), [1e-6])[-1]
    # The first of 64 tokens attends to half of itself, and the others to one more.
    flops = 128 * flops_per_token(model, (0.5 + 63 * 1.5) / 64)
    assert cell == f"{flops / 1e-6 / device.bf16_flops:.1%}"


@pytest.mark.parametrize(
    "word", ["document=3", "documents=1:documents=2", "fp9=rowwise", "attention"]
)
def test_an_unknown_word_raises(base, word):
    with pytest.raises(ValueError, match=r"must be \(scanned\|unrolled\):REMAT"):
        Way.parse(base, f"scanned:minimal:{word}")
