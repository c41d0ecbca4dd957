"""Finds the fastest launch parameters of the kernels on this card.

    python -m benchmarks.kernels.tune --output tuned.json  # `make tune`
    python -m benchmarks.kernels.tune rms_norm add_rms_norm --hidden-sizes 4096 --output tuned.json
    python -m benchmarks.kernels.tune linear_cross_entropy --vocab-sizes 128256 --output tuned.json
    PALLAS_KERNELS_TUNED=tuned.json python -m train ...

Without an operation, the cases are those of the tables that come with the library, whatever card
they are for. Cases that the output file has for this card are skipped.

The sweep runs the default parameters and the candidates of the operation's `config.py`, forward,
then backward. For the linear cross-entropy it runs those of the kernel over a chunk of logits
(`logits_config.py`), which makes statistics and gradient in one call. Threads compile them. A
candidate is listed and not timed if it does not compile, spills registers, or errs more against
float32 than plain JAX does. The others take turns with a copy of as many bytes. A candidate
replaces the default if it is at least 1 % faster in the median, and faster in three of four rounds.

The program prints the tables, rows to paste into the file of the candidates, and the gains;
`--output` writes the rows into a JSON file, which the kernels read instead.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import command, tables, timing
from benchmarks.kernels import ops, shapes
from benchmarks.kernels.ops import Direction
from benchmarks.kernels.sweep import FASTER_ROUNDS, LEAST_GAIN, Sweep, cast, fastest, sweep
from benchmarks.kernels.tunables import TUNABLES, Config
from pallas_kernels import tuning
from pallas_kernels.gpu.device import target_device
from pallas_kernels.norm import config as norm_config

# Seconds of a sweep beside compilation: inputs, plain JAX, checks and rounds.
_OTHER_SECONDS = 8.0

_SHORT = {"forward": "fwd", "backward": "bwd"}


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation at a length of rows and a dtype: what a row of the tables is for."""

    op: str
    size: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.op} {self.size} {self.dtype}"

    def key(self, device_kind: str) -> tuple[str, str, str, int]:
        """The values of `tuning.KEYS` on a card."""
        return self.op, device_kind, tuning.dtype_name(self.dtype), self.size

    def seconds(self) -> dict[Direction, float]:
        """Seconds to compile the candidates of each direction, about."""
        tunable = TUNABLES[self.op]
        return {
            direction: tunable.seconds * len(candidates(self.size, self.dtype))
            for direction, candidates in tunable.candidates.items()
        }


def merged(forward: Config, backward: Config) -> Config:
    """The forward's parameters from `forward`, the backward's from `backward`."""
    names = [field.name for field in dataclasses.fields(forward) if field.name.startswith("bwd_")]
    return dataclasses.replace(forward, **{name: getattr(backward, name) for name in names})


def table(found: Sweep) -> str:
    """The table in Markdown: the fastest first, the failed last."""
    rows = []
    for config in fastest(found.timings):
        times = [time_ms * 1e3 for time_ms in found.timings[config].times_ms]
        median = found.timings[config].median_ms * 1e3
        spread = f"{min(times):.1f} - {max(times):.1f}"
        rows.append([_fields(config), f"{found.fraction(config):.3f}", f"{median:.1f}", spread])
    for config, failed in found.timings.items():
        if failed.error is not None:
            rows.append([_fields(config), failed.error])
    return "\n".join(tables.markdown(["config", "of the copy", "µs", "min - max"], rows))


def tune(
    case: Case,
    shape: tuple[int, int],
    default: Config,
    run: Callable[[Direction, list[Config]], Sweep],
) -> dict[str, Any] | None:
    """Sweeps all directions and prints their tables.

    Args:
      case: Case to tune.
      shape: Shape of an input, for the tables.
      default: Parameters that the kernel has without a new row.
      run: Function that sweeps candidates, the default ones first.

    Returns:
      The entry of the JSON file, without the device; None if no candidate works. Its `config` is
      None if every direction keeps the default.
    """
    chosen, speeds, texts = default, {}, []
    for direction, candidates in TUNABLES[case.op].candidates.items():
        configs = [
            merged(config, chosen) if direction == "forward" else merged(chosen, config)
            for config in candidates(case.size, case.dtype)
        ]
        found = run(direction, list(dict.fromkeys([chosen, *configs])))
        print(f"\n{case}, {direction}, {shapes.label(shape)}\n\n{table(found)}", flush=True)
        if (config := found.chosen()) is None:
            return None
        chosen, speeds[direction] = config, found.speeds()
        texts.append(f"{_SHORT[direction]} {found.fraction(chosen):.2f}")
    return {
        "op": case.op,
        "dtype": tuning.dtype_name(case.dtype),
        "size": case.size,
        "config": None if chosen == default else dataclasses.asdict(chosen),
        "measured": f"{time.strftime('%Y-%m-%d')} jax {importlib.metadata.version('jax')}: "
        f"{', '.join(texts)} of a copy",
        "speeds": speeds,
    }


