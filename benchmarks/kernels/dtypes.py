"""Times the linear cross-entropy for every pair of dtypes of `x` and weight, with its memory.

    python -m benchmarks.kernels.dtypes --shape 8192x4096x128256

Each row is a loss with the gradients of `x` and weight, which have the dtypes of their arguments.
The plan is the one that the loss chooses by default, unless the row names an option. Times are
kernel times (`benchmarks/timing.py`), medians over rounds. Each loss takes turns with the three
bare matrix products of operands in the dtype of its `x`. Memory is counted beside arguments and
results, by XLA's `memory_analysis`. The error is the largest of loss, `dx` and `dweight`, as
`benchmarks/agreement.py` defines it, against XLA's loss of the same numbers in full float32.

The precision is `jax.default_matmul_precision`. It changes float32 products alone: XLA multiplies
16-bit operands exactly, whatever it is.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import agreement, command, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.loss import gemms
from benchmarks.kernels.shapes import Shape
from pallas_kernels import linear_cross_entropy, linear_cross_entropy_plan

DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table.

    Attributes:
      x: Dtype of the hidden states.
      weight: Dtype of the weight.
      precision: Value of `jax.default_matmul_precision`, or None to leave it.
      options: Options of the loss.
    """

    x: str
    weight: str
    precision: str | None = None
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """The first cells of the row."""
        options = [f"{name}={value}" for name, value in self.options]
        if self.precision is not None:
            options.append(f"precision {self.precision!r}")
        return f"{self.x} | {self.weight} | {', '.join(options)}"


ROWS = (
    *(Row(x="bfloat16", weight=weight) for weight in DTYPES),
    Row(x="bfloat16", weight="bfloat16", options=(("accum_dtype", "bfloat16"),)),
    Row(x="bfloat16", weight="bfloat16", options=(("vocab_chunk_size", 2048),)),
    *(Row(x=x, weight=weight) for x in ("float16", "float32") for weight in DTYPES),
    Row(x="float32", weight="float32", precision="highest"),
)


def measure(shape: Shape, rows: Sequence[Row], rounds: int) -> Iterator[str]:
    """Yields the lines of a Markdown table, each as soon as it is measured."""
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 3)
    # Numbers that all three dtypes have, so that all rows compute the same.
    exactly = lambda a: a.astype(jnp.bfloat16).astype(jnp.float32)
    x = exactly(jax.random.normal(keys[0], (num_tokens, hidden_size)))
    weight = exactly(jax.random.normal(keys[1], (vocab_size, hidden_size)) / 50)
    weight = jnp.where(jnp.abs(weight) < 2**-14, 0, weight)
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size)

    def graded(x, weight, labels, **options):
        loss = lambda x, weight: linear_cross_entropy(x, weight, labels, **options)
        return jax.value_and_grad(loss, argnums=(0, 1))(x, weight)

    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(graded, implementation="xla"))(x, weight, labels)
    exact = jax.tree.leaves(exact)
    cast = functools.cache(lambda name, dtype: {"x": x, "weight": weight}[name].astype(dtype))
    yield "| x | weight | options | plan | ms | over three products | MiB | error |"
    yield "|---|---|---|---|---|---|---|---|"
    products: dict[Any, Callable[[], Any]] = {}
    for row in rows:
        arguments = cast("x", row.x), cast("weight", row.weight), labels
        options = dict(row.options)
        plan = linear_cross_entropy_plan(*arguments, **options)
        with jax.default_matmul_precision(row.precision):
            compiled = jax.jit(functools.partial(graded, **options)).lower(*arguments).compile()
        found = jax.tree.leaves(jax.block_until_ready(compiled(*arguments)))
        error = agreement.relative_error(found, exact)
        del found
        key = row.x, row.precision
        if key not in products:
            products.clear()  # 4 GiB of operands
            with jax.default_matmul_precision(row.precision):
                bare = gemms(shape, row.x)
            products[key] = lambda bare=bare: [gemm() for gemm in bare]
        timings = timing.compare(
            [
                timing.Case("loss", [functools.partial(compiled, *arguments)]),
                timing.Case("products", [products[key]]),
            ],
            rounds=rounds,
            calls_per_round=1,
        )
        ms, limit = timings["loss"].median_ms, timings["products"].median_ms
        yield (
            f"| {row.name} | {plan.name}, {plan.num_products} products | {ms:.1f} | "
            f"{ms / limit:.3f} | {agreement.temporary_bytes(compiled) / 2**20:.0f} | {error:.1e} |"
        )


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures and prints the table."""
    parser = command.parser("benchmarks.kernels.dtypes", __doc__)
    parser.add_argument("--shape", type=shapes.parse, default=(8192, 4096, 128256))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    device_kind = timing.require_gpu()
    print(f"{shapes.label(args.shape)} on {device_kind}, jax {jax.__version__}\n")
    for line in measure(args.shape, ROWS, args.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
