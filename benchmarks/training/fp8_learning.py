"""Trains a Llama in bfloat16 and in FP8 from the same seeds on real text, and compares the losses.

    python -m benchmarks.training.fp8_learning --tokens tokens.npz --output runs/fp8
    python -m benchmarks.training.fp8_learning --report runs/fp8 --chart curves.png

A run is a pair of a seed and a recipe. All runs of a seed start from the same parameters, see the
same batches and take the same number of steps. `none` is bfloat16. `perturbed` is bfloat16, too,
from parameters that are larger by 2**-16 of themselves: its gap shows what rounding alone does. All
other names are recipes of `pallas_kernels.fp8`. The model, the step and the measurement of held-out
text are those of `python -m train`; `benchmarks.training.make_tokens` makes the file of tokens.

A recipe leaves a weight in bfloat16 if it is too small to gain time (`Recipe.least_size`), and all
weights of this model are. The runs therefore set `least_size` to 0 in `pallas_kernels.fp8.RECIPES`,
so all projections and MLPs multiply in FP8. This compares losses, so the time does not matter.

Each run writes a JSON file into the folder `--output`, every 20 seconds and at its end. Runs with
one recipe share a compiled step. `--only 0:none 1:rowwise` chooses runs, so that several processes,
one for each GPU, can share the work and the folder. `--report` reads the files of a folder. It
compares all runs at the largest number of steps that they have in common.

The held-out loss is measured in two ways: in bfloat16, which is the model in the files of a run,
and in the recipe's own forward. A gap is a run's loss minus that of bfloat16 with the same seed. A
recipe passes a measure if the mean gap is at most 0.004 nats or two standard errors, whichever is
larger, and no step was skipped.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import re
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

from models.config import LlamaConfig
from models.fp8 import describe
from models.rope import RopeParameters
from models.sharding import batch_sharding, make_mesh
from pallas_kernels.choices import Explanation, recording
from pallas_kernels.fp8 import RECIPES
from train import data
from train.config import DataConfig, OptimizerConfig, TrainConfig, fast_dtype
from train.distributed import to_devices
from train.evaluate import measure
from train.planner.plan import abstract_batch
from train.setup import step_batch
from train.step import (
    TrainState,
    abstract_state,
    init_state,
    jit_train_step,
    loss_and_sums,
    make_eval_step,
    memory_in_bytes,
    model_graph,
)

BASELINE, PERTURBED = "none", "perturbed"
_PERTURBATION = 2.0**-16
_LIMIT = 0.004  # nats; chosen before the first run
_LAST = 0.05  # share of the steps whose mean loss is a run's training loss
_QUEUED = 4  # steps that the device may have before the host waits
_WRITE_EVERY_S = 20.0
_COLORS = ("#c1440e", "#33418a", "#2e7d4f", "#8a6d1f")
_INK, _PALE = "#333333", "#777777"


@dataclasses.dataclass(frozen=True)
class Text:
    """The two parts of a file of tokens."""

    train: data.PackedDataset
    held_out: data.PackedDataset

    @classmethod
    def load(cls, path: Path, sequence_length: int) -> "Text":
        """Reads what `benchmarks.training.make_tokens` wrote."""
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}

        def dataset(tokens: np.ndarray) -> data.PackedDataset:
            begins = 1 + np.flatnonzero(tokens[:-1] == arrays["end_of_text"])
            return data.PackedDataset(
                tokens,
                np.concatenate([[0], begins]),
                sequence_length,
                token_bytes=arrays["token_bytes"],
            )

        return cls(dataset(arrays["train"]), dataset(arrays["held_out"]))


def recipe_of(name: str) -> str | None:
    """The value of `LlamaConfig.fp8` for the name of a run's recipe."""
    return None if name in (BASELINE, PERTURBED) else name


