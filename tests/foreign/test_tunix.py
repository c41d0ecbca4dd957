"""`google-tunix`: its Qwen 3, Llama 3 and Gemma 3, trained with the loss of its `PeftTrainer`."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from tunix.models.gemma3 import model as gemma3
from tunix.models.llama3 import model as llama3
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer

from foreign import comparison
from foreign.comparison import IGNORED, Project, Size


def build_qwen3(size: Size, dtype: Any) -> nnx.Module:
    """Float32 parameters, and activations in `dtype`."""
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


def build_llama3(size: Size, dtype: Any) -> nnx.Module:
    """Everything in the dtype of the parameters, and the embedding as the head."""
    config = llama3.ModelConfig(
        num_layers=2,
        vocab_size=size.vocab,
        embed_dim=size.width,
        hidden_dim=size.hidden,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        rope_theta=500_000,
        norm_eps=1e-5,
        weight_tying=True,
    )
    return comparison.cast_parameters(llama3.Llama3(config, rngs=nnx.Rngs(0)), dtype)


def build_gemma3(size: Size, dtype: Any) -> nnx.Module:
    """Norms and MLPs that `patch` leaves: norms of rounded squares, and MLPs of GELU."""
    config = gemma3.ModelConfig(
        num_layers=2,
        num_embed=size.vocab,
        embed_dim=size.width,
        hidden_dim=size.hidden,
        num_heads=size.heads,
        num_kv_heads=size.kv_heads,
        head_dim=size.head_dim,
        sliding_window_size=size.length // 2,
        param_dtype=jnp.float32,
    )
    return comparison.cast_parameters(gemma3.Gemma3(config, rngs=nnx.Rngs(0)), dtype)


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


PROJECTS = {
    name: Project(build, batch, loss, patched_loss)
    for name, build in (("qwen3", build_qwen3), ("llama3", build_llama3), ("gemma3", build_gemma3))
}
CASES = comparison.cases(PROJECTS["qwen3"])


@pytest.mark.parametrize("model", ["qwen3", "llama3"])
def test_parameters_stay(model):
    comparison.assert_tree_is_kept(PROJECTS[model])


@pytest.mark.parametrize("model, num_replaced", [("qwen3", 11), ("llama3", 7), ("gemma3", 0)])
def test_loss_and_gradients(model, num_replaced):
    comparison.assert_same_training(PROJECTS[model], num_replaced)


def test_program_for_an_h100():
    calls = {
        "gated_matmul": 2,
        "gated_matmul_backward": 2,
        "linear_exponentials": 2,
        "linear_exponentials_again": 2,
        "rms_norm_bwd": 9,
        "rms_norm_fwd": 9,
    }
    comparison.assert_kernels_replace_logits("foreign.test_tunix", calls)
