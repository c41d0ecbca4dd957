"""A traced program as a list of operations, grouped into XLA's fusions.

The list has the bodies of calls in place of the calls, and no views: a view is its operand. It
leaves out operations that no result needs. Loops, `jax.shard_map`, kernels and the loss stay single
operations.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

# Views. They compute and copy nothing: the result is the operand with another shape or name.
_VIEWS = frozenset(
    "reshape squeeze expand_dims name sharding_constraint optimization_barrier stop_gradient copy "
    "pvary new_ref freeze ref_freeze".split()
)
# Views if they keep the dtype and, apart from axes of size 1, the shape.
_PERHAPS_VIEWS = frozenset(
    "slice pad convert_element_type broadcast_in_dim transpose reduce_precision".split()
)
# Operations that read only as much as they return.
SLICES = frozenset("slice dynamic_slice split gather".split())
# Operations that write in place, and only as much as they insert.
UPDATES = frozenset("dynamic_update_slice scatter scatter-add scatter_add".split())
# Names of the parameter that holds the body of a call.
_BODIES = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
# The losses of a step, each of which `cost` reads as a program of its own.
LOSSES = frozenset(("linear_cross_entropy", "linear_token_loss", "linear_distillation_loss"))
_CONTROL = frozenset(("scan", "cond", "shard_map", *LOSSES))
# The primitives of `pallas_kernels.operation`.
_OPERATIONS = frozenset(("operation", "operation_backward"))
# Exchanges between the devices of an axis, in a `jax.shard_map`.
COLLECTIVES = frozenset(("all_gather", "reduce_scatter", "all_to_all", "psum"))


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array of the program, under all of its names.

    `stage` is the number of stages before it (`fuse`). `maker` is None for inputs and constants.
    `sources` is a cache of `train.planner.cost`.
    """

    aval: Any
    stage: int = 0
    maker: "Op | None" = None
    readers: "list[Op]" = dataclasses.field(default_factory=list)
    sources: "list[Value] | None" = None


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """An operation of the program.

    `shapes` has the shapes of its operands. They differ from the shapes of `inputs` if an operand
    is a view. `fusion` leads to the operation that stands for its fusion.
    """

    name: str
    params: dict[str, Any]
    shapes: list[tuple[int, ...]]
    inputs: list[Value]
    outputs: list[Value]
    fusible: bool
    stage: int
    fusion: "Op | None" = None

    @property
    def root(self) -> "Op":
        """The operation that stands for its fusion."""
        op = self
        while op.fusion is not None:
            op = op.fusion
        return op


def is_kernel(name: str) -> bool:
    """Whether an operation is a kernel of ours."""
    return "pallas" in name or "mpmd_map" in name or "core_map" in name or "custom_call" in name


def _is_opaque(name: str) -> bool:
    """Whether XLA fuses the operation with no other."""
    return (
        name in ("dot_general", "device_put", "sort", "conv_general_dilated")
        or name in _CONTROL
        or name in COLLECTIVES
        or "dot_product_attention" in name
        or is_kernel(name)
    )


def operations(
    jaxpr: Any, body_of_device: Callable[[Any], Any] | None = None
) -> tuple[list[Op], list[Value], list[Value]]:
    """The operations that a jaxpr's results need, the jaxpr's inputs, and its results.

    Args:
      jaxpr: Jaxpr to read.
      body_of_device: Function from an equation of `custom_partitioning` to the jaxpr to read in its
        place; by default its own.
    """
    inputs = [Value(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)]
    ops: list[Op] = []
    results = _flatten(jaxpr, inputs, ops, body_of_device)
    return _live(ops, results), inputs, results


