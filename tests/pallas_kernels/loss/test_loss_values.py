"""Losses and gradients of every plan that runs without kernels, against the formula in float64."""

import math

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from support.loss_formulas import (
    BF16,
    BY_XLA_STRATEGY,
    EPS32,
    F16,
    F32,
    IGNORED,
    D,
    T,
    V,
    check,
    check_against_formula,
    check_nan_stays,
    each_strategy,
    each_strategy_and_reduction,
    each_xla_strategy,
    formula,
    full,
    in_turn,
    make_arrays,
    put,
    run,
)

# (leading axes, hidden, vocabulary, chunk). Tokens, hidden sizes and vocabularies are a tile, near
# a tile and far from one. Some chunks divide the tokens.
SHAPES = [
    ((), 64, 5, 4),
    ((2, 0), 8, 5, None),
    ((1,), 128, 2, 1),
    ((7,), 1, 127, 3),
    ((127,), 64, 128, 64),
    ((129,), 96, 129, 128),
    ((3, 43), 130, 101, 43),
    ((2, 3, 2, 3), 8, 1, 9),
]


@in_turn(
    "sizes, chunks",
    {str(sizes): sizes for sizes in SHAPES},
    {str(c): c for c in ((True, None), (False, 16), (False, 100))},
    but=[
        (str(((1,), 128, 2, 1)), str((False, 100))),
        (str(((7,), 1, 127, 3)), str((True, None))),
        (str(((127,), 64, 128, 64)), str((False, 16))),
    ],
)
def test_every_shape_in_bfloat16(sizes, chunks):
    shape, hidden, vocab, chunk_size = sizes
    of_tokens, vocab_chunk_size = chunks
    arrays, labels = make_arrays(shape, hidden, vocab, BF16, only=["x", "weight"])
    reduction = "sum" if len(shape) % 2 else "mean"
    options = {"chunk_size": chunk_size if of_tokens else None, "reduction": reduction}
    check(arrays, labels, implementation="xla", vocab_chunk_size=vocab_chunk_size, **options)


@in_turn(
    "sizes, case",
    {str(sizes): sizes for sizes in SHAPES[-3:-1]},
    {
        "xla_float32_none": ("xla", F32, "none"),
        "reference_bfloat16_none": ("reference", BF16, "none"),
        "reference_float32_mean": ("reference", F32, "mean"),
    },
)
def test_other_dtypes(sizes, case):
    shape, hidden, vocab, chunk_size = sizes
    implementation, dtype, reduction = case
    arrays, labels = make_arrays(shape, hidden, vocab, dtype, only=["x", "weight"])
    check(arrays, labels, implementation=implementation, reduction=reduction, chunk_size=chunk_size)


@in_turn(
    "strategy, dtypes",
    BY_XLA_STRATEGY,
    {
        "float16_float32": (F16, F32),
        "float32_bfloat16": (F32, BF16),
        "bfloat16_float32": (BF16, F32),
    },
)
def test_mixed_dtypes(strategy, dtypes):
    x_dtype, weight_dtype = dtypes
    arrays, labels = make_arrays()
    arrays |= {"x": arrays["x"].astype(x_dtype), "weight": arrays["weight"].astype(weight_dtype)}
    got = run(arrays, labels, **strategy)
    chex.assert_type([got["x"], got["weight"]], [x_dtype, weight_dtype])
    # The GEMMs round the weight to the dtype of x. Its gradient has the digits of its own dtype.
    used = arrays | {"weight": arrays["weight"].astype(x_dtype).astype(weight_dtype)}
    check_against_formula(got, used, labels, **strategy)
    if weight_dtype == F32:
        coarse = np.asarray(got["weight"].astype(x_dtype).astype(F32))
        assert np.mean(np.asarray(got["weight"]) == coarse) < 0.1


