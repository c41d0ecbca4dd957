"""Helpers of the tests that run on a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from support.numerics import value_and_grads

# Tests that take more than 20 GiB. `make test-gpu` runs them after the others, one at a time.
large = pytest.mark.large


def as_float64(tree):
    """The leaves as float64 arrays of numpy."""
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def sampled(tree):
    """A part of each matrix in float64, every seventh row and the last 64; other arrays whole."""

    def sample(a):
        if a.ndim < 2:
            return a
        return a[np.r_[: a.shape[0] : 7, a.shape[0] - min(64, a.shape[0]) : a.shape[0]]]

    return as_float64([sample(a) for a in tree])


def graded(fn, **options):
    """The values and all gradients of `fn`, compiled."""
    fn = functools.partial(fn, **options)
    return jax.jit(lambda args, cotangents: value_and_grads(fn, args, cotangents))


@jax.jit
def same_bits(a, b):
    """Whether the arrays of two sequences are equal, one element for each pair."""
    return jnp.array([jnp.array_equal(*pair) for pair in zip(a, b, strict=True)])
