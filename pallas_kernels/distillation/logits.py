"""Logits as they lie in memory, and what becomes of them before the softmax."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.loss.token_loss import softcapped, with_bias


class Logits(NamedTuple):
    """Logits of some tokens.

    Attributes:
      values: Products of hidden states and output embedding, as they lie in memory.
      bias: Bias of the logits, if there is one.
      softcap: Bound c of `c · tanh(z / c)`; None sets no bound.
      temperature: Divisor of the logits after the softcap.
    """

    values: Float[Array, "*T V"]
    bias: Float[Array, " V"] | None
    softcap: float | None
    temperature: float

    def stored(self) -> "Logits":
        """The same logits, such that all readers see the numbers that are in memory.

        XLA fuses small products with their readers, and there drops the rounding of a cast to 16
        bits and back. The derivative then reads other numbers than the sums. At T = 64, D = 3 and
        V = 300 on a CPU, the gradient of a reverse KL erred by 90 % of itself, and now by 19 %.
        """
        return self._replace(values=jax.lax.optimization_barrier(self.values))

    def with_bias(self) -> Float[Array, "*T V"]:
        """The logits with their bias, float32."""
        return with_bias(self.values.astype(jnp.float32), self.bias)

    def scaled(self) -> Float[Array, "*T V"]:
        """The logits with bias and softcap, divided by the temperature, float32."""
        return softcapped(self.with_bias(), self.softcap) / self.temperature

    def times_slope(self, gradient: Float[Array, "*T V"]) -> Float[Array, "*T V"]:
        """The gradient times the derivative of the softcap."""
        return times_slope(gradient, self.with_bias(), self.softcap)


def times_slope(
    gradient: Float[Array, "..."], z: Float[Array, "..."], softcap: float | None
) -> Float[Array, "..."]:
    """`gradient · (1 - tanh²(z / c))`, or the gradient itself without a cap."""
    return gradient if softcap is None else gradient * (1 - jnp.square(jnp.tanh(z / softcap)))
