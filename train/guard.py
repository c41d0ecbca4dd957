"""Which steps are skipped: those whose loss or gradient is not finite, or whose loss jumps.

A skipped step leaves parameters and optimizer state as they are, to the bit. The decision is made
inside of the jitted step, so that the host need not wait for it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Losses in the running mean. A spike is looked for once half as many have been seen.
WINDOW = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guard:
    """What deciding needs to know of earlier steps.

    Attributes:
      skipped: steps skipped so far, an int32.
      in_a_row: steps skipped since the last that was taken, an int32.
      loss_mean: of the losses of the steps taken, a float32.
      loss_variance: of the same, a float32.
    """

    skipped: Any
    in_a_row: Any
    loss_mean: Any
    loss_variance: Any


def initial_guard() -> Guard:
    """Before the first step."""
    return Guard(
        skipped=jnp.zeros((), jnp.int32),
        in_a_row=jnp.zeros((), jnp.int32),
        loss_mean=jnp.zeros((), jnp.float32),
        loss_variance=jnp.zeros((), jnp.float32),
    )


def judge(
    guard: Guard,
    step: Int[Array, ""],
    loss: Float[Array, ""],
    grad_norm: Float[Array, ""],
    *,
    max_skipped_steps: int,
    spike_factor: float,
) -> tuple[Bool[Array, ""], Guard]:
    """Whether a step is taken, and what is known after it.

    With `n` steps taken before, mean `m` and variance `v` of their losses, a loss `l` is a spike if
    `n >= WINDOW / 2` and `l - m > spike_factor * sqrt(v)`. After a step that is taken, with
    `a = max(1 / (n + 1), 1 / WINDOW)`, `v` becomes `(1 - a) * (v + a * (l - m)**2)` and `m` becomes
    `m + a * (l - m)`: mean and variance of all losses at first, exponentially weighted later. A
    skipped loss enters neither.

    After `max_skipped_steps` in a row no step is taken any more: the loop, which learns of a step
    when the next one runs, finds the parameters with which things went wrong.

    Args:
      guard: before the step.
      step: how many steps went before, taken or skipped.
      loss: of the step.
      grad_norm: of the step, before clipping.
      max_skipped_steps: see `TrainConfig`.
      spike_factor: standard deviations above the mean; 0 looks for no spikes.
    """
    taken_before = step - guard.skipped
    deviation = loss - guard.loss_mean
    taken = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (guard.in_a_row < max_skipped_steps)
    if spike_factor:
        limit = spike_factor * jnp.sqrt(guard.loss_variance)
        taken &= (taken_before < WINDOW // 2) | (deviation <= limit)
    share = 1 / jnp.minimum(taken_before + 1, WINDOW).astype(jnp.float32)
    mean = guard.loss_mean + share * deviation
    variance = (1 - share) * (guard.loss_variance + share * deviation**2)
    return taken, Guard(
        skipped=guard.skipped + (~taken).astype(jnp.int32),
        in_a_row=jnp.where(taken, 0, guard.in_a_row + 1),
        loss_mean=jnp.where(taken, mean, guard.loss_mean),
        loss_variance=jnp.where(taken, variance, guard.loss_variance),
    )
