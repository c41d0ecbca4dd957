"""How the arrays of a function of tokens are split over a mesh, and what a device computes.

`partition.py` and `auto_axes.py` use these words:

- The *local function* computes the results of a device's tokens from the device's arrays.
- A *role* says what an array is for the local function: it has tokens (`Tokens`, `TokensLast`), it
  is a weight that every token reads (`Weight`), it is the gradient of a weight (`GradientOf`), or
  it is the same on all devices (`Replicated`).
- The *splits* of an array name, for each of its axes, the mesh axes that split it.
- The *parts* are named axes that may stay split while a device computes: the columns of an MLP, the
  vocabulary, or the heads of attention.
- The *place* tells the local function which mesh axes split the tokens and the parts. With it the
  function exchanges between devices what is missing.

`Layout.make` takes the roles and the splits that the arguments have, and chooses the splits to
compute in. `Layout.of_device` wraps the local function: it gathers weights before, and adds up
their gradients after.
"""

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pallas_kernels.logs import log_once
from pallas_kernels.mapping import Levels, loop

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
    """An array whose last axes are tokens.

    The axes of tokens stay separate. If they were one axis, the order of its entries would depend
    on how the tokens are split, and a call that splits them otherwise would read other tokens.

    Attributes:
      features: Names of the axes before.
    """

    features: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Replicated:
    """A result that is the same on all devices of the tokens, such as a scale.

    Attributes:
      axes: Names of its axes.
    """

    axes: tuple[str, ...] = ()


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
      parts: Names of the axes that may stay split while a device computes.
      unit: Number of which a device's part of each axis in `parts` must be a multiple. An axis with
        other parts is gathered.
      blocks: Name of an axis for each of `parts`, or (). The axis has one entry for `unit` entries
        of the part, and is split alike. `unit` divides the part.
      apart: Whether the splits of weights have no influence on how XLA splits tokens. Otherwise XLA
        splits a part alike in weights and in arrays of tokens.
    """

    args: tuple[Tokens | TokensLast | Weight, ...]
    results: tuple[Tokens | TokensLast | Replicated | GradientOf, ...]
    parts: tuple[str, ...] = ()
    unit: int = 1
    blocks: tuple[str, ...] = ()
    apart: bool = False


@dataclasses.dataclass(frozen=True)
class Place:
    """The mesh axes that split the arrays of a local function; empty where nothing is split.

    Attributes:
      parts: Mesh axes that split each of `Roles.parts`, in that order.
      leading: Mesh axes that split each leading axis of the tokens; empty if none is split.
    """

    parts: Splits = ()
    leading: Splits = ()

    @property
    def tokens(self) -> Split:
        """The mesh axes that split the tokens."""
        return tuple(itertools.chain(*self.leading))


# `local(key, place)` makes the local function. `local` is defined at the top level of a module, so
# that equal calls share an entry of the cache of `over_auto_axes`.
type Local = Callable[[Any, Place], Callable[..., Sequence[jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The splits to compute in.

    Attributes:
      args: Splits of the arguments.
      gathered: For each argument, the mesh axes over which a device gathers each of its axes; empty
        for tokens.
      results: Splits of the results.
      place: Place for the local function.
    """

    args: tuple[Splits, ...]
    gathered: tuple[Splits, ...]
    results: tuple[Splits, ...]
    place: Place

    @classmethod
    def make(
        cls,
        roles: Roles,
        whole: Place,
        splits: Sequence[Splits],
        shapes: Sequence[Sequence[int]],
        sizes: Mapping[str, int],
    ) -> "Layout":
        """The layout to compute in, for arguments with these splits.

        Example: the mesh axis `data` splits the batch of `x [B, S, D]`. A weight `[D, F]` is split
        over `data` and `tensor`, and F is a part. The results are `[B, S, F]` and the gradient of
        the weight::

            roles = Roles(
                args=(Tokens(("D",)), Weight(("D", "F"))),
                results=(Tokens(("F",)), GradientOf(1)),
                parts=("F",),
            )
            of_x, of_weight = (("data",), (), ()), (("data",), ("tensor",))
            shapes, sizes = ((4, 16, 8), (8, 32)), {"data": 2, "tensor": 2}
            layout = Layout.make(roles, Place(parts=((),)), (of_x, of_weight), shapes, sizes)

        A device gathers the weight's axis D over `data`, which splits tokens, and keeps its own
        columns of F. Its result has these columns, and its gradient is split as the weight is::

            layout.args == (of_x, of_weight)
            layout.gathered == (((), (), ()), (("data",), ()))
            layout.results == ((("data",), (), ("tensor",)), of_weight)
            layout.place == Place(parts=(("tensor",),), leading=(("data",), ()))
            layout.place.tokens == ("data",)

        Args:
          roles: Roles of the arguments and of the results.
          whole: Place of whole arrays, with the Manual axes over which the caller has split parts.
          splits: Splits that the arguments have.
          shapes: Shapes of the arguments.
          sizes: Number of devices of each mesh axis.
        """
        leading = _leading(roles, splits)
        tokens = tuple(itertools.chain(*leading))
        kept: dict[str, Split] = {}
        for name in roles.parts:
            # A mesh axis splits one axis of an array.
            others = [kept[other] for other in kept if _share_an_array(roles, name, other)]
            used = {*tokens, *itertools.chain(*others)}
            kept[name] = _part(name, roles, splits, used, shapes, sizes)
        parts = tuple(kept.values())
        if roles.blocks:
            kept |= zip(roles.blocks, parts, strict=True)

        def of_tokens(role: Any) -> Splits:
            features = tuple(kept.get(name, ()) for name in role.features)
            return features + leading if isinstance(role, TokensLast) else leading + features

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
                case Replicated(axes):
                    results.append(tuple(kept.get(name, ()) for name in axes))
                case _:
                    results.append(of_tokens(role))
        all_parts = tuple(map(operator.add, whole.parts, parts))
        return cls(tuple(args), tuple(gathered), tuple(results), Place(all_parts, leading))

    def warn_of_repeated_work(self) -> None:
        """Logs the mesh axes that split a gathered matrix and no tokens, if others split tokens.

        Tokens that no axis splits are left alone: they may be a single row, such as a sample. So
        are vectors, because a norm beside tensor parallelism computes the same on several devices.
        """
        matrices = (splits for splits in self.gathered if len(splits) > 1)
        axes = {name for splits in matrices for split in splits for name in split}
        axes -= {*self.place.tokens, *(name for split in self.place.parts for name in split)}
        if axes and self.place.tokens:
            log_once(
                f"the mesh axes {tuple(sorted(axes))} split a weight and no tokens: each device "
                "gathers the weight, and the devices along these axes compute the same; split the "
                f"tokens over them as well as over {self.place.tokens}"
            )

    def of_device(
        self,
        local: Local,
        key: Hashable,
        roles: Roles,
        levels: Levels = (),
        dtypes: Sequence[Any] = (),
    ) -> Callable[..., Any]:
        """The function of a device's arrays: gathers weights, computes, and adds up gradients.

        If arguments have members of a `jax.vmap`, a loop computes one member after the other.
        Weights that all members share are gathered before the loop.

        Args:
          local: Maker of the local function.
          key: Static options of `local`.
          roles: Roles of the arguments and of the results.
          levels: Arguments that have members, of which a device has its own.
          dtypes: Dtypes of the results; () keeps those of `local`.
        """
        of_args = list(zip(roles.args, self.gathered, strict=True))
        is_shared = [not any(level[i] for level in levels) for i in range(len(of_args))]

        def gathered(args: Sequence[jax.Array], where: Sequence[bool]) -> list[jax.Array]:
            many = zip(args, of_args, where, strict=True)
            return [_whole(a, *how) if is_here else a for a, how, is_here in many]

        def of_one(*args: jax.Array) -> list[jax.Array]:
            results = local(key, self.place)(*gathered(args, [not shared for shared in is_shared]))
            results = [
                _reduce(a, self.gathered[role.index], self.place.tokens)
                if isinstance(role, GradientOf)
                else a
                for a, role in zip(results, roles.results, strict=True)
            ]
            if not dtypes:
                return results
            return [a.astype(dtype) for a, dtype in zip(results, dtypes, strict=True)]

        return lambda *args: tuple(loop(of_one, levels)(*gathered(args, is_shared)))


