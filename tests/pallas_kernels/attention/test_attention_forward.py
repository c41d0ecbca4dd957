"""The forward kernel of attention within documents, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.config import Config, default_config
from pallas_kernels.attention.forward import attention_forward
from pallas_kernels.attention.reference import attention_reference
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


def rounded_formula(q, k, v, begins, scale):
    """The formula with the roundings of the kernel's dtype: of the exponentials, and of out."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    scores = scale * jnp.einsum("bsnh,btnh->bnst", q, k, preferred_element_type=jnp.float32)
    token = jnp.arange(q.shape[1])
    seen = (begins[:, :, None] <= token) & (token <= token[:, None])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - largest)
    total = jnp.sum(p, axis=-1)
    out = jnp.einsum("bnst,btnh->bsnh", p.astype(q.dtype), v, preferred_element_type=jnp.float32)
    out /= total.swapaxes(1, 2)[..., None]
    return out.astype(q.dtype), largest[..., 0] + jnp.log(total)


def check(args, config, scale=0.125):
    q, k, v, begins = args
    got = attention_forward(q, k, v, begins, scale=scale, config=config)
    low_precision = rounded_formula(q, k, v, begins, scale)
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(a, np.float64)) for a in (q, k, v))
        exact = attention_reference(q, k, v, begins, scale=scale)
    assert (got[0].dtype, got[1].dtype) == (args[0].dtype, jnp.float32)
    assert_as_accurate(got, low_precision, exact, names=("out", "logsumexp"))


@interpreted
@pytest.mark.parametrize(
    ("rows", "heads", "head_size", "dtype", "config"),
    [
        # A block has two heads of 64 queries. The last block of a row has 8 tokens, and in the
        # second row it begins after the block's first tile.
        ([[200], [1, 63, 70, 1, 65]], (4, 2), 64, BF16, Config(heads=2)),
        ([[200], [1, 63, 70, 1, 65]], (2, 1), 64, F16, Config(heads=4, block_kv=128, max_stages=1)),
        # Slots are filled again.
        ([[328]], (2, 1), 64, F16, Config(heads=2, max_stages=2)),
        ([[7, 1, 56]], (2, 1), 128, F16, default_config(128)),
        ([[8]], (1, 1), 64, BF16, default_config(64)),
    ],
    ids=str,
)
def test_values(rows, heads, head_size, dtype, config):
    """10 s for all."""
    check(make_args(rows, heads, head_size, dtype), config)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 5}, "heads=5 must be from 1 to 4"),
        ({"block_kv": 96}, "block_kv=96"),
        ({"block_kv": 320}, "block_kv=320"),
        ({"max_stages": 0}, "max_stages=0"),
    ],
    ids=str,
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**{"heads": 2, **options})
