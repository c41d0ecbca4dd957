"""The loss of a model without its logits.

The model is traced. From the logits, the trace is followed back to the product with a matrix, over
casts, a bias and a softcap. `linear_cross_entropy` takes what that product takes. Whatever else
happens to the logits is refused by name, so a loss is either the model's or an error.
"""

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from pallas_kernels.loss import linear_cross_entropy
from pallas_kernels.loss.layout import WeightLayout
from pallas_kernels.patching.programs import Atom, Equation, Program

# Primitives that change neither a value nor its place in the array, and casts.
_TRANSPARENT = {"convert_element_type", "copy", "name", "reshard", "sharding_constraint"}
# Primitives with a program of their own, for the message of an error.
_TRACED_INSIDE = {
    "cond",
    "custom_jvp_call",
    "custom_vjp_call",
    "jit",
    "remat2",
    "scan",
    "shard_map",
    "while",
}


class _NoHead(Exception):
    """An output is not the product with a matrix, and why."""


@dataclasses.dataclass(frozen=True)
class _Head:
    """The product that makes the logits.

    Attributes:
      hidden: Hidden states.
      hidden_axes: Order of the axes of `hidden` in which the tokens are those of the logits, with D
        as the last.
      weight: Output embedding.
      weight_layout: Its layout.
      bias: Bias of the logits, a vector; None if there is none.
      softcap: Bound of the logits.
      precision: Precision of the product.
    """

    hidden: Atom
    hidden_axes: tuple[int, ...]
    weight: Atom
    weight_layout: WeightLayout
    bias: Atom | None
    softcap: float | None
    precision: Any


def loss(
    model: nnx.Module,
    labels: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any],
) -> Any:
    """`linear_cross_entropy` of the model's logits for `labels`; see `Patched.loss`."""
    if unfit := {"bias", "logit_softcap", "vocab_axis", "weight_layout"} & options.keys():
        names = ", ".join(sorted(unfit))
        raise TypeError(f"loss_options: the model decides {names}; leave {names} out")
    graphdef, state = nnx.split(model)
    found = {}

    def run(state: Any) -> Any:
        module = nnx.merge(graphdef, state)
        out = module(*args, **kwargs)
        found["graphdef"], new_state = nnx.split(module)
        arrays = jax.tree.leaves_with_path(out)
        found["names"] = [jax.tree_util.keystr(p) for p, a in arrays if isinstance(a, jax.Array)]
        return [a for _, a in arrays if isinstance(a, jax.Array)], jax.tree.leaves(new_state)

    program = Program(jax.make_jaxpr(run)(state))
    if found["graphdef"] != graphdef:
        raise NotImplementedError(
            "the call of the model adds or removes variables; create them before, for example by a "
            "call of the model itself"
        )
    number = len(found["names"])
    outputs = dict(zip(found["names"], program.outputs[:number], strict=True))
    head = _only_head(program, outputs, labels)
    states = zip(program.inputs, program.outputs[number:], strict=True)
    changed = {i: new for i, (old, new) in enumerate(states) if old is not new}
    optional = [] if head.bias is None else [head.bias]
    leaves, structure = jax.tree.flatten(state)
    hidden, weight, *others = program.run(
        [head.hidden, head.weight, *optional, *changed.values()], leaves
    )
    bias = others.pop(0).reshape(-1) if optional else None
    if changed:
        for i, value in zip(changed, others, strict=True):
            leaves[i] = value
        nnx.update(model, jax.tree.unflatten(structure, leaves))
    hidden = jnp.transpose(hidden, head.hidden_axes)
    with _precision(hidden, head.precision):
        return linear_cross_entropy(
            hidden,
            weight,
            jnp.reshape(labels, hidden.shape[:-1]),
            weight_layout=head.weight_layout,
            bias=bias,
            logit_softcap=head.softcap,
            **options,
        )


def _precision(hidden: jax.Array, precision: Any) -> contextlib.AbstractContextManager[Any]:
    """The context in which float32 products have the precision of the model's."""
    if precision is None or hidden.dtype != jnp.float32:
        return contextlib.nullcontext()
    is_usual = isinstance(precision, jax.lax.Precision)
    return jax.default_matmul_precision(precision.name.lower() if is_usual else precision.name)


