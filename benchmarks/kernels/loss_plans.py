"""Times plans of the linear cross-entropy, to check the planner's estimates and to fit them.

    python -m benchmarks.kernels.loss_plans --shapes 8192x2560x151936 8192x2304x256000

The first plans of a shape are those that the planner chooses by default and with 1 GiB of logits.
Then come, for each limit and class of plans, the fastest by estimate and the one whose chunks have
the largest power of two of tokens. A class is chunks of tokens, all tokens in place, or the first
tokens in place and then chunks. Loss and gradients of each plan are compared with those of the
first before it is timed.

Data is random; `x` and the weight are bfloat16, the gradient of the weight is float32. Times are
kernel times (`benchmarks/timing.py`), medians over interleaved rounds, over the three bare GEMMs of
the same rounds. The regret of a limit is the time of the chosen plan over that of the fastest
measured plan that the limit allows, less 1. The results of a shape are written before the next one.

    python -m benchmarks.kernels.loss_plans --fit benchmarks/results/loss_plans_h100_202611.json

fits the rates of `pallas_kernels/loss/cost.py` to such files, and prints them and the regrets of
estimates with the old and the new rates. It needs no GPU.
"""

import functools
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import least_squares

from benchmarks import agreement, command, tables, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.loss import gemms, random_arguments
from benchmarks.kernels.shapes import Shape
from pallas_kernels import linear_cross_entropy
from pallas_kernels.loss import cost, differentiable, plan
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.mosaic_gpu import in_place
from pallas_kernels.loss.plan import Candidate, Choice, InPlace, Request, Settings, TokenChunks
from pallas_kernels.loss.token_loss import LossOptions

type LossPlan = TokenChunks | InPlace

LIMITS = {"default": None, "1 GiB": 2**30}
_IMPLEMENTATION = "mosaic_gpu"
# Bare GEMMs with more bytes of dlogits are measured with fewer tokens, and their time is scaled.
_MOST_DLOGITS = 2**33
_SHARE_OF_COMPILING = 0.6  # of a shape's time, after which no further plan is compiled


def request_of(shape: Shape, limit: int | None) -> Request:
    """The planner's request for a float32 gradient of a bfloat16 weight."""
    tokens, hidden_size, vocab_size = shape
    options = LossOptions(label_smoothing=0.0, z_loss=0.0, logit_softcap=None)
    settings = Settings(
        options=options,
        implementation=_IMPLEMENTATION,
        accum_dtype=jnp.dtype(jnp.float32),
        weight_layout="vd",
        vocab_axes=(),
        config=Config(),
    )
    return Request(
        settings=settings,
        x=jax.ShapeDtypeStruct((tokens, hidden_size), jnp.bfloat16),
        weight=jax.ShapeDtypeStruct((vocab_size, hidden_size), jnp.float32),
        has_bias=False,
        is_low_rank=False,
        chunk_size=None,
        vocab_chunk_size=None,
        max_logits_bytes=limit,
        counted_fraction=1.0,
    )


def name_of(chosen: plan.Plan) -> str:
    """The plan's name in tables."""
    if isinstance(chosen, TokenChunks):
        return f"chunks of {chosen.chunk_size}"
    assert isinstance(chosen, InPlace)
    name = f"{chosen.extent.num_inside} in place"
    if chosen.extent.num_beside:
        name += f", {chosen.extent.num_beside} beside"
    return name if chosen.chunk_size is None else f"{name}, chunks of {chosen.chunk_size}"


def selected(shape: Shape, most: int) -> tuple[dict[str, Candidate], dict[str, str]]:
    """At most so many plans by name, the chosen ones first, and the chosen plan of each limit."""
    requests = {name: request_of(shape, limit) for name, limit in LIMITS.items()}
    chosen = {name: name_of(plan.choose(request).plan) for name, request in requests.items()}
    every: dict[str, Candidate] = {}
    fastest, powers = [], []
    for request in requests.values():
        found = {name_of(c.plan): c for c in plan.candidates(request)[0]}
        every |= found
        for of_class in _classes(found):
            fastest.append(min(of_class, key=lambda name: found[name].seconds))
            power = max(of_class, key=lambda name: (_is_power(found[name]), found[name].num_bytes))
            powers.append(power)
    names = list(dict.fromkeys([*chosen.values(), *fastest, *reversed(powers)]))[:most]
    return {name: every[name] for name in names}, chosen


