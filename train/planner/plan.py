"""Chooses the fastest rematerialization policy that fits: the planner behind `remat="auto"`.

The planner traces the step with every policy and estimates its time from the trace
(`train.planner.cost`). Then it compiles steps ahead of time, as training compiles them, fastest
first, and takes the first whose memory fits. No device needs to be in this machine
(`train.planner.aot`). It skips programs whose estimated memory is far above the limit.

*On several devices* the planner assumes that the exchange of parameters and gradients over `data`
and `fsdp` hides behind the computation: a step takes the longer of the two times. On four H200s a
step of the 1B model took 5 % (data) and 8 % (fsdp) longer than on one, because a hidden exchange
slows the GEMMs beside it. The exchange of tokens over `tensor` hides behind nothing, because the
next operation waits for it. So its time is added. A profile of layers of Llama 8B on the H200s
showed this.
"""

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from models.config import AUTO_REMAT
from models.fp8 import size_in_fp8
from models.remat import POLICIES, remat_policy
from models.sharding import BATCH_AXES, batch_sharding
from pallas_kernels import hardware
from train.config import MeshConfig, TrainConfig
from train.errors import one_line
from train.formats import format_count
from train.planner import cost
from train.planner.splits import Splits
from train.planner.target import MARGIN, Target, memory_fraction
from train.reporting import metrics
from train.step import abstract_state, contexts_of_rows, jit_train_step, memory_in_bytes
from train.teacher import abstract_frozen

# A step is compiled if its estimated memory is at most this many times the limit. Estimates were
# within 9 % of the compiler's figure for Llamas of 1B and 8B, with one exception: "full" with 16
# rows of 4096 tokens a device was 16 % below, because XLA holds more of the MLP at a time. Scanned
# layers with `tensor` were within 8 %. With unrolled layers on several devices, XLA's latency
# hiding scheduler repeats the forward too early, and the estimate for "full" was 40 % below at
# 1x1x4. The compiler's figure decides in the end.
HOPELESS = 1.2
_GIB = 2**30


class PlanError(ValueError):
    """No configuration fits; the message says by how much, and what would help."""


@runtime_checkable
class Measures(Protocol):
    """The planner's questions about a configuration with a concrete policy."""

    def estimate(self, config: TrainConfig) -> tuple[float, int]:
        """Estimated seconds of a step, and estimated bytes on each device."""
        ...

    def memory(self, config: TrainConfig) -> int:
        """Bytes of the compiled step on each device."""
        ...


class Programs:
    """The training steps, traced and compiled for a target."""

    def __init__(self, target: Target):
        self.target = target
        self._traced: dict[TrainConfig, Any] = {}
        self._workspace: dict[TrainConfig, float] = {}

    def estimate(self, config: TrainConfig) -> tuple[float, int]:
        """Traces the step."""
        mesh, rates = self.target.mesh, self.target.rates
        state, frozen = abstract_state(config, mesh), abstract_frozen(config, mesh)
        leaves, splits = jax.tree.leaves(state), Splits((state, frozen), mesh)
        # The longer of two windows counts, because the trace does not say whose attention it is.
        share = max(contexts_of_rows(config).values()) / (config.data.sequence_length / 2)
        with self._context():
            batch = abstract_batch(config, mesh)
            traced = jit_train_step(config, state).trace(state, batch, *frozen)
            program = cost.Program(
                rates,
                bytes_per_device=splits.bytes_per_device,
                num_devices=mesh.size,
                hidden_axes=BATCH_AXES,
                body_of_device=splits.body_of_device,
                share_of_pairs=share,
            )
            found = program.estimate(traced.jaxpr, num_aliased=len(leaves))
            if not self._is_here():
                program = dataclasses.replace(program, has_workspace=False)
                without = program.estimate(traced.jaxpr, num_aliased=len(leaves))
                self._workspace[config] = found.temp_bytes - without.temp_bytes
        self._traced[config] = traced
        received = found.link_bytes + self._hidden_link_bytes(config, state, frozen)
        seconds = max(found.seconds, rates.link_seconds(received))
        held = sum(map(splits.bytes_per_device, [*leaves, *jax.tree.leaves(frozen)]))
        return seconds, int(held + found.temp_bytes)

    def memory(self, config: TrainConfig) -> int:
        """Compiles the step.

        A compilation without the device leaves out cuDNN's workspace. So what the workspace adds to
        the estimate is added here.
        """
        memory = memory_in_bytes(self.compile(config))
        return memory if self._is_here() else memory + int(self._workspace[config])

    def compile(self, config: TrainConfig) -> Any:
        """The compiled step."""
        if config not in self._traced:
            self.estimate(config)
        traced = self._traced.pop(config)
        with self._context():
            return traced.lower().compile()

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        mesh = self.target.mesh
        # The default device decides which kernels run, and for which architecture.
        on_target = jax.default_device(mesh.devices.flat[0])
        with jax.set_mesh(mesh), contextlib.nullcontext() if self._is_here() else on_target:
            yield

    def _is_here(self) -> bool:
        return self.target.mesh.devices.flat[0] in jax.local_devices()

    def _hidden_link_bytes(self, config: TrainConfig, state: Any, frozen: Any) -> float:
        """Bytes received to gather the parameters twice and to sum the gradients, for each batch.

        Weights whose products run in FP8 are gathered in FP8. Their gradients are not in FP8. The
        parameters of a teacher are gathered once a batch.
        """
        shape, recipe = self.target.mesh.shape, config.model.fp8
        tensor = shape.get("tensor", 1)
        number = sum(leaf.size for leaf in jax.tree.leaves(state.params)) / tensor
        in_fp8 = size_in_fp8(state.params["layers"], recipe, tensor) if recipe else 0
        itemsize = jnp.dtype(config.model.dtype).itemsize
        of_teacher = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
        gathered = 3 * number * itemsize - 2 * in_fp8 * (itemsize - 1) + of_teacher
        gathered *= 1 - 1 / shape["fsdp"]
        itemsize = jnp.dtype(config.model.param_dtype).itemsize
        summed = 2 * number * itemsize / shape["fsdp"] * (1 - 1 / shape["data"])
        return (gathered + summed) * config.data.accumulation_steps


