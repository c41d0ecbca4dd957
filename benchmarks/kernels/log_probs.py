"""Times log-probabilities and losses made of them, over the bare matrix products of their shapes.

    python -m benchmarks.kernels.log_probs --shapes 8192x4096x128256 --peers

Data is random and bfloat16; the gradient of the weight is float32, unless a setting says otherwise.
Gradients are those for random cotangents of the log-probabilities, and of the entropies in the
settings with entropies. A loss of tokens is a sum of products with the same numbers. The policy
loss is PPO's, of eight sequences with an advantage for each. The preference loss is DPO's, of four
pairs of sequences; the reference's log-probabilities are 0, so no time goes into a reference.

Times are kernel times (`benchmarks/timing.py`), medians over interleaved rounds. The same rounds
measure the three bare GEMMs of the same shapes; results without gradients are compared with the
first. Memory is counted beside arguments and results: by XLA's `memory_analysis`, and for PyTorch
as the peak above the memory allocated before. The gradients of PyTorch are bfloat16. The program
writes a table and all numbers into the folder of results.
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

from benchmarks import agreement, ceilings, peers, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.bench import short_name, write_results
from benchmarks.kernels.formulas import SEQUENCES
from benchmarks.kernels.loss import gemms, table
from benchmarks.kernels.shapes import Shape
from pallas_kernels import linear_cross_entropy, linear_log_probs, linear_token_loss
from pallas_kernels.log_probs.objectives import clipped_policy_loss, dpo_loss

type Kind = Literal["value", "gradients", "token loss", "policy loss", "preference loss"]


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to compute a quantity.

    Attributes:
      name: Name in the table.
      kind: `"value"` for results alone, `"gradients"` for results and gradients with cotangents
        that only the backward knows, `"token loss"`, `"policy loss"` and `"preference loss"` for a
        scalar and its gradients.
      results: Function `(x, weight, labels) -> (log_probs, entropy)`, the last None without
        entropies; for a loss, `(x, weight, labels, g, h) -> loss`.
      entropy: Whether there are entropies.
      weight: Dtype of the weight and its gradient: `"widened"` is a float32 gradient of a bfloat16
        weight, `"bfloat16"` is bfloat16 for both, and `"frozen"` a bfloat16 weight without one.
    """

    name: str
    kind: Kind
    results: Callable[..., Any]
    entropy: bool = False
    weight: str = "widened"

    def program(self) -> Callable[..., Any]:
        """The function `(x, weight, labels, g, h)` to compile."""
        widened = lambda w: w.astype(jnp.float32) if self.weight == "widened" else w
        # The weights that have a gradient.
        weights = lambda w: () if self.weight == "frozen" else (widened(w),)

        def value(x, weight, labels, g, h):
            return self.results(x, weight, labels)

        def gradients(x, weight, labels, g, h):
            fn = lambda x, w=weight: self.results(x, w, labels)
            results, vjp = jax.vjp(fn, x, *weights(weight))
            return results, vjp((g, h if self.entropy else None))

        def loss(x, weight, labels, g, h):
            fn = lambda x, w=weight: self.results(x, w, labels, g, h)
            args = x, *weights(weight)
            return jax.value_and_grad(fn, argnums=tuple(range(len(args))))(*args)

        return {"value": value, "gradients": gradients}.get(self.kind, loss)


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
    return jnp.sum(_products(log_probs, entropy, data))


def _products(log_probs, entropy, data):
    g, h = data
    losses = g * log_probs
    return losses if entropy is None else losses + h * entropy


def _token_loss(entropy: bool, **options: Any) -> Callable[..., Any]:
    fn = _products if options.get("per_token") else _sum_of_products

    def loss(x, weight, labels, g, h):
        return linear_token_loss(x, weight, labels, fn, (g, h), with_entropy=entropy, **options)

    return loss


def _advantages(g):
    return g[:SEQUENCES]


def _clipped(log_probs, entropy, advantages):
    of_tokens = jnp.broadcast_to(advantages[:, None], log_probs.shape)
    return clipped_policy_loss(log_probs, None, of_tokens, jnp.ones(log_probs.shape))


def _preference(log_probs, entropy, advantages):
    return dpo_loss(log_probs, jnp.zeros(log_probs.shape), jnp.ones(log_probs.shape))


