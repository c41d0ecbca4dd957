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

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import agreement, command, peers, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.formulas import SEQUENCES
from benchmarks.kernels.loss import gemms, random_arguments, records_of, table
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


def _all_logits(x, weight, labels):
    logits = jnp.einsum("td,vd->tv", x, weight.astype(x.dtype)).astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits, axis=-1)
    picked = jnp.take_along_axis(log_p, labels[:, None], axis=-1)[:, 0]
    return picked, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


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


_OF_SEQUENCES: dict[Kind, Callable[..., Any]] = {
    "policy loss": _clipped,
    "preference loss": _preference,
}


def _loss_of_sequences(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def loss(x, weight, labels, g, h):
        labels = labels.reshape(SEQUENCES, -1)
        x = x.reshape(*labels.shape, -1)
        return linear_token_loss(x, weight, labels, fn, _advantages(g), **options)

    return loss


def _gradients(
    name: str, entropy: bool = False, *, weight: str = "widened", **options: Any
) -> Setting:
    """Our log-probabilities, with entropies or without, and their gradients."""
    results = _log_probs(entropy, **_KERNELS, **options)
    return Setting(f"ours, {name}", "gradients", results, entropy, weight)


def _loss_of_tokens(
    name: str, entropy: bool = False, *, weight: str = "widened", **options: Any
) -> Setting:
    """Our loss of tokens, with entropies or without."""
    results = _token_loss(entropy, **_KERNELS, **options)
    return Setting(f"ours, {name}", "token loss", results, entropy, weight)


_KERNELS = {"implementation": "mosaic_gpu"}
_XLA = {"implementation": "xla"}
SETTINGS = (
    Setting("ours, log-probabilities alone", "value", _log_probs(False, **_KERNELS)),
    Setting("ours, entropies alone", "value", _log_probs(True, **_KERNELS), True),
    Setting("XLA chunks, entropies alone", "value", _log_probs(True, **_XLA), True),
    _gradients("log-probabilities"),
    _gradients("log-probabilities, logits of 32 MiB", max_logits_bytes=2**25),
    _gradients("log-probabilities, chunks of 2048", chunk_size=2048),
    _gradients("log-probabilities, bfloat16 dweight", weight="bfloat16"),
    _gradients("log-probabilities, frozen weight", weight="frozen"),
    _gradients("log-probabilities, kept exponentials", keep_exponentials=True),
    _gradients("entropies, kept exponentials", True, keep_exponentials=True),
    Setting("ours, losses of tokens", "gradients", _minus_losses(**_KERNELS)),
    _gradients("entropies", True),
    _gradients("entropies, softcap", True, logit_softcap=1e4),
    Setting("XLA chunks, entropies", "gradients", _log_probs(True, **_XLA), True),
    Setting("XLA, all logits, entropies", "gradients", _all_logits, True),
    _loss_of_tokens("token loss"),
    _loss_of_tokens("token loss, frozen weight", weight="frozen"),
    _loss_of_tokens("token loss with entropies", True),
    _loss_of_tokens("losses of single tokens", per_token=True),
    _loss_of_tokens("losses of single tokens with entropies", True, per_token=True),
    Setting("XLA chunks, token loss", "token loss", _token_loss(False, **_XLA)),
    *(
        Setting(f"{prefix}, {kind}", kind, _loss_of_sequences(fn, **options))
        for kind, fn in _OF_SEQUENCES.items()
        for prefix, options in (("ours", _KERNELS), ("XLA chunks", _XLA))
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
    if kind in _OF_SEQUENCES:
        results = _loss_of_sequences(_OF_SEQUENCES[kind], **_XLA)
    else:
        results = (_token_loss if kind == "token loss" else _log_probs)(entropy, **_XLA)
    return Setting("expected", kind, results, entropy)


def measure(
    shape: Shape, settings: Sequence[Setting], *, with_peers: bool = False, rounds: int
) -> list[dict[str, Any]]:
    """One record for each setting at a shape, and for each peer."""
    bare = gemms(shape)  # before peers take memory, which PyTorch keeps
    x, weight, labels = random_arguments(shape)
    g, h = (jax.random.normal(jax.random.key(seed), (len(x),)) for seed in (1, 2))
    arguments = x, weight, labels, g, h
    arrays = {"x": x, "weight": weight, "labels": labels, "dlog_probs": g, "dentropy": h}
    arrays["advantages"] = _advantages(g)
    cases: dict[str, timing.Case] = {}
    alone = {s.name for s in settings if s.kind == "value"}
    kinds: dict[tuple[Kind, bool], None] = dict.fromkeys((s.kind, s.entropy) for s in settings)
    for kind, entropy in kinds:
        # One kind at a time: a dweight has 2 GB at the first shape.
        expected = jax.tree.leaves(jax.jit(_expected(kind, entropy).program())(*arguments))
        for setting in settings:
            if (setting.kind, setting.entropy) == (kind, entropy):
                cases[setting.name] = agreement.compiled(
                    setting.name, setting.program(), arguments, lambda got, e=expected: e
                )
        if with_peers:
            peers.reset()
            op, what = _PEERS.get((kind, entropy), ("", ""))
            direction = "forward" if kind == "value" else "forward+backward"
            for peer in peers.peers_of(op):
                name = f"{peer.name}, {what}"
                cases[name] = peers.case_of(peer, name, arrays, direction, expected)
                alone |= {name} if kind == "value" else set()
        del expected
    ordered = [cases.pop(setting.name) for setting in settings]
    return records_of(shape, bare, [*ordered, *cases.values()], alone, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, writes the results and prints them."""
    parser = command.parser("benchmarks.kernels.log_probs", __doc__)
    command.add_settings(parser, [shapes.LOSS[0]], SETTINGS)
    args = parser.parse_args(argv)
    settings = [s for s in SETTINGS if not args.settings or s.name in args.settings]
    run = functools.partial(measure, settings=settings)
    command.run_settings(
        parser, argv, args, "log_probs", "linear_log_probs and linear_token_loss", run, table
    )


if __name__ == "__main__":
    main()
