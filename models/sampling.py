"""Text generation with a key/value cache."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from models.llama import Llama

type Cache = tuple[Float[Array, "L B C K H"], Float[Array, "L B C K H"]]


def init_cache(model: Llama, batch_size: int, capacity: int) -> Cache:
    """Empty keys and values for `capacity` tokens in each sequence."""
    config = model.config
    shape = (
        config.num_hidden_layers,
        batch_size,
        capacity,
        config.num_key_value_heads,
        config.head_dim,
    )
    return jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)


def extend(
    model: Llama, tokens: Int[Array, "B S"], positions: Int[Array, "B S"], cache: Cache
) -> tuple[Float[Array, "B S D"], Cache]:
    """Hidden states of tokens that follow those in the cache, and the cache with them.

    Args:
      model: the model.
      tokens: new tokens.
      positions: of each new token in its sequence, and so its place in the cache. A token attends
        to the cached positions up to its own; what was in its place before is overwritten.
      cache: keys and values of the positions before.
    """
    rows = jnp.arange(len(tokens))[:, None]

    def attend(q, k, v, layer_cache):
        keys, values = layer_cache
        keys = keys.at[rows, positions].set(k)
        values = values.at[rows, positions].set(v)
        visible = jnp.arange(keys.shape[1]) <= positions[:, None, :, None]
        # cuDNN's attention needs static lengths; a query of one token gains nothing from it.
        out = jax.nn.dot_product_attention(q, keys, values, mask=visible, implementation="xla")
        return out, (keys, values)

    return model.run_layers(tokens, positions, attend, cache)


def generate(
    model: Llama,
    prompts: Int[Array, "B P"],
    *,
    max_new_tokens: int,
    prompt_lengths: Int[Array, " B"] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    key: Key[Array, ""] | None = None,
) -> Int[Array, "B _"]:
    """Continues every prompt by `max_new_tokens` tokens.

    After a token of `eos_token_id` a row holds only `pad_token_id` (the first `eos_token_id`,
    without one).

    Args:
      model: the model.
      prompts: at least one token each, shorter ones filled up at the right with any token.
      max_new_tokens: how many tokens to return for each prompt.
      prompt_lengths: tokens of each prompt; `None` means all P.
      temperature: 0 takes the likeliest token; else tokens are drawn from `softmax(logits /
        temperature)`.
      top_k: draw from so many of the likeliest tokens; `None` from all.
      key: random key of the draws.

    Raises:
      ValueError: the whole would exceed `max_position_embeddings`, an argument is out of its range,
        or a temperature comes without a key.
    """
    batch_size, prompt_size = prompts.shape
    if prompt_size < 1 or max_new_tokens < 1:
        raise ValueError(f"{prompts.shape=} and {max_new_tokens=} must be at least 1")
    if temperature < 0 or (temperature > 0 and key is None):
        raise ValueError(f"{temperature=} must be 0, or positive with a key, got {key=}")
    if top_k is not None and not 1 <= top_k <= model.config.vocab_size:
        raise ValueError(f"{top_k=} must be between 1 and vocab_size={model.config.vocab_size}")
    limit = model.config.max_position_embeddings
    if prompt_size + max_new_tokens > limit:
        raise ValueError(
            f"{prompt_size=} + {max_new_tokens=} exceeds max_position_embeddings={limit}"
        )
    if prompt_lengths is None:
        prompt_lengths = jnp.full((batch_size,), prompt_size, jnp.int32)
    graphdef, state = nnx.split(model)
    key = jax.random.key(0) if key is None else key
    sizes = max_new_tokens, top_k, temperature == 0
    return _generate(graphdef, state, prompts, prompt_lengths, temperature, key, *sizes)


@functools.partial(jax.jit, static_argnums=(0, 6, 7, 8))
def _generate(graphdef, state, prompts, lengths, temperature, key, max_new_tokens, top_k, greedy):
    model: Llama = nnx.merge(graphdef, state)
    batch_size, prompt_size = prompts.shape
    eos = model.config.eos_token_id
    eos = jnp.asarray([] if eos is None else eos, prompts.dtype).reshape(-1)
    fill = model.config.pad_token_id
    if fill is None:
        fill = eos[0] if eos.size else 0

    def choose(hidden, key):
        logits = model.logits(hidden)
        if top_k is not None:
            least = jax.lax.top_k(logits, top_k)[0][..., -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        chosen = (
            jnp.argmax(logits, axis=-1)
            if greedy
            else jax.random.categorical(key, logits / temperature)
        )
        return chosen.astype(prompts.dtype)

    def step(carry, key):
        token, position, finished, cache = carry
        hidden, cache = extend(model, token[:, None], position[:, None], cache)
        following = jnp.where(finished, fill, choose(hidden[:, 0], key))
        return (following, position + 1, finished | jnp.isin(following, eos), cache), following

    cache = init_cache(model, batch_size, prompt_size + max_new_tokens)
    positions = jnp.broadcast_to(jnp.arange(prompt_size, dtype=jnp.int32), prompts.shape)
    hidden, cache = extend(model, prompts, positions, cache)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    first_key, *_ = keys = jax.random.split(key, max_new_tokens)
    first = choose(last, first_key)
    carry = first, lengths.astype(jnp.int32), jnp.isin(first, eos), cache
    _, others = jax.lax.scan(step, carry, keys[1:])
    return jnp.concatenate([first[:, None], others.T], axis=1)
