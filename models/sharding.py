"""How parameters and batches lie on a mesh; the only module that names mesh axes.

`data` holds copies of the model, `fsdp` splits parameters and optimizer state (https://arxiv.org/abs/2304.11277,
as XLA derives it: a layer's parameters are gathered when it runs). The batch is split over both.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from pallas_kernels.sharding import map_over_token_shards, sum_over_token_shards

BATCH_AXES = ("data", "fsdp")

# By the last two names of a parameter's path. Layers are stacked on axis 0, which stays whole
# because each step of the scan needs one layer from everywhere. What is not listed (norms, biases)
# is replicated.
_PARAMETER_SPECS: dict[tuple[str, ...], PartitionSpec] = {
    ("embed_tokens", "embedding"): PartitionSpec(None, "fsdp"),
    ("lm_head", "weight"): PartitionSpec(None, "fsdp"),
    ("q_proj", "kernel"): PartitionSpec(None, "fsdp", None),
    ("k_proj", "kernel"): PartitionSpec(None, "fsdp", None),
    ("v_proj", "kernel"): PartitionSpec(None, "fsdp", None),
    ("o_proj", "kernel"): PartitionSpec(None, None, "fsdp"),
    ("gate_proj", "kernel"): PartitionSpec(None, "fsdp", None),
    ("up_proj", "kernel"): PartitionSpec(None, "fsdp", None),
    ("down_proj", "kernel"): PartitionSpec(None, None, "fsdp"),
}


def make_mesh(*, data: int, fsdp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of `data` copies of the model, each split over `fsdp` devices.

    Raises:
      ValueError: the product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    if data * fsdp != len(devices):
        raise ValueError(f"{data=} times {fsdp=} must be the number of devices, {len(devices)}")
    return jax.make_mesh((data, fsdp), BATCH_AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def batch_sharding(mesh: Mesh, *, batch_axis: int = 0) -> NamedSharding:
    """Of a batch whose axis `batch_axis` are the sequences."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * batch_axis, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def parameter_shardings(params: nnx.State, mesh: Mesh) -> nnx.State:
    """The sharding of each parameter of a Llama, in the structure of `params` (or of their shapes).

    Raises:
      ValueError: `fsdp` does not divide the axis it splits.
    """

    def sharding(path: tuple[Any, ...], param: Any) -> NamedSharding:
        names = parameter_path(path)
        spec = _PARAMETER_SPECS.get(names[-2:], PartitionSpec())
        for size, axis in zip(param.shape, spec, strict=False):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"{'.'.join(names)} {param.shape}: {axis}={mesh.shape[axis]} does not divide "
                    f"{size}; use fewer devices on that axis"
                )
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, params)


def parameter_path(path: tuple[Any, ...]) -> tuple[str, ...]:
    """The names that lead to a parameter, from its key path in an `nnx.State`."""
    return tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))


def split_batch(x: Float[Array, "B S D"]) -> Float[Array, "B S D"]:
    """Says to XLA that activations are split by sequence, on the mesh in context if there is one.

    Without it the partitioner is free to split hidden channels as the parameters are, and to sum
    partial products over the mesh instead of gathering parameters.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))


def map_over_batch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(weights, tokens) -> tokens` on each device's tokens; see `map_over_token_shards`.

    Where the devices do not divide the batch, as that of a few prompts, XLA splits `fn` itself.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return fn

    def mapped(weights: Any, tokens: Any) -> Any:
        if any(a.shape[0] % mesh.size for a in jax.tree.leaves(tokens)):
            return fn(weights, tokens)
        return map_over_token_shards(fn, BATCH_AXES)(weights, tokens)

    return mapped


def sum_over_batch(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn(weights, tokens) -> sums` on each device's tokens; see `sum_over_token_shards`."""
    if jax.sharding.get_abstract_mesh().empty:
        return fn
    return sum_over_token_shards(fn, BATCH_AXES)
