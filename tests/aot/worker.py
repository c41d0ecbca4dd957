"""Compiles cases for one chip: `python -m aot.worker CHIP MODULE RESULTS NAME...`.

Appends a pickled `Program` or `Failure` to RESULTS for each named case of `MODULE.CASES`, in order,
so that the reader knows which case killed the process. Expects the environment that
`aot.harness.compile_cases` gives it.
"""

import contextlib
import importlib
import math
import os
import pathlib
import pickle  # noqa: TID251  of our own worker, in a folder of the test
import sys
import time
import traceback

import jax
import numpy as np
from jax.experimental.mosaic.gpu import constraints
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from aot.harness import (
    CHIPS,
    Case,
    Failure,
    Kernel,
    Program,
    kernel_calls,
    kernel_hashes,
    parse_instructions,
    parse_kernel,
    without_binaries,
)
from train.planner import aot


def main(chip: str, module: str, results: str, *names: str) -> None:
    """Compiles the named cases and appends their results to a file."""
    # Mosaic GPU dumps its layout constraints with the rest. To make text of them takes 13 of the 21
    # seconds of a large kernel.
    constraints.ConstraintSystem.__str__ = lambda self: "not dumped"
    cases: dict[str, Case] = importlib.import_module(module).CASES
    kernels: dict[str, Kernel] = {}
    for name in names:
        try:
            result = _compile(cases[name], chip, kernels)
        except Exception:
            result = Failure(traceback.format_exc())
        with open(results, "ab") as file:
            pickle.dump(result, file)


def _compile(case: Case, chip: str, kernels: dict[str, Kernel]) -> Program:
    """Compiles a case and adds its new kernels to those by hash."""
    sizes = case.mesh or {"x": 1}
    devices = np.array(aot.devices(CHIPS[chip], math.prod(sizes.values())))
    kind = AxisType.Explicit if case.is_explicit else AxisType.Auto
    mesh = Mesh(devices.reshape(*sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))

    specs = case.specs or (PartitionSpec(),) * len(case.args)
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    args = tuple(
        jax.tree.map(
            lambda a, sharding=sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            arg,
        )
        for arg, sharding in zip(case.args, shardings, strict=True)
    )
    dumps = pathlib.Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    known = set(dumps.glob("*.ptxas"))
    start = time.perf_counter()
    # Mosaic GPU takes the architecture from the default device, and silently sm_90 if it has none.
    in_context = jax.set_mesh(mesh) if case.mesh else contextlib.nullcontext()
    with jax.default_device(mesh.devices.flat[0]), in_context:
        function = jax.jit(case.function, donate_argnums=case.donated)
        compiled = function.trace(*args).lower().compile(case.compiler_options)
    seconds = time.perf_counter() - start
    hlo = compiled.as_text()
    memory = compiled.memory_analysis()
    assert hlo is not None and memory is not None
    # A kernel that this process has compiled before comes from a cache and is not dumped again.
    # The others are compiled, and so dumped, in the order of their calls.
    new_hashes = [name for name in kernel_hashes(hlo) if name not in kernels]
    new_dumps = sorted(set(dumps.glob("*.ptxas")) - known, key=lambda path: path.stat().st_mtime_ns)
    kernels |= zip(new_hashes, map(_read_kernel, new_dumps), strict=True)
    return Program(
        kernels=tuple(kernels[name] for name in kernel_hashes(hlo)),
        calls=kernel_calls(hlo),
        instructions=parse_instructions(hlo),
        hlo=without_binaries(hlo),
        temp_bytes=memory.temp_size_in_bytes,
        host_temp_bytes=memory.host_temp_size_in_bytes,
        seconds=seconds,
    )


def _read_kernel(ptxas: pathlib.Path) -> Kernel:
    # JAX 0.12 numbers the resources apart from the code, once for each time it is lowered.
    name, _, _ = ptxas.stem.rpartition("_")
    resources = ptxas.parent.glob(f"{name}_*.resources.txt")
    return parse_kernel(
        ptxas.with_suffix(".ptx").read_text(),
        ptxas.read_text(),
        max(resources, key=lambda path: path.stat().st_mtime_ns).read_text(),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
