"""A teacher that is known by the log-probabilities of `k` tokens.

The `k` tokens are classes, and with `tail="one_bucket"` all other tokens are one class more. A
divergence of both distributions over these classes is the loss. `tail="ignore"` keeps the sum over
the `k` tokens alone, `Σ q·(log q - log p)`, with probabilities `p` of the softmax over the whole
vocabulary.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.distillation.divergence import RowReductions, derivative, statistics
from pallas_kernels.distillation.settings import Settings
from pallas_kernels.loss.arguments import columns_of

# Largest sum of the teacher's probabilities of a token that can be rounding. Log-probabilities in
# bfloat16 err by up to 2^-9 of their size. That is 1 % for a distribution of 5 nats.
_MOST_PROBABILITY = 1.05


def checked_classes(
    log_probs: Array, ids: Any, vocab_size: int
) -> tuple[Float[Array, "*T k"], Int[Array, "*T k"]]:
    """`(log_probs, columns)` of the classes: float32 and int32.

    An entry of -inf is no class. Its token stays in the tail, and its column becomes `vocab_size`,
    which no array has. A token whose entries cannot be right has NaN for all log-probabilities: a
    column out of range, a column twice, or probabilities with a sum above 1.05.
    """
    log_probs = log_probs.astype(jnp.float32)
    is_class = log_probs != -jnp.inf
    in_range, of_classes = columns_of(ids, vocab_size)
    columns = jnp.where(in_range & is_class, of_classes, vocab_size)
    # Different numbers for what is no class, so that it is not there twice.
    others = vocab_size + jnp.arange(columns.shape[-1], dtype=jnp.int32)
    in_order = jnp.sort(jnp.where(columns == vocab_size, others, columns), axis=-1)
    is_twice = jnp.any(in_order[..., 1:] == in_order[..., :-1], axis=-1)
    total = jnp.sum(jnp.exp(log_probs), axis=-1)
    is_right = ~jnp.any(is_class & ~in_range, axis=-1) & ~is_twice & (total <= _MOST_PROBABILITY)
    return jnp.where(is_right[..., None], log_probs, jnp.nan), columns


def log_probs_of_classes(
    settings: Settings, log_probs: Float[Array, "*T k"], has_tail: Array
) -> Float[Array, "*T k1"]:
    """The teacher's log-probabilities of all classes, the tail last.

    The tail has what is missing to 1, and at least 2^-24: a float32 sum near 1 errs by that much,
    and the reverse KL to a tail of 0 is infinite. It has nothing if the `k` tokens are the whole
    vocabulary.
    """
    if settings.tail == "ignore":
        return log_probs
    total = jnp.sum(jnp.exp(log_probs), axis=-1)
    tail = jnp.log1p(-jnp.minimum(total, 1 - jnp.finfo(jnp.float32).epsneg))
    tail = jnp.where(has_tail | jnp.isnan(total), tail, -jnp.inf)
    return jnp.concatenate([log_probs, tail[..., None]], axis=-1)


def statistics_of_classes(
    settings: Settings,
    top: Float[Array, "T k"],
    tail: Float[Array, " T"],
    log_probs: Float[Array, "T k"],
) -> tuple[Float[Array, " T"], Float[Array, "T k"], Float[Array, " T"]]:
    """The losses, and their derivatives in the logits of the classes.

    Args:
      settings: Static settings.
      top: Student's logits of the `k` tokens, divided by the temperature; -inf for no class.
      tail: Logsumexp of the other logits of the student.
      log_probs: Teacher's log-probabilities of the `k` tokens.
    """
    student = jnp.concatenate([top, tail[:, None]], axis=-1)
    teacher = log_probs_of_classes(settings, log_probs, tail != -jnp.inf)
    if settings.tail == "one_bucket":
        # The teacher's classes have a sum of 1 already, but for rounding.
        found = statistics(settings.divergence, student, teacher, RowReductions())
        gradient = derivative(settings.divergence, student, teacher, found)
        return found.loss, gradient[:, :-1], gradient[:, -1]
    lse = jax.nn.logsumexp(student, axis=-1)
    q = jnp.exp(log_probs)
    total = jnp.sum(q, axis=-1)
    terms = jnp.where(q == 0, 0.0, q * (log_probs - (top - lse[:, None])))
    gradient = total[:, None] * jnp.exp(student - lse[:, None])
    return jnp.sum(terms, axis=-1), gradient[:, :-1] - q, gradient[:, -1]
