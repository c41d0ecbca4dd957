"""The tokens that attend to each other, in rows of documents."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from pallas_kernels.arguments import check_integer
from pallas_kernels.partition import explicit_splits, split_as

_LARGEST_WINDOW = 2**30  # so that the sum of a token's index and the window fits int32


class Bounds(NamedTuple):
    """The tokens that a token attends to, and the tokens that attend to it.

    Neither bound may fall along a row.

    Attributes:
      begins: Index in the row of the first token that the token attends to: the first token of its
        document or of its window.
      ends: Index in the row of the token after the last one that attends to the token.
    """

    begins: Int32[Array, "B S"]
    ends: Int32[Array, "B S"]


def document_bounds(segment_ids: Int[Array, "B S"], *, window: int | None = None) -> Bounds:
    """The bounds of the documents of rows, or of windows in the documents.

    A document begins wherever `segment_ids` changes along a row. Token t attends to the tokens of
    its document up to t. With a window, it attends to those from `t - window + 1` to t.

    Args:
      segment_ids: Number of each token's document. Neighbouring documents have different numbers.
      window: Number of tokens that a token attends to at most, itself included. `None` is no limit.

    Raises:
      ValueError: `segment_ids` does not have two axes, or `window` is below 1.
      TypeError: `segment_ids` is no array, or its dtype is not of integers or bool, or `window` is
        no integer.
    """
    _check(segment_ids)
    if window is not None:
        check_integer("window", window, remedy="None is no limit")
        if window < 1:
            raise ValueError(f"window={window} must be at least 1; None is no limit")
    rows, _ = explicit_splits(segment_ids)
    segment_ids = split_as((rows, ()), segment_ids)  # cummax along a row needs all of its tokens
    length = segment_ids.shape[1]
    tokens = jnp.arange(length, dtype=jnp.int32)[None]
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    is_last = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    begins = jax.lax.cummax(jnp.where(is_first, tokens, 0), axis=1)
    ends = jax.lax.cummin(jnp.where(is_last, tokens + 1, length), axis=1, reverse=True)
    if window is not None:
        window = min(int(window), _LARGEST_WINDOW)
        begins = jnp.maximum(begins, tokens - (window - 1))
        ends = jnp.minimum(ends, tokens + window)
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
