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
which takes a row for one document, "cuDNN, mask", which gets a mask of S² elements, and "ours" with
several tiles. The rates of all rows count the causal attention of a whole row, so they compare
times.

`--window N` times cuDNN and ours where a token attends to N tokens at most, itself included. The
rates count the attention of a whole row there, too.

`--peers` adds tokamax and the PyTorch libraries of `benchmarks/libraries.py`; with `--documents` it
adds TransformerEngine alone, as "TransformerEngine, packed". That attention first fills the results
with zeros, by the driver, which kernel times leave out.

`--contenders` takes names of contenders in JAX, as the tables show them. A name that the run does
not have is an error before any work. All programs are compiled first, in threads. The benchmark
writes a table and all numbers into the folder of results.
"""

import dataclasses
import functools
import gc
import importlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import agreement, command, peers, tables, timing
from benchmarks.kernels import documents, shapes
from benchmarks.kernels.documents import Direction
from benchmarks.kernels.formulas import (
    ATTENTION,
    DOCUMENT_ATTENTION,
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
DIRECTIONS: tuple[Direction, Direction] = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A contender with its tiles.

    Attributes:
      name: Name of the contender.
      tiles: Tiles, as the tables show them; empty if the contender chooses them.
      attend: Function `(q, k, v) -> out` of `[B, S, heads, H]`. With `DOCUMENT_ATTENTION` it also
        takes the number of each token's document, `[B, S]`.
      directions: Directions to time.
      formula: Formula that it computes.
      dtype: Dtype of its arrays.
      scales_logits: Whether it divides the logits by √H. If not, its queries are divided before.
    """

    name: str
    tiles: str
    attend: Callable[..., jax.Array]
    directions: tuple[Direction, ...] = DIRECTIONS
    formula: Formula = ATTENTION
    dtype: Any = jnp.bfloat16
    scales_logits: bool = True

    def program(self, direction: Direction) -> Callable[..., Arrays]:
        """The function of `q`, `k`, `v`, `dout` and the documents, if any, to compile."""

        def forward(q, k, v, dout, *ids) -> Arrays:
            del dout
            return {"out": self.attend(q, k, v, *ids)}

        def both(q, k, v, dout, *ids) -> Arrays:
            out, vjp = jax.vjp(lambda *qkv: self.attend(*qkv, *ids), q, k, v)
            dq, dk, dv = vjp(dout)
            return {"out": out, "dq": dq, "dk": dk, "dv": dv}

        return forward if direction == "forward" else both

    def arguments(self, arrays: Arrays) -> tuple[jax.Array, ...]:
        """The arguments of the program."""
        q = arrays["q"] if self.scales_logits else arrays["q"] * _scale(arrays["q"])
        floats = (a.astype(self.dtype) for a in (q, arrays["k"], arrays["v"], arrays["dout"]))
        ids = (arrays["segment_ids"],) if "segment_ids" in self.formula.inputs else ()
        return (*floats, *ids)

    def results(self, results: Arrays) -> Arrays:
        """The results of the program as those of the formula."""
        if self.scales_logits or "dq" not in results:
            return results
        return results | {"dq": results["dq"] * _scale(results["dq"])}


def _scale(q: jax.Array) -> float:
    return q.shape[-1] ** -0.5


def variants(*, with_tokamax: bool) -> list[Variant]:
    """The contenders that run in JAX, each with all of its tiles."""
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    return [
        Variant("cuDNN", "", functools.partial(cudnn, is_causal=True)),
        Variant("ours", "", documents.by_kernels),
        Variant("XLA", "", functools.partial(xla, is_causal=True)),
        Variant("cuDNN, no mask", "", cudnn, formula=FULL_ATTENTION),
        *_of_jax(),
        *(_of_tokamax() if with_tokamax else ()),
    ]


def of_window(window: int) -> list[Variant]:
    """The contenders where a token attends to as many tokens at most, itself included."""
    cudnn = functools.partial(
        jax.nn.dot_product_attention,
        implementation="cudnn",
        is_causal=True,
        local_window_size=(window - 1, 0),
    )
    ours = functools.partial(documents.by_kernels, window=window)
    formula = dataclasses.replace(ATTENTION, fn=functools.partial(ATTENTION.fn, window=window))
    return [
        Variant("cuDNN", "", cudnn, formula=formula),
        Variant("ours", "", ours, formula=formula),
    ]


