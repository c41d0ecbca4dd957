"""The forward kernel of attention within documents, interpreted."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.config import Config, default_config
from pallas_kernels.attention.forward import attention_forward
from pallas_kernels.attention.reference import attention_reference
from support.numerics import assert_as_accurate

BF16, F16 = jnp.bfloat16, jnp.float16
SMALL = Config(block_kv=64)
OVERLAPPED = dataclasses.replace(SMALL, overlap=True)

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
        # Two blocks of 128 queries and tiles of 64 keys. The last warpgroup of a row has 8 tokens,
        # and the second row's first one sees no key of the block's last tile.
        ([[200], [1, 63, 70, 1, 65]], (4, 2), 64, BF16, SMALL),
        ([[200], [1, 63, 70, 1, 65]], (2, 1), 64, F16, OVERLAPPED),
        # One block of three warpgroups. The last one sees no key of the first two tiles.
        ([[130, 38]], (1, 1), 64, BF16, dataclasses.replace(OVERLAPPED, warpgroups=3)),
        # The second warpgroup has no tokens.
        ([[7, 1, 56]], (2, 1), 128, F16, default_config(128)),
        ([[8]], (1, 1), 64, BF16, Config(warpgroups=1, in_turns=False)),
    ],
    ids=str,
)
def test_values(rows, heads, head_size, dtype, config):
    """10 s for all."""
    check(make_args(rows, heads, head_size, dtype), config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": jnp.zeros((1, 12, 2, 64), BF16)}, "multiple of 8"),
        ({"q": jnp.zeros((1, 8, 2, 32), BF16)}, "64 or 128 numbers"),
        ({"k": jnp.zeros((1, 8, 1, 64), F16)}, "all bfloat16 or all float16"),
        ({"begins": jnp.zeros((1, 8), jnp.float32)}, "int32"),
        ({"v": jnp.zeros((1, 8, 1, 64), BF16)}, "k and v have shapes"),
        ({"q": jnp.zeros((1, 8, 3, 64), BF16)}, "no multiple"),
        ({"begins": jnp.zeros((2, 8), jnp.int32)}, "begins has shape"),
        ({"scale": 0.0}, "must be positive"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(unchecked_shapes, change, message):
    q, kv = jnp.zeros((1, 8, 4, 64), BF16), jnp.zeros((1, 8, 2, 64), BF16)
    args = {"q": q, "k": kv, "v": kv, "begins": jnp.zeros((1, 8), jnp.int32), "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        attention_forward(**args | change, config=SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warpgroups": 4}, "warpgroups"),
        ({"block_q": 96}, "block_q"),
        ({"warpgroups": 3, "block_q": 128}, "block_q"),
        ({"block_kv": 320}, "block_kv"),
        ({"max_stages": 0}, "max_stages"),
    ],
    ids=str,
)
def test_config_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        Config(**options)
