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
from jax.sharding import Mesh

from benchmarks import command, tables, timing
from benchmarks.kernels.fp8 import normal, with_gradients
from benchmarks.kernels.loss import random_arguments
from benchmarks.training.train_step import Way, add_workload, started, workload
from models.sharding import make_mesh
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


def graded(fn: Callable[..., jax.Array], *args: jax.Array) -> Callable[[], Any]:
    """A function that computes `fn` and all gradients; the last argument is that of the result."""
    return functools.partial(jax.jit(functools.partial(with_gradients, fn)), *args)


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
        x, weight = normal(0, tokens, depth), small(normal(1, depth, columns))
        flops = 2.0 * tokens * depth * columns
        label = f"product of {name}, {depth} x {columns}"
        found.append(Part(label, functools.partial(multiply, x, weight), flops))
        if name == "gate and up":
            zeros = functools.partial(multiply, jnp.zeros_like(x), weight)
            found.append(Part("the same with zeros", zeros, flops))
    gate, up, down = (small(normal(i, *shape)) for i, shape in enumerate([(d, f), (d, f), (f, d)]))
    run = graded(swiglu_mlp, normal(3, tokens, d), gate, up, down, normal(4, tokens, d))
    found.append(Part("gated MLP with gradients", run, 18.0 * tokens * d * f))
    of_heads = lambda seed, number: normal(seed, rows, length, number, size)
    q, k, v_, dout = map(of_heads, range(4), (heads, kv_heads, kv_heads, heads))
    run = graded(lambda q, k, v: document_attention(q, k, v, None), q, k, v_, dout)
    # 2 products in the forward and 5 in the backward, of half of the keys.
    found.append(Part("attention with gradients", run, 7.0 * rows * heads * length**2 * size))
    x, weight, labels = random_arguments((tokens, d, v))
    loss = lambda x, weight: linear_cross_entropy(x, weight, labels)
    run = graded(loss, x, weight.astype(jnp.float32), jnp.float32(1))
    found.append(Part("loss with gradients", run, 6.0 * tokens * d * v))
    source = jax.random.bits(jax.random.key(0), (copied,), jnp.uint32)
    found.append(Part("copy", functools.partial(jax.jit(jnp.copy), source), 0.0))
    return found


def step_of(config: TrainConfig, name: str, way: Way, mesh: Mesh, states: list[Any]) -> Part:
    """A whole step; `states` has the state that all steps train, and gets the new one."""
    variant, states[0] = started(name, way, states[0], mesh)

    def run():
        states[0], values = variant.run(states[0], variant.batch)
        return values["loss"]

    flops = metrics.flops_of_run(config)(contexts_of_rows(config)) * config.data.tokens_per_step
    return Part(f"step, {name}", run, flops)


def row(part: Part) -> list[str]:
    """Cells of the table: medians, and the range of the milliseconds."""
    ms, watts, mhz = (statistics.median(of_part) for of_part in (part.ms, part.watts, part.mhz))
    joules = ms / 1e3 * watts
    digits = 3 if ms < 10 else 1
    return [
        part.name,
        f"{ms:.{digits}f}",
        f"{min(part.ms):.{digits}f} - {max(part.ms):.{digits}f}",
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
    # Names are checked before any work.
    ways = {name: Way.parse(config, name) for name in arguments.variants}
    parts = parts_of(config)
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with jax.set_mesh(mesh):
        states = [init_state(config, mesh)] if ways else []
        parts += [step_of(config, name, way, mesh, states) for name, way in ways.items()]
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
