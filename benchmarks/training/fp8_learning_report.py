"""Compares the losses of the runs of `benchmarks.training.fp8_learning`, recipe by recipe."""

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import tables
from pallas_kernels.fp8 import RECIPES

BASELINE, PERTURBED = "none", "perturbed"
_LIMIT = 0.004  # nats; chosen before the first run
_LAST = 0.05  # share of the steps whose mean loss is a run's training loss
_COLORS = ("#c1440e", "#33418a", "#2e7d4f", "#8a6d1f")
_INK, _PALE = "#333333", "#777777"


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
        ]
        rows = []
        for name in recipes[1:]:
            gaps = found.gaps(name)
            if not gaps:
                continue
            verdict = Verdict.of(list(gaps.values()), skipped[name])
            rows.append(
                [
                    f"`{name}`",
                    *(f"{gaps[seed]:+.4f}" if seed in gaps else "-" for seed in seeds),
                    f"{verdict.mean:+.4f}",
                    f"{verdict.error:.4f}",
                    f"{verdict.limit:.4f}",
                    str(skipped[name]),
                    "passes" if verdict.passes else "fails",
                ]
            )
        header = ["recipe", *(f"gap, seed {seed}" for seed in seeds), "mean gap"]
        header += ["standard error", "limit", "skipped steps", "verdict"]
        lines += tables.markdown(header, rows)
    rows = []
    for name in recipes:
        own = [run for run in runs if run["recipe"] == name]
        times = [run["step_ms"] for run in own if "step_ms" in run]
        facts = own[0]["programs"]
        calls = ", ".join(f"{count} {kernel}" for kernel, count in facts["calls"].items())
        rows.append(
            [
                f"`{name}`",
                str(skipped[name]),
                f"{statistics.median(times):.1f}" if times else "-",
                f"{facts['memory_gib']:.1f} GiB",
                calls or "-",
            ]
        )
    header = ["recipe", "skipped steps", "ms a step", "memory", "calls in the compiled step"]
    return "\n".join([*lines, "", *tables.markdown(header, rows)]) + "\n"


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
