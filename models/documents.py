"""The documents of rows of tokens, in buckets of their lengths.

`packed_attention.py` computes the documents of a bucket in one call, which needs memory for the
product of their number and their largest length. The largest length of the first bucket is that of
a row, S. In each further bucket it is a quarter of the one before. A bucket has the documents that
are too long for the next one. So a row has at most three documents of the first bucket, and fewer
than 4 S / L of a bucket whose largest length is L. The last bucket has any number of documents,
down to one token. One call computes at most 3 S / L of each row, and a loop computes the rest.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

_RATIO = 4
# Documents that a call of cuDNN has for each L tokens.
ROOM = _RATIO - 1
# The last bucket has the documents of at most so many tokens, or of a quarter of a row.
_LAST = 1024


def buckets(sequence_length: int) -> tuple[int, ...]:
    """The largest length of the documents of each bucket, L, in falling order.

    A row is a multiple of each L. cuDNN takes even lengths, so a length that is no multiple of 8 is
    the only one.
    """
    lengths = [sequence_length]
    while lengths[-1] > min(_LAST, sequence_length // _RATIO) and lengths[-1] % (2 * _RATIO) == 0:
        lengths.append(lengths[-1] // _RATIO)
    return tuple(lengths)


def documents_in_a_call(sequence_length: int, bucket: int) -> int:
    """The number of documents of a row that one call computes, M."""
    return ROOM * (sequence_length // buckets(sequence_length)[bucket])


class Documents(NamedTuple):
    """The documents of a batch of rows.

    Attributes:
      positions: Position of each token in its document, from 0.
      lengths: Length of each token's document.
      numbers: Index of each token's document among those of its row and bucket.
      begins: For each bucket, where its documents begin in each row, in rising order, then S for
        every document that the row lacks. Their number is a multiple of `documents_in_a_call`.
    """

    positions: Int32[Array, "B S"]
    lengths: Int32[Array, "B S"]
    numbers: Int32[Array, "B S"]
    begins: tuple[Int32[Array, "B _"], ...]


class Part(NamedTuple):
    """The documents that one call computes.

    Attributes:
      begins: Where a document begins in its row; S for documents that the row lacks.
      lengths: Length of a document, 0 for documents that the row lacks.
      numbers: Index of each token's document among those of the call and row.
      is_here: Whether the call computes a token's document. If not, its number is of no use.
    """

    begins: Int32[Array, "B M"]
    lengths: Int32[Array, "B M"]
    numbers: Int32[Array, "B S"]
    is_here: Bool[Array, "B S"]


def documents_of(segment_ids: Int[Array, "B S"]) -> Documents:
    """The documents of rows. A document begins wherever `segment_ids` changes along a row."""
    length = segment_ids.shape[1]
    tokens = jnp.arange(length, dtype=jnp.int32)
    is_first = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    starts = jax.lax.cummax(jnp.where(is_first, tokens, 0), axis=1)
    is_last = jnp.pad(is_first[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    ends = jax.lax.cummin(jnp.where(is_last, tokens + 1, length), axis=1, reverse=True)
    lengths = ends - starts
    numbers, all_begins = jnp.zeros_like(lengths), []
    for bucket in range(len(buckets(length))):
        is_here = _is_in_bucket(lengths, bucket)
        numbers = jnp.where(is_here, jnp.cumsum(is_first & is_here, axis=1) - 1, numbers)
        begins = jnp.sort(jnp.where(is_first & is_here, tokens, length), axis=1)
        count = documents_in_a_call(length, bucket)
        if bucket + 1 == len(buckets(length)):
            padding = ((0, 0), (0, -length % count))
            all_begins.append(jnp.pad(begins, padding, constant_values=length))
        else:
            all_begins.append(begins[:, :count])
    return Documents(tokens - starts, lengths, numbers, tuple(all_begins))


def part_of(documents: Documents, bucket: int, index: Any) -> Part:
    """The documents of a bucket that its call with this index computes."""
    length = documents.lengths.shape[1]
    count = documents_in_a_call(length, bucket)
    begins = jax.lax.dynamic_slice_in_dim(documents.begins[bucket], index * count, count, axis=1)
    at_begins = jnp.minimum(begins, length - 1)
    lengths = jnp.take_along_axis(documents.lengths, at_begins, axis=1)
    is_here = _is_in_bucket(documents.lengths, bucket) & (documents.numbers // count == index)
    lengths = jnp.where(begins < length, lengths, 0)
    return Part(begins, lengths, documents.numbers % count, is_here)


def num_calls(documents: Documents, bucket: int) -> Int32[Array, ""]:
    """The number of calls that the documents of a bucket need, or 1 if there are none."""
    is_here = _is_in_bucket(documents.lengths, bucket)
    count = documents_in_a_call(documents.lengths.shape[1], bucket)
    return jnp.max(jnp.where(is_here, documents.numbers, 0)) // count + 1


def _is_in_bucket(lengths: Int32[Array, "B S"], bucket: int) -> Bool[Array, "B S"]:
    largest = (*buckets(lengths.shape[1]), 0)
    return (largest[bucket + 1] < lengths) & (lengths <= largest[bucket])
