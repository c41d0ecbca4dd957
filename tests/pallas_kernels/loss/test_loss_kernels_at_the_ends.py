"""The loss by its kernels at the ends of the number range, interpreted."""

import math

import numpy as np
import pytest

from support.loss_formulas import (
    BASE_2,
    BF16,
    F32,
    IGNORED,
    D,
    check,
    check_labels_out_of_range,
    check_nan_stays,
    formula,
    full,
    interpreted,
    make_arrays,
    put,
    run,
)
from support.loss_kernels import (
    KERNEL_STRATEGIES,
    KT,
    KV,
    ONE_WARPGROUP,
    kernel_arrays,
    kernel_strategies,
    two_other_kernel_strategies,
)


@interpreted
@kernel_strategies("columns")
def test_a_label_out_of_range_is_nan_in_the_kernels(strategy):
    # The last three are columns of the padding, and of a chunk's. Token 0 is the first chunk.
    cases = [2**31 - 1, -(2**31), -1], [KV, 255, 260]
    check_labels_out_of_range(*kernel_arrays(), [0, 4, 8], cases, reduction="none", **strategy)


@interpreted
@kernel_strategies("tokens", "columns", "in place")
@pytest.mark.parametrize("reduction", ["none", pytest.param("mean", marks=full)])
def test_nan_stays_in_its_token_in_the_kernels(strategy, reduction):
    check_nan_stays(*kernel_arrays(), 4, reduction=reduction, **strategy)


@interpreted
@kernel_strategies("tokens", "columns", "in place")
# NumPy says so where the interpreter multiplies infinities.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_no_gradient_of_a_token_of_no_weight_in_the_kernels(strategy):
    # Its logits are NaN, or infinite, and the gradient of them is zero all the same.
    arrays, labels = kernel_arrays()
    tokens = [4, 7]
    labels = put(labels, tokens, IGNORED)
    broken = {"x": (tokens, 3), "token_weights": tokens}
    broken = {name: put(arrays[name], at, [np.nan, np.inf]) for name, at in broken.items()}
    got, want = run(arrays | broken, labels, **strategy), run(arrays, labels, **strategy)
    for name in ("loss", "x", "weight", "bias", "token_weights"):
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(want[name]), name)
    assert np.all(np.asarray(got["x"])[tokens] == 0)


@interpreted
@two_other_kernel_strategies
def test_zero_coefficients_in_the_kernels(strategy):
    arrays, labels = kernel_arrays()
    weights = arrays["token_weights"]
    got = check(arrays | {"token_weights": put(weights, [0, 5], 0)}, labels, **strategy)
    assert np.all(np.asarray(got["x"])[[0, 5]] == 0)
    got = run(arrays | {"token_weights": 0 * weights}, labels, **strategy)
    for name in ("loss", "x", "weight", "bias"):
        assert np.all(np.asarray(got[name]) == 0), name


@interpreted
@two_other_kernel_strategies
def test_huge_logits_in_the_kernels(strategy):
    # Integers, so that every logit, up to 1e4, is the same number in float32 and in float64.
    rng = np.random.default_rng(0)
    arrays, labels = kernel_arrays()
    arrays |= {
        "x": rng.integers(-9, 10, size=(KT, D)).astype(BF16),
        "weight": rng.integers(-99, 100, size=(KV, D)).astype(BF16),
        "bias": 0 * arrays["bias"],
    }
    assert np.max(np.abs(arrays["x"].astype(F32) @ arrays["weight"].astype(F32).T)) > 4e3
    check(arrays, labels, but=["token_weights"], **strategy)


