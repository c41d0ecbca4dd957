"""Kills a training run again and again, and compares its end with that of an undisturbed run.

    python -m tests.support.faults --kills 20

starts a small run, kills it with SIGTERM and SIGKILL in turn, and starts it again each time. It
kills at a random moment or while a checkpoint is being written. At last it lets the run finish. The
final state must equal that of an undisturbed run bit by bit, and so must the rows of metrics.jsonl
apart from times and memory.

With `--processes 2` a run is two processes of one device each, which share the parameters. The
signals go to each process in turn. SIGTERM must end both with exit status 0. After a SIGKILL of one
process the other must end by itself and print why. (If process 0 dies, JAX reports it first, in
several lines.)
"""

import argparse
import collections
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.checkpoints.checkpoint import Checkpoints
from train.cli.command_line import parse_command_line
from train.setup import mesh_of
from train.step import abstract_state

ROOT = Path(__file__).parents[2]
STEPS_PER_KILL = 10
SETTINGS = """--model.hidden-size 32 --model.intermediate-size 64 --model.num-hidden-layers 2
    --model.num-attention-heads 2 --model.num-key-value-heads 1 --model.head-dim 16
    --data.sequence-length 32 --optimizer.warmup-steps 2 --eval-every 7 --eval-batches 1
    --sample-tokens 0 --no-save --checkpoint.every 3""".split()


