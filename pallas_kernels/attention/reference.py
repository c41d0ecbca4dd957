"""Attention within documents in plain JAX: the formula that the kernels are judged by."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def attention_reference(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    begins: Int[Array, "B S"],
    *,
    scale: float,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B N S"]]:
    """Attention of token t to the tokens from `begins[t]` to t, and its logsumexp.

    It computes in float32, or in float64 for operands of float64, and returns both in that dtype.

    Args:
      q: Queries.
      k: Keys; N is a multiple of K, and head n of the queries reads head `n // (N // K)`.
      v: Values.
      begins: Index in its row of the first token that each token attends to.
      scale: Factor of the products of queries and keys.
    """
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    q, k, v = (a.astype(dtype) for a in (q, k, v))
    # With an axis of the heads of keys, an Explicit axis may split all heads alike.
    queries = q.reshape(*q.shape[:2], k.shape[2], q.shape[2] // k.shape[2], q.shape[3])
    scores = scale * jnp.einsum("bskgh,btkh->bkgst", queries, k)
    token = jnp.arange(q.shape[1], dtype=begins.dtype)
    seen = (begins[:, :, None] <= token[None, None]) & (token[None] <= token[:, None])[None]
    scores = jnp.where(seen[:, None, None], scores, -jnp.inf)
    logsumexp = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - logsumexp[..., None])
    out = jnp.einsum("bkgst,btkh->bskgh", p, v).reshape(q.shape)
    return out, logsumexp.reshape(q.shape[0], q.shape[2], q.shape[1])
