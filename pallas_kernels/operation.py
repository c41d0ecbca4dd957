"""Operations as JAX primitives, with their own rules for derivatives and for `jax.vmap`.

`jax.custom_vjp` would be simpler, but makes too many gradients under `jax.vmap`. A *member* is one
element of the axis that `jax.vmap` maps over. Over a `custom_vjp`, `vmap` batches the backward: the
backward makes one gradient of a shared weight for each member, and JAX adds these gradients up.
Over a primitive, `vmap` acts before the derivative. So `grad(vmap(f))` differentiates one call on
the tokens of all members, which makes one gradient of the weight. `vmap(grad(f))` still makes one
gradient for each member.

Three primitives make a differentiable function of an `Operation`:

- `operation` computes the results. Its JVP rule also computes what the backward reads.
- `operation_tangent` is the linear function from the tangents of the arguments to those of the
  results. It exists to be transposed, because kernels have no forward mode.
- `operation_backward`, the transpose of `operation_tangent`, computes the gradients that are asked
  for, and no others.

A fourth primitive, `operation_follows`, tells `jax.checkpoint` how to compute a result again.

An operation that is a `HasTangent` has forward mode and second derivatives, in plain JAX. All other
operations raise NotImplementedError for both.

Some calls cannot compute all members at once, for example if each member has a weight of its own.
Where XLA partitions the program, the primitive then stays a function of one member, and its
parameter `levels` (`mapping.py`) says which arrays have members. On several devices `jax.vmap` maps
the function, and functions inside of it that XLA partitions loop over a device's own members. On
one device the lowering makes one loop around the whole function. Elsewhere the batching rule makes
a loop at once (`members.py`).

A mask has a bool for each array. For example, `f(x, w, b)` has one result, each member of one
`jax.vmap` has its own `x` and `w`, and the gradients of `w` and `b` are asked for:

- `wanted = (False, True, True)`: the arguments whose gradients are asked for.
- `given = (True,)`: the results that have a cotangent.
- `levels = ((True, True, False),)`: the arguments that have members, for each `jax.vmap`.
- `summed = ((False, True),)`: the wanted gradients to add up over the members; `b` has one for all.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Recompute, checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import AxisType
from jax.stages import Wrapped

from pallas_kernels.choices import TANGENT_REASON, record
from pallas_kernels.gpu.kernel import vary, varying_axes
from pallas_kernels.mapping import Levels, Mask, by_vmap, loop
from pallas_kernels.members import fold_members, loop_over_members, saved_of_members
from pallas_kernels.partition import splits_itself, xla_partitions
from pallas_kernels.protocol import HasTangent, Operation


def call(operation: Operation, *args: jax.Array) -> tuple[jax.Array, ...]:
    """The results of the operation."""
    return tuple(_bind_forward(operation, None, (), *args))


def follows(
    result: jax.Array,
    operation: Operation,
    *args: jax.Array,
    name: str,
    where_kept: Mapping[str, jax.Array],
) -> jax.Array:
    """`result`, which a `jax.checkpoint` may compute again as `call(operation, *args)`.

    A checkpoint computes an array again by the operation that made it, from arguments which it may
    have to compute again, too. Here it takes `operation` if its policy keeps all of `where_kept`
    and not `result`. A policy keeps an array on the device, or in the memory of the host.

    Args:
      result: Array with the values of `call(operation, *args)[0]`, up to rounding.
      operation: Operation with one result.
      *args: Arguments of the operation.
      name: Name that `checkpoint_name` gave to `result`.
      where_kept: Arrays that the policy must keep, by the names that `checkpoint_name` gave them.
    """
    params = {"operation": operation, "num_args": len(args), "names": (name, *where_kept)}
    return _follows_p.bind(result, *args, *where_kept.values(), **params)[0]


def _primitive(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


_operation_p = _primitive("operation")
_tangent_p = _primitive("operation_tangent")
_backward_p = _primitive("operation_backward")
_follows_p = _primitive("operation_follows")


@dataclasses.dataclass(frozen=True)
class _Asked:
    """The gradients that a backward is asked for.

    Attributes:
      wanted: Arguments whose gradients are wanted.
      dtypes: Dtypes of these gradients.
      given: Results that have a cotangent.
    """

    wanted: Mask
    dtypes: tuple[Any, ...]
    given: Mask


# Jitted functions, so that JAX traces and lowers equal calls once.
@functools.lru_cache(maxsize=4096)
def _forward(operation: Operation, wanted: Mask | None, levels: Levels = ()) -> Wrapped:
    forward = by_vmap(functools.partial(operation.forward, wanted), levels)
    return _jit(operation, lambda *args: tuple(forward(*args)), wanted, levels)


@functools.lru_cache(maxsize=4096)
def _backward(
    operation: Operation, asked: _Asked, levels: Levels = (), summed: Levels = ()
) -> Wrapped:
    def backward(*arrays: jax.Array) -> list[jax.Array]:
        rest = iter(arrays)
        cotangents = [next(rest) if is_given else None for is_given in asked.given]
        gradients = operation.backward(asked.wanted, list(rest), cotangents)
        return [g.astype(dtype) for g, dtype in zip(gradients, asked.dtypes, strict=True)]

    of_members = by_vmap(backward, levels, summed)
    return _jit(operation, lambda *arrays: tuple(of_members(*arrays)), asked, levels, summed)


@functools.lru_cache(maxsize=4096)
def _tangent(operation: HasTangent, wanted: Mask) -> Wrapped:
    """A function from the wanted tangents and the saved arrays to the tangents of the results."""

    def tangent(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        tangents, saved = arrays[: sum(wanted)], arrays[sum(wanted) :]
        record(operation.name, saved, None, "reference", TANGENT_REASON)
        return tuple(operation.tangent(wanted, saved, tangents))

    return _jit(operation, tangent, "tangent", wanted)


def _jit(operation: Operation, fn: Callable[..., Any], *options: Any) -> Wrapped:
    # The program text of a function that partitions itself does not show what a device computes.
    # So two functions could have one text, and a compilation cache would take them for one. A name
    # with a hash of all options keeps them apart.
    digest = hashlib.sha256(repr((operation, options)).encode()).hexdigest()[:12]
    fn.__name__ = fn.__qualname__ = f"{operation.name}_{digest}"
    return jax.jit(fn)


def _bind(primitive: Primitive, fn: Any, *args: jax.Array, **params: Any) -> Any:
    """Binds the primitive that computes `fn`.

    The jaxpr of `fn` is a parameter, because JAX searches the jaxprs of an equation for primitives
    that need to know the devices. Code that counts the kernels of a program finds them there, too.
    """
    args = tuple(map(jnp.asarray, args))
    return primitive.bind(*args, fn=fn, jaxpr=fn.trace(*map(jax.typeof, args)).jaxpr, **params)


def _bind_forward(
    operation: Operation, wanted: Mask | None, levels: Levels, *args: jax.Array
) -> Any:
    fn = _forward(operation, wanted, levels)
    return _bind(_operation_p, fn, *args, operation=operation, wanted=wanted, levels=levels)


def _bind_backward(
    operation: Operation, asked: _Asked, levels: Levels, summed: Levels, *arrays: jax.Array
) -> Any:
    fn = _backward(operation, asked, levels, summed)
    params = {"operation": operation, "asked": asked, "levels": levels, "summed": summed}
    return _bind(_backward_p, fn, *arrays, **params)


def _forward_in_a_loop(operation: Operation, wanted: Mask | None, levels: Levels) -> Any:
    return loop(functools.partial(_bind_forward, operation, wanted, ()), levels)


def _backward_in_a_loop(operation: Operation, asked: _Asked, levels: Levels, summed: Levels) -> Any:
    return loop(functools.partial(_bind_backward, operation, asked, (), ()), levels, summed)


def _lower(
    in_a_loop: Callable[..., Any], context: Any, *args: Any, fn: Any, jaxpr: Any, **params: Any
) -> Any:
    operation, module = params["operation"], context.module_context
    num_devices = getattr(module.axis_context, "num_devices", 1)
    if params["levels"] and num_devices == 1:
        fn = in_a_loop(**params)
    elif module.lowering_parameters.for_export and num_devices > 1 and splits_itself(jaxpr):
        raise NotImplementedError(
            f"jax.export of {operation.name} for {num_devices} devices: on Auto axes XLA asks "
            "Python how to split it, which no file can hold; use a mesh of Explicit axes, or "
            "jax.shard_map"
        )
    return mlir.lower_fun(fn, multiple_results=True)(context, *args)


for _p, _in_a_loop in ((_operation_p, _forward_in_a_loop), (_backward_p, _backward_in_a_loop)):
    _p.def_impl(lambda *args, fn, **_: fn(*args))
    _p.def_effectful_abstract_eval(lambda *_, jaxpr, **__: (jaxpr.out_avals, jaxpr.effects))
    mlir.register_lowering(_p, functools.partial(_lower, _in_a_loop))


# Derivatives.


def _jvp(primals, tangents, *, operation: Operation, wanted: Mask | None, levels: Levels, **_):
    has_tangent = tuple(type(t) is not ad.Zero for t in tangents)
    if wanted is not None:  # a derivative of a derivative
        _with_tangent(operation)
    out = _bind_forward(operation, has_tangent if wanted is None else wanted, levels, *primals)
    num_results = len(out) - operation.num_residuals(has_tangent)
    residuals = out[num_results:]
    saved_of = functools.partial(operation.saved, has_tangent)
    results, saved, levels_of_saved = saved_of_members(
        saved_of, levels, primals, out[:num_results], residuals
    )
    given = [t for t, is_given in zip(tangents, has_tangent, strict=True) if is_given]
    levels = tuple(
        (*itertools.compress(level, has_tangent), *of_saved)
        for level, of_saved in zip(levels, levels_of_saved, strict=True)
    )
    types = tuple(jax.typeof(a) for a in results)
    params = {"operation": operation, "wanted": has_tangent, "levels": levels}
    of_results = _tangent_p.bind(*given, *saved, result_types=types, **params)
    if wanted is None:
        return list(results), of_results
    return [*results, *residuals], [*of_results, *(ad.Zero(jax.typeof(a)) for a in residuals)]


def _transpose(cotangents, *args, operation: Operation, wanted: Mask, levels: Levels, **_: Any):
    num_tangents = sum(wanted)
    given = tuple(type(c) is not ad.Zero for c in cotangents)
    arrays = [c for c, is_given in zip(cotangents, given, strict=True) if is_given]
    # A member has a cotangent of its own. Members that share an argument share its gradient.
    summed = tuple(tuple(not own for own in level[:num_tangents]) for level in levels)
    levels = tuple((*(True,) * len(arrays), *level[num_tangents:]) for level in levels)
    arrays += args[num_tangents:]
    asked = _Asked(wanted, tuple(a.aval.dtype for a in args[:num_tangents]), given)
    gradients = _bind_backward(operation, asked, levels, summed, *arrays)
    gradients = [_split_as(a.aval, g) for g, a in zip(gradients, args[:num_tangents], strict=True)]
    return [*gradients, *[None] * (len(args) - num_tangents)]


def _split_as(aval: Any, gradient: jax.Array) -> jax.Array:
    """The gradient of an argument of this type, split over a mesh as the argument is.

    Inside of `jax.shard_map`, the gradient of an array that is the same on several devices is the
    sum of their gradients. With `check_vma=False` no type says which arrays are the same, and the
    transpose of `shard_map` takes the sum.
    """
    varying = aval.manual_axis_type.varying
    if same := tuple(sorted(varying_axes(gradient) - varying)):
        gradient = jax.lax.psum(gradient, same)
    gradient = vary(gradient, varying)
    if AxisType.Explicit in aval.sharding.mesh.axis_types:
        return jax.sharding.reshard(gradient, aval.sharding)
    return gradient


def _with_tangent(operation: Operation) -> HasTangent:
    if not isinstance(operation, HasTangent):
        raise NotImplementedError(
            f"{operation.name} has a gradient rule of its own, so it has no forward mode (jax.jvp, "
            "jax.jacfwd) and no second derivative; use implementation='reference' if the function "
            "takes it"
        )
    return operation


def _in_plain_jax(
    *arrays: jax.Array, operation: Operation, wanted: Mask, levels: Levels, **_: Any
) -> Any:
    return list(by_vmap(_tangent(_with_tangent(operation), wanted), levels)(*arrays))


def _jvp_of_tangent(primals, tangents, **params: Any):
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(functools.partial(_in_plain_jax, **params), primals, tangents)


def _jvp_of_backward(
    primals,
    tangents,
    *,
    operation: Operation,
    asked: _Asked,
    levels: Levels,
    summed: Levels,
    **_: Any,
):
    run = _tangent(_with_tangent(operation), asked.wanted)
    gradients = _bind_backward(operation, asked, levels, summed, *primals)
    given = asked.given

    def backward(*arrays: jax.Array) -> Any:
        # The point at which the linear function `tangent` is transposed. Its arrays have the types
        # of the gradients: on Manual axes a gradient may vary over an axis over which its argument
        # does not.
        types = _backward(operation, asked).trace(*map(jax.typeof, arrays)).jaxpr.out_avals
        zeros = [ad.instantiate_zeros(ad.Zero(t)) for t in types]
        cotangents, saved = arrays[: sum(given)], arrays[sum(given) :]

        def tangent(*tangents: jax.Array) -> list[jax.Array]:
            results = zip(run(*tangents, *saved), given, strict=True)
            return [a for a, is_given in results if is_given]

        return jax.vjp(tangent, *zeros)[1](list(cotangents))

    of_members = by_vmap(backward, levels, summed)
    _, found = jax.jvp(of_members, primals, tuple(map(ad.instantiate_zeros, tangents)))
    return gradients, list(found)


def _batch_tangent(args, axes, **params: Any):
    out = jax.vmap(functools.partial(_in_plain_jax, **params), tuple(axes))(*args)
    return out, [0] * len(out)


ad.primitive_jvps[_operation_p] = _jvp
ad.primitive_jvps[_backward_p] = _jvp_of_backward
ad.primitive_jvps[_tangent_p] = _jvp_of_tangent
ad.primitive_transposes[_tangent_p] = _transpose
_tangent_p.def_abstract_eval(lambda *_, result_types, **__: list(result_types))
_tangent_p.def_impl(_in_plain_jax)
mlir.register_lowering(_tangent_p, mlir.lower_fun(_in_plain_jax, multiple_results=True))
batching.primitive_batchers[_tangent_p] = _batch_tangent


# Batches.


def _batch_forward(
    args, axes, *, operation: Operation, wanted: Mask | None, levels: Levels, **_: Any
):
    args, is_batched = _at_front(args, axes)
    fold = functools.partial(operation.fold, wanted)
    folded = fold_members(fold, levels, args, is_batched)
    if folded is not None:
        of_all, arrays, levels = folded
        out = _bind_forward(of_all, wanted, levels, *arrays)
        return out, [len(levels)] * len(out)
    if xla_partitions(args):
        out = _bind_forward(operation, wanted, (is_batched, *levels), *args)
    else:
        of_one = functools.partial(_bind_forward, operation, wanted, levels)
        out = loop_over_members(operation.name, of_one, args, is_batched)
    return out, [0] * len(out)


def _batch_backward(
    args,
    axes,
    *,
    operation: Operation,
    asked: _Asked,
    levels: Levels,
    summed: Levels,
    **_: Any,
):
    args, is_batched = _at_front(args, axes)
    bind = functools.partial(_bind_backward, operation, asked)
    if xla_partitions(args):
        of_own = (False,) * sum(asked.wanted)  # each member has gradients of its own
        out = bind((is_batched, *levels), (of_own, *summed), *args)
    else:
        of_one = functools.partial(bind, levels, summed)
        out = loop_over_members(operation.name, of_one, args, is_batched)
    return out, [0] * len(out)


def _at_front(args, axes) -> tuple[list[jax.Array], Mask]:
    is_batched = tuple(axis is not None for axis in axes)
    pairs = zip(args, axes, strict=True)
    return [a if axis is None else jnp.moveaxis(a, axis, 0) for a, axis in pairs], is_batched


batching.primitive_batchers[_operation_p] = _batch_forward
batching.primitive_batchers[_backward_p] = _batch_backward


# Results that follow from others.


def _recompute(saveable, is_unknown, is_instantiated, eqn):
    """The rule of `follows` for `jax.checkpoint`: equations of the forward and of the backward.

    Args:
      saveable: Policy of the checkpoint.
      is_unknown: Operands that only the backward knows.
      is_instantiated: Operands that the backward has without keeping them: arguments of the
        checkpoint, and what the backward computes again.
      eqn: Equation of the primitive.

    Returns:
      The equation of the forward, that of the backward, whether the result is unknown and
      instantiated, and operands to keep. Each equation may be None.
    """
    num_args, names = eqn.params["num_args"], eqn.params["names"]
    named = eqn.invars[0], *eqn.invars[1 + num_args :]
    # An array in the memory of the host counts as instantiated, as one that is computed again does.
    result_is_kept, *others_are_kept = (
        saveable(_name_primitive(), v.aval, name=name) not in (False, Recompute)
        for v, name in zip(named, names, strict=True)
    )
    read = [v for v, given in zip(eqn.invars, is_instantiated, strict=True) if not given]
    if any(is_unknown):
        return None, eqn, [True], [True], read
    if not is_instantiated[0]:  # the policy keeps the result on the device
        return eqn, None, [False], [False], []
    if result_is_kept or not all(others_are_kept):
        return eqn, eqn, [False], [True], read
    args, operation = eqn.invars[1 : 1 + num_args], eqn.params["operation"]
    fn = _forward(operation, None)
    jaxpr = fn.trace(*(v.aval for v in args)).jaxpr
    params = {"fn": fn, "jaxpr": jaxpr, "operation": operation, "wanted": None, "levels": ()}
    again = eqn.replace(primitive=_operation_p, invars=args, params=params, effects=jaxpr.effects)
    return eqn, again, [False], [True], [v for v in args if v in read]


@functools.cache
def _name_primitive() -> Any:
    """The primitive of `checkpoint_name`, which `jax.ad_checkpoint` has only from JAX 0.12 on."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, "any"))(0.0).eqns[0].primitive


_follows_p.def_impl(lambda result, *_, **__: [result])
_follows_p.def_abstract_eval(lambda result, *_, **__: [result])
mlir.register_lowering(_follows_p, lambda context, result, *_, **__: [result])
ad.primitive_jvps[_follows_p] = lambda primals, tangents, **params: (
    _follows_p.bind(*primals, **params),
    [tangents[0]],
)
# `jax.vmap` removes the primitive. A checkpoint then computes the result again by the operation
# that made it.
batching.primitive_batchers[_follows_p] = lambda args, axes, **_: ([args[0]], [axes[0]])
partial_eval.partial_eval_jaxpr_custom_rules[_follows_p] = _recompute
