"""The methods that an operation has, for `operation.py`, and the types of their arguments."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from pallas_kernels.mapping import Mask

type Arrays = Sequence[jax.Array]
# One for each result. A cotangent that is None is 0.
type Cotangents = Sequence[jax.Array | None]


@runtime_checkable  # for the checks of types in tests
class Operation(Protocol):
    """A differentiable function of arrays.

    An operation is static: frozen, hashable, and equal to another with the same options. Its `repr`
    names all options, because it becomes a part of the compiled program's text.
    """

    @property
    def name(self) -> str:
        """The name in errors and profiles."""
        ...

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        """The results, followed by the residuals unless `wanted` is None.

        Args:
          wanted: Arguments whose gradients will be asked for; None if no gradient will be.
          *args: Arguments of the operation.
        """
        ...

    def num_residuals(self, wanted: Mask) -> int:
        """The number of residuals that follow the results."""
        ...

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        """`(results, what the backward reads)`.

        An operation may give these arrays names here, for the policies of `jax.checkpoint`.
        """
        ...

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        """The gradients of the wanted arguments, of any dtype."""
        ...

    def fold(
        self, wanted: Mask | None, args: Arrays, is_batched: Mask
    ) -> "tuple[Operation, Arrays] | None":
        """One call that computes all members of a batch, or None if there is no such call.

        Args:
          wanted: Mask with which `forward` was called.
          args: Arguments, with the batch as axis 0 of those that have it.
          is_batched: Arguments that have it.

        Returns:
          An operation and its arguments. All its results have the batch as axis 0.
        """
        ...


@runtime_checkable
class HasTangent(Operation, Protocol):
    """An operation with forward mode and second derivatives, which plain JAX computes.

    `Operation.saved` takes the same residuals whatever is wanted.
    """

    def tangent(self, wanted: Mask, saved: Arrays, tangents: Arrays) -> Arrays:
        """The tangents of the results, in plain JAX, which JAX differentiates further.

        Residuals have no tangents. So this function reads no residual, and computes the same
        numbers again from the other saved arrays.

        Args:
          wanted: Arguments that have a tangent.
          saved: Arrays that the backward reads.
          tangents: Tangents of the wanted arguments, of any dtype.
        """
        ...


def with_members(args: Arrays, is_batched: Mask, weights: Sequence[int] = ()) -> list[jax.Array]:
    """The arguments of a call that computes all members of a batch, for `Operation.fold`.

    Args:
      args: Arguments, with the batch as axis 0 of those that have it.
      is_batched: Arguments that have it.
      weights: Positions of the arguments that all members share. The others are repeated.
    """
    size = next(len(a) for a, b in zip(args, is_batched, strict=True) if b)
    return [
        a if b or i in weights else jnp.broadcast_to(a, (size, *a.shape))
        for i, (a, b) in enumerate(zip(args, is_batched, strict=True))
    ]
