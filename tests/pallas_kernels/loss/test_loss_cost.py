"""The estimate of the time of a plan of the loss."""

import math
from typing import Any

import jax.numpy as jnp
import pytest

from pallas_kernels.gpu.device import Device
from pallas_kernels.loss import cost
from pallas_kernels.loss.mosaic_gpu import in_place

H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
RATES = cost.H100_RATES


def sizes_of(hidden_size, vocab_size, layout: Any = "vd", result=4, total=4):
    return cost.Sizes(hidden_size, vocab_size, layout, result, total)


def in_place_of(sizes, num_inside, num_beside=0, dtype=jnp.float32, bands=(4224, 29, 5760)):
    extent = in_place.Extent(num_inside, num_beside, jnp.dtype(dtype), in_place.Bands(*bands))
    return cost.of_in_place(sizes, extent.num_tokens, extent, None)


def bare(num_tokens, hidden_size, vocab_size):
    """Seconds of three bare GEMMs, which reached 800 TFLOP/s in the runs below."""
    return 6 * num_tokens * hidden_size * vocab_size / 800e12


# Times over three bare GEMMs on an H100, from benchmarks/results and docs/lab. Programs of one plan
# differ by up to 5 % from run to run.
@pytest.mark.parametrize(
    "shape, chunk_size, measured",
    [
        ((8192, 4096, 128256), 2048, 1.085),
        ((8192, 4096, 128256), 1024, 1.214),
        ((8192, 4096, 128256), 512, 1.709),
        ((8192, 4096, 128256), 8192, 1.053),
        ((32768, 4096, 128256), 4096, 1.066),
        ((8192, 3584, 152064), 1536, 1.129),
        ((8192, 2560, 151936), 2048, 1.066),
        ((4096, 8192, 128256), 2048, 1.069),
    ],
    ids=str,
)
def test_chunks_take_as_long_as_measured(shape, chunk_size, measured):
    num_tokens, *others = shape
    estimate = cost.of_chunks(sizes_of(*others), num_tokens, chunk_size) / bare(*shape)
    assert estimate == pytest.approx(measured, rel=0.07)


def test_tokens_in_place_take_as_long_as_measured():
    estimate = in_place_of(sizes_of(4096, 128256), 8192) / bare(8192, 4096, 128256)
    assert estimate == pytest.approx(1.056, rel=0.05)
    extent = in_place.Extent(4096, 0, jnp.dtype(jnp.float32), in_place.Bands(8448, 14, 9984))
    estimate = cost.of_in_place(sizes_of(2048, 128256), 16384, extent, 2048)
    assert estimate / bare(16384, 2048, 128256) == pytest.approx(1.095, rel=0.05)


def test_a_chunk_passes_over_dweight():
    sizes = sizes_of(4096, 128256)
    of = lambda num_chunks: cost.of_chunks(sizes, 1024 * num_chunks, 1024)
    # The passes of short chunks are longer than their products.
    passes = 8 * sizes.num_entries / RATES.bandwidth
    assert of(9) - of(8) == pytest.approx(of(2) - of(1)) and of(9) - of(8) > passes
    # A frozen weight has none, and a sum of 16 bits has shorter ones.
    frozen, halved = sizes._replace(result_bytes=0, sum_bytes=0), sizes._replace(sum_bytes=2)
    times = [cost.of_chunks(s, 8192, 1024) for s in (frozen, halved._replace(result_bytes=2))]
    assert times[0] < times[1] < of(8)


def test_a_wave_is_paid_for_as_a_whole():
    sizes, per_token = sizes_of(2560, 151936), lambda time, tokens: time / tokens
    bands: dict[str, Any] = {"bands": (4992, 29, 7168)}
    # 400 tiles of 128 x 256 are four waves, 390 are three.
    four, three = (in_place_of(sizes, tokens, **bands) for tokens in (5120, 4992))
    assert per_token(four, 5120) > 1.03 * per_token(three, 4992)
    # XLA shares out the depth by eighths: 140 tiles of 256 x 128 cost 9 of them, 120 cost 8.
    two, one = (cost.of_chunks(sizes, tokens, tokens) for tokens in (1792, 1536))
    assert per_token(two, 1792) < per_token(one, 1536)
    # From two waves on it does by halves: 340 tiles cost three waves, 320 cost two and a half.
    three, fewer = (cost.of_chunks(sizes, tokens, tokens) for tokens in (4352, 4096))
    assert per_token(three, 4352) > 1.02 * per_token(fewer, 4096)


def test_blocks_of_logits_come_in_pairs():
    sizes = sizes_of(4096, 128256)
    of = lambda tokens: cost.of_chunks(sizes, 4 * tokens, tokens) / tokens
    assert of(1408) > 1.01 * of(1536)


def test_a_gradient_of_16_bits_is_rounded_once():
    sizes = sizes_of(4096, 128256, result=2)
    rounding = (4 + 2) * sizes.num_entries / RATES.bandwidth
    wide = cost.of_chunks(sizes_of(4096, 128256), 8192, 2048)
    assert cost.of_chunks(sizes, 8192, 2048) == pytest.approx(wide + rounding)
    by_16_bits = in_place_of(sizes, 4096, dtype=jnp.bfloat16)
    assert in_place_of(sizes, 4096) - by_16_bits > rounding


def test_columns_are_copied():
    of = lambda layout: in_place_of(sizes_of(4096, 128256, layout), 8192, bands=(5120, 24, 5376))
    copies = 3 * 8192 * 128256 / RATES.bandwidth
    assert of("dv") - of("vd") == pytest.approx(copies, rel=0.1)


def test_an_estimate_of_no_tokens_is_a_number():
    assert math.isfinite(cost.of_chunks(sizes_of(64, 128), 0, 128))
