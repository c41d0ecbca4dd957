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
      begins: Index in its row of the first token of each token's document.
      scale: Factor of the products of queries and keys.
    """
    dtype = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(a.astype(dtype), group, axis=2) for a in (k, v))
    scores = scale * jnp.einsum("bsnh,btnh->bnst", q.astype(dtype), k)
    token = jnp.arange(q.shape[1], dtype=begins.dtype)
    seen = (begins[:, :, None] <= token) & (token <= token[:, None])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    logsumexp = jax.nn.logsumexp(scores, axis=-1)
    p = jnp.exp(scores - logsumexp[..., None])
    return jnp.einsum("bnst,btnh->bsnh", p, v), logsumexp
