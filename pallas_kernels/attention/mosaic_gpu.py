"""Attention of documents as an operation: each device computes its own rows and heads."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from pallas_kernels.attention.backward import attention_backward
from pallas_kernels.attention.bounds import Bounds, whole_rows
from pallas_kernels.attention.config import (
    AttentionConfig,
    KeysConfig,
    forward_config,
    keys_config,
    queries_config,
)
from pallas_kernels.attention.dkdv_kernel import check_keys
from pallas_kernels.attention.dq_kernel import check_queries
from pallas_kernels.attention.forward import (
    DTYPES,
    HEAD_SIZES,
    attention_forward,
    check_forward,
)
from pallas_kernels.attention.key_tiles import QUERIES, Unit
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.arrays import apart_from_stacks
from pallas_kernels.gpu.device import target_device
from pallas_kernels.layout import Place, Roles, Tokens
from pallas_kernels.mapping import Mask
from pallas_kernels.operation import call
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members

_MOST_BLOCKS = 65535  # of an axis of the grid; the rows are an axis
_FEWEST_WARPGROUPS = 2  # of a block in the default parameters; each computes `QUERIES` of a head


def unsupported_reason(
    q: Float[Array, "B S N H"], k: Float[Array, "B S K H"], v: Float[Array, "B S K H"]
) -> str | None:
    """Why the kernels do not take these arguments, or None if they do."""
    dtypes = [a.dtype for a in (q, k, v)]
    if q.dtype not in DTYPES or len(set(dtypes)) > 1:
        return (
            f"q, k and v are {', '.join(map(str, dtypes))}; the kernels take bfloat16 or float16, "
            "the same for all three"
        )
    num_rows, length, num_heads, head_size = q.shape
    group = num_heads // k.shape[2]
    if head_size > HEAD_SIZES[-1]:
        return f"heads have {head_size} numbers; the kernels take up to {HEAD_SIZES[-1]}"
    if length % 8:
        return f"rows have {length} tokens; pad them to a multiple of 8"
    if num_rows > _MOST_BLOCKS:
        return f"there are {num_rows} rows; the kernels take up to {_MOST_BLOCKS}"
    if Unit(length=length, group=group, warpgroups=_FEWEST_WARPGROUPS).num_blocks > _MOST_BLOCKS:
        longest = _MOST_BLOCKS * _FEWEST_WARPGROUPS // group * QUERIES
        return (
            f"rows have {length} tokens; where {group} heads of queries share a head of keys, the "
            f"kernels take up to {longest}"
        )
    return hopper_gemm.unsupported_device(target_device())


def check_launch(
    config: AttentionConfig, q: Float[Array, "B S N H"], k: Float[Array, "B S K H"]
) -> None:
    """Raises ValueError if a kernel cannot be launched with its parameters."""
    head_size, length, group = _head_size_of_kernels(q), q.shape[1], q.shape[2] // k.shape[2]
    for kernel in filter(None, (config.forward, config.dq, config.dkdv)):
        if isinstance(kernel, KeysConfig):
            num_blocks = pl.cdiv(length, kernel.keys)
        else:
            num_blocks = Unit(length=length, group=group, warpgroups=kernel.warpgroups).num_blocks
        if num_blocks > _MOST_BLOCKS:
            raise ValueError(
                f"{kernel} makes {num_blocks} blocks of a row of {length} tokens, and a grid has "
                f"up to {_MOST_BLOCKS}; take more warpgroups"
            )
    if config.forward is not None:
        check_forward(config.forward, q, head_size)
    if config.dq is not None:
        check_queries(config.dq, q, head_size)
    if config.dkdv is not None:
        check_keys(config.dkdv, q, head_size, group)


def attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bounds: Bounds | None,
    *,
    scale: float,
    config: AttentionConfig | None,
) -> Float[Array, "B S N H"]:
    """The attention by the kernels; `unsupported_reason` must be None for the arguments."""
    return call(_Attention(scale, config or AttentionConfig()), q, k, v, *(bounds or ()))[0]


_Q, _K = Tokens(("s", "kv_heads", "g", "h")), Tokens(("s", "kv_heads", "h"))
_LOGSUMEXP, _BOUND = Tokens(("kv_heads", "g", "s")), Tokens(("s",))
PARTS = ("kv_heads",)


@dataclasses.dataclass(frozen=True)
class _Attention:
    """The output of `(q, k, v, begins, ends)`, or of `(q, k, v)` if each row is one document.

    Its functions of a device have queries and output as `[B, S, K, G, H]`, with G = N / K: with an
    axis of the heads of keys, a mesh axis may split all arrays alike. The operation itself has them
    as the caller does. So the caller and the backward keep one array, and not one of each shape.
    The residual is the logsumexp of each token's logits. The members of `jax.vmap` are an axis
    before the rows.
    """

    scale: float
    config: AttentionConfig

    name = "document_attention"

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        """The output, followed by the logsumexp unless `wanted` is None."""
        q, k, v, *bounds = args
        roles = Roles((_Q, _K, _K, *[_BOUND] * len(bounds)), (_Q, _LOGSUMEXP), PARTS)
        out, logsumexp = partitioned(_forward_of, self, roles, _by_keys(q, k), k, v, *bounds)
        out = out.reshape(q.shape)
        return (out,) if wanted is None else (out, logsumexp)

    def num_residuals(self, wanted: Mask) -> int:
        """One, the logsumexp."""
        return 1

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        """`(results, what the backward reads)`."""
        q, k, v, *bounds = args
        # One name, because a `jax.checkpoint` that keeps one of the two runs the kernel again.
        arrays = *apart_from_stacks(results), *residuals
        out, logsumexp = (checkpoint_name(a, "context") for a in arrays)
        return (out,), (q, k, v, out, logsumexp, *bounds)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        """The wanted gradients of `q`, `k` and `v`."""
        (dout,) = cotangents
        assert dout is not None  # JAX asks for no gradient of a result without one
        q, k, v, out, logsumexp, *bounds = saved
        dout, by_keys, out = (_by_keys(a, k) for a in (dout, q, out))
        of_bounds = [_BOUND] * len(bounds)
        roles = Roles((_Q, _Q, _K, _K, _Q, _LOGSUMEXP, *of_bounds), (_Q, _K, _K), PARTS)
        args = dout, by_keys, k, v, out, logsumexp, *bounds
        dq, dk, dv = partitioned(_backward_of, self, roles, *args)
        gradients = dq.reshape(q.shape), dk, dv
        return [g for g, is_wanted in zip(gradients, wanted[:3], strict=True) if is_wanted]

    def fold(self, wanted: Mask | None, args: Arrays, is_batched: Mask) -> tuple[Operation, Arrays]:
        """The same operation, with the members before the rows."""
        return self, with_members(args, is_batched)


def _forward_of(operation: _Attention, place: Place) -> Callable[..., Any]:
    def forward(q: Array, k: Array, v: Array, *bounds: Array) -> tuple[Array, Array]:
        by_heads, k, v = map(_as_wide_as_the_kernels, (_heads(q), k, v))
        config = operation.config.forward or forward_config(
            q.shape[1], k.shape[-1], whole_rows=not bounds
        )
        begins, _ = bounds or whole_rows(*q.shape[:2])
        out, logsumexp = attention_forward(
            by_heads, k, v, begins, scale=operation.scale, config=config
        )
        out = out[..., : q.shape[-1]]
        return out.reshape(q.shape), logsumexp.reshape(len(q), *q.shape[2:4], q.shape[1])

    return _of_all_rows(forward)


def _backward_of(operation: _Attention, place: Place) -> Callable[..., Any]:
    def backward(
        dout: Array, q: Array, k: Array, v: Array, out: Array, logsumexp: Array, *bounds: Array
    ) -> tuple[Array, ...]:
        of_heads = jax.lax.collapse(logsumexp, 1, 3)
        arrays = map(_as_wide_as_the_kernels, (_heads(q), k, v, _heads(out), _heads(dout)))
        by_heads, k, v, out, dout = arrays
        args = by_heads, k, v, out, of_heads, dout, *(bounds or whole_rows(*q.shape[:2]))
        gradients = attention_backward(
            *args,
            scale=operation.scale,
            of_queries=operation.config.dq or queries_config(k.shape[-1]),
            of_keys=operation.config.dkdv or keys_config(k.shape, q.shape[3]),
        )
        dq, dk, dv = (g[..., : q.shape[-1]] for g in gradients)
        return dq.reshape(q.shape), dk, dv

    return _of_all_rows(backward)


def _by_keys(a: Float[Array, "*B S N H"], k: Float[Array, "*B S K H"]) -> Array:
    """The array as `[*B, S, K, G, H]`."""
    return a.reshape(*a.shape[:-2], k.shape[-2], a.shape[-2] // k.shape[-2], a.shape[-1])


def _as_wide_as_the_kernels(a: Float[Array, "B S _ H"]) -> Float[Array, "B S _ _"]:
    """The array with zeros after the numbers of each head. They change no product and no sum."""
    size = _head_size_of_kernels(a)
    return a if size == a.shape[-1] else jnp.pad(a, [(0, 0)] * 3 + [(0, size - a.shape[-1])])


def _head_size_of_kernels(a: Float[Array, "B S _ H"]) -> int:
    return next(size for size in HEAD_SIZES if size >= a.shape[-1])


def _heads(a: Float[Array, "B S K G H"]) -> Float[Array, "B S _ H"]:
    return jax.lax.collapse(a, 2, 4)


def _of_all_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of rows, for arrays that also have axes of members before the axis of rows."""

    def run(q: Array, *others: Array) -> Any:
        leading = q.shape[:-4]
        if (num_rows := math.prod(leading)) > _MOST_BLOCKS:
            raise NotImplementedError(
                f"document_attention: the members of jax.vmap have {num_rows} rows together, and "
                f"the kernels take up to {_MOST_BLOCKS}; map over fewer members at a time"
            )
        rows = (jax.lax.collapse(a, 0, len(leading)) for a in (q, *others))
        return tuple(a.reshape(*leading, *a.shape[1:]) for a in function(*rows))

    return run
