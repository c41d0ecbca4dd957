"""Linear cross-entropy against the formula written here, in float64 numpy, and its program.

Shapes are small and shared between tests wherever the values alone decide what is tested, because
compiling is what takes time here: `compiled` keeps one program for each set of options.
"""

import functools
import itertools
import math
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

from pallas_kernels import LossMetrics, linear_cross_entropy
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss import config as config_module
from pallas_kernels.loss.config import Config, chunk_sizes
from pallas_kernels.loss.mosaic_gpu import in_place, products
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.mosaic_gpu import statistics as linear_statistics
from pallas_kernels.loss.token_loss import LossOptions
from support.numerics import assert_as_accurate, quick_jit, rounded

REDUCTIONS = ["mean", "sum", "none"]
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EPS32 = float(np.finfo(np.float32).eps)
IGNORED = -100
T, D, V, CHUNK = 32, 24, 53, 16

# The kernels take exponentials base 2, so they round a logit times log2(e): a loss that is a small
# difference of large numbers errs by as much more.
BASE_2 = 1.2 * float(np.log2(np.e))

interpreted = pytest.mark.usefixtures("interpreted")
full = pytest.mark.full


def in_turn(names, *axes, also=()):
    """The cross of parameters, of which the normal run has every value, but not with every other.

    Args:
      names: those of the parameters.
      *axes: their values, by the names that tests have of them.
      also: further cases of the normal run, each by the names of its values.
    """
    longest = max(map(len, axes))
    chosen = {tuple(list(axis)[i % len(axis)] for axis in axes) for i in range(longest)}
    chosen |= set(also)
    cases = [
        pytest.param(
            *(axis[name] for axis, name in zip(axes, case, strict=True)),
            id="-".join(case),
            marks=() if case in chosen else full,
        )
        for case in itertools.product(*axes)
    ]
    return pytest.mark.parametrize(names, cases)


# 53 columns are 5 and three times 16.
STRATEGIES = {
    "reference": {"implementation": "reference"},
    "tokens": {"implementation": "xla", "chunk_size": CHUNK},
    "columns": {"implementation": "xla", "chunk_size": None, "vocab_chunk_size": 16},
    "both": {"implementation": "xla", "chunk_size": CHUNK, "vocab_chunk_size": 16},
}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
XLA_STRATEGIES = [name for name in STRATEGIES if name != "reference"]
each_xla_strategy = pytest.mark.parametrize(
    "strategy", [STRATEGIES[name] for name in XLA_STRATEGIES], ids=XLA_STRATEGIES
)
each_reduction = pytest.mark.parametrize("reduction", REDUCTIONS)
BY_REDUCTION = {reduction: reduction for reduction in REDUCTIONS}
BY_XLA_STRATEGY = {name: STRATEGIES[name] for name in XLA_STRATEGIES}


@np.errstate(all="ignore")  # -inf and NaN are among the inputs
def formula(
    arrays,
    labels,
    cotangent,
    *,
    ignore_index=IGNORED,
    reduction="mean",
    label_smoothing=0.0,
    z_loss=0.0,
    logit_softcap=None,
    compute: Any = np.float64,
    round_dlogits=None,
    round_logits=None,
    round_for=("losses", "lse"),
    round_exponentials=None,
    vocab_chunk_size=None,
):
    """The loss and the gradient of every array, by name, with the derivative worked out by hand.

    With `round_logits` the derivative is that of logits in memory, which are rounded to this dtype
    before the bias; `round_for` names what else is made of them, and not of unrounded logits. With
    `vocab_chunk_size` the lse of each chunk is rounded too. `round_exponentials` is the dtype of
    those, and of x times its factor, of `exponentials.py`.
    """
    given = {name: np.asarray(a).astype(compute) for name, a in arrays.items()}
    weight = given["weight"]
    x = given["x"].reshape(-1, weight.shape[1])
    labels = np.asarray(labels).astype(np.int64)
    shape, labels = labels.shape, labels.reshape(-1)
    valid = labels != ignore_index
    weights = given.get("token_weights", np.ones(shape, compute)).reshape(-1) * valid
    cotangent = np.asarray(cotangent, compute)

    def capped(z):
        z = z + given.get("bias", compute(0))
        return z if logit_softcap is None else logit_softcap * np.tanh(z / logit_softcap)

    def logsumexp(z):
        largest = np.max(z, -1, keepdims=True)
        largest = np.where(np.isneginf(largest), 0, largest)
        return largest + np.log(np.sum(np.exp(z - largest), -1, keepdims=True))

    def combined_logsumexp(z):
        if vocab_chunk_size is None:
            return logsumexp(z)
        ends = np.arange(z.shape[1], 0, -vocab_chunk_size)[:0:-1]
        parts = [logsumexp(part) for part in np.split(z, ends, axis=1)]
        return logsumexp(np.concatenate(parts, axis=1))

    raw = x @ weight.T
    stored = capped(raw if round_logits is None else raw.astype(round_logits).astype(compute))
    z = stored if "losses" in round_for else capped(raw)
    lse = combined_logsumexp(z)
    right = (np.arange(len(weight)) == labels[:, None]).astype(compute)
    target = right * (1 - label_smoothing) + label_smoothing / len(weight)
    nll = (lse - np.sum(np.where(right == 1, z, 0), -1, keepdims=True))[:, 0]
    losses = (1 - label_smoothing) * nll
    if label_smoothing:
        losses = losses + label_smoothing * (lse[:, 0] - np.mean(z, -1))
    losses = np.where(valid, losses + z_loss * lse[:, 0] ** 2, 0)
    z = stored
    lse = combined_logsumexp(z if "lse" in round_for else capped(raw))
    p = np.exp(z - lse)
    dz = p * (1 + 2 * z_loss * lse) - target
    if logit_softcap is not None:
        dz = dz * (1 - (z / logit_softcap) ** 2)

    total = np.sum(weights)
    factor = compute(1)
    if reduction == "mean":
        factor = 1 / total if total else compute(0)
    # All that a token's gradient is multiplied with before it is rounded.
    coefficients = weights * (cotangent.reshape(-1) if reduction == "none" else factor)
    dz = np.where(coefficients[:, None] == 0, 0, coefficients[:, None] * dz)
    dbias = np.sum(dz, 0)
    if round_dlogits is not None:
        # The exponents of float16 do not reach far.
        scale = np.max(np.abs(coefficients), initial=0) if round_dlogits == F16 else 1
        scale = compute(scale or 1)
        dz = (dz / scale).astype(round_dlogits).astype(compute) * scale
    if round_logits is not None:
        dbias = np.sum(dz, 0)  # of what is in memory
    if reduction == "none":
        after = compute(1)
        loss = (weights * losses).reshape(shape)
        dweights = cotangent.reshape(-1) * losses
    else:
        after = cotangent
        loss = np.sum(weights * losses) * factor
        dweights = factor * cotangent * valid * (losses - (loss if reduction == "mean" else 0))
    dx, dweight = dz @ weight, dz.T @ x
    if round_exponentials is not None:
        coarse = lambda a: a.astype(round_exponentials).astype(compute)
        largest = np.max(z, -1, keepdims=True)
        column = np.where((labels >= 0) & (labels < len(weight)), labels, 0)
        offset = z[np.arange(len(z)), column][:, None]
        offset = np.where(largest - offset <= 64 * np.log(2), offset, largest)
        slope = 1 + 2 * z_loss * lse
        sums = np.exp(lse - offset) / slope
        exact = np.exp(z - offset) - sums * right
        dz = coarse(exact)
        factor = coefficients[:, None] / sums
        at_label = lambda a: np.sum(np.where(right == 1, a, 0), -1, keepdims=True)
        is_rounded = at_label(dz) != 0
        factor *= np.where(is_rounded, at_label(exact) / np.where(is_rounded, at_label(dz), 1), 1)
        dx, dweight = dz @ weight * factor, dz.T @ coarse(x * factor)
        dbias = np.sum(dz * coarse(factor), 0)
    out = {
        "loss": loss,
        "x": (dx * after).reshape(arrays["x"].shape),
        "weight": dweight * after,
        "bias": dbias * after,
        "token_weights": dweights.reshape(shape),
    }
    return {name: value for name, value in out.items() if name == "loss" or name in arrays}


def put(array, index, value):
    """A copy of a numpy array with some elements replaced."""
    array = array.copy()
    array[index] = value
    return array


def make_arrays(shape=(T,), hidden=D, vocab=V, dtype=F32, *, seed=0, only=None):
    """Numpy arrays by name, and labels of which every fifth is ignored."""
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.normal(size=(*shape, hidden)).astype(dtype),
        "weight": (rng.normal(size=(vocab, hidden)) / math.sqrt(hidden)).astype(dtype),
        "bias": rng.normal(size=vocab).astype(dtype),
        "token_weights": np.asarray(rng.uniform(0.5, 2, size=shape), np.float32),
    }
    labels = rng.integers(vocab, size=shape)
    labels = np.where(np.arange(labels.size).reshape(shape) % 5 == 3, IGNORED, labels)
    if only is not None:
        arrays = {name: arrays[name] for name in only}
    return arrays, labels.astype(np.int32)


def as_jax(tree):
    return jax.tree.map(jnp.asarray, tree)


