"""The documents of rows of tokens, in buckets of their lengths.

`packed_attention.py` computes documents of a bucket in one call. A call needs memory for the
product of its number of documents and their largest length, L. In the first bucket L is the length
of a row, S. In each further bucket L is a quarter of that before. A call has room for 3 S / L
documents of each row.

A document belongs to the last bucket that takes its length. The last bucket has any number of
documents, and a loop makes its calls. Each other bucket has one call. If a row has more documents
than this call has room for, the rest of them are in the bucket before. For example, with 8192
tokens the second bucket takes documents of 513 to 2048 tokens and has room for 12. If a row has 15
documents of 546 tokens, three of them are in the first bucket.

The first bucket never has more than its three documents. Assume that it had a fourth one. Then it
and perhaps some buckets after it had more documents than room. Let L be the largest length of the
last of these buckets. The next bucket gave none of its documents away, so all documents of these
buckets are longer than L / 4. The buckets have room for 3 + 12 + ... + 3 S / L = 4 S / L - 1 of
them. So there were 4 S / L documents or more, which together are longer than S.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32

_RATIO = 4
# Documents that a call of cuDNN has for each L tokens.
ROOM = _RATIO - 1
# There is no further bucket after one whose documents have at most so many tokens.
_LAST = 1024


def buckets(sequence_length: int) -> tuple[int, ...]:
    """The largest length of the documents of each bucket, L, in falling order.

    A row is a multiple of each L. cuDNN takes even lengths, so a length that is no multiple of 8 is
    not divided further. If the length of a row is none, there is one bucket.
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
      numbers: Place of each token's document among the places of its row. The places of the first
        bucket come first. Each bucket has `documents_in_a_call` places, and the last one has any
        number of them.
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
    is_first = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    starts = jax.lax.cummax(jnp.where(is_first, tokens, 0), axis=1)
    is_last = jnp.pad(is_first[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    ends = jax.lax.cummin(jnp.where(is_last, tokens + 1, length), axis=1, reverse=True)
    lengths = ends - starts
    largest, last = buckets(length), len(buckets(length)) - 1
    bucket_of = jnp.zeros_like(lengths)
    for bucket in range(1, len(largest)):
        bucket_of = jnp.where(lengths <= largest[bucket], bucket, bucket_of)
    numbers, all_begins = jnp.zeros_like(lengths), []
    for bucket in reversed(range(len(largest))):
        is_here = bucket_of == bucket
        indices = jnp.cumsum(is_first & is_here, axis=1, dtype=jnp.int32) - 1
        count = documents_in_a_call(length, bucket)
        if bucket < last:
            bucket_of = jnp.where(is_here & (indices >= count), bucket - 1, bucket_of)
            is_here &= indices < count
        numbers = jnp.where(is_here, indices + _first_place(length, bucket), numbers)
        begins = jnp.sort(jnp.where(is_first & is_here, tokens, length), axis=1)
        if bucket < last:
            all_begins.append(begins[:, :count])
        else:
            padding = ((0, 0), (0, -length % count))
            all_begins.append(jnp.pad(begins, padding, constant_values=length))
    return Documents(tokens - starts, lengths, numbers, tuple(reversed(all_begins)))


def part_of(documents: Documents, bucket: int, index: Any) -> Part:
    """The documents of a bucket that its call with this index computes."""
    length = documents.lengths.shape[1]
    count = documents_in_a_call(length, bucket)
    begins = jax.lax.dynamic_slice_in_dim(documents.begins[bucket], index * count, count, axis=1)
    at_begins = jnp.minimum(begins, length - 1)
    lengths = jnp.take_along_axis(documents.lengths, at_begins, axis=1)
    lengths = jnp.where(begins < length, lengths, 0)
    numbers = documents.numbers - (_first_place(length, bucket) + index * count)
    is_here = (numbers >= 0) & (numbers < count)
    return Part(begins, lengths, jnp.where(is_here, numbers, 0), is_here)


def num_calls_of_last(documents: Documents) -> Int32[Array, ""]:
    """The number of calls that the documents of the last bucket need, or 1 if there are none."""
    length = documents.lengths.shape[1]
    last = len(documents.begins) - 1
    first = _first_place(length, last)
    highest = jnp.max(documents.numbers, initial=first)
    return (highest - first) // documents_in_a_call(length, last) + 1


def _first_place(sequence_length: int, bucket: int) -> int:
    """The place of the first document of a bucket; see `Documents.numbers`."""
    return sum(documents_in_a_call(sequence_length, earlier) for earlier in range(bucket))
