"""Computes the tokens that count, in fewer rows than there are tokens.

A token that does not count takes as much time in the matrix products as any other. So the rows of
the tokens that count are gathered, and the results are put back: a read and a write of `[T, D]`
beside products with V columns.

Sizes are static, so the caller names the largest share of tokens that should count. A batch with
more of them is computed whole, by a second program under `jax.lax.cond`. So the share has no
influence on results, only on time.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Shaped

_TILE = 128  # rows of a tile of the products

type PerToken = Sequence[Shaped[Array, "T ..."]]
type Others = Sequence[Array]


def num_rows(num_tokens: int, fraction: float) -> int:
    """Rows for the tokens that count: whole tiles, or all tokens if they would not be fewer."""
    return min(num_tokens, math.ceil(fraction * num_tokens / _TILE) * _TILE)


def in_fewer_rows(
    compute: Callable[..., tuple[PerToken, Others]],
    tokens: PerToken,
    fills: Sequence[int],
    counts: Bool[Array, " T"],
    fraction: float,
) -> tuple[PerToken, Others]:
    """The results of `compute(*tokens)`, where the results of tokens that do not count are 0.

    Args:
      compute: Function of arrays of rows. It returns arrays of as many rows, and other arrays,
        which must not depend on rows that do not count.
      tokens: Arguments of `compute`.
      fills: Value of each argument in a row that has no token. Such a row must not count.
      counts: Whether each token counts.
      fraction: Largest share of the tokens that is computed in fewer rows.
    """
    num_tokens = len(counts)
    size = num_rows(num_tokens, fraction)
    if size == num_tokens:
        return compute(*tokens)

    # The row of each token that counts, and the token of each row.
    rows = jnp.cumsum(counts, dtype=jnp.int32) - 1
    arange = jnp.arange(num_tokens, dtype=jnp.int32)

    def few() -> tuple[PerToken, Others]:
        positions = jnp.full((size,), num_tokens, jnp.int32)
        positions = positions.at[jnp.where(counts, rows, size)].set(arange, mode="drop")
        per_token, others = compute(
            *(
                a.at[positions].get(mode="fill", fill_value=fill)
                for a, fill in zip(tokens, fills, strict=True)
            )
        )

        def put_back(a: Array) -> Array:
            mask = counts.reshape(-1, *(1,) * (a.ndim - 1))
            return jnp.where(
                mask, a.at[jnp.maximum(rows, 0)].get(mode="clip"), jnp.zeros((), a.dtype)
            )

        return [put_back(a) for a in per_token], list(others)

    def whole() -> tuple[PerToken, Others]:
        per_token, others = compute(*tokens)
        return list(per_token), list(others)

    return jax.lax.cond(rows[-1] < size, few, whole)
