"""A Llama with two small layers and random parameters, and its values and gradients."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.config import LlamaConfig
from models.llama import Llama
from models.rope import RopeParameters

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters=RopeParameters(rope_theta=100.0),
    dtype="float32",
    remat="none",
)
B, S = 2, 20


def changed(config: LlamaConfig = CONFIG, **changes: Any) -> LlamaConfig:
    return dataclasses.replace(config, **changes)


@functools.cache
def make_model(config: LlamaConfig) -> Llama:
    """A model with parameters far from their initial values: no norm is the identity, no bias 0."""
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def random(path, shape):
        center = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(center + 0.15 * rng.normal(size=shape.shape), shape.dtype)

    return nnx.merge(graphdef, jax.tree.map_with_path(random, shapes))


def random_tokens(config: LlamaConfig, shape=(B, S), seed=0) -> jax.Array:
    # 0 is left out: it is the padding token where there is one.
    return jax.random.randint(jax.random.key(seed), shape, 1, config.vocab_size, jnp.int32)


# A token that occurs, so that the model without padding trains its embedding.
PAD = int(random_tokens(CONFIG)[0, 2])


def call(graphdef, state, args, kwargs) -> jax.Array:
    return nnx.merge(graphdef, state)(*args, **kwargs)


_call = jax.jit(call, static_argnums=0)


def hidden_of(config: LlamaConfig, *args, **kwargs) -> jax.Array:
    # jax.nn.dot_product_attention does not lower in 16 bits under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return _call(*nnx.split(make_model(config)), args, kwargs)


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(graphdef, state, cotangent, args, kwargs):
    hidden, vjp = jax.vjp(lambda state: call(graphdef, state, args, kwargs), state)
    return hidden, nnx.to_pure_dict(vjp(cotangent)[0])


def value_and_gradients(config: LlamaConfig, cotangent, *args, **kwargs):
    """Hidden states and the gradients of `sum(hidden * cotangent)`."""
    with jax.numpy_dtype_promotion("standard"):
        return _value_and_gradients(*nnx.split(make_model(config)), cotangent, args, kwargs)


def differ(a, b) -> bool:
    leaves, others = jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b)
    same = len(leaves) == len(others) and all(
        path == other_path and np.array_equal(leaf, other)
        for (path, leaf), (other_path, other) in zip(leaves, others, strict=True)
    )
    return not same
