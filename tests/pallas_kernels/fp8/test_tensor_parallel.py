"""FP8 with tensor parallelism: devices have parts of the axes K, N and F of weights.

`tests/aot/test_aot_fp8_tensor_parallel.py` checks the kernels and the exchanges.
"""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.fp8 import RECIPES, fp8_linears, fp8_swiglu_mlp
from support.fp8_formulas import SMALL, exact_mlp, exact_of_quantized, make_args, mlp_args
from support.numerics import assert_as_accurate, quick_jit, rounded, value_and_grads

FSDP, TENSOR = "fsdp", "tensor"
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "types"])


def on_mesh(fn, args, specs, kind):
    """`fn(*args)` on two by two devices, split by the specs."""
    mesh = jax.make_mesh((2, 2), (FSDP, TENSOR), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(args, specs, strict=True)
        ]
        return quick_jit(fn)(*placed)


# Specs of `x`, the weights and the gradients of the products; parts of K; parts of each N. The two
# weights of the last case split one mesh axis in two ways, so the second one is split again.
COLUMNS, ROWS = P(FSDP, TENSOR), P(TENSOR, FSDP)
OF_COLUMNS, OF_ROWS = P(FSDP, None, TENSOR), P(FSDP)
LINEAR = {
    "columns": (P(FSDP), [COLUMNS], [OF_COLUMNS], 1, [2]),
    "rows": (OF_COLUMNS, [ROWS], [OF_ROWS], 2, [1]),
    "rows of whole tokens": (P(), [P(TENSOR)], [P()], 2, [1]),
    "columns and a whole weight": (P(FSDP), [COLUMNS, P(FSDP)], [OF_COLUMNS, OF_ROWS], 1, [2, 1]),
    "columns and split channels": (OF_COLUMNS, [COLUMNS], [OF_COLUMNS], 1, [2]),
    "rows and columns": (P(FSDP), [ROWS, COLUMNS], [OF_ROWS, OF_ROWS], 2, [1, 1]),
}
RECIPE_OF = dict(zip(LINEAR, ["rowwise", "tensorwise", "rowwise_with_gw_hp"] * 2, strict=False))


def products_of(name, kind, recipe):
    """Arguments, function for products and gradients, and its results on a mesh."""
    of_x, of_weights, of_dys, *_ = LINEAR[name]
    n = len(of_weights)
    x, weights, dys = make_args((4, 6, 32), (16, 48)[:n])

    def graded(x, *rest):
        fn = lambda x, *weights: fp8_linears(x, weights, recipe=recipe)
        return value_and_grads(fn, (x, *rest[:n]), rest[n:])

    got = on_mesh(graded, (x, *weights, *dys), (of_x, *of_weights, *of_dys), kind)
    if kind == AxisType.Explicit:
        whole = lambda spec, a: P(*spec, *[None] * (a.ndim - len(spec)))
        for a, spec in zip(got, (*of_dys, of_x, *of_weights), strict=True):
            assert jax.typeof(a).sharding.spec == whole(spec, a)
    return (x, weights, dys), graded, got


def check(got, low_precision, exact, slack):
    exact = [e.reshape(g.shape) for e, g in zip(exact, got, strict=True)]
    n = len(got) // 2
    names = [*(f"y{i}" for i in range(n)), "dx", *(f"dw{i}" for i in range(n))]
    assert_as_accurate(got, low_precision(exact), exact, names=names, slack=slack)


# 1 s each.
@KINDS
@pytest.mark.parametrize("name", LINEAR)
def test_linear(name, kind):
    """Row scales are those of a device's part of a row, and a scale of a tensor is of all parts."""
    *_, parts_of_k, parts_of_n = LINEAR[name]
    recipe = SMALL[RECIPE_OF[name]]
    args, _, got = products_of(name, kind, recipe)
    exact = exact_of_quantized(recipe, *args, parts_of_k, parts_of_n)
    # Each device rounds its part of a sum over K or N to bfloat16.
    check(got, lambda exact: rounded(exact, got), exact, slack=2.0)


# 0.5 s each. In "rows and columns" each of the two products has a layout of its own.
@pytest.mark.parametrize("name", [name for name in LINEAR if name != "rows and columns"])
def test_weights_that_are_too_small(name):
    """Their products are split as those in FP8, and err as on one device."""
    (x, weights, dys), graded, got = products_of(name, AxisType.Explicit, "rowwise")
    x64, *dys64 = (np.asarray(a, np.float64).reshape(-1, a.shape[-1]) for a in (x, *dys))
    weights64 = [np.asarray(w.astype(jnp.bfloat16), np.float64) for w in weights]
    dx = sum(dy @ w.T for dy, w in zip(dys64, weights64, strict=True))
    exact = [*(x64 @ w for w in weights64), dx, *(x64.T @ dy for dy in dys64)]
    on_one = quick_jit(graded)(x, *weights, *dys)
    check(got, lambda _: on_one, exact, slack=2.0)


D = 32


def check_mlp(recipe, num_columns, kind):
    """Compares the MLP on four devices with that on one: it errs no more."""
    args = mlp_args((4, 13, D), num_columns)
    fn = lambda *args: fp8_swiglu_mlp(*args, recipe=SMALL[recipe])
    graded = lambda *args: value_and_grads(fn, args[:-1], args[-1])
    got = on_mesh(graded, args, (P(FSDP), COLUMNS, COLUMNS, ROWS, P(FSDP)), kind)
    exact = [e.reshape(g.shape) for e, g in zip(exact_mlp(*args), got, strict=True)]
    names = "y", "dx", "dw_gate", "dw_up", "dw_down"
    assert_as_accurate(got, quick_jit(graded)(*args), exact, names=names)


# 1.5 s each.
@KINDS
@pytest.mark.parametrize("recipe", RECIPES)
def test_mlp(recipe, kind, caplog):
    with caplog.at_level(logging.WARNING):
        check_mlp(recipe, 512, kind)
    assert "gathers" not in caplog.text


@KINDS
def test_columns_that_are_no_whole_blocks(kind, caplog):
    """Gate and up have a scale for 128 columns, so each device computes all 384. 1.5 s each."""
    with caplog.at_level(logging.WARNING):
        check_mlp("rowwise", 384, kind)
    assert "gathers an axis of 384" in caplog.text
    assert "a part of 192 is no multiple of 128" in caplog.text
