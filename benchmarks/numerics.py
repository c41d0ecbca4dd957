"""Errors of RMSNorm against float64: our kernel, plain JAX, and Hugging Face's formula.

    python -m benchmarks.numerics

Prints two tables in Markdown: over the hidden size, and of `dweight` over the number of tokens.
Inputs and outputs are bfloat16, the weight float32, so that the error of the sum is not hidden by
the rounding of its result. Errors are root mean squares, relative to that of the value. Off the GPU
the kernel is interpreted, which takes minutes.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import rms_norm

_EPS = 1e-6
_HIDDEN_SIZES = (128, 1024, 2880, 4096, 8192)
_TOKENS = (256, 1024, 4096, 16384)


def hugging_face(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The formula of transformers' LlamaRMSNorm; the result is rounded to the dtype of `x`."""
    hidden = x.astype(jnp.float32)
    hidden *= jax.lax.rsqrt(jnp.mean(jnp.square(hidden), axis=-1, keepdims=True) + _EPS)
    return (weight * hidden.astype(x.dtype).astype(jnp.float32)).astype(x.dtype)


def exact(x: Any, weight: Any, dy: Any) -> tuple[np.ndarray, ...]:
    """`(y, dx, dweight)` in float64."""
    x, weight, dy = (np.asarray(a, np.float64) for a in (x, weight, dy))
    rstd = 1 / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + _EPS)
    x_hat, dx_hat = x * rstd, dy * weight
    dx = rstd * (dx_hat - x_hat * np.mean(dx_hat * x_hat, axis=-1, keepdims=True))
    return x_hat * weight, dx, np.sum(dy * x_hat, axis=0)


def errors(num_tokens: int, hidden_size: int) -> dict[str, list[float]]:
    """Relative errors of `(y, dx, dweight)` by implementation."""
    keys = jax.random.split(jax.random.key(0), 3)
    x, dy = (jax.random.normal(key, (num_tokens, hidden_size), jnp.bfloat16) for key in keys[:2])
    weight = 1 + jax.random.normal(keys[2], (hidden_size,)) / 8
    norm = functools.partial(rms_norm, eps=_EPS)
    implementations = {
        "mosaic_gpu": functools.partial(norm, implementation="mosaic_gpu"),
        "reference": functools.partial(norm, implementation="reference"),
        "Hugging Face": hugging_face,
    }
    wanted = exact(x, weight, dy)
    found = {}
    for name, fn in implementations.items():
        y, vjp = jax.vjp(fn, x, weight)
        got = [np.asarray(a, np.float64) for a in (y, *vjp(dy))]
        found[name] = [
            float(np.sqrt(np.mean((g - w) ** 2) / np.mean(w**2)))
            for g, w in zip(got, wanted, strict=True)
        ]
    return found


def main() -> None:
    """Prints the tables."""
    on_gpu = jax.default_backend() == "gpu"
    with contextlib.nullcontext() if on_gpu else plgpu.force_gpu_interpret_mode():
        print("| D | " + " | ".join(f"{n}: y, dx, dweight" for n in errors(4, 64)) + " |")
        print("|---|---|---|---|")
        for hidden_size in _HIDDEN_SIZES:
            cells = [", ".join(f"{e:.1e}" for e in row) for row in errors(64, hidden_size).values()]
            print(f"| {hidden_size} | {' | '.join(cells)} |", flush=True)
        print("\n| tokens | " + " | ".join(f"{n}: dweight" for n in errors(4, 64)) + " |")
        print("|---|---|---|---|")
        for num_tokens in _TOKENS:
            cells = [f"{row[2]:.1e}" for row in errors(num_tokens, 128).values()]
            print(f"| {num_tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
