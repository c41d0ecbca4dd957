"""The NNX layers against the operations; their parameters and options."""

import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import add_rms_norm, linear_cross_entropy, rms_norm, swiglu
from pallas_kernels.layers import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU
from support.frameworks import not_hidden_states
from support.nnx_layers import (
    BF16,
    F32,
    B,
    D,
    F,
    S,
    V,
    in_both_modes,
    make_inputs,
    params,
    shuffled,
)
from support.numerics import assert_close, quick_jit

pytestmark = pytest.mark.usefixtures("fast_compilation")


def rms_norm_layer(**options):
    return RMSNorm(D, epsilon=1e-3, weight_offset=0.5, rngs=nnx.Rngs(0), **options)


def add_rms_norm_layer(**options):
    return AddRMSNorm(D, epsilon=1e-3, casting="llama", rngs=nnx.Rngs(0), **options)


def swiglu_layer(**options):
    return SwiGLU(D, F, use_bias=True, rngs=nnx.Rngs(0), **options)


def loss_layer(**options: Any):
    options = {"use_bias": True, "z_loss": 1e-3, "logit_softcap": 5.0} | options
    return LinearCrossEntropy(D, V, rngs=nnx.Rngs(0), **options)


def linear(x, p, name):
    return x @ p[f"{name}.kernel"] + p[f"{name}.bias"]


# Each layer: a function that makes it, its inputs, its operation on parameters by name, and their
# shapes.
LAYERS = {
    "RMSNorm": (
        rms_norm_layer,
        lambda x, residual, labels: (x,),
        lambda p, x: rms_norm(x, p["scale"], eps=1e-3, weight_offset=0.5),
        {"scale": (D,)},
    ),
    "AddRMSNorm": (
        add_rms_norm_layer,
        lambda x, residual, labels: (x, residual),
        lambda p, x, r: add_rms_norm(x, r, p["scale"], eps=1e-3, casting="llama"),
        {"scale": (D,)},
    ),
    "SwiGLU": (
        swiglu_layer,
        lambda x, residual, labels: (x,),
        lambda p, x: linear(
            swiglu(linear(x, p, "gate_proj"), linear(x, p, "up_proj")), p, "down_proj"
        ),
        {"gate_proj.kernel": (D, F), "up_proj.kernel": (D, F), "down_proj.kernel": (F, D)}
        | {"gate_proj.bias": (F,), "up_proj.bias": (F,), "down_proj.bias": (D,)},
    ),
    "LinearCrossEntropy": (
        loss_layer,
        lambda x, residual, labels: (x, labels, jnp.abs(x[..., 0])),
        lambda p, x, labels, token_weights: linear_cross_entropy(
            x,
            p["kernel"],
            labels,
            weight_layout="dv",
            bias=p["bias"],
            token_weights=token_weights,
            z_loss=1e-3,
            logit_softcap=5.0,
        ),
        {"kernel": (D, V), "bias": (V,)},
    ),
}
each_layer = pytest.mark.parametrize("make, choose, operation, shapes", LAYERS.values(), ids=LAYERS)


def total(outputs):
    """A scalar to which every output contributes differently."""
    return sum((i + 1) * jnp.sum(jnp.sin(a)) for i, a in enumerate(jax.tree.leaves(outputs)))


def value_and_gradients(fn):
    gradients = jax.grad(lambda *args: total(fn(*args)), argnums=(0, 1))
    return quick_jit(lambda p, x: (fn(p, x), gradients(p, x)))


@functools.cache
def of_the_operation(make, choose, operation):
    """Values and gradients of the operation, with the parameters and inputs of the test."""
    inputs = choose(*make_inputs())
    plain = lambda p, x: operation(p, x, *inputs[1:])
    return value_and_gradients(plain)(params(shuffled(make())), inputs[0])


