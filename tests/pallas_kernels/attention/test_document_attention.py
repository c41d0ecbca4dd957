"""Attention of documents as an operation: its bounds, its gradients, and members of vmap."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.api import document_attention
from pallas_kernels.attention.backward import attention_backward
from pallas_kernels.attention.bounds import bounds_of
from pallas_kernels.attention.config import default_config
from pallas_kernels.attention.forward import attention_forward
from pallas_kernels.attention.reference import attention_reference
from support.numerics import assert_as_accurate, value_and_grads

pytestmark = pytest.mark.usefixtures("interpreted")
B, S, N, K, H = 2, 72, 2, 1, 64
IDS = np.array([[3] * 5 + [1] + [7] * 60 + [3] * 6, [0] * S], np.int32)
NAMES = ["out", "dq", "dk", "dv"]


def test_bounds():
    begins, ends = bounds_of(jnp.asarray([[4, 4, 9, 4, 4, 4], [0, 1, 1, 1, 1, 2]], jnp.int32))
    np.testing.assert_array_equal(begins, [[0, 0, 2, 3, 3, 3], [0, 1, 1, 1, 1, 5]])
    np.testing.assert_array_equal(ends, [[2, 2, 3, 6, 6, 6], [1, 5, 5, 5, 5, 6]])


def arrays(*leading: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(*leading, B, S, heads, H) for heads in (N, K, K, N)]
    return [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]


def reference(q, k, v):
    bounds = bounds_of(jnp.asarray(IDS))
    return attention_reference(q, k, v, bounds.begins, scale=H**-0.5)[0]


def by_kernels(args, cotangent):
    """Output and gradients by the kernels themselves, which have tests of their own."""
    begins, ends = bounds_of(jnp.asarray(IDS))
    config = default_config(H)
    q, k, v = args
    out, sums = attention_forward(q, k, v, begins, scale=H**-0.5, config=config)
    gradients = attention_backward(q, k, v, out, sums, cotangent, begins, ends, scale=H**-0.5)
    return out, *gradients


def in_float64(args, cotangent):
    with jax.enable_x64(True):
        args, cotangent = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (args, cotangent))
        return [np.asarray(a) for a in value_and_grads(reference, args, cotangent)]


def test_members_of_vmap():
    """Two members, each with gradients of its own, in one call. 6 s."""
    *args, cotangent = arrays(2)
    bounds = bounds_of(jnp.asarray(IDS))
    attend = jax.vmap(lambda q, k, v: document_attention(q, k, v, bounds))
    got = value_and_grads(attend, args, cotangent)
    for i in range(2):
        of_member, of_output = [a[i] for a in args], cotangent[i]
        plain = by_kernels(of_member, of_output)
        exact = in_float64(of_member, of_output)
        assert_as_accurate([a[i] for a in got], plain, exact, names=NAMES)


def test_a_gradient_of_keys_alone():
    """5 s."""
    *args, cotangent = arrays()
    bounds = bounds_of(jnp.asarray(IDS))
    q, k, v = args
    _, vjp = jax.vjp(lambda k: document_attention(q, k, v, bounds), k)
    plain, exact = by_kernels(args, cotangent), in_float64(args, cotangent)
    assert_as_accurate(vjp(cotangent), plain[2:3], exact[2:3], names=["dk"])


def test_forward_mode_is_an_error():
    q, k, v, dq = arrays()
    attend = lambda q: document_attention(q, k, v, bounds_of(jnp.asarray(IDS)))
    with pytest.raises(NotImplementedError, match="document_attention"):
        jax.jvp(attend, (q,), (dq,))
