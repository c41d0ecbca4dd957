"""The loss as an operation: when its gradients are made, and how they meet on a mesh.

A sum of losses has one cotangent, which is 1 for a loss. So the forward makes the gradients of a
sum while the logits exist, and the backward only multiplies them: three GEMMs. A cotangent other
than 1 multiplies them in float32, and they are rounded again.

Several sums, or losses that are not added up, have a cotangent each, which the forward does not
know. So the forward makes the losses alone, and the backward computes the logits again: four GEMMs.
Where the plan has exponentials, the last logits become dlogits at once (`recomputed.py`).
With chunks of columns, a single sum takes four GEMMs too.

Each device computes the losses of its own tokens. The vocabulary may be split over mesh axes that
split no tokens. Then the devices exchange 20 bytes of statistics a token, and add up `dx`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.kernel import varying_axes
from pallas_kernels.layout import GradientOf, Place, Roles, Tokens, Weight
from pallas_kernels.logs import log_once
from pallas_kernels.loss import by_columns, by_tokens, low_rank, recomputed
from pallas_kernels.loss.columns import Gradients
from pallas_kernels.loss.counted import compute_counted
from pallas_kernels.loss.layout import Embedding, unsupported_reason
from pallas_kernels.loss.plan import ColumnChunks, Request, choose
from pallas_kernels.loss.token_loss import IGNORED, TokenLosses, finite_where_not_counted
from pallas_kernels.mapping import Mask
from pallas_kernels.operation import call
from pallas_kernels.partition import partitioned
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members

_X, _NUMBERS = Tokens(("d",)), Tokens()
_WEIGHT, _COEFFICIENTS, _BIAS = 1, 2, 4  # positions among the arguments
_NUM_LOSSES = len(TokenLosses._fields)


def sums_of_losses(
    request: Request,
    x: Float[Array, "*T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    coefficients: Float[Array, "*T"],
    labels: Int[Array, "*T"],
    *,
    num_axes: int,
) -> tuple[Float[Array, "..."], TokenLosses]:
    """Sums of `coefficients · loss`, float32, and the losses.

    A token whose coefficient is 0 adds nothing to sums and gradients, whatever its `x` holds. The
    coefficients of ignored tokens must be 0. Only the sums carry a gradient. The losses are
    metrics, which the caller must not differentiate.

    Args:
      request: Everything that the plan depends on.
      x: Hidden states.
      weight: Output embedding.
      bias: Bias of the logits, if there is one.
      coefficients: Factors of the losses, float32.
      labels: Column of each token, -1 for an ignored one.
      num_axes: Number of leading axes of the tokens that the sums keep: 0 adds up all losses.
    """
    first, last = low_rank.arguments(weight)
    operation = _CrossEntropy(request, num_axes, is_unchecked(request.settings.vocab_axes, first))
    biases = () if bias is None else (bias,)
    total, *losses = call(operation, x, first, coefficients, labels, *biases, *last)
    return total, TokenLosses(*losses)


def is_unchecked(axes: Sequence[str], weight: Any) -> bool:
    """Whether the vocabulary is split inside of `jax.shard_map(check_vma=False)`.

    Its transpose divides the cotangent of a result among the devices, and adds up `dx`.
    """
    return bool(axes) and not varying_axes(weight) >= {*axes}


@dataclasses.dataclass(frozen=True, slots=True)
class _CrossEntropy:
    """Sums of losses of `(x, weight, coefficients, labels)`, and the bias if there is one.

    Attributes:
      request: Everything that the plan depends on. Each device puts its own shapes in the place of
        those in the request.
      num_axes: Number of leading axes of the tokens that the sums keep.
      is_unchecked: As `is_unchecked` says.
    """

    request: Request
    num_axes: int
    is_unchecked: bool

    name = "linear_cross_entropy"

    @property
    def _is_early(self) -> bool:
        """Whether the forward makes the gradients."""
        return self.num_axes == 0 and self.request.vocab_chunk_size is None

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        early = wanted_arrays(wanted, _BIAS) if wanted is not None and self._is_early else ()
        results = *(_NUMBERS,) * _NUM_LOSSES, *roles_of_gradients(early, _BIAS)
        # The gradient of a coefficient is its token's loss, even where the coefficient is 0.
        has_all_losses = wanted is not None and wanted[_COEFFICIENTS]
        key = self, early, has_all_losses
        out = split(self.request, _forward_of, key, args, (), results, num_per_token=2)
        coefficients = args[2]
        axes = tuple(range(self.num_axes, coefficients.ndim))
        return jnp.sum(coefficients * out[0], axis=axes), *out

    def num_residuals(self, wanted: Mask) -> int:
        return sum(wanted_arrays(wanted, _BIAS)) if self._is_early else 0

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        losses = TokenLosses(*results[1:])
        if self._is_early:
            return results, (losses.loss, *residuals)
        return results, (losses.loss, losses.lse, *args)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        of_sums, *of_metrics = cotangents
        assert of_sums is not None and not any(a is not None for a in of_metrics)
        loss, *rest = saved
        whole = of_sums
        if self.is_unchecked:
            whole = jax.lax.psum(of_sums, self.request.settings.vocab_axes)
        to_tokens = (..., *(None,) * (loss.ndim - self.num_axes))
        of_arrays = wanted_arrays(wanted, _BIAS)
        gradients = []
        if self._is_early:
            gradients += [g.astype(jnp.float32) * whole for g in rest]
        elif any(of_arrays):
            lse, x, weight, coefficients, *others = rest
            # A token that does not count may have an infinite cotangent.
            of_losses = jnp.where(coefficients == 0, 0.0, coefficients * whole[to_tokens])
            args = x, weight, of_losses, *others
            key, results = (self, of_arrays), roles_of_gradients(of_arrays, _BIAS)
            gradients += split(
                self.request, _backward_of, key, args, (lse,), results, num_per_token=2
            )
        if wanted[_COEFFICIENTS]:
            # Each device has the whole loss of its tokens, and not one for its part of the
            # vocabulary. So this gradient takes the device's share of the cotangent, `of_sums`.
            gradients.insert(sum(wanted[:_COEFFICIENTS]), of_sums[to_tokens] * loss)
        return gradients

    def fold(
        self, wanted: Mask | None, args: Arrays, is_batched: Mask
    ) -> tuple[Operation, Arrays] | None:
        if is_batched[_WEIGHT] or any(is_batched[_BIAS:]):
            return None
        if wanted is not None and self._is_early:
            return None  # each member has gradients of its own
        weights = _WEIGHT, *range(_BIAS, len(args))
        folded = with_members(args, is_batched, weights=weights)
        return dataclasses.replace(self, num_axes=self.num_axes + 1), folded


def split(
    request: Request,
    local: Any,
    key: Any,
    args: Arrays,
    others: Arrays,
    results: Sequence[Any],
    *,
    num_per_token: int,
    roles_of_others: Sequence[Any] | None = None,
) -> tuple[jax.Array, ...]:
    """`partitioned` for `(x, weight, *numbers, *bias, *frozen weight)` and other arrays.

    Args:
      request: Request of the operation.
      local: Maker of the function of a device's arrays.
      key: Static options of `local`.
      args: Arguments of the operation.
      others: More arguments of the function.
      results: Roles of the results.
      num_per_token: Number of the arguments that have a number for each token.
      roles_of_others: Roles of `others`; None if they have a number for each token.
    """
    settings = request.settings
    weight, last = low_rank.roles(request.is_low_rank, settings.weight_layout, request.x.dtype)
    roles = [_X, weight, *[_NUMBERS] * num_per_token]
    roles += [Weight(("v",))] * (len(args) - len(roles) - len(last))
    roles += last
    roles += [_NUMBERS] * len(others) if roles_of_others is None else roles_of_others
    return partitioned(
        local,
        key,
        Roles(tuple(roles), tuple(results), parts=("v",)),
        *args,
        *others,
        manual_parts=(settings.vocab_axes,),
    )


def wanted_arrays(wanted: Mask, bias: int) -> Mask:
    """Whether the gradients of x, weight and bias are wanted; `bias` is the bias's position."""
    return (*wanted[:2], any(wanted[bias:]))


