"""Times every implementation of an operation by shape, forward and backward, in one run.

    python -m benchmarks.kernels.bench --ops rms_norm add_rms_norm --peers

The data are random bfloat16 numbers; times are kernel times (`benchmarks/timing.py`), the median
over interleaved rounds. Each table gives the speed of an implementation as a fraction of a limit
that is measured in the same rounds. The limit is a kernel that copies the least number of bytes
that the operation must move, or the operation's bare matrix products. An implementation whose
result differs from the formula by over 2 % is not timed. The benchmark writes a table and all
numbers of each operation into the folder of results. `--peers` adds the RMSNorms of tokamax and
TransformerEngine, and the PyTorch libraries of `benchmarks/peers.py`.

The backward is timed alone, from the arrays that the forward keeps. `reference`, `default` and the
layer norm in XLA keep what a model under a remat policy keeps: inputs and statistics of each row.
"""

import argparse
import functools
import gc
import importlib.metadata
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import ceilings, peers, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.formulas import Arrays, Formula, exact, wrong_result
from benchmarks.kernels.ops import (
    JAX_PEERS,
    OPS,
    Direction,
    Limit,
    Op,
    Prepared,
    input_sets,
    prepare,
)
from benchmarks.kernels.shapes import Shape

# A column: its name, its formula, a function that prepares it, and one that makes JAX arrays of its
# results.
type Column = tuple[
    str,
    Formula,
    Callable[[list[Arrays], Direction], Prepared],
    Callable[[dict[str, Any]], Arrays],
]


def columns_of(op: Op, *, with_peers: bool, names: Sequence[str] | None) -> list[Column]:
    """The columns of an operation's tables: the named ones, all if `names` is None."""
    contenders = list(op.contenders)
    if with_peers:
        absent = peers.missing()
        of_op = JAX_PEERS.get(op.name, {})
        contenders += [peer for package, peer in of_op.items() if package not in absent]
    columns: list[Column] = [
        (c.name, c.formula, functools.partial(prepare, c), lambda arrays: arrays)
        for c in contenders
    ]
    if with_peers:
        columns += [
            (p.name, p.formula, functools.partial(peers.prepare, p), peers.to_jax)
            for p in peers.peers_of(op.name)
        ]
    return [column for column in columns if names is None or column[0] in names]


def measure_shape(op: Op, shape: Shape, columns: list[Column], rounds: int) -> list[dict[str, Any]]:
    """One record per direction: the limit and every column."""
    sets = input_sets(op.inputs, shape)
    expected = {formula: exact(formula, sets[0]) for formula in {column[1] for column in columns}}
    records = []
    for direction in op.directions:
        limit = op.limit(shape, direction)
        cases = [timing.Case(limit.name, limit.calls)]
        refused, num_bytes = {}, {}
        for name, formula, prepare_column, to_jax in columns:
            try:
                prepared = prepare_column(sets, direction)
                reason = wrong_result(to_jax(prepared.calls[0]()), expected[formula])
                num_bytes[name] = prepared.num_bytes()
            except Exception as error:  # that a library fails at this shape is a result
                refused[name] = timing.Timing(error=timing.first_line(error))
                continue
            if reason is None:
                cases.append(timing.Case(name, prepared.calls))
            else:
                refused[name] = timing.Timing(error=reason)
        timings = timing.compare(cases, rounds=rounds) | refused
        limit_timing = timings.pop(limit.name)
        if limit_timing.error is not None:
            sys.exit(f"the limit, {limit.name}, failed: {limit_timing.error}")
        measured = {name: timings[name] for name, *_ in columns}
        records.append(record(shape, direction, limit, limit_timing, measured, num_bytes))
    return records


def record(
    shape: Shape,
    direction: Direction,
    limit: Limit,
    limit_timing: timing.Timing,
    measured: dict[str, timing.Timing],
    num_bytes: dict[str, int],
) -> dict[str, Any]:
    """The entry of a shape and direction in the JSON file."""
    columns = {}
    for name, column in measured.items():
        columns[name] = column.summary()
        if column.error is None:
            columns[name]["fraction"] = limit_timing.median_ms / column.median_ms
            columns[name]["bytes"] = num_bytes[name]
    rate = limit.amount / (limit_timing.median_ms * 1e-3) / limit.scale
    return {
        "shape": list(shape),
        "direction": direction,
        "limit": {"name": limit.name, "rate": rate, "unit": limit.unit} | limit_timing.summary(),
        "columns": columns,
    }