@each_layer
@in_both_modes
def test_equals_the_operation_in_value_and_gradient(make, choose, operation, shapes):
    layer = shuffled(make())
    inputs = choose(*make_inputs())
    graphdef, state = nnx.split(layer)
    apply = lambda state, x: nnx.merge(graphdef, state)(x, *inputs[1:])
    out, (dstate, dx) = value_and_gradients(apply)(state, inputs[0])
    want_out, (dparams, want_dx) = of_the_operation(make, choose, operation)
    chex.assert_trees_all_close(out, want_out, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(dx, want_dx, rtol=1e-5, atol=1e-6)
    got = {".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(dstate)}
    chex.assert_trees_all_close(got, dparams, rtol=1e-5, atol=1e-6)
    assert all(np.any(np.asarray(g)) for g in jax.tree.leaves(got))
    # The module itself, through nnx.jit.
    chex.assert_trees_all_close(
        nnx.jit(lambda layer, *inputs: layer(*inputs))(layer, *inputs), out, rtol=1e-5, atol=1e-6
    )


@each_layer
def test_parameters(make, choose, operation, shapes):
    assert {name: a.shape for name, a in params(make()).items()} == shapes
    for dtype in (F32, BF16):
        layer = make(param_dtype=dtype)
        assert {a.dtype for a in params(layer).values()} == {jnp.dtype(dtype)}
        # The layer has no state of other kinds, and the first call adds none.
        before = jax.tree.structure(nnx.state(layer))
        jax.eval_shape(layer, *choose(*make_inputs(dtype)))
        assert jax.tree.structure(nnx.state(layer)) == before
        assert jax.tree.structure(nnx.state(layer, nnx.Param)) == before


@each_layer
@in_both_modes
def test_construction_without_arrays(make, choose, operation, shapes):
    abstract = nnx.eval_shape(make)
    assert all(isinstance(a, jax.ShapeDtypeStruct) for a in jax.tree.leaves(nnx.state(abstract)))
    plain = jax.eval_shape(lambda: nnx.split(make())[1])
    assert jax.tree.map(jnp.shape, jax.tree.leaves(plain)) == [
        a.shape for a in jax.tree.leaves(nnx.state(abstract))
    ]
    # The structure does not change from one construction to the next: jit compiles once.
    one, two = nnx.split(make())[0], nnx.split(make())[0]
    assert one == two and hash(one) == hash(two)


@each_layer
def test_bfloat16_inputs_with_float32_parameters(make, choose, operation, shapes):
    out = jax.eval_shape(make(), *choose(*make_inputs(BF16)))
    want = F32 if make is loss_layer else BF16
    assert all(a.dtype == want for a in jax.tree.leaves(out))


def test_an_unknown_option_of_the_loss_fails_at_construction():
    with pytest.raises(TypeError, match="label_smooth: not among the options of"):
        loss_layer(label_smooth=0.1)
    with pytest.raises(TypeError, match="token_weights: not among the options"):
        loss_layer(token_weights=None)


@pytest.mark.parametrize("use_bias", [False, True])
def test_the_mlp_keeps_the_dtype_of_the_stream(use_bias):
    layer = SwiGLU(D, F, use_bias=use_bias, rngs=nnx.Rngs(0))
    for dtype in (BF16, F32):
        assert jax.eval_shape(layer, make_inputs(dtype)[0]).dtype == dtype


@pytest.mark.parametrize("shape", [(4, 2), (1, 8)], ids=str)
def test_an_mlp_with_biases_on_explicit_axes(shape):
    """The result, every gradient, and how each of them is split. Both cases take 2 s."""
    graphdef, state = nnx.split(SwiGLU(16, 32, use_bias=True, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(0), 8))
    state = jax.tree.map(lambda a: jax.random.normal(next(keys), a.shape), state)  # biases, too
    x = jax.random.normal(next(keys), (8, 3, 16))

    @jax.jit
    def run(state, x):
        y, vjp = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
        return y, vjp(y)

    expected = run(state, x)

    mesh = jax.make_mesh(shape, ("fsdp", "tensor"), (AxisType.Explicit,) * 2)
    put = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))

    def split(path, a):
        axes = ("tensor", "fsdp") if path[0].key == "down_proj" else ("fsdp", "tensor")
        return put(a, *axes[-a.ndim :])

    state = jax.tree_util.tree_map_with_path(split, state)
    x = put(x, "fsdp")
    with jax.set_mesh(mesh):
        found = run(state, x)
    assert jax.tree.map(jax.typeof, found[1]) == jax.tree.map(jax.typeof, (state, x))
    assert_close(jax.device_get(found), jax.device_get(expected))


