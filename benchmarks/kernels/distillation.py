"""Times the distillation losses with their gradients against their bare matrix products.

    python -m benchmarks.kernels.distillation --shapes 8192x2048x4096x128256 --peers

A shape is tokens x hidden size x hidden size of the teacher x vocabulary. Data is random and
bfloat16, and the gradient of the student's weight is float32. Times are kernel times
(`benchmarks/timing.py`), medians over interleaved rounds. The same rounds measure the bare products
of the same shapes: the logits of student and teacher, dx and dweight. A loss alone is compared with
the first two, and a teacher of stored log-probabilities with the three of the student. Memory is
counted beside arguments and results: by XLA's `memory_analysis`, and for PyTorch as the peak above
the memory allocated before. The gradients of PyTorch are bfloat16. Before a setting is timed, its
loss and gradients are compared with those of all logits in float32. The program writes a table and
all numbers into the folder of results.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import agreement, command, peers, tables
from benchmarks.kernels import shapes
from benchmarks.kernels.formulas import LINEAR_JENSEN_SHANNON, Arrays
from benchmarks.kernels.loss import beside_products, gemms
from benchmarks.kernels.shapes import Shape
from pallas_kernels import linear_distillation_loss, linear_distillation_loss_top_k

# Llama 3.2 1B, taught by Llama 3.1 8B; a narrower teacher; and a smaller vocabulary.
SHAPES: tuple[Shape, ...] = (
    (8192, 2048, 4096, 128256),
    (8192, 2048, 3072, 128256),
    (8192, 2048, 4096, 32000),
)
_K = 64
_SOFTCAP = 30.0  # Gemma 2
_LOGITS, _DX, _DWEIGHT, _TEACHER_LOGITS = range(4)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to compute a loss.

    Attributes:
      name: Name in the table.
      loss: Function `(x, weight, *teacher) -> loss`.
      formula: Function of the same arguments with all logits in float32, to compare with.
      gradients: Whether to compute the gradients.
      of_top_k: Whether the teacher is `(log_probs, ids)`.
    """

    name: str
    loss: Callable[..., jax.Array]
    formula: Callable[..., jax.Array]
    gradients: bool = True
    of_top_k: bool = False

    @property
    def products(self) -> tuple[int, ...]:
        """The products with which the setting is compared."""
        found = (_LOGITS,) if self.of_top_k else (_LOGITS, _TEACHER_LOGITS)
        return (*found, _DX, _DWEIGHT) if self.gradients else found

    def program(self, loss: Callable[..., jax.Array]) -> Callable[..., Any]:
        """The function to compile."""
        if not self.gradients:
            return loss
        graded = jax.value_and_grad(loss, argnums=(0, 1))
        return lambda x, weight, *teacher: graded(x, weight.astype(jnp.float32), *teacher)


def _log_softmax(x, weight, bias: Any = 0.0, softcap=None):
    logits = jnp.einsum("td,vd->tv", x, weight.astype(x.dtype), preferred_element_type=jnp.float32)
    logits += bias
    logits = logits if softcap is None else softcap * jnp.tanh(logits / softcap)
    return jax.nn.log_softmax(logits, axis=-1)


def _biases(x, teacher_x, vocab_size):
    """Biases of student and teacher. The student's is made of `x`, so that it has a gradient."""
    wave = jnp.cos(jnp.arange(vocab_size, dtype=jnp.float32))
    return tuple(a[0, 0].astype(jnp.float32) * wave for a in (x, teacher_x))


def _capped_loss(x, weight, teacher_x, teacher_weight, **options):
    bias, teacher_bias = _biases(x, teacher_x, len(weight))
    return linear_distillation_loss(
        x,
        weight,
        teacher_x,
        teacher_weight,
        bias=bias,
        teacher_bias=teacher_bias,
        logit_softcap=_SOFTCAP,
        teacher_logit_softcap=_SOFTCAP,
        **options,
    )