def main() -> None:
    """Parses the command line, kills and compares."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--processes", type=int, default=1, help="processes of the run")
    arguments = parser.parse_args()
    options = {"seed": arguments.seed, "num_processes": arguments.processes}
    with tempfile.TemporaryDirectory() as folder:
        for line in kill_and_compare(Path(folder), arguments.kills, **options):
            print(line, flush=True)


def kill_and_compare(
    folder: Path, kills: int, *, seed: int, num_processes: int = 1
) -> Iterator[str]:
    """Yields a line for each kill, and one for the comparison.

    Args:
      folder: Folder for the runs.
      kills: Number of kills.
      seed: Seed of the moments at which to kill.
      num_processes: Processes of a run; each has one device.

    Raises:
      AssertionError: The runs differ, or a process did not end as it should.
    """
    rng = random.Random(seed)
    steps = STEPS_PER_KILL * (kills + 1)

    def finish(processes: Sequence[subprocess.Popen[str]]) -> None:
        for process in processes:
            output, _ = process.communicate(timeout=600)
            assert process.returncode == 0, output

    arguments = {
        name: [*SETTINGS, f"--steps={steps}", f"--runs-dir={folder}", f"--name={name}"]
        for name in ("whole", "killed")
    }
    # The first run leaves its programs here, so that later runs start in seconds.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    start = lambda name: [
        subprocess.Popen(
            [sys.executable, "-m", "train", *arguments[name], *flags],
            cwd=ROOT,
            # A CPU program for several devices can hang when it comes from the cache.
            env=os.environ | (cache if num_processes == 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for flags in process_flags(num_processes)
    ]
    finish(start("whole"))
    counts = collections.Counter()
    for kill, number in zip(
        range(kills), itertools.cycle((signal.SIGTERM, signal.SIGKILL)), strict=False
    ):
        processes = start("killed")
        # Each process gets both signals, then the next one.
        hit = kill // 2 % num_processes
        process = processes[hit]
        moment = _wait(process, folder / "killed", STEPS_PER_KILL * (kill + 1), rng)
        process.send_signal(number)
        others = [other for other in processes if other is not process]
        outputs = {other: other.communicate(timeout=300)[0] for other in [process, *others]}
        output = outputs[process]
        saving = "step" in moment and any((folder / "killed" / "checkpoints").glob("*tmp*"))
        # Before the first step there is nothing to save, so SIGTERM may end the process as usual.
        expected = {-number} if number == signal.SIGKILL else {0} if "step" in moment else {0, -15}
        assert process.returncode in expected, f"{process.returncode}\n{output}"
        for other in others:
            why = _check_end(process, other, outputs[other])
            moment += f", of process {hit}; the other: {why}"
        counts[number] += 1
        counts["left a part of a checkpoint"] += saving
        yield (
            f"{number.name} {moment}: exit status {process.returncode}, "
            f"{'part of a checkpoint left' if saving else 'no part of a checkpoint left'}"
        )
    finish(start("killed"))
    compare(folder, arguments)
    yield (
        f"state and metrics after {steps} steps are those of the run that was not killed: "
        f"{counts[signal.SIGTERM]} SIGTERM, {counts[signal.SIGKILL]} SIGKILL, "
        f"{counts['left a part of a checkpoint']} of them with a checkpoint half written"
    )


def process_flags(num_processes: int) -> list[list[str]]:
    """The flags of each process, for a run of so many processes on this machine."""
    if num_processes == 1:
        return [[]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return [
        [
            f"--distributed.coordinator-address={address}",
            f"--distributed.num-processes={num_processes}",
            f"--distributed.process-id={index}",
            "--distributed.heartbeat-timeout-s=5",
            "--distributed.initialization-timeout-s=60",
            f"--mesh.fsdp={num_processes}",
        ]
        for index in range(num_processes)
    ]


def _check_end(killed: subprocess.Popen[str], other: subprocess.Popen[str], output: str) -> str:
    """Tells how a process ended after the other was killed; AssertionError if it was wrong."""
    if killed.returncode == 0:
        assert other.returncode == 0, f"{other.returncode}\n{output}"
        return "exit status 0"
    ours = re.search(
        r"^error: (process \d+ (was not heard|cannot be reached)[^:.(]*|not all processes met)",
        output,
        re.M,
    )
    of_jax = "Terminating process because the JAX distributed service" in output
    assert other.returncode in (1, -6) and (ours or of_jax), f"{other.returncode}\n{output}"
    return f"exit status {other.returncode}, {ours[1] if ours else 'told by JAX'}"


def _wait(process: subprocess.Popen[str], run_dir: Path, step: int, rng: random.Random) -> str:
    """Waits for the moment to kill, and tells which moment it is."""
    if rng.random() < 0.2:
        seconds = rng.uniform(0, 4)
        time.sleep(seconds)
        return f"{seconds:.1f} s after the start"
    deadline = time.monotonic() + 300
    wait_for = lambda true: _poll(process, true, deadline)
    wait_for(lambda: _last_step(run_dir) >= step)
    if rng.random() < 0.6:
        wait_for(lambda: any((run_dir / "checkpoints").glob("*tmp*")))
        time.sleep(rng.uniform(0, 0.03))
        return f"in a save after step {step}"
    time.sleep(rng.uniform(0, 0.1))
    return f"after step {step}"


def _poll(process: subprocess.Popen[str], true: Any, deadline: float) -> None:
    while not true():
        assert process.poll() is None, f"ended by itself:\n{process.communicate()[0]}"
        assert time.monotonic() < deadline, "the run is stuck"
        time.sleep(0.001)


def _last_step(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith(b"\n")), default=0)


def compare(folder: Path, arguments: Mapping[str, list[str]]) -> None:
    """Raises AssertionError unless the runs "whole" and "killed" ended alike."""
    states, rows = {}, {}
    for name, flags in arguments.items():
        config = parse_command_line(flags)
        run_dir = config.runs_dir / config.name
        mesh = mesh_of(config)
        with jax.set_mesh(mesh), Checkpoints(run_dir / "checkpoints", keep=2) as checkpoints:
            restored = checkpoints.restore(abstract_state(config, mesh))
        assert restored is not None and restored[0] == config.steps, restored
        states[name] = jax.device_get(restored[1])
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        rows[name] = [timeless(json.loads(line)) for line in lines]
    jax.tree.map(np.testing.assert_array_equal, states["killed"], states["whole"])
    for got, expected in itertools.zip_longest(rows["killed"], rows["whole"]):
        assert got == expected, f"metrics.jsonl has {got} in place of {expected}"


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of metrics.jsonl without the fields that differ between equal runs."""
    varying = ("memory_gib", "peak_memory_gib", "mfu")
    return {k: v for k, v in row.items() if not k.endswith("_s") and k not in varying}


if __name__ == "__main__":
    main()
