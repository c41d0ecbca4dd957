"""The kernels of the gradients of attention within documents compile for an H100."""

import functools

import jax
import jax.numpy as jnp
import pytest

from aot.harness import ARCHS, CHIPS, Case, Program
from pallas_kernels.attention import KeysConfig
from pallas_kernels.attention.backward import attention_backward
from pallas_kernels.attention.config import queries_config

B, S, N, K = 4, 4096, 32, 8
array = jax.ShapeDtypeStruct


def case(head_size: int, parts: int = 1, dtype=jnp.bfloat16) -> Case:
    of_queries, of_keys = (array((B, S, heads, head_size), dtype) for heads in (N, K))
    bounds = array((B, S), jnp.int32)
    logsumexp = array((B, N, S), jnp.float32)
    function = functools.partial(
        attention_backward,
        scale=head_size**-0.5,
        of_queries=queries_config(head_size),
        of_keys=KeysConfig(parts=parts),
    )
    args = (of_queries, of_keys, of_keys, of_queries, logsumexp, of_queries, bounds, bounds)
    return Case(function, args)


CASES = {"64": case(64), "128": case(128), "64, parts": case(64, 4), "128, parts": case(128, 2)}


# Where heads have 128 numbers, the sums and tiles of `dk` and `dv` take 192 of a lane's 240
# registers. Numbers of tiles go to memory: 20 bytes, stores and loads together.
MOST_SPILLED = {
    ("128", "attention_backward_dkdv"): 20,
    ("128, parts", "attention_backward_dkdv"): 20,
}
# So that three computing warpgroups of heads of 128 run together, and four of heads of 64.
MOST_REGISTERS = {"64": 128, "128": 168}


@pytest.mark.oldest
@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile(compiled, chip, case):
    """A program takes 4 s."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    assert program.calls == {"attention_backward_dq": 1, "attention_backward_dkdv": 1}
    for kernel in program.kernels:
        most = MOST_SPILLED.get((case, kernel.name), 0)
        assert kernel.arch == ARCHS[chip]
        assert kernel.spill_bytes <= most and kernel.stack_bytes <= most, kernel
        assert all(most and "Registers are spilled" in w for w in kernel.warnings), kernel
        assert not kernel.early_conversions and not kernel.lone_roundings, kernel
        assert not kernel.lacks_registers and not kernel.linear_stores, kernel
        assert kernel.smem_bytes <= CHIPS[chip].limits.smem_bytes
        if kernel.name == "attention_backward_dq":
            assert kernel.registers <= MOST_REGISTERS[case.removesuffix(", parts")], kernel
