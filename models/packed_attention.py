"""cuDNN's causal attention of rows that hold several documents.

cuDNN computes each document by itself, from where it begins and how long it is. So it skips the
pairs of tokens of two documents, and needs no mask of S² elements. A call has room for M documents
of each row, a constant, and its statistics have M times as many elements as those of whole rows. So
a call computes M documents of every row, and a loop calls again for the rows that have more. The
backward keeps the statistics of each token alone.

JAX has no public function for it, and the gradient of its own function keeps the statistics of M
documents. This module makes an `Operation` of the primitives below that function. So each device of
a mesh computes its own rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels.layout import Place, Roles, Tokens
from pallas_kernels.mapping import Mask
from pallas_kernels.operation import call
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members

# Forward and backward of 4 x 4096 tokens and 32 heads of 64 channels take 1.04 ms on an H200 with
# M = 8. Room for each further document costs 0.025 ms. Another call with M = 8 costs 0.30 ms, as
# much as room for 12 documents (docs/lab/2026-11-29-rows-of-documents.md). With M = 64 the
# statistics have as many bytes as queries of 128 channels.
_LEAST, _TOKENS_EACH, _MOST = 8, 512, 64


def documents_at_a_time(sequence_length: int) -> int:
    """The number of documents of a row that one call of cuDNN computes, M."""
    return min(max(_LEAST, sequence_length // _TOKENS_EACH), _MOST)


class Documents(NamedTuple):
    """The documents of a batch of rows.

    Attributes:
      numbers: Index of each token's document in its row.
      positions: Position of each token in its document, from 0.
      begins: Where each document of a row begins, then S for every document that the row lacks.
    """

    numbers: Int32[Array, "B S"]
    positions: Int32[Array, "B S"]
    begins: Int32[Array, "B _"]

    def some(self, first: Int[Array, ""] | int) -> tuple[Int32[Array, "B M"], Int32[Array, "B M"]]:
        """Where M documents begin, and their lengths, which are 0 for those that a row lacks."""
        count = documents_at_a_time(self.numbers.shape[1])
        bounds = jax.lax.dynamic_slice_in_dim(self.begins, first, count + 1, axis=1)
        return bounds[:, :-1], jnp.diff(bounds, axis=1)


def documents_of(segment_ids: Int[Array, "B S"]) -> Documents:
    """The documents of rows. A document begins wherever `segment_ids` changes along a row."""
    length = segment_ids.shape[1]
    count = documents_at_a_time(length)
    tokens = jnp.arange(length, dtype=jnp.int32)
    is_first = jnp.diff(segment_ids, axis=1, prepend=segment_ids[:, :1] - 1) != 0
    numbers = jnp.cumsum(is_first, axis=1, dtype=jnp.int32) - 1
    starts = jax.lax.cummax(jnp.where(is_first, tokens, 0), axis=1)
    begins = jnp.sort(jnp.where(is_first, tokens, length), axis=1)
    padding = -length % count + 1
    begins = jnp.pad(begins, ((0, 0), (0, padding)), constant_values=length)
    return Documents(numbers, tokens - starts, begins)


def packed_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    documents: Documents,
) -> Float[Array, "B S N H"]:
    """The causal attention of each document by itself; logits are divided by √H.

    If a device's queries have 2³¹ elements or more, it raises an error. Where JAX does not tell how
    the arrays are split, the output is NaN instead.

    Raises:
      NotImplementedError: A device's queries are too large, or the result is differentiated in
        forward mode, or twice.
      RuntimeError: There is no cuDNN.
    """
    cudnn.check_cudnn_version()
    return call(_PackedAttention(), q, k, v, *documents)[0]


_Q, _K, _LOGSUMEXP = Tokens(("s", "n", "h")), Tokens(("s", "k", "h")), Tokens(("s", "n"))
_DOCUMENTS = (Tokens(("s",)), Tokens(("s",)), Tokens(("m",)))


@dataclasses.dataclass(frozen=True, slots=True)
class _PackedAttention:
    """The output of `(q, k, v, *documents)`.

    The residual is the logsumexp of each token's logits, `[B, S, N]`. The members of `jax.vmap` are
    an axis before the rows.
    """

    name = "packed_attention"

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        roles = Roles((_Q, _K, _K, *_DOCUMENTS), (_Q, _LOGSUMEXP))
        out, logsumexp = partitioned(_forward_of, None, roles, *args)
        return (out,) if wanted is None else (out, logsumexp)

    def num_residuals(self, wanted: Mask) -> int:
        return 1

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        return results, (*args, *results, *residuals)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        (dout,) = cotangents
        assert dout is not None  # JAX asks for no gradient of a result without one
        roles = Roles((_Q, _K, _K, *_DOCUMENTS, _Q, _LOGSUMEXP, _Q), (_Q, _K, _K))
        gradients = partitioned(_backward_of, None, roles, *saved, dout)
        return [g for g, is_wanted in zip(gradients, wanted[:3], strict=True) if is_wanted]

    def fold(self, wanted: Mask | None, args: Arrays, is_batched: Mask) -> tuple[Operation, Arrays]:
        return self, with_members(args, is_batched)


def _forward_of(_: None, place: Place) -> Callable[..., tuple[Array, Array]]:
    def forward(q: Array, k: Array, v: Array, *arrays: Array) -> tuple[Array, Array]:
        documents = Documents(*arrays)
        if not _fits(q, place):
            return jnp.full_like(q, jnp.nan), jnp.full(q.shape[:3], jnp.nan, jnp.float32)

        def some(first: Any) -> tuple[Array, Array]:
            out, stats = _bind(cudnn._dot_product_attention_fwd_p, q, k, v, documents, first)
            return out, _of_tokens(stats, documents, first)

        return _over_all(some, documents)

    return _of_all_rows(forward)


def _backward_of(_: None, place: Place) -> Callable[..., tuple[Array, Array, Array]]:
    def backward(q: Array, k: Array, v: Array, *arrays: Array) -> tuple[Array, Array, Array]:
        *of_documents, out, logsumexp, dout = arrays
        documents = Documents(*of_documents)

        def some(first: Any) -> tuple[Array, Array, Array]:
            stats = _of_documents(logsumexp, documents, first)
            primitive = cudnn._dot_product_attention_bwd_p
            dq, dk, dv = _bind(primitive, q, k, v, documents, first, stats, out, dout)
            return dq, dk, dv

        return _over_all(some, documents)

    return _of_all_rows(backward)


def _of_all_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of rows, for arrays that also have axes of members before the axis of rows."""

    def run(q: Array, *others: Array) -> Any:
        leading = q.shape[:-3]
        rows = (jax.lax.collapse(a, 0, len(leading)) for a in (q, *others))
        return tuple(a.reshape(*leading, *a.shape[1:]) for a in function(*rows))

    return run


