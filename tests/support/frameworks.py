"""Comparisons of our layers with a framework's layers, whose errors are the tolerance."""

import re
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np

from support.jaxprs import equations
from support.numerics import assert_trees_as_accurate, quick_jit


def normal(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    """Random numbers."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def shuffled(params: Any) -> Any:
    """Changed parameters, because initial constants hide mistakes."""
    rng = np.random.default_rng(1)
    # NumPy adds without a program for each shape.
    changed = lambda a: np.asarray(a) + (rng.standard_normal(a.shape) / 8).astype(a.dtype)
    return jax.tree.map(lambda a: jnp.asarray(changed(a)), params)


def check(ours: Callable[..., Any], theirs: Callable[..., Any], *args: Any) -> None:
    """Asserts that `ours` errs as little as `theirs`, in the value and in every gradient.

    Args:
      ours: Function of trees of floating arrays.
      theirs: The same function in the framework's layers. It computes in the dtype of its last
        argument, so that with float64 arguments it is exact.
      *args: Arguments, such as the parameters and `x`.
    """
    theirs = jax.numpy_dtype_promotion("standard")(theirs)
    result = jax.eval_shape(ours, *args)
    cotangent = jax.tree.map(lambda a: normal(a.shape, jnp.float32, seed=2), result)

    def graded(fn: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
        def scalar(*args: Any) -> tuple[Any, Any]:
            out = fn(*args)
            parts = jax.tree.map(
                lambda a, c: jnp.sum(a.astype(dtype) * c.astype(dtype)), out, cotangent
            )
            return sum(jax.tree.leaves(parts)), out

        gradients = jax.grad(scalar, tuple(range(len(args))), has_aux=True)
        return quick_jit(gradients)

    got, low = (graded(fn, jnp.float32)(*args) for fn in (ours, theirs))
    with jax.enable_x64(True):
        exact = graded(theirs, jnp.float64)(
            *jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), args)
        )
        assert_trees_as_accurate(got, low, exact)
    for gradients, arg in zip(got[0], args, strict=True):
        chex.assert_trees_all_equal_shapes_and_dtypes(gradients, arg)
        assert all(np.any(np.asarray(g, np.float32)) for g in jax.tree.leaves(gradients))


def has_shape(fn: Callable[..., Any], args: Any, *shape: int) -> bool:
    """Whether a function makes an array of a shape, in any of the programs that it calls."""
    jaxpr = jax.make_jaxpr(fn)(*args).jaxpr
    return any(getattr(v.aval, "shape", ()) == shape for e in equations(jaxpr) for v in e.outvars)


def not_hidden_states(name):
    """Values that no layer takes as hidden states `[4, 8]`, with their errors: `(class, a, text)`.

    Args:
      name: Name of the layer's argument.
    """
    keys = jax.random.split(jax.random.key(0), 4)
    not_floating = [jnp.ones((4, 8), dtype) for dtype in (jnp.int32, jnp.bool, jnp.complex64)]
    yield TypeError, [[1.0] * 8] * 4, f"^{name} must be an array, got a list; make it a"
    for a in (*not_floating, keys):
        text = f"{name} is {a.dtype}, not a floating dtype; cast {name} to float32"
        yield TypeError, a, f"^{re.escape(text)}"
    text = f"{name} must be [..., D], got a scalar; give it an axis of D numbers"
    yield ValueError, jnp.float32(1), f"^{re.escape(text)}"
