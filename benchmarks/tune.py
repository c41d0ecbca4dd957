"""Finds the launch parameters of the norms' and SwiGLU's kernels for this card, by width.

    python -m benchmarks.tune rms_norm add_rms_norm --hidden-sizes 4096 --output tuned.json
    PALLAS_KERNELS_TUNED=tuned.json python -m train ...

Sweeps the candidates of the operation's `config.py`, forward, then backward. One that does not
compile, spills registers, or errs more against float32 than plain JAX does, is listed and not
timed. The others take turns beside a copy of as many bytes. Prints the tables and the rows to paste
into `config.py`; `--output` puts the rows into a JSON file that the kernels read instead.
"""

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from benchmarks import ops, shapes, timing
from benchmarks.ops import Arrays, Contender, Direction
from pallas_kernels.rms_norm import config as norm_config
from pallas_kernels.swiglu import config as swiglu_config

_CHECKED_ROWS = 2000
# There can be hundreds of candidates: all of them run a few rounds, the fastest run all of them.
_SCREENING_ROUNDS = 3
_FINALISTS = 8

_KEYS = ("op", "device_kind", "dtype", "hidden_size")  # of an entry in the JSON file

# A frozen dataclass, whose fields begin with "fwd_" or "bwd_".
type Config = Any


@dataclasses.dataclass(frozen=True)
class Tunable:
    """An operation whose kernels have launch parameters.

    Attributes:
      fn: the public function.
      forward_candidates: from the last axis of the input, and its dtype.
      backward_candidates: likewise.
      variant: what follows device, dtype and last axis in the keys of its table of tuned rows.
    """

    fn: Callable[..., Any]
    forward_candidates: Callable[[int, str], list[Config]]
    backward_candidates: Callable[[int, str], list[Config]]
    variant: tuple[bool, ...] = ()


def _norm(fn: Callable[..., Any], *, add: bool) -> Tunable:
    return Tunable(
        functools.partial(fn, eps=ops.EPS),
        functools.partial(norm_config.forward_candidates, add=add),
        functools.partial(norm_config.backward_candidates, add=add),
        variant=(add,),
    )


_TUNABLES: dict[str, Tunable] = {
    "rms_norm": _norm(pallas_kernels.rms_norm, add=False),
    "add_rms_norm": _norm(pallas_kernels.add_rms_norm, add=True),
    "swiglu": Tunable(
        pallas_kernels.swiglu,
        lambda _, dtype: swiglu_config.forward_candidates(dtype),
        lambda _, dtype: swiglu_config.backward_candidates(dtype),
    ),
}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """The candidates of one kernel.

    Attributes:
      timings: of every candidate, or why it has none.
      copy: the timing of the copy beside them.
    """

    timings: dict[Config, timing.Timing]
    copy: timing.Timing

    def best(self) -> Config | None:
        """The fastest candidate, None if all failed."""
        return next(iter(fastest(self.timings)), None)

    def fraction(self, config: Config) -> float:
        """Speed of a candidate, over that of the copy."""
        return self.copy.median_ms / self.timings[config].median_ms


def contender(op: str, config: Config | None) -> Contender:
    """The kernel with launch parameters, or plain JAX without any."""
    fn = functools.partial(
        _TUNABLES[op].fn,
        implementation="reference" if config is None else "mosaic_gpu",
        config=config,
    )
    return Contender(str(config), ops.OPS[op].contenders[0].formula, fn)


