"""FP8 on meshes of eight devices whose axes split the arrays at random.

The axes may split tokens, K, N and F, in all arrays alike or not. Whatever they split, results err
as on one device.
"""

import random

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.fp8 import fp8_linears, fp8_swiglu_mlp
from support.fp8_formulas import SMALL, exact_mlp, make_args, mlp_args
from support.numerics import assert_as_accurate, quick_jit, value_and_grads
from support.random_meshes import SIZES, random_spec

TOKENS = (8, 16), (64,), (8, 4, 8), (1, 8, 16)


def linear_case(rng, recipe):
    """A function of `x` and weights, its arguments, cotangents, and exact results and gradients."""
    depth, columns = rng.choice([64, 48, 8]), (64, 128)[: rng.choice([1, 2])]
    x, weights, dys = make_args((*rng.choice(TOKENS), depth), columns)
    fn = lambda x, *weights: fp8_linears(x, weights, recipe=recipe)
    as_rows = lambda a: np.asarray(a, np.float64).reshape(-1, a.shape[-1])
    x64, weights64, dys64 = as_rows(x), list(map(as_rows, weights)), list(map(as_rows, dys))
    dx = sum(dy @ w.T for dy, w in zip(dys64, weights64, strict=True))
    return fn, (x, *weights), dys, [*(x64 @ w for w in weights64), dx, *(x64.T @ d for d in dys64)]


def mlp_case(rng, recipe):
    """The same for the gated MLP."""
    depth, columns = rng.choice([64, 48]), rng.choice([1024, 384, 256, 128, 100])
    *args, dy = mlp_args((*rng.choice(TOKENS), depth), columns)
    return lambda *args: fp8_swiglu_mlp(*args, recipe=recipe), args, dy, exact_mlp(*args, dy)


# 1.5 s each.
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("make", [linear_case, mlp_case])
@pytest.mark.parametrize(
    "seed", [pytest.param(i, marks=() if i < 6 else pytest.mark.full) for i in range(20)]
)
def test_random_splits(seed, make, kind):
    rng = random.Random(seed)
    sizes = rng.choice(SIZES)
    mesh = jax.make_mesh(sizes, ("a", "b", "c")[: len(sizes)], (kind,) * len(sizes))
    fn, args, cotangent, exact = make(rng, SMALL[rng.choice(list(SMALL))])

    def graded(args, cotangent):
        if kind == AxisType.Explicit and not jax.sharding.get_abstract_mesh().empty:
            like = jax.eval_shape(fn, *args)
            reshard = lambda c, a: jax.sharding.reshard(c, a.sharding)
            cotangent = jax.tree.map(reshard, cotangent, like)
        return value_and_grads(fn, args, cotangent)

    def placed(a, spec):
        return jax.device_put(a, NamedSharding(mesh, spec))

    of_args = [random_spec(rng, mesh, a.shape) for a in args]
    with jax.set_mesh(mesh):
        on_mesh = [placed(a, spec) for a, spec in zip(args, of_args, strict=True)]
        whole = lambda a: placed(
            a, P() if kind == AxisType.Explicit else random_spec(rng, mesh, a.shape)
        )
        got = quick_jit(graded)(on_mesh, jax.tree.map(whole, cotangent))
    exact = [e.reshape(g.shape) for e, g in zip(exact, got, strict=True)]
    names = [f"{i} of {of_args} on {sizes}" for i in range(len(got))]
    on_one = quick_jit(graded)(args, cotangent)
    assert_as_accurate(got, on_one, exact, names=names, slack=1.3)
