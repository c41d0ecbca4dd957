"""The gated MLP compiles for an H100: its kernels, its other instructions, and its memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case, Program
from pallas_kernels import swiglu_mlp

BF16 = jnp.bfloat16
MIB = 2**20
# Tokens, D and F: an 8B Llama, a 1B Llama, sizes that no tile divides, a single tile, whose steps
# LLVM unrolls, and less than a tile.
SHAPES = {
    "8b": (8192, 4096, 14336),
    "1b": (16384, 2048, 8192),
    "odd": (1009, 2880, 2880),
    "small": (8, 128, 128),
    "narrow": (8, 64, 64),
}


def forward(*args: Any, **options: Any) -> Any:
    return swiglu_mlp(*args, **options)


def gradients(*args: Any, **options: Any) -> Any:
    y, vjp = jax.vjp(functools.partial(swiglu_mlp, **options), *args[:-1])
    return y, vjp(args[-1])


def gradients_with_frozen_down(x: Any, w_gate: Any, w_up: Any, w_down: Any, dy: Any) -> Any:
    mlp = lambda x, w_gate, w_up: swiglu_mlp(x, w_gate, w_up, w_down)
    y, vjp = jax.vjp(mlp, x, w_gate, w_up)
    return y, vjp(dy)


def _cases() -> dict[str, Case]:
    # With this option products are custom calls, and fusions are elementwise.
    compiler_options = {"xla_gpu_enable_triton_gemm": False}
    cases = {}
    for name, (t, d, f) in SHAPES.items():
        array = lambda *shape: jax.ShapeDtypeStruct(shape, BF16)
        args = (array(t, d), array(d, f), array(d, f), array(f, d))
        for implementation in ("mosaic_gpu", "xla", "reference"):
            options = {"implementation": implementation}
            cases[f"forward-{name}-{implementation}"] = Case(
                functools.partial(forward, **options), args, compiler_options=compiler_options
            )
            for save in ("all", "gate_up", "x"):
                cases[f"gradients-{name}-{implementation}-{save}"] = Case(
                    functools.partial(gradients, save=save, **options),
                    (*args, array(t, d)),
                    compiler_options=compiler_options,
                )
        cases[f"frozen-{name}"] = Case(gradients_with_frozen_down, (*args, array(t, d)))
    return cases


CASES = _cases()
on_h100 = pytest.mark.parametrize("chip", ["h100"])


def kernels_of(program: Program) -> dict[str, Any]:
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    return {kernel.name: kernel for kernel in program.kernels}


def fusions_of(program: Program) -> int:
    return sum(part.opcode == "fusion" for part in program.instructions.values())


def assert_runs_well(kernel: Any) -> None:
    assert kernel.arch == "sm_90a"
    # The place of a tile may be spilled: a few registers, stored before its steps and loaded after.
    # Tiles of a warpgroup's own take 192 registers, and the backward spills 28 more.
    most = 232 if kernel.name == "gated_matmul_backward" else 16
    assert kernel.spill_bytes <= most and not any("serialized" in w for w in kernel.warnings)
    # LLVM once converted sums before the wgmma that adds to them had finished.
    assert kernel.early_conversions == 0
    # With numbers rounded one by one, the forward took 2 to 5 % longer.
    assert kernel.lone_roundings == 0
    # Only TMA moves activations.
    assert kernel.tma_loads > 0 and kernel.tma_stores > 0
    assert not kernel.loads and not kernel.stores, kernel


@on_h100
@pytest.mark.parametrize(
    "case", ["forward-8b-mosaic_gpu", "forward-odd-mosaic_gpu", "forward-small-mosaic_gpu"]
)
def test_forward(compiled, chip, case):
    program: Program = compiled(chip, case)
    kernels = kernels_of(program)
    assert kernels.keys() == {"gated_matmul"}
    assert_runs_well(kernels["gated_matmul"])
    assert kernels["gated_matmul"].spill_bytes == 0
    if "8b" in case:  # elsewhere XLA cuts the rows that fill up 8
        t, _, f = SHAPES[case.split("-")[1]]
        # The product is in memory, and gate and up are not.
        assert program.temp_bytes <= 2 * t * f + 8 * MIB


@on_h100
@pytest.mark.parametrize(
    "case",
    [
        "gradients-1b-mosaic_gpu-gate_up",
        "gradients-odd-mosaic_gpu-gate_up",
        "gradients-small-mosaic_gpu-gate_up",
        "gradients-8b-mosaic_gpu-x",
    ],
)
def test_gradients(compiled, chip, case):
    program: Program = compiled(chip, case)
    kernels = kernels_of(program)
    assert kernels.keys() == {"gated_matmul", "gated_matmul_backward"}
    for kernel in kernels.values():
        assert_runs_well(kernel)
    if "1b" in case or "8b" in case:
        # No array has a pass of its own beside GEMMs and kernels.
        opcodes = {part.opcode for part in program.instructions.values()}
        assert not opcodes & {"fusion", "copy", "transpose", "convert", "pad", "concatenate"}


@on_h100
@pytest.mark.parametrize("case", ["gradients-1b-mosaic_gpu-all", "frozen-1b"])
def test_no_product_is_written_where_none_is_read(compiled, chip, case):
    """4 s."""
    three = kernels_of(compiled(chip, "gradients-1b-mosaic_gpu-gate_up"))["gated_matmul_backward"]
    two = kernels_of(compiled(chip, case))["gated_matmul_backward"]
    assert_runs_well(two)
    assert 3 * two.tma_stores == 2 * three.tma_stores > 0


@on_h100
@pytest.mark.parametrize("case", ["forward-narrow-mosaic_gpu"])
def test_nothing_is_stored_past_a_single_block_of_columns(compiled, chip, case):
    """Mosaic leaves the number of a single block out, so such a store would overwrite the block."""
    kernel = kernels_of(compiled(chip, case))["gated_matmul"]
    assert kernel.tma_stores == 1  # a tile has two blocks


@on_h100
@pytest.mark.oldest
@pytest.mark.parametrize(
    "case, baseline",
    [
        # Gate, up, dgate, dup and the product are in memory beside arguments and results.
        ("gradients-1b-mosaic_gpu-gate_up", "gradients-1b-xla-gate_up"),
        # dproduct is, too.
        ("gradients-1b-xla-gate_up", "gradients-1b-reference-gate_up"),
    ],
)
def test_memory(compiled, chip, case, baseline):
    t, _, f = SHAPES["1b"]
    temp, baseline_temp = compiled(chip, case).temp_bytes, compiled(chip, baseline).temp_bytes
    print(temp / MIB, baseline_temp / MIB)
    assert temp <= (5 if "mosaic_gpu" in case else 6) * 2 * t * f + 8 * MIB
    assert temp <= baseline_temp + MIB


@on_h100
@pytest.mark.oldest
@pytest.mark.parametrize("case", ["gradients-1b-xla-gate_up"])
def test_xla_makes_gradients_and_product_in_one_pass(compiled, chip, case):
    assert fusions_of(compiled(chip, case)) == 2  # and the forward's product
