"""Comparisons whose tolerance is the error that the number format itself makes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np


def quick_jit(fn, **options):
    """`jax.jit` for small arrays that keeps every rounding in the program.

    It skips LLVM's optimizations, which take half of the time to compile. By default XLA may drop a
    cast to 16 bits and back, and so hide a rounding of another backend or of an eager call.
    """
    compiler_options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    return jax.jit(fn, compiler_options=compiler_options, **options)


def value_and_grads(fn, args, cotangent):
    """`fn(*args)` and the gradient for every argument, flattened, in their own dtypes."""
    out, vjp = jax.vjp(fn, *args)
    return [*jax.tree.leaves(out), *jax.tree.leaves(vjp(cotangent))]


def rounded(exact, like):
    """Float64 arrays rounded once to the dtypes of `like`: the least possible error."""
    return [np.asarray(e).astype(g.dtype) for e, g in zip(exact, like, strict=True)]


def rms(a):
    """Root mean square, 0 of an empty array."""
    return float(np.sqrt(np.mean(np.square(a)))) if a.size else 0.0


def assert_as_accurate(got, low_precision, exact, *, names, slack=1.2, floor=8.0):
    """Asserts that `got` errs at most `slack` times as much as `low_precision` does.

    Where `exact` is infinite or NaN, `got` must be the same infinity or NaN.

    Args:
      got: Arrays under test.
      low_precision: Same quantities from a plain implementation in the same dtypes. Its error comes
        from the number format, so the tolerance needs no tuning by dtype or shape.
      exact: Same quantities in float64.
      names: Names of the quantities, for the message.
      slack: Allowed ratio of the root-mean-square errors.
      floor: Number of float32 epsilons of the value that are always allowed.
    """
    for name, *arrays in zip(names, got, low_precision, exact, strict=True):
        g, w, e = (np.asarray(a, np.float64) for a in arrays)
        assert g.shape == e.shape, f"{name}: shape {g.shape}, expected {e.shape}"
        finite = np.isfinite(e)
        np.testing.assert_array_equal(g[~finite], e[~finite], err_msg=name)
        g, w, e = g[finite], w[finite], e[finite]
        allowed = max(slack * rms(w - e), floor * np.finfo(np.float32).eps * rms(e))
        error = rms(g - e)
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def assert_trees_as_accurate(got, low_precision, exact, **options):
    """`assert_as_accurate` for trees of one structure; paths name the leaves."""
    chex.assert_trees_all_equal_structs(got, low_precision, exact)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(exact)]
    leaves = map(jax.tree.leaves, (got, low_precision, exact))
    assert_as_accurate(*leaves, names=names, **options)


def assert_close(got, expected):
    """Equal up to some float32 epsilons of the largest element of each array.

    For one computation in two programs, which XLA fuses differently.
    """
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda a, e: a / jnp.max(jnp.abs(e)), t, expected) for t in (got, expected)),
        rtol=0,
        atol=2e-6,
    )
