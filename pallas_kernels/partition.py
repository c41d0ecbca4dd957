"""Splits a function of tokens over a mesh, so that each device computes its own tokens.

XLA cannot split a kernel or a loop over chunks of tokens. Left alone, it would gather all tokens on
every device. So `partitioned` says how the function is split, for each of JAX's three kinds of mesh
axes:

- Auto axes: by `custom_partitioning` with a rule for Shardy (`auto_axes.py`). XLA decides how the
  tokens, and the members of a `jax.vmap`, are split.
- Explicit axes: by `jax.shard_map` over the axes that the types of the arrays name.
- Manual axes, inside of `jax.shard_map`: the arrays are a device's parts already, and nothing is
  left to do. `operation.py` sums the gradients.

The caller gives a *local function*, which computes one device's tokens from the device's arrays,
and the *roles* of its arrays (`layout.py`). A weight may be split over any axes. Each device
gathers the weight once for a call, in the dtype of the computation. The gradient of the weight is
reduce-scattered.

An axis of a weight that is named in `Roles.parts` need not be gathered: the columns of an MLP, or
the vocabulary. It may stay split over mesh axes that split no tokens. Then each device computes
with its part of the weight, and the local function exchanges between devices what is missing.

The leading axes of tokens stay separate until the local function merges them. A reshape that merges
a split axis with another axis would make XLA gather both.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.extend.core import subjaxprs
from jax.sharding import AxisType, NamedSharding

from pallas_kernels.auto_axes import over_auto_axes
from pallas_kernels.gpu.device import reason_not_here
from pallas_kernels.gpu.kernel import interpreted, retyped, vary, varying_axes
from pallas_kernels.layout import Layout, Local, Place, Roles, Split, Splits, to_spec
from pallas_kernels.logs import log_once


def unsupported_reason() -> str | None:
    """Why `partitioned` cannot split tokens over the mesh in context, or None if it can."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = axes_of_kind(mesh, AxisType.Auto)
    if not (auto and axes_of_kind(mesh, AxisType.Manual)):
        return None
    return (
        f"the mesh axes {auto} are left to XLA inside of jax.shard_map, where XLA cannot partition "
        "a kernel, and gathers the tokens of a loss; name the axes in axis_names of jax.shard_map "
        "too, or make them Explicit"
    )


def partitioned(
    local: Local, key: Hashable, roles: Roles, *args: jax.Array, manual_parts: Splits | None = None
) -> tuple[jax.Array, ...]:
    """`local(key, place)(*args)`, computed by each device for its own tokens.

    Args:
      local: Maker of the local function. The local function takes whole weights, except for the
        axes that `place` says are split, and returns an array for each of `roles.results`.
      key: Static options of `local`.
      roles: Roles of the arguments and of the results.
      *args: The arrays.
      manual_parts: Manual axes over which the caller has split each of `roles.parts`.
    """
    mesh = mesh_of(args)
    whole = Place(parts=manual_parts or ((),) * len(roles.parts))
    if _explicit_axes(mesh):
        _log_of_unused_auto_axes(mesh)
        return _over_explicit_axes(local, key, roles, whole, mesh, args)
    if xla_partitions(args):
        return tuple(over_auto_axes(local, key, roles, whole, tuple(a.ndim for a in args))(*args))
    # On Manual axes the arrays are a device's parts already. Where `unsupported_reason` is not
    # None, XLA partitions the operations of `local` as those of any program.
    return tuple(local(key, whole)(*args))


def xla_partitions(args: Sequence[jax.Array]) -> bool:
    """Whether XLA partitions the functions of these arrays that are given to `partitioned`.

    It does on meshes whose axes are all Auto, and in programs without a mesh, whose arguments XLA
    may split all the same.
    """
    if interpreted():
        return False  # a function that XLA partitions cannot have the effects of the interpreter
    mesh = mesh_of(args)
    is_auto = bool(axes_of_kind(mesh, AxisType.Auto))
    is_manual = bool(axes_of_kind(mesh, AxisType.Manual))
    return mesh.empty or (is_auto and not is_manual and not _explicit_axes(mesh))


def splits_itself(jaxpr: Any) -> bool:
    """Whether a jaxpr has functions that XLA asks Python to split."""
    is_split = any(eqn.primitive.name == "custom_partitioning" for eqn in jaxpr.eqns)
    return is_split or any(map(splits_itself, subjaxprs(jaxpr)))


def split_over_explicit_axes(
    local: Local, key: Hashable, roles: Roles, *args: jax.Array
) -> tuple[jax.Array, ...]:
    """`local(key, place)(*args)` for a function in plain JAX, which JAX differentiates.

    XLA partitions it over Auto axes, as it does any program. On Explicit axes JAX would refuse, for
    instance, the product of tokens and a weight that the same axis splits. So there each device
    gathers the weights and computes its own tokens. The roles have no parts.
    """
    mesh, whole = mesh_of(args), Place()
    explicit = _explicit_axes(mesh)
    has_auto = bool(axes_of_kind(mesh, AxisType.Auto))
    is_split = any(name is not None for a in args for name in jax.typeof(a).sharding.spec)
    # A map beside Auto axes names the Explicit ones, and JAX refuses one that names the axis of the
    # members of a `jax.vmap`. So there is no map where no array here is split.
    if not explicit or (has_auto and not is_split):
        return tuple(local(key, whole)(*args))
    names = explicit if has_auto else ()
    run = lambda *args: _over_explicit_axes(local, key, roles, whole, mesh, args, names=names)
    return tuple(in_types_that_do_not_vary(run, args))


