"""The kernels that quantize to FP8 on a GPU, at real sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.fp8 import quantize, quantize_both, quantize_transposed
from support.on_gpu import same_bits

pytestmark = pytest.mark.gpu

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
each_scaling = pytest.mark.parametrize("scaling", ["tensor", "row"])


def compiled(function, implementation, **options):
    return jax.jit(functools.partial(function, implementation=implementation, **options))


def assert_same(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        a, b = np.asarray(a.astype(F32)), np.asarray(b.astype(F32))
        np.testing.assert_array_equal(a, b)


@each_scaling
@pytest.mark.parametrize(
    "shape, dtype, to",
    [
        ((16384, 8192), BF16, jnp.float8_e4m3fn),
        ((8192, 14336), BF16, jnp.float8_e5m2),
        ((2048, 8192), F32, jnp.float8_e4m3fn),
        ((4160, 2880), F16, jnp.float8_e4m3fn),
        ((64, 64), F32, jnp.float8_e5m2),
    ],
    ids=str,
)
def test_the_kernels_have_the_bits_of_xla(scaling, shape, dtype, to):
    # Magnitudes from 2^-12 to 2^12, so that many values are subnormal.
    first, second = jax.random.split(jax.random.key(0))
    x = jax.random.normal(first, shape) * jnp.exp2(jax.random.normal(second, shape) * 4)
    x = x.astype(dtype)
    for function in (quantize, quantize_transposed, quantize_both):
        options = dict(dtype=to, scaling=scaling)
        got = compiled(function, "mosaic_gpu", **options)(x)
        assert_same(got, compiled(function, "reference", **options)(x))
    run = compiled(quantize_both, "mosaic_gpu", dtype=to, scaling=scaling)
    first = run(x)
    for _ in range(10):
        assert np.all(same_bits(jax.tree.leaves(run(x)), jax.tree.leaves(first)))


@each_scaling
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=jnp.dtype)
@pytest.mark.parametrize("to", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=jnp.dtype)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf], ids=str)
def test_nan_and_infinity_arrive_as_nan(scaling, dtype, to, bad):
    x = jax.random.normal(jax.random.key(0), (128, 192), dtype).at[70, 5].set(bad)
    options = dict(dtype=to, scaling=scaling)
    got = compiled(quantize_both, "mosaic_gpu", **options)(x)
    assert_same(got, compiled(quantize_both, "reference", **options)(x))
    for q, row in zip(got, (70, 5), strict=True):
        is_nan = np.isnan(np.asarray(q.dequantize()))
        assert is_nan[row].all() and (scaling == "tensor") == is_nan.all()


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