def _all_logits(
    x, weight, teacher_x, teacher_weight, divergence="forward_kl", capped: bool = False
):
    student, teacher = (), ()
    if capped:
        student, teacher = ((b, _SOFTCAP) for b in _biases(x, teacher_x, len(weight)))
    log_p = _log_softmax(x, weight, *student)
    log_q = jax.lax.stop_gradient(_log_softmax(teacher_x, teacher_weight, *teacher))
    p, q = jnp.exp(log_p), jnp.exp(log_q)
    match divergence:
        case "forward_kl":
            terms = q * (log_q - log_p)
        case "reverse_kl":
            terms = p * (log_p - log_q)
        case _:
            log_m = jnp.log((p + q) / 2)
            terms = (q * (log_q - log_m) + p * (log_p - log_m)) / 2
    return jnp.sum(terms) / len(x)


def _all_logits_of_top_k(x, weight, log_probs, ids):
    log_p = _log_softmax(x, weight)
    top = jnp.take_along_axis(log_p, ids, axis=-1)
    is_top = jnp.zeros(log_p.shape, bool).at[jnp.arange(len(x))[:, None], ids].set(True)
    tail = jax.nn.logsumexp(jnp.where(is_top, -jnp.inf, log_p), axis=-1)
    q, rest = jnp.exp(log_probs), 1 - jnp.sum(jnp.exp(log_probs), axis=-1)
    losses = jnp.sum(q * (log_probs - top), axis=-1) + rest * (jnp.log(rest) - tail)
    return jnp.mean(losses)


def _dense(name: str, *, gradients: bool = True, capped: bool = False, **options: Any) -> Setting:
    loss = functools.partial(_capped_loss if capped else linear_distillation_loss, **options)
    divergence = options.get("divergence", "forward_kl")
    formula = functools.partial(_all_logits, divergence=divergence, capped=capped)
    return Setting(name, loss, formula, gradients)


_OF_TOP_K = functools.partial(linear_distillation_loss_top_k, implementation="xla")
SETTINGS = (
    _dense("forward KL"),
    _dense("reverse KL", divergence="reverse_kl"),
    _dense("Jensen-Shannon", divergence="jensen_shannon"),
    _dense("forward KL, biases and softcaps", capped=True),
    _dense("Jensen-Shannon, biases and softcaps", capped=True, divergence="jensen_shannon"),
    _dense("forward KL, loss alone", gradients=False),
    _dense("forward KL, XLA passes", implementation="xla"),
    _dense("Jensen-Shannon, XLA passes", divergence="jensen_shannon", implementation="xla"),
    _dense("forward KL, chunks of 512", chunk_size=512),
    _dense("forward KL, chunks of 768", chunk_size=768),
    _dense("forward KL, chunks of 1024", chunk_size=1024),
    _dense("forward KL, chunks of 2048", chunk_size=2048),
    _dense("Jensen-Shannon, chunks of 1024", divergence="jensen_shannon", chunk_size=1024),
    _dense("forward KL, float32 logits", logits_dtype=jnp.float32),
    Setting(f"top {_K}, one bucket", _OF_TOP_K, _all_logits_of_top_k, of_top_k=True),
    Setting("all logits", _all_logits, _all_logits),
)


def products(shape: Shape) -> list[Callable[[], Any]]:
    """The bare matrix products: logits, dx and dweight of the student, logits of the teacher."""
    tokens, hidden, teacher_hidden, vocab = shape
    return [*gemms((tokens, hidden, vocab)), gemms((tokens, teacher_hidden, vocab))[0]]


