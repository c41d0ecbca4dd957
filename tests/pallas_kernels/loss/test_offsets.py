"""The offset of stored exponentials, where a logit is far from the label's; interpreted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_cross_entropy, linear_log_probs, linear_token_loss
from pallas_kernels.loss.mosaic_gpu import exponentials
from support.loss_formulas import IGNORED, full, interpreted
from support.numerics import quick_jit

KERNEL: Any = {"implementation": "mosaic_gpu"}
V = 128


def minus_sum(log_probs, entropy, data):
    return -jnp.sum(log_probs)


def minus_each(log_probs, entropy, data):
    return -log_probs


LOSSES = {
    "log-probs": lambda x, w, labels: (
        -jnp.sum(linear_log_probs(x, w, labels, keep_exponentials=True, **KERNEL))
    ),
    "token loss": functools.partial(linear_token_loss, token_fn=minus_sum, **KERNEL),
    "single tokens": functools.partial(
        linear_token_loss, token_fn=minus_each, per_token=True, **KERNEL
    ),
    "loss": functools.partial(linear_cross_entropy, reduction="sum", **KERNEL),
    "z-loss": functools.partial(linear_cross_entropy, reduction="sum", z_loss=1e-4, **KERNEL),
}


# The normal run has a loss that computes its gradients, and one that keeps exponentials of chunks.
OTHERS = "log-probs", "token loss", "loss"


# The sum of a row is V - 1 after the second GEMM, and the label's exponential e^-70 to e^-100. Of
# the last one nothing is left. 2 s each.
@interpreted
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=full if name in OTHERS else ()) for name in LOSSES]
)
def test_a_label_far_below_all_others(name):
    below = np.array([70, 85, 86, 87, 100], np.float32)
    x = np.zeros((len(below), 64), np.float32)
    x[:, 0] = below
    weight = np.zeros((V, 64), np.float32)
    weight[0, 0] = -1
    args = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16)
    labels = jnp.zeros(len(below), jnp.int32)
    of = lambda x, weight: LOSSES[name](x, weight, labels=labels)
    loss, (dx, dweight) = quick_jit(jax.value_and_grad(of, argnums=(0, 1)))(*args)
    lse = np.log(V - 1)
    z_loss = 1e-4 * lse**2 if name == "z-loss" else 0
    np.testing.assert_allclose(loss, np.sum(below + lse + z_loss), rtol=1e-6)
    # The label's logit falls by x, and that of no other entry moves with it.
    np.testing.assert_allclose(np.asarray(dx, np.float32)[:, 0], 1, rtol=2**-7)
    np.testing.assert_allclose(np.asarray(dweight, np.float32)[0, 0], -sum(below), rtol=2**-7)


# The first token's label is 3, as near to the largest logit as can be.
@interpreted
@pytest.mark.parametrize(
    "label, first, is_repeated",
    [
        pytest.param(3, 1, False, id="near", marks=full),
        pytest.param(0, 1, True, id="far"),
        pytest.param(IGNORED, 1, False, id="ignored"),
        pytest.param(IGNORED, np.nan, True, id="ignored NaN", marks=full),
    ],
)
def test_what_repeats_the_gemm(monkeypatch, label, first, is_repeated):
    """A column 0 far below the others matters to no token whose label is ignored. 1 s each."""
    seen = []

    def repetition(found, is_needed):
        seen.append(is_needed)
        return repeat(found, is_needed)

    repeat = exponentials.Repetition
    monkeypatch.setattr(exponentials, "Repetition", repetition)
    x, weight = np.zeros((9, 64), np.float32), np.zeros((V, 64), np.float32)
    x[:, 0], weight[0, 0] = 1, -50
    x[1, 0] = first
    labels = np.full(9, 3)
    labels[1] = exponentials.IGNORED if label == IGNORED else label

    def run(x, weight, labels):
        counts = labels != exponentials.IGNORED
        found, lse = exponentials.exponentials_of_linear(x, weight, labels, counts, num_columns=V)
        return found, lse, seen.pop()

    args = jnp.asarray(x, jnp.bfloat16), jnp.asarray(weight, jnp.bfloat16), jnp.asarray(labels)
    found, lse, is_needed = quick_jit(run)(*args)
    assert is_needed == is_repeated
    counted = np.flatnonzero(labels != exponentials.IGNORED)
    np.testing.assert_allclose(lse[counted], np.log(V - 1), rtol=1e-6)
    if label == IGNORED:
        assert not np.any(np.asarray(found.values, np.float32)[1])
