"""The names of rematerialization policies, and random numbers in a part that runs again."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from models.presets import PRESETS
from models.remat import POLICIES, TENSOR_NAMES, RematPolicy, remat_policy
from support.jaxprs import equations
from support.numerics import quick_jit


def test_policies_describe_themselves_in_a_line():
    for policy in POLICIES.values():
        assert 0 < len(policy.description) < 80 and "\n" not in policy.description


@pytest.mark.parametrize(
    "remat, unknown",
    [
        ("nothing", "nothing"),
        ("Full", "Full"),
        ("", ""),
        ("q,,k", ""),
        ("gate,full", "full"),
        ("gate,upp", "upp"),
        ("gate,upp@host", "upp"),
        ("gate@device", "gate@device"),
        ("@host", ""),
    ],
)
def test_unknown_names_raise(remat, unknown):
    with pytest.raises(ValueError, match=re.escape(f"[{unknown!r}] unknown; use one of")) as error:
        remat_policy(remat)
    assert repr(remat) in str(error.value)
    assert all(name in str(error.value) for name in (*POLICIES, *TENSOR_NAMES))
    with pytest.raises(ValueError, match="unknown"):
        dataclasses.replace(PRESETS["demo"], remat=remat)


@pytest.mark.parametrize(
    "remat, message",
    [
        ("gate,up,gate@host", r"['gate'] both on the device and in host memory; name each"),
        ("attention@host,gate", r"['attention'] cannot go to host memory, because the attention"),
        ("attention,q@host,up@host", r"['q'] cannot go to host memory, because the attention"),
    ],
)
def test_offloading_that_is_impossible_raises(remat, message):
    with pytest.raises(ValueError, match=re.escape(f"{remat=}: {message}")):
        remat_policy(remat)


def test_names_may_stand_in_any_order_with_spaces():
    assert remat_policy(" up , attention,gate@host ") == RematPolicy(
        tensors=("up",), offloaded=("gate",), attention=True
    )


def random_layer(x, key):
    """Products of small integers, so that no order of additions rounds."""
    gate = checkpoint_name(x @ jnp.eye(4) * 2, "gate")
    dropout = jax.random.bernoulli(key, 0.5, x.shape)
    return x + jnp.where(dropout, gate * x, 0.0)


@functools.cache
def random_gradients(remat: str, seed: int, scan_layers: bool):
    """Gradients of two layers with dropout, and how often the program draws random bits."""
    layer = remat_policy(remat).checkpoint(random_layer, prevent_cse=not scan_layers)
    keys = jax.random.split(jax.random.key(seed), 2)

    def last(x):
        if scan_layers:
            return jax.lax.scan(lambda x, key: (layer(x, key), None), x, keys)[0]
        return layer(layer(x, keys[0]), keys[1])

    x = jnp.arange(-4.0, 4.0).reshape(2, 4)
    program = quick_jit(lambda x: jax.vjp(last, x)[1](jnp.ones_like(x))[0]).trace(x)
    draws = [e for e in equations(program.jaxpr.jaxpr) if e.primitive.name == "random_bits"]
    return program.lower().compile()(x), len(draws)


@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize(
    "remat", ["full", pytest.param("minimal", marks=pytest.mark.full), "offload"]
)
def test_recomputation_draws_the_same_random_numbers(remat, scan_layers):
    gradients, draws = random_gradients(remat, 0, scan_layers)
    expected, expected_draws = random_gradients("none", 0, scan_layers)
    assert draws == 2 * expected_draws > 0
    assert jnp.array_equal(gradients, expected)
    assert not jnp.array_equal(random_gradients("none", 1, scan_layers)[0], expected)