def _loss_of_sequences(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def loss(x, weight, labels, g, h):
        labels = labels.reshape(SEQUENCES, -1)
        x = x.reshape(*labels.shape, -1)
        return linear_token_loss(x, weight, labels, fn, _advantages(g), **options)

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
    Setting(
        "ours, log-probabilities, frozen weight",
        "gradients",
        _log_probs(False, **_KERNELS),
        weight="frozen",
    ),
    Setting(
        "ours, log-probabilities, kept exponentials",
        "gradients",
        _log_probs(False, keep_exponentials=True, **_KERNELS),
    ),
    Setting(
        "ours, entropies, kept exponentials",
        "gradients",
        _log_probs(True, keep_exponentials=True, **_KERNELS),
        True,
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
    Setting(
        "ours, token loss, frozen weight",
        "token loss",
        _token_loss(False, **_KERNELS),
        weight="frozen",
    ),
    Setting("ours, token loss with entropies", "token loss", _token_loss(True, **_KERNELS), True),
    Setting(
        "ours, losses of single tokens",
        "token loss",
        _token_loss(False, per_token=True, **_KERNELS),
    ),
    Setting(
        "ours, losses of single tokens with entropies",
        "token loss",
        _token_loss(True, per_token=True, **_KERNELS),
        True,
    ),
    Setting("XLA chunks, token loss", "token loss", _token_loss(False, **_XLA)),
    Setting("ours, policy loss", "policy loss", _loss_of_sequences(_clipped, **_KERNELS)),
    Setting("XLA chunks, policy loss", "policy loss", _loss_of_sequences(_clipped, **_XLA)),
    Setting(
        "ours, preference loss", "preference loss", _loss_of_sequences(_preference, **_KERNELS)
    ),
    Setting(
        "XLA chunks, preference loss", "preference loss", _loss_of_sequences(_preference, **_XLA)
    ),
)
# The operation of `benchmarks/peers.py` of a kind with or without entropies, and the rows' names.
_PEERS = {
    ("value", False): ("linear_log_probs", "log-probabilities alone"),
    ("value", True): ("linear_log_probs_and_entropy", "entropies alone"),
    ("gradients", False): ("linear_log_probs", "log-probabilities"),
    ("gradients", True): ("linear_log_probs_and_entropy", "entropies"),
    ("policy loss", False): ("policy_loss", "policy loss"),
    ("preference loss", False): ("preference_loss", "preference loss"),
}


def _expected(kind: Kind, entropy: bool) -> Setting:
    """The setting whose results those of a kind must agree with."""
    match kind:
        case "token loss":
            results = _token_loss(entropy, **_XLA)
        case "policy loss":
            results = _loss_of_sequences(_clipped, **_XLA)
        case "preference loss":
            results = _loss_of_sequences(_preference, **_XLA)
        case _:
            results = _log_probs(entropy, **_XLA)
    return Setting("expected", kind, results, entropy)


def _wrong(result: list[jax.Array], expected: list[jax.Array]) -> timing.Timing | None:
    error = agreement.relative_error(result, expected)
    if error < agreement.LIMIT:  # not NaN
        return None
    return timing.Timing(error=f"wrong result: relative error {error:.1e}")


def _run_peers(
    kind: tuple[Kind, bool], arguments: Sequence[jax.Array], expected: list[jax.Array]
) -> dict[str, timing.Timing | tuple[timing.Case, int]]:
    """For each peer, the calls and their bytes, or why there are none."""
    op, what = _PEERS.get(kind, ("", ""))
    x, weight, labels, g, h = arguments
    arrays = {"x": x, "weight": weight, "labels": labels, "dlog_probs": g, "dentropy": h}
    arrays["advantages"] = _advantages(g)
    found = {}
    for peer in peers.peers_of(op):
        name = f"{peer.name}, {what}"
        try:
            direction = "forward" if kind[0] == "value" else "forward+backward"
            prepared = peers.prepare(peer, [arrays], direction)
            wrong = _wrong(list(peers.to_jax(prepared.calls[0]()).values()), expected)
            # The gradients have the dtypes of the arguments.
            results = 0 if direction == "forward" else x.nbytes + weight.nbytes
            case = timing.Case(name, prepared.calls)
            found[name] = wrong or (case, prepared.num_bytes() - results)
        except Exception as error:  # running out of memory is a result
            found[name] = timing.Timing(error=timing.first_line(error))
    return found


def measure(
    shape: Shape, settings: Sequence[Setting], *, with_peers: bool = False, rounds: int
) -> list[dict[str, Any]]:
    """One record for each setting at a shape, and for each peer."""
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
    names = [s.name for s in settings]
    alone = {s.name for s in settings if s.kind == "value"}
    kinds: dict[tuple[Kind, bool], None] = dict.fromkeys((s.kind, s.entropy) for s in settings)
    for kind in kinds:
        # One kind at a time: a dweight has 2 GB at the first shape.
        expected = jax.tree.leaves(jax.jit(_expected(*kind).program())(*arguments))
        for setting in (s for s in settings if (s.kind, s.entropy) == kind):
            try:
                compiled = jax.jit(setting.program()).lower(*arguments).compile()
                result = jax.tree.leaves(jax.block_until_ready(compiled(*arguments)))
            except Exception as error:  # running out of memory is a result
                refused[setting.name] = timing.Timing(error=timing.first_line(error))
                continue
            wrong = _wrong(result, expected)
            del result
            if wrong is not None:
                refused[setting.name] = wrong
                continue
            analysis = compiled.memory_analysis()
            assert analysis is not None
            memory[setting.name] = analysis.temp_size_in_bytes
            cases.append(timing.Case(setting.name, [functools.partial(compiled, *arguments)]))
        if with_peers:
            peers.reset()
            for name, ran in _run_peers(kind, arguments, expected).items():
                names.append(name)
                if kind[0] == "value":
                    alone.add(name)
                if isinstance(ran, timing.Timing):
                    refused[name] = ran
                else:
                    case, memory[name] = ran
                    cases.append(case)
        del expected
    timings = timing.compare(cases, rounds=rounds, calls_per_round=1)
    limits = {name: timings.pop(name) for name in ("one GEMM", "three GEMMs")}
    records = []
    for name in names:
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
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    args = parser.parse_args(argv)

    device_kind = timing.require_gpu()
    if args.peers and "torch" in peers.missing():
        sys.exit("--peers needs torch")
    settings = [s for s in SETTINGS if not args.settings or s.name in args.settings]
    packages = ("jax", "jaxlib", *(peers.PACKAGES if args.peers else ()))
    found = [f"{p} {importlib.metadata.version(p)}" for p in packages if p not in peers.missing()]
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
        of_shape = measure(shape, settings, with_peers=args.peers, rounds=args.rounds)
        gc.collect()
        jax.clear_caches()
        # Written after each shape, so that a failure loses only one.
        records += of_shape
        text = title + table(records)
        write_results(args.output_dir, "log_probs", short_name(device_kind), contents, text)
        print(table(of_shape), flush=True)


if __name__ == "__main__":
    main()
