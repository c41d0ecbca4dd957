"""Causal attention of whole sequences, and which library computes it."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from models.sharding import tensor_axis
from pallas_kernels.attention import Bounds, document_attention
from pallas_kernels.attention.api import choose_attention
from pallas_kernels.gpu.device import reason_not_here, target_device
from pallas_kernels.logs import log_once


def causal_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bounds: Bounds | None,
    implementation: Literal["xla", "cudnn", "mosaic_gpu"] | None,
    *,
    window: int | None = None,
) -> Float[Array, "B S N H"]:
    """The attention of each token to itself and to the earlier tokens in its bounds.

    Args:
      q: Queries.
      k: Keys, each of which N / K heads of queries share.
      v: Values.
      bounds: Documents of the rows, or windows in them; None if each token attends to all tokens
        before it.
      implementation: `LlamaConfig.attention_implementation`.
      window: Number of tokens in a window of `bounds`, if each row is one document; None otherwise.
        cuDNN takes this number in the place of a mask.

    Raises:
      NotImplementedError: There is no cuDNN on a GPU, or `implementation` names a library that does
        not take the arguments.
    """
    chosen = _choose(q, k, v, bounds, window) if implementation is None else implementation
    if chosen == "mosaic_gpu":
        try:
            return document_attention(q, k, v, bounds, implementation="mosaic_gpu")
        except NotImplementedError as error:
            if implementation is None:
                raise
            reason = str(error).removeprefix("implementation='mosaic_gpu': ")
            raise NotImplementedError(
                f"attention_implementation='mosaic_gpu': {reason}. Leave it None, which takes what "
                "runs here."
            ) from error
    mask, before_and_after = None, None
    # JAX's attention by XLA takes a window, too, but not in rows of a symbolic length.
    if window is not None and chosen == "cudnn":
        before_and_after = window - 1, 0
    elif bounds is not None:
        # Keys after the query are hidden by `is_causal`.
        keys = jnp.arange(k.shape[1], dtype=bounds.begins.dtype)
        mask = (keys >= bounds.begins[:, :, None])[:, None]
    try:
        return _of_jax(q, k, v, mask, before_and_after, chosen)
    except RuntimeError as error:
        # XLA's errors are of other classes. This one says why cuDNN cannot compute it.
        if type(error) is not RuntimeError or chosen != "cudnn":
            raise
        raise NotImplementedError(
            f"attention_implementation='cudnn': {error} Set it to 'xla', or leave it None, which "
            "takes what runs here."
        ) from error


def _choose(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bounds: Bounds | None,
    window: int | None,
) -> Literal["xla", "cudnn", "mosaic_gpu"]:
    """The library that computes the attention if the configuration names none.

    Our kernels come first, except in rows without bounds where cuDNN is faster. On a GPU the log
    says why a mask is read, or why all scores are kept in memory.
    """
    why_no_cudnn = _why_no_cudnn(q)
    chosen, reason = choose_attention(q, k, v)
    if chosen == "mosaic_gpu":
        is_best = bounds is not None or why_no_cudnn is not None or _is_faster_than_cudnn(q)
        return chosen if is_best else "cudnn"
    reasons = [f"no kernel of document_attention runs: {reason}"]
    if why_no_cudnn is None:
        library, work = "cudnn", "cuDNN reads a mask of S² elements for each row"
    else:
        library, work = "xla", "XLA computes it and keeps all S² scores"
        reasons.append(why_no_cudnn)
    reads_mask = bounds is not None and window is None
    if (reads_mask or library == "xla") and reason_not_here() is None:
        log_once(f"attention: {work}, because {'; and '.join(reasons)}")
    return library


def _is_faster_than_cudnn(q: Float[Array, "B S N H"]) -> bool:
    """Whether our kernels are as fast as cuDNN in rows without bounds, or faster.

    For a query and a key, the gradients of cuDNN take 5 products, and those of our kernels take 7.
    In long rows with heads of 128 the products take most of the time. There cuDNN takes 0.94 to
    0.97 of the time of our kernels (docs/lab/2026-11-30-attention-of-whole-rows.md). Our kernels
    pad heads of other sizes, so there cuDNN takes 0.72 to 0.93 of their time
    (docs/lab/2026-11-30-one-kernel-for-three-gradients.md).
    """
    _, num_positions, _, head_dim = q.shape
    return head_dim == 64 or (head_dim == 128 and num_positions <= 8192)


def _of_jax(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "B 1 S S"] | None,
    before_and_after: tuple[int, int] | None,
    implementation: Literal["xla", "cudnn"],
) -> Float[Array, "B S N H"]:
    """`jax.nn.dot_product_attention`, causal.

    A token attends to `before_and_after` neighbours at most.
    """
    attend: Any = functools.partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        local_window_size=before_and_after,
        implementation=implementation,
    )
    if tensor_axis():
        # cuDNN's gradient rule keeps an empty array. If an empty array leaves a scan inside of a
        # `shard_map`, the compiler of JAX 0.11.2 ends with a segmentation fault. So the backward
        # recomputes arrays that are filled with one value.
        attend = jax.checkpoint(attend, policy=_keep_all_but_fills, prevent_cse=False)
    return attend(q, k, v, mask=mask)


def _keep_all_but_fills(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint` that keeps all but arrays filled with one value."""
    return primitive.name != "broadcast_in_dim"


def _why_no_cudnn(q: Float[Array, "B S N H"]) -> str | None:
    """Why cuDNN's attention does not take `q`, or None if it does.

    As for the kernels, the default device decides. It may be a GPU that is only compiled for.
    """
    if (reason := reason_not_here()) is not None:
        return reason
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