def make_cotangent(reduction, shape=(T,), seed=1) -> Any:
    if reduction != "none":
        return np.float32(1)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def loss_of(x, weight, labels, *, bias=None, bias_in_weight=False, lines=False, **options):
    """`linear_cross_entropy`, if asked to without a bias but with the same logits.

    Then `weight` has a column more, the bias, for which `x` is 1: what has a bias does not go the
    way of `exponentials.py`, and so the tests of biases test it, too. With `lines` it has 128 of
    them as well, and 512 rows, as `in_place.py` asks; the rows that nobody has given are far below
    the others, and their numbers are no labels.
    """
    if lines and bias is None:
        bias = jnp.zeros(len(weight), weight.dtype)
    if bias_in_weight and bias is not None:
        x = jnp.concatenate([x, jnp.ones((*x.shape[:-1], 1), x.dtype)], axis=-1)
        weight = jnp.concatenate([weight, bias[:, None].astype(weight.dtype)], axis=1)
        bias = None
    if lines:
        num_rows, hidden = weight.shape
        more = 512 - num_rows
        weight = jnp.pad(weight, ((0, more), (0, 128 - hidden)))
        weight = weight.at[num_rows:, hidden - 1].set(-3e4)
        x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, 128 - hidden)))
        labels = jnp.where((labels >= num_rows) & (labels < 512), 512, labels)
    return linear_cross_entropy(x, weight, labels, bias=bias, **options)


@functools.cache
def compiled(**options):
    """Loss and gradients by name, of `(arrays, labels, cotangent)`."""

    def run(arrays, labels, cotangent):
        fn = lambda arrays: loss_of(labels=labels, **arrays, **options)
        loss, vjp = jax.vjp(fn, arrays)
        return {"loss": loss} | vjp(cotangent)[0]

    return quick_jit(run)


def run(
    arrays,
    labels,
    cotangent=None,
    *,
    reduction="mean",
    chunk_size: int | None = CHUNK,
    config: Config | None = None,
    **options,
):
    if cotangent is None:
        cotangent = make_cotangent(reduction, labels.shape)
    options |= {"reduction": reduction, "chunk_size": chunk_size, "config": config}
    # In one order: the cache takes another for another program.
    fn = compiled(**{name: options[name] for name in sorted(options)})
    return fn(arrays, labels, cotangent)


def check_against_formula(
    got,
    arrays,
    labels,
    cotangent=None,
    *,
    but=(),
    implementation="xla",
    chunk_size=None,
    vocab_chunk_size=None,
    bias_in_weight=False,
    lines=False,
    max_logits_bytes=None,
    config=None,
    slack=1.2,
    **options,
):
    """Compares to float64, by the error of float32 with dlogits rounded to the dtype of `x`.

    The kernels round the logits in memory as well, where there are any, or exponentials.
    """
    reduction = options.get("reduction", "mean")
    rounding = {"round_dlogits": arrays["x"].dtype}
    vocabulary_alone = vocab_chunk_size is not None and chunk_size is None
    if vocabulary_alone:
        rounding["vocab_chunk_size"] = vocab_chunk_size
    has_exponentials = (
        implementation == "mosaic_gpu"
        and arrays["x"].dtype == BF16
        and (bias_in_weight or "bias" not in arrays)
        and not {"label_smoothing", "logit_softcap"} & options.keys()
    )
    if implementation == "mosaic_gpu" and not has_exponentials:
        forward = () if reduction == "none" else ("losses",)
        of_rounded = () if vocabulary_alone else ("lse", *forward)
        rounding |= {"round_logits": arrays["x"].dtype, "round_for": of_rounded}
    if cotangent is None:
        cotangent = make_cotangent(reduction, labels.shape)
    exact = formula(arrays, labels, cotangent, **options)
    in_float32 = functools.partial(
        formula, arrays, labels, cotangent, compute=np.float32, **options
    )
    if has_exponentials and not vocabulary_alone:
        low = in_float32(round_exponentials=BF16)
        if vocab_chunk_size is not None:
            # Of dlogits made once more; no rounding of logits, and a bias that is in the weight.
            again = in_float32(round_logits=F32, **rounding)
            low |= {name: again[name] for name in ("weight", "bias") if name in again}
    else:
        low = in_float32(**rounding)
    assert set(got) == set(exact)
    chex.assert_type(got["loss"], F32)
    for name in arrays:
        chex.assert_type(got[name], arrays[name].dtype)
    names = [name for name in exact if name not in but]
    pick = lambda values: [values[name] for name in names]
    low_precision = rounded(pick(low), pick(got))
    assert_as_accurate(pick(got), low_precision, pick(exact), names=names, slack=slack)


def check(
    arrays,
    labels,
    cotangent=None,
    *,
    chunk_size: int | None = CHUNK,
    config=None,
    but=(),
    slack=1.2,
    **options,
):
    options["chunk_size"] = chunk_size
    got = run(arrays, labels, cotangent, config=config, **options)
    check_against_formula(got, arrays, labels, cotangent, but=but, slack=slack, **options)
    return got


# Shapes and dtypes.

# (leading axes, hidden, vocabulary, chunk): tokens, hidden sizes and vocabularies around and off a
# tile; chunks that do and do not divide the tokens.
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
    {str(c): c for c in ((True, None), (False, 16), (False, 100), (True, 16))},
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
    also=[("tokens", "bfloat16_float32"), ("columns", "bfloat16_float32")],
)
def test_mixed_dtypes(strategy, dtypes):
    x_dtype, weight_dtype = dtypes
    arrays, labels = make_arrays()
    arrays |= {"x": arrays["x"].astype(x_dtype), "weight": arrays["weight"].astype(weight_dtype)}
    got = run(arrays, labels, **strategy)
    chex.assert_type([got["x"], got["weight"]], [x_dtype, weight_dtype])
    # The GEMMs take the weight rounded to the dtype of x; its gradient keeps the digits of its own.
    used = arrays | {"weight": arrays["weight"].astype(x_dtype).astype(weight_dtype)}
    check_against_formula(got, used, labels, **strategy)
    if weight_dtype == F32:
        coarse = np.asarray(got["weight"].astype(x_dtype).astype(F32))
        assert np.mean(np.asarray(got["weight"]) == coarse) < 0.1


@each_xla_strategy
def test_small_weights_of_tokens_do_not_underflow_in_float16(strategy):
    # A caller that normalizes by a million tokens itself: as a float16, 1e-6 has 4 bits.
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


# Options.

OPTIONS = [
    {"label_smoothing": 0.1},
    {"label_smoothing": 1.0},
    {"z_loss": 1e-2},
    {"logit_softcap": 1.5},
    {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 1.5},
]


@in_turn(
    "strategy, index",
    STRATEGIES,
    {str(options): index for index, options in enumerate(OPTIONS)},
    also=[(name, str(OPTIONS[-1])) for name in STRATEGIES],
)
def test_options(strategy, index):
    arrays, labels = make_arrays()
    reduction = REDUCTIONS[index % 3]
    check(arrays, labels, reduction=reduction, **strategy, **OPTIONS[index])


@in_turn("strategy, case", STRATEGIES, {"plain": ("mean", None), "softcap": ("sum", 1.5)})
def test_options_and_logits_of_minus_infinity(strategy, case):
    reduction, logit_softcap = case
    # Smoothing takes the mean of the logits: the loss is infinite (as in torch), its gradient is
    # not. A softcap makes -inf finite.
    arrays, labels = make_arrays()
    arrays["bias"] = put(arrays["bias"], 5, -np.inf)
    labels = np.where(labels == 5, np.int32(6), labels)
    options = {"label_smoothing": 0.1, "reduction": reduction}
    if logit_softcap is not None:
        options |= {"logit_softcap": logit_softcap, "z_loss": 1e-2}
    got = run(arrays, labels, **strategy, **options)
    exact = formula(arrays, labels, 1.0, **options)
    assert np.isinf(got["loss"]) == (logit_softcap is None)
    for name in ("x", "weight", "bias"):
        assert np.all(np.isfinite(got[name])), name
        chex.assert_trees_all_close(np.asarray(got[name], np.float64), exact[name], atol=1e-5)


@each_strategy
@each_reduction
def test_cotangents(strategy, reduction):
    arrays, labels = make_arrays()
    if reduction == "none":
        varied = make_cotangent("none")
        cotangents = [varied, put(varied, slice(0, None, 3), 0), -varied, 0 * varied]
    else:
        cotangents = [np.float32(c) for c in (1, 0, 2, -1, 1e-8)]
    for cotangent in cotangents:
        got = check(arrays, labels, cotangent, reduction=reduction, **strategy)
        if not np.any(cotangent):
            del got["loss"]
            assert all(np.all(np.asarray(g) == 0) for g in got.values())


@each_strategy
@each_reduction
def test_token_weights(strategy, reduction):
    arrays, labels = make_arrays()
    weights = arrays["token_weights"]
    for changed in (put(weights, slice(0, None, 4), 0), 0 * weights + 1, -weights, 1e-4 * weights):
        check(
            arrays | {"token_weights": changed},
            labels,
            reduction=reduction,
            **strategy,
        )
    got = run(
        arrays | {"token_weights": 0 * weights},
        labels,
        reduction=reduction,
        **strategy,
    )
    for name in ("loss", "x", "weight", "bias"):
        assert np.all(np.asarray(got[name]) == 0), name


# Labels.


@each_strategy
@each_reduction
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


@each_strategy
@each_reduction
def test_few_labels_count(strategy, reduction):
    arrays, labels = make_arrays()
    token = np.arange(T)
    cases = [token == 0, token == T - 1, token >= CHUNK, token < CHUNK, token != 7, token >= 0]
    for counts in cases:
        kept = np.where(counts, np.abs(labels) % V, np.int32(IGNORED))
        # In a mean the gradients of the weights are differences of losses, none for a single token.
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
    # What is ignored elsewhere, -100, is out of range here.
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
    # 255 as uint8 and -1 as int8 are out of range, whatever they are in the other.
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


