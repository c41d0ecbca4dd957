"""Times FP8 linear layers with their quantization, beside bare products in bfloat16 and in FP8.

    python -m benchmarks.kernels.fp8 --tokens 8192 16384 --layers 2048x8192 4096x14336

A layer is K x N. The data are random bfloat16 numbers; times are kernel times
(`benchmarks/timing.py`), the median over interleaved rounds. Each figure is a layer's time in
bfloat16 over its time in FP8, so above 1 FP8 is faster:

- `product`: one bare product. Its operands are quantized already. There is a figure for each kind
  of scale and of accumulation.
- `layer`: `fp8_linear` forward, and forward with both gradients, against the bare products in
  bfloat16. The time includes the casts of `x` and `dy`. Weights are quantized once a step, and that
  time is a column of its own.
- `mlp`: `fp8_swiglu_mlp` forward with all gradients, against `swiglu_mlp` in bfloat16.

Each result is compared with bfloat16's before it is timed. The tables come last.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp

from benchmarks import agreement, command, timing
from pallas_kernels import swiglu_mlp
from pallas_kernels.fp8 import (
    RECIPES,
    Recipe,
    Scaling,
    fp8_linear,
    fp8_matmul,
    fp8_swiglu_mlp,
    quantize,
    quantize_weight,
)

# The products of 1B and 8B: attention's output, one projection of the MLP, and its down projection.
LAYERS = ("2048x2048", "2048x8192", "8192x2048", "4096x4096", "4096x14336", "14336x4096")
# The relative error that two operands with 3 mantissa bits make, with a margin; e5m2 has 2. The MLP
# has two layers one after the other, so 2 ** 0.5 times that.
_MAX_ERROR = 0.08
_MAX_ERROR_OF_MLP = 0.113
# Every layer, however small.
_EVERY = {name: dataclasses.replace(r, least_size=0) for name, r in RECIPES.items()}


def normal(seed: int, *shape: int) -> jax.Array:
    """Random bfloat16 numbers."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def compare(
    ways: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]],
    rounds: int,
    max_error: float = _MAX_ERROR,
) -> dict[str, timing.Timing]:
    """Times ways to compute the result of the first, after they are checked against it."""
    expected = agreement.of_first()
    cases = [
        agreement.compiled(name, fn, args, expected, limit=max_error)
        for name, (fn, args) in ways.items()
    ]
    del expected
    return timing.compare(cases, rounds=rounds, calls_per_round=3)


def products(tokens: int, k: int, n: int, rounds: int) -> dict[str, timing.Timing]:
    """One product `[T, K] @ [N, K].T`, with row scales and with tensor scales."""
    x, w = normal(0, tokens, k), normal(1, n, k)
    ways: dict[str, Any] = {"bf16": (lambda a, b: a @ b.T, (x, w))}
    for scaling in get_args(Scaling.__value__):
        operands = tuple(jax.jit(lambda a, s=scaling: quantize(a, scaling=s))(a) for a in (x, w))
        for accumulation in ("fast", "promoted"):
            fn = functools.partial(fp8_matmul, accumulation=accumulation)
            ways[f"{scaling} {accumulation}"] = fn, operands
    return compare(ways, rounds)


def with_gradients(fn: Callable[..., Any], *args: Any) -> Any:
    """`(y, gradients)` of `y = fn(*args[:-1])`; the last argument is the gradient of `y`."""
    y, vjp = jax.vjp(fn, *args[:-1])
    return y, vjp(args[-1])


def layers(tokens: int, k: int, n: int, rounds: int) -> dict[str, timing.Timing]:
    """A linear layer forward (`f`), and forward with both gradients (`f+b`)."""
    x, w, dy = normal(0, tokens, k), normal(1, k, n) * 0.02, normal(2, tokens, n)
    bf16 = lambda x, w: x @ w
    both: dict[str, Any] = {"bf16 f+b": (functools.partial(with_gradients, bf16), (x, w, dy))}
    forward: dict[str, Any] = {"bf16 f": (bf16, (x, w))}
    casts = []
    for name, recipe in _EVERY.items():

        def graded(x: Any, w: Any, dy: Any, copies: Any, recipe: Recipe = recipe) -> Any:
            of = lambda w: dataclasses.replace(copies, weight=w)
            return with_gradients(lambda x, w: fp8_linear(x, of(w), recipe=recipe), x, w, dy)

        def cast(w: jax.Array, recipe: Recipe = recipe) -> Any:
            quantized = quantize_weight(w, recipe)
            return quantized.forward, quantized.dgrad

        prepared = jax.jit(functools.partial(quantize_weight, recipe=recipe))(w)
        both[f"{name} f+b"] = graded, (x, w, dy, prepared)
        forward[f"{name} f"] = functools.partial(fp8_linear, recipe=recipe), (x, prepared)
        casts.append(timing.Case(f"weight {name}", [functools.partial(jax.jit(cast), w)]))
    timings = compare(both, rounds) | compare(forward, rounds)
    return timings | timing.compare(casts, rounds=rounds)


def mlps(tokens: int, d: int, f: int, rounds: int) -> dict[str, timing.Timing]:
    """The gated MLP forward with all gradients; `all` also counts the casts of weights."""
    x, dy = normal(0, tokens, d), normal(4, tokens, d)
    shapes = (d, f), (d, f), (f, d)
    weights = [normal(i, *s) * (1 / s[0]) ** 0.5 for i, s in enumerate(shapes, 1)]
    weights = [w.astype(jnp.bfloat16) for w in weights]
    ways: dict[str, Any] = {
        "bf16": (functools.partial(with_gradients, swiglu_mlp), (x, *weights, dy)),
    }
    for name, recipe in RECIPES.items():
        fn = functools.partial(fp8_swiglu_mlp, recipe=recipe)
        ways[name] = functools.partial(with_gradients, fn), (x, *weights, dy)
    return compare(ways, rounds, _MAX_ERROR_OF_MLP)


def main() -> None:
    """Measures and prints the tables."""
    parser = command.parser("benchmarks.kernels.fp8", __doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--layers", nargs="+", default=list(LAYERS))
    measure = {"product": products, "layer": layers, "mlp": mlps}
    parser.add_argument("--parts", nargs="+", choices=measure, default=list(measure))
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    kind = timing.require_gpu()
    tables = []
    for part in options.parts:
        for tokens in options.tokens:
            for layer in options.layers:
                k, n = map(int, layer.split("x"))
                if part == "mlp" and k >= n:
                    continue
                found = measure[part](tokens, k, n, options.rounds)
                tables.append(_lines(f"{part} {tokens}x{layer}", found, 2 * tokens * k * n))
                print(tables[-1], flush=True)
    print(f"\n{kind}, jax {jax.__version__}: ms, and bfloat16's time over it")
    print("\n".join(tables))


def _lines(title: str, found: dict[str, timing.Timing], flops: int) -> str:
    cells = []
    for name, result in found.items():
        if result.error is not None:
            cells.append(f"{name}: {result.error}")
            continue
        bases = (b for b in ("bf16", f"bf16 {name.split()[-1]}") if b in found)
        base = next((b for b in bases if found[b].error is None), None)
        ratio = f" ({found[base].median_ms / result.median_ms:.2f})" if base else ""
        rate = f" {flops / result.median_ms / 1e9:.0f}" if title.startswith("product") else ""
        cells.append(f"{name} {result.median_ms:.3f}{ratio}{rate}")
    return f"{title}: " + "; ".join(cells)


if __name__ == "__main__":
    main()
