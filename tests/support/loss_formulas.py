"""The linear cross-entropy written in NumPy, and comparisons with it.

Compilation takes most of the time, so shapes are small and tests share them. `compiled` keeps one
program for each set of options.
"""

import functools
import itertools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_cross_entropy
from pallas_kernels.loss.config import Config
from support.numerics import assert_as_accurate, quick_jit, rounded

REDUCTIONS = ["mean", "sum", "none"]
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EPS32 = float(np.finfo(np.float32).eps)
IGNORED = -100
T, D, V, CHUNK = 32, 24, 53, 16
# The kernels take exponentials base 2, so they round a logit times log2(e). A loss that is a small
# difference of large numbers errs by as much more.
BASE_2 = 1.2 * float(np.log2(np.e))
interpreted = pytest.mark.usefixtures("interpreted")
full = pytest.mark.full


def in_turn(names, *axes, also=(), but=()):
    """A cross of parameters. The normal run has every value, but not every pair of values.

    Args:
      names: Names of the parameters.
      *axes: Values of each parameter, by the names that they have in the test's name.
      also: Further cases of the normal run, each by the names of its values.
      but: Cases in turn that are not in the normal run, because other tests have their values.
    """
    longest = max(map(len, axes))
    chosen = {tuple(list(axis)[i % len(axis)] for axis in axes) for i in range(longest)}
    assert set(but) <= chosen
    chosen = chosen - set(but) | set(also)
    cases = [
        pytest.param(
            *(axis[name] for axis, name in zip(axes, case, strict=True)),
            id="-".join(case),
            marks=() if case in chosen else full,
        )
        for case in itertools.product(*axes)
    ]
    return pytest.mark.parametrize(names, cases)


# 53 columns make a chunk of 5 and three of 16.
STRATEGIES = {
    "reference": {"implementation": "reference"},
    "tokens": {"implementation": "xla", "chunk_size": CHUNK},
    "columns": {"implementation": "xla", "chunk_size": None, "vocab_chunk_size": 16},
}
each_strategy = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
BY_XLA_STRATEGY = {name: STRATEGIES[name] for name in STRATEGIES if name != "reference"}
# The normal run has the columns, whose plan is the longer one.
each_xla_strategy = pytest.mark.parametrize(
    "strategy",
    [pytest.param(BY_XLA_STRATEGY["tokens"], marks=full), BY_XLA_STRATEGY["columns"]],
    ids=BY_XLA_STRATEGY,
)
BY_REDUCTION = {reduction: reduction for reduction in REDUCTIONS}
# A pair is a program. In the normal run tokens have a mean and columns have none, as in tests
# without one of the two parameters.
each_strategy_and_reduction = in_turn(
    "strategy, reduction", STRATEGIES, {name: name for name in ("sum", "mean", "none")}
)


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
    sum_rounded=False,
):
    """The loss and the gradient of every array, by name, with the derivative worked out by hand.

    Some arguments imitate the roundings of a plan.

    Args:
      round_dlogits: Dtype to which the gradient of the logits is rounded.
      round_logits: Dtype of logits in memory, without the bias. The derivative is made of them.
      round_for: Quantities that are made of rounded logits too: "losses", "lse".
      round_exponentials: Dtype of exponentials, and of x times its factor, as in `exponentials.py`.
      vocab_chunk_size: Columns of a chunk; the lse of each chunk is rounded.
      sum_rounded: Whether the gradient of the bias is a sum of rounded dlogits.
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
    # The factor of a token's gradient before rounding.
    coefficients = weights * (cotangent.reshape(-1) if reduction == "none" else factor)
    dz = np.where(coefficients[:, None] == 0, 0, coefficients[:, None] * dz)
    dbias = np.sum(dz, 0)
    if round_dlogits is not None:
        # The range of float16 is small, so the coefficients are scaled.
        scale = np.max(np.abs(coefficients), initial=0) if round_dlogits == F16 else 1
        scale = compute(scale or 1)
        dz = (dz / scale).astype(round_dlogits).astype(compute) * scale
    if sum_rounded or round_logits is not None:
        dbias = np.sum(dz, 0)
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
    """`linear_cross_entropy`, or the same logits without a bias.

    With a bias the loss has no plan of `exponentials.py`. With `bias_in_weight` the bias is a
    column of `weight` instead, for which `x` is 1, so that the tests with a bias test such plans,
    too. With `lines` the weight is padded to 512 rows of 128 columns, as `in_place.py` needs them.
    The logits of the new rows are far below the others, and no label has their numbers.
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
    if options.get("weight_layout") == "dv":
        weight = weight.T
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
    # Sorted, because the cache takes another order for another program.
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
    counted_fraction=1.0,
    weight_layout="vd",
    config=None,
    slack=1.2,
    **options,
):
    """Compares with float64. The tolerance is the error of float32 with the roundings of the plan.

    Every plan rounds dlogits to the dtype of `x`. The kernels also round logits or exponentials in
    memory.
    """
    reduction = options.get("reduction", "mean")
    rounding = {"round_dlogits": arrays["x"].dtype, "sum_rounded": bias_in_weight}
    by_columns = vocab_chunk_size is not None
    if by_columns:
        rounding["vocab_chunk_size"] = vocab_chunk_size
    has_exponentials = (
        implementation == "mosaic_gpu"
        and arrays["x"].dtype == BF16
        and arrays["x"].shape[-1] % 8 == 0  # TMA reads whole 16 bytes of a row
        and (bias_in_weight or "bias" not in arrays)
        and not {"label_smoothing", "logit_softcap"} & options.keys()
    )
    if implementation == "mosaic_gpu" and not has_exponentials:
        forward = () if reduction == "none" else ("losses",)
        of_rounded = () if by_columns else ("lse", *forward)
        rounding |= {"round_logits": arrays["x"].dtype, "round_for": of_rounded}
    if cotangent is None:
        cotangent = make_cotangent(reduction, labels.shape)
    exact = formula(arrays, labels, cotangent, **options)
    in_float32 = functools.partial(
        formula, arrays, labels, cotangent, compute=np.float32, **options
    )
    # Without a reduction the backward knows the logsumexp, and rounds dlogits alone.
    if has_exponentials and not by_columns and reduction != "none":
        low = in_float32(round_exponentials=BF16)
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


def check_labels_out_of_range(arrays, labels, tokens, cases, *, reduction, **options):
    """Tokens with such labels, and the weight, have NaN. The other tokens keep their results."""
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


def check_nan_stays(arrays, labels, token, *, reduction, **options):
    """NaN in a token makes its gradient and the weight's NaN, and no other token's."""
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


def check_repeated_vjp(arrays, labels, *, reduction: Any = "mean", **options):
    fn = lambda arrays: loss_of(labels=labels, reduction=reduction, **options, **arrays)
    loss, vjp = quick_jit(lambda arrays: jax.vjp(fn, arrays))(arrays)
    cotangent = make_cotangent(reduction, labels.shape)
    backward = quick_jit(lambda vjp, cotangent: vjp(cotangent)[0])
    first, second, twice = (backward(vjp, c) for c in (cotangent, cotangent, 2 * cotangent))
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_close(twice, jax.tree.map(lambda g: 2 * g, first), rtol=1e-6)
    check_against_formula({"loss": loss} | first, arrays, labels, reduction=reduction, **options)