def check_labels_out_of_range(arrays, labels, tokens, cases, *, reduction, **options):
    """Tokens with such labels have NaN, as the weight has, and the others what they had."""
    options["reduction"] = reduction
    good = run(arrays, labels, **options)
    others = lambda a: np.delete(np.asarray(a), tokens, axis=0)
    for case in cases:
        bad = run(arrays, put(labels, tokens, case), **options)
        for name in ("weight", "bias"):
            assert np.isnan(np.asarray(bad[name])).all(), (name, case)
        assert np.isnan(np.asarray(bad["x"])[tokens]).all(), case
        if reduction == "none":
            assert np.isnan(np.asarray(bad["loss"])[tokens]).all(), case
            for name in ("loss", "x", "token_weights"):
                np.testing.assert_array_equal(others(bad[name]), others(good[name]), name)
        else:
            assert np.isnan(bad["loss"]), case


@each_strategy
@each_reduction
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


# Values at the ends of the number range.


@each_strategy
@each_reduction
def test_logits_of_minus_infinity(strategy, reduction):
    # A whole leading block of them: the maximum of a block that a kernel sees first is -inf.
    arrays, labels = make_arrays()
    arrays["bias"] = put(arrays["bias"], [*range(20), 40], -np.inf)
    labels = np.where(labels == IGNORED, labels, 20 + labels % 20)
    got = check(arrays, labels, reduction=reduction, **strategy)
    assert np.all(np.asarray(got["weight"])[:20] == 0)
    assert np.all(np.asarray(got["bias"])[:20] == 0)


@each_strategy
def test_very_negative_logits(strategy):
    # Were the vocabulary padded with zeros, these would carry all of the probability.
    arrays, labels = make_arrays()
    arrays["bias"] -= 200
    check(arrays, labels, **strategy)


@each_strategy
@each_reduction
def test_huge_logits(strategy, reduction):
    # Integers, so that every logit, up to 1e4, is the same number in float32 and in float64.
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
    # The mean of equal losses does not depend on the weights: nothing but rounding is left.
    got = check(arrays, labels, **strategy, but=["token_weights"])
    assert abs(got["loss"] - math.log(V)) < 4 * EPS32 * math.log(V)
    assert np.max(np.abs(got["token_weights"])) < 4 * EPS32


@in_turn(
    "strategy, dtype",
    BY_XLA_STRATEGY,
    {"float32": F32, "bfloat16": BF16},
    also=[("tokens", "bfloat16"), ("columns", "float32")],
)
def test_a_confident_token_keeps_the_digits_of_its_gradient(strategy, dtype):
    # p = 0.999 at the label: rounded to bfloat16 before the 1 is taken away, p - 1 would be 0.
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
        # Two roundings to dtype, and in p = exp(z - lse) an ulp of the lse, which is 10.9. Each row
        # of dweight adds up two tokens.
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


def check_nan_stays(arrays, labels, token, *, reduction, **options):
    """NaN in a token makes its own gradient NaN and that of the weight, and no other token's."""
    options["reduction"] = reduction
    good = run(arrays, labels, **options)
    bad = run(arrays | {"x": put(arrays["x"], (token, 3), np.nan)}, labels, **options)
    others = lambda a: np.delete(np.asarray(a), token, axis=0)
    assert np.isnan(np.asarray(bad["x"])[token]).all()
    np.testing.assert_array_equal(others(bad["x"]), others(good["x"]))
    assert np.isnan(np.asarray(bad["weight"])).all()
    if reduction == "none":
        assert np.isnan(bad["loss"][token])
        np.testing.assert_array_equal(others(bad["loss"]), others(good["loss"]))
    else:
        assert np.isnan(bad["loss"])


@each_strategy
@each_reduction
def test_nan_stays_in_its_token(strategy, reduction):
    check_nan_stays(*make_arrays(), 9, reduction=reduction, **strategy)


# Chunks.


@pytest.mark.parametrize(
    "chunk_size", [1, 7, 36, 37, *(pytest.param(size, marks=full) for size in (38, 128, None))]
)
def test_chunk_sizes_agree(chunk_size):
    arrays, labels = make_arrays((37,), dtype=BF16)
    # Rounded to bfloat16, as the GEMMs see it, but float32, so that its gradient keeps its digits.
    arrays["weight"] = arrays["weight"].astype(F32)
    got = check(arrays, labels, implementation="xla", chunk_size=chunk_size)
    # The same dlogits, so the same sums but for their order.
    want = run(arrays, labels, implementation="xla", chunk_size=7)
    chex.assert_trees_all_close(got["weight"], want["weight"], atol=1e-6)
    # Tokens that count only in the last, short chunk of 7, or of 36.
    last = np.where(np.arange(37) == 36, 4, IGNORED).astype(np.int32)
    check(arrays, last, implementation="xla", chunk_size=chunk_size)


@pytest.mark.parametrize(
    "vocab_chunk_size", [1, 16, 52, 53, *(pytest.param(size, marks=full) for size in (7, 54, 128))]
)
def test_vocabulary_chunk_sizes_agree(vocab_chunk_size):
    arrays, labels = make_arrays((37,), dtype=BF16)
    arrays["weight"] = arrays["weight"].astype(F32)
    # Labels in the first and last column of all chunks of 7 and 16, the first of which are short.
    labels[:14] = [0, 3, 4, 10, 11, 45, 46, 52, 5, 20, 21, 36, 37, 52]
    options = {"implementation": "xla", "chunk_size": None}
    got = check(arrays, labels, vocab_chunk_size=vocab_chunk_size, **options)
    want = run(arrays, labels, vocab_chunk_size=V, **options)
    # Only the order of the sum for the lse differs, which may change how a dlogit is rounded.
    chex.assert_trees_all_close(got["loss"], want["loss"], rtol=4 * EPS32)
    # A column of the vocabulary is in one chunk, and so is the sum over tokens for it.
    np.testing.assert_allclose(got["weight"], want["weight"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "num_tokens, vocab_size, dtype, max_bytes, want",
    [
        # Without a limit: 512 MiB of 16 bits, or 2093 tokens; 1 GiB of float32, the same tokens.
        (8192, 128256, BF16, None, (2048, None)),
        (8192, 128256, F32, None, (2048, None)),
        (8193, 128256, BF16, None, (1792, None)),  # 5 chunks, none of them tiny
        (8192, 152064, BF16, None, (1536, None)),  # 1664 would fit
        (8192, 32000, BF16, None, (8192, None)),
        (4096, 128256, BF16, None, (1536, None)),  # 3 chunks instead of 2
        (8192, 2**21, BF16, None, (512, None)),  # 128 would fit
        (300, 2**21, BF16, None, (384, None)),
        (0, 32000, BF16, None, (128, None)),
        (1, 32000, BF16, None, (128, None)),
        # A limit holds as long as 768 tokens fit, or all there are.
        (8192, 128256, BF16, 2**28, (1024, None)),
        (8192, 128256, F32, 2**29, (1024, None)),
        (8192, 2**15, BF16, 768 * 2**16, (768, None)),
        (256, 2**15, BF16, 2**24, (256, None)),
        # Less, and columns are limited, tokens by the 2**10 numbers that a row of dweight has.
        (8192, 2**15, BF16, 768 * 2**16 - 1, (2048, 2816)),
        (8192, 128256, BF16, 2**24, (2048, 1024)),
        (8192, 128256, F32, 2**24, (1024, 512)),
        (512, 2**15, BF16, 2**24, (512, 11008)),
        (8192, 2**21, BF16, 2**24, (None, 1024)),  # 512 MiB, the most by default, are 128 tokens
        # At least a tile, even where that is too much.
        (8192, 128256, BF16, 1, (2048, 128)),
        (100, 50, F32, 1, (128, 128)),
    ],
    ids=str,
)
def test_default_chunk_sizes(num_tokens, vocab_size, dtype, max_bytes, want):
    num_bytes = 4 * 2**10 * vocab_size
    got = chunk_sizes(num_tokens, vocab_size, jnp.dtype(dtype), max_bytes, dweight_bytes=num_bytes)
    assert got == want
    tokens, columns = got
    if max_bytes is not None and max_bytes > 1:
        itemsize = jnp.dtype(dtype).itemsize
        for_tokens = max_bytes if columns is None else num_bytes
        assert min(tokens or 0, num_tokens) * vocab_size * itemsize <= for_tokens
        assert num_tokens * (columns or 0) * itemsize <= max_bytes


def test_chunk_sizes_where_dweight_is_small():
    sizes = functools.partial(chunk_sizes, 8192, 2**15, jnp.dtype(BF16), 2**24)
    assert sizes(dweight_bytes=2**15 * 512) == (256, 1024)
    assert sizes(dweight_bytes=2**15 * 511) == (256, 1024)  # what the limit itself allows
    smaller = functools.partial(chunk_sizes, 8192, 2**15, jnp.dtype(BF16), 2**23)
    assert smaller(dweight_bytes=2**15 * 511) == (None, 512)
    # Not both, whatever fits.
    assert sizes(dweight_bytes=None) == (None, 1024)
    larger = functools.partial(chunk_sizes, 8192, 2**15, jnp.dtype(BF16), 40 * 2**20)
    assert larger(dweight_bytes=None) == (None, 2560)
    assert larger(dweight_bytes=2**15 * 4096) == (2048, 2560)


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
    # What remains is the rounding of the weight and of the dlogits to bfloat16.
    one = dweight_error(1, "float32")
    for num_chunks in (8, 64, 256):
        assert dweight_error(num_chunks, "float32") < 1.01 * one, num_chunks
    # The same measure sees an accumulator that is too coarse.
    assert dweight_error(256, "bfloat16") > 3 * one


# Transformations.


@each_xla_strategy
def test_gradients_of_some_arrays_only(strategy):
    arrays, labels = as_jax(make_arrays())
    want = run(arrays, labels, **strategy)
    for name in arrays:
        rest = {k: v for k, v in arrays.items() if k != name}
        fn = lambda a, name=name, rest=rest: linear_cross_entropy(
            labels=labels, **strategy, **{name: a}, **rest
        )
        got = quick_jit(jax.grad(fn))(arrays[name])
        chex.assert_trees_all_close(got, want[name], rtol=1e-5, atol=1e-7)


@in_turn("strategy, reduction", BY_XLA_STRATEGY, BY_REDUCTION)
def test_a_vjp_can_be_called_again(strategy, reduction):
    check_repeated_vjp(*as_jax(make_arrays()), reduction=reduction, **strategy)


def check_repeated_vjp(arrays, labels, *, reduction: Any = "mean", **options):
    fn = lambda arrays: loss_of(labels=labels, reduction=reduction, **options, **arrays)
    loss, vjp = quick_jit(lambda arrays: jax.vjp(fn, arrays))(arrays)
    cotangent = make_cotangent(reduction, labels.shape)
    backward = quick_jit(lambda vjp, cotangent: vjp(cotangent)[0])
    first, second, twice = (backward(vjp, c) for c in (cotangent, cotangent, 2 * cotangent))
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_close(twice, jax.tree.map(lambda g: 2 * g, first), rtol=1e-6)
    check_against_formula({"loss": loss} | first, arrays, labels, reduction=reduction, **options)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_checkpoint(reduction):
    arrays, labels = as_jax(make_arrays())
    cotangent = make_cotangent(reduction)
    fn = jax.checkpoint(
        lambda arrays: linear_cross_entropy(
            labels=labels, implementation="xla", reduction=reduction, chunk_size=CHUNK, **arrays
        )
    )
    got = quick_jit(jax.grad(lambda arrays: jnp.vdot(fn(arrays), cotangent)))(arrays)
    want = run(arrays, labels, cotangent, implementation="xla", reduction=reduction)
    chex.assert_trees_all_close({"loss": want["loss"]} | got, want, rtol=1e-5, atol=1e-7)


def test_scan_and_donation():
    arrays, labels = make_arrays(only=["x", "weight"])

    def step(arrays, labels):
        fn = lambda arrays: linear_cross_entropy(
            labels=labels, implementation="xla", chunk_size=CHUNK, **arrays
        )
        loss, gradients = jax.value_and_grad(fn)(arrays)
        return jax.tree.map(lambda a, g: a - 0.5 * g, arrays, gradients), loss

    batches = np.stack([labels, labels[::-1], labels])
    scanned, losses = quick_jit(lambda a, b: jax.lax.scan(step, a, b))(arrays, batches)
    donating = quick_jit(step, donate_argnums=0)
    state = as_jax(arrays)
    for batch, want in zip(batches, losses, strict=True):
        previous = state
        state, loss = donating(state, batch)
        chex.assert_trees_all_close(loss, want, rtol=1e-5)
        assert all(a.is_deleted() for a in jax.tree.leaves(previous))
    chex.assert_trees_all_close(state, scanned, rtol=1e-5, atol=1e-6)
    assert losses[2] < losses[0]


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_vmap_is_the_loop(reduction):
    arrays, labels = make_arrays((3, T))
    cotangents = make_cotangent("none", (3, T))
    if reduction == "mean":
        cotangents = cotangents[:, 0]
    axes = {"x": 0, "weight": None, "bias": None, "token_weights": 0}
    fn = compiled(chunk_size=CHUNK, config=None, implementation="xla", reduction=reduction)
    got = jax.vmap(fn, in_axes=(axes, 0, 0))(arrays, labels, cotangents)
    for i in range(3):
        one = arrays | {name: arrays[name][i] for name in ("x", "token_weights")}
        want = fn(one, labels[i], cotangents[i])
        chex.assert_trees_all_close({k: v[i] for k, v in got.items()}, want, rtol=1e-4, atol=1e-6)


def test_without_jit_and_without_names():
    arrays, labels = as_jax(make_arrays((9,), 8, 11))
    loss = functools.partial(linear_cross_entropy, labels=labels)
    got = jax.grad(lambda arrays: loss(**arrays))(arrays)
    want = run(arrays, labels, implementation="xla", chunk_size=None)
    chex.assert_trees_all_close({"loss": loss(**arrays)} | got, want, rtol=1e-5, atol=1e-7)


@each_strategy
def test_repeated_runs_have_the_same_bits(strategy):
    arrays, labels = make_arrays()
    one, two = (run(arrays, labels, **strategy) for _ in range(2))
    chex.assert_trees_all_equal(one, two)


# By tracing alone: what raises runs no kernel.
TRACES = {
    f"{implementation}_{name}": {"implementation": implementation, **chunks}
    for implementation in ("xla", "mosaic_gpu")
    for name, chunks in {
        "tokens": {"chunk_size": CHUNK},
        "columns": {"vocab_chunk_size": 16},
        "both": {"chunk_size": CHUNK, "vocab_chunk_size": 16},
    }.items()
}


@interpreted
@in_turn("options, reduction", TRACES, BY_REDUCTION)
def test_forward_mode_is_refused(options, reduction):
    arrays, labels = as_jax(make_arrays(dtype=BF16, only=["x", "weight"]))
    fn = lambda arrays: linear_cross_entropy(
        labels=labels, reduction=reduction, **options, **arrays
    )
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda a: jax.jvp(fn, (a,), (a,))).lower(arrays)


