"""Statistics of `x @ weight.T` over the vocabulary, without the logits in memory; for Hopper.

The loss of a token and its gradient need only a few numbers from each row of the `[T, V]` logits:
the logsumexp, the label's logit, and maxima for the accuracy. Here the logits exist only as wgmma
accumulators.

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
- The statistics take four instructions an element: a maximum, one fma that scales by log2(e) and
  subtracts the maximum, exp2, and an addition. exp2 is the slow one, with 16 a clock and
  multiprocessor: 1536 clocks against the 49152 of the tile's multiplications.
- Comparing columns with the label would double this cost. So the kernel compares only in those
  halves of tiles (64 rows) whose columns include a label of their rows. They are one half in eleven
  at the shape above. XLA makes a table of them before the kernel.
- The column of the largest logit takes a comparison, a selection and a minimum an element in every
  tile. It is tracked only on request. The tiles of a row come in rising or falling order of
  columns. So the kernel compares the columns of equal logits, and keeps the lower one.

`linear_exponentials` is the same GEMM for a loss with gradients. Through shared memory it stores
the exponentials of the logits relative to an offset of each row, times a factor of the row. It
keeps the same statistics, which cost nothing more.

TMA fills in zeros for rows past T and V. Results of tokens past T are dropped. Logits of columns
past V become -inf before any statistic. Running maxima start at -1e30 and not at -inf, because -inf
minus itself is NaN. So logits of -inf count as nothing, and -inf is put back at the end. The kernel
takes every logit to be -inf or above -1e30.

Above 450 lines, because `linear_statistics` and `linear_exponentials` share the kernel.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import Device, target_device
from pallas_kernels.gpu.hopper_gemm import (
    BLOCK_M,
    TILE_M,
    WARPGROUPS,
    Config,
    MainLoop,
    Operand,
    store_piece,
    wait_for_pieces,
    whole_tiles,
)
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, store
from pallas_kernels.gpu.math import LN_2, LOG2_E
from pallas_kernels.loss.layout import Embedding, WeightLayout, sizes
from pallas_kernels.loss.low_rank import TwoParts
from pallas_kernels.loss.token_loss import LogitStatistics

_PIECE = 64  # columns of a tile that go through shared memory at a time: 128 bytes of a row
_PIECES = (WARPGROUPS, 2, TILE_M, _PIECE)  # one of two is filled while the other is stored
_LOWEST = -1e30
_LEAST = -1e4  # finite exponent whose power of 2 is 0, as that of -inf

_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of a tile
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def default_config(num_tokens: int, vocab_size: int, hidden_size: int, device: Device) -> Config:
    """Launch parameters to use: the widest tiles that a warpgroup has registers for."""
    tile_n, stages = (192, 4) if vocab_size > 128 else (128, 6)
    return hopper_gemm.default_config(
        num_tokens, vocab_size, hidden_size, device, tile_n=tile_n, stages=stages
    )


def unsupported_reason(
    x: Operand, weight: Operand | TwoParts, weight_layout: WeightLayout = "vd"
) -> str | None:
    """Why the kernel cannot run these arguments on the default device, or None if it can."""
    operand = jax.ShapeDtypeStruct(weight.shape, weight.dtype)
    reason = hopper_gemm.unsupported_reason(target_device(), x, operand)
    vocab_size, hidden_size = sizes(weight, weight_layout)
    if reason is None and weight_layout == "dv" and (vocab_size % _PIECE or hidden_size % 8):
        reason = f"weight [D, V] of shape {weight.shape} has not whole tiles of 8 rows by {_PIECE}"
    return reason


def linear_statistics(
    x: Float[Array, "T D"],
    weight: Embedding,
    bias: Float[Array, " _"] | None,
    labels: Int[Array, " T"],
    *,
    softcap: float | None,
    num_columns: int | None = None,
    temperature: float = 1.0,
    with_total: bool = False,
    with_entropy: bool = False,
    with_argmax: bool = False,
    weight_layout: WeightLayout = "vd",
    config: Config | None = None,
) -> tuple[LogitStatistics, Float[Array, " T"] | None, Float[Array, " T"] | None]:
    """`(statistics, entropy, argmax)` of the logits, in float32; None for what is not asked for.

    The logits are `z = (x @ weight.T + bias) / temperature`, with the softcap before the division.

    Let m be the largest logit, `S = Σ e^(z - m)` and `W = Σ e^(z - m) · (z - m)`. Then the entropy
    of the softmax is `log S - W / S` nats. The kernel adds up W beside S. If m grows by d, W
    becomes `e^-d · (W - d · S)`. Where all logits are -inf, the entropy is 0.

    The argmax is the lowest column with the largest logit, and 0 where all logits are -inf. As a
    float32 number it is exact up to 2^24.

    Args:
      x: Hidden states, bfloat16 or float16.
      weight: Entries of the output embedding, in the dtype of `x`, with or without padding.
      bias: Bias of the logits without padding, added in float32.
      labels: Column of each token. A number that is no entry of `weight` is no column.
      softcap: Bound c of `c · tanh(z / c)`, applied before the temperature.
      num_columns: Number of columns without padding; None if `weight` has no padding.
      temperature: Divisor of the logits.
      with_total: Whether to compute the sum of the logits. Otherwise it is 0.
      with_entropy: Whether to compute the entropy.
      with_argmax: Whether to compute the argmax.
      weight_layout: Layout of `weight`.
      config: Launch parameters; chosen if None.

    Raises:
      NotImplementedError: `unsupported_reason` gives a reason.
      ValueError: The configuration does not fit the device.
    """
    if num_columns is None:
        num_columns, _ = sizes(weight, weight_layout)
    loop, x, weight = _loop(x, weight, weight_layout, config, num_columns)
    running, _ = _running_statistics(
        loop,
        x,
        weight,
        labels,
        num_columns=num_columns,
        bias=_padded_bias(loop, bias),
        softcap=softcap,
        temperature=temperature,
        with_total=with_total,
        with_weighted=with_entropy,
        with_argmax=with_argmax,
    )
    sum_exp, largest, label_logit, largest_before, *more = running
    # Where every logit is -inf, the maximum is _LOWEST and the sum is 0.
    top = jnp.max(largest, axis=0)
    factor = jnp.exp(largest - top)
    sums = jnp.sum(sum_exp * factor, axis=0)
    lse = top + jnp.log(sums)
    found = LogitStatistics(
        lse=lse,
        label_logit=_lowest_to_inf(jnp.max(label_logit, axis=0)),
        largest=_lowest_to_inf(top),
        largest_before=_lowest_to_inf(jnp.max(largest_before, axis=0)),
        total=jnp.sum(more.pop(0), axis=0) if with_total else jnp.zeros_like(lse),
    )
    entropy = argmax = None
    if with_entropy:
        weighted = more.pop(0) + sum_exp * ((largest - top) * LOG2_E)
        entropy = entropy_of(sums, jnp.sum(weighted * factor, axis=0))
    if with_argmax:
        argmax = lowest_of_largest(largest, more.pop(0))
    return found, entropy, argmax


def lowest_of_largest(
    largest: Float[Array, "parts *T"], argmax: Float[Array, "parts *T"]
) -> Float[Array, "*T"]:
    """The lowest argmax of the parts of a row that have its largest logit; of all parts for NaN."""
    is_less = largest < jnp.max(largest, axis=0)
    return jnp.min(jnp.where(is_less, jnp.inf, argmax), axis=0)


def entropy_of(sum_exp: Float[Array, " T"], weighted: Float[Array, " T"]) -> Float[Array, " T"]:
    """The entropy of `2^u / Σ 2^u` from `Σ 2^u` and `Σ 2^u · u`; 0 where all `2^u` are 0."""
    entropy = jnp.log(sum_exp) - weighted / sum_exp * LN_2
    # Rounding of large logits may leave -1e-6 where one of them has all of the probability.
    return jnp.where(sum_exp == 0, 0.0, jnp.maximum(entropy, 0.0))


def _padded_bias(loop: MainLoop, bias: Any) -> Any:
    """The bias in float32 with zeros up to whole tiles; None if there is none."""
    if bias is None:
        return None
    columns = loop.column_tiles * loop.config.tile_n
    return jnp.pad(bias.astype(jnp.float32), (0, columns - len(bias)))


class Exponentials(NamedTuple):
    """Exponentials and statistics of the logits of each token, relative to the token's offset.

    Attributes:
      values: Exponentials `2^(logit · log2(e) - offset)`, times the scale if there is one, in the
        dtype of `x`; 0 in the padding of the columns. `[T, V]`, or as `Stored` says.
      total: Sum of the exponentials before scale and rounding.
      of_label: Exponential of the label before scale and rounding; 0 if the label is no column.
      label_logit: Logit of the label, as in `LogitStatistics`.
      largest: Largest logit, as in `LogitStatistics`.
      largest_before: Largest logit before the label's column, as in `LogitStatistics`.
      weighted: Sum of the exponentials times their exponents, before scale and rounding; None if it
        was not asked for.
    """

    values: Float[Array, "rows columns"]
    total: Float[Array, " T"]
    of_label: Float[Array, " T"]
    label_logit: Float[Array, " T"]
    largest: Float[Array, " T"]
    largest_before: Float[Array, " T"]
    weighted: Float[Array, " T"] | None


class Transposed(NamedTuple):
    """Layout of exponentials with a row for each column of the vocabulary.

    Attributes:
      width: Width of the rows, a multiple of 64. A row begins with the tokens. Padding follows up
        to the next multiple of 64: the kernel makes its values from zeros for `x` and scale. The
        rest of the row is not written.
      shift: Number of rows by which each column lies above the row of its number, a multiple of 64.
        The first columns lie at the end.
    """

    width: int
    shift: int

    is_transposed = True

    def shape(self, num_columns: int) -> tuple[int, int]:
        """Shape of the array."""
        return num_columns, self.width

    def place(self, token: Any, column: Any, num_rows: int) -> tuple[Any, Any]:
        """Row and column in the array."""
        row = jnp.where(column < self.shift, column + num_rows, column) - self.shift
        return row, token


class Interleaved(NamedTuple):
    """Layout of exponentials in the memory of `[height, V]`, where each tile of columns stays.

    The bytes of `tile` columns of `[height, V]` hold exponentials in the same columns: for
    `2 · height` tokens if the array is float32. A row of the array holds, for each tile of columns
    in turn, the exponentials of each of its tokens.

    Attributes:
      height: Number of rows, a multiple of 128. Row r holds the tokens r, r + height and so on. Up
        to the next multiple of 64 tokens follow values that the kernel makes of zeros for `x` and
        scale. Rows after them are not written.
      tokens_of_row: Number of tokens that a row holds.
      tile: Number of columns of a tile, a multiple of 64 that divides V.
    """

    height: int
    tokens_of_row: int
    tile: int

    is_transposed = False

    def shape(self, num_columns: int) -> tuple[int, int]:
        """Shape of the array."""
        return self.height, self.tokens_of_row * num_columns

    def place(self, token: Any, column: Any, num_rows: int | None = None) -> tuple[Any, Any]:
        """Row and column in the array."""
        del num_rows
        turn, row = _divided(token, self.height)
        tile, inside = _divided(column, self.tile)
        return row, (tile * self.tokens_of_row + turn) * self.tile + inside

    def aligned(self, token: Any, column: Any) -> tuple[Any, Any]:
        """The result of `place` for multiples of 64, in a kernel."""
        row, place = self.place(token, column)
        return pl.multiple_of(row, TILE_M), pl.multiple_of(place, _PIECE)


def _divided(a: Any, divisor: int) -> tuple[Any, Any]:
    """Quotient and remainder in the dtype of `a`, also where a Python number would have 64 bits."""
    number = np.asarray(divisor, a.dtype)[()]
    return jax.lax.div(a, number), jax.lax.rem(a, number)


type Stored = Transposed | Interleaved


class Repetition(NamedTuple):
    """Second call of `linear_exponentials` for the same operands.

    Attributes:
      found: Result of the first call; the second writes over its `values`.
      is_needed: Whether the second call is needed. If not, its kernel ends at once, and the result
        is `found`.
    """

    found: Exponentials
    is_needed: Bool[Array, ""]


def linear_exponentials(
    x: Float[Array, "T D"],
    weight: Embedding,
    labels: Int[Array, " T"],
    offset: Float[Array, " T"],
    *,
    num_columns: int,
    bias: Float[Array, " _"] | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    scale: Float[Array, " T"] | None = None,
    slope: Float[Array, " T"] | None = None,
    with_weighted: bool = False,
    repetition: Repetition | None = None,
    stored: Stored | None = None,
    weight_layout: WeightLayout = "vd",
    config: Config | None = None,
) -> Exponentials:
    """Exponentials of `x @ weight.T` relative to an offset, and statistics of the logits.

    The GEMM stores exponentials instead of logits, through shared memory, 64 columns at a time.

    Above 80 lines, because it documents many arguments.

    Args:
      x: Hidden states, bfloat16 or float16.
      weight: Entries of the output embedding, in the dtype of `x`; V, a multiple of 128, is
        `num_columns` with padding.
      labels: Column of each token; may be any number.
      offset: Offset of each token's exponents, in units of log 2.
      num_columns: Number of columns without padding.
      bias: Bias of the logits without padding, added in float32.
      softcap: Bound c of `c · tanh(z / c)`. With it `values` are also multiplied by the derivative
        of the bounded logit, `1 - tanh²(z / c)`, if there is a scale.
      temperature: Divisor of the logits after the softcap. Exponents and statistics are of the
        result.
      scale: Factor of each token's `values` before rounding. A factor of 0 makes them 0, whatever
        the logits are.
      slope: Factor of each exponent, in units of log 2, which is added to the scale. Both factors
        must be 0 to make `values` 0, whatever the logits are. Needs a scale.
      with_weighted: Whether to compute `weighted`.
      repetition: Result of a first call, and whether a second is needed; None for a first call.
      stored: Layout of `values`, with padding of the columns; None for `[T, V]`.
      weight_layout: Layout of `weight`.
      config: Launch parameters; chosen if None.

    Raises:
      NotImplementedError: `unsupported_reason` gives a reason.
      ValueError: The configuration does not fit the device.
    """
    extra_bytes = x.dtype.itemsize * math.prod(_PIECES)
    padded_columns, _ = sizes(weight, weight_layout)
    loop, x, weight = _loop(x, weight, weight_layout, config, padded_columns, extra_bytes)
    running, values = _running_statistics(
        loop,
        x,
        weight,
        labels,
        num_columns=num_columns,
        bias=_padded_bias(loop, bias),
        softcap=softcap,
        temperature=temperature,
        with_weighted=with_weighted,
        offset=offset,
        scale=scale,
        slope=slope,
        repetition=repetition,
        stored=stored,
    )
    # One reduction instead of four. The maximum of the weighted sums is not used.
    largest, label_logit, largest_before, *_, of_label = jnp.max(running[1:], axis=1)
    found = Exponentials(
        values=values if stored is not None else values[: loop.num_rows],
        total=jnp.sum(running[0], axis=0),
        of_label=of_label,
        label_logit=_lowest_to_inf(label_logit),
        largest=_lowest_to_inf(largest),
        largest_before=_lowest_to_inf(largest_before),
        weighted=jnp.sum(running[4], axis=0) if with_weighted else None,
    )
    if repetition is None:
        return found
    select = lambda new, old: jnp.where(repetition.is_needed, new, old)
    return Exponentials(found.values, *jax.tree.map(select, found[1:], repetition.found[1:]))


def _loop(
    x,
    weight,
    weight_layout: WeightLayout,
    config: Config | None,
    vocab_size: int,
    extra_bytes: int = 0,
):
    """The main loop for these operands, and the operands padded for it."""
    if (reason := unsupported_reason(x, weight, weight_layout)) is not None:
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    num_tokens, hidden_size = x.shape
    device = target_device()
    if config is None:
        config = default_config(num_tokens, vocab_size, hidden_size, device)
    # If D of a `[D, V]` is no multiple of 64, TMA fills the rows that the last step lacks.
    if isinstance(weight, TwoParts):
        # Each part begins with a step in K.
        x = jnp.concatenate([whole_tiles(part) for part in weight.split(x)], axis=1)
    else:
        x = whole_tiles(x)
    weight = jax.tree.map(whole_tiles, weight) if weight_layout == "vd" else weight
    loop = MainLoop(
        config=config,
        num_rows=num_tokens,
        num_columns=vocab_size,
        depth=x.shape[1],
        dtype=x.dtype,
        b_layout="NK" if weight_layout == "vd" else "KN",
        in_turns=True,
    )
    loop.check_fits(device, extra_bytes=extra_bytes)
    return loop, x, weight


def _lowest_to_inf(a: jax.Array) -> jax.Array:
    return jnp.where(a == _LOWEST, -jnp.inf, a)


# Start of the running statistics: sum of exp, largest, label_logit, largest_before. The others
# follow and start at 0: the sum of the logits, the weighted sum, the argmax, and the label's
# exponential.
_START = (0.0, _LOWEST, _LOWEST, _LOWEST)


def _running_statistics(
    loop: MainLoop,
    x: Float[Array, "some_T padded_D"],
    weight: Float[Array, "some_V some_D"] | Float[Array, "some_D some_V"] | TwoParts,
    labels: Int[Array, " T"],
    *,
    num_columns: int,
    bias: Float[Array, " padded_V"] | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    with_total: bool = False,
    with_weighted: bool = False,
    with_argmax: bool = False,
    offset: Float[Array, " T"] | None = None,
    scale: Float[Array, " T"] | None = None,
    slope: Float[Array, " T"] | None = None,
    repetition: Repetition | None = None,
    stored: Stored | None = None,
) -> tuple[Float[Array, "statistics parts T"], Any]:
    """`(running, exponentials)`: statistics of each part's tiles, in the order of `_START`.

    Without an offset the second result is None. With an offset it is the array of the exponentials
    relative to the offset, for the rows of `x`. The first statistic is then their sum, and the last
    one the label's exponential.

    Above 80 lines, because the kernel's body needs the static choices that are made before it.
    """
    num_tokens = loop.num_rows
    tile_n, cluster = loop.config.tile_n, loop.config.cluster
    num_pieces = tile_n // _PIECE
    all_full = loop.column_tiles * tile_n == num_columns
    parts = (weight.frozen, weight.low_rank) if isinstance(weight, TwoParts) else (weight,)
    padded_vocab = parts[0].shape[loop.b_layout.index("N")]
    padding = (0, loop.groups * cluster * BLOCK_M - num_tokens)
    labels = jnp.pad(labels, padding)
    label_tile = jnp.where(labels < 0, -1, labels // tile_n).reshape(-1, TILE_M)
    column_tiles = jnp.arange(loop.column_tiles, dtype=label_tile.dtype)
    has_label = jnp.any(label_tile[..., None] == column_tiles, axis=1)
    stores = offset is not None
    name = "linear_exponentials" if stores else "linear_statistics"
    if repetition is not None:
        name += "_again"
    starts = (*_START, *[0.0] * (with_total + with_weighted + with_argmax + stores))
    arguments = {
        "x": x,
        "weight": parts[0],
        "labels": labels,
        "has_label": has_label.astype(jnp.int32),
    }
    if len(parts) > 1:
        arguments["low_rank"] = parts[1]
    out_type = {
        "running": jax.ShapeDtypeStruct(
            (len(starts), loop.num_clusters * WARPGROUPS, labels.size), jnp.float32
        )
    }
    if bias is not None:
        arguments["bias"] = bias
    if stores:
        arguments["offset"] = jnp.pad(offset, padding)
    if scale is not None:
        arguments["scale"] = jnp.pad(scale, padding)
    if slope is not None:
        arguments["slope"] = jnp.pad(slope, padding)
    values: Any = None
    if stores and repetition is None:
        shape = (len(x), padded_vocab) if stored is None else stored.shape(padded_vocab)
        out_type["values"] = jax.ShapeDtypeStruct(shape, x.dtype)
    if repetition is not None:
        arguments["is_needed"] = repetition.is_needed.astype(jnp.int32)[None]
        values = repetition.found.values
        if stored is None:
            values = jnp.pad(values, ((0, len(x) - num_tokens), (0, 0)))
        # `loss_of_logits` in logits.py gives the reason for the barrier.
        arguments, values = jax.lax.optimization_barrier((arguments, values))
        arguments["values"] = values
    else:
        # One by one, because `jax.tree.map` sorts the keys of a dictionary. `train/planner` takes
        # `x` and `weight` for the first operands.
        arguments = {name: at_aligned_addresses(a) for name, a in arguments.items()}

    def kernel(*refs):
        names = [*arguments, *out_type]
        of: dict[str, Any] = dict(zip(names, refs, strict=False))
        scratch = list(refs[len(names) :])
        running_gmem: Any = of["running"]
        values_gmem: Any = of.get("values")
        pieces_smem: Any = scratch.pop(0) if stores else None

        def running_at(statistic, row):
            part = jax.lax.axis_index("group") * WARPGROUPS + jax.lax.axis_index("warpgroup")
            return running_gmem.at[statistic, part, pl.ds(row, TILE_M)]

        def start():
            def start_group(group, _):
                first = (group * cluster + jax.lax.axis_index("member")) * BLOCK_M
                for row in range(0, BLOCK_M, TILE_M):
                    for i, value in enumerate(starts):
                        store(running_at(i, first + row), _filled(value, (TILE_M,), _ROW))

            jax.lax.fori_loop(0, loop.groups, start_group, None)

        def tile(row, column, multiply):
            for half, logits in enumerate(multiply()):
                add_half(row + half * TILE_M, column, logits)

        def add_half(row, column, logits):
            of_rows = lambda name: load(of[name].at[pl.ds(row, TILE_M)], _ROW)
            # The label's exponential is not loaded: it is computed anew from the running logit of
            # the label.
            num_added = len(starts) - stores
            running = [load(running_at(i, row), _ROW) for i in range(num_added)]
            label = of_rows("labels")
            offset: Any = of_rows("offset") if stores else None
            scale = of_rows("scale") if "scale" in of else None
            slope = of_rows("slope") if "slope" in of else None
            label_here = of["has_label"][jax.lax.div(row, TILE_M), jax.lax.div(column, tile_n)]

            def store_exp(i, first, exp):
                def put():
                    slots = pieces_smem.at[jax.lax.axis_index("warpgroup")]
                    at = row, first
                    if stored is not None:
                        at = stored.place(row, first, padded_vocab)
                        at = pl.multiple_of(at[0], TILE_M), pl.multiple_of(at[1], TILE_M)
                    # A piece has as many columns as rows.
                    to = values_gmem.at[pl.ds(at[0], TILE_M), pl.ds(at[1], _PIECE)]
                    is_transposed = stored is not None and stored.is_transposed
                    store_piece(i, exp, slots, to, transposed=is_transposed)

                is_inside = None
                if padded_vocab % tile_n:
                    is_inside = first < padded_vocab
                if stored is not None and num_tokens % (cluster * BLOCK_M):
                    is_token = row < num_tokens
                    is_inside = is_token if is_inside is None else is_inside & is_token
                if is_inside is None:
                    put()
                else:
                    pl.when(is_inside)(put)

            def scaled(exp, exponent, piece, scale):
                to_piece = lambda a: jax.lax.broadcast_in_dim(a, piece.shape, (0,))
                factor, counts = to_piece(scale), scale
                if slope is not None:
                    factor += to_piece(slope) * jnp.maximum(exponent, _LEAST)
                    counts = jnp.where(scale != 0, scale, slope)
                exp *= factor
                if softcap is not None:
                    # Columns after the vocabulary are -inf, and their exponential is 0.
                    bounded = piece * (temperature / softcap)
                    exp *= 1 - jnp.minimum(jnp.square(bounded), 1.0)
                return jnp.where(to_piece(counts != 0), exp, _filled(0.0, exp.shape, _TILE))

            def scale_and_store(i, first, exp, exponent, piece):
                if scale is not None:
                    exp = scaled(exp, exponent, piece, scale)
                store_exp(i, first, exp.astype(x.dtype))

            for i in range(num_pieces):
                first = column + i * _PIECE
                piece = logits[:, i * _PIECE : (i + 1) * _PIECE]
                if "bias" in of:
                    values = load(of["bias"].at[pl.ds(first, _PIECE)], _COLUMN)
                    piece += jax.lax.broadcast_in_dim(values, piece.shape, (1,))
                if softcap is not None:
                    piece = softcap * _tanh(piece * (1 / softcap))
                if temperature != 1:
                    piece *= 1 / temperature
                running = _with_piece(
                    running,
                    piece,
                    label - first,
                    label_here != 0,
                    # Columns of the vocabulary from this piece on; None if all tiles are full.
                    None if all_full else num_columns - first,
                    with_total=with_total,
                    with_weighted=with_weighted,
                    first_column=first if with_argmax else None,
                    offset=offset,
                    use_exp=functools.partial(scale_and_store, i, first) if stores else None,
                )
            if stores:
                # In a part without the label the logit is -1e30, whose exponential is 0.
                label_logit = running[2]
                running.append(jnp.exp2(label_logit * LOG2_E - offset))
            for i, value in enumerate(running):
                store(running_at(i, row), value)

        weights = [of[name] for name in ("weight", "low_rank") if name in of]
        loop.run(
            [of["x"]],
            [weights],
            scratch,
            tile=tile,
            start=start,
            end=wait_for_pieces if stores else None,
            is_needed=of["is_needed"][0] != 0 if "is_needed" in of else None,
        )

    running, *written = gpu_kernel(
        kernel,
        out_type=list(out_type.values()),
        **loop.launch,
        scratch_types=[
            *([plgpu.SMEM(_PIECES, x.dtype)] if stores else []),
            *loop.scratch_types,
        ],
        kernel_name=name,
        # With approx_math exp2 is one instruction, without it four, for results below 1e-38. No
        # automatic barriers: `store_piece` synchronizes, and each lane loads the running statistics
        # that it stored itself.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        in_place=None if repetition is None else [*arguments].index("values"),
    )(*arguments.values())
    return running[..., :num_tokens], written[0] if stores else None


def _with_piece(
    running,
    logits,
    label,
    label_here,
    num_columns,
    *,
    with_total,
    with_weighted,
    first_column=None,
    offset=None,
    use_exp=None,
):
    """The running statistics after one more piece of a tile.

    Args:
      running: Statistics before the piece, in the order of `_START`.
      logits: Logits of the piece.
      label: Label of each row, counted from the piece's first column.
      label_here: Whether a label may be one of the piece's columns.
      num_columns: Number of columns of the vocabulary from the piece's first column on; None if
        they fill the piece.
      with_total: Whether the statistics have the sum of the logits.
      with_weighted: Whether they have the weighted sum.
      first_column: First column of the piece, if the statistics have the argmax.
      offset: Offset of the exponents; None keeps the sums relative to the maximum.
      use_exp: Function that takes the exponentials, exponents and logits of the piece.
    """
    to_piece = lambda row: jax.lax.broadcast_in_dim(row, logits.shape, (0,))
    columns = lambda: plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=_TILE)
    lowest = lambda: _filled(_LOWEST, logits.shape, _TILE)

    def without(logits, fill):
        """The logits, with `fill` in columns after the vocabulary."""
        if num_columns is None:
            return logits
        return jax.lax.cond(
            num_columns < _PIECE,
            lambda: jnp.where(columns() < num_columns, logits, _filled(fill, logits.shape, _TILE)),
            lambda: logits,
        )

    sum_exp, largest, label_logit, largest_before, *more = running
    total = [more.pop(0) + jnp.sum(without(logits, 0.0), axis=1)] if with_total else []
    weighted = more.pop(0) if with_weighted else None
    logits = without(logits, -jnp.inf)
    piece_largest = jnp.max(logits, axis=1)
    argmax = []
    if first_column is not None:
        is_largest = logits == to_piece(piece_largest)
        none = plgpu.layout_cast(jnp.full(logits.shape, _PIECE, jnp.int32), _TILE)
        here = first_column + jnp.min(jnp.where(is_largest, columns(), none), axis=1)
        here, before = here.astype(jnp.float32), more.pop(0)
        # A piece of -inf alone is below _LOWEST, and changes nothing.
        lower = jnp.where(piece_largest == largest, jnp.minimum(here, before), before)
        argmax = [jnp.where(piece_largest > largest, here, lower)]

    def with_label():
        at_label = jnp.where(columns() == to_piece(label), logits, lowest())
        before = jnp.where(columns() < to_piece(label), logits, lowest())
        return jnp.max(at_label, axis=1), jnp.max(before, axis=1)

    def without_label():
        none = _filled(_LOWEST, label.shape, _ROW)
        return none, jnp.where(label >= _PIECE, piece_largest, none)

    at_label, before = jax.lax.cond(label_here, with_label, without_label)
    new_largest = jnp.maximum(largest, piece_largest)
    if offset is None:
        # Subtracts before it multiplies: for -1e30, an fma as below would leave the rounding error
        # of the product.
        change = (largest - new_largest) * LOG2_E
        if weighted is not None:
            weighted = (weighted + sum_exp * change) * jnp.exp2(change)
        sum_exp *= jnp.exp2(change)
        offset = new_largest * LOG2_E
    exponent = logits * LOG2_E - to_piece(offset)
    exp = jnp.exp2(exponent)
    sum_exp += jnp.sum(exp, axis=1)
    if weighted is not None:
        # An exponent of -inf adds nothing.
        weighted += jnp.sum(exp * jnp.maximum(exponent, _LEAST), axis=1)
    if use_exp is not None:
        use_exp(exp, exponent, logits)
    return [
        sum_exp,
        new_largest,
        jnp.maximum(label_logit, at_label),
        jnp.maximum(largest_before, before),
        *total,
        *([] if weighted is None else [weighted]),
        *argmax,
    ]


def _tanh(x):
    """tanh to 1e-7. It has a division, because `gpu.math.tanh` spills 24 bytes more here."""
    return 1 - 2 / (jnp.exp2(x * (2 * LOG2_E)) + 1)


def _filled(value: float, shape: tuple[int, ...], layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
