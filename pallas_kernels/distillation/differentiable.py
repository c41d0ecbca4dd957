"""The distillation losses as an operation: when its gradients are made, and how devices share it.

A sum of losses has one cotangent, which is 1 for a loss. So the forward makes the gradients of a
sum while the logits exist, and the backward only multiplies them. Losses that are not added up have
a cotangent each, which the forward does not know. So the forward makes the losses alone, and the
backward computes all logits again.

Each device computes the losses of its own tokens. The vocabulary may be split over mesh axes that
split no tokens. Then the devices add up a few numbers for each token, and `dx`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.distillation import by_tokens
from pallas_kernels.distillation.settings import Settings
from pallas_kernels.layout import Place, Roles, Tokens, Weight
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.counted import compute_counted
from pallas_kernels.loss.differentiable import is_unchecked, roles_of_gradients
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.token_loss import finite_where_not_counted
from pallas_kernels.mapping import Mask
from pallas_kernels.operation import call
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members

_COEFFICIENTS, _BIAS = 2, 3  # positions among the arguments


def sum_of_losses(
    settings: Settings,
    x: Float[Array, "*T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, "*T"],
    *teacher: Array,
    num_axes: int,
) -> Float[Array, "..."]:
    """Sums of `coefficients · loss`, float32.

    A token whose coefficient is 0 adds nothing to sums and gradients, whatever its arrays hold.

    Args:
      settings: Static settings.
      x: Hidden states of the student.
      weight: Output embedding of the student.
      bias: Bias of the student's logits, if there is one.
      coefficients: Factors of the losses, float32.
      *teacher: Hidden states and output embedding of the teacher, and its bias if there is one; or
        its log-probabilities and their columns. They must not have tangents.
      num_axes: Number of leading axes of the tokens that the sums keep: 0 adds up all losses.
    """
    first, last = low_rank.arguments(weight)
    operation = _Distillation(settings, num_axes, is_unchecked(settings.vocab_axes, first))
    biases = () if bias is None else (bias,)
    return call(operation, x, first, coefficients, *biases, *teacher, *last)[0]


def roles_of(settings: Settings, args: Arrays) -> list[Tokens | Weight]:
    """The roles of `(x, weight, coefficients, *bias, *teacher, *frozen weight)`."""
    weight, last = low_rank.roles(settings.is_low_rank, settings.weight_layout, args[0].dtype)
    bias = Weight(("v",))
    roles = [Tokens(("d",)), weight, Tokens(), *[bias] * settings.has_bias]
    if settings.tail is not None:
        return [*roles, Tokens(("k",)), Tokens(("k",)), *last]
    # The teacher has a hidden size of its own.
    axes = tuple(settings.teacher_weight_layout.replace("d", "e"))
    teacher_x = args[len(roles)]
    roles += [Tokens(("e",)), Weight(axes, teacher_x.dtype, by_rows=True)]
    return [*roles, *[bias] * settings.has_teacher_bias, *last]


@dataclasses.dataclass(frozen=True, slots=True)
class _Distillation:
    """Sums of losses of `(x, weight, coefficients, *teacher)`, and of a bias before the teacher.

    Attributes:
      settings: Static settings.
      num_axes: Number of leading axes of the tokens that the sums keep.
      is_unchecked: As `loss.differentiable.is_unchecked` says.
    """

    settings: Settings
    num_axes: int
    is_unchecked: bool

    @property
    def name(self) -> str:
        """The name of the public function."""
        return "linear_distillation_loss" + ("" if self.settings.tail is None else "_top_k")

    @property
    def _is_early(self) -> bool:
        """Whether the forward makes the gradients."""
        return self.num_axes == 0

    def _of_arrays(self, wanted: Mask) -> Mask:
        """Whether the gradients of x, weight and bias are wanted."""
        return (*wanted[:2], self.settings.has_bias and wanted[_BIAS])

    def _partitioned(
        self, wanted: Mask, args: Arrays, *, every_loss: bool
    ) -> tuple[jax.Array, ...]:
        """Losses, and the wanted gradients of x, weight and bias.

        A token that does not count has the loss 0 unless `every_loss`.
        """
        results = Tokens(), *roles_of_gradients(wanted, _BIAS)
        roles = Roles(tuple(roles_of(self.settings, args)), results, parts=("v",))
        return partitioned(
            _of_device,
            (self, wanted, every_loss),
            roles,
            *args,
            manual_parts=(self.settings.vocab_axes,),
        )

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        early = (False,) * 3
        if wanted is not None and self._is_early:
            early = self._of_arrays(wanted)
        # The gradient of a factor is the loss.
        every_loss = wanted is not None and wanted[_COEFFICIENTS]
        loss, *gradients = self._partitioned(early, args, every_loss=every_loss)
        coefficients = args[_COEFFICIENTS]
        loss = finite_where_not_counted(loss, coefficients)
        axes = tuple(range(self.num_axes, coefficients.ndim))
        total = jnp.sum(coefficients * loss, axis=axes)
        return (total,) if wanted is None else (total, loss, *gradients)

    def num_residuals(self, wanted: Mask) -> int:
        return 1 + (sum(self._of_arrays(wanted)) if self._is_early else 0)

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        if self._is_early:
            return results, residuals
        return results, (*residuals, *args)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        assert not any(wanted[_BIAS + self.settings.has_bias :]), "the teacher has no gradient"
        (of_sums,) = cotangents
        assert of_sums is not None
        loss, *rest = saved
        whole = of_sums
        if self.is_unchecked:
            whole = jax.lax.psum(of_sums, self.settings.vocab_axes)
        to_tokens = (..., *(None,) * (loss.ndim - self.num_axes))
        of_arrays = self._of_arrays(wanted)
        gradients = []
        if self._is_early:
            gradients += [g.astype(jnp.float32) * whole for g in rest]
        elif any(of_arrays):
            x, weight, coefficients, *others = rest
            # A token that does not count may have an infinite cotangent.
            of_losses = jnp.where(coefficients == 0, 0.0, coefficients * whole[to_tokens])
            args = x, weight, of_losses, *others
            gradients += self._partitioned(of_arrays, args, every_loss=False)[1:]
        if wanted[_COEFFICIENTS]:
            # Each device has the whole loss of its tokens, and not one for its part of the
            # vocabulary. So this gradient takes the device's share of the cotangent, `of_sums`.
            gradients.insert(sum(wanted[:_COEFFICIENTS]), of_sums[to_tokens] * loss)
        return gradients

    def fold(
        self, wanted: Mask | None, args: Arrays, is_batched: Mask
    ) -> tuple[Operation, Arrays] | None:
        roles = roles_of(self.settings, args)
        weights = [i for i, role in enumerate(roles) if isinstance(role, Weight)]
        if any(is_batched[i] for i in weights):
            return None
        if wanted is not None and self._is_early:
            return None  # each member has gradients of its own
        folded = with_members(args, is_batched, weights=weights)
        return dataclasses.replace(self, num_axes=self.num_axes + 1), folded


def _of_device(key: tuple[_Distillation, Mask, bool], place: Place) -> Callable[..., Arrays]:
    """The losses of a device's tokens, and the wanted gradients of their sum."""
    operation, wanted, every_loss = key
    settings = operation.settings
    (axes,) = place.parts

    def run(*args: jax.Array) -> Arrays:
        x, weight, coefficients, *teacher = args
        bias = teacher.pop(0) if settings.has_bias else None
        layout = settings.weight_layout
        weight, teacher = low_rank.joined(settings.is_low_rank, layout, weight, teacher)
        # Both weights are cast outside of branches, which XLA does not see through.
        weight, of_tokens, of_vocabulary = weight.astype(x.dtype), teacher, []
        if settings.tail is None:
            teacher_x, teacher_weight, *biases = teacher
            of_tokens = [teacher_x]
            of_vocabulary = [teacher_weight.astype(teacher_x.dtype), *biases]

        def compute(x: Any, coefficients: Any, *of_tokens: Any) -> Any:
            losses, gradients = by_tokens.losses_and_gradients(
                settings,
                axes,
                x,
                weight,
                bias,
                coefficients,
                of_tokens,
                of_vocabulary,
                wanted=wanted,
            )
            num_per_token = int(wanted[0])
            return [losses, *gradients[:num_per_token]], gradients[num_per_token:]

        tokens = x, coefficients, *of_tokens
        fills, counts = (0,) * len(tokens), coefficients != 0
        fraction = 1.0 if every_loss else settings.counted_fraction
        losses, *gradients = compute_counted(
            compute, tokens, fills, counts, fraction, place, name=operation.name
        )
        if wanted[0] and not operation.is_unchecked:
            gradients[0] = jax.lax.psum(gradients[0], axes)
        return losses, *gradients

    return run
