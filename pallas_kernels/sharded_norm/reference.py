"""All tokens on every device, differentiated by JAX: the formula that tests compare with."""

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
    """The reference of `pallas_kernels.sharded_add_rms_norm`; `norm` is `add_rms_norm`."""
    tokens = partial.ndim - 2
    y, residual_out = norm(
        jax.lax.psum(partial, axis_name),
        jax.lax.all_gather(residual, axis_name, axis=tokens, tiled=True),
        weight,
    )
    size = residual.shape[tokens]
    start = jax.lax.axis_index(axis_name) * size
    shard_of = lambda a: jax.lax.dynamic_slice_in_dim(a, start, size, tokens)
    return y if gather else shard_of(y), shard_of(residual_out)
