"""Times causal attention with grouped queries: cuDNN, XLA, others' Mosaic GPU kernels, PyTorch.

    python -m benchmarks.kernels.attention --peers
    python -m benchmarks.kernels.attention --documents 8 --peers
    python -m benchmarks.kernels.attention --window 4096 --shapes 1x16384x32x8x128
    python -m benchmarks.kernels.attention --contenders cuDNN ours --shapes 1x8192x32x8x128

A shape is sequences x length x query heads x key heads x head size. Data is random and bfloat16;
times are kernel times (`benchmarks/timing.py`), medians over interleaved rounds. cuDNN and XLA run
as `models/llama.py` calls them, and so does "ours", `document_attention`. The other kernels in JAX
have several tiles each; all of them are timed, and the table has the fastest. The backward is the
forward with the backward less the forward. A forward counts 4 B N S² H floating-point operations,
half of them if it is causal, and a backward 2.5 times as many. A result that differs from the
formula in float32 by over 2 % is not timed.

JAX's `attention_mgpu` takes float16 alone, scales no logits, so that its queries are scaled before,
and has a backward without a mask only. The rows "no mask" compare that backward with cuDNN's.

`--documents N` times rows of N documents of random lengths. The contenders are "cuDNN, whole rows",
"cuDNN, mask" and "ours". The first takes a row for one document, and the second gets a mask of S²
elements. "Ours" has several tiles. The rates of all rows count the causal attention of a whole row,
so they compare times.

`--window N` times cuDNN and ours where a token attends to N tokens at most, itself included. The
rates count the attention of a whole row there, too.

`--peers` adds tokamax and the PyTorch libraries of `benchmarks/libraries.py`; with `--documents` it
adds TransformerEngine alone, as "TransformerEngine, packed". That attention first fills the results
with zeros, by the driver, which kernel times leave out.

`--contenders` takes names of contenders in JAX, as the tables show them: with `--documents` those
above. A name that the run does not have is an error before any work. All programs are compiled
first, in threads. The benchmark writes a table and all numbers into the folder of results.
"""

import functools
import gc
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from benchmarks import agreement, command, peers, tables, timing
from benchmarks.kernels import documents, shapes
from benchmarks.kernels.attention_contenders import (
    DIRECTIONS,
    Variant,
    of_documents,
    of_window,
    variants,
)
from benchmarks.kernels.documents import Direction
from benchmarks.kernels.formulas import (
    ATTENTION,
    FULL_ATTENTION,
    Arrays,
    Formula,
    exact,
    wrong_result,
)
from benchmarks.kernels.shapes import Shape

# The attention of Llama 3.2 1B, Llama 3.1 8B and Qwen3 0.6B.
SHAPES: tuple[Shape, ...] = (
    (4, 4096, 32, 8, 64),
    (1, 8192, 32, 8, 128),
    (2, 4096, 16, 8, 128),
)


def operations(shape: Shape, direction: Direction, *, is_causal: bool) -> float:
    """Floating-point operations of a call."""
    batch_size, length, num_heads, _, head_size = shape
    forward = 4 * batch_size * num_heads * length**2 * head_size / (2 if is_causal else 1)
    return forward if direction == "forward" else 3.5 * forward


type Program = tuple[Shape, Variant, Direction]


def compile_all(programs: Sequence[Program]) -> dict[Program, Future[Callable[..., Arrays]]]:
    """The compiled programs; that of a case which a contender does not support has an error."""

    def compiled(program: Program) -> Callable[..., Arrays]:
        shape, variant, direction = program
        specs = jax.eval_shape(variant.arguments, documents.specs_of(shape))
        return jax.jit(variant.program(direction)).lower(*specs).compile()

    with ThreadPoolExecutor() as pool:
        return {program: pool.submit(compiled, program) for program in programs}


def measure(
    shape: Shape,
    compiled: dict[Program, Future[Callable[..., Arrays]]],
    *,
    with_peers: bool,
    rounds: int,
    num_documents: int = 1,
) -> list[dict[str, Any]]:
    """One record for each program of a shape, and for each peer and direction."""
    arrays = documents.arrays_of(shape, num_documents)
    formulas = {variant.formula for of_shape, variant, _ in compiled if of_shape == shape}
    formulas |= {ATTENTION} if with_peers else set()
    expected = {formula: exact(formula, arrays) for formula in formulas}
    cases: list[timing.Case] = []
    records: list[dict[str, Any]] = []

    def add(
        name: str,
        tiles: str,
        direction: Direction,
        formula: Formula,
        prepare: Callable[[], list[Callable[[], Any]]],
        results: Callable[[Any], Arrays],
    ) -> None:
        wrong = lambda got: wrong_result(results(got), expected[formula])
        cases.append(agreement.checked(f"{name}, {tiles}, {direction}", prepare, wrong))
        row = {"contender": name, "tiles": tiles, "direction": direction}
        is_causal = formula is not FULL_ATTENTION
        records.append({"shape": list(shape), **row, "is_causal": is_causal})

    for (of_shape, variant, direction), program in compiled.items():
        if of_shape == shape:
            prepare = functools.partial(_prepare, program, variant, arrays)
            add(variant.name, variant.tiles, direction, variant.formula, prepare, variant.results)
    if with_peers:
        peers.reset()
        for peer, direction in itertools.product(peers.peers_of("attention"), DIRECTIONS):
            prepare = functools.partial(_prepare_peer, peer, arrays, direction)
            add(peer.name, "", direction, ATTENTION, prepare, peers.to_jax)
    expected.clear()

    timings = timing.compare(cases, rounds=rounds)
    for record, case in zip(records, cases, strict=True):
        measured = timings[case.name]
        record |= measured.summary()
        if measured.error is None:
            work = operations(shape, record["direction"], is_causal=record["is_causal"])
            record["tflops"] = work / measured.median_ms / 1e9
    return records