def checked(prepared: ops.Prepared) -> dict[str, np.ndarray]:
    """What the first call gives, by name: vectors whole, of arrays some rows and the last."""
    got = {}
    for name, array in prepared.calls[0]().items():
        if array.ndim == 2:
            array = array[:: -max(array.shape[0] // _CHECKED_ROWS, 1)]
        got[name] = np.asarray(array, np.float64)
    return got


def inaccuracy(
    got: dict[str, np.ndarray], plain: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> str | None:
    """Where `got` errs over 1.2 times as much as plain JAX in the same dtype does, or None.

    Errors below 64 float32 epsilons of the value do not count: sums may be in any order.
    """
    for name, value in exact.items():
        allowed = max(1.2 * _rms(plain[name] - value), 64 * 2.0**-23 * _rms(value))
        error = _rms(got[name] - value)
        if not error <= allowed:  # also NaN
            return f"{name} errs by {error:.1e}, allowed {allowed:.1e}"
    return None


def spills(dump: Path) -> str | None:
    """What ptxas says of spilled registers in the files of a compilation, or None."""
    logs = [path.read_text(errors="replace") for path in dump.glob("*.ptxas")]
    if not logs:
        return "no output of ptxas to look for spills in"
    found = [int(size) for log in logs for size in re.findall(r"(\d+) bytes spill stores", log)]
    return f"spills {max(found)} bytes" if max(found, default=0) else None


def sweep(
    op: str,
    shape: tuple[int, int],
    dtype: np.dtype,
    direction: Direction,
    candidates: Sequence[Config],
    *,
    dump: Path,
    rounds: int,
) -> Sweep:
    """Compiles, checks and times the candidates of one direction.

    Those of the backward must have one forward, and one that works.
    """
    sets = [_cast(arrays, dtype) for arrays in ops.input_sets(ops.OPS[op], shape)]
    plain = checked(ops.prepare(contender(op, None), sets[:1], direction))
    in_float32 = _cast(sets[0], np.dtype(np.float32))
    exact = checked(ops.prepare(contender(op, None), [in_float32], direction))
    del in_float32

    kept = None
    if direction == "backward":
        # All of them keep the same, so it is computed and stored once.
        kept = ops.keep(contender(op, candidates[0]), sets)
    cases, timings = {}, {}
    for config in candidates:
        for path in dump.iterdir():
            path.unlink()
        try:
            prepared = ops.prepare(contender(op, config), sets, direction, kept=kept)
            got = checked(prepared)
        except Exception as error:  # that a candidate does not compile is a result
            timings[config] = timing.Timing(error=timing.first_line(error))
            continue
        if reason := spills(dump) or inaccuracy(got, plain, exact):
            timings[config] = timing.Timing(error=reason)
        else:
            cases[config] = timing.Case(str(config), prepared.calls)

    copy = ops.copy(ops.PASSES[op][direction] * dtype.itemsize * shape[0] * shape[1])
    beside = timing.Case(copy.name, copy.calls)
    screened = timing.compare([beside, *cases.values()], rounds=_SCREENING_ROUNDS)
    timings |= {config: screened[case.name] for config, case in cases.items()}
    finalists = fastest(timings)[:_FINALISTS]
    final = timing.compare([beside, *(cases[config] for config in finalists)], rounds=rounds)
    timings |= {config: final[cases[config].name] for config in finalists}
    if final[copy.name].error is not None:
        sys.exit(f"the copy, beside which all is measured, failed: {final[copy.name].error}")
    return Sweep(timings, final[copy.name])


def fastest(timings: dict[Config, timing.Timing]) -> list[Config]:
    """Those that have a time, the fastest first."""
    timed = [config for config, found in timings.items() if found.error is None]
    return sorted(timed, key=lambda config: timings[config].median_ms)


def merged(forward: Config, backward: Config) -> Config:
    """The forward's parameters of one and the backward's of the other."""
    names = [field.name for field in dataclasses.fields(forward) if field.name.startswith("bwd_")]
    return dataclasses.replace(forward, **{name: getattr(backward, name) for name in names})


def table(found: Sweep) -> str:
    """Markdown, the fastest first, the failed last."""
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
    """The best configuration and its speed in words; None if no candidate is left.

    Prints the tables of both sweeps.
    """
    title, tunable = f"{shapes.label(shape)} {dtype}", _TUNABLES[op]
    forward = run("forward", tunable.forward_candidates(shape[1], dtype))
    print(f"\n{op} forward, {title}\n\n{table(forward)}", flush=True)
    if (with_forward := forward.best()) is None:
        return None
    candidates = tunable.backward_candidates(shape[1], dtype)
    backward = run("backward", [merged(with_forward, config) for config in candidates])
    print(f"\n{op} backward, {title}\n\n{table(backward)}", flush=True)
    if (best := backward.best()) is None:
        return None
    fractions = (forward.fraction(with_forward), backward.fraction(best))
    return best, "fwd {:.2f}, bwd {:.2f} of a copy".format(*fractions)


def paste(
    op: str, device_kind: str, dtype: str, hidden_size: int, config: Config, measured: str
) -> str:
    """A row of the table in the operation's `config.py`."""
    key = ", ".join(map(str, (f'"{device_kind}", "{dtype}"', hidden_size, *_TUNABLES[op].variant)))
    if op == "swiglu":
        return f"({key}): {config!r},  # {measured}"
    fields = ", ".join(str(value) for value in dataclasses.astuple(config))
    return f"({key}): _config({fields}),  # {measured}"


def merge_entries(
    old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """The entries of both; of two for the same case, the new one, in the place of the old."""
    entries = {_key(entry): entry for entry in old}
    return list((entries | {_key(entry): entry for entry in new}).values())


def _key(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[name] for name in _KEYS)


def _fields(config: Config) -> str:
    return ", ".join(f"{name}={value}" for name, value in dataclasses.asdict(config).items())


def _rms(array: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(array))))


def _cast(arrays: Arrays, dtype: np.dtype) -> Arrays:
    return {name: array.astype(dtype) for name, array in arrays.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, sweeps, prints and writes what is best."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tune",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("ops", nargs="+", choices=_TUNABLES)
    parser.add_argument(
        "--hidden-sizes", type=int, nargs="+", required=True, help="of swiglu: intermediate sizes"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--num-elements", type=int, default=2**26, help="of an input; rows follow")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output", type=Path, help="JSON file, made or added to")
    args = parser.parse_args(argv)

    device_kind = timing.require_gpu()
    # Mosaic GPU reads these when it compiles.
    dump = Path(tempfile.mkdtemp(prefix="ptxas"))
    os.environ["MOSAIC_GPU_DUMP_TO"] = str(dump)
    os.environ["MOSAIC_GPU_DUMP_PTXAS"] = "1"
    # A program from the cache would not pass through ptxas.
    jax.config.update("jax_enable_compilation_cache", False)

    rows, failed = [], []
    for op in args.ops:
        for hidden_size in args.hidden_sizes:
            shape = (max(args.num_elements // hidden_size, 1), hidden_size)
            run = functools.partial(
                sweep, op, shape, jnp.dtype(args.dtype), dump=dump, rounds=args.rounds
            )
            found = tune(op, shape, args.dtype, run)
            if found is None:
                failed.append(f"{op} {hidden_size}")
                continue
            config, speed = found
            measured = (
                f"{time.strftime('%Y-%m-%d')} jax {importlib.metadata.version('jax')}: {speed}"
            )
            key = (device_kind, args.dtype, hidden_size)
            rows.append(paste(op, *key, config, measured))
            entry = dict(zip(_KEYS, (op, *key), strict=True))
            entry |= {"config": dataclasses.asdict(config), "measured": measured}
            if args.output is not None:  # after each, for a sweep can take minutes
                old = json.loads(args.output.read_text()) if args.output.exists() else []
                args.output.write_text(json.dumps(merge_entries(old, [entry]), indent=1) + "\n")
    print("\n" + "\n".join(rows))
    if failed:
        sys.exit(f"no candidate is left for {', '.join(failed)}")


if __name__ == "__main__":
    main()
