"""The distillation losses written in NumPy with derivatives by hand, and comparisons with them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import linear_distillation_loss, linear_distillation_loss_top_k
from support.loss_formulas import BASE_2
from support.numerics import assert_as_accurate, quick_jit, rounded

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
T, D, E, V, K, CHUNK = 37, 24, 40, 53, 7, 16
# Names, and the options that choose them.
DIVERGENCES: dict[str, dict[str, Any]] = {
    "forward_kl": {"divergence": "forward_kl"},
    "reverse_kl": {"divergence": "reverse_kl"},
    "jensen_shannon": {"divergence": "jensen_shannon"},
    "jensen_shannon_0.9": {"divergence": "jensen_shannon", "beta": 0.9},
}


@np.errstate(all="ignore")
def formula(
    arrays,
    teacher,
    cotangent,
    *,
    divergence="forward_kl",
    beta: Any = None,
    temperature=1.0,
    logit_softcap=None,
    teacher_logit_softcap=None,
    reduction="mean",
    tail=None,
    compute: Any = np.float64,
    round_logits: Any = None,
    round_dlogits: Any = None,
    round_teacher_logits: Any = None,
):
    """The loss, and the gradients of the student's arrays, by name.

    Args:
      arrays: The student's arrays by name.
      teacher: `(teacher_x, teacher_weight)` and a bias if it has one; `(log_probs, ids)` with
        `tail`.
      cotangent: Cotangent of the loss.
      divergence: Options of the loss, as those that follow.
      beta: Share of the teacher.
      temperature: Divisor of the logits.
      logit_softcap: Bound of the student's logits.
      teacher_logit_softcap: Bound of the teacher's logits.
      reduction: Reduction.
      tail: Tail of the top-k teacher.
      compute: Dtype of the computation.
      round_logits: Dtype of the student's logits in memory.
      round_dlogits: Dtype of the gradient of the logits.
      round_teacher_logits: Dtype of the teacher's logits in memory.
    """
    if divergence == "jensen_shannon":
        beta = 0.5 if beta is None else beta
        divergence = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(float(beta), divergence)
    given = {name: np.asarray(a).astype(compute) for name, a in arrays.items()}
    weight = given["weight"]
    shape = given["x"].shape[:-1]
    x = given["x"].reshape(-1, weight.shape[1])
    coarse = lambda a, dtype: a if dtype is None else a.astype(dtype).astype(compute)

    def log_softmax(z):
        largest = np.max(z, -1, keepdims=True)
        return z - (largest + np.log(np.sum(np.exp(z - largest), -1, keepdims=True)))

    def scaled(z, bias, softcap):
        z, slope = z + bias, compute(1)
        if softcap is not None:
            tanh = np.tanh(z / compute(softcap))
            z, slope = compute(softcap) * tanh, 1 - tanh**2
        return z / compute(temperature), slope

    z = coarse(x @ weight.T, round_logits)
    z, slope = scaled(z, given.get("bias", compute(0)), logit_softcap)
    log_p = log_p_of_logits = log_softmax(z)
    if tail is None:
        teacher_x, teacher_weight, *bias = (np.asarray(a).astype(compute) for a in teacher)
        teacher_x = teacher_x.reshape(len(x), teacher_weight.shape[1])
        teacher_z = coarse(teacher_x @ teacher_weight.T, round_teacher_logits)
        bias = bias[0] if bias else compute(0)
        teacher_z, _ = scaled(teacher_z, bias, teacher_logit_softcap)
        log_q = log_softmax(teacher_z)
        members = None
    else:
        log_probs, ids = (np.asarray(a).reshape(len(x), -1) for a in teacher)
        log_q = log_probs.astype(compute)
        k = ids.shape[1]
        members = np.zeros((len(x), k + 1, len(weight)), bool)  # of each class, the tail last
        for token in range(len(x)):
            members[token, np.arange(k), ids[token]] = log_q[token] > -np.inf
        members[:, -1] = ~np.any(members[:, :-1], 1)
        of_classes = np.where(members, log_p[:, None], -np.inf)
        largest = np.max(of_classes, -1, keepdims=True)
        largest = np.where(np.isneginf(largest), 0, largest)
        log_p = largest[..., 0] + np.log(np.sum(np.exp(of_classes - largest), -1))
        rest = 1 - np.sum(np.exp(log_q), -1, keepdims=True)
        rest = np.where(np.any(members[:, -1], -1)[:, None], np.maximum(rest, 0), 0)
        log_q = np.concatenate([log_q, np.log(rest)], -1)
    p, q = np.exp(log_p), np.exp(log_q)
    zero_without = lambda probability, a: np.where(probability == 0, 0, probability * a)
    if tail == "ignore":
        terms = zero_without(q, log_q - log_p)[:, :-1]
        loss = np.sum(terms, -1)
        dz = np.sum(q[:, :-1], -1, keepdims=True) * p - q
        dz[:, -1] += q[:, -1]
    elif divergence == "forward_kl":
        loss = np.sum(zero_without(q, log_q - log_p), -1)
        dz = p - q
    elif divergence == "reverse_kl":
        loss = np.sum(zero_without(p, log_p - log_q), -1)
        dz = zero_without(p, log_p - log_q - loss[:, None])
    else:
        if compute == np.float32:
            # The rounding of the code: a sum of probabilities, of which the smallest are 0.
            mixture = compute(beta) * q + compute(1 - beta) * p
            log_m = np.log(np.maximum(mixture, np.finfo(np.float32).tiny))
        else:
            log_m = np.logaddexp(np.log(compute(beta)) + log_q, np.log1p(-compute(beta)) + log_p)
        part = np.sum(zero_without(p, log_p - log_m), -1)
        of_teacher = np.sum(zero_without(q, log_q - log_m), -1)
        loss = compute(beta) * of_teacher + compute(1 - beta) * part
        dz = compute(1 - beta) * zero_without(p, log_p - log_m - part[:, None])
    if members is not None:
        shares = np.where(members, np.exp(log_p_of_logits[:, None] - log_p[..., None]), 0)
        dz = np.sum(shares * dz[..., None], 1)

    weights = given.get("token_weights", np.ones(shape, compute)).reshape(-1)
    cotangent = np.asarray(cotangent, compute)
    total = np.sum(weights)
    factor = compute(1)
    if reduction == "mean":
        factor = 1 / total if total else compute(0)
    is_none = reduction == "none"
    coefficients = weights * (cotangent.reshape(-1) if is_none else factor)
    row = coefficients[:, None] / compute(temperature)
    dz = np.where(row == 0, 0, row * dz * slope)
    counted_x = np.where(row == 0, 0, x)
    scale = compute(np.max(np.abs(coefficients), initial=0) if round_dlogits == F16 else 1)
    dz = coarse(dz / (scale or 1), round_dlogits) * scale
    loss = np.where((weights == 0) & ~np.isfinite(loss), 0, loss)
    if is_none:
        after, value = compute(1), (weights * loss).reshape(shape)
        dweights = cotangent.reshape(-1) * loss
    else:
        after, value = cotangent, np.sum(weights * loss) * factor
        dweights = factor * cotangent * (loss - (value if reduction == "mean" else 0))
    found = {
        "loss": value,
        "x": (dz @ weight * after).reshape(arrays["x"].shape),
        "weight": dz.T @ counted_x * after,
        "bias": np.sum(dz, 0) * after,
        "token_weights": dweights.reshape(shape),
    }
    return {name: a for name, a in found.items() if name == "loss" or name in arrays}


def make_arrays(
    shape=(T,), vocab=V, dtype=F32, *, seed=0, weights=True, teacher_hidden=E, biases=False
):
    """`(arrays of the student by name, arrays of the teacher)`. Every fifth token is left out."""
    rng = np.random.default_rng(seed)
    arrays = {
        "x": rng.normal(size=(*shape, D)).astype(dtype),
        "weight": (2 * rng.normal(size=(vocab, D)) / math.sqrt(D)).astype(dtype),
    }
    if weights:
        kept = np.arange(math.prod(shape)).reshape(shape) % 5 != 3
        arrays["token_weights"] = (kept * rng.uniform(0.5, 2, size=shape)).astype(np.float32)
    teacher = (
        rng.normal(size=(*shape, teacher_hidden)).astype(dtype),
        (2 * rng.normal(size=(vocab, teacher_hidden)) / math.sqrt(teacher_hidden)).astype(dtype),
    )
    if biases:
        arrays["bias"] = rng.normal(size=vocab).astype(dtype)
        teacher = (*teacher, rng.normal(size=vocab).astype(dtype))
    return arrays, teacher


def make_top_k(shape=(T,), vocab=V, k=K, *, seed=2, dtype=F32):
    """`(log_probs, ids)` of the likeliest `k` of random logits."""
    logits = 2 * np.random.default_rng(seed).normal(size=(*shape, vocab))
    log_q = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    ids = np.argsort(-log_q, axis=-1)[..., :k]
    return np.take_along_axis(log_q, ids, -1).astype(dtype), ids.astype(np.int32)


def make_cotangent(reduction, shape=(T,)):
    if reduction != "none":
        return np.float32(1)
    return np.random.default_rng(1).normal(size=shape).astype(np.float32)


@functools.cache
def compiled(tail: Any = None, **options):
    """Loss and gradients by name, of `(arrays, teacher, cotangent)`."""

    def run(arrays, teacher, cotangent):
        value, vjp = jax.vjp(lambda arrays: loss_of(arrays, teacher, tail, **options), arrays)
        return {"loss": value} | vjp(cotangent)[0]

    return quick_jit(run)


def loss_of(arrays, teacher, tail: Any = None, **options):
    """The loss of the arrays of `make_arrays`, or of `make_top_k` with a tail."""
    options |= {name: arrays.get(name) for name in ("bias", "token_weights")}
    x, weight = arrays["x"], arrays["weight"]
    if tail is not None:
        return linear_distillation_loss_top_k(x, weight, *teacher, tail=tail, **options)
    *teacher, bias = teacher if len(teacher) == 3 else (*teacher, None)
    return linear_distillation_loss(x, weight, *teacher, teacher_bias=bias, **options)


def run(arrays, teacher, cotangent=None, *, chunk_size: Any = CHUNK, **options):
    if cotangent is None:
        cotangent = make_cotangent(options.get("reduction"), arrays["x"].shape[:-1])
    options["chunk_size"] = chunk_size
    fn = compiled(**{name: options[name] for name in sorted(options)})
    return fn(arrays, teacher, cotangent)


def check(
    arrays,
    teacher,
    cotangent=None,
    *,
    chunk_size: Any = CHUNK,
    but=(),
    slack=1.2,
    floor=8.0,
    **options,
):
    """Runs a loss and compares it with float64, by the error of float32 with the same roundings."""
    got = run(arrays, teacher, cotangent, chunk_size=chunk_size, **options)
    check_against_formula(
        got, arrays, teacher, cotangent, but=but, slack=slack, floor=floor, **options
    )
    return got


def check_against_formula(
    got,
    arrays,
    teacher,
    cotangent=None,
    *,
    but=(),
    implementation: Any = None,
    slack=1.2,
    floor=8.0,
    **options,
):
    if cotangent is None:
        cotangent = make_cotangent(options.get("reduction"), arrays["x"].shape[:-1])
    logits_dtype = options.pop("logits_dtype", None)
    max_logits_bytes = options.pop("max_logits_bytes", None)
    del max_logits_bytes
    exact = formula(arrays, teacher, cotangent, **options)
    if implementation == "mosaic_gpu":
        slack *= BASE_2  # and sums and derivatives are multiplied by log(2)
        if jax.default_backend() == "gpu":
            # The GPU's exponential and logarithm err by two units, and NumPy's by half a unit.
            slack *= 4
            # So, too, where float32's own error is so small that the floor decides: on an H200 two
            # losses erred by 8.1 epsilons.
            floor = max(floor, 16.0)
    rounding = {}
    if implementation != "reference":
        rounding = {
            "round_logits": logits_dtype or arrays["x"].dtype,
            "round_teacher_logits": logits_dtype or teacher[0].dtype,
            "round_dlogits": arrays["x"].dtype,
        }
    low = formula(arrays, teacher, cotangent, compute=np.float32, **rounding, **options)
    assert set(got) == set(exact)
    assert got["loss"].dtype == F32
    for name in arrays:
        assert got[name].dtype == arrays[name].dtype, name
    names = [name for name in exact if name not in but]
    pick = lambda values: [values[name] for name in names]
    assert_as_accurate(
        pick(got),
        rounded(pick(low), pick(got)),
        pick(exact),
        names=names,
        slack=slack,
        floor=floor,
    )
