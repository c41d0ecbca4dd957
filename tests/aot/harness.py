"""Compiles functions for real GPUs on a machine without one, and reads what the compilers report.

JAX lowers, XLA compiles and NVIDIA's `ptxas` assembles exactly as they do on the GPU. They know the
chip from the description in `train/planner/aot.py`. So these results hold on hardware: that the
kernels compile, their registers and spills, their memory instructions, and the instructions that
XLA puts around them. They say nothing about speed, races, deadlocks or numbers.

Compilation runs in `aot.worker`, a process of its own for every chip: a kernel that LLVM cannot
select instructions for aborts the whole process.
"""

import dataclasses
import itertools
import math
import os
import pathlib
import pickle  # noqa: TID251  of our own worker, in a folder of the test
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from train.planner import aot

_ROOT = pathlib.Path(__file__).parents[2]


CHIPS = {
    "h100": aot.CHIPS["h100"],
    "a100": aot.CHIPS["a100-40gb"],
    "l4": aot.CHIPS["l4"],
    "b200": aot.CHIPS["b200"],
}
# The architecture for which the kernels of a chip must be assembled.
ARCHS = {"h100": "sm_90a", "a100": "sm_80", "l4": "sm_89", "b200": "sm_100a"}


@dataclasses.dataclass(frozen=True)
class Case:
    """A function and the shapes that it is compiled for.

    Attributes:
      function: Function to trace and compile.
      args: Arguments, each a `jax.ShapeDtypeStruct`.
      donated: Number of the argument whose memory the results may take.
      compiler_options: Options of XLA.
      mesh: Names and sizes of the axes of the mesh in context; empty for one device.
      specs: Specs of the arguments on the mesh; without any, each device has all arguments whole.
      is_explicit: Whether the axes of the mesh are Explicit, and not Auto.
      auto: Names of axes that are Auto all the same.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    donated: int | None = None
    compiler_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)
    specs: tuple[PartitionSpec, ...] = ()
    is_explicit: bool = False
    auto: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """The report of `ptxas`, and of the PTX, on one Mosaic GPU kernel.

    Attributes:
      name: Name that its operation gave it.
      arch: Architecture for which it was assembled.
      registers: Registers of a thread.
      threads: Threads of a block.
      stack_bytes: Bytes of a thread for spills, and for arrays that do not fit in registers.
      spill_bytes: Bytes of a thread that are spilled, stores and loads together.
      smem_bytes: Shared memory that a block asks for.
      warnings: Warnings of `ptxas`, and its notes on lost performance, such as serialized wgmmas.
      tma_loads: Number of bulk copies from global to shared memory.
      tma_stores: Number of bulk copies from shared to global memory.
      loads: Number of instructions that load from global memory, by bytes a thread.
      stores: Number of instructions that store to global memory, by bytes a thread.
      early_conversions: Number of roundings to 16 bits between a wgmma and the wait for it.
      lone_roundings: Number of instructions that round one number to bfloat16. The hardware runs 16
        of them a clock, and 64 that round two.
      peer_signals: Number of atomic additions that other devices see.
      multicasts: Number of instructions for NVLink multicast.
      set_registers: Registers that warpgroups give themselves by `setmaxnreg`: the one that has the
        fewest, then each of the others. None if they keep those of the launch.
      linear_stores: Most bytes of each bulk store that has no tensor map. It ends at the end of the
        array, not at that of a row.
    """

    name: str
    arch: str
    registers: int
    threads: int
    stack_bytes: int
    spill_bytes: int
    smem_bytes: int
    warnings: tuple[str, ...]
    tma_loads: int
    tma_stores: int
    loads: Counter[int]
    stores: Counter[int]
    early_conversions: int
    lone_roundings: int
    peer_signals: int
    multicasts: int
    set_registers: tuple[int, int] | None
    linear_stores: tuple[int, ...]

    @property
    def lacks_registers(self) -> bool:
        """Whether warpgroups ask for more registers than the block is launched with, and hang."""
        if self.set_registers is None:
            return False
        fewest, others = self.set_registers
        warpgroups = self.threads // 128
        return fewest + (warpgroups - 1) * others > warpgroups * self.registers


@dataclasses.dataclass(frozen=True)
class Instruction:
    """An instruction of an optimized program.

    Attributes:
      opcode: Name such as "copy", "fusion" or "custom-call".
      outputs: Dtype and dimensions of its result, or of each part of it.
      operands: Names of the instructions that it reads.
      is_kernel: Whether it calls a Mosaic GPU kernel.
    """

    opcode: str
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    operands: tuple[str, ...]
    is_kernel: bool

    @property
    def largest_size(self) -> int:
        """Elements of the largest array in its result."""
        return max((math.prod(dims) for _, dims in self.outputs), default=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A compiled case.

    Attributes:
      kernels: Distinct Mosaic GPU kernels in it.
      calls: Number of calls of each kernel, by its name; a loop's body counts once.
      instructions: Instructions by name, without those inside of fusions.
      hlo: Optimized program, without the binaries of kernels.
      temp_bytes: Device memory beside arguments and results.
      host_temp_bytes: Memory of the host beside arguments and results.
      seconds: Time from tracing to the executable.
    """

    kernels: tuple[Kernel, ...]
    calls: Counter[str]
    instructions: dict[str, Instruction]
    hlo: str
    temp_bytes: int
    host_temp_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True)
