"""Some tokens of a plan at a time: the first ones in place, and the others by chunks."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.folding import fold_chunks
from pallas_kernels.loss.plan import InPlace, TokenChunks


def over_tokens(
    one_chunk: Callable[[Any, Any], tuple[Any, Any]],
    first_in_place: Callable[[InPlace, Any], tuple[Any, Any]],
    arrays: Any,
    plan: TokenChunks | InPlace,
) -> tuple[Any, Any]:
    """The results of `fold_chunks` with the chunks of a plan.

    Args:
      one_chunk: Function `(chunk, start) -> (summands, parts)`.
      first_in_place: Function `(plan, chunk) -> (summands, parts)` of the tokens in place.
      arrays: Pytree of arrays of tokens.
      plan: Tokens whose dlogits are in memory at a time.
    """
    if not isinstance(plan, InPlace):
        return fold_chunks(one_chunk, arrays, plan.chunk_size)
    chunk_size = plan.chunk_size or len(jax.tree.leaves(arrays)[0])
    first = plan.extent.num_tokens, functools.partial(first_in_place, plan)
    return fold_chunks(one_chunk, arrays, chunk_size, first=first)
