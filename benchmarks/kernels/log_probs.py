"""Times log-probabilities and losses made of them, over the bare matrix products of their shapes.

    python -m benchmarks.kernels.log_probs --shapes 8192x4096x128256

Data is random and bfloat16; the gradient of the weight is float32, unless a setting says otherwise.
Gradients are those for random cotangents of the log-probabilities, and of the entropies in the
settings with entropies. A loss of tokens is a sum of products with the same numbers. Times are
kernel times (`benchmarks/timing.py`), medians over interleaved rounds. The same rounds measure the
three bare GEMMs of the same shapes; results without gradients are compared with the first. Memory
is what XLA's `memory_analysis` counts beside arguments and results. The program writes a table and
all numbers into the folder of results.
"""

import argparse
import dataclasses
import functools
import gc
import importlib.metadata
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import agreement, ceilings, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.bench import short_name, write_results
from benchmarks.kernels.loss import gemms, table
from benchmarks.kernels.shapes import Shape
from pallas_kernels import linear_cross_entropy, linear_log_probs, linear_token_loss

type Kind = Literal["value", "gradients", "token loss"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to compute a quantity.

    Attributes:
      name: Name in the table.
      kind: `"value"` for results alone, `"gradients"` for results and gradients with cotangents
        that only the backward knows, `"token loss"` for a scalar and its gradients.
      results: Function `(x, weight, labels) -> (log_probs, entropy)`, the last None without
        entropies; for a token loss, `(x, weight, labels, g, h) -> loss`.
      entropy: Whether there are entropies.
      weight: Dtype of the weight and its gradient: `"widened"` is a float32 gradient of a bfloat16
        weight, `"bfloat16"` is bfloat16 for both.
    """

    name: str
    kind: Kind
    results: Callable[..., Any]
    entropy: bool = False
    weight: str = "widened"

    def program(self) -> Callable[..., Any]:
        """The function `(x, weight, labels, g, h)` to compile."""
        widened = lambda w: w.astype(jnp.float32) if self.weight == "widened" else w

        def value(x, weight, labels, g, h):
            return self.results(x, weight, labels)

        def gradients(x, weight, labels, g, h):
            fn = lambda x, weight: self.results(x, weight, labels)
            results, vjp = jax.vjp(fn, x, widened(weight))
            return results, vjp((g, h if self.entropy else None))

        def token_loss(x, weight, labels, g, h):
            fn = lambda x, weight: self.results(x, weight, labels, g, h)
            return jax.value_and_grad(fn, argnums=(0, 1))(x, widened(weight))

        return {"value": value, "gradients": gradients, "token loss": token_loss}[self.kind]


def _log_probs(entropy: bool, **options: Any) -> Callable[..., Any]:
    def results(x, weight, labels):
        found = linear_log_probs(x, weight, labels, return_entropy=entropy, **options)
        return found if entropy else (found, None)

    return results


def _minus_losses(**options: Any) -> Callable[..., Any]:
    def results(x, weight, labels):
        return -linear_cross_entropy(x, weight, labels, reduction="none", **options), None

    return results


def _all_logits(entropy: bool) -> Callable[..., Any]:
    def results(x, weight, labels):
        logits = jnp.einsum("td,vd->tv", x, weight.astype(x.dtype)).astype(jnp.float32)
        log_p = jax.nn.log_softmax(logits, axis=-1)
        picked = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
        return picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1) if entropy else None

    return results


def _sum_of_products(log_probs, entropy, data):
    g, h = data
    loss = jnp.sum(g * log_probs)
    return loss if entropy is None else loss + jnp.sum(h * entropy)


def _token_loss(entropy: bool, **options: Any) -> Callable[..., Any]:
    def loss(x, weight, labels, g, h):
        return linear_token_loss(
            x, weight, labels, _sum_of_products, (g, h), with_entropy=entropy, **options
        )

    return loss


_KERNELS = {"implementation": "mosaic_gpu"}
_XLA = {"implementation": "xla"}
SETTINGS = (
    Setting("ours, log-probabilities alone", "value", _log_probs(False, **_KERNELS)),
    Setting("ours, entropies alone", "value", _log_probs(True, **_KERNELS), True),
    Setting("XLA chunks, entropies alone", "value", _log_probs(True, **_XLA), True),
    Setting("ours, log-probabilities", "gradients", _log_probs(False, **_KERNELS)),
    Setting(
        "ours, log-probabilities, logits of 32 MiB",
        "gradients",
        _log_probs(False, max_logits_bytes=2**25, **_KERNELS),
    ),
    Setting(
        "ours, log-probabilities, chunks of 2048",
        "gradients",
        _log_probs(False, chunk_size=2048, **_KERNELS),
    ),
    Setting(
        "ours, log-probabilities, bfloat16 dweight",
        "gradients",
        _log_probs(False, **_KERNELS),
        weight="bfloat16",
    ),
    Setting("ours, losses of tokens", "gradients", _minus_losses(**_KERNELS)),
    Setting("ours, entropies", "gradients", _log_probs(True, **_KERNELS), True),
    Setting(
        "ours, entropies, softcap",
        "gradients",
        _log_probs(True, logit_softcap=1e4, **_KERNELS),
        True,
    ),
    Setting("XLA chunks, entropies", "gradients", _log_probs(True, **_XLA), True),
    Setting("XLA, all logits, entropies", "gradients", _all_logits(True), True),
    Setting("ours, token loss", "token loss", _token_loss(False, **_KERNELS)),
    Setting("ours, token loss with entropies", "token loss", _token_loss(True, **_KERNELS), True),
    Setting("XLA chunks, token loss", "token loss", _token_loss(False, **_XLA)),
)


def _expected(kind: Any, entropy: bool) -> Setting:
    """The setting whose results those of a kind must agree with."""
    results = (_token_loss if kind == "token loss" else _log_probs)(entropy, **_XLA)
    return Setting("expected", kind, results, entropy)


def measure(shape: Shape, settings: Sequence[Setting], *, rounds: int) -> list[dict[str, Any]]:
    """One record for each setting at a shape."""
    tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (tokens, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size), jnp.bfloat16) / 50
    labels = jax.random.randint(keys[2], (tokens,), 0, vocab_size)
    g, h = (jax.random.normal(key, (tokens,)) for key in keys[3:])
    arguments = x, weight, labels, g, h
    bare = gemms(shape)
    cases = [
        timing.Case("one GEMM", bare[:1]),
        timing.Case("three GEMMs", [lambda: [gemm() for gemm in bare]]),
    ]
    memory, refused = {}, {}
    for kind in dict.fromkeys((s.kind, s.entropy) for s in settings):
        # One kind at a time: a dweight has 2 GB at the first shape.
        expected = jax.tree.leaves(jax.jit(_expected(*kind).program())(*arguments))
        for setting in (s for s in settings if (s.kind, s.entropy) == kind):
            try:
                compiled = jax.jit(setting.program()).lower(*arguments).compile()
                result = jax.tree.leaves(jax.block_until_ready(compiled(*arguments)))
            except Exception as error:  # running out of memory is a result
                refused[setting.name] = timing.Timing(error=timing.first_line(error))
                continue
            error = agreement.relative_error(result, expected)
            del result
            if not error < agreement.LIMIT:  # also NaN
                wrong = f"wrong result: relative error {error:.1e}"
                refused[setting.name] = timing.Timing(error=wrong)
                continue
            analysis = compiled.memory_analysis()
            assert analysis is not None
            memory[setting.name] = analysis.temp_size_in_bytes
            cases.append(timing.Case(setting.name, [functools.partial(compiled, *arguments)]))
        del expected
    timings = timing.compare(cases, rounds=rounds, calls_per_round=1)
    limits = {name: timings.pop(name) for name in ("one GEMM", "three GEMMs")}
    records = []
    alone = {s.name for s in settings if s.kind == "value"}
    for name in (s.name for s in settings):
        measured = (timings | refused)[name]
        limit = limits["one GEMM" if name in alone else "three GEMMs"]
        record: dict[str, Any] = {"shape": list(shape), "setting": name} | measured.summary()
        if measured.error is None:
            record |= {"over_gemms": measured.median_ms / limit.median_ms}
            record |= {"gemms_ms": limit.median_ms, "temporary_bytes": memory[name]}
        records.append(record)
    return records


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, writes the results and prints them."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels.log_probs",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("--shapes", nargs="+", type=shapes.parse, default=[shapes.LOSS[0]])
    parser.add_argument("--settings", nargs="+", choices=[s.name for s in SETTINGS])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)

    device_kind = timing.require_gpu()
    settings = [s for s in SETTINGS if not args.settings or s.name in args.settings]
    found = [f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib")]
    command = f"python -m benchmarks.kernels.log_probs {shlex.join(argv)}".strip()
    title = (
        f"# linear_log_probs and linear_token_loss on {device_kind}\n\n"
        f"{time.strftime('%Y-%m-%d')}, {device_kind}, {', '.join(found)}. bfloat16, kernel time, "
        f"median of {args.rounds} interleaved rounds; {ceilings.measure()} by wall time.\n\n"
        f"    {command}\n\n"
    )
    records: list[dict[str, Any]] = []
    contents = {"device": device_kind, "versions": found, "command": command, "records": records}
    for shape in args.shapes:
        print(f"{shapes.label(shape)} ...", file=sys.stderr, flush=True)
        of_shape = measure(shape, settings, rounds=args.rounds)
        gc.collect()
        jax.clear_caches()
        # Written after each shape, so that a failure loses only one.
        records += of_shape
        text = title + table(records)
        write_results(args.output_dir, "log_probs", short_name(device_kind), contents, text)
        print(table(of_shape), flush=True)


if __name__ == "__main__":
    main()