class Failure:
    """A case that did not compile, and why."""

    message: str


def missing_toolchain() -> str | None:
    """Why nothing can be compiled for a GPU here, or None."""
    missing = aot.missing_toolchain()
    return missing and f"not installed here: {missing}; `make test-aot` installs it"


def compile_cases(
    chip: str, cases: Sequence[tuple[str, str]]
) -> dict[tuple[str, str], Program | Failure]:
    """Compiles `CASES[name]` of a module for a chip, each of the pairs of module and name.

    A case that kills its process fails; those after it run in a new one.
    """
    results: dict[tuple[str, str], Program | Failure] = {}
    while remaining := [case for case in cases if case not in results]:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "results")
            path.touch()
            process = subprocess.run(
                [sys.executable, "-m", "aot.worker", chip, path, *itertools.chain(*remaining)],
                env=_worker_environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            results |= zip(remaining, _read_results(path), strict=False)
        # A case that raises is a result, so an error of Python is one of the worker.
        if process.returncode > 0:
            raise RuntimeError(f"aot.worker failed for {chip}:\n{process.stdout[-4000:]}")
        if process.returncode < 0:
            killer = next(case for case in remaining if case not in results)
            results[killer] = Failure(
                f"the process died of signal {-process.returncode}:\n{process.stdout[-4000:]}"
            )
    return results


def _worker_environment() -> dict[str, str]:
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "MOSAIC_GPU_DUMP_PTX": "1",
        "MOSAIC_GPU_DUMP_PTXAS": "1",
        "MOSAIC_GPU_DUMP_RESOURCES": "1",
        "PYTHONPATH": os.pathsep.join([str(_ROOT), str(_ROOT / "tests")]),
    }


def _read_results(path: pathlib.Path) -> list[Program | Failure]:
    results = []
    with path.open("rb") as file:
        while True:
            try:
                results.append(pickle.load(file))  # noqa: S301  written by our worker
            except EOFError:
                return results


def parse_kernel(ptx: str, ptxas: str, resources: str) -> Kernel:
    """Reads what Mosaic GPU dumps of a kernel: its code, ptxas' log, its memory."""
    # A digest follows the name, see `aot.worker`.
    name, arch = _find(r"Compiling entry function '(\w+)_\w+_mosaic_gpu_kernel' for '(\S+)'", ptxas)
    stack, stored, loaded = _find(
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", ptxas
    )
    (registers,) = _find(r"Used (\d+) registers", ptxas)
    (threads,) = _find(r"\.maxntid (\d+)", ptx)
    (smem,) = _find(r"smem_scratch_bytes=(\d+)", resources)
    return Kernel(
        name=name,
        arch=arch,
        registers=int(registers),
        threads=int(threads),
        stack_bytes=int(stack),
        spill_bytes=int(stored) + int(loaded),
        smem_bytes=int(smem),
        warnings=tuple(re.findall("^.*(?:warning|performance loss).*$", ptxas, re.I | re.M)),
        tma_loads=len(re.findall(r"\bcp\.async\.bulk\.(?:tensor\.\dd\.)?shared::\w+\.global", ptx)),
        tma_stores=len(
            re.findall(r"\bcp\.async\.bulk\.(?:tensor\.\dd\.)?global\.shared::cta", ptx)
        ),
        loads=_access_widths("ld", ptx),
        stores=_access_widths("st", ptx),
        early_conversions=sum(
            part.count("cvt.rn.")
            for part in re.findall(r"wgmma\.commit_group.*?wgmma\.wait_group\S* 0;", ptx, re.DOTALL)
        ),
        lone_roundings=ptx.count("cvt.rn.bf16.f32"),
        peer_signals=ptx.count("red.release.sys"),
        multicasts=ptx.count("multimem"),
        set_registers=_set_registers(ptx),
        linear_stores=tuple(_linear_stores(ptx)),
    )


