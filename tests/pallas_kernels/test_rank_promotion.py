"""Operations where the caller forbids JAX to promote ranks. Nothing is compiled."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from pallas_kernels import (
    add_rms_norm,
    document_attention,
    document_bounds,
    fp8,
    linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
    rms_norm,
)
from pallas_kernels.layers import LinearCrossEntropy, SwiGLU

X, SCALE = jnp.ones((2, 3, 16)), jnp.ones(16)
HEAD, BIAS, LABELS = jnp.ones((8, 16)), jnp.ones(8), jnp.zeros((2, 3), jnp.int32)


def attention(x, bounds):
    heads = x.reshape(2, 3, 4, 4)  # with two heads of keys and of values
    return document_attention(heads, heads[:, :, :2], heads[:, :, 2:], bounds)


LOSSES = {
    "cross-entropy": lambda x, **o: linear_cross_entropy(x, HEAD, LABELS, bias=BIAS, **o),
    "log-probabilities": lambda x, **o: linear_log_probs(x, HEAD, LABELS, bias=BIAS, **o),
    "distillation": lambda x, **o: linear_distillation_loss(x, HEAD, x, HEAD, bias=BIAS, **o),
}
CALLS = {
    "norm": lambda x: rms_norm(x, SCALE),
    "norm of a sum": lambda x: add_rms_norm(x, x, SCALE),
    "MLP with biases": lambda x: SwiGLU(16, 32, use_bias=True, rngs=nnx.Rngs(0))(x),
    "attention of windows": lambda x: attention(x, document_bounds(LABELS, window=2)),
    "attention of whole rows": lambda x: attention(x, None),
    "logits": lambda x: LinearCrossEntropy(16, 8, use_bias=True, rngs=nnx.Rngs(0)).logits(x),
    **{
        f"{name}, {implementation}": lambda x, fn=fn, name=implementation: fn(
            x, implementation=name
        )
        for name, fn in LOSSES.items()
        for implementation in ("xla", "reference")
    },
}

# Losses of a size that the kernels take.
WIDE = jnp.ones((256, 128), jnp.bfloat16)
REQUIRED: Any = {"implementation": "require"}
KERNELS = {
    "cross-entropy": lambda x: linear_cross_entropy(x, WIDE, LABELS, **REQUIRED),
    "entropies": lambda x: linear_log_probs(
        x, WIDE, LABELS, return_entropy=True, return_argmax=True, **REQUIRED
    )[:2],
    "distillation": lambda x: linear_distillation_loss(x, WIDE, x, WIDE, **REQUIRED),
}


@pytest.mark.parametrize("name", CALLS)
def test_no_rank_is_promoted(name):
    assert_traces(CALLS[name], X)


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_promote_no_rank(name, on_h100):
    assert_traces(KERNELS[name], jnp.ones((2, 3, 128), jnp.bfloat16))


def assert_traces(call, x):
    def total(x):
        return sum(jnp.sum(a) for a in jax.tree.leaves(call(x)))

    with jax.numpy_rank_promotion("raise"):
        assert jax.eval_shape(jax.grad(total), x).shape == x.shape


def test_no_rank_is_promoted_in_a_quantized_norm():
    with jax.numpy_rank_promotion("raise"):
        y, _ = jax.eval_shape(lambda x: fp8.rms_norm_quantized(x, SCALE), X)
    assert y.values.shape == X.shape
