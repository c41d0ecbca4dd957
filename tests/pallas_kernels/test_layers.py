"""The NNX layers: against the operations, and inside a model that somebody else wrote."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import print_saved_residuals

from pallas_kernels import add_rms_norm, linear_cross_entropy, rms_norm, swiglu
from pallas_kernels.layers import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU
from support.numerics import assert_as_accurate, quick_jit

B, S, D, F, V = 2, 8, 16, 24, 37
BF16, F32 = jnp.bfloat16, jnp.float32

pytestmark = pytest.mark.usefixtures("fast_compilation")


@pytest.fixture(params=["graph_mode", "tree_mode"])
def nnx_mode(request):
    """NNX's two ways to see a module; what is expected is computed once, in the first."""
    graph = request.param == "graph_mode"
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        assert nnx.set_graph_mode.current_value() == graph
        yield


in_both_modes = pytest.mark.usefixtures("nnx_mode")


def make_inputs(dtype=F32):
    rng = np.random.default_rng(0)
    x, residual = (jnp.asarray(rng.normal(size=(B, S, D)), dtype) for _ in range(2))
    labels = rng.integers(V, size=(B, S)).astype(np.int32)
    labels[0, 3:5] = -100
    return x, residual, jnp.asarray(labels)


def params(module):
    """Parameters by path, as plain arrays."""
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): variable[...] for path, variable in flat}


def shuffled(module, seed=1):
    """The module with other numbers than it starts from: a constant hides mistakes."""
    rng = np.random.default_rng(seed)
    change = lambda a: (a + jnp.asarray(rng.normal(size=a.shape) / 8, F32)).astype(a.dtype)
    nnx.update(module, jax.tree.map(change, nnx.state(module)))
    return module


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


# Each layer: how it is made, its inputs, and what it computes from its parameters by name.
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
        # No state of other kinds, and none that appears with the first call.
        before = jax.tree.structure(nnx.state(layer))
        layer(*choose(*make_inputs(dtype)))
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
    out = make()(*choose(*make_inputs(BF16)))
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


@pytest.mark.parametrize("dtype", [None, BF16])
def test_logits_are_those_of_the_loss(dtype):
    x, _, labels = make_inputs()
    layer = shuffled(loss_layer(z_loss=0.0, dtype=dtype))
    logits = layer.logits(x)
    chex.assert_shape(logits, (B, S, V))
    chex.assert_type(logits, F32)
    counts = np.asarray(labels) != -100
    labels_or_zero = jnp.where(counts, labels, 0)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels_or_zero)
    np.testing.assert_allclose(layer(x, labels), np.mean(losses[counts]), rtol=1e-6)
    assert np.max(np.abs(logits)) < 5  # the softcap


def test_only_the_two_projections_need_be_kept(capsys):
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


# Somebody else's model, with nothing of ours in it, and how our layers get into it.


class TheirBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = nnx.RMSNorm(D, epsilon=1e-5, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        self.norm2 = nnx.RMSNorm(D, epsilon=1e-5, rngs=rngs)
        self.gate = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.up = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(F, D, use_bias=False, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        y = self.norm2(x)
        return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


class TheirModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([TheirBlock(rngs) for _ in range(2)])
        self.norm = nnx.RMSNorm(D, epsilon=1e-5, rngs=rngs)
        self.head = nnx.Linear(D, V, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.head(self.norm(x))

    def loss(self, tokens, labels):
        losses = optax.softmax_cross_entropy_with_integer_labels(self(tokens), labels)
        return jnp.mean(losses)


class BlockWithOurs(nnx.Module):
    def __init__(self, rngs):
        self.norm1 = RMSNorm(D, epsilon=1e-5)
        self.attention = nnx.MultiHeadAttention(2, D, decode=False, rngs=rngs)
        self.norm2 = AddRMSNorm(D, epsilon=1e-5)
        self.mlp = SwiGLU(D, F, rngs=rngs)

    def __call__(self, x, mask):
        y, x = self.norm2(self.attention(self.norm1(x), mask=mask), x)
        return x + self.mlp(y)


class ModelWithOurs(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(V, D, rngs=rngs)
        self.blocks = nnx.List([BlockWithOurs(rngs) for _ in range(2)])
        self.norm = RMSNorm(D, epsilon=1e-5)
        self.head = LinearCrossEntropy(D, V, rngs=rngs)

    def loss(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(tokens))
        return self.head(self.norm(x), labels)


def to_ours(path: str, array: jax.Array) -> tuple[str, jax.Array]:
    """The name and value of one of their parameters in the model with our layers."""
    for theirs, ours in (
        (".gate.", ".mlp.gate_proj."),
        (".up.", ".mlp.up_proj."),
        (".down.", ".mlp.down_proj."),
    ):
        path = path.replace(theirs, ours)
    return path, array


def by_path(state):
    return {".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(state)}


def tokens_and_labels():
    tokens = np.random.default_rng(0).integers(V, size=(B, S + 1))
    tokens = jnp.asarray(tokens, jnp.int32)
    return tokens[:, :-1], tokens[:, 1:]


def with_jax_jit(model):
    graphdef, state, rest = nnx.split(model, nnx.Param, ...)
    fn = lambda state, x, y: nnx.merge(graphdef, state, rest).loss(x, y)
    loss, gradients = quick_jit(jax.value_and_grad(fn))(state, *tokens_and_labels())
    return loss, by_path(gradients)


def with_nnx_jit(model):
    step = nnx.jit(nnx.value_and_grad(lambda model, x, y: model.loss(x, y)))
    loss, gradients = step(model, *tokens_and_labels())
    return loss, by_path(nnx.state(gradients))


@functools.cache
def of_their_model():
    """Parameters, loss and gradients, by our names."""
    theirs = shuffled(TheirModel(nnx.Rngs(0)))
    loss, gradients = with_jax_jit(theirs)
    ours = lambda arrays: dict(to_ours(path, a) for path, a in arrays.items())
    return ours(params(theirs)), loss, ours(gradients)


@in_both_modes
@pytest.mark.parametrize(
    "nnx_mode", ["graph_mode", pytest.param("tree_mode", marks=pytest.mark.full)], indirect=True
)
def test_inside_somebody_elses_model():
    ours = ModelWithOurs(nnx.Rngs(1))
    converted, want, their_gradients = of_their_model()
    assert set(converted) == set(params(ours))
    state = nnx.state(ours, nnx.Param)
    flat = [
        (path, variable.replace(converted[".".join(map(str, path))]))
        for path, variable in nnx.to_flat_state(state)
    ]
    nnx.update(ours, nnx.from_flat_state(flat))

    for got, gradients in (with_jax_jit(ours), with_nnx_jit(ours)):
        np.testing.assert_allclose(got, want, rtol=1e-6)
        chex.assert_trees_all_close(gradients, their_gradients, rtol=1e-4, atol=1e-6)


# Flax's own layers, and ours that take over their parameters.


def shared_with(layer, **variables):
    """Whether the layer holds these very variables, and no others."""
    held = jax.tree.leaves(nnx.state(layer), is_leaf=lambda v: isinstance(v, nnx.Variable))
    found = {name: functools.reduce(getattr, name.split("."), layer) for name in variables}
    return len(held) == len(variables) and all(found[n] is variables[n] for n in variables)


@in_both_modes
def test_norms_from_flax():
    flax = shuffled(nnx.RMSNorm(D, epsilon=1e-3, rngs=nnx.Rngs(0)))
    ours = RMSNorm.from_nnx(flax)
    assert shared_with(ours, scale=flax.scale)
    x, residual, _ = make_inputs()
    np.testing.assert_allclose(ours(x), flax(x), rtol=1e-5, atol=1e-6)
    flax.dtype = BF16
    assert flax.scale is not None
    both = AddRMSNorm.from_nnx(flax, casting="llama", implementation="reference")
    y, total = both(x, residual)
    assert y.dtype == total.dtype == BF16
    expected = add_rms_norm(
        x.astype(BF16), residual.astype(BF16), flax.scale[...], eps=1e-3, casting="llama"
    )
    chex.assert_trees_all_equal((y, total), expected)


@pytest.mark.parametrize("stream, dtype", [(BF16, F32), (F32, BF16)])
def test_the_norm_casts_its_input_as_flax_does(stream, dtype):
    x = 3 * make_inputs(stream)[0]
    # Numbers of bfloat16, because Flax casts its scale, too.
    scale = jnp.linspace(0.5, 1.5, D, dtype=BF16).astype(F32)
    flax, ours = nnx.RMSNorm(D, dtype=dtype, rngs=nnx.Rngs(0)), RMSNorm(D, dtype=dtype)
    assert flax.scale is not None
    flax.scale[...] = ours.scale[...] = scale
    with jax.numpy_dtype_promotion("standard"):
        theirs = flax(x)
    assert ours(x).dtype == theirs.dtype == dtype
    wide = np.asarray(x.astype(dtype), np.float64)
    exact = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 1e-6) * np.asarray(scale)
    assert_as_accurate([ours(x)], [theirs], [exact], names=["norm"])


@in_both_modes
def test_mlp_from_flax():
    make = functools.partial(nnx.Linear, use_bias=False, dtype=BF16)
    gate, up = (make(D, F, rngs=nnx.Rngs(i)) for i in range(2))
    down = make(F, D, rngs=nnx.Rngs(2))
    ours = SwiGLU.from_nnx(gate, up, down, save="x", chunk_size=4)
    names = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    assert shared_with(ours, **{f"{name}.kernel": layer.kernel for name, layer in names.items()})
    assert (ours.save, ours.chunk_size) == ("x", 4)
    x, *_ = make_inputs()
    expected = down(nnx.silu(gate(x)) * up(x))
    np.testing.assert_allclose(ours(x), expected, rtol=0.05, atol=0.02)
    biased = [nnx.Linear(*sizes, rngs=nnx.Rngs(3)) for sizes in ((D, F), (D, F), (F, D))]
    got = SwiGLU.from_nnx(*biased)(x)
    gate, up, down = biased
    np.testing.assert_allclose(got, down(nnx.silu(gate(x)) * up(x)), rtol=1e-4, atol=1e-5)


def test_heads_from_flax():
    x, _, labels = make_inputs()
    linear = shuffled(nnx.Linear(D, V, rngs=nnx.Rngs(0)))
    head = LinearCrossEntropy.from_nnx(linear, z_loss=1e-3)
    assert shared_with(head, kernel=linear.kernel, bias=linear.bias)
    np.testing.assert_allclose(head.logits(x), linear(x), rtol=1e-5, atol=1e-5)
    embed = nnx.Embed(V, D, rngs=nnx.Rngs(0))
    tied = LinearCrossEntropy.from_nnx(embed)
    assert shared_with(tied, embedding=embed.embedding)
    np.testing.assert_allclose(tied.logits(x), embed.attend(x), rtol=1e-5, atol=1e-5)
    expected = linear_cross_entropy(x, embed.embedding[...], labels)
    np.testing.assert_allclose(tied(x, labels), expected, rtol=1e-6)


def linear_layers(**options: Any) -> tuple[nnx.Linear, nnx.Linear]:
    make = functools.partial(nnx.Linear, D, F, rngs=nnx.Rngs(0), **options)
    return make(), make()


@pytest.mark.parametrize(
    "make, error, match",
    [
        (
            lambda: RMSNorm.from_nnx(nnx.LayerNorm(D, rngs=nnx.Rngs(0))),  # pyright: ignore
            TypeError,
            "RMSNorm.from_nnx takes an nnx.RMSNorm, got a LayerNorm",
        ),
        (
            lambda: RMSNorm.from_nnx(nnx.RMSNorm(D, use_scale=False, rngs=nnx.Rngs(0))),
            ValueError,
            "use_scale=False cannot be kept; the norm has a scale",
        ),
        (
            lambda: AddRMSNorm.from_nnx(nnx.RMSNorm(D, feature_axes=(0,), rngs=nnx.Rngs(0))),
            ValueError,
            r"feature_axes=\(0,\) cannot be kept; the scale is along the last axis",
        ),
        (
            lambda: SwiGLU.from_nnx(*linear_layers(), nnx.Linear(D, F, rngs=nnx.Rngs(0))),
            ValueError,
            r"the kernels must be \[D, F\], \[D, F\] and \[F, D\], got",
        ),
        (
            lambda: SwiGLU.from_nnx(
                *linear_layers(), nnx.Linear(F, D, use_bias=False, rngs=nnx.Rngs(0))
            ),
            ValueError,
            "the layers differ in use_bias: {'gate': True, 'up': True, 'down': False}",
        ),
        (
            lambda: SwiGLU.from_nnx(
                *linear_layers(precision="highest"), nnx.Linear(F, D, rngs=nnx.Rngs(0))
            ),
            ValueError,
            "precision='highest' cannot be kept; products take operands of dtype",
        ),
        (
            lambda: LinearCrossEntropy.from_nnx(nnx.RMSNorm(D, rngs=nnx.Rngs(0))),  # pyright: ignore
            TypeError,
            "takes an nnx.Linear or an nnx.Embed, got a RMSNorm",
        ),
        (
            lambda: SwiGLU(D, F, down={"precision": "highest"}, rngs=nnx.Rngs(0)),
            TypeError,
            "precision: not among the options of one projection, which are bias_init",
        ),
        (
            lambda: LinearCrossEntropy(D, V, weight_layout="dd", rngs=nnx.Rngs(0)),  # pyright: ignore
            ValueError,
            "weight_layout='dd' must be 'dv' or 'vd'",
        ),
        (
            lambda: RMSNorm(D, scale_init=nnx.initializers.ones),
            ValueError,
            "scale_init needs random numbers; pass rngs",
        ),
        (lambda: RMSNorm(D, epsilom=1.0), TypeError, "epsilom"),  # pyright: ignore
    ],
)
def test_what_layers_refuse(make, error, match, unchecked_shapes):
    with pytest.raises(error, match=match):
        make()


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
    # A layer behind a norm starts from the numbers that it has behind Flax's.
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
    np.testing.assert_allclose(rows(x, labels), columns(x, labels), rtol=1e-5)
    np.testing.assert_allclose(rows.logits(x), columns.logits(x), rtol=1e-5, atol=1e-5)


def test_old_names_work_once_more_and_warn():
    with pytest.warns(DeprecationWarning, match="the argument eps is called epsilon now"):
        norm: Any = RMSNorm(D, eps=1e-3)  # pyright: ignore[reportCallIssue]
    assert norm.epsilon == 1e-3
    with pytest.warns(DeprecationWarning, match="the argument hidden_size is called num_features"):
        RMSNorm(hidden_size=D)  # pyright: ignore[reportCallIssue]
    with pytest.warns(DeprecationWarning, match="the parameter weight is called scale now"):
        assert norm.weight is norm.scale
    head = LinearCrossEntropy(D, V, rngs=nnx.Rngs(0))
    with pytest.warns(DeprecationWarning, match=r"weight is called kernel \[D, V\] or embedding"):
        assert head.weight is head.kernel
    with pytest.raises(TypeError, match="eps is the old name of epsilon; leave it out"):
        with pytest.warns(DeprecationWarning):
            RMSNorm(D, eps=1e-3, epsilon=1e-3)  # pyright: ignore[reportCallIssue]
