"""The GEMM whose logits exist only in registers, as statistics and stored exponentials; for Hopper.

The loss of a token and its gradient need only a few numbers from each row of the `[T, V]` logits:
the logsumexp, the label's logit, and maxima for the accuracy. Here the logits exist only as wgmma
accumulators. `linear_statistics` runs the kernel for the statistics alone. `linear_exponentials`
runs it for a loss with gradients. Then the kernel also stores, through shared memory, the
exponentials of the logits relative to an offset of each row, times a factor of the row.

At T=8192, D=4096, V=128256 in bfloat16 the GEMM has `2·T·D·V` = 8.6 Tflop, which take 10.9 ms at
the 791 TF/s that cuBLAS reaches on an H100. `weight` has 1.05 GB and `x` 67 MB, and each read once
takes 0.37 ms of device memory's time. Logits in memory would be 2.1 GB, to write and to read. So
the tensor cores bound the kernel, and all other work has to hide behind a wgmma.

The loop is the one in `pallas_kernels/gpu/hopper_gemm.py`, in turns: a warpgroup computes tiles of
128 x 192 for itself, and its statistics run beside the steps of the other warpgroup. On an H200
`linear_exponentials` takes 1.13 times as long as cuBLAS' GEMM at 8192 x 1024 x 151936. With tiles
that the warpgroups share it took 1.35 (docs/lab/2026-11-28-exponentials-in-turns.md).

Here 66 pairs of blocks of an H100 work on 8 row groups of 256 (17 MB of `x`, which stay in the L2)
and 8 tiles of `weight` (13 MB). Each band of row groups goes through all of `weight`: 4 bands read
it 4 times, 1.3 ms of memory time under 11 ms of arithmetic. There are 323.9 tiles a pair, and no
pair has more than 324.

- A warpgroup comes back to a row with other columns in between. So it keeps the running statistics
  of every row of its block in its own part of a float32 array. They take 16 bytes a token and part,
  and 4 for each statistic more. Each pair of blocks has two parts (17 MB at the shape above; in the
  L2). XLA combines the parts.
- A tile has 192 accumulators a lane, of 232 registers. So the statistics go through it by pieces of
  64 columns, and only the values of one piece are in registers.
- The statistics cost 1536 clocks of exp2 (`running_statistics.py`) against the 49152 of the tile's
  multiplications.
- Comparing columns with the label would double this cost. So the kernel compares only in those
  halves of tiles (64 rows) whose columns include a label of their rows. They are one half in eleven
  at the shape above. XLA makes a table of them before the kernel.
- The column of the largest logit takes a comparison, a selection and a minimum an element in every
  tile. It is tracked only on request.

TMA fills in zeros for rows past T and V. Results of tokens past T are dropped.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.hopper_gemm import (
    BLOCK_M,
    TILE_M,
    WARPGROUPS,
    MainLoop,
    store_piece,
    wait_for_pieces,
)
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.gpu.math import LOG2_E
from pallas_kernels.gpu.wgmma import COLUMN, ROW, over, splat
from pallas_kernels.loss.low_rank import TwoParts
from pallas_kernels.loss.mosaic_gpu.linear_launch import PaddedEmbedding
from pallas_kernels.loss.mosaic_gpu.running_statistics import (
    LEAST_EXPONENT,
    Running,
    with_piece,
)
from pallas_kernels.loss.mosaic_gpu.stored_layouts import PIECE, Stored

_PIECES = (WARPGROUPS, 2, TILE_M, PIECE)  # one of two is filled while the other is stored


class Storing(NamedTuple):
    """How the kernel stores exponentials of the logits.

    The stored value of a logit z is `2^u · (scale + slope · u)` with `u = z · log2(e) - offset`. If
    there are a scale and a softcap, it is also multiplied by the derivative of the softcap. It is
    computed in float32 and rounded once to the dtype of `x`.

    Attributes:
      offset: Offset of each token's exponents.
      scale: First factor of each token; None for 1. Where both factors are 0, so is the value,
        whatever the logits are.
      slope: Second factor of each token; None for 0. Needs a scale.
      layout: Layout of the values; None for `[T, V]`.
      values: Values of an earlier call, which this one overwrites; None for an array of its own.
      is_needed: Whether to write over `values`. If not, the kernel ends at once, and its statistics
        are undefined. None without `values`.
    """

    offset: Float[Array, " T"]
    scale: Float[Array, " T"] | None = None
    slope: Float[Array, " T"] | None = None
    layout: Stored | None = None
    values: Float[Array, "rows columns"] | None = None
    is_needed: Bool[Array, ""] | None = None


def bytes_to_store(dtype: jnp.dtype) -> int:
    """Bytes of shared memory through which the kernel stores values of this dtype."""
    return dtype.itemsize * math.prod(_PIECES)


def run(
    loop: MainLoop,
    x: Float[Array, "some_T padded_D"],
    weight: PaddedEmbedding,
    labels: Int[Array, " T"],
    *,
    start: Running,
    num_columns: int,
    bias: Float[Array, " _"] | None,
    softcap: float | None,
    temperature: float,
    storing: Storing | None,
) -> tuple[Float[Array, "statistics parts T"], Any]:
    """`(running, values)`: statistics of each part's tiles, and what was stored of the logits.

    The statistics are float32, in the order of `Running`, without those that are not kept. A part
    that has no tile of a row keeps the start. The values are for the rows of the padded `x`; None
    if nothing is stored.

    Args:
      loop: Main loop, from `linear_launch.main_loop`.
      x: Hidden states, as `main_loop` pads them.
      weight: Entries of the output embedding, as `main_loop` pads them.
      labels: Column of each token; another number is no column.
      start: Running statistics before the first column. It says which ones the kernel keeps.
      num_columns: Number of columns without padding.
      bias: Bias of the logits without padding, added in float32.
      softcap: Bound c of `c · tanh(z / c)`, applied before the temperature.
      temperature: Divisor of the logits.
      storing: Exponentials to store; None for statistics alone.
    """
    arguments = _arguments(loop, x, weight, labels, bias, storing)
    num_labels = arguments["labels"].size
    parts = loop.num_clusters * WARPGROUPS
    num_statistics = len(jax.tree.leaves(start))
    running = jax.ShapeDtypeStruct((num_statistics, parts, num_labels), jnp.float32)
    out_type = {"running": running}
    padded_columns = arguments["weight"].shape[loop.b_layout.index("N")]
    layout = None if storing is None else storing.layout
    name = "linear_statistics" if storing is None else "linear_exponentials"
    in_place = None
    if storing is not None and storing.values is None:
        shape = (len(x), padded_columns) if layout is None else layout.shape(padded_columns)
        out_type["values"] = jax.ShapeDtypeStruct(shape, x.dtype)
    elif storing is not None:
        name += "_again"
        in_place = [*arguments].index("values")

    def kernel(*refs):
        names = [*arguments, *out_type]
        scratch = list(refs[len(names) :])
        body = _Body(
            loop=loop,
            refs=dict(zip(names, refs, strict=False)),
            pieces_smem=None if storing is None else scratch.pop(0),
            start=start,
            num_columns=num_columns,
            padded_columns=padded_columns,
            softcap=softcap,
            temperature=temperature,
            layout=layout,
            dtype=x.dtype,
        )
        body.run(scratch)

    running, *written = gpu_kernel(
        kernel,
        out_type=list(out_type.values()),
        **loop.launch,
        scratch_types=[
            *([] if storing is None else [plgpu.SMEM(_PIECES, x.dtype)]),
            *loop.scratch_types,
        ],
        kernel_name=name,
        # With approx_math exp2 is one instruction, without it four, for results below 1e-38. No
        # automatic barriers: `store_piece` synchronizes, and each lane loads the running statistics
        # that it stored itself.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        in_place=in_place,
    )(*arguments.values())
    return running[..., : loop.num_rows], None if storing is None else written[0]


def _arguments(
    loop: MainLoop,
    x: jax.Array,
    weight: PaddedEmbedding,
    labels: jax.Array,
    bias: jax.Array | None,
    storing: Storing | None,
) -> dict[str, jax.Array]:
    """The arrays that the kernel reads, in its order; of each token up to whole blocks of rows."""
    padding = (0, loop.groups * loop.config.cluster * BLOCK_M - loop.num_rows)
    tile_n = loop.config.tile_n
    if bias is not None:
        bias = jnp.pad(bias.astype(jnp.float32), (0, loop.column_tiles * tile_n - len(bias)))
    parts = (weight.frozen, weight.low_rank) if isinstance(weight, TwoParts) else (weight,)
    labels = jnp.pad(labels, padding)
    arguments = {
        "x": x,
        "weight": parts[0],
        "labels": labels,
        "has_label": _has_label(labels, tile_n, loop.column_tiles),
    }
    if len(parts) > 1:
        arguments["low_rank"] = parts[1]
    if bias is not None:
        arguments["bias"] = bias
    if storing is not None:
        of_tokens = {"offset": storing.offset, "scale": storing.scale, "slope": storing.slope}
        for name, a in of_tokens.items():
            if a is not None:
                arguments[name] = jnp.pad(a, padding)
    if storing is None or storing.values is None:
        # One by one, because `jax.tree.map` sorts the keys of a dictionary. `train/planner` takes
        # `x` and `weight` for the first operands.
        return {name: at_aligned_addresses(a) for name, a in arguments.items()}
    assert storing.is_needed is not None
    arguments["is_needed"] = storing.is_needed.astype(jnp.int32)[None]
    values = storing.values
    if storing.layout is None:
        values = jnp.pad(values, ((0, len(x) - loop.num_rows), (0, 0)))
    # `loss_of_logits` in logits.py gives the reason for the barrier.
    arguments, values = jax.lax.optimization_barrier((arguments, values))
    return arguments | {"values": values}


def _has_label(
    labels: Int[Array, " padded_T"], tile_n: int, column_tiles: int
) -> Int[Array, "halves column_tiles"]:
    """Whether the columns of a tile include a label of 64 rows, as 0 or 1; int32."""
    label_tile = jnp.where(labels < 0, -1, labels // tile_n).reshape(-1, TILE_M)
    tiles = jnp.arange(column_tiles, dtype=label_tile.dtype)
    return jnp.any(label_tile[..., None] == tiles[None, None], axis=1).astype(jnp.int32)


class _Rows(NamedTuple):
    """Numbers of 64 rows; None for those that the kernel does not read.

    Attributes:
      first: Number of the first row.
      label: Label of each row.
      offset: Offset of each row's exponents.
      scale: Factor of each row's exponentials.
      slope: Factor of each exponent, which is added to the scale.
    """

    first: Any
    label: Any
    offset: Any
    scale: Any
    slope: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Body:
    """The body of the kernel. A warpgroup computes tiles of 128 rows, in halves of 64 rows.

    Attributes:
      loop: Main loop.
      refs: References to arguments and results in device memory, by name.
      pieces_smem: Shared memory of `_PIECES` to store through; None if nothing is stored.
      start: Running statistics before the first column.
      num_columns: Number of columns without padding.
      padded_columns: Number of columns of `weight`, with padding.
      softcap: Bound of the logits.
      temperature: Divisor of the logits.
      layout: Layout of the stored values; None for `[T, V]`.
      dtype: Dtype of the stored values.
    """

    loop: MainLoop
    refs: dict[str, Any]
    pieces_smem: Any
    start: Running
    num_columns: int
    padded_columns: int
    softcap: float | None
    temperature: float
    layout: Stored | None
    dtype: Any

    @property
    def _stores(self) -> bool:
        return self.pieces_smem is not None

    def run(self, scratch: list[Any]) -> None:
        """Runs all tiles of a block."""
        weights = [self.refs[name] for name in ("weight", "low_rank") if name in self.refs]
        is_needed = self.refs["is_needed"][0] != 0 if "is_needed" in self.refs else None
        self.loop.run(
            [self.refs["x"]],
            [weights],
            scratch,
            tile=self._add_tile,
            start=self._store_start,
            end=wait_for_pieces if self._stores else None,
            is_needed=is_needed,
        )

    def _running_at(self, statistic: int, row: Any) -> Any:
        """Where the warpgroup keeps a statistic of 64 rows."""
        part = jax.lax.axis_index("group") * WARPGROUPS + jax.lax.axis_index("warpgroup")
        return self.refs["running"].at[statistic, part, pl.ds(row, TILE_M)]

    def _store_start(self) -> None:
        """Writes the start of the statistics for all rows of the block."""

        def start_group(group, _):
            block = group * self.loop.config.cluster + jax.lax.axis_index("member")
            first = block * BLOCK_M
            for row in range(0, BLOCK_M, TILE_M):
                for i, value in enumerate(jax.tree.leaves(self.start)):
                    store(self._running_at(i, first + row), splat(value, (TILE_M,), ROW))

        jax.lax.fori_loop(0, self.loop.groups, start_group, None)

    def _add_tile(self, row: Any, column: Any, multiply: Any) -> None:
        """Adds a tile to the statistics of its rows, and stores its exponentials."""
        for half, logits in enumerate(multiply()):
            self._add_half(row + half * TILE_M, column, logits)

    def _add_half(self, row: Any, column: Any, accumulators: Any) -> None:
        # The label's exponential is not loaded: it is computed anew from the running logit of
        # the label.
        leaves, kept = jax.tree.flatten(self.start._replace(of_label=None))
        loaded = [load(self._running_at(i, row), ROW) for i in range(len(leaves))]
        running: Running = jax.tree.unflatten(kept, loaded)
        of_rows = lambda name: load(self.refs[name].at[pl.ds(row, TILE_M)], ROW)
        names = "labels", "offset", "scale", "slope"
        rows = _Rows(row, *(of_rows(name) if name in self.refs else None for name in names))
        half, tile = jax.lax.div(row, TILE_M), jax.lax.div(column, self.loop.config.tile_n)
        label_here = self.refs["has_label"][half, tile]
        # If the last tile is full, no piece has columns after the vocabulary.
        all_full = self.loop.column_tiles * self.loop.config.tile_n == self.num_columns
        for i in range(self.loop.config.tile_n // PIECE):
            first = column + i * PIECE
            running = with_piece(
                running,
                self._logits(accumulators[:, i * PIECE : (i + 1) * PIECE], first),
                rows.label - first,
                label_here != 0,
                first_column=first,
                num_columns=None if all_full else self.num_columns - first,
                offset=rows.offset,
                use_exp=functools.partial(self._store, rows, i, first) if self._stores else None,
            )
        if self._stores:
            # In a part without the label the logit is -1e30, whose exponential is 0.
            of_label = jnp.exp2(running.label_logit * LOG2_E - rows.offset)
            running = running._replace(of_label=of_label)
        for i, value in enumerate(jax.tree.leaves(running)):
            store(self._running_at(i, row), value)

    def _logits(self, piece: Any, first_column: Any) -> jax.Array:
        """The logits of a piece, from its accumulators: with bias, softcap and temperature."""
        if "bias" in self.refs:
            bias = load(self.refs["bias"].at[pl.ds(first_column, PIECE)], COLUMN)
            piece += over(bias, piece, axis=1)
        if self.softcap is not None:
            piece = self.softcap * _tanh(piece * (1 / self.softcap))
        if self.temperature != 1:
            piece *= 1 / self.temperature
        return piece

    def _store(self, rows: _Rows, i: int, first: Any, exp: Any, exponent: Any, logits: Any) -> None:
        """Stores the values of piece `i`, which begins in column `first`."""
        if rows.scale is not None:
            exp = self._scaled(rows, exp, exponent, logits)
        store_values = functools.partial(self._store_values, rows.first, i, first)
        value = exp.astype(self.dtype)
        is_inside = None
        if self.padded_columns % self.loop.config.tile_n:
            is_inside = first < self.padded_columns
        if self.layout is not None and self.loop.num_rows % (self.loop.config.cluster * BLOCK_M):
            is_token = rows.first < self.loop.num_rows
            is_inside = is_token if is_inside is None else is_inside & is_token
        if is_inside is None:
            store_values(value)
        else:
            pl.when(is_inside)(lambda: store_values(value))

    def _scaled(self, rows: _Rows, exp: Any, exponent: Any, logits: Any) -> jax.Array:
        """The exponentials times the factors of their rows and the slope of the softcap."""
        factor, counts = over(rows.scale, logits), rows.scale
        if rows.slope is not None:
            factor += over(rows.slope, logits) * jnp.maximum(exponent, LEAST_EXPONENT)
            counts = jnp.where(rows.scale != 0, rows.scale, rows.slope)
        exp *= factor
        if self.softcap is not None:
            # Columns after the vocabulary are -inf, and their exponential is 0.
            bounded = logits * (self.temperature / self.softcap)
            exp *= 1 - jnp.minimum(jnp.square(bounded), 1.0)
        return jnp.where(over(counts != 0, logits), exp, splat(0.0, exp.shape))

    def _store_values(self, row: Any, i: int, column: Any, values: Any) -> None:
        """Stores `[64, 64]` values, of these first row and column, where the layout says."""
        slots = self.pieces_smem.at[jax.lax.axis_index("warpgroup")]
        is_transposed = False
        if self.layout is not None:
            row, column = self.layout.place(row, column, self.padded_columns)
            # A piece has as many columns as rows.
            row, column = pl.multiple_of(row, TILE_M), pl.multiple_of(column, TILE_M)
            is_transposed = self.layout.is_transposed
        to = self.refs["values"].at[pl.ds(row, TILE_M), pl.ds(column, PIECE)]
        store_piece(i, values, slots, to, transposed=is_transposed)


def _tanh(x: Any) -> Any:
    """tanh to 1e-7. It has a division, because `gpu.math.tanh` spills 24 bytes more here."""
    return 1 - 2 / (jnp.exp2(x * (2 * LOG2_E)) + 1)
