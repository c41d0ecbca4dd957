"""An estimate of the time that the loss with its gradients takes, by plan.

`plan.py` takes the plan with the least estimate. So the estimate has to be right about what differs
between plans:

- *Products.* A product is done in waves of tiles, one tile for each multiprocessor. The last wave
  takes as long as the others, even if it has few tiles. XLA's products may split the depth, which
  is V for `dx`, and so lose little if they have few waves. Our product for `dx` in place may lose
  most of a wave.
- *Passes over `dweight`.* Each chunk of tokens but the first reads and writes all of it.
- *Launches.* Each kernel of a chunk, and each band of `dweight`, has a start and an end.

The rates are for bfloat16 on an H100 with 132 multiprocessors. The tile and the waves of XLA's
products were chosen by measurements on an H200, too. Other devices and dtypes take the plan of an
H100. So a plan depends on sizes and options alone, except for the bands of a plan in place. Those
with the least time on the device at hand are taken (`plan.py`).
"""

import math
from typing import NamedTuple

from pallas_kernels.gpu.device import Device
from pallas_kernels.gpu.hopper_gemm import BLOCK_M
from pallas_kernels.loss.layout import WeightLayout
from pallas_kernels.loss.mosaic_gpu import in_place, products

_H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
_TILE_N = 256  # columns of a tile of our product for `dweight` in place
# Rows and columns of a tile of XLA's products. With tiles of 128 x 256 and the halves below, the
# estimate would choose chunks of 8320 tokens at 32768 x 4096 x 32000. They are 5.7 % slower than
# 8192 (H200). Over all measured plans both sizes have the same error.
_XLA_TILE = 256, 128
# A product of XLA may share out the depth of its tiles. So its waves are rounded up to eighths, and
# not to whole waves. With a depth of 128256 cuBLAS reaches 791 TFLOP/s at 512 x 4096, which has 64
# tiles, and 834 at 2048 x 2048, which has 128. It reaches 728 at 1664 x 3584, which has 196.
_PARTS_OF_DEPTH = 8
# From two waves on, a product shares out less of its depth, and its waves are rounded up to halves.
# At 16384 x 2560 x 100352, `dx` has 2.6 waves with chunks of 4352 tokens, and 2.4 with 4096. With
# eighths the estimate would prefer 4352. Chunks of 4352 were 3.5 and 2.0 % slower on two H200s
# (docs/lab/2026-11-27-waves-of-the-loss.md).
_MANY_WAVES, _PARTS_OF_MANY_WAVES = 2, 2
# A plan with several chunks that are no multiple of 512 tokens counts as 0.5 % slower. At 32 shapes
# with two limits this changes three choices. The new ones are 1 to 8 % faster in all measurements
# (docs/lab/2026-11-28-loss-beside-peers.md). The cause is not known.
_EVEN_CHUNK, _COST_OF_OTHER_CHUNKS = 512, 0.005
# Bytes that a pass moves in the time of a copied exponential. The copy reads 2 bytes and writes 2,
# at 3.35 TB/s and not at the rate of passes. At 8192 x 4096 x 128256 that makes 1.3 ms, and
# measurements differ by 1.0 ms.
_BYTES_OF_COPY = 3
# XLA's `dx` of a chunk is float32, and another pass multiplies it with factors and rounds it. Our
# product in place does both before it stores.
_BYTES_OF_DX = 8


class Rates(NamedTuple):
    """The measured numbers of the estimate.

    `python -m benchmarks.kernels.loss_plans --fit FILES` fits them to measured times.

    Attributes:
      flops: Rate of products with full waves, flop/s.
      bandwidth: Rate of passes over memory, bytes/s.
      exposed: Share of the shorter one of a product and the pass over its result that the longer
        one does not hide.
      launch: Time that a kernel's start and end add, seconds.
    """

    flops: float
    bandwidth: float
    exposed: float
    launch: float


# Fitted by hand to 37 ratios over three bare GEMMs in benchmarks/results and docs/lab, with errors
# of 3.1 % (docs/lab/2026-11-25-loss-cost-model.md). Errors of 70 measurements on an H100 are 3.9 %,
# of 174 on an H200 4.6 %. Ratios of one program differ by up to 5 % from run to run. Profiles of an
# H100 agree with the rates:
# - Bare products take 31.8 ms at 8192 x 4096 x 128256, which is 812 TFLOP/s.
# - Sums over chunks of 512 tokens at 4096 x 128256 take 2.05 ms: 4.2 GB, and products of 0.69 ms.
# - Sums over chunks of 1024 tokens at 2304 x 256000 take 2.36 ms: 4.7 GB, and products of 1.55 ms.
# - Sums over chunks of 2048 tokens at 2048 x 128256 take 1.50 to 1.77 ms: 2.1 GB, and products of
#   1.38 ms.
H100_RATES = Rates(flops=780e12, bandwidth=2.5e12, exposed=0.3, launch=5e-6)


