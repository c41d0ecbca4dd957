"""Functions of tokens that each device computes for its own tokens, on any mesh.

A kernel computes the tokens that it is given, and so does a loop over chunks of tokens. XLA cannot
split either, so it gathers all tokens on every device. `partitioned` tells XLA how to split them,
in each of the three ways in which JAX uses the axes of a mesh:

- Auto axes: by `custom_partitioning` with a rule for Shardy. XLA decides how the tokens are split.
- Explicit axes: by `jax.shard_map` over the axes that the types of the arrays name.
- Manual axes, inside of `jax.shard_map`: the arrays are a device's parts already, and nothing is
  left to do. `operation.py` sums the gradients.

A weight may be split over any axes. Each device gathers the weight once for a call, in the dtype of
the computation, and its part of the gradient is reduce-scattered. A named axis of a weight (the
columns of an MLP, the vocabulary) may stay split over mesh axes that do not split tokens: then each
device computes with its part, and the local function exchanges what is missing.

The leading axes of tokens stay apart until the local function merges them. A reshape that merges an
axis that is split with another one would make XLA gather both.

Above 450 lines, because all three kinds of axes read the same roles and layout.
"""

import dataclasses
import functools
import logging
import math
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels.gpu.device import reason_not_here
from pallas_kernels.gpu.kernel import interpreted, retyped, vary, varying_axes

_logger = logging.getLogger(__name__)

# The mesh axes that split an axis of an array, major first; empty where the axis is whole.
type Split = tuple[str, ...]
type Splits = tuple[Split, ...]


@dataclasses.dataclass(frozen=True)
class Tokens:
    """An array whose leading axes are tokens.

    Attributes:
      features: Names of the axes that follow.
    """

    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokensLast:
    """An array of all tokens, merged into the last axis: `[*features, T]`.

    A device has the columns of its own tokens. Where several leading axes are split, the columns
    lie in another order than those of one device. So the array is only for a call that splits the
    tokens in the same way.

    Attributes:
      features: Names of the axes before the last.
    """

    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A result that is the same on all devices, such as a scale.

    Attributes:
      num_axes: Number of its axes.
    """

    num_axes: int = 0


@dataclasses.dataclass(frozen=True)
class Weight:
    """An array that every token reads.

    Attributes:
      axes: Names of its axes.
      dtype: Dtype to which it is cast before it is gathered; None keeps its own. A weight that is
        not gathered comes as it is.
      by_rows: Whether a gathered weight lies row by row in memory, as kernels read it. Otherwise
        XLA lays it out as the exchange delivers it, and may copy it for each kernel.
    """

    axes: tuple[str, ...]
    dtype: Any = None
    by_rows: bool = False


@dataclasses.dataclass(frozen=True)
class GradientOf:
    """The gradient of a weight. The local function returns the sum over a device's own tokens.

    Attributes:
      index: Position of the weight among the arguments.
    """

    index: int


@dataclasses.dataclass(frozen=True)
class Roles:
    """The roles of a local function's arguments and results.

    Attributes:
      args: Roles of the arguments.
      results: Roles of the results.
      parts: Names of the axes of which a device may have a part.
    """

    args: tuple[Tokens | TokensLast | Weight, ...]
    results: tuple[Tokens | TokensLast | Replicated | GradientOf, ...]
    parts: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Place:
    """The mesh axes that split what a local function sees. Empty where nothing is split.

    Attributes:
      tokens: Mesh axes that split the tokens.
      parts: Mesh axes that split each of `Roles.parts`, in that order.
      leading: Mesh axes that split each leading axis of the tokens; empty if none is split.
    """

    tokens: Split = ()
    parts: Splits = ()
    leading: Splits = ()


# `local(key, place)` makes the function of a device's arrays. It is defined at the top level of a
# module, so that equal calls share an entry of the cache of `_over_auto_axes`.
type Local = Callable[[Any, Place], Callable[..., Sequence[jax.Array]]]


def unsupported_reason() -> str | None:
    """Why `partitioned` cannot split tokens over the mesh in context, or None if it can."""
    mesh = jax.sharding.get_abstract_mesh()
    auto = axes_of_kind(mesh, AxisType.Auto)
    if not (auto and axes_of_kind(mesh, AxisType.Manual)):
        return None
    return (
        f"the mesh axes {auto} are left to XLA inside of jax.shard_map, where XLA cannot partition "
        "a kernel; name them in axis_names of jax.shard_map too, or make them Explicit"
    )


def partitioned(
    local: Local, key: Hashable, roles: Roles, *args: jax.Array, manual_parts: Splits | None = None
) -> tuple[jax.Array, ...]:
    """`local(key, place)(*args)`, computed by each device for its own tokens.

    Args:
      local: Maker of the function of a device's arrays. That function takes weights that are whole,
        except for the parts that `place` names, and returns a value for each result.
      key: Static options of `local`.
      roles: Roles of the arguments and of the results.
      *args: The arrays.
      manual_parts: Manual axes over which the caller has split each of `roles.parts`.
    """
    mesh = mesh_of(args)
    auto, manual = axes_of_kind(mesh, AxisType.Auto), axes_of_kind(mesh, AxisType.Manual)
    whole = Place(parts=manual_parts or ((),) * len(roles.parts))
    if explicit := _explicit_beside_auto(mesh) or _explicit_axes(mesh, args):
        return _over_explicit_axes(local, key, roles, whole, mesh, explicit, args)
    if interpreted() or (not mesh.empty and (manual or not auto)):
        # On Manual axes the arrays are a device's parts already. A function that XLA partitions
        # cannot have the effects of the interpreter. Where `unsupported_reason` is not None, XLA
        # partitions the operations of `local` as those of any program.
        return tuple(local(key, whole)(*args))
    return tuple(_over_auto_axes(local, key, roles, whole, tuple(a.ndim for a in args))(*args))


def split_over_explicit_axes(
    local: Local, key: Hashable, roles: Roles, *args: jax.Array
) -> tuple[jax.Array, ...]:
    """`local(key, place)(*args)` for a function in plain JAX, which JAX differentiates.

    XLA partitions it over Auto axes, as it does any program. On Explicit axes JAX would refuse, for
    instance, the product of tokens and a weight that the same axis splits. So there each device
    gathers the weights and computes its own tokens.
    """
    mesh = mesh_of(args)
    whole = Place(parts=((),) * len(roles.parts))
    if explicit := _explicit_axes(mesh, args):
        is_mixed = bool(axes_of_kind(mesh, AxisType.Auto))
        # Inside of another `jax.shard_map`, JAX makes gradients of types that do not vary, because
        # `_over_explicit_axes` maps with check_vma=False. So its arguments do not vary either.
        varying = frozenset().union(*map(varying_axes, args))
        own = [retyped(vary(a, varying), frozenset()) for a in args]
        results = _over_explicit_axes(
            local, key, roles, whole, mesh, explicit, own, leaves_auto=is_mixed
        )
        return tuple(retyped(a, varying) for a in results)
    return tuple(local(key, whole)(*args))


def mesh_of(args: Sequence[jax.Array]) -> Any:
    """The mesh in context, or that of the arrays' types.

    `jax.vmap` takes the axis that splits its members off the mesh in context.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    meshes = [jax.typeof(a).sharding.mesh for a in args]
    return next((m for m in meshes if not m.empty), mesh)


