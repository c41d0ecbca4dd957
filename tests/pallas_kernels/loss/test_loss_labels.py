"""Labels: ignored labels, labels out of range, and dtypes."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from pallas_kernels import linear_cross_entropy, linear_log_probs
from support.loss_formulas import (
    BY_XLA_STRATEGY,
    CHUNK,
    IGNORED,
    T,
    V,
    as_jax,
    check,
    check_labels_out_of_range,
    each_strategy_and_reduction,
    each_xla_strategy,
    in_turn,
    make_arrays,
    put,
    run,
)


@each_strategy_and_reduction
def test_no_label_counts(strategy, reduction):
    arrays, labels = make_arrays()
    got = run(
        arrays,
        np.full_like(labels, IGNORED),
        reduction=reduction,
        **strategy,
    )
    for name, value in got.items():
        assert np.all(np.asarray(value) == 0), name


@each_strategy_and_reduction
def test_few_labels_count(strategy, reduction):
    arrays, labels = make_arrays()
    token = np.arange(T)
    cases = [token == 0, token == T - 1, token >= CHUNK, token < CHUNK, token != 7, token >= 0]
    for counts in cases:
        kept = np.where(counts, np.abs(labels) % V, np.int32(IGNORED))
        # The weights' gradients of a mean are differences of losses, and 0 for a single token.
        got = check(
            arrays,
            kept,
            reduction=reduction,
            **strategy,
            but=["token_weights"] if reduction == "mean" else [],
        )
        assert np.all(np.asarray(got["x"])[~counts] == 0)
        assert np.all(np.asarray(got["token_weights"])[~counts] == 0)


@in_turn("strategy, ignore_index", BY_XLA_STRATEGY, {str(i): i for i in (0, V - 1, -1)})
def test_ignore_index(strategy, ignore_index):
    arrays, labels = make_arrays()
    labels = put(put(labels, labels == IGNORED, ignore_index), 5, ignore_index)
    # The label -100, which other tests ignore, is out of range here.
    check(arrays, labels, ignore_index=ignore_index, **strategy)
    got = run(arrays, put(labels, 0, IGNORED), ignore_index=ignore_index, **strategy)
    assert np.isnan(got["loss"])


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.uint32], ids=jnp.dtype)
def test_label_dtypes(dtype):
    arrays, labels = make_arrays()
    ignore_index = -100 if dtype == jnp.int8 else 52
    options = {"implementation": "xla", "ignore_index": ignore_index}
    labels = put(labels, labels == IGNORED, ignore_index)
    check(arrays, labels.astype(dtype), **options)
    # 255 as uint8 and -1 as int8 have the same bits, and both are out of range.
    outside = 255 if dtype == jnp.uint8 else -1 if dtype == jnp.int8 else 2**32 - 1
    wrong = put(labels.astype(dtype), 3, outside)
    assert np.isnan(run(arrays, wrong, **options)["loss"])


@each_xla_strategy
def test_labels_of_64_bits(strategy):
    arrays, labels = make_arrays()
    want = run(arrays, labels, **strategy)
    with jax.enable_x64(True):
        long = labels.astype(np.int64)
        got = run(arrays, long, np.float32(1), **strategy)
        for label in (2**32, -(2**32) + 1, 2**62):
            wrong = run(arrays, put(long, 3, label), np.float32(1), **strategy)
            assert np.isnan(wrong["loss"]), label
        unsigned = put(long, long == IGNORED, 2**32 + 1).astype(np.uint64)
        wrong = run(arrays, unsigned, np.float32(1), **strategy)
    chex.assert_trees_all_close(got, want, rtol=1e-6)
    assert np.isnan(wrong["loss"])


@each_strategy_and_reduction
def test_a_label_out_of_range_is_nan(strategy, reduction):
    cases = V, V + 75, -1, -101, 2**31 - 1, -(2**31)
    check_labels_out_of_range(*make_arrays(), [9], cases, reduction=reduction, **strategy)


def test_check_labels_raises_at_once():
    arrays, labels = as_jax(make_arrays((2, 4)))
    loss = lambda labels: linear_cross_entropy(labels=labels, check_labels=True, **arrays)
    want = linear_cross_entropy(labels=labels, **arrays)
    chex.assert_trees_all_equal(loss(labels), want)
    with pytest.raises(
        checkify.JaxRuntimeError, match=r"label 57 at token 6 is neither in \[0, 53\)"
    ):
        loss(labels.at[1, 2].set(57))
    with pytest.raises(checkify.JaxRuntimeError, match=r"label -7 at token 0 .* ignore_index=-100"):
        loss(labels.at[0, 0].set(-7))


def test_check_labels_prints_a_label_of_64_bits(unchecked_shapes):
    x, weight = jnp.ones((2, 4)), jnp.ones((5, 4))
    labels: Any = np.array([1, 2**33 + 1])
    for fn in (linear_cross_entropy, linear_log_probs):
        with pytest.raises(checkify.JaxRuntimeError, match="label 8589934593 at token 1 is"):
            fn(x, weight, labels, check_labels=True)


def test_check_labels_raises_through_checkify_under_jit():
    arrays, labels = make_arrays()
    loss = functools.partial(linear_cross_entropy, check_labels=True, chunk_size=CHUNK)
    fn = jax.jit(
        checkify.checkify(jax.value_and_grad(lambda arrays, labels: loss(labels=labels, **arrays)))
    )
    error, (value, gradients) = fn(arrays, labels)
    error.throw()
    want = run(arrays, labels, implementation="xla")
    chex.assert_trees_all_close({"loss": value} | gradients, want, rtol=1e-5, atol=1e-8)
    error, _ = fn(arrays, put(labels, [11, 12], [-3, 99]))
    with pytest.raises(checkify.JaxRuntimeError, match="label -3 at token 11"):
        error.throw()
