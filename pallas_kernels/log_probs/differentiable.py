"""The log-probabilities as an operation: what is kept, and how devices share the work.

The forward takes one GEMM and keeps the logsumexp of each token, and the entropy. The backward
computes the logits again and takes any cotangents: three GEMMs (`loss/recomputed.py`).

With the cotangents g of the log-probability and h of the entropy H, and `p = softmax(z)`,

    dz[v] = g · ([v = label] - p[v]) - h · p[v] · (log p[v] + H)

Each device computes the log-probabilities of its own tokens. The vocabulary may be split over mesh
axes that split no tokens. Then the devices exchange 8 bytes of statistics a token, 4 more with the
entropy and 8 more with the argmax, and add up `dx`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import Place, Tokens
from pallas_kernels.log_probs.statistics import distribution_of_linear, of_labels
from pallas_kernels.loss import low_rank, recomputed
from pallas_kernels.loss.columns import Gradients, place_in_vocabulary
from pallas_kernels.loss.counted import compute_counted
from pallas_kernels.loss.differentiable import (
    is_unchecked,
    on_device,
    roles_of_gradients,
    split,
    wanted_arrays,
    wanted_gradients,
    weight_and_bias,
)
from pallas_kernels.loss.gradient_terms import GradientTerms
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.plan import InPlace, Request, TokenChunks, choose
from pallas_kernels.loss.token_loss import IGNORED, LossOptions, is_column
from pallas_kernels.mapping import Mask
from pallas_kernels.operation import call
from pallas_kernels.protocol import Arrays, Cotangents, Operation, with_members

_WEIGHT, BIAS = 1, 3  # positions among the arguments
_NUMBERS = Tokens()


def log_probs(
    request: Request,
    x: Float[Array, "*T D"],
    weight: Embedding,
    bias: Float[Array, " V"] | None,
    labels: Int[Array, "*T"],
    *,
    temperature: float,
    with_entropy: bool,
    with_argmax: bool,
    kind: "type[LogProbs]",
) -> tuple[Float[Array, "*T"], ...]:
    """Log-probability of each label, and what else is asked for, as `of_labels` says; float32.

    Args:
      request: Everything that the plan depends on.
      x: Hidden states.
      weight: Output embedding.
      bias: Bias of the logits, if there is one.
      labels: Column of each token, `IGNORED` for an ignored one.
      temperature: Divisor of the logits after the softcap.
      with_entropy: Whether to compute the entropy.
      with_argmax: Whether to find the argmax and its log-probability. The caller stops their
        gradients.
      kind: Type of the operation.
    """
    first, last = low_rank.arguments(weight)
    operation = kind(
        request,
        temperature,
        with_entropy,
        with_argmax,
        is_unchecked(request.settings.vocab_axes, first),
    )
    biases = () if bias is None else (bias,)
    return call(operation, x, first, labels, *biases, *last)


@dataclasses.dataclass(frozen=True, slots=True)
class LogProbs:
    """Log-probabilities and more of `(x, weight, labels)`, and the bias if there is one.

    Attributes:
      request: Everything that the plan depends on. Each device puts its own shapes in the place of
        those in the request.
      temperature: Divisor of the logits after the softcap.
      with_entropy: Whether there are entropies.
      with_argmax: Whether argmax and its log-probability are results, whose cotangents are None.
      is_unchecked: As `is_unchecked` says.
    """

    request: Request
    temperature: float
    with_entropy: bool
    with_argmax: bool
    is_unchecked: bool

    name = "linear_log_probs"

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        """The results, and the logsumexp as the residual."""
        num_results = 1 + self.with_entropy + 2 * self.with_argmax + (wanted is not None)
        return split(
            self.request,
            _forward_of,
            (self, wanted is not None),
            args,
            (),
            (_NUMBERS,) * num_results,
            num_per_token=1,
        )

    def num_residuals(self, wanted: Mask) -> int:
        """The logsumexp alone."""
        return 1

    def saved(
        self, wanted: Mask, args: Arrays, results: Arrays, residuals: Arrays
    ) -> tuple[Arrays, Arrays]:
        """The backward reads the residuals, the entropies and the arguments, in this order."""
        return results, (*residuals, *results[1 : 1 + self.with_entropy], *args)

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        """The gradients, from logits that are computed again."""
        numbers, args = self.numbers_and_arguments(saved, cotangents)
        of_arrays = wanted_arrays(wanted, BIAS)
        key, results = (self, of_arrays, len(args)), roles_of_gradients(of_arrays, BIAS)
        return split(self.request, _backward_of, key, args, numbers, results, num_per_token=1)

    def numbers_and_arguments(
        self, saved: Arrays, cotangents: Cotangents
    ) -> tuple[list[jax.Array], Arrays]:
        """The numbers of each token that `Device.terms` takes, and the operation's arguments."""
        lse, *args = saved
        of_log_probs, *of_others = cotangents
        numbers = [lse, jnp.zeros_like(lse) if of_log_probs is None else of_log_probs]
        if self.with_entropy:
            entropy, of_entropy = args.pop(0), of_others.pop(0)
            if of_entropy is not None:
                numbers += [of_entropy, entropy]
        assert not any(a is not None for a in of_others), "the argmax has no gradient"
        if self.is_unchecked:
            axes = self.request.settings.vocab_axes
            numbers[1:3] = [jax.lax.psum(a, axes) for a in numbers[1:3]]
        return numbers, args

    def fold(
        self, wanted: Mask | None, args: Arrays, is_batched: Mask
    ) -> tuple[Operation, Arrays] | None:
        """One call for the tokens of all members, if they share the weights."""
        if is_batched[_WEIGHT] or any(is_batched[BIAS:]):
            return None
        weights = _WEIGHT, *range(BIAS, len(args))
        return self, with_members(args, is_batched, weights=weights)


