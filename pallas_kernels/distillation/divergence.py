"""Divergences of two distributions over classes: the formulas and their derivatives.

Let `p` be the student's probabilities, `q` the teacher's, and `M = beta·q + (1 - beta)·p`. With
`r = log p - log q` and `a = log p - log M`, the losses, and their derivatives in the logits of the
student, are

    forward KL       Σ q·(log q - log p)                         p - q
    reverse KL       Σ p·(log p - log q)                         p·(r - loss)
    Jensen-Shannon   beta·Σ q·(log q - log M) + (1 - beta)·Σ p·a (1 - beta)·p·(a - Σ p·a)

A class without probability adds nothing: `0·log 0` is 0.
"""

import dataclasses
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Logarithms below it count as -inf. Exponentials below 2^-126, whose logarithm is -87.3, are 0 on a
# GPU, which has no smaller float32 number.
_LOG_OF_ZERO = -87.0
_LARGEST = float(jnp.finfo(jnp.float32).max)

type DivergenceName = Literal["forward_kl", "reverse_kl", "jensen_shannon"]


@dataclasses.dataclass(frozen=True, slots=True)
class Divergence:
    """A divergence.

    Attributes:
      name: Name of the divergence.
      beta: Share of the teacher in the mixture, in (0, 1). Only `"jensen_shannon"` reads it.
    """

    name: DivergenceName
    beta: float


@dataclasses.dataclass(frozen=True, slots=True)
class RowReductions:
    """Reductions over the last axis, which mesh axes may split.

    Attributes:
      axes: Mesh axes that split the last axis.
    """

    axes: tuple[str, ...] = ()

    def sum(self, a: Float[Array, "*T C"]) -> Float[Array, "*T"]:
        """The sums of the rows."""
        return jax.lax.psum(jnp.sum(a, axis=-1), self.axes)

    def max(self, a: Float[Array, "*T C"]) -> Float[Array, "*T"]:
        """The maxima of the rows."""
        return jax.lax.pmax(jnp.max(a, axis=-1), self.axes)


class Statistics(NamedTuple):
    """Numbers of each row that the derivative needs, float32.

    Attributes:
      loss: Divergence of each row.
      lse: Logsumexp of the student's logits.
      teacher_lse: Logsumexp of the teacher's logits.
      student_part: `Σ p·a` of the Jensen-Shannon divergence; 0 for the others.
    """

    loss: Float[Array, "*T"]
    lse: Float[Array, "*T"]
    teacher_lse: Float[Array, "*T"]
    student_part: Float[Array, "*T"]

    def log_probs(
        self, student: Float[Array, "*T C"], teacher: Float[Array, "*T C"]
    ) -> tuple[Float[Array, "*T C"], Float[Array, "*T C"]]:
        """`(log p, log q)` of the logits."""
        return student - self.lse[..., None], teacher - self.teacher_lse[..., None]


def statistics(
    divergence: Divergence,
    student: Float[Array, "*T C"],
    teacher: Float[Array, "*T C"],
    rows: RowReductions,
) -> Statistics:
    """The divergences of the softmaxes of two float32 arrays of logits.

    A KL takes two passes over the logits: the maxima, then all sums. The second pass does not know
    the logsumexps yet, so the terms have exponentials relative to the maximum, and their sum is
    divided by the total. Terms are differences of logits relative to their maxima, so equal logits
    give a loss of exactly 0. The Jensen-Shannon divergence takes a third pass, because its mixture
    needs both logsumexps.
    """
    largest, teacher_largest = rows.max(student), rows.max(teacher)
    below, teacher_below = student - largest[..., None], teacher - teacher_largest[..., None]
    total, teacher_total = rows.sum(jnp.exp(below)), rows.sum(jnp.exp(teacher_below))
    log_total, teacher_log_total = jnp.log(total), jnp.log(teacher_total)
    of_totals = log_total - teacher_log_total
    difference = _difference(below, teacher_below)
    none = jnp.zeros_like(largest)
    found = Statistics(none, largest + log_total, teacher_largest + teacher_log_total, none)
    match divergence.name:
        case "forward_kl":
            loss = of_totals - rows.sum(_exp_times(teacher_below, difference)) / teacher_total
            return found._replace(loss=loss)
        case "reverse_kl":
            loss = rows.sum(_exp_times(below, difference)) / total - of_totals
            return found._replace(loss=loss)
    log_p, log_q = found.log_probs(student, teacher)
    log_m = _log_mixture(log_p, log_q, divergence.beta)
    student_part = rows.sum(_exp_times(log_p, log_p - log_m))
    # Without the barrier XLA would store the mixture for both sums. With it, both sums are still in
    # one loop, which computes the mixture twice (JAX 0.11.2).
    again = Statistics(*jax.lax.optimization_barrier(tuple(found)))
    log_p, log_q = again.log_probs(student, teacher)
    log_m = _log_mixture(log_p, log_q, divergence.beta)
    teacher_part = rows.sum(_exp_times(log_q, log_q - log_m))
    loss = divergence.beta * teacher_part + (1 - divergence.beta) * student_part
    return found._replace(loss=loss, student_part=student_part)


