"""The main loop of the kernels that multiply matrices on Hopper; each kernel has its own epilogue.

The loop computes `a @ b` by wgmma, with one `a` and one or several `b` of one shape. The kernel
decides what to do with the float32 accumulators of a tile.

- A persistent block computes a tile of 128 rows by `tile_n` columns of each product. Two warpgroups
  compute `64 x tile_n` each and share the tiles of `b`. A third loads operands by TMA, `stages`
  steps in K ahead. It runs on from tile to tile, so the next tile's operands are there when the
  epilogue ends.
- While one warpgroup waits for its wgmma, or is in an epilogue, the wgmma of the other runs. Two
  variants were tried and are slower (`docs/lab/2026-11-21-gated-mlp.md`): to issue the next wgmma
  before waiting, and to start the second warpgroup some steps after the first.
- With `in_turns` the warpgroups take turns instead: each computes whole tiles of `128 x tile_n`,
  and its epilogue runs beside the other's steps. That pays for an epilogue of half a tile's time.
- `cluster=2` blocks with different rows share the tiles of `b`. Each loads half and multicasts it,
  which takes a step's reads of the L2 from 48 to 32 KiB a block (256 columns).
- The blocks take the tiles in turn, so the numbers of tiles of two blocks differ by at most one.
  Tiles that run together must share operands in the L2. So `band` groups of `128 · cluster` rows
  are a band. Tiles are numbered band by band, and rows first inside of a band. Every other band
  goes through the columns backwards.

Above 450 lines, because the loop, its launch parameters and its stores belong together.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.gpu.device import Device

TILE_M = 64  # rows of a warpgroup's tile, as wgmma has them
WARPGROUPS = 2  # warpgroups that compute
BLOCK_M = WARPGROUPS * TILE_M
TILE_K = 64  # depth of a step in 16 bits: 128 bytes, the widest swizzle
_STEP_BYTES = 128  # bytes along K that a step takes of each row of `a` and column of `b`
DTYPES = (jnp.bfloat16, jnp.float16)

# Parts of an operand, of which a step loads one: `(condition, tile in device memory)`. The
# condition is a scalar, or None for the only part.
type Parts = list[tuple[Any, Any]]

# `unsupported_reason` needs only a shape and a dtype, so an array need not exist yet.
type Operand = jax.Array | jax.ShapeDtypeStruct

# A block has 65536 registers. The memory warpgroup keeps 40 a lane. That leaves 236 a lane to the
# other two, and so 232, because the hardware hands registers out in eights.
_MEMORY_REGISTERS = 40
_COMPUTE_REGISTERS = 232
# Accumulators of a lane that leave enough registers for an epilogue.
_MOST_ACCUMULATORS = 192


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Launch parameters: how blocks share the products, and how much shared memory they use.

    Attributes:
      tile_n: Number of columns of a tile, a multiple of 64 up to 256.
      stages: Number of steps of 128 bytes in K whose operands shared memory holds.
      cluster: Number of blocks that share tiles of `b`, 1 or 2.
      band: Number of row groups (of `128 · cluster` rows) that go through the columns together.
      blocks: Number of thread blocks, a multiple of `cluster`.
    """

    tile_n: int
    stages: int
    cluster: int
    band: int
    blocks: int

    def __post_init__(self):
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise ValueError(f"tile_n={self.tile_n} must be a multiple of 64 from 64 to 256")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster={self.cluster} must be 1 or 2")
        if self.band < 1:
            raise ValueError(f"band={self.band} must be at least 1")
        if self.blocks < 1 or self.blocks % self.cluster:
            raise ValueError(
                f"blocks={self.blocks} must be a positive multiple of cluster={self.cluster}"
            )


