"""The distillation losses as an operation: when its gradients are made, and how devices share it.

A sum of losses has one cotangent, which is 1 for a loss. So the forward makes the gradients of a
sum while the logits exist, and the backward only multiplies them. Losses that are not added up have
a cotangent each, which the forward does not know. So the forward makes the losses alone, and the
backward computes all logits again.

Each device computes the losses of its own tokens. The vocabulary may be split over mesh axes that
split no tokens. Then the devices add up a few numbers for each token, and `dx`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.distillation import xla
from pallas_kernels.distillation.settings import Settings
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.counted import fraction_in_effect, in_fewer_rows
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.operation import Mask, Operation, call, with_members
from pallas_kernels.partition import GradientOf, Place, Roles, Tokens, Weight, partitioned

_WEIGHT, _TEACHER_WEIGHT = 1, 4  # positions among the arguments


def sum_of_losses(
    settings: Settings,
    x: Float[Array, "*T D"],
    weight: Embedding,
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
      coefficients: Factors of the losses, float32.
      *teacher: Hidden states and output embedding of the teacher, or its log-probabilities and
        their columns. They must not have tangents.
      num_axes: Number of leading axes of the tokens that the sums keep: 0 adds up all losses.
    """
    first, last = low_rank.arguments(weight)
    return call(_Distillation(settings, num_axes), x, first, coefficients, *teacher, *last)[0]


def roles_of(settings: Settings, x: Any, teacher: Sequence[Any]) -> list[Tokens | Weight]:
    """The roles of `(x, weight, coefficients, *teacher)`, and of the frozen weight if there is."""
    weight, last = low_rank.roles(settings.is_low_rank, settings.weight_layout, x.dtype)
    roles = [Tokens(("d",)), weight, Tokens()]
    if settings.teacher_weight_layout is None:
        return [*roles, Tokens(("k",)), Tokens(("k",)), *last]
    # The teacher has a hidden size of its own.
    axes = tuple(settings.teacher_weight_layout.replace("d", "e"))
    return [*roles, Tokens(("e",)), Weight(axes, teacher[0].dtype, by_rows=True), *last]


@dataclasses.dataclass(frozen=True, slots=True)
class _Distillation:
    """Sums of losses of `(x, weight, coefficients, *teacher)`.

    Attributes:
      settings: Static settings.
      num_axes: Number of leading axes of the tokens that the sums keep.
    """

    settings: Settings
    num_axes: int

    name = "linear_distillation_loss"

    @property
    def _is_early(self) -> bool:
        """Whether the forward makes the gradients."""
        return self.num_axes == 0

    def _partitioned(
        self, wanted: Mask, args: Sequence[jax.Array], *, every_loss: bool
    ) -> tuple[jax.Array, ...]:
        """Losses and wanted gradients.

        A token that does not count has the loss 0 unless `every_loss`.
        """
        x, _, _, *teacher = args
        gradients = [Tokens(("d",))] * wanted[0] + [GradientOf(_WEIGHT)] * wanted[1]
        roles = Roles(
            tuple(roles_of(self.settings, x, teacher)), (Tokens(), *gradients), parts=("v",)
        )
        return partitioned(_of_device, (self.settings, wanted, every_loss), roles, *args)

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        early = (False, False) if wanted is None or not self._is_early else wanted[:2]
        # The gradient of a factor is the loss.
        every_loss = wanted is not None and wanted[2]
        loss, *gradients = self._partitioned(early, args, every_loss=every_loss)
        coefficients = args[2]
        # Otherwise infinity or NaN times a coefficient of 0 would make the sum NaN.
        loss = jnp.where((coefficients == 0) & ~jnp.isfinite(loss), 0.0, loss)
        axes = tuple(range(self.num_axes, coefficients.ndim))
        total = jnp.sum(coefficients * loss, axis=axes)
        return (total,) if wanted is None else (total, loss, *gradients)

    def num_residuals(self, wanted: Mask) -> int:
        return 1 + (sum(wanted[:2]) if self._is_early else 0)

    def saved(
        self,
        wanted: Mask,
        args: Sequence[jax.Array],
        results: Sequence[jax.Array],
        residuals: Sequence[jax.Array],
    ) -> tuple[Sequence[jax.Array], Sequence[jax.Array]]:
        if self._is_early:
            return results, residuals
        return results, (*residuals, *args)

    def backward(
        self, wanted: Mask, saved: Sequence[jax.Array], cotangents: Sequence[jax.Array | None]
    ) -> Sequence[jax.Array]:
        assert not any(wanted[3:]), "the teacher has no gradient"
        (of_sums,) = cotangents
        assert of_sums is not None
        loss, *rest = saved
        to_tokens = (..., *(None,) * (loss.ndim - self.num_axes))
        if self._is_early:
            found = [g.astype(jnp.float32) * of_sums for g in rest]
        elif any(wanted[:2]):
            x, weight, coefficients, *teacher = rest
            args = x, weight, coefficients * of_sums[to_tokens], *teacher
            _, *found = self._partitioned(wanted[:2], args, every_loss=False)
        else:
            found = []
        return [*found, of_sums[to_tokens] * loss] if wanted[2] else found

    def fold(
        self, wanted: Mask | None, args: Sequence[jax.Array], is_batched: Mask
    ) -> tuple[Operation, Sequence[jax.Array]] | None:
        weights = (_WEIGHT, _TEACHER_WEIGHT) if self.settings.tail is None else (_WEIGHT,)
        weights += (len(args) - 1,) if self.settings.is_low_rank else ()
        if any(is_batched[i] for i in weights):
            return None
        if wanted is not None and self._is_early:
            return None  # each member has gradients of its own
        folded = with_members(args, is_batched, weights=weights)
        return dataclasses.replace(self, num_axes=self.num_axes + 1), folded


def _of_device(
    key: tuple[Settings, tuple[bool, bool], bool], place: Place
) -> Callable[..., Sequence[jax.Array]]:
    """The losses of a device's tokens, and the wanted gradients of their sum."""
    settings, wanted, every_loss = key
    (axes,) = place.parts

    def run(*args: jax.Array) -> Sequence[jax.Array]:
        x, weight, coefficients, *teacher = args
        layout = settings.weight_layout
        weight, teacher = low_rank.joined(settings.is_low_rank, layout, weight, teacher)
        merged = lambda a: a.reshape(coefficients.size, *a.shape[coefficients.ndim :])
        has_weight = settings.tail is None
        weights = [weight.astype(x.dtype)]
        if has_weight:  # both before the branches, as XLA does not simplify across one
            weights.append(teacher[1].astype(teacher[0].dtype))
        of_tokens = teacher[:1] if has_weight else teacher

        def compute(x: Any, coefficients: Any, *teacher: Any) -> Any:
            losses, gradients = xla.losses_and_gradients(
                settings, axes, x, weights[0], coefficients, *teacher, *weights[1:], wanted=wanted
            )
            num_per_token = int(wanted[0])
            return [losses, *gradients[:num_per_token]], gradients[num_per_token:]

        tokens = [merged(x), merged(coefficients), *map(merged, of_tokens)]
        fraction = 1.0 if every_loss else settings.counted_fraction
        fraction = fraction_in_effect(_Distillation.name, fraction, place, coefficients.size)
        counts = merged(coefficients) != 0
        (losses, *dx), of_weight = in_fewer_rows(
            compute, tokens, (0,) * len(tokens), counts, fraction
        )
        dx = [a.reshape(x.shape) for a in dx]
        dx = [jax.lax.psum(a, axes) if axes else a for a in dx]
        return losses.reshape(coefficients.shape), *dx, *of_weight

    return run
