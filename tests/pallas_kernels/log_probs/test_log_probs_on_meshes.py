"""Log-probabilities on eight devices: results and gradients as in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_log_probs, linear_token_loss
from support.log_prob_formulas import (
    arrays_of,
    arrays_with_ties,
    both,
    check_against_formula,
    check_argmax,
    make_cotangents,
    with_gradients,
)
from support.loss_formulas import F32, in_turn
from support.numerics import assert_trees_as_accurate, quick_jit

AXES = {"data": 2, "fsdp": 2, "tensor": 2}
SHAPE, D, V = (4, 6), 24, 56
OPTIONS: dict[str, Any] = {
    "implementation": "xla",
    "chunk_size": 3,
    "temperature": 0.7,
    "logit_softcap": 2.0,
}
OF_FORMULA: dict[str, Any] = {"temperature": 0.7, "logit_softcap": 2.0}
# Specs of the tokens, and mesh axes of the hidden size and of the vocabulary.
LAYOUTS = {
    "batch": (P(("data", "fsdp")), None, None),
    "sequence": (P(("data", "fsdp"), "tensor"), None, None),
    "fsdp": (P(("data", "fsdp")), "fsdp", None),
    "tensor": (P("data"), None, "tensor"),
    "both": (P(("data", "fsdp")), "fsdp", "tensor"),
}


def mesh_of(kind):
    return jax.make_mesh(tuple(AXES.values()), tuple(AXES), axis_types=(kind,) * len(AXES))


def placed(mesh, arrays, labels, cotangents, layout):
    tokens, hidden, columns = layout
    specs = {"x": tokens, "weight": P(columns, hidden), "bias": P(columns)}
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    arrays = {name: put(a, specs[name]) for name, a in arrays.items()}
    return arrays, put(labels, tokens), tuple(put(c, tokens) for c in cotangents)


@pytest.mark.usefixtures("on_h100")
def test_kept_exponentials_refuse_a_split_vocabulary():
    mesh = mesh_of(AxisType.Explicit)
    x, weight, labels = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((256, 64)), jnp.zeros(8, int)
    with jax.set_mesh(mesh):
        weight = jax.device_put(weight, NamedSharding(mesh, P("tensor")))
        loss = lambda x: jnp.sum(linear_log_probs(x, weight, labels, keep_exponentials=True))
        with pytest.raises(ValueError, match=r"mesh axes \('tensor',\) split it; use keep_exp"):
            jax.make_jaxpr(jax.grad(loss))(x)


def run(arrays, labels, cotangents):
    return with_gradients(functools.partial(both, labels=labels, **OPTIONS), arrays, cotangents)


@in_turn("layout, kind", LAYOUTS, {str(kind): kind for kind in (AxisType.Auto, AxisType.Explicit)})
def test_results_and_gradients(kind, layout):
    arrays, labels = arrays_of(SHAPE, D, V, F32)
    cotangents = make_cotangents(SHAPE)
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        got = quick_jit(run)(*placed(mesh, arrays, labels, cotangents, layout))
        got = jax.tree.map(np.asarray, got)
    check_against_formula(got, arrays, labels, cotangents, floor=12.0, **OF_FORMULA)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("layout", ["fsdp", "both"])
def test_argmax(kind, layout):
    """The lowest of equal logits, also where several parts of the vocabulary have them."""
    arrays, labels = arrays_with_ties(SHAPE, D, V, F32)
    options = {"return_argmax": True, "implementation": "xla", "counted_fraction": 0.9}
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, arrays, labels, (), LAYOUTS[layout])[:2]
        fn = lambda arrays, labels: linear_log_probs(labels=labels, **arrays, **options)[1]
        got = jax.tree.map(np.asarray, quick_jit(fn)(*arguments))
    check_argmax(got, arrays, labels)


@pytest.mark.parametrize("check_vma", [False, True])
def test_the_argmax_of_a_vocabulary_that_the_caller_splits(check_vma):
    arrays, labels = arrays_with_ties(SHAPE, D, V, F32)
    tokens = P("data")
    local = jax.shard_map(
        lambda x, weight, labels: linear_log_probs(
            x, weight, labels, vocab_axis="tensor", return_argmax=True, implementation="xla"
        )[1],
        mesh=mesh_of(AxisType.Auto),
        in_specs=(tokens, P("tensor"), tokens),
        out_specs=tokens,
        check_vma=check_vma,
    )
    got = quick_jit(local)(*map(jnp.asarray, (arrays["x"], arrays["weight"], labels)))
    check_argmax(got, arrays, labels)


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_vocabulary_that_the_caller_splits(check_vma):
    arrays, labels = arrays_of(SHAPE, D, V, F32)
    cotangents = make_cotangents(SHAPE)
    tokens = P("data")
    specs = {"x": tokens, "weight": P("tensor"), "bias": P("tensor")}
    local = jax.shard_map(
        lambda arrays, labels: both(labels=labels, vocab_axis="tensor", **OPTIONS, **arrays),
        mesh=mesh_of(AxisType.Auto),
        in_specs=(specs, tokens),
        out_specs=(tokens, tokens),
        check_vma=check_vma,
    )
    fn = lambda **arrays: local(arrays, jnp.asarray(labels))
    args = jax.tree.map(jnp.asarray, (arrays, cotangents))
    got = quick_jit(lambda *args: with_gradients(fn, *args))(*args)
    check_against_formula(got, arrays, labels, cotangents, floor=12.0, **OF_FORMULA)


def loss_of_tokens(log_probs, entropy, data):
    return data["same"] * (entropy - data["of_fsdp"] * log_probs)


def loss_of_all_devices(arrays, labels, data):
    """The sum over the devices of `data`, which split tokens, and of `fsdp`, which split data."""
    logits = jnp.einsum("bsd,vd->bsv", arrays["x"], arrays["weight"])
    log_p = jax.nn.log_softmax(logits)
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    log_probs = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    of_data = lambda a: jnp.where(labels < 0, 0, a).reshape(2, 1, 2, 6)
    data = {"same": data["same"], "of_fsdp": data["of_fsdp"].reshape(2, 2, 6)}
    return jnp.sum(loss_of_tokens(of_data(log_probs), of_data(entropy), data))


@pytest.mark.parametrize("per_token", [False, True])
def test_data_that_are_the_same_on_devices_with_other_tokens(per_token):
    """Inside of `jax.shard_map` their gradient is the sum over these devices. 2 s each."""
    arrays, labels = arrays_of(SHAPE, D, V, F32, bias=False)
    rng = np.random.default_rng(0)
    data = {"same": rng.normal(size=(2, 6)), "of_fsdp": rng.normal(size=SHAPE)}
    args = jax.tree.map(lambda a: jnp.asarray(a, F32), (arrays, data))

    def local(arrays, data, labels):
        whole = lambda *args: jnp.sum(loss_of_tokens(*args))
        loss = linear_token_loss(
            **arrays,
            labels=labels,
            token_fn=loss_of_tokens if per_token else whole,
            token_data=data,
            with_entropy=True,
            per_token=per_token,
            implementation="xla",
        )
        return jax.lax.psum(loss, ("data", "fsdp"))

    tokens = P("data")
    mapped = jax.shard_map(
        local,
        mesh=mesh_of(AxisType.Auto),
        in_specs=({"x": tokens, "weight": P()}, {"same": P(), "of_fsdp": P("fsdp")}, tokens),
        out_specs=P(),
    )
    plain = lambda arrays, data, labels: loss_of_all_devices(arrays, labels, data)
    graded = lambda fn: quick_jit(jax.value_and_grad(fn, argnums=(0, 1)))
    got, low_precision = (graded(fn)(*args, labels) for fn in (mapped, plain))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), args)
        exact = graded(plain)(*wide, labels)
    assert_trees_as_accurate(got, low_precision, exact)
