"""Log-probabilities in plain JAX over all logits, differentiated by JAX: the oracle."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.layout import Place, Roles, Tokens
from pallas_kernels.log_probs.statistics import distribution_of_logits, of_labels
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.plan import Request
from pallas_kernels.loss.reference import arguments_and_roles, float32_logits
from pallas_kernels.loss.token_loss import IGNORED, softcapped
from pallas_kernels.partition import split_over_explicit_axes


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
) -> tuple[Float[Array, "*T"], ...]:
    """The same as `differentiable.log_probs`.

    The logits `[*T, V]` are in memory, with float32 operands in all steps and in the GEMM.
    """
    arrays, roles = arguments_and_roles(request, x, weight, bias, labels)
    results = (Tokens(),) * (1 + with_entropy + 2 * with_argmax)
    key = request, temperature, with_entropy, with_argmax
    return split_over_explicit_axes(_log_probs_of, key, Roles(roles, results), *arrays)


def _log_probs_of(
    key: tuple[Request, float, bool, bool], place: Place
) -> Callable[..., Sequence[jax.Array]]:
    """The log-probabilities of a device's tokens."""
    request, temperature, with_entropy, with_argmax = key
    layout = request.settings.weight_layout

    def run(x: Any, weight: Any, labels: Any, *bias: Any) -> Sequence[jax.Array]:
        weight, bias = low_rank.joined(request.is_low_rank, layout, weight, bias)
        # `jnp.where` gives ignored tokens the gradient 0, and 0 · NaN is NaN.
        x = jnp.where((labels == IGNORED)[..., None], 0, x)
        logits = float32_logits(layout, x, weight, bias)
        logits = softcapped(logits, request.settings.options.logit_softcap)
        found = distribution_of_logits(logits / temperature, labels, with_entropy, with_argmax)
        return of_labels(found, labels, logits.shape[-1])

    return run
