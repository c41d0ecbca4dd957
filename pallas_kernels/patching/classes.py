"""Classes that run an operation in the place of a module's own call.

A patched module gets a subclass of its class, with another `__call__`. Its parameters, attributes
and paths stay, and so does `isinstance`. One class is made for a class and a rule, so that equal
modules have equal graph definitions.
"""

import copyreg
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.choices import record
from pallas_kernels.patching.candidates import parameters
from pallas_kernels.patching.rules import Call, Rule, name_of

# The result gets the first one. The second one is that of gate and up, which the operations lay out
# themselves. Arguments of other names may constrain anything.
_LAYOUTS = ("out_sharding", "intermediate_sharding")


@functools.cache
def patched_class(base: type[nnx.Module], rule: Rule) -> type[nnx.Module]:
    """The subclass of `base` whose call follows the rule."""
    own_call: Any = base.__call__
    signature = inspect.signature(own_call)
    name_of_self, name_of_x, *_ = signature.parameters

    @functools.wraps(own_call)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        x = given.pop(name_of_x)
        del given[name_of_self]
        if not (hasattr(x, "shape") and hasattr(x, "dtype")):
            return own_call(self, *args, **kwargs)
        kind = _kind_of(self, x, rule)
        reason = _state_reason(self, rule) or _argument_reason(given, signature, rule)
        reason = reason or _kind_reason(kind, rule)
        if reason is not None:
            why = f"the patched {base.__name__} runs its own code, because {reason}"
            record(rule.operation.name, (x,), asked_for=None, chosen="reference", reason=why)
            return own_call(self, *args, **kwargs)
        y = rule.operation.run(self, jnp.asarray(x), dict(rule.calls)[kind])
        return _constrained(y, given.get("out_sharding"))

    namespace = {
        "__call__": call,
        "__doc__": base.__doc__,
        "__module__": base.__module__,
        "pallas_kernels_base": base,
        "pallas_kernels_rule": rule,
    }
    return _metaclass(type(base))(f"Patched{base.__name__}", (base,), namespace)


@functools.cache
def _metaclass(base: type) -> type:
    """A metaclass whose classes are pickled by the arguments of `patched_class`."""
    metaclass = type(f"Patched{base.__name__}", (base,), {})
    copyreg.pickle(metaclass, _arguments_of_class)
    return metaclass


def _arguments_of_class(cls: Any) -> Any:
    return patched_class, (cls.pallas_kernels_base, cls.pallas_kernels_rule)


def is_patched(module: nnx.Module) -> bool:
    """Whether the module already runs an operation."""
    return hasattr(type(module), "pallas_kernels_rule")


def set_class(module: nnx.Module, cls: type[nnx.Module]) -> None:
    """Changes the class of the module, around the checks that NNX has for attributes."""
    object.__setattr__(module, "__class__", cls)


def is_sharding(value: Any) -> bool:
    """Whether the value says where an array lies."""
    return isinstance(value, NamedSharding | PartitionSpec)


def _kind_of(module: nnx.Module, x: jax.Array, rule: Rule) -> Call:
    """The kind of a call of the module for an input."""
    found = parameters(module)
    dtypes = tuple(jnp.dtype(found[path].dtype) for path, _ in rule.ranks if path in found)
    return Call(jnp.dtype(x.dtype), x.ndim, dtypes)


def _kind_reason(kind: Call, rule: Rule) -> str | None:
    """Why nothing is known about calls of this kind, or None."""
    known = [call for call, _ in rule.calls]
    if kind in known:
        return None
    for what, of in (
        ("its input is {}", lambda call: call.dtype),
        ("the rank of its input is {}", lambda call: call.rank),
        ("its parameters are {}", lambda call: ", ".join(map(str, dict.fromkeys(call.parameters)))),
    ):
        values = dict.fromkeys(map(of, known))
        if of(kind) not in values:
            return f"{what.format(of(kind))}, and it was compared for {', '.join(map(str, values))}"
    return (
        f"it was not compared for an input of {kind.dtype} and rank {kind.rank} with its parameters"
    )


def _state_reason(module: nnx.Module, rule: Rule) -> str | None:
    """Why the module is no longer the one that was compared, or None."""
    found = {path: v.ndim for path, v in parameters(module).items()}
    if found == dict(rule.ranks):
        return None
    if found.keys() == dict(rule.ranks).keys():
        return "its parameters are stacked, and it is not called inside of a scan or vmap over them"
    changed = found.keys() ^ dict(rule.ranks).keys()
    names = ", ".join(sorted(map(name_of, changed)))
    return f"it has other parameters than when it was patched: {names}"


def _argument_reason(given: dict[str, Any], signature: inspect.Signature, rule: Rule) -> str | None:
    """Why other arguments of the call may change the result, or None."""
    for name, value in given.items():
        default = signature.parameters[name].default
        is_default = value is default or (type(value) is type(default) and _equal(value, default))
        is_ignored = isinstance(value, bool) and name in rule.ignored
        is_layout = name in _LAYOUTS and is_sharding(value)
        if not (is_default or is_ignored or is_layout):
            return f"its argument {name}={_short(value)} may change the result"
    return None


def _equal(a: Any, b: Any) -> bool:
    """Whether plain values are equal. Arrays have no such answer while JAX traces."""
    return isinstance(a, bool | int | float | str | tuple) and a == b


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"<{type(value).__name__}>"


def _constrained(y: jax.Array, sharding: Any) -> jax.Array:
    """The result, laid out as the caller asks for."""
    if not is_sharding(sharding):
        return y
    is_named = isinstance(sharding, NamedSharding)
    mesh = sharding.mesh if is_named else jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        return jax.sharding.reshard(y, sharding)
    return jax.lax.with_sharding_constraint(y, sharding)
