"""Parts of both kernels of attention's gradients: the launch, the steps, and tiles of pairs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.device import MAX_REGISTERS_PER_LANE, REGISTERS_PER_SM
from pallas_kernels.gpu.math import APPROXIMATE

ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of a tile
COLUMN = plgpu.Layout.WGMMA.reduce(0)
_TILE = plgpu.Layout.WGMMA
_LANES = 128  # lanes of a warpgroup
# Registers of a lane of the warpgroup that loads. They leave 240 to each lane of two others. With
# 40 and 232 the kernel of `dk` and `dv` spilled, where heads have 128 numbers.
_MEMORY_REGISTERS = 24


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class PassConfig:
    """Launch parameters of one of the kernels.

    Attributes:
      rows: Number of rows that a warpgroup owns, a multiple of 64.
      tile: Number of rows of the other side in a step, a multiple of 64 up to 256.
      stages: Number of steps whose tiles shared memory holds.
      warpgroups: Number of warpgroups that compute.
    """

    rows: int
    tile: int
    stages: int
    warpgroups: int

    def __post_init__(self):
        if self.rows % 64 or self.block > 256 or self.warpgroups < 1 or self.rows < 1:
            raise ValueError(
                f"rows={self.rows} must be a multiple of 64, and {self.warpgroups} warpgroups must "
                "have from 64 to 256 rows together"
            )
        if self.tile % 64 or not 64 <= self.tile <= 256:
            raise ValueError(f"tile={self.tile} must be a multiple of 64 from 64 to 256")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")

    @property
    def block(self) -> int:
        """Number of rows of a block."""
        return self.rows * self.warpgroups

    @property
    def registers(self) -> int:
        """Registers of a computing lane: what the loading warpgroup leaves, in eights.

        A block has only the registers that it is launched with, which are equally many for each
        lane: 168 of three warpgroups, 504 together and not 512. To ask for more waits forever.
        """
        warpgroups = self.warpgroups + 1
        launched = REGISTERS_PER_SM // (warpgroups * _LANES) // 8 * 8
        free = launched * warpgroups - _MEMORY_REGISTERS
        return min(free // self.warpgroups, MAX_REGISTERS_PER_LANE) // 8 * 8


def launch(config: PassConfig) -> dict[str, Any]:
    """Keyword arguments of `gpu_kernel` that both kernels share."""
    return {
        "num_threads": config.warpgroups + 1,
        "thread_name": "warpgroup",
        "compiler_params": APPROXIMATE,
    }


def run_warpgroups(config: PassConfig, load, compute) -> None:
    """Runs `load` in the last warpgroup, and `compute` with its number in each of the others."""
    warpgroup = jax.lax.axis_index("warpgroup")

    @pl.when(warpgroup == config.warpgroups)
    def _load():
        plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")
        load()

    @pl.when(warpgroup < config.warpgroups)
    def _compute():
        plgpu.set_max_registers(config.registers, action="increase")
        compute(warpgroup)


def slot_to_fill(step: Any, config: PassConfig, freed: Any) -> Any:
    """The slot of a step, once all computing warpgroups have read what it had."""
    slot = jax.lax.rem(step, config.stages)
    pl.when(step >= config.stages)(lambda: plgpu.barrier_wait(freed.at[slot]))
    return slot


def wait_until_freed(steps: Any, config: PassConfig, freed: Any) -> None:
    """Waits for the slots of the last steps, because each phase of a barrier needs a wait.

    JAX's interpreter says so where a thread makes new barriers afterwards (JAX 0.11.2 and 0.12).
    """
    wait = lambda step, _: plgpu.barrier_wait(freed.at[jax.lax.rem(step, config.stages)])
    jax.lax.fori_loop(jnp.maximum(steps - config.stages, 0), steps, wait, None)


def next_in_cycle(number: Any, end: Any, begin: Any = 0) -> Any:
    """The number after this one in a cycle from `begin` to before `end`."""
    return jnp.where(number + 1 < end, number + 1, begin)


def visit(tile, slot, own_tiles, add, filled: Any, freed: Any) -> None:
    """Takes a step, with a tile that the computing warpgroup may need or not.

    Args:
      tile: Number of the tile.
      slot: Slot of the tile in shared memory.
      own_tiles: First tile that the warpgroup needs, and the one after the last.
      add: Function that adds the tile's part of the sums.
      filled: Barriers of slots that TMA has filled.
      freed: Barriers of slots that all warpgroups have read.
    """
    begin, end = own_tiles
    plgpu.barrier_wait(filled.at[slot])
    pl.when((begin <= tile) & (tile < end))(lambda: add(tile, slot))
    plgpu.barrier_arrive(freed.at[slot])


def sums_type(rows: int, columns: int) -> Any:
    """The type of float32 sums of a warpgroup in registers."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def to_tile(vector: jax.Array, shape: tuple[int, ...], along: int) -> jax.Array:
    """The vector in a tile of a shape, with its elements along an axis."""
    return jax.lax.broadcast_in_dim(vector, shape, (along,))


def p_and_dp(
    of_s: tuple[Any, Any], of_dp: tuple[Any, Any], p_of: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """`p_of(s)` and `dp` for a tile of pairs; `dp` is computed beside `p_of`.

    Args:
      of_s: Tiles `a` and `b` in shared memory, of which `s = a @ b.T`.
      of_dp: Tiles of which `dp` is the product.
      p_of: Function of `s`.
    """

    def multiply(*sums):
        for to, (a, b) in zip(sums, (of_s, of_dp), strict=True):
            plgpu.wgmma(to, a, b.transpose((1, 0)))
        # LLVM may otherwise compute with the sums before the waits.
        s = jax.lax.optimization_barrier(plgpu.wgmma_accumulator_load(sums[0], wait_n=1))
        p = jax.lax.optimization_barrier(p_of(s))
        return p, jax.lax.optimization_barrier(sums[1][...])

    shape = of_s[0].shape[0], of_s[1].shape[0]
    return pl.run_scoped(multiply, sums_type(*shape), sums_type(*shape))


def row_numbers(rows: int) -> jax.Array:
    """The numbers of the rows of a tile."""
    return plgpu.broadcasted_iota(jnp.int32, (rows,), 0, layout=ROW)


def masked_products(
    s: jax.Array, attended: Callable[[], tuple[Any, Any]], is_inside: Any
) -> jax.Array:
    """The tile with -inf for pairs of tokens that do not attend.

    Args:
      s: Products of the queries and keys of a tile.
      attended: Function that gives, for each row, the first column that attends and the one after
        the last. Both may lie outside of the tile.
      is_inside: Scalar that says whether all pairs attend, and no mask is needed.
    """

    def masked():
        begin, end = (to_tile(a, s.shape, 0) for a in attended())
        column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=_TILE)
        lowest = plgpu.layout_cast(jnp.full(s.shape, -jnp.inf, jnp.float32), _TILE)
        return jnp.where((begin <= column) & (column < end), s, lowest)

    return jax.lax.cond(is_inside, lambda: s, masked)
