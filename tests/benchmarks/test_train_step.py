"""The variants of the benchmark of training steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.training import train_step
from benchmarks.training.train_step import Way, speed_cells
from models.sharding import make_mesh
from pallas_kernels import hardware
from train.config import preset
from train.reporting.metrics import flops_per_token
from train.step import init_state


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


@pytest.mark.parametrize(
    ("word", "options"),
    [("", {}), (":loss=xla", {"implementation": "xla"}), (":loss=logits", {"chunk_size": 2**30})],
)
def test_a_variant_has_its_loss(base, word, options, monkeypatch):
    """Each case takes 1 s."""

    class Asked(Exception):
        pass

    def ask(*_, **options):
        raise Asked(options)

    monkeypatch.setattr(train_step, "linear_cross_entropy", ask)
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    way = Way.parse(base, f"unrolled:minimal{word}")
    batch = {name: jnp.asarray(a)[None] for name, a in way.batch().items()}
    with jax.set_mesh(mesh), pytest.raises(Asked) as asked:
        way.compile(init_state(base, mesh), batch)
    assert asked.value.args[0].items() >= options.items()
