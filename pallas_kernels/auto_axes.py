"""Functions of tokens that XLA partitions over Auto axes, by `custom_partitioning`.

First XLA decides how the arrays are split. A rule for Shardy, its partitioner, says which axes of
the arrays belong together. Then XLA calls `partition`, which returns the function of a device's
arrays.

Under `jax.vmap` such a function computes one member (one element of the mapped axis) after the
other, in a loop. XLA may split the members over mesh axes. Then each device has a loop over its own
members. A mesh axis that splits members splits neither tokens nor weights of the same call.
`layout.py` explains the words *local function*, *roles*, *place* and *splits*.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding

from pallas_kernels.layout import (
    GradientOf,
    Layout,
    Local,
    Place,
    Replicated,
    Roles,
    Splits,
    Tokens,
    TokensLast,
    Weight,
    to_spec,
    warn_of_idle_axes,
)
from pallas_kernels.logs import log_once
from pallas_kernels.mapping import Levels, loop, num_levels
from pallas_kernels.shardings import mesh_and_splits


@functools.lru_cache(maxsize=4096)
def over_auto_axes(
    local: Local,
    key: Hashable,
    roles: Roles,
    whole: Place,
    ranks: tuple[int, ...],
    levels: Levels = (),
) -> Callable[..., Any]:
    """The local function `local(key, whole)`, applied to whole arrays, which XLA partitions.

    Args:
      local: Maker of the local function.
      key: Static options of `local`.
      roles: Roles of the arguments and of the results.
      whole: Place of whole arrays.
      ranks: Number of axes of each argument, without those of members.
      levels: Arguments that have members.
    """

    def of_whole_arrays(*args: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(loop(local(key, whole), levels)(*args))

    def partition(mesh: Any, args: Any, results: Any) -> Any:
        has_mesh = not mesh.empty
        mesh, splits = mesh_and_splits(mesh, [a.sharding for a in args], [a.ndim for a in args])
        splits = [_even(split, a.shape, mesh) for split, a in zip(splits, args, strict=True)]
        members, splits = _members_apart(levels, splits)
        shapes = [a.shape[a.ndim - len(s) :] for a, s in zip(args, splits, strict=True)]
        layout = Layout.make(roles, whole, splits, shapes, mesh.shape)
        layout.warn_of_repeated_work()
        if has_mesh and roles.parts and not any(isinstance(role, Weight) for role in roles.args):
            # Nothing else can use a mesh axis. With weights, `Layout` knows what is gathered.
            used = {*layout.place.tokens, *itertools.chain(*members, *layout.place.parts)}
            if idle := tuple(n for n in mesh.axis_names if mesh.shape[n] > 1 and n not in used):
                warn_of_idle_axes(idle, roles.parts)
        of_args = _behind_members(members, levels, layout.args)
        of_results = [(*members, *rest) for rest in layout.results]
        shardings = lambda many: tuple(NamedSharding(mesh, to_spec(s)) for s in many)
        # A plan depends on the shapes, so a device's gradient may be in 16 bits where that of the
        # whole arrays has float32 sums, and the other way round.
        dtypes = [a.dtype for a in results]
        run = layout.of_device(local, key, roles, levels, dtypes)
        return mesh, run, shardings(of_results), shardings(of_args)

    rule, factors_that_are_whole, sizes = _rule(roles, ranks, levels)
    split = custom_partitioning(of_whole_arrays)
    split.def_partition(
        partition=partition,
        sharding_rule=rule,
        need_replication_factors=factors_that_are_whole,
        decode_shardings=False,  # JAX raises where a part of a mesh axis splits an array
        **sizes,
    )
    # JAX cannot batch a function that XLA partitions.
    run = jax.custom_batching.custom_vmap(split)

    @run.def_vmap
    def of_members(size: int, is_batched: Sequence[bool], *args: jax.Array) -> Any:
        more = (tuple(is_batched), *levels)
        results = over_auto_axes(local, key, roles, whole, ranks, more)(*args)
        return results, (True,) * len(results)

    return run


def _members_apart(levels: Levels, splits: Sequence[Splits]) -> tuple[Splits, list[Splits]]:
    """The mesh axes that split the members of each level, and the splits of the other axes.

    Members are split as in the first argument whose members are split.
    """
    found: list[tuple[str, ...]] = []
    used: set[str] = set()
    for depth, level in enumerate(levels):
        axes = num_levels(levels[:depth], len(splits))
        own = [s[axis] for s, axis, b in zip(splits, axes, level, strict=True) if b]
        candidates = [tuple(name for name in names if name not in used) for names in own]
        found.append(next(filter(None, candidates), ()))
        used.update(found[-1])
    without = lambda names: tuple(name for name in names if name not in used)
    nums = num_levels(levels, len(splits))
    rest = [tuple(map(without, s[num:])) for s, num in zip(splits, nums, strict=True)]
    return tuple(found), rest


def _behind_members(
    members: Sequence[Any], levels: Levels, of_args: Sequence[Sequence[Any]]
) -> list[tuple[Any, ...]]:
    """For each argument, what `members` has for the levels of the argument, then its other axes."""
    return [
        (*itertools.compress(members, [level[i] for level in levels]), *rest)
        for i, rest in enumerate(of_args)
    ]


def _even(splits: Splits, shape: Sequence[int], mesh: Mesh) -> Splits:
    """The splits of an array, but with each axis whole whose size the devices do not divide.

    XLA pads the last part of an uneven split with arbitrary numbers. A local function would take
    the padding for tokens or for columns.
    """
    even = []
    for split, size in zip(splits, shape, strict=True):
        num_devices = math.prod(mesh.shape[name] for name in split)
        if size % num_devices:
            log_once(
                f"every device gathers an axis of {size} and computes all of it, because the mesh "
                f"axes {split} split it over {num_devices} devices, which do not divide {size}; "
                "pad the axis, or split another one"
            )
            split = ()
        even.append(split)
    return tuple(even)


def _rule(
    roles: Roles, ranks: Sequence[int], levels: Levels
) -> tuple[str, tuple[str, ...], dict[str, int]]:
    """Shardy's rule, the factors (names of axes) in it that are whole on every device, and sizes.

    The sizes are those of factors that are no axis of an array. An axis with blocks has two
    factors, its blocks and what is in a block.
    """
    num_leading = next(
        rank - len(role.features)
        for role, rank in zip(roles.args, ranks, strict=True)
        if isinstance(role, Tokens)
    )
    leading = [f"t{i}" for i in range(num_leading)]
    may_be_split = {*roles.parts, *roles.blocks}
    whole: list[str] = []

    def of_tokens(role: Any) -> list[str]:
        whole.extend(name for name in role.features if name not in may_be_split)
        is_last = isinstance(role, TokensLast)
        return [*role.features, *leading] if is_last else [*leading, *role.features]

    def of_weight(index: int, role: Any) -> list[str]:
        # An axis that is gathered here is a factor of its own, which XLA need not make whole.
        linked = () if roles.apart else roles.parts
        return [name if name in linked else f"{name}_of{index}" for name in role.axes]

    args = [
        of_weight(i, role) if isinstance(role, Weight) else of_tokens(role)
        for i, role in enumerate(roles.args)
    ]
    results = []
    for i, role in enumerate(roles.results):
        match role:
            case GradientOf(index):
                results.append(args[index])
            case Replicated(axes):
                own = [name if name in roles.parts else f"r{i}x{j}" for j, name in enumerate(axes)]
                whole.extend(name for name in own if name not in roles.parts)
                results.append(own)
            case _:
                results.append(of_tokens(role))
    members = [f"m{i}" for i in range(len(levels))]
    of_args = _behind_members(members, levels, args)
    of_results = [(*members, *factors) for factors in results]
    pairs = list(zip(roles.parts, roles.blocks, strict=True)) if roles.blocks else []
    in_rule = {part: f"({blocks} in_{blocks})" for part, blocks in pairs}

    def text(many: Sequence[Sequence[str]]) -> str:
        return ", ".join(" ".join(in_rule.get(name, name) for name in names) for names in many)

    sizes = {f"in_{blocks}": roles.unit for blocks in roles.blocks}
    return f"{text(of_args)} -> {text(of_results)}", tuple(dict.fromkeys(whole)), sizes