def _explicit_axes(mesh: Any, args: Sequence[jax.Array]) -> Split:
    """The Explicit axes, unless there are Auto axes, too, and no Explicit axis splits an array.

    Inside of `jax.vmap` JAX refuses a `jax.shard_map` that names the axis of the members. Where all
    axes are Explicit, none is named.
    """
    axes = axes_of_kind(mesh, AxisType.Explicit)
    is_split = any(name is not None for a in args for name in jax.typeof(a).sharding.spec)
    return axes if is_split or not axes_of_kind(mesh, AxisType.Auto) else ()


def _explicit_beside_auto(mesh: Any) -> Split:
    """The Explicit axes of a mesh that has Auto axes, too, among them axes of one device.

    JAX cannot compile a function that XLA partitions on such a mesh. So `partitioned` maps over all
    axes, and splits the tokens over the Explicit ones alone.
    """
    if not (auto := axes_of_kind(mesh, AxisType.Auto)):
        return ()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    if explicit and reason_not_here() is None:
        _warn_of_mixed_axes(explicit, auto)
    return explicit


@functools.cache
def _warn_of_mixed_axes(explicit: Split, auto: Split) -> None:
    _logger.warning(
        "the mesh has the Explicit axes %s and the Auto axes %s: operations with kernels are not "
        "split over the Auto axes there, and all their devices compute the same; make all axes "
        "Explicit, or all Auto",
        explicit,
        auto,
    )


def axes_of_kind(mesh: Any, kind: AxisType) -> Split:
    """The axes of that kind that have several devices."""
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return tuple(name for name, size, k in axes if k == kind and size > 1)