def warn_of_idle_axes(idle: Split, parts: tuple[str, ...]) -> None:
    """Logs once the mesh axes that split neither the rows nor the parts of a call without weights.

    Args:
      idle: The mesh axes.
      parts: Names of the parts.
    """
    names = ", ".join(parts)
    log_once(
        f"the devices along the mesh axes {idle} gather the arrays of a call and compute the same, "
        f"because these axes split neither its rows nor its {names}; split the rows over them, or "
        f"take a number of devices that divides the number of {names}"
    )


def _leading(roles: Roles, splits: Sequence[Splits]) -> Splits:
    """How tokens are split: as in the first array that is split, or not at all."""
    of_tokens = [
        split[: len(split) - len(role.features)]
        for role, split in zip(roles.args, splits, strict=True)
        if isinstance(role, Tokens)
    ]
    return next((s for s in of_tokens if any(s)), of_tokens[0])


def _share_an_array(roles: Roles, *names: str) -> bool:
    """Whether an argument has all of these axes."""
    named = (role.axes if isinstance(role, Weight) else role.features for role in roles.args)
    return any(set(names) <= set(axes) for axes in named)


def _part(
    name: str,
    roles: Roles,
    splits: Sequence[Splits],
    used: set[str],
    shapes: Sequence[Sequence[int]],
    sizes: Mapping[str, int],
) -> Split:
    """The mesh axes over which a named axis stays split: those of an array that are not used.

    The array is a weight, or has tokens if no weight has the axis.
    """
    of_weights, of_tokens = [], []
    for role, split, shape in zip(roles.args, splits, shapes, strict=True):
        if isinstance(role, Weight) and name in role.axes:
            axis = role.axes.index(name)
            of_weights.append((shape[axis], split[axis]))
        elif isinstance(role, Tokens) and name in role.features:
            axis = role.features.index(name) - len(role.features)
            of_tokens.append((shape[axis], split[axis]))
    for size, split in of_weights or of_tokens:
        if found := tuple(n for n in split if n not in used):
            num_devices = math.prod(sizes[n] for n in found)
            if size % (roles.unit * num_devices) == 0:
                return found
            if num_devices > 1:  # an Explicit axis of one device is named, but splits nothing
                log_once(
                    f"each device gathers an axis of {size} that the mesh axes {found} split, "
                    f"because a part of {size // num_devices} is no multiple of {roles.unit}; pad "
                    "the axis, or split it over fewer devices"
                )
            return ()
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
            a = jax.lax.psum(a, both)
            left = tuple(name for name in left if name not in both)
            a = _own_part(a, names, axis)
    return jax.lax.psum(a, left)


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


def to_spec(splits: Splits) -> PartitionSpec:
    """The splits of an array as JAX takes them."""
    return PartitionSpec(*(split or None for split in splits))
