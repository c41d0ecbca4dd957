"""Which rematerialization policy is fastest and fits: the planner behind `remat="auto"`.

Every policy is traced, and the trace tells how long a step would take (`train.planner.cost`). From the
fastest on, the step is compiled ahead of time as training compiles it, and the first whose memory
fits is chosen; no device needs to be there (`train.planner.aot`). Programs whose estimated memory is far
above the limit are not compiled.

*On several devices* the exchange over `data` and `fsdp`, of parameters and gradients, is taken to
hide behind the computation as far as it is shorter. On four H200s a step of the 1B model took 5 %
(data) and 8 % (fsdp) longer than on one, because a hidden exchange slows the GEMMs beside it. The
exchange over `tensor`, of tokens, is what the next operation waits for, so its time is added: so it
was in a profile of layers of Llama 8B there.
"""

import contextlib
import dataclasses
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.config import AUTO_REMAT
from models.remat import POLICIES, remat_policy
from models.sharding import BATCH_AXES, batch_sharding
from pallas_kernels import hardware
from train.config import MeshConfig, TrainConfig
from train.planner import cost
from train.planner.target import MARGIN, Target, memory_fraction
from train.reporting import metrics
from train.step import abstract_state, jit_train_step, memory_in_bytes

# Estimates of memory were within 9 % of the compiler's for Llamas of 1B and 8B, but for "full" with
# 16 rows of 4096 tokens a device, where XLA holds more of the MLP at a time: 16 % below; and within
# 8 % for scanned layers with `tensor`. Of unrolled ones, on several devices, XLA's latency hiding
# scheduler runs the forward again too early: "full" was 40 % below at 1x1x4. Compiling tells.
HOPELESS = 1.2
_GIB = 2**30


class PlanError(ValueError):
    """Nothing fits; the message says by how much and what would help."""


@runtime_checkable
class Measures(Protocol):
    """What the planner asks of a configuration with a concrete policy."""

    def estimate(self, config: TrainConfig) -> tuple[float, int]:
        """Seconds of a step, and a guess of the bytes on each device."""
        ...

    def memory(self, config: TrainConfig) -> int:
        """Bytes of the compiled step on each device."""
        ...


class Programs:
    """The training steps, traced and compiled for a target."""

    def __init__(self, target: Target):
        self.target = target
        self._traced: dict[TrainConfig, Any] = {}

    def estimate(self, config: TrainConfig) -> tuple[float, int]:
        """Traces the step."""
        mesh, rates = self.target.mesh, self.target.rates
        state = abstract_state(config, mesh)
        leaves = jax.tree.leaves(state)
        # Gradients and updates lie as the parameters of their shape, all else as the batch.
        parts = {a.shape: a.size / math.prod(a.sharding.shard_shape(a.shape)) for a in leaves}
        nbytes = lambda a: cost.nbytes(a) / parts.get(a.shape, mesh.size)
        self._traced[config] = self._in_context(
            lambda: jit_train_step(config, state).trace(state, abstract_batch(config, mesh))
        )
        found = cost.estimate(
            self._traced[config].jaxpr,
            rates,
            bytes_per_device=nbytes,
            num_devices=mesh.size,
            num_aliased=len(leaves),
            hidden_axes=BATCH_AXES,
        )
        received = found.link_bytes + self._hidden_link_bytes(config, state)
        seconds = max(found.seconds, rates.link_seconds(received))
        return seconds, int(sum(map(nbytes, leaves)) + found.temp_bytes)

    def memory(self, config: TrainConfig) -> int:
        """Compiles the step."""
        return memory_in_bytes(self.compile(config))

    def compile(self, config: TrainConfig) -> Any:
        """The compiled step."""
        if config not in self._traced:
            self.estimate(config)
        traced = self._traced.pop(config)
        return self._in_context(lambda: traced.lower().compile())

    def _in_context[T](self, fn: Callable[[], T]) -> T:
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.set_mesh(self.target.mesh))
            device = self.target.mesh.devices.flat[0]
            if device not in jax.local_devices():
                # What runs as a kernel, and for which architecture, depends on this device.
                stack.enter_context(jax.default_device(device))
            return fn()

    def _hidden_link_bytes(self, config: TrainConfig, state: Any) -> float:
        """To gather the parameters twice and to sum the gradients, over `fsdp` and `data`."""
        shape = self.target.mesh.shape
        number = sum(leaf.size for leaf in jax.tree.leaves(state.params)) / shape.get("tensor", 1)
        gathered = 3 * number * jnp.dtype(config.model.dtype).itemsize * (1 - 1 / shape["fsdp"])
        itemsize = jnp.dtype(config.model.param_dtype).itemsize
        summed = 2 * number * itemsize / shape["fsdp"] * (1 - 1 / shape["data"])
        return gathered + summed