def of_documents(num_documents: int, *, with_transformer_engine: bool) -> list[Variant]:
    """The contenders on rows of so many documents, and cuDNN on whole rows."""
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=True)
    found = documents.contenders(num_documents, with_transformer_engine=with_transformer_engine)
    return [
        Variant("cuDNN, whole rows", "", cudnn),
        *(
            Variant(name, tiles, fn, directions, DOCUMENT_ATTENTION)
            for name, tiles, fn, directions in found
        ),
    ]


def _of_jax() -> list[Variant]:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")

    def attend(is_causal: bool, block_q: int, block_kv: int, stages: int, **backward: int):
        config = module.TuningConfig(block_q, block_kv, stages, causal=is_causal, **backward)
        return lambda q, k, v: module.attention(q, k, v, config)

    of_float16 = {"dtype": jnp.float16, "scales_logits": False}
    full = {"formula": FULL_ATTENTION, **of_float16}
    found = [
        # Not supported by JAX 0.11 and 0.12.
        Variant("JAX, bfloat16", "64x128x2", attend(True, 64, 128, 2), scales_logits=False)
    ]
    for tiles in ((64, 128, 2), (64, 128, 3), (64, 256, 2), (128, 64, 2)):
        label, run = "x".join(map(str, tiles)), attend(True, *tiles)
        # The backward, which raises an error, is asked for once.
        directions = DIRECTIONS if tiles == (64, 128, 2) else DIRECTIONS[:1]
        found.append(Variant("JAX, float16", label, run, directions, **of_float16))
    forward = DIRECTIONS[:1]
    found.append(
        Variant("JAX, float16, no mask", "64x128x2", attend(False, 64, 128, 2), forward, **full)
    )
    for block_q, block_kv, warpgroups in ((64, 64, 2), (128, 64, 1), (128, 64, 2)):
        run = attend(
            False,
            64,
            128,
            2,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
            compute_wgs_bwd=warpgroups,
        )
        label = f"{block_q}x{block_kv}, warpgroups: {warpgroups}"
        found.append(Variant("JAX, float16, no mask", label, run, DIRECTIONS[1:], **full))
    return found


def _of_tokamax() -> list[Variant]:
    attention = importlib.import_module("tokamax").dot_product_attention
    # Its public function takes a kernel with a configuration, but does not export either.
    folder = "tokamax._src.ops.attention"
    kernel = importlib.import_module(f"{folder}.api").IMPLEMENTATIONS["mosaic_gpu"]
    forward = importlib.import_module(f"{folder}.pallas_mosaic_gpu_kernel_sm90").Config
    backward = importlib.import_module(f"{folder}.pallas_mosaic_gpu_vjp_common").Config

    def attend(kernel):
        return functools.partial(attention, is_causal=True, implementation=(kernel,))

    found = []
    # The first is the default, the third and the fourth are what its own tuning found for rows of
    # 4096 and head sizes 128 and 64.
    for block_q, block_kv, stages in ((64, 128, 2), (64, 128, 3), (64, 256, 3), (128, 64, 2)):
        config = forward(block_q=block_q, block_kv=block_kv, num_stages=stages)
        run = attend(kernel.replace(config=config, vjp=kernel.vjp))
        label = f"{block_q}x{block_kv}x{stages}"
        found.append(Variant("tokamax", label, run, DIRECTIONS[:1]))
    config = forward(block_q=64, block_kv=128, num_stages=2)
    # The first is the default and what its own tuning found for rows of 4096.
    for of_dkv, of_dq, stages in (
        ((64, 64), (64, 64), 2),
        ((64, 64), (64, 64), 3),
        ((64, 64), (64, 128), 2),
        ((128, 64), (64, 64), 2),
        ((128, 64), (128, 64), 2),
    ):
        of_backward = backward(
            block_q_dkv=of_dkv[0],
            block_kv_dkv=of_dkv[1],
            block_q_dq=of_dq[0],
            block_kv_dq=of_dq[1],
            num_stages=stages,
        )
        run = attend(kernel.replace(config=config, vjp=kernel.vjp.replace(config=of_backward)))
        label = f"dk and dv {shapes.label(of_dkv)}, dq {shapes.label(of_dq)}, {stages} stages"
        found.append(Variant("tokamax", label, run, DIRECTIONS[1:]))
    return found


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