@each_xla_strategy
def test_small_weights_of_tokens_do_not_underflow_in_float16(strategy):
    # A caller may divide by a million tokens itself, and in float16 the factor 1e-6 has 4 bits.
    arrays, labels = make_arrays()
    arrays["x"] = arrays["x"].astype(F16)
    arrays["weight"] = arrays["weight"].astype(F16).astype(F32)
    ones = np.ones(T, np.float32)
    arrays["token_weights"] = ones
    want = check(arrays, labels, reduction="sum", **strategy)
    weighted = arrays | {"token_weights": 1e-6 * ones}
    for got in (
        run(weighted, labels, reduction="sum", **strategy),
        run(arrays, labels, 1e-6 * ones, reduction="none", **strategy),
    ):
        for name in ("weight", "bias"):
            error = np.asarray(got[name]) - 1e-6 * np.asarray(want[name])
            assert np.max(np.abs(error)) < 1e-3 * 1e-6 * np.max(np.abs(want[name])), name


@each_strategy_and_reduction
def test_logits_of_minus_infinity(strategy, reduction):
    # The logits of a whole first block are -inf, and so is its maximum.
    arrays, labels = make_arrays()
    arrays["bias"] = put(arrays["bias"], [*range(20), 40], -np.inf)
    labels = np.where(labels == IGNORED, labels, 20 + labels % 20)
    got = check(arrays, labels, reduction=reduction, **strategy)
    assert np.all(np.asarray(got["weight"])[:20] == 0)
    assert np.all(np.asarray(got["bias"])[:20] == 0)


@each_strategy
def test_very_negative_logits(strategy):
    # Logits of 0, as of padding, would have all of the probability.
    arrays, labels = make_arrays()
    arrays["bias"] -= 200
    check(arrays, labels, **strategy)


@each_strategy_and_reduction
def test_huge_logits(strategy, reduction):
    # All values are integers, so every logit, up to 1e4, is the same in float32 and in float64.
    rng = np.random.default_rng(0)
    arrays, labels = make_arrays()
    arrays |= {
        "x": rng.integers(-9, 10, size=(T, D)).astype(np.float32),
        "weight": rng.integers(-99, 100, size=(V, D)).astype(np.float32),
        "bias": 0 * arrays["bias"],
    }
    assert 5e3 < np.max(np.abs(arrays["x"] @ arrays["weight"].T)) < 2e4
    check(arrays, labels, reduction=reduction, **strategy)


@each_strategy
def test_equal_logits(strategy):
    arrays, labels = make_arrays()
    arrays |= {"x": 0 * arrays["x"], "bias": 0 * arrays["bias"] + 3}
    # The mean of equal losses does not depend on the weights, so their gradient is rounding alone.
    got = check(arrays, labels, **strategy, but=["token_weights"])
    assert abs(got["loss"] - math.log(V)) < 4 * EPS32 * math.log(V)
    assert np.max(np.abs(got["token_weights"])) < 4 * EPS32


@in_turn(
    "strategy, dtype",
    BY_XLA_STRATEGY,
    {"float32": F32, "bfloat16": BF16},
)
def test_a_confident_token_keeps_the_digits_of_its_gradient(strategy, dtype):
    # p is 0.999 at the label. Rounded to bfloat16 it is 1, and p - 1 would be 0.
    arrays, _ = make_arrays(dtype=dtype)
    labels = np.arange(T, dtype=np.int32) % D
    arrays |= {
        "x": (10.875 * np.eye(D)[labels]).astype(dtype),
        "weight": np.eye(V, D, dtype=dtype),
        "bias": np.zeros(V, dtype),
        "token_weights": np.ones(T, np.float32),
    }
    got = run(arrays, labels, reduction="sum", **strategy)
    exact = formula(arrays, labels, 1.0, reduction="sum")
    assert -1e-3 < exact["x"].min() < -9e-4
    for name in ("x", "weight"):
        # There are two roundings to dtype, and in p = exp(z - lse) an ulp of the lse, which is
        # 10.9. Each row of dweight adds up two tokens.
        ulps = 8 if name == "x" else 8 * 2 * 10.875
        np.testing.assert_allclose(
            np.asarray(got[name], np.float64),
            exact[name],
            rtol=float(jnp.finfo(dtype).eps),
            atol=ulps * EPS32,
            err_msg=name,
        )
    # The likelihood is never above 1.
    losses = run(arrays, labels, reduction="none", **strategy)["loss"]
    assert np.all(np.asarray(losses) >= 0)