def _forward_of(key: tuple[LogProbs, bool], place: Place) -> Callable[..., Arrays]:
    """The results for a device's tokens, and the logsumexp if it is kept."""
    operation, keeps_lse = key

    def run(x, weight, labels, *last) -> Arrays:
        def compute(x, labels) -> Any:
            device = Device.make(
                operation.request, operation.temperature, place, x, weight, bias, labels
            )
            lse, found = device.log_probs(
                with_entropy=operation.with_entropy, with_argmax=operation.with_argmax
            )
            return [*found, lse] if keeps_lse else list(found), []

        weight, bias = weight_and_bias(operation.request, x, weight, last)
        counts, fraction = labels != IGNORED, operation.request.counted_fraction
        return compute_counted(
            compute, (x, labels), (0, IGNORED), counts, fraction, place, name=operation.name
        )

    return run


def _backward_of(key: tuple[LogProbs, Mask, int], place: Place) -> Callable[..., Arrays]:
    """The wanted gradients of a device's arrays."""
    operation, wanted, num_args = key

    def run(*arrays) -> Arrays:
        x, weight, labels, *last = arrays[:num_args]
        numbers = arrays[num_args:]

        def compute(x, labels, *numbers) -> Any:
            device = Device.make(
                operation.request, operation.temperature, place, x, weight, bias, labels
            )
            gradients = device.gradients(device.terms(*numbers), wanted)
            return wanted_gradients(
                device.request, gradients, wanted, place, is_unchecked=operation.is_unchecked
            )

        weight, bias = weight_and_bias(operation.request, x, weight, last)
        _, of_log_probs, *more = numbers
        has_cotangent = of_log_probs != 0
        if more:
            has_cotangent |= more[0] != 0
        counts = (labels != IGNORED) & has_cotangent
        tokens, fills = (x, labels, *numbers), (0, IGNORED, *(0,) * len(numbers))
        fraction = operation.request.counted_fraction
        return compute_counted(compute, tokens, fills, counts, fraction, place, name=operation.name)

    return run


@dataclasses.dataclass(frozen=True)
class Device:
    """The plan of one device, and its arrays with one axis of tokens.

    Attributes:
      request: The request for this device's arrays.
      plan: Tokens whose dlogits are in memory at a time.
      temperature: Divisor of the logits.
      x: Hidden states.
      weight: Output embedding.
      bias: Bias of the logits, if there is one.
      labels: Column of each token.
    """

    request: Request
    plan: TokenChunks | InPlace
    temperature: float
    x: Any
    weight: Any
    bias: Any
    labels: Any

    @classmethod
    def make(
        cls,
        request: Request,
        temperature: float,
        place: Place,
        x: Any,
        weight: Any,
        bias: Any,
        labels: Any,
    ) -> "Device":
        """The plan for the arrays of one device."""
        request = on_device(request, place, x, weight, name="log-probabilities")
        if request.settings.implementation == "mosaic_gpu" and not len(x):
            # No kernel has a grid of no blocks.
            settings = dataclasses.replace(request.settings, implementation="xla")
            request = dataclasses.replace(request, settings=settings)
        plan = choose(planned(request)).plan
        assert isinstance(plan, TokenChunks | InPlace)
        return cls(request, plan, temperature, x, weight, bias, labels)

    def log_probs(
        self, *, with_entropy: bool, with_argmax: bool = False
    ) -> tuple[jax.Array, Arrays]:
        """`(lse, results)`."""
        settings = self.request.settings
        found = distribution_of_linear(
            settings,
            self.x,
            self.weight,
            self.bias,
            self.labels,
            self.plan.without_dweight.chunk_size,
            temperature=self.temperature,
            with_entropy=with_entropy,
            with_argmax=with_argmax,
        )
        _, vocab_size = place_in_vocabulary(settings, self.weight)
        return found.lse, of_labels(found, self.labels, vocab_size)

    def terms(
        self,
        lse: jax.Array,
        of_log_probs: jax.Array,
        of_entropy: jax.Array | None = None,
        entropy: jax.Array | None = None,
    ) -> GradientTerms:
        """The terms of the gradient in the logits, for cotangents of the results."""
        _, vocab_size = place_in_vocabulary(self.request.settings, self.weight)
        is_ignored = self.labels == IGNORED
        wrong = ~(is_ignored | is_column(self.labels, vocab_size)) & (of_log_probs != 0)
        g = jnp.where(wrong, jnp.nan, jnp.where(is_ignored, 0.0, of_log_probs)) / self.temperature
        if entropy is None or of_entropy is None:
            return GradientTerms(jnp.where(g == 0, 0.0, lse), -g, None, g)
        h = jnp.where(is_ignored, 0.0, of_entropy) / self.temperature
        is_zero = (g == 0) & (h == 0)
        softmax = jnp.where(is_zero, 0.0, -(g + h * entropy))  # 0 · NaN is NaN
        return GradientTerms(jnp.where(is_zero, 0.0, lse), softmax, -h, g)

    def gradients(self, terms: GradientTerms, wanted: Mask) -> Gradients:
        """The gradients, by computing the logits again."""
        return recomputed.gradients(
            self.request.settings,
            self.plan if wanted[1] else self.plan.without_dweight,
            self.x,
            self.weight,
            self.bias,
            self.labels,
            terms,
            temperature=self.temperature,
        )


def planned(request: Request) -> Request:
    """The request as the planner takes it.

    The logsumexp is known, so a softcap or a split vocabulary rules out no plan.
    """
    options = LossOptions(label_smoothing=0.0, z_loss=0.0, logit_softcap=None)
    settings = dataclasses.replace(request.settings, options=options, vocab_axes=())
    return dataclasses.replace(request, settings=settings)
