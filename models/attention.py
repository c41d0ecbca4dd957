"""Causal attention of whole sequences, and which library computes it."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models.documents import Documents
from models.packed_attention import packed_attention
from models.sharding import tensor_axis
from pallas_kernels.choices import log_once
from pallas_kernels.gpu.device import reason_not_here, target_device


def causal_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    documents: Documents | None,
    implementation: Literal["xla", "cudnn"] | None,
) -> Float[Array, "B S N H"]:
    """The attention of each token to itself and to the earlier tokens of its document.

    Args:
      q: Queries.
      k: Keys, each of which N / K heads of queries share.
      v: Values.
      documents: Documents of the rows; None if each row is one document.
      implementation: `LlamaConfig.attention_implementation`.

    Raises:
      NotImplementedError: There is no cuDNN on a GPU, or `implementation` is "cudnn" and cuDNN does
        not take the arguments, or there are documents and a device's queries have more elements
        than `packed_attention` takes.
    """
    if implementation is None:
        reason = _why_no_cudnn(q)
        implementation = "cudnn" if reason is None else "xla"
        if reason is not None and reason_not_here() is None:
            log_once(f"attention: XLA computes it and keeps all S² scores, because {reason}")
    try:
        if documents is None:
            return _of_jax(q, k, v, None, implementation)
        if implementation == "cudnn" and _has_packed_attention():
            if (reason := _why_refused(q)) is not None:
                raise RuntimeError(f"{reason}.")
            return packed_attention(q, k, v, documents)
        begins = jnp.arange(q.shape[1], dtype=jnp.int32) - documents.positions
        mask = (begins[:, :, None] == begins[:, None, :])[:, None]
        return _of_jax(q, k, v, mask, implementation)
    except RuntimeError as error:
        # XLA's errors are of other classes. This one says why cuDNN cannot compute it.
        if type(error) is not RuntimeError or implementation != "cudnn":
            raise
        raise NotImplementedError(
            f"attention_implementation='cudnn': {error} Set it to 'xla', or leave it None, which "
            "takes what runs here."
        ) from error


def _of_jax(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B 1 S S"] | None,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "B S N H"]:
    """`jax.nn.dot_product_attention`, causal."""
    attend: Any = functools.partial(
        jax.nn.dot_product_attention, is_causal=True, implementation=implementation
    )
    if tensor_axis():
        # cuDNN's gradient rule keeps an empty array. If an empty array leaves a scan inside of a
        # `shard_map`, the compiler of JAX 0.11.2 ends with a segmentation fault. So the backward
        # recomputes arrays that are filled with one value. `packed_attention` keeps no empty array,
        # and inside of this checkpoint the backward would repeat its loop.
        attend = jax.checkpoint(attend, policy=_keep_all_but_fills, prevent_cse=False)
    return attend(q, k, v, mask=mask)


def _keep_all_but_fills(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps all but arrays filled with one value."""
    return primitive.name != "broadcast_in_dim"


def _why_no_cudnn(q: Float[Array, "B S N H"]) -> str | None:
    """Why cuDNN's attention does not take `q`, or None if it does.

    As for the kernels, the default device decides. It may be a GPU that is only compiled for.
    """
    return reason_not_here() or _why_refused(q)


def _why_refused(q: Float[Array, "B S N H"]) -> str | None:
    """Why cuDNN's attention takes no queries of this shape and dtype, or None if it does."""
    _, num_positions, _, head_dim = q.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"cuDNN takes bfloat16 and float16, not {q.dtype}; set dtype='bfloat16'"
    # With 256 channels on an H200 it takes 0.18 of the time of XLA's, and errs as little.
    capability = target_device().capability
    largest = 256 if capability is not None and capability[0] == 9 else 128
    if head_dim % 8 or head_dim > largest:
        return f"cuDNN takes heads of 8, 16, ... or {largest} channels here, not {head_dim}"
    if num_positions % 2:  # JAX's gradient refuses them
        return f"cuDNN takes an even number of positions, not {num_positions}; pad the sequences"
    return None


def _has_packed_attention() -> bool:
    """Whether cuDNN can compute each document of a row by itself. If not, the log says so."""
    capability = target_device().capability
    if capability is not None and capability < (9, 0):
        log_once(
            "attention: cuDNN reads a mask of S² elements for each row of documents, because it "
            "computes each document by itself only from compute capability (9, 0) on, not "
            f"{capability}"
        )
        return False
    return True