def roles_of_gradients(wanted: Sequence[bool], bias: int) -> list[Any]:
    """The roles of the wanted gradients of x, weight and bias; none for an empty `wanted`."""
    return list(itertools.compress((_X, GradientOf(_WEIGHT), GradientOf(bias)), wanted))


def wanted_gradients(
    request: Request, found: Gradients, wanted: Mask, place: Place, *, is_unchecked: bool
) -> tuple[list[Any], list[Any]]:
    """The wanted gradients of a device: `dx` of the whole vocabulary, then of weight and bias.

    Args:
      request: The device's request.
      found: Gradients of the device.
      wanted: Whether the gradients of x, weight and bias are wanted.
      place: The device's place on the mesh, whose only part is the vocabulary.
      is_unchecked: As `is_unchecked` says.
    """
    (axes,) = place.parts
    dx, dweight, dbias = found
    if wanted[0] and axes and not is_unchecked:
        dx = jax.lax.psum(dx, axes)
    has_kernels = request.settings.implementation == "mosaic_gpu"
    if wanted[1] and has_kernels and request.counted_fraction < 1:
        # Few rows may make a `dweight` of 16 bits in place, where all tokens need sums in float32.
        # Both branches of the `lax.cond` return one dtype. Those of XLA have one anyway.
        dweight = dweight.astype(request.weight.dtype)
    of_weights = itertools.compress((dweight, dbias), wanted[1:])
    return [dx] if wanted[0] else [], list(of_weights)


