"""The kernels that quantize to FP8 compile, and how well.

Ada and Blackwell have the kernel of the norm alone, 1 s each.
"""

import functools

import jax
import jax.numpy as jnp
import pytest

from aot.harness import ARCHS, Case, Program
from pallas_kernels.fp8 import (
    RECIPES,
    add_rms_norm_quantized,
    quantize,
    quantize_both,
    rms_norm_quantized,
)
from pallas_kernels.fp8.casts import Axes
from pallas_kernels.fp8.mlp import swiglu_backward
from pallas_kernels.fp8.types import BlockwiseInt8

BF16, F32 = jnp.bfloat16, jnp.float32
kernel = dict(implementation="mosaic_gpu")
tensor = functools.partial(quantize_both, **kernel)
row = functools.partial(quantize_both, scaling="row", **kernel)
e5m2 = functools.partial(quantize_both, dtype=jnp.float8_e5m2, **kernel)
one = functools.partial(quantize, **kernel)
one_row = functools.partial(quantize, scaling="row", **kernel)

CASES = {
    name: Case(function, (jax.ShapeDtypeStruct(shape, dtype),))
    for name, (function, shape, dtype) in {
        "tensor": (tensor, (16384, 8192), BF16),
        "row": (row, (16384, 8192), BF16),
        "row-f32": (row, (2048, 8192), F32),
        # 45 tiles in a row and 65 in a column, so blocks have 3 and 5.
        "row-2880": (row, (4160, 2880), BF16),
        "e5m2": (e5m2, (8192, 4096), BF16),
        "one": (one, (8192, 4096), BF16),
        "rows-2048": (one_row, (16384, 2048), BF16),
        "rows-14336": (one_row, (8192, 14336), BF16),
        "rows-f32": (one_row, (8192, 8192), F32),
        # No block holds such a row.
        "one-151936": (one_row, (1024, 151936), BF16),
    }.items()
}


def operands_of(recipe, *args):
    """All FP8 copies that the backward of `fp8_swiglu_mlp` needs."""
    gate, up, dproduct = args
    return swiglu_backward(gate, up, dproduct, RECIPES[recipe], (True,) * 4, Axes())


_KEPT = BlockwiseInt8(
    jax.ShapeDtypeStruct((16384, 8192), jnp.int8), jax.ShapeDtypeStruct((64, 16384), F32)
)
CASES |= {
    f"swiglu-{name}": Case(
        functools.partial(operands_of, name),
        (_KEPT, _KEPT, jax.ShapeDtypeStruct((16384, 8192), BF16)),
    )
    for name in ("tensorwise", "rowwise")
}
_TOKENS, _WEIGHT = jax.ShapeDtypeStruct((8192, 4096), BF16), jax.ShapeDtypeStruct((4096,), BF16)
CASES |= {
    "norm": Case(functools.partial(rms_norm_quantized, **kernel), (_TOKENS, _WEIGHT)),
    "norm-add": Case(
        functools.partial(add_rms_norm_quantized, **kernel), (_TOKENS, _TOKENS, _WEIGHT)
    ),
}


@pytest.mark.parametrize(
    "chip, case", [("l4", "norm"), ("b200", "norm"), *(("h100", name) for name in CASES)]
)
def test_compiles(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    if case.startswith("rows"):
        assert program.calls == {"fp8_quantize_rows": 1}
    elif case.startswith("norm"):
        (name,) = program.calls
        assert name == ("add_rms_norm_fwd" if case == "norm-add" else "rms_norm_fwd")
    elif case.startswith("swiglu"):
        assert program.calls == {"fp8_swiglu_bwd_amax": 1, "fp8_swiglu_bwd_quantize": 1}
    else:
        has_maxima = case.startswith("row")
        assert program.calls == {"fp8_quantize": 1} | ({"fp8_amax": 1} if has_maxima else {})
    for kernel in program.kernels:
        assert kernel.arch == ARCHS[chip]
        assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ()), kernel
        assert kernel.lone_roundings == 0, kernel
        if "amax" in kernel.name:
            # TMA reads all arrays. The text has two first copies of each and a refill.
            leaves = 5 if case.startswith("swiglu") else 1
            assert (kernel.loads, kernel.tma_loads) == ({}, 3 * leaves), kernel
            # Six blocks share a multiprocessor.
            assert kernel.registers <= 80 and kernel.smem_bytes <= 36 * 1024, kernel
            continue
        if kernel.name.startswith("fp8_swiglu_bwd_quantize"):
            # Five arrays come in, and the scales of columns; dgate and dup go out in both orders,
            # and the product in one. The text has three first copies and a refill.
            copies_of_fetch = 5 + 3 * (case == "swiglu-rowwise")
            assert (kernel.tma_loads, kernel.tma_stores) == (4 * copies_of_fetch, 5), kernel
            # Two blocks share a multiprocessor.
            assert kernel.smem_bytes <= 113 * 1024, kernel
            continue
        if kernel.name.startswith(("fp8_quantize_rows", "rms_norm", "add_rms_norm")):
            # 16 bytes are read at a time, and their 8 (float32: 4) values written.
            assert kernel.loads == {16: kernel.loads[16]}, kernel
            assert kernel.tma_loads == 0, kernel
            continue
        # TMA moves tiles and scales of columns in, and the copies out. The text has three first
        # copies and a refill. Blocks of 2 and 3 tiles have no refill.
        num_fetches = {"one-151936": 2, "row-2880": 3}.get(case, 4)
        num_copies = 1 if case.startswith("one") else 2
        num_loads = num_fetches * (1 + case.startswith("row"))
        assert (kernel.tma_loads, kernel.tma_stores) == (num_loads, num_copies), kernel
    # XLA converts, transposes and copies no array: nothing but the kernel writes one.
    arg = jax.tree.leaves(CASES[case].args)[0]
    for part in program.instructions.values():
        if part.opcode not in ("parameter", "get-tuple-element", "tuple", "bitcast"):
            assert part.is_kernel or part.largest_size <= arg.size // 16, part
    assert program.temp_bytes <= arg.size // 8 + 2**20