def default_config(
    num_rows: int,
    num_columns: int,
    depth: int,
    device: Device,
    *,
    tile_n: int,
    stages: int,
    max_cluster: int = 2,
    band_rows: int | None = None,
) -> Config:
    """Launch parameters with this `tile_n` and `stages`; the others are derived.

    `band_rows` is the number of rows in a band, derived if None.
    """
    cluster = max_cluster if num_rows > BLOCK_M and device.num_sms % max_cluster == 0 else 1
    groups = pl.cdiv(num_rows, cluster * BLOCK_M)
    tiles = groups * pl.cdiv(num_columns, tile_n)
    # Bands of 2048 rows were best with depths of 2048 and 4096. Deeper rows get bands of 16 MiB, a
    # third of the L2 of an H100. All bands have one size: a narrow last band would share less.
    rows = band_rows or min(2048, max(1, 2**24 // (2 * depth)))
    bands = pl.cdiv(groups, max(1, rows // (cluster * BLOCK_M)))
    return Config(
        tile_n=tile_n,
        stages=stages,
        cluster=cluster,
        band=pl.cdiv(groups, bands),
        blocks=cluster * min(device.num_sms // cluster, tiles),
    )


def unsupported_device(device: Device) -> str | None:
    """Why the device has no wgmma, or None if it has or is no NVIDIA GPU."""
    if device.capability is not None and device.capability[0] != 9:
        return f"wgmma needs compute capability (9, x), {device.kind} has {device.capability}"
    return None


def unsupported_reason(device: Device, *operands: Operand) -> str | None:
    """Why no kernel with this loop can multiply the 16-bit operands, or None if it can."""
    if (reason := unsupported_device(device)) is not None:
        return reason
    dtypes = [a.dtype for a in operands]
    if dtypes[0] not in DTYPES or any(dtype != dtypes[0] for dtype in dtypes):
        return (
            f"the operands are {', '.join(map(str, dtypes))}, not all bfloat16 or float16; cast "
            "the activations to one of these dtypes, and weights follow"
        )
    if any(0 in a.shape for a in operands):
        return f"operands of shapes {', '.join(str(a.shape) for a in operands)} are empty"
    return None


def step_depth(dtype: DTypeLike) -> int:
    """Depth of a step in K: 64 numbers of 16 bits, 128 of 8 bits."""
    return _STEP_BYTES // jnp.dtype(dtype).itemsize


def whole_tiles(a: Float[Array, "N D"]) -> Float[Array, "padded_N padded_D"]:
    """`a` with zeros up to whole tiles of 8 rows by 128 bytes, which TMA swizzles together.

    Mosaic cannot copy a part of a tile. The usual models have whole tiles, and so need no padding.
    """
    return jnp.pad(a, ((0, -a.shape[0] % 8), (0, -a.shape[1] % step_depth(a.dtype))))


def store_piece(
    i: int, value: Float[Array, "64 width"], slots: Any, to: Any, *, transposed=False
) -> None:
    """Stores columns of a warpgroup's accumulators through shared memory.

    The caller calls it for each piece of a tile in turn, and may leave out the last ones. A slot is
    filled while the others are stored. `wait_for_pieces` waits for the last stores.

    TMA stores nothing past the last row or column of an array, with one exception. Where an array
    has a single block of columns and a piece is one block wide, Mosaic leaves the number of the
    block out of the copy (JAX 0.11.2 and 0.12). So the copy of a piece past this block overwrites
    the block. The caller must not store such a piece.

    Args:
      i: Number of the piece in the tile.
      value: Values to store, in the dtype of `to`, so that the rounding is done before the wait.
      slots: `[num_slots, 64, width]` in shared memory, the warpgroup's own, with 2 slots or more.
      to: Destination in device memory, `[64, width]`.
      transposed: Whether to store the transpose; `width` is then 64.
    """
    num_slots = slots.shape[0]
    smem = slots.at[i % num_slots]
    wait_for_slot(i, num_slots)
    if transposed:
        smem.transpose((1, 0))[...] = plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED)
    else:
        smem[...] = value
    store_slot(smem, to)


def wait_for_slot(i: int, num_slots: int = 2) -> None:
    """Waits until a warpgroup may fill slot `i % num_slots` with the i-th piece of a tile.

    Only the stores from the other slots may then still be reading. The tile before may have ended
    with any slot, so the first piece waits for all. The pieces up to the last slot then have free
    slots.
    """
    if i == 0 or i >= num_slots - 1:
        plgpu.wait_smem_to_gmem(min(i, num_slots - 1), wait_read_only=True)


def store_slot(smem: Any, to: Any) -> None:
    """Stores a slot that is filled."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, to)


def wait_for_pieces() -> None:
    """Waits until the stores have read their shared memory, which may then be reused."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MainLoop:
    """`a @ b` for each `b`, tile by tile.

    Attributes:
      config: Launch parameters.
      num_rows: Number of rows of `a`, M; TMA fills in zeros for rows that are not there.
      num_columns: Number of columns of each `b`, N; TMA fills in zeros here, too.
      depth: Depth of the products, K, a multiple of a step.
      dtype: Dtype of `a`, and of each `b` if `b_dtype` is None.
      num_b: Number of `b`.
      a_layout: Layout of `a`, `"MK"` or `"KM"`.
      b_layout: Layout of each `b`, `"NK"` or `"KN"`.
      b_dtype: Dtype of each `b`, for operands of 8 bits, which may be of two dtypes.
      promote_every: Number of steps after which the accumulators are added to float32 sums in
        registers and start from 0; 0 for never. wgmma adds products of 8 bits with about 14 bits.
        The sums take as many registers as the accumulators.
      in_turns: Whether each computing warpgroup has whole tiles for itself. A lane then has
        `tile_n` accumulators for each `b`, and at most 192 fit.

    A step has 64 numbers of 16 bits, or 128 of 8 bits. Operands of 8 bits have the layouts `"MK"`
    and `"NK"`, the only ones that wgmma reads. The first dimension of an operand is a multiple of 8
    and the second a multiple of a step, because Mosaic copies whole blocks of 8 rows by 128 bytes.
    Blocks that lie outside of an operand become zeros, and TMA does not store blocks that lie
    outside of a result.
    """

    config: Config
    num_rows: int
    num_columns: int
    depth: int
    dtype: DTypeLike
    num_b: int = 1
    a_layout: Literal["MK", "KM"] = "MK"
    b_layout: Literal["NK", "KN"] = "NK"
    b_dtype: DTypeLike | None = None
    promote_every: int = 0
    in_turns: bool = False

    @property
    def step(self) -> int:
        """Depth of a step in K."""
        return step_depth(self.dtype)

    @property
    def groups(self) -> int:
        """Number of groups of rows, one group for a cluster at a time."""
        return pl.cdiv(self.num_rows, self.config.cluster * BLOCK_M)

    @property
    def column_tiles(self) -> int:
        """Number of tiles from the first to the last column."""
        return pl.cdiv(self.num_columns, self.config.tile_n)

    @property
    def num_clusters(self) -> int:
        """Number of clusters of blocks."""
        return self.config.blocks // self.config.cluster

    @property
    def smem_bytes(self) -> int:
        """Bytes of shared memory of a block for the operands."""
        rows = BLOCK_M + self.num_b * self.config.tile_n
        return _STEP_BYTES * self.config.stages * rows

    def check_fits(self, device: Device, *, extra_bytes: int = 0) -> None:
        """Raises ValueError if the operands and `extra_bytes` do not fit a block's memory."""
        if self.in_turns and self.num_b * self.config.tile_n > _MOST_ACCUMULATORS:
            raise ValueError(
                f"{self.config} has tiles of {self.num_b * self.config.tile_n} columns, and a "
                f"warpgroup has registers for {_MOST_ACCUMULATORS}; use narrower tiles"
            )
        num_bytes = self.smem_bytes + extra_bytes
        if num_bytes > device.smem_bytes:
            raise ValueError(
                f"{self.config} takes {num_bytes} bytes of shared memory, a block of {device.kind} "
                f"can have {device.smem_bytes}; use fewer stages or narrower tiles"
            )

    @property
    def scratch_types(self) -> list[Any]:
        """Types of the scratch memory that `run` takes."""
        c = self.config
        a_tile = (BLOCK_M, self.step) if self.a_layout == "MK" else (self.step, BLOCK_M)
        b_tile = (c.tile_n, self.step) if self.b_layout == "NK" else (self.step, c.tile_n)
        b_dtype = self.dtype if self.b_dtype is None else self.b_dtype
        readers = 1 if self.in_turns else WARPGROUPS
        freed = (
            plgpu.Barrier(num_arrivals=readers, num_barriers=c.stages)
            if c.cluster == 1
            else plgpu.ClusterBarrier(
                collective_axes=("member",), num_arrivals=readers, num_barriers=c.stages
            )
        )
        # A waiting warpgroup must not skip a phase of a barrier. In turns the warpgroups read
        # different steps, so each has barriers of its own.
        num_filled = c.stages * WARPGROUPS if self.in_turns else c.stages
        return [
            plgpu.SMEM((c.stages, *a_tile), self.dtype),
            *(plgpu.SMEM((c.stages, *b_tile), b_dtype) for _ in range(self.num_b)),
            plgpu.Barrier(num_arrivals=1 + self.num_b, num_barriers=num_filled),
            freed,
        ]

    @property
    def launch(self) -> dict[str, Any]:
        """Keyword arguments of `plgpu.kernel`."""
        return {
            "grid": (self.num_clusters,),
            "grid_names": ("group",),
            "cluster": (self.config.cluster,),
            "cluster_names": ("member",),
            "num_threads": WARPGROUPS + 1,
            "thread_name": "warpgroup",
        }

    def _parts_in_k(self, gmems: Sequence[Any], layout: str, others: Any, k: Any) -> Parts:
        """This step of K in each array, and whether that array has it."""
        end, parts = 0, []
        for gmem in gmems:
            num_steps = pl.cdiv(gmem.shape[layout.index("K")], self.step)
            start, end = end, end + num_steps
            depth = pl.ds((k - start) * self.step, self.step)
            part = gmem.at[(depth, others) if layout[0] == "K" else (others, depth)]
            parts.append(((start <= k) & (k < end) if len(gmems) > 1 else None, part))
        return parts

    def run(
        self,
        a_gmems: Sequence[Any],
        b_gmems: Sequence[Sequence[Any]],
        scratch: Sequence[Any],
        *,
        tile: Callable[[Any, Any, Callable[[], tuple[jax.Array, ...]]], None],
        start: Callable[[], None] | None = None,
        end: Callable[[], None] | None = None,
        is_needed: Any = None,
        first_step_of_b: int = 0,
        parts_of_a: Callable[[Any, Any], Parts] | None = None,
        parts_of_b: Callable[[Any, Any], Parts] | None = None,
    ) -> None:
        """The body of a kernel, run by all warpgroups of a block.

        Above 80 lines, because the loading and the computing warpgroups share its barriers.

        Args:
          a_gmems: One `[M, K]` or `[K, M]`, or several that follow each other in K. The depth of
            each except the last is a multiple of a step.
          b_gmems: The same for each `b`: `[N, K]` or `[K, N]`.
          scratch: Scratch memory of `scratch_types`.
          tile: Function that each computing warpgroup calls once a tile, with its first row, the
            first column, and a function that returns its accumulators: `[64, tile_n]` for each `b`,
            and with `in_turns` those of the first 64 rows before those of the others.
          start: Function that each computing warpgroup calls before its first tile.
          end: Function that each computing warpgroup calls after its last tile.
          is_needed: Scalar. If it is False, there are no tiles, and `start` is not called.
          first_step_of_b: Step in K of each `b` that goes with the first step of `a`. The steps
            before it follow the last.
          parts_of_a: Function `(row, step)` that gives the `Parts` of `a` from this row and step of
            K on, for an `a` of another layout than `a_gmems`. Then `a_gmems` are not read.
          parts_of_b: Function `(column, step)` that gives the `Parts` of the only `b`. Then
            `b_gmems` are not read.
        """
        tile_n, stages, cluster = self.config.tile_n, self.config.stages, self.config.cluster
        num_clusters = self.num_clusters
        num_tiles = self.groups * self.column_tiles
        if is_needed is not None:
            num_tiles = jnp.where(is_needed, num_tiles, 0)
        k_steps = self.depth // self.step
        a_smem, *rest = scratch
        b_smems, (filled, freed) = rest[: self.num_b], rest[self.num_b :]
        group_of_blocks, member = jax.lax.axis_index("group"), jax.lax.axis_index("member")
        warpgroup = jax.lax.axis_index("warpgroup")
        tiles_here = jax.lax.div(num_tiles + num_clusters - 1 - group_of_blocks, num_clusters)
        slot_of = lambda step: jax.lax.rem(step, stages)

        def place(i):
            """First row and column of the i-th tile of this block."""
            group, column_tile = plgpu.planar_snake(
                group_of_blocks + i * num_clusters,
                (self.groups, self.column_tiles),
                0,
                self.config.band,
            )
            return (group * cluster + member) * BLOCK_M, column_tile * tile_n

        def filled_of(i, step):
            """The barrier of a step of the i-th tile."""
            first = jax.lax.rem(i, WARPGROUPS) * stages if self.in_turns else 0
            return filled.at[first + slot_of(step)]

        def rows_of_a(row, k):
            return self._parts_in_k(a_gmems, self.a_layout, pl.ds(row, BLOCK_M), k)

        def columns_of_each_b(column, k):
            if parts_of_b is not None:
                return [parts_of_b(column, k)]
            of_b = jax.lax.rem(k + first_step_of_b, k_steps) if first_step_of_b else k
            columns = pl.ds(column, tile_n)
            return [self._parts_in_k(gmems, self.b_layout, columns, of_b) for gmems in b_gmems]

        def bring_part(parts, smem, barrier, collective_axes=None):
            for condition, part in parts:
                bring = functools.partial(
                    plgpu.copy_gmem_to_smem,
                    part,
                    smem,
                    barrier,
                    collective_axes=collective_axes,
                )
                bring() if condition is None else pl.when(condition)(bring)

        @pl.when(warpgroup == WARPGROUPS)
        def _bring_operands():
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

            def bring_tile(i, step):
                row, column = place(i)

                def bring(k, step):
                    slot = slot_of(step)

                    @pl.when(step >= stages)
                    def _wait():
                        plgpu.barrier_wait(freed.at[slot])

                    barrier = filled_of(i, step)
                    bring_part((parts_of_a or rows_of_a)(row, k), a_smem.at[slot], barrier)
                    for of_b, b_smem in zip(columns_of_each_b(column, k), b_smems, strict=True):
                        shared = "member" if cluster > 1 else None
                        bring_part(of_b, b_smem.at[slot], barrier, collective_axes=shared)
                    return step + 1

                return jax.lax.fori_loop(0, k_steps, bring, step)

            steps = jax.lax.fori_loop(0, tiles_here, bring_tile, 0)
            # Waits until the last slots are free. Otherwise the other block of the cluster would
            # arrive at a barrier of a block that has ended.
            jax.lax.fori_loop(
                jnp.maximum(steps - stages, 0),
                steps,
                lambda step, _: plgpu.barrier_wait(freed.at[slot_of(step)]),
                None,
            )

        @pl.when(warpgroup < WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            own_rows = [pl.ds(warpgroup * TILE_M, TILE_M)]
            if self.in_turns:
                own_rows = [pl.ds(first, TILE_M) for first in range(0, BLOCK_M, TILE_M)]
            if start is not None and is_needed is not None:
                pl.when(is_needed)(start)
            elif start is not None:
                start()

            def compute_tile(i):
                row, column = place(i)
                first_step = i * k_steps

                def multiply(first, num_steps, *accs):
                    def free(step):
                        plgpu.barrier_arrive(freed.at[slot_of(step)])

                    def multiply_step(step, _):
                        slot = slot_of(step)
                        plgpu.barrier_wait(filled_of(i, step))
                        for acc, (rows, b_smem) in zip(
                            accs, itertools.product(own_rows, b_smems), strict=True
                        ):
                            if self.a_layout == "MK":
                                a = a_smem.at[slot, rows]
                            else:
                                a = a_smem.at[slot, :, rows].transpose((1, 0))
                            b = b_smem.at[slot]
                            b = b.transpose((1, 0)) if self.b_layout == "NK" else b
                            plgpu.wgmma(acc, a, b)
                        if self.in_turns:
                            # The tensor cores have only this warpgroup's steps. So it issues a
                            # step before the one before it has ended.
                            plgpu.wgmma_wait(len(accs))
                            pl.when(step > first)(lambda: free(step - 1))
                        else:
                            plgpu.wgmma_wait(0)
                            free(step)

                    jax.lax.fori_loop(first, first + num_steps, multiply_step, None)
                    if self.in_turns:
                        plgpu.wgmma_wait(0)
                        free(first + num_steps - 1)
                    # LLVM takes the sums for complete once a wgmma is issued. Without the barrier
                    # it may compute with them before the wait, and with a wgmma in flight it did.
                    return jax.lax.optimization_barrier(tuple(acc[...] for acc in accs))

                accumulator = plgpu.WGMMAAccumulatorRef((TILE_M, tile_n), jnp.float32)

                def multiply_steps(first, num_steps):
                    run = functools.partial(multiply, first, num_steps)
                    return pl.run_scoped(run, *[accumulator] * self.num_b * len(own_rows))

                def multiply_all():
                    if not 0 < self.promote_every < k_steps:
                        return multiply_steps(first_step, k_steps)
                    num_parts, rest = divmod(k_steps, self.promote_every)

                    # The rest comes first, so that the loop has parts of one size.
                    def add_part(i, sums):
                        first = first_step + rest + i * self.promote_every
                        part = multiply_steps(first, self.promote_every)
                        return tuple(map(operator.add, sums, part))

                    sums = multiply_steps(first_step, rest or self.promote_every)
                    return jax.lax.fori_loop(0 if rest else 1, num_parts, add_part, sums)

                tile(row if self.in_turns else row + warpgroup * TILE_M, column, multiply_all)

            if self.in_turns:
                num_own = jax.lax.div(tiles_here + WARPGROUPS - 1 - warpgroup, WARPGROUPS)
                own_tile = lambda j, _: compute_tile(j * WARPGROUPS + warpgroup)
                jax.lax.fori_loop(0, num_own, own_tile, None)
            else:
                jax.lax.fori_loop(0, tiles_here, lambda i, _: compute_tile(i), None)
            if end is not None:
                end()
