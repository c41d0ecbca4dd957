"""The options of XLA for a training step on GPUs.

`jax.jit` passes them to the compiler with the step (`compiler_options`). The variable `XLA_FLAGS`
is not used: an unknown option in it ends the process, while an unknown compiler option raises an
error that can be caught. `compiler_options` also work for devices that are not in this machine.
"""

import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

type OptionValue = bool | int | float | str

# For several GPUs: with these options the exchange runs beside GEMMs. JAX 0.11.2 and 0.12 know
# them. They were chosen by schedules that JAX 0.12 compiled for four H100s: two layers of Llama 8B
# with 8192 tokens a share of the batch (`benchmarks/training/overlap.py`). "8.9 of 9.6 ms" below
# means: the exchange takes 9.6 ms, and nothing is computed during 8.9 ms of them. "4x1" means fsdp
# x tensor. On four H200s (JAX 0.11.2) a step takes 60.3 ms with the options, 63.4 without them and
# 64.1 with latency hiding off at 4x1, and 18.6, 18.9 and 19.5 ms at 1x4.
#
# Some options change nothing in that schedule and are left out: effort O1, the analytical latency
# estimator (XLA has it on by default), the stream's priority, no command buffers, double-buffered
# loops, and the windows of collective matmuls (XLA's partitioner makes them, a `jax.shard_map` does
# not need them). Two options make it worse: thresholds of 512 MiB for combining, and pipelining of
# all kinds of collectives. With four scanned layers at 4x1, 6.9 ms become 14.8 and 9.3. On the
# H200s none of them is faster, and the windows turn 61.6 ms a step into 73.4 at 4x1. NCCL's
# symmetric buffers change nothing: a step of eight layers at 4x1 on H200s takes 480.9 ms with them
# and 479.1 without them. It takes 478.2 if NCCL also gathers by copy engines (`NCCL_CTA_POLICY=2`).
OPTIONS: dict[str, OptionValue] = {
    # At 4x1, 8.9 of 9.6 ms without it and 3.8 with it. JAX 0.12 has it on by default.
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # A second collective may start before the first has ended; the default is one at a time. At 4x1
    # 3.8 of 9.6 ms become 2.7, at 1x4 2.3 of 3.2 become 2.1. It costs 0.25 GiB at 4x1. Four at a
    # time are no better.
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
    # Limits for a collective that some device does not join. The devices meet before a program's
    # first collective. The default limit of 40 s is short for processes that compile or read files
    # at different speeds. 1800 s is also the default of the watchdog (`train.distributed`), which
    # says more. (NCCL_TIMEOUT and TORCH_NCCL_* are PyTorch's.)
    "xla_gpu_first_collective_call_warn_stuck_timeout_seconds": 60,
    "xla_gpu_first_collective_call_terminate_timeout_seconds": 1800,
    # Limit for the same meeting inside NCCL, which ends the process; the default, -1, is no limit.
    "xla_gpu_nccl_termination_timeout_seconds": 1800,
}
# For one GPU. By default XLA lets Triton and cuBLAS compete for a product. Unrolled layers of Llama
# 3.2 1B (two H100s, 4 x 4096 tokens, `minimal`) take 257.0 and 252.4 ms a step without Triton. With
# it they take 259.5 and 255.2, and 8 to 12 s more to compile. Four layers of 8B take the same time
# with and without. Scanned layers take 265.1 ms instead of 269.0: cuBLAS reads a layer's weight
# inside the stack, and writes the weight's gradient there, because XLA fuses the slice with the
# call. On several GPUs such a fusion does not run beside the exchange. So four H200s with fsdp are
# slower without Triton: 209k tokens/s instead of 228k, and 34.0k instead of 37.6k for 8B.
OPTIONS_OF_ONE: dict[str, OptionValue] = {"xla_gpu_enable_triton_gemm": False}
NONE = "none"


def compiler_options(devices: Iterable[Any], chosen: Sequence[str] = ()) -> dict[str, OptionValue]:
    """The options to compile a step with; there are none unless the devices are GPUs.

    The defaults are `OPTIONS` on several GPUs, and `OPTIONS_OF_ONE` on one GPU. A default that
    `XLA_FLAGS` sets is left out.

    Args:
      devices: All devices that the step runs on; they need not be in this machine.
      chosen: Options as `name=value`, which come on top of the defaults or replace one; "none"
        drops the defaults.

    Returns:
      The options that this version of XLA knows. A message names each other option once.
    """
    devices = list(devices)
    if devices[0].platform != "gpu":
        if chosen and NONE not in chosen:
            print(f"xla_options are for GPUs, so a {devices[0].platform} leaves them out")
        return {}
    if NONE in chosen:
        options = {}
    else:
        options = OPTIONS if len(devices) > 1 else OPTIONS_OF_ONE
    flags = re.findall(r"--(\w+)", os.environ.get("XLA_FLAGS", ""))
    options = {name: value for name, value in options.items() if name not in flags}
    options |= parse(chosen)
    ours = (device for device in devices if device.process_index == jax.process_index())
    return accepted(tuple(options.items()), next(ours, devices[0]))


def parse(chosen: Sequence[str]) -> dict[str, OptionValue]:
    """Reads options of the form `name=value`; "none" stands for no option.

    Raises:
      ValueError: A text is neither.
    """
    options: dict[str, OptionValue] = {}
    for text in chosen:
        found = re.fullmatch(r"(?:--)?(\w+)=(.*)", text)
        if found:
            options[found[1]] = _value(found[2])
        elif text != NONE:
            raise ValueError(
                f"xla_options: {text!r} must be name=value, for example "
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
    """The value as it is written in `name=value`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.cache
def accepted(options: tuple[tuple[str, OptionValue], ...], device: Any) -> dict[str, OptionValue]:
    """The options that the compiler for `device` knows; an empty program finds them out."""
    taken = dict(options)
    with jax.set_mesh(Mesh(np.array([device]), ("x",))):  # hides the mesh of the step
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


def calls_until_compiled_again() -> int:
    """Number of the call that compiles again (`with_measured_latencies`), from 1; 4 by default."""
    return jax.config.jax_pgle_profiling_runs + 1


def with_measured_latencies(step: Callable[..., Any]) -> Callable[..., Any]:
    """A jitted function that XLA compiles again with the times that its kernels took.

    JAX calls that profile-guided latency estimation. It profiles the first calls, and compiles the
    function again at call `calls_until_compiled_again()`. XLA then knows how long kernels and
    exchange take, and so which kernels to start beside an exchange. Without a profile it assumes
    10 us for a call of cuDNN or of our kernels, and 0.01 us for a kernel that it fuses with a slice
    of stacked layers. On several hosts all take the profile of the first. On four H200s a step of
    Llama 8B with `fsdp` 4 and 16384 tokens a GPU takes 1586.8 ms in place of 1591.0 (JAX 0.11.2).

    The profiled calls run without command buffers, and wait for the device. They need JAX's
    profiler, so no other trace may run. Where another tool holds CUPTI the profile is empty: JAX
    warns, and the function stays without command buffers.
    """

    def run(*args: Any) -> Any:
        # Set only for this call, because JAX would profile all other functions, too. The option is
        # one of the process, so no other thread may call a jitted function meanwhile.
        with_all = jax.config.jax_enable_pgle
        jax.config.update("jax_enable_pgle", True)
        try:
            return step(*args)
        finally:
            jax.config.update("jax_enable_pgle", with_all)

    return run
