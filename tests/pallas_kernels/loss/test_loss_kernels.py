"""The loss by its kernels, interpreted, against the formula in float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import LossMetrics
from support.loss_formulas import (
    BF16,
    EPS32,
    F16,
    F32,
    IGNORED,
    D,
    as_jax,
    check,
    check_against_formula,
    check_repeated_vjp,
    formula,
    full,
    interpreted,
    loss_of,
    make_arrays,
    put,
    run,
)
from support.loss_kernels import (
    ALL_OPTIONS,
    BY_KERNEL_STRATEGY,
    KERNEL_STRATEGIES,
    KT,
    KV,
    ONE_WARPGROUP,
    Z_LOSS,
    kernel_arrays,
    kernel_names,
    kernel_strategies,
    run_and_kernel_names,
)
from support.numerics import quick_jit


@interpreted
@pytest.mark.parametrize(
    "num_tokens, vocab, dtype, reduction, chunks",
    [
        (0, 100, BF16, "mean", {"chunk_size": 8}),
        pytest.param(1, 128, F16, "sum", {"chunk_size": 8}, marks=full),
        pytest.param(7, 127, BF16, "mean", {"chunk_size": 8}, marks=full),
        pytest.param(8, 129, F16, "none", {"chunk_size": 8}, marks=full),
        pytest.param(9, 1, BF16, "sum", {"chunk_size": 8}, marks=full),
        pytest.param(9, 100, F16, "mean", {"chunk_size": 8}, marks=full),
        pytest.param(17, 1000, BF16, "none", {"chunk_size": 8}, marks=full),
        (0, 129, BF16, "none", {"vocab_chunk_size": 128}),
        pytest.param(1, 1, BF16, "mean", {"vocab_chunk_size": 128}, marks=full),
        pytest.param(9, 127, F16, "sum", {"vocab_chunk_size": 128}, marks=full),
        pytest.param(8, 129, BF16, "mean", {"vocab_chunk_size": 128}, marks=full),
        pytest.param(5, 100, F16, "none", {"vocab_chunk_size": 16}, marks=full),
        pytest.param(5, 1000, BF16, "sum", {"vocab_chunk_size": 300}, marks=full),
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
@full
def test_kernels_by_default():
    arrays, labels = make_arrays((2, 2), 72, 600, BF16)
    check(arrays, labels, implementation="mosaic_gpu", chunk_size=None, **ALL_OPTIONS)


@interpreted
@pytest.mark.parametrize(
    "strategy, reduction, dtype",
    [
        pytest.param("tokens", "mean", BF16, marks=full),
        pytest.param("tokens", "none", F16, marks=full),
        pytest.param("columns", "sum", F16, marks=full),
        pytest.param("columns", "none", BF16, marks=full),
    ],
)
def test_kernels_with_all_options(strategy, reduction, dtype):
    arrays, labels = kernel_arrays(dtype)
    options = {"implementation": "mosaic_gpu", "config": ONE_WARPGROUP} | ALL_OPTIONS
    check(arrays, labels, reduction=reduction, **options, **KERNEL_STRATEGIES[strategy])


@interpreted
@kernel_strategies("tokens")
def test_a_loss_alone_has_float32_logits(strategy):
    arrays, labels = kernel_arrays()
    options = {name: value for name, value in strategy.items() if name != "config"}
    loss = quick_jit(lambda arrays: loss_of(labels=jnp.asarray(labels), **options, **arrays))(
        arrays
    )
    exact = formula(arrays, labels, 1.0)["loss"]
    # The error is below a tenth of the error of rounded logits.
    rounded_logits = formula(arrays, labels, 1.0, round_logits=BF16)["loss"]
    assert abs(loss - exact) < min(4 * EPS32 * abs(exact), 0.1 * abs(rounded_logits - exact))


@interpreted
@kernel_strategies("tokens")
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
@full
@kernel_strategies("columns")
def test_kernels_with_labels_at_the_ends_of_chunks(strategy):
    arrays, labels = kernel_arrays()
    labels[:8] = 0, 49, 50, 149, 150, 249, 127, 128
    check(arrays, labels, reduction="none", **strategy)


@interpreted
@pytest.mark.parametrize("strategy", ["exponentials", pytest.param("in place", marks=full)])
@pytest.mark.parametrize("bias", [0, -30])
def test_z_loss_by_exponentials(strategy, bias):
    # With a bias of -30, 1 + 2 · z_loss · lse is below -1.
    arrays, labels = kernel_arrays()
    arrays["bias"] = (arrays["bias"].astype(F32) + bias).astype(BF16)
    check(arrays, labels, reduction="sum", z_loss=Z_LOSS, **BY_KERNEL_STRATEGY[strategy])


@interpreted
@kernel_strategies("tokens")
@pytest.mark.parametrize("reduction", ["sum"])
def test_metrics_of_the_kernels(strategy, reduction):
    arrays, labels = kernel_arrays()
    # Columns 7 and 130 are the largest of every token, and equal. They are in different chunks.
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


# Our GEMM of dweight needs a hidden size of 128. Other tests have smaller ones, and XLA's GEMM.
@interpreted
@pytest.mark.parametrize(
    "chunks, reduction, x_dtype, weight_dtype",
    [
        pytest.param({"vocab_chunk_size": 128}, "mean", BF16, BF16, marks=full),
        ({"vocab_chunk_size": 100, **ALL_OPTIONS}, "none", F16, F32),
        pytest.param({"vocab_chunk_size": 100}, "sum", BF16, F32, marks=full),
        pytest.param({"vocab_chunk_size": 128}, "mean", F16, F16, marks=full),
    ],
    ids=str,
)
def test_dweight_by_our_gemm(chunks, reduction, x_dtype, weight_dtype):
    arrays, labels = make_arrays((KT,), 128, KV, weight_dtype, only=["x", "weight"])
    arrays["x"] = arrays["x"].astype(x_dtype)
    options = {"implementation": "mosaic_gpu", "config": ONE_WARPGROUP, "chunk_size": None} | chunks
    on_device, labels_there = as_jax((arrays, labels))
    loss = lambda arrays: jnp.sum(loss_of(labels=labels_there, **options, **arrays))
    assert "weight_gradient" in kernel_names(jax.grad(loss), on_device)
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
        for runs in [(name, wanted) == ("in place", "weight")]
    ],
)
def test_gradients_of_some_arrays_only_in_the_kernels(strategy, name):
    # "in place" has no other case with a z-loss.
    strategy = strategy | {"z_loss": 0.1}
    arrays, labels = as_jax(kernel_arrays())
    rest = {k: v for k, v in arrays.items() if k != name}
    fn = lambda a: loss_of(labels=labels, **strategy, **{name: a}, **rest)
    (loss, got), names = run_and_kernel_names(jax.value_and_grad(fn), arrays[name])
    chunks = {}
    if name == "x" and "lines" in strategy:
        # Without a dweight there is no memory for exponentials in its place.
        assert "input_gradient" not in names
        chunks = {"chunk_size": 128}
    others = {k: jnp.zeros_like(v) for k, v in rest.items()}
    found = {"loss": loss, name: got} | others
    check_against_formula(found, arrays, labels, but=list(others), **(strategy | chunks))


@interpreted
@full
@kernel_strategies("in place")
@pytest.mark.parametrize("reduction", ["mean"])
def test_a_vjp_of_the_kernels_can_be_called_again(strategy, reduction):
    check_repeated_vjp(*as_jax(kernel_arrays()), reduction=reduction, **strategy)
