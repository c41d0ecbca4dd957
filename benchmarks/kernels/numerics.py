"""Measures errors against float64 of RMSNorm, of the linear cross-entropy and of usual formulas.

    python -m benchmarks.kernels.numerics
    python -m benchmarks.kernels.numerics loss

For RMSNorm it prints two tables in Markdown: errors by hidden size, and the error of `dweight` by
number of tokens. Inputs and outputs are bfloat16. The weight is float32, so that rounding `dweight`
does not hide the error of its sum. For the loss it prints one table, by tokens in a chunk; inputs
are bfloat16 and `dweight` is float32. An error is the root mean square of the difference over that
of the exact value. Without a GPU the kernels are interpreted, which takes minutes, and the loss has
smaller shapes.
"""

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from benchmarks import command
from benchmarks.kernels.formulas import EPS
from benchmarks.kernels.loss import all_logits
from pallas_kernels import linear_cross_entropy, rms_norm

_HIDDEN_SIZES = (128, 1024, 2880, 4096, 8192)
_TOKENS = (256, 1024, 4096, 16384)
# (Tokens, hidden size, vocabulary size) and the chunk sizes, on a GPU and in the interpreter.
_LOSS_ON_GPU = (8192, 1024, 32000), (8192, 2048, 512, 128)
_LOSS_INTERPRETED = (256, 128, 500), (256, 128)


def hugging_face(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The formula of transformers' LlamaRMSNorm, with the result rounded to the dtype of `x`."""
    hidden = x.astype(jnp.float32)
    hidden *= jax.lax.rsqrt(jnp.mean(jnp.square(hidden), axis=-1, keepdims=True) + EPS)
    return (weight * hidden.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)


def exact(x: Any, weight: Any, dy: Any) -> tuple[np.ndarray, ...]:
    """`(y, dx, dweight)` in float64."""
    x, weight, dy = (np.asarray(a, np.float64) for a in (x, weight, dy))
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
    x_hat, dx_hat = x * rstd, dy * weight
    dx = rstd * (dx_hat - x_hat * np.mean(dx_hat * x_hat, axis=-1, keepdims=True))
    return x_hat * weight, dx, np.sum(dy * x_hat, axis=0)


_NORM = functools.partial(rms_norm, eps=EPS)
NORMS = {
    "mosaic_gpu": functools.partial(_NORM, implementation="mosaic_gpu"),
    "reference": functools.partial(_NORM, implementation="reference"),
    "Hugging Face": hugging_face,
}


def errors(num_tokens: int, hidden_size: int) -> list[list[float]]:
    """Relative errors of `(y, dx, dweight)` of each of `NORMS`."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(key, (num_tokens, hidden_size), jnp.bfloat16) for key in keys[:2])
    weight = 1 + jax.random.normal(keys[2], (hidden_size,)) / 8
    wanted = exact(x, weight, dy)
    found = []
    for fn in NORMS.values():
        y, vjp = jax.vjp(fn, x, weight)
        found.append(_relative_errors((y, *vjp(dy)), wanted))
    return found


def exact_loss(x: Any, weight: Any, labels: Any) -> tuple[np.ndarray, ...]:
    """`(loss, dx, dweight)` in float64."""
    x, weight = (np.asarray(a, np.float64) for a in (x, weight))
    rows = np.arange(len(x)), np.asarray(labels)
    logits = x @ weight.T
    picked = logits[rows]
    largest = logits.max(axis=1)
    dlogits = np.exp(logits - largest[:, None])
    sums = dlogits.sum(axis=1)
    loss = np.mean(np.log(sums) + largest - picked)
    dlogits /= sums[:, None]
    dlogits[rows] -= 1
    dlogits /= len(x)
    return loss, dlogits @ weight, dlogits.T @ x


def loss_errors(
    shape: tuple[int, int, int], chunk_sizes: tuple[int, ...]
) -> dict[str, list[list[float]]]:
    """Relative errors of `(loss, dx, dweight)` by implementation, a row for each chunk size."""
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num_tokens, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size)) / hidden_size**0.5
    # The numbers fit bfloat16; the dtype is float32 so that the gradient is float32, too.
    weight = jax.lax.reduce_precision(weight, 8, 7)
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size)
    loss = functools.partial(linear_cross_entropy, labels=labels)
    implementations = {
        "mosaic_gpu": functools.partial(loss, implementation="mosaic_gpu"),
        "its sums in bfloat16": functools.partial(
            loss, implementation="mosaic_gpu", accum_dtype=jnp.bfloat16
        ),
        "xla": functools.partial(loss, implementation="xla"),
        # As transformers computes the loss, with all logits in memory in the dtype of `x`.
        "all logits": functools.partial(all_logits, labels=labels),
    }
    wanted = exact_loss(x, weight, labels)
    found = {}
    for name, fn in implementations.items():
        sizes = [{"chunk_size": n} for n in chunk_sizes] if name != "all logits" else [{}]
        found[name] = []
        for options in sizes:
            value, gradients = jax.jit(
                jax.value_and_grad(functools.partial(fn, **options), argnums=(0, 1))
            )(x, weight)
            found[name].append(_relative_errors((value, *gradients), wanted))
    return found


def _relative_errors(got: Sequence[Any], wanted: Sequence[np.ndarray]) -> list[float]:
    return [
        float(np.sqrt(np.mean((np.asarray(g, np.float64) - w) ** 2) / np.mean(w**2)))
        for g, w in zip(got, wanted, strict=True)
    ]


def print_norms() -> None:
    """Prints both tables of RMSNorm, each row as soon as it is measured."""
    by_size = ((f"{size}", errors(64, size)) for size in _HIDDEN_SIZES)
    by_tokens = ((f"{n}", [row[2:] for row in errors(n, 128)]) for n in _TOKENS)
    for head, names, rows in (
        ("| D", "y, dx, dweight", by_size),
        ("\n| tokens", "dweight", by_tokens),
    ):
        print(f"{head} | {' | '.join(f'{norm}: {names}' for norm in NORMS)} |\n|---|---|---|---|")
        for label, found in rows:
            print(f"| {label} | {' | '.join(map(_cell, found))} |", flush=True)


def print_loss(*, on_gpu: bool) -> None:
    """Prints the table of the loss."""
    shape, chunk_sizes = _LOSS_ON_GPU if on_gpu else _LOSS_INTERPRETED
    found = loss_errors(shape, chunk_sizes)
    print(f"{' x '.join(map(str, shape))} (tokens x D x V)\n")
    print("| tokens in a chunk | " + " | ".join(f"{n}: loss, dx, dweight" for n in found) + " |")
    print("|---|---|---|---|---|")
    for i, chunk_size in enumerate(chunk_sizes):
        # `all logits` has one chunk, and so only the first row.
        cells = [_cell(rows[i]) if i < len(rows) else "" for rows in found.values()]
        print(f"| {chunk_size} | {' | '.join(cells)} |", flush=True)


def _cell(row: list[float]) -> str:
    return ", ".join(f"{error:.1e}" for error in row)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line and prints the tables."""
    parser = command.parser("benchmarks.kernels.numerics", __doc__)
    parser.add_argument("op", nargs="?", choices=("norms", "loss"), default="norms")
    op = parser.parse_args(argv).op
    # The interpreter's callbacks wait for JAX's threads, and one device has too few threads.
    jax.config.update("jax_num_cpu_devices", 8)
    on_gpu = jax.default_backend() == "gpu"
    with contextlib.nullcontext() if on_gpu else plgpu.force_gpu_interpret_mode():
        print_norms() if op == "norms" else print_loss(on_gpu=on_gpu)


if __name__ == "__main__":
    main()
