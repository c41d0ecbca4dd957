"""Times the linear cross-entropy with its gradients against the memory it takes, by setting.

    python -m benchmarks.kernels.loss --shapes 8192x4096x128256 --peers

Data is random and bfloat16. Times are kernel times (`benchmarks/timing.py`), medians over
interleaved rounds. The same rounds measure the three bare GEMMs of the same shapes (logits, dx,
dweight); a loss alone is compared with the first. Memory is counted beside arguments and results:
by XLA's `memory_analysis`, and for PyTorch as the peak above the memory allocated before. The
program compares each loss and its gradients with those of XLA's chunks, and does not time a wrong
one (`benchmarks/agreement.py`). It writes a table and all numbers into the folder of results. With
`--chart X.png` it measures nothing: it draws time against memory of the first shape in the file
X.json.

    python -m benchmarks.kernels.loss --settings ours "ours, half of the rows" --ignored 0.5

measures the loss of a batch in which half of the labels are ignored.
"""

import dataclasses
import functools
import importlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import agreement, command, peers, tables, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.shapes import Shape
from pallas_kernels import LoRA, linear_cross_entropy


@dataclasses.dataclass(frozen=True)
class Setting:
    """A way to compute the loss.

    Attributes:
      name: Name in the table.
      loss: Function `(x, weight, labels) -> loss`.
      weight: Dtype of the weight and its gradient. `"widened"` is a float32 gradient of a bfloat16
        weight. `"float32"` is a float32 weight, which the program itself rounds for its GEMMs.
        `"bfloat16"` is bfloat16 for both, and `"frozen"` a bfloat16 weight without a gradient.
        `"lora"` is a frozen weight with an update of rank 16 that has gradients.
      gradients: Whether to compute the gradients.
      layout: Layout of the weight, as in `linear_cross_entropy`.
    """

    name: str
    loss: Callable[..., jax.Array]
    weight: str = "widened"
    gradients: bool = True
    layout: str = "vd"

    def with_layout(self, layout: str) -> "Setting":
        """This setting for a weight of another layout, which the loss must know."""
        if layout == self.layout:
            return self
        loss = functools.partial(self.loss, weight_layout=layout)
        name = f"{self.name}, weight [{', '.join(layout.upper())}]"
        return dataclasses.replace(self, name=name, loss=loss, layout=layout)

    def program(self) -> Callable[..., Any]:
        """The function to compile. It takes a float32 weight if the setting has one."""
        if not self.gradients:
            return self.loss
        if self.weight == "lora":
            return functools.partial(_low_rank, self.loss, self.layout.index("v"))
        argnums = (0,) if self.weight == "frozen" else (0, 1)
        with_gradients = jax.value_and_grad(self.loss, argnums=argnums)
        if self.weight != "widened":
            return with_gradients
        return lambda x, weight, labels: with_gradients(x, weight.astype(jnp.float32), labels)


def _ours(**options: Any) -> Callable[..., jax.Array]:
    return functools.partial(linear_cross_entropy, implementation="mosaic_gpu", **options)


def _low_rank(loss, vocab_axis, x, weight, labels):
    """The loss and the gradients of `x` and of both factors of an update, which is 0."""
    # XLA would leave out a constant 0.
    a, b = jnp.broadcast_to(0 * x[0, :16], (weight.shape[vocab_axis], 16)), x[:16]
    of_factors = lambda x, a, b: loss(x, LoRA(weight, a, b), labels)
    return jax.value_and_grad(of_factors, argnums=(0, 1, 2))(x, a, b)


def all_logits(x, weight, labels, weight_layout="vd"):
    """The loss with all logits in memory, in the dtype of `x`."""
    logits = jnp.einsum(f"td,{weight_layout}->tv", x, weight.astype(x.dtype)).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def _tokamax(x, weight, labels):
    tokamax = importlib.import_module("tokamax")
    return tokamax.linear_softmax_cross_entropy_loss(
        x, labels, weight, reduction="mean", implementation="chunked_xla"
    )


_XLA = Setting("XLA chunks", functools.partial(linear_cross_entropy, implementation="xla"))
SETTINGS = (
    Setting("ours", _ours()),
    Setting("ours, logits of 96 MiB", _ours(max_logits_bytes=3 * 2**25)),
    Setting("ours, logits of 32 MiB", _ours(max_logits_bytes=2**25)),
    Setting("ours, logits of 1 GiB", _ours(max_logits_bytes=2**30)),
    Setting("ours, chunks of 4096", _ours(chunk_size=4096)),
    Setting("ours, chunks of 2048", _ours(chunk_size=2048)),
    Setting("ours, chunks of 1024", _ours(chunk_size=1024)),
    Setting("ours, 2048 columns", _ours(vocab_chunk_size=2048), "float32"),
    Setting("ours, bfloat16 sums", _ours(accum_dtype=jnp.bfloat16), "bfloat16"),
    Setting("ours, bfloat16 dweight", _ours(), "bfloat16"),
    Setting("ours, loss alone", _ours(), gradients=False),
    Setting("ours, half of the rows", _ours(counted_fraction=0.5)),
    Setting("ours, frozen weight", _ours(), "frozen"),
    Setting("ours, LoRA", _ours(), "lora"),
    _XLA,
    Setting("XLA, all logits", all_logits),
)
# The only peer that runs in JAX.
_TOKAMAX = Setting("tokamax", _tokamax, "bfloat16", layout="dv")


