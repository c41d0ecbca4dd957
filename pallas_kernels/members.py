"""Computes the members of a `jax.vmap`, also where one call of an operation cannot.

A *member* is one element of the axis that `jax.vmap` maps over. For most operations one call
computes all members that share their weights (`fold_members`). One call is not enough if each
member has a weight or a gradient of its own. On Auto axes, and without a mesh, XLA then splits the
members over devices (`auto_axes.py`). Elsewhere a loop computes one member after the other
(`loop_over_members`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.choices import called
from pallas_kernels.gpu.device import reason_not_here
from pallas_kernels.gpu.kernel import in_groups
from pallas_kernels.layout import Split, to_spec
from pallas_kernels.logs import log_once
from pallas_kernels.mapping import Levels, Mask, by_vmap_unless_shared, loop, num_levels
from pallas_kernels.partition import (
    axes_of_kind,
    explicit_splits,
    in_types_that_do_not_vary,
    mesh_of,
)


def loop_over_members(
    operation: str, fn: Callable[..., Any], args: Sequence[jax.Array], is_batched: Sequence[bool]
) -> list[jax.Array]:
    """The results of `fn` for one member after the other. The members are their axis 0.

    Explicit axes of a mesh may split the members. Then each device computes its own.

    XLA cannot partition a kernel inside of a `jax.shard_map` that leaves Auto axes to XLA. There
    every device computes all members. No type says whether such an axis splits the members, so a
    warning is logged for every loop there.

    Args:
      operation: Name of the operation.
      fn: Function of one member's arrays.
      args: Arrays, with the members as axis 0 of those that have them.
      is_batched: Arguments that have members.

    Raises:
      NotImplementedError: Explicit axes split the members, and the mesh has Auto axes, too.
    """
    run = loop(fn, (tuple(is_batched),))
    for a, b in zip(args, is_batched, strict=True):
        if b and (members := explicit_splits(a)[0]):
            return _split(run, members, jax.typeof(a).sharding.mesh, args, is_batched)
    mesh = mesh_of(args)
    auto = axes_of_kind(mesh, AxisType.Auto)
    if auto and axes_of_kind(mesh, AxisType.Manual) and reason_not_here() is None:
        log_once(
            f"{called(operation)}: a loop computes one member of jax.vmap after the other, because "
            f"each has a weight or a gradient of its own; if the Auto axes {auto}, which "
            "jax.shard_map leaves to XLA, split the members, every device gathers and computes all "
            "of them; name these axes in axis_names of jax.shard_map, too"
        )
    return run(*args)


def saved_of_members(
    saved: Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]],
    levels: Levels,
    args: Sequence[jax.Array],
    results: Sequence[jax.Array],
    residuals: Sequence[jax.Array],
) -> tuple[list[jax.Array], list[jax.Array], Levels]:
    """`saved` for all members: results, arrays that the backward reads, and their levels.

    Args:
      saved: `Operation.saved`, without its first argument.
      levels: Arguments that have members.
      args: Arguments of the operation.
      results: Results of its forward, each with all members.
      residuals: Residuals of its forward, each with all members.
    """
    sizes = len(args), len(results), len(residuals)

    def of_one(*arrays: jax.Array) -> list[jax.Array]:
        of_results, read = saved(*in_groups(arrays, *sizes))
        return [*of_results, *read]

    others = (True,) * (len(results) + len(residuals))
    of_arrays = tuple((*level, *others) for level in levels)
    found, of_found = by_vmap_unless_shared(of_one, of_arrays, (*args, *results, *residuals))
    num = len(results)
    return found[:num], found[num:], tuple(level[num:] for level in of_found)


def fold_members(
    fold: Callable[..., Any], levels: Levels, args: Sequence[jax.Array], is_batched: Mask
) -> tuple[Any, list[jax.Array], Levels] | None:
    """`fold(args, is_batched)` for each member: operation, arguments and their levels, or None.

    All results of the operation have the new batch behind the axes of members.

    Args:
      fold: `Operation.fold`, without its first argument.
      levels: Arguments that have members, apart from the new batch.
      args: Arguments, with the new batch as axis 0 of those that have it.
      is_batched: Arguments that have it.
    """
    operations: list[Any] = []

    def of_one(*args: jax.Array) -> list[jax.Array]:
        found = fold(args, is_batched)
        if found is None:
            return []
        operations.append(found[0])
        return list(found[1])

    behind = [
        jnp.moveaxis(a, 0, num) if is_here else a
        for a, is_here, num in zip(args, is_batched, num_levels(levels, len(args)), strict=True)
    ]
    arrays, of_arrays = by_vmap_unless_shared(of_one, levels, behind)
    return (operations[0], arrays, of_arrays) if operations else None


def _split(
    run: Callable[..., list[jax.Array]],
    members: Split,
    mesh: Any,
    args: Sequence[jax.Array],
    is_batched: Sequence[bool],
) -> list[jax.Array]:
    """`run(*args)`, with the members split over these Explicit axes."""
    if auto := axes_of_kind(mesh, AxisType.Auto):
        raise NotImplementedError(
            f"the Explicit axes {members} split the members of jax.vmap, and the Auto axes {auto} "
            "are left to XLA, which cannot partition a kernel there; make them Explicit, or put "
            "jax.vmap into a jax.shard_map over all axes"
        )
    specs, shardings = [], []
    for a, is_member in zip(args, is_batched, strict=True):
        rest = [tuple(n for n in names if n not in members) for names in explicit_splits(a)]
        # Inside, only the axes of the members are Manual.
        specs.append(PartitionSpec(members) if is_member else PartitionSpec())
        of_all = to_spec((members, *rest[1:]) if is_member else tuple(rest))
        shardings.append(NamedSharding(mesh, of_all))
    looped = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=tuple(specs),
        out_specs=PartitionSpec(members),
        axis_names=set(members),
        check_vma=False,
    )
    on_mesh = lambda *args: looped(*map(jax.sharding.reshard, args, shardings))
    return in_types_that_do_not_vary(on_mesh, args)
