"""Skips steps whose loss or gradient is not finite, or whose loss jumps.

A skipped step leaves parameters and optimizer state as they are, to the bit. The jitted step makes
the decision, so the host need not wait for it.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Losses in the running mean. The guard looks for spikes after half as many losses.
WINDOW = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Guard:
    """The statistics of earlier steps that the decision needs.

    Attributes:
      skipped: Number of steps skipped so far, int32.
      in_a_row: Number of steps skipped since the last step that was taken, int32.
      loss_mean: Running mean of the losses of the steps taken, float32.
      loss_variance: Running variance of the same losses, float32.
    """

    skipped: Any
    in_a_row: Any
    loss_mean: Any
    loss_variance: Any


def initial_guard() -> Guard:
    """The statistics before the first step."""
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
    """Whether a step is taken, and the statistics after it.

    Let `n` steps have been taken, with mean `m` and variance `v` of their losses. A loss `l` is a
    spike if `n >= WINDOW / 2` and `l - m > spike_factor * sqrt(v)`. A step that is taken updates
    both statistics with `a = max(1 / (n + 1), 1 / WINDOW)`: `v` becomes
    `(1 - a) * (v + a * (l - m)**2)`, then `m` becomes `m + a * (l - m)`. At first both are plain
    statistics of all losses; later they weight losses exponentially. A skipped loss changes
    neither.

    After `max_skipped_steps` in a row all further steps are skipped. The loop reads the result of a
    step when the next one runs, so it still finds the parameters with which things went wrong.

    Args:
      guard: Statistics before the step.
      step: Number of earlier steps, taken or skipped.
      loss: Loss of the step.
      grad_norm: Gradient norm of the step, before clipping.
      max_skipped_steps: Number of skipped steps in a row that ends the run.
      spike_factor: Limit of a loss in standard deviations above the mean; 0 skips no spikes.
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