def _flatten(
    jaxpr: Any, inputs: list[Value], ops: list[Op], body_of_device: Callable[[Any], Any] | None
) -> list[Value]:
    """Appends the operations of a jaxpr and of its calls to `ops`; returns its results."""
    values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    read = lambda atom: Value(atom.aval) if hasattr(atom, "val") else values[atom]
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = [read(atom) for atom in eqn.invars]
        body = None
        if name == "custom_partitioning" and body_of_device is not None:
            body = body_of_device(eqn)
        elif name in _OPERATIONS and eqn.params["operation"].name in LOSSES:
            name = eqn.params["operation"].name
        elif name not in _CONTROL and not is_kernel(name):
            body = next((eqn.params[key] for key in _BODIES if key in eqn.params), None)
        if body is not None and hasattr(getattr(body, "jaxpr", body), "eqns"):
            body = getattr(body, "jaxpr", body)
            consts = [Value(var.aval) for var in body.constvars]
            operands = [*consts, *operands[len(operands) - len(body.invars) :]]
            outputs = _flatten(body, operands, ops, body_of_device)
        elif name in _VIEWS or (name in _PERHAPS_VIEWS and _is_view(eqn)):
            outputs = operands[: len(eqn.outvars)]
        else:
            shapes = [getattr(atom.aval, "shape", ()) for atom in eqn.invars]
            used = operands
            if name != "scan":
                used = [values[atom] for atom in eqn.invars if not hasattr(atom, "val")]
            fusible = not _is_opaque(name)
            stage = max((value.stage for value in used), default=0)
            op = Op(name, eqn.params, shapes, used, [], fusible, stage)
            after = (
                stage if fusible and not name.startswith(("reduce_", "arg", "cum")) else stage + 1
            )
            op.outputs = outputs = [Value(var.aval, after, op) for var in eqn.outvars]
            ops.append(op)
        values.update(zip(eqn.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def is_addend(value: Value) -> bool:
    """Whether a GEMM adds this value to an array, so that the value itself is never in memory."""
    maker = value.maker
    return (
        maker is not None
        and maker.name == "dot_general"
        and len(value.readers) == 1
        and accumulates(value.readers[0])
    )


def overwrites(op: Op, value: Value) -> bool:
    """Whether the results of a value's last reader take its memory.

    A fusion overwrites an operand, a loop its carry, and a kernel the operands that it names.
    Everything else that a loop reads stays to its end.
    """
    if any(value is op.inputs[i] for i in dict(op.params.get("input_output_aliases", ()))):
        return True
    if op.name != "scan":
        return op.fusible
    jaxpr = op.params["jaxpr"].jaxpr
    # Operands are constants, carry, slices. Slices have an axis less than their stack.
    outputs = zip(op.outputs, jaxpr.outvars, strict=True)
    num_carried = sum(len(v.aval.shape) == len(var.aval.shape) for v, var in outputs)
    operands = zip(op.shapes, jaxpr.invars, strict=True)
    end = sum(len(shape) == len(var.aval.shape) for shape, var in operands)
    return any(value is carried for carried in op.inputs[end - num_carried : end])


def accumulates(op: Op) -> bool:
    """Whether an operation adds an array to the result of a GEMM that no other operation reads."""
    return op.name in ("add", "add_any") and any(
        value.maker is not None and value.maker.name == "dot_general" and value.readers == [op]
        for value in op.inputs
    )


def _is_view(eqn: Any) -> bool:
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    if eqn.primitive.name == "broadcast_in_dim" and before.size == after.size:
        return True  # axes of size 1
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return False
    if eqn.primitive.name == "transpose":
        return list(eqn.params["permutation"]) == sorted(eqn.params["permutation"])
    if eqn.primitive.name == "reduce_precision":
        limits = jnp.finfo(before.dtype)
        bits = eqn.params["exponent_bits"], eqn.params["mantissa_bits"]
        return bits == (limits.nexp, limits.nmant)
    return True


def _live(ops: list[Op], results: Iterable[Value]) -> list[Op]:
    """The operations that the results need, with the readers of each value."""
    needed = {id(value) for value in results}
    live = []
    for op in reversed(ops):
        if any(id(value) in needed for value in op.outputs):
            live.append(op)
            needed.update(id(value) for value in op.inputs)
    live.reverse()
    for op in live:
        for value in op.inputs:
            value.readers.append(op)
    return live


def fuse(ops: list[Op]) -> None:
    """Joins elementwise operations with the operations whose results they read, within a stage.

    A stage ends at a GEMM, a kernel or a reduction, because later operations need another pass.
    """
    for op in ops:
        for value in op.inputs if op.fusible else ():
            maker = value.maker
            if maker is not None and maker.fusible and value.stage == maker.stage == op.stage:
                first, second = maker.root, op.root
                if first is not second:
                    second.fusion = first


def fusions(ops: list[Op]) -> Iterable[list[Op]]:
    """The groups of operations that `fuse` has joined."""
    groups: dict[int, list[Op]] = {}
    for op in ops:
        if op.fusible:
            groups.setdefault(id(op.root), []).append(op)
    return groups.values()


def nbytes(aval: Any) -> float:
    """The bytes of a whole array, given its abstract value."""
    dtype = getattr(aval, "dtype", None)
    return float(math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 0))
