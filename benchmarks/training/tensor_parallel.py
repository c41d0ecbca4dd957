"""Times the layers of a tensor-parallel Llama, forward and backward, against XLA's partitioning.

    python -m benchmarks.training.tensor_parallel --preset llama3.1-8b

All GPUs of this host share the sequences. There are three contenders:

- `all-reduce`: XLA partitions the Llama from the shardings of its parameters alone. It runs without
  kernels, which XLA cannot partition, sums after each sublayer, and computes the norms of all
  tokens on every device.
- `ours`: the residual stream is split by tokens.
- `peer kernel`: as `ours`, with the peer-memory kernel of `sharded_add_rms_norm` between the
  sublayers.

The model has a few layers, a small vocabulary and bfloat16 parameters; the tokens are random. A
time is the wall time of loss and gradients over the number of layers, the median over interleaved
rounds. Memory is XLA's analysis of the program, beside its arguments and results.
"""

import contextlib
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import jax

import models.layers
import train.objectives
from benchmarks import agreement, command, tables, timing
from benchmarks.training.overlap import add_model, config_of, random_batch
from models.sharding import make_mesh
from pallas_kernels import sharded_add_rms_norm
from train.config import TrainConfig
from train.step import abstract_state, init_state, make_gradients
from train.xla_flags import compiler_options

_CALLS = 3  # of a program in a round


def with_peer_kernel(*args: Any, **options: Any) -> Any:
    """`sharded_add_rms_norm` with its peer-memory kernel."""
    return sharded_add_rms_norm(*args, **options | {"implementation": "mosaic_gpu"})


@contextlib.contextmanager
def contender(name: str, config: TrainConfig) -> Iterator[TrainConfig]:
    """Yields the configuration of a contender, which must be traced inside of the context."""
    if name == "all-reduce":
        model = dataclasses.replace(config.model, implementation="xla")
        with (
            mock.patch.object(train.objectives, "sum_over_devices", lambda fn: fn),
            mock.patch.object(train.objectives, "tensor_axis", lambda: None),
        ):
            yield dataclasses.replace(config, model=model)
    elif name == "peer kernel":
        with mock.patch.object(models.layers, "sharded_add_rms_norm", with_peer_kernel):
            yield config
    else:
        yield config


CONTENDERS = ("all-reduce", "ours", "peer kernel")


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, compiles, times and prints."""
    parser = command.parser("benchmarks.training.tensor_parallel", __doc__)
    add_model(parser, layers=4, vocab_size=1024)
    parser.add_argument("--batch-size", dest="rows", type=int, default=2)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args(argv)
    device_kind = timing.require_gpu()
    devices = jax.devices()
    mesh = make_mesh(data=1, fsdp=1, tensor=len(devices), devices=devices)
    config = config_of(arguments, fsdp=1, tensor=len(devices))
    model = dataclasses.replace(config.model, param_dtype="bfloat16")
    config = dataclasses.replace(config, model=model)
    programs, losses = {}, {}
    with jax.set_mesh(mesh):
        params = init_state(config, mesh).params
        batch = random_batch(config, mesh)
        shardings = jax.tree.map(lambda a: a.sharding, abstract_state(config, mesh).params)
        for name in arguments.contenders:
            start = time.perf_counter()
            with contender(name, config) as traced:
                gradients = jax.jit(make_gradients(traced), out_shardings=(None, shardings))
                options = compiler_options(devices)
                programs[name] = gradients.lower(params, batch).compile(options)
            metrics, _ = programs[name](params, batch)
            losses[name] = metrics["loss"].item(), metrics["grad_norm"].item()
            seconds = time.perf_counter() - start
            print(f"{name}: compiled in {seconds:.0f} s", file=sys.stderr, flush=True)
        cases = [
            timing.Case(name, [functools.partial(program, params, batch)])
            for name, program in programs.items()
        ]
        timings = timing.compare(
            cases, rounds=arguments.rounds, calls_per_round=_CALLS, measure=timing.wall_ms
        )
    rows = []
    for name, timed in timings.items():
        loss, norm = losses[name]
        gib = f"{agreement.temporary_bytes(programs[name]) / 2**30:.2f}"
        if timed.error is not None:
            rows.append([name, timed.error, "", gib])
            continue
        ms = [time_ms / arguments.layers for time_ms in timed.times_ms]
        spread = f"{statistics.median(ms):.3f}", f"{min(ms):.3f} - {max(ms):.3f}"
        rows.append([name, *spread, gib, f"{loss:.4f}, {norm:.4f}"])
    header = ["", "ms a layer", "min - max"]
    header += ["GiB beside arguments and results", "loss, gradient norm"]
    print(
        f"{len(devices)} x {device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}\n\n"
        f"    {command.line(parser.prog, argv)}\n"
    )
    print("\n".join(tables.markdown(header, rows)))


if __name__ == "__main__":
    main()