@in_turn(
    "options, reduction, twice",
    TRACES,
    BY_REDUCTION,
    {fn.__name__: fn for fn in (jax.grad, jax.jacfwd, jax.linearize)},
    also=[
        ("xla_tokens", "none", "jacfwd"),
        ("xla_columns", "mean", "linearize"),
        ("xla_both", "sum", "grad"),
        ("mosaic_gpu_tokens", "none", "linearize"),
        ("mosaic_gpu_columns", "mean", "grad"),
        ("mosaic_gpu_both", "sum", "jacfwd"),
    ],
)
def test_a_second_derivative_is_refused(options, reduction, twice):
    arrays, labels = as_jax(make_arrays(dtype=BF16, only=["x", "weight"]))
    fn = lambda arrays: jnp.sum(
        linear_cross_entropy(labels=labels, reduction=reduction, **options, **arrays)
    )

    def size_of_gradient(arrays):
        leaves = jax.tree.leaves(jax.grad(fn)(arrays))
        return sum(jnp.sum(jnp.square(g.astype(F32))) for g in leaves)

    def second(arrays):
        if twice is jax.linearize:
            return jax.linearize(size_of_gradient, arrays)[0]
        return twice(size_of_gradient)(arrays)

    message = f"'{options['implementation']}' of linear_cross_entropy has no .* no second"
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(second, arrays)


def test_a_second_derivative_of_the_reference():
    arrays, labels = as_jax(make_arrays((5,), 4, 7))
    fn = lambda x: linear_cross_entropy(
        labels=labels, implementation="reference", **(arrays | {"x": x})
    )
    x = arrays["x"]
    along = quick_jit(jax.grad(fn))
    product = quick_jit(jax.grad(lambda x: jnp.vdot(jax.grad(fn)(x), x)))(x)
    step = 1e-2 * x
    numeric = (along(x + step) - along(x - step)) / 2e-2
    # The derivative of <g(x), x> is H x + g.
    chex.assert_trees_all_close(product - along(x), numeric, atol=1e-3)


# Metrics.


@in_turn("strategy, reduction", STRATEGIES, BY_REDUCTION)
def test_metrics(strategy, reduction):
    arrays, labels = make_arrays()
    # Entries 7 and 30 are the first and the second largest of every token, and equal.
    arrays["weight"] = put(arrays["weight"], 30, arrays["weight"][7])
    arrays["bias"] = put(arrays["bias"], [7, 30], 9)
    labels = put(put(labels, slice(0, None, 4), 7), slice(1, None, 4), 30)
    labels = put(labels, 4, IGNORED)
    options = {"z_loss": 1e-2, "label_smoothing": 0.1, "reduction": reduction}

    @quick_jit
    def both(arrays, cotangent):
        fn = functools.partial(
            linear_cross_entropy,
            labels=jnp.asarray(labels),
            return_metrics=True,
            **strategy,
            **options,
        )
        (loss, metrics), vjp = jax.vjp(lambda arrays: fn(**arrays), arrays)
        # Were the metrics differentiated through, their cotangents would change the gradients.
        ones: Any = [np.zeros((), jax.dtypes.float0), *[np.float32(1)] * 4]
        return {"loss": loss} | vjp((cotangent, LossMetrics(*ones)))[0], metrics

    cotangent = make_cotangent(reduction)
    got, metrics = both(arrays, cotangent)
    want = run(arrays, labels, cotangent, **strategy, **options)
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)

    valid = np.asarray(labels) != IGNORED
    weights = np.asarray(arrays["token_weights"], np.float64) * valid
    mean = lambda values: np.sum(weights * values) / np.sum(weights)
    plain = {name: arrays[name] for name in ("x", "weight", "bias")}
    nll = formula(plain, labels, make_cotangent("none"), reduction="none")["loss"]
    x, weight, bias = (np.asarray(a, np.float64) for a in plain.values())
    logits = x @ weight.T + bias
    lse = np.log(np.sum(np.exp(logits), -1))
    expected = LossMetrics(
        num_tokens=valid.sum(),
        nll=mean(nll),
        z_loss=mean(1e-2 * lse**2),
        accuracy=mean(np.asarray(labels) == 7),
        lse=mean(lse),
    )
    assert np.all(np.argmax(logits, -1) == 7)
    chex.assert_type(list(metrics), [jnp.int32, F32, F32, F32, F32])
    for name in LossMetrics._fields:
        np.testing.assert_allclose(
            np.asarray(getattr(metrics, name), np.float64),
            np.asarray(getattr(expected, name), np.float64),
            rtol=1e-6,
            err_msg=name,
        )


