"""A run that takes milliseconds, for tests that change some of its fields."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx

import models.llama
from models.llama import Llama, LlamaConfig
from train.config import DataConfig, OptimizerConfig, TrainConfig, preset

# With the vocabulary of bytes.
MODEL = dataclasses.replace(
    preset("demo").model,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    dtype="float32",
)
CONFIG = TrainConfig(
    name="tiny",
    model=dataclasses.replace(MODEL, vocab_size=64),
    data=DataConfig(source="synthetic", sequence_length=16, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    steps=8,
    eval_every=0,
    sample_tokens=0,
    save=False,
)


def row_groups(config: LlamaConfig) -> list[int]:
    """The sequences of each group that a model deals four to, where devices share them."""
    sizes = []

    def run(self, groups, layer_inputs):
        sizes.extend(len(group.tokens) for group in groups)
        return [jnp.zeros((*group.tokens.shape, 1)) for group in groups], None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models.llama, "tensor_axis", lambda: "tensor")
        patch.setattr(Llama, "_run", run)
        nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))(jnp.zeros((4, 8), jnp.int32)))
    return sizes