def test_norms_start_at_a_scale_of_one():
    x, residual, _ = make_inputs()
    for offset in (0.0, 1.0):
        options = {"weight_offset": offset, "rngs": nnx.Rngs(0)}
        scaled = lambda a: a / np.sqrt(np.mean(np.square(a), -1, keepdims=True) + 1e-6)
        np.testing.assert_allclose(RMSNorm(D, **options)(x), scaled(np.asarray(x)), rtol=1e-5)
        y, residual_out = AddRMSNorm(D, **options)(x, residual)
        np.testing.assert_allclose(y, scaled(np.asarray(x + residual)), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(residual_out, x + residual)


def test_the_norms_need_no_random_numbers():
    chex.assert_trees_all_equal(params(RMSNorm(D)), params(RMSNorm(D, rngs=nnx.Rngs(1))))


def test_linear_layers_start_from_their_initializer_and_seed():
    make = lambda seed, **options: params(SwiGLU(D, F, rngs=nnx.Rngs(seed), **options))
    chex.assert_trees_all_equal(make(0), make(0))
    assert not np.array_equal(make(0)["gate_proj.kernel"], make(1)["gate_proj.kernel"])
    assert not np.array_equal(make(0)["gate_proj.kernel"], make(0)["up_proj.kernel"])
    zeros = nnx.initializers.zeros
    assert not any(np.any(np.asarray(a)) for a in make(0, kernel_init=zeros).values())
    head = LinearCrossEntropy(D, V, kernel_init=zeros, rngs=nnx.Rngs(0))
    assert set(params(head)) == {"kernel"}  # no bias unless asked for
    x, _, labels = make_inputs()
    np.testing.assert_allclose(head(x, labels), np.log(V), rtol=1e-6)


def test_loss_options_reach_the_loss():
    x, _, labels = make_inputs()
    layer = shuffled(loss_layer(reduction="none", label_smoothing=0.1, return_metrics=True))
    p = params(layer)
    want = linear_cross_entropy(
        x,
        p["kernel"],
        labels,
        weight_layout="dv",
        bias=p["bias"],
        reduction="none",
        label_smoothing=0.1,
        z_loss=1e-3,
        logit_softcap=5.0,
        return_metrics=True,
    )
    chex.assert_trees_all_close(layer(x, labels), want, rtol=1e-6)


@pytest.mark.parametrize("value", [jnp.float32(0.1), np.array(0.1)], ids=["jax", "numpy"])
def test_arrays_are_no_options_of_the_loss(value):
    with pytest.raises(TypeError, match=r"z_loss=.* is an array.* such as z_loss=float\(\.\.\.\)"):
        LinearCrossEntropy(D, V, rngs=nnx.Rngs(0), z_loss=value)


@pytest.mark.parametrize("dtype", [None, BF16])
def test_logits_are_those_of_the_loss(dtype):
    x, _, labels = make_inputs()
    layer = shuffled(loss_layer(z_loss=0.0, dtype=dtype))
    logits, loss = quick_jit(lambda x: (layer.logits(x), layer(x, labels)))(x)
    chex.assert_shape(logits, (B, S, V))
    chex.assert_type(logits, F32)
    counts = np.asarray(labels) != -100
    labels_or_zero = jnp.where(counts, labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels_or_zero)
    np.testing.assert_allclose(loss, np.mean(losses[counts]), rtol=1e-6)
    assert np.max(np.abs(logits)) < 5  # the softcap


def test_a_policy_can_keep_the_two_projections_alone(capsys):
    x, *_ = make_inputs()
    layer = SwiGLU(D, F, rngs=nnx.Rngs(0))
    policy = jax.checkpoint_policies.save_only_these_names("gate", "up")
    print_saved_residuals(jax.checkpoint(layer, policy=policy), x)
    # Lines such as "f32[2,8,24] named 'gate' from ...".
    kept = {tuple(line.split(" ")[:3]) for line in capsys.readouterr().out.splitlines()}
    named = {what for _, how, what in kept if how == "named"}
    others = {shape for shape, how, _ in kept if how != "named"}
    assert named == {"'gate'", "'up'"}
    assert others <= {f"f32[{D},{F}]", f"f32[{F},{D}]", f"f32[{B},{S},{D}]"}


def test_initializers_and_metadata_are_flaxs():
    rngs = lambda: nnx.Rngs(0)
    ones, zeros = nnx.initializers.ones, nnx.initializers.zeros
    norm = RMSNorm(D, scale_init=zeros, scale_metadata={"axes": "d"}, dtype=BF16, rngs=rngs())
    assert not np.any(norm.scale[...]) and norm.scale.get_metadata()["axes"] == "d"
    assert norm(make_inputs()[0]).dtype == BF16
    down = {"kernel_init": zeros, "kernel_metadata": {"axes": "fd"}}
    mlp = SwiGLU(D, F, kernel_init=ones, up={"kernel_init": zeros}, down=down, rngs=rngs())
    sums = [np.sum(layer.kernel[...]) for layer in (mlp.gate_proj, mlp.up_proj, mlp.down_proj)]
    assert sums == [D * F, 0, 0]
    assert mlp.down_proj.kernel.get_metadata()["axes"] == "fd"
    metadata: dict[str, Any] = {"kernel_metadata": {"a": 1}, "bias_metadata": {"a": 2}}
    head = LinearCrossEntropy(D, V, use_bias=True, rngs=rngs(), **metadata)
    assert head.bias is not None
    assert (head.kernel.get_metadata()["a"], head.bias.get_metadata()["a"]) == (1, 2)
    # A layer after our norm starts from the same numbers as after Flax's norm.
    ours, flax = rngs(), rngs()
    RMSNorm(D, rngs=ours)
    nnx.RMSNorm(D, rngs=flax)
    np.testing.assert_array_equal(
        nnx.Linear(D, F, rngs=ours).kernel[...], nnx.Linear(D, F, rngs=flax).kernel[...]
    )


@pytest.mark.parametrize("use_bias", [False, True])
def test_the_two_layouts_of_a_head(use_bias):
    x, _, labels = make_inputs()
    columns = shuffled(LinearCrossEntropy(D, V, use_bias=use_bias, rngs=nnx.Rngs(0)))
    rows = LinearCrossEntropy(D, V, use_bias=use_bias, weight_layout="vd", rngs=nnx.Rngs(1))
    rows.embedding[...] = columns.kernel[...].T
    if columns.bias is not None and rows.bias is not None:
        rows.bias[...] = columns.bias[...]
    both = quick_jit(lambda x: [(head(x, labels), head.logits(x)) for head in (rows, columns)])
    (loss, logits), (want, want_logits) = both(x)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(logits, want_logits, rtol=1e-5, atol=1e-5)


def test_a_chunk_size_with_biases_is_refused():
    with pytest.raises(ValueError, match="chunk_size=4 is for layers without biases"):
        swiglu_layer(chunk_size=4)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "vocab_size", "num_features"])