@each_strategy
def test_metrics_without_a_token(strategy):
    arrays, labels = make_arrays((4,), 8, 11, only=["x", "weight"])
    fn = functools.partial(linear_cross_entropy, return_metrics=True, z_loss=0.1, **strategy)
    _, metrics = quick_jit(fn)(labels=np.full_like(labels, IGNORED), **arrays)
    assert [float(m) for m in metrics] == [0] * 5


# The kernels, interpreted: with few threads, which takes less time than with the default;
# test_logits_kernel.py has the others.

ONE_WARPGROUP = Config(logits=logits_kernel.Config(warpgroups=1, slots=2, max_lines=4))
# 9 tokens are 1 and 8; 250 columns are 50 and twice 100, each padded to 128.
KT, KV = 9, 250
KERNEL_STRATEGIES = {
    "tokens": {"chunk_size": 8},
    "columns": {"chunk_size": None, "vocab_chunk_size": 100},
    "exponentials": {"chunk_size": 8, "bias_in_weight": True},
    "both": {"chunk_size": 8, "vocab_chunk_size": 100, "bias_in_weight": True},
    # Copies of 128 rows, of 128 columns of 16 bits, and three bands.
    "in place": {
        "chunk_size": None,
        "max_logits_bytes": 2**15,
        "bias_in_weight": True,
        "lines": True,
    },
}
BY_KERNEL_STRATEGY = {
    name: {"implementation": "mosaic_gpu", "config": ONE_WARPGROUP, **chunks}
    for name, chunks in KERNEL_STRATEGIES.items()
}


def kernel_strategies(*names):
    """The cross of strategies, of which the normal run has these."""
    cases = [
        pytest.param(strategy, id=name, marks=() if name in names else full)
        for name, strategy in BY_KERNEL_STRATEGY.items()
    ]
    return pytest.mark.parametrize("strategy", cases)


each_kernel_strategy = kernel_strategies(*KERNEL_STRATEGIES)
# A program is seconds of compilation. "columns" and "in place" have all loops of the others,
# "tokens" has the kernel over logits in memory.
two_kernel_strategies = kernel_strategies("columns", "in place")
two_other_kernel_strategies = kernel_strategies("tokens", "in place")
ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 1.5}


def kernel_arrays(dtype=BF16, **options):
    return make_arrays((KT,), D, KV, dtype, **options)


@interpreted
@pytest.mark.parametrize(
    "num_tokens, vocab, dtype, reduction, chunks",
    [
        (0, 100, BF16, "mean", {"chunk_size": 8}),
        pytest.param(1, 128, F16, "sum", {"chunk_size": 8}, marks=full),
        pytest.param(7, 127, BF16, "mean", {"chunk_size": 8}, marks=full),
        pytest.param(8, 129, F16, "none", {"chunk_size": 8}, marks=full),
        (9, 1, BF16, "sum", {"chunk_size": 8}),
        pytest.param(9, 100, F16, "mean", {"chunk_size": 8}, marks=full),
        pytest.param(17, 1000, BF16, "none", {"chunk_size": 8}, marks=full),
        (0, 129, BF16, "none", {"vocab_chunk_size": 128}),
        pytest.param(1, 1, BF16, "mean", {"vocab_chunk_size": 128}, marks=full),
        pytest.param(9, 127, F16, "sum", {"vocab_chunk_size": 128}, marks=full),
        pytest.param(8, 129, BF16, "mean", {"vocab_chunk_size": 128}, marks=full),
        pytest.param(5, 100, F16, "none", {"vocab_chunk_size": 16}, marks=full),
        pytest.param(5, 1000, BF16, "sum", {"vocab_chunk_size": 300}, marks=full),
        (0, 129, BF16, "sum", {"chunk_size": 8, "vocab_chunk_size": 128}),
        pytest.param(1, 129, BF16, "mean", {"chunk_size": 8, "vocab_chunk_size": 128}, marks=full),
        (9, 127, F16, "mean", {"chunk_size": 8, "vocab_chunk_size": 100}),
        pytest.param(17, 500, BF16, "none", {"chunk_size": 8, "vocab_chunk_size": 128}, marks=full),
    ],
    ids=str,
)
def test_kernel_shapes(num_tokens, vocab, dtype, reduction, chunks):
    arrays, labels = make_arrays((num_tokens,), D, vocab, dtype, only=["x", "weight"])
    if num_tokens > 1:
        labels[:2] = 0, vocab - 1
    options = {"chunk_size": None, "reduction": reduction, **chunks}
    check(arrays, labels, implementation="mosaic_gpu", config=ONE_WARPGROUP, **options)


@interpreted
def test_kernels_by_default():
    arrays, labels = make_arrays((2, 2), 72, 600, BF16)
    check(arrays, labels, implementation="mosaic_gpu", chunk_size=None, **ALL_OPTIONS)


@interpreted
@pytest.mark.parametrize(
    "strategy, reduction, dtype",
    [
        pytest.param("tokens", "mean", BF16, marks=full),
        pytest.param("tokens", "none", F16, marks=full),
        ("columns", "sum", F16),
        pytest.param("columns", "none", BF16, marks=full),
    ],
)
def test_kernels_with_all_options(strategy, reduction, dtype):
    arrays, labels = kernel_arrays(dtype)
    options = {"implementation": "mosaic_gpu", "config": ONE_WARPGROUP} | ALL_OPTIONS
    check(arrays, labels, reduction=reduction, **options, **KERNEL_STRATEGIES[strategy])


@interpreted
@kernel_strategies("tokens", "in place")
def test_a_loss_alone_has_float32_logits(strategy):
    arrays, labels = kernel_arrays()
    options = {name: value for name, value in strategy.items() if name != "config"}
    loss = quick_jit(lambda arrays: loss_of(labels=jnp.asarray(labels), **options, **arrays))(
        arrays
    )
    exact = formula(arrays, labels, 1.0)["loss"]
    # A tenth of what rounded logits cost.
    rounded_logits = formula(arrays, labels, 1.0, round_logits=BF16)["loss"]
    assert abs(loss - exact) < min(4 * EPS32 * abs(exact), 0.1 * abs(rounded_logits - exact))


@interpreted
@two_other_kernel_strategies
def test_kernels_with_few_labels_that_count(strategy):
    arrays, labels = kernel_arrays()
    token = np.arange(KT)
    # The first chunk of tokens is token 0.
    for counts in (token == 0, token == KT - 1, token < 0):
        kept = np.where(counts, np.abs(labels) % KV, np.int32(IGNORED))
        got = check(arrays, kept, but=["token_weights"], **strategy)
        for name in ("x", "token_weights"):
            assert np.all(np.asarray(got[name])[~counts] == 0), name
        if not np.any(counts):
            assert all(np.all(np.asarray(value) == 0) for value in got.values())


@interpreted
@kernel_strategies("columns")
def test_kernels_with_labels_at_the_ends_of_chunks(strategy):
    arrays, labels = kernel_arrays()
    labels[:8] = 0, 49, 50, 149, 150, 249, 127, 128
    check(arrays, labels, reduction="none", **strategy)


@interpreted
@two_kernel_strategies
def test_a_label_out_of_range_is_nan_in_the_kernels(strategy):
    # The last three are columns of the padding, and of a chunk's. Token 0 is the first chunk.
    cases = [2**31 - 1, -(2**31), -1], [KV, 255, 260]
    check_labels_out_of_range(*kernel_arrays(), [0, 4, 8], cases, reduction="none", **strategy)


def test_the_kernels_refuse_64_bit_mode():
    arrays, labels = kernel_arrays()
    with (
        jax.enable_x64(True),
        pytest.raises(NotImplementedError, match="jax_enable_x64"),
    ):
        run(arrays, labels.astype(np.int64), np.float32(1), implementation="mosaic_gpu")


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
@pytest.mark.parametrize(
    "strategy, case",
    [
        pytest.param("exponentials", (0.05, 0), marks=full),
        pytest.param("exponentials", (0.3, -10), marks=full),
        pytest.param("in place", (0.05, 0), marks=full),
        ("in place", (0.3, -10)),
    ],
)
def test_z_loss_by_exponentials(strategy, case):
    z_loss, bias = case
    # With the second, 1 + 2 · z_loss · lse is below -1.
    options = {"implementation": "mosaic_gpu", "z_loss": z_loss, **KERNEL_STRATEGIES[strategy]}
    arrays, labels = kernel_arrays()
    arrays["bias"] = (arrays["bias"].astype(F32) + bias).astype(BF16)
    check(arrays, labels, config=ONE_WARPGROUP, **options)


@interpreted
@pytest.mark.parametrize(
    "strategy", ["exponentials", *(pytest.param(n, marks=full) for n in ("both", "in place"))]
)
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
FAR_BELOW = {("exponentials", 43), ("exponentials", 2000), ("in place", 46), ("in place", 20)}


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
@two_other_kernel_strategies
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