def _fits(q: Array, place: Place) -> bool:
    """Whether int32 has the offsets into the queries.

    Where JAX traces the arrays of all devices, the answer may be False, and the results are not
    used. Where it cannot be known whether `q` is a device's part, a device has NaN.

    Raises:
      NotImplementedError: int32 is too small, and `q` is a device's part.
    """
    if q.size < 2**31:
        return True
    mesh = jax.sharding.get_abstract_mesh()
    num_devices = jax.device_count() if mesh.empty else mesh.size
    if place.leading or num_devices == 1 or mesh.are_all_axes_manual:
        raise NotImplementedError(
            "cuDNN finds documents in fewer than 2**31 elements, and a device's queries "
            f"{q.shape} have {q.size}; give a device fewer rows, or split them over more devices"
        )
    return False


def _over_all[T](some: Callable[[Any], T], documents: Documents) -> T:
    """The results of `some(first)`, of M documents from `first`, for the tokens of all documents.

    Each result is a tuple of arrays `[B, S, ...]`, with any value for tokens of other documents.
    """
    count = documents_at_a_time(documents.numbers.shape[1])

    def step(i: Array, results: T) -> T:
        is_here = documents.numbers // count == i

        def replaced(old: Array, new: Array) -> Array:
            return jnp.where(jnp.expand_dims(is_here, range(2, old.ndim)), new, old)

        return jax.tree.map(replaced, results, some(i * count))

    num_steps = jnp.max(documents.numbers[:, -1]) // count + 1
    return jax.lax.fori_loop(1, num_steps, step, some(0))


def _of_tokens(
    stats: Float32[Array, "BM N S"], documents: Documents, first: Any
) -> Float32[Array, "B S N"]:
    """The statistics of each token, from those of M documents, which are stored by position."""
    batch_size = len(documents.numbers)
    stats = stats.reshape(batch_size, -1, *stats.shape[1:])
    numbers = jnp.clip(documents.numbers - first, 0, stats.shape[1] - 1)
    of_row = lambda stats, number, position: stats[number, :, position]
    return jax.vmap(of_row)(stats, numbers, documents.positions)


def _of_documents(
    stats: Float32[Array, "B S N"], documents: Documents, first: Any
) -> Float32[Array, "BM N S"]:
    """The statistics of M documents, stored by position; the reverse of `_of_tokens`."""
    length = stats.shape[1]
    begins, _ = documents.some(first)
    tokens = jnp.minimum(begins[:, :, None] + jnp.arange(length, dtype=jnp.int32), length - 1)
    of_row = lambda stats, tokens: jnp.moveaxis(stats[tokens], 2, 1)
    of_documents = jax.vmap(of_row)(stats, tokens)
    return of_documents.reshape(-1, *of_documents.shape[2:])


def _bind(
    primitive: Any,
    q: Array,
    k: Array,
    v: Array,
    documents: Documents,
    first: Any,
    *of_backward: Array,
) -> Any:
    """cuDNN's forward or backward of M documents of each row, from `first`."""
    begins, lengths = documents.some(first)
    unused = jnp.zeros(0, q.dtype)
    options: dict[str, Any] = {} if of_backward else {"is_training": True}
    if jax.__version_info__ >= (0, 12):
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return primitive.bind(
        *(q, k, v, unused, lengths, lengths, _offsets(begins, q), _offsets(begins, k)),
        *(unused, unused, *of_backward),
        scale=q.shape[-1] ** -0.5,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **options,
    )


def _offsets(begins: Int32[Array, "B M"], x: Float[Array, "B S N H"]) -> Int32[Array, "B M+1"]:
    """The index of each document's first element among all elements of `x`.

    The first B M entries are for the documents of all rows, in order. The next one is the size of
    `x`. cuDNN reads no entry after it.
    """
    batch_size, length, *_ = x.shape
    rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None] * length
    tokens = jnp.pad(
        (begins + rows).reshape(-1), (0, batch_size), constant_values=batch_size * length
    )
    size = x.shape[2] * x.shape[3]
    return tokens.reshape(batch_size, -1) * size
