"""The Equinox modules beside Equinox's own: values, gradients, parameters. 10 s on one core."""

import builtins
import functools
import importlib
import io
import sys
from typing import Any

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import pallas_kernels
from pallas_kernels import linear_cross_entropy, rms_norm
from pallas_kernels.equinox import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU
from support.framework_models import equinox_model
from support.frameworks import check, has_shape, normal, shuffled

BF16, F32 = jnp.bfloat16, jnp.float32
B, S, D, F, V = 2, 9, 20, 33, 37
LABELS = jnp.arange(B * S).reshape(B, S) % V
KEY = jax.random.key(0)

pytestmark = pytest.mark.usefixtures("fast_compilation")


def in_dtype(module, dtype):
    """The module as users of mixed precision cast it."""
    return jax.tree.map(lambda a: a.astype(dtype), module)


# The next functions compute one sequence in Equinox's own layers.


def their_norm(norm, x):
    return jax.vmap(norm)(x)


def their_add_norm(norm, x, residual):
    return jax.vmap(norm)(x + residual), x + residual


def their_mlp(layers, x):
    gate, up, down = (jax.vmap(layer) for layer in in_dtype(layers, x.dtype))
    return down(jax.nn.silu(gate(x)) * up(x))


def their_loss(head, x, labels):
    logits = jax.vmap(in_dtype(head, x.dtype))(x)
    logits = logits.astype(jnp.promote_types(F32, x.dtype))
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def linears(key):
    keys = jax.random.split(key, 3)
    sizes = (D, F), (D, F), (F, D)
    return tuple(
        eqx.nn.Linear(*size, use_bias=False, key=key) for size, key in zip(sizes, keys, strict=True)
    )


NORM = eqx.nn.RMSNorm(D, use_bias=False)
# Our module, Equinox's own, the function of one sequence, and the number of floating inputs.
LAYERS = {
    "RMSNorm": (RMSNorm(D), NORM, their_norm, 1),
    "AddRMSNorm": (AddRMSNorm(D), NORM, their_add_norm, 2),
    "SwiGLU": (SwiGLU(D, F, key=KEY), linears(KEY), their_mlp, 1),
    "LinearCrossEntropy": (
        LinearCrossEntropy(D, V, use_bias=True, key=KEY),
        eqx.nn.Linear(D, V, key=KEY),
        their_loss,
        1,
    ),
}
each_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.mark.parametrize(
    "name, dtype",
    [
        *((name, BF16) for name in LAYERS),
        *(pytest.param(name, F32, marks=pytest.mark.full) for name in LAYERS),
    ],
)
def test_errs_as_little_as_equinoxs_own(name, dtype):
    """Under `jax.vmap` over a batch of sequences."""
    ours, _, theirs, num_inputs = LAYERS[name]
    leaves, structure = jax.tree.flatten(shuffled(ours))
    their_structure = jax.tree.structure(LAYERS[name][1])
    inputs = [normal((B, S, D), dtype, seed) for seed in range(num_inputs)]
    labels = [LABELS] if name == "LinearCrossEntropy" else []

    def of_a_batch(fn, structure):
        def run(leaves, *inputs):
            module = jax.tree.unflatten(structure, leaves)
            return jax.vmap(functools.partial(fn, module))(*inputs, *labels)

        return run

    check(
        of_a_batch(lambda module, *args: module(*args), structure),
        of_a_batch(theirs, their_structure),
        leaves,
        *inputs,
    )


@each_layer
def test_has_the_parameters_of_equinoxs_own(name):
    """Its first values are the same, and it loads a file that Equinox wrote."""
    ours, theirs, *_ = LAYERS[name]
    chex.assert_trees_all_equal(jax.tree.leaves(ours), jax.tree.leaves(theirs))
    trained = shuffled(theirs)
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, trained)
    file.seek(0)
    loaded = eqx.tree_deserialise_leaves(file, ours)
    chex.assert_trees_all_equal(jax.tree.leaves(loaded), jax.tree.leaves(trained))


def test_parameters_have_equinoxs_names_and_the_dtype_that_is_asked_for():
    mlp = SwiGLU(D, F, dtype=BF16, key=KEY)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(mlp)]
    assert paths == [".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"]
    head = LinearCrossEntropy(D, V, True, BF16, key=KEY)
    assert head.weight.shape == (V, D) and head.bias is not None and head.bias.shape == (V,)
    for module in (mlp, head, RMSNorm((D,), dtype=BF16), AddRMSNorm(D, dtype=BF16)):
        assert {a.dtype for a in jax.tree.leaves(module)} == {jnp.dtype(BF16)}
    assert LinearCrossEntropy(D, V, key=KEY).bias is None


def test_a_layer_takes_a_token_or_a_sequence():
    x = normal((S, D), F32)
    for layer in (RMSNorm(D), SwiGLU(D, F, key=KEY)):
        chex.assert_trees_all_close(layer(x), jax.vmap(layer)(x), rtol=1e-5, atol=1e-6)
    in_sequence = eqx.nn.Sequential([RMSNorm(D), SwiGLU(D, F, key=KEY)])
    assert in_sequence(x, key=KEY).shape == (S, D)