def _set_registers(ptx: str) -> tuple[int, int] | None:
    changes = dict(re.findall(r"setmaxnreg\.(dec|inc)\.sync\.aligned\.u32 (\d+)", ptx))
    return (int(changes["dec"]), int(changes["inc"])) if changes else None


def _linear_stores(ptx: str) -> Iterator[int]:
    for size in re.findall(r"cp\.async\.bulk\.global\.shared::cta\.\S+ .*, (%r\d+);", ptx):
        constant = re.search(rf"mov\.b32\s+{size}, (\d+);", ptx)
        if constant is None:
            (wide,) = _find(rf"cvt\.u32\.u64\s+{size}, (%rd\d+);", ptx)
            constant = re.search(rf"min\.u64\s+{wide}, %rd\d+, (\d+);", ptx)
            assert constant is not None, f"no bound of {wide} in:\n{ptx}"
        yield int(constant[1])


def _find(pattern: str, text: str) -> tuple[str, ...]:
    match = re.search(pattern, text)
    if match is None:
        raise ValueError(f"no {pattern!r} in:\n{text}")
    return match.groups()


def _access_widths(opcode: str, ptx: str) -> Counter[int]:
    """How many loads or stores of global memory there are of each width, in bytes a thread.

    An instruction that names no memory counts as one of global memory: the tiled layouts of Mosaic
    GPU make such instructions, and the kernels use these layouts in global memory.
    """
    widths: Counter[int] = Counter()
    for modifiers in re.findall(rf"^\s*(?:@!?%\w+\s+)?{opcode}\.([\w.:]+)\s", ptx, re.MULTILINE):
        parts = modifiers.split(".")
        if any(part.split("::")[0] in ("shared", "local", "param", "const") for part in parts):
            continue
        lanes = [int(part[1:]) for part in parts if re.fullmatch(r"v\d", part)]
        bits = int(parts[-1].lstrip("bfus"))
        widths[math.prod(lanes) * bits // 8] += 1
    return widths


def parse_instructions(hlo: str) -> dict[str, Instruction]:
    """The instructions of an HLO module that read and write memory, by name.

    These are the instructions of the entry and of the computations that it calls. A fusion is one
    instruction, because its inner ones keep their results in registers.
    """
    inside = set(re.findall(r" (?!call\()[\w-]+\(%.*(?:calls|to_apply)=%([\w.-]+)", hlo))
    instructions = {}
    computations = re.findall(r"^(?:ENTRY )?%(\S+) \(.*\{\n((?:  .*\n)*)\}", hlo, re.MULTILINE)
    for computation, body in computations:
        if computation in inside:
            continue
        for line in body.splitlines():
            line = line.split(", backend_config=", 1)[0]  # a kernel's is its binary
            name, outputs, opcode, rest = _find(r"%(\S+) = (.*?)([\w-]+)\((.*)", line)
            instructions[name] = Instruction(
                opcode,
                tuple(
                    (dtype, tuple(int(size) for size in dims.split(",") if size))
                    for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", outputs)
                ),
                tuple(re.findall(r"%([\w.-]+)", rest.split(")", 1)[0])),
                'custom_call_target="mosaic_gpu' in rest,
            )
    return instructions


def without_binaries(hlo: str) -> str:
    """The program without the code of its Mosaic GPU kernels, which is megabytes."""
    return re.sub(r'(custom_call_target="mosaic_gpu\w*").*', r"\1", hlo)


def kernel_digests(hlo: str) -> list[str]:
    """The worker's names for the distinct kernels of a program, in the order of its calls."""
    calls = re.findall(r'custom_call_target="mosaic_gpu.*', hlo)
    digests = [_find(r"_([0-9a-f]{64})_mosaic_gpu\b", call)[0] for call in calls]
    return list(dict.fromkeys(digests))
