"""Projections of one input as one product. `test_llama.py` has the whole model's values."""

import chex
import jax.numpy as jnp
import pytest
from flax import nnx

from models.projections import join_projections, kernel_of, project

X = jnp.linspace(-1, 1, 24).reshape(3, 8)


def projections(query=nnx.Linear, **options):
    rngs, ones = nnx.Rngs(0), nnx.initializers.ones
    first = query(8, 16, bias_init=ones, rngs=rngs, **options)
    second = nnx.Linear(8, 4, bias_init=ones, rngs=rngs)
    return [first, second, nnx.Linear(8, 4, use_bias=False, rngs=rngs)]


def joined(modules):
    """The modules as the layers see them, after `join_projections`."""
    names = "q_proj", "k_proj", "v_proj"
    pairs = dict(zip(names, map(nnx.split, modules), strict=True))
    state = join_projections(nnx.State({name: state for name, (_, state) in pairs.items()}))
    return [nnx.merge(graphdef, state[name]) for name, (graphdef, _) in pairs.items()]


def test_one_kernel_has_the_columns_of_all():
    first, *others = map(kernel_of, joined(projections()))
    assert first.shape == (8, 24) and others == [None, None]


@pytest.mark.parametrize(
    "query, options",
    [(nnx.Linear, {}), (nnx.LoRALinear, dict(lora_rank=2, b_initializer=nnx.initializers.ones))],
    ids=["linear", "lora"],
)
def test_results_are_those_of_the_modules(query, options):
    """Adapters of low rank are not lost: their projections stay apart."""
    modules = projections(query, **options)
    expected = [module(X) for module in modules]
    chex.assert_trees_all_close(project(X, joined(modules), None), expected, rtol=1e-5)
