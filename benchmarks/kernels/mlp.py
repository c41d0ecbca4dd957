"""Times the gated MLP, whole and in parts, against its bare GEMMs.

    python -m benchmarks.kernels.mlp --shapes 16384x2048x8192 8192x4096x14336

The shapes are tokens x D x F. The data are random bfloat16 numbers; times are kernel times
(`benchmarks/timing.py`), the median over interleaved rounds. The parts are:

- `projections`: gate, up and their product, beside two GEMMs. The kernel makes the product in the
  epilogue of its GEMM. It is timed with gate and up written, as a training step needs them, and
  without.
- `gradients`: dgate, dup and the product, from dy, gate and up, beside one GEMM. Three ways are
  timed: a GEMM and one elementwise pass by XLA, a GEMM and our two elementwise kernels, and our
  GEMM with the elementwise work in its epilogue.
- `mlp`: forward and backward by implementation and by saved arrays, beside nine GEMMs.

Each candidate for the launch parameters is checked against XLA's result, then timed; `--sweep` adds
candidates. The benchmark writes a table and all numbers into the folder of results, anew after each
shape. The last table has a row for each shape: the kernels beside XLA.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import agreement, command, tables, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.shapes import Shape
from pallas_kernels import swiglu, swiglu_mlp
from pallas_kernels.gpu.device import target_device
from pallas_kernels.gpu.hopper_gemm import Config
from pallas_kernels.mlp import formula, gated_matmul

SHAPES: tuple[Shape, ...] = ((8192, 4096, 14336), (16384, 2048, 8192))


@dataclasses.dataclass(frozen=True)
class Part:
    """A computation for which there are several ways.

    Attributes:
      name: Name of the section.
      inputs: Inputs of every way.
      gemms: Bare matrix products of the computation.
      ways: Ways to compute it, by name: functions of the inputs that return a tuple of arrays. The
        arrays of each must agree with those of the first.
    """

    name: str
    inputs: tuple[jax.Array, ...]
    gemms: list[Callable[[], Any]]
    ways: dict[str, Callable[..., Any]]


def variants(base: Config, *, sweep: bool) -> Iterator[tuple[str, Config]]:
    """The default launch parameters and, in a sweep, those that change one of them, by name."""
    yield "", base
    if not sweep:
        return
    for tile_n in (128, 192, 256):
        if tile_n != base.tile_n:
            # Wider tiles fit shared memory with fewer stages only.
            change = dict(tile_n=tile_n, stages=min(base.stages, 3))
            yield f", {tile_n=}", dataclasses.replace(base, **change)
    changes = {
        "stages": (base.stages - 1,),
        "cluster": (3 - base.cluster,),
        "band": (max(1, base.band // 2), 2 * base.band),
    }
    for name, values in changes.items():
        for value in values:
            if value != getattr(base, name):
                yield f", {name}={value}", dataclasses.replace(base, **{name: value})


def parts(shape: Shape, *, sweep: bool) -> list[Part]:
    """The parts at a shape, with their inputs."""
    tokens, hidden_size, intermediate_size = shape
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16)
    x, dy = normal(tokens, hidden_size), normal(tokens, hidden_size)
    scale = jnp.asarray(hidden_size**-0.5, jnp.bfloat16)
    w_gate = normal(hidden_size, intermediate_size) * scale
    w_up = normal(hidden_size, intermediate_size) * scale
    w_down = normal(intermediate_size, hidden_size) * scale
    gate, up = normal(tokens, intermediate_size), normal(tokens, intermediate_size)

    matmul = jax.jit(jnp.matmul)
    transposed = jax.jit(lambda a, b: a @ b.T)
    weight_gradient = jax.jit(lambda a, b: a.T @ b)
    project = functools.partial(matmul, x, w_gate)
    down = functools.partial(matmul, gate, w_down)
    dproduct = functools.partial(transposed, dy, w_down)
    dx = functools.partial(transposed, gate, w_gate)
    dw = functools.partial(weight_gradient, x, gate)
    dw_down = functools.partial(weight_gradient, gate, dy)

    device = target_device()
    backward = gated_matmul.default_backward_config(tokens, intermediate_size, hidden_size, device)
    projections: dict[str, Callable[..., Any]] = {
        "XLA, gate and up kept": _project_xla,
        "XLA": lambda *a: _project_xla(*a)[:1],
    }
    for keep in (True, False):
        forward = gated_matmul.default_config(
            tokens, intermediate_size, hidden_size, device, keep=keep
        )
        for name, config in variants(forward, sweep=sweep):
            kernel = functools.partial(gated_matmul.gated_matmul, keep=keep, config=config)
            projections[f"kernel{', gate and up kept' if keep else ''}{name}"] = kernel
    gradients: dict[str, Callable[..., Any]] = {
        "XLA": _gradients_xla,
        "XLA's GEMM, our elementwise kernels": _gradients_kernels,
    }
    for name, config in variants(backward, sweep=sweep):
        kernel = functools.partial(gated_matmul.gated_matmul_backward, config=config)
        gradients[f"kernel{name}"] = kernel
    whole = {
        f"{implementation}, save={save}": functools.partial(_whole, implementation, save)
        for implementation, saves in (
            ("reference", ("all",)),
            ("xla", ("all", "gate_up", "x")),
            ("mosaic_gpu", ("all", "gate_up", "x")),
        )
        for save in saves
    }
    weights = w_gate, w_up, w_down
    nine = [project, project, down, dproduct, dx, dx, dw, dw, dw_down]
    return [
        Part("projections", (x, w_gate, w_up), [project] * 2, projections),
        Part("gradients", (dy, w_down, gate, up), [dproduct], gradients),
        Part("mlp", (x, *weights, dy), nine, whole),
    ]


def _project_xla(x, w_gate, w_up):
    gate, up = x @ w_gate, x @ w_up
    product = formula.product(gate.astype(jnp.float32), up.astype(jnp.float32))
    return product.astype(x.dtype), gate, up


def _gradients_xla(dy, w_down, gate, up):
    in_float32 = (a.astype(jnp.float32) for a in (gate, up, dy @ w_down.T))
    return tuple(a.astype(dy.dtype) for a in formula.gradients(*in_float32))


def _gradients_kernels(dy, w_down, gate, up):
    product, vjp = jax.vjp(functools.partial(swiglu, implementation="mosaic_gpu"), gate, up)
    return *vjp(dy @ w_down.T), product


def _whole(implementation, save, *arrays):
    fn = functools.partial(swiglu_mlp, implementation=implementation, save=save)
    y, vjp = jax.vjp(fn, *arrays[:-1])
    return y, *vjp(arrays[-1])


def measure(part: Part, rounds: int) -> dict[str, Any]:
    """Times the ways of a part beside its GEMMs."""
    expected = agreement.of_first()
    cases = [agreement.compiled(*way, part.inputs, expected) for way in part.ways.items()]
    del expected
    gemms = timing.Case("GEMMs", [lambda: [gemm() for gemm in part.gemms]])
    timings = timing.compare([gemms, *cases], rounds=rounds)
    return {
        "part": part.name,
        "gemms_ms": timings["GEMMs"].median_ms,
        "ways": [
            {"name": case.name, "temporary_bytes": case.temporary_bytes}
            | timings[case.name].summary()
            for case in cases
        ],
    }


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown with a section for each shape and part, the fastest way first."""
    lines = []
    for record in records:
        gemms = record["gemms_ms"]
        timed = [way for way in record["ways"] if "error" not in way]
        rows = [
            [
                way["name"],
                f"{way['median_ms']:.3f}",
                f"{way['median_ms'] / gemms:.3f}",
                f"{way['temporary_bytes'] / 2**20:.0f}",
            ]
            for way in sorted(timed, key=lambda way: way["median_ms"])
        ]
        rows += [[way["name"], way["error"]] for way in record["ways"] if "error" in way]
        header = ["", "ms", "over the GEMMs", "MiB beside arguments and results"]
        label = f"{shapes.label(record['shape'])}, {record['part']}"
        lines += [f"## {label}: GEMMs {gemms:.3f} ms", "", *tables.markdown(header, rows), ""]
    return "\n".join(lines)


