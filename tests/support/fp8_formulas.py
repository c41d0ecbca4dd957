"""Numbers for linear layers in FP8, and their results in float64."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np

from pallas_kernels.fp8 import RECIPES, quantize
from support.numerics import quick_jit

BF16, F32 = jnp.bfloat16, jnp.float32
# Without a least size, because the tests' weights are small.
SMALL = {name: dataclasses.replace(r, least_size=0) for name, r in RECIPES.items()}


def make_args(shape, sizes, dtype=BF16, weight_dtype=F32, seed=0):
    """x, a weight for each size, and a cotangent for each result."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    weights = [
        jnp.asarray(rng.standard_normal((shape[-1], n)) / np.sqrt(shape[-1]), weight_dtype)
        for n in sizes
    ]
    dys = tuple(jnp.asarray(rng.standard_normal((*shape[:-1], n)), dtype) for n in sizes)
    return x, weights, dys


@functools.cache
def _dequantize(dtype, scaling):
    return quick_jit(lambda a: quantize(a, dtype, scaling=scaling).dequantize())


def dequantized(a, cast, parts=1):
    """The numbers that a product reads, in float64, of an operand `[rows, contracted]`.

    With row scales, each of the equal parts of a row has a scale.
    """
    by_part = np.split(np.asarray(a), parts if cast.scaling == "row" else 1, axis=1)
    found = map(_dequantize(cast.dtype, cast.scaling), by_part)
    return np.concatenate([np.asarray(a, np.float64) for a in found], axis=1)


def exact_of_quantized(recipe, x, weights, dys, parts_of_k=1, parts_of_n=None):
    """Results and gradients in float64, of the numbers that the products read.

    Devices have equal parts of K, and of the N of each weight.
    """
    x, *dys = (np.asarray(a).reshape(-1, a.shape[-1]) for a in (x, *dys))
    weights = [np.asarray(w) for w in weights]
    of_x = dequantized(x, recipe.inputs, parts_of_k)
    parts_of_dys = zip(dys, parts_of_n or [1] * len(dys), strict=True)
    of_dys = [dequantized(dy, recipe.gradients, parts) for dy, parts in parts_of_dys]
    forward = [dequantized(w.T, recipe.weights) for w in weights]
    dgrad = [dequantized(w, recipe.weights) for w in weights]
    if recipe.wgrad is None:
        pairs = [(np.asarray(x.T, np.float64), np.asarray(dy.T, np.float64)) for dy in dys]
    else:
        transposed = dequantized(x.T, recipe.inputs)
        pairs = [(transposed, dequantized(dy.T, recipe.gradients)) for dy in dys]
    ys = [of_x @ w.T for w in forward]
    dx = sum(dy @ w.T for dy, w in zip(of_dys, dgrad, strict=True))
    return [*ys, dx, *(a @ b.T for a, b in pairs)]


def mlp_args(shape, intermediate_size, weight_dtype=F32):
    """x, the three weights, and a cotangent for the result."""
    x, (gate, up), _ = make_args(shape, (intermediate_size,) * 2, weight_dtype=weight_dtype)
    down, dy = make_args((1, intermediate_size), (shape[-1],), weight_dtype=weight_dtype)[1], None
    dy = make_args(shape, (shape[-1],), seed=1)[2][0]
    return x, gate, up, down[0], dy


def exact_mlp(*args):
    """Value and gradients of the MLP in float64, of unquantized numbers."""
    x, w_gate, w_up, w_down, dy = (np.asarray(a, np.float64) for a in args)
    x, dy = (a.reshape(-1, a.shape[-1]) for a in (x, dy))
    gate, up = x @ w_gate, x @ w_up
    sigmoid = 1 / (1 + np.exp(-gate))
    product, dproduct = gate * sigmoid * up, dy @ w_down.T
    dgate = dproduct * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dproduct * gate * sigmoid
    dx = dgate @ w_gate.T + dup @ w_up.T
    return product @ w_down, dx, x.T @ dgate, x.T @ dup, product.T @ dy
