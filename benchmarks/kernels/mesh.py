"""Times the operations with their gradients on a mesh, against plain JAX and a `shard_map` by hand.

    JAX_PLATFORMS=cpu python -m benchmarks.kernels.mesh --operations loss   # eight CPU devices
    python -m benchmarks.kernels.mesh                                       # all GPUs of this host

`Auto` and `Explicit` are plain calls of the public operation on a mesh whose axis has that type.
`by hand` is a `shard_map` as a user would write it. It gathers a split weight in the dtype of the
activations, and calls the operation on a device's tokens. Then it sums the gradient of the weight
in float32, and scatters it if the weight is split. `plain JAX` is the formula, as XLA partitions
it. Tokens are split in every case. A weight is whole, or split as FSDP splits it. Weights are
float32, activations bfloat16 on GPUs and float32 on CPUs. A time is the wall time of a call, the
median over interleaved rounds.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import agreement, command, timing
from pallas_kernels import linear_cross_entropy, rms_norm, swiglu_mlp

_NUM_CPU_DEVICES = 8
_AXIS = "data"
_TOKENS = P(_AXIS)
WAYS = ("plain JAX", "by hand", "Auto", "Explicit")


def plain_norm(x: Any, weight: Any) -> Any:
    """The norm in float32, rounded once."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
    return (x32 * scale * weight).astype(x.dtype)


def plain_mlp(x: Any, gate: Any, up: Any, down: Any) -> Any:
    """The gated MLP with gate and up products in memory."""
    gate, up, down = (w.astype(x.dtype) for w in (gate, up, down))
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def plain_loss(x: Any, weight: Any, labels: Any) -> Any:
    """The mean loss with all logits in memory."""
    logits = jnp.matmul(x, weight.T.astype(x.dtype), preferred_element_type=jnp.float32)
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label_logits)