def _is_power(candidate: Candidate) -> bool:
    chosen = candidate.plan
    size = chosen.extent.num_beside if isinstance(chosen, InPlace) else chosen.chunk_size
    return (chosen.chunk_size or size).bit_count() == 1


def _classes(found: dict[str, Candidate]) -> list[list[str]]:
    """The names of the plans, by class."""
    classes: dict[tuple[bool, bool], list[str]] = {}
    for name, candidate in found.items():
        is_in_place = isinstance(candidate.plan, InPlace)
        key = is_in_place, candidate.plan.chunk_size is None
        classes.setdefault(key, []).append(name)
    return list(classes.values())


def compiled(shape: Shape, chosen: LossPlan, number: int, arguments: Sequence[Any]) -> Any:
    """The loss with its gradients by a plan; `number` is another one for each plan of a shape."""

    def run(x: jax.Array, weight: jax.Array, labels: jax.Array) -> Any:
        # JAX and the operation keep traces by their arguments, so each plan has other ones.
        loss = lambda x, weight: linear_cross_entropy(
            x, weight, labels, implementation=_IMPLEMENTATION, max_logits_bytes=2**30 + number
        )
        return jax.value_and_grad(loss, argnums=(0, 1))(x, weight.astype(jnp.float32))

    asked = []

    def choose(request: Request) -> Choice:
        asked.append(request)
        return Choice(chosen, "The benchmark asks for it.")

    with mock.patch.object(differentiable, "choose", choose):
        program = jax.jit(run).lower(*arguments).compile()
    if not asked:
        raise RuntimeError(f"the loss at {shapes.label(shape)} did not ask for a plan")
    return program


