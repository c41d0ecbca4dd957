"""Launch parameters of the linear cross-entropy's kernels, and how much is done at a time."""

import dataclasses
import math

import jax.numpy as jnp

from pallas_kernels.gpu.hopper_gemm import BLOCK_M
from pallas_kernels.loss.mosaic_gpu import logits_config, products
from pallas_kernels.loss.mosaic_gpu import statistics as linear_statistics


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Launch parameters of `implementation="mosaic_gpu"`.

    Attributes:
      logits: of the kernel over logits in memory; None takes the user's (`pallas_kernels.tuning`),
        else measured ones, else a guess.
      linear: of the GEMMs that keep their logits to themselves; None derives them from device and
        sizes.
      dweight: of the GEMM that writes a part of `dweight` where it belongs; likewise.
      dx: of that of `dx` from exponentials that are where `dweight` will be; likewise.
    """

    logits: logits_config.Config | None = None
    linear: linear_statistics.Config | None = None
    dweight: products.Config | None = None
    dx: products.Config | None = None


# What the logits of a chunk may take unless the caller says otherwise. On an H100 at D = 2048 and
# V = 128256 (docs/lab/2026-11-21-loss-chunks.md), against chunks of 2048 tokens, 512 take 38 %
# longer, 1024 take 6 %, 4096 save 2 %; in 16 bits these are 501 MiB.
_LOGITS_BYTES = 512 * 2**20
# Of fewer tokens the GEMMs slow down, and without a limit nothing asks for it.
_MIN_DEFAULT_CHUNK = 512
# Every chunk passes `dweight`: 8 bytes an entry for 2 flops a token. At 8192 x 4096 x 128256 (H100)
# chunks of 1024 tokens take 39.7 ms, of 768 44.6 and of 512 55.5; with a fourth GEMM, and nothing
# to add up, it is 48.
_MIN_CHUNK = 768
# Of fewer tokens the products with `weight` take longer to read it than to compute: an H100 does
# about 250 flops a byte of device memory.
_MIN_CHUNK_OF_BOTH = 256
_TILE = 128  # of the GEMMs, in tokens and columns
# Tokens of two blocks that share operands in our GEMMs. 1408 take as long as 1536: at 4096 x 8192 x
# 128256 (H100) chunks of 1408 are at 1.151 of the bare GEMMs, 1536 at 1.102; at 8192 x 3584 x
# 152064 1664 are at 1.176, 1536 at 1.129.
_PAIR = 2 * BLOCK_M


# Of exponentials that are not where `dweight` will be (in_place.py). Enough for 45 blocks of 128
# rows of a float32 `dweight` at D = 4096, so that bands can have 33: 4 tiles for each of the 132
# multiprocessors of an H100.
_COPIED_BYTES = 96 * 2**20


def copied_bytes(max_bytes: int | None) -> int:
    """What these may take, where logits may take `max_bytes`."""
    return _COPIED_BYTES if max_bytes is None else min(max_bytes, _COPIED_BYTES)


def chunk_sizes(
    num_tokens: int,
    vocab_size: int,
    logits_dtype: jnp.dtype,
    max_bytes: int | None,
    *,
    dweight_bytes: int | None,
) -> tuple[int | None, int | None]:
    """`(chunk_size, vocab_chunk_size)` whose logits take at most `max_bytes`, where that can be.

    Token chunks, spread evenly, as long as 768 tokens fit. Else both: those of tokens are done when
    `dweight` begins, so that XLA has their logits where it will be, and `dweight_bytes` are what
    these may take. If that is less than 256 tokens, or None, vocabulary chunks alone, `(None,
    columns)`.
    Sizes are multiples of 128, of tokens 256 where there are several chunks. Without a limit it is
    512 MiB, 1 GiB of float32 logits, and chunks are of tokens, at least 512.
    """
    itemsize = jnp.dtype(logits_dtype).itemsize
    default = _LOGITS_BYTES * itemsize // 2
    tokens_in = lambda num_bytes: num_bytes // (itemsize * vocab_size) // _TILE * _TILE
    vocab_chunk_size = None
    if max_bytes is None:
        most = max(tokens_in(default), _MIN_DEFAULT_CHUNK)
    elif (most := tokens_in(max_bytes)) < min(_MIN_CHUNK, num_tokens):
        most = tokens_in(min(default, max(max_bytes, dweight_bytes or 0)))
        has_both = dweight_bytes is not None and most >= _MIN_CHUNK_OF_BOTH
        columns = max_bytes // (itemsize * num_tokens) // _TILE * _TILE
        vocab_chunk_size = _spread(vocab_size, max(_TILE, columns), _TILE)
        if not has_both:
            return None, vocab_chunk_size
    tile = _PAIR if most < num_tokens else _TILE
    return _spread(num_tokens, max(tile, most // tile * tile), tile), vocab_chunk_size


def _spread(total: int, most: int, tile: int) -> int:
    """The size of chunks of at most `most`, as few as can be and none of them tiny."""
    num_chunks = max(1, math.ceil(total / most))
    if num_chunks == 2:
        num_chunks = 3  # as `fold_chunks` would do
    return tile * max(1, math.ceil(total / num_chunks / tile))
