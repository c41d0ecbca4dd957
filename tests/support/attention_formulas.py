"""The kernels of attention of documents in plain JAX, with their roundings and signatures.

The interpreter of kernels needs one device, so tests of several replace the kernels.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.attention.forward import HEAD_SIZES
from pallas_kernels.attention.reference import attention_reference
from support.numerics import quick_jit, value_and_grads

F32 = jnp.float32


def emulate(monkeypatch: Any) -> None:
    """Replaces the kernels, for any dtype and length. The test needs `fresh_operations`, too."""

    def in_place_of(kernel):
        def run(q, *args, scale, **_):
            assert q.ndim == 4 and q.shape[-1] in HEAD_SIZES
            return kernel(q, *args, scale=scale)

        return run

    monkeypatch.setattr(mosaic_gpu, "attention_forward", in_place_of(forward))
    monkeypatch.setattr(mosaic_gpu, "attention_backward", in_place_of(backward))
    monkeypatch.setattr(mosaic_gpu, "unsupported_reason", lambda *_: None)


def forward(q, k, v, begins, *, scale):
    """The output and the logsumexp `[B, N, S]`, by the bounds of queries."""
    k, v = _by_heads(q, k, v)
    scores = _scores(q, k, scale)
    token = jnp.arange(q.shape[1], dtype=begins.dtype)
    scores = jnp.where(_seen(begins[:, :, None] <= token), scores, -jnp.inf)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    p = jnp.exp(scores - largest)
    total = jnp.sum(p, axis=-1)
    out = _product("bnst,btnh->bsnh", p.astype(q.dtype), v)
    out /= total.swapaxes(1, 2)[..., None]
    return out.astype(q.dtype), largest[..., 0] + jnp.log(total)


def backward(q, k, v, out, logsumexp, dout, begins, ends, *, scale):
    """The gradients: that of the queries by `begins`, those of keys and values by `ends`."""
    num_kv_heads, dtype = k.shape[2], q.dtype
    k, v = _by_heads(q, k, v)
    token = jnp.arange(q.shape[1], dtype=begins.dtype)
    p = jnp.exp(_scores(q, k, scale) - logsumexp[..., None])
    delta = _product("bsnh,bsnh->bns", out, dout)[..., None]
    ds = p * (_product("bsnh,btnh->bnst", dout, v) - delta)
    by_queries, by_keys = begins[:, :, None] <= token, token[:, None] < ends[:, None]
    where = lambda seen, a: jnp.where(_seen(seen), a, 0.0).astype(dtype)
    of_keys = lambda a: a.reshape(*a.shape[:2], num_kv_heads, -1, a.shape[3]).sum(axis=3)
    dq = scale * _product("bnst,btnh->bsnh", where(by_queries, ds), k)
    dk = of_keys(scale * _product("bnst,bsnh->btnh", where(by_keys, ds), q))
    dv = of_keys(_product("bnst,bsnh->btnh", where(by_keys, p), dout))
    return tuple(a.astype(dtype) for a in (dq, dk, dv))


def _by_heads(q, *of_keys):
    return (jnp.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in of_keys)


def _scores(q, k, scale):
    return scale * _product("bsnh,btnh->bnst", q, k)


def _seen(is_of_document):
    """The mask `[B, 1, S, S]` of documents and of earlier tokens."""
    return (is_of_document & jnp.tri(is_of_document.shape[1], dtype=bool))[:, None]


def _product(terms, a, b):
    return jnp.einsum(terms, a, b, preferred_element_type=F32)


def rounded_value_and_gradients(arrays, bounds, *, scale):
    """The output and the gradients, with the roundings of the kernels.

    Args:
      arrays: Queries, keys, values and the gradient of the output.
      bounds: Documents of the rows.
      scale: Factor of the products of queries and keys.
    """
    q, k, v, dout = arrays
    out, logsumexp = forward(q, k, v, bounds.begins, scale=scale)
    return out, *backward(q, k, v, out, logsumexp, dout, *bounds, scale=scale)


def exact_value_and_gradients(arrays, bounds, *, scale):
    """The output and the gradients in float64, by the reference."""

    def compute(arrays, begins):
        *args, dout = arrays
        attend = lambda q, k, v: attention_reference(q, k, v, begins, scale=scale)[0]
        return value_and_grads(attend, args, dout)

    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in arrays]
        return [np.asarray(a) for a in quick_jit(compute)(wide, bounds.begins)]