# What a device has of each array.


@dataclasses.dataclass(frozen=True)
class _Layout:
    """How arrays are split.

    Attributes:
      args: Splits of the arguments.
      gathered: Splits of the weights' axes that each device gathers; empty splits for tokens.
      results: Splits of the results.
      place: Place that the local function is told.
    """

    args: tuple[Splits, ...]
    gathered: tuple[Splits, ...]
    results: tuple[Splits, ...]
    place: Place

    @classmethod
    def make(cls, roles: Roles, whole: Place, splits: Sequence[Splits]) -> "_Layout":
        """The layout to compute in, for arguments that are split so."""
        leading = _leading(roles, splits)
        tokens = tuple(name for split in leading for name in split)
        parts = tuple(_part(name, roles, splits, tokens) for name in roles.parts)
        kept = dict(zip(roles.parts, parts, strict=True))

        def of_tokens(role: Any) -> Splits:
            features = tuple(kept.get(name, ()) for name in role.features)
            return (*features, tokens) if isinstance(role, TokensLast) else (*leading, *features)

        args, gathered = [], []
        for role, split in zip(roles.args, splits, strict=True):
            if isinstance(role, Tokens | TokensLast):
                args.append(of_tokens(role))
                gathered.append(((),) * len(split))
                continue
            stay = [kept.get(name, ()) for name in role.axes]
            # A mesh axis that stays at one axis of the weight can split no other one of it.
            of_one = {name for names in stay for name in names}
            pairs = [
                _kept_and_gathered(own, tuple(n for n in names if n in own or n not in of_one))
                for own, names in zip(stay, split, strict=True)
            ]
            args.append(tuple(keep + rest for keep, rest in pairs))
            gathered.append(tuple(rest for _, rest in pairs))
        results = []
        for role in roles.results:
            match role:
                case GradientOf(index):
                    results.append(args[index])
                case Replicated(num_axes):
                    results.append(((),) * num_axes)
                case _:
                    results.append(of_tokens(role))
        all_parts = tuple(map(operator.add, whole.parts, parts))
        return cls(tuple(args), tuple(gathered), tuple(results), Place(tokens, all_parts, leading))

    def of_device(self, local: Local, key: Hashable, roles: Roles) -> Callable[..., Any]:
        """The function of a device's arrays, which gathers weights and adds up their gradients."""

        def run(*args: jax.Array) -> tuple[jax.Array, ...]:
            parts = zip(args, roles.args, self.gathered, strict=True)
            results = local(key, self.place)(*(_whole(a, role, s) for a, role, s in parts))
            return tuple(
                _reduce(a, self.gathered[role.index], self.place.tokens)
                if isinstance(role, GradientOf)
                else a
                for a, role in zip(results, roles.results, strict=True)
            )

        return run


def _leading(roles: Roles, splits: Sequence[Splits]) -> Splits:
    """How tokens are split: as in the first array that is split, or not at all."""
    of_tokens = [
        split[: len(split) - len(role.features)]
        for role, split in zip(roles.args, splits, strict=True)
        if isinstance(role, Tokens)
    ]
    return next((s for s in of_tokens if any(s)), of_tokens[0])


def _part(name: str, roles: Roles, splits: Sequence[Splits], tokens: Split) -> Split:
    """The mesh axes over which a named axis stays split: those of a weight that split no tokens."""
    for role, split in zip(roles.args, splits, strict=True):
        if isinstance(role, Weight) and name in role.axes:
            found = tuple(n for n in split[role.axes.index(name)] if n not in tokens)
            if found:
                return found
    return ()


def _kept_and_gathered(kept: Split, split: Split) -> tuple[Split, Split]:
    """An axis of a weight: what stays split, and what is gathered.

    An axis is gathered here only where the axes that stay split are the major ones: then a device's
    part is contiguous. Otherwise XLA brings the weight into the split that is kept.
    """
    if split[: len(kept)] == kept:
        return kept, split[len(kept) :]
    return kept, ()


def _whole(a: jax.Array, role: Tokens | TokensLast | Weight, splits: Splits) -> jax.Array:
    """The argument, gathered over the axes of the splits."""
    if isinstance(role, Weight) and role.dtype is not None and any(splits):
        a = a.astype(role.dtype)
    by_rows = isinstance(role, Weight) and role.by_rows
    for axis, names in enumerate(splits):
        if names and by_rows:
            a = jnp.moveaxis(jax.lax.all_gather(a, names, axis=0), 0, axis)
            a = jax.lax.collapse(a, axis, axis + 2)
        elif names:
            a = jax.lax.all_gather(a, names, axis=axis, tiled=True)
    return a


