"""Times the norms' kernels at many widths, as fractions of a copy of the same bytes.

    python -m benchmarks.kernels.norm_widths --rows 16384 --output widths.json
    python -m benchmarks.kernels.norm_widths --widths 2304 7168 --candidates 12

The launch parameters are the default ones. `--candidates N` also times N others for each direction,
from the lists of `pallas_kernels/norm/config.py`, and shows the fastest. Each kernel takes turns
with a kernel that copies as many bytes as the norm must move; times are kernel times
(`benchmarks/timing.py`), medians over rounds. Before that, outputs and gradients are compared with
plain JAX in float32. The error ratio is the error over that of plain JAX with the same dtypes, for
the worst array. A kernel is not timed if its ratio exceeds 1.2.

A cell of the last table has the fraction, the microseconds of the kernel, and those beyond the
copy's. `!` marks a cell whose best candidate is over 1 % faster. To compare with an older library,
run this file in a copy of that library.
"""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import agreement, command, tables, timing
from benchmarks.kernels import ops, sweep
from benchmarks.kernels.formulas import Arrays
from benchmarks.kernels.ops import Direction
from benchmarks.kernels.tunables import TUNABLES

# Widths of models, widths between them, and multiples of 64 alone; all the rest is like these.
# fmt: off
WIDTHS = (
    512, 576, 640, 768, 896, 1024, 1152, 1280, 1536, 1600, 1792, 2048, 2112, 2304, 2560, 2816, 2880,
    3072, 3584, 3840, 4096, 4608, 5120, 5376, 5632, 6144, 6656, 7168, 7680, 8192, 8448, 9216, 10240,
    11264, 12288, 13312, 14336, 14400, 15360, 16064, 16384,
)
# fmt: on
_CASES: tuple[tuple[str, Direction], ...] = tuple(
    itertools.product(("rms_norm", "add_rms_norm"), ("forward", "backward"))
)
_LARGEST_RATIO = 1.2


@dataclasses.dataclass(frozen=True)
class Found:
    """The measurements of one operation in one direction at one shape.

    Attributes:
      timings: Timing of each configuration by its text, the default one first.
      copy: Timing of the copy.
      ratios: Error ratio of each configuration that ran.
    """

    timings: dict[str, timing.Timing]
    copy: timing.Timing
    ratios: dict[str, float]

    @property
    def best(self) -> str | None:
        """The fastest configuration; None if all failed."""
        ran = [name for name, found in self.timings.items() if found.error is None]
        return min(ran, key=lambda name: self.timings[name].median_ms, default=None)

    def fraction(self, name: str) -> float:
        """The speed of a configuration over that of the copy."""
        return self.copy.median_ms / self.timings[name].median_ms

    def cell(self) -> str:
        """The default's cell of the table."""
        default = next(iter(self.timings))
        if self.timings[default].error is not None:
            return "failed"
        ms = self.timings[default].median_ms
        beyond = (ms - self.copy.median_ms) * 1e3
        better = self.best is not None and self.timings[self.best].median_ms < ms / 1.01
        mark = "!" if better else ""
        return f"{self.fraction(default):.3f}{mark} ({ms * 1e3:.1f}, {beyond:+.1f})"

    def summary(self) -> dict[str, Any]:
        """Its entry in the JSON file."""
        configs = {name: found.summary() for name, found in self.timings.items()}
        for name, ratio in self.ratios.items():
            configs[name]["error_ratio"] = ratio
        return {"copy": self.copy.summary(), "configs": configs}


def error_ratio(
    got: dict[str, np.ndarray], plain: dict[str, np.ndarray], exact: dict[str, np.ndarray]
) -> float:
    """The largest ratio of the errors of `got` and of `plain`, over the arrays; NaN with a NaN."""
    ratios = []
    for name, value in exact.items():
        error, of_plain = (sweep.rms(some[name] - value) for some in (got, plain))
        ratios.append(error / max(of_plain, sweep.LEAST_ERROR * sweep.rms(value)))
    return float(np.max(ratios))


