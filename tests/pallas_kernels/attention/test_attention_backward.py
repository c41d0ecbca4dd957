"""Gradients of attention within documents by the Mosaic GPU kernels, interpreted, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import config as configs
from pallas_kernels.attention.backward import attention_backward
from pallas_kernels.attention.config import KeysConfig, QueriesConfig, queries_config
from pallas_kernels.attention.reference import attention_reference
from support.attention_formulas import backward
from support.numerics import assert_as_accurate, quick_jit

BF16, F16 = jnp.bfloat16, jnp.float16
NAMES = ("dq", "dk", "dv")
interpreted = pytest.mark.usefixtures("interpreted")


def bounds_of(lengths):
    """`begins` and `ends` of rows of documents of these lengths."""
    last = np.stack([np.repeat(np.cumsum(row), row) for row in lengths])
    sizes = np.stack([np.repeat(row, row) for row in lengths])
    return (last - sizes).astype(np.int32), last.astype(np.int32)


def make_args(lengths, dtype, *, heads=(4, 2), head_size=64, seed=0, window=None):
    """Operands of the gradients; attention is sharp where logits have a deviation of 2."""
    rng = np.random.default_rng(seed)
    begins, ends = bounds_of(lengths)
    if window is not None:
        token = np.arange(begins.shape[1], dtype=np.int32)
        begins, ends = np.maximum(begins, token - window + 1), np.minimum(ends, token + window)
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


def check(args, options):
    head_size = args[0].shape[-1]
    scale = 2 * head_size**-0.5
    options = {"of_queries": queries_config(head_size), "of_keys": KeysConfig()} | options
    got = quick_jit(functools.partial(attention_backward, scale=scale, **options))(*args)
    assert [a.dtype for a in got] == [args[0].dtype] * 3
    low = quick_jit(functools.partial(backward, scale=scale))(*args)
    with jax.enable_x64(True):
        exact_args = [np.asarray(a, np.float64) for a in args[:6]]
        exact = quick_jit(functools.partial(formula, scale=scale))(*exact_args, *args[6:])
        exact = [np.asarray(a) for a in exact]
    assert_as_accurate(got, low, exact, names=NAMES)


def options_of(of_dq=3, stages=2, tile=64, warpgroups=1, parts=1):
    """Launch parameters; the kernel of `dq` has `of_dq` warpgroups."""
    return {
        "of_queries": QueriesConfig(warpgroups=of_dq, stages=stages),
        "of_keys": KeysConfig(tile=tile, stages=stages, warpgroups=warpgroups, parts=parts),
    }


@interpreted
@pytest.mark.parametrize(
    ("lengths", "heads", "head_size", "dtype", "options"),
    [
        # Two queries' heads a head of keys. The second row has one document. A block of 128 rows
        # has 8 tokens, and its second warpgroup none.
        ([[1, 70, 1, 60, 4], [136]], (4, 2), 64, BF16, {}),
        # Documents begin inside of tiles. More tiles than slots.
        ([[40, 100, 60]], (2, 2), 64, F16, options_of()),
        # The last block of the kernel of `dq` has more warpgroups than units are left.
        ([[200], [30, 170]], (4, 1), 64, BF16, options_of()),
        ([[40, 288]], (4, 2), 64, BF16, options_of(of_dq=2)),
        # All queries share a head of keys. The last document has one token.
        ([[71, 1], [8, 64]], (4, 1), 64, F16, options_of(tile=128, of_dq=4)),
        ([[57, 80, 63]], (2, 1), 64, BF16, options_of(warpgroups=3)),
        ([[100, 28, 8]], (2, 1), 128, BF16, {}),
        # Each head of queries has a block of its own, and so have one head and two of a group.
        ([[100, 28, 8], [136]], (2, 1), 64, BF16, {"of_keys": KeysConfig(parts=2)}),
        ([[57, 80, 63]], (3, 1), 128, F16, options_of(parts=2)),
        # Fewer tokens than a warpgroup has rows.
        ([[3, 5], [8]], (1, 1), 64, BF16, {}),
    ],
    ids=str,
)
def test_gradients(lengths, heads, head_size, dtype, options):
    """2 s."""
    check(make_args(lengths, dtype, heads=heads, head_size=head_size), options)


@interpreted
@pytest.mark.parametrize("window", [1, 50, 130])
def test_gradients_within_a_window(window):
    """3 s each."""
    args = make_args([[200], [90, 110]], BF16, heads=(2, 1), window=window)
    check(args, {"of_keys": KeysConfig(parts=2)})


@pytest.mark.parametrize(
    "options",
    [{"warpgroups": 5}, {"tile": 96}, {"tile": 320}, {"stages": 1}, {"of_dq": 5}, {"parts": 0}],
)
def test_unsupported_configs(options):
    with pytest.raises(ValueError, match=next(iter(options)).replace("of_dq", "warpgroups")):
        options_of(**options)


@pytest.mark.parametrize("warpgroups", [1, 2, 3, 4])
def test_a_block_has_the_registers_of_its_launch(warpgroups):
    """A warpgroup that asks for more waits forever."""
    config = KeysConfig(warpgroups=warpgroups)
    launched = 65536 // (128 * (warpgroups + 1)) // 8 * 8
    wanted = configs.LOADER_REGISTERS + warpgroups * config.registers
    assert wanted <= launched * (warpgroups + 1)