def paste(entry: dict[str, Any]) -> str:
    """A row for the table of tuned rows beside the operation's candidates."""
    tunable = TUNABLES[entry["op"]]
    names = f'"{entry["device_kind"]}", "{entry["dtype"]}"'
    key = ", ".join(map(str, (names, entry["size"], *tunable.variant)))
    config = tunable.config(**entry["config"])
    if not isinstance(config, norm_config.Config):
        return f"({key}): {config!r},  # {entry['measured']}"
    fields = ", ".join(str(value) for value in dataclasses.astuple(config))
    return f"({key}): _config({fields}),  # {entry['measured']}"


def report(entries: Iterable[dict[str, Any]]) -> str:
    """The table of gains in Markdown, a line for each kernel."""
    rows, num_left_out = [], 0
    for entry, direction, speeds in _directions(entries):
        before, after, left_out = speeds["default"], speeds["best"], speeds["left_out"]
        gain = "the default fails" if before is None else _percent(after / before)
        rows.append(
            [
                f"{entry['op']} {entry['size']} {entry['dtype']} {direction}",
                "" if before is None else f"{before:.3f}",
                f"{after:.3f}",
                f"{gain}, default kept" if speeds["keeps_default"] else gain,
                f"{speeds['candidates']}" + (f", {left_out} of them left out" if left_out else ""),
            ]
        )
        num_left_out += left_out
    lines = tables.markdown(["case", "default", "best", "gain", "candidates"], rows)
    lines.append(
        "\nSpeeds are fractions of a copy of as many bytes. A default is kept, without a row, "
        f"where the best gains less than {LEAST_GAIN:.0%}, or is faster in fewer than "
        f"{FASTER_ROUNDS:.0%} of the rounds."
    )
    if num_left_out:
        lines.append(
            f"{num_left_out} candidates were left out, because the time was over: a larger "
            "--seconds with --again, or with the operation's name, measures them."
        )
    return "\n".join(lines)


def overall(entries: Iterable[dict[str, Any]]) -> str:
    """The gain over all kernels whose default works, in words."""
    gains = [
        1.0 if speeds["keeps_default"] else speeds["best"] / speeds["default"]
        for _, _, speeds in _directions(entries)
        if speeds["default"] is not None
    ]
    if not gains:
        return "No gain was measured."
    return (
        f"Overall gain {_percent(statistics.geometric_mean(gains))}, the geometric mean of "
        f"{len(gains)} kernels, of which {gains.count(1.0)} keep their default."
    )


def _directions(
    entries: Iterable[dict[str, Any]],
) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """Each entry with its directions and their speeds; files of older versions have no speeds."""
    for entry in entries:
        for direction, speeds in entry.get("speeds", {}).items():
            yield entry, direction, speeds


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def merge_entries(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of both. A new one replaces an old one of the same case, in its place."""
    entries = {tuning.row_key(entry): entry for entry in old}
    return list((entries | {tuning.row_key(entry): entry for entry in new}).values())


def _fields(config: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def cases_of_tables() -> list[Case]:
    """The cases of the rows that come with the library, for any card."""
    cases = [
        Case(op, size, dtype)
        for op, tunable in TUNABLES.items()
        for _, dtype, size, *variant in tunable.tuned
        if tuple(variant) == tunable.variant
    ]
    return list(dict.fromkeys(cases))


def read_entries(path: Path | None) -> list[dict[str, Any]]:
    """The entries of the output file; none without a file."""
    return json.loads(path.read_text()) if path is not None and path.exists() else []


def write_entries(path: Path, entries: list[dict[str, Any]]) -> None:
    """Writes the output file, the old one stays whole until the new one is."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(entries, indent=1) + "\n")
    temporary.replace(path)


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[Case]]:
    """The flags, and the cases that they name."""
    parser = command.parser("benchmarks.kernels.tune", __doc__)
    parser.add_argument("ops", nargs="*", choices=TUNABLES, metavar="op", help=", ".join(TUNABLES))
    parser.add_argument(
        "--hidden-sizes", type=int, nargs="+", help="for norms; for swiglu: intermediate sizes"
    )
    parser.add_argument("--vocab-sizes", type=int, nargs="+", help="for linear_cross_entropy")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="bfloat16 by default"
    )
    parser.add_argument(
        "--num-elements", type=int, help="elements of an input; the rows follow from it"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--seconds",
        type=float,
        default=1200,
        help="limit of time, shared over the candidates of all cases; 1200 by default",
    )
    parser.add_argument("--again", action="store_true", help="measure what the output file has")
    parser.add_argument("--output", type=Path, help="JSON file to create or add to")
    args = parser.parse_args(argv)
    if args.output is not None and not args.output.parent.is_dir():
        parser.error(f"--output={args.output}: there is no folder {args.output.parent}")
    for op in args.ops:
        if getattr(args, sizes := TUNABLES[op].sizes) is None:
            parser.error(f"{op} needs --{sizes.replace('_', '-')}")
    for name in ("hidden_sizes", "vocab_sizes", "dtype"):
        if not args.ops and getattr(args, name) is not None:
            parser.error(f"--{name.replace('_', '-')} needs an operation")
    named = [
        Case(op, size, args.dtype or "bfloat16")
        for op in args.ops
        for size in getattr(args, TUNABLES[op].sizes)
    ]
    return args, named or cases_of_tables()


