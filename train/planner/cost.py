"""How long a traced step takes and how much memory it needs, estimated without compiling it.

XLA's own cost analysis does not help here. It is not implemented for devices that are not there
(`Compiled.cost_analysis()` is None on a topology), and where it is, custom calls, which is what
cuBLAS, cuDNN and our kernels are, count no FLOPs. So the jaxpr is read, which has every GEMM,
those that run again included:

- a GEMM or an attention takes as long as its FLOPs or its bytes, whichever is longer;
- elementwise operations that depend on each other without a GEMM, a kernel or a reduction between
  them are taken for one fusion, which reads its inputs and writes its outputs once;
- a loop over layers copies what a GEMM or a kernel reads of its stacked inputs and makes of its
  stacked outputs, because those take whole buffers and not slices; on one device, with the options
  of `train.xla_flags`, all but attention take slices;
- what goes to host memory or comes back takes its bytes over the bus, with nothing beside it;
- a collective in a `jax.shard_map` takes what a device gets from the others over the link, with
  nothing beside it, unless its axis is one whose exchange is taken to hide (`train.planner.plan`).

These add up: one stream, no launch gaps, and nothing of what XLA's partitioner exchanges. Memory is
followed through the program in the order of the jaxpr. Both are for choosing what to compile; the
memory that decides is the compiler's.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pallas_kernels.hardware import Hardware
from train.planner.dataflow import (
    COLLECTIVES,
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
)

# Measured on an H100, as shares of its peaks: a large GEMM 683 TFLOP/s, a copy 2.8 TB/s, and
# cuDNN's causal attention with 64 channels a head 390 TFLOP/s forward and 330 backward
# (benchmarks/results/train_step_llama3.2-1b_h100_202611.md). Taken for all devices.
GEMM_EFFICIENCY = 0.69
COPY_EFFICIENCY = 0.84
ATTENTION_EFFICIENCY = 0.39
ATTENTION_BACKWARD_EFFICIENCY = 0.33
# Measured on four H200s: by NCCL's all-gathers and reduce-scatters of 64 MiB each device gets 270
# GB/s from the others, of NVLink's 450. Smaller ones are slower, because each has a fixed cost,
# which is not counted. Taken for all links.
LINK_EFFICIENCY = 0.60


# GEMMs in a kernel, by its name.
_PRODUCTS = {
    "gated_matmul": 2,
    "gated_matmul_backward": 1,
    "linear_statistics": 1,
    "linear_exponentials": 1,
}
# And those whose result has not the rows of an operand, with the other operand first.
_GRADIENTS = {"input_gradient", "weight_gradient", "weight_gradient_rows"}
# The first unless a logit is far above its label's.
_WITHOUT_WORK = {"linear_exponentials_again"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """What a device does in a second.

    Attributes:
      flops: of dense 16-bit matrix products at best, FLOP/s.
      bandwidth: of its memory at best, bytes/s.
      host_bandwidth: between it and its host, bytes/s in one direction.
      link_bandwidth: between it and the other devices, bytes/s in one direction; 0 if not known,
        and then no exchange is counted.
      known: False if the figures only serve to put programs in order.
    """

    flops: float
    bandwidth: float
    host_bandwidth: float
    link_bandwidth: float = 0.0
    known: bool = True

    @classmethod
    def of(
        cls,
        hardware: Hardware | None,
        host_bandwidth: float | None = None,
        link_bandwidth: float = 0.0,
    ) -> "Rates":
        """Of a device in the table; of one that is not, those of an A100, for the order alone."""
        host_bandwidth = host_bandwidth or 25e9  # PCIe 4.0 x16, 80 % of 31.5 GB/s
        if hardware is None:
            return cls(
                flops=312e12,
                bandwidth=2e12,
                host_bandwidth=host_bandwidth,
                link_bandwidth=link_bandwidth,
                known=False,
            )
        return cls(
            flops=hardware.bf16_flops,
            bandwidth=hardware.hbm_bandwidth,
            host_bandwidth=host_bandwidth,
            link_bandwidth=link_bandwidth,
        )

    def link_seconds(self, size: float) -> float:
        """To receive as many bytes from other devices."""
        return size / (self.link_bandwidth * LINK_EFFICIENCY) if self.link_bandwidth else 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one run of a program, on each device.

    Attributes:
      seconds: that it takes.
      flops: in GEMMs and attention.
      host_bytes: that cross the bus to the host, both ways.
      link_bytes: that come from other devices, in collectives with nothing beside them.
      temp_bytes: memory at the fullest moment, beside the arguments and results that replace them.
    """

    seconds: float = 0.0
    flops: float = 0.0
    host_bytes: float = 0.0
    link_bytes: float = 0.0
    temp_bytes: float = 0.0

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(
            seconds=self.seconds + other.seconds,
            flops=self.flops + other.flops,
            host_bytes=self.host_bytes + other.host_bytes,
            link_bytes=self.link_bytes + other.link_bytes,
            temp_bytes=max(self.temp_bytes, other.temp_bytes),
        )

    def times(self, number: int) -> "Cost":
        """Of as many runs, one after the other."""
        return Cost(
            seconds=self.seconds * number,
            flops=self.flops * number,
            host_bytes=self.host_bytes * number,
            link_bytes=self.link_bytes * number,
            temp_bytes=self.temp_bytes,
        )


