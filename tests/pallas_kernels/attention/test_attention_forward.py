"""The forward kernel of attention within documents, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.config import ForwardConfig, forward_config
from pallas_kernels.attention.forward import attention_forward
from pallas_kernels.attention.reference import attention_reference
from support.attention_formulas import forward
from support.numerics import assert_as_accurate

BF16, F16 = jnp.bfloat16, jnp.float16

interpreted = pytest.mark.usefixtures("interpreted")


def begins_of(rows):
    """Index of the first token of each token's document, from the documents' lengths."""
    starts = [np.cumsum([0, *lengths[:-1]]) for lengths in rows]
    return jnp.asarray([np.repeat(s, n) for s, n in zip(starts, rows, strict=True)], jnp.int32)


def make_args(rows, heads, head_size, dtype):
    """q, k, v and begins, with N and K in `heads`."""
    begins = begins_of(rows)
    shapes = [(*begins.shape, n, head_size) for n in (heads[0], heads[1], heads[1])]
    keys = jax.random.split(jax.random.key(0), 3)
    arrays = (jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True))
    return *arrays, begins


def check(args, config, scale=0.125):
    q, k, v, begins = args
    config = config or forward_config(*q.shape[1::2], whole_rows=False)
    got = attention_forward(q, k, v, begins, scale=scale, config=config)
    low_precision = forward(q, k, v, begins, scale=scale)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(a, np.float64)) for a in (q, k, v))
        exact = attention_reference(q, k, v, begins, scale=scale)
    assert (got[0].dtype, got[1].dtype) == (args[0].dtype, jnp.float32)
    assert_as_accurate(got, low_precision, exact, names=("out", "logsumexp"))


@interpreted
@pytest.mark.parametrize(
    ("rows", "heads", "head_size", "dtype", "config"),
    [
        # A block has 64 queries of two heads. The last block of a row has 8 tokens, and in the
        # second row it begins after the block's first tile.
        ([[200], [1, 63, 70, 1, 65]], (4, 2), 64, BF16, ForwardConfig(warpgroups=2)),
        # A block has 128 queries of two heads.
        (
            [[200], [1, 63, 70, 1, 65]],
            (2, 1),
            64,
            F16,
            ForwardConfig(warpgroups=4, block_kv=128, max_stages=1),
        ),
        # Three heads share keys. A slot is filled again by a tile that some warpgroups skip.
        ([[100, 236]], (3, 1), 64, BF16, ForwardConfig(warpgroups=4, max_stages=2)),
        # Slots are filled again.
        ([[328]], (2, 1), 64, F16, ForwardConfig(warpgroups=2, max_stages=2)),
        ([[7, 1, 56]], (2, 1), 128, F16, None),
        ([[8]], (1, 1), 64, BF16, None),
    ],
    ids=str,
)
def test_values(rows, heads, head_size, dtype, config):
    """12 s for all."""
    check(make_args(rows, heads, head_size, dtype), config)


@interpreted
@pytest.mark.parametrize(("window", "stages"), [(1, 1), (50, 2), (130, 3)])
def test_values_within_a_window(window, stages):
    """2 s each. The interpreter waits forever if a test runs the same program as one before."""
    q, k, v, begins = make_args([[200], [90, 110]], (2, 1), 64, BF16)
    begins = jnp.maximum(begins, jnp.arange(200, dtype=jnp.int32) - window + 1)
    config = ForwardConfig(warpgroups=4, block_kv=64, max_stages=stages)
    check((q, k, v, begins), config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warpgroups": 5}, "warpgroups=5 must be from 1 to 4"),
        ({"block_kv": 96}, "block_kv=96"),
        ({"block_kv": 320}, "block_kv=320"),
        ({"max_stages": 0}, "max_stages=0"),
    ],
    ids=str,
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        ForwardConfig(**{"warpgroups": 2, **options})
