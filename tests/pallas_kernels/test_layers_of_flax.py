"""The NNX layers in the place of Flax's own: in a model, and with the parameters of a layer."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from pallas_kernels import add_rms_norm, linear_cross_entropy
from pallas_kernels.layers import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU
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
from support.numerics import assert_as_accurate, quick_jit

pytestmark = pytest.mark.usefixtures("fast_compilation")


# A model in Flax's own layers, and the same model with ours.


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
        self.blocks = nnx.List([TheirBlock(rngs)])
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
        self.blocks = nnx.List([BlockWithOurs(rngs)])
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


@pytest.mark.full
@in_both_modes
@pytest.mark.parametrize("nnx_mode", ["graph_mode", "tree_mode"], indirect=True)
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
    """Whether the layer holds these variables themselves, and no others."""
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
            "weight_layout='dd' must be one of",
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
