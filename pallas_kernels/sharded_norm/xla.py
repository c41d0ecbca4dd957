"""Reduce-scatter, residual-add RMSNorm of a device's tokens, all-gather.

Why this exists. An all-reduce of the partial products of tensor parallelism leaves every device
with all tokens. All devices then do the same addition and norm, and all keep the same residual. An
all-reduce is a reduce-scatter and an all-gather; between the two a device has 1/n of the tokens
(Megatron's sequence parallelism, https://arxiv.org/abs/2205.05198). With the norm there, the bytes
between devices stay the same: each device sends `2·(n-1)/n` arrays `[T, D]` in the forward and as
many in the backward. The memory traffic of the norm, and what it keeps for the backward, are 1/n.
With `gather=False` half of the bytes of each direction are sent here. The caller's all-gather sends
the other half.

This module needs no gradient rule, because the rules of its parts are right. The transpose of the
all-gather is a reduce-scatter, of `dy`. The transpose of the reduce-scatter is an all-gather, of
the gradient of every device's `partial`. Neither keeps anything. The norm's own rule keeps
`residual_out` and `rstd` of this device's tokens, or what JAX keeps of plain JAX.
"""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float


def sharded_add_rms_norm(
    partial: Float[Array, "*B T D"],
    residual: Float[Array, "*B shard D"],
    weight: Float[Array, " D"],
    norm: Callable[[Array, Array, Array], tuple[Array, Array]],
    axis_name: str,
    *,
    gather: bool,
) -> tuple[Float[Array, "*B tokens D"], Float[Array, "*B shard D"]]:
    """`pallas_kernels.sharded_add_rms_norm` by XLA's collectives; `norm` is `add_rms_norm`."""
    tokens = partial.ndim - 2
    total = jax.lax.psum_scatter(partial, axis_name, scatter_dimension=tokens, tiled=True)
    y, residual_out = norm(total, residual, weight)
    if gather:
        y = jax.lax.all_gather(y, axis_name, axis=tokens, tiled=True)
    return y, residual_out
