"""Comparisons that know how much error the number format itself makes."""

import chex
import jax
import numpy as np


def quick_jit(fn, **options):
    """`jax.jit` for small arrays, with every rounding that is written.

    LLVM's optimizations are half of the time to compile. XLA may drop a cast to 16 bits and back,
    which hides a rounding that another backend or an eager call would do.
    """
    compiler_options = {"xla_backend_optimization_level": 0, "xla_allow_excess_precision": False}
    return jax.jit(fn, compiler_options=compiler_options, **options)


def value_and_grads(fn, args, cotangent):
    """`fn(*args)` and the gradient in every argument, flattened, in their own dtypes."""
    out, vjp = jax.vjp(fn, *args)
    return [*jax.tree.leaves(out), *jax.tree.leaves(vjp(cotangent))]


def rounded(exact, like):
    """Float64 arrays rounded once to the dtypes of others: the least error that can be made."""
    return [np.asarray(e).astype(g.dtype) for e, g in zip(exact, like, strict=True)]


def rms(a):
    """Root mean square, 0 of an empty array."""
    return float(np.sqrt(np.mean(np.square(a)))) if a.size else 0.0


def assert_as_accurate(got, low_precision, exact, *, names, slack=1.2, floor=8.0):
    """Asserts that `got` errs at most `slack` times as much as `low_precision` does.

    An element that overflows, or is NaN, in `exact` must be the same infinity, or NaN, in `got`.

    Args:
      got: arrays under test.
      low_precision: the same quantities from a plain implementation in the same dtypes: its error
        is that of the number format, so the tolerance needs no tuning by dtype or shape.
      exact: the same in float64.
      names: of the quantities, for the message.
      slack: ratio of root-mean-square errors allowed.
      floor: errors below this many float32 epsilons of the value are never too large.
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
    """`assert_as_accurate` of trees of one structure, whose leaves are named by their paths."""
    chex.assert_trees_all_equal_structs(got, low_precision, exact)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(exact)]
    leaves = map(jax.tree.leaves, (got, low_precision, exact))
    assert_as_accurate(*leaves, names=names, **options)