def _reduce(a: jax.Array, splits: Splits, tokens: Split) -> jax.Array:
    """The sum over the mesh axes `tokens`, split as the weight was before it was gathered."""
    left = tokens
    for axis, names in enumerate(splits):
        if names and set(names) <= set(left):
            a = jax.lax.psum_scatter(a, names, scatter_dimension=axis, tiled=True)
            left = tuple(name for name in left if name not in names)
        elif names:
            # Devices along an axis that splits no tokens have the same sum.
            both = tuple(name for name in names if name in left)
            a = jax.lax.psum(a, both) if both else a
            left = tuple(name for name in left if name not in both)
            a = _own_part(a, names, axis)
    return jax.lax.psum(a, left) if left else a


def _own_part(a: jax.Array, names: Split, axis: int) -> jax.Array:
    """This device's part of an axis that mesh axes split."""
    size = a.shape[axis] // jax.lax.axis_size(names)
    return jax.lax.dynamic_slice_in_dim(a, jax.lax.axis_index(names) * size, size, axis)


def of_all_tokens(a: jax.Array, place: Place) -> jax.Array:
    """The numbers of all tokens, from those of this device's tokens."""
    for axis, names in enumerate(place.leading):
        if names:
            a = jax.lax.all_gather(a, names, axis=axis, tiled=True)
    return a


def of_own_tokens(a: jax.Array, place: Place) -> jax.Array:
    """The numbers of this device's tokens, from those of all tokens."""
    for axis, names in enumerate(place.leading):
        if names:
            a = _own_part(a, names, axis)
    return a


def split_alike(x: jax.Array, *numbers: jax.Array) -> list[jax.Array]:
    """Numbers for each token, split over Explicit axes as the tokens of `x` are.

    If `x` is whole, all are split as the first one that is split. JAX refuses to combine arrays
    that Explicit axes split in other ways. The last axis of `x` is no axis of tokens.
    """
    mesh = mesh_of((x, *numbers))
    if not axes_of_kind(mesh, AxisType.Explicit):
        return list(numbers)
    specs = [to_splits(jax.typeof(a).sharding.spec, a.ndim) for a in (x, *numbers)]
    specs[0] = specs[0][:-1]
    wanted = next(filter(any, specs), specs[0])
    sharding = NamedSharding(mesh, to_spec(wanted))
    return [
        a if own == wanted else jax.sharding.reshard(a, sharding)
        for a, own in zip(numbers, specs[1:], strict=True)
    ]