def bare_gemms(shape: Shape) -> tuple[list[Callable[[], Any]], int]:
    """The three products, and the number of times that the shape has as many tokens."""
    tokens, hidden_size, vocab_size = shape
    times = 1
    while 2 * tokens * vocab_size > _MOST_DLOGITS * times and tokens % (2 * times) == 0:
        times *= 2
    return gemms((tokens // times, hidden_size, vocab_size)), times


def measure(shape: Shape, *, rounds: int, most: int, seconds: float) -> dict[str, Any]:
    """The record of a shape; plans that there is no time to compile are left out."""
    end = time.monotonic() + _SHARE_OF_COMPILING * seconds
    arguments = random_arguments(shape)
    bare, times = bare_gemms(shape)
    candidates, chosen = selected(shape, most)
    cases: list[timing.Case] = []
    expected = agreement.of_first()

    def wrong(result: Any) -> str | None:
        got = jax.tree.leaves(result)
        return agreement.reason(got, expected(got))

    for number, (name, candidate) in enumerate(candidates.items()):

        def prepare(number: int = number, candidate: Candidate = candidate) -> list[Any]:
            is_timed = sum(case.error is None for case in cases)
            if is_timed >= len(LIMITS) and time.monotonic() > end:
                raise agreement.Rejected("no time was left to compile it")
            program = compiled(shape, candidate.plan, number, arguments)
            return [functools.partial(program, *arguments)]

        cases.append(agreement.checked(name, prepare, wrong, agreement.bytes_of_first))
    del expected
    beside = timing.Case("three GEMMs", [lambda: [gemm() for gemm in bare]])
    timings = timing.compare([beside, *cases], rounds=rounds, calls_per_round=1)
    bare_ms = times * timings["three GEMMs"].median_ms
    plans = []
    for case, candidate in zip(cases, candidates.values(), strict=True):
        record = {"plan": case.name, "logits_bytes": candidate.num_bytes}
        record |= {**_contents(candidate.plan), "estimate_ms": 1e3 * candidate.seconds}
        record |= timings[case.name].summary()
        if timings[case.name].error is None:
            record |= {"over_gemms": timings[case.name].median_ms / bare_ms}
            record |= {"temporary_bytes": case.temporary_bytes}
        plans.append(record)
    limits = {name: plan.limit_of(request_of(shape, limit)) for name, limit in LIMITS.items()}
    return {
        "shape": list(shape),
        "gemms_ms": bare_ms,
        "limits": limits,
        "chosen": chosen,
        "plans": plans,
    }


def _contents(chosen: LossPlan) -> dict[str, Any]:
    """The part of a plan's record that the fit reads."""
    if isinstance(chosen, TokenChunks):
        return {"chunk_size": chosen.chunk_size}
    extent = chosen.extent
    return {
        "chunk_size": chosen.chunk_size,
        "extent": [extent.num_inside, extent.num_beside, str(extent.dtype), list(extent.bands)],
    }


def estimate(shape: Shape, record: dict[str, Any], rates: cost.Rates) -> float:
    """Seconds of a plan in a file, by these rates."""
    request = request_of(shape, None)
    chunks = TokenChunks(chunk_size=record["chunk_size"] or 1, by_exponentials=True)
    if "extent" not in record:
        return plan.seconds(request, chunks, rates)
    num_inside, num_beside, dtype, bands = record["extent"]
    extent = in_place.Extent(num_inside, num_beside, jnp.dtype(dtype), in_place.Bands(*bands))
    chosen = InPlace(extent=extent, chunk_size=record["chunk_size"], without_dweight=chunks)
    return plan.seconds(request, chosen, rates)


def measured(record: dict[str, Any], limit: int | None = None) -> list[dict[str, Any]]:
    """The plans of a shape's record that were timed, and that a limit allows."""
    return [
        p
        for p in record["plans"]
        if "error" not in p and (limit is None or p["logits_bytes"] <= limit)
    ]


def regret(record: dict[str, Any], limit: str, chosen: str) -> tuple[float, float, str] | None:
    """The ratio of the chosen plan, its regret, and the fastest plan; None if it was not timed."""
    plans = {p["plan"]: p["over_gemms"] for p in measured(record, record["limits"][limit])}
    if chosen not in plans:
        return None
    best = min(plans, key=lambda name: plans[name])
    return plans[chosen], plans[chosen] / plans[best] - 1, best


def table(records: Sequence[dict[str, Any]]) -> str:
    """A row for each shape, and then all plans."""
    header = ["tokens x D x V", "GEMMs"]
    for limit in LIMITS:
        header += [f"{limit}: plan", "over GEMMs", "fastest", "regret"]
    rows = []
    for record in records:
        row = [shapes.label(record["shape"]), f"{record['gemms_ms']:.1f} ms"]
        for limit, chosen in record["chosen"].items():
            found = regret(record, limit, chosen)
            if found is None:
                row += [chosen, "not timed", "", ""]
                continue
            ratio, loss, best = found
            row += [chosen, f"{ratio:.3f}", best if loss else "the same", f"{100 * loss:.1f} %"]
        rows.append(row)
    every = []
    for record in records:
        label = shapes.label(record["shape"])
        for p in record["plans"]:
            if "error" in p:
                every.append([label, p["plan"], p["error"]])
                continue
            cells = [f"{p['median_ms']:.2f}", f"{p['over_gemms']:.3f}"]
            cells.append(f"{p['estimate_ms'] / p['median_ms']:.3f}")
            every.append([label, p["plan"], *cells, f"{p['temporary_bytes'] / 2**20:.0f}"])
    columns = ["tokens x D x V", "plan", "ms", "over GEMMs", "estimate over measured", "MiB"]
    lines = [*tables.markdown(header, rows), "", *tables.markdown(columns, every)]
    return "\n".join(lines) + "\n"


def fit(records: Sequence[dict[str, Any]]) -> cost.Rates:
    """The rates with the least squares of relative errors of the estimates."""
    points = [(tuple(r["shape"]), p) for r in records for p in measured(r)]

    def errors(logarithms: np.ndarray) -> list[float]:
        rates = cost.Rates(*np.exp(logarithms))
        return [np.log(1e3 * estimate(s, p, rates) / p["median_ms"]) for s, p in points]

    start = np.log(cost.H100_RATES)
    # Rates stay within a factor of 20, so that a number that explains nothing does not run away.
    found = least_squares(errors, start, bounds=(start - 3, start + 3), loss="soft_l1", f_scale=0.1)
    return cost.Rates(*map(float, np.exp(found.x)))


def fit_report(records: Sequence[dict[str, Any]]) -> str:
    """The rates of the planner and the fitted ones, with errors and regrets on the records."""
    points = [(tuple(r["shape"]), p) for r in records for p in measured(r)]
    lines = []
    for title, rates in (("as they are", cost.H100_RATES), ("fitted", fit(records))):
        ratios = [1e3 * estimate(s, p, rates) / p["median_ms"] for s, p in points]
        spread = np.sqrt(np.mean(np.square(np.log(ratios))))
        numbers = ", ".join(f"{n}={v:.3g}" for n, v in rates._asdict().items())
        lines.append(f"{title}: Rates({numbers}); {len(points)} plans, error {100 * spread:.1f} %")
        for limit in LIMITS:
            regrets = {}
            for record in records:
                name = _choice(record, limit, rates)
                found = None if name is None else regret(record, limit, name)
                if found is not None:
                    regrets[shapes.label(record["shape"])] = found[1]
            if regrets:
                worst = max(regrets, key=lambda label: regrets[label])
                mean = 100 * np.mean(list(regrets.values()))
                lines.append(
                    f"  {limit}: regret {mean:.1f} % in the mean, {100 * regrets[worst]:.1f} % at "
                    f"most ({worst})"
                )
    return "\n".join(lines)


def _choice(record: dict[str, Any], limit: str, rates: cost.Rates) -> str | None:
    """The timed plan that the planner would choose by these rates; None if there is none."""
    num_bytes = record["limits"][limit]
    weighted = lambda p: plan.weighted(
        estimate(tuple(record["shape"]), p, rates), p["logits_bytes"], num_bytes
    )
    return min(measured(record, num_bytes), key=weighted, default={"plan": None})["plan"]


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures or fits, writes the results and prints them."""
    parser = command.parser("benchmarks.kernels.loss_plans", __doc__)
    parser.add_argument("--shapes", nargs="+", type=shapes.parse, default=list(shapes.LOSS))
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--plans", type=int, default=8, help="most plans of a shape")
    parser.add_argument("--seconds", type=float, default=1e9, help="time for all shapes")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--fit", nargs="+", type=Path, metavar="FILE", help="fit to these files")
    args = parser.parse_args(argv)
    if args.fit:
        contents = [json.loads(path.read_text()) for path in args.fit]
        print(fit_report([record for c in contents for record in c["records"]]))
        return

    start = time.monotonic()
    run = command.Run.start(parser, argv, args.rounds)
    records: list[dict[str, Any]] = []
    for number, shape in enumerate(args.shapes):
        left = args.seconds - (time.monotonic() - start)
        if left <= 0:
            print(f"no time is left for {shapes.label(shape)} and later shapes", file=sys.stderr)
            break
        share = left / (len(args.shapes) - number)
        print(f"{shapes.label(shape)}, {share:.0f} s ...", file=sys.stderr, flush=True)
        try:
            record = measure(shape, rounds=args.rounds, most=args.plans, seconds=share)
        except Exception as error:  # such as no memory for the bare GEMMs; others may run
            print(f"{shapes.label(shape)}: {timing.first_line(error)}", file=sys.stderr)
            continue
        records.append(record)
        gc.collect()
        jax.clear_caches()
        text = run.heading("Plans of linear_cross_entropy") + table(records)
        run.write(args.output_dir, "loss_plans", run.contents(records), text)
    print(table(records), flush=True)


if __name__ == "__main__":
    main()