# The columns of the summary: a part, the way of the kernels, and XLA's way for the same arrays.
_COMPARED = (
    ("projections", "kernel, gate and up kept", "XLA, gate and up kept"),
    ("gradients", "kernel", "XLA"),
    ("mlp", "mosaic_gpu, save=gate_up", "xla, save=gate_up"),
)


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Markdown with a row for each shape: times over the GEMMs, the kernels' and XLA's."""
    by_shape: dict[Shape, dict[str, dict[str, Any]]] = {}
    for record in records:
        by_shape.setdefault(tuple(record["shape"]), {})[record["part"]] = record
    rows = [
        [shapes.label(shape)]
        + [
            f"{_over_gemms(by_part.get(part), kernel)} ({_over_gemms(by_part.get(part), xla)})"
            for part, kernel, xla in _COMPARED
        ]
        for shape, by_part in by_shape.items()
    ]
    parts = ["gate, up and product", "dgate, dup and product", "forward and backward"]
    title = "## All shapes: time over the GEMMs, by the kernels (by XLA)"
    lines = [title, "", *tables.markdown(["tokens x D x F", *parts], rows)]
    return "\n".join(lines) + "\n"


def _over_gemms(record: dict[str, Any] | None, name: str) -> str:
    """The time of a way over that of the GEMMs, or a dash if there is none."""
    if record is None:
        return "-"
    for way in record["ways"]:
        if way["name"] == name and "error" not in way:
            return f"{way['median_ms'] / record['gemms_ms']:.3f}"
    return "-"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, writes and prints."""
    parser = command.parser("benchmarks.kernels.mlp", __doc__)
    parser.add_argument("--shapes", nargs="+", type=shapes.parse, default=list(SHAPES))
    parser.add_argument("--parts", nargs="+", choices=("projections", "gradients", "mlp"))
    parser.add_argument("--sweep", action="store_true", help="more launch parameters")
    command.add_results(parser)
    args = parser.parse_args(argv)
    run = command.Run.start(parser, argv, args.rounds)
    records, text = [], ""
    for shape in args.shapes:
        for part in parts(shape, sweep=args.sweep):
            if args.parts and part.name not in args.parts:
                continue
            print(f"{shapes.label(shape)} {part.name} ...", file=sys.stderr, flush=True)
            records.append({"shape": list(shape)} | measure(part, args.rounds))
        text = run.heading("swiglu_mlp") + table(records) + "\n" + summary(records)
        run.write(args.output_dir, "swiglu_mlp", records, text)
    print(text)


if __name__ == "__main__":
    main()
