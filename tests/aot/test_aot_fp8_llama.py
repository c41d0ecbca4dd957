"""The program of a Llama's step in FP8, compiled for an H100."""

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

pytestmark = pytest.mark.oldest
# Two layers, because one would not be a loop. The loss is left out; the attention is not cuDNN's,
# as in test_aot_llama. F is D, so that fewer products have shapes of their own.
LAYERS, S = 2, 4096
CONFIG = dataclasses.replace(
    PRESETS["llama3.2-1b"],
    num_hidden_layers=LAYERS,
    intermediate_size=2048,
    vocab_size=1024,
    attention_implementation="xla",
    remat="minimal",
)
D = CONFIG.hidden_size


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


CASES = {"tensorwise": _case("tensorwise")}
on_h100 = pytest.mark.parametrize("chip, case", [("h100", "tensorwise")])


def products_in_16_bits(hlo: str) -> list[tuple[int, ...]]:
    """Shapes of the results of products that are not in FP8."""
    found = re.findall(r'= \(\w+\[([\d,]+)\].*custom_call_target="__cublas\$lt\$matmul"', hlo)
    return [tuple(map(int, dims.split(","))) for dims in found]


def casts_back(hlo: str) -> list[str]:
    """Casts of FP8 arrays to a wider type."""
    of_fp8 = set(re.findall(r"%(\S+) = f8e\w+\[\d[\d,]*\]", hlo))
    casts = re.findall(r"%\S+ = (?:bf16|f16|f32)\[\d[\d,]*\]\S* convert\(%([\w.-]+)\)", hlo)
    return [name for name in casts if name in of_fp8]


@on_h100
def test_products_are_in_fp8(compiled, chip, case):
    program: Program = compiled(chip, case)
    wide = products_in_16_bits(program.hlo)
    print(f"{program.seconds:.1f} s", program.calls, wide)
    # Three products each of o and of q, k and v, which have one weight. The MLP has seven, and the
    # kernel of gate and up.
    assert program.calls["fp8_matmul"] + program.hlo.count('"__cublas$lt$matmul$f8"') == 13
    assert program.calls["fp8_gated_matmul"] == 1
    assert not casts_back(program.hlo)
    # The attention is left.
    assert wide.count((S, D)) == 0 and wide.count((D, D)) == 0


@on_h100
def test_weights_are_quantized_once_and_inputs_are_kept_in_fp8(compiled, chip, case):
    program: Program = compiled(chip, case)
    # The weights outside of the loops: that of q, k and v, and those of o and the MLP. In a layer:
    # inputs of q, o and the MLP, and its product; the gradients of q with k and v, of o and of
    # down. SwiGLU's backward quantizes the rest.
    assert program.calls["fp8_quantize"] == 5 + 4 + 3
    assert program.calls["fp8_swiglu_bwd_amax"] == program.calls["fp8_swiglu_bwd_quantize"] == 1
    # The loop keeps the three inputs in FP8.
    kept = {
        shape for i in program.instructions.values() for kind, shape in i.outputs if "f8e" in kind
    }
    assert (LAYERS, D, 1, S) in kept


@on_h100
def test_maxima_come_from_arrays_in_memory(compiled, chip, case):
    """XLA does not repeat the rotations that make a gradient to find its maximum."""
    program: Program = compiled(chip, case)
    # XLA finds the maxima of bfloat16 by comparing bits.
    maxima = [i for i in program.instructions.values() if i.outputs and i.outputs[0][0] == "u16"]
    assert len(maxima) > 8 and all(len(i.operands) == 1 for i in maxima)