def _only_head(program: Program, outputs: Mapping[str, Atom], labels: Any) -> _Head:
    """The head of the one output that has logits for the labels.

    Raises:
      ValueError: No output has the shape of logits for the labels, or several have a head.
      NotImplementedError: An output has that shape, and is not the product with a matrix.
    """
    heads, reasons = {}, []
    shape = jnp.shape(labels)
    for name, atom in outputs.items():
        aval = atom.aval
        is_float = jnp.issubdtype(aval.dtype, jnp.floating)
        if aval.ndim == 0 or aval.shape[:-1] != shape or not is_float:
            continue
        try:
            heads[name] = _head_of(program, atom)
        except _NoHead as e:
            reasons.append(f"output{name} {aval.str_short()}: {e}")
    if len(heads) == 1:
        return next(iter(heads.values()))
    if heads:
        raise ValueError(
            f"several outputs of the model are logits: {', '.join(heads)}; return one of them"
        )
    if reasons:
        raise NotImplementedError(
            f"the loss cannot take the head of the model: {'; '.join(reasons)}. Compute the logits "
            "and their loss as before"
        )
    found = ", ".join(f"output{name} {atom.aval.str_short()}" for name, atom in outputs.items())
    raise ValueError(f"labels {shape} need logits {(*shape, 'V')}, and the model returns {found}")


def _head_of(program: Program, atom: Atom) -> _Head:
    """Follows logits back to the product that makes them.

    Raises:
      _NoHead: Something else happens to them, or they are no such product.
    """
    softcap, bias = None, None
    axes = tuple(range(atom.aval.ndim))  # of the product, in the order of the logits
    while True:
        equation = program.producer(atom)
        if equation is None:
            raise _NoHead("it is an argument or a constant")
        name, operand = equation.primitive.name, equation.invars[0]
        if name == "dot_general":
            return _of_product(program, equation, axes, bias, softcap)
        if _is_transparent(equation):
            atom = operand
        elif name == "transpose":
            axes = tuple(equation.params["permutation"][i] for i in axes)
            atom = operand
        elif name == "reshape" and _keeps_rows(operand, atom, axes):
            axes, atom = tuple(range(operand.aval.ndim)), operand
        elif name == "add" and bias is None and axes[-1] == atom.aval.ndim - 1:
            bias, atom = _bias_and_rest(program, equation)
        elif name == "mul" and softcap is None and bias is None:
            softcap, atom = _softcap_and_rest(program, equation)
        else:
            inside = " which the loss does not see into" if name in _TRACED_INSIDE else ""
            raise _NoHead(f"it is the result of {name!r}{inside}, and not of a product")


def _is_transparent(equation: Equation) -> bool:
    """Whether the loss may take the operand in the place of the result.

    It leaves out a cast that rounds logits to 16 bits, because its logits are float32. Eight bits
    are too few for that, and the loss takes no such array.
    """
    dtypes = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    is_wide = all(jnp.issubdtype(d, jnp.floating) and d.itemsize > 1 for d in dtypes)
    return equation.primitive.name in _TRANSPARENT and is_wide


def _keeps_rows(old: Atom, new: Atom, axes: tuple[int, ...]) -> bool:
    """Whether a reshape only splits or merges axes of tokens."""
    is_ordered = axes == tuple(range(len(axes)))
    return is_ordered and old.aval.ndim > 0 and old.aval.shape[-1] == new.aval.shape[-1]


def _bias_and_rest(program: Program, equation: Equation) -> tuple[Atom, Atom]:
    """The vector that is added to the logits, and the logits before."""
    size = equation.outvars[0].aval.shape[-1]
    for bias, rest in (equation.invars, equation.invars[::-1]):
        source, is_vector = bias, bias.aval.shape[-1:] == (size,)
        while is_vector and source.aval.shape != (size,):
            inner = program.producer(source)
            if inner is None or not _keeps_last_axis(inner):
                is_vector = False
                continue
            source = inner.invars[0]
            is_vector = source.aval.shape[-1:] == (size,) and source.aval.size == size
        if is_vector and rest.aval.shape == equation.outvars[0].aval.shape:
            return source, rest
    raise _NoHead("something is added to it that is no vector with a number for each column")


def _keeps_last_axis(equation: Equation) -> bool:
    """Whether the last axis of the operand is the last one of the result."""
    if _is(equation, "broadcast_in_dim"):
        last = equation.outvars[0].aval.ndim - 1
        return equation.params["broadcast_dimensions"][-1:] == (last,)
    return _is(equation, "reshape")


