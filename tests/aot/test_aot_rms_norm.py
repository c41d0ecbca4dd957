"""The kernels of `rms_norm` and `add_rms_norm` compile well for real GPUs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from aot.harness import ARCHS, CHIPS, Case, Kernel, Program
from pallas_kernels import add_rms_norm, rms_norm
from pallas_kernels.gpu.device import Device
from pallas_kernels.norm.config import default_config

NUM_TOKENS = 8192
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
# Dtypes of the activations and of the weight.
DTYPES = {
    "bf16": (jnp.bfloat16, jnp.bfloat16),
    "bf16_f32": (jnp.bfloat16, jnp.float32),
    "f16": (jnp.float16, jnp.float16),
    "f32": (jnp.float32, jnp.float32),
}
# Hidden sizes to compile in bfloat16 for each chip; the dtypes have 4096. The H100 has all cases.
# The other chips have those that split rows differently. The L4 differs from the A100 in its number
# of multiprocessors and its shared memory. A case takes up to five seconds of a core. The cases of
# the forward alone are only for the H100, and in the normal run only for 4096, because those of the
# backward have the same forward kernel. On the other chips the normal run alternates between the
# two operations. The H100 has widths without a tuned row, too: 14400 is an odd multiple of 64 with
# hardly enough registers.
HIDDEN_SIZES = {
    "h100": (1024, 2048, 2304, 2880, 4096, 5120, 5376, 7168, 8192, 14400, 16384),
    "a100": (2048, 2880, 4096, 8192, 16384),
    "l4": (2880, 8192),
    "b200": (2048, 2880, 4096, 8192, 16384),
}
OTHER_DTYPES = {"h100": ("bf16_f32", "f16", "f32"), "a100": (), "l4": (), "b200": ("f32",)}


def rms_norm_forward(x: Any, weight: Any) -> Any:
    return rms_norm(x, weight, implementation="mosaic_gpu")


def rms_norm_backward(x: Any, weight: Any, dy: Any) -> Any:
    _, vjp = jax.vjp(rms_norm_forward, x, weight)
    return vjp(dy)


def add_rms_norm_forward(x: Any, residual: Any, weight: Any) -> Any:
    return add_rms_norm(x, residual, weight, implementation="mosaic_gpu")


def add_rms_norm_backward(x: Any, residual: Any, weight: Any, dy: Any, dresidual: Any) -> Any:
    (_, residual_out), vjp = jax.vjp(add_rms_norm_forward, x, residual, weight)
    # The gradient of the residual is that of x. A program that returns one array twice copies it.
    dx, _, dweight = vjp((dy, dresidual))
    return residual_out, dx, dweight


FUNCTIONS = {
    rms_norm_forward: lambda x, weight: (x, weight),
    rms_norm_backward: lambda x, weight: (x, weight, x),
    add_rms_norm_forward: lambda x, weight: (x, x, weight),
    add_rms_norm_backward: lambda x, weight: (x, x, weight, x, x),
}


def _cases_and_pairs() -> tuple[dict[str, Case], list[Any]]:
    cases, pairs = {}, []
    for chip in CHIPS:
        sizes = [(size, "bf16") for size in HIDDEN_SIZES[chip]]
        sizes += [(4096, name) for name in OTHER_DTYPES[chip]]
        for i, (hidden_size, dtypes) in enumerate(sizes):
            left_out = (rms_norm_backward, add_rms_norm_backward)[i % 2]
            x_dtype, weight_dtype = DTYPES[dtypes]
            x = jax.ShapeDtypeStruct((NUM_TOKENS, hidden_size), x_dtype)
            weight = jax.ShapeDtypeStruct((hidden_size,), weight_dtype)
            for function, args in FUNCTIONS.items():
                is_alone = function in (rms_norm_forward, add_rms_norm_forward)
                if chip == "h100":
                    is_full = is_alone and hidden_size != 4096
                elif is_alone:
                    continue
                else:
                    is_full = function is left_out
                name = f"{function.__name__}-{hidden_size}-{dtypes}"
                cases[name] = Case(function, args(x, weight))
                pairs.append(pytest.param(chip, name, marks=pytest.mark.full if is_full else ()))
    return cases, pairs


def forward_mode(*args: Any) -> Any:
    return jax.jvp(add_rms_norm, args, args)


def forward_mode_of_gradients(*args: Any) -> Any:
    def loss(*args: Any) -> Any:
        return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in add_rms_norm(*args))

    return jax.jvp(jax.grad(loss, (0, 1, 2)), args, args)


def gradients_of_members(x: Any, weight: Any) -> Any:
    loss = lambda x, weight: jnp.sum(jnp.sin(rms_norm(x, weight).astype(jnp.float32)))
    return jax.vmap(jax.grad(loss, (0, 1)), (0, None))(x, weight)


CASES, PAIRS = _cases_and_pairs()
_X, _WEIGHT = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((512, 1024), (1024,)))
# Plain JAX computes the tangents beside the kernels.
KERNELS = {
    "forward mode": (forward_mode, ["add_rms_norm_fwd"]),
    "of gradients": (forward_mode_of_gradients, ["add_rms_norm_bwd", "add_rms_norm_fwd"]),
}
_MEMBERS = jax.ShapeDtypeStruct((4, 512, 1024), jnp.bfloat16)
CASES["members"] = Case(
    gradients_of_members,
    (_MEMBERS, _WEIGHT),
    mesh={"data": 2, "tensor": 2},
    specs=(PartitionSpec("data", "tensor"), PartitionSpec()),
    is_explicit=True,
)
CASES |= {name: Case(fn, (_X, _X, _WEIGHT)) for name, (fn, _) in KERNELS.items()}

# A row's `rstd` is one 4-byte scalar, stored by the forward. The backward loads those of up to four
# rows at once.
MAX_SCALAR_ACCESSES = 4
# Activations, weight and partial sums of dweight move in accesses of 16 bytes a thread, except for
# the ends of segments of these widths: at most two narrower accesses for each of four arrays.
WITH_NARROW_ENDS = (2304, 5120, 5376, 7168, 14400)
MAX_NARROW = 8

MOVES_NOTHING = ("parameter", "constant", "get-tuple-element", "tuple", "bitcast", "call")
ITEMSIZES = {"bf16": 2, "f16": 2, "f32": 4}


@pytest.mark.parametrize(("chip", "case"), PAIRS)
def test_compiles(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    x = CASES[case].args[0]
    num_elements = math.prod(x.shape)
    assert len(program.kernels) == (2 if "backward" in case else 1)
    for kernel in program.kernels:
        assert kernel.arch == ARCHS[chip]
        assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ()), kernel
        assert kernel.smem_bytes <= CHIPS[chip].limits.smem_bytes
        for widths in (kernel.loads, kernel.stores):
            # A kernel may bring rows and the weight through shared memory, and store them directly.
            assert widths[16] + widths[32] > 0 or (kernel.tma_loads and not widths[2]), kernel
            if x.shape[1] in WITH_NARROW_ENDS:
                narrow = sum(count for width, count in widths.items() if width < 16)
                assert narrow <= MAX_SCALAR_ACCESSES + MAX_NARROW, kernel
            else:
                assert set(widths) <= {4, 8, 16, 32}, kernel
                assert widths[4] + widths[8] <= MAX_SCALAR_ACCESSES, kernel
        if chip == "h100" and kernel.name.endswith("bwd"):
            config = default_config(H100, x.shape[1], x.dtype, add="add" in case)
            assert _resident_blocks(kernel) >= config.bwd_blocks, (kernel, config)
    _assert_only_kernels_touch_activations(program, num_elements)
    _assert_little_memory(program, num_elements)


def _resident_blocks(kernel: Kernel) -> int:
    """Blocks that a multiprocessor of an H100 holds at a time."""
    registers = -(-kernel.registers // 8) * 8 * kernel.threads
    # The driver takes 1024 bytes of shared memory for each block.
    return min(65536 // registers, (H100.smem_bytes + 1024) // (kernel.smem_bytes + 1024))


@pytest.mark.parametrize(("chip", "case"), [("h100", "members")])
def test_gradients_of_members_that_an_explicit_axis_splits(compiled, chip, case):
    """Each device computes its own members, and nothing is gathered."""
    program = compiled(chip, case)
    assert sorted(program.calls) == ["rms_norm_bwd", "rms_norm_fwd"]
    opcodes = {instruction.opcode for instruction in program.instructions.values()}
    assert not {o for o in opcodes if o.startswith(("all-gather", "all-to-all"))}


@pytest.mark.parametrize(("chip", "case"), [("h100", case) for case in KERNELS])
def test_forward_mode_runs_kernels_and_plain_jax(compiled, chip, case):
    assert sorted(compiled(chip, case).calls) == KERNELS[case][1]


def _assert_only_kernels_touch_activations(program: Program, num_elements: int) -> None:
    """XLA copies, transposes, pads or converts nothing of the size of an activation."""
    for name, instruction in program.instructions.items():
        if not instruction.is_kernel and instruction.opcode not in MOVES_NOTHING:
            read = [program.instructions[operand] for operand in instruction.operands]
            largest = max(part.largest_size for part in [instruction, *read])
            assert largest < num_elements, f"{name}: {instruction}"


def _assert_little_memory(program: Program, num_elements: int) -> None:
    """Beside results, memory holds the statistics of rows and the partial sums of dweight."""
    small = [
        math.prod(dims) * ITEMSIZES[dtype]
        for instruction in program.instructions.values()
        if instruction.is_kernel
        for dtype, dims in instruction.outputs
        if math.prod(dims) < num_elements
    ]
    assert program.temp_bytes <= sum(small) + 64 * 1024
    # A multiprocessor has a few partial sums, and the activations 8192 rows of 16 bits.
    assert sum(small) <= num_elements * 2 / 4