def gemms(shape: Shape, dtype: Any = jnp.bfloat16) -> list[Callable[[], Any]]:
    """The bare matrix products of the loss and its gradients: logits, dx and dweight."""
    tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(1), 3)
    sizes = (tokens, hidden_size), (vocab_size, hidden_size), (tokens, vocab_size)
    x, weight, dlogits = (
        jax.random.normal(key, size, dtype) for key, size in zip(keys, sizes, strict=True)
    )
    return [
        # Compiled here, because the precision may be another one where they run.
        functools.partial(jax.jit(fn).lower(a, b).compile(), a, b)
        for fn, a, b in (
            (lambda a, b: a @ b.T, x, weight),
            (lambda a, b: a @ b, dlogits, weight),
            (lambda a, b: a.T @ b, dlogits, x),
        )
    ]


def random_arguments(shape: Shape) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Random `x`, weight and labels."""
    tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size), jnp.bfloat16) / 50
    return x, weight, jax.random.randint(keys[2], (tokens,), 0, vocab_size)


def beside_products(
    bare: Sequence[Callable[[], Any]],
    cases: Sequence[timing.Case],
    products: Mapping[str, tuple[int, ...]],
    rounds: int,
) -> tuple[dict[str, timing.Timing], dict[str, float]]:
    """Times cases in turns with bare products.

    Args:
      bare: Bare products.
      cases: Cases to time.
      products: Indices in `bare` of the products of each case, by its name.
      rounds: Number of measured rounds.

    Returns:
      The timings, and the milliseconds of each case's products, by the names of the cases.
    """
    limits = {
        of: timing.Case(f"products {of}", [lambda of=of: [bare[i]() for i in of]])
        for of in dict.fromkeys(products[case.name] for case in cases)
    }
    timings = timing.compare([*limits.values(), *cases], rounds=rounds, calls_per_round=1)
    limit_of = lambda name: timings[limits[products[name]].name].median_ms
    return timings, {case.name: limit_of(case.name) for case in cases}


def records_of(
    shape: Shape,
    bare: Sequence[Callable[[], Any]],
    cases: Sequence[timing.Case],
    alone: set[str],
    rounds: int,
) -> list[dict[str, Any]]:
    """Times the cases beside the bare GEMMs, of which those of `alone` have only the first."""
    products = {case.name: (0,) if case.name in alone else (0, 1, 2) for case in cases}
    timings, limits = beside_products(bare, cases, products, rounds)
    records = []
    for case in cases:
        measured = timings[case.name]
        record: dict[str, Any] = {"shape": list(shape), "setting": case.name} | measured.summary()
        if measured.error is None:
            limit = limits[case.name]
            record |= {"over_gemms": measured.median_ms / limit, "gemms_ms": limit}
            record |= {"temporary_bytes": case.temporary_bytes}
        records.append(record)
    return records


def _arrays(setting: Setting, result: Any) -> list[jax.Array]:
    """The loss, and the gradients of `x` and of the weight if there are any, `[V, D]`."""
    if not setting.gradients:
        return [result]
    loss, (dx, *dweights) = result
    if setting.weight == "lora":
        dweights = []
    return [loss, dx, *(d.T if setting.layout == "dv" else d for d in dweights)]


def measure(
    shape: Shape,
    settings: Sequence[Setting],
    *,
    with_peers: bool,
    rounds: int,
    ignored: float = 0.0,
) -> list[dict[str, Any]]:
    """One record for each setting at a shape, where a share of the labels is ignored."""
    bare = gemms(shape)  # before peers take memory, which PyTorch keeps
    x, weight, labels = random_arguments(shape)
    order = jax.random.permutation(jax.random.key(3), len(x))
    labels = jnp.where(order < round(ignored * len(x)), -100, labels)
    expected = _arrays(_XLA, jax.jit(_XLA.program())(x, weight, labels))
    if with_peers and "tokamax" not in peers.missing():
        settings = [*settings, _TOKAMAX]
    cases = []
    for setting in settings:
        of_setting = weight.T if setting.layout == "dv" else weight
        dtype = jnp.float32 if setting.weight == "float32" else x.dtype
        cases.append(
            agreement.compiled(
                setting.name,
                setting.program(),
                (x, of_setting.astype(dtype), labels),
                lambda got: expected,
                leaves=functools.partial(_arrays, setting),
            )
        )
    if with_peers:
        peers.reset()
        arrays = {"x": x, "weight": weight, "labels": labels}
        cases += [
            peers.case_of(peer, peer.name, arrays, "forward+backward", expected)
            for peer in peers.peers_of("linear_cross_entropy")
        ]
    alone = {s.name for s in settings if not s.gradients}
    return records_of(shape, bare, cases, alone, rounds)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown tables, a section for each shape."""
    lines = []
    for shape in dict.fromkeys(tuple(r["shape"]) for r in records):
        rows = [r for r in records if tuple(r["shape"]) == shape]
        limit = max(r.get("gemms_ms", 0.0) for r in rows)
        lines += [f"## {shapes.label(shape)}, three GEMMs {limit:.1f} ms", ""]
        lines += tables.markdown(
            ["setting", "ms", "over its GEMMs", "MiB beside arguments and results"],
            [
                [r["setting"], r["error"]]
                if "error" in r
                else [
                    r["setting"],
                    f"{r['median_ms']:.1f}",
                    f"{r['over_gemms']:.3f}",
                    f"{r['temporary_bytes'] / 2**20:.0f}",
                ]
                for r in rows
            ],
        )
        lines.append("")
    return "\n".join(lines)


