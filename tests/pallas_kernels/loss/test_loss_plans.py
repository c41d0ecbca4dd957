"""Which plan is chosen, and how it is described."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.gpu.device import Device
from pallas_kernels.loss.mosaic_gpu import in_place, products
from support.loss_formulas import (
    BF16,
    F32,
)


@pytest.mark.parametrize(
    "num_tokens, vocab_size, dtype, max_bytes, want",
    [
        # Without a limit: 512 MiB of 16 bits, or 2093 tokens; 1 GiB of float32, the same tokens.
        (8192, 128256, BF16, None, (2048, None)),
        (8192, 128256, F32, None, (2048, None)),
        (8193, 128256, BF16, None, (1792, None)),  # 5 chunks, none of them tiny
        (8192, 152064, BF16, None, (1536, None)),  # 1664 would fit
        (8192, 32000, BF16, None, (8192, None)),
        (4096, 128256, BF16, None, (1536, None)),  # 3 chunks instead of 2
        (8192, 2**21, BF16, None, (512, None)),  # 128 would fit
        (300, 2**21, BF16, None, (384, None)),
        (0, 32000, BF16, None, (128, None)),
        (1, 32000, BF16, None, (128, None)),
        # A limit holds as long as 768 tokens fit, or all there are.
        (8192, 128256, BF16, 2**28, (1024, None)),
        (8192, 128256, F32, 2**29, (1024, None)),
        (8192, 2**15, BF16, 768 * 2**16, (768, None)),
        (256, 2**15, BF16, 2**24, (256, None)),
        # Less, and columns are limited, tokens by the 2**10 numbers that a row of dweight has.
        (8192, 2**15, BF16, 768 * 2**16 - 1, (2048, 2816)),
        (8192, 128256, BF16, 2**24, (2048, 1024)),
        (8192, 128256, F32, 2**24, (1024, 512)),
        (512, 2**15, BF16, 2**24, (512, 11008)),
        (8192, 2**21, BF16, 2**24, (None, 1024)),  # 512 MiB, the most by default, are 128 tokens
        # At least a tile, even where that is too much.
        (8192, 128256, BF16, 1, (2048, 128)),
        (100, 50, F32, 1, (128, 128)),
    ],
    ids=str,
)
def test_default_chunk_sizes(num_tokens, vocab_size, dtype, max_bytes, want):
    num_bytes = 4 * 2**10 * vocab_size
    got = chunk_sizes(num_tokens, vocab_size, jnp.dtype(dtype), max_bytes, dweight_bytes=num_bytes)
    assert got == want
    tokens, columns = got
    if max_bytes is not None and max_bytes > 1:
        itemsize = jnp.dtype(dtype).itemsize
        for_tokens = max_bytes if columns is None else num_bytes
        assert min(tokens or 0, num_tokens) * vocab_size * itemsize <= for_tokens
        assert num_tokens * (columns or 0) * itemsize <= max_bytes


@pytest.mark.parametrize(
    "shape, weight_dtype, chunk_size, want",
    [
        # (inside, beside, chunk size, bands), and the dtype of dweight.
        ((8192, 4096, 128256), F32, 2048, (8192, 0, None, (4224, 29, 5760), F32)),
        ((8192, 4096, 128256), F32, None, (8192, 0, None, (4224, 29, 5760), F32)),
        ((8192, 4096, 128256), BF16, 2048, (8192, 0, None, (4224, 29, 5760), F32)),
        ((4096, 4096, 128256), BF16, 2048, (4096, 0, None, (8448, 14, 9984), BF16)),
        ((6144, 4096, 128256), BF16, 2048, (4096, 2048, None, (8448, 14, 9984), BF16)),
        ((6145, 4096, 128256), BF16, 2048, (6145, 0, None, (4224, 29, 5760), F32)),
        ((8193, 4096, 128256), F32, 2048, (8192, 1, None, (4224, 29, 5760), F32)),
        ((8193, 4096, 128256), F32, None, None),
        ((16384, 2048, 128256), F32, 2048, (4096, 0, 2048, (8448, 14, 9984), F32)),
        ((8192, 3584, 152064), F32, 1536, (7168, 1024, None, (3584, 41, 5120), F32)),
        ((8192, 2304, 256000), F32, 1024, (4096, 0, 1024, (5632, 44, 8192), F32)),
        # No less sums than with chunks alone.
        ((16384, 1024, 128256), F32, 2048, None),
        ((8192, 4096, 50257), F32, 4096, None),
        ((8192, 4000, 128256), F32, 2048, None),
    ],
    ids=str,
)
def test_what_is_in_place(monkeypatch, shape, weight_dtype, chunk_size, want):
    device = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
    for module in (in_place, linear_statistics, products):
        monkeypatch.setattr(module, "target_device", lambda: device)
    num_tokens, hidden, vocab = shape
    found = in_place.extent(
        jax.ShapeDtypeStruct((num_tokens, hidden), BF16),
        jax.ShapeDtypeStruct((vocab, hidden), weight_dtype),
        LossOptions(ignore_index=-100, label_smoothing=0.0, z_loss=0.0, logit_softcap=None),
        accum_dtype=F32,
        copied_bytes=config_module.copied_bytes(None),
        chunk_size=chunk_size,
    )
    if want is not None:
        inside, beside, chunk, bands, dtype = want
        want = in_place.Extent(inside, beside, chunk, jnp.dtype(dtype), in_place.Bands(*bands))
    assert found == want


@pytest.mark.parametrize(
    "vocab, limit, want",
    [
        (128256, 2**25, (1024, 124, 1280)),  # 16 blocks of 2 MiB
        (128256, 0, (128, 1001, 128)),
        (48 * 128, None, (48 * 128, 0, 0)),  # no more than what may be copied
        (49 * 128, None, (1536, 3, 1664)),
        (256, 0, (256, 0, 0)),
    ],
)
def test_bands(monkeypatch, vocab, limit, want):
    device = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
    monkeypatch.setattr(in_place, "target_device", lambda: device)
    limit = config_module.copied_bytes(limit)
    found = in_place._bands((vocab, 4096), jnp.dtype(F32), limit)
    assert found == want
    assert found.size * max(1, found.number) + found.num_copied == vocab
