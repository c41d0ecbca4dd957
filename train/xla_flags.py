"""The options of XLA for a training step on GPUs.

They go to the compiler with the step (`compiler_options` of `jax.jit`) and not through `XLA_FLAGS`:
an option that a version of XLA does not know is then an error that can be caught, where in
`XLA_FLAGS` it ends the process, and they also hold for devices that are only compiled for.
"""

import functools
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

type OptionValue = bool | int | float | str

# On several GPUs, so that their exchange runs beside GEMMs. JAX 0.11.2 and 0.12 know both. Chosen
# by schedules compiled for four H100s, two layers of Llama 8B with 8192 tokens a share of the batch
# (`benchmarks/training/overlap.py`, JAX 0.12; milliseconds of the exchange in which nothing is computed, of
# all of it; fsdp x tensor). On four H200s (JAX 0.11.2) a step takes, with them, without, and with
# latency hiding off, 60.3, 63.4 and 64.1 ms at 4x1, and 18.6, 18.9 and 19.5 at 1x4.
#
# Left out, because there they change nothing in the schedule: effort O1, the analytical latency
# estimator, the stream's priority, no command buffers, the windows of collective matmuls (which
# XLA's partitioner makes, and a `jax.shard_map` does without) and double-buffered loops. Thresholds
# of 512 MiB for combining, and pipelining all kinds, are worse: scanned over four layers, 4x1, they
# make 14.8 and 9.3 of 6.9 ms. Timed on the H200s none is faster, and the windows make 73.4 of 61.6
# ms at 4x1.
OPTIONS: dict[str, OptionValue] = {
    # Off, 4x1 has 8.9 of 9.6 ms exposed, on 3.8. It is on by default in JAX 0.12.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # A second collective may start before the first has ended, which is 1 by default. 4x1: 2.7 of
    # 9.6 ms for 3.8, 1x4: 2.1 of 3.2 for 2.3. It costs 0.25 GiB at 4x1. Four are no better.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    # About a collective that some device does not join, as long as the watchdog's default
    # (`train.distributed`), which says more. (NCCL_TIMEOUT and TORCH_NCCL_* are PyTorch's.) The
    # devices meet before a program's first collective: 40 s, the default, is short for processes
    # that compile or read files at different speeds.
    "xla_gpu_first_collective_call_warn_stuck_timeout_seconds": 60,
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 1800,
    # Before the job is ended that is stuck where NCCL's devices meet; -1, the default, is never.
    "xla_gpu_nccl_termination_timeout_seconds": 1800,
}
# On one GPU, for scanned layers. A GEMM then reads its layer's weight where it is stacked, and
# writes the weight's gradient there: XLA fuses the slice with a call of cuBLAS, but not with what
# it makes of a product, with this on, to let Triton and cuBLAS compete. Llama 3.2 1B on an H100,
# 4 x 4096 tokens, `minimal`: 265.1 ms a step for 269.0; unrolled, where there are no slices, 262.0
# for 259.7. On several GPUs it is slower, because such a fusion does not run beside the exchange:
# on fsdp 4 of H200s 209k tokens/s for 228k, and of 8B 34.0k for 37.6k.
OPTIONS_OF_SCANS: dict[str, OptionValue] = {"xla_gpu_enable_triton_gemm": False}
NONE = "none"


def compiler_options(
    devices: Iterable[Any], chosen: Sequence[str] = (), *, scan_layers: bool
) -> dict[str, OptionValue]:
    """What to compile a step with for these devices: nothing unless they are GPUs.

    Args:
      devices: all that the step runs on; they need not be here.
      chosen: `name=value`, added to ours or in place of one of them; "none" leaves out ours:
        `OPTIONS` on several GPUs, on one `OPTIONS_OF_SCANS` if it has scanned layers. What is in
        `XLA_FLAGS` is left to that.
      scan_layers: as in `LlamaConfig`.

    Returns:
      Those that this version of XLA takes; the others are named in a message, once.
    """
    devices = list(devices)
    if devices[0].platform != "gpu":
        return {}
    if NONE in chosen:
        options = {}
    elif len(devices) > 1:
        options = OPTIONS
    else:
        options = OPTIONS_OF_SCANS if scan_layers else {}
    flags = re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", ""))
    options = {name: value for name, value in options.items() if name not in flags}
    options |= parse(chosen)
    ours = (device for device in devices if device.process_index == jax.process_index())
    return accepted(tuple(options.items()), next(ours, devices[0]))


def parse(chosen: Sequence[str]) -> dict[str, OptionValue]:
    """The options in `name=value`; "none" is none.

    Raises:
      ValueError: one is neither.
    """
    options: dict[str, OptionValue] = {}
    for text in chosen:
        found = re.fullmatch(r"(?:--)?(\w+)=(.*)", text)
        if found:
            options[found[1]] = _value(found[2])
        elif text != NONE:
            raise ValueError(
                f"xla_options: {text!r} must be name=value, such as "
                f"xla_gpu_enable_latency_hiding_scheduler=true, or {NONE!r}"
            )
    return options


def _value(text: str) -> OptionValue:
    if text in ("true", "false"):
        return text == "true"
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text


def as_text(value: OptionValue) -> str:
    """As it is written in `name=value`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def accepted(options: tuple[tuple[str, OptionValue], ...], device: Any) -> dict[str, OptionValue]:
    """Those that the compiler for `device` takes, found out with a program that does nothing."""
    taken = dict(options)
    with jax.set_mesh(Mesh(np.array([device]), ("x",))):  # not that of the step
        nothing = jax.jit(lambda: jnp.zeros(())).lower()
    while taken:
        try:
            nothing.compile(taken)
            break
        except jax.errors.JaxRuntimeError as error:
            found = re.search(r"(?:No such compile|setting) option:? '?(\w+)", str(error))
            if found is None or found[1] not in taken:
                raise
            print(f"XLA option left out: {found[1]}={as_text(taken.pop(found[1]))}: {error}")
    return taken
