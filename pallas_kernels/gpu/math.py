"""Functions of float32 values inside of kernels, in few instructions.

In a clock a multiprocessor computes 16 numbers by exp2, rsqrt or a reciprocal, and 128 products or
sums. Its only fast division is by a reciprocal, to which ptxas adds instructions for numbers below
2**-126. The square of rsqrt is a reciprocal without them. With `approx_math` exp2 is one
instruction.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

LOG2_E = math.log2(math.e)
LN_2 = math.log(2)
# For kernels that need no other option of the compiler: exp2 in one instruction.
APPROXIMATE = plgpu.CompilerParams(approx_math=True)


def logistic(z: jax.Array) -> jax.Array:
    """`1 / (1 + exp(-z))`; relative error `(4 + |z|) · 2**-23` at most, and 0 below z = -88."""
    return jnp.square(jax.lax.rsqrt(1.0 + jnp.exp2(z * -LOG2_E)))


def tanh(z: jax.Array) -> jax.Array:
    """The hyperbolic tangent, to 1e-6; the hardware's own errs by 2**-11."""
    return 1.0 - 2.0 * jnp.square(jax.lax.rsqrt(1.0 + jnp.exp2(z * (2.0 * LOG2_E))))


def rounded(value: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`value` in 16 bits, or in its own dtype, for a kernel that computes with rounded numbers.

    Two numbers are rounded in one instruction, 64 a clock. Without the barrier LLVM rounds each
    number by itself, and ptxas takes an instruction that runs at 16 a clock.
    """
    return jax.lax.optimization_barrier(value.astype(dtype))


# 1.5 · 2**23 and its bits. The low bits of `x + _SHIFT` are `x`, rounded to an integer with ties to
# even. The factor of 1.5 keeps the exponent where `x` is negative.
_SHIFT = 12582912.0
_SHIFT_BITS = 0x4B400000


def int8_to_float32(values: jax.Array) -> jax.Array:
    """`values` of int8 in float32, from their bits. The hardware converts 16 a clock only."""
    bits = values.astype(jnp.int32) + _SHIFT_BITS
    return jax.lax.bitcast_convert_type(bits, jnp.float32) - _SHIFT


def float32_to_int8(values: jax.Array) -> jax.Array:
    """`values` up to 127 in magnitude, rounded to the nearest int8, ties to even; NaN gives any."""
    return jax.lax.bitcast_convert_type(values + _SHIFT, jnp.int32).astype(jnp.int8)