def derivative(
    divergence: Divergence,
    student: Float[Array, "*T C"],
    teacher: Float[Array, "*T C"],
    found: Statistics,
) -> Float[Array, "*T C"]:
    """The derivatives of the divergences in the student's logits, float32."""
    log_p, log_q = found.log_probs(student, teacher)
    match divergence.name:
        case "forward_kl":
            return jnp.exp(log_p) - jnp.exp(log_q)
        case "reverse_kl":
            return _exp_times_bounded(log_p, _difference(log_p, log_q) - found.loss[..., None])
    of_student = log_p - _log_mixture(log_p, log_q, divergence.beta)
    above = of_student - found.student_part[..., None]
    return (1 - divergence.beta) * _exp_times_bounded(log_p, above)


def losses(
    divergence: Divergence, log_p: Float[Array, "*T C"], log_q: Float[Array, "*T C"]
) -> Float[Array, "*T"]:
    """The divergences of log-probabilities, as they are defined, for JAX to differentiate."""
    # `jnp.where` gives what it leaves out the derivative 0, and 0 times infinity would be NaN.
    has_p, has_q = log_p != -jnp.inf, log_q != -jnp.inf
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    finite_log_p, finite_log_q = jnp.where(has_p, log_p, 0.0), jnp.where(has_q, log_q, 0.0)
    sum_over = lambda has, a: jnp.sum(jnp.where(has, a, 0.0), axis=-1)
    match divergence.name:
        case "forward_kl":
            return sum_over(has_q, q * (finite_log_q - log_p))
        case "reverse_kl":
            # Without the selection the gradient of what is left out is 0 times infinity.
            return sum_over(has_p, p * (finite_log_p - jnp.where(has_p, log_q, 0.0)))
    beta = divergence.beta
    # Not the logarithm of a sum of probabilities, which may all be too small for float32.
    has_any = has_p | has_q
    log_m = jnp.logaddexp(
        jnp.where(has_any, log_q, 0.0) + math.log(beta),
        jnp.where(has_any, log_p, 0.0) + math.log1p(-beta),
    )
    return beta * sum_over(has_q, q * (finite_log_q - log_m)) + (1 - beta) * sum_over(
        has_p, p * (finite_log_p - log_m)
    )


def _difference(a: Float[Array, "*T C"], b: Float[Array, "*T C"]) -> Float[Array, "*T C"]:
    """`a - b`, and 0 where both are -inf."""
    return jnp.where(a == b, 0.0, a - b)


def _exp_times(log_p: Float[Array, "*T C"], a: Float[Array, "*T C"]) -> Float[Array, "*T C"]:
    """`exp(log_p) · a`, and 0 where the exponential is 0, though `a` be infinite."""
    return jnp.exp(log_p) * jnp.where(log_p < _LOG_OF_ZERO, 0.0, a)


def _exp_times_bounded(
    log_p: Float[Array, "*T C"], a: Float[Array, "*T C"]
) -> Float[Array, "*T C"]:
    """The same for the derivative, with a finite number in place of an infinite `a`.

    In the loop that overwrites the logits XLA would store the condition of `_exp_times`.
    """
    return jnp.exp(log_p) * jnp.clip(a, -_LARGEST, _LARGEST)


def _log_mixture(
    log_p: Float[Array, "*T C"], log_q: Float[Array, "*T C"], beta: float
) -> Float[Array, "*T C"]:
    """`log M`, but not below the logarithm of the smallest number."""
    mixture = beta * jnp.exp(log_q) + (1 - beta) * jnp.exp(log_p)
    return jnp.log(jnp.maximum(mixture, jnp.finfo(jnp.float32).tiny))
