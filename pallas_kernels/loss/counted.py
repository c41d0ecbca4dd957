"""Computes the tokens that count, in fewer rows than there are tokens.

A token that does not count takes as much time in the matrix products as any other. So the rows of
the tokens that count are gathered, and the results are put back: a read and a write of `[T, D]`
beside products with V columns.

Sizes are static, so the caller names the largest share of tokens that should count. A batch with
more of them is computed whole, by a second program under `jax.lax.cond`. So the share
changes the time and the order of sums. With the kernels a device also rounds its `dweight` to the
dtype of the weight before devices add up theirs, and before a cotangent multiplies it: only some
plans have sums in float32, and both programs return one dtype.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from pallas_kernels.layout import Place
from pallas_kernels.logs import log_once

_TILE = 128  # rows of a tile of the products


def num_rows(num_tokens: int, fraction: float) -> int:
    """Rows for the tokens that count: whole tiles, or all tokens if they would not be fewer."""
    return min(num_tokens, math.ceil(fraction * num_tokens / _TILE) * _TILE)


def where_counted(counts: Bool[Array, " T"], a: Shaped[Array, "T ..."]) -> Shaped[Array, "T ..."]:
    """The array, with 0 for each token that does not count."""
    return jnp.where(counts.reshape(-1, *(1,) * (a.ndim - 1)), a, jnp.zeros((), a.dtype))


@dataclasses.dataclass(frozen=True, slots=True)
class FewRows:
    """Rows for the tokens that count.

    Attributes:
      counts: Whether each token counts.
      rows: Row of each token that counts.
      size: Number of rows, at least the number of tokens that count.
    """

    counts: Bool[Array, " T"]
    rows: Int[Array, " T"]
    size: int

    def take(self, a: Shaped[Array, "T ..."], fill: int) -> Shaped[Array, "size ..."]:
        """The rows of an array of tokens; `fill` in a row that has no token."""
        num_tokens = len(self.counts)
        positions = jnp.full((self.size,), num_tokens, jnp.int32)
        row = jnp.where(self.counts, self.rows, self.size)
        positions = positions.at[row].set(jnp.arange(num_tokens, dtype=jnp.int32), mode="drop")
        return a.at[positions].get(mode="fill", fill_value=fill)

    def put_back(self, a: Shaped[Array, "size ..."]) -> Shaped[Array, "T ..."]:
        """The array of tokens of an array of rows; 0 for a token that does not count."""
        found = a.at[jnp.maximum(self.rows, 0)].get(mode="clip")
        return where_counted(self.counts, found)


def for_few_or_all[T](
    compute: Callable[[FewRows | None], T],
    counts: Bool[Array, " T"],
    fraction: float,
    place: Place,
    *,
    name: str,
    agreeing: Sequence[str] = (),
) -> T:
    """`compute` of the rows of the tokens that count, or of None if they are too many.

    It is `compute(None)`, too, where the vocabulary is split, because its devices exchange
    statistics. The log says so.

    Args:
      compute: Function that returns arrays of the same shapes for rows and for None.
      counts: Whether each of the device's tokens counts.
      fraction: Largest share of the tokens that is computed in fewer rows.
      place: The device's place on the mesh, whose only part is the vocabulary.
      name: Name of the public function, for the log.
      agreeing: Mesh axes whose devices must compute the same, because `compute` exchanges data.
    """
    num_tokens = len(counts)
    size = num_rows(num_tokens, fraction)
    if size == num_tokens:
        return compute(None)
    if any(place.parts):
        log_once(
            f"{name}: counted_fraction={fraction} has no effect, because the vocabulary is split "
            "over devices; all tokens are computed"
        )
        return compute(None)
    rows = jnp.cumsum(counts, dtype=jnp.int32) - 1
    last = jax.lax.pmax(rows[-1], tuple(agreeing))
    few = FewRows(counts, rows, size)
    return jax.lax.cond(last < size, lambda: compute(few), lambda: compute(None))


def compute_counted(
    compute: Callable[..., tuple[Sequence[Array], Sequence[Array]]],
    tokens: Sequence[Shaped[Array, "..."]],
    fills: Sequence[int],
    counts: Bool[Array, "*T"],
    fraction: float,
    place: Place,
    *,
    name: str,
) -> list[Array]:
    """The results of `compute(*tokens)`, where the results of tokens that do not count are 0.

    Args:
      compute: Function of arrays with one axis of rows. It returns arrays of as many rows, and
        other arrays, which must not depend on rows that do not count.
      tokens: Arguments of `compute`, each with all axes of tokens.
      fills: Value of each argument in a row that has no token. Such a row must not count.
      counts: Whether each token counts.
      fraction: As for `for_few_or_all`, and so are the arguments that follow.
      place: The device's place on the mesh.
      name: Name of the public function.
    """
    shape = counts.shape
    flat = [a.reshape(counts.size, *a.shape[len(shape) :]) for a in tokens]

    def run(few: FewRows | None) -> tuple[list[Array], list[Array]]:
        if few is None:
            per_token, others = compute(*flat)
            return list(per_token), list(others)
        per_token, others = compute(*map(few.take, flat, fills))
        return [few.put_back(a) for a in per_token], list(others)

    per_token, others = for_few_or_all(run, counts.reshape(-1), fraction, place, name=name)
    return [a.reshape(*shape, *a.shape[1:]) for a in per_token] + others