def in_types_that_do_not_vary(
    run: Callable[..., Sequence[jax.Array]], args: Sequence[jax.Array]
) -> list[jax.Array]:
    """`run(*args)`, where `run` is a `jax.shard_map` with check_vma=False that JAX differentiates.

    By their types, neither the results of such a map nor its gradients vary over the Manual axes
    around the map. So `run` gets arguments whose types do not vary either. The returned results
    vary over the axes over which `args` vary.
    """
    varying = varying_axes(args)
    own = (retyped(vary(a, varying), frozenset()) for a in args)
    return [retyped(a, varying) for a in run(*own)]


def mesh_of(args: Sequence[jax.Array]) -> Any:
    """The mesh in context, or that of the arrays' types.

    `jax.vmap` takes the axis that splits its members off the mesh in context.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    meshes = [jax.typeof(a).sharding.mesh for a in args]
    return next((m for m in meshes if not m.empty), mesh)


def _log_of_unused_auto_axes(mesh: Any) -> None:
    """Logs once that kernels are not split over Auto axes of several devices beside Explicit ones.

    JAX cannot compile a function that XLA partitions on such a mesh. So `partitioned` maps over all
    axes, and splits the tokens over the Explicit ones alone.
    """
    if (auto := axes_of_kind(mesh, AxisType.Auto)) and reason_not_here() is None:
        log_once(
            f"the mesh has the Explicit axes {_explicit_axes(mesh)} and the Auto axes {auto}: "
            "operations with kernels are not split over the Auto axes there, and all their devices "
            "compute the same; make all axes Explicit, or all Auto"
        )


def axes_of_kind(mesh: Any, kind: AxisType) -> Split:
    """The axes of that kind that have several devices."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(name for name, size, k in axes if k == kind and size > 1)


def _explicit_axes(mesh: Any) -> Split:
    """The Explicit axes, those of one device, too: types name them, and JAX checks the types."""
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(name for name, kind in axes if kind == AxisType.Explicit)


def split_alike(x: jax.Array, *numbers: jax.Array) -> list[jax.Array]:
    """Numbers for each token, split over Explicit axes as the tokens of `x` are.

    If `x` is whole, all are split as the first one that is split. JAX refuses to combine arrays
    that Explicit axes split in other ways. The last axis of `x` is no axis of tokens.
    """
    mesh = mesh_of((x, *numbers))
    if not _explicit_axes(mesh):
        return list(numbers)
    specs = [explicit_splits(a) for a in (x, *numbers)]
    specs[0] = specs[0][:-1]
    wanted = next(filter(any, specs), specs[0])
    return [split_as(wanted, a, mesh) for a in numbers]


def gathered(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, whole on each device of Explicit axes."""
    return [split_as(((),) * a.ndim, a) for a in arrays]


def explicit_splits(a: jax.Array) -> Splits:
    """The Explicit axes that split each axis of an array."""
    spec = jax.typeof(a).sharding.spec  # of a type, so it has an entry for each axis
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec)


def split_as(wanted: Splits, a: jax.Array, mesh: Any = None) -> jax.Array:
    """The array, split by Explicit axes as wanted; the array itself if it is split so already.

    Args:
      wanted: The Explicit axes that shall split each axis of the array.
      a: Array.
      mesh: Mesh of the axes; None takes that of the array's type.
    """
    if explicit_splits(a) == wanted:
        return a
    mesh = jax.typeof(a).sharding.mesh if mesh is None else mesh
    return jax.sharding.reshard(a, NamedSharding(mesh, to_spec(wanted)))


def _over_explicit_axes(
    local: Local,
    key: Hashable,
    roles: Roles,
    whole: Place,
    mesh: Any,
    args: Sequence[jax.Array],
    *,
    names: Split = (),
) -> tuple[jax.Array, ...]:
    """`local(key, place)(*args)` by `jax.shard_map`, split over the Explicit axes.

    Without `names` the map is over all axes, except for one over which `jax.vmap` splits its
    members, which JAX refuses to name. With `names` it is over these axes, and the Auto axes are
    left to XLA.
    """
    types = list(map(explicit_splits, args))
    # An axis of one device splits nothing: it decides neither kernels nor exchanges. Only the types
    # of the results name it.
    several = axes_of_kind(mesh, AxisType.Explicit)
    shapes = [a.shape for a in args]
    layout_of = lambda splits: Layout.make(roles, whole, splits, shapes, mesh.shape)
    layout = layout_of([_only(several, splits) for splits in types])
    of_types = layout_of(types).results
    results_as = [
        named if _only(several, named) == own else own
        for named, own in zip(of_types, layout.results, strict=True)
    ]
    layout.warn_of_repeated_work()
    run = layout.of_device(local, key, roles)
    # XLA ends with an internal error where it partitions a map over axes of one device alone.
    if several or not names:
        run = jax.shard_map(
            run,
            mesh=mesh,
            in_specs=tuple(map(to_spec, layout.args)),
            out_specs=tuple(map(to_spec, layout.results)),
            axis_names=set(names),
            check_vma=False,
        )
    of = lambda splits: NamedSharding(mesh, to_spec(splits))
    results = run(*map(jax.sharding.reshard, args, map(of, layout.args)))
    results = [
        a if named == own else jax.sharding.reshard(a, of(named))
        for a, named, own in zip(results, results_as, layout.results, strict=True)
    ]
    # With check_vma=False the results do not say over which Manual axes around this shard_map they
    # vary. They vary as the arguments do, but not over axes over which the caller has split a part:
    # there the local functions have exchanged what is missing.
    exchanged = {name for split in whole.parts for name in split}
    varying = varying_axes(args) - exchanged
    return tuple(vary(a, varying) for a in results)


def _only(axes: Split, splits: Splits) -> Splits:
    """The splits over these mesh axes alone."""
    return tuple(tuple(name for name in names if name in axes) for names in splits)
