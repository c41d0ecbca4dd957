"""The benchmark of the quantization to FP8 without a GPU: the comparisons and the table."""

import dataclasses

import jax.numpy as jnp
import pytest

from benchmarks import timing
from benchmarks.kernels import quantize

PARTS = (
    "given scale",
    "tensor",
    "row",
    "one order, row",
    "swiglu, tensorwise",
    "swiglu, rowwise",
)


@pytest.fixture
def two_sets(monkeypatch):
    monkeypatch.setattr(timing, "rotation", lambda num_bytes: 2)


@pytest.mark.full
def test_ways_that_run_here_are_timed_and_the_kernels_listed(two_ms_a_call, two_sets):
    record = quantize.measure((64, 128), "bfloat16", quantize.ways(), 2)
    errors = {name: "error" in way for name, way in record["ways"].items()}
    assert errors == {
        f"{part}, {name}": name == "kernel" for part in PARTS for name in ("XLA", "kernel")
    }
    assert not any("wrong result" in str(way) for way in record["ways"].values())
    text = quantize.table([record])
    assert "| 64x128 bfloat16 | row, XLA | 2000.0 | 1.00 | 0 |" in text


def test_a_wrong_result_is_not_timed(two_ms_a_call, two_sets):
    right = quantize.ways()[0]
    wrong = dataclasses.replace(right, name="wrong", fn=lambda x: right.fn(2 * x))
    record = quantize.measure((64, 128), "bfloat16", [right, wrong], 2)
    assert "wrong result" in record["ways"]["given scale, wrong"]["error"]
    values = jnp.zeros(100_000, jnp.float8_e4m3fn)
    assert quantize.difference(values, values.at[0].set(1)) is None
    assert quantize.difference(values, values.at[:2].set(1)) == "wrong result: 2 values differ"
    scale = jnp.float32(1)
    assert quantize.difference(scale, scale + 2.0**-23) is None
    wrong = "wrong result: a scale differs by {} of itself"
    assert quantize.difference(scale, scale + 2.0**-19) == wrong.format("1.9e-06")
    nan = jnp.nan * scale
    assert quantize.difference([scale, nan], [scale, scale]) == wrong.format("nan")
    assert quantize.difference(values, values[:1]) == "wrong result: a shape differs"
