"""Kills a training run again and again, and compares what it ends with to a run left alone.

`python -m benchmarks.faults --kills 20` starts a small run, kills it in turn with SIGTERM and
SIGKILL, at a random moment or while a checkpoint is being written, and starts it again each time.
At last it lets the run finish, and compares the state to the bit, and the rows of metrics.jsonl but
for times, with those of a run of the same settings that nobody killed.
"""

import argparse
import collections
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from train.checkpoint import Checkpoints
from train.config import parse_command_line
from train.loop import mesh_of
from train.step import abstract_state

ROOT = Path(__file__).parent.parent
STEPS_PER_KILL = 10
SETTINGS = """--model.hidden-size 32 --model.intermediate-size 64 --model.num-hidden-layers 2
    --model.num-attention-heads 2 --model.num-key-value-heads 1 --model.head-dim 16
    --data.sequence-length 32 --optimizer.warmup-steps 2 --eval-every 7 --eval-batches 1
    --sample-tokens 0 --no-save --checkpoint.every 3""".split()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for line in kill_and_compare(Path(folder), arguments.kills, seed=arguments.seed):
            print(line, flush=True)


def kill_and_compare(folder: Path, kills: int, *, seed: int) -> Iterator[str]:
    """Gives a line for each kill, and one for the comparison.

    Raises:
      AssertionError: the runs differ, or one did not end as it should.
    """
    rng = random.Random(seed)
    steps = STEPS_PER_KILL * (kills + 1)

    def finish(process: subprocess.Popen[str]) -> None:
        output, _ = process.communicate(timeout=600)
        assert process.returncode == 0, output

    arguments = {
        name: [*SETTINGS, f"--steps={steps}", f"--runs-dir={folder}", f"--name={name}"]
        for name in ("whole", "killed")
    }
    # Later runs find their programs where the first one leaves them, and start in seconds.
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    start = lambda name: subprocess.Popen(
        [sys.executable, "-m", "train", *arguments[name]],
        cwd=ROOT,
        env=os.environ | cache,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    finish(start("whole"))
    counts = collections.Counter()
    for kill, number in zip(
        range(kills), itertools.cycle((signal.SIGTERM, signal.SIGKILL)), strict=False
    ):
        process = start("killed")
        moment = _wait(process, folder / "killed", STEPS_PER_KILL * (kill + 1), rng)
        process.send_signal(number)
        output, _ = process.communicate(timeout=300)
        saving = "step" in moment and any((folder / "killed" / "checkpoints").glob("*tmp*"))
        # Before the first step there is nothing to save, and SIGTERM ends the process as usual.
        expected = {-number} if number == signal.SIGKILL else {0} if "step" in moment else {0, -15}
        assert process.returncode in expected, f"{process.returncode}\n{output}"
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


def _wait(process: subprocess.Popen[str], run_dir: Path, step: int, rng: random.Random) -> str:
    """Waits for the moment to kill, and tells which it is."""
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
    """Raises AssertionError unless the runs "whole" and "killed" ended the same."""
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
    """A row of metrics.jsonl without what differs between two runs of the same settings."""
    varying = ("memory_gib", "peak_memory_gib", "mfu")
    return {k: v for k, v in row.items() if not k.endswith("_s") and k not in varying}


if __name__ == "__main__":
    main()