def abstract_batch(config: TrainConfig, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and shardings of a batch, equal to those of the batches that the loop makes."""
    names, data = ["tokens", "labels"], config.data
    is_preferences = config.objective == "dpo"
    if data.is_packed and not is_preferences:
        names += ["segment_ids", "positions"]
    shape = (data.accumulation_steps, data.batch_size)
    sharding = batch_sharding(mesh, batch_axis=1)
    of = lambda size, dtype: jax.ShapeDtypeStruct((*shape, size), dtype, sharding=sharding)
    batch = {name: of(data.sequence_length, np.int32) for name in names}
    return batch | ({"reference": of(1, np.float32)} if is_preferences else {})


def with_remat(config: TrainConfig, remat: str) -> TrainConfig:
    """The configuration with another policy."""
    return dataclasses.replace(config, model=dataclasses.replace(config.model, remat=remat))


def with_policies(config: TrainConfig) -> list[TrainConfig]:
    """The configurations to choose from: one for each policy if the policy is "auto".

    Policies that the configuration does not allow are left out, for example offloading with
    unrolled layers.
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
    """A configuration and its measurements.

    Attributes:
      config: Configuration with a concrete policy.
      seconds: Estimated time of a step.
      estimated_bytes: Estimated memory on each device.
      memory_bytes: Memory on each device, from the compiler; None before compilation.
      failure: Error of the compilation; None if there was none.
    """

    config: TrainConfig
    seconds: float
    estimated_bytes: int
    memory_bytes: int | None = None
    failure: str | None = None

    @property
    def remat(self) -> str:
        """The name of its policy."""
        return self.config.model.remat

    @property
    def bytes(self) -> int:
        """Memory on each device: the compiler's figure, or the estimate if there is none."""
        return self.estimated_bytes if self.memory_bytes is None else self.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return self.config.data.tokens_per_step / self.seconds


@dataclasses.dataclass(frozen=True)
class Plan:
    """The candidates, fastest first, and the one that was chosen."""

    target: Target
    candidates: list[Candidate]
    best: Candidate


def plan(configs: Sequence[TrainConfig], target: Target, measures: Measures) -> Plan:
    """Chooses the configuration with the most tokens a second among those that fit.

    Standard error gets a line before each compilation.

    Args:
      configs: Configurations with concrete policies.
      target: Devices to plan for. Its mesh is one of the meshes of the configurations.
      measures: `Programs`, or an object that answers the same questions.

    Raises:
      PlanError: No configuration fits.
    """
    report = functools.partial(print, file=sys.stderr, flush=True)
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
            candidate.failure = one_line(error)
            report(f"  does not compile: {candidate.failure}")
            return False
        return candidate.memory_bytes <= target.limit_bytes

    limit = target.limit_bytes
    promising = [c for c in candidates if c.estimated_bytes <= HOPELESS * limit]
    best = next(filter(fits, promising), None)
    untried = [c for c in candidates if c.memory_bytes is None and c.failure is None]
    if best is None and len(untried) == len(candidates):
        # All seem hopeless. Compile the smallest, so that the message has a figure of the compiler.
        best = next(filter(fits, [min(candidates, key=lambda candidate: candidate.bytes)]), None)
    if best is None:
        raise PlanError(_nothing_fits(candidates, target))
    return Plan(target, candidates, best)


def _nothing_fits(candidates: list[Candidate], target: Target) -> str:
    compiled = [c for c in candidates if c.memory_bytes is not None]
    if not compiled:
        reason = next(candidate.failure for candidate in candidates if candidate.failure)
        return f"no candidate compiles: {reason}; try another --model.remat"
    closest = min(compiled, key=lambda candidate: candidate.bytes)
    config, limit = closest.config, target.limit_bytes
    data, tensor, num_devices = config.data, config.mesh.tensor, target.mesh.size
    num_shares = num_devices // tensor
    advice = []
    least = num_shares * config.rows_of_example
    if data.batch_size > least:
        smaller = max(least, data.batch_size // 2 // least * least)
        advice.append(
            f"--data.batch-size {smaller} (--data.accumulation-steps keeps the tokens of a step)"
        )
    elif not (num_shares % 2 or config.model.num_key_value_heads % (2 * tensor)):
        advice.append(
            f"--mesh.tensor {2 * tensor} --mesh.fsdp {num_shares // 2} --data.batch-size "
            f"{data.batch_size // 2}, which is fewer sequences, each shared by devices"
        )
    if config.mesh.fsdp < num_shares:
        advice.append(f"--mesh.fsdp {num_shares}, which splits parameters and moments")
    enough = num_devices * closest.bytes / limit
    enough = 2 ** math.ceil(math.log2(max(enough, num_devices + 1)))
    advice.append(f"more devices, {enough} or so, with --mesh.fsdp {enough // tensor}")
    if config.model.param_dtype == "float32":
        advice.append(
            "--model.param-dtype bfloat16, which halves parameters, gradients and moments"
        )
    if len({c.remat for c in candidates}) == 1 and config.model.remat != "full":
        advice.append("--model.remat auto")
    if target.is_share and memory_fraction() < 0.9:
        advice.append("XLA_CLIENT_MEM_FRACTION=0.92 in the environment")
    advice.append("a shorter --data.sequence-length")
    return (
        f"nothing fits into {limit / _GIB:.1f} GiB of each {target.device_kind} ({target.pool}, "
        f"less {MARGIN:.0%}). The closest, remat {closest.remat}, {data.batch_size} x "
        f"{data.sequence_length} tokens, needs {closest.bytes / _GIB:.1f} GiB, "
        f"{(closest.bytes - limit) / _GIB:.1f} too many. Each of these helps: {'; '.join(advice)}"
    )


def _memory_of_objective(config: TrainConfig, target: Target) -> str | None:
    """A line on the memory that an objective takes besides the model's."""
    if config.objective == "dpo":
        return (
            "dpo: the reference takes no memory in a step, because its log-probabilities are "
            "computed before the first one"
        )
    if config.objective == "distill":
        leaves = jax.tree.leaves(abstract_frozen(config, target.mesh))
        size = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in leaves)
        return f"distill: the teacher's parameters, {size / _GIB:.1f} GiB a device, are counted"
    return None


def _mesh_name(mesh: MeshConfig, num_devices: int) -> str:
    return f"{num_devices // (mesh.fsdp * mesh.tensor)}x{mesh.fsdp}x{mesh.tensor}"


def table(chosen: Plan) -> str:
    """The candidates as a table, with `*` before the chosen one."""
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
    flops = metrics.flops_of_run(config)(contexts_of_rows(config))
    if of_objective := _memory_of_objective(config, target):
        lines.insert(1, of_objective)
    peak = hardware.lookup(target.device_kind)
    order = list(dict.fromkeys(candidate.remat for candidate in chosen.candidates))
    described: set[str] = set()
    for row in sorted(
        chosen.candidates,
        key=lambda c: (c.config.mesh.tensor, order.index(c.remat), c.config.data.batch_size),
    ):
        used = metrics.mfu(row.tokens_per_s * flops, peak, target.mesh.size)
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
            f"{fits:>5} {row.seconds * 1e3:>8.0f} {format_count(row.tokens_per_s):>9} "
            f"{'-' if used is None else format(used, '.1%'):>6}  {keeps}".rstrip()
        )
    if any(row.memory_bytes is None for row in chosen.candidates):
        lines.append("~ is estimated from the trace, ? is too near the limit; the rest is compiled")
    if not target.rates.known:
        lines.append(f"the speed of {target.device_kind!r} is not known: times only show the order")
    return "\n".join(lines)
