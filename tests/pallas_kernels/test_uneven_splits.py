"""Splits that do not divide an axis, on Auto axes: results of plain JAX, and a warning."""

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
CASES = {
    "MLP": (mlp, OF_MLP, P("tokens"), None),
    "width of the MLP": (mlp, OF_MLP, P(), P(None, "tokens")),
    "loss": (loss, numbers(V, D, seed=4), P("tokens"), None),
    "log-probs": (log_probs, numbers(V, D, seed=4), P("tokens"), None),
    "FP8": (linear, numbers(D, F, seed=5), P("tokens"), None),
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
