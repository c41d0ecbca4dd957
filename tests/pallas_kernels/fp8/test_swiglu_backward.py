"""The kernels that make the FP8 copies of SwiGLU's gradients, against float64. About 12 s."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8 import RECIPES, quantize_both, reference
from pallas_kernels.fp8.casts import Axes, cast_computed
from pallas_kernels.mlp.reference import swiglu_gradients
from support.numerics import assert_as_accurate, quick_jit
from support.pairwise import pairwise

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
NAMES = ("dgate", "dup", "product")


def operands(shape, dtype):
    """gate and up in int8, and the gradient of their product."""
    gate, up, dproduct = (
        jax.random.normal(k, shape, dtype) for k in jax.random.split(jax.random.key(0), 3)
    )
    # Blocks of different magnitudes, so that a wrong scale is seen.
    gate *= jnp.exp2(jnp.arange(shape[0]) % 3)[:, None].astype(dtype)
    gate *= jnp.exp2(-(jnp.arange(shape[1]) // 128))[None].astype(dtype)
    return reference.blockwise_int8(gate), reference.blockwise_int8(up), dproduct


def casts_of(recipe):
    recipe = RECIPES[recipe]
    return recipe.gradients, recipe.gradients, recipe.inputs


@functools.cache
def by_kernels(recipe, wanted=((True, True),) * 3):
    def run(*args):
        return cast_computed(
            args, swiglu_gradients, casts_of(recipe), wanted, Axes(), name="fp8_swiglu_bwd"
        )

    return quick_jit(run)


@functools.cache
def by_pieces(recipe):
    """The gradients in the dtype of dproduct, then a cast of each."""

    def run(gate, up, dproduct):
        found = swiglu_gradients(gate.dequantize(), up.dequantize(), dproduct)
        casts = zip(found, casts_of(recipe), strict=True)
        return [quantize_both(a, c.dtype, scaling=c.scaling) for a, c in casts]

    return quick_jit(run)


def exact(gate, up, dproduct):
    arrays = gate.dequantize(), up.dequantize(), dproduct
    gate, up, dproduct = (np.asarray(a, np.float64) for a in arrays)
    sigmoid = 1 / (1 + np.exp(-gate))
    dgate = dproduct * up * sigmoid * (1 + gate * (1 - sigmoid))
    return dgate, dproduct * gate * sigmoid, gate * sigmoid * up


@pytest.mark.parametrize(
    "recipe, dtype, shape",
    pairwise(
        ["tensorwise", "rowwise"],
        [BF16, F16, F32],
        [(64, 64), (64, 192), (192, 256)],
        but=[
            ("tensorwise", F16, (192, 256)),
            ("tensorwise", F32, (64, 192)),
            ("tensorwise", F32, (192, 256)),
            ("rowwise", F16, (64, 64)),
            ("rowwise", BF16, (64, 192)),
        ],
    ),
    ids=str,
)
def test_every_copy_is_as_accurate_as_a_cast_of_its_own(interpreted, recipe, dtype, shape):
    assert_accurate(recipe, dtype, shape)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_strips_of_several_tiles(interpreted, recipe):
    assert_accurate(recipe, BF16, (256, 256))


def assert_accurate(recipe, dtype, shape):
    args = operands(shape, dtype)
    got, plain = by_kernels(recipe)(*args), by_pieces(recipe)(*args)
    for name, pair, pieces, want in zip(NAMES, got, plain, exact(*args), strict=True):
        for a, b, e in zip(pair, pieces, (want, want.T), strict=True):
            assert (a.values.shape, a.values.dtype) == (b.values.shape, b.values.dtype)
            assert a.scale.shape == b.scale.shape
            assert_as_accurate([a.dequantize()], [b.dequantize()], [e], names=[name])


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.full)])
def test_copies_that_are_asked_for(interpreted, recipe):
    args = operands((64, 128), BF16)
    wanted = (True, False), (False, True), (False, False)
    got, every = by_kernels(recipe, wanted)(*args), by_kernels(recipe)(*args)
    for pair, all_of_it, asked_for in zip(got, every, wanted, strict=True):
        for a, b, is_wanted in zip(pair, all_of_it, asked_for, strict=True):
            assert (a is not None) == is_wanted
            if is_wanted:
                np.testing.assert_array_equal(a.values, b.values)
                np.testing.assert_array_equal(a.scale, b.scale)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_and_infinity_arrive_as_nan(interpreted, recipe, bad):
    gate, up, dproduct = operands((64, 64), BF16)
    of_dgate, of_dup, of_product = by_kernels(recipe)(gate, up, dproduct.at[5, 7].set(bad))
    for row_major, transposed in (of_dgate, of_dup):
        for q, row in ((row_major, 5), (transposed, 7)):
            is_nan = np.isnan(np.asarray(q.dequantize()))
            assert is_nan[row].all() and is_nan.all() == (recipe == "tensorwise")
    assert all(np.isfinite(np.asarray(q.dequantize())).all() for q in of_product)
    # In int8 it makes 128 columns of its row NaN.
    up = reference.blockwise_int8(up.dequantize().at[5, 7].set(bad))
    for row_major, transposed in by_kernels(recipe)(gate, up, dproduct)[::2]:
        is_nan = np.isnan(np.asarray(row_major.dequantize()))
        assert is_nan[5].all() and is_nan.all() == (recipe == "tensorwise")
        assert np.isnan(np.asarray(transposed.dequantize())).all()


def test_zeros(interpreted):
    gate, up, dproduct = operands((64, 64), BF16)
    of_dgate, of_dup, _ = by_kernels("tensorwise")(gate, up, 0 * dproduct)
    for q in (*of_dgate, *of_dup):
        assert q.scale == 1 and not np.any(np.asarray(q.values, np.float32))


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("shape", [(3, 128), (5, 200), (2, 40)], ids=str)
def test_int8_errs_by_half_a_step(dtype, shape):
    """A step is the largest magnitude of 128 columns of a row over 127."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape) * 10.0 ** rng.integers(-30, 30, (shape[0], 1))
    x = jnp.asarray(x, dtype).at[1].set(0)
    kept = reference.blockwise_int8(x)
    assert (kept.values.dtype, kept.values.shape) == (jnp.int8, shape)
    numbers, got = np.asarray(x, np.float64), np.asarray(kept.dequantize(), np.float64)
    for start in range(0, shape[1], 128):
        block = np.s_[:, start : start + 128]
        amax = np.abs(numbers[block]).max(axis=1, keepdims=True)
        assert np.all(np.abs(got - numbers)[block] <= amax / 254 * (1 + 1e-5))
        largest = np.abs(kept.values[block]).max(axis=1)
        assert np.all(largest == np.where(amax[:, 0] > 0, 127, 0))
