"""Norms, gated MLPs and heads as other people write them, without our layers."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

D, F, V = 16, 24, 37
BF16, F32 = jnp.bfloat16, jnp.float32


def numbers(*shape: int, seed: int = 0, dtype: Any = F32) -> jax.Array:
    """Random weights that keep products of order one."""
    rng = np.random.default_rng([seed, *shape])
    return jnp.asarray(rng.normal(size=shape) * shape[0] ** -0.5, dtype)


class FloatNorm(nnx.Module):
    """Computes in float32, and stores its scale minus one."""

    def __init__(self):
        self.w = nnx.Param(jnp.zeros(D))
        self.variance_epsilon = 3e-4

    def __call__(self, x):
        y = x.astype(F32)
        y = y / jnp.sqrt(jnp.mean(y**2, axis=-1, keepdims=True) + self.variance_epsilon)
        return ((1 + self.w[...]) * y).astype(x.dtype)


class RoundingNorm(nnx.Module):
    """Rounds before the scale, and has its epsilon in the code."""

    def __init__(self, dtype: Any = BF16):
        self.gamma = nnx.Param(jnp.ones(D, BF16))
        self.dtype = dtype

    @jax.named_scope("norm")
    def __call__(self, x, deterministic: bool | None = None):
        y = x.astype(F32)
        y = (y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + 2.5e-5)).astype(self.dtype)
        return jnp.einsum("i...k,...k->i...k", y, self.gamma[...].astype(self.dtype))


class Projections(nnx.Module):
    """Has three linear layers in a dictionary, the gate in the middle."""

    def __init__(self, dtype: Any = BF16, activation: Any = nnx.silu, **options: Any):
        rngs = nnx.Rngs(0)
        make = functools.partial(
            nnx.Linear, dtype=dtype, rngs=rngs, **({"use_bias": False} | options)
        )
        self.dense = nnx.Dict(w1=make(D, F), w2=make(D, F), w3=make(F, D))
        self.activation = activation

    def __call__(self, inputs, deterministic=False, out_sharding=None):
        up, gate = self.dense.w1(inputs), self.dense.w2(inputs)
        return self.dense.w3(up * self.activation(gate))


class Einsums(nnx.Module):
    """Matrices `[out, in]`, as in PyTorch."""

    def __init__(self):
        self.gate_proj, self.up_proj = (nnx.Param(numbers(D, F, seed=i).T) for i in range(2))
        self.down_proj = nnx.Param(numbers(F, D).T)

    def __call__(self, x):
        dot = lambda x, w: x @ w[...].T.astype(x.dtype)
        return dot(jax.nn.silu(dot(x, self.gate_proj)) * dot(x, self.up_proj), self.down_proj)


class Fused(nnx.Module):
    """Has gate and up in one array: along an axis of their own, or one after the other."""

    def __init__(self, axis: int | None):
        pair = [numbers(D, F, seed=i) for i in range(2)]
        self.wi = nnx.Param(jnp.concatenate(pair, 1) if axis is None else jnp.stack(pair, axis))
        self.wo = nnx.Param(numbers(F, D))
        self.axis = axis

    def __call__(self, x):
        w = self.wi[...].astype(x.dtype)
        if self.axis is None:
            gate, up = jnp.split(x @ w, 2, axis=-1)
        else:
            gate, up = (x @ jnp.take(w, i, axis=self.axis) for i in range(2))
        return (jax.nn.silu(gate) * up) @ self.wo[...].astype(x.dtype)


class Remat(Einsums):
    """The backward finds the input alone."""

    __call__ = nnx.remat(Einsums.__call__)


class Model(nnx.Module):
    """A model of such modules; its head is what a test makes it."""

    def __init__(
        self, num_layers: int, *, dtype: Any = BF16, head: Any = None, use_bias: bool = False
    ):
        rngs, normal = nnx.Rngs(0), nnx.initializers.normal(1.0)
        self.embed = nnx.Embed(V, D, dtype=dtype, embedding_init=normal, rngs=rngs)
        self.layers = nnx.List([Layer(dtype) for _ in range(num_layers)])
        self.norm = nnx.RMSNorm(D, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.lm_head = nnx.Linear(D, V, use_bias=use_bias, dtype=dtype, rngs=rngs)
        self.calls = nnx.BatchStat(jnp.zeros((), jnp.int32))
        self.head = head

    def __call__(self, tokens, *, counts: bool = False, out_sharding=None):
        x = self.embed(tokens, out_sharding=out_sharding)
        for layer in self.layers:
            x = layer(x)
        if counts:
            self.calls[...] += 1
        x = self.norm(x)
        return self.lm_head(x) if self.head is None else self.head(self, x)


class Layer(nnx.Module):
    def __init__(self, dtype: Any):
        self.norm = nnx.RMSNorm(D, epsilon=1e-5, dtype=dtype, rngs=nnx.Rngs(0))
        self.mlp = Projections(dtype)

    def __call__(self, x):
        return x + self.mlp(self.norm(x), deterministic=True)


def shuffled(module: Any, seed: int = 1) -> Any:
    """The module with changed parameters, because initial constants hide mistakes."""
    rng = np.random.default_rng(seed)
    state = nnx.state(module, nnx.Param)
    change = lambda a: (a + jnp.asarray(rng.normal(size=a.shape) / 8, F32)).astype(a.dtype)
    nnx.update(module, jax.tree.map(change, state))
    return module
