"""Times the quantization to FP8 against a copy of as many bytes.

    python -m benchmarks.kernels.quantize --shapes 16384x8192

The data are random numbers; times are kernel times (`benchmarks/timing.py`), the median over
interleaved rounds. The parts are:

- `given scale`: both memory orders, with a scale that the caller has. An element is read once and
  written twice.
- `tensor`: `quantize_both`, which first reads the array for its largest magnitude.
- `row`: `quantize_both` with a scale for each row and for each column.
- `one order, row`: `quantize` with a scale for each row, which reads and writes an element once.
- `swiglu, RECIPE`: the tensors that the backward of `fp8_swiglu_mlp` quantizes, from gate and up in
  int8 and the gradient of their product. Each array is read twice, and five are written. XLA
  computes the gradients in a pass of its own, and the kernel of `quantize_both` follows.

Before a part is timed, its results are compared with those of XLA. One value in 100,000 of all
results together may differ, and a scale by a millionth. The benchmark writes a table and all
numbers into the folder of results.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import agreement, command, tables, timing
from benchmarks.kernels import ops, shapes
from benchmarks.kernels.shapes import Shape
from pallas_kernels import require_kernels
from pallas_kernels.fp8 import (
    RECIPES,
    Recipe,
    mlp,
    mosaic_gpu,
    quantize,
    quantize_both,
    quantize_transposed,
    reference,
)
from pallas_kernels.fp8.casts import Axes
from pallas_kernels.fp8.types import E4M3, BlockwiseInt8
from pallas_kernels.mlp.reference import swiglu_gradients

# Tokens x hidden or intermediate size of Llama 1B and 8B, and a weight.
SHAPES: tuple[Shape, ...] = ((16384, 2048), (16384, 8192), (8192, 14336), (2048, 8192))


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to quantize.

    Attributes:
      part: Name of the part, whose first way is XLA's.
      name: Name in the table.
      fn: Function of arrays; it returns a pytree of arrays.
      num_arrays: Number of arrays.
      num_int8: Number of the first arrays that the function takes in int8.
    """

    part: str
    name: str
    fn: Callable[..., Any]
    num_arrays: int = 1
    num_int8: int = 0


def ways() -> list[Way]:
    """The ways to compare, XLA's first in each part."""
    one = functools.partial(jnp.full, (), 1 / 64, jnp.float32)
    found = [
        Way("given scale", "XLA", lambda x: reference.values_of_both(x, one(), one(), E4M3)),
        Way("given scale", "kernel", lambda x: mosaic_gpu.quantize(x, one(), one(), E4M3)),
    ]
    for part, fn in (
        ("tensor", functools.partial(quantize_both, scaling="tensor")),
        ("row", functools.partial(quantize_both, scaling="row")),
        ("one order, row", functools.partial(quantize, scaling="row")),
    ):
        found.append(Way(part, "XLA", functools.partial(fn, implementation="reference")))
        found.append(Way(part, "kernel", functools.partial(fn, implementation="mosaic_gpu")))
    for recipe in ("tensorwise", "rowwise"):
        for name, fn in (("XLA", swiglu_in_pieces), ("kernel", swiglu_by_kernels)):
            fn = functools.partial(fn, RECIPES[recipe])
            found.append(Way(f"swiglu, {recipe}", name, fn, num_arrays=3, num_int8=2))
    return found


def swiglu_by_kernels(
    recipe: Recipe, gate: BlockwiseInt8, up: BlockwiseInt8, dproduct: jax.Array
) -> Any:
    """All FP8 copies that the backward of `fp8_swiglu_mlp` needs, by its two kernels."""
    with require_kernels():
        return mlp.swiglu_backward(gate, up, dproduct, recipe, (True,) * 4, Axes())


def swiglu_in_pieces(
    recipe: Recipe, gate: BlockwiseInt8, up: BlockwiseInt8, dproduct: jax.Array
) -> Any:
    """The same from gradients that XLA computes, each quantized by itself."""
    found = swiglu_gradients(gate.dequantize(), up.dequantize(), dproduct)
    # XLA would compute the gradients again for each of their readers.
    dgate, dup, product = jax.lax.optimization_barrier(found)
    cast, of_product = recipe.gradients, recipe.inputs
    both = functools.partial(quantize_both, dtype=cast.dtype, scaling=cast.scaling)
    transposed = quantize_transposed(product, of_product.dtype, scaling=of_product.scaling)
    return both(dgate), both(dup), transposed