def _forward_of(key: tuple[_CrossEntropy, Mask, bool], place: Place) -> Callable[..., Arrays]:
    """The losses of a device's tokens, and the wanted gradients of their sum."""
    operation, wanted, has_all_losses = key

    def run(x, weight, coefficients, labels, *last) -> Arrays:
        weight, bias = weight_and_bias(operation.request, x, weight, last)

        def compute(x, coefficients, labels) -> Any:
            request = on_device(operation.request, place, x, weight, name=operation.name)
            plan: Any = choose(request).plan
            gradients = None
            if any(wanted):
                plan = plan if wanted[1] else plan.without_dweight
                losses, gradients = by_tokens.losses_and_gradients(
                    request.settings, plan, x, weight, bias, coefficients, labels
                )
            else:
                module: Any = by_columns if isinstance(plan, ColumnChunks) else by_tokens
                losses = module.losses(request.settings, plan, x, weight, bias, labels)
            losses = finite_where_not_counted(losses, coefficients)
            if gradients is None:
                return losses, ()
            of_x, of_weights = wanted_gradients(
                request, gradients, wanted, place, is_unchecked=operation.is_unchecked
            )
            return [*losses, *of_x], of_weights

        counts = labels != IGNORED
        if not has_all_losses:
            counts &= coefficients != 0
        tokens, fills = (x, coefficients, labels), (0, 0, IGNORED)
        fraction = operation.request.counted_fraction
        return compute_counted(compute, tokens, fills, counts, fraction, place, name=operation.name)

    return run


def _backward_of(key: tuple[_CrossEntropy, Mask], place: Place) -> Callable[..., Arrays]:
    """The wanted gradients of the sum of a device's losses."""
    operation, wanted = key

    def run(x, weight, coefficients, labels, *last_and_lse) -> Arrays:
        *last, lse = last_and_lse
        weight, bias = weight_and_bias(operation.request, x, weight, last)

        def compute(x, coefficients, labels, lse) -> Any:
            request = on_device(operation.request, place, x, weight, name=operation.name)
            plan: Any = choose(request).plan
            args = x, weight, bias, coefficients, labels
            if isinstance(plan, ColumnChunks):
                gradients = by_columns.gradients(
                    request.settings, plan, *args, lse, dweight_dtype=request.weight.dtype
                )
            else:
                plan = plan if wanted[1] else plan.without_dweight
                if plan.by_exponentials:
                    gradients = recomputed.gradients_of_losses(request.settings, plan, *args, lse)
                else:
                    _, gradients = by_tokens.losses_and_gradients(request.settings, plan, *args)
            return wanted_gradients(
                request, gradients, wanted, place, is_unchecked=operation.is_unchecked
            )

        counts = (labels != IGNORED) & (coefficients != 0)
        tokens, fills = (x, coefficients, labels, lse), (0, 0, IGNORED, 0)
        fraction = operation.request.counted_fraction
        return compute_counted(compute, tokens, fills, counts, fraction, place, name=operation.name)

    return run


def weight_and_bias(
    request: Request, x: jax.Array, weight: jax.Array, last: Arrays
) -> tuple[Any, jax.Array | None]:
    """Weight and bias; the weight in the dtype of x if a `lax.cond` may hold the products.

    The caller may have widened the weight to float32, for a float32 gradient. XLA drops that cast
    and the cast back, but not across a branch, where the weight would exist in float32. Chunks of
    columns are rounded one at a time.
    """
    layout = request.settings.weight_layout
    weight, biases = low_rank.joined(request.is_low_rank, layout, weight, last)
    if request.counted_fraction < 1 and request.vocab_chunk_size is None:
        weight = weight.astype(x.dtype)
    return weight, biases[0] if biases else None


def on_device(request: Request, place: Place, x: jax.Array, weight: Any, *, name: str) -> Request:
    """The request for the arrays of a device. The log says if it copies its part of the weight."""
    (axes,) = place.parts
    request = request.on_device(x, weight, axes)
    if request.settings.implementation == "mosaic_gpu":
        reason = unsupported_reason(weight, request.settings.weight_layout)
        if reason is not None:
            log_once(f"{name}: each device copies its part; {reason}")
    return request
