"""A Llama whose layers multiply in FP8: errors, layouts, policies, meshes, and a step of training."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import LlamaConfig
from models.llama import Llama
from models.remat import POLICIES
from models.sampling import generate
from models.sharding import make_mesh, parameter_shardings
from pallas_kernels.fp8 import RECIPES, recipes
from support import small_llama, tiny_run
from support.jaxprs import equations
from support.numerics import assert_trees_as_accurate, rms
from support.small_llama import B, S, changed, random_tokens
from train.step import init_state, make_train_step

pytestmark = pytest.mark.usefixtures("fast_compilation", "every_size_gains")

CONFIG = changed(tie_word_embeddings=True)
TOKENS = random_tokens(CONFIG)
COTANGENT = jax.random.normal(jax.random.key(1), (B, S, CONFIG.hidden_size))

# Errors of the hidden states and of the kernels' gradients, relative to float32, as measured. They
# are those of FP8's roundings: an e4m3 number errs by 2.6 % in the mean square, an e5m2 number by
# 5.2 %, where float32 errs by 1e-6. The gradients of `tensorwise` are e5m2.
ERRORS = {
    "tensorwise": (0.06, 0.09),
    "rowwise": (0.06, 0.09),
    "rowwise_with_gw_hp": (0.06, 0.09),
}


@pytest.fixture(scope="module")
def every_size_gains():
    """The products of these small layers run in FP8, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, recipe in RECIPES.items():
            patch.setitem(recipes.RECIPES, name, dataclasses.replace(recipe, least_size=0))
        yield


def on_one_device():
    return jax.set_mesh(make_mesh(data=1, fsdp=1, devices=jax.devices()[:1]))


def compute(config: LlamaConfig, state, tokens=TOKENS):
    """Hidden states and the gradients of their sum with fixed weights."""
    graphdef = nnx.graphdef(small_llama.make_model(config))
    hidden, vjp = jax.vjp(lambda state: nnx.merge(graphdef, state)(tokens), state)
    return {"hidden": hidden, "gradients": nnx.to_pure_dict(vjp(COTANGENT)[0])}


def state_of(config: LlamaConfig = CONFIG) -> nnx.State:
    return nnx.state(small_llama.make_model(config))


@functools.cache
def results(fp8: str | None, **changes):
    """`compute` on one device, as a run trains."""
    config = changed(CONFIG, fp8=fp8, **changes)
    with on_one_device():
        return jax.jit(functools.partial(compute, config))(state_of())


def relative_error(got, exact) -> float:
    return rms(np.asarray(got) - np.asarray(exact)) / rms(np.asarray(exact))


@pytest.mark.parametrize("recipe", RECIPES)
def test_errors_are_those_of_rounding_to_fp8(recipe):
    got, exact = results(recipe), results(None)
    errors = jax.tree.map(relative_error, got, exact)
    print(recipe, errors)
    layers = errors["gradients"]["layers"]
    kernels = [e for part in ("self_attn", "mlp") for e in jax.tree.leaves(layers[part])]
    assert len(kernels) == 7
    of_hidden, of_kernels = ERRORS[recipe]
    assert 0.5 * of_hidden < errors["hidden"] < 1.2 * of_hidden
    assert 0.5 * of_kernels < max(kernels) < 1.2 * of_kernels
    assert max(jax.tree.leaves(errors)) < 1.2 * of_kernels
