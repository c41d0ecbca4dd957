"""The gated MLP in plain JAX and in float64, and comparisons with them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import swiglu_mlp
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

NAMES = ("y", "dx", "dw_gate", "dw_up", "dw_down")


def make_args(shape, intermediate_size, dtype, weight_dtype=None, *, scale=1.0, seed=0):
    """x, the three weights and a cotangent; gates of a standard deviation of `scale`."""
    rng = np.random.default_rng(seed)
    hidden_size = shape[-1]
    normal = lambda *shape: rng.standard_normal(shape)
    x, dy = normal(*shape) * scale, normal(*shape)
    w_gate, w_up = normal(2, hidden_size, intermediate_size) / np.sqrt(hidden_size)
    w_down = normal(intermediate_size, hidden_size) / np.sqrt(max(1, intermediate_size))
    weight_dtype = weight_dtype or dtype
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(w_gate, weight_dtype),
        jnp.asarray(w_up, weight_dtype),
        jnp.asarray(w_down, weight_dtype),
        jnp.asarray(dy, dtype),
    )


def plain(x, w_gate, w_up, w_down):
    """The MLP in plain JAX, every step in the dtype of `x`."""
    w_gate, w_up, w_down = (w.astype(x.dtype) for w in (w_gate, w_up, w_down))
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def exact(*args):
    """Value and gradients in float64."""
    x, w_gate, w_up, w_down, dy = (np.asarray(a, np.float64) for a in args)
    shape = x.shape
    x, dy = x.reshape(-1, shape[-1]), dy.reshape(-1, shape[-1])
    gate, up = x @ w_gate, x @ w_up
    sigmoid = 1 / (1 + np.exp(-np.clip(gate, -700, None)))
    product = gate * sigmoid * up
    dproduct = dy @ w_down.T
    dgate = dproduct * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dproduct * gate * sigmoid
    dx = dgate @ w_gate.T + dup @ w_up.T
    y = product @ w_down
    return y.reshape(shape), dx.reshape(shape), x.T @ dgate, x.T @ dup, product.T @ dy


@functools.cache
def graded(**options):
    fn = functools.partial(swiglu_mlp, **options)
    return quick_jit(lambda *args: value_and_grads(fn, args[:-1], args[-1]))


graded_plain = quick_jit(lambda *args: value_and_grads(plain, args[:-1], args[-1]))


def check(args, **options):
    got = graded(**options)(*args)
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in (args[0], *args[:-1])]
    assert_as_accurate(got, graded_plain(*args), exact(*args), names=NAMES)
    return got
