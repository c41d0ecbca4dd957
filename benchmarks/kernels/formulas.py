"""The formulas that every implementation of an operation is checked against."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import agreement

EPS = 1e-6
SEQUENCES = 8  # of the policy loss and, as four pairs, of the preference loss

type Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Formula:
    """The mathematics that several implementations share. Their results are checked against it.

    The cotangent of an output `y` is called `dy`, the gradient of an input `x` is called `dx`.

    Attributes:
      fn: Function of the inputs in float32; it returns one array or a tuple of arrays.
      inputs: Names of its arguments.
      outputs: Names of its results.
      gradients: Inputs whose gradients a backward in JAX returns. The residual's is left out of
        `ADD_RMS_NORM`: it is the same array as `dx`, and XLA copies an array that a program returns
        twice.
    """

    fn: Callable[..., Any]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    gradients: tuple[str, ...]


def _rms_norm(x, weight):
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + EPS) * weight


def _add_rms_norm(x, residual, weight):
    # The sum is rounded as the residual stream is stored; its gradient passes through unrounded.
    total = x + residual
    stored = total + jax.lax.stop_gradient(total.astype(jnp.bfloat16).astype(jnp.float32) - total)
    return _rms_norm(stored, weight), stored


def _layer_norm(x, weight, bias):
    centered = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centered), axis=-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + EPS) * weight + bias


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def _linear_cross_entropy(x, weight, labels):
    return -jnp.mean(_linear_log_probs(x, weight, labels))


def _linear_log_probs(x, weight, labels):
    return _linear_log_probs_and_entropy(x, weight, labels)[0]


def _linear_log_probs_and_entropy(x, weight, labels):
    log_p = jax.nn.log_softmax(x @ weight.T, axis=-1)
    picked = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
    return picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def _policy_loss(x, weight, labels, advantages):
    # PPO's loss where the policy has sampled itself, so that the ratio is 1.
    log_probs = _linear_log_probs(x, weight, labels).reshape(len(advantages), -1)
    ratio = jnp.exp(log_probs - jax.lax.stop_gradient(log_probs))
    return -jnp.mean(ratio * advantages[:, None])


def _preference_loss(x, weight, labels):
    # DPO's loss with reference log-probabilities of 0 and beta 0.1; the chosen sequences are first.
    rewards = jnp.sum(_linear_log_probs(x, weight, labels).reshape(2, SEQUENCES // 2, -1), axis=-1)
    return -jnp.mean(jax.nn.log_sigmoid(0.1 * (rewards[0] - rewards[1])))


def _linear_jensen_shannon(x, weight, teacher_x, teacher_weight):
    log_p = jax.nn.log_softmax(x @ weight.T, axis=-1)
    log_q = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_x @ teacher_weight.T), axis=-1)
    log_m = jnp.logaddexp(log_p, log_q) - jnp.log(2)
    terms = jnp.exp(log_p) * (log_p - log_m) + jnp.exp(log_q) * (log_q - log_m)
    return jnp.sum(terms) / (2 * len(x))


def attention(q, k, v, segment_ids=None, *, is_causal: bool = True, window: int | None = None):
    """Attention of `q` `[B, S, N, H]` to `k` and `v` `[B, S, K, H]`, each for N / K heads of `q`.

    With `segment_ids` `[B, S]` a token attends to tokens of its own segment. With a window it
    attends to as many tokens at most, itself included.

    One key head of one sequence at a time, because float32 logits of all heads fill a card.
    """
    batch_size, length, num_kv_heads, head_size = k.shape
    if segment_ids is None:
        segment_ids = jnp.zeros((batch_size, length), jnp.int32)
    scores = functools.partial(jnp.einsum, precision="highest")

    @jax.checkpoint
    def of_one_kv_head(arrays):
        q, k, v, ids = arrays
        logits = scores("sgh,th->gst", q, k) * head_size**-0.5
        mask = ids[:, None] == ids
        if is_causal:
            mask &= jnp.tri(length, dtype=bool)
        if window is not None:
            mask &= ~jnp.tri(length, k=-window, dtype=bool)
        logits = jnp.where(mask, logits, -jnp.inf)
        return scores("gst,th->sgh", jax.nn.softmax(logits), v)

    by_head = lambda a: jnp.moveaxis(a, 2, 1).reshape(-1, length, *a.shape[3:])
    queries = q.reshape(batch_size, length, num_kv_heads, -1, head_size)
    ids = jnp.repeat(segment_ids, num_kv_heads, axis=0)
    out = jax.lax.map(of_one_kv_head, (by_head(queries), by_head(k), by_head(v), ids))
    return jnp.moveaxis(out.reshape(batch_size, num_kv_heads, *out.shape[1:]), 1, 2).reshape(
        q.shape
    )


RMS_NORM = Formula(_rms_norm, ("x", "weight"), ("y",), ("x", "weight"))
ADD_RMS_NORM = Formula(
    _add_rms_norm, ("x", "residual", "weight"), ("y", "residual_out"), ("x", "weight")
)
LAYER_NORM = Formula(_layer_norm, ("x", "weight", "bias"), ("y",), ("x", "weight", "bias"))
SWIGLU = Formula(_swiglu, ("gate", "up"), ("y",), ("gate", "up"))
LINEAR_CROSS_ENTROPY = Formula(
    _linear_cross_entropy, ("x", "weight", "labels"), ("loss",), ("x", "weight")
)

_OF_LABELS, _OF_TEACHER = ("x", "weight", "labels"), ("x", "weight", "teacher_x", "teacher_weight")
LINEAR_LOG_PROBS = Formula(_linear_log_probs, _OF_LABELS, ("log_probs",), ("x", "weight"))
LINEAR_LOG_PROBS_AND_ENTROPY = Formula(
    _linear_log_probs_and_entropy, _OF_LABELS, ("log_probs", "entropy"), ("x", "weight")
)
POLICY_LOSS = Formula(_policy_loss, (*_OF_LABELS, "advantages"), ("loss",), ("x", "weight"))
PREFERENCE_LOSS = Formula(_preference_loss, _OF_LABELS, ("loss",), ("x", "weight"))
LINEAR_JENSEN_SHANNON = Formula(_linear_jensen_shannon, _OF_TEACHER, ("loss",), ("x", "weight"))
ATTENTION = Formula(attention, ("q", "k", "v"), ("out",), ("q", "k", "v"))
FULL_ATTENTION = Formula(
    functools.partial(attention, is_causal=False), ("q", "k", "v"), ("out",), ("q", "k", "v")
)
DOCUMENT_ATTENTION = Formula(attention, ("q", "k", "v", "segment_ids"), ("out",), ("q", "k", "v"))


def exact(formula: Formula, arrays: Mapping[str, jax.Array]) -> Arrays:
    """Every output and every gradient by name, computed by the formula in float32."""
    inputs = {name: arrays[name] for name in formula.inputs}
    floating = {k: v for k, v in inputs.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    cotangents = [arrays[f"d{k}"] for k in formula.outputs if f"d{k}" in arrays]

    @jax.jit
    def run(floating, inputs, cotangents):
        floating, cotangents = jax.tree.map(lambda a: a.astype(jnp.float32), (floating, cotangents))

        def outputs_of(floating):
            merged = inputs | floating
            return as_tuple(formula.fn(*(merged[name] for name in formula.inputs)))

        outputs, vjp = jax.vjp(outputs_of, floating)
        # The backward starts at a loss, so a loss has no cotangent among the arrays.
        (gradients,) = vjp(tuple(cotangents) or tuple(map(jnp.ones_like, outputs)))
        named = {f"d{name}": gradient for name, gradient in gradients.items()}
        return dict(zip(formula.outputs, outputs, strict=True)) | named

    return run(floating, inputs, cotangents)


def wrong_result(got: Mapping[str, jax.Array], expected: Mapping[str, jax.Array]) -> str | None:
    """The first array that errs by more than `agreement.LIMIT`, in words; None if none does."""
    for name, array in got.items():
        error = agreement.relative_error([array], [expected[name]])
        if not error < agreement.LIMIT:  # also NaN
            return f"wrong result: relative error {error:.1e} of {name}"
    return None


def as_tuple(outputs: Any) -> tuple[jax.Array, ...]:
    """The results of a function that returns one array or several."""
    return tuple(outputs) if isinstance(outputs, tuple | list) else (outputs,)
