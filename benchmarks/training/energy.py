"""Power, clock and energy of a training step and of its parts, each in a loop of some seconds.

    python -m benchmarks.training.energy --variants unrolled:minimal unrolled:minimal:fp8=rowwise

A GPU at its limit of power lowers its clock. Then the energy of an operation decides how long it
takes. The table has these parts of a step of the preset:

- the products of a layer by XLA, as its forward computes them;
- one of them with a left operand of zeros;
- the gated MLP, the attention and the loss, with all gradients;
- a copy of 1 GiB in memory;
- whole steps, which are variants of `benchmarks.training.train_step`.

Each runs alone for `--seconds`, after half as long to warm up, in rounds of a random order. Power
and clock are means of the reports of `nvidia-smi` for the first GPU, one every 20 ms.
"""

import contextlib
import dataclasses
import functools
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import command, tables, timing
from benchmarks.training.train_step import Way, add_workload, workload
from models.sharding import batch_sharding, make_mesh
from pallas_kernels import document_attention, linear_cross_entropy, swiglu_mlp
from train.config import TrainConfig
from train.reporting import metrics
from train.step import contexts_of_rows, init_state

_IN_FLIGHT = 8  # calls that the host is ahead; each has its results in memory


@dataclasses.dataclass
class Part:
    """Work to measure, and its measurements.

    Attributes:
      name: Name in the table.
      run: Function that starts a call and returns arrays of it.
      flops: Floating-point operations of a call; 0 for a copy.
      ms: Milliseconds of a call, for each round.
      watts: Mean power of each round.
      mhz: Mean clock of the multiprocessors of each round.
    """

    name: str
    run: Callable[[], Any]
    flops: float
    ms: list[float] = dataclasses.field(default_factory=list)
    watts: list[float] = dataclasses.field(default_factory=list)
    mhz: list[float] = dataclasses.field(default_factory=list)


def samples(text: str) -> list[tuple[float, float]]:
    """`(watts, MHz)` of each line of `nvidia-smi`; the last line may be cut off.

    Raises:
      ValueError: There is no whole line of two numbers.
    """
    whole = [line.split(",") for line in text.splitlines(keepends=True) if line.endswith("\n")]
    try:
        found = [(float(watts), float(mhz)) for watts, mhz in whole]
    except ValueError:
        found = []
    if not found:
        raise ValueError(f"nvidia-smi reported no power and clock, but {text[:200]!r}")
    return found


@contextlib.contextmanager
def sampled(command: str = "nvidia-smi") -> Iterator[list[tuple[float, float]]]:
    """A list that has `(watts, MHz)` of the time in the context, once it has ended."""
    query = ["--query-gpu=power.draw.instant,clocks.sm", "--format=csv,noheader,nounits", "--id=0"]
    found: list[tuple[float, float]] = []
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen([command, *query, "--loop-ms=20"], stdout=file)
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            file.seek(0)
            text = file.read()
    found += samples(text)


def repeat(run: Callable[[], Any], seconds: float) -> int:
    """Calls `run` for this long, waits for the results, and returns the number of calls."""
    end, results, calls = time.perf_counter() + seconds, [], 0
    while time.perf_counter() < end:
        results.append(run())
        calls += 1
        if len(results) > _IN_FLIGHT:
            jax.block_until_ready(results.pop(0))
    jax.block_until_ready(results)
    return calls


def measure(part: Part, seconds: float) -> None:
    """Adds a round to the measurements of the part."""
    repeat(part.run, seconds / 2)
    with sampled() as found:
        start = time.perf_counter()
        calls = repeat(part.run, seconds)
        part.ms.append((time.perf_counter() - start) / calls * 1e3)
    part.watts.append(statistics.mean(watts for watts, _ in found))
    part.mhz.append(statistics.mean(mhz for _, mhz in found))


