"""Gradients of causal attention within documents, in two kernels for Hopper.

With `p = exp(scale · q·k - logsumexp)` and `ds = p · (dout·v - Σ out · dout)` the gradients are
sums over pairs of a query and a key:

- `dv = Σ p · dout` and `dk = scale · Σ ds · q`, over the queries that attend to the key;
- `dq = scale · Σ ds · k`, over the keys that the query attends to.

One kernel computes `dk` and `dv`, the other one `dq`, and both compute `p` and `ds`. That is 7
products of a pair instead of 5. But each sum stays in the registers of one warpgroup: there are no
atomic additions, no workspace, and equal calls have equal results.

- A block owns consecutive rows of one head, some for each computing warpgroup: keys in the one
  kernel, queries in the other. Another warpgroup streams tiles of the other side by TMA, `stages`
  tiles ahead.
- A document is consecutive, so the other side is one range of tiles. The queries of a key go
  from it to the end of its document, and the keys of a query from the start of its document to it.
  Documents are in order, so the bounds of the first and the last row give the range, and tell
  whether a tile needs a mask. Only tiles at the ends of a document or of a range do.
- Rows are the M of each wgmma. So `p` and `ds` of the rows come out of registers and go as
  registers into the next wgmma.
- The queries of all heads of a group follow each other in the stream of a key's head. So `dk` and
  `dv` are sums over the group without a sum in memory.

TMA fills in zeros for rows past S, and does not store them. Zeros make `p` a finite number: 1. The
bounds are zeros there too. So a key past S has no query. A query past S may have keys, and its `dq`
is dropped.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.attention.backward_kernels import (
    gradient_of_queries,
    gradients_of_keys_and_values,
)
from pallas_kernels.attention.backward_steps import PassConfig
from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.kernel import shared
from pallas_kernels.gpu.math import LOG2_E


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BackwardConfig:
    """Launch parameters.

    Attributes:
      dq: Parameters of the kernel for `dq`; its rows are queries, its tiles are of keys and values.
      dkdv: Parameters of the kernel for `dk` and `dv`; its rows are keys, its tiles are of queries.
    """

    dq: PassConfig
    dkdv: PassConfig


def default_config(head_size: int) -> BackwardConfig:
    """Launch parameters whose sums and tiles fit the registers."""
    if head_size == 64:
        return BackwardConfig(
            dq=PassConfig(rows=64, tile=128, stages=3, warpgroups=2),
            dkdv=PassConfig(rows=64, tile=64, stages=4, warpgroups=2),
        )
    return BackwardConfig(
        dq=PassConfig(rows=64, tile=64, stages=3, warpgroups=2),
        dkdv=PassConfig(rows=64, tile=64, stages=3, warpgroups=2),
    )


@shared("scale", "config")
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
    config: BackwardConfig | None = None,
) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """The gradients `(dq, dk, dv)` of causal attention within documents.

    `p` and `ds` are rounded to the dtype of `q` for their products. Sums are in float32.

    Args:
      q: Queries, bfloat16 or float16. S is a multiple of 8, H is 64 or 128.
      k: Keys; N is a multiple of K, and head n of the queries reads head `n // (N // K)`.
      v: Values.
      out: Output of the attention.
      logsumexp: Natural logarithm of the sum of `exp(scale · q·k)` over the keys of a query.
      dout: Gradient of `out`.
      begins: Index in its row of the first token of each token's document.
      ends: Index in its row after the last token of each token's document.
      scale: Positive factor of the products of queries and keys.
      config: Launch parameters; chosen if None.

    Raises:
      ValueError: The kernels do not compute arrays of these shapes and dtypes, or the scale is not
        positive.
    """
    _check(q, k, v, scale)
    config = config or default_config(q.shape[-1])
    # exp2 is one instruction, and an fma multiplies its argument by log2(e) and subtracts.
    log2_sum = logsumexp * LOG2_E
    delta = jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    operands = (q, k, v, dout, log2_sum, delta)
    of_dq, of_dkdv = (at_aligned_addresses((*operands, bounds)) for bounds in (begins, ends))
    dq = gradient_of_queries(*of_dq, scale=scale, config=config.dq)
    dk, dv = gradients_of_keys_and_values(*of_dkdv, scale=scale, config=config.dkdv)
    return at_aligned_addresses((dq, dk, dv))


def _check(q: Any, k: Any, v: Any, scale: float) -> None:
    """Raises ValueError for arguments that the kernels do not compute."""
    batch_size, num_tokens, num_heads, head_size = q.shape
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(
            f"q, k, v are {q.dtype}, {k.dtype}, {v.dtype}, not all bfloat16 or all float16"
        )
    if head_size not in (64, 128) or num_tokens % 8 or not q.size:
        raise ValueError(
            f"q has shape {q.shape}; heads must have 64 or 128 numbers, and the number of tokens "
            "of a row must be a positive multiple of 8"
        )
    of_keys = (batch_size, num_tokens, k.shape[2], head_size)
    if k.shape != of_keys or v.shape != of_keys or num_heads % k.shape[2]:
        raise ValueError(f"q, k, v of shapes {q.shape}, {k.shape}, {v.shape} do not fit together")
    if scale <= 0:
        raise ValueError(f"scale={scale} must be positive")
