"""Lists the matrix products in a program that no operation of this library computes.

The program is a jaxpr. Our operations are primitives in it, and the search does not look inside
them. But the plain JAX of some operations is not inside a primitive. Each equation has the
traceback of the call that made it, also in a backward. So a product belongs to an operation if the
operation's public function is in the traceback.
"""

import contextlib
import dataclasses
import math
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from jax.extend.core import subjaxprs
from jax.interpreters import partial_eval

# Primitives in which the search does not look: operations of this library, and kernels of others.
_CLOSED = ("operation", "operation_backward", "pallas_call")

# Primitives that run their programs a number of times that no trace knows.
_UNKNOWN = {
    "scan": "in a scan whose length is symbolic: counted once",
    "while": "in a while loop, whose passes are unknown: counted once",
    "cond": "in a branch that may not run: counted as if it runs",
    "custom_linear_solve": "in a linear solve, which may not run it: counted once",
}

_OWN_FOLDER = os.path.dirname(__file__) + os.sep
# Packages with layers, whose lines do not say which part of a model a product is from.
_LAYERS = ("flax", "equinox", "jaxtyping")


@dataclasses.dataclass(frozen=True)
class Product:
    """A product that plain JAX computes, with all equal products of the same line.

    Attributes:
      primitive: `dot_general`, `ragged_dot_general` or `conv_general_dilated`.
      operands: Dtypes and shapes of both operands. Inside of `jax.shard_map` they are those of a
        device's part.
      result: Dtype and shape of the result.
      line: Line of the user's code that makes it, as `folder/file.py:123 (function)`. A product of
        a backward has the line of the forward.
      times: Number of times that the program computes it. `jax.lax.scan` multiplies the number by
        its length, and `jax.shard_map` by its devices.
      flops: Floating-point operations of all times together, two for each multiplication with its
        addition; None if a size is symbolic.
      note: Statement about the number of times, if a loop or a branch makes it uncertain, or if it
        counts devices; otherwise empty.
    """

    primitive: str
    operands: tuple[str, str]
    result: str
    line: str
    times: int
    flops: int | None
    note: str

    def __str__(self) -> str:
        text = f"{self.primitive}({', '.join(self.operands)}) -> {self.result}  {self.line}"
        return f"{text}; {self.note}" if self.note else text


class Products(tuple[Product, ...]):
    """The products of a program, those with the most FLOPs first; `str` makes a table to print.

    The shares in the table are those of the FLOPs of all products in it. A product with a symbolic
    size has none.
    """

    def __str__(self) -> str:
        if not self:
            return "no product of plain JAX"
        total = sum(p.flops or 0 for p in self) or 1
        lines = [" share     FLOPs   times  product"]
        for p in self:
            share = flops = "?"
            if p.flops is not None:
                share, flops = f"{p.flops / total:.1%}", f"{p.flops:.2e}"
            lines.append(f"{share:>6}  {flops:>8}  {p.times!s:>6}  {p}")
        return "\n".join(lines)


def plain_products(jaxpr: Any, operations: Collection[str]) -> Products:
    """The products of a jaxpr.

    Args:
      jaxpr: The jaxpr.
      operations: Names of public functions of this library, whose products are left out.
    """
    # JAX traces products whose results nothing reads, such as the last one of a `jax.grad`. XLA
    # removes them.
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    times: Counter[Product] = Counter()
    for product, count in _products_in(jaxpr, frozenset(operations), (), 1, ()):
        times[product] += count
    found = [
        dataclasses.replace(p, times=n, flops=None if p.flops is None else n * p.flops)
        for p, n in times.items()
    ]
    flops = lambda p: math.inf if p.flops is None else p.flops
    return Products(sorted(found, key=flops, reverse=True))