@interpreted
@kernel_strategies("tokens")
@pytest.mark.parametrize("reduction", ["sum"])
def test_metrics_of_the_kernels(strategy, reduction):
    arrays, labels = kernel_arrays()
    # Columns 7 and 130 are the largest of every token, and equal; in chunks, 7 and 130 are apart.
    arrays["weight"] = put(arrays["weight"], 130, arrays["weight"][7])
    arrays["bias"] = put(arrays["bias"], [7, 130], 20)
    labels = np.array([7, 130, 7, 130, 3, IGNORED, 249, 7, 0], np.int32)
    options = {name: value for name, value in strategy.items() if name != "config"}
    has_exponentials = "bias_in_weight" in strategy
    z_loss = 1e-2

    @quick_jit
    def both(arrays):
        fn = functools.partial(
            loss_of,
            labels=jnp.asarray(labels),
            return_metrics=True,
            reduction=reduction,
            z_loss=z_loss,
            **options,
        )
        total = lambda arrays: jax.tree.map(jnp.sum, fn(**arrays))
        alone = fn(**arrays)[1]
        _, with_gradient = jax.value_and_grad(total, has_aux=True)(arrays)[0]
        return alone, with_gradient

    found = both(arrays)
    x, weight, bias, weights = (np.asarray(a, np.float64) for a in arrays.values())
    weights *= labels != IGNORED
    logits = x @ weight.T
    for metrics, in_memory in zip(
        found, (False, bool(strategy["chunk_size"]) and not has_exponentials), strict=True
    ):
        z = logits.astype(BF16).astype(np.float64) if in_memory else logits
        z = z + bias
        lse = np.logaddexp.reduce(z, axis=1)
        mean = lambda values: np.sum(weights * values) / np.sum(weights)
        expected = LossMetrics(
            num_tokens=np.sum(labels != IGNORED),
            nll=mean(lse - z[np.arange(KT), np.maximum(labels, 0)]),
            z_loss=mean(z_loss * lse**2),
            accuracy=mean(labels == 7),
            lse=mean(lse),
        )
        chex.assert_trees_all_close(
            [np.asarray(m, np.float64) for m in metrics],
            [np.asarray(e, np.float64) for e in expected],
            rtol=1e-6,
        )


@interpreted
@kernel_strategies("tokens")
def test_a_float32_weight_in_the_kernels(strategy):
    has_exponentials = "bias_in_weight" in strategy
    x_dtype = F16 if strategy["chunk_size"] and not has_exponentials else BF16
    arrays, labels = kernel_arrays(F32)
    arrays["x"] = arrays["x"].astype(x_dtype)
    if has_exponentials:
        arrays["bias"] = arrays["bias"].astype(x_dtype)
    got = run(arrays, labels, **strategy)
    chex.assert_type([got["x"], got["weight"]], [x_dtype, F32])
    used = arrays | {"weight": arrays["weight"].astype(x_dtype).astype(F32)}
    options = {name: value for name, value in strategy.items() if name != "config"}
    check_against_formula(got, used, labels, **options)
    coarse = np.asarray(got["weight"].astype(x_dtype).astype(F32))
    assert np.mean(np.asarray(got["weight"]) == coarse) < 0.1


# 128 wide, as our GEMM of dweight asks; the other arrays are narrower, their products XLA's.
@interpreted
@pytest.mark.parametrize(
    "chunks, reduction, x_dtype, weight_dtype",
    [
        pytest.param({"vocab_chunk_size": 128}, "mean", BF16, BF16, marks=full),
        ({"vocab_chunk_size": 100}, "none", F16, F32),
        pytest.param({"chunk_size": 8, "vocab_chunk_size": 100}, "sum", BF16, F32, marks=full),
        pytest.param({"chunk_size": 8, "vocab_chunk_size": 128}, "mean", F16, F16, marks=full),
    ],
    ids=str,
)
def test_dweight_by_our_gemm(chunks, reduction, x_dtype, weight_dtype):
    arrays, labels = make_arrays((KT,), 128, KV, weight_dtype, only=["x", "weight"])
    arrays["x"] = arrays["x"].astype(x_dtype)
    options = {"implementation": "mosaic_gpu", "config": ONE_WARPGROUP, "chunk_size": None} | chunks
    on_device, labels_there = as_jax((arrays, labels))
    loss = lambda arrays: jnp.sum(loss_of(labels=labels_there, **options, **arrays))
    assert "weight_gradient" in str(jax.make_jaxpr(jax.grad(loss))(on_device))
    got = run(arrays, labels, reduction=reduction, **options)
    chex.assert_type([got["x"], got["weight"]], [x_dtype, weight_dtype])
    used = arrays | {"weight": arrays["weight"].astype(x_dtype).astype(weight_dtype)}
    del options["config"]
    check_against_formula(got, used, labels, reduction=reduction, **options)


@interpreted
@pytest.mark.parametrize(
    "strategy, name",
    [
        pytest.param(strategy, wanted, id=f"{name}-{wanted}", marks=() if runs else full)
        for name, strategy in BY_KERNEL_STRATEGY.items()
        for wanted in ("weight", "x")
        for runs in [
            name == "in place" or (name, wanted) in {("tokens", "weight"), ("columns", "x")}
        ]
    ],
)
def test_gradients_of_some_arrays_only_in_the_kernels(strategy, name):
    arrays, labels = as_jax(kernel_arrays())
    rest = {k: v for k, v in arrays.items() if k != name}
    fn = lambda a: loss_of(labels=labels, **strategy, **{name: a}, **rest)
    loss, got = quick_jit(jax.value_and_grad(fn))(arrays[name])
    chunks = {}
    if name == "x" and "lines" in strategy:
        # Nothing can be in the place of a dweight that is not made.
        assert "input_gradient" not in str(jax.make_jaxpr(jax.grad(fn))(arrays[name]))
        chunks = {"vocab_chunk_size": 512}
    others = {k: jnp.zeros_like(v) for k, v in rest.items()}
    found = {"loss": loss, name: got} | others
    check_against_formula(found, arrays, labels, but=list(others), **(strategy | chunks))


@interpreted
@kernel_strategies("in place")
@pytest.mark.parametrize("reduction", ["mean"])
def test_a_vjp_of_the_kernels_can_be_called_again(strategy, reduction):
    check_repeated_vjp(*as_jax(kernel_arrays()), reduction=reduction, **strategy)


# In place of dweight, as the loss by default does; the strategy above has few tokens.


def in_place_loss(max_logits_bytes, reduction, **options):
    options |= {"max_logits_bytes": max_logits_bytes, "reduction": reduction}
    return functools.partial(loss_of, implementation="mosaic_gpu", **options)


def kernel_names(fn, *args) -> set[str]:
    return set(re.findall(r"name=(\w+)", str(jax.make_jaxpr(fn)(*args))))


# A float32 dweight has the memory for 2 · hidden tokens, one of 16 bits for half of that; what it
# has not is beside, or in chunks. Bands in blocks of 128 rows: of each, how many, and copied.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, hidden, vocab, weight_dtype, reduction, bands",
    [
        (1, 128, 384, BF16, "mean", (1, 2, 1)),
        pytest.param(63, 128, 128, F32, "sum", (1, 0, 0), marks=full),
        pytest.param(64, 128, 512, BF16, "none", (1, 3, 1), marks=full),
        (65, 192, 640, F16, "mean", (1, 3, 2)),
        pytest.param(65, 192, 640, F32, "mean", (1, 3, 2), marks=full),
        pytest.param(128, 128, 256, BF16, "mean", (2, 0, 0), marks=full),
        (129, 128, 384, BF16, "none", (1, 2, 1)),  # one beside
        pytest.param(129, 128, 384, BF16, "sum", (1, 2, 1), marks=full),
        pytest.param(256, 128, 384, F32, "mean", (1, 2, 1), marks=full),
        pytest.param(200, 128, 640, F16, "mean", (1, 2, 3), marks=full),
        pytest.param(300, 128, 896, F32, "mean", (2, 2, 3), marks=full),  # 44 beside
        pytest.param(511, 128, 512, BF16, "none", (1, 2, 2), marks=full),  # 255 beside
        (900, 256, 384, F32, "mean", (1, 2, 1)),  # 388 and twice 256
        pytest.param(900, 256, 384, BF16, "sum", (3, 0, 0), marks=full),
    ],
    ids=str,
)
def test_in_place(monkeypatch, num_tokens, hidden, vocab, weight_dtype, reduction, bands):
    arrays, labels = make_arrays((num_tokens,), hidden, vocab, F32, only=["x", "weight"])
    arrays["x"] = arrays["x"].astype(BF16)
    # Numbers of bfloat16, which are those of the GEMMs.
    arrays["weight"] = arrays["weight"].astype(BF16).astype(weight_dtype)
    if num_tokens > 1:
        labels[:2] = 0, vocab - 1
    # So that chunks of tokens may have 256.
    monkeypatch.setattr(config_module, "_MIN_CHUNK", 256)
    limit = 2 * vocab * 256
    bands = in_place.Bands(128 * bands[0], bands[1], 128 * bands[2])
    assert bands.size * max(1, bands.number) + bands.num_copied == vocab
    monkeypatch.setattr(in_place, "_bands", lambda *_: bands)
    loss = in_place_loss(limit, reduction)
    cotangent = make_cotangent(reduction, labels.shape)

    def with_gradients(arrays, labels, cotangent):
        value, vjp = jax.vjp(lambda arrays: loss(labels=labels, **arrays), arrays)
        return {"loss": value} | vjp(cotangent)[0]

    args = as_jax((arrays, labels, cotangent))
    assert {"input_gradient", "weight_gradient_rows"} <= kernel_names(with_gradients, *args)
    got = quick_jit(with_gradients)(*args)
    check_against_formula(
        got, arrays, labels, cotangent, implementation="mosaic_gpu", reduction=reduction
    )


