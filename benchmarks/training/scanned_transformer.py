"""Times a transformer of a user's own, whose layers run in a `jax.lax.scan`, on one GPU.

The variants are the arrays that a layer keeps for its backward, and the dtypes of its products. The
sizes are those of Llama 3.2 1B without tied embeddings, with 4 rows of 4096 tokens. A call computes
the loss and all gradients.

    python -m benchmarks.training.scanned_transformer --rounds 10
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import command, timing
from benchmarks.training import programs, transformer

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
_FP8_KEPT = (*transformer.KEPT, "fp8_x")
VARIANTS: dict[str, dict[str, Any]] = {
    "everything, without `jax.checkpoint`": {"kept": None},
    "names of the norms, the MLP and the attention": {"kept": transformer.KEPT},
    "the same without `context`": {"kept": tuple(n for n in transformer.KEPT if n != "context")},
    "`rowwise`: everything, without `jax.checkpoint`": {"kept": None, "fp8": "rowwise"},
    "`rowwise`: all names": {"kept": _FP8_KEPT, "fp8": "rowwise"},
    "`tensorwise`: all names": {"kept": _FP8_KEPT, "fp8": "tensorwise"},
}
ROWS, LENGTH = 4, 4096


def main() -> None:
    """Parses the command line, measures, prints and writes the table."""
    parser = command.parser("benchmarks.training.scanned_transformer", __doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    timing.require_gpu()

    init = lambda: nnx.state(transformer.Transformer(SIZES, nnx.Rngs(0)), nnx.Param)
    params = jax.jit(init)()
    tokens = jax.random.randint(jax.random.key(0), (ROWS, LENGTH + 1), 0, SIZES.vocabulary)
    batch = tokens[:, :-1], tokens[:, 1:], jnp.zeros((ROWS, LENGTH), jnp.int32)
    compiled = {}
    for name, changes in VARIANTS.items():
        gradients = transformer.gradients_of(dataclasses.replace(SIZES, **changes))
        compiled[name] = jax.jit(gradients).lower(params, *batch).compile()
        loss, _ = compiled[name](params, *batch)
        print(f"{name}: loss {loss:.4f}", flush=True)
    args = params, *batch
    programs.report(parser.prog, compiled, args, arguments.rounds, arguments.output)


if __name__ == "__main__":
    main()
