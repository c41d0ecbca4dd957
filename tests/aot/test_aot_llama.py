"""A Llama's loss and gradients, with kernels, compile for a real GPU as one program."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from aot.harness import Case, Program
from models.llama import PRESETS, Llama
from pallas_kernels import linear_cross_entropy

# Two layers are the first, which stands alone, and one that repeats. A small vocabulary compiles
# faster. cuDNN's attention would need cuDNN, which is larger than all the compilers.
CONFIG = dataclasses.replace(
    PRESETS["llama3.2-1b"],
    num_hidden_layers=2,
    vocab_size=32000,
    scan_layers=False,
    attention_implementation="xla",
)


def loss_and_gradients(params: Any, tokens: jax.Array) -> Any:
    def loss(params):
        model = nnx.merge(nnx.graphdef(_abstract_model()), params)
        return linear_cross_entropy(model(tokens), model.output_weight, tokens)

    return jax.value_and_grad(loss)(params)


def _abstract_model() -> Llama:
    return nnx.eval_shape(lambda: Llama(CONFIG, rngs=nnx.Rngs(0)))


CASES = {
    "llama3.2-1b": Case(
        loss_and_gradients,
        (nnx.state(_abstract_model(), nnx.Param), jax.ShapeDtypeStruct((1, 4096), jnp.int32)),
    )
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chip", ["h100"])
def test_compiles(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    names = {kernel.name.removesuffix("_mosaic_gpu_kernel") for kernel in program.kernels}
    assert names == {"rms_norm_fwd", "rms_norm_bwd", "add_rms_norm_fwd", "add_rms_norm_bwd"}
    for kernel in program.kernels:
        assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ()), kernel
    # 4096 tokens in bfloat16 that a kernel could not read, or the next operation not take, in the
    # layout they have.
    for name, instruction in program.instructions.items():
        if instruction.opcode in ("copy", "transpose"):
            read = [program.instructions[operand] for operand in instruction.operands]
            assert not any(part.is_kernel for part in read), f"{name}: {instruction}"
        if instruction.is_kernel:
            read = [program.instructions[operand] for operand in instruction.operands]
            assert not any(part.opcode in ("copy", "transpose") for part in read), name