@pytest.mark.parametrize(
    "shape, weight_dtype, chunk_size, want",
    [
        # (inside, beside, chunk size, bands), and the dtype of dweight.
        ((8192, 4096, 128256), F32, 2048, (8192, 0, None, (4224, 29, 5760), F32)),
        ((8192, 4096, 128256), F32, None, (8192, 0, None, (4224, 29, 5760), F32)),
        ((8192, 4096, 128256), BF16, 2048, (8192, 0, None, (4224, 29, 5760), F32)),
        ((4096, 4096, 128256), BF16, 2048, (4096, 0, None, (8448, 14, 9984), BF16)),
        ((6144, 4096, 128256), BF16, 2048, (4096, 2048, None, (8448, 14, 9984), BF16)),
        ((6145, 4096, 128256), BF16, 2048, (6145, 0, None, (4224, 29, 5760), F32)),
        ((8193, 4096, 128256), F32, 2048, (8192, 1, None, (4224, 29, 5760), F32)),
        ((8193, 4096, 128256), F32, None, None),
        ((16384, 2048, 128256), F32, 2048, (4096, 0, 2048, (8448, 14, 9984), F32)),
        ((8192, 3584, 152064), F32, 1536, (7168, 1024, None, (3584, 41, 5120), F32)),
        ((8192, 2304, 256000), F32, 1024, (4096, 0, 1024, (5632, 44, 8192), F32)),
        # No less sums than with chunks alone.
        ((16384, 1024, 128256), F32, 2048, None),
        ((8192, 4096, 50257), F32, 4096, None),
        ((8192, 4000, 128256), F32, 2048, None),
    ],
    ids=str,
)
def test_what_is_in_place(monkeypatch, shape, weight_dtype, chunk_size, want):
    device = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
    for module in (in_place, linear_statistics, products):
        monkeypatch.setattr(module, "target_device", lambda: device)
    num_tokens, hidden, vocab = shape
    found = in_place.extent(
        jax.ShapeDtypeStruct((num_tokens, hidden), BF16),
        jax.ShapeDtypeStruct((vocab, hidden), weight_dtype),
        LossOptions(ignore_index=-100, label_smoothing=0.0, z_loss=0.0, logit_softcap=None),
        accum_dtype=F32,
        copied_bytes=config_module.copied_bytes(None),
        chunk_size=chunk_size,
    )
    if want is not None:
        inside, beside, chunk, bands, dtype = want
        want = in_place.Extent(inside, beside, chunk, jnp.dtype(dtype), in_place.Bands(*bands))
    assert found == want


@pytest.mark.parametrize(
    "vocab, limit, want",
    [
        (128256, 2**25, (1024, 124, 1280)),  # 16 blocks of 2 MiB
        (128256, 0, (128, 1001, 128)),
        (48 * 128, None, (48 * 128, 0, 0)),  # no more than what may be copied
        (49 * 128, None, (1536, 3, 1664)),
        (256, 0, (256, 0, 0)),
    ],
)
def test_bands(monkeypatch, vocab, limit, want):
    device = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
    monkeypatch.setattr(in_place, "target_device", lambda: device)
    limit = config_module.copied_bytes(limit)
    found = in_place._bands((vocab, 4096), jnp.dtype(F32), limit)
    assert found == want
    assert found.size * max(1, found.number) + found.num_copied == vocab


@interpreted
def test_in_place_of_nothing_else():
    """What has a bias or other dtypes, or asks for chunks, goes other ways."""
    arrays, labels = as_jax(make_arrays((4,), 128, 256, BF16))

    def names(x, weight, **options):
        fn = lambda x, weight: jnp.sum(loss_of(x, weight, labels, **options))
        return kernel_names(jax.grad(fn, argnums=(0, 1)), x, weight)

    ours = {"implementation": "mosaic_gpu"}
    x, weight = arrays["x"], arrays["weight"]
    assert "input_gradient" in names(x, weight, **ours)
    for other in (
        {"bias": arrays["bias"]},
        {"chunk_size": 4},
        {"vocab_chunk_size": 128},
        {"label_smoothing": 0.1},
        {"logit_softcap": 30.0},
    ):
        assert "input_gradient" not in names(x, weight, **ours, **other), other
    assert "input_gradient" not in names(x.astype(F16), weight, **ours)
    assert "input_gradient" not in names(x, weight[:250], **ours)
    assert "input_gradient" not in names(x[:, :120], weight[:, :120], **ours)


@interpreted
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_nothing_is_in_place_of_a_gradient_that_is_not_made(reduction):
    arrays, labels = as_jax(make_arrays((4,), 128, 256, BF16, only=["x", "weight"]))
    loss = in_place_loss(None, reduction)
    total = lambda x, weight: jnp.sum(loss(x, weight, labels))
    args = arrays["x"], arrays["weight"]
    of = lambda argnums: kernel_names(jax.grad(total, argnums=argnums), *args)
    assert "input_gradient" not in of(0)
    assert "input_gradient" in of(1)


@interpreted
@pytest.mark.full
@pytest.mark.parametrize("limit", [2**15, None])
def test_in_place_again_with_the_same_bits(limit):
    arrays, labels = as_jax(make_arrays((70,), 128, 384, BF16, only=["x", "weight"]))
    loss = in_place_loss(limit, "mean")
    fn = quick_jit(jax.grad(lambda arrays: loss(labels=labels, **arrays)))
    chex.assert_trees_all_equal(fn(arrays), fn(arrays))


@interpreted
def test_in_place_in_a_scan_and_again_with_the_same_bits():
    arrays, labels = as_jax(make_arrays((70,), 128, 384, BF16, only=["x", "weight"]))
    loss = in_place_loss(2**15, "mean")

    def scanned(x, weight):
        add = lambda total, x: (total + loss(x, weight, labels), None)
        return jax.lax.scan(add, 0.0, x)[0]

    fn = quick_jit(jax.value_and_grad(scanned, argnums=(0, 1)))
    args = jnp.stack([arrays["x"]] * 2), arrays["weight"]
    total, (dx, dweight) = first = fn(*args)
    chex.assert_trees_all_equal(first, fn(*args))
    chex.assert_trees_all_equal(dx[0], dx[1])
    # Halves of sums of two, which are exact.
    got = {"loss": total / 2, "x": dx[0], "weight": dweight / 2}
    check_against_formula(got, arrays, labels, implementation="mosaic_gpu")


# Arguments.


@pytest.mark.parametrize(
    "change, error, message",
    [
        (
            {"reduction": "avg"},
            ValueError,
            r"reduction='avg' must be one of \('mean', 'sum', 'none'\)",
        ),
        ({"label_smoothing": -0.1}, ValueError, r"label_smoothing=-0.1 must lie in \[0, 1\]"),
        ({"label_smoothing": 1.5}, ValueError, r"label_smoothing=1.5 must lie in \[0, 1\]"),
        ({"label_smoothing": math.nan}, ValueError, "label_smoothing=nan must lie in"),
        ({"logit_softcap": 0.0}, ValueError, "logit_softcap=0.0 must be above 0; None turns"),
        ({"logit_softcap": -30.0}, ValueError, "logit_softcap=-30.0 must be above 0"),
        ({"logit_softcap": math.nan}, ValueError, "logit_softcap=nan must be above 0"),
        ({"chunk_size": 0}, ValueError, "chunk_size=0 must be at least 1"),
        ({"chunk_size": -8}, ValueError, "chunk_size=-8 must be at least 1"),
        ({"vocab_chunk_size": 0}, ValueError, "vocab_chunk_size=0 must be at least 1"),
        ({"max_logits_bytes": 0}, ValueError, "max_logits_bytes=0 must be at least 1"),
        ({"chunk_size": 1, "max_logits_bytes": 9}, ValueError, "give it or chunk_size=1 and"),
        (
            {"vocab_chunk_size": 1, "max_logits_bytes": 9},
            ValueError,
            "chooses the sizes of chunks; give it or chunk_size=None and vocab_chunk_size=1",
        ),
        (
            {"implementation": "reference", "vocab_axis": "tensor"},
            ValueError,
            "vocab_axis='tensor': implementation='reference' has the whole vocabulary",
        ),
        ({"implementation": "mosaic_gpu"}, NotImplementedError, "logits are float32, not bfloat16"),
        (
            {"implementation": "xla", "config": Config()},
            ValueError,
            "implementation='xla' has no launch parameters",
        ),
        (
            {"implementation": "triton"},
            ValueError,
            "implementation='triton' must be None or one of",
        ),
        ({"config": 1}, ValueError, "config=1: .* no launch parameters"),
        ({"weight": np.ones(4, np.float32)}, ValueError, r"weight must be \[V, D\].* got \(4,\)"),
        ({"weight": np.ones((0, 4), np.float32)}, ValueError, r"V >= 1, got \(0, 4\)"),
        ({"weight": np.ones((5, 3), np.float32)}, ValueError, r"x \(6, 4\) and weight \(5, 3\)"),
        ({"x": np.float32(1)}, ValueError, r"x \(\) and weight \(5, 4\) must agree"),
        ({"x": np.ones((7, 4), np.float32)}, ValueError, r"labels must have shape \(7,\).*\(6,\)"),
        ({"labels": np.ones((2, 3), np.int32)}, ValueError, r"labels must have shape \(6,\)"),
        ({"labels": np.ones(6, np.float32)}, TypeError, "labels must be integers, got float32"),
        ({"labels": np.ones(6, bool)}, TypeError, "labels must be integers, got bool"),
        ({"bias": np.ones(4, np.float32)}, ValueError, r"bias must have shape \(5,\), got \(4,\)"),
        (
            {"token_weights": np.ones(5, np.float32)},
            ValueError,
            r"token_weights .*\(6,\), got \(5,\)",
        ),
    ],
)
def test_wrong_arguments(unchecked_shapes, change, error, message):
    arguments = {
        "x": np.ones((6, 4), np.float32),
        "weight": np.ones((5, 4), np.float32),
        "labels": np.ones(6, np.int32),
    }
    with pytest.raises(error, match=message):
        linear_cross_entropy(**(arguments | change))


# The program. Sizes for which tokens x vocabulary, chunk x vocabulary, tokens x hidden and
# vocabulary x hidden are different numbers, the first by far the largest.

