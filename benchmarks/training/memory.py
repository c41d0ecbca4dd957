"""Compares the memory that a run announces for its step with the run's peak on this GPU.

    python -m benchmarks.training.memory --variants unrolled:minimal scanned:full --batch-sizes 4 2

Each run is a process of its own, `python -m train` with two steps, because the peak of a process
never falls. The announced memory is XLA's analysis of the compiled step, which the run prints
before its first step and `--model.remat auto` relies on. The peak is the allocator's; it includes
the initial parameters and the batches. A variant is `layers:remat`.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import command

_VARIANTS = ("unrolled:minimal", "unrolled:mlp_inputs", "unrolled:full", "scanned:minimal")


def announced_gib(output: str) -> float:
    """The announced total in GiB, from the output of a run.

    Raises:
      ValueError: The output has no line about the memory of the step.
    """
    match = re.search(r"memory of the step: .*in all ([\d.]+) ([GM])iB", output)
    if match is None:
        raise ValueError(f"no line about the memory of the step in:\n{output[-2000:]}")
    return float(match[1]) / (1 if match[2] == "G" else 1024)


def peak_gib(metrics: Path) -> float:
    """The highest peak in a run's `metrics.jsonl`, in GiB.

    Raises:
      ValueError: The device, such as a CPU, does not count its memory.
    """
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    peaks = [row["peak_memory_gib"] for row in rows if "peak_memory_gib" in row]
    if not peaks:
        raise ValueError(f"no peak in {metrics}: the device does not count its memory")
    return max(peaks)


def run(preset: str, variant: str, batch_size: int, sequence_length: int) -> tuple[float, float]:
    """`(announced, peak)` of a run, in GiB.

    Raises:
      RuntimeError: The run failed, for example for want of memory.
    """
    layers, remat = variant.split(":", 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            *(sys.executable, "-m", "train", "--preset", preset, "--steps", "2"),
            *("--optimizer.warmup-steps", "1", "--runs-dir", folder, "--name", "memory"),
            *("--data.batch-size", str(batch_size), "--model.remat", remat),
            *("--data.sequence-length", str(sequence_length)),
            f"--model.{'no-' if layers == 'unrolled' else ''}scan-layers",
        ]
        done = subprocess.run(arguments, capture_output=True, text=True)
        if done.returncode:
            lines = [text for line in done.stderr.splitlines() if (text := line.strip("│╭╮╰╯─ "))]
            raise RuntimeError(" ".join(lines[-4:]) or f"exit status {done.returncode}")
        return announced_gib(done.stdout), peak_gib(Path(folder, "memory", "metrics.jsonl"))


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, runs and prints the table."""
    parser = command.parser("benchmarks.training.memory", __doc__)
    parser.add_argument("--preset", default="llama3.2-1b")
    parser.add_argument("--variants", nargs="+", default=list(_VARIANTS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[4])
    parser.add_argument("--sequence-length", type=int, default=4096)
    args = parser.parse_args(argv)
    print("| layers:remat | rows | announced | peak | peak over announced |")
    print("|---|---|---|---|---|")
    for variant, batch_size in itertools.product(args.variants, args.batch_sizes):
        try:
            announced, peak = run(args.preset, variant, batch_size, args.sequence_length)
        except RuntimeError as error:
            print(f"| {variant} | {batch_size} | {error} | | |", flush=True)
            continue
        print(
            f"| {variant} | {batch_size} | {announced:.2f} GiB | {peak:.2f} GiB "
            f"| {peak / announced:.3f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
