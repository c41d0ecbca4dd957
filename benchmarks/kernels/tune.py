"""Finds the fastest launch parameters of the kernels on this card, by the length of the rows.

    python -m benchmarks.kernels.tune rms_norm add_rms_norm --hidden-sizes 4096 --output tuned.json
    python -m benchmarks.kernels.tune linear_cross_entropy --vocab-sizes 128256 --output tuned.json
    PALLAS_KERNELS_TUNED=tuned.json python -m train ...

The sweep runs the candidates of the operation's `config.py`, forward, then backward. For the linear
cross-entropy it runs those of the kernel over a chunk of logits (`logits_config.py`), which makes
statistics and gradient in one call. A candidate is listed and not timed if it does not compile,
spills registers, or errs more against float32 than plain JAX does. The others take turns with a
copy of as many bytes. The program prints the tables, and rows to paste into the file of the
candidates; `--output` writes the rows into a JSON file, which the kernels read instead.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import timing
from benchmarks.kernels import ops, shapes
from benchmarks.kernels.formulas import Arrays
from benchmarks.kernels.ops import Contender, Direction
from benchmarks.kernels.tunables import TUNABLES, Config
from pallas_kernels import tuning
from pallas_kernels.norm import config as norm_config

_CHECKED_ELEMENTS = 2**23
# There can be hundreds of candidates. All run a few screening rounds; the finalists, the fastest of
# them, run all rounds.
_SCREENING_ROUNDS = 3
_FINALISTS = 8

_SHORT = {"forward": "fwd", "backward": "bwd"}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The candidates of one kernel.

    Attributes:
      timings: Timing of every candidate, or its error.
      copy: Timing of the copy in the same rounds.
    """

    timings: dict[Config, timing.Timing]
    copy: timing.Timing

    def best(self) -> Config | None:
        """The fastest candidate; None if all failed."""
        return next(iter(fastest(self.timings)), None)

    def fraction(self, config: Config) -> float:
        """Speed of a candidate over the speed of the copy."""
        return self.copy.median_ms / self.timings[config].median_ms


def contender(op: str, config: Config | None) -> Contender:
    """The kernel with these launch parameters; plain JAX if `config` is None."""
    fn = functools.partial(
        TUNABLES[op].fn,
        implementation="reference" if config is None else "mosaic_gpu",
        config=config,
    )
    return Contender(str(config), TUNABLES[op].formula, fn)