BIG_T, BIG_D, BIG_V, BIG_CHUNK = 4096, 32, 1009, 256
BIG_COLUMNS = 128  # of a vocabulary chunk; the first has 113
LOGITS, DX, DWEIGHT = (BIG_CHUNK, BIG_V), (BIG_D, BIG_CHUNK), (BIG_D, BIG_V)
BY_COLUMNS = (("vocab_chunk_size", BIG_COLUMNS),)
BY_BOTH = (("chunk_size", BIG_CHUNK), *BY_COLUMNS)


@functools.cache
def program(
    implementation: Any = "xla",
    reduction: Any = "sum",
    argnums=(0, 1),
    return_metrics=False,
    chunks=(("chunk_size", BIG_CHUNK),),
) -> Any:
    """The compiled loss (argnums None), or loss and gradients."""

    def loss(x, weight, labels):
        out = linear_cross_entropy(
            x,
            weight,
            labels,
            reduction=reduction,
            implementation=implementation,
            return_metrics=return_metrics,
            **dict(chunks),
        )
        out, metrics = out if return_metrics else (out, None)
        # Unequal cotangents, which the gradients cannot be scaled with afterwards.
        return jnp.vdot(out, jnp.arange(1.0, 1 + out.size).reshape(out.shape)), metrics

    fn = loss if argnums is None else jax.value_and_grad(loss, argnums=argnums, has_aux=True)
    x = jax.ShapeDtypeStruct((BIG_T, BIG_D), F32)
    weight = jax.ShapeDtypeStruct((BIG_V, BIG_D), F32)
    labels = jax.ShapeDtypeStruct((BIG_T,), jnp.int32)
    return jax.jit(fn).lower(x, weight, labels).compile()


def shape_of(dims):
    return tuple(int(d) for d in dims.split(",") if d)


def largest_buffer(compiled):
    """Elements of the largest array in the optimized program, inside of fusions as well."""
    shapes = re.findall(r"\b(?:pred|[a-z]+\d+\w*)\[([\d,]*)\]", compiled.as_text())
    return max(math.prod(shape_of(dims)) for dims in shapes)


def gemms(compiled):
    """Shapes of the results of the dots in the optimized program, axes sorted; a loop body once."""
    results = re.findall(r"= \w+\[([\d,]*)\]\S* dot\(", compiled.as_text())
    return sorted(tuple(sorted(shape_of(dims))) for dims in results)


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_no_buffer_has_the_size_of_all_logits(reduction):
    assert largest_buffer(program("xla", reduction)) == BIG_CHUNK * BIG_V
    for chunks in (BY_COLUMNS, BY_BOTH):
        assert largest_buffer(program("xla", reduction, chunks=chunks)) == BIG_T * BIG_COLUMNS
    assert largest_buffer(program("reference")) == BIG_T * BIG_V


def test_the_limit_decides_the_chunks():
    limited = lambda num_bytes: program(chunks=(("max_logits_bytes", num_bytes),))
    for tokens in (768, 1024):
        assert largest_buffer(limited(4 * tokens * BIG_V)) == tokens * BIG_V
    # Less than 256 tokens have the logits in the place of dweight, of 32 numbers a row.
    both = (("chunk_size", 512), *BY_COLUMNS)
    assert gemms(limited(4 * 768 * BIG_V - 1)) == gemms(program(chunks=both))
    assert gemms(limited(4 * 256 * BIG_V - 1)) == gemms(program(chunks=BY_COLUMNS))


def test_peak_memory_is_that_of_a_chunk():
    temporary = lambda compiled: compiled.memory_analysis().temp_size_in_bytes
    # Logits and dlogits of a chunk, dx and dweight in float32, dweight once more around the loop, a
    # dozen numbers for each token.
    bound = 4 * (2 * BIG_CHUNK * BIG_V + BIG_T * BIG_D + 2 * BIG_V * BIG_D + 12 * BIG_T)
    for reduction in ("sum", "none"):
        assert temporary(program("xla", reduction)) <= bound
    assert temporary(program("reference")) > 4 * BIG_T * BIG_V > 4 * bound


# The first chunk and the loop over the others are two places in the program. Where a backward
# computes logits again, XLA sees that those of the first chunk are the forward's.


def test_gemms_of_the_compiled_program():
    assert gemms(program(argnums=None)) == 2 * [LOGITS]
    assert gemms(program()) == sorted(2 * [LOGITS, DX, DWEIGHT])
    assert gemms(program(reduction="none")) == sorted([LOGITS] + 2 * [LOGITS, DX, DWEIGHT])
    all_tokens = (BIG_V, BIG_T), (BIG_D, BIG_T), DWEIGHT
    assert gemms(program(chunks=(("chunk_size", BIG_T),))) == sorted(all_tokens)


# The loop that makes `dweight` again if a row of `x` that does not count is not finite.
REPAIR = [(BIG_COLUMNS, BIG_T), (BIG_D, BIG_COLUMNS)]


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gemms_by_vocabulary_chunks(reduction):
    first, others = (
        [(n, BIG_T), (BIG_D, BIG_T), (BIG_D, n)] for n in (BIG_V % BIG_COLUMNS, BIG_COLUMNS)
    )
    expected = sorted(first + others + [(BIG_COLUMNS, BIG_T)] + REPAIR)
    assert gemms(program(reduction=reduction, chunks=BY_COLUMNS)) == expected


# `dweight` by vocabulary chunks, when losses and `dx` are there.
OF_DWEIGHT = [
    shape
    for n in (BIG_V % BIG_COLUMNS, BIG_COLUMNS)
    for shape in ((n, BIG_T), (min(n, BIG_D), max(n, BIG_D)))
] + REPAIR


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_gemms_by_both_chunks(reduction):
    alone = [LOGITS] if reduction == "none" else []
    expected = sorted(alone + 2 * [LOGITS, DX] + OF_DWEIGHT)
    assert gemms(program(reduction=reduction, chunks=BY_BOTH)) == expected
    of = lambda argnum: program(reduction=reduction, chunks=BY_BOTH, argnums=(argnum,))
    assert gemms(of(0)) == sorted(alone + 2 * [LOGITS, DX])
    assert gemms(of(1)) == sorted(alone + 2 * [LOGITS] + OF_DWEIGHT)


def test_a_gradient_that_nobody_asks_for_takes_no_gemm():
    for reduction, again in (("sum", []), ("none", [LOGITS])):
        of = lambda argnum, reduction=reduction: program(argnums=(argnum,), reduction=reduction)
        assert gemms(of(0)) == sorted(again + 2 * [LOGITS, DX])
        assert gemms(of(1)) == sorted(again + 2 * [LOGITS, DWEIGHT])


def test_a_loss_alone_makes_nothing_of_the_size_of_dweight():
    # What is computed: neither an argument nor its way through the loop.
    made = rf"= f32\[(?:{BIG_V},{BIG_D}|{BIG_D},{BIG_V})\]\S* (?!parameter|get-tuple-element)(\w+)"
    moves = {"copy", "bitcast", "transpose"}
    assert set(re.findall(made, program(argnums=None).as_text())) <= moves
    assert set(re.findall(made, program().as_text())) - moves


def maxima(compiled):
    """How many reductions by maximum the optimized program has; a loop body once."""
    text = compiled.as_text()
    functions = re.findall(r"^%?([\w.\-]+) \([^\n]*\{\n(.*?)^\}", text, re.DOTALL | re.MULTILINE)
    is_maximum = {name: bool(re.search(r"ROOT .* maximum\(", body)) for name, body in functions}
    return sum(is_maximum[name] for name in re.findall(r" reduce\(.*to_apply=%?([\w.\-]+)", text))


def test_accuracy_costs_nothing_unless_asked_for():
    # The logsumexp takes the maximum of a row, the accuracy that of the columns before the label.
    for argnums in (None, (0, 1)):
        plain = program(argnums=argnums)
        with_metrics = program(argnums=argnums, return_metrics=True)
        assert (maxima(plain), maxima(with_metrics)) == (2, 4)
        assert gemms(plain) == gemms(with_metrics)


def executed_flops(jaxpr):
    """FLOPs of the matrix products of a jaxpr, loops multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            lhs, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
            total += 2 * math.prod(out) * math.prod(lhs[axis] for axis in contracted)
            continue
        if eqn.primitive.name == "while":
            # It makes `dweight` again if a row of `x` that does not count is not finite.
            continue
        assert eqn.primitive.name != "cond", "of unknown count"
        count = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for parameter in eqn.params.values():
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                total += count * executed_flops(inner)
    return total


@pytest.mark.parametrize(
    "reduction, differentiated, num_gemms",
    [
        ("mean", False, 1),
        ("none", False, 1),
        ("mean", True, 3),
        ("sum", True, 3),
        ("none", True, 4),
    ],
)
@pytest.mark.parametrize(
    "chunks",
    [
        {"chunk_size": 16},
        {"chunk_size": 7},
        {"chunk_size": 64},
        {},
        {"vocab_chunk_size": 16},
        {"vocab_chunk_size": 53},
        {"vocab_chunk_size": 100},
        {"chunk_size": 7, "vocab_chunk_size": 16},
    ],
    ids=str,
)
def test_executed_gemms(reduction, differentiated, num_gemms, chunks):
    # 37 tokens and 53 columns divide into none of the chunks: nothing is computed twice, nor as
    # padding.
    if differentiated and "vocab_chunk_size" in chunks:
        num_gemms = 5 if reduction == "none" and "chunk_size" in chunks else 4
    arrays, labels = as_jax(make_arrays((37,), only=["x", "weight"]))
    loss = lambda x, weight: jnp.sum(
        linear_cross_entropy(x, weight, labels, reduction=reduction, implementation="xla", **chunks)
    )
    fn = jax.value_and_grad(loss, argnums=(0, 1)) if differentiated else loss
    jaxpr = jax.make_jaxpr(fn)(arrays["x"], arrays["weight"])
    assert executed_flops(jaxpr.jaxpr) == num_gemms * 2 * 37 * D * V