def draw(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Draws time against memory of the settings with gradients at the first shape."""
    # Imported here, because matplotlib may be missing where the benchmark runs.
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    first = records[0]["shape"]
    points = [
        r
        for r in records
        if r["shape"] == first and "error" not in r and "alone" not in r["setting"]
    ]
    figure = Figure(figsize=(8.5, 6), layout="constrained")
    axes = figure.subplots()
    marks = {}
    for r in points:
        color = "#c1440e" if r["setting"].startswith("ours") else "#33418a"
        place = max(1.0, r["temporary_bytes"] / 2**20), r["median_ms"]
        # Two limits of memory can lead to one program. Its mark has the name of the first.
        marks.setdefault(
            (r["temporary_bytes"], round(r["median_ms"], 1)), (r["setting"], place, color)
        )
    for _, place, color in marks.values():
        axes.scatter(*place, color=color, s=25)
    axes.axhline(points[0]["gemms_ms"], color="#777777", linestyle=":", label="three bare GEMMs")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.margins(0.12)
    axes.set_xlabel("MiB beside arguments and results")
    axes.set_ylabel("ms, loss and gradients")
    axes.set_title(f"Linear cross-entropy, {shapes.label(tuple(first))} bfloat16", fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    _label(figure, axes, list(marks.values()))
    figure.savefig(path, dpi=150)


def _label(figure: Any, axes: Any, marks: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Writes each name beside its mark, in a place without another name or mark."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # for the final places of the marks, in pixels
    pixels = [axes.transData.transform(place) for _, place, _ in marks]
    taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in pixels]
    directions = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (1, -1), (-1, 1), (-1, -1))
    for name, place, color in marks:
        for distance, (right, up) in itertools.product((5, 9, 20), directions):
            text = axes.annotate(
                name,
                place,
                xytext=(distance * right, distance * up),
                textcoords="offset points",
                ha=("center", "left", "right")[right],
                va=("center", "bottom", "top")[up],
                fontsize=7,
                color=color,
            )
            box = text.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                line = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0}
                axes.annotate("", place, text.xyann, textcoords="offset points", arrowprops=line)
                break
            text.remove()
        else:
            raise ValueError(f"no place near the mark of {name!r} is free: make the chart larger")


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, writes the results and prints them."""
    parser = command.parser("benchmarks.kernels.loss", __doc__)
    command.add_settings(parser, shapes.LOSS, SETTINGS)
    parser.add_argument("--layouts", nargs="+", choices=["vd", "dv"], default=["vd"])
    parser.add_argument("--ignored", type=float, default=0.0, help="share of ignored labels")
    parser.add_argument("--chart", type=Path, help="draw this PNG from its JSON file")
    args = parser.parse_args(argv)
    if args.chart is not None:
        draw(json.loads(args.chart.with_suffix(".json").read_text())["records"], args.chart)
        return
    settings = [s for s in SETTINGS if not args.settings or s.name in args.settings]
    settings = [s.with_layout(layout) for s in settings for layout in args.layouts]
    run = functools.partial(measure, settings=settings, ignored=args.ignored)
    command.run_settings(
        parser, argv, args, "linear_cross_entropy", "linear_cross_entropy", run, table
    )


if __name__ == "__main__":
    main()