def random_arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Normal numbers in bfloat16."""
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]


def graded(fn: Callable[..., jax.Array], cotangent: jax.Array, *args: jax.Array) -> Any:
    """A function that computes `fn` and all gradients, on these arrays."""

    @jax.jit
    def run(cotangent, *args):
        result, pull = jax.vjp(fn, *args)
        return result, pull(cotangent)

    return functools.partial(run, cotangent, *args)


def parts_of(config: TrainConfig, copied: int = 2**28) -> list[Part]:
    """The parts of a step of this configuration, and a copy of so many numbers of 32 bits."""
    model, data = config.model, config.data
    rows, length = data.batch_size, data.sequence_length
    tokens, d, f, v = rows * length, model.hidden_size, model.intermediate_size, model.vocab_size
    heads, kv_heads, size = model.num_attention_heads, model.num_key_value_heads, model.head_dim
    multiply = jax.jit(jnp.matmul)
    small = lambda a: a * 0.02  # as the weights of a model
    found = []
    of_layer = {
        "queries, keys and values": (d, (heads + 2 * kv_heads) * size),
        "output of the attention": (heads * size, d),
        "gate and up": (d, 2 * f),
        "down": (f, d),
    }
    for name, (depth, columns) in of_layer.items():
        x, weight = random_arrays((tokens, depth), (depth, columns))
        flops = 2.0 * tokens * depth * columns
        label = f"product of {name}, {depth} x {columns}"
        found.append(Part(label, functools.partial(multiply, x, small(weight)), flops))
        if name == "gate and up":
            zeros = functools.partial(multiply, jnp.zeros_like(x), small(weight))
            found.append(Part("the same with zeros", zeros, flops))
    dy, x, *weights = random_arrays((tokens, d), (tokens, d), (d, f), (d, f), (f, d))
    run = graded(swiglu_mlp, dy, x, *map(small, weights))
    found.append(Part("gated MLP with gradients", run, 18.0 * tokens * d * f))
    of_heads = [(rows, length, n, size) for n in (heads, heads, kv_heads, kv_heads)]
    attention = lambda q, k, v: document_attention(q, k, v, None)
    run = graded(attention, *random_arrays(*of_heads))
    # 2 products in the forward and 5 in the backward, of half of the keys.
    found.append(Part("attention with gradients", run, 7.0 * rows * heads * length**2 * size))
    x, weight = random_arrays((tokens, d), (v, d))
    labels = jax.random.randint(jax.random.key(1), (tokens,), 0, v)
    loss = lambda x, weight: linear_cross_entropy(x, weight, labels)
    run = graded(loss, jnp.float32(1), x, small(weight).astype(jnp.float32))
    found.append(Part("loss with gradients", run, 6.0 * tokens * d * v))
    source = jax.random.bits(jax.random.key(0), (copied,), jnp.uint32)
    found.append(Part("copy", functools.partial(jax.jit(jnp.copy), source), 0.0))
    return found


def step_of(config: TrainConfig, variant: str, mesh: Any, states: list[Any]) -> Part:
    """A whole step; `states` has the state that all steps train, and gets the new one."""
    way = Way.parse(config, variant)
    batch = {name: a[None] for name, a in way.batch().items()}
    batch = jax.device_put(batch, batch_sharding(mesh, batch_axis=1))
    _, step = way.compile(states[0], batch)

    def run():
        states[0], values = step(states[0], batch)
        return values["loss"]

    jax.block_until_ready(run())
    flops = metrics.flops_of_run(config)(contexts_of_rows(config)) * config.data.tokens_per_step
    return Part(f"step, {variant}", run, flops)


def row(part: Part) -> list[str]:
    """Cells of the table: medians, and the range of the milliseconds."""
    ms, watts, mhz = (statistics.median(of_part) for of_part in (part.ms, part.watts, part.mhz))
    joules = ms / 1e3 * watts
    return [
        part.name,
        f"{ms:.3f}" if ms < 10 else f"{ms:.1f}",
        f"{min(part.ms):.3f} - {max(part.ms):.3f}"
        if ms < 10
        else f"{min(part.ms):.1f} - {max(part.ms):.1f}",
        f"{part.flops / ms / 1e9:.0f}" if part.flops else "",
        f"{watts:.0f}",
        f"{mhz:.0f}",
        f"{joules:.3f}" if joules < 10 else f"{joules:.1f}",
        f"{joules / part.flops * 1e12:.2f}" if part.flops else "",
    ]


COLUMNS = ("part", "ms", "min - max", "TFLOP/s", "W", "MHz", "J", "pJ/FLOP")


def main() -> None:
    """Parses the command line, measures, prints and writes the table."""
    parser = command.parser("benchmarks.training.energy", __doc__)
    add_workload(parser)
    parser.add_argument("--variants", nargs="*", default=["unrolled:minimal"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a measurement")
    parser.add_argument("--output", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    device = timing.require_gpu()
    config = workload(arguments)
    parts = parts_of(config)
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        states: list[Any] = [init_state(config, mesh)] if arguments.variants else []
        parts += [step_of(config, variant, mesh, states) for variant in arguments.variants]
        order = random.Random(0)
        for _ in range(arguments.rounds):
            for part in order.sample(parts, len(parts)):
                measure(part, arguments.seconds)
    text = "\n".join(
        [
            f"# Energy of a step of {config.name}, {config.data.batch_size} x "
            f"{config.data.sequence_length} tokens",
            "",
            f"{time.strftime('%Y-%m-%d')}, {device}, jax {jax.__version__}. Medians of "
            f"{arguments.rounds} rounds of {arguments.seconds} s. The FLOPs of a step are those of "
            "MFU; the FLOPs of the attention count half of the keys.",
            "",
            f"    {command.line('python -m benchmarks.training.energy')}",
            "",
            *tables.markdown(COLUMNS, [row(part) for part in parts]),
            "",
        ]
    )
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