def _prepare(
    program: Future[Callable[..., Arrays]], variant: Variant, arrays: Arrays
) -> list[Callable[[], Arrays]]:
    return [functools.partial(program.result(), *variant.arguments(arrays))]


def _prepare_peer(peer: peers.Peer, arrays: Arrays, direction: Direction) -> list[Callable]:
    return peers.prepare(peer, [arrays], direction).calls


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown tables, a section for each shape, with the fastest tiles of each contender."""
    lines = []
    for shape in dict.fromkeys(tuple(r["shape"]) for r in records):
        rows = [r for r in records if tuple(r["shape"]) == shape]
        contenders = []
        failures = []
        for name in dict.fromkeys(r["contender"] for r in rows):
            of_name = [r for r in rows if r["contender"] == name]
            best = {}
            for direction in dict.fromkeys(r["direction"] for r in of_name):
                tried = [r for r in of_name if r["direction"] == direction]
                timed = [r for r in tried if "error" not in r]
                if timed:
                    best[direction] = min(timed, key=lambda r: r["median_ms"])
                failures += [
                    f"- {', '.join(filter(None, (name, r['tiles'], direction)))}: {r['error']}"
                    for r in tried
                    if "error" in r
                ]
            if best:
                contenders.append([name, *_cells(shape, best)])
        header = ["contender", "forward", "with the backward", "backward", "tiles"]
        lines += [f"## {shapes.label(shape)}", "", *tables.markdown(header, contenders)]
        lines += ["", "Milliseconds; in brackets TFLOP/s.", ""]
        if failures:
            lines += ["Not timed:", "", *failures, ""]
    return "\n".join(lines)


def _cells(shape: Shape, best: dict[str, dict[str, Any]]) -> list[str]:
    forward, both = (best.get(direction) for direction in DIRECTIONS)
    cell = lambda ms, tflops: f"{ms:.3f} ({tflops:.0f})"
    cells = [cell(r["median_ms"], r["tflops"]) if r else "" for r in (forward, both)]
    if forward and both:
        backward_ms = both["median_ms"] - forward["median_ms"]
        work = 2.5 * operations(shape, "forward", is_causal=both["is_causal"])
        cells.append(cell(backward_ms, work / backward_ms / 1e9))
    else:
        cells.append("")
    return [*cells, "; ".join(r["tiles"] for r in (forward, both) if r and r["tiles"])]


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, writes the results and prints them."""
    parser = command.parser("benchmarks.kernels.attention", __doc__)
    parser.add_argument("--shapes", nargs="+", type=shapes.parse, default=list(SHAPES))
    parser.add_argument("--peers", action="store_true", help="add other libraries' kernels")
    parser.add_argument("--documents", type=int, help="documents of a row")
    parser.add_argument("--window", type=int, help="tokens that a token attends to at most")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="time these in JAX alone")
    command.add_results(parser)
    args = parser.parse_args(argv)
    for shape in args.shapes:
        if len(shape) != len(SHAPES[0]):
            parser.error(f"a shape is such as {shapes.label(SHAPES[0])}, not {shapes.label(shape)}")

    of_whole_rows = args.documents is None
    if not of_whole_rows and not all(1 <= args.documents <= s[1] for s in args.shapes):
        parser.error(f"a row of S tokens has 1 to S documents, not {args.documents}")
    if args.window is not None and (args.peers or not of_whole_rows or args.window < 1):
        parser.error("--window takes a number from 1 on, without --documents and --peers")

    timing.require_gpu()
    absent = peers.missing()
    with_torch = args.peers and of_whole_rows
    if with_torch:
        peers.require_torch()
    if args.window is not None:
        name, contenders = f"attention_window_{args.window}", of_window(args.window)
    elif of_whole_rows:
        name = "attention"
        contenders = variants(with_tokamax=args.peers and "tokamax" not in absent)
    else:
        name = f"attention_documents_{args.documents}"
        with_te = args.peers and "transformer-engine" not in absent
        contenders = of_documents(args.documents, with_transformer_engine=with_te)
    if names := args.contenders:
        known = dict.fromkeys(v.name for v in contenders)
        if unknown := set(names) - set(known):
            parser.error(f"--contenders: {sorted(unknown)} must be among {list(known)}")
        contenders = [v for v in contenders if v.name in names]
    run = command.Run.start(parser, argv, args.rounds, with_peers=args.peers)
    programs: list[Program] = [
        (s, v, d) for s in args.shapes for v in contenders for d in v.directions
    ]
    start = time.perf_counter()
    compiled = compile_all(programs)
    print(f"{len(programs)} programs in {time.perf_counter() - start:.0f} s", file=sys.stderr)

    records: list[dict[str, Any]] = []
    for shape in args.shapes:
        print(f"{shapes.label(shape)} ...", file=sys.stderr, flush=True)
        records += measure(
            shape,
            compiled,
            with_peers=with_torch,
            rounds=args.rounds,
            num_documents=args.documents or 1,
        )
        gc.collect()  # PyTorch's graphs hold their inputs in reference cycles
        text = run.heading("Attention", "Kernel time") + table(records)
        run.write(args.output_dir, name, run.contents(records), text)
    print(table(records))


if __name__ == "__main__":
    main()
