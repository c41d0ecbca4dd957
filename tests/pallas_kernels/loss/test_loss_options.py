"""Options of the loss, its metrics and its refusals."""

import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import LossMetrics, linear_cross_entropy
from pallas_kernels.loss.config import Config
from support.loss_formulas import (
    BY_REDUCTION,
    F32,
    IGNORED,
    REDUCTIONS,
    STRATEGIES,
    check,
    each_strategy,
    each_strategy_and_reduction,
    formula,
    in_turn,
    make_arrays,
    make_cotangent,
    put,
    run,
)
from support.numerics import assert_as_accurate, quick_jit

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
)
def test_options(strategy, index):
    arrays, labels = make_arrays()
    reduction = REDUCTIONS[index % 3]
    check(arrays, labels, reduction=reduction, **strategy, **OPTIONS[index])


@in_turn("strategy, case", STRATEGIES, {"plain": ("mean", None), "softcap": ("sum", 1.5)})
def test_options_and_logits_of_minus_infinity(strategy, case):
    reduction, logit_softcap = case
    # Smoothing takes the mean of the logits, so the loss is infinite (as in torch) and its gradient
    # is finite. A softcap makes -inf finite.
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


@each_strategy_and_reduction
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


@each_strategy_and_reduction
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


@pytest.mark.parametrize(
    "size", [1e-3, *(pytest.param(size, marks=pytest.mark.full) for size in (0.03, 1.0)), 30.0]
)
@pytest.mark.parametrize("strategy", [{"implementation": "reference"}, {"implementation": "xla"}])
def test_rounding_of_a_mean_is_not_in_the_gradient_of_every_token_weight(strategy, size):
    """The gradient errs as the losses do, which are float32: `(loss - mean) / Σ weights`.

    With small logits all losses are about log(V), and their differences are small.
    """
    numbers = np.random.default_rng(0)
    num_tokens, vocab_size = 37, 1000
    logits = (size * numbers.standard_normal((num_tokens, vocab_size))).astype(F32)
    weights = numbers.uniform(0.5, 2, num_tokens).astype(F32)
    labels = numbers.integers(0, vocab_size, num_tokens)
    # One-hot hidden states, so that the output embedding holds the logits as they are.
    arguments = jnp.eye(num_tokens, dtype=F32), jnp.asarray(logits.T), jnp.asarray(labels)

    def loss(weights):
        return linear_cross_entropy(*arguments, token_weights=weights, reduction="mean", **strategy)

    losses = linear_cross_entropy(*arguments, reduction="none", implementation="reference")
    wide = logits.astype(np.float64)
    exact = np.log(np.sum(np.exp(wide), axis=-1)) - wide[np.arange(num_tokens), labels]
    gradient = lambda losses: (losses - np.average(exact, weights=weights)) / np.sum(weights)
    rounded = gradient(np.asarray(losses, np.float64))
    got = quick_jit(jax.grad(loss))(jnp.asarray(weights))
    assert_as_accurate([got], [rounded], [gradient(exact)], names=["token_weights"])


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
        # The cotangents of the metrics must not change the gradients.
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
        ({"chunk_size": 1, "max_logits_bytes": 9}, ValueError, "give one of them"),
        (
            {"vocab_chunk_size": 1, "max_logits_bytes": 9},
            ValueError,
            "vocab_chunk_size=1 and max_logits_bytes=9 each choose the chunks; give one of them",
        ),
        (
            {"chunk_size": 2, "vocab_chunk_size": 1},
            ValueError,
            "chunk_size=2 and vocab_chunk_size=1 each choose the chunks; give one of them",
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
        ({"config": 1}, TypeError, "config=1 must be a .*, or None for the default"),
        (
            {"config": Config()},
            ValueError,
            "no launch parameters, and it runs because x and its logits are",
        ),
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


@pytest.mark.parametrize("name", ["chunk_size", "vocab_chunk_size", "max_logits_bytes"])
@pytest.mark.parametrize("kind", [np.int64, np.array, jnp.int32])
def test_sizes_may_be_integers_of_numpy_and_jax(unchecked_shapes, name, kind):
    x, weight, labels = jnp.ones((4, 8)), jnp.ones((16, 8)), jnp.arange(4)
    of = lambda size: linear_cross_entropy(x, weight, labels, **{name: size})
    np.testing.assert_array_equal(of(kind(4)), of(4))
