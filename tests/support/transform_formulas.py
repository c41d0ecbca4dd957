"""The formula of each operation in the dtypes of its arguments, for `support.transforms`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def wide(a: Any) -> Any:
    """The array in float32, or in float64 if it is that."""
    return a if a.dtype == jnp.float64 else a.astype(jnp.float32)


def _norm(x: Any, weight: Any) -> Any:
    z = wide(x)
    rstd = jax.lax.rsqrt(jnp.mean(z * z, axis=-1, keepdims=True) + 1e-6)
    return (z * rstd * weight.astype(z.dtype)).astype(x.dtype)


def _add_norm(x: Any, residual: Any, weight: Any) -> Any:
    total = (wide(x) + wide(residual)).astype(x.dtype)
    return _norm(total, weight), total


def _gated(gate: Any, up: Any) -> Any:
    return (jax.nn.silu(wide(gate)) * wide(up)).astype(gate.dtype)


def _mlp(x: Any, w_gate: Any, w_up: Any, w_down: Any) -> Any:
    return _gated(x @ w_gate, x @ w_up) @ w_down


def _logits(x: Any, weight: Any) -> Any:
    logits = x @ weight.T
    # Kernels round logits. XLA on a GPU leaves out a rounding to bfloat16 before a wider dtype.
    numbers = jnp.finfo(logits.dtype)
    return jax.lax.reduce_precision(wide(logits), numbers.nexp, numbers.nmant)


def _loss(x: Any, weight: Any, labels: Any) -> Any:
    logits = _logits(x, weight)
    counts = labels >= 0
    picked = jnp.take_along_axis(logits, jnp.where(counts, labels, 0)[..., None], axis=-1)[..., 0]
    losses = jnp.where(counts, jax.nn.logsumexp(logits, axis=-1) - picked, 0)
    return jnp.sum(losses) / jnp.sum(counts).astype(losses.dtype)


def _log_probs(x: Any, weight: Any, labels: Any) -> Any:
    log_p = jax.nn.log_softmax(_logits(x, weight), axis=-1)
    counts = labels >= 0
    picked = jnp.take_along_axis(log_p, jnp.where(counts, labels, 0)[..., None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    return jnp.where(counts, picked, 0), jnp.where(counts, entropy, 0)


def of_log_probs(log_probs: Any, entropy: Any, data: Any) -> Any:
    """A function for `linear_token_loss`."""
    del entropy, data
    return jnp.mean(jnp.sin(log_probs))


def _of_tokens(x: Any, weight: Any, labels: Any) -> Any:
    return of_log_probs(_log_probs(x, weight, labels)[0], None, None)


def _distillation(x: Any, weight: Any, teacher_x: Any, teacher_weight: Any) -> Any:
    log_p = jax.nn.log_softmax(_logits(x, weight), axis=-1)
    log_q = jax.nn.log_softmax(_logits(teacher_x, teacher_weight), axis=-1)
    return jnp.sum(jnp.exp(log_q) * (log_q - log_p)) / (log_p.size // log_p.shape[-1])


FORMULAS: dict[str, Callable[..., Any]] = {
    "rms_norm": _norm,
    "add_rms_norm": _add_norm,
    "swiglu": _gated,
    "swiglu_mlp": _mlp,
    "linear_cross_entropy": _loss,
    "linear_log_probs": _log_probs,
    "linear_token_loss": _of_tokens,
    "linear_distillation_loss": _distillation,
}