class Sizes(NamedTuple):
    """The sizes of a loss that all its plans share.

    Attributes:
      hidden_size: D.
      vocab_size: V, with padding.
      weight_layout: Layout of the weight and of `dweight`.
      result_bytes: Bytes of an entry of the weight's gradient; 0 if the weight is frozen.
      sum_bytes: Bytes of an entry of the sum over chunks; 0 if the weight is frozen.
    """

    hidden_size: int
    vocab_size: int
    weight_layout: WeightLayout
    result_bytes: int
    sum_bytes: int

    @property
    def num_entries(self) -> int:
        """Number of entries of the weight."""
        return self.hidden_size * self.vocab_size


def of_chunks(sizes: Sizes, num_tokens: int, chunk_size: int, rates: Rates = H100_RATES) -> float:
    """Seconds of chunks of tokens alone; the first one has the tokens left over by full chunks."""
    num_full = max(0, math.ceil(num_tokens / chunk_size) - 1)
    first = num_tokens - num_full * chunk_size
    time = _chunk(sizes, first, sizes.sum_bytes, rates)
    time += num_full * _chunk(sizes, chunk_size, 2 * sizes.sum_bytes, rates)
    time += _rounding(sizes, sizes.sum_bytes, rates)
    return time * _factor_of(chunk_size) if num_full else time


def of_in_place(
    sizes: Sizes,
    num_tokens: int,
    extent: in_place.Extent,
    chunk_size: int | None,
    rates: Rates = H100_RATES,
) -> float:
    """Seconds of tokens in the memory of `dweight`, and of the full chunks that follow if any."""
    bands, itemsize = extent.bands, extent.dtype.itemsize
    per_column = 2 * BLOCK_M * _H100.num_sms / rates.flops  # of a tile in each multiprocessor
    dx = 0.0
    for rows in (extent.num_inside, extent.num_beside):
        columns, tile_n = products.best_tile(rows, sizes.hidden_size, _H100)
        dx += columns * sizes.vocab_size * per_column * _without_store(tile_n)
    columns = in_place.time_of_bands(bands, sizes.hidden_size, sizes.weight_layout, _H100)
    dweight = columns * extent.num_tokens * per_column * _without_store(_TILE_N)
    stored = itemsize * sizes.num_entries / rates.bandwidth
    time = _logits(sizes, extent.num_tokens, rates) + dx + _together(dweight, stored, rates)
    time += (4 + bands.number) * rates.launch
    if sizes.weight_layout == "dv":
        time += _BYTES_OF_COPY * extent.num_inside * sizes.vocab_size / rates.bandwidth
    if chunk_size is not None:
        number = math.ceil((num_tokens - extent.num_tokens) / chunk_size)
        time += number * _chunk(sizes, chunk_size, 2 * sizes.sum_bytes, rates)
        time *= _factor_of(chunk_size)
    return time + _rounding(sizes, itemsize, rates)


def _factor_of(chunk_size: int) -> float:
    """The factor for the time of a plan with several chunks of this size."""
    return 1 + _COST_OF_OTHER_CHUNKS * (chunk_size % _EVEN_CHUNK != 0)


def _chunk(sizes: Sizes, num_tokens: int, bytes_of_entry: int, rates: Rates) -> float:
    """Seconds of a chunk of tokens; its sum moves `bytes_of_entry` for each entry of `dweight`."""
    hidden_size, vocab_size = sizes.hidden_size, sizes.vocab_size
    dx = _product(num_tokens, hidden_size, vocab_size, rates)
    dx += _BYTES_OF_DX * num_tokens * hidden_size / rates.bandwidth
    dweight = _product(vocab_size, hidden_size, num_tokens, rates)
    passed = bytes_of_entry * sizes.num_entries / rates.bandwidth
    return (
        _logits(sizes, num_tokens, rates)
        + dx
        + _together(dweight, passed, rates)
        + 3 * rates.launch
    )


def _logits(sizes: Sizes, num_tokens: int, rates: Rates) -> float:
    """Seconds of our product of the logits, in which two blocks of rows share their operands."""
    rows = BLOCK_M if num_tokens <= BLOCK_M else num_tokens + -num_tokens % (2 * BLOCK_M)
    return 2 * rows * sizes.num_entries / rates.flops


def _product(num_rows: int, num_columns: int, depth: int, rates: Rates) -> float:
    """Seconds of a product by XLA."""
    rows, columns = _XLA_TILE
    waves = math.ceil(num_rows / rows) * math.ceil(num_columns / columns) / _H100.num_sms
    parts = _PARTS_OF_DEPTH if waves < _MANY_WAVES else _PARTS_OF_MANY_WAVES
    waves = math.ceil(parts * waves) / parts
    return waves * _H100.num_sms * 2 * rows * columns * depth / rates.flops


def _without_store(tile_n: int) -> float:
    """Share of a tile's time, as `products` estimates it, in which it multiplies."""
    return tile_n / (tile_n + products.STORE_COST)


def _together(one: float, other: float, rates: Rates) -> float:
    """Seconds of a product and of the pass over memory that runs beside it."""
    return max(one, other) + rates.exposed * min(one, other)


def _rounding(sizes: Sizes, itemsize: int, rates: Rates) -> float:
    """Seconds to round `dweight` to the dtype of the gradient, if it has another one."""
    if itemsize == sizes.result_bytes:
        return 0.0
    return (itemsize + sizes.result_bytes) * sizes.num_entries / rates.bandwidth