@dataclasses.dataclass(frozen=True)
class Work:
    """An operation, its arrays and how they are split.

    Attributes:
      operation: Operation to call.
      plain: Formula of the operation.
      shapes: Shapes of the activations and of the weights.
      weights: Split of each weight.
      num_labels: Size of the vocabulary if the operation takes labels, else None.
    """

    operation: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: Sequence[tuple[int, ...]]
    weights: Sequence[P]
    num_labels: int | None = None

    def arrays(self, mesh: Mesh, dtype: Any) -> tuple[Any, ...]:
        """Random arrays in their places; the last one is the cotangent or the labels."""
        keys = jax.random.split(jax.random.key(0), len(self.shapes) + 1)
        place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
        x = place(jax.random.normal(keys[0], self.shapes[0], dtype), _TOKENS)
        weights = [
            place(jax.random.normal(k, s, jnp.float32) / (s[-1] ** 0.5 if s[1:] else 1), spec)
            for k, s, spec in zip(keys[1:], self.shapes[1:], self.weights, strict=False)
        ]
        if self.num_labels is None:
            last = jax.random.normal(keys[-1], self.shapes[0], dtype)
        else:
            last = jax.random.randint(keys[-1], self.shapes[0][:-1], 0, self.num_labels)
        return x, *weights, place(last, _TOKENS)

    def gradients(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the value of `fn` and its gradients by the activations and the weights."""

        def run(*args: Any) -> Any:
            *floating, last = args
            if self.num_labels is not None:
                return jax.value_and_grad(fn, tuple(range(len(floating))))(*args)
            out, vjp = jax.vjp(fn, *floating)
            return out, vjp(last)

        return run

    def by_hand(self, mesh: Mesh) -> Callable[..., Any]:
        """The gradients with a `shard_map` around the operation."""

        def local(x: Any, *rest: Any) -> Any:
            *weights, last = rest
            whole = [
                jax.lax.all_gather(w.astype(x.dtype), _AXIS, axis=spec.index(_AXIS), tiled=True)
                if _AXIS in spec
                else w
                for w, spec in zip(weights, self.weights, strict=True)
            ]
            out, (dx, *gradients) = self.gradients(self.operation)(x, *whole, last)
            if self.num_labels is not None:
                # The mean over all tokens: every device has the same number of them.
                out = jax.lax.pmean(out, _AXIS)
                dx, *gradients = (g / mesh.size for g in (dx, *gradients))
            gradients = [g.astype(jnp.float32) for g in gradients]
            summed = (
                jax.lax.psum_scatter(g, _AXIS, scatter_dimension=spec.index(_AXIS), tiled=True)
                if _AXIS in spec
                else jax.lax.psum(g, _AXIS)
                for g, spec in zip(gradients, self.weights, strict=True)
            )
            return out, (dx, *summed)

        out = P() if self.num_labels is not None else _TOKENS
        return jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(_TOKENS, *self.weights, _TOKENS),
            out_specs=(out, (_TOKENS, *self.weights)),
            check_vma=False,
        )


# Tokens of a device, D, F and V; and all tokens, D and V of a trainer's loss.
type Sizes = tuple[int, int, int, int, tuple[int, int, int]]
SIZES: dict[str, Sizes] = {
    "cpu": (512, 512, 1536, 8192, (4096, 512, 8192)),
    "gpu": (8192, 4096, 14336, 128256, (32768, 2560, 128256)),
}


def works(num_devices: int, sizes: Sizes) -> dict[str, Work]:
    """The work by name."""
    tokens, hidden, wide, vocab, (num_rows, width, words) = sizes
    tokens *= num_devices
    mlp = [(tokens, hidden), (hidden, wide), (hidden, wide), (wide, hidden)]
    loss = Work(linear_cross_entropy, plain_loss, [(tokens, hidden), (vocab, hidden)], [P()], vocab)
    rows = dataclasses.replace(loss, weights=[P(_AXIS, None)])
    return {
        "norm": Work(rms_norm, plain_norm, [(tokens, hidden), (hidden,)], [P()]),
        "mlp, weights whole": Work(swiglu_mlp, plain_mlp, mlp, [P()] * 3),
        "mlp, FSDP": Work(swiglu_mlp, plain_mlp, mlp, [P(_AXIS, None)] * 3),
        "loss, weight whole": loss,
        "loss, FSDP": rows,
        "loss of a trainer, FSDP": dataclasses.replace(
            rows, shapes=[(num_rows, width), (words, width)], num_labels=words
        ),
    }


def cases_of(work: Work, num_devices: int, dtype: Any) -> list[timing.Case]:
    """The ways to call the operation, each compiled for its mesh."""
    meshes = {
        name: jax.make_mesh((num_devices,), (_AXIS,), axis_types=(kind,))
        for name, kind in (("Auto", AxisType.Auto), ("Explicit", AxisType.Explicit))
    }
    ours = work.gradients(work.operation)
    ways = {
        "plain JAX": (meshes["Auto"], work.gradients(work.plain)),
        "by hand": (meshes["Auto"], work.by_hand(meshes["Auto"])),
        "Auto": (meshes["Auto"], ours),
        "Explicit": (meshes["Explicit"], ours),
    }
    cases = []
    for name, (mesh, run) in ways.items():
        splits = tuple(NamedSharding(mesh, spec) for spec in (_TOKENS, *work.weights))
        out = NamedSharding(mesh, P() if work.num_labels is not None else _TOKENS)
        # An Auto program chooses the places of its results, unless they are named.
        jitted = jax.jit(run, out_shardings=None if name == "Explicit" else (out, splits))

        def prepare(mesh: Mesh = mesh, jitted: Any = jitted) -> list[Callable[[], Any]]:
            args = work.arrays(mesh, dtype)
            return [functools.partial(jitted.lower(*args).compile(), *args)]

        unchecked = lambda result: None  # `errors` compares the results
        with jax.set_mesh(mesh):
            cases.append(agreement.checked(name, prepare, unchecked, agreement.bytes_of_first))
    return cases


def errors(cases: Sequence[timing.Case]) -> dict[str, float]:
    """Largest relative difference of a gradient from those of the program by hand."""
    results = {
        case.name: [jax.device_get(a) for a in jax.tree.leaves(case.calls[0]())]
        for case in cases
        if case.error is None
    }
    want = results.pop("by hand")
    return {name: agreement.relative_error(got, want) for name, got in results.items()}


def line(
    cases: Sequence[timing.Case], timings: dict[str, timing.Timing], wrong: dict[str, float]
) -> str:
    """The cells of a table: time, time over that by hand, temporary memory of a device."""
    cells = []
    by_hand = timings["by hand"].median_ms
    for case in cases:
        timed = timings[case.name]
        if timed.error is not None:
            cells.append(timed.error)
            continue
        memory = (case.temporary_bytes or 0) / 2**20
        difference = f", {wrong[case.name]:.0e}" if case.name in wrong else ""
        ms = timed.median_ms
        cells.append(f"{ms:.3g} ms, {ms / by_hand:.3f}, {memory:.0f} MiB{difference}")
    return " | ".join(cells)


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table with a line for each operation."""
    parser = command.parser("benchmarks.kernels.mesh", __doc__)
    parser.add_argument("--operations", nargs="+", help="beginnings of names; all by default")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--calls", type=int, default=4, help="calls of a program in a round")
    flags = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", _NUM_CPU_DEVICES)
    devices = jax.devices()
    if len(devices) < 2:
        sys.exit(f"this needs several devices; JAX found only {devices[0].device_kind!r}")
    is_cpu = devices[0].platform == "cpu"
    print(f"{len(devices)} x {devices[0].device_kind}; time, over `by hand`, memory, difference\n")
    print(f"| | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
    for name, work in works(len(devices), SIZES[devices[0].platform]).items():
        if flags.operations and not name.startswith(tuple(flags.operations)):
            continue
        dtype = jnp.float32 if is_cpu else jnp.bfloat16
        cases = cases_of(work, len(devices), dtype)
        wrong = errors(cases)
        timings = timing.compare(
            cases, rounds=flags.rounds, calls_per_round=flags.calls, measure=timing.wall_ms
        )
        print(f"| {name} | {line(cases, timings, wrong)} |", flush=True)


if __name__ == "__main__":
    main()
