"""cuDNN's causal attention of rows that hold several documents.

cuDNN gets the beginning and the length of each document, and computes each by itself. So it skips
the pairs of tokens of two documents, and needs no mask of S² elements. But a call has room for a
constant number of documents, and needs memory for that number times the largest length. So there is
a call for each bucket of documents (`documents.py`). Its memory is that of three times the tokens.

JAX has no public function for this attention. The gradient rule of its private function keeps
softmax statistics for every document for which there is room, at the largest length. This module
binds the primitives below that function, in an `Operation` of its own. It keeps one statistic for
each token and head, and each device of a mesh computes its own rows.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import NamedSharding
from jaxtyping import Array, Float, Float32, Int32

from models.documents import ROOM, Documents, Part, buckets, num_calls_of_last, part_of
from pallas_kernels.attention.by_heads import AttentionByHeads
from pallas_kernels.choices import log_once
from pallas_kernels.layout import Place, Tokens, to_spec, to_splits

# cuDNN adds up `dq` in float32, in one array for all documents of a call, and finds a sum in it by
# an index of 32 bits. If there are more sums, `dq` is wrong
# (docs/lab/2026-11-30-buckets-of-documents.md). Each document takes L tokens of this array, rounded
# up to a whole tile.
_MOST_SUMS, _TILE = 2**32, 128


def packed_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    documents: Documents,
) -> Float[Array, "B S N H"]:
    """The causal attention of each document by itself; logits are divided by √H.

    cuDNN takes at most about 1.4 · 10⁹ elements of `q` on a device. With more the call raises, or,
    where a trace cannot know the part of a device, the output is NaN.

    Raises:
      NotImplementedError: A device's queries are too large, or the result is differentiated in
        forward mode, or twice.
      RuntimeError: There is no cuDNN.
    """
    cudnn.check_cudnn_version()
    return _PackedAttention()(_splittable(q, k.shape[2]), k, v, *documents)


def _splittable(q: Float[Array, "B S N H"], num_kv_heads: int) -> Float[Array, "B S N H"]:
    """The queries, with whole heads if the Explicit axes that split them cannot split the keys."""
    mesh, spec = jax.typeof(q).sharding.mesh, jax.typeof(q).sharding.spec
    splits = to_splits(spec, q.ndim)
    num_devices = math.prod(mesh.shape[name] for name in splits[2])
    if num_kv_heads % num_devices == 0:
        return q
    log_once(
        f"packed attention: every device gathers the queries' {q.shape[2]} heads and computes all "
        f"of them, because the mesh axes {splits[2]} split them over {num_devices} devices, which "
        f"do not divide the {num_kv_heads} heads of keys; split the rows over these axes"
    )
    return jax.sharding.reshard(q, NamedSharding(mesh, to_spec((*splits[:2], (), splits[3]))))


@dataclasses.dataclass(frozen=True)
class _PackedAttention(AttentionByHeads):
    name = "packed_attention"
    logsumexp = Tokens(("s", "kv_heads", "g"))
    of_documents = (Tokens(("s",)), Tokens(("s",)), Tokens(("p",)), Tokens(("p",)))

    def local_forward(self, place: Place) -> Callable[..., tuple[Array, Array]]:
        def forward(q: Array, k: Array, v: Array, *arrays: Array) -> tuple[Array, Array]:
            documents = Documents(*arrays)
            if not _fits(q, place):
                return jnp.full_like(q, jnp.nan), jnp.full(q.shape[:-1], jnp.nan, jnp.float32)

            def attend(part: Part, largest: int) -> tuple[Array, Array]:
                primitive = cudnn._dot_product_attention_fwd_p
                out, stats = _bind(primitive, part, largest, q, k, v)
                of_tokens = _of_tokens(stats, part, documents)
                return out.reshape(q.shape), of_tokens.reshape(q.shape[:-1])

            return _over_all(attend, documents)

        return forward

    def local_backward(self, place: Place) -> Callable[..., tuple[Array, ...]]:
        def backward(
            dout: Array, q: Array, k: Array, v: Array, out: Array, logsumexp: Array, *arrays: Array
        ) -> tuple[Array, ...]:
            def gradients(part: Part, largest: int) -> tuple[Array, ...]:
                of_tokens = logsumexp.reshape(*logsumexp.shape[:2], -1)
                stats = _of_documents(of_tokens, part, largest)
                primitive = cudnn._dot_product_attention_bwd_p
                found = _bind(primitive, part, largest, q, k, v, stats, out, dout)
                return tuple(g.reshape(a.shape) for g, a in zip(found, (q, k, v), strict=True))

            return _over_all(gradients, Documents(*arrays))

        return backward


def _fits(q: Array, place: Place) -> bool:
    """Whether cuDNN's indices reach all sums of the gradient of `q`.

    JAX also traces with the arrays of all devices, to find shapes. Nothing reads the results of
    such a trace, so it must not raise. If `q` may be an array of all devices, the answer is False
    in place of an error, and the caller returns NaN.

    Raises:
      NotImplementedError: The indices do not reach all sums, and `q` is a device's part.
    """
    largest = buckets(q.shape[1])[-1]
    num_sums = ROOM * q.size // largest * (-(-largest // _TILE) * _TILE)
    if num_sums <= _MOST_SUMS:
        return True
    mesh = jax.sharding.get_abstract_mesh()
    num_devices = jax.device_count() if mesh.empty else mesh.size
    if place.leading or num_devices == 1 or mesh.are_all_axes_manual:
        raise NotImplementedError(
            f"a device's queries {q.shape} are too many for cuDNN's attention of documents, whose "
            f"{num_sums} sums need indices of more than 32 bits; give a device fewer rows, split "
            "them over more devices, or leave out segment_ids"
        )
    return False


def _over_all[T](attend: Callable[[Part, int], T], documents: Documents) -> T:
    """The results of `attend(part, largest length)` for the tokens of all documents.

    Each result is a tuple of arrays `[B, S, ...]`, with any value for tokens of other documents.
    """
    lengths = buckets(documents.places.shape[1])

    def with_part(bucket: int, index: Any, results: T | None) -> T:
        part = part_of(documents, bucket, index)

        def replaced(old: Array, new: Array) -> Array:
            return jnp.where(jnp.expand_dims(part.is_here, range(2, old.ndim)), new, old)

        found = attend(part, lengths[bucket])
        return found if results is None else jax.tree.map(replaced, results, found)

    results, last = None, len(lengths) - 1
    for bucket in range(len(lengths)):
        results = with_part(bucket, 0, results)
        if bucket in range(2, last, 2):
            # Without a barrier XLA keeps the results of all buckets, and then reads them at once.
            # By the compiler, barriers save 7.3 GiB with a row of 542,720 tokens.
            results = jax.lax.optimization_barrier(results)
    step = lambda index, results: with_part(last, index, results)
    return jax.lax.fori_loop(1, num_calls_of_last(documents), step, results)


def _of_tokens(
    stats: Float32[Array, "_ N L"], part: Part, documents: Documents
) -> Float32[Array, "B S N"]:
    """The statistics of each token, from those of the documents, which are stored by position."""
    stats = stats.reshape(*part.begins.shape, *stats.shape[1:])
    positions = jnp.where(part.is_here, documents.positions, 0)
    of_row = lambda stats, number, position: stats[number, :, position]
    return jax.vmap(of_row)(stats, part.numbers, positions)


def _of_documents(
    stats: Float32[Array, "B S N"], part: Part, largest: int
) -> Float32[Array, "_ N L"]:
    """The statistics of the documents, stored by position; the reverse of `_of_tokens`."""
    tokens = part.begins[:, :, None] + jnp.arange(largest, dtype=jnp.int32)
    of_row = lambda stats, tokens: jnp.moveaxis(stats[tokens], 2, 1)
    of_documents = jax.vmap(of_row)(stats, jnp.minimum(tokens, stats.shape[1] - 1))
    return of_documents.reshape(-1, *of_documents.shape[2:])


def _bind(
    primitive: Any, part: Part, largest: int, q: Array, k: Array, v: Array, *of_backward: Array
) -> Any:
    """cuDNN's forward or backward of the documents of a call.

    cuDNN takes rows as long as the largest document, L, so the tokens of all rows are reshaped to
    rows of L tokens. It finds a document by its offset among all tokens. So a document may go on
    after the end of such a row.
    """
    in_rows = lambda a: a.reshape(-1, largest, math.prod(a.shape[2:-1]), a.shape[-1])
    q, k, v, *rest = (a if a.ndim == 3 else in_rows(a) for a in (q, k, v, *of_backward))
    lengths = part.lengths.reshape(-1, ROOM)
    unused = jnp.zeros(0, q.dtype)
    options: dict[str, Any] = {} if of_backward else {"is_training": True}
    if jax.__version_info__ >= (0, 12):
        options |= {"score_mod_name": None, "score_mod_jaxpr": None}
    return primitive.bind(
        *(q, k, v, unused, lengths, lengths, _offsets(part, q), _offsets(part, k)),
        *(unused, unused, *rest),
        scale=q.shape[-1] ** -0.5,
        seed=0,
        dropout_rate=0.0,
        variadic_args=(False, False),
        mask_type=cudnn.MaskType.PADDING_CAUSAL,
        layout=cudnn.AttentionLayout.BTNH.value,
        sliding_window_length=None,
        **options,
    )


def _offsets(part: Part, x: Float[Array, "R L N H"]) -> Int32[Array, "R _"]:
    """The index of each document's first element among all elements of `x`.

    The first entries are for the documents of all rows, in order. The next one is the size of `x`.
    cuDNN reads no entry after it.
    """
    batch_size, length = part.numbers.shape
    rows = jnp.arange(batch_size, dtype=jnp.int32)[:, None] * length
    padding = (0, len(x))
    begins = jnp.pad((part.begins + rows).reshape(-1), padding, constant_values=batch_size * length)
    return begins.reshape(len(x), -1) * (x.shape[2] * x.shape[3])
