"""Gradients of causal attention within documents, in two kernels for Hopper.

With `p = exp(scale · q·k - logsumexp)` and `ds = p · (dout·v - Σ out · dout)` the gradients are
sums over pairs of a query and a key:

- `dv = Σ p · dout` and `dk = scale · Σ ds · q`, over the queries that attend to the key;
- `dq = scale · Σ ds · k`, over the keys that the query attends to.

One kernel computes `dk` and `dv`, the other computes `dq`, and both compute `p` and `ds`. Together
they take 7 products for a query and a key, where one kernel for all would take 5. But each sum
stays in the registers of one warpgroup. So there are no atomic additions, and two calls with equal
arguments have equal results. With heads of 64, one kernel was not faster
(docs/lab/2026-11-30-one-kernel-for-three-gradients.md).

The tokens of a document are adjacent. So the sums of a key go over one range of tiles of queries,
and the sum of a query goes over one range of tiles of keys. `dq_kernel.py` and `dkdv_kernel.py`
describe the kernels.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.config import KeysConfig, QueriesConfig
from pallas_kernels.attention.dkdv_kernel import gradients_of_keys_and_values
from pallas_kernels.attention.dq_kernel import gradient_of_queries
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.kernel import shared
from pallas_kernels.gpu.math import LOG2_E


@shared("scale", "of_queries", "of_keys")
def attention_backward(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    out: Float[Array, "B S N H"],
    logsumexp: Float32[Array, "B N S"],
    dout: Float[Array, "B S N H"],
    begins: Int32[Array, "B S"],
    ends: Int32[Array, "B S"],
    *,
    scale: float,
    of_queries: QueriesConfig,
    of_keys: KeysConfig,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """The gradients `(dq, dk, dv)` of causal attention within documents.

    `p` and `ds` are rounded to the dtype of `q` for their products. Sums are in float32.

    Args:
      q: Queries, as in `attention_forward`.
      k: Keys; N is a multiple of K, and head n of the queries reads head `n // (N // K)`.
      v: Values.
      out: Output of the attention.
      logsumexp: Natural logarithm of the sum of `exp(scale · q·k)` over the keys of a query.
      dout: Cotangent of `out`.
      begins: Index in its row of the first token that each token attends to.
      ends: Index in its row of the token after the last one that attends to each token.
      scale: Positive factor of the products of queries and keys.
      of_queries: Launch parameters of the kernel of `dq`.
      of_keys: Launch parameters of the kernel of `dk` and `dv`.
    """
    # exp2 is one instruction. One fma computes its argument from a score: it multiplies by
    # `scale · log2(e)` and subtracts `log2_sum`.
    log2_sum = logsumexp * LOG2_E
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    operands = (q, k, v, dout, log2_sum, delta)
    of_dq, of_dkdv = (at_aligned_addresses((*operands, bounds)) for bounds in (begins, ends))
    dq = gradient_of_queries(*of_dq, scale=scale, config=of_queries)
    dk, dv = gradients_of_keys_and_values(*of_dkdv, scale=scale, config=of_keys)
    return at_aligned_addresses((dq, dk, dv))
