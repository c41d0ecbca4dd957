"""What a Llama's step in FP8 is compiled to for an H100."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from aot.harness import Case, Program
from models.config import LlamaConfig
from models.llama import Llama
from models.presets import PRESETS

# Two layers, because one would not be a loop. The loss is left out; the attention is not cuDNN's,
# as in test_aot_llama.
LAYERS, S = 2, 4096
CONFIG = dataclasses.replace(
    PRESETS["llama3.2-1b"],
    num_hidden_layers=LAYERS,
    vocab_size=1024,
    attention_implementation="xla",
    remat="minimal",
)
D, F = CONFIG.hidden_size, CONFIG.intermediate_size


def _model(config: LlamaConfig) -> Llama:
    return nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))


def gradients(config: LlamaConfig, params: Any, tokens: jax.Array) -> Any:
    graphdef = nnx.graphdef(_model(config))
    return jax.grad(lambda p: jnp.sum(jnp.square(nnx.merge(graphdef, p)(tokens)), dtype="float32"))(
        params
    )


def _case(recipe: str) -> Case:
    config = dataclasses.replace(CONFIG, fp8=recipe)
    args = nnx.state(_model(config), nnx.Param), jax.ShapeDtypeStruct((1, S), jnp.int32)
    options = {"xla_gpu_enable_triton_gemm": False}
    return Case(functools.partial(gradients, config), args, compiler_options=options)


CASES = {recipe: _case(recipe) for recipe in ("tensorwise", "rowwise")}


@pytest.mark.parametrize("chip, case", [("h100", "tensorwise"), ("h100", "rowwise")])
def test_products(compiled, chip, case):
    program: Program = compiled(chip, case)
    hlo = program.hlo
    print(program.seconds, program.calls)