def _products_in(
    jaxpr: Any, operations: frozenset[str], outer: Sequence[Any], times: int, notes: Sequence[str]
) -> Iterator[tuple[Product, int]]:
    """Each product once, with the number of its times.

    Args:
      jaxpr: The jaxpr.
      operations: Names of public functions.
      outer: Frames of the equation around the jaxpr. The traceback of an equation inside of a
        jitted function ends at this function.
      times: Number of times that the jaxpr runs.
      notes: Statements about this number.
    """
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        inner = list(subjaxprs(jaxpr.replace(eqns=[equation])))
        if name in _CLOSED or not (inner or name in _MULTIPLICATIONS):
            continue
        traceback = equation.source_info.traceback
        frames = [*(traceback.frames if traceback else ()), *outer]
        if name in _MULTIPLICATIONS:
            if operations.isdisjoint(_own_functions(frames)):
                yield _product(equation, _line(frames), notes), times
            continue
        count, around = times, list(notes)
        if name == "scan" and isinstance(params["length"], int):
            count *= params["length"]
        elif name == "shard_map":
            devices = math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
            count *= devices
            if devices > 1:
                around.append(f"a device's part in jax.shard_map, on {devices} devices")
        elif name in _UNKNOWN and _UNKNOWN[name] not in around:
            around.append(_UNKNOWN[name])
        for program in inner:
            yield from _products_in(program, operations, frames, count, around)


def _product(equation: Any, line: str, notes: Sequence[str]) -> Product:
    """The product of an equation, for one time."""
    a, b, result = (v.aval for v in (*equation.invars[:2], equation.outvars[0]))
    flops = 2 * _MULTIPLICATIONS[equation.primitive.name](a, b, result, equation.params)
    return Product(
        equation.primitive.name,
        (a.str_short(), b.str_short()),
        result.str_short(),
        line,
        times=1,
        flops=flops if isinstance(flops, int) else None,
        note="; ".join(notes),
    )


def _of_dot(a: Any, b: Any, result: Any, params: Any) -> Any:
    (contracted, _), _ = params["dimension_numbers"]
    return math.prod(result.shape) * math.prod(a.shape[axis] for axis in contracted)


def _of_ragged_dot(a: Any, b: Any, result: Any, params: Any) -> Any:
    numbers = params["ragged_dot_dimension_numbers"]
    (_, contracted), (_, batch) = numbers.dot_dimension_numbers
    others = {*contracted, *batch, *numbers.rhs_group_dimensions}
    return math.prod(a.shape) * math.prod(n for i, n in enumerate(b.shape) if i not in others)


def _of_convolution(a: Any, b: Any, result: Any, params: Any) -> Any:
    features = params["dimension_numbers"].rhs_spec[0]
    size = math.prod(n for i, n in enumerate(b.shape) if i != features)
    # A dilated input is zero between its numbers.
    return math.prod(result.shape) * size // math.prod(params["lhs_dilation"])


# The number of multiplications in each kind of product, which a symbolic size makes symbolic.
_MULTIPLICATIONS = {
    "dot_general": _of_dot,
    "ragged_dot_general": _of_ragged_dot,
    "conv_general_dilated": _of_convolution,
}


def _own_functions(frames: Sequence[Any]) -> Iterator[str]:
    return (f.function_name for f in frames if f.file_name.startswith(_OWN_FOLDER))


def _line(frames: Sequence[Any]) -> str:
    """The innermost line that is not of JAX, and not of a layer if a model calls the layer."""
    for hidden in (*_folders(*_LAYERS), _OWN_FOLDER, contextlib.__file__), ():
        hidden = (*hidden, *_folders("jax"))
        for frame in frames:
            if not frame.file_name.startswith(hidden):
                place = os.sep.join(frame.file_name.split(os.sep)[-2:])
                return f"{place}:{frame.line_num} ({frame.function_name})"
    return "unknown line"


def _folders(*packages: str) -> list[str]:
    """The folders of those packages that are imported."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in packages)
    return [os.path.dirname(file) + os.sep for file in files if file is not None]
