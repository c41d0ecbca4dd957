"""Estimates the time and the memory of a traced step, without compiling it.

XLA's own cost analysis does not help here. For devices that are not in this machine it does not
exist (`Compiled.cost_analysis()` is None on a topology). Elsewhere it counts no FLOPs for custom
calls, and cuBLAS, cuDNN and our kernels are custom calls. So this module reads the jaxpr, which has
every GEMM, also those that rematerialization runs again:

- A GEMM or an attention takes the time of its FLOPs or of its bytes, whichever is longer.
- Elementwise operations that depend on each other, with no GEMM, kernel or reduction between them,
  count as one fusion, which reads its inputs and writes its outputs once.
- GEMMs and kernels read and write whole buffers, not slices. So a loop over layers copies the
  slices of its stacked inputs and outputs that they use. On one device, with the options of
  `train.xla_flags`, GEMMs and our kernels use slices without a copy, and attention does not.
- Data that goes to host memory or comes back takes the time of its bytes on the bus. Nothing else
  runs at that time.
- The loss holds its results beside its inputs. On several devices, each device computes the loss
  for its own tokens, with the whole weight. The other operations are split evenly.
- A collective in a `jax.shard_map` takes the time in which a device receives its bytes over the
  link. Nothing else runs at that time, unless the planner assumes that the exchange over its axis
  hides (`train.planner.plan`).

The times add up: there is one stream without gaps between kernels, and no exchange by XLA's
partitioner. Memory is followed through the program in the order of the jaxpr. Both estimates only
choose the programs to compile; the compiler's memory decides.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from train.planner import attention
from train.planner.dataflow import (
    COLLECTIVES,
    LOSSES,
    SLICES,
    UPDATES,
    Op,
    Value,
    accumulates,
    fuse,
    fusions,
    is_addend,
    is_kernel,
    nbytes,
    operations,
    overwrites,
)

# Measured on an H100, as shares of its peaks: a large GEMM 683 TFLOP/s, a copy 2.8 TB/s, and
# cuDNN's causal attention with 64 channels a head 390 TFLOP/s forward and 330 backward
# (benchmarks/results/train_step_llama3.2-1b_h100_202611.md). All devices use these shares.
GEMM_EFFICIENCY = 0.69
COPY_EFFICIENCY = 0.84
ATTENTION_EFFICIENCY = 0.39
ATTENTION_BACKWARD_EFFICIENCY = 0.33
# Measured on four H200s: in NCCL's all-gathers and reduce-scatters of 64 MiB each device receives
# 270 GB/s from the others; NVLink has 450. Smaller collectives are slower, because each has a fixed
# cost, which is not counted. All links use this share.
LINK_EFFICIENCY = 0.60


# Number of GEMMs in a kernel, by its name. Where XLA runs the FP8 products in place of a kernel,
# they count as products in 16 bits, of operands that are cast back.
_PRODUCTS = {
    "gated_matmul": 2,
    "gated_matmul_backward": 1,
    "fp8_matmul": 1,
    "fp8_gated_matmul": 2,
    "linear_statistics": 1,
    "linear_exponentials": 1,
}
# The kernels named `fp8_*` run GEMMs at twice the rate of 16 bits: 1400 to 1570 TFLOP/s on an H200.
_FP8_RATE = 2.0
# Kernels with one GEMM. The first dimension of the result is no dimension of the first operand. So
# the FLOPs are twice that dimension times the size of that operand.
_GRADIENTS = {"input_gradient", "weight_gradient", "weight_gradient_rows"}
# A kernel without work, unless a logit is far above its label's.
_WITHOUT_WORK = {"linear_exponentials_again"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """The speeds of a device.

    Attributes:
      flops: Peak of dense 16-bit matrix products, FLOP/s.
      bandwidth: Peak of its memory, bytes/s.
      host_bandwidth: Bandwidth to its host, bytes/s in one direction.
      link_bandwidth: Bandwidth to the other devices, bytes/s in one direction. 0 means unknown, and
        then exchanges take no time.
      known: Whether the figures are this device's; otherwise they only put programs in order.
    """

    flops: float
    bandwidth: float
    host_bandwidth: float
    link_bandwidth: float = 0.0
    known: bool = True

    def link_seconds(self, size: float) -> float:
        """Seconds to receive `size` bytes from other devices."""
        return size / (self.link_bandwidth * LINK_EFFICIENCY) if self.link_bandwidth else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one run of a program, on each device.

    Attributes:
      seconds: Time in seconds.
      flops: FLOPs in GEMMs and attention.
      link_bytes: Bytes from other devices, in collectives that do not hide.
      temp_bytes: Memory at the fullest moment, without the arguments and the results that replace
        them.
    """

    seconds: float = 0.0
    flops: float = 0.0
    link_bytes: float = 0.0
    temp_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            seconds=self.seconds + other.seconds,
            flops=self.flops + other.flops,
            link_bytes=self.link_bytes + other.link_bytes,
            temp_bytes=max(self.temp_bytes, other.temp_bytes),
        )

    def times(self, number: int) -> "Cost":
        """The cost of `number` runs, one after the other."""
        return Cost(
            seconds=self.seconds * number,
            flops=self.flops * number,
            link_bytes=self.link_bytes * number,
            temp_bytes=self.temp_bytes,
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """Estimates what a traced program costs on each of its devices.

    Attributes:
      rates: Speeds of a device.
      bytes_per_device: Function from an array's abstract value to the bytes that a device holds.
      num_devices: Number of devices that share GEMMs and attention.
      hidden_axes: Axes of the mesh over which a collective takes no time.
      body_of_device: Function that gives each device's part of the loss; see
        `dataflow.operations`.
      has_workspace: Whether the memory includes the workspace of the attention's backward.
      share_of_pairs: Share of the pairs of a query and an earlier key that a sliding window leaves.
        Our kernels of the attention compute no others, and cuDNN computes no others if it has a
        window. With a mask cuDNN computes all pairs.
      axis_sizes: Mesh of the `jax.shard_map` that the program is the body of.
    """

    rates: Rates
    _: dataclasses.KW_ONLY
    bytes_per_device: Callable[[Any], float]
    num_devices: int
    hidden_axes: Collection[str] = ()
    body_of_device: Callable[[Any], Any] | None = None
    has_workspace: bool = True
    share_of_pairs: float = 1.0
    axis_sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def estimate(self, jaxpr: Any, *, num_aliased: int = 0) -> Cost:
        """The cost of a closed jaxpr.

        Its arrays have their global sizes, except inside a `jax.shard_map`.

        Args:
          jaxpr: Jaxpr of the program.
          num_aliased: Number of results, from the first, that take the memory of arguments.
        """
        return self._cost(jaxpr.jaxpr, num_aliased=num_aliased)

    def _cost(
        self,
        jaxpr: Any,
        *,
        num_aliased: int | None = None,
        body_of_device: Callable[[Any], Any] | None = None,
    ) -> Cost:
        """The cost of a jaxpr, without the memory of its arguments and its aliased results.

        Without `num_aliased`, all results are aliased.
        """
        ops, _, results = operations(jaxpr, body_of_device)
        fuse(ops)
        num_aliased = len(results) if num_aliased is None else num_aliased
        held = {id(value) for value in results[num_aliased:]}
        aliased = {id(value) for value in results[:num_aliased]} - held
        opaque = {id(op): self._opaque(op) for op in ops if not op.fusible}
        total = sum(opaque.values(), Cost())
        for fusion in fusions(ops):
            total += Cost(seconds=self._copy(self._traffic(fusion, held | aliased)))
        inside = {key: cost.temp_bytes for key, cost in opaque.items()}
        return dataclasses.replace(total, temp_bytes=self._peak(ops, inside, held, aliased))

    def _size(self, *values: Value) -> float:
        """Bytes of some values on a device."""
        return sum((self.bytes_per_device(value.aval) for value in values), 0.0)

    def _copy(self, size: float) -> float:
        return size / (self.rates.bandwidth * COPY_EFFICIENCY)

    def _opaque(self, op: Op) -> Cost:
        if op.params.get("name") in _WITHOUT_WORK:
            return Cost()
        sizes = self._size(*op.inputs, *op.outputs)
        flops = _dot_flops(op) if op.name == "dot_general" else _kernel_flops(op)
        if flops := flops / self.num_devices:
            rate = self.rates.flops * GEMM_EFFICIENCY
            if op.params.get("name", "").startswith("fp8_"):
                rate *= _FP8_RATE
            return Cost(seconds=max(flops / rate, self._copy(sizes)), flops=flops)
        if attention.is_kernel(op):
            flops = self.share_of_pairs * attention.kernel_flops(op) / self.num_devices
            rate = self.rates.flops * attention.kernel_efficiency(op)
            return Cost(seconds=max(flops / rate, self._copy(sizes)), flops=flops)
        if "dot_product_attention" in op.name:
            backward = "bwd" in op.name
            flops = attention.forward_flops(op) / self.num_devices * (2.5 if backward else 1)
            flops *= self.share_of_pairs if attention.has_window(op) else 1
            efficiency = ATTENTION_BACKWARD_EFFICIENCY if backward else ATTENTION_EFFICIENCY
            seconds = flops / (self.rates.flops * efficiency)
            workspace = 0.0
            if backward and self.has_workspace:
                workspace = attention.workspace_bytes(op) / self.num_devices
            return Cost(seconds=seconds, flops=flops, temp_bytes=workspace)
        if op.name == "device_put":
            kinds = ["Host" in str(kind) for kind in op.params.get("devices", ())]
            from_host = any("host" in str(value.aval).lower() for value in op.inputs)
            if not any(kinds) and not from_host:
                return Cost()
            moved = self._size(*op.outputs)
            return Cost(seconds=moved / self.rates.host_bandwidth)
        if op.name == "scan":
            body = self._cost(op.params["jaxpr"].jaxpr)
            copied = self._scan_copies(op)
            return body.times(op.params["length"]) + Cost(seconds=self._copy(copied))
        if op.name == "cond":
            branches = [self._cost(branch.jaxpr) for branch in op.params["branches"]]
            return max(branches, key=lambda cost: cost.seconds)
        if op.name == "shard_map":
            local = dataclasses.replace(
                self,
                bytes_per_device=nbytes,
                num_devices=1,
                axis_sizes=op.params["mesh"].shape,
                body_of_device=None,
            )
            return self._without_results(local._cost(op.params["jaxpr"], num_aliased=0), op)
        if op.name in LOSSES:
            jaxpr = op.params["jaxpr"].jaxpr
            inside = self._cost(jaxpr, num_aliased=0, body_of_device=self.body_of_device)
            return self._without_results(inside, op)
        if op.name in COLLECTIVES:
            received = self._received(op)
            return Cost(seconds=self.rates.link_seconds(received), link_bytes=received)
        return Cost(seconds=self._copy(sizes))

    def _without_results(self, inside: Cost, op: Op) -> Cost:
        """The cost without the memory of the results, which the caller counts."""
        results = self._size(*op.outputs)
        return dataclasses.replace(inside, temp_bytes=max(inside.temp_bytes - results, 0.0))

    def _received(self, op: Op) -> float:
        """Bytes that a device receives from the others in a collective, sent in a ring."""
        axes = op.params["axes" if op.name == "psum" else "axis_name"]
        axes = (axes,) if isinstance(axes, str) else axes
        number = math.prod(self.axis_sizes[axis] for axis in axes if axis not in self.hidden_axes)
        whole = max(self._size(*side) for side in (op.inputs, op.outputs))
        rounds = 2 if op.name == "psum" else 1  # a psum is a reduce-scatter and an all-gather
        return rounds * whole * (1 - 1 / number)

    def _scan_copies(self, op: Op) -> float:
        """Bytes that a scan reads and writes to copy slices for its operations and their results.

        Fusions read a slice, and write one, inside the stack without a copy.
        """
        jaxpr = op.params["jaxpr"].jaxpr
        _, inputs, results = operations(jaxpr)
        # A slice has an axis less than its stack. The parameters that name a scan's constants,
        # carry and slices differ between versions of JAX.
        outer = zip(inputs[len(jaxpr.constvars) :], op.shapes, strict=True)
        sliced = [value for value, shape in outer if len(shape) > len(value.aval.shape)]
        outer = zip(results, op.outputs, strict=True)
        stacked = [value for value, all in outer if len(all.aval.shape) > len(value.aval.shape)]
        is_copied = lambda op: not op.fusible and not self._takes_slices(op)
        copied = [value for value in sliced if any(map(is_copied, value.readers))]
        copied += [value for value in stacked if value.maker and is_copied(value.maker)]
        on_device = (value for value in copied if "<host>" not in str(value.aval))
        return op.params["length"] * 2 * self._size(*on_device)

    def _takes_slices(self, op: Op) -> bool:
        """Whether an operation reads and writes slices of a stacked array in place."""
        is_alone = self.num_devices * math.prod(self.axis_sizes.values()) == 1
        return is_alone and (op.name == "dot_general" or is_kernel(op.name))

    def _is_in_place(self, op: Op) -> bool:
        """Whether an operation only selects the slice that another reads or writes in place."""
        if op.name == "dynamic_slice":
            return all(map(self._takes_slices, op.outputs[0].readers))
        if op.name == "dynamic_update_slice" and len(op.inputs) > 1:
            maker = op.inputs[1].maker
            return maker is not None and self._takes_slices(maker)
        return False

    def _traffic(self, fusion: list[Op], results: set[int]) -> float:
        """Bytes that a fusion reads and writes."""
        root = fusion[0].root
        read: dict[int, float] = {}
        written = 0.0
        for op in fusion:
            if len(fusion) == 1 and accumulates(op):
                return 0.0
            if self._is_in_place(op):
                continue
            for operand in op.inputs:
                if operand.maker is not None and operand.maker.root is root:
                    continue
                for value in self._sources(operand):
                    size = self._size(value)
                    if op.name in SLICES:
                        size = min(size, self._size(*op.outputs))
                    if op.name in UPDATES and operand is op.inputs[0]:
                        size = 0.0
                    read[id(value)] = max(read.get(id(value), 0.0), size)
            for value in op.outputs:
                if self._materialized(value, results):
                    size = self._size(value)
                    if op.name in UPDATES:
                        size = min(size, self._size(*op.inputs[1:]))
                    written += size
        return sum(read.values()) + written

    def _sources(self, value: Value) -> list[Value]:
        """The values that a fusion reads to get a value of another fusion.

        They are the operands of the other fusion, if they are no larger than the value: XLA then
        repeats elementwise operations instead of reading their result.
        """
        if value.sources is None:
            value.sources = [value]
            if value.maker is not None and value.maker.fusible:
                made_of = [s for operand in value.maker.inputs for s in self._sources(operand)]
                made_of = list({id(source): source for source in made_of}.values())
                if self._size(*made_of) <= self._size(value):
                    value.sources = made_of
        return value.sources

    def _materialized(self, value: Value, results: set[int]) -> bool:
        """Whether a value of a fusion is written to memory."""
        maker = value.maker
        if maker is None or not maker.inputs:  # each fusion makes its own constants
            return False
        if id(value) in results:
            return True
        elsewhere = [user for user in value.readers if user.root is not maker.root]
        if any(not user.fusible for user in elsewhere):
            return True
        return bool(elsewhere) and self._sources(value) == [value]

    def _peak(
        self, ops: list[Op], inside: dict[int, float], held: set[int], aliased: set[int]
    ) -> float:
        """Memory at the fullest moment, in the order of the operations."""
        last: dict[int, int] = {}
        for index, op in enumerate(ops):
            for operand in op.inputs:
                for value in (operand, *(self._sources(operand) if op.fusible else ())):
                    last[id(value)] = index
        # For the index of an operation: bytes whose memory its results take, and bytes that are
        # free after it.
        overwritten: dict[int, float] = {}
        freed: dict[int, float] = {}
        live = peak = 0.0
        for index, op in enumerate(ops):
            live -= overwritten.pop(index, 0.0)
            for value in op.outputs:
                if id(value) in aliased or "<host>" in str(value.aval) or is_addend(value):
                    continue
                if op.fusible and not self._materialized(value, held):
                    continue
                size = self._size(value)
                live += size
                if id(value) not in held:
                    end = last.get(id(value), index)
                    is_overwritten = end > index and overwrites(ops[end], value)
                    ends = overwritten if is_overwritten else freed
                    ends[end] = ends.get(end, 0.0) + size
            peak = max(peak, live + inside.get(id(op), 0.0))
            live -= freed.pop(index, 0.0)
        return peak


def _dot_flops(op: Op) -> float:
    (contracted, _), _ = op.params["dimension_numbers"]
    left = op.shapes[0]
    terms = math.prod(left[axis] for axis in contracted)
    return 2.0 * terms * math.prod(op.outputs[0].aval.shape)


def _kernel_flops(op: Op) -> float:
    """FLOPs of our kernels with GEMMs: the first operand has tokens, the second is the weight."""
    name = op.params.get("name", "")
    if name in _GRADIENTS:
        return 2.0 * op.outputs[0].aval.shape[0] * math.prod(op.shapes[0])
    if name not in _PRODUCTS:
        return 0.0
    return 2.0 * _PRODUCTS[name] * op.shapes[0][0] * math.prod(op.shapes[1])
