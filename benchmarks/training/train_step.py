"""Times whole training steps, several variants in one run, beside the limits of the card.

    python -m benchmarks.training.train_step --variants scanned:minimal unrolled:minimal

A variant is `layers:remat`. Suffixes change it:

- `:fp8=RECIPE` multiplies in FP8 by a recipe such as `tensorwise`.
- `:xla` runs none of our kernels in products of 16 bits and in norms.
- `:loss=xla` leaves the loss to XLA, in chunks.
- `:loss=logits` leaves the loss to XLA, with all logits in memory.
- `:attention=LIBRARY` is the model's `attention_implementation`, such as `mosaic_gpu`.
- `:documents=N` has rows of N documents of random lengths, whose tokens do not attend to others'.
- `:pgle` compiles again after three steps, with the times that the kernels took in them. The
  memory of that program is not known.
- `:xla_gpu_enable_triton_gemm=false` sets an option of XLA.

All variants train one state and take turns: in each round each runs a few steps, in a random order.
Times are wall times, the median over the rounds. `--kernels` adds the time by kind of kernel, from
a profiler trace.
"""

import argparse
import collections
import dataclasses
import functools
import importlib.metadata
import math
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax.sharding import Mesh

import train.objectives
from benchmarks import ceilings, command, tables
from benchmarks.kernels.documents import positions_of, random_segment_ids
from models.sharding import batch_sharding, make_mesh
from pallas_kernels import hardware, linear_cross_entropy
from train.config import PRESET_NAMES, TrainConfig, preset
from train.data import SyntheticDataset
from train.reporting import metrics
from train.step import contexts_of_rows, init_state, make_train_step, memory_in_bytes
from train.xla_flags import (
    calls_until_compiled_again,
    compiler_options,
    with_measured_latencies,
)

# The first pattern that occurs in the name of a kernel gives its kind. XLA names its fusions after
# their operations.
_KINDS = {
    "norm (ours)": r"rms_norm",
    "GEMM in FP8 (ours)": r"fp8_(gated_)?matmul",
    "quantization to FP8 (ours)": r"fp8_|amax",
    "GEMM with SwiGLU (ours)": r"gated_matmul",
    "loss (ours)": r"loss_of_logits|linear_statistics|linear_exponentials|(weight|input)_gradient",
    "attention (ours)": r"attention_(forward|backward)",
    "attention (cuDNN)": r"cudnn|flash|sdpa|fmha",
    "GEMM (XLA's Triton)": r"gemm_fusion",
    "GEMM (cuBLAS)": r"nvjet|gemm|cutlass|xmma",
    "copy, cast, transpose": r"copy|convert|transpose|memcpy|memset|Memcpy|Memset",
    "concatenate, slice, broadcast": r"concatenate|slice|broadcast",
    "scatter, gather": r"scatter|gather",
    "reduction": r"reduce",
}


# Options of `linear_cross_entropy`. A chunk of 2**30 tokens holds all of them.
_LOSSES: dict[str, dict[str, Any]] = {
    "xla": {"implementation": "xla"},
    "logits": {"implementation": "xla", "chunk_size": 2**30},
}
_WORDS = ("fp8=", "xla", "loss=", "attention=", "documents=", "pgle")


def options_of(words: Sequence[str], known: Sequence[str]) -> dict[str, str] | None:
    """`["xla", "fp8=rowwise"]` as `{"xla": "", "fp8": "rowwise"}`; None if a word is wrong.

    Args:
      words: Parts of the name of a variant.
      known: Words that exist, each of them once; one with a value ends in "=".
    """
    found = {}
    for name, equals, value in (word.partition("=") for word in words):
        if name + equals not in known or name in found:
            return None
        found[name] = value
    return found


@dataclasses.dataclass
class Variant:
    """A compiled variant of the step, and its measurements."""

    name: str
    batch: dict[str, jax.Array]
    compiled: Any
    run: Callable[..., Any]
    compile_s: float
    loss: Any = math.nan
    times_s: list[float] = dataclasses.field(default_factory=list)
    kernels: list[tuple[str, float]] = dataclasses.field(default_factory=list)
    traced_ms: float = 0.0

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.times_s)


