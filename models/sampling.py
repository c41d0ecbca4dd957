"""Text generation with a key/value cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Key

from models.llama import Llama
from pallas_kernels.arguments import check_number

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
      model: Model to run.
      tokens: New tokens.
      positions: Position of each new token in its sequence, which is its place in the cache. A
        token attends to the cached positions up to its own, or to those of them in its
        `sliding_window`. It replaces what was in its place.
      cache: Keys and values of the positions before.
    """
    rows = jnp.arange(len(tokens))[:, None]

    def attend(q, k, v, layer_cache):
        keys, values = layer_cache
        keys = keys.at[rows, positions].set(k)
        values = values.at[rows, positions].set(v)
        places, last = jnp.arange(keys.shape[1]), positions[:, None, :, None]
        visible = places <= last
        if (window := model.config.sliding_window) is not None:
            visible &= last - places < window
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

    After a token of `eos_token_id`, a row holds only `pad_token_id` or, in a model without one, the
    first `eos_token_id`.

    The call waits for the tokens, to check them. It cannot look at values under a trace (`jax.jit`,
    `jax.vmap`), or in arrays that no process has whole. There a row holds -1 where its logits are
    not finite, and everywhere if its prompt or length is out of range.

    Args:
      model: Model to run.
      prompts: Tokens, at least one a prompt. Fill up shorter prompts at the right, with any token.
      max_new_tokens: Number of tokens to return for each prompt, at least 1.
      prompt_lengths: Number of tokens of each prompt, from 1 to P; `None` means all P.
      temperature: Divisor of the logits, from whose softmax the tokens are drawn; 0 takes the
        likeliest token.
      top_k: Number of the likeliest tokens to draw from; `None` draws from all.
      key: Random key of the draws.

    Raises:
      TypeError: The temperature is no number, or JAX traces it.
      ValueError: An argument is of a wrong kind or out of its range, a token is not in the
        vocabulary, the whole would exceed `max_position_embeddings`, or a temperature comes without
        a key.
      FloatingPointError: Logits were NaN or infinite, so that no token could be chosen. The message
        names the first row and the place of its token.
    """
    _check_options(model.config.vocab_size, max_new_tokens, temperature, top_k, key)
    _check_prompts(model.config.vocab_size, prompts, prompt_lengths)
    batch_size, prompt_size = prompts.shape
    limit = model.config.max_position_embeddings
    if prompt_size + max_new_tokens > limit:
        raise ValueError(
            f"{prompt_size=} + {max_new_tokens=} exceeds max_position_embeddings={limit}; "
            "take shorter prompts, or fewer new tokens"
        )
    if prompt_lengths is None:
        prompt_lengths = jnp.full((batch_size,), prompt_size, jnp.int32)
    graphdef, state = nnx.split(model)
    key = jax.random.key(0) if key is None else key
    sizes = max_new_tokens, top_k, float(temperature) == 0
    tokens = _generate(graphdef, state, prompts, prompt_lengths, temperature, key, *sizes)
    if (values := _values(tokens)) is not None and (values < 0).any():
        row, place = np.argwhere(values < 0)[0]
        raise FloatingPointError(
            f"the logits of new token {place} of row {row} are not finite: the parameters hold NaN "
            f"or infinities, or they overflow in {model.config.dtype}; load other parameters, or "
            "set a dtype with a larger range"
        )
    return tokens


def _check_options(
    vocab_size: int, max_new_tokens: Any, temperature: Any, top_k: Any, key: Any
) -> None:
    for name, value in (("max_new_tokens", max_new_tokens), ("top_k", top_k)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer | None):
            raise ValueError(f"{name}={value!r} must be a whole number")
    if max_new_tokens is None or max_new_tokens < 1:
        raise ValueError(f"{max_new_tokens=} must be at least 1")
    if top_k is not None and not 1 <= top_k <= vocab_size:
        raise ValueError(f"{top_k=} must be between 1 and {vocab_size=}")
    remedy = "take 0 for the likeliest token, or a larger number to draw tokens"
    check_number("temperature", temperature, least=0.0, remedy=remedy)
    if temperature != 0 and key is None:
        raise ValueError(
            f"{temperature=} draws tokens at random, which needs a key; pass a jax.random.key, or "
            "temperature=0"
        )


def _check_prompts(vocab_size: int, prompts: jax.Array, lengths: jax.Array | None) -> None:
    for name, array, ndim in (("prompts", prompts, 2), ("prompt_lengths", lengths, 1)):
        if array is None:
            continue
        if not hasattr(array, "dtype"):
            raise ValueError(
                f"{name} must be an array, got {type(array).__name__}; pass jnp.asarray"
            )
        # Signed, because -1 stands for a missing token.
        if not jnp.issubdtype(array.dtype, jnp.signedinteger):
            raise ValueError(f"{name} must be signed integers such as int32, got {array.dtype}")
        if array.ndim != ndim:
            raise ValueError(f"{name} must have {ndim} axes, got the shape {array.shape}")
    batch_size, prompt_size = prompts.shape
    if batch_size < 1:
        raise ValueError(f"{prompts.shape=}: there must be at least 1 prompt")
    if prompt_size < 1:
        raise ValueError(f"{prompts.shape=}: a prompt must have at least 1 token")
    if jnp.iinfo(prompts.dtype).max < vocab_size - 1:
        raise ValueError(
            f"{prompts.dtype=} does not hold the tokens of {vocab_size=}; cast prompts to int32"
        )
    if (values := _values(prompts)) is not None:
        outside = (values < 0) | (values >= vocab_size)
        if outside.any():
            row, place = np.argwhere(outside)[0]
            raise ValueError(
                f"prompts[{row}, {place}]={values[row, place]} is no token of {vocab_size=}; take "
                "the tokenizer of the model"
            )
    if lengths is None:
        return
    if lengths.shape != (batch_size,):
        raise ValueError(f"{lengths.shape=} must be the number of prompts, {(batch_size,)}")
    if (values := _values(lengths)) is not None:
        outside = (values < 1) | (values > prompt_size)
        if outside.any():
            row = np.flatnonzero(outside)[0]
            raise ValueError(
                f"prompt_lengths[{row}]={values[row]} must be from 1 to {prompt_size}, the length "
                "of prompts"
            )


def _values(array: jax.Array) -> np.ndarray | None:
    """The values of an array; None if they are not known, or no process has all of them."""
    if isinstance(array, Tracer):
        return None
    if isinstance(array, jax.Array):
        if not (array.is_fully_addressable or array.is_fully_replicated):
            return None
    return np.asarray(array)


@functools.partial(jax.jit, static_argnums=(0, 6, 7, 8))
def _generate(graphdef, state, prompts, lengths, temperature, key, max_new_tokens, top_k, greedy):
    model: Llama = nnx.merge(graphdef, state)
    batch_size, prompt_size = prompts.shape
    eos = model.config.eos_token_id
    eos = jnp.asarray([] if eos is None else eos, prompts.dtype).reshape(-1)
    fill = model.config.pad_token_id
    if fill is None:
        fill = eos[0] if eos.size else 0

    # Checked in the program, because `generate` cannot check values under a trace.
    in_range = jnp.all((prompts >= 0) & (prompts < model.config.vocab_size), axis=1)
    in_range &= (lengths >= 1) & (lengths <= prompt_size)

    def choose(hidden, key):
        logits = model.logits(hidden)
        good = in_range & jnp.all(jnp.isfinite(logits), axis=-1)
        if top_k is not None:
            least = jax.lax.top_k(logits, top_k)[0][..., -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if greedy:
            chosen = jnp.argmax(logits, axis=-1)
        else:
            # Now no logit is above 0, so a small temperature cannot turn one into +infinity.
            logits -= jnp.max(logits, axis=-1, keepdims=True)
            chosen = jax.random.categorical(key, logits / temperature)
        return jnp.where(good, chosen, -1).astype(prompts.dtype)

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
