"""The gated MLP on a GPU, at real sizes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import swiglu_mlp
from support.numerics import assert_as_accurate
from support.on_gpu import graded, sampled

pytestmark = pytest.mark.gpu

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
MLP_NAMES = ("y", "dx", "dw_gate", "dw_up", "dw_down")


def mlp_args(shape, dtype, weight_dtype, num_layers=()):
    """`(x, w_gate, w_up, w_down)` and the cotangent of the result, for `(tokens, D, F)`."""
    num_tokens, hidden_size, intermediate_size = shape
    keys = jax.random.split(jax.random.key(0), 5)

    def weight(key, size_in, size_out):
        initial = jax.random.normal(key, (*num_layers, size_in, size_out)) / np.sqrt(size_in)
        return initial.astype(weight_dtype)

    x, dy = (jax.random.normal(key, (num_tokens, hidden_size), dtype) for key in keys[:2])
    w_gate, w_up = (weight(key, hidden_size, intermediate_size) for key in keys[2:4])
    return (x, w_gate, w_up, weight(keys[4], intermediate_size, hidden_size)), dy


def assert_mlp_is_as_accurate(mlp, args, dy):
    """Compares value and gradients of `mlp(swiglu_mlp)` with the formula, and with later runs."""
    kernels, reference = (
        graded(mlp(functools.partial(swiglu_mlp, implementation=name)))
        for name in ("mosaic_gpu", "reference")
    )
    got = kernels(args, dy)
    low_precision = reference(args, dy)
    floats = jax.tree.map(lambda a: a.astype(F32), (args, dy))
    with jax.default_matmul_precision("highest"):
        exact = reference(*floats)
    some = map(sampled, (got, low_precision, exact))
    assert_as_accurate(*some, names=MLP_NAMES)
    for _ in range(5):
        chex.assert_trees_all_equal(kernels(args, dy), got)


@pytest.mark.parametrize("save", ["all", "gate_up", "x"])
@pytest.mark.parametrize(
    "shape, dtype, weight_dtype",
    [
        ((8192, 4096, 14336), BF16, BF16),
        ((4096, 2048, 8192), BF16, F32),
        ((2049, 2880, 2880), F16, F16),  # no tile divides tokens and columns
        ((4096, 576, 1536), BF16, F32),
        ((1, 576, 1472), BF16, BF16),
    ],
    ids=str,
)
def test_mlp_at_real_sizes(shape, dtype, weight_dtype, save):
    args, dy = mlp_args(shape, dtype, weight_dtype)
    assert_mlp_is_as_accurate(lambda fn: functools.partial(fn, save=save), args, dy)


# In a scan the kernels write gate and up into arrays of all layers, and read them from there.
@pytest.mark.parametrize("kept", [("gate", "up"), ("gate", "up", "mlp_product"), ()], ids=str)
def test_mlp_in_a_scan_over_layers(kept):
    (x, *weights), dy = mlp_args((2100, 1024, 2816), BF16, BF16, num_layers=(3,))
    policy = jax.checkpoint_policies.save_only_these_names(*kept)

    def layers(fn):
        layer = jax.checkpoint(
            lambda x, weights: (x + fn(x, *weights, save="all"), None), policy=policy
        )
        return lambda x, *weights: jax.lax.scan(layer, x, weights)[0]

    assert_mlp_is_as_accurate(layers, (x, *weights), dy)
