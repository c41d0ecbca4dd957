"""Variants of a training step that each run in a process of their own: times, table and command.

`train_step_torch` and `train_step_te` use it.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from benchmarks import command, peers, tables
from benchmarks.training.train_step import SPEED_COLUMNS, add_workload, speed_cells, workload
from train.config import TrainConfig


@dataclasses.dataclass
class Measured:
    """The measurements of a variant; `bytes` is its memory."""

    name: str
    times_s: list[float]
    bytes: int
    loss: float


def timed(
    step: Callable[[], Any], finished: Callable[[], Any], rounds: int, steps: int
) -> tuple[list[float], Any]:
    """`(seconds of a step in each round, last loss)`, after a round to warm up.

    Args:
      step: Function that starts a step and returns its loss.
      finished: Function that waits until all steps are done.
      rounds: Number of rounds.
      steps: Number of steps in a round.
    """
    times: list[float] = []
    loss: Any = None
    for measured in [False] + [True] * rounds:
        finished()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        finished()
        if measured:
            times.append((time.perf_counter() - start) / steps)
    return times, loss


def report(config: TrainConfig, results: list[Measured], module: str, setup: str) -> str:
    """The table in Markdown, with the columns of `benchmarks.training.train_step`."""
    device = jax.devices()[0]
    installed = {name: version for name, version in peers.versions().items() if version}
    versions = ", ".join(f"{name} {version}" for name, version in installed.items())
    lines = [
        f"# Training step of {config.name} by {module.rpartition('.')[2]}, "
        f"{config.data.batch_size} x {config.data.sequence_length} tokens",
        "",
        f"{time.strftime('%Y-%m-%d')}, {device.device_kind}, {versions}. {setup} "
        f"Learning rate {config.optimizer.learning_rate}.",
        "",
        f"    {command.line(f'python -m {module}')}",
        "",
    ]
    rows = [
        [r.name, *speed_cells(config, r.times_s), f"{r.bytes / 2**30:.1f} GiB", f"{r.loss:.3f}"]
        for r in results
    ]
    return "\n".join([*lines, *tables.markdown([*SPEED_COLUMNS, "memory", "loss"], rows)]) + "\n"


def compare(
    measure: Callable[[TrainConfig, str, int, int], Measured],
    check: Callable[[str], Any],
    *,
    description: str | None,
    default: list[str],
    module: str,
    setup: str,
) -> None:
    """The command of a benchmark whose variants each run in a process of their own.

    Args:
      measure: Function that trains one variant: of the configuration, the name of the variant, and
        the numbers of rounds and of steps in a round.
      check: Function that refuses the name of an unknown variant.
      description: Text of `--help`.
      default: Variants that run without `--variants`.
      module: Name of the benchmark's module.
      setup: Sentences above the table.
    """
    parser = command.parser(module, description)
    add_workload(parser)
    parser.add_argument("--variants", nargs="+", default=default)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps in a round")
    parser.add_argument("--output", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    config = workload(arguments)
    for name in arguments.variants:
        check(name)
    # JAX only names the device in this process. The memory is for the processes of the variants.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    processes = concurrent.futures.ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
    )
    results = []
    for name in arguments.variants:
        result = processes.submit(measure, config, name, arguments.rounds, arguments.steps)
        results.append(result.result())
        if arguments.output:  # a variant that fails does not take the others with it
            arguments.output.write_text(report(config, results, module, setup))
    print(report(config, results, module, setup))