@each_layer
def test_vmap_makes_one_gradient_of_a_weight(name):
    ours, _, _, num_inputs = LAYERS[name]
    inputs = [normal((B, S, D), BF16)] * num_inputs
    labels = [LABELS] if name == "LinearCrossEntropy" else []
    total = lambda out: sum(jnp.sum(a.astype(F32)) for a in jax.tree.leaves(out))
    loss = lambda module, *inputs: total(jax.vmap(module)(*inputs, *labels))
    alone = lambda module, *args: total(module(*args))
    for shape in {a.shape for a in jax.tree.leaves(ours)}:
        assert not has_shape(jax.grad(loss), (ours, *inputs), B, *shape)
        # The other order makes one for each sequence, so the test can fail.
        by_sequence = jax.vmap(jax.grad(alone), (None, *(0,) * (num_inputs + len(labels))))
        assert has_shape(by_sequence, (ours, *inputs, *labels), B, *shape)


def test_options_reach_the_operations():
    x = normal((S, D), BF16)
    options: dict[str, Any] = {"eps": 0.1, "weight_offset": 1.0, "casting": "llama"}
    norm = RMSNorm(D, **options)
    chex.assert_trees_all_equal(norm.weight, jnp.zeros(D))  # so the scale is 1
    chex.assert_trees_all_equal(norm(x), rms_norm(x, jnp.zeros(D), **options))

    loss: dict[str, Any] = {"z_loss": 0.1, "reduction": "none", "logit_softcap": 3.0}
    head = LinearCrossEntropy(D, V, key=KEY, **loss)
    weights = jnp.arange(S).astype(F32) % 3
    want = linear_cross_entropy(x, head.weight, LABELS[0], token_weights=weights, **loss)
    chex.assert_trees_all_close(head(x, LABELS[0], weights), want, rtol=1e-6)
    mlp = SwiGLU(D, F, save="x", chunk_size=4, key=KEY)
    assert "save='x', chunk_size=4" in str(jax.make_jaxpr(mlp)(x))


def test_logits_are_those_of_the_loss():
    x = normal((S, D), F32)
    head = shuffled(LinearCrossEntropy(D, V, True, key=KEY, logit_softcap=5.0))
    logits = head.logits(x)
    assert logits.shape == (S, V) and jnp.max(jnp.abs(logits)) < 5
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, LABELS[0])
    chex.assert_trees_all_close(head(x, LABELS[0]), jnp.mean(losses), rtol=1e-6)


SWIGLU = functools.partial(SwiGLU, intermediate_size=F, key=KEY)
HEAD = functools.partial(LinearCrossEntropy, out_features=V, key=KEY)


@pytest.mark.parametrize(
    "make, options, error, message",
    [
        (RMSNorm, {"epsilon": 1e-5}, TypeError, "unexpected keyword argument 'epsilon'"),
        (RMSNorm, {"use_bias": True}, ValueError, "use_bias=True: the operation has no bias"),
        (SWIGLU, {"use_bias": True}, TypeError, "unexpected keyword argument 'use_bias'"),
        (HEAD, {"smoothing": 0.1}, TypeError, "smoothing: not among the options of linear_cross_"),
        (HEAD, {"token_weights": None}, TypeError, "token_weights: not among the options of"),
    ],
)
def test_a_wrong_argument_fails_at_construction(unchecked_shapes, make, options, error, message):
    with pytest.raises(error, match=message):
        make(D, **options)
    with pytest.raises(ValueError, match="=-1 must not be below 0; give the size"):
        make(-1)
    with pytest.raises(TypeError, match=r" must be an integer, got 2\.5; give the number"):
        make(2.5)
    with pytest.raises(ValueError, match=r"shape=\(9, 20\): only the last axis"):
        AddRMSNorm((S, D))


def test_logits_of_what_is_no_array(unchecked_shapes):
    no_array: Any = [[1.0] * 8] * 4
    head = LinearCrossEntropy(8, 16, key=jax.random.key(0))
    with pytest.raises(TypeError, match=r"^x must be an array, got a list; make it a"):
        head.logits(no_array)


def test_without_equinox_the_import_names_the_extra(monkeypatch):
    original = builtins.__import__

    def without_equinox(name, *args, **kwargs):
        if name == "equinox":
            raise ModuleNotFoundError("No module named 'equinox'", name="equinox")
        return original(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "pallas_kernels.equinox")
    monkeypatch.setattr(builtins, "__import__", without_equinox)
    with pytest.raises(ImportError, match=r"pip install 'pallas-kernels\[equinox\]'"):
        importlib.import_module("pallas_kernels.equinox")


def test_all_layers_choose_kernels_under_vmap(on_h100):
    module, loss = equinox_model()
    tokens = jax.ShapeDtypeStruct((8, 256), jnp.int32)
    with pallas_kernels.require_kernels():
        found = pallas_kernels.explain(loss, module, tokens, tokens)
    names = ["rms_norm", "swiglu_mlp", "add_rms_norm", "linear_cross_entropy"]
    assert [choice.operation for choice in found.choices] == names
