"""Log-probabilities and entropies written in NumPy, with their derivative by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import linear_log_probs
from support.loss_formulas import F16, IGNORED, make_arrays
from support.numerics import assert_as_accurate, quick_jit, rounded

NAMES = ("log_probs", "entropy")


@np.errstate(all="ignore")  # -inf and NaN are among the inputs
def formula(
    arrays,
    labels,
    cotangents,
    *,
    temperature=1.0,
    logit_softcap=None,
    ignore_index=IGNORED,
    compute: Any = np.float64,
    round_dlogits=None,
    sum_rounded=False,
    round_exponentials=None,
    by_pass=False,
):
    """Results and gradients by name.

    Args:
      round_dlogits: Dtype to which the gradient in the logits is rounded.
      sum_rounded: Whether the gradient of the bias is a sum of rounded numbers.
      round_exponentials: Dtype of exponentials relative to the label's, without a softcap. Then x
        times a factor of each token is rounded to it, too, or dlogits are.
      by_pass: Whether dlogits are made of rounded exponentials and rounded, as for the entropy.
    """
    given = {name: np.asarray(a).astype(compute) for name, a in arrays.items()}
    weight, shape = given["weight"], labels.shape
    x, labels = given["x"].reshape(-1, weight.shape[1]), np.asarray(labels, np.int64).reshape(-1)
    g, h = (np.asarray(c).astype(compute).reshape(-1, 1) for c in cotangents)
    valid = (labels != ignore_index)[:, None]
    g, h = np.where(valid, g, 0), np.where(valid, h, 0)
    z, slope = _logits(x, given, temperature, logit_softcap)
    top = np.max(z, -1, keepdims=True)
    log_p = z - (top + np.log(np.sum(np.exp(z - top), -1, keepdims=True)))
    p = np.exp(log_p)
    p_log_p = np.where(p == 0, 0, p * log_p)
    entropy = -np.sum(p_log_p, -1, keepdims=True)
    right = np.arange(len(weight)) == labels[:, None]
    log_probs = np.sum(np.where(right, log_p, 0), -1, keepdims=True)
    dz = g * (right - p) - h * (p_log_p + p * entropy)
    dz = np.where((g == 0) & (h == 0), 0, dz * slope / compute(temperature))
    dbias = np.sum(dz, 0)
    if round_dlogits is not None:
        scale = compute(1)
        if round_dlogits == F16:  # whose range is small
            scale = compute(np.max(np.abs([g, g + h * entropy, h])) / temperature or 1)
        dz = (dz / scale).astype(round_dlogits).astype(compute) * scale
        dbias = np.sum(dz, 0) if sum_rounded else dbias
    x = np.where((g == 0) & (h == 0), 0, x)
    dx, dweight = dz @ weight, dz.T @ x
    if round_exponentials is not None:
        coarse = lambda a: a.astype(round_exponentials).astype(compute)
        counts = (g != 0) | (h != 0)
        relative = z - np.sum(np.where(right, z, 0), -1, keepdims=True)
        sums = np.sum(np.exp(relative), -1, keepdims=True)
        e = coarse(np.exp(relative))
        if by_pass:
            log_e = np.log(e) - np.log(sums)
            found = e / sums * -(g + h * entropy + h * np.where(e == 0, 0, log_e))
            dz = np.where(right, dz, found / compute(temperature))
            dz = coarse(np.where(counts, dz, 0))
            dx, dweight = dz @ weight, dz.T @ x
        else:
            at_label = np.sum(np.where(right, np.exp(relative) - sums, 0), -1, keepdims=True)
            dz = np.where(right, coarse(at_label), e)
            is_rounded = coarse(at_label) != 0
            factor = -g / compute(temperature) / sums
            factor *= np.where(is_rounded, at_label / np.where(is_rounded, coarse(at_label), 1), 1)
            dx, dweight = dz @ weight * factor, dz.T @ coarse(x * factor)
    out = {
        "log_probs": np.where(valid, log_probs, 0).reshape(shape),
        "entropy": np.where(valid, entropy, 0).reshape(shape),
        "x": dx.reshape(given["x"].shape),
        "weight": dweight,
        "bias": dbias,
    }
    return {name: a for name, a in out.items() if name in NAMES or name in arrays}


def _logits(x, given, temperature, logit_softcap):
    """The logits after softcap and temperature, and the derivative of the softcap."""
    compute = x.dtype.type
    logits = x @ given["weight"].T + given.get("bias", compute(0))
    z, slope = logits, compute(1)
    if logit_softcap is not None:
        tanh = np.tanh(logits / compute(logit_softcap))
        z, slope = compute(logit_softcap) * tanh, 1 - tanh**2
    return z / compute(temperature), slope


def argmax_formula(
    arrays, labels, *, temperature=1.0, logit_softcap=None, compute: Any = np.float64
):
    """`(index, log_prob)` of the largest logit; -1 and 0 for ignored labels."""
    given = {name: np.asarray(a).astype(compute) for name, a in arrays.items()}
    z, _ = _logits(given["x"], given, temperature, logit_softcap)
    top = np.max(z, axis=-1, keepdims=True)
    log_prob = -np.log(np.sum(np.exp(z - top), axis=-1))
    valid = np.asarray(labels) != IGNORED
    return np.where(valid, np.argmax(z, axis=-1), -1), np.where(valid, log_prob, 0)


def with_argmax(x, weight, labels, **options):
    """`((log_probs, entropy), argmax)` as `both`."""
    *results, argmax = both(x, weight, labels, return_argmax=True, **options)
    return tuple(results), argmax


def check_argmax(got, arrays, labels, *, slack=1.2, **options):
    """Compares an `Argmax` with float64: the index, and the error of its log-probability.

    The caller's largest logits must be equal, or differ by more than float32's rounding.
    """
    index, exact = argmax_formula(arrays, labels, **options)
    _, low = argmax_formula(arrays, labels, compute=np.float32, **options)
    assert (got.ids.dtype, got.log_probs.dtype) == (jnp.int32, jnp.float32)
    np.testing.assert_array_equal(got.ids, index)
    assert_as_accurate(
        [got.log_probs], [low], [exact], names=["log_prob of the argmax"], slack=slack
    )


def arrays_with_ties(shape, hidden, vocab, dtype, *, seed=0):
    """Small integers, so that logits are exact in any order and many of the largest are equal."""
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.integers(-1, 2, (*shape, hidden)).astype(dtype),
        "weight": rng.integers(-1, 2, (vocab, hidden)).astype(dtype),
    }
    # Each entry comes a second time, at a random place.
    arrays["weight"] = rng.permutation(np.repeat(arrays["weight"], 2, axis=0)[:vocab])
    labels = rng.integers(vocab, size=shape)
    labels = np.where(np.arange(labels.size).reshape(shape) % 5 == 3, IGNORED, labels)
    return arrays, labels.astype(np.int32)


def make_cotangents(shape, seed=3):
    """Random cotangents of both results; every seventh token has none."""
    rng = np.random.default_rng(seed)
    g, h = rng.normal(size=(2, *shape)).astype(np.float32)
    none = (np.arange(g.size) % 7 == 5).reshape(shape)
    return np.where(none, 0, g), np.where(none, 0, h)


def arrays_of(shape, hidden, vocab, dtype, *, bias=True, weight_dtype=None):
    """Arrays without token weights; a wider weight holds numbers of the dtype."""
    names = ["x", "weight", "bias"] if bias else ["x", "weight"]
    arrays, labels = make_arrays(shape, hidden, vocab, dtype, only=names)
    if weight_dtype is not None:
        arrays["weight"] = arrays["weight"].astype(weight_dtype)
    return arrays, labels


def both(x, weight, labels, *, bias=None, weight_layout: Any = "vd", **options):
    """`(log_probs, entropy)` for a weight `[V, D]`."""
    weight = weight if weight_layout == "vd" else weight.T
    return linear_log_probs(
        x, weight, labels, bias=bias, weight_layout=weight_layout, return_entropy=True, **options
    )


def with_gradients(fn, arrays, cotangents):
    """Results and gradients of `fn(**arrays)` by name."""
    results, vjp = jax.vjp(lambda arrays: fn(**arrays), arrays)
    return dict(zip(NAMES, results, strict=True)) | vjp(cotangents)[0]


@functools.cache
def compiled(**options):
    def run(arrays, labels, cotangents):
        return with_gradients(functools.partial(both, labels=labels, **options), arrays, cotangents)

    return quick_jit(run)


def run(arrays, labels, cotangents, **options):
    cotangents = tuple(map(jnp.asarray, cotangents))
    # Sorted, because the cache takes another order for another program.
    return compiled(**{name: options[name] for name in sorted(options)})(arrays, labels, cotangents)


def check_against_formula(
    got,
    arrays,
    labels,
    cotangents,
    *,
    round_dlogits=True,
    sum_rounded=False,
    slack=1.2,
    floor=8.0,
    **options,
):
    """Compares with float64. The tolerance is the error of float32 with the plan's roundings."""
    exact = formula(arrays, labels, cotangents, **options)
    dtype = arrays["x"].dtype if round_dlogits else None
    low = formula(
        arrays,
        labels,
        cotangents,
        compute=np.float32,
        round_dlogits=dtype,
        sum_rounded=sum_rounded,
        **options,
    )
    assert set(got) == set(exact)
    for name in NAMES:
        assert got[name].dtype == jnp.float32
    for name in arrays:
        assert got[name].dtype == arrays[name].dtype
    pick = lambda values: [values[name] for name in exact]
    low_precision = rounded(pick(low), pick(got))
    assert_as_accurate(
        pick(got), low_precision, pick(exact), names=list(exact), slack=slack, floor=floor
    )
