"""`google-tunix`: its Llama 3 and Qwen 3, trained with the loss of its `PeftTrainer`."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer

from foreign import comparison
from foreign.comparison import IGNORED, Project, Size


def build(size: Size, dtype: Any) -> nnx.Module:
    config = qwen3.ModelConfig(
        num_layers=2,
        vocab_size=size.vocab,
        embed_dim=size.width,
        hidden_dim=size.hidden,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        rope_theta=1_000_000,
        norm_eps=1e-6,
        dtype=dtype,
        param_dtype=jnp.float32,
    )
    return qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def batch(key: jax.Array, size: Size) -> dict[str, jax.Array]:
    shape = size.sequences, size.length
    tokens = jax.random.randint(key, shape, 0, size.vocab)
    causal = jnp.tril(jnp.ones((size.length, size.length), bool))
    return {
        "input_tokens": tokens,
        "input_mask": jnp.broadcast_to(jnp.arange(size.length) >= 9, shape),  # without a prompt
        "positions": jnp.broadcast_to(jnp.arange(size.length), shape),
        "attention_mask": jnp.broadcast_to(causal, (size.sequences, *causal.shape)),
    }


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    return peft_trainer._default_loss_fn(model, **batch)


def patched_loss(patched: Any, model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    tokens = batch["input_tokens"]
    next_tokens = jnp.where(batch["input_mask"], tokens, IGNORED)[:, 1:]
    labels = jnp.pad(next_tokens, ((0, 0), (0, 1)), constant_values=IGNORED)
    return patched.loss(model, labels, tokens, batch["positions"], None, batch["attention_mask"])


PROJECT = Project(build, batch, loss, patched_loss)

CASES = comparison.cases(PROJECT)


def test_parameters_stay():
    comparison.assert_tree_is_kept(PROJECT)


def test_loss_and_gradients():
    comparison.assert_same_training(PROJECT)


def test_program_for_an_h100():
    programs = comparison.compile_for_h100("foreign.test_tunix")
    assert comparison.has_logits(programs["before"])
    assert not comparison.num_calls(programs["before"])
    assert not comparison.has_logits(programs["patched"])
    assert comparison.kernels_of(programs["patched"]) == {}
