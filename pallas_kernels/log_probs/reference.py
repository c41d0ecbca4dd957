"""Log-probabilities in plain JAX over all logits, differentiated by JAX: the oracle."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.log_probs.statistics import distribution_of_logits, of_labels
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.arguments import IGNORED
from pallas_kernels.loss.layout import Embedding
from pallas_kernels.loss.plan import Request
from pallas_kernels.partition import Place, Roles, Tokens, Weight, split_over_explicit_axes


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
    settings = request.settings
    first, last = low_rank.arguments(weight)
    of_first, of_last = low_rank.roles(request.is_low_rank, settings.weight_layout, None)
    roles, arrays = [Tokens(("d",)), of_first, Tokens()], [x, first, labels]
    if bias is not None:
        roles.append(Weight(("v",)))
        arrays.append(bias)
    roles, arrays = [*roles, *of_last], [*arrays, *last]
    results = (Tokens(),) * (1 + with_entropy + 2 * with_argmax)
    softcap = settings.options.logit_softcap
    layout = settings.weight_layout
    key = layout, request.is_low_rank, softcap, temperature, with_entropy, with_argmax
    return split_over_explicit_axes(_log_probs_of, key, Roles(tuple(roles), results), *arrays)


def _log_probs_of(key: tuple[Any, ...], place: Place) -> Callable[..., Sequence[jax.Array]]:
    """The log-probabilities of a device's tokens."""
    layout, is_low_rank, softcap, temperature, with_entropy, with_argmax = key

    def run(x: Any, weight: Any, labels: Any, *bias: Any) -> Sequence[jax.Array]:
        weight, bias = low_rank.joined(is_low_rank, layout, weight, bias)
        # `jnp.where` gives ignored tokens the gradient 0, and 0 · NaN is NaN.
        x = jnp.where((labels == IGNORED)[..., None], 0, x)
        logits = jnp.einsum(
            f"...d,{layout}->...v",
            x.astype(jnp.float32),
            low_rank.whole(weight).astype(jnp.float32),
            precision=jax.lax.Precision.HIGHEST,
        )
        if bias:
            logits += bias[0].astype(jnp.float32)
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        found = distribution_of_logits(logits / temperature, labels, with_entropy, with_argmax)
        return of_labels(found, labels, logits.shape[-1])

    return run
