"""The scan over layers against `jax.lax.scan`: the errors of both, and the arrays it keeps."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from models.layer_scan import layer_scan
from models.llama import Llama
from models.sharding import make_mesh
from support import tiny_run
from support.numerics import assert_trees_as_accurate, quick_jit
from support.textbook_llama import textbook_logits

D = 8
TABLE = np.cos(np.arange(3 * D, dtype=np.float32)).reshape(3, D)  # closed over


def weights(num_layers):
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(num_layers, D, D)) / D**0.5, jnp.float32),
        "b": jnp.asarray(rng.normal(size=(num_layers, D)), jnp.bfloat16),
    }


def layer(carry, inputs):
    """Keeps a weight, a constant and its own arrays; one output has the dtype of the bias."""
    x, total = carry
    x = jnp.sin(x @ inputs["w"] + inputs["b"].astype(x.dtype)) + x * jnp.asarray(TABLE, x.dtype)
    squares = jnp.square(x).astype(inputs["b"].dtype)
    return (x, total + jnp.sum(squares, dtype=x.dtype)), {"squares": squares}


def run(scan, carry, inputs, fn=layer):
    """Values and gradients of a scan in all arguments, with a cotangent for each result."""

    def cotangent(a):
        # Numbers of few bits, which every dtype holds exactly.
        return jnp.asarray(np.round(16 * np.cos(np.arange(a.size))).reshape(a.shape) / 16, a.dtype)

    found, vjp = jax.vjp(functools.partial(scan, fn), carry, inputs)
    return found, vjp(jax.tree.map(cotangent, found))


def arguments(num_layers):
    x = jnp.asarray(np.linspace(-1, 1, 3 * D).reshape(3, D), jnp.float32)
    return (x, jnp.float32(0)), weights(num_layers)


@functools.cache
def in_float64(num_layers):
    given = arguments(num_layers)
    with jax.enable_x64(True):
        given = jax.tree.map(lambda a: np.asarray(a, np.float64), given)
        return quick_jit(functools.partial(run, jax.lax.scan))(*given)


def on_one_device():
    return jax.set_mesh(make_mesh(data=1, fsdp=1, devices=jax.devices()[:1]))


@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("num_layers", [1, pytest.param(2, marks=pytest.mark.full), 5])
def test_values_and_gradients_are_those_of_lax_scan(num_layers, checkpointed):
    fn = jax.checkpoint(layer, prevent_cse=False) if checkpointed else layer
    with on_one_device():
        got, low_precision = (
            quick_jit(functools.partial(run, scan, fn=fn))(*arguments(num_layers))
            for scan in (layer_scan, jax.lax.scan)
        )
    assert_trees_as_accurate(got, low_precision, in_float64(num_layers))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(got))


def empties(traced):
    """Types of the arrays that the program does not fill."""
    return [
        line.split(":")[1].split()[0] for line in str(traced).splitlines() if "= empty[" in line
    ]


def test_weights_and_constants_are_not_stacked_again():
    with on_one_device():
        found = empties(jax.make_jaxpr(lambda: run(layer_scan, *arguments(4)))())
    # Only the gradients of weight and bias are stacked. The table is as large as x and is not
    # stacked. The three stacks of that size are x, its sine and the sum that enters the square.
    assert found.count("f32[4,8,8]") == found.count("bf16[4,8]") == 1
    assert found.count("f32[4,3,8]") == 3, found


def test_an_input_that_needs_no_gradient_gets_no_stack_of_them():
    def value(scan, w, b):
        (x, _), _ = scan(layer, arguments(4)[0], {"w": w, "b": b})
        return jnp.sum(x)

    given = weights(4)
    gradients = [functools.partial(jax.grad(value, 1), scan) for scan in (layer_scan, jax.lax.scan)]
    with on_one_device():
        found = empties(jax.make_jaxpr(gradients[0])(given["w"], given["b"]))
        got, expected = (quick_jit(fn)(given["w"], given["b"]) for fn in gradients)
    assert found.count("f32[4,8,8]") == 1 and "bf16[4,8]" not in found
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5 * np.max(np.abs(expected)))


def test_a_scan_without_gradients_keeps_nothing():
    with on_one_device():
        carry = jnp.ones((3, D)), jnp.float32(0)
        assert not empties(jax.make_jaxpr(lambda: layer_scan(layer, carry, weights(2)))())


@pytest.mark.parametrize("in_shard_map", [False, True], ids=["auto", "manual"])  # 3 s each
def test_on_a_mesh(in_shard_map):
    """Each device has its columns of the weights, and gathers them for each layer."""
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    whole = P(), P()
    of_weights = {"w": P(None, None, "fsdp"), "b": P()}

    def gathered_layer(carry, inputs):
        return layer(
            carry, inputs | {"w": jax.lax.all_gather(inputs["w"], "fsdp", axis=1, tiled=True)}
        )

    def both(scan, carry, given):
        if not in_shard_map:
            return run(scan, carry, given)
        results = (whole, {"squares": P()}), (whole, of_weights)
        local = functools.partial(run, scan, fn=gathered_layer)
        return jax.shard_map(
            local, in_specs=(whole, of_weights), out_specs=results, check_vma=False
        )(carry, given)

    with jax.set_mesh(mesh):
        carry, given = arguments(5)
        given = jax.device_put(given, {n: NamedSharding(mesh, s) for n, s in of_weights.items()})
        got, low_precision = (
            quick_jit(functools.partial(both, scan))(carry, given)
            for scan in (layer_scan, jax.lax.scan)
        )
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (carry, given))
            exact = quick_jit(functools.partial(both, jax.lax.scan))(*wide)
    assert_trees_as_accurate(got, low_precision, exact)


def test_devices_that_jax_does_not_know_of_get_lax_scan():
    explicit = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(explicit):
        assert not empties(jax.make_jaxpr(lambda: run(layer_scan, *arguments(2)))())
    assert jax.device_count() > 1  # and no mesh
    assert not empties(jax.make_jaxpr(lambda: run(layer_scan, *arguments(2)))())


def test_a_value_that_a_layer_closes_over_has_no_gradient():
    def value(scale):
        scaled = lambda carry, inputs: layer((carry[0] * scale, carry[1]), inputs)
        (x, _), _ = layer_scan(scaled, (jnp.ones((3, D)), jnp.float32(0)), weights(2))
        return jnp.sum(x)

    with on_one_device():
        quick_jit(value)(jnp.float32(2))
        with pytest.raises(jax.errors.UnexpectedTracerError):
            jax.jit(jax.grad(value))(jnp.float32(2))


LLAMA = tiny_run.MODEL
TOKENS = np.random.default_rng(0).integers(LLAMA.vocab_size, size=(2, 20), dtype=np.int32)


@functools.cache
def parameters():
    return nnx.state(Llama(LLAMA, rngs=nnx.Rngs(0)))


def traced_llama(remat):
    """The logits and the gradients of a function of them."""
    config = dataclasses.replace(LLAMA, remat=remat)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))

    def logits(params):
        model = nnx.merge(graphdef, params)
        return model.logits(model(jnp.asarray(TOKENS)))

    return quick_jit(functools.partial(with_gradients, logits)).trace(parameters())


def with_gradients(logits, params):
    found, vjp = jax.vjp(logits, params)
    return found, vjp(jnp.cos(found))[0]


@functools.cache
def textbook_in_float64():
    positions = np.broadcast_to(np.arange(TOKENS.shape[1]), TOKENS.shape)
    packing = {"positions": positions, "segment_ids": np.ones_like(TOKENS)}
    with jax.enable_x64(True):
        params = nnx.to_pure_dict(parameters())
        params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
        logits = functools.partial(
            textbook_logits, config=LLAMA, tokens=TOKENS, dtype=jnp.float64, **packing
        )
        return quick_jit(functools.partial(with_gradients, logits))(params)


@functools.cache
def llama_with_lax_scan():
    with on_one_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("models.llama.layer_scan", jax.lax.scan)
        traced = traced_llama("none")
        assert not empties(traced.jaxpr)
        return traced.lower().compile()(parameters())


@pytest.mark.parametrize(
    "remat", [pytest.param(name, marks=pytest.mark.full) for name in ("none", "minimal", "full")]
)
def test_a_llama_on_one_device(remat):
    with on_one_device():
        traced = traced_llama(remat)
        assert empties(traced.jaxpr)
        got = traced.lower().compile()(parameters())
    pure = lambda result: (result[0], nnx.to_pure_dict(result[1]))
    assert_trees_as_accurate(pure(got), pure(llama_with_lax_scan()), textbook_in_float64())
