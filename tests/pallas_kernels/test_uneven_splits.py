"""Splits with a warning: those that do not divide an axis, and axes that repeat work."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_cross_entropy, linear_log_probs, swiglu_mlp
from pallas_kernels.fp8 import RECIPES, fp8_linear, fp8_linears
from support.numerics import quick_jit

D, F, V = 16, 22, 40
RECIPE = dataclasses.replace(RECIPES["rowwise"], least_size=0)


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def mlp(x, weights):
    gate, up, down = weights
    return jnp.sum(jnp.square(swiglu_mlp(x, gate, up, down, implementation="xla")))


def loss(x, weight):
    labels = jnp.arange(len(x)) % V
    return linear_cross_entropy(x, weight, labels, implementation="xla")


def log_probs(x, weight):
    labels = jnp.arange(len(x)) % V
    return jnp.sum(jnp.sin(linear_log_probs(x, weight, labels, implementation="xla")))


def linear(x, weight):
    return jnp.sum(jnp.sin(fp8_linear(x, weight, recipe=RECIPE)))


OF_MLP = numbers(D, F, seed=1), numbers(D, F, seed=2), numbers(F, D, seed=3)
OF_LOSS, OF_FP8 = numbers(V, D, seed=4), numbers(D, F, seed=5)
CASES = {
    "MLP": (mlp, OF_MLP, P("tokens"), None),
    "width of the MLP": (mlp, OF_MLP, P(), P(None, "tokens")),
    "loss": (loss, OF_LOSS, P("tokens"), None),
    "log-probs": (log_probs, OF_LOSS, P("tokens"), None),
    "FP8": (linear, OF_FP8, P("tokens"), None),
}


# Before, the gradients erred by 1e-3 to 0.7 of the largest entry. 2 s each.
@pytest.mark.parametrize("name", CASES)
def test_an_axis_that_devices_do_not_divide(caplog, name):
    fn, weights, of_x, of_gate = CASES[name]
    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    keep = lambda a, spec: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, spec))

    def run(x, weights, *, is_split):
        def split(x, weights):
            if not is_split:
                return fn(jnp.exp(x), weights)
            if of_gate is not None:
                weights = keep(weights[0], of_gate), *weights[1:]
            return fn(jnp.exp(keep(x, of_x)), weights)

        return jax.value_and_grad(split, argnums=(0, 1))(x, weights)

    args = numbers(6, D), weights
    want = quick_jit(functools.partial(run, is_split=False))(*args)
    with caplog.at_level(logging.WARNING):
        got = quick_jit(functools.partial(run, is_split=True))(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(b))))
    assert "every device gathers an axis" in caplog.text
    assert "('tokens',) split it over 4 devices" in caplog.text


def test_many_weights_have_names_of_their_own():
    """The axis of weight 14 is none of a result's."""
    mesh = jax.make_mesh((4,), ("tokens",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    x = jax.device_put(numbers(8, D), NamedSharding(mesh, P("tokens")))
    weights = [numbers(D, 8 + i, seed=i) for i in range(15)]
    found = quick_jit(lambda x, weights: fp8_linears(x, weights, recipe=RECIPE))(x, weights)
    assert [y.shape for y in found] == [(8, 8 + i) for i in range(15)]


WARNING = "the mesh axes ('tensor',) split a weight and no tokens"


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "fn, weights, of_x, of_weights, warns",
    [
        (linear, OF_FP8, P("data"), P(None, "tensor"), False),
        (linear, OF_FP8, P(("data", "tensor")), P(None, "tensor"), False),
        (linear, OF_FP8, P(), P(None, "tensor"), False),  # such as the single row of a sample
        (loss, OF_LOSS, P("data"), P(None, "tensor"), True),
        (loss, OF_LOSS, P("data"), P("tensor"), False),
    ],
    ids=["columns", "tokens over both", "no tokens split", "hidden size", "vocabulary"],
)
def test_an_axis_that_splits_a_weight_and_no_tokens(
    caplog, fn, weights, of_x, of_weights, warns, kind
):
    """0.5 s each."""
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), (kind,) * 2, devices=jax.devices()[:4])
    struct = lambda a, spec: jax.ShapeDtypeStruct(
        a.shape, a.dtype, sharding=NamedSharding(mesh, spec)
    )
    args = struct(numbers(8, D), of_x), struct(weights, of_weights)
    with jax.set_mesh(mesh), caplog.at_level(logging.WARNING):
        jax.jit(fn).lower(*args).compile()
    assert (WARNING in caplog.text) == warns, caplog.text
