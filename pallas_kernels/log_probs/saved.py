"""Log-probabilities whose backward takes two GEMMs, because the forward saves exponentials.

The forward stores the exponentials of all logits, `[T, V]` in the dtype of `x`. They wait for the
cotangents as those of a scalar do (`kept.py`), until the backward makes the gradient in the logits
of them. So results and gradients take three GEMMs instead of four. Memory holds 2 bytes for each
token and column from the forward to the backward.
"""

import dataclasses
from collections.abc import Callable

import jax

from pallas_kernels.layout import Place, Tokens
from pallas_kernels.log_probs.differentiable import BIAS, Device, LogProbs
from pallas_kernels.log_probs.kept import KeptExponentials
from pallas_kernels.loss.columns import Columns, Gradients
from pallas_kernels.loss.differentiable import (
    roles_of_gradients,
    split,
    wanted_arrays,
    wanted_gradients,
    weight_and_bias,
)
from pallas_kernels.loss.mosaic_gpu import exponentials
from pallas_kernels.loss.plan import Request
from pallas_kernels.mapping import Mask
from pallas_kernels.protocol import Arrays, Cotangents

_NUMBERS, _EXPONENTIALS = Tokens(), Tokens(("column",))


def unsupported_reason(request: Request) -> str | None:
    """Why exponentials cannot be saved, or None if they can."""
    settings = request.settings
    if settings.implementation != "mosaic_gpu":
        return f"the kernels do not run, implementation={settings.implementation!r}"
    if not len(request.x):
        return "there are no tokens"
    return exponentials.unsupported_reason(
        request.x, request.operand, settings.options, settings.weight_layout
    )


@dataclasses.dataclass(frozen=True, slots=True)
class WithExponentials(LogProbs):
    """Log-probabilities and entropies, whose plan is one chunk of all tokens."""

    def forward(self, wanted: Mask | None, *args: jax.Array) -> tuple[jax.Array, ...]:
        """The results; then sums, exponentials of labels, all exponentials and the logsumexp."""
        if wanted is None:
            return LogProbs.forward(self, wanted, *args)
        roles = *(_NUMBERS,) * (1 + self.with_entropy + 2), _EXPONENTIALS, _NUMBERS
        return split(self.request, _forward_of, self, args, (), roles, num_per_token=1)

    def num_residuals(self, wanted: Mask) -> int:
        """The four arrays that follow the results."""
        return 4

    def backward(self, wanted: Mask, saved: Arrays, cotangents: Cotangents) -> Arrays:
        """The gradients, from the saved exponentials."""
        sum_exp, of_label, values, *rest = saved
        numbers, args = self.numbers_and_arguments(rest, cotangents)
        of_arrays = wanted_arrays(wanted, BIAS)
        others = *numbers, sum_exp, of_label, values
        return split(
            self.request,
            _backward_of,
            (self, of_arrays, len(args)),
            args,
            others,
            roles_of_gradients(of_arrays, BIAS),
            num_per_token=1,
            roles_of_others=[*[_NUMBERS] * (len(others) - 1), _EXPONENTIALS],
        )


def _forward_of(key: WithExponentials, place: Place) -> Callable[..., Arrays]:
    """The results for a device's tokens, then what the backward needs."""

    def run(x, weight, labels, *last) -> Arrays:
        device, columns = _whole(key, place, x, weight, labels, last)
        kept = KeptExponentials.make(device, columns, with_entropy=key.with_entropy)
        (found,) = kept.found
        per_token = *kept.of_labels(), found.sum_exp, found.of_label, found.values, kept.lse
        return [a.reshape(*labels.shape, *a.shape[1:]) for a in per_token]

    return run


def _backward_of(key: tuple[WithExponentials, Mask, int], place: Place) -> Callable[..., Arrays]:
    """The wanted gradients of a device's arrays."""
    operation, wanted, num_args = key

    def run(*arrays) -> Arrays:
        x, weight, labels, *last = arrays[:num_args]
        device, columns = _whole(operation, place, x, weight, labels, last)
        per_token = arrays[num_args:]
        flat = [a.reshape(labels.size, *a.shape[labels.ndim :]) for a in per_token]
        *numbers, sum_exp, of_label, values = flat
        kept = KeptExponentials.of_saved(device, columns, values, sum_exp, of_label, lse=numbers[0])
        dx, dweight = kept.gradients(device.terms(*numbers), with_dweight=wanted[1])
        dweight = jax.tree.map(columns.without_padding, dweight)  # None without a gradient
        found = Gradients(dx, dweight, None)
        of_x, of_weights = wanted_gradients(
            device.request, found, wanted, place, is_unchecked=False
        )
        return [*(a.reshape(x.shape) for a in of_x), *of_weights]

    return run


def _whole(operation: WithExponentials, place: Place, x, weight, labels, last):
    """A device's arrays in one chunk, and its columns."""
    (axes,) = place.parts
    if axes:
        raise ValueError(
            "linear_log_probs: keep_exponentials=True needs the whole vocabulary on each device, "
            f"and the mesh axes {axes} split it; use keep_exponentials=False"
        )
    weight, bias = weight_and_bias(operation.request, x, weight, last)
    flat = x.reshape(labels.size, x.shape[-1]), weight, bias, labels.reshape(-1)
    device = Device.make(operation.request, operation.temperature, place, *flat)
    return device, Columns.make(device.request.settings, weight.astype(x.dtype), None)
