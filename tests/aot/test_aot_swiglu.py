"""The kernels of `swiglu` compile well for real GPUs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aot.harness import ARCHS, CHIPS, Case, Program
from pallas_kernels import swiglu
from pallas_kernels.gpu.device import Device
from pallas_kernels.mlp import Config
from pallas_kernels.mlp.config import default_config

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


def forward(gate: Any, up: Any, *, config: Config | None = None) -> Any:
    return swiglu(gate, up, implementation="mosaic_gpu", config=config)


def backward(gate: Any, up: Any, dy: Any, *, config: Config | None = None) -> Any:
    _, vjp = jax.vjp(functools.partial(forward, config=config), gate, up)
    return vjp(dy)


NUM_ARRAYS = {"forward": (2, 1), "backward": (3, 2)}  # read, written
SHAPES = {
    "14336": ((16384, 14336), BF16),
    "8192": ((16384, 8192), BF16),
    "f16": ((16384, 14336), F16),
    "f32": ((16384, 14336), F32),
    # Every tile leaves a rest of 256 elements.
    "tail": ((8191, 11008), BF16),
    # 32 bits cannot count the elements. Tiles of 2048 divide them, and tiles of 4096 do not.
    "huge": ((150001, 14336), BF16),
    # The number is odd, so only accesses of one element start at a multiple of their size.
    "odd": ((1009, 1001), BF16),
}
SHAPES_OF = {
    ("h100", forward): tuple(SHAPES),
    ("h100", backward): tuple(SHAPES),
    ("a100", forward): ("14336", "tail"),
    ("a100", backward): ("14336", "tail"),
    ("l4", forward): ("14336",),
    ("l4", backward): ("14336",),
    ("b200", forward): ("14336", "f32"),
    ("b200", backward): ("14336", "f32"),
}
DEVICES = {
    name: Device(chip.device_kind, chip.compute_capability, chip.limits.num_sms)
    for name, chip in CHIPS.items()
}
MOST = Config(fwd_accesses=8, bwd_accesses=4)


def _cases_and_pairs() -> tuple[dict[str, Case], list[tuple[str, str]]]:
    cases, pairs = {}, []

    def add(chip: str, function: Any, name: str, config: Config | None = None) -> None:
        num_read, _ = NUM_ARRAYS[function.__name__]
        case = f"{function.__name__}-{name}" + ("-most" if config else "")
        if config:
            function = functools.partial(function, config=config)
        cases[case] = Case(function, (jax.ShapeDtypeStruct(*SHAPES[name]),) * num_read)
        pairs.append((chip, case))

    for (chip, function), names in SHAPES_OF.items():
        for name in names:
            add(chip, function, name)
    for function in (forward, backward):
        for name in ("14336", "f32"):
            add("h100", function, name, MOST)
    return cases, pairs


CASES, PAIRS = _cases_and_pairs()

MOVES_NOTHING = {"parameter", "get-tuple-element", "tuple", "bitcast"}


@pytest.mark.parametrize(("chip", "case"), PAIRS)
def test_compiles(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    (kernel,) = program.kernels
    assert kernel.arch == ARCHS[chip]
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.warnings) == (0, 0, ()), kernel
    function, name, *most = case.split("-")
    num_read, num_written = NUM_ARRAYS[function]
    (*_, columns), dtype = SHAPES[name]
    config = MOST if most else default_config(DEVICES[chip], columns, dtype)
    num_parts = config.fwd_accesses if function == "forward" else config.bwd_accesses
    if name == "huge":
        num_parts = min(num_parts, 2)
    elif name == "odd":
        num_parts *= 8
    if name in ("tail", "odd"):
        num_parts += 2  # a chunk of the tail, and the last one
    # Each array goes through memory once, in accesses of 16 bytes, and no other data does.
    width = 2 if name == "odd" else 16
    assert kernel.loads == {width: num_read * num_parts}, kernel
    assert kernel.stores == {width: num_written * num_parts}, kernel
    # XLA copies, pads and converts nothing.
    others = {part.opcode for part in program.instructions.values() if not part.is_kernel}
    assert others <= MOVES_NOTHING
    assert sum(part.is_kernel for part in program.instructions.values()) == 1
    assert program.temp_bytes <= 64 * 1024