def markdown(result: dict[str, Any]) -> str:
    """The tables of one operation: a row per shape, a column per implementation."""
    limit = result["records"][0]["limit"]
    lines = [
        f"# {result['op']} on {result['device']}",
        "",
        f"{result['date']}, {result['device']}, {result['versions']}. bfloat16, kernel time, "
        f"median of {result['rounds']} interleaved rounds. In the same run, by wall time: "
        f"{result['ceilings']}.",
        "",
        f"    {result['command']}",
        "",
        f"Speed over that of the {limit['name']} in the same rounds; in brackets microseconds.",
    ]
    failures = []
    for direction in dict.fromkeys(row["direction"] for row in result["records"]):
        rows = [row for row in result["records"] if row["direction"] == direction]
        names = list(rows[0]["columns"])
        table = [[f"{limit['name']}, {limit['unit']}", *names]]
        labels = [shapes.label(row["shape"]) for row in rows]
        for shape, row in zip(labels, rows, strict=True):
            table.append([f"{row['limit']['rate']:.0f}", *map(_cell, row["columns"].values())])
            failures += [
                f"- {direction}, {shape}, {name}: {column['error']}"
                for name, column in row["columns"].items()
                if "error" in column
            ]
        lines += ["", f"## {direction}", "", *_table(labels, table)]
        if direction == "forward+backward":
            table = [names]
            table += [[_mebibytes(column) for column in row["columns"].values()] for row in rows]
            lines += ["", "Memory at the peak beyond the inputs, MiB:", "", *_table(labels, table)]
    if failures:
        lines += ["", "Not timed:", "", *failures]
    return "\n".join(lines) + "\n"


def _table(labels: list[str], rows: list[list[str]]) -> list[str]:
    header, *body = rows
    lines = [f"| shape | {' | '.join(header)} |", "|---" * (len(header) + 1) + "|"]
    return lines + [
        f"| {label} | {' | '.join(row)} |" for label, row in zip(labels, body, strict=True)
    ]


def _cell(column: dict[str, Any]) -> str:
    if "error" in column:
        return "failed"
    microseconds = column["median_ms"] * 1e3
    digits = 1 if microseconds < 1000 else 0
    return f"{column['fraction']:.2f} ({microseconds:.{digits}f})"


def _mebibytes(column: dict[str, Any]) -> str:
    return "failed" if "error" in column else f"{column['bytes'] / 2**20:.0f}"


def short_name(device_kind: str) -> str:
    """`h100` for "NVIDIA H100 80GB HBM3", `rtx4090` for "NVIDIA GeForce RTX 4090"."""
    name = device_kind.removeprefix("NVIDIA ").removeprefix("GeForce ").replace("RTX ", "RTX")
    return re.split(r"[ -]", name)[0].lower()


def write_results(folder: Path, name: str, device: str, contents: Any, text: str) -> None:
    """Writes `NAME_DEVICE_YYYYMM.json` and `.md`; the folder is made if there is none.

    Args:
      folder: Folder of the results.
      name: Beginning of the files' names.
      device: Middle of the files' names, such as `h100` or `h100_x8`.
      contents: All numbers, for the JSON file.
      text: Table in Markdown.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}_{device}_{time.strftime('%Y%m')}"
    path.with_suffix(".json").write_text(json.dumps(contents, indent=1) + "\n")
    path.with_suffix(".md").write_text(text)


def _versions(with_peers: bool) -> str:
    found = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    if with_peers:
        found |= {name: version for name, version in peers.versions().items() if version}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints and writes the tables."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.bench",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--ops", nargs="+", choices=OPS, default=["rms_norm", "add_rms_norm"])
    parser.add_argument("--shapes", nargs="+", type=shapes.parse, help="such as 16384x4096")
    parser.add_argument("--implementations", nargs="+", help="names of columns; default: all")
    parser.add_argument("--peers", action="store_true", help="add other libraries")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)

    device_kind = timing.require_gpu()
    if args.peers and "torch" in peers.missing():
        sys.exit("--peers needs torch, which is not installed")
    columns = {
        name: columns_of(OPS[name], with_peers=args.peers, names=args.implementations)
        for name in args.ops
    }
    for name, found in columns.items():
        if unknown := set(args.implementations or ()) - {column[0] for column in found}:
            sys.exit(f"{name} has no column named {', '.join(sorted(unknown))}")
        for shape in args.shapes or ():
            if len(shape) != len(OPS[name].shapes[0]):
                sys.exit(f"{name} takes shapes such as {shapes.label(OPS[name].shapes[0])}")
    header = {
        "device": device_kind,
        "date": time.strftime("%Y-%m-%d"),
        "versions": _versions(args.peers),
        "command": shlex.join(["python", "-m", "benchmarks.kernels.bench", *argv]),
        "rounds": args.rounds,
        "ceilings": str(ceilings.measure()),
    }
    for name, found in columns.items():
        records = []
        for shape in args.shapes or OPS[name].shapes:
            print(f"{name} {shapes.label(shape)} ...", file=sys.stderr, flush=True)
            if args.peers:
                peers.reset()
            records += measure_shape(OPS[name], shape, found, args.rounds)
            gc.collect()  # PyTorch's graphs hold their inputs in reference cycles
        result = {"op": name, **header, "records": records}
        write_results(args.output_dir, name, short_name(device_kind), result, markdown(result))
        print(markdown(result), flush=True)


if __name__ == "__main__":
    main()
