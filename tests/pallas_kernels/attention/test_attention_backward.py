"""Gradients of attention within documents by the Mosaic GPU kernels, interpreted, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import backward_steps
from pallas_kernels.attention.backward import BackwardConfig, attention_backward
from pallas_kernels.attention.backward_steps import PassConfig
from pallas_kernels.attention.reference import attention_reference
from support.numerics import assert_as_accurate, quick_jit

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
NAMES = ("dq", "dk", "dv")
interpreted = pytest.mark.usefixtures("interpreted")


def bounds_of(lengths):
    """`begins` and `ends` of rows of documents of these lengths."""
    last = np.stack([np.repeat(np.cumsum(row), row) for row in lengths])
    sizes = np.stack([np.repeat(row, row) for row in lengths])
    return (last - sizes).astype(np.int32), last.astype(np.int32)


def make_args(lengths, dtype, *, heads=(4, 2), head_size=64, seed=0):
    """Operands of the gradients; attention is sharp where logits have a deviation of 2."""
    rng = np.random.default_rng(seed)
    begins, ends = bounds_of(lengths)
    normal = lambda num_heads: jnp.asarray(
        rng.standard_normal((*begins.shape, num_heads, head_size)), dtype
    )
    q, k, v, dout = (normal(heads[i]) for i in (0, 1, 1, 0))
    reference = functools.partial(attention_reference, scale=2 * head_size**-0.5)
    out, logsumexp = quick_jit(reference)(q, k, v, begins)
    return q, k, v, out.astype(dtype), logsumexp, dout, begins, ends


def formula(q, k, v, out, logsumexp, dout, begins, ends, *, scale):
    """The gradients by automatic differentiation of the reference."""
    attend = lambda q, k, v: attention_reference(q, k, v, begins, scale=scale)[0]
    return jax.vjp(attend, q, k, v)[1](dout)


def in_16_bits(q, k, v, out, logsumexp, dout, begins, ends, *, scale):
    """The gradients with the roundings of the kernels."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a, group, axis=2) for a in (k, v))
    multiply = lambda terms, a, b: jnp.einsum(terms, a, b, preferred_element_type=F32)
    token = jnp.arange(q.shape[1])
    seen = (begins[:, :, None] <= token) & (token <= token[:, None])
    scores = scale * multiply("bsnh,btnh->bnst", q, k) - logsumexp[..., None]
    p = jnp.where(seen[:, None], jnp.exp(scores), 0.0)
    delta = multiply("bsnh,bsnh->bns", out, dout)
    ds = p * (multiply("bsnh,btnh->bnst", dout, v) - delta[..., None])
    p, ds = p.astype(dtype), ds.astype(dtype)
    by_key = lambda a: a.reshape(*a.shape[:2], -1, group, a.shape[3]).sum(axis=3)
    return tuple(
        a.astype(dtype)
        for a in (
            scale * multiply("bnst,btnh->bsnh", ds, k),
            by_key(scale * multiply("bnst,bsnh->btnh", ds, q)),
            by_key(multiply("bnst,bsnh->btnh", p, dout)),
        )
    )


def check(args, config=None):
    scale = 2 * args[0].shape[-1] ** -0.5
    got = quick_jit(functools.partial(attention_backward, scale=scale, config=config))(*args)
    assert [a.dtype for a in got] == [args[0].dtype] * 3
    low = quick_jit(functools.partial(in_16_bits, scale=scale))(*args)
    with jax.enable_x64(True):
        exact_args = [np.asarray(a, np.float64) for a in args[:6]]
        exact = quick_jit(functools.partial(formula, scale=scale))(*exact_args, *args[6:])
        exact = [np.asarray(a) for a in exact]
    assert_as_accurate(got, low, exact, names=NAMES)


def config_of(rows=64, tile=64, stages=2, warpgroups=1):
    """Both kernels with the same launch parameters."""
    one = PassConfig(rows=rows, tile=tile, stages=stages, warpgroups=warpgroups)
    return BackwardConfig(dq=one, dkdv=one)


@interpreted
@pytest.mark.parametrize(
    ("lengths", "heads", "head_size", "dtype", "config"),
    [
        # Two queries' heads a head of keys. The second row has one document. A block of 128 rows
        # has 8 tokens, and its second warpgroup none.
        ([[1, 70, 1, 60, 4], [136]], (4, 2), 64, BF16, None),
        # Documents begin inside of tiles. More tiles than slots.
        ([[40, 100, 60]], (2, 2), 64, F16, config_of()),
        # All queries share a head of keys. The last document has one token.
        ([[71, 1], [8, 64]], (4, 1), 64, F16, config_of(tile=128)),
        ([[57, 80, 63]], (2, 1), 64, BF16, config_of(rows=128, warpgroups=2)),
        ([[100, 28, 8]], (2, 1), 128, BF16, None),
        # Fewer tokens than a warpgroup has rows.
        ([[3, 5], [8]], (1, 1), 64, BF16, None),
    ],
    ids=str,
)
def test_gradients(lengths, heads, head_size, dtype, config):
    """2 s."""
    check(make_args(lengths, dtype, heads=heads, head_size=head_size), config)


def test_unsupported_arguments(unchecked_shapes):
    args = make_args([[8]], BF16, heads=(2, 1))
    run = lambda *args, scale=1.0: attention_backward(*args, scale=scale)
    with pytest.raises(ValueError, match="float32"):
        run(*(a.astype(F32) for a in args[:6]), *args[6:])
    with pytest.raises(ValueError, match="multiple of 8"):
        run(*(a[:, :7] for a in args[:4]), args[4][..., :7], *(a[:, :7] for a in args[5:]))
    with pytest.raises(ValueError, match="do not fit together"):
        run(args[0][:, :, :1], *(jnp.repeat(a, 2, axis=2) for a in args[1:3]), *args[3:])
    with pytest.raises(ValueError, match="positive"):
        run(*args, scale=-1.0)


@pytest.mark.parametrize(
    "options", [{"rows": 32}, {"warpgroups": 5}, {"tile": 96}, {"tile": 320}, {"stages": 1}]
)
def test_unsupported_configs(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        config_of(**options)


@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_a_block_has_the_registers_of_its_launch(warpgroups):
    """A warpgroup that asks for more waits forever."""
    config = config_of(warpgroups=warpgroups).dq
    launched = 65536 // (128 * (warpgroups + 1)) // 8 * 8
    wanted = backward_steps._MEMORY_REGISTERS + warpgroups * config.registers
    assert wanted <= launched * (warpgroups + 1)
