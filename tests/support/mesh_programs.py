"""A small model of all operations, for every layout of its arrays on a mesh of 2 x 2 x 2 devices.

The model is what a user writes, and names the mesh only inside of `jax.shard_map`. There the user
has a device's parts, so the model gathers weights, adds up the MLP's results over devices, and
names the axis that splits the vocabulary.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from pallas_kernels import add_rms_norm, linear_cross_entropy, rms_norm, swiglu, swiglu_mlp
from pallas_kernels.implementation import Implementation

AXES = {"data": 2, "fsdp": 2, "tensor": 2}
MODES = ("auto", "explicit", "manual")
TRANSFORMS = ("plain", "scan", "remat")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the arrays are split.

    Attributes:
      tokens: Spec of the leading axes of activations.
      hidden: Mesh axis that splits the hidden size of every weight.
      columns: Mesh axis that splits the columns of the MLP and the vocabulary.
    """

    tokens: P
    hidden: str | None = None
    columns: str | None = None

    def weight_specs(self) -> dict[str, P]:
        """The specs of a layer's weights, and of the head and the last norm."""
        across, down = P(self.hidden, self.columns), P(self.columns, self.hidden)
        norm = P(self.hidden)
        return {
            "norm": norm,
            "w_gate": across,
            "w_up": across,
            "w_down": down,
            "last_norm": norm,
            "head": down,
        }


def cases() -> list[tuple[str, str, str]]:
    """The cross of layouts, modes and transforms."""
    return list(itertools.product(LAYOUTS, MODES, TRANSFORMS))


_ALL = ("data", "fsdp", "tensor")
LAYOUTS = {
    "batch": Layout(P(_ALL)),
    "sequence": Layout(P(("data", "fsdp"), "tensor")),
    "fsdp": Layout(P(_ALL), hidden="fsdp"),
    "tensor": Layout(P(("data", "fsdp")), columns="tensor"),
    "fsdp and tensor": Layout(P(("data", "fsdp")), hidden="fsdp", columns="tensor"),
}
_OF_A_LAYER = ("norm", "w_gate", "w_up", "w_down")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the model: B, S, D, F and V."""

    batch: int
    sequence: int
    hidden: int
    columns: int
    vocabulary: int


def shapes(
    sizes: Sizes, transform: str, dtype: Any, param_dtype: Any
) -> dict[str, jax.ShapeDtypeStruct]:
    """Weights, activations and labels, with weights of two layers for a scan."""
    b, s, d, f, v = dataclasses.astuple(sizes)
    layers = (2,) if transform == "scan" else ()
    weights = {
        "norm": (*layers, d),
        "w_gate": (*layers, d, f),
        "w_up": (*layers, d, f),
        "w_down": (*layers, f, d),
        "last_norm": (d,),
        "head": (v, d),
    }
    return {name: jax.ShapeDtypeStruct(shape, param_dtype) for name, shape in weights.items()} | {
        "x": jax.ShapeDtypeStruct((b, s, d), dtype),
        "labels": jax.ShapeDtypeStruct((b, s), jnp.int32),
    }


def make_args(sizes: Sizes, transform: str, dtype: Any, param_dtype: Any) -> dict[str, Any]:
    """Random numbers for `shapes`."""
    numbers = np.random.default_rng(0)
    b, s, d, f, v = dataclasses.astuple(sizes)
    labels = numbers.integers(0, v, (b, s))
    labels[numbers.random((b, s)) < np.linspace(0, 0.9, b)[:, None]] = -100  # uneven on purpose
    means = {"norm": 1.0, "last_norm": 1.0}
    deviations = {"norm": 0.1, "last_norm": 0.1, "w_down": f**-0.5, "x": 1.0}
    args: dict[str, Any] = {
        name: jnp.asarray(
            means.get(name, 0.0)
            + deviations.get(name, d**-0.5) * numbers.standard_normal(of.shape),
            of.dtype,
        )
        for name, of in shapes(sizes, transform, dtype, param_dtype).items()
        if name != "labels"
    }
    return args | {"labels": jnp.asarray(labels, jnp.int32)}


def specs(layout: Layout, transform: str) -> dict[str, P]:
    """The specs of the arguments."""
    found = layout.weight_specs() | {"x": layout.tokens, "labels": layout.tokens}
    if transform == "scan":
        found |= {name: P(None, *found[name]) for name in _OF_A_LAYER}
    return found


def loss_of(
    layout: Layout, mode: str, transform: str, implementation: Implementation | None = None
) -> Callable[[dict[str, Any]], jax.Array]:
    """The mean loss of the model.

    Args:
      layout: Split of the arrays.
      mode: One of `MODES`.
      transform: One of `TRANSFORMS`.
      implementation: Implementation of `swiglu`, which has no kernel by default.
    """
    is_manual = mode == "manual"
    split_columns = layout.columns if is_manual else None

    def whole(weight: jax.Array, axis: int, dtype: Any) -> jax.Array:
        if not is_manual or layout.hidden is None:
            return weight
        return jax.lax.all_gather(weight.astype(dtype), layout.hidden, axis=axis, tiled=True)

    def layer(h: jax.Array, weights: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        dtype = h.dtype
        norm = whole(weights["norm"], 0, jnp.float32)
        y, h = add_rms_norm(jnp.sin(h), h, norm)
        w_gate, w_up = (whole(weights[name], 0, dtype) for name in ("w_gate", "w_up"))
        out = swiglu_mlp(y, w_gate, w_up, whole(weights["w_down"], 1, dtype))
        if split_columns:
            out = jax.lax.psum(out, split_columns)
        return h + swiglu(out, y, implementation=implementation), None

    def losses(args: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        weights = {name: args[name] for name in _OF_A_LAYER}
        if transform == "scan":
            h, _ = jax.lax.scan(layer, args["x"], weights)
        else:
            run = jax.checkpoint(layer) if transform == "remat" else layer
            h, _ = run(args["x"], weights)
        y = rms_norm(h, whole(args["last_norm"], 0, jnp.float32))
        head = whole(args["head"], 1, h.dtype)
        total = linear_cross_entropy(
            y, head, args["labels"], reduction="sum", vocab_axis=split_columns
        )
        return total, jnp.sum(args["labels"] >= 0)

    def mean(args: dict[str, Any]) -> jax.Array:
        if not is_manual:
            total, number = losses(args)
            return total / number.astype(jnp.float32)

        def local(args: dict[str, Any]) -> jax.Array:
            axes = tuple(n for entry in layout.tokens for n in _names(entry))
            total, number = (jax.lax.psum(a, axes) for a in losses(args))
            return total / number.astype(jnp.float32)

        of_args = {name: s for name, s in specs(layout, transform).items() if name in args}
        return jax.shard_map(local, in_specs=(of_args,), out_specs=P())(args)

    return mean


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry)


@functools.cache
def gradients_of(*case: Any) -> Callable[..., Any]:
    """Loss and gradients of `(floating arrays, labels)`, for the arguments of `loss_of`."""
    loss = loss_of(*case)
    return jax.value_and_grad(lambda arrays, labels: loss(arrays | {"labels": labels}))