def test_wrong_sizes_are_refused(unchecked_shapes, name):
    sizes: dict[str, Any]
    layer, sizes = {
        "num_features": (RMSNorm, {}),
        "vocab_size": (LinearCrossEntropy, {"hidden_size": 8}),
    }.get(name, (SwiGLU, {"hidden_size": 8, "intermediate_size": 8}))
    with pytest.raises(ValueError, match=f"^{name}=-1 must not be below 0; give the size"):
        layer(**sizes | {name: -1}, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=rf"^{name} must be an integer, got 2\.5; give the number"):
        layer(**sizes | {name: 2.5}, rngs=nnx.Rngs(0))


def test_two_names_of_a_dtype_are_one():
    of = lambda size_in, size_out, dtype: nnx.Linear(
        size_in, size_out, use_bias=False, dtype=dtype, rngs=nnx.Rngs(0)
    )
    layers = of(D, F, jnp.bfloat16), of(D, F, jnp.dtype("bfloat16")), of(F, D, jnp.bfloat16)
    assert SwiGLU.from_nnx(*layers)(jnp.ones((2, D))).dtype == jnp.bfloat16


def test_layers_refuse_dtypes_as_the_operations_do(unchecked_shapes):
    x = jnp.ones((4, 8))
    with pytest.raises(TypeError, match="weight is int32"):
        RMSNorm(8, param_dtype=jnp.int32)(x)
    options: dict[str, Any] = {"kernel_init": nnx.initializers.zeros_init(), "rngs": nnx.Rngs(0)}
    with pytest.raises(TypeError, match="x is int32"):
        SwiGLU(8, 16, dtype=jnp.int32, **options)(x)


