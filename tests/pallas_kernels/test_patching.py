"""`patch` on modules that other people might write: what it recognizes, and what it keeps."""

import copy
import functools
import pickle  # noqa: TID251  of our own objects, in one process
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from pallas_kernels import explain, patch
from support.foreign_modules import (
    BF16,
    F32,
    D,
    Einsums,
    F,
    FloatNorm,
    Fused,
    Model,
    Projections,
    Remat,
    RoundingNorm,
    shuffled,
)
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

pytestmark = pytest.mark.usefixtures("fast_compilation", "usual_promotion")


@pytest.fixture
def usual_promotion():
    """The code of others lets JAX promote dtypes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def flax_norm(**options: Any):
    return nnx.RMSNorm(D, rngs=nnx.Rngs(0), **options)


def norm_of(name: str, eps: float, offset: float = 0.0):
    def formula(p, x):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (p[name] + offset)

    return formula


def mlp_of(gate, up, down):
    return lambda p, x: (jax.nn.silu(x @ gate(p)) * (x @ up(p))) @ down(p)


def plain(name: str):
    return lambda p: p[name]


EINSUMS = mlp_of(*(lambda p, n=n: p[f"{n}_proj"].T for n in ("gate", "up", "down")))
PROJECTIONS = mlp_of(*(plain(f"dense.w{i}.kernel") for i in (2, 1, 3)))
# What computes the module, the text of what runs, and the module's formula.
RECOGNIZED = {
    "flax": (
        lambda: flax_norm(epsilon=1e-3, dtype=BF16),
        "rms_norm(weight=scale, eps=0.001)",
        norm_of("scale", 1e-3),
    ),
    "flax, promotes": (flax_norm, "rms_norm(weight=scale, eps=1e-06)", norm_of("scale", 1e-6)),
    "offset": (
        FloatNorm,
        "rms_norm(weight=w, eps=0.0003, weight_offset=1)",
        norm_of("w", 3e-4, 1.0),
    ),
    "rounds": (
        RoundingNorm,
        "rms_norm(weight=gamma, eps=2.5e-05, casting='llama')",
        norm_of("gamma", 2.5e-5),
    ),
    "linear layers": (
        Projections,
        "swiglu_mlp(dense.w2.kernel, dense.w1.kernel, dense.w3.kernel)",
        PROJECTIONS,
    ),
    "float32": (
        lambda: Projections(None),
        "swiglu_mlp(dense.w2.kernel, dense.w1.kernel, dense.w3.kernel)",
        PROJECTIONS,
    ),
    "transposed": (Einsums, "swiglu_mlp(gate_proj.T, up_proj.T, down_proj.T)", EINSUMS),
    "remat": (Remat, "swiglu_mlp(gate_proj.T, up_proj.T, down_proj.T, save='x')", EINSUMS),
    **{
        f"fused {axis}": (
            functools.partial(Fused, axis),
            f"swiglu_mlp(wi[first half of axis {1 if axis is None else axis}], "
            f"wi[second half of axis {1 if axis is None else axis}], wo)",
            mlp_of(
                *(lambda p, i=i, axis=axis: half(p["wi"], i, axis) for i in (0, 1)), plain("wo")
            ),
        )
        for axis in (None, 0, 1)
    },
}


def half(w, i, axis):
    return jnp.split(w, 2, axis=1)[i] if axis is None else jnp.take(w, i, axis=axis)


def parameters(module) -> dict[str, Any]:
    flat = nnx.to_flat_state(nnx.state(module, nnx.Param))
    return {".".join(map(str, path)): v[...] for path, v in flat}


@functools.cache
def input_and_cotangent(dtype: Any):
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=(2, 32, D)), dtype) for _ in range(2))


def results(module, dtype: Any):
    """The value and the gradients for all parameters and the input, by name."""
    graphdef, state = nnx.split(module)
    x, dy = input_and_cotangent(dtype)

    def run(state, x):
        y, vjp = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, x)
        return y, vjp(dy.astype(y.dtype))

    y, (dstate, dx) = quick_jit(run)(state, x)
    return {"y": y, "x": dx} | {
        ".".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(dstate)
    }


@pytest.mark.parametrize("name", RECOGNIZED)
def test_what_is_recognized_and_its_values_and_gradients(name):
    make, text, formula = RECOGNIZED[name]
    # XLA for CPUs lacks a product of bfloat16 in this layout, unless it optimizes.
    dtype = F32 if formula is EINSUMS else BF16
    module = shuffled(make())
    before = results(module, dtype)
    (found,) = patch(module).modules
    assert found.operation == text
    after = results(module, dtype)
    assert {k: a.dtype for k, a in after.items()} == {k: a.dtype for k, a in before.items()}
    with jax.enable_x64(True):
        wide = lambda a: jnp.asarray(np.asarray(a, np.float64))
        p = {k: wide(a) for k, a in parameters(module).items()}
        x, dy = map(wide, input_and_cotangent(dtype))
        y, *gradients = value_and_grads(formula, (p, x), dy)
        exact = dict(zip([*sorted(p), "x"], map(np.asarray, gradients), strict=True))
        exact["y"] = np.asarray(y)
    assert_as_accurate(*([r[k] for k in exact] for r in (after, before, exact)), names=exact)


class LargeEpsilon(nnx.Module):
    """An epsilon beside the root, and not under it."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(D))

    def __call__(self, x):
        return x / (jnp.sqrt(jnp.mean(x * x, -1, keepdims=True)) + 1e-6) * self.scale[...]


