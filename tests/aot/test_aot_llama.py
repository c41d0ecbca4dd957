"""A Llama's loss and gradients, with kernels, compile for a real GPU as one program."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from aot.harness import Case, Program
from aot.loss_shapes import assert_spills_little
from models.config import LlamaConfig
from models.llama import Llama
from models.presets import PRESETS
from pallas_kernels import linear_cross_entropy

# The first of the two layers stands alone, and the second one repeats. A small vocabulary compiles
# faster. cuDNN's attention would need cuDNN, which is larger than all the compilers.
CONFIG = dataclasses.replace(
    PRESETS["llama3.2-1b"],
    num_hidden_layers=2,
    vocab_size=32000,
    scan_layers=False,
    attention_implementation="xla",
)


pytestmark = pytest.mark.oldest
TOKENS = jax.ShapeDtypeStruct((1, 4096), jnp.int32)


def cross_entropy(model: Llama, tokens: jax.Array) -> jax.Array:
    # Exponentials in the memory of `dweight`, as with a whole vocabulary.
    weight = model.output_weight
    return linear_cross_entropy(model(tokens), weight, tokens, max_logits_bytes=2**22)


def squares(model: Llama, tokens: jax.Array) -> jax.Array:
    """A loss without kernels, for what layers do in a loop."""
    return jnp.sum(jnp.square(model(tokens)), dtype="float32")


def loss_and_gradients(loss: Any, config: LlamaConfig, params: Any, tokens: jax.Array) -> Any:
    graphdef = nnx.graphdef(_abstract_model(config))
    return jax.value_and_grad(lambda params: loss(nnx.merge(graphdef, params), tokens))(params)


def _abstract_model(config: LlamaConfig) -> Llama:
    return nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))


def _case(config: LlamaConfig, loss: Any) -> Case:
    params = nnx.state(_abstract_model(config), nnx.Param)
    return Case(functools.partial(loss_and_gradients, loss, config), (params, TOKENS))


SCANNED = dataclasses.replace(CONFIG, scan_layers=True, num_hidden_layers=4)
CASES = {
    "llama3.2-1b": _case(CONFIG, cross_entropy),
    "scanned": _case(dataclasses.replace(SCANNED, remat="minimal"), squares),
    "offload": _case(dataclasses.replace(SCANNED, remat="offload"), squares),
}


def queries_and_keys(x: jax.Array, cos: jax.Array, params: Any) -> Any:
    """The queries and keys of a layer of Qwen 3, and the gradients of a sum of them."""
    graphdef = nnx.graphdef(_abstract_model(QWEN3).layers.self_attn)

    def total(x, params):
        q, k, _ = nnx.merge(graphdef, params).project(x, cos, cos)
        return jnp.sum(jnp.square(q)) + jnp.sum(jnp.square(k))

    return jax.value_and_grad(total, (0, 1))(x, params)


QWEN3 = dataclasses.replace(PRESETS["qwen3-0.6b"], num_hidden_layers=1)
CASES["qwen3"] = Case(
    queries_and_keys,
    (
        jax.ShapeDtypeStruct((2, 2048, QWEN3.hidden_size), jnp.bfloat16),
        jax.ShapeDtypeStruct((1, 2048, QWEN3.head_dim // 2), jnp.float32),
        jax.eval_shape(
            lambda state: jax.tree.map(lambda a: a[0].astype(jnp.bfloat16), state),
            nnx.state(_abstract_model(QWEN3).layers.self_attn),
        ),
    ),
)


@pytest.mark.parametrize("chip, case", [("h100", "qwen3")])
def test_queries_and_keys_are_normed_by_kernels(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert program.calls == {"rms_norm_fwd": 2, "rms_norm_bwd": 2}
    for kernel in program.kernels:
        assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ()), kernel


@pytest.mark.parametrize("case", ["llama3.2-1b"])
@pytest.mark.parametrize("chip", ["h100"])
def test_compiles(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    names = {kernel.name for kernel in program.kernels}
    loss = {"linear_exponentials", "linear_exponentials_again"}
    loss |= {"input_gradient", "weight_gradient_rows"}
    norms = {"rms_norm_fwd", "rms_norm_bwd", "add_rms_norm_fwd", "add_rms_norm_bwd"}
    assert names == {*norms, "gated_matmul", "gated_matmul_backward", *loss}
    for kernel in program.kernels:
        if kernel.name != "gated_matmul_backward":  # test_aot_swiglu_mlp.py says what it spills
            assert_spills_little(kernel)
    # A copy or transpose beside a kernel would be 4096 tokens in bfloat16 whose layout the kernel,
    # or the next operation, could not take.
    for name, instruction in program.instructions.items():
        if instruction.opcode in ("copy", "transpose"):
            read = [program.instructions[operand] for operand in instruction.operands]
            assert not any(part.is_kernel for part in read), f"{name}: {instruction}"
        if instruction.is_kernel:
            read = [program.instructions[operand] for operand in instruction.operands]
            assert not any(part.opcode in ("copy", "transpose") for part in read), name


@pytest.mark.parametrize("chip, case", [("h100", "scanned")])
def test_the_backward_reads_gate_and_up_where_they_are_stacked(compiled, chip, case):
    program: Program = compiled(chip, case)
    of_layer = (*TOKENS.shape, SCANNED.intermediate_size)
    made = [shape for i in program.instructions.values() for _, shape in i.outputs]
    assert made.count((SCANNED.num_hidden_layers, *of_layer)) > 0
    assert made.count((1, *of_layer)) == 0  # a slice that is copied


@pytest.mark.parametrize("chip, case", [("h100", "scanned")])
def test_norms_whose_results_are_stacked_run_once(compiled, chip, case):
    program: Program = compiled(chip, case)
    # After the attention and after the MLP, in the body of the loop.
    assert program.calls["add_rms_norm_fwd"] == program.calls["add_rms_norm_bwd"] == 2


@pytest.mark.parametrize("chip, case, baseline", [("h100", "offload", "scanned")])
def test_offloading_moves_memory_to_the_host(compiled, chip, case, baseline):
    program: Program = compiled(chip, case)
    minimal: Program = compiled(chip, baseline)
    # Each layer has two projections, the inputs of both halves and the residuals after them.
    width = 2 * SCANNED.intermediate_size + 4 * SCANNED.hidden_size
    num_bytes = 2 * SCANNED.num_hidden_layers * TOKENS.size * width
    assert (minimal.host_temp_bytes, program.host_temp_bytes) == (0, num_bytes)
    # The tensors of the running layer, and of the layer in transfer, remain on the device.
    in_use = num_bytes * 2 / SCANNED.num_hidden_layers
    assert minimal.temp_bytes - program.temp_bytes >= num_bytes - in_use