def measure(shape: Shape, dtype: str, found: Sequence[Way], rounds: int) -> dict[str, Any]:
    """Times the ways beside a copy of the bytes that `given scale` moves."""
    num_sets = max(3, timing.rotation(int(np.prod(shape)) * (jnp.dtype(dtype).itemsize + 2)))
    keys = jax.random.split(jax.random.key(0), num_sets)
    inputs = [jax.random.normal(key, shape, dtype) for key in keys]
    in_int8 = []
    if any(way.num_int8 for way in found):
        in_int8 = [jax.jit(reference.blockwise_int8)(a) for a in inputs]

    def arguments(way: Way, i: int) -> list[Any]:
        """The arguments of call `i`, which begins with array `i`."""
        dtypes = [in_int8] * way.num_int8 + [inputs] * (way.num_arrays - way.num_int8)
        return [arrays[(i + j) % num_sets] for j, arrays in enumerate(dtypes)]

    num_bytes = inputs[0].nbytes + 2 * inputs[0].size
    expected: dict[str, Any] = {}
    cases = []
    for way in found:
        fn = jax.jit(way.fn)
        calls = [functools.partial(fn, *arguments(way, i)) for i in range(num_sets)]
        wrong = lambda got, way=way: difference(got, expected.setdefault(way.part, got))
        prepare = lambda calls=calls: calls
        cases.append(agreement.checked(f"{way.part}, {way.name}", prepare, wrong))
    del expected
    timings, copied = ops.compare_with_copy(ops.copy(num_bytes), cases, rounds)
    return {
        "shape": list(shape),
        "dtype": dtype,
        "bytes": num_bytes,
        "copy_ms": copied.median_ms,
        "ways": {name: timings[name].summary() for name in timings},
    }


def difference(got: Any, expected: Any) -> str | None:
    """How results differ by more than they may, or None."""
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return "wrong result: a shape differs"
    values = [pair for pair in pairs if pair[0].dtype.itemsize == 1]
    scales = [pair for pair in pairs if pair[0].dtype.itemsize != 1]
    different = sum(int(jnp.sum(a.view(jnp.uint8) != b.view(jnp.uint8))) for a, b in values)
    if different > sum(a.size for a, _ in values) // 100_000:
        return f"wrong result: {different} values differ"
    errors = [float(jnp.max(jnp.abs(a / b - 1))) for a, b in scales]
    wrong = [error for error in errors if not error < 1e-6]  # NaN is wrong, too
    return f"wrong result: a scale differs by {wrong[0]:.1e} of itself" if wrong else None


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown with a row for each way."""
    rows = []
    for record in records:
        label = f"{shapes.label(record['shape'])} {record['dtype']}"
        ways = {"copy": {"median_ms": record["copy_ms"]}} | record["ways"]
        for name, way in ways.items():
            if "error" in way:
                rows.append([label, name, way["error"]])
                continue
            ms = way["median_ms"]
            rate = record["bytes"] / ms / 1e6
            over = f"{ms / record['copy_ms']:.2f}"
            rows.append([label, name, f"{1e3 * ms:.1f}", over, f"{rate:.0f}"])
    lines = tables.markdown(["shape", "way", "us", "over the copy", "GB/s"], rows)
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, writes and prints."""
    parser = command.parser("benchmarks.kernels.quantize", __doc__)
    parser.add_argument("--shapes", nargs="+", type=shapes.parse, default=list(SHAPES))
    parser.add_argument(
        "--dtypes", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"]
    )
    command.add_results(parser)
    args = parser.parse_args(argv)
    run = command.Run.start(parser, argv, args.rounds)
    records = []
    for dtype in args.dtypes:
        for shape in args.shapes:
            print(f"{shapes.label(shape)} {dtype} ...", file=sys.stderr, flush=True)
            records.append(measure(shape, dtype, ways(), args.rounds))
    note = " GB/s count the bytes of `given scale`."
    text = run.heading("Quantization to FP8", "Kernel time", note) + table(records)
    run.write(args.output_dir, "quantize", records, text)
    print(text)


if __name__ == "__main__":
    main()