class Clamped(Einsums):
    def __call__(self, x):
        dot = lambda x, w: x @ w[...].T
        gate = jnp.minimum(dot(x, self.gate_proj), 7.0)
        return dot(jax.nn.silu(gate) * dot(x, self.up_proj), self.down_proj)


class WithDropout(Einsums):
    def __init__(self, **options):
        super().__init__()
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0), **options)

    def __call__(self, x):
        return self.dropout(super().__call__(x))


class Counting(Einsums):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __call__(self, x):
        self.count += 1
        return super().__call__(x)


class Adding(FloatNorm):
    def __call__(self, x, residual):
        return super().__call__(x + residual)


class Failing(FloatNorm):
    def __call__(self, x):
        raise RuntimeError("only under a mesh")


REFUSED = {
    "LayerNorm": (lambda: nnx.LayerNorm(D, rngs=nnx.Rngs(0)), "an RMSNorm has one vector, and"),
    "LayerNorm without bias": (
        lambda: nnx.LayerNorm(D, use_bias=False, rngs=nnx.Rngs(0)),
        "differs from RMSNorm by",
    ),
    "epsilon beside the root": (LargeEpsilon, "differs from RMSNorm by"),
    "GELU": (lambda: Projections(activation=nnx.gelu), "differs from a gated MLP with silu by"),
    "biases": (lambda: Projections(use_bias=True), "a gated MLP has three matrices, and this has"),
    "precision": (
        lambda: Projections(precision=jax.lax.Precision.HIGHEST),
        "products have a precision of their own",
    ),
    "clamped": (Clamped, "differs from a gated MLP with silu by"),
    "dropout": (WithDropout, "in evaluation mode, for example by dropout"),
    "dropout in evaluation": (lambda: WithDropout(deterministic=True), "in training mode"),
    "attributes": (Counting, "changes its attributes"),
    "two inputs": (Adding, r"its call takes \(x, residual\), and not one array"),
    "failing": (Failing, "raises only under a mesh"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_and_why(name):
    make, reason = REFUSED[name]
    module = make()
    cls = type(module)
    (left,) = patch(module).left
    assert type(module) is cls and left.operation is None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(left.reason)


def test_other_modules_are_no_candidates(unchecked_shapes):
    model = nnx.Dict(
        attention=nnx.MultiHeadAttention(2, D, rngs=nnx.Rngs(0)),
        embed=nnx.Embed(7, D, rngs=nnx.Rngs(0)),
        conv=nnx.Conv(D, D, 3, rngs=nnx.Rngs(0)),
    )
    assert patch(model).modules == ()
    with pytest.raises(TypeError, match="takes an nnx.Module, got a dict"):
        patch({})  # pyright: ignore[reportArgumentType]
