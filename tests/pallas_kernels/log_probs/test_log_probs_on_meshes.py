"""Log-probabilities on eight devices: results and gradients as in float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import linear_log_probs
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
from support.numerics import quick_jit

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
