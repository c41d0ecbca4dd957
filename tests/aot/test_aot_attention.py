"""The kernels of attention within documents compile well for an H100."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aot.harness import ARCHS, CHIPS, Case, Program
from pallas_kernels.attention import ForwardConfig
from pallas_kernels.attention.config import forward_config
from pallas_kernels.attention.forward import attention_forward
from pallas_kernels.gpu.device import REGISTERS_PER_SM


def _case(
    head_size: int,
    heads: int,
    dtype: Any,
    length: int = 4096,
    config: ForwardConfig | None = None,
    *,
    whole_rows: bool = False,
) -> Case:
    config = config or forward_config(length, head_size, whole_rows=whole_rows)
    q, kv = ((4, length, n, head_size) for n in (heads, 8))
    return Case(
        functools.partial(attention_forward, scale=head_size**-0.5, config=config),
        (
            *(jax.ShapeDtypeStruct(shape, dtype) for shape in (q, kv, kv)),
            jax.ShapeDtypeStruct((4, length), jnp.int32),
        ),
    )


CASES = {"64": _case(64, 32, jnp.bfloat16), "128": _case(128, 32, jnp.bfloat16)}
CASES["64, rows of one document"] = _case(64, 32, jnp.bfloat16, whole_rows=True)
CASES["128, each head with keys"] = _case(128, 8, jnp.bfloat16)
EVEN_CASES = tuple(CASES)
CASES["uneven"] = _case(64, 32, jnp.bfloat16, 4096 + 8)
# Four warpgroups have all registers, and a few scalars wait outside of the loop in local memory.
# Bytes of their stores and loads, and of the stack:
MOST_SPILLED = {"128": (80, 32), "128, each head with keys": (96, 40)}
# The most shared memory and the most sums that a block may have.
CASES["most"] = _case(64, 32, jnp.bfloat16, config=ForwardConfig(warpgroups=4, block_kv=192))


@pytest.mark.oldest
@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", EVEN_CASES)
def test_forward(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    (kernel,) = program.kernels
    assert kernel.arch == ARCHS[chip]
    most_spilled, most_stack = MOST_SPILLED.get(case, (0, 0))
    assert kernel.spill_bytes <= most_spilled and kernel.stack_bytes <= most_stack, kernel
    assert most_spilled or not kernel.warnings, kernel
    assert kernel.early_conversions == 0
    assert not kernel.lacks_registers
    assert set(kernel.linear_stores) == {256}  # the logsumexp of a warpgroup's 64 tokens
    assert kernel.smem_bytes <= CHIPS[chip].limits.smem_bytes
    # XLA copies nothing, and the kernel needs no memory but its results.
    moves = {"parameter", "bitcast", "get-tuple-element", "tuple", "custom-call"}
    assert {part.opcode for part in program.instructions.values()} <= moves
    assert program.temp_bytes <= 64 * 1024


@pytest.mark.oldest
@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", ["most"])
def test_the_largest_tiles_compile(compiled, chip, case):
    """7 s. One stage or 64 keys more are an error of the operation."""
    program: Program = compiled(chip, case)
    (kernel,) = program.kernels
    assert kernel.registers * kernel.threads == REGISTERS_PER_SM
    assert 0 <= CHIPS[chip].limits.smem_bytes - kernel.smem_bytes <= 1024


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", ["uneven"])
def test_a_store_keeps_to_its_row(compiled, chip, case):
    """The last warpgroup of a row has 8 tokens; the next head's logsumexp follows theirs."""
    program: Program = compiled(chip, case)
    (kernel,) = program.kernels
    assert kernel.linear_stores and set(kernel.linear_stores) == {8 * 4}
