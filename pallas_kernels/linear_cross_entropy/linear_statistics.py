"""Statistics of `x @ weight.T` over the vocabulary, without the logits in memory; for Hopper.

The loss of a token and its gradient need of the `[T, V]` logits a few numbers a row: the logsumexp,
the label's logit, and maxima for the accuracy. Here the logits exist as wgmma accumulators only.

What it moves, at T=8192, D=4096, V=128256 in bfloat16: `2·T·D·V` = 8.6 Tflop, which take 10.9 ms at
the 791 TF/s that cuBLAS reaches on an H100. `weight` is 1.05 GB and `x` 67 MB, 0.37 ms of device
memory if each is read once; the logits that are not written and read back would be 2.1 GB, twice.
So it is a GEMM, bound by the tensor cores, and all that is not a wgmma has to hide behind one.

The loop is that of `pallas_kernels/hopper_gemm.py`. Here 66 pairs of blocks of an H100 work on 8
row groups of 256 (17 MB of `x`, which stay in the L2) and 8 tiles of `weight` (17 MB), which go by
once a band: 4 bands read `weight` 4 times, 1.3 ms of memory time under 11 ms of arithmetic. There
are 242.9 tiles a pair, and no pair has more than 243.

- A block comes back to a row with other columns in between. Each cluster keeps the running
  statistics of every row in a row of its own of a float32 array, 16 or 20 bytes a token a cluster
  (8.7 MB at the shape above; in the L2), loaded before the steps of a tile and stored after. XLA
  combines the clusters.
- Taking statistics is four instructions an element: maximum, one fma that scales by log2(e) and
  subtracts the maximum, exp2, add. exp2 is the slow one, 16 a clock and multiprocessor: 2048 clocks
  against the 65536 of the tile's multiplications. Comparing columns with the label would double it,
  so that happens only in tiles with a label of one of the warpgroup's 64 rows, which a table says:
  one in eight at the shape above.

TMA fills in zeros for rows past T and V; no result is kept of the former, and logits of the latter
are lowered to -inf before anything is taken from them. Running maxima start at -1e30, not at -inf,
whose difference with itself is NaN, so logits of -inf count as nothing; -inf is put back at the
end. Logits are therefore taken to be -inf or above -1e30.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import hopper_gemm
from pallas_kernels.hopper_gemm import BLOCK_M, TILE_M, Config, MainLoop, whole_tiles
from pallas_kernels.linear_cross_entropy.token_loss import LogitStatistics
from pallas_kernels.mosaic_gpu import Device, load, store, target_device

_LOWEST = -1e30
_LOG2_E = math.log2(math.e)

_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of a tile
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


def default_config(num_tokens: int, vocab_size: int, hidden_size: int, device: Device) -> Config:
    """The launch parameters to use: derived, not measured."""
    tile_n, stages = (256, 4) if vocab_size > 128 else (128, 6)
    return hopper_gemm.default_config(
        num_tokens, vocab_size, hidden_size, device, tile_n=tile_n, stages=stages
    )


def unsupported_reason(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel cannot run these arguments on the default device, or None if it can."""
    return hopper_gemm.unsupported_reason(target_device(), x, weight)


