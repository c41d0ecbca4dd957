"""Functions inside of kernels, by plain JAX on a CPU. It takes a second."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.gpu import math

Z = np.concatenate([np.linspace(-87, 87, 4001), np.linspace(-2, 2, 4001), [-1e30, 1e30, 0.0]])


def test_logistic():
    z = Z.astype(np.float32)
    exact = 1 / (1 + np.exp(-z.astype(np.float64).clip(-700)))
    got = np.asarray(jax.jit(math.logistic)(z), np.float64)
    normal = z > -87.0001
    allowed = (4 + np.abs(z)) * 2.0**-23
    assert np.all(np.abs(got / exact - 1)[normal] <= allowed[normal])
    assert got[z == -1e30] == 0 and got[z == 1e30] == 1


def test_tanh():
    z = Z.astype(np.float32)
    got = np.asarray(jax.jit(math.tanh)(z), np.float64)
    assert np.max(np.abs(got - np.tanh(z.astype(np.float64)))) <= 1e-6


def test_rounded_numbers_are_those_of_astype():
    z = jnp.asarray(Z, jnp.float32)
    got = jax.jit(lambda a: math.rounded(a, jnp.bfloat16))(z)
    assert got.dtype == jnp.bfloat16 and jnp.array_equal(got, z.astype(jnp.bfloat16))