def measure(
    op: str, direction: Direction, shape: tuple[int, int], configs: Sequence[Any], rounds: int
) -> Found:
    """Checks and times the configurations; None is the default one."""
    sets = ops.input_sets(TUNABLES[op].inputs, shape)
    in_float32: Arrays = {name: array.astype(jnp.float32) for name, array in sets[0].items()}
    kept = ops.keep(sweep.contender(op, None), sets) if direction == "backward" else None
    plain = sweep.contender(op, None, "reference")
    with ThreadPoolExecutor() as pool:  # a compiler has one core
        of_plain = pool.submit(ops.prepare, plain, sets[:1], direction)
        of_exact = pool.submit(ops.prepare, plain, [in_float32], direction)
        found = {
            "default" if config is None else str(config): pool.submit(
                ops.prepare, sweep.contender(op, config), sets, direction, kept=kept
            )
            for config in configs
        }
    expected = [sweep.sampled(some.result()[0]()) for some in (of_plain, of_exact)]
    del in_float32, of_exact, of_plain

    ratios = {}

    def wrong(name: str, got: Arrays) -> str | None:
        ratios[name] = error_ratio(sweep.sampled(got), *expected)
        if ratios[name] <= _LARGEST_RATIO:
            return None
        return f"errs {ratios[name]:.2f} times as much as plain JAX"

    cases = [
        agreement.checked(name, of_config.result, functools.partial(wrong, name))
        for name, of_config in found.items()
    ]
    copy = ops.copy(ops.OPS[op].num_bytes(shape, direction))
    return Found(*ops.compare_with_copy(copy, cases, rounds), ratios)


def lines_of(op: str, direction: Direction, shape: tuple[int, int], found: Found) -> Iterator[str]:
    """The lines to print at once: the default, the fastest, and the failures."""
    ratio = found.ratios.get("default", float("nan"))
    yield f"{shape[0]} x {shape[1]} {op} {direction}: {found.cell()}, error ratio {ratio:.3f}"
    timed = {name: t for name, t in found.timings.items() if t.error is None}
    for name in sorted(timed, key=lambda name: timed[name].median_ms)[:3]:
        if len(found.timings) > 1:
            yield f"    {found.fraction(name):.3f} {name}"
    for name, failed in found.timings.items():
        if failed.error is not None:
            yield f"    failed: {name}: {failed.error}"


def table(results: dict[tuple[int, int], dict[tuple[str, Direction], Found]]) -> str:
    """The table of all shapes in Markdown."""
    header = ["rows x D", *(f"{op} {direction}" for op, direction in _CASES)]
    rows = [
        [f"{num_rows} x {width}"] + [found[case].cell() if case in found else "" for case in _CASES]
        for (num_rows, width), found in results.items()
    ]
    return "\n".join(tables.markdown(header, rows))


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, and prints and writes what it found."""
    parser = command.parser("benchmarks.kernels.norm_widths", __doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--rows", type=int, nargs="+", default=[16384])
    parser.add_argument("--ops", nargs="+", choices=("rms_norm", "add_rms_norm"))
    parser.add_argument("--directions", nargs="+", choices=("forward", "backward"))
    parser.add_argument("--candidates", type=int, default=0, help="others for each direction")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="JSON file, written after each shape")
    args = parser.parse_args(argv)
    device_kind = timing.require_gpu()
    print(f"{device_kind}, jax {jax.__version__}\n", flush=True)

    cases: list[tuple[str, Direction]] = [
        (op, direction)
        for op, direction in _CASES
        if op in (args.ops or (op,)) and direction in (args.directions or (direction,))
    ]
    results: dict[tuple[int, int], dict[tuple[str, Direction], Found]] = {}
    for shape in itertools.product(args.rows, args.widths):
        results[shape] = {}
        for op, direction in cases:
            others = TUNABLES[op].candidates[direction](shape[1], "bfloat16")
            configs = [None, *others[: args.candidates]]
            found = measure(op, direction, shape, configs, args.rounds)
            results[shape][op, direction] = found
            print("\n".join(lines_of(op, direction, shape, found)), flush=True)
        if args.output is not None:
            entries = [
                {"shape": shape, "op": op, "direction": direction} | found.summary()
                for shape, of_shape in results.items()
                for (op, direction), found in of_shape.items()
            ]
            contents = {"device": device_kind, "jax": jax.__version__, "entries": entries}
            args.output.write_text(json.dumps(contents, indent=1) + "\n")
    print(f"\n{table(results)}")


if __name__ == "__main__":
    main()