def _arguments(shape: Shape) -> tuple[Any, Any]:
    """The arguments of the losses, without and with a teacher of stored log-probabilities."""
    tokens, hidden, teacher_hidden, vocab = shape
    keys = jax.random.split(jax.random.key(0), 5)
    array = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)
    x, weight = array(keys[0], tokens, hidden), array(keys[1], vocab, hidden) / 50
    teacher = array(keys[2], tokens, teacher_hidden), array(keys[3], vocab, teacher_hidden) / 50
    k = min(_K, vocab - 1)
    # Random log-probabilities of tokens that have 90 % of the probability.
    log_probs = jax.nn.log_softmax(jax.random.normal(keys[4], (tokens, k))) + jnp.log(0.9)
    ids = (jnp.arange(tokens)[:, None] + jnp.arange(k) * (vocab // k)) % vocab
    return (x, weight, *teacher), (x, weight, log_probs, ids)


_JENSEN_SHANNON = next(s for s in SETTINGS if s.name == "Jensen-Shannon")


def measure(
    shape: Shape, settings: Sequence[Setting], *, with_peers: bool = False, rounds: int
) -> list[dict[str, Any]]:
    """One record for each setting at a shape, and for each peer."""
    bare = products(shape)  # before peers take memory, which PyTorch keeps
    arguments = _arguments(shape)
    cases = []
    of_names = {setting.name: setting.products for setting in settings}
    for setting in settings:
        args = arguments[setting.of_top_k]
        formula = functools.partial(jax.jit(setting.program(setting.formula)), *args)
        expected = lambda got, formula=formula: jax.tree.leaves(formula())
        cases.append(
            agreement.compiled(setting.name, setting.program(setting.loss), args, expected)
        )
    if with_peers:
        arrays: Arrays = dict(zip(LINEAR_JENSEN_SHANNON.inputs, arguments[0], strict=True))
        program = _JENSEN_SHANNON.program(_JENSEN_SHANNON.formula)
        expected = jax.tree.leaves(jax.jit(program)(*arguments[0]))
        peers.reset()
        for peer in peers.peers_of("linear_jensen_shannon"):
            name = f"{peer.name}, Jensen-Shannon"
            of_names[name] = _JENSEN_SHANNON.products
            cases.append(peers.case_of(peer, name, arrays, "forward+backward", expected))
        del expected
    timings, limits = beside_products(bare, cases, of_names, rounds)
    records = []
    for case in cases:
        measured, limit = timings[case.name], limits[case.name]
        record: dict[str, Any] = {"shape": list(shape), "setting": case.name}
        record |= measured.summary()
        if measured.error is None:
            record |= {"num_products": len(of_names[case.name]), "products_ms": limit}
            record |= {"over_products": measured.median_ms / limit}
            record |= {"temporary_bytes": case.temporary_bytes}
        records.append(record)
    return records


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown tables, a section for each shape."""
    lines = []
    for shape in dict.fromkeys(tuple(r["shape"]) for r in records):
        rows = [
            [r["setting"], r["error"]]
            if "error" in r
            else [
                r["setting"],
                f"{r['median_ms']:.1f}",
                f"{r['num_products']}: {r['products_ms']:.1f} ms",
                f"{r['over_products']:.3f}",
                f"{r['temporary_bytes'] / 2**20:.0f}",
            ]
            for r in records
            if tuple(r["shape"]) == shape
        ]
        header = ["setting", "ms", "bare products", "over them", "MiB beside arguments and results"]
        lines += [f"## {shapes.label(shape)}", "", *tables.markdown(header, rows), ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, writes the results and prints them."""
    parser = command.parser("benchmarks.kernels.distillation", __doc__)
    command.add_settings(parser, SHAPES, SETTINGS)
    args = parser.parse_args(argv)
    if wrong := [shapes.label(shape) for shape in args.shapes if len(shape) != 4]:
        parser.error(f"--shapes {' '.join(wrong)}: tokens x hidden x teacher's hidden x vocabulary")
    settings = [s for s in SETTINGS if not args.settings or s.name in args.settings]
    run = functools.partial(measure, settings=settings)
    command.run_settings(parser, argv, args, "distillation", "Distillation losses", run, table)


if __name__ == "__main__":
    main()
