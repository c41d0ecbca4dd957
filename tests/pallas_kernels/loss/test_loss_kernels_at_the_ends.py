"""The loss by its kernels at the ends of the number range, interpreted.

A program takes seconds to compile, so the tests of a strategy share one. They ask for the loss of
each token, except that the strategy "tokens" shares the mean loss with test_loss_kernels.py.
"""

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
    put,
    run,
)
from support.loss_kernels import (
    BY_KERNEL_STRATEGY,
    KT,
    KV,
    Z_LOSS,
    kernel_arrays,
    kernel_strategies,
    two_other_kernel_strategies,
)


def reduction_of(strategy):
    return "mean" if strategy == BY_KERNEL_STRATEGY["tokens"] else "none"


@interpreted
@kernel_strategies("in place")
def test_a_label_out_of_range_is_nan_in_the_kernels(strategy):
    # The last three are columns of the padding, of the vocabulary or of a chunk. Token 0 is the
    # first chunk.
    cases = [2**31 - 1, -(2**31), -1], [KV, 255, 260]
    check_labels_out_of_range(*kernel_arrays(), [0, 4, 8], cases, reduction="none", **strategy)


@interpreted
@two_other_kernel_strategies
@pytest.mark.parametrize("other", [False, pytest.param(True, marks=full)])
def test_nan_stays_in_its_token_in_the_kernels(strategy, other):
    reduction = reduction_of(strategy)
    if other:
        reduction = "none" if reduction == "mean" else "mean"
    check_nan_stays(*kernel_arrays(), 4, reduction=reduction, **strategy)


@interpreted
@two_other_kernel_strategies
# NumPy warns where the interpreter multiplies infinities.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_no_gradient_of_a_token_of_no_weight_in_the_kernels(strategy):
    # The logits of two ignored tokens are NaN and infinite, and their gradients are zero.
    arrays, labels = kernel_arrays()
    options = strategy | {"reduction": reduction_of(strategy)}
    tokens = [4, 7]
    labels = put(labels, tokens, IGNORED)
    broken = {"x": (tokens, 3), "token_weights": tokens}
    broken = {name: put(arrays[name], at, [np.nan, np.inf]) for name, at in broken.items()}
    got, want = run(arrays | broken, labels, **options), run(arrays, labels, **options)
    for name in ("loss", "x", "weight", "bias", "token_weights"):
        np.testing.assert_array_equal(np.asarray(got[name]), np.asarray(want[name]), name)
    assert np.all(np.asarray(got["x"])[tokens] == 0)


@interpreted
@two_other_kernel_strategies
def test_zero_coefficients_in_the_kernels(strategy):
    arrays, labels = kernel_arrays()
    options = strategy | {"reduction": reduction_of(strategy)}
    weights = arrays["token_weights"]
    got = check(arrays | {"token_weights": put(weights, [0, 5], 0)}, labels, **options)
    assert np.all(np.asarray(got["x"])[[0, 5]] == 0)
    got = run(arrays | {"token_weights": 0 * weights}, labels, **options)
    for name in ("loss", "x", "weight", "bias"):
        assert np.all(np.asarray(got[name]) == 0), name


@interpreted
@two_other_kernel_strategies
def test_huge_logits_in_the_kernels(strategy):
    # All values are integers, so every logit, up to 1e4, is the same in float32 and in float64.
    rng = np.random.default_rng(0)
    arrays, labels = kernel_arrays()
    arrays |= {
        "x": rng.integers(-9, 10, size=(KT, D)).astype(BF16),
        "weight": rng.integers(-99, 100, size=(KV, D)).astype(BF16),
        "bias": 0 * arrays["bias"],
    }
    assert np.max(np.abs(arrays["x"].astype(F32) @ arrays["weight"].astype(F32).T)) > 4e3
    options = strategy | {"reduction": reduction_of(strategy)}
    check(arrays, labels, but=["token_weights"], **options)


@interpreted
@pytest.mark.parametrize("strategy", ["exponentials", pytest.param("in place", marks=full)])
def test_a_z_loss_that_leaves_nothing_of_softmax(strategy):
    # All logits are -16, and then the derivative of the loss with respect to lse is 0.
    arrays, labels = kernel_arrays()
    arrays["x"][:] = np.eye(1, D)
    arrays["weight"][:, 0] = -16
    arrays["bias"][:] = 0
    options = {"z_loss": Z_LOSS, "reduction": "sum"}
    got = run(arrays, labels, **BY_KERNEL_STRATEGY[strategy], **options)
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
    arrays, labels = kernel_arrays()
    arrays["bias"][:] = 0
    x, weight = arrays["x"], arrays["weight"]
    x[:, -1], weight[:, -1] = 1, 0
    # Tokens 0 and 2 have no such logit. Tokens 3 (ignored) and 4 have it with the other sign.
    weight[7, -1], weight[130, -1] = above, above / 2
    x[[0, 2], -1], x[3:5, -1] = 0, -1
    labels[labels == 7] = 9
    # The options of other tests, for one program.
    options = {"reduction": "none"}
    if strategy == "exponentials":
        options = {"reduction": "sum", "z_loss": Z_LOSS}
    check(arrays, labels, **options, **BY_KERNEL_STRATEGY[strategy])


@interpreted
@two_other_kernel_strategies
# NumPy warns where the interpreter multiplies infinities.
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
    # They fill whole chunks and whole lines, the first ones or the last ones.
    arrays, labels = kernel_arrays()
    arrays["bias"] = put(arrays["bias"], columns, -np.inf)
    left = np.setdiff1d(np.arange(KV), np.arange(KV)[columns]).astype(np.int32)
    labels = np.where(labels == IGNORED, labels, left[labels % len(left)])
    got = check(arrays, labels, reduction=reduction_of(strategy), **strategy)
    for name in ("weight", "bias"):
        assert np.all(np.asarray(got[name])[columns] == 0), name


@interpreted
@kernel_strategies("tokens")
def test_very_negative_logits_in_the_kernels(strategy):
    # A kernel that read the padding, which is zeros, would give it all of the probability.
    arrays, labels = kernel_arrays()
    labels[:3] = 60, 120, 155  # columns of one chunk that are padding of the chunk before
    check(arrays | {"bias": arrays["bias"] - BF16(200)}, labels, slack=BASE_2, **strategy)


@interpreted
@kernel_strategies("in place")
def test_a_confident_token_in_the_kernels(strategy):
    arrays, labels = kernel_arrays()
    labels = np.arange(KT, dtype=np.int32)
    ones = np.ones(KT, np.float32)
    arrays |= {
        "x": (12.5 * np.eye(KT, D)).astype(BF16),
        "weight": np.eye(KV, D, dtype=BF16),
        "bias": np.zeros(KV, BF16),
        # With other weights, four of the bias' nine gradients lie so close to the middle of two
        # bfloat16 numbers that an ulp of the logsumexp decides, which differs between devices.
        "token_weights": ones,
    }
    got = check(arrays, labels, ones, reduction="none", slack=BASE_2, **strategy)
    exact = formula(arrays, labels, ones, reduction="none")
    # 1 - p is 9e-4 at the label, which p rounded to bfloat16 does not show. Two roundings to
    # bfloat16 err by 2**-7 at most.
    at_label = (np.arange(KT), labels)
    for name, at in (("x", at_label), ("bias", slice(None))):
        np.testing.assert_allclose(
            np.asarray(got[name], np.float64)[at], exact[name][at], rtol=2**-7, err_msg=name
        )
