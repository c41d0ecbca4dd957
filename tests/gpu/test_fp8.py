"""FP8 products and layers at real sizes, against float32 products of the same numbers."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels import require_kernels
from pallas_kernels.fp8 import (
    RECIPES,
    Fp8DotGeneral,
    fp8_linear,
    fp8_matmul,
    fp8_swiglu_mlp,
    quantize,
    quantize_weight,
)
from pallas_kernels.layers import SwiGLU

pytestmark = pytest.mark.gpu
BF16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2


def normal(seed, *shape, dtype=BF16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


@jax.jit
def relative_error(got, want):
    got, want = got.astype(F32), want.astype(F32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


@jax.jit
def plain(a, b):
    """Exact but for float32 sums."""
    return jax.lax.dot_general(
        a.dequantize(), b.dequantize(), (((1,), (1,)), ((), ())), precision="highest"
    )


# Relative errors measured on an H200: rounding to bfloat16 errs by 1.66e-3, and fast accumulation
# over 2048 makes it 1.84e-3, over 8192 2.59e-3.
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize(
    "accumulation, k, error", [("fast", 2048, 1.84e-3), ("promoted", 8192, 1.68e-3)]
)
@pytest.mark.parametrize("m, n", [(2048, 3072), (1009, 200)])
def test_product(scaling, accumulation, k, error, m, n):
    a = quantize(normal(0, m, k), E5M2, scaling=scaling)
    b = quantize(normal(1, n, k), E4M3, scaling=scaling)
    fn = jax.jit(functools.partial(fp8_matmul, accumulation=accumulation))
    got = fn(a, b)
    assert relative_error(got, plain(a, b)) < 1.1 * error
    np.testing.assert_array_equal(got, fn(a, b))


def test_kernel_writes_float32():
    a, b = (quantize(normal(s, 512, 4096), scaling="row") for s in (0, 1))
    got = fp8_matmul(a, b, out_dtype=F32, accumulation="promoted")
    assert relative_error(got, plain(a, b)) < 4e-4


# Errors of one rounding to FP8 with 3 and 2 mantissa bits: docs/fp8.md.
@pytest.mark.parametrize("name", list(RECIPES))
def test_layers(name):
    recipe = dataclasses.replace(RECIPES[name], least_size=0)
    x, w, dy = normal(0, 2, 1000, 1024), normal(1, 1024, 1536, dtype=F32), normal(2, 2, 1000, 1536)

    def graded(fn):
        def run(x, w, dy):
            y, vjp = jax.vjp(fn, x, w)
            return y, *vjp(dy)

        return jax.jit(run)(x, w, dy)

    layer = lambda x, w: fp8_linear(x, quantize_weight(w, recipe), recipe=recipe)
    got, want = graded(layer), graded(lambda x, w: x @ w.astype(BF16))
    for a, b in zip(got, want, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert relative_error(a, b) < 0.07
    ways = graded(jax.checkpoint(layer))
    for a, b in zip(got, ways, strict=True):
        np.testing.assert_array_equal(a, b)
    mlp = functools.partial(fp8_swiglu_mlp, recipe=recipe)
    y = jax.jit(mlp)(x, w / 32, w / 32, w.T / 32)
    gate = jnp.matmul(x, (w / 32).astype(BF16), preferred_element_type=F32)
    assert (
        relative_error(y, (jax.nn.silu(gate) * gate).astype(BF16) @ (w.T / 32).astype(BF16)) < 0.1
    )


class Layers(nnx.Module):
    """Projections to heads and back, and a gated MLP."""

    def __init__(self, size, recipe=None):
        options = {"dtype": BF16, "rngs": nnx.Rngs(0)}
        linear = functools.partial(nnx.LinearGeneral, use_bias=False, **options)
        if recipe is not None:
            linear = functools.partial(linear, dot_general=Fp8DotGeneral(recipe))
        self.to_heads = linear(size, (size // 128, 128))
        self.of_heads = linear((size // 128, 128), size, axis=(-2, -1))
        self.mlp = SwiGLU(size, 2 * size, fp8=recipe, **options)

    def __call__(self, x):
        return self.mlp(self.of_heads(self.to_heads(x)))


@pytest.mark.parametrize("name", list(RECIPES))
def test_layers_of_flax(name):
    """Kernels alone run. Four products in a row err by up to twice one rounding of operands."""
    x, dy = normal(0, 2, 1024, 2048), normal(1, 2, 1024, 2048)

    def graded(recipe):
        graphdef, params = nnx.split(Layers(2048, recipe))

        def run(params, x):
            y, vjp = jax.vjp(lambda params, x: nnx.merge(graphdef, params)(x), params, x)
            return y, vjp(dy)

        return jax.tree.leaves(jax.jit(run)(params, x))

    with require_kernels():
        got = graded(name)
    for a, b in zip(got, graded(None), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        assert 0.01 < relative_error(a, b) < 0.15
