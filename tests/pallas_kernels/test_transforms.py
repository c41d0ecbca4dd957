"""Every transformation of every operation and implementation; docs/transforms.md shows the table.

The transformations of an operation are one program.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mlp import mosaic_gpu as swiglu_kernels
from pallas_kernels.mlp.reference import swiglu as swiglu_formula
from pallas_kernels.norm import mosaic_gpu as norm_kernels
from support.numerics import assert_as_accurate, quick_jit
from support.transforms import (
    BASE,
    DONATION,
    IMPLEMENTATIONS,
    MATRIX,
    NO_FORWARD_MODE,
    OPERATIONS,
    RAISES,
    VALUES,
    WORKS,
    Sizes,
    expected,
    make_call,
    run_all,
)

pytestmark = pytest.mark.usefixtures("fast_compilation")

SIZES = Sizes(members=2, tokens=5, hidden=64, columns=96, vocabulary=80)
# Those that the kernels with matrix products take.
SIZES_OF_PRODUCTS = Sizes(members=2, tokens=5, hidden=128, columns=128, vocabulary=128)
PRODUCTS = "swiglu_mlp", "linear_cross_entropy"


def sizes_of(dtype: Any) -> Sizes:
    return SIZES_OF_PRODUCTS if dtype == jnp.bfloat16 else SIZES


@functools.cache
def results(operation: str, implementation: str, dtype: Any, names: tuple[str, ...]) -> Any:
    """The results of transformations."""
    call = make_call(operation, implementation, sizes_of(dtype), dtype)
    donated = jax.tree.map(jnp.copy, call.floating_args)
    run = quick_jit(functools.partial(run_all, call, names), donate_argnums=1)
    found = jax.block_until_ready(run(call.args, donated))
    assert all(a.is_deleted() for a in donated)
    return jax.tree.map(np.asarray, found)


@functools.cache
def exact(operation: str, dtype: Any) -> Any:
    """The results of the formula in float64."""
    call = make_call(operation, "formula", sizes_of(dtype), dtype)
    with jax.enable_x64(True):
        args = jax.tree.map(
            lambda a: np.asarray(a, np.float64) if a.dtype == dtype else a, call.args
        )
        run = quick_jit(functools.partial(run_all, call, BASE))
        return jax.tree.map(np.asarray, run(args, args[: call.num_floating]))


def marks(transform: str, operation: str, implementation: str) -> Any:
    if implementation == "mosaic_gpu":
        # Their transformations are those of "xla", by the same primitives.
        needs_gpu = operation in PRODUCTS and MATRIX[transform][operation][implementation] == WORKS
        return pytest.mark.gpu if needs_gpu else ()
    if implementation == "xla":
        is_the_reference = operation not in PRODUCTS
        return pytest.mark.full if is_the_reference else ()
    # The rest is JAX's own transformation of plain JAX.
    return () if transform in (*BASE, DONATION) else pytest.mark.full


CELLS = [
    pytest.param(*(cell := (transform, *which)), id="-".join(cell), marks=marks(*cell))
    for which in itertools.product(OPERATIONS, IMPLEMENTATIONS)
    for transform in (*VALUES, DONATION)
]


@pytest.fixture
def kernel_formulas(monkeypatch, fresh_operations):
    """On a CPU formulas are in the place of the kernels of norms and of `swiglu`.

    Transformations do not look into a kernel, and the interpreter's effects rule some of them out.
    """
    if jax.default_backend() == "gpu":
        return
    monkeypatch.setattr(norm_kernels, "forward", norm_forward)
    monkeypatch.setattr(norm_kernels, "backward", norm_backward)
    gradients = lambda *args: jax.vjp(swiglu_formula, *args[:2])[1](args[2])
    monkeypatch.setattr(swiglu_kernels, "_forward_of", lambda *_: lambda *a: [swiglu_formula(*a)])
    monkeypatch.setattr(swiglu_kernels, "_backward_of", lambda *_: gradients)


def norm_forward(options, x, residual, weight):
    total = x if residual is None else x + residual
    rstd = jax.lax.rsqrt(jnp.mean(total * total, axis=-1) + options.eps)
    return total * rstd[:, None] * weight, None if residual is None else total, rstd


def norm_backward(options, dy, dresidual_out, source, weight, rstd):
    x_hat, dx_hat = source * rstd[:, None], dy * weight
    dx = rstd[:, None] * (dx_hat - x_hat * jnp.mean(dx_hat * x_hat, axis=-1, keepdims=True))
    return dx if dresidual_out is None else dx + dresidual_out, jnp.sum(dy * x_hat, axis=0)


@pytest.mark.parametrize("transform, operation, implementation", CELLS)
def test_each_cell(transform, operation, implementation, kernel_formulas):
    dtype = jnp.float32
    if operation in PRODUCTS and implementation == "mosaic_gpu":
        dtype = jnp.bfloat16
    if MATRIX[transform][operation][implementation] == RAISES:
        call = make_call(operation, implementation, sizes_of(dtype), dtype)
        run = jax.jit(lambda args: VALUES[transform].run(dataclasses.replace(call, args=args)))
        platform = "cuda" if implementation == "mosaic_gpu" else jax.default_backend()
        with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
            run.trace(call.args).lower(lowering_platforms=(platform,))
        return
    works = tuple(n for n in VALUES if MATRIX[n][operation][implementation] == WORKS)
    is_base = implementation == "reference" and transform in (*BASE, DONATION)
    found = results(operation, implementation, dtype, BASE if is_base else works)
    args = make_call(operation, "formula", sizes_of(dtype), dtype).floating_args
    want = expected(transform, exact(operation, dtype), [np.asarray(a, np.float64) for a in args])
    # The reference of the loss has float32 logits; the formula rounds them as the kernels do.
    plain = "reference" if dtype == jnp.float32 else "formula"
    low_precision = expected(transform, results(operation, plain, dtype, BASE), args)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(want)]
    leaves = map(jax.tree.leaves, (found[transform], low_precision, want))
    assert_as_accurate(*leaves, names=names)
