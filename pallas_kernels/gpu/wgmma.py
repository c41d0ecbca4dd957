"""Tiles of numbers in the registers of a warpgroup, as a wgmma leaves and takes them."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE = plgpu.Layout.WGMMA
ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of a tile
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # a value for each column of a tile


def completed(acc: Any, in_flight: int = 0) -> jax.Array:
    """The sums of a wgmma, after it has ended, with this number of later wgmmas in flight.

    LLVM takes the sums for complete once the wgmma is issued. Without the barrier it may compute
    with them before the wait.
    """
    return jax.lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=in_flight))


def over(vector: jax.Array, tile: jax.Array, axis: int = 0) -> jax.Array:
    """The vector in the shape of a tile, with its numbers along an axis."""
    return jax.lax.broadcast_in_dim(vector, tile.shape, (axis,))


def splat(value: float, shape: tuple[int, ...], layout: Any = TILE) -> jax.Array:
    """A float32 array of one value in a layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
