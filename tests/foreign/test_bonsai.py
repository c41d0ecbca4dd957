"""Bonsai's Qwen 3 of `flax.nnx` layers, with the parameters in bf16 as its loader leaves them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from bonsai.models.qwen3 import modeling
from flax import nnx

from foreign import comparison
from foreign.comparison import IGNORED, Project, Size


class Logits(nnx.Module):
    """The model's logits without a cache from before. Bonsai has no loss and no training."""

    def __init__(self, model: modeling.Qwen3):
        self.model = model

    def __call__(self, tokens: jax.Array) -> jax.Array:
        dtype = self.model.lm_head.kernel.dtype
        cache = modeling.init_cache(self.model.config, *tokens.shape, 0, dtype)
        return self.model(tokens, cache=cache, segment_ids=jnp.ones_like(tokens))


def build(size: Size, dtype: Any) -> nnx.Module:
    config = modeling.ModelConfig(
        num_layers=2,
        vocab_size=size.vocab,
        emb_dim=size.width,
        mlp_dim=size.hidden,
        num_heads=size.heads,
        head_dim=size.head_dim,
        num_kv_heads=size.kv_heads,
        rope_theta=1_000_000,
        rope_scaling_factor=8.0,
        local_rope_theta=1e4,
        norm_eps=1e-6,
        tie_word_embeddings=False,
    )
    model = Logits(modeling.Qwen3(config, rngs=nnx.Rngs(0)))
    return comparison.cast_parameters(model, dtype)


def batch(key: jax.Array, size: Size) -> dict[str, jax.Array]:
    tokens = jax.random.randint(key, (size.sequences, size.length + 1), 0, size.vocab)
    is_answer = jnp.arange(size.length) >= 9  # without a prompt
    return {"tokens": tokens[:, :-1], "labels": jnp.where(is_answer, tokens[:, 1:], IGNORED)}


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    labels = batch["labels"]
    logits = model(batch["tokens"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
    return losses.mean(where=labels != IGNORED)


def patched_loss(patched: Any, model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return patched.loss(model, batch["labels"], batch["tokens"])


PROJECT = Project(build, batch, loss, patched_loss)
CASES = comparison.cases(PROJECT)


def test_parameters_stay():
    comparison.assert_tree_is_kept(PROJECT)


def test_loss_and_gradients():
    comparison.assert_same_training(PROJECT, num_replaced=11)


def test_program_for_an_h100():
    calls = {
        "gated_matmul": 2,
        "gated_matmul_backward": 2,
        "linear_exponentials": 2,
        "linear_exponentials_again": 2,
        "rms_norm_bwd": 9,
        "rms_norm_fwd": 9,
    }
    comparison.assert_kernels_replace_logits("foreign.test_bonsai", calls)
