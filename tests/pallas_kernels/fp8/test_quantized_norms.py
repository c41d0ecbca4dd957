"""RMSNorm quantized by row, against the norm and the quantization one after the other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm, rms_norm
from pallas_kernels.fp8 import add_rms_norm_quantized, quantize, rms_norm_quantized
from support.numerics import quick_jit
from support.pairwise import pairwise

BF16, F32 = jnp.bfloat16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
OPTIONS = dict(eps=1e-5, weight_offset=1.0)


@pytest.fixture
def implementation(request):
    if request.param == "mosaic_gpu":
        request.getfixturevalue("interpreted")
    return request.param


def make_args(shape, dtype):
    shapes = (shape, shape, shape[-1:])
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.random.normal(k, s, dtype) for k, s in zip(keys, shapes, strict=True)]


def assert_same(got, want, y):
    """Asserts the scales and values of `quantize`, up to what the order of a sum may change."""
    # The sum of squares may differ in its last bits, and so the norm by one rounding.
    step = float(jnp.finfo(y.dtype).eps)
    np.testing.assert_allclose(got.scale, want.scale, rtol=2 * step)
    assert got.values.dtype == want.values.dtype and got.values.shape == y.shape
    a, b = (np.asarray(q.values, F32) for q in (got, want))
    # Neighbours of a value differ by at most 2^-2 of it.
    np.testing.assert_allclose(a, b, rtol=0.25, atol=2.0**-9)
    assert np.mean(a != b) <= 0.02


@pytest.mark.parametrize(
    "implementation, add, dtypes, shape",
    pairwise(
        ["reference", "mosaic_gpu"],
        [False, True],
        [(E4M3, BF16), (E5M2, F32)],
        [(8, 1024), (2, 3, 320), (7, 64)],
        but=[
            ("reference", True, (E5M2, F32), (2, 3, 320)),
            ("reference", False, (E4M3, BF16), (8, 1024)),
            ("mosaic_gpu", False, (E4M3, BF16), (2, 3, 320)),
        ],
    ),
    indirect=["implementation"],
    ids=str,
)
def test_both_steps_in_one(implementation, add, dtypes, shape):
    dtype, x_dtype = dtypes
    x, residual, weight = make_args(shape, x_dtype)
    options = dict(casting="llama" if add else "float32", **OPTIONS)
    run = functools.partial(
        add_rms_norm_quantized if add else rms_norm_quantized,
        dtype=dtype,
        implementation=implementation,
        **options,
    )
    plain = functools.partial(
        add_rms_norm if add else rms_norm, implementation="reference", **options
    )
    args = (x, residual, weight) if add else (x, weight)
    y, *others = quick_jit(run)(*args)
    want = quick_jit(plain)(*args)
    source = np.asarray(x, np.float64)
    if add:
        want, total = want
        np.testing.assert_array_equal(others[0], total)
        source = np.asarray(total, np.float64)
    assert_same(y, quantize(want, dtype, scaling="row", implementation="reference"), want)
    assert y.scale.shape == (*shape[:-1], 1)
    rstd = 1 / np.sqrt(np.mean(source**2, axis=-1) + OPTIONS["eps"])
    np.testing.assert_allclose(others[-1], rstd, rtol=1e-5)


@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"], indirect=True)
def test_zeros_and_nan(implementation):
    x, _, weight = make_args((8, 64), BF16)
    x = x.at[2].set(0).at[5, 7].set(np.nan)
    y, _ = quick_jit(functools.partial(rms_norm_quantized, implementation=implementation))(
        x, weight
    )
    values, scale = np.asarray(y.values, F32), np.asarray(y.scale)
    assert scale[2] == 1 and not values[2].any()
    assert np.isnan(scale[5]) and np.isnan(values[5]).all()
    assert np.isfinite(np.delete(values, 5, axis=0)).all()


def test_errors(unchecked_shapes):
    x, residual, weight = make_args((8, 64), BF16)
    with pytest.raises(ValueError, match="bfloat16 is no dtype of FP8"):
        rms_norm_quantized(x, weight, BF16)
    with pytest.raises(ValueError, match=r"weight must have shape \(64,\)"):
        rms_norm_quantized(x, weight[:3])
    with pytest.raises(ValueError, match="residual must have the shape of x"):
        add_rms_norm_quantized(x, residual[:2], weight)
    with pytest.raises(NotImplementedError, match="fewer than 4 rows; pad it to 4"):
        rms_norm_quantized(x[:3], weight, implementation="mosaic_gpu")
