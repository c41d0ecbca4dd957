"""The product of two FP8 tensors: values, sizes that divide no tile, NaN, and errors."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8 import Quantized, fp8_matmul, gated_kernel, products, quantize, reference
from pallas_kernels.fp8.products import choose_fp8_matmul
from pallas_kernels.gpu.device import Device
from pallas_kernels.gpu.hopper_gemm import Config
from support.numerics import assert_as_accurate, quick_jit, rounded

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
CONFIG = Config(tile_n=128, stages=2, cluster=1, band=2, blocks=1)


def make_operands(
    m, n, k, *, dtypes=(E4M3, E4M3), scalings=("row", "row"), seed=0
) -> tuple[Quantized, Quantized]:
    rng = np.random.default_rng(seed)
    # Rows of different magnitudes, so that a wrong scale is seen.
    arrays = (rng.standard_normal((size, k)) * rng.exponential(size=(size, 1)) for size in (m, n))
    a, b = (
        _quantize(dtype, scaling)(a.astype(np.float32))
        for a, dtype, scaling in zip(arrays, dtypes, scalings, strict=True)
    )
    return a, b


@functools.cache
def _quantize(dtype, scaling):
    return quick_jit(
        functools.partial(quantize, dtype=dtype, scaling=scaling, implementation="reference")
    )


_dequantize = quick_jit(Quantized.dequantize)


def exact(a, b):
    return np.asarray(_dequantize(a), np.float64) @ np.asarray(_dequantize(b), np.float64).T


def check(a, b, out_dtype, **options):
    got = quick_jit(functools.partial(fp8_matmul, out_dtype=out_dtype, **options))(a, b)
    want = exact(a, b)
    assert (got.shape, got.dtype) == (want.shape, out_dtype)
    # Float32 sums of exact products; the result is rounded once. A GPU adds up 512 products in its
    # tensor cores, with about 14 bits.
    floor = 2.0**-11 / float(np.finfo(np.float32).eps) if jax.default_backend() == "gpu" else 8.0
    assert_as_accurate([got], rounded([want], [got]), [want], names=["product"], floor=floor)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
@pytest.mark.parametrize("scalings", [("tensor", "tensor"), ("row", "row"), ("tensor", "row")])
@pytest.mark.parametrize("out_dtype", [BF16, F32])
def test_emulation(implementation, scalings, out_dtype):
    a, b = make_operands(13, 7, 33, dtypes=(E5M2, E4M3), scalings=scalings)
    check(a, b, out_dtype, implementation=implementation)


# Rows around the 128 of a block, columns around a tile, depths around a step of 128; a loop of
# promoted parts with a rest, and one without.
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "m, n, k, dtypes, out_dtype, accumulation, config",
    [
        (133, 70, 200, (E4M3, E5M2), BF16, "fast", CONFIG),
        (64, 136, 1200, (E5M2, E4M3), F32, "promoted", CONFIG),
        pytest.param(8, 64, 1024, (E4M3, E4M3), F16, "promoted", None, marks=pytest.mark.full),
        pytest.param(300, 256, 128, (E4M3, E4M3), BF16, "fast", None, marks=pytest.mark.full),
        pytest.param(1, 1, 1, (E4M3, E4M3), F32, "promoted", CONFIG, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_kernel(m, n, k, dtypes, out_dtype, accumulation, config):
    a, b = make_operands(m, n, k, dtypes=dtypes)
    options = {"accumulation": accumulation, "config": config}
    check(a, b, out_dtype, implementation="mosaic_gpu", **options)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "scalings",
    [
        ("tensor", "tensor"),
        pytest.param(("row", "tensor"), marks=pytest.mark.full),
        pytest.param(("tensor", "row"), marks=pytest.mark.full),
    ],
)
def test_kernel_with_a_scale_for_the_tensor_and_nan(scalings):
    a, b = make_operands(9, 8, 16, scalings=scalings)
    check(a, b, BF16, implementation="mosaic_gpu", config=CONFIG)
    bad = Quantized(a.values.at[3, 2].set(np.nan), a.scale)
    got = fp8_matmul(bad, b, implementation="mosaic_gpu", config=CONFIG)
    assert np.isnan(got[3]).all() and np.isfinite(np.delete(got, 3, axis=0)).all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "scalings, keep",
    [(("row", "row"), True), pytest.param(("tensor", "tensor"), False, marks=pytest.mark.full)],
)
def test_gated(scalings, keep):
    x, w_gate = make_operands(133, 200, 200, scalings=scalings)
    w_up = make_operands(1, 200, 200, scalings=scalings, seed=1)[1]
    product, kept, maxima = gated_kernel.gated(
        x, w_gate, w_up, out_dtype=BF16, keep=keep, find_amax=True, config=CONFIG
    )
    # The maxima of 128 columns each, of rows up to whole tiles.
    assert maxima is not None and maxima.shape == (2, 256)
    magnitudes = np.abs(np.pad(np.asarray(product, np.float32), ((0, 123), (0, 56))))
    np.testing.assert_array_equal(maxima, magnitudes.reshape(256, 2, 128).max(axis=2).T)
    gate, up = (np.asarray(exact(x, w).astype(BF16), np.float64) for w in (w_gate, w_up))
    want = gate / (1 + np.exp(np.minimum(-gate, 700))) * up  # not infinite
    # The formula of the rounded gate and up: of exact sums, and so only a few of them differ.
    assert_as_accurate([product], [np.asarray(want.astype(BF16))], [want], names=["product"])
    assert len(kept) == 2 * keep
    both = zip(kept, (gate, up), (w_gate, w_up), strict=False)  # kept is empty without `keep`
    for got, rounded_sums, w in both:
        best = reference.blockwise_int8(jnp.asarray(rounded_sums, BF16))
        assert (got.values.dtype, got.values.shape) == (jnp.int8, (133, 200))
        assert (got.scale.dtype, got.scale.shape) == (F32, (2, 133))
        pair = [got.dequantize()], [best.dequantize()]
        assert_as_accurate(*pair, [exact(x, w)], names=["gate or up"])


@pytest.mark.usefixtures("interpreted")
def test_gated_keeps_nan_and_zeros():
    """A sum that is NaN makes 128 columns of its row NaN; a row of zeros stays zeros."""
    x, w = make_operands(9, 136, 64)
    x = Quantized(x.values.at[3].set(0).at[5].set(np.nan), x.scale)
    _, kept, _ = gated_kernel.gated(x, w, w, out_dtype=BF16, keep=True, config=CONFIG)
    for got in kept:
        numbers = np.asarray(got.dequantize())
        assert np.isnan(numbers[5]).all() and np.isfinite(np.delete(numbers, 5, axis=0)).all()
        assert not np.any(numbers[3]) and np.all(got.scale[:, 3] == 1)
    with pytest.raises(ValueError, match="must be 128 with keep=True"):
        narrow = dataclasses.replace(CONFIG, tile_n=64)
        gated_kernel.gated(x, w, w, out_dtype=BF16, keep=True, config=narrow)


@pytest.mark.parametrize("scales", [(1e-9, 1e5), (1e-8, 1e3)])
def test_scales_beyond_float16(monkeypatch, scales):
    """On a GPU with products of cublasLt, too, no scale is rounded to float16."""
    monkeypatch.setattr(products, "target_device", lambda: Device("NVIDIA L4", (8, 9), 58))
    a, b = make_operands(4, 8, 16)
    a, b = (Quantized(q.values, jnp.float32(s)) for q, s in zip((a, b), scales, strict=True))
    check(a, b, F16, implementation="xla")


def test_no_rows():
    a, b = make_operands(0, 4, 8)
    assert fp8_matmul(a, b).shape == (0, 4)
    a, b = make_operands(3, 4, 0)
    assert not np.any(np.asarray(fp8_matmul(a, b), F32))


def test_choice(on_h100):
    operands = make_operands(256, 256, 256)
    assert choose_fp8_matmul(*operands, "mosaic_gpu", None) == ("mosaic_gpu", None)
    assert choose_fp8_matmul(*operands, "xla", None)[0] == "xla"
    chosen, reason = choose_fp8_matmul(*make_operands(0, 4, 8), None, None)
    assert chosen == "xla" and "empty" in str(reason)


@pytest.mark.usefixtures("unchecked_shapes")
def test_errors():
    a, b = make_operands(4, 4, 8)
    with pytest.raises(ValueError, match="same last axis"):
        fp8_matmul(a, make_operands(4, 4, 9)[1])
    with pytest.raises(ValueError, match="both float8_e5m2"):
        fp8_matmul(*make_operands(4, 4, 8, dtypes=(E5M2, E5M2)))
    plain: Any = jnp.ones((8, 16))
    with pytest.raises(TypeError, match=r"a must be a Quantized, .*; pass quantize\(a\)"):
        fp8_matmul(plain, b)
    with pytest.raises(TypeError, match="a has values of dtype float32"):
        fp8_matmul(Quantized(a.dequantize(), a.scale), b)
    with pytest.raises(ValueError, match=r"b must be \[M, K\]"):
        fp8_matmul(a, Quantized(b.values, b.scale[:, 0]))
    with pytest.raises(ValueError, match="accumulation='slow'"):
        fp8_matmul(a, b, accumulation=cast(Any, "slow"))
    with pytest.raises(ValueError, match="out_dtype=int8"):
        fp8_matmul(a, b, out_dtype=jnp.int8)
    with pytest.raises(ValueError, match="'mosaic_gpu' by name, got implementation=None"):
        fp8_matmul(a, b, config=CONFIG)
    with pytest.raises(TypeError, match=r"config=1 must be a .*hopper_gemm\.Config"):
        fp8_matmul(a, b, config=cast(Any, 1))
    with pytest.raises(NotImplementedError, match="NVIDIA GPU"):
        jax.jit(lambda a, b: fp8_matmul(a, b, implementation="mosaic_gpu"))(a, b)
