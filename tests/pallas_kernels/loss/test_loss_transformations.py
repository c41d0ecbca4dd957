"""The loss under JAX's transformations."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_cross_entropy
from support.loss_formulas import (
    BF16,
    BY_REDUCTION,
    BY_XLA_STRATEGY,
    CHUNK,
    F32,
    T,
    as_jax,
    check_repeated_vjp,
    compiled,
    each_strategy,
    each_xla_strategy,
    in_turn,
    interpreted,
    make_arrays,
    make_cotangent,
    run,
)
from support.numerics import quick_jit


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


@in_turn("strategy, reduction", BY_XLA_STRATEGY, BY_REDUCTION, but=[("tokens", "mean")])
def test_a_vjp_can_be_called_again(strategy, reduction):
    check_repeated_vjp(*as_jax(make_arrays()), reduction=reduction, **strategy)


@pytest.mark.parametrize("reduction", ["mean", pytest.param("none", marks=pytest.mark.full)])
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


@pytest.mark.parametrize("reduction", [pytest.param("mean", marks=pytest.mark.full), "none"])
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


# Tracing is enough, because a call that raises runs no kernel.
TRACES = {
    f"{implementation}_{name}": {"implementation": implementation, **chunks}
    for implementation in ("xla", "mosaic_gpu")
    for name, chunks in {
        "tokens": {"chunk_size": CHUNK},
        "columns": {"vocab_chunk_size": 16},
    }.items()
}


@interpreted
@in_turn("options, reduction", TRACES, BY_REDUCTION)
def test_forward_mode_is_refused(options, reduction):
    arrays, labels = as_jax(make_arrays(dtype=BF16, only=["x", "weight"]))
    fn = lambda arrays: linear_cross_entropy(
        labels=labels, reduction=reduction, **options, **arrays
    )
    with pytest.raises(NotImplementedError, match="no forward mode"):
        jax.jit(lambda a: jax.jvp(fn, (a,), (a,))).lower(arrays)


@in_turn(
    "options, reduction, twice",
    TRACES,
    BY_REDUCTION,
    {fn.__name__: fn for fn in (jax.grad, jax.jacfwd, jax.linearize)},
    also=[
        ("xla_tokens", "none", "jacfwd"),
        ("xla_columns", "mean", "linearize"),
        ("xla_tokens", "sum", "grad"),
        ("mosaic_gpu_tokens", "none", "linearize"),
        ("mosaic_gpu_columns", "mean", "grad"),
        ("mosaic_gpu_columns", "sum", "jacfwd"),
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

    with pytest.raises(NotImplementedError, match="no second derivative"):
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