def linear_statistics(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    *,
    softcap: float | None,
    first_column: Int[Array, ""] | int = 0,
    with_total: bool = False,
    config: Config | None = None,
) -> LogitStatistics:
    """Statistics of `z = x @ weight.T + bias`, or of `softcap · tanh(z / softcap)`, in float32.

    Args:
      x: bfloat16 or float16.
      weight: rows of the embedding, of the dtype of `x`.
      bias: added in float32.
      labels: column of each token in the whole vocabulary; may be any number.
      softcap: c of `c · tanh(z / c)`.
      first_column: number in the whole vocabulary of the first row of `weight`.
      with_total: whether the sum of the logits is computed.
      config: launch parameters; chosen if None.

    Raises:
      NotImplementedError: `unsupported_reason` has one.
      ValueError: the configuration does not fit the device.
    """
    if (reason := unsupported_reason(x, weight)) is not None:
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    num_tokens, hidden_size = x.shape
    vocab_size = weight.shape[0]
    device = target_device()
    if config is None:
        config = default_config(num_tokens, vocab_size, hidden_size, device)
    x, weight = whole_tiles(x), whole_tiles(weight)
    loop = MainLoop(
        config=config,
        num_rows=num_tokens,
        num_columns=vocab_size,
        depth=x.shape[1],
        dtype=x.dtype,
    )
    loop.check_fits(device)
    padding = loop.groups * config.cluster * BLOCK_M - num_tokens
    labels = jnp.pad(labels - jnp.asarray(first_column, labels.dtype), (0, padding))
    label_tile = jnp.where(labels < 0, -1, labels // config.tile_n).reshape(-1, TILE_M)
    has_label = jnp.any(label_tile[..., None] == jnp.arange(loop.column_tiles), axis=1)
    if bias is not None:
        bias = bias.astype(jnp.float32)
        bias = jnp.pad(bias, (0, loop.column_tiles * config.tile_n - vocab_size))
    running = _running_statistics(
        loop, x, weight, bias, labels, has_label, softcap=softcap, with_total=with_total
    )
    largest, sum_exp, label_logit, largest_before, *total = running[..., :num_tokens]
    lowest_to_inf = lambda a: jnp.where(a == _LOWEST, -jnp.inf, a)
    # Relative to _LOWEST where every logit is -inf; the sum is 0 then.
    top = jnp.max(largest, axis=0)
    lse = top + jnp.log(jnp.sum(sum_exp * jnp.exp(largest - top), axis=0))
    return LogitStatistics(
        lse=lse,
        label_logit=lowest_to_inf(jnp.max(label_logit, axis=0)),
        largest=lowest_to_inf(top),
        largest_before=lowest_to_inf(jnp.max(largest_before, axis=0)),
        total=jnp.sum(total[0], axis=0) if with_total else jnp.zeros_like(lse),
    )


# Where the running statistics start: largest, sum of exp, label_logit, largest_before, total.
_START = (_LOWEST, 0.0, _LOWEST, _LOWEST, 0.0)


def _running_statistics(
    loop: MainLoop,
    x: Float[Array, "some_T padded_D"],
    weight: Float[Array, "some_V padded_D"],
    bias: Float[Array, " padded_V"] | None,
    labels: Int[Array, " padded_T"],
    has_label: Bool[Array, "row_tiles vocab_tiles"],
    *,
    softcap: float | None,
    with_total: bool,
) -> Float[Array, "statistics clusters padded_T"]:
    """The statistics, in the order of `_START`, of the tiles that each cluster had."""
    padded_tokens = labels.size
    tile_n, cluster, vocab_size = loop.config.tile_n, loop.config.cluster, loop.num_columns
    starts = _START if with_total else _START[:-1]
    has_bias = bias is not None

    def kernel(*refs):
        x_gmem, weight_gmem, labels_gmem, has_label_gmem, *refs = refs
        bias_gmem, *refs = refs if has_bias else (None, *refs)
        running_gmem, *scratch = refs

        def running_at(statistic, row):
            group_of_blocks = jax.lax.axis_index("group")
            return running_gmem.at[statistic, group_of_blocks, pl.ds(row, TILE_M)]

        def start():
            first = jax.lax.axis_index("member") * BLOCK_M
            first += jax.lax.axis_index("warpgroup") * TILE_M

            def start_group(group, _):
                row = group * cluster * BLOCK_M + first
                for i, value in enumerate(starts):
                    store(running_at(i, row), _filled(value, (TILE_M,), _ROW))

            jax.lax.fori_loop(0, loop.groups, start_group, None)

        def tile(row, column, multiply):
            # On their way during the multiplications.
            running = [load(running_at(i, row), _ROW) for i in range(len(starts))]
            label = load(labels_gmem.at[pl.ds(row, TILE_M)], _ROW)
            label_here = has_label_gmem[jax.lax.div(row, TILE_M), jax.lax.div(column, tile_n)]
            (logits,) = multiply()
            if bias_gmem is not None:
                values = load(bias_gmem.at[pl.ds(column, tile_n)], _COLUMN)
                logits += jax.lax.broadcast_in_dim(values, logits.shape, (1,))
            if softcap is not None:
                logits = softcap * _tanh(logits * (1 / softcap))
            # Of the vocabulary in this tile, or more; None if all tiles are full.
            num_columns = vocab_size - column if vocab_size % tile_n else None
            running = _with_tile(running, logits, label - column, label_here != 0, num_columns)
            for i, value in enumerate(running):
                store(running_at(i, row), value)

        loop.run(x_gmem, [weight_gmem], scratch, tile=tile, start=start)

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(starts), loop.num_clusters, padded_tokens), jnp.float32),
        **loop.launch,
        scratch_types=loop.scratch_types,
        kernel_name="linear_statistics",
        # exp2 is then one instruction; else three more serve results below 1e-38.
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, weight, labels, has_label.astype(jnp.int32), *((bias,) if has_bias else ()))


def _with_tile(running, logits, label, label_here, num_columns):
    """The running statistics with those of a tile.

    Args:
      running: as in `_START`.
      logits: of the tile.
      label: of each row, counted from the tile's first column.
      label_here: whether a label may be one of the tile's columns.
      num_columns: how many columns of the vocabulary are left for this tile, None for enough.
    """
    tile_n = logits.shape[1]
    to_tile = lambda row: jax.lax.broadcast_in_dim(row, logits.shape, (0,))
    columns = lambda: plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=_TILE)
    lowest = lambda: _filled(_LOWEST, logits.shape, _TILE)

    def without(logits, fill):
        """The logits with `fill` where the vocabulary is over."""
        if num_columns is None:
            return logits
        return jax.lax.cond(
            num_columns < tile_n,
            lambda: jnp.where(columns() < num_columns, logits, _filled(fill, logits.shape, _TILE)),
            lambda: logits,
        )

    largest, sum_exp, label_logit, largest_before, *total = running
    if total:
        total = [total[0] + jnp.sum(without(logits, 0.0), axis=1)]
    logits = without(logits, -jnp.inf)
    tile_largest = jnp.max(logits, axis=1)

    def with_label():
        at_label = jnp.where(columns() == to_tile(label), logits, lowest())
        before = jnp.where(columns() < to_tile(label), logits, lowest())
        return jnp.max(at_label, axis=1), jnp.max(before, axis=1)

    def without_label():
        none = _filled(_LOWEST, label.shape, _ROW)
        return none, jnp.where(label >= tile_n, tile_largest, none)

    at_label, before = jax.lax.cond(label_here, with_label, without_label)
    new_largest = jnp.maximum(largest, tile_largest)
    # Not as below: of -1e30 the fma would leave the rounding error of the product.
    sum_exp *= jnp.exp2((largest - new_largest) * _LOG2_E)
    offset = to_tile(new_largest * _LOG2_E)
    sum_exp += jnp.sum(jnp.exp2(logits * _LOG2_E - offset), axis=1)
    return [
        new_largest,
        sum_exp,
        jnp.maximum(label_logit, at_label),
        jnp.maximum(largest_before, before),
        *total,
    ]


def _tanh(x):
    """tanh by exp2: an error of 1e-7 of the largest value, a fifth of the instructions."""
    return 1 - 2 / (jnp.exp2(x * (2 * _LOG2_E)) + 1)


def _filled(value: float, shape: tuple[int, ...], layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