def checked(prepared: ops.Prepared) -> dict[str, np.ndarray]:
    """The results of the first call by name: whole vectors, and some rows of larger arrays."""
    got = {}
    for name, array in prepared.calls[0]().items():
        if array.ndim == 2:
            array = array[:: -max(array.size // _CHECKED_ELEMENTS, 1)]  # with the last row
        got[name] = np.asarray(array, np.float64)
    return got


def inaccuracy(
    got: dict[str, np.ndarray], plain: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> str | None:
    """The first array of `got` that errs over 1.2 times as much as plain JAX's, in words, or None.

    Plain JAX computes in the same dtype. Errors below 64 float32 epsilons of the value are allowed,
    because sums may be in any order.
    """
    for name, value in exact.items():
        allowed = max(1.2 * _rms(plain[name] - value), 64 * 2.0**-23 * _rms(value))
        error = _rms(got[name] - value)
        if not error <= allowed:  # also NaN
            return f"{name} errs by {error:.1e}, allowed {allowed:.1e}"
    return None


@contextlib.contextmanager
def captured_stdout() -> Iterator[IO[bytes]]:
    """Yields a file that receives what the process prints meanwhile, its C++ included.

    Mosaic GPU prints the output of ptxas there. It could write that output into a folder, but then
    it would also write its layout constraints, and formatting them takes longer than compiling.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)
        try:
            yield file
        finally:
            sys.stdout.flush()
            os.dup2(kept, 1)
            os.close(kept)


def spills(ptxas: str) -> str | None:
    """The spilled bytes in the output of ptxas, in words; None without spills."""
    found = [int(size) for size in re.findall(r"(\d+) bytes spill stores", ptxas)]
    if not found:
        return "ptxas printed nothing about spills"
    return f"spills {max(found)} bytes" if max(found) else None


def sweep(
    op: str,
    shape: tuple[int, int],
    dtype: np.dtype,
    direction: Direction,
    candidates: Sequence[Config],
    *,
    rounds: int,
) -> Sweep:
    """Compiles, checks and times the candidates of one direction.

    All candidates for the backward must have the same forward, one that works.
    """
    tunable = TUNABLES[op]
    sets = [_cast(arrays, dtype) for arrays in ops.input_sets(tunable.inputs, shape)]
    plain = checked(ops.prepare(contender(op, None), sets[:1], direction))
    in_float32 = _cast(sets[0], np.dtype(np.float32))
    exact = checked(ops.prepare(contender(op, None), [in_float32], direction))
    del in_float32

    kept = None
    if direction == "backward":
        # All candidates keep the same arrays, so one forward computes them.
        kept = ops.keep(contender(op, candidates[0]), sets)
    cases, timings = {}, {}
    for config in candidates:
        try:
            with captured_stdout() as file:
                prepared = ops.prepare(contender(op, config), sets, direction, kept=kept)
                got = checked(prepared)
                file.seek(0)
                ptxas = file.read().decode(errors="replace")
        except Exception as error:  # that a candidate does not compile is a result
            timings[config] = timing.Timing(error=timing.first_line(error))
            continue
        if reason := spills(ptxas) or inaccuracy(got, plain, exact):
            timings[config] = timing.Timing(error=reason)
        else:
            cases[config] = timing.Case(str(config), prepared.calls)

    copy = ops.copy(tunable.passes[direction] * dtype.itemsize * shape[0] * shape[1])
    beside = timing.Case(copy.name, copy.calls)
    screened = timing.compare([beside, *cases.values()], rounds=_SCREENING_ROUNDS)
    timings |= {config: screened[case.name] for config, case in cases.items()}
    finalists = fastest(timings)[:_FINALISTS]
    final = timing.compare([beside, *(cases[config] for config in finalists)], rounds=rounds)
    timings |= {config: final[cases[config].name] for config in finalists}
    if final[copy.name].error is not None:
        sys.exit(f"the copy failed, so there is no limit: {final[copy.name].error}")
    return Sweep(timings, final[copy.name])


def fastest(timings: dict[Config, timing.Timing]) -> list[Config]:
    """The candidates that have a time, the fastest first."""
    timed = [config for config, found in timings.items() if found.error is None]
    return sorted(timed, key=lambda config: timings[config].median_ms)


def merged(forward: Config, backward: Config) -> Config:
    """The forward's parameters from `forward`, the backward's from `backward`."""
    names = [field.name for field in dataclasses.fields(forward) if field.name.startswith("bwd_")]
    return dataclasses.replace(forward, **{name: getattr(backward, name) for name in names})


def table(found: Sweep) -> str:
    """The table in Markdown: the fastest first, the failed last."""
    lines = ["| config | of the copy | µs | min - max |", "|---|---|---|---|"]
    for config in fastest(found.timings):
        times = [time_ms * 1e3 for time_ms in found.timings[config].times_ms]
        cells = [
            f"{found.fraction(config):.3f}",
            f"{found.timings[config].median_ms * 1e3:.1f}",
            f"{min(times):.1f} - {max(times):.1f}",
        ]
        lines.append(f"| {_fields(config)} | {' | '.join(cells)} |")
    for config, failed in found.timings.items():
        if failed.error is not None:
            lines.append(f"| {_fields(config)} | {failed.error} | | |")
    return "\n".join(lines)


def tune(
    op: str, shape: tuple[int, int], dtype: str, run: Callable[[Direction, list[Config]], Sweep]
) -> tuple[Config, str] | None:
    """Sweeps all directions and prints their tables.

    Returns:
      The best configuration and its speed in words; None if no candidate works.
    """
    best, speeds = None, []
    for direction, candidates in TUNABLES[op].candidates.items():
        configs = candidates(shape[1], dtype)
        if best is not None:
            configs = [merged(best, config) for config in configs]
        found = run(direction, configs)
        print(f"\n{op} {direction}, {shapes.label(shape)} {dtype}\n\n{table(found)}", flush=True)
        if (best := found.best()) is None:
            return None
        speeds.append(f"{_SHORT[direction]} {found.fraction(best):.2f}")
    return best, f"{', '.join(speeds)} of a copy"


def paste(op: str, device_kind: str, dtype: str, size: int, config: Config, measured: str) -> str:
    """A row for the table of tuned rows beside the operation's candidates."""
    key = ", ".join(map(str, (f'"{device_kind}", "{dtype}"', size, *TUNABLES[op].variant)))
    if not isinstance(config, norm_config.Config):
        return f"({key}): {config!r},  # {measured}"
    fields = ", ".join(str(value) for value in dataclasses.astuple(config))
    return f"({key}): _config({fields}),  # {measured}"


def merge_entries(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of both. A new one replaces an old one of the same case, in its place."""
    entries = {tuning.row_key(entry): entry for entry in old}
    return list((entries | {tuning.row_key(entry): entry for entry in new}).values())


def _fields(config: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def _cast(arrays: Arrays, dtype: np.dtype) -> Arrays:
    """The floating-point arrays cast to `dtype`, and the integers."""
    return {
        name: array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array
        for name, array in arrays.items()
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, sweeps, prints and writes the best parameters."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ops", nargs="+", choices=TUNABLES)
    parser.add_argument(
        "--hidden-sizes", type=int, nargs="+", help="for norms; for swiglu: intermediate sizes"
    )
    parser.add_argument("--vocab-sizes", type=int, nargs="+", help="for linear_cross_entropy")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument(
        "--num-elements", type=int, help="elements of an input; the rows follow from it"
    )
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path, help="JSON file to create or add to")
    args = parser.parse_args(argv)
    for op in args.ops:
        if getattr(args, sizes := TUNABLES[op].sizes) is None:
            parser.error(f"{op} needs --{sizes.replace('_', '-')}")

    device_kind = timing.require_gpu()
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"  # Mosaic GPU reads it when it compiles
    # A program from the cache would not pass through ptxas.
    jax.config.update("jax_enable_compilation_cache", False)

    rows, failed = [], []
    for op in args.ops:
        for size in getattr(args, TUNABLES[op].sizes):
            num_elements = args.num_elements or TUNABLES[op].num_elements
            shape = (max(num_elements // size, 1), size)
            run = functools.partial(sweep, op, shape, jnp.dtype(args.dtype), rounds=args.rounds)
            found = tune(op, shape, args.dtype, run)
            if found is None:
                failed.append(f"{op} {size}")
                continue
            config, speed = found
            measured = (
                f"{time.strftime('%Y-%m-%d')} jax {importlib.metadata.version('jax')}: {speed}"
            )
            key = (device_kind, tuning.dtype_name(args.dtype), size)
            rows.append(paste(op, *key, config, measured))
            entry = dict(zip(tuning.KEYS, (op, *key), strict=True))
            entry |= {"config": dataclasses.asdict(config), "measured": measured}
            if args.output is not None:  # after each sweep, which can take minutes
                old = json.loads(args.output.read_text()) if args.output.exists() else []
                args.output.write_text(json.dumps(merge_entries(old, [entry]), indent=1) + "\n")
    print("\n" + "\n".join(rows))
    if failed:
        sys.exit(f"no candidate works for {', '.join(failed)}")


if __name__ == "__main__":
    main()