@pytest.mark.parametrize("dtype", [None, BF16])
def test_what_layers_refuse_with_and_without_a_dtype(unchecked_shapes, dtype):
    """Flax casts integers and complex numbers. 0.5 s."""
    x, options = jnp.ones((4, 8)), {"dtype": dtype, "rngs": nnx.Rngs(0)}
    head = LinearCrossEntropy(8, 16, **options)
    add = AddRMSNorm(8, **options)
    layers = [
        ("x", RMSNorm(8, **options)),
        ("x", lambda x: add(x, x)),
        ("residual", lambda residual: add(x, residual)),
        ("x", SwiGLU(8, 16, **options)),
        ("x", SwiGLU(8, 16, use_bias=True, **options)),
        ("x", lambda x: head(x, jnp.ones(4, jnp.int32))),
        ("x", head.logits),
    ]
    for name, layer in layers:
        for error, bad, message in not_hidden_states(name):
            with pytest.raises(error, match=message):
                layer(bad)


def test_the_logits_of_a_head_are_of_floating_tokens_of_its_size(unchecked_shapes):
    head = LinearCrossEntropy(8, 16, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="x is int32, not a floating dtype"):
        head.logits(jnp.ones((3, 8), int))
    message = "x (3, 7) and weight (8, 16) must agree in D: weight_layout='dv' is [D, V]"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        head.logits(jnp.ones((3, 7)))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = RMSNorm(D, rngs=rngs)
        self.mlp = SwiGLU(D, F, rngs=rngs)
        self.add_norm = AddRMSNorm(D, rngs=rngs)

    def __call__(self, h):
        normed, h = self.add_norm(self.mlp(self.norm(h)), h)
        return h + normed


def test_nnx_makes_layers_with_vmap_and_runs_them_with_scan_and_remat():
    """2 s."""
    make = nnx.split_rngs(splits=3)(nnx.vmap(Block))
    graphdef, stacked = nnx.split(make(nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (2, 4, D))

    def scanned(stacked):
        run = nnx.scan(
            nnx.remat(lambda h, block: block(h)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
        )
        return jnp.sum(jnp.sin(run(x, nnx.merge(graphdef, stacked))))

    def in_a_loop(stacked):
        h = x
        for i in range(3):
            h = nnx.merge(graphdef, jax.tree.map(lambda a, i=i: a[i], stacked))(h)
        return jnp.sum(jnp.sin(h))

    got, expected = (quick_jit(jax.value_and_grad(fn))(stacked) for fn in (scanned, in_a_loop))
    chex.assert_trees_all_close(got, expected, rtol=1e-5, atol=1e-5)
