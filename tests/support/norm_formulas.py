"""RMSNorm and residual-add RMSNorm in float64 numpy, and comparisons with them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import add_rms_norm, rms_norm
from support.numerics import assert_as_accurate, quick_jit, rounded, value_and_grads

F32 = jnp.float32


def formula(x, weight, dy, *, eps=1e-6, weight_offset=0.0, compute: Any = np.float64):
    """`(y, dx, dweight)`, with the derivative worked out by hand."""
    x, weight, dy = (np.asarray(a).astype(compute) for a in (x, weight, dy))
    scale = weight + compute(weight_offset)
    rstd = 1 / np.sqrt(np.mean(x * x, -1, keepdims=True) + compute(eps))
    x_hat = x * rstd
    dx_hat = dy * scale
    dx = rstd * (dx_hat - x_hat * np.mean(dx_hat * x_hat, -1, keepdims=True))
    # The sum runs over the tokens in order, as in a loop.
    return x_hat * scale, dx, np.sum((dy * x_hat).reshape(-1, x.shape[-1]), axis=0)


def add_formula(args, cotangents, residual_out, **options):
    """`[y, residual_out, dx, dresidual, dweight]` for a sum that is given."""
    dy, dresidual_out = cotangents
    y, dx, dweight = formula(residual_out, args[2], dy, **options)
    dx = dx + np.asarray(dresidual_out, np.float64)
    return [y, np.asarray(residual_out, np.float64), dx, dx, dweight]


def plain_add(x, residual, weight, *, eps=1e-6, weight_offset=0.0):
    """The addition and then the norm, each rounded to the dtype of `x`."""
    residual_out = (x.astype(F32) + residual.astype(F32)).astype(x.dtype)
    r = residual_out.astype(F32)
    scale = weight.astype(F32) + weight_offset
    y = r * jax.lax.rsqrt(jnp.mean(r * r, -1, keepdims=True) + eps) * scale
    return y.astype(x.dtype), residual_out


def make_args(shape, x_dtype=F32, weight_dtype=None, *, seed=0, weight_mean=1.0):
    rng = np.random.default_rng(seed)
    x, dy = (jnp.asarray(rng.normal(size=shape), x_dtype) for _ in range(2))
    weight = weight_mean + rng.normal(size=shape[-1:]) / 8
    return x, jnp.asarray(weight, weight_dtype or x_dtype), dy


def make_add_args(shape, x_dtype=F32, residual_dtype=None, weight_dtype=None):
    """`(x, residual, weight)` and the cotangents of `(y, residual_out)`."""
    x, weight, dy = make_args(shape, x_dtype, weight_dtype)
    residual, _, dresidual_out = make_args(shape, residual_dtype or x_dtype, seed=1)
    return (x, residual, weight), (dy, dresidual_out.astype(x_dtype))


@functools.cache
def compiled(fn, **options):
    """The program of values and gradients of `fn`, one for each set of options."""
    return quick_jit(lambda args, dy: value_and_grads(functools.partial(fn, **options), args, dy))


def graded(x, weight, dy, *, implementation, eps=1e-6, weight_offset=0.0, **options):
    """The value and both gradients of `rms_norm`."""
    fn = compiled(
        rms_norm, implementation=implementation, eps=eps, weight_offset=weight_offset, **options
    )
    return fn((x, weight), dy)


def check(x, weight, dy, *, eps=1e-6, weight_offset=0.0, **options):
    """Compares the value and both gradients of `rms_norm` with the formula; returns them."""
    names = ("y", "dx", "dweight")
    got = graded(x, weight, dy, eps=eps, weight_offset=weight_offset, **options)
    assert [a.dtype for a in got] == [x.dtype, x.dtype, weight.dtype]
    exact = formula(x, weight, dy, eps=eps, weight_offset=weight_offset)
    assert_as_accurate(got, rounded(exact, got), exact, names=names)
    return got


def check_add(args, cotangents, *, implementation, eps=1e-6, weight_offset=0.0, **options):
    """Compares both values and all gradients of `add_rms_norm` with the formula; returns them."""
    x, residual, weight = args
    numbers = {"eps": eps, "weight_offset": weight_offset}
    got = compiled(add_rms_norm, implementation=implementation, **numbers, **options)(
        args, cotangents
    )
    assert [a.dtype for a in got] == [x.dtype, x.dtype, x.dtype, residual.dtype, weight.dtype]
    # The sum of two such numbers is exact in float64, so only the cast rounds.
    total = np.asarray(x, np.float64) + np.asarray(residual, np.float64)
    residual_out = np.asarray(got[1])
    np.testing.assert_array_equal(residual_out, total.astype(x.dtype))
    assert_as_accurate(
        got,
        compiled(plain_add, **numbers)(args, cotangents),
        add_formula(args, cotangents, residual_out, **numbers),
        names=("y", "residual_out", "dx", "dresidual", "dweight"),
    )
    return got
