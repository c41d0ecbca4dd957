"""Fixtures and formulas that the tests of the sharded norm share."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import implementation as implementation_module
from pallas_kernels.norm import mosaic_gpu

F32 = jnp.float32


def forward_formula(options, config, x, residual, weight):
    """The formula of the norm's forward kernel."""
    total = (x.astype(F32) + residual.astype(F32)).astype(x.dtype)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(total.astype(F32)), axis=-1) + options.eps)
    x_hat = total.astype(F32) * rstd[:, None]
    if options.casting == "llama":
        x_hat = x_hat.astype(x.dtype).astype(F32)
    return (x_hat * (weight.astype(F32) + options.weight_offset)).astype(x.dtype), total, rstd


def backward_formula(options, config, dy, dresidual_out, source, weight, rstd):
    x_hat, dy = source.astype(F32) * rstd[:, None], dy.astype(F32)
    dx_hat = dy * (weight.astype(F32) + options.weight_offset)
    mean = jnp.mean(dx_hat * x_hat, axis=-1, keepdims=True)
    dx = rstd[:, None] * (dx_hat - x_hat * mean)
    if dresidual_out is not None:
        dx += dresidual_out.astype(F32)
    return dx.astype(source.dtype), jnp.sum(dy * x_hat, axis=0)


@pytest.fixture
def kernel_formulas(monkeypatch, fresh_operations):
    """The norm runs its kernels by default, and formulas are in the place of the kernels.

    The interpreter knows only one device, so it cannot run the kernels of a mesh.
    """
    monkeypatch.setattr(implementation_module, "reason_not_here", lambda: None)
    monkeypatch.setattr(mosaic_gpu, "forward", forward_formula)
    monkeypatch.setattr(mosaic_gpu, "backward", backward_formula)


@pytest.fixture
def implementation(request):
    if request.param != "xla_kernel":
        return request.param
    request.getfixturevalue("kernel_formulas")
    return "xla"
