"""Low-rank updates of a frozen output embedding (LoRA), which are never added to it.

With a frozen W `[V, D]`, a `[V, r]` and b `[r, D]`, the logits of `W + scale · a @ b` are

    x @ W.T + u @ a.T = [x, u] @ [W, a].T,    u = scale · x @ b.T

So the operations take the hidden states `[x, u]`, of D + r numbers, and an embedding that lies in
two arrays, `TwoParts`. Their gradient `[dx, du]` takes two products, of W and of a. The gradient of
a is the product of dlogits and u, and W has none. JAX differentiates u.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from pallas_kernels.arguments import BITS_OF_PRODUCTS, floating_arrays
from pallas_kernels.layout import Weight
from pallas_kernels.partition import gathered

_STEP = 64  # hidden units of a step of the kernels: 16 MB of a 16-bit `a` with V = 128256


class LoRA(NamedTuple):
    """The output embedding `weight + scale · a @ b` with a frozen `weight`.

    `linear_cross_entropy`, `linear_log_probs`, `linear_token_loss` and the distillation losses take
    a `LoRA` as their argument `weight`. The sum is never formed. Only `x`, `a`, `b` and `scale`
    have gradients. The gradient of the frozen `weight` is an array of zeros; do not ask for it.

    Products take `a` and `b` in the dtype of `x`. `scale · x @ b.T` is computed in float32 and
    rounded once, to the dtype of `x`. All options of the loss work except `vocab_chunk_size`. On a
    mesh, `a` may be split as `weight` is. Each device gathers all of `b`, which is small.

    `a` and `b` have floating dtypes of 16 bits or more, and each gradient the dtype of its array.
    The functions that take a `LoRA` raise ValueError if its shapes disagree or for
    `vocab_chunk_size`, and TypeError for other dtypes or a `scale` that is no number.

    Source: https://arxiv.org/abs/2106.09685, whose B is `a` and whose A is `b`.

    Attributes:
      weight: Frozen embedding, `[V, D]` or as `weight_layout` says.
      a: Left factor, `[V, r]` in both layouts.
      b: Right factor, `[r, D]`.
      scale: Factor of the update, such as alpha / r.
    """

    weight: Float[Array, "V D"] | Float[Array, "D V"]
    a: Float[Array, "V r"]
    b: Float[Array, "r D"]
    scale: Any = 1.0


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["frozen", "low_rank"], meta_fields=["layout"]
)
@dataclasses.dataclass(frozen=True)
class TwoParts:
    """An embedding of D + r hidden units in two arrays, with the shape and dtype of a whole one.

    Attributes:
      frozen: Entries of the first D hidden units, which have no gradient.
      low_rank: Entries of the last r hidden units.
      layout: Layout of both.
    """

    frozen: Any
    low_rank: Any
    layout: str

    ndim = 2

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole embedding."""
        axis, shape = self.layout.index("d"), list(self.frozen.shape)
        shape[axis] += self.low_rank.shape[axis]
        return tuple(shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the part that has a gradient."""
        return self.low_rank.dtype

    def astype(self, dtype: DTypeLike) -> "TwoParts":
        """Both parts in the dtype."""
        return jax.tree.map(lambda a: a.astype(dtype), self)

    def split(self, x: Float[Array, "*T _"]) -> tuple[Float[Array, "*T _"], Float[Array, "*T _"]]:
        """The hidden states of the two parts."""
        hidden_size = self.frozen.shape[self.layout.index("d")]
        return x[..., :hidden_size], x[..., hidden_size:]


def extended(x: Array, lora: LoRA, layout: str) -> tuple[Array, TwoParts]:
    """`([x, u], [W, a])`, of checked `x` and `lora.weight`; u and a with columns of zeros.

    Raises:
      ValueError: Shapes disagree.
      TypeError: A factor is no array, or its dtype does not suit it; or the scale is no number.
    """
    factors = {"weight.a": lora.a, "weight.b": lora.b}
    a, b = floating_arrays(**factors, least_bits=BITS_OF_PRODUCTS)
    vocab_size, hidden_size = (lora.weight.shape[layout.index(axis)] for axis in "vd")
    rank = a.shape[-1] if a.ndim else 0
    if rank == 0 or a.shape != (vocab_size, rank) or b.shape != (rank, hidden_size):
        raise ValueError(
            f"weight.a must be [V, r] and weight.b [r, D] with V = {vocab_size}, D = {hidden_size} "
            f"and r >= 1, got {a.shape} and {b.shape}"
        )
    if not isinstance(lora.scale, int | float) and getattr(lora.scale, "shape", None) != ():
        raise TypeError(
            f"weight.scale must be a number or a scalar array, got {lora.scale!r}; 1.0 is none"
        )
    scale = jnp.asarray(lora.scale, jnp.float32)
    (b,) = gathered([b])  # JAX refuses the product with `x` where Explicit axes split `b`
    u = (_product_of_finite(x, b.astype(x.dtype)) * scale).astype(x.dtype)
    padding = -rank % _STEP
    u = jnp.pad(u, (*[(0, 0)] * (x.ndim - 1), (0, padding)))
    low_rank = jnp.pad(a, ((0, 0), (0, padding)))
    low_rank = low_rank if layout == "vd" else low_rank.T
    frozen = jax.lax.stop_gradient(jnp.asarray(lora.weight))
    return jnp.concatenate([x, u], axis=-1), TwoParts(frozen, low_rank, layout)


def whole(weight: Any) -> jax.Array:
    """The embedding in one array: float32, and a copy, if it has two parts."""
    if not isinstance(weight, TwoParts):
        return weight
    parts = jax.tree.leaves(weight.astype(jnp.float32))
    return jnp.concatenate(parts, axis=weight.layout.index("d"))


@jax.checkpoint  # or a copy of x would be kept for the backward, 64 MiB at 8192 x 4096
def _product_of_finite(x: Array, b: Array) -> Array:
    """`x @ b.T` in float32; 0 where a token's x is not finite.

    A token that does not count may hold NaN, and its 0 times NaN would be in the gradient of b. One
    that counts has NaN through x itself.
    """
    is_finite = jnp.all(jnp.isfinite(x), axis=-1, keepdims=True)
    finite = jnp.where(is_finite, x, 0)
    return jnp.einsum("...d,rd->...r", finite, b, preferred_element_type=jnp.float32)


# An operation has one argument with a gradient in the place of the weight, so the frozen part is
# its last argument.


def arguments(weight: Any) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """The argument in the place of the weight, and those at the end."""
    return (weight.low_rank, (weight.frozen,)) if isinstance(weight, TwoParts) else (weight, ())


def joined(is_low_rank: bool, layout: str, weight: Any, last: Sequence[Any]) -> tuple[Any, Any]:
    """The weight of the operation's arguments, and the others of the last ones."""
    if not is_low_rank:
        return weight, last
    *others, frozen = last
    return TwoParts(frozen, weight, layout), others


def roles(is_low_rank: bool, layout: str, dtype: Any) -> tuple[Weight, tuple[Weight, ...]]:
    """The role of the argument in the place of the weight, and those at the end."""
    # Kernels and a gather of entries read the weight. Without `by_rows` XLA held copies of it.
    weight = Weight(tuple(layout), dtype, by_rows=True)
    if not is_low_rank:
        return weight, ()
    return Weight(tuple(layout.replace("d", "r")), dtype, by_rows=True), (weight,)
