"""A loop over the members of `jax.vmap`, on any mesh."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pallas_kernels.choices import called, log_once
from pallas_kernels.gpu.device import reason_not_here
from pallas_kernels.gpu.kernel import vary, varying_axes
from pallas_kernels.layout import Split, to_spec, to_splits
from pallas_kernels.partition import axes_of_kind, mesh_of


def loop_over_members(
    operation: str, fn: Callable[..., Any], args: Sequence[jax.Array], is_batched: Sequence[bool]
) -> list[jax.Array]:
    """The results of `fn` for one member after the other. The members are their axis 0.

    Explicit axes of a mesh may split the members. Then each device computes its own. If Auto axes
    split them, every device computes all members. No type says whether they do, so a warning is
    logged on every mesh of Auto axes.

    Args:
      operation: Name of the operation.
      fn: Function of one member's arrays.
      args: Arrays, with the members as axis 0 of those that have them.
      is_batched: Arguments that have members.

    Raises:
      NotImplementedError: Explicit axes split the members, and the mesh has Auto axes, too.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        def one(parts: list[jax.Array]) -> Any:
            part = iter(parts)
            return fn(*(next(part) if b else a for a, b in zip(args, is_batched, strict=True)))

        return list(jax.lax.map(one, [a for a, b in zip(args, is_batched, strict=True) if b]))

    for a, b in zip(args, is_batched, strict=True):
        if b and (members := to_splits(jax.typeof(a).sharding.spec, a.ndim)[0]):
            return _split(run, members, jax.typeof(a).sharding.mesh, args, is_batched)
    auto = axes_of_kind(mesh_of(args), AxisType.Auto)
    if auto and reason_not_here() is None:
        log_once(
            f"{called(operation)}: a loop computes one member of jax.vmap after the other, because "
            f"each has a weight or a gradient of its own; if the Auto axes {auto} split the "
            "members, every device gathers and computes all of them; make the axes Explicit, or "
            "put jax.vmap into a jax.shard_map over all axes"
        )
    return run(*args)


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
        splits = to_splits(jax.typeof(a).sharding.spec, a.ndim)
        rest = [tuple(name for name in names if name not in members) for names in splits]
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
    results = looped(*map(jax.sharding.reshard, args, shardings))
    # With check_vma=False the results do not say over which Manual axes around this shard_map they
    # vary.
    varying = frozenset().union(*map(varying_axes, args))
    return [vary(a, varying) for a in results]
