"""Functions of tokens inside of `jax.shard_map`, as the Llama in `models` uses them.

The operations of this package need no such function: they partition themselves (`partition.py`).
A model calls them for what it computes around an operation on each device's tokens.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

_WHOLE = PartitionSpec()


def map_over_token_shards(fn: Callable[..., Any], mesh_axes: tuple[str, ...]) -> Callable[..., Any]:
    """A function that runs `fn` on each device's tokens.

    Differentiable, as `sum_over_token_shards` is.

    Args:
      fn: Function `(weights, tokens) -> tokens`, where arguments and results are pytrees.
      mesh_axes: Axes of the mesh in context (`jax.set_mesh`) over which axis 0 of every array in
        `tokens`, and of every result, is split. A weight that is split over the mesh is gathered,
        once per call.

    Returns:
      A function of the same arguments that takes and returns global arrays.
    """
    tokens = PartitionSpec(mesh_axes)
    # `sum_over_token_shards` says why check_vma is False.
    return jax.shard_map(fn, in_specs=(PartitionSpec(), tokens), out_specs=tokens, check_vma=False)


def sum_over_token_shards(
    fn: Callable[..., Any],
    mesh_axes: tuple[str, ...],
    *,
    weights_spec: PartitionSpec = _WHOLE,
) -> Callable[..., Any]:
    """A function that runs `fn` on each device's tokens, and adds up the results.

    Differentiable: the gradient of `weights` is summed over the devices once, by the transpose of
    `jax.shard_map`, so `fn` and its gradient rules must not sum over mesh axes themselves.

    Args:
      fn: Function `(weights, tokens) -> sums`, where both arguments are pytrees and the results are
        sums over tokens.
      mesh_axes: Axes of the mesh in context (`jax.set_mesh`) over which axis 0 of every array in
        `tokens` is split.
      weights_spec: Partition of each weight as `fn` gets it; whole by default. A whole weight that
        is split over the mesh is gathered, once per call. Its gradient, which is as large on every
        device, is summed by an all-reduce. If `fn` gets a part and gathers it by
        `jax.lax.all_gather`, the gradient is summed by a reduce-scatter.

    Returns:
      A function of the same arguments that takes and returns global arrays.
    """

    def local(weights: Any, tokens: Any) -> Any:
        return jax.tree.map(lambda a: a[None], fn(weights, tokens))

    def sharded(weights: Any, tokens: Any) -> Any:
        # With check_vma=False the transpose of shard_map sums the gradient of a weight, once.
        # Returning one value a device leaves the sum to code outside, where its gradient cannot be
        # counted twice.
        parts = jax.shard_map(
            local,
            in_specs=(weights_spec, PartitionSpec(mesh_axes)),
            out_specs=PartitionSpec(mesh_axes),
            check_vma=False,
        )(weights, tokens)
        return jax.tree.map(lambda a: jnp.sum(a, axis=0), parts)

    return sharded