def _softcap_and_rest(program: Program, equation: Equation) -> tuple[float, Atom]:
    """The bound `c` of `c * tanh(logits / c)`, and the logits."""
    for factor, rest in (equation.invars, equation.invars[::-1]):
        bound = _scalar(factor)
        tanh = program.producer(rest)
        while tanh is not None and _is_transparent(tanh):
            tanh = program.producer(tanh.invars[0])
        if bound is None or bound <= 0 or tanh is None or tanh.primitive.name != "tanh":
            continue
        scaled = program.producer(tanh.invars[0])
        if scaled is None or not _is(scaled, "div", "mul"):
            continue
        is_quotient = _is(scaled, "div")
        orders = [scaled.invars] if is_quotient else [scaled.invars, scaled.invars[::-1]]
        for logits, number in orders:
            if value := _scalar(number):
                found = value if is_quotient else 1 / value
                # A literal has the dtype of the logits.
                if abs(found - bound) <= 2 * float(jnp.finfo(logits.aval.dtype).eps) * bound:
                    return bound, logits
    raise _NoHead("it is multiplied by something, and is no c * tanh(logits / c)")


def _is(equation: Equation, *names: str) -> bool:
    return equation.primitive.name in names


def _scalar(atom: Atom) -> float | None:
    """The number, or None if it is none or not known when tracing."""
    return float(atom.val) if isinstance(atom, core.Literal) and not jnp.shape(atom.val) else None


def _of_product(
    program: Program,
    equation: Equation,
    axes: tuple[int, ...],
    bias: Atom | None,
    softcap: float | None,
) -> _Head:
    contracted, batched = equation.params["dimension_numbers"]
    if any(map(len, batched)) or any(len(c) != 1 for c in contracted):
        raise _NoHead("it is a product with batches or over several axes")
    # Each axis of the product: the operand that it is from, and its number there.
    free = [
        (side, i)
        for side, operand in enumerate(equation.invars)
        for i in range(operand.aval.ndim)
        if i != contracted[side][0]
    ]
    *tokens, (side, _) = (free[i] for i in axes)
    if equation.invars[side].aval.ndim != 2 or any(other == side for other, _ in tokens):
        raise _NoHead("it is no product of hidden states with one matrix")
    hidden = 1 - side
    dtypes = [equation.invars[i].aval.dtype for i in (hidden, side)]
    if dtypes[0] != dtypes[1]:
        raise _NoHead(f"it is a product of {dtypes[0]} with {dtypes[1]}; cast one of them before")
    weight, is_swapped = _parameter_of(program, equation.invars[side])
    return _Head(
        hidden=equation.invars[hidden],
        hidden_axes=(*(i for _, i in tokens), contracted[hidden][0]),
        weight=weight,
        weight_layout="vd" if (contracted[side][0] == 1) != is_swapped else "dv",
        bias=bias,
        softcap=softcap,
        precision=_one_precision(equation.params["precision"]),
    )


def _one_precision(precision: Any) -> Any:
    """The precision of both operands; a preset of an algorithm counts as one."""
    if isinstance(precision, jax.lax.DotAlgorithm):
        raise _NoHead(f"its product has the precision {precision}, which the loss does not have")
    first, second = precision if isinstance(precision, tuple) else (precision, precision)
    if first != second:
        raise _NoHead(f"its product has two precisions, {first} and {second}; give it one")
    return first


def _parameter_of(program: Program, atom: Atom) -> tuple[Atom, bool]:
    """The array under casts and transpositions of a matrix, and whether it is transposed.

    The loss casts it to the dtype of the hidden states itself, a part at a time. So the array is
    the result of the last cast that dropped bits of that dtype, or float8 that is cast back.
    """
    is_swapped, dtype = False, atom.aval.dtype
    while (equation := program.producer(atom)) is not None:
        name = equation.primitive.name
        if name == "transpose" and equation.params["permutation"] == (1, 0):
            is_swapped = not is_swapped
        elif not _is_transparent(equation) or not _holds(equation.outvars[0].aval.dtype, dtype):
            break
        atom = equation.invars[0]
    return atom, is_swapped


def _holds(one: Any, other: Any) -> bool:
    """Whether a floating dtype has all numbers of another, except for the smallest."""
    one, other = jnp.finfo(one), jnp.finfo(other)
    return one.nmant >= other.nmant and one.maxexp >= other.maxexp