@interpreted
@pytest.mark.parametrize("strategy", ["exponentials", pytest.param("in place", marks=full)])
def test_a_z_loss_that_leaves_nothing_of_softmax(strategy):
    # By a derivative of 0: of logits that are all -16, and so lse = log(V) - 16 for every token.
    arrays, labels = make_arrays((KT,), D, KV, BF16, only=["x", "weight"])
    arrays["x"][:] = np.eye(1, D)
    arrays["weight"][:, 0] = -16
    options = {"z_loss": 0.5 / (16 - math.log(KV)), "reduction": "sum"}
    strategy = KERNEL_STRATEGIES[strategy] | {"implementation": "mosaic_gpu"}
    got = run(arrays, labels, config=ONE_WARPGROUP, **strategy, **options)
    exact = formula(arrays, labels, 1.0, **options)
    for name in got:
        size = np.max(np.abs(exact[name]))
        error = np.abs(np.asarray(got[name], np.float64) - exact[name])
        np.testing.assert_array_less(error, 2**-7 * size + 1e-30, err_msg=name)


# A logit may be 44.4 above the label's before exponentials are made again.
FAR_BELOW = {("exponentials", 43), ("exponentials", 2000), ("in place", 46)}


@interpreted
@pytest.mark.parametrize(
    "strategy, above",
    [
        pytest.param(strategy, above, marks=() if (strategy, above) in FAR_BELOW else full)
        for strategy in ("exponentials", "in place")
        for above in (20, 43, 46, 150, 2000)
    ],
)
def test_labels_far_below_the_largest_logit(strategy, above):
    arrays, labels = make_arrays((KT,), D, KV, BF16, only=["x", "weight", "token_weights"])
    x, weight = arrays["x"], arrays["weight"]
    x[:, -1], weight[:, -1] = 1, 0
    # Of two tokens, an ignored one, and all that come after the first chunk.
    weight[7, -1], weight[130, -1] = above, above / 2
    x[[0, 2], -1], x[3:5, -1] = 0, -1
    labels[labels == 7] = 9
    options = {"implementation": "mosaic_gpu", "config": ONE_WARPGROUP}
    check(arrays, labels, **options, **KERNEL_STRATEGIES[strategy])


@interpreted
@two_other_kernel_strategies
# NumPy says so where the interpreter multiplies infinities.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(
    "columns",
    [
        pytest.param(slice(0, 50), marks=full),
        pytest.param(slice(50, 200), marks=full),
        slice(120, 250),
    ],
    ids=str,
)
def test_logits_of_minus_infinity_in_the_kernels(strategy, columns):
    # Whole chunks and whole lines of them, first and last.
    arrays, labels = kernel_arrays()
    arrays["bias"] = put(arrays["bias"], columns, -np.inf)
    left = np.setdiff1d(np.arange(KV), np.arange(KV)[columns]).astype(np.int32)
    labels = np.where(labels == IGNORED, labels, left[labels % len(left)])
    got = check(arrays, labels, **strategy)
    for name in ("weight", "bias"):
        assert np.all(np.asarray(got[name])[columns] == 0), name


@interpreted
@kernel_strategies("tokens")
def test_very_negative_logits_in_the_kernels(strategy):
    # Were the padding of zeros looked at, it would carry all of the probability.
    arrays, labels = kernel_arrays()
    labels[:3] = 60, 120, 155  # which are padding to the chunk before theirs
    check(arrays | {"bias": arrays["bias"] - BF16(200)}, labels, slack=BASE_2, **strategy)


@interpreted
@kernel_strategies("in place")
def test_a_confident_token_in_the_kernels(strategy):
    arrays, labels = kernel_arrays()
    labels = np.arange(KT, dtype=np.int32)
    arrays |= {
        "x": (12.5 * np.eye(KT, D)).astype(BF16),
        "weight": np.eye(KV, D, dtype=BF16),
        "bias": np.zeros(KV, BF16),
    }
    ones = np.ones(KT, np.float32)
    got = check(arrays, labels, ones, reduction="none", slack=BASE_2, **strategy)
    exact = formula(arrays, labels, ones, reduction="none")
    # 1 - p is 9e-4 at the label, which p rounded to bfloat16 does not show.
    at_label = (np.arange(KT), labels)
    np.testing.assert_allclose(
        np.asarray(got["x"], np.float64)[at_label], exact["x"][at_label], rtol=2**-7
    )