@dataclasses.dataclass(frozen=True)
class Way:
    """The settings in the name of a variant.

    Attributes:
      config: Configuration of the run.
      loss: Options of the loss; None leaves them to the configuration.
      options: Options of XLA, in addition to those of training.
      pgle: Whether XLA compiles again with the times of the first steps.
      documents: Documents of a row; None has rows without `segment_ids`.
    """

    config: TrainConfig
    loss: dict[str, Any] | None
    options: tuple[str, ...]
    pgle: bool
    documents: int | None

    @classmethod
    def parse(cls, base: TrainConfig, name: str) -> "Way":
        """Applies the name of a variant, such as `unrolled:minimal:xla`, to `base`.

        Raises:
          ValueError: The name has an unknown part.
        """
        layers, remat, *rest = name.split(":")
        of_xla = tuple(word for word in rest if word.startswith("xla_"))
        options = options_of([word for word in rest if word not in of_xla], _WORDS)
        if (
            layers not in ("scanned", "unrolled")
            or options is None
            or options.get("loss", "xla") not in _LOSSES
        ):
            raise ValueError(
                f"variant {name!r} must be (scanned|unrolled):REMAT, with ':fp8=RECIPE', ':xla', "
                "':loss=xla', ':loss=logits', ':attention=LIBRARY', ':documents=N', ':pgle' or "
                "':xla_OPTION=VALUE' after it"
            )
        model = dataclasses.replace(
            base.model,
            scan_layers=layers == "scanned",
            remat=remat,
            implementation="xla" if "xla" in options else None,
            fp8=options.get("fp8"),
            attention_implementation=options.get("attention"),
        )
        loss = _LOSSES[options["loss"]] if "loss" in options else None
        number = int(options["documents"]) if "documents" in options else None
        config = dataclasses.replace(base, model=model)
        return cls(config, loss, of_xla, "pgle" in options, number)

    def batch(self) -> dict[str, Any]:
        """The batch of all steps."""
        data = self.config.data
        dataset = SyntheticDataset(self.config.model.vocab_size, data.sequence_length)
        rows = dataset.batch(0, batch_size=data.batch_size, seed=0)
        batch: dict[str, Any] = dict(rows)
        if self.documents is not None:
            sizes = data.batch_size, data.sequence_length
            ids = random_segment_ids(jax.random.key(0), *sizes, self.documents)
            batch |= {"segment_ids": ids, "positions": positions_of(ids)}
        return batch

    def compile(self, *args: Any) -> tuple[Any, Callable[..., Any]]:
        """The step compiled for these arguments, and the function to run; the first is donated.

        With `pgle` the first is None: calls of the function compile.
        """
        options = compiler_options(jax.tree.leaves(args)[0].devices(), self.options)
        step = jax.jit(make_train_step(self.config), donate_argnums=0, compiler_options=options)

        def loss(*args: Any, **options: Any) -> Any:
            return linear_cross_entropy(*args, **options | (self.loss or {}))

        def with_loss(fn: Callable[..., Any], *args: Any) -> Any:
            with mock.patch.object(train.objectives, "linear_cross_entropy", loss):
                return fn(*args)

        if self.pgle:
            return None, functools.partial(with_loss, with_measured_latencies(step))
        compiled = with_loss(step.lower, *args).compile()
        return compiled, compiled


def started(name: str, way: Way, state: Any, mesh: Mesh) -> tuple[Variant, Any]:
    """The variant, compiled and after its first steps, and the new state; prints time and loss."""
    batch = {key: a[None] for key, a in way.batch().items()}
    batch = jax.device_put(batch, batch_sharding(mesh, batch_axis=1))
    start = time.perf_counter()
    compiled, run = way.compile(state, batch)
    for _ in range(calls_until_compiled_again() - 1 if way.pgle else 0):
        state, _ = run(state, batch)  # profiled; the next step is compiled again
    state, values = run(state, batch)
    seconds = time.perf_counter() - start
    print(f"{name}: compiled in {seconds:.1f} s, loss {values['loss']:.3f}", flush=True)
    return Variant(name, batch, compiled, run, seconds, loss=values["loss"]), state


