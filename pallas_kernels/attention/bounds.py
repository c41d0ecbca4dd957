"""Where the documents of rows of tokens begin and end."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from pallas_kernels.partition import explicit_splits, split_as


class Bounds(NamedTuple):
    """Where the document of each token begins and ends.

    Attributes:
      begins: Index in the row of the first token of the document.
      ends: Index in the row of the token after the last token of the document.
    """

    begins: Int32[Array, "B S"]
    ends: Int32[Array, "B S"]


def document_bounds(segment_ids: Int[Array, "B S"]) -> Bounds:
    """Where the document of each token begins and ends.

    A document begins wherever `segment_ids` changes along a row.

    Args:
      segment_ids: Number of each token's document. Neighbouring documents have different numbers.

    Raises:
      ValueError: `segment_ids` does not have two axes.
      TypeError: `segment_ids` is no array, or its dtype is not of integers or bool.
    """
    _check(segment_ids)
    rows, _ = explicit_splits(segment_ids)
    segment_ids = split_as((rows, ()), segment_ids)  # cummax along a row needs all of its tokens
    length = segment_ids.shape[1]
    tokens = jnp.arange(length, dtype=jnp.int32)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    is_last = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    begins = jax.lax.cummax(jnp.where(is_first, tokens, 0), axis=1)
    ends = jax.lax.cummin(jnp.where(is_last, tokens + 1, length), axis=1, reverse=True)
    return Bounds(begins, ends)


def whole_rows(batch_size: int, length: int) -> Bounds:
    """The bounds of rows of one document."""
    begins = jnp.zeros((batch_size, length), jnp.int32)
    return Bounds(begins, jnp.full_like(begins, length))


def _check(segment_ids: Any) -> None:
    if not (hasattr(segment_ids, "shape") and hasattr(segment_ids, "dtype")):
        kind = type(segment_ids).__name__
        raise TypeError(f"segment_ids must be an array, got a {kind}; make it a jax.Array")
    dtype = segment_ids.dtype
    # NaN differs from NaN, and large numbers in floating dtypes are equal to their neighbours.
    if not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
        raise TypeError(f"segment_ids is {dtype}, not of integers; cast it to int32")
    if len(segment_ids.shape) != 2:
        raise ValueError(f"segment_ids must be [B, S], got {segment_ids.shape}")
