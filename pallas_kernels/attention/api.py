"""Attention of rows that hold several documents, by our own kernels.

It is not the Llama's attention yet, and it has not run on a GPU: the model calls cuDNN
(`models/attention.py`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

from pallas_kernels.attention.backward import BackwardConfig, attention_backward
from pallas_kernels.attention.config import Config, default_config
from pallas_kernels.attention.forward import attention_forward
from pallas_kernels.layout import Place, Roles, Tokens
from pallas_kernels.mapping import Mask
from pallas_kernels.operation import call
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members


class Bounds(NamedTuple):
    """Where the document of each token begins and ends.

    Attributes:
      begins: Index in its row of the first token of the document.
      ends: Index of the token after the last one.
    """

    begins: Int32[Array, "B S"]
    ends: Int32[Array, "B S"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Launch parameters of the kernels. `None` takes the defaults for the head size.

    Attributes:
      forward: Parameters of the forward.
      backward: Parameters of the backward.
    """

    forward: Config | None = None
    backward: BackwardConfig | None = None


def bounds_of(segment_ids: Int[Array, "B S"]) -> Bounds:
    """The bounds of documents. A document begins wherever `segment_ids` changes along a row."""
    length = segment_ids.shape[1]
    tokens = jnp.arange(length, dtype=jnp.int32)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    is_first = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    is_last = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    begins = jax.lax.cummax(jnp.where(is_first, tokens, 0), axis=1)
    ends = jax.lax.cummin(jnp.where(is_last, tokens + 1, length), axis=1, reverse=True)
    return Bounds(begins, ends)


def document_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bounds: Bounds,
    *,
    config: AttentionConfig = AttentionConfig(),
) -> Float[Array, "B S N H"]:
    """The causal attention of each document by itself; logits are divided by √H.

    The kernels take bfloat16 and float16, H of 64 and 128, and S that is a multiple of 8. The
    softmax is computed in float32. Its weights are rounded to the dtype of `v` before the product
    with `v`. The backward takes two kernels and no workspace. The gradients of `k` and `v` are
    added up over heads in float32.

    Args:
      q: Queries.
      k: Keys; N is a multiple of K, and head n of the queries reads head `n // (N // K)`.
      v: Values.
      bounds: Documents of the rows.
      config: Launch parameters.

    Raises:
      NotImplementedError: There is no GPU from Hopper on, or the result is differentiated in
        forward mode, or twice.
      ValueError: The kernels do not take the shapes or dtypes.
    """
    # With an axis of the heads of keys, a mesh axis may split all arrays alike.
    groups = q.shape[2] // k.shape[2]
    by_keys = q.reshape(*q.shape[:2], k.shape[2], groups, q.shape[3])
    return call(_DocumentAttention(config), by_keys, k, v, *bounds)[0].reshape(q.shape)


_Q, _K = Tokens(("s", "kv_heads", "g", "h")), Tokens(("s", "kv_heads", "h"))
_LOGSUMEXP = Tokens(("kv_heads", "g", "s"))
_BOUNDS = (Tokens(("s",)), Tokens(("s",)))
_PARTS = ("kv_heads",)


@dataclasses.dataclass(frozen=True, slots=True)
class _DocumentAttention:
    """The output of `(q, k, v, begins, ends)`.

    Queries and output are `[B, S, K, G, H]`, with G = N / K. The residual is the logsumexp of each
    token's logits, `[B, K, G, S]`. The members of `jax.vmap` are an axis before the rows.
    """

    config: AttentionConfig
    name = "document_attention"

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        roles = Roles((_Q, _K, _K, *_BOUNDS), (_Q, _LOGSUMEXP), _PARTS)
        out, logsumexp = partitioned(_forward_of, self.config, roles, *args)
        return (out,) if wanted is None else (out, logsumexp)

    def num_residuals(self, wanted: Mask) -> int:
        return 1

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        q, k, v, *bounds = args
        return results, (q, k, v, *results, *residuals, *bounds)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        (dout,) = cotangents
        assert dout is not None  # JAX asks for no gradient of a result without one
        roles = Roles((_Q, _Q, _K, _K, _Q, _LOGSUMEXP, *_BOUNDS), (_Q, _K, _K), _PARTS)
        gradients = partitioned(_backward_of, self.config, roles, dout, *saved)
        return [g for g, is_wanted in zip(gradients, wanted[:3], strict=True) if is_wanted]

    def fold(self, wanted: Mask | None, args: Arrays, is_batched: Mask) -> tuple[Operation, Arrays]:
        return self, with_members(args, is_batched)


def _forward_of(config: AttentionConfig, place: Place) -> Callable[..., tuple[Array, Array]]:
    def results(q: Array, k: Array, v: Array, begins: Array, ends: Array) -> tuple[Array, Array]:
        options = {"scale": _scale(q), "config": config.forward or default_config(q.shape[-1])}
        out, logsumexp = attention_forward(_heads(q), k, v, begins, **options)
        return out.reshape(q.shape), logsumexp.reshape(len(q), *q.shape[2:4], -1)

    return _of_all_rows(results)


def _backward_of(
    config: AttentionConfig, place: Place
) -> Callable[..., tuple[Array, Array, Array]]:
    def gradients(
        dout: Array, q: Array, k: Array, v: Array, out: Array, logsumexp: Array, *bounds: Array
    ) -> tuple[Array, Array, Array]:
        of_heads = logsumexp.reshape(len(q), -1, q.shape[1])
        args = _heads(q), k, v, _heads(out), of_heads, _heads(dout), *bounds
        options = {"scale": _scale(q), "config": config.backward}
        dq, dk, dv = attention_backward(*args, **options)
        return dq.reshape(q.shape), dk, dv

    return _of_all_rows(gradients)


def _heads(a: Float[Array, "B S K G H"]) -> Float[Array, "B S _ H"]:
    return jax.lax.collapse(a, 2, 4)


def _scale(q: Float[Array, "... H"]) -> float:
    return q.shape[-1] ** -0.5


def _of_all_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of rows, for arrays that also have axes of members before the axis of rows."""

    def run(q: Array, *others: Array) -> Any:
        leading = q.shape[:-4]
        rows = (jax.lax.collapse(a, 0, len(leading)) for a in (q, *others))
        return tuple(a.reshape(*leading, *a.shape[1:]) for a in function(*rows))

    return run
