"""Times every implementation of an operation by shape, forward and backward, in one run.

    python -m benchmarks.kernels.bench --ops rms_norm add_rms_norm --peers

The data are random bfloat16 numbers; times are kernel times (`benchmarks/timing.py`), the median
over interleaved rounds. Each table gives the speed of an implementation as a fraction of a limit
that is measured in the same rounds. The limit is a kernel that copies the least number of bytes
that the operation must move. An implementation whose result differs from the formula by over 2 % is
not timed. The benchmark writes a table and all numbers of each operation into the folder of
results. `--peers` adds the RMSNorms of tokamax and TransformerEngine, and the PyTorch libraries of
`benchmarks/libraries.py`.

The backward is timed alone, from the arrays that the forward keeps. `reference`, `default` and the
layer norm in XLA keep what a model under a remat policy keeps: inputs and statistics of each row.
"""

import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import agreement, command, peers, tables, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.formulas import Arrays, Formula, exact, wrong_result
from benchmarks.kernels.ops import (
    JAX_PEERS,
    OPS,
    Call,
    Direction,
    Op,
    compare_with_copy,
    copy,
    input_sets,
    prepare,
)
from benchmarks.kernels.shapes import Shape

_DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
# A column: its name, its formula, a function that prepares it, and one that makes JAX arrays of its
# results.
type Column = tuple[
    str,
    Formula,
    Callable[[list[Arrays], Direction], list[Call]],
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
            (p.name, p.formula, functools.partial(_prepare_peer, p), peers.to_jax)
            for p in peers.peers_of(op.name)
        ]
    return [column for column in columns if names is None or column[0] in names]


def _prepare_peer(peer: peers.Peer, sets: list[Arrays], direction: Direction) -> list[Call]:
    return peers.prepare(peer, sets, direction).calls


def measure_shape(op: Op, shape: Shape, columns: list[Column], rounds: int) -> list[dict[str, Any]]:
    """One record per direction: the limit and every column."""
    sets = input_sets(op.inputs, shape)
    expected = {formula: exact(formula, sets[0]) for formula in {column[1] for column in columns}}
    records = []
    for direction in _DIRECTIONS:
        num_bytes = op.num_bytes(shape, direction)
        limit = copy(num_bytes)  # before peers take memory, which PyTorch keeps
        cases = []
        for name, formula, prepare_column, to_jax in columns:
            run = functools.partial(prepare_column, sets, direction)
            wrong = lambda got, to_jax=to_jax, formula=formula: wrong_result(
                to_jax(got), expected[formula]
            )
            cases.append(agreement.checked(name, run, wrong))
        timings, of_copy = compare_with_copy(limit, cases, rounds)
        records.append(record(shape, direction, num_bytes, of_copy, timings))
    return records


def record(
    shape: Shape,
    direction: Direction,
    num_bytes: int,
    limit: timing.Timing,
    timings: dict[str, timing.Timing],
) -> dict[str, Any]:
    """The entry of a shape and direction in the JSON file."""
    columns = {name: column.summary() for name, column in timings.items()}
    for name, column in timings.items():
        if column.error is None:
            columns[name]["fraction"] = limit.median_ms / column.median_ms
    rate = num_bytes / limit.median_ms / 1e6
    return {
        "shape": list(shape),
        "direction": direction,
        "limit": {"name": "copy", "rate": rate, "unit": "GB/s"} | limit.summary(),
        "columns": columns,
    }


def markdown(records: Sequence[dict[str, Any]]) -> str:
    """The tables of one operation: a row per shape, a column per implementation."""
    lines = ["Speed over that of the copy in the same rounds; in brackets microseconds."]
    failures = []
    for direction in dict.fromkeys(row["direction"] for row in records):
        rows = [row for row in records if row["direction"] == direction]
        body = []
        for row in rows:
            shape, columns = shapes.label(row["shape"]), row["columns"]
            body.append([shape, f"{row['limit']['rate']:.0f}", *map(_cell, columns.values())])
            failures += [
                f"- {direction}, {shape}, {name}: {column['error']}"
                for name, column in columns.items()
                if "error" in column
            ]
        header = ["shape", "copy, GB/s", *rows[0]["columns"]]
        lines += ["", f"## {direction}", "", *tables.markdown(header, body)]
    if failures:
        lines += ["", "Not timed:", "", *failures]
    return "\n".join(lines) + "\n"


def _cell(column: dict[str, Any]) -> str:
    if "error" in column:
        return "failed"
    microseconds = column["median_ms"] * 1e3
    digits = 1 if microseconds < 1000 else 0
    return f"{column['fraction']:.2f} ({microseconds:.{digits}f})"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints and writes the tables."""
    parser = command.parser("benchmarks.kernels.bench", __doc__)
    parser.add_argument("--ops", nargs="+", choices=OPS, default=["rms_norm", "add_rms_norm"])
    parser.add_argument("--shapes", nargs="+", type=shapes.parse, help="such as 16384x4096")
    parser.add_argument("--implementations", nargs="+", help="names of columns; default: all")
    parser.add_argument("--peers", action="store_true", help="add other libraries")
    command.add_results(parser, rounds=12)
    args = parser.parse_args(argv)

    timing.require_gpu()
    if args.peers:
        peers.require_torch()
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
    run = command.Run.start(parser, argv, args.rounds, with_peers=args.peers)
    for name, found in columns.items():
        records = []
        for shape in args.shapes or OPS[name].shapes:
            print(f"{name} {shapes.label(shape)} ...", file=sys.stderr, flush=True)
            if args.peers:
                peers.reset()
            records += measure_shape(OPS[name], shape, found, args.rounds)
            gc.collect()  # PyTorch's graphs hold their inputs in reference cycles
        text = run.heading(name) + markdown(records)
        run.write(args.output_dir, name, {"op": name} | run.contents(records), text)
        print(text, flush=True)


if __name__ == "__main__":
    main()