def estimate(
    jaxpr: Any,
    rates: Rates,
    *,
    bytes_per_device: Callable[[Any], float],
    num_devices: int,
    num_aliased: int = 0,
    hidden_axes: Collection[str] = (),
) -> Cost:
    """The cost of a traced program on each of its devices.

    Args:
      jaxpr: closed; arrays have their global sizes, except inside of `jax.shard_map`.
      rates: of a device.
      bytes_per_device: what a device holds of an array, given its abstract value.
      num_devices: over which GEMMs and attention are split.
      num_aliased: how many results, from the first, take the place of arguments.
      hidden_axes: of the mesh, over which a collective takes no time.
    """
    program = _Program(rates, bytes_per_device, num_devices, hidden_axes, num_devices == 1)
    return program.cost(jaxpr.jaxpr, num_aliased=num_aliased)


class _Program:
    """Reads jaxprs.

    The arguments are those of `estimate`, whether the whole program is one device's, and the mesh
    inside of a `shard_map`.
    """

    def __init__(
        self,
        rates: Rates,
        size: Callable[[Any], float],
        num_devices: int,
        hidden_axes: Collection[str],
        is_alone: bool,
        axis_sizes: Mapping[str, int] | None = None,
    ):
        self.rates = rates
        self.size = size
        self.num_devices = num_devices
        self.hidden_axes = hidden_axes
        self.is_alone = is_alone
        self.axis_sizes = axis_sizes or {}

    def cost(self, jaxpr: Any, *, num_aliased: int | None = None) -> Cost:
        """Of a jaxpr whose arguments somebody else holds, and its first results, or all."""
        ops, _, results = operations(jaxpr)
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

    def _copy(self, size: float) -> float:
        return size / (self.rates.bandwidth * COPY_EFFICIENCY)

    def _opaque(self, op: Op) -> Cost:
        if op.params.get("name") in _WITHOUT_WORK:
            return Cost()
        sizes = sum(self.size(value.aval) for value in (*op.inputs, *op.outputs))
        if op.name == "dot_general":
            flops = _dot_flops(op) / self.num_devices
            rate = self.rates.flops * GEMM_EFFICIENCY
            return Cost(seconds=max(flops / rate, self._copy(sizes)), flops=flops)
        if flops := _kernel_flops(op) / self.num_devices:
            rate = self.rates.flops * GEMM_EFFICIENCY
            return Cost(seconds=max(flops / rate, self._copy(sizes)), flops=flops)
        if "dot_product_attention" in op.name:
            backward = "bwd" in op.name
            flops = _attention_flops(op) / self.num_devices * (2.5 if backward else 1)
            efficiency = ATTENTION_BACKWARD_EFFICIENCY if backward else ATTENTION_EFFICIENCY
            return Cost(seconds=flops / (self.rates.flops * efficiency), flops=flops)
        if op.name == "device_put":
            kinds = ["Host" in str(kind) for kind in op.params.get("devices", ())]
            from_host = any("host" in str(value.aval).lower() for value in op.inputs)
            if not any(kinds) and not from_host:
                return Cost()
            moved = sum(self.size(value.aval) for value in op.outputs)
            return Cost(seconds=moved / self.rates.host_bandwidth, host_bytes=moved)
        if op.name == "scan":
            body = self.cost(op.params["jaxpr"].jaxpr)
            copied = self._scan_copies(op)
            return body.times(op.params["length"]) + Cost(seconds=self._copy(copied))
        if op.name == "while":
            return self.cost(op.params["body_jaxpr"].jaxpr)
        if op.name == "cond":
            branches = [self.cost(branch.jaxpr) for branch in op.params["branches"]]
            return max(branches, key=lambda cost: cost.seconds)
        if op.name == "shard_map":
            axis_sizes = op.params["mesh"].shape
            local = _Program(self.rates, nbytes, 1, self.hidden_axes, self.is_alone, axis_sizes)
            inside = local.cost(op.params["jaxpr"], num_aliased=0)
            # Its results, which it makes one after the other, are counted by whoever holds them.
            results = sum(self.size(value.aval) for value in op.outputs)
            return dataclasses.replace(inside, temp_bytes=max(inside.temp_bytes - results, 0.0))
        if op.name in COLLECTIVES:
            received = self._received(op)
            return Cost(seconds=self.rates.link_seconds(received), link_bytes=received)
        return Cost(seconds=self._copy(sizes))

    def _received(self, op: Op) -> float:
        """Bytes of a collective that a device gets from the others, as a ring sends them."""
        axes = op.params["axes" if op.name == "psum" else "axis_name"]
        axes = (axes,) if isinstance(axes, str) else axes
        number = math.prod(self.axis_sizes[axis] for axis in axes if axis not in self.hidden_axes)
        whole = max(sum(self.size(v.aval) for v in side) for side in (op.inputs, op.outputs))
        rounds = 2 if op.name == "psum" else 1  # a sum is split over the devices, and then gathered
        return rounds * whole * (1 - 1 / number)

    def _scan_copies(self, op: Op) -> float:
        """Bytes read and written to hand slices to a scan's operations and to stack their results.

        A slice that is only read by fusions is read where it lies, and so for results.
        """
        jaxpr = op.params["jaxpr"].jaxpr
        _, inputs, results = operations(jaxpr)
        # The parameters that tell a scan's constants, carry and slices apart differ by version of
        # JAX; that a slice has an axis less does not.
        outer = zip(inputs[len(jaxpr.constvars) :], op.shapes, strict=True)
        sliced = [value for value, shape in outer if len(shape) > len(value.aval.shape)]
        outer = zip(results, op.outputs, strict=True)
        stacked = [value for value, all in outer if len(all.aval.shape) > len(value.aval.shape)]
        is_copied = lambda op: not op.fusible and not self._takes_slices(op)
        copied = [value for value in sliced if any(map(is_copied, value.readers))]
        copied += [value for value in stacked if value.maker and is_copied(value.maker)]
        on_device = (value for value in copied if "<host>" not in str(value.aval))
        return op.params["length"] * sum((2 * self.size(v.aval) for v in on_device), 0.0)

    def _takes_slices(self, op: Op) -> bool:
        """Whether an operation reads and writes its layer's part of a stacked array in place."""
        return self.is_alone and (op.name == "dot_general" or is_kernel(op.name))

    def _is_in_place(self, op: Op) -> bool:
        """Whether an operation is no more than the place where another reads or writes."""
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
                    size = self.size(value.aval)
                    if op.name in SLICES:
                        size = min(size, sum(self.size(output.aval) for output in op.outputs))
                    if op.name in UPDATES and operand is op.inputs[0]:
                        size = 0.0
                    read[id(value)] = max(read.get(id(value), 0.0), size)
            for value in op.outputs:
                if self._materialized(value, results):
                    size = self.size(value.aval)
                    if op.name in UPDATES:
                        size = min(size, sum(self.size(v.aval) for v in op.inputs[1:]))
                    written += size
        return sum(read.values()) + written

    def _sources(self, value: Value) -> list[Value]:
        """What a fusion reads that needs a value made elsewhere: the value, or what it is made of.

        XLA computes elementwise operations again rather than to read more than their operands.
        """
        if value.sources is None:
            value.sources = [value]
            if value.maker is not None and value.maker.fusible:
                made_of = [s for operand in value.maker.inputs for s in self._sources(operand)]
                made_of = list({id(source): source for source in made_of}.values())
                if sum(self.size(s.aval) for s in made_of) <= self.size(value.aval):
                    value.sources = made_of
        return value.sources

    def _materialized(self, value: Value, results: set[int]) -> bool:
        """Whether a value of a fusion is written to memory."""
        maker = value.maker
        if maker is None or not maker.inputs:  # constants are made where they are used
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
        """Memory at the fullest moment, operation after operation."""
        last: dict[int, int] = {}
        for index, op in enumerate(ops):
            for operand in op.inputs:
                for value in (operand, *(self._sources(operand) if op.fusible else ())):
                    last[id(value)] = index
        freed: dict[int, float] = {}
        live = peak = 0.0
        for index, op in enumerate(ops):
            if op.fusible or op.name == "scan":
                # Written over operands that nobody needs any more, as a loop's carry is.
                live -= freed.pop(index, 0.0)
            for value in op.outputs:
                if id(value) in aliased or "<host>" in str(value.aval) or is_addend(value):
                    continue
                if op.fusible and not self._materialized(value, held):
                    continue
                size = self.size(value.aval)
                live += size
                if id(value) not in held:
                    end = last.get(id(value), index)
                    freed[end] = freed.get(end, 0.0) + size
            peak = max(peak, live + inside.get(id(op), 0.0))
            live -= freed.pop(index, 0.0)
        return peak


def _dot_flops(op: Op) -> float:
    (contracted, _), _ = op.params["dimension_numbers"]
    left = op.shapes[0]
    terms = math.prod(left[axis] for axis in contracted)
    return 2.0 * terms * math.prod(op.outputs[0].aval.shape)


def _kernel_flops(op: Op) -> float:
    """Of our kernels with GEMMs: every token of the first operand by every weight of the second."""
    name = op.params.get("name", "")
    if name in _GRADIENTS:
        return 2.0 * op.outputs[0].aval.shape[0] * math.prod(op.shapes[0])
    if name not in _PRODUCTS:
        return 0.0
    return 2.0 * _PRODUCTS[name] * op.shapes[0][0] * math.prod(op.shapes[1])


def _attention_flops(op: Op) -> float:
    """Of cuDNN's forward: two products over all pairs, or over half of them if causal."""
    batch, length, heads, head_dim = op.shapes[0]
    keys = op.shapes[1][1]
    causal = "CAUSAL" in str(op.params.get("mask_type", ""))
    return 4.0 * batch * heads * length * keys * head_dim * (0.5 if causal else 1.0)
