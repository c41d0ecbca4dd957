"""Times a transformer of a user's own, whose layers run in a `jax.lax.scan`, on one GPU.

The variants are arrays that a layer keeps for its backward. The sizes are those of Llama 3.2 1B
without tied embeddings, with 4 rows of 4096 tokens. A call computes the loss and all gradients.

    python -m benchmarks.training.scanned_transformer --rounds 10
"""

import dataclasses
import random
import statistics
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import ceilings, command, tables, timing
from benchmarks.training import transformer

SIZES = transformer.Sizes(
    hidden=2048,
    intermediate=8192,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    vocabulary=128256,
    num_layers=16,
    dtype=jnp.bfloat16,
    has_mesh=False,
)
VARIANTS = {
    "everything, without `jax.checkpoint`": None,
    "`" + "`, `".join(transformer.KEPT) + "`": transformer.KEPT,
    "the same without `context`": tuple(n for n in transformer.KEPT if n != "context"),
}
ROWS, LENGTH = 4, 4096


def main() -> None:
    """Parses the command line, measures, prints and writes the table."""
    parser = command.parser("benchmarks.training.scanned_transformer", __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    device = timing.require_gpu()

    init = lambda: nnx.state(transformer.Transformer(SIZES, nnx.Rngs(0)), nnx.Param)
    params = jax.jit(init)()
    tokens = jax.random.randint(jax.random.key(0), (ROWS, LENGTH + 1), 0, SIZES.vocabulary)
    batch = tokens[:, :-1], tokens[:, 1:], jnp.zeros((ROWS, LENGTH), jnp.int32)
    programs = {}
    for name, kept in VARIANTS.items():
        gradients = transformer.gradients_of(dataclasses.replace(SIZES, kept=kept))
        programs[name] = jax.jit(gradients).lower(params, *batch).compile()
        loss, _ = jax.block_until_ready(programs[name](params, *batch))
        print(f"{name}: loss {loss:.4f}", flush=True)
    times: dict[str, list[float]] = {name: [] for name in programs}
    limit = ceilings.measure()
    order = random.Random(0)
    for _ in range(arguments.rounds):
        for name in order.sample(list(programs), len(programs)):
            start = time.perf_counter()
            jax.block_until_ready([programs[name](params, *batch) for _ in range(2)])
            times[name].append((time.perf_counter() - start) / 2 * 1e3)
    rows = [
        (
            name,
            f"{statistics.median(ms):.1f}",
            f"{min(ms):.1f} - {max(ms):.1f}",
            f"{programs[name].memory_analysis().temp_size_in_bytes / 2**30:.1f} GiB",
        )
        for name, ms in times.items()
    ]
    text = "\n".join(
        [
            f"{device}, jax {jax.__version__}; {limit}",
            "",
            *tables.markdown(("kept", "ms", "min - max", "temporaries"), rows),
            "",
            command.line("benchmarks.training.scanned_transformer"),
            "",
        ]
    )
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
