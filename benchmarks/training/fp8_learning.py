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
one recipe share a compiled step. Several processes, one for each GPU, can share the folder, with
other `--seeds` or `--recipes`. `--report` reads the files of a folder. It compares all runs at the
largest number of steps that they have in common.

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
import itertools
import json
import math
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.sharding import Mesh

from benchmarks import command
from benchmarks.training.fp8_learning_report import BASELINE, PERTURBED, draw, read_runs, report
from benchmarks.training.schedule import kernel_calls
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
from train.objectives import loss_and_sums
from train.planner.plan import abstract_batch
from train.reporting.rows import write_whole
from train.setup import step_batch
from train.step import (
    TrainState,
    abstract_state,
    init_state,
    jit_train_step,
    make_eval_step,
    memory_in_bytes,
    model_graph,
)

_PERTURBATION = 2.0**-16
_QUEUED = 4  # steps that the device may have before the host waits
_WRITE_EVERY_S = 20.0


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
    recipe = None if name in (BASELINE, PERTURBED) else name
    return dataclasses.replace(config, model=dataclasses.replace(config.model, fp8=recipe))


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of a recipe.

    Attributes:
      step: Training step; it donates the state.
      evaluate: Sums over a held-out batch in bfloat16.
      evaluate_own: The same sums in the recipe's forward; None if that is bfloat16.
      facts: Entries that a run writes about them.
    """

    step: Callable[..., Any]
    evaluate: Callable[..., Any]
    evaluate_own: Callable[..., Any] | None
    facts: dict[str, Any]


def calls_of(hlo: str) -> dict[str, int]:
    """How often a compiled program calls our kernels and cuBLAS in FP8."""
    counts = kernel_calls(hlo)
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
            "calls": calls_of(step.as_text()),
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
                    write_whole(path, json.dumps(record).encode())
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


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("benchmarks.training.fp8_learning", __doc__)
    names = (BASELINE, PERTURBED, *RECIPES)
    parser.add_argument("--tokens", type=Path, help="file of benchmarks.training.make_tokens")
    parser.add_argument("--output", type=Path, default=Path("runs/fp8_learning"))
    parser.add_argument("--report", type=Path, metavar="FOLDER", help="report, do not train")
    parser.add_argument("--chart", type=Path, help="image that --report draws")
    parser.add_argument(
        "--recipes", nargs="+", choices=names, default=[BASELINE, "tensorwise", "rowwise"]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
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
        for seed, recipe in itertools.product(args.seeds, args.recipes):
            path = args.output / f"seed{seed}_{recipe}.json"
            trainer.run(seed, recipe, path, args.seconds)


if __name__ == "__main__":
    main()
