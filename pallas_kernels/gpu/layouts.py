"""A register layout in which each warp has its own rows, and loads and stores in that layout."""

from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.device import LANES, WARPS_PER_WARPGROUP


def rows_of_warps(vector: int) -> Any:
    """Layout of a `[4, n·32·vector]` value: warp i has row i, a lane `vector` neighbours of it.

    A sum over axis 1 stays within a warp, so it needs no shared memory. (`jnp.sum` of a layout
    that spans warps goes through one scratch buffer a block, where several warpgroups race.)
    """
    return plgpu.Layout.TILED(
        plgpu.Tiling(((WARPS_PER_WARPGROUP, LANES * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-2,),
        vector_dim=-1,
    )


def load(ref: Any, layout: Any) -> jax.Array:
    """The values of a reference, in a tiled layout."""
    # `optimized=True` asks for whole 32-byte sectors a warp. JAX 0.11 does not have it for tiled
    # layouts from global memory, and 0.12 refuses some layouts that are fine.
    return plgpu.load(ref, layout=layout, optimized=False)


def store(ref: Any, value: jax.Array) -> None:
    """Stores a value that is in a tiled layout."""
    if hasattr(plgpu, "store"):  # since JAX 0.12, where `ref[...] =` implies `optimized=True`
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value