def abstract_batch(config: TrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of what a step takes, as the loop's data has them."""
    names = ["tokens", "labels"]
    if config.data.is_packed:
        names += ["segment_ids", "positions"]
    data = config.data
    shape = (data.accumulation_steps, data.batch_size, data.sequence_length)
    sharding = batch_sharding(mesh, batch_axis=1)
    return {name: jax.ShapeDtypeStruct(shape, np.int32, sharding=sharding) for name in names}


def with_remat(config: TrainConfig, remat: str) -> TrainConfig:
    """The configuration with another policy."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def with_policies(config: TrainConfig) -> list[TrainConfig]:
    """The configuration with its policy; if "auto", with each of `models.remat.POLICIES` it allows.

    Offloading, for one, is refused where the layers are unrolled.
    """
    if config.model.remat != AUTO_REMAT:
        return [config]
    configs = []
    for name in POLICIES:
        with contextlib.suppress(ValueError):
            configs.append(with_remat(config, name))
    return configs


@dataclasses.dataclass(kw_only=True)
class Candidate:
    """A configuration with what is known of it.

    Attributes:
      config: with a concrete policy.
      seconds: of a step, estimated.
      estimated_bytes: on each device.
      memory_bytes: on each device, from the compiler; None if not compiled.
      failure: why it did not compile.
    """

    config: TrainConfig
    seconds: float
    estimated_bytes: int
    memory_bytes: int | None = None
    failure: str | None = None

    @property
    def remat(self) -> str:
        """Its policy."""
        return self.config.model.remat

    @property
    def bytes(self) -> int:
        """The compiler's figure if there is one."""
        return self.estimated_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        """Over all devices."""
        return self.config.data.tokens_per_step / self.seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The candidates, fastest first, and which of them was chosen."""

    target: Target
    candidates: list[Candidate]
    best: Candidate


def plan(
    configs: Sequence[TrainConfig],
    target: Target,
    measures: Measures,
    *,
    report: Callable[[str], None] | None = None,
) -> Plan:
    """Chooses the configuration with the most tokens a second among those that fit.

    Args:
      configs: with concrete policies.
      target: what to plan for; where the configurations have several meshes, with one of them.
      measures: `Programs`, or something that answers in their place.
      report: called with a line on what is being done.

    Raises:
      PlanError: none fits.
    """
    report = report or (lambda line: print(line, file=sys.stderr, flush=True))
    candidates = []
    for config in configs:
        seconds, estimated = measures.estimate(config)
        candidates.append(Candidate(config=config, seconds=seconds, estimated_bytes=estimated))
    candidates.sort(key=lambda candidate: -candidate.tokens_per_s)

    def fits(candidate: Candidate) -> bool:
        data = candidate.config.data
        report(
            f"compiling remat {candidate.remat}, {data.batch_size} x {data.sequence_length}, mesh "
            f"{_mesh_name(candidate.config.mesh, target.mesh.size)}"
        )
        try:
            candidate.memory_bytes = measures.memory(candidate.config)
        except Exception as error:
            candidate.failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            report(f"  does not compile: {candidate.failure}")
            return False
        return candidate.memory_bytes <= target.limit_bytes

    limit = target.limit_bytes
    promising = [c for c in candidates if c.estimated_bytes <= HOPELESS * limit]
    best = next(filter(fits, promising), None)
    untried = [c for c in candidates if c.memory_bytes is None and c.failure is None]
    if best is None and len(untried) == len(candidates):
        # All seem hopeless; the compiler has the last word, and its figure goes into the message.
        best = next(filter(fits, [min(candidates, key=lambda candidate: candidate.bytes)]), None)
    if best is None:
        raise PlanError(_nothing_fits(candidates, target))
    return Plan(target, candidates, best)


def _nothing_fits(candidates: list[Candidate], target: Target) -> str:
    compiled = [c for c in candidates if c.memory_bytes is not None]
    if not compiled:
        reason = next(candidate.failure for candidate in candidates if candidate.failure)
        return f"no candidate compiles: {reason}"
    closest = min(compiled, key=lambda candidate: candidate.bytes)
    config, limit = closest.config, target.limit_bytes
    data, tensor, num_devices = config.data, config.mesh.tensor, target.mesh.size
    num_shares = num_devices // tensor
    advice = []
    if data.batch_size > num_shares:
        smaller = max(num_shares, data.batch_size // 2)
        advice.append(
            f"--data.batch-size {smaller} (--data.accumulation-steps keeps the tokens of a step)"
        )
    elif not (num_shares % 2 or config.model.num_key_value_heads % (2 * tensor)):
        advice.append(
            f"--mesh.tensor {2 * tensor} --mesh.fsdp {num_shares // 2} --data.batch-size "
            f"{data.batch_size // 2}, fewer sequences, which devices share"
        )
    if config.mesh.fsdp < num_shares:
        advice.append(f"--mesh.fsdp {num_shares}, which splits parameters and moments")
    enough = num_devices * closest.bytes / limit
    enough = 2 ** math.ceil(math.log2(max(enough, num_devices + 1)))
    advice.append(f"more devices, {enough} or so, with --mesh.fsdp {enough // tensor}")
    if config.model.param_dtype == "float32":
        advice.append("--model.param-dtype bfloat16, half of parameters, gradients and moments")
    if len({c.remat for c in candidates}) == 1 and config.model.remat != "full":
        advice.append("--model.remat auto")
    if target.pool.startswith("XLA's") and memory_fraction() < 0.9:
        advice.append("XLA_CLIENT_MEM_FRACTION=0.92 in the environment")
    advice.append("a shorter --data.sequence-length")
    return (
        f"nothing fits into {limit / _GIB:.1f} GiB of each {target.device_kind} ({target.pool}, "
        f"less {MARGIN:.0%}). Closest: remat {closest.remat}, {data.batch_size} x "
        f"{data.sequence_length} tokens, needs {closest.bytes / _GIB:.1f} GiB, "
        f"{(closest.bytes - limit) / _GIB:.1f} too many. What helps: {'; '.join(advice)}"
    )


def _mesh_name(mesh: MeshConfig, num_devices: int) -> str:
    return f"{num_devices // (mesh.fsdp * mesh.tensor)}x{mesh.fsdp}x{mesh.tensor}"


def table(chosen: Plan) -> str:
    """What was chosen from: a line each, with `*` before the choice."""
    target = chosen.target
    config = chosen.best.config
    lines = [
        f"{config.name} on {target.mesh.size} x {target.device_kind} (mesh: data x fsdp x tensor), "
        f"{config.data.sequence_length} tokens a row, layers "
        f"{'scanned' if config.model.scan_layers else 'unrolled'}",
        f"limit {target.limit_bytes / _GIB:.1f} GiB a device: {target.pool}, less {MARGIN:.0%}",
        f"  {'remat':<12} {'mesh':>6} {'batch':>6} {'GiB':>7} {'fits':>5} {'ms/step':>8} "
        f"{'tokens/s':>9} {'MFU':>6}  policy",
    ]
    flops = metrics.flops_per_token(config.model, config.data.sequence_length)
    peak = hardware.lookup(target.device_kind)
    order = list(dict.fromkeys(candidate.remat for candidate in chosen.candidates))
    described: set[str] = set()
    for row in sorted(
        chosen.candidates,
        key=lambda c: (c.config.mesh.tensor, order.index(c.remat), c.config.data.batch_size),
    ):
        used = metrics.mfu(row.tokens_per_s, flops, peak, target.mesh.size)
        guess = "~" if row.memory_bytes is None else " "
        fits = guess + ("yes" if row.bytes <= target.limit_bytes else "no")
        if row.failure:
            fits = "fails"
        elif row.memory_bytes is None and 1 / HOPELESS < row.bytes / target.limit_bytes < HOPELESS:
            fits = "?"
        keeps = "" if row.remat in described else remat_policy(row.remat).description
        described.add(row.remat)
        lines.append(
            f"{'*' if row is chosen.best else ' '} {row.remat:<12} "
            f"{_mesh_name(row.config.mesh, target.mesh.size):>6} "
            f"{row.config.data.batch_size:>6} {guess + format(row.bytes / _GIB, '.1f'):>7} "
            f"{fits:>5} {row.seconds * 1e3:>8.0f} {metrics.format_count(row.tokens_per_s):>9} "
            f"{'-' if used is None else format(used, '.1%'):>6}  {keeps}".rstrip()
        )
    if any(row.memory_bytes is None for row in chosen.candidates):
        lines.append("~ estimated from the trace, ? too near the limit to tell; the rest: compiled")
    if not target.rates.known:
        lines.append(f"no peak rates are known for {target.device_kind!r}: times only rank")
    return "\n".join(lines)