@each_strategy_and_reduction
def test_nan_stays_in_its_token(strategy, reduction):
    check_nan_stays(*make_arrays(), 9, reduction=reduction, **strategy)


@pytest.mark.parametrize(
    "chunk_size", [1, 7, 37, *(pytest.param(size, marks=full) for size in (36, 38, 128, None))]
)
def test_chunk_sizes_agree(chunk_size):
    arrays, labels = make_arrays((37,), dtype=BF16)
    # The GEMMs lose nothing of these weights, and the gradient has the digits of float32.
    arrays["weight"] = arrays["weight"].astype(F32)
    got = check(arrays, labels, implementation="xla", chunk_size=chunk_size)
    # The dlogits are equal, so only the order of the sums differs.
    want = run(arrays, labels, implementation="xla", chunk_size=7)
    chex.assert_trees_all_close(got["weight"], want["weight"], atol=1e-6)
    # Only the last token counts.
    last = np.where(np.arange(37) == 36, 4, IGNORED).astype(np.int32)
    check(arrays, last, implementation="xla", chunk_size=chunk_size)


@pytest.mark.parametrize(
    "vocab_chunk_size", [1, 16, 53, *(pytest.param(size, marks=full) for size in (7, 52, 54, 128))]
)
def test_vocabulary_chunk_sizes_agree(vocab_chunk_size):
    arrays, labels = make_arrays((37,), dtype=BF16)
    arrays["weight"] = arrays["weight"].astype(F32)
    # The labels are the first and last columns of chunks of 7 and 16. The first chunk is short.
    labels[:14] = [0, 3, 4, 10, 11, 45, 46, 52, 5, 20, 21, 36, 37, 52]
    options = {"implementation": "xla", "chunk_size": None}
    got = check(arrays, labels, vocab_chunk_size=vocab_chunk_size, **options)
    want = run(arrays, labels, vocab_chunk_size=V, **options)
    # Only the order of the sum for the lse differs, which may change how a dlogit is rounded.
    chex.assert_trees_all_close(got["loss"], want["loss"], rtol=4 * EPS32)
    # A column of the vocabulary, and its sum over tokens, is in one chunk.
    np.testing.assert_allclose(got["weight"], want["weight"], rtol=0, atol=1e-4)


def dweight_error(num_chunks, accum_dtype):
    """Relative error of dweight, for all its 512 tokens in chunks."""
    arrays, labels = make_arrays((512,), 16, 33, BF16, only=["x", "weight"])
    arrays["weight"] = arrays["weight"].astype(F32)
    got = run(
        arrays,
        labels,
        implementation="xla",
        reduction="sum",
        chunk_size=512 // num_chunks,
        accum_dtype=accum_dtype,
    )["weight"]
    exact = formula(arrays, labels, 1.0, reduction="sum")["weight"]
    return np.linalg.norm(np.asarray(got) - exact) / np.linalg.norm(exact)


def test_the_error_of_dweight_is_flat_in_the_number_of_chunks():
    # The error is that of rounding the weight and the dlogits to bfloat16.
    one = dweight_error(1, "float32")
    for num_chunks in (8, 64, 256):
        assert dweight_error(num_chunks, "float32") < 1.01 * one, num_chunks
    # An accumulator with too few digits has a larger error, so the test can fail.
    assert dweight_error(256, "bfloat16") > 3 * one
