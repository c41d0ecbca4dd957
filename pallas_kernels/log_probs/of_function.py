"""Operations that call the caller's function of log-probabilities.

An operation calls the function and differentiates it in the forward. So the forward makes all
gradients, and the backward only multiplies them with the cotangent of the loss.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import Place
from pallas_kernels.log_probs.differentiable import BIAS
from pallas_kernels.log_probs.token_function import TokenFunction
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.differentiable import (
    is_unchecked,
    roles_of_gradients,
    split,
    wanted_arrays,
)
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.plan import Request
from pallas_kernels.mapping import Mask
from pallas_kernels.operation import call
from pallas_kernels.protocol import Arrays, Cotangents, Operation


@dataclasses.dataclass(frozen=True, slots=True)
class OfFunction(abc.ABC):
    """Results of a caller's function, for `(x, weight, labels, *bias, *frozen weight, *data)`.

    Attributes:
      request: Everything that the plan depends on. Each device puts its own shapes in the place of
        those in the request.
      temperature: Divisor of the logits after the softcap.
      function: The caller's function.
      num_arrays: Number of arguments before the data.
      is_unchecked: As `loss.differentiable.is_unchecked` says.
    """

    request: Request
    temperature: float
    function: TokenFunction
    num_arrays: int
    is_unchecked: bool

    name = "linear_token_loss"

    @abc.abstractmethod
    def roles(
        self, num_axes: int, data: Arrays
    ) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """The roles of the data, of the results, and of the gradients of the data.

        Args:
          num_axes: Number of axes of the labels.
          data: Leaves of the function's last argument, and its constants.
        """

    @abc.abstractmethod
    def on_device(self, wanted: Mask | None, place: Place) -> Callable[..., Arrays]:
        """The function of a device's arrays.

        It returns the results, and then the wanted gradients of x, weight, bias and the data.
        """

    def of_arrays(self, wanted: Mask | None) -> Mask:
        """Whether the gradients of x, weight and bias are wanted."""
        return (False,) * 3 if wanted is None else wanted_arrays(wanted[: self.num_arrays], BIAS)

    def of_data(self, wanted: Mask) -> Mask:
        """Whether the gradient of each leaf of the data is wanted, and False for the constants."""
        found = wanted[self.num_arrays :]
        assert not any(self.function.split(found)[1])
        return found

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        """The results, and the wanted gradients of the loss as residuals."""
        arrays, data = args[: self.num_arrays], args[self.num_arrays :]
        roles, results, of_gradients = self.roles(args[2].ndim, data)
        results = [*results, *roles_of_gradients(self.of_arrays(wanted), BIAS)]
        if wanted is not None:
            results += [r for r, w in zip(of_gradients, self.of_data(wanted), strict=True) if w]
        return split(
            self.request,
            _on_device,
            (self, wanted),
            arrays,
            data,
            results,
            num_per_token=1,
            roles_of_others=roles,
        )

    def num_residuals(self, wanted: Mask) -> int:
        """The number of wanted gradients."""
        return sum(self.of_arrays(wanted)) + sum(self.of_data(wanted))

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The results, and the gradients."""
        return results, residuals

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        """The gradients of the loss times its cotangent, in float32."""
        of_loss, *of_aux = cotangents
        assert of_loss is not None and not any(a is not None for a in of_aux)
        whole = of_loss
        if self.is_unchecked:
            whole = jax.lax.psum(of_loss, self.request.settings.vocab_axes)
        num_of_arrays = sum(self.of_arrays(wanted))
        # Each device has the whole gradients of the data, and not summands for its part of the
        # vocabulary. So they take the device's share of the cotangent, `of_loss`.
        factors = [whole if i < num_of_arrays else of_loss for i in range(len(saved))]
        return [g.astype(jnp.float32) * c for g, c in zip(saved, factors, strict=True)]

    def fold(
        self, wanted: Mask | None, args: Arrays, is_batched: Mask
    ) -> tuple[Operation, Arrays] | None:
        """None: the function sees the tokens of one member."""
        return None


def _on_device(key: tuple[OfFunction, Mask | None], place: Place) -> Callable[..., Arrays]:
    operation, wanted = key
    return operation.on_device(wanted, place)


def results_of_function(
    kind: type[OfFunction],
    request: Request,
    x: Float[Array, "*T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, "*T"],
    function: TokenFunction,
    data: Sequence[Array],
    *,
    temperature: float,
) -> tuple[Array, ...]:
    """The loss, then the other results of the function; only the loss has a gradient.

    `kind` is the operation that calls the function, and `data` are the leaves of the function's
    last argument, and its constants. The other arguments are those of `differentiable.log_probs`.
    """
    first, last = low_rank.arguments(weight)
    biases = () if bias is None else (bias,)
    arrays = x, first, labels, *biases, *last
    operation = kind(
        request,
        temperature,
        function,
        len(arrays),
        is_unchecked(request.settings.vocab_axes, first),
    )
    return call(operation, *arrays, *data)