def every_size_in_fp8() -> contextlib.AbstractContextManager[Any]:
    """Lets the recipes take weights of every size, until the context ends."""
    every = {name: dataclasses.replace(r, least_size=0) for name, r in RECIPES.items()}
    return mock.patch.dict(RECIPES, every)


def workload(args: argparse.Namespace, vocab_size: int) -> TrainConfig:
    """The configuration of all runs, without seed and recipe."""
    model = LlamaConfig(
        vocab_size=-(-vocab_size // 128) * 128,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.sequence_length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        rope_parameters=RopeParameters(rope_theta=10_000.0),
        dtype=fast_dtype(),
        remat=args.remat,
    )
    return TrainConfig(
        name="fp8_learning",
        model=model,
        data=DataConfig(
            source="stdlib",  # packed documents, as those of this source
            sequence_length=args.sequence_length,
            batch_size=args.batch_size,
        ),
        optimizer=OptimizerConfig(
            learning_rate=args.learning_rate, warmup_steps=min(args.warmup_steps, args.steps // 2)
        ),
        steps=args.steps,
        eval_every=args.eval_every,
        sample_tokens=0,
        save=False,
    )


def with_recipe(config: TrainConfig, name: str) -> TrainConfig:
    """The configuration of the runs with this recipe."""
    model = dataclasses.replace(config.model, fp8=recipe_of(name))
    return dataclasses.replace(config, model=model)


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a recipe.

    Attributes:
      step: Training step; it donates the state.
      evaluate: Sums over a held-out batch in bfloat16.
      evaluate_own: The same sums in the recipe's forward; None if that is bfloat16.
      facts: What a run writes about them.
    """

    step: Callable[..., Any]
    evaluate: Callable[..., Any]
    evaluate_own: Callable[..., Any] | None
    facts: dict[str, Any]


def kernel_counts(hlo: str) -> dict[str, int]:
    """How often a compiled program calls our kernels and cuBLAS in FP8; a loop's body is once."""
    calls = re.findall(r'custom_call_target="mosaic_gpu.*?op_name="([^"]*)"', hlo)
    # The last part is JAX's primitive. The one before may be `jit(name)`.
    parts = [call.split("/") for call in calls]
    names = [re.findall(r"\w+", (part[-2:-1] or part)[0])[-1] for part in parts]
    counts = collections.Counter(names)
    if cublas := hlo.count('"__cublas$lt$matmul$f8"'):
        counts["cublasLt in FP8"] = cublas
    return dict(sorted(counts.items()))


class Trainer:
    """The runs of a process; programs and initial states are made once.

    Args:
      config: Configuration of all runs, from `workload`.
      text: Tokens.
      mesh: Mesh of one device.
    """

    def __init__(self, config: TrainConfig, text: Text, mesh: Mesh):
        self._config, self._text, self._mesh = config, text, mesh
        self.programs = functools.cache(self._programs)
        self._initial = functools.cache(self._initial_state)
        self._evaluate = jax.jit(make_eval_step(config))

    def _programs(self, recipe: str) -> Programs:
        if recipe == PERTURBED:
            return self.programs(BASELINE)
        config = with_recipe(self._config, recipe)
        facts: dict[str, Any] = {}
        if config.model.fp8 is not None:
            facts["weights"] = describe(config.model)
        state = abstract_state(config, self._mesh)
        start = time.perf_counter()
        with recording() as choices:
            lowered = jit_train_step(config, state).lower(state, abstract_batch(config, self._mesh))
        facts["kernels"] = Explanation(tuple(choices)).summary
        step = lowered.compile()
        facts |= {
            "compile_s": time.perf_counter() - start,
            "memory_gib": memory_in_bytes(step) / 2**30,
            "calls": kernel_counts(step.as_text()),
        }
        for name, value in facts.items():
            print(f"{recipe}: {name}: {value}", flush=True)
        own = None
        if config.model.fp8 is not None:
            graph = model_graph(config.model)

            def sums(params: Any, batch: Any) -> Any:
                count = (batch["labels"] != data.IGNORED).sum()
                return loss_and_sums(graph, params, batch)[1] | {"num_tokens": count}

            own = jax.jit(sums)
        return Programs(step, self._evaluate, own, facts)

    def _initial_state(self, seed: int) -> TrainState:
        return init_state(dataclasses.replace(self._config, seed=seed), self._mesh)

    def initial(self, seed: int, recipe: str) -> TrainState:
        """A copy of the state before the first step of a run, which a step may take over."""
        state = jax.tree.map(lambda a: a.copy(), self._initial(seed))
        if recipe != PERTURBED:
            return state
        params = jax.tree.map(lambda a: a * (1 + _PERTURBATION), state.params)
        return dataclasses.replace(state, params=params)

    def held_out(self, programs: Programs, params: Any) -> dict[str, float]:
        """The loss of the whole held-out text, in nats a token, in each forward."""
        text, size = self._text.held_out, self._config.data.batch_size

        def loss(evaluate: Callable[..., Any]) -> float:
            batches = text.eval_batches(size)
            return measure(evaluate, params, batches, text.token_bytes, self._mesh).loss

        bf16 = loss(programs.evaluate)
        own = bf16 if programs.evaluate_own is None else loss(programs.evaluate_own)
        return {"bf16": bf16, "own": own}

    def run(self, seed: int, recipe: str, path: Path, seconds: float = math.inf) -> dict[str, Any]:
        """Trains, and writes the record of the run to `path` as it goes.

        Args:
          seed: Seed of the parameters and of the order of the data.
          recipe: Name of the recipe.
          path: JSON file of the record.
          seconds: Time after which the run stops before its last step.
        """
        config = dataclasses.replace(with_recipe(self._config, recipe), seed=seed)
        programs = self.programs(recipe)
        state = self.initial(seed, recipe)
        begin = time.perf_counter()
        record: dict[str, Any] = {
            "seed": seed,
            "recipe": recipe,
            "steps": config.steps,
            "tokens_per_step": config.data.tokens_per_step,
            "num_parameters": sum(a.size for a in jax.tree.leaves(state.params)),
            "device": jax.devices()[0].device_kind,
            "versions": {n: importlib.metadata.version(n) for n in ("jax", "flax", "optax")},
            "programs": programs.facts,
            "model": dataclasses.asdict(config.model),
            "optimizer": dataclasses.asdict(config.optimizer),
            "losses": [],
            "batches": [],
            "skipped_steps": 0,
            "held_out": [],
        }
        pending: collections.deque[tuple[int, dict[str, Any]]] = collections.deque()
        written = begin

        def collect(most: int) -> None:
            while len(pending) > most:
                checksum, values = pending.popleft()
                record["losses"].append(float(values["loss"]))
                record["batches"].append(checksum)
                record["skipped_steps"] = int(values["skipped_steps"])

        with data.prefetch(lambda: self._batches(config)) as batches:
            # The time of a step is that since the last evaluation, when all is loaded.
            clock, timed = time.perf_counter(), 0
            for step, (checksum, batch) in enumerate(batches, start=1):
                state, values = programs.step(state, batch)
                pending.append((checksum, values))
                collect(_QUEUED)
                now = time.perf_counter()
                last = step == config.steps or now - begin > seconds
                if last or (config.eval_every and step % config.eval_every == 0):
                    collect(0)
                    record["step_ms"] = (time.perf_counter() - clock) / (step - timed) * 1e3
                    losses = self.held_out(programs, state.params)
                    record["held_out"].append({"step": step, **losses})
                    print(
                        f"{recipe}, seed {seed}, step {step}: loss {record['losses'][-1]:.4f}, "
                        f"held-out {losses['bf16']:.4f} (own forward {losses['own']:.4f}), "
                        f"{record['step_ms']:.1f} ms a step",
                        flush=True,
                    )
                    clock, timed = time.perf_counter(), step
                if last or now - written > _WRITE_EVERY_S:
                    written = now
                    _write(path, record)
                if last:
                    break
        return record

    def _batches(self, config: TrainConfig) -> Iterator[tuple[int, Any]]:
        """The checksum and the arrays of each step's batch."""
        sharding = batch_sharding(self._mesh, batch_axis=1)
        for step in range(config.steps):
            batch = step_batch(config, self._text.train, step)
            checksum = zlib.crc32(np.ascontiguousarray(batch["tokens"]))
            yield checksum, to_devices(batch, sharding)


def _write(path: Path, record: dict[str, Any]) -> None:
    """Replaces the file in one step, so that a reader never sees a part of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(record))
    part.replace(path)


@dataclasses.dataclass(frozen=True)
class Measure:
    """One number for each run, by recipe and seed.

    Attributes:
      name: Words for a table.
      values: Nats a token by recipe, then by seed.
    """

    name: str
    values: dict[str, dict[int, float]]

    def gaps(self, recipe: str) -> dict[int, float]:
        """By seed, the loss with the recipe less that in bfloat16."""
        baseline = self.values[BASELINE]
        return {s: v - baseline[s] for s, v in self.values[recipe].items() if s in baseline}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The judgement of some gaps.

    Attributes:
      mean: Mean gap.
      error: Standard error of the mean; NaN for a single seed.
      limit: Largest mean that passes.
      passes: Whether the mean is within the limit and no step was skipped.
    """

    mean: float
    error: float
    limit: float
    passes: bool

    @classmethod
    def of(cls, gaps: Sequence[float], skipped_steps: int) -> "Verdict":
        """Judges the gaps of a recipe, one for each seed."""
        mean = statistics.fmean(gaps)
        error = _deviation(gaps) / math.sqrt(len(gaps))
        limit = _LIMIT if math.isnan(error) else max(_LIMIT, 2 * error)
        # A NaN is not within the limit.
        return cls(mean, error, limit, mean <= limit and not skipped_steps)


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample; NaN for a single value."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """The records in a folder, bfloat16 first, then by recipe and seed.

    Raises:
      ValueError: There is no bfloat16 run, or runs of a seed saw different batches.
    """
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    runs = [run for run in runs if run["losses"]]
    order = {name: place for place, name in enumerate((BASELINE, PERTURBED, *RECIPES))}
    runs.sort(key=lambda run: (order[run["recipe"]], run["seed"]))
    if not runs or runs[0]["recipe"] != BASELINE:
        raise ValueError(f"{folder} has no run in bfloat16 ({BASELINE!r}) to compare with")
    steps = common_steps(runs)
    first = {run["seed"]: run for run in reversed(runs)}
    for run in runs:
        other = first[run["seed"]]
        same = all(run[key] == other[key] for key in ("steps", "tokens_per_step", "optimizer"))
        if not same or run["batches"][:steps] != other["batches"][:steps]:
            raise ValueError(
                f"{run['recipe']} and {other['recipe']} of seed {run['seed']} differ in their "
                "batches or schedules, so their losses are no pair"
            )
    return runs


def common_steps(runs: Sequence[dict[str, Any]]) -> int:
    """The number of steps that all runs have."""
    return min(len(run["losses"]) for run in runs)


def measures(runs: Sequence[dict[str, Any]]) -> list[Measure]:
    """The training loss and the held-out losses at the last step that all runs have."""

    def by_recipe(name: str, value: Callable[[dict[str, Any]], float]) -> Measure:
        values: dict[str, dict[int, float]] = collections.defaultdict(dict)
        for run in runs:
            values[run["recipe"]][run["seed"]] = value(run)
        return Measure(name, dict(values))

    steps = common_steps(runs)
    last = max(1, round(_LAST * steps))
    found = [
        by_recipe(
            f"training, steps {steps - last + 1} to {steps}",
            lambda run: statistics.fmean(run["losses"][steps - last : steps]),
        )
    ]
    evaluated = [{row["step"]: row for row in run["held_out"]} for run in runs]
    shared = set.intersection(*map(set, evaluated))
    if shared:
        step = max(shared)
        for key, forward in (("bf16", "in bfloat16"), ("own", "in the recipe's forward")):
            losses = {
                (run["recipe"], run["seed"]): rows[step][key]
                for run, rows in zip(runs, evaluated, strict=True)
            }
            found.append(
                by_recipe(
                    f"held-out, step {step}, {forward}",
                    lambda run, losses=losses: losses[run["recipe"], run["seed"]],
                )
            )
    return found


def report(runs: Sequence[dict[str, Any]]) -> str:
    """The tables, in Markdown."""
    first = runs[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    recipes = list(dict.fromkeys(run["recipe"] for run in runs))
    seeds = sorted({run["seed"] for run in runs})
    skipped = {
        name: sum(run["skipped_steps"] for run in runs if run["recipe"] == name) for name in recipes
    }
    devices = ", ".join(sorted({run["device"] for run in runs}))
    lines = [
        f"{devices}, {versions}. {first['num_parameters'] / 1e6:.0f}M parameters, "
        f"{first['tokens_per_step']:,} tokens a step, {common_steps(runs):,} of "
        f"{first['steps']:,} steps. Losses and gaps are nats a token.",
    ]
    for found in measures(runs):
        baseline = list(found.values[BASELINE].values())
        spread = _deviation(baseline)
        lines += [
            "",
            f"{found.name[:1].upper()}{found.name[1:]}. bfloat16: "
            f"{', '.join(f'{value:.4f}' for value in baseline)}; standard deviation over seeds "
            f"{spread:.4f}, range {max(baseline) - min(baseline):.4f}.",
            "",
            "| recipe | "
            + " | ".join(f"gap, seed {seed}" for seed in seeds)
            + " | mean gap | standard error | limit | skipped steps | verdict |",
            "|---" * (len(seeds) + 6) + "|",
        ]
        for name in recipes[1:]:
            gaps = found.gaps(name)
            if not gaps:
                continue
            verdict = Verdict.of(list(gaps.values()), skipped[name])
            cells = [
                f"`{name}`",
                *(f"{gaps[seed]:+.4f}" if seed in gaps else "-" for seed in seeds),
                f"{verdict.mean:+.4f}",
                f"{verdict.error:.4f}",
                f"{verdict.limit:.4f}",
                str(skipped[name]),
                "passes" if verdict.passes else "fails",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| recipe | skipped steps | ms a step | memory | calls in the compiled step |",
        "|---|---|---|---|---|",
    ]
    for name in recipes:
        own = [run for run in runs if run["recipe"] == name]
        times = [run["step_ms"] for run in own if "step_ms" in run]
        facts = own[0]["programs"]
        calls = ", ".join(f"{count} {kernel}" for kernel, count in facts["calls"].items())
        cells = [
            f"`{name}`",
            str(skipped[name]),
            f"{statistics.median(times):.1f}" if times else "-",
            f"{facts['memory_gib']:.1f} GiB",
            calls or "-",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[dict[str, Any]]) -> Any:
    """The figure: losses at the left, gaps at the right, both as running means."""
    # A machine that only trains needs no matplotlib.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    steps = common_steps(runs)
    window = max(1, round(_LAST * steps))
    smooth = lambda values: np.convolve(values[:steps], np.full(window, 1 / window), "valid")
    x = np.arange(window, steps + 1)
    baseline = {run["seed"]: np.array(run["losses"]) for run in runs if run["recipe"] == BASELINE}
    recipes = list(dict.fromkeys(run["recipe"] for run in runs))
    colors = dict(zip(recipes, (_PALE, *_COLORS), strict=False))
    figure = Figure(figsize=(11, 3.8), dpi=150, layout=ConstrainedLayoutEngine())
    left, right = figure.subplots(1, 2)
    labelled: set[str] = set()
    for run in runs:
        name, losses = run["recipe"], np.array(run["losses"])
        label = None if name in labelled else {BASELINE: "bfloat16"}.get(name, name)
        labelled.add(name)
        left.plot(x, smooth(losses), color=colors[name], lw=1, label=label)
        if name != BASELINE and run["seed"] in baseline:
            gap = losses[:steps] - baseline[run["seed"]][:steps]
            right.plot(x, smooth(gap), color=colors[name], lw=1, label=label)
    right.axhspan(-_LIMIT, _LIMIT, color=_PALE, alpha=0.15, lw=0)
    right.axhline(0, color=_PALE, lw=0.8)
    # The first steps, where the loss falls by nats, would hide the rest.
    late = [smooth(losses)[len(x) // 10 :] for losses in baseline.values()]
    left.set_ylim(min(map(np.min, late)) - 0.05, max(map(np.max, late)) + 0.05)
    left.set_title(f"loss, nats a token, mean of {window} steps", loc="left", fontsize=10)
    right.set_title("gap to bfloat16 with the same seed", loc="left", fontsize=10)
    for ax in (left, right):
        ax.set_xlabel("steps", fontsize=8, color=_INK)
        ax.spines[["top", "right"]].set_visible(False)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(frameon=False, fontsize=8)
    return figure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.fp8_learning",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    names = (BASELINE, PERTURBED, *RECIPES)
    parser.add_argument("--tokens", type=Path, help="file of benchmarks.training.make_tokens")
    parser.add_argument("--output", type=Path, default=Path("runs/fp8_learning"))
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="report, do not train")
    parser.add_argument("--chart", type=Path, help="image that --report draws")
    parser.add_argument(
        "--recipes", nargs="+", choices=names, default=[BASELINE, "tensorwise", "rowwise"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", metavar="SEED:RECIPE", help="runs of this process")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="time after which a run stops"
    )
    parser.add_argument("--eval-every", type=int, default=200)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--warmup-steps", type=int, default=100)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--intermediate-size", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--kv-heads", type=int, default=4)
    parser.add_argument("--remat", default="minimal")
    return parser


def runs_of(args: argparse.Namespace) -> list[tuple[int, str]]:
    """The pairs of a seed and a recipe to train; a killed process leaves whole seeds.

    Raises:
      ValueError: `--only` names an unknown recipe.
    """
    if not args.only:
        return [(seed, recipe) for seed in args.seeds for recipe in args.recipes]
    pairs = []
    for text in args.only:
        seed, _, recipe = text.partition(":")
        if not seed.isdecimal() or recipe not in (BASELINE, PERTURBED, *RECIPES):
            raise ValueError(f"--only {text} must be SEED:RECIPE, such as 0:tensorwise")
        pairs.append((int(seed), recipe))
    return pairs


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, then trains or reports."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.report:
        runs = read_runs(args.report)
        print(report(runs))
        if args.chart:
            draw(runs).savefig(args.chart)
        return
    if args.tokens is None:
        parser.error("--tokens is missing; benchmarks.training.make_tokens makes the file")
    pairs = runs_of(args)
    text = Text.load(args.tokens, args.sequence_length)
    args.output.mkdir(parents=True, exist_ok=True)
    config = workload(args, len(text.train.token_bytes))
    print(
        f"{len(text.train.tokens):,} tokens for training, {len(text.held_out.tokens):,} held out; "
        f"{config.steps * config.data.tokens_per_step:,} tokens a run",
        flush=True,
    )
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh), every_size_in_fp8():
        trainer = Trainer(config, text, mesh)
        for seed, recipe in pairs:
            path = args.output / f"seed{seed}_{recipe}.json"
            trainer.run(seed, recipe, path, args.seconds)


if __name__ == "__main__":
    main()
