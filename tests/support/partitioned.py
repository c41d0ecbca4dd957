"""Small operations in plain JAX that partition themselves, for tests of the partitioning."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layout import GradientOf, Place, Roles, Tokens, Weight
from pallas_kernels.partition import partitioned

_X, _H = Tokens(("d",)), Tokens(("f",))
_W_IN, _W_OUT = Weight(("d", "f")), Weight(("f", "d"))
_PARTS = ("f",)


def _forward(key: Any, place: Place):
    def run(x, w_in, w_out):
        h = x @ w_in
        return _over_parts(jnp.tanh(h) @ w_out, place), h

    return run


def _backward(key: Any, place: Place):
    def run(dy, x, h, w_in, w_out):
        a = jnp.tanh(h)
        dh = (dy @ w_out.T) * (1 - a * a)
        return _over_parts(dh @ w_in.T, place), _over_tokens(x, dh), _over_tokens(a, dy)

    return run


def _over_parts(a, place: Place):
    (axes,) = place.parts
    return jax.lax.psum(a, axes) if axes else a


def _over_tokens(a, b):
    return a.reshape(-1, a.shape[-1]).T @ b.reshape(-1, b.shape[-1])


@dataclasses.dataclass(frozen=True)
class TanhMLP:
    """`tanh(x @ w_in) @ w_out`, whose columns of `w_in` and rows of `w_out` may be split."""

    name = "tanh_mlp"

    def forward(self, wanted, *args):
        roles = Roles((_X, _W_IN, _W_OUT), (_X, _H), _PARTS)
        y, h = partitioned(_forward, self, roles, *args)
        return (y,) if wanted is None else (y, h)

    def num_residuals(self, wanted):
        return 1

    def saved(self, wanted, args, results, residuals):
        return results, (*args, *residuals)

    def backward(self, wanted, saved, cotangents):
        x, w_in, w_out, h = saved
        roles = Roles((_X, _X, _H, _W_IN, _W_OUT), (_X, GradientOf(3), GradientOf(4)), _PARTS)
        gradients = partitioned(_backward, self, roles, cotangents[0], x, h, w_in, w_out)
        return [g for g, is_wanted in zip(gradients, wanted, strict=True) if is_wanted]

    def fold(self, wanted, args, is_batched):
        return (self, args) if is_batched == (True, False, False) else None
