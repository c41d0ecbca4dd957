"""FP8 products compile for an H100: our kernel, and the patterns that XLA must recognize."""

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case, Program
from pallas_kernels.fp8 import Quantized, fp8_matmul

BF16, F32, E4M3, E5M2 = jnp.bfloat16, jnp.float32, jnp.float8_e4m3fn, jnp.float8_e5m2
CUBLAS = '"__cublas$lt$matmul$f8"'
SHAPE = (16384, 2048, 8192)  # rows, columns, depth: the down projection of a 1B Llama
ODD = (1009, 200, 1000)


def quantized(rows, depth, dtype, scaling):
    scale = jax.ShapeDtypeStruct(() if scaling == "tensor" else (rows, 1), F32)
    return Quantized(jax.ShapeDtypeStruct((rows, depth), dtype), scale)


def product(accumulation, out_dtype):
    return lambda a, b: fp8_matmul(a, b, accumulation=accumulation, out_dtype=out_dtype)


def _cases() -> dict[str, Case]:
    # Products are then custom calls, and fusions are what is elementwise.
    compiler_options = {"xla_gpu_enable_triton_gemm": False}
    cases = {}
    for name, (m, n, k) in {"1b": SHAPE, "odd": ODD}.items():
        for scaling in ("tensor", "row"):
            for accumulation in ("fast", "promoted"):
                for a_dtype in (E4M3, E5M2):
                    for out_dtype in (BF16, F32):
                        label = f"{a_dtype.__name__[7:11]}-{out_dtype.__name__}"
                        cases[f"product-{name}-{scaling}-{accumulation}-{label}"] = Case(
                            product(accumulation, out_dtype),
                            (quantized(m, k, a_dtype, scaling), quantized(n, k, E4M3, scaling)),
                            compiler_options=compiler_options,
                        )
    return cases


CASES = _cases()
on_h100 = pytest.mark.parametrize("chip", ["h100"])


@on_h100
@pytest.mark.parametrize(
    "case",
    [
        "product-1b-row-fast-e4m3-bfloat16",
        "product-1b-row-promoted-e5m2-bfloat16",
        "product-1b-row-fast-e5m2-float32",
        "product-1b-row-promoted-e4m3-float32",
        "product-odd-row-fast-e4m3-bfloat16",
    ],
)
def test_kernel(compiled, chip, case):
    program: Program = compiled(chip, case)
    (kernel,) = program.kernels
    print(f"{program.seconds:.1f} s", kernel)
    assert kernel.arch == "sm_90a"
    assert kernel.spill_bytes == 0 and not any("serialized" in w for w in kernel.warnings)
    assert kernel.early_conversions == 0
    assert kernel.tma_loads > 0 and kernel.tma_stores > 0 and not kernel.stores
    if "1b" in case:
        # No padding, no copy; row scales of one axis are the kernel's own operands.
        opcodes = {part.opcode for part in program.instructions.values()}
        assert not opcodes & {"fusion", "copy", "transpose", "convert", "pad", "concatenate"}


@on_h100
@pytest.mark.parametrize(
    "case",
    [
        "product-1b-tensor-fast-e4m3-bfloat16",
        "product-1b-tensor-promoted-e5m2-bfloat16",
        "product-1b-tensor-promoted-e5m2-float32",
    ],
)
def test_cublas(compiled, chip, case):
    program: Program = compiled(chip, case)
    assert program.hlo.count(CUBLAS) == 1 and not program.kernels
    # The scales stay float32, and nothing goes through a pass of its own.
    opcodes = {part.opcode for part in program.instructions.values()}
    assert not opcodes & {"fusion", "copy", "transpose", "convert", "pad", "multiply"}
    precision = "HIGHEST" if "promoted" in case else "DEFAULT"
    assert f'"operand_precision":["{precision}","{precision}"]' in program.hlo
