"""Attention as an operation, whatever computes it: each device has its own rows and heads."""

import abc
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from pallas_kernels.layout import Place, Roles, Tokens
from pallas_kernels.mapping import Mask
from pallas_kernels.operation import call
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members

_Q, _K = Tokens(("s", "kv_heads", "g", "h")), Tokens(("s", "kv_heads", "h"))
_PARTS = ("kv_heads",)


class AttentionByHeads(abc.ABC):
    """The output of `(q, k, v, *arrays of the documents)`.

    Queries and output are `[B, S, K, G, H]`, with G = N / K: with an axis of the heads of keys, a
    mesh axis may split all arrays alike. The residual is the logsumexp of each token's logits. The
    members of `jax.vmap` are an axis before the rows.

    Attributes:
      name: Name of the operation.
      logsumexp: Role of the logsumexp.
      of_documents: Roles of the arrays of the documents.
    """

    name: str
    logsumexp: Tokens
    of_documents: tuple[Tokens, ...]

    @abc.abstractmethod
    def local_forward(self, place: Place) -> Callable[..., tuple[Array, ...]]:
        """The function of a device's rows to the output and the logsumexp."""

    @abc.abstractmethod
    def local_backward(self, place: Place) -> Callable[..., tuple[Array, ...]]:
        """The function to the gradients of `q`, `k` and `v`.

        Its arguments are the gradient of the output, `q`, `k`, `v`, the output, the logsumexp, and
        the arrays of the documents.
        """

    def __call__(
        self,
        q: Float[Array, "B S N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K H"],
        *of_documents: jax.Array,
    ) -> Float[Array, "B S N H"]:
        """The attention."""
        num_kv_heads = k.shape[2]
        by_keys = q.reshape(*q.shape[:2], num_kv_heads, q.shape[2] // num_kv_heads, q.shape[3])
        return call(self, by_keys, k, v, *of_documents)[0].reshape(q.shape)

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        """The output, followed by the logsumexp unless `wanted` is None."""
        roles = Roles((_Q, _K, _K, *self.of_documents), (_Q, self.logsumexp), _PARTS)
        out, logsumexp = partitioned(_forward_of, self, roles, *args)
        return (out,) if wanted is None else (out, logsumexp)

    def num_residuals(self, wanted: Mask) -> int:
        """One, the logsumexp."""
        return 1

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        """`(results, what the backward reads)`."""
        q, k, v, *of_documents = args
        return results, (q, k, v, *results, *residuals, *of_documents)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        """The wanted gradients of `q`, `k` and `v`."""
        (dout,) = cotangents
        assert dout is not None  # JAX asks for no gradient of a result without one
        args = (_Q, _Q, _K, _K, _Q, self.logsumexp, *self.of_documents)
        gradients = partitioned(_backward_of, self, Roles(args, (_Q, _K, _K), _PARTS), dout, *saved)
        return [g for g, is_wanted in zip(gradients, wanted[:3], strict=True) if is_wanted]

    def fold(self, wanted: Mask | None, args: Arrays, is_batched: Mask) -> tuple[Operation, Arrays]:
        """The same operation, with the members before the rows."""
        return self, with_members(args, is_batched)


def _forward_of(operation: AttentionByHeads, place: Place) -> Callable[..., Any]:
    return _of_all_rows(operation.local_forward(place))


def _backward_of(operation: AttentionByHeads, place: Place) -> Callable[..., Any]:
    return _of_all_rows(operation.local_backward(place))


def _of_all_rows(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of rows, for arrays that also have axes of members before the axis of rows."""

    def run(q: Array, *others: Array) -> Any:
        leading = q.shape[:-4]
        rows = (jax.lax.collapse(a, 0, len(leading)) for a in (q, *others))
        return tuple(a.reshape(*leading, *a.shape[1:]) for a in function(*rows))

    return run
