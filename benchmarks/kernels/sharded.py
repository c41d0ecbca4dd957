"""Times the sharded residual-add RMSNorm over all GPUs of this host, by implementation.

    python -m benchmarks.kernels.sharded --shapes 8192x4096 1024x8192 32768x4096

The shapes are tokens x D; the data are random bfloat16 numbers. A program is a chain of operations:
each takes the result of the previous one as its partial sums, so that the program has no other work
and no dispatch between operations. A time is the wall time of the program over the number of
operations, the median over interleaved rounds. `all-reduce` is tensor parallelism without sharded
tokens: a sum, then the addition and the norm of all tokens on every device. The rate is the number
of bytes that a device must receive, 2·(n-1)/n arrays, over the time of the operation. NVLink
delivers 450 GB/s to an H100 or H200.
"""

import functools
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import agreement, command, tables, timing
from benchmarks.kernels import shapes
from benchmarks.kernels.shapes import Shape
from pallas_kernels import add_rms_norm, sharded_add_rms_norm

SHAPES: tuple[Shape, ...] = ((8192, 4096), (1024, 8192), (32768, 4096))
_AXIS = "tensor"
_LENGTH = 16  # operations in a chain
_CALLS = 4  # of a program in a round


def all_reduce(partial: jax.Array, residual: jax.Array, weight: jax.Array) -> Any:
    """Sums on all devices; each of them has all tokens of the residual."""
    return add_rms_norm(jax.lax.psum(partial, _AXIS), residual, weight)


_SHARDED = functools.partial(sharded_add_rms_norm, axis_name=_AXIS)
# The operation of each, and whether it splits the residual by tokens.
CONTENDERS: dict[str, tuple[Callable[..., Any], bool]] = {
    "all-reduce, add_rms_norm": (all_reduce, False),
    "xla": (functools.partial(_SHARDED, implementation="xla"), True),
    "mosaic_gpu": (functools.partial(_SHARDED, implementation="mosaic_gpu"), True),
}


def program(name: str, mesh: Mesh, *, backward: bool) -> Any:
    """The chain of a contender on the mesh, or its forward and backward."""
    fn, is_split = CONTENDERS[name]
    fn = jax.jit(fn)  # so that the chain lowers it once

    def chain(partial, residual, weight):
        for _ in range(_LENGTH):
            partial, residual = fn(partial, residual, weight)
        return partial, residual

    def both(*args):
        outputs, vjp = jax.vjp(chain, *args)
        return vjp(outputs)

    tokens = P(_AXIS) if is_split else P()
    outputs = (P(), tokens, P()) if backward else (P(), tokens)
    return jax.jit(
        jax.shard_map(
            both if backward else chain,
            mesh=mesh,
            in_specs=(P(), tokens, P()),
            out_specs=outputs,
            check_vma=False,
        )
    )


def measure(shape: Shape, mesh: Mesh, rounds: int, *, backward: bool) -> dict[str, Any]:
    """The milliseconds of one operation by contender, or the error that it raised."""
    keys = jax.random.split(jax.random.key(0), 2)
    # Every device has the same partial sums; their values do not change the time.
    whole = jax.random.normal(keys[0], shape, jnp.bfloat16) / mesh.size
    weight = 1 + jax.random.normal(keys[1], shape[-1:], jnp.float32) / 8
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    cases, expected = [], agreement.of_first()
    for name, (_, is_split) in CONTENDERS.items():
        args = place(whole, P()), place(whole, P(_AXIS) if is_split else P()), place(weight, P())

        def prepare(name: str = name, args: Any = args) -> list[Callable[[], Any]]:
            compiled = program(name, mesh, backward=backward).lower(*args).compile()
            return [functools.partial(compiled, *args)]

        def wrong(result: Any, is_split: bool = is_split) -> str | None:
            got = [np.asarray(result[0])]
            # In `all-reduce` every device has a whole residual and adds the gradient of its own.
            if not is_split and backward:
                return None
            # The contenders round sixteen sums in bfloat16 in different orders.
            return agreement.reason(got, expected(got), limit=0.1)

        cases.append(agreement.checked(name, prepare, wrong))
    timings = timing.compare(cases, rounds=rounds, calls_per_round=_CALLS, measure=timing.wall_ms)
    results: dict[str, Any] = {}
    for name, timed in timings.items():
        if timed.error is not None:
            results[name] = {"error": timed.error}
            continue
        times = [ms / _LENGTH for ms in timed.times_ms]
        moved = 2 * (2 if backward else 1) * (mesh.size - 1) / mesh.size * whole.nbytes
        median = statistics.median(times)
        rate = moved / median * 1e3
        results[name] = {"times_ms": times, "median_ms": median, "bytes_per_s": rate}
    return results


def table(records: Sequence[dict[str, Any]]) -> str:
    """The table in Markdown."""
    cell = lambda result: (
        result.get("error")
        or (f"{result['median_ms']:.3f} ms, {result['bytes_per_s'] / 1e9:.0f} GB/s")
    )
    rows = [[r["name"], *(cell(r["results"][name]) for name in CONTENDERS)] for r in records]
    return "\n".join(tables.markdown(["", *CONTENDERS], rows)) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, writes and prints."""
    parser = command.parser("benchmarks.kernels.sharded", __doc__)
    parser.add_argument("--shapes", nargs="+", type=shapes.parse, default=list(SHAPES))
    command.add_results(parser, rounds=12)
    args = parser.parse_args(argv)
    timing.require_gpu()
    devices = jax.devices()
    if len(devices) < 2:
        parser.error(f"the exchange needs several GPUs, and there is {len(devices)}")
    run = command.Run.start(parser, argv, args.rounds, num_gpus=len(devices))
    mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
    records = []
    for shape, backward in itertools.product(args.shapes, (False, True)):
        name = f"{shapes.label(shape)} {'forward and backward' if backward else 'forward'}"
        print(f"{name} ...", file=sys.stderr, flush=True)
        results = measure(shape, mesh, args.rounds, backward=backward)
        records.append({"name": name, "shape": list(shape), "results": results})
    what = f"bfloat16, wall time of one of {_LENGTH} in a program"
    text = run.heading("sharded_add_rms_norm", what) + table(records)
    run.write(args.output_dir, "sharded_add_rms_norm", records, text)
    print(text)


if __name__ == "__main__":
    main()
