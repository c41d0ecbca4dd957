"""A traced program as a list of operations, and which of them XLA makes one fusion of.

Calls are replaced with what they call, views with what they show, and operations that no result
needs are left out. Loops, `jax.shard_map` and kernels stay single operations.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

# Nothing is computed or copied for these: the result is the operand under another shape or name.
_VIEWS = frozenset(
    "reshape squeeze expand_dims name sharding_constraint optimization_barrier stop_gradient copy "
    "pvary new_ref freeze ref_freeze".split()
)
# Nor for these if they change neither shape, but for axes of size 1, nor dtype.
_PERHAPS_VIEWS = frozenset(
    "slice pad convert_element_type broadcast_in_dim transpose reduce_precision".split()
)
# These read only as much as they return.
SLICES = frozenset("slice dynamic_slice split gather".split())
# These write in place: as much as is put in.
UPDATES = frozenset("dynamic_update_slice scatter scatter-add scatter_add".split())
# A call of these is what is in its body.
_BODIES = ("jaxpr", "call_jaxpr", "call", "fun_jaxpr")
_CONTROL = frozenset(("scan", "while", "cond", "shard_map"))
# Between the devices of an axis, in a `jax.shard_map`.
COLLECTIVES = frozenset(("all_gather", "reduce_scatter", "all_to_all", "psum"))


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """An array of the program: made once, whatever the names it goes by."""

    aval: Any
    stage: int = 0
    maker: "Op | None" = None
    readers: "list[Op]" = dataclasses.field(default_factory=list)
    sources: "list[Value] | None" = None


@dataclasses.dataclass(eq=False, slots=True)
class Op:
    """An operation of the program.

    `shapes` are those of its operands, which may be others than those of `inputs` behind views.
    `fusion` is the operation that stands for its fusion.
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
        """Of its fusion."""
        op = self
        while op.fusion is not None:
            op = op.fusion
        return op


def is_kernel(name: str) -> bool:
    """Whether an operation is a kernel of ours."""
    return "pallas" in name or "mpmd_map" in name or "core_map" in name or "custom_call" in name


def _is_opaque(name: str) -> bool:
    """Whether nothing can be fused with it."""
    return (
        name in ("dot_general", "device_put", "sort", "conv_general_dilated")
        or name in _CONTROL
        or name in COLLECTIVES
        or "dot_product_attention" in name
        or is_kernel(name)
    )


def operations(jaxpr: Any) -> tuple[list[Op], list[Value], list[Value]]:
    """The operations that a jaxpr's results need, the jaxpr's inputs, and its results."""
    inputs = [Value(var.aval) for var in (*jaxpr.constvars, *jaxpr.invars)]
    ops: list[Op] = []
    results = _flatten(jaxpr, inputs, ops)
    return _live(ops, results), inputs, results


def _flatten(jaxpr: Any, inputs: list[Value], ops: list[Op]) -> list[Value]:
    """Appends the operations of a jaxpr and of what it calls; returns its results."""
    values: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), inputs, strict=True))
    read = lambda atom: Value(atom.aval) if hasattr(atom, "val") else values[atom]
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        operands = [read(atom) for atom in eqn.invars]
        body = None
        if name not in _CONTROL and not is_kernel(name):
            body = next((eqn.params[key] for key in _BODIES if key in eqn.params), None)
        if body is not None and hasattr(getattr(body, "jaxpr", body), "eqns"):
            body = getattr(body, "jaxpr", body)
            consts = [Value(var.aval) for var in body.constvars]
            outputs = _flatten(body, [*consts, *operands[len(operands) - len(body.invars) :]], ops)
        elif name in _VIEWS or (name in _PERHAPS_VIEWS and _is_view(eqn)):
            outputs = operands[: len(eqn.outvars)]
        else:
            shapes = [getattr(atom.aval, "shape", ()) for atom in eqn.invars]
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
    """Whether a GEMM adds its result to something in memory, so that it is never there alone."""
    maker = value.maker
    return (
        maker is not None
        and maker.name == "dot_general"
        and len(value.readers) == 1
        and accumulates(value.readers[0])
    )


def accumulates(op: Op) -> bool:
    """Whether an operation adds the result of a GEMM, which nobody else reads, to something."""
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
    """Joins elementwise operations with those whose results they read, within a stage.

    A stage ends at a GEMM, a kernel or a reduction: what comes after it cannot be computed in the
    same pass.
    """
    for op in ops:
        for value in op.inputs if op.fusible else ():
            maker = value.maker
            if maker is not None and maker.fusible and value.stage == maker.stage == op.stage:
                first, second = maker.root, op.root
                if first is not second:
                    second.fusion = first


def fusions(ops: list[Op]) -> Iterable[list[Op]]:
    """The operations that `fuse` has joined."""
    groups: dict[int, list[Op]] = {}
    for op in ops:
        if op.fusible:
            groups.setdefault(id(op.root), []).append(op)
    return groups.values()


def nbytes(aval: Any) -> float:
    """Of a whole array, given its abstract value."""
    dtype = getattr(aval, "dtype", None)
    return float(math.prod(getattr(aval, "shape", ())) * getattr(dtype, "itemsize", 0))