def to_splits(spec: PartitionSpec, ndim: int) -> Splits:
    """The mesh axes that split each axis of an array."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return tuple(() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries)


def to_spec(splits: Splits) -> PartitionSpec:
    """The inverse of `to_splits`."""
    return PartitionSpec(*(split or None for split in splits))


# Auto axes.


@functools.lru_cache(maxsize=4096)
def _over_auto_axes(
    local: Local, key: Hashable, roles: Roles, whole: Place, ranks: tuple[int, ...]
) -> Callable[..., Any]:
    def of_whole_arrays(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(local(key, whole)(*args))

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        mesh, specs = _mesh_and_specs([a.sharding for a in args])
        splits = [_even(spec, a.shape, mesh) for spec, a in zip(specs, args, strict=True)]
        layout = _Layout.make(roles, whole, splits)
        shardings = lambda many: tuple(NamedSharding(mesh, to_spec(s)) for s in many)
        of_device = layout.of_device(local, key, roles)
        # A plan depends on the shapes, so a device's gradient may be in 16 bits where that of the
        # whole arrays has float32 sums, and the other way round.
        dtypes = [a.dtype for a in results]

        def run(*args: jax.Array) -> tuple[jax.Array, ...]:
            return tuple(a.astype(d) for a, d in zip(of_device(*args), dtypes, strict=True))

        return mesh, run, shardings(layout.results), shardings(layout.args)

    rule, factors_that_are_whole = _rule(roles, ranks)
    run = custom_partitioning(of_whole_arrays)
    run.def_partition(
        partition=partition, sharding_rule=rule, need_replication_factors=factors_that_are_whole
    )
    return run


def _even(spec: PartitionSpec, shape: Sequence[int], mesh: Mesh) -> Splits:
    """The splits of the spec, without those whose devices do not divide the axis.

    Without even parts XLA pads the last part with arbitrary numbers. A local function would take
    the padding for tokens or for columns.
    """
    splits = []
    for split, size in zip(to_splits(spec, len(shape)), shape, strict=True):
        num_devices = math.prod(mesh.shape[name] for name in split)
        if size % num_devices:
            _logger.warning(
                "every device gathers an axis of %d and computes all of it, because the mesh axes "
                "%s split it over %d devices, which do not divide %d; pad the axis, or split "
                "another one",
                size,
                split,
                num_devices,
                size,
            )
            split = ()
        splits.append(split)
    return tuple(splits)


def _mesh_and_specs(shardings: Sequence[Any]) -> tuple[Mesh, list[PartitionSpec]]:
    """The mesh and the specs of shardings that XLA chose.

    A program of several devices may have no mesh: neither in the types of its arguments nor in the
    context in which JAX traced it. Then every device computes all.
    """
    if all(isinstance(s, NamedSharding) for s in shardings):
        return shardings[0].mesh, [s.spec for s in shardings]
    if not all(s.is_fully_replicated for s in shardings):
        _logger.warning(
            "every device computes all tokens, because the program has no mesh; give its arguments "
            "a NamedSharding, or call it under jax.set_mesh"
        )
    devices = sorted(shardings[0].device_set, key=lambda device: device.id)
    return Mesh(devices, ("devices",)), [PartitionSpec() for _ in shardings]


def _rule(roles: Roles, ranks: Sequence[int]) -> tuple[str, tuple[str, ...]]:
    """Shardy's rule, and the factors in it that are whole on every device."""
    num_leading = next(
        rank - len(role.features)
        for role, rank in zip(roles.args, ranks, strict=True)
        if isinstance(role, Tokens)
    )
    leading = [f"t{i}" for i in range(num_leading)]
    whole: list[str] = []

    def of_tokens(role: Any) -> list[str]:
        whole.extend(name for name in role.features if name not in roles.parts)
        if isinstance(role, TokensLast):
            merged = f"({' '.join(leading)})" if num_leading > 1 else leading[0]
            return [*role.features, merged]
        return [*leading, *role.features]

    def of_weight(index: int, role: Any) -> list[str]:
        # An axis that is gathered here is a factor of its own, which XLA need not make whole.
        return [name if name in roles.parts else f"{name}_of{index}" for name in role.axes]

    args = [
        of_weight(i, role) if isinstance(role, Weight) else of_tokens(role)
        for i, role in enumerate(roles.args)
    ]
    results = []
    for i, role in enumerate(roles.results):
        match role:
            case GradientOf(index):
                results.append(args[index])
            case Replicated(num_axes):
                own = [f"r{i}x{axis}" for axis in range(num_axes)]
                whole.extend(own)
                results.append(own)
            case _:
                results.append(of_tokens(role))
    text = lambda many: ", ".join(" ".join(factors) for factors in many)
    return f"{text(args)} -> {text(results)}", tuple(dict.fromkeys(whole))


# Explicit axes.


def _over_explicit_axes(
    local: Local,
    key: Hashable,
    roles: Roles,
    whole: Place,
    mesh: Any,
    axes: Split,
    args: Sequence[jax.Array],
    *,
    leaves_auto: bool = False,
) -> tuple[jax.Array, ...]:
    named = lambda split: tuple(name for name in split if name in axes)
    specs = [jax.typeof(a).sharding.spec for a in args]
    splits = [
        tuple(map(named, to_splits(spec, a.ndim))) for spec, a in zip(specs, args, strict=True)
    ]
    layout = _Layout.make(roles, whole, splits)
    run = jax.shard_map(
        layout.of_device(local, key, roles),
        mesh=mesh,
        in_specs=tuple(map(to_spec, layout.args)),
        out_specs=tuple(map(to_spec, layout.results)),
        # Without names it maps over all axes except for one over which `jax.vmap` splits its
        # members. JAX refuses to name that one. With names it leaves Auto axes to XLA.
        axis_names=set(axes) if leaves_auto else frozenset(),
        check_vma=False,
    )
    shardings = [NamedSharding(mesh, to_spec(s)) for s in layout.args]
    results = run(*map(jax.sharding.reshard, args, shardings))
    # With check_vma=False the results do not say over which Manual axes around this shard_map they
    # vary. They vary as the arguments do, but not over axes over which the caller has split a part:
    # there the local functions have exchanged what is missing.
    exchanged = {name for split in whole.parts for name in split}
    varying = frozenset().union(*map(varying_axes, args)) - exchanged
    return tuple(vary(a, varying) for a in results)
