"""Distillation of nothing, of masked classes, from narrow ids, and with infinite cotangents."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
    linear_cross_entropy,
    linear_distillation_loss,
    linear_distillation_loss_top_k,
)
from support.loss_formulas import interpreted
from support.numerics import quick_jit


def numbers(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize(
    "dtype, vocab, implementation",
    [
        (jnp.uint8, 256, "reference"),
        *((*ids, "xla") for ids in ((jnp.uint8, 256), (jnp.uint8, 300), (jnp.int16, 2**15))),
        pytest.param(jnp.uint8, 300, "reference", marks=pytest.mark.full),
        pytest.param(jnp.int16, 2**15, "reference", marks=pytest.mark.full),
    ],
)
def test_ids_of_a_dtype_that_does_not_hold_the_vocabulary(dtype, vocab, implementation):
    """The last entry of each list is no class."""
    x, weight = numbers(4, 8), numbers(vocab, 8, seed=1)
    ids = jnp.arange(20).reshape(4, 5)
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(x @ weight.T), ids, axis=1)
    log_probs = log_probs.at[:, 4].set(-jnp.inf)
    of = lambda ids: linear_distillation_loss_top_k(
        x, weight, log_probs, ids, implementation=implementation
    )
    np.testing.assert_array_equal(of(ids.astype(dtype)), of(ids))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_class_without_probability_in_both(implementation):
    x, weight = numbers(4, 8), numbers(32, 8, seed=1)
    mask = jnp.zeros(32).at[3].set(-jnp.inf)
    options = {"divergence": "reverse_kl", "implementation": implementation}
    of = lambda x, weight, mask: linear_distillation_loss(
        x, weight, -x, weight, bias=mask, teacher_bias=mask, **options
    )
    few = jnp.delete(weight, 3, axis=0)
    want = jax.value_and_grad(of)(x, few, jnp.zeros(31))
    for a, b in zip(jax.value_and_grad(of)(x, weight, mask), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("gap", [10, 17, 40])
def test_a_teacher_that_is_sure_of_the_top_k(gap, implementation):
    """The float32 sum of its probabilities is 1 from a gap of 17 on."""
    x, weight = numbers(4, 8), numbers(11, 8, seed=1)
    teacher = jax.nn.log_softmax(jnp.zeros(11).at[0].set(gap))[:2]
    ids, log_probs = jnp.broadcast_to(jnp.arange(2), (4, 2)), jnp.broadcast_to(teacher, (4, 2))
    of = lambda x: linear_distillation_loss_top_k(
        x, weight, log_probs, ids, divergence="reverse_kl", implementation=implementation
    )
    value, dx = jax.value_and_grad(of)(x)
    p = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    p = np.exp(p) / np.sum(np.exp(p), axis=1, keepdims=True)
    q = np.exp(np.asarray(teacher, np.float64))
    classes = np.log(np.stack([p[:, 0], p[:, 1], np.sum(p[:, 2:], axis=1)]))
    log_q = np.log(np.array([*q, max(1 - q.sum(), 2.0**-24)]))
    want = np.mean(np.sum(np.exp(classes) * (classes - log_q[:, None]), axis=0))
    assert np.all(np.isfinite(dx))
    # The float32 sum near 1 errs by 2^-24, a thousandth of the tail at a gap of 10.
    np.testing.assert_allclose(value, want, rtol=2e-3)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("wrong", ["log_probs", "ids"])
def test_wrong_entries_of_a_token_that_does_not_count(wrong, implementation):
    x, weight = numbers(4, 8), numbers(11, 8, seed=1)
    ids = jnp.broadcast_to(jnp.arange(3), (4, 3))
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(-x @ weight.T), ids, axis=1)
    if wrong == "ids":
        ids = ids.at[1, 0].set(11)
    else:
        log_probs = log_probs.at[1, 0].set(jnp.nan)
    counts = jnp.array([1, 0, 1, 1])
    of = lambda x, weight, implementation: linear_distillation_loss_top_k(
        x, weight, log_probs, ids, token_weights=counts, implementation=implementation
    )
    got = jax.value_and_grad(of, (0, 1))(x, weight, implementation)
    others = jnp.array([0, 2, 3])
    few = lambda x, weight: linear_distillation_loss_top_k(
        x[others], weight, log_probs[others], ids[others], implementation=implementation
    )
    loss, (dx, dweight) = got
    want, (dx_of_others, dweight_of_others) = jax.value_and_grad(few, (0, 1))(x, weight)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(dweight, dweight_of_others, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(dx, dx_of_others, rtol=1e-5, atol=1e-6)


def test_errors_and_plans_name_the_function_of_the_top_k():
    x, weight, ids = numbers(4, 8), numbers(11, 8, seed=1), jnp.zeros((4, 1), int)
    of = lambda x: linear_distillation_loss_top_k(x, weight, jnp.zeros((4, 1)), ids)
    with pytest.raises(NotImplementedError, match="linear_distillation_loss_top_k has a gradient"):
        jax.jvp(of, (x,), (x,))


@interpreted
def test_no_tokens_with_kernels():
    x, weight = numbers(0, 64, dtype=jnp.bfloat16), numbers(128, 64, seed=1)
    of = lambda x, weight: linear_distillation_loss(
        x, weight, x, weight, implementation="mosaic_gpu"
    )
    value, (dx, dweight) = quick_jit(jax.value_and_grad(of, argnums=(0, 1)))(x, weight)
    assert value == 0 and dx.shape == x.shape and not np.any(dweight)


@pytest.mark.parametrize("fn", [linear_cross_entropy, linear_distillation_loss])
def test_an_infinite_cotangent_of_a_token_that_does_not_count(fn):
    """The square root of a loss of 0 has an infinite derivative."""
    x, weight = numbers(4, 8), numbers(32, 8, seed=1)
    teacher = (jnp.array([3, 5, 7, 9]),) if fn is linear_cross_entropy else (-x, weight)
    counts = jnp.array([1, 1, 0, 1])

    def of(x, weight, counts):
        losses = fn(
            x, weight, *teacher, token_weights=counts, reduction="none", implementation="xla"
        )
        return jnp.sum(jnp.sqrt(losses))

    dx, dweight = jax.grad(of, argnums=(0, 1))(x, weight, counts)
    assert np.isfinite(dweight).all() and np.isfinite(dx).all() and not np.any(dx[2])
    assert np.any(dx[0])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("is_of_teacher", [False, True])
def test_the_gradient_of_a_weight_of_0_with_nan(implementation, is_of_teacher):
    """There is no loss to take."""
    x, weight = numbers(4, 8), numbers(32, 8, seed=1)
    broken = x.at[2].set(jnp.nan)
    student, teacher = (x, broken) if is_of_teacher else (broken, x)
    of = lambda counts: linear_distillation_loss(
        student,
        weight,
        -teacher,
        weight,
        token_weights=counts,
        reduction="sum",
        implementation=implementation,
    )
    gradient = jax.grad(of)(jnp.array([1.0, 1, 0, 1]))
    assert gradient[2] == 0 and np.all(gradient[jnp.array([0, 1, 3])] > 0)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_long_ids_are_not_cut(unchecked_shapes, implementation):
    """2^32 + 1 is no column 1. JAX has 32 bits, NumPy 64."""
    x, weight = numbers(4, 8), numbers(32, 8, seed=1)
    ids: Any = np.arange(20).reshape(4, 5)
    log_probs = jnp.log(jnp.full(ids.shape, 0.1))
    ids[2, 1] += 2**32
    losses = linear_distillation_loss_top_k(
        x, weight, log_probs, ids, reduction="none", implementation=implementation
    )
    np.testing.assert_array_equal(np.isnan(losses), [False, False, True, False])
