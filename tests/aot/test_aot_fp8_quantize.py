"""The kernels that quantize to FP8 compile for an H100, and how well."""

import functools

import jax
import jax.numpy as jnp
import pytest

from aot.harness import ARCHS, Case, Program
from pallas_kernels.fp8 import quantize, quantize_both

BF16, F32 = jnp.bfloat16, jnp.float32
kernel = dict(implementation="mosaic_gpu")
tensor = functools.partial(quantize_both, **kernel)
row = functools.partial(quantize_both, scaling="row", **kernel)
e5m2 = functools.partial(quantize_both, dtype=jnp.float8_e5m2, **kernel)
one = functools.partial(quantize, **kernel)

CASES = {
    name: Case(function, (jax.ShapeDtypeStruct(shape, dtype),))
    for name, (function, shape, dtype) in {
        "tensor": (tensor, (16384, 8192), BF16),
        "row": (row, (16384, 8192), BF16),
        "row-f32": (row, (2048, 8192), F32),
        # No tile divides it.
        "row-2880": (row, (4160, 2880), BF16),
        "e5m2": (e5m2, (8192, 4096), BF16),
        "one": (one, (8192, 4096), BF16),
    }.items()
}


@pytest.mark.parametrize("chip", ["h100"])
@pytest.mark.parametrize("case", CASES)
def test_compiles(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    has_maxima = case.startswith("row")
    assert program.calls == {"fp8_quantize": 1} | ({"fp8_amax": 1} if has_maxima else {})
    for kernel in program.kernels:
        assert kernel.arch == ARCHS[chip]
        assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ()), kernel
        if kernel.name.startswith("fp8_amax"):
            # The array goes through the lanes 16 bytes at a time, 64 rows a block.
            assert kernel.loads == {16: 16}, kernel
            continue
        # TMA moves the tile in and its copies out.
        assert (kernel.tma_loads, kernel.tma_stores) == (1, 1 if case == "one" else 2), kernel
    # XLA converts, transposes and copies no array: nothing but the kernel writes one.
    (arg,) = CASES[case].args
    for part in program.instructions.values():
        if part.opcode not in ("parameter", "get-tuple-element", "tuple", "bitcast"):
            assert part.is_kernel or part.largest_size <= arg.size // 16, part
    assert program.temp_bytes <= arg.size // 8 + 2**20