def kind_of(kernel: str) -> str:
    """The kind of a kernel, from its name."""
    found = (kind for kind, pattern in _KINDS.items() if re.search(pattern, kernel))
    return next(found, "elementwise")


def grouped(
    kernels: Sequence[tuple[str, float]], group: Callable[[str], str]
) -> list[tuple[str, str, str]]:
    """The name, launches and milliseconds of each group of kernels, the longest first."""
    totals: dict[str, list[float]] = collections.defaultdict(list)
    for name, milliseconds in kernels:
        totals[group(name)].append(milliseconds)
    ordered = sorted(totals.items(), key=lambda item: -sum(item[1]))
    return [(name, str(len(times)), f"{sum(times):.1f}") for name, times in ordered]


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that choose the model and the batch."""
    parser.add_argument("--preset", choices=PRESET_NAMES, default="llama3.2-1b")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--num-layers", type=int, help="layers of the model; default: the preset's")
    # The batch is the same in each step. With a usual learning rate the model knows it by heart
    # after 20 steps, and its gradients are then unlike those of a training run.
    parser.add_argument("--learning-rate", type=float, default=1e-9)


def workload(arguments: argparse.Namespace) -> TrainConfig:
    """The configuration of the run that these flags describe, on random tokens."""
    base = preset(arguments.preset)
    data = dataclasses.replace(
        base.data,
        source="synthetic",
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
    )
    model = base.model
    if arguments.num_layers is not None:
        model = dataclasses.replace(model, num_hidden_layers=arguments.num_layers)
    optimizer = dataclasses.replace(base.optimizer, learning_rate=arguments.learning_rate)
    return dataclasses.replace(base, data=data, model=model, optimizer=optimizer)


# The first column, and those of `speed_cells`.
SPEED_COLUMNS = ("variant", "ms/step", "min - max", "tokens/s", "MFU")


def speed_cells(config: TrainConfig, times_s: list[float], num_gpus: int = 1) -> list[str]:
    """Cells of a table: median and range of the milliseconds a step, tokens/s of all GPUs, MFU."""
    flops = metrics.flops_of_run(config)(contexts_of_rows(config))
    step_s = statistics.median(times_s)
    speed = config.data.tokens_per_step / step_s
    used = metrics.mfu(speed * flops, hardware.lookup(jax.devices()[0].device_kind), num_gpus)
    return [
        f"{step_s * 1e3:.1f}",
        f"{min(times_s) * 1e3:.1f} - {max(times_s) * 1e3:.1f}",
        f"{speed:,.0f}",
        "-" if used is None else f"{used:.1%}",
    ]


def main() -> None:
    """Parses the command line, measures, prints and writes the table."""
    parser = command.parser("benchmarks.training.train_step", __doc__)
    add_workload(parser)
    parser.add_argument("--variants", nargs="+", default=["scanned:minimal", "unrolled:minimal"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=3, help="steps of a variant in a round")
    parser.add_argument("--kernels", action="store_true", help="add a table of the kernels")
    parser.add_argument("--fsdp", type=int, default=1, help="GPUs that share the parameters")
    parser.add_argument("--output", type=Path, help="file to write the tables to")
    arguments = parser.parse_args()

    base = workload(arguments)
    # Names are checked before the first variant compiles, which takes half a minute.
    ways = {name: Way.parse(base, name) for name in arguments.variants}
    num_gpus = arguments.fsdp
    mesh = make_mesh(data=1, fsdp=num_gpus, devices=jax.devices()[:num_gpus])
    with jax.set_mesh(mesh):
        state = init_state(base, mesh)
        variants = []
        for name, way in ways.items():
            variant, state = started(name, way, state, mesh)
            variants.append(variant)
        limits = []
        order = random.Random(0)
        for _ in range(arguments.rounds):
            limits.append(ceilings.measure())
            for variant in order.sample(variants, len(variants)):
                jax.block_until_ready(state)
                start = time.perf_counter()
                for _ in range(arguments.steps):
                    state, values = variant.run(state, variant.batch)
                    variant.loss = values["loss"]
                jax.block_until_ready(state)
                variant.times_s.append((time.perf_counter() - start) / arguments.steps)
        if arguments.kernels:
            for variant in variants:
                found = device_times(variant.run, state, variant.batch)
                state, variant.kernels, variant.traced_ms = found
    text = report(base, variants, limits, num_gpus)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


def device_times(
    run: Callable[..., Any], state: Any, batch: Any
) -> tuple[Any, list[tuple[str, float]], float]:
    """Runs one more step under the profiler, whose trace has copies as well as kernels.

    Returns:
      The new state, `(name, milliseconds)` of each kernel and copy on the first GPU, and the
      milliseconds from the first start to the last end.
    """
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            state, _ = jax.block_until_ready(run(state, batch))
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
        streams = [
            line
            for plane in profile.planes
            if plane.name == "/device:GPU:0"
            for line in plane.lines
            if line.name.startswith("Stream")
        ]
        events = [event for line in streams for event in line.events]
        kernels = [(event.name, event.duration_ns / 1e6) for event in events]
        first = min(event.start_ns for event in events)
        last = max(event.start_ns + event.duration_ns for event in events)
        return state, kernels, (last - first) / 1e6


def report(
    config: TrainConfig, variants: list[Variant], limits: list[ceilings.Ceilings], num_gpus: int
) -> str:
    """The tables, in Markdown."""
    device = jax.devices()[0]
    flops = metrics.flops_of_run(config)(contexts_of_rows(config))
    gemm = statistics.median(limit.gemm for limit in limits)
    copy = statistics.median(limit.copy for limit in limits)
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("jax", "flax", "optax")
    )
    limit = ceilings.Ceilings(gemm, copy)
    lines = [
        f"# Training step of {config.name}, "
        f"{config.model.num_hidden_layers} layers, {config.data.batch_size} x "
        f"{config.data.sequence_length} tokens",
        "",
        f"{time.strftime('%Y-%m-%d')}, {num_gpus} x {device.device_kind}, {versions}. Parameters "
        f"and AdamW moments {config.model.param_dtype}, compute {config.model.dtype}. Wall time, "
        f"median of {len(limits)} interleaved rounds. Learning rate "
        f"{config.optimizer.learning_rate}. In the same run: {limit}.",
        "",
        f"    {command.line('python -m benchmarks.training.train_step')}",
        "",
        "MFU counts the causal attention of whole rows at half and no recomputation, against the "
        "card's dense bfloat16 peak. Memory is arguments plus temporaries of the compiled step, on "
        "one GPU.",
        "",
    ]
    rows = []
    for variant in variants:
        speed = config.data.tokens_per_step / variant.step_s
        rows.append(
            [
                variant.name,
                *speed_cells(config, variant.times_s, num_gpus),
                f"{speed * flops / (gemm * num_gpus):.1%}",
                f"{memory_in_bytes(variant.compiled) / 2**30:.1f} GiB" if variant.compiled else "-",
                f"{variant.compile_s:.0f} s",
                f"{variant.loss:.3f}",
            ]
        )
    lines += tables.markdown([*SPEED_COLUMNS, "of GEMM", "memory", "compile", "loss"], rows)
    for variant in variants:
        if not variant.kernels:
            continue
        total = sum(milliseconds for _, milliseconds in variant.kernels)
        by_kind = grouped(variant.kernels, kind_of)
        shortened = lambda name: f"`{re.sub(r'[_.]?\d+$', '', name)[:70]}`"
        lines += [
            "",
            f"{variant.name}: {total:.1f} ms of kernels in {len(variant.kernels)} launches, "
            f"{variant.traced_ms:.1f} ms from the first to the last",
            "",
            *tables.markdown(["kind", "launches", "ms"], by_kind),
            "",
            *tables.markdown(
                ["longest kernels", "launches", "ms"], grouped(variant.kernels, shortened)[:16]
            ),
        ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
