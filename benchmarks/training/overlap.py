"""Shows how much of the exchange between GPUs a training step hides behind GEMMs, by XLA option.

    python -m benchmarks.training.overlap                # compiles for GPUs that are not here
    python -m benchmarks.training.overlap --run --quiet  # compiles and times on this host's GPUs

A mesh is fsdp x tensor. The step trains a few layers of a preset on random tokens. A table lists
the collectives in the schedule of one device: how often each runs, the bytes of its larger side,
whether it is asynchronous, and the FLOPs of the GEMMs and attention between its start and its end.

"Exposed" is an estimate of the time in which nothing is computed, and serves to rank schedules. It
assumes that GEMMs and collectives reach the shares of their peak rates in `train.planner.cost`,
that collectives run one at a time, and that all other work takes no time. `--run` measures the wall
time of a step, the median over rounds in which every set of options has its turn.
"""

import argparse
import collections
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import command, tables, timing
from benchmarks.training.schedule import Collective, Schedule
from models.sharding import make_mesh
from train import xla_flags
from train.cli.command_line import parse_command_line
from train.config import TrainConfig
from train.planner import aot, cost
from train.planner.plan import abstract_batch
from train.step import abstract_state, init_state, jit_train_step, memory_in_bytes

_PIPELINED = "COLLECTIVE_PIPELINING_MODE_ON"
# The options of training, no options, and options that could change the schedule, one idea a set.
SETS: dict[str, dict[str, xla_flags.OptionValue]] = {
    "training": xla_flags.OPTIONS,
    "none": {},
    "no-latency-hiding": {"xla_gpu_enable_latency_hiding_scheduler": False},
    "effort-O1": {"optimization_level": "O1"},
    "analytical-latencies": {"xla_gpu_enable_analytical_sol_latency_estimator": True},
    "priority": {"xla_gpu_enable_highest_priority_async_stream": True},
    "two-at-a-time": {"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
    "four-at-a-time": {"xla_gpu_experimental_parallel_collective_overlap_limit": 4},
    "early": {"xla_gpu_experimental_collective_start_as_early_as_possible": True},
    "pipelined": {
        "xla_gpu_pipeline_all_gather": _PIPELINED,
        "xla_gpu_pipeline_reduce_scatter": _PIPELINED,
        "xla_gpu_pipeline_all_reduce": _PIPELINED,
    },
    "double-buffered": {"xla_gpu_enable_while_loop_double_buffering": True},
    "combined": {
        "xla_gpu_all_gather_combine_threshold_bytes": 1 << 29,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 1 << 29,
        "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 29,
    },
    "not-combined": {
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
    },
    "windowed": {
        "xla_gpu_threshold_for_windowed_einsum_mib": 0,
        "xla_gpu_multi_streamed_windowed_einsum": True,
    },
    "no-graphs": {"xla_gpu_enable_command_buffer": ""},
}


def exchange_ms(schedule: Schedule, chip: aot.Chip) -> tuple[float, float]:
    """Milliseconds of the exchange on each device, and those that no GEMM hides."""
    link = chip.link_bandwidth * cost.COPY_EFFICIENCY
    exchange, waits = schedule.seconds(link, chip.limits.bf16_flops * cost.GEMM_EFFICIENCY)
    return exchange * 1e3, waits * 1e3


def table(collectives: Sequence[Collective]) -> str:
    """The collectives that round to at least one MiB; equal ones share a row."""
    rows = collections.Counter()
    for found in collectives:
        row = found.kind, round(found.nbytes / 2**20), found.is_async, round(found.flops / 1e9)
        rows[row] += found.times
    cells = [
        [kind, f"{mib}", f"{times}", *(["yes", f"{gflops}"] if is_async else ["no"])]
        for (kind, mib, is_async, gflops), times in rows.items()
        if mib
    ]
    header = ["collective", "MiB", "times", "asynchronous", "GEMM GFLOPs beside it"]
    return "\n".join(tables.markdown(header, cells))


def add_model(parser: argparse.ArgumentParser, *, layers: int, vocab_size: int) -> None:
    """Adds the flags that choose a few layers of a preset, with these defaults."""
    parser.add_argument("--preset", default="llama3.1-8b")
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--scan", action="store_true", help="scanned layers")
    parser.add_argument("--remat", default="minimal")
    parser.add_argument("--vocab-size", type=int, default=vocab_size)
    parser.add_argument("--sequence-length", type=int, default=4096)


def config_of(arguments: argparse.Namespace, fsdp: int, tensor: int) -> TrainConfig:
    """A few layers on a mesh; each data-parallel share of the batch has `rows` rows."""
    flags = [
        *("--preset", arguments.preset, "--model.num-hidden-layers", str(arguments.layers)),
        *("--model.vocab-size", str(arguments.vocab_size), "--model.remat", arguments.remat),
        f"--model.{'' if arguments.scan else 'no-'}scan-layers",
        *("--mesh.fsdp", str(fsdp), "--mesh.tensor", str(tensor)),
        *("--data.batch-size", str(arguments.rows * fsdp)),
        *("--data.sequence-length", str(arguments.sequence_length)),
    ]
    return parse_command_line(flags)


def compile_step(config: TrainConfig, mesh: Mesh, options: dict[str, xla_flags.OptionValue]) -> Any:
    """The step, compiled with these options and no others."""
    named = [f"{name}={xla_flags.as_text(value)}" for name, value in options.items()]
    config = dataclasses.replace(config, xla_options=("none", *named))
    state = abstract_state(config, mesh)
    return jit_train_step(config, state).lower(state, abstract_batch(config, mesh)).compile()


def random_batch(config: TrainConfig, mesh: Mesh) -> dict[str, jax.Array]:
    """A batch of random tokens, as a step takes it."""
    rng = np.random.default_rng(0)
    return {
        name: jax.device_put(
            rng.integers(config.model.vocab_size, size=a.shape, dtype=a.dtype), a.sharding
        )
        for name, a in abstract_batch(config, mesh).items()
    }


def times_of(
    config: TrainConfig, mesh: Mesh, steps: dict[str, Any], rounds: int, calls: int
) -> dict[str, timing.Timing]:
    """The wall time of a step by name; all steps train one state."""
    state = init_state(config, mesh)
    batch = random_batch(config, mesh)

    def run(step: Any) -> Any:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    cases = [timing.Case(name, [functools.partial(run, step)]) for name, step in steps.items()]
    return timing.compare(cases, rounds=rounds, calls_per_round=calls, measure=timing.wall_ms)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, compiles, times if asked to, and prints."""
    parser = command.parser("benchmarks.training.overlap", __doc__)
    add_model(parser, layers=2, vocab_size=32768)
    parser.add_argument("--meshes", nargs="+", default=["1x4", "4x1", "2x2"], metavar="FSDPxTENSOR")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--rows", type=int, default=2, help="rows in each share of the batch")
    parser.add_argument("--device", default="h100", help="GPU to compile for without --run")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=4, help="steps in a round")
    parser.add_argument("--quiet", action="store_true", help="no tables of collectives")
    arguments = parser.parse_args(argv)
    if arguments.run:
        kind = timing.require_gpu()
        chip = aot.chip_of_kind(kind)
        if chip is None:
            parser.error(f"train/planner/aot.py has no data of {kind}")
    else:
        jax.config.update("jax_platforms", "cpu")
        chip = aot.chip(arguments.device)
    print(f"{chip.device_kind}, jax {jax.__version__}")
    print(f"    {command.line(parser.prog, argv)}\n")
    rows = []
    for name in arguments.meshes:
        fsdp, tensor = map(int, name.split("x"))
        number = fsdp * tensor
        devices = jax.devices()[:number] if arguments.run else aot.devices(chip, number)
        mesh = make_mesh(data=1, fsdp=fsdp, tensor=tensor, devices=devices)
        config = config_of(arguments, fsdp, tensor)
        times: dict[str, timing.Timing] = {}
        with jax.set_mesh(mesh), jax.default_device(devices[0]):
            steps = {}
            for label in arguments.sets:
                start = time.perf_counter()
                steps[label] = compile_step(config, mesh, SETS[label])
                seconds = time.perf_counter() - start
                print(f"{name} {label}: compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
            if arguments.run:
                times = times_of(config, mesh, steps, arguments.rounds, arguments.calls)
        for label, step in steps.items():
            schedule = Schedule(step.as_text())
            if not arguments.quiet:
                print(f"{name}, {label}\n\n{table(schedule.collectives())}\n")
            whole, exposed = exchange_ms(schedule, chip)
            gib = memory_in_bytes(step) / 2**30
            measured = "-"
            if timed := times.get(label):
                measured = timed.error or f"{timed.median_ms:.2f}"
            cells = f"{whole:.2f}", f"{exposed:.2f}", f"{gib:.2f}", measured
            rows.append([name, label, *cells])
    header = ["fsdp x tensor", "options", "exchange ms", "exposed ms", "GiB", "step ms"]
    print("\n".join(tables.markdown(header, rows)))


if __name__ == "__main__":
    main()
