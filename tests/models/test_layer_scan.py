"""The scan over layers against `jax.lax.scan`, bit by bit, and what it keeps."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import tiny_run
from models.layer_scan import layer_scan
from models.llama import Llama
from models.sharding import make_mesh
from numerics import quick_jit

D = 8
TABLE = jnp.cos(jnp.arange(3 * D, dtype=jnp.float32)).reshape(3, D)  # closed over


def weights(num_layers):
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "w": jax.random.normal(keys[0], (num_layers, D, D)) / D**0.5,
        "b": jax.random.normal(keys[1], (num_layers, D), jnp.bfloat16),
    }


def layer(carry, inputs):
    """Keeps a weight, a constant, arrays of its own, and has an output."""
    x, total = carry
    x = jnp.sin(x @ inputs["w"] + inputs["b"].astype(x.dtype)) + x * TABLE
    squares = jnp.square(x).astype(jnp.bfloat16)
    return (x, total + jnp.sum(squares, dtype=jnp.float32)), {"squares": squares}


def run(scan, num_layers, fn=layer):
    """Values and gradients of a scan in all that it takes, with a cotangent for all it returns."""
    carry = jnp.linspace(-1, 1, 3 * D).reshape(3, D), jnp.float32(0)

    def values(carry, inputs):
        return scan(fn, carry, inputs)

    found, vjp = jax.vjp(values, carry, weights(num_layers))
    cotangents = jax.tree.map(lambda a: jnp.cos(jnp.arange(a.size).reshape(a.shape)), found)
    cotangents = jax.tree.map(lambda c, a: c.astype(a.dtype), cotangents, found)
    return found, vjp(cotangents)


def on_one_device():
    return jax.set_mesh(make_mesh(data=1, fsdp=1, devices=jax.devices()[:1]))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_values_and_gradients_are_those_of_lax_scan(num_layers, checkpointed):
    fn = jax.checkpoint(layer, prevent_cse=False) if checkpointed else layer
    with on_one_device():
        both = [
            quick_jit(run, static_argnums=(0, 1, 2))(scan, num_layers, fn)
            for scan in (layer_scan, jax.lax.scan)
        ]
    chex.assert_trees_all_equal(*both)
    assert all(jnp.any(leaf) for leaf in jax.tree.leaves(both))


def empties(traced):
    """Types of the arrays that nobody fills."""
    return [
        line.split(":")[1].split()[0] for line in str(traced).splitlines() if "= empty[" in line
    ]


def test_weights_and_constants_are_not_stacked_again():
    with on_one_device():
        found = empties(jax.make_jaxpr(lambda: run(layer_scan, 4))())
    # Of weight and bias only the gradients; the table, which is as large as x, nowhere: x, its sine
    # and the sum that enters the square.
    assert found.count("f32[4,8,8]") == found.count("bf16[4,8]") == 1
    assert found.count("f32[4,3,8]") == 3, found


def test_a_scan_without_gradients_keeps_nothing():
    with on_one_device():
        carry = jnp.ones((3, D)), jnp.float32(0)
        assert not empties(jax.make_jaxpr(lambda: layer_scan(layer, carry, weights(2)))())


def test_several_devices_get_lax_scan():
    for mesh in (make_mesh(data=8, fsdp=1), make_mesh(data=2, fsdp=4)):
        with jax.set_mesh(mesh):
            assert not empties(jax.make_jaxpr(lambda: run(layer_scan, 2))())
    assert jax.device_count() > 1  # and no mesh
    assert not empties(jax.make_jaxpr(lambda: run(layer_scan, 2))())


def test_what_a_layer_closes_over_has_no_gradient():
    def value(scale):
        scaled = lambda carry, inputs: layer((carry[0] * scale, carry[1]), inputs)
        (x, _), _ = layer_scan(scaled, (jnp.ones((3, D)), jnp.float32(0)), weights(2))
        return jnp.sum(x)

    with on_one_device():
        jax.jit(value)(jnp.float32(2))
        with pytest.raises(jax.errors.UnexpectedTracerError):
            jax.jit(jax.grad(value))(jnp.float32(2))


@pytest.mark.parametrize("remat", ["none", "minimal", "full"])
def test_a_llama_on_one_device(remat, monkeypatch):
    config = dataclasses.replace(tiny_run.MODEL, num_hidden_layers=3, remat=remat)
    graphdef, params = nnx.split(Llama(config, rngs=nnx.Rngs(0)))
    tokens = jax.random.randint(jax.random.key(1), (2, 20), 0, config.vocab_size)

    def value(params):
        return jnp.sum(jnp.sin(nnx.merge(graphdef, params)(tokens)))

    gradients = lambda: quick_jit(jax.value_and_grad(value))(params)

    with on_one_device():
        assert empties(jax.make_jaxpr(jax.grad(value))(params))
        got = gradients()
        monkeypatch.setattr("models.llama.layer_scan", jax.lax.scan)
        want = gradients()
    chex.assert_trees_all_equal(got, want)
