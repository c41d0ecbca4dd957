"""The documents of rows of tokens, in buckets of their lengths.

`packed_attention.py` computes the documents of a bucket in one call. Every document of a call has
room for the same number of tokens, L, and a call has room for 3 S / L documents of a row of S
tokens. So all calls need the same memory:

- The first bucket has the 3 longest documents of each row; L is S.
- The second bucket has the next 12; L is S / 4.
- The third bucket has the next 48; L is S / 16.

The last bucket has all documents that are left, and a loop makes its calls.

No document is too long for its bucket. The i longest documents of a row have at most S tokens
together, so the i-th longest has at most S / i. The second bucket begins with the 4th longest, the
third with the 16th, and so on.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

from pallas_kernels.attention.bounds import bounds_of

_RATIO = 4
# Documents for which a call has room, for each L tokens of a row.
ROOM = _RATIO - 1
# Largest L of the last bucket, where L can be divided so often.
_LAST = 1024


def buckets(sequence_length: int) -> tuple[int, ...]:
    """L of each bucket, the largest first. A row is a multiple of each L.

    The last L is at most 1024, and at most a quarter of a row. But an L that is no multiple of 8 is
    not divided further, because cuDNN takes even lengths.
    """
    lengths = [sequence_length]
    while lengths[-1] > min(_LAST, sequence_length // _RATIO) and lengths[-1] % (2 * _RATIO) == 0:
        lengths.append(lengths[-1] // _RATIO)
    return tuple(lengths)


def documents_in_a_call(bucket: int) -> int:
    """The number of documents of a row for which one call has room, M."""
    return ROOM * _RATIO**bucket


class Documents(NamedTuple):
    """The documents of a batch of rows.

    A row has a place for each document. The places of the first bucket come first. Each bucket has
    `documents_in_a_call` places, and the last one has a multiple of that.

    Attributes:
      positions: Position of each token in its document, from 0.
      places: Place of each token's document.
      begins: Where the document of each place begins, in ascending order within a bucket; S for a
        place without a document.
      lengths: Length of the document of each place; 0 for a place without a document.
    """

    positions: Int32[Array, "B S"]
    places: Int32[Array, "B S"]
    begins: Int32[Array, "B P"]
    lengths: Int32[Array, "B P"]


class Part(NamedTuple):
    """The documents that one call computes.

    Attributes:
      begins: Where a document begins in its row; S for documents that the row lacks.
      lengths: Length of a document, 0 for documents that the row lacks.
      numbers: Index of each token's document among those of the call and row; 0 if the call does
        not compute it.
      is_here: Whether the call computes a token's document.
    """

    begins: Int32[Array, "B M"]
    lengths: Int32[Array, "B M"]
    numbers: Int32[Array, "B S"]
    is_here: Bool[Array, "B S"]


def documents_of(segment_ids: Int[Array, "B S"]) -> Documents:
    """The documents of rows. A document begins wherever `segment_ids` changes along a row."""
    length = segment_ids.shape[1]
    tokens = jnp.arange(length, dtype=jnp.int32)
    starts, ends = bounds_of(segment_ids)
    is_first, lengths = starts == tokens, ends - starts
    # The beginnings, those of the longest documents first.
    keys = jnp.where(is_first, -lengths, 0)
    begins = jnp.where(is_first, tokens, length)
    _, begins = jax.lax.sort((keys, begins), dimension=1, num_keys=1)
    last = len(buckets(length)) - 1
    padding = -(length - _first_place(last)) % documents_in_a_call(last)
    begins = jnp.pad(begins, ((0, 0), (0, padding)), constant_values=length)
    bounds = [_first_place(bucket) for bucket in range(1, last + 1)]
    of_buckets = jnp.split(begins, bounds, axis=1)
    begins = jnp.concatenate([jnp.sort(of_bucket, axis=1) for of_bucket in of_buckets], axis=1)
    all_places = jnp.arange(begins.shape[1], dtype=jnp.int32)
    places_of = lambda begins: jnp.zeros_like(tokens).at[begins].set(all_places, mode="drop")
    places = jnp.take_along_axis(jax.vmap(places_of)(begins), starts, axis=1)
    lengths = jnp.take_along_axis(lengths, jnp.minimum(begins, length - 1), axis=1)
    return Documents(tokens - starts, places, begins, jnp.where(begins < length, lengths, 0))


def part_of(documents: Documents, bucket: int, index: Any) -> Part:
    """The documents of a bucket that its call with this index computes."""
    count = documents_in_a_call(bucket)
    first = _first_place(bucket) + index * count
    begins, lengths = (
        jax.lax.dynamic_slice_in_dim(a, first, count, axis=1)
        for a in (documents.begins, documents.lengths)
    )
    numbers = documents.places - first
    is_here = (numbers >= 0) & (numbers < count)
    return Part(begins, lengths, jnp.where(is_here, numbers, 0), is_here)


def num_calls_of_last(documents: Documents) -> Int32[Array, ""]:
    """The number of calls that the documents of the last bucket need, or 1 if there are none."""
    last = len(buckets(documents.places.shape[1])) - 1
    first = _first_place(last)
    highest = jnp.max(documents.places, initial=first)
    return (highest - first) // documents_in_a_call(last) + 1


def _first_place(bucket: int) -> int:
    return _RATIO**bucket - 1  # the sum of `documents_in_a_call` of the buckets before
