"""The kernels that quantize to FP8 on a GPU, at real sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.quantize import swiglu_by_kernels, swiglu_in_pieces
from pallas_kernels import add_rms_norm, rms_norm
from pallas_kernels.fp8 import (
    RECIPES,
    add_rms_norm_quantized,
    quantize,
    quantize_both,
    reference,
    rms_norm_quantized,
)
from support.on_gpu import same_bits
from support.pairwise import pairwise

pytestmark = pytest.mark.gpu

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
each_scaling = pytest.mark.parametrize("scaling", ["tensor", "row"])


def compiled(function, implementation, **options):
    return jax.jit(functools.partial(function, implementation=implementation, **options))


def assert_same(got, want, share=0.0):
    """Asserts equal bits, but a share of the values may be neighbours of what is expected."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        is_value = a.dtype.itemsize == 1
        a, b = np.asarray(a.astype(F32)), np.asarray(b.astype(F32))
        if not (share and is_value):
            np.testing.assert_array_equal(a, b)
            continue
        np.testing.assert_allclose(a, b, rtol=0.25, atol=2.0**-9)
        assert np.mean(a != b) <= share


@each_scaling
@pytest.mark.parametrize(
    "shape, dtype, to",
    [
        ((16384, 8192), BF16, jnp.float8_e4m3fn),
        ((2048, 8192), F32, jnp.float8_e5m2),
        ((4160, 2880), F16, jnp.float8_e4m3fn),
    ],
    ids=str,
)
def test_the_kernels_have_the_bits_of_xla(scaling, shape, dtype, to):
    # Magnitudes over many powers of two, so that some values are subnormal.
    first, second = jax.random.split(jax.random.key(0))
    x = jax.random.normal(first, shape) * jnp.exp2(jax.random.normal(second, shape) * 2)
    x = x.astype(dtype)
    options = dict(dtype=to, scaling=scaling)
    run = compiled(quantize_both, "mosaic_gpu", **options)
    got = run(x)
    want = compiled(quantize_both, "reference", **options)(x)
    assert_same(got, want)
    # The kernel of rows has a reciprocal that may err in the last bit. A value within 2^-23 of a
    # tie may then round to its other neighbour.
    plain = compiled(quantize, "mosaic_gpu", **options)(x)
    assert_same(plain, want[0], 1e-5 if scaling == "row" else 0)
    for _ in range(20):
        assert np.all(same_bits(jax.tree.leaves(run(x)), jax.tree.leaves(got)))


@pytest.mark.parametrize("shape", [(64, 64), (192, 64), (64, 192), (128, 128)], ids=str)
def test_one_block_of_a_dimension(shape):
    x = jax.random.normal(jax.random.key(0), shape, BF16)
    options = dict(scaling="row")
    got = compiled(quantize_both, "mosaic_gpu", **options)(x)
    assert_same(got, compiled(quantize_both, "reference", **options)(x))


@pytest.mark.parametrize(
    "scaling, dtype, bad",
    pairwise(["tensor", "row"], [BF16, F16, F32], [np.nan, np.inf]),
    ids=str,
)
def test_nan_and_infinity_arrive_as_nan(scaling, dtype, bad):
    x = jax.random.normal(jax.random.key(0), (128, 192), dtype).at[70, 5].set(bad)
    got = compiled(quantize_both, "mosaic_gpu", scaling=scaling)(x)
    assert_same(got, compiled(quantize_both, "reference", scaling=scaling)(x))
    (row_major, transposed) = got
    for q, row in ((row_major, 70), (transposed, 5)):
        is_nan = np.isnan(np.asarray(q.dequantize()))
        assert is_nan[row].all() and (scaling == "tensor") == is_nan.all()


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_swiglu_backward_in_strips(name):
    recipe = RECIPES[name]
    keys = jax.random.split(jax.random.key(0), 3)
    gate, up, dproduct = (jax.random.normal(key, (2048, 2112), BF16) for key in keys)
    args = *map(jax.jit(reference.blockwise_int8), (gate, up)), dproduct
    run = jax.jit(functools.partial(swiglu_by_kernels, recipe))
    got = run(*args)
    assert_same(got, jax.jit(functools.partial(swiglu_in_pieces, recipe))(*args), 1e-4)
    for _ in range(20):
        assert np.all(same_bits(jax.tree.leaves(run(*args)), jax.tree.leaves(got)))


def test_a_layer_of_a_stack_of_weights():
    # The layers do not start at multiples of 256 bytes.
    weights = jax.random.normal(jax.random.key(0), (3, 64, 64 * 3), BF16)
    both = functools.partial(quantize_both, scaling="row")

    def layer(carry, w):
        return carry, both(w, implementation="mosaic_gpu")

    _, got = jax.jit(lambda w: jax.lax.scan(layer, 0, w))(weights)
    for i in range(3):
        assert_same(
            jax.tree.map(lambda a, i=i: a[i], got), both(weights[i], implementation="reference")
        )


@pytest.mark.parametrize("shape", [(16384, 2048), (8193, 4096), (1001, 320)], ids=str)
def test_norms_quantized_by_row(shape):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (shape, shape, shape[-1:])
    args = [jax.random.normal(k, s, BF16) for k, s in zip(keys, shapes, strict=True)]
    got, total, _ = compiled(add_rms_norm_quantized, "mosaic_gpu")(*args)
    y, want_total = compiled(add_rms_norm, "mosaic_gpu")(*args)
    np.testing.assert_array_equal(np.asarray(total, F32), np.asarray(want_total, F32))
    assert_same(got, compiled(quantize, "reference", scaling="row")(y), 1e-5)
    got, _ = compiled(rms_norm_quantized, "mosaic_gpu")(args[0], args[2])
    y = compiled(rms_norm, "mosaic_gpu")(args[0], args[2])
    assert_same(got, compiled(quantize, "reference", scaling="row")(y), 1e-5)