def measure(
    case: Case, args: argparse.Namespace, compile_seconds: Callable[[Direction], float]
) -> dict[str, Any] | None:
    """Tunes a case; `compile_seconds` gives the time that a direction has for its candidates."""
    tunable, dtype = TUNABLES[case.op], np.dtype(jnp.dtype(case.dtype))
    num_elements = args.num_elements or tunable.num_elements
    shape = (max(num_elements // case.size, 1), case.size)
    sets = [cast(arrays, dtype) for arrays in ops.input_sets(tunable.inputs, shape)]
    device = target_device()

    def run(direction: Direction, candidates: list[Config]) -> Sweep:
        deadline = time.monotonic() + compile_seconds(direction)
        return sweep(
            case.op, shape, sets, direction, candidates, rounds=args.rounds, deadline=deadline
        )

    entry = tune(case, shape, tunable.default(device, case.size, dtype), run)
    return None if entry is None else entry | {"device_kind": device.kind}


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, sweeps, prints and writes the best parameters."""
    args, cases = parse(argv)
    end = time.monotonic() + args.seconds
    device_kind = timing.require_gpu()
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # Mosaic GPU reads it when it compiles
    # A program from the cache would not pass through ptxas.
    jax.config.update("jax_enable_compilation_cache", False)
    if os.environ.pop(tuning.VARIABLE, None):
        print(f"{tuning.VARIABLE} is ignored here: the default is the library's own row or guess")

    entries = read_entries(args.output)
    if not args.ops and not args.again:
        done = {tuning.row_key(entry) for entry in entries}
        skipped = [case for case in cases if case.key(device_kind) in done]
        cases = [case for case in cases if case not in skipped]
        if skipped:
            print(f"{args.output} has {len(skipped)} cases; --again measures them, too")
    costs = {
        (case, direction): seconds
        for case in cases
        for direction, seconds in case.seconds().items()
    }

    def compile_seconds(case: Case, direction: Direction) -> float:
        left = sum(seconds + _OTHER_SECONDS for seconds in costs.values())
        return costs.pop((case, direction)) / left * (end - time.monotonic())

    failed, left_out = [], []
    for case in cases:
        if time.monotonic() > end:
            left_out.append(str(case))
            continue
        entry = measure(case, args, functools.partial(compile_seconds, case))
        costs = {key: seconds for key, seconds in costs.items() if key[0] != case}
        if entry is None:
            failed.append(str(case))
            continue
        entries = merge_entries(entries, [entry])
        if args.output is not None:  # after each case, which can take minutes
            write_entries(args.output, entries)

    here = [entry for entry in entries if entry["device_kind"] == device_kind]
    rows = [paste(entry) for entry in here if entry["config"] is not None]
    print("\n" + "\n".join(["Rows for the source:", *(rows or ["none"])]))
    print(f"\n{report(here)}")
    if failed:
        print(f"No candidate works, so there is no row: {', '.join(failed)}.")
    if left_out:
        print(f"--seconds={args.seconds:g} left out: {', '.join(left_out)}. Run it again to go on.")
    use = "--output writes the rows into a file."
    if args.output is not None:
        use = f"To use the rows: export {tuning.VARIABLE}={args.output.resolve()}"
    print(f"{overall(here)} {use}")
    if failed and not here:
        sys.exit(1)


if __name__ == "__main__":
    main()
