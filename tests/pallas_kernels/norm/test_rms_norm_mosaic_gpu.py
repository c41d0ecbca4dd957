"""The Mosaic GPU kernels of RMSNorm, interpreted: shapes and launch parameters.

test_rms_norm.py has the tests of every implementation, and test_rms_norm_programs.py those of
programs and transformations.
"""

import dataclasses
import functools
import itertools

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import rms_norm
from pallas_kernels.norm import Config, backward_kernel, forward_kernel
from pallas_kernels.norm.reference import Options
from pallas_kernels.norm.rows import column_parts, split_row
from support.norm_formulas import (
    add_formula,
    check,
    check_add,
    compiled,
    formula,
    make_add_args,
    make_args,
)
from support.numerics import assert_as_accurate, quick_jit, rounded

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EPS32 = float(np.finfo(np.float32).eps)
BASE = Config(fwd_warps=4, fwd_reread=False, bwd_warps=4, bwd_blocks=1, bwd_stages=0, bwd_rows=1)

interpreted = pytest.mark.usefixtures("interpreted")


def config(**changes):
    return dataclasses.replace(BASE, **changes)


OPTIONS = Options(eps=1e-6, weight_offset=0.0, casting="float32")


# Shapes.


# Numbers of rows around a block's tile of 4 or 32 rows, and rows that accesses of 16 bytes do not
# divide.
@interpreted
@pytest.mark.parametrize(
    "shape, dtype",
    [
        pytest.param((1, 64), BF16, marks=pytest.mark.full),
        pytest.param((2, 720), BF16, marks=pytest.mark.full),
        pytest.param((3, 96), F16, marks=pytest.mark.full),
        pytest.param((4, 130), BF16, marks=pytest.mark.full),
        pytest.param((5, 1024), BF16, marks=pytest.mark.full),
        pytest.param((7, 2880), BF16, marks=pytest.mark.full),
        pytest.param((31, 64), F32, marks=pytest.mark.full),
        ((33, 66), BF16),
        pytest.param((37, 64), F16, marks=pytest.mark.full),
        pytest.param((3, 4096), BF16, marks=pytest.mark.full),
        pytest.param((2, 4096), F32, marks=pytest.mark.full),
        pytest.param((5, 65), F32, marks=pytest.mark.full),
        pytest.param((1, 255), F32, marks=pytest.mark.full),
        ((4, 257), F32),
        pytest.param((2, 3, 720), F32, marks=pytest.mark.full),
        ((3, 2880), F16),
    ],
    ids=str,
)
def test_shapes_that_divide_nothing(shape, dtype):
    check_add(*make_add_args(shape, dtype), implementation="mosaic_gpu")


@interpreted
@pytest.mark.parametrize(
    "shape, dtype",
    [
        pytest.param((1, 64), BF16, marks=pytest.mark.full),
        pytest.param((2, 720), BF16, marks=pytest.mark.full),
        pytest.param((33, 66), BF16, marks=pytest.mark.full),
        ((3, 2880), F16),
        pytest.param((4, 257), F32, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_shapes_that_divide_nothing_without_a_residual(shape, dtype):
    check(*make_args(shape, dtype), implementation="mosaic_gpu")


@interpreted
@pytest.mark.parametrize("num_tokens", [1, pytest.param(5, marks=pytest.mark.full)])
def test_an_eps_of_zero(num_tokens):
    # The rows of padding beside a single token are zeros, so their norm is 0.
    check(*make_args((num_tokens, 64)), implementation="mosaic_gpu", eps=0.0)


# Launch parameters.


@interpreted
@pytest.mark.parametrize(
    "hidden_size, dtype, residual",
    [
        pytest.param(512, BF16, False, marks=pytest.mark.full),
        (512, BF16, True),
        pytest.param(720, F32, True, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("every_way", [False, pytest.param(True, marks=pytest.mark.full)])
def test_all_forward_configurations_agree(hidden_size, dtype, residual, every_way):
    (x, r, weight), _ = make_add_args((5, hidden_size), dtype, weight_dtype=F32)

    def run(config):
        forward = functools.partial(forward_kernel.forward, OPTIONS, config)
        return quick_jit(forward)(x, r if residual else None, weight)

    y, residual_out, rstd = run(BASE)
    exact = formula(residual_out if residual else x, weight, x)[0]
    assert_as_accurate([y], rounded([exact], [y]), [exact], names=["y"])
    ways = [*itertools.product((1, 4, 8, 16), (False, True))]
    for warps, reread in ways if every_way else ((1, True), (8, False), (16, True)):
        chosen = config(fwd_warps=warps, fwd_reread=reread)
        if chosen == BASE:
            continue
        other, total, other_rstd = run(chosen)
        chex.assert_trees_all_equal(total, residual_out)
        # Only the order in which a row is added up differs.
        np.testing.assert_allclose(other_rstd, rstd, rtol=4 * EPS32)
        same = np.asarray(other_rstd) == np.asarray(rstd)
        assert same.any()
        np.testing.assert_array_equal(np.asarray(other)[same], np.asarray(y)[same])


# A kernel keeps rows in shared memory only where each warp's part of a row is a multiple of 16
# bytes. The cases have one warp a row, several, and several warpgroups, and some have a residual.
@interpreted
@pytest.mark.parametrize(
    "hidden_size, dtype, warps, residual",
    [
        pytest.param(512, BF16, 1, True, marks=pytest.mark.full),
        pytest.param(512, BF16, 4, False, marks=pytest.mark.full),
        (512, BF16, 16, True),
        (720, F32, 1, False),
        pytest.param(720, F32, 4, True, marks=pytest.mark.full),
        pytest.param(720, BF16, 1, False, marks=pytest.mark.full),
        pytest.param(720, F16, 8, False, marks=pytest.mark.full),
        pytest.param(720, F16, 8, True, marks=pytest.mark.full),
        pytest.param(576, BF16, 4, False, marks=pytest.mark.full),
        pytest.param(576, BF16, 1, True, marks=pytest.mark.full),
        pytest.param(2112, BF16, 4, True, marks=pytest.mark.full),
        pytest.param(2304, BF16, 8, False, marks=pytest.mark.full),
        pytest.param(7168, BF16, 16, True, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("every_way", [False, pytest.param(True, marks=pytest.mark.full)])
def test_all_backward_configurations_agree(
    monkeypatch, hidden_size, dtype, warps, residual, every_way
):
    # The last tile repeats a row with 11 rows and one warp a row, or with 5 and two rows a step. It
    # is in one block of several or not.
    shape = (11 if warps == 1 else 5, hidden_size)
    source, weight, dy = make_args(shape, dtype, F32)
    dresidual = make_args(shape, dtype, seed=1)[0] if residual else None
    zero = np.zeros_like(dy)
    exact = add_formula((None, None, weight), (dy, dresidual if residual else zero), source)[2::2]
    mean_square = np.mean(np.square(np.asarray(source, np.float64)), -1)
    rstd = jnp.asarray(1 / np.sqrt(mean_square + 1e-6), F32)
    whole_accesses = hidden_size // warps * jnp.dtype(dtype).itemsize % 16 == 0
    stages = (0, 2, 3) if whole_accesses else (0,)
    ways = [*itertools.product(stages, (1, 2))]
    if not every_way:  # each number of stages, and each number of rows with and without them
        ways = [way for way in ways if way not in ((2, 2), (3, 1))]
    monkeypatch.setattr(backward_kernel, "_ROWS_PER_BLOCK", 1)
    for i, (stages, rows) in enumerate(ways):
        # In turn: one block or three, one partial sum a block or one for every second row.
        blocks, rows_per_partial = ((1, 256), (3, 2), (1, 2), (1, 256))[i % 4]
        monkeypatch.setattr(backward_kernel, "_ROWS_PER_PARTIAL", rows_per_partial)
        chosen = config(bwd_warps=warps, bwd_blocks=blocks, bwd_stages=stages, bwd_rows=rows)
        backward = functools.partial(backward_kernel.backward, OPTIONS, chosen)
        got = quick_jit(backward)(dy, dresidual, source, weight, rstd)
        assert_as_accurate(got, rounded(exact, got), exact, names=("dx", "dweight"))


@interpreted
def test_the_weight_in_shared_memory(monkeypatch):
    # It is there where registers do not hold it, which takes rows of 10000 elements and more.
    monkeypatch.setattr(backward_kernel, "keeps_weight", lambda split: False)
    chosen = config(bwd_warps=8, bwd_stages=2, bwd_rows=2)
    plan = backward_kernel._plan(chosen, 5, 576, jnp.dtype(BF16), jnp.dtype(F32), num_operands=3)
    assert plan.weight_in_smem and not plan.keep_weight
    args, cotangents = make_add_args((5, 576), BF16, weight_dtype=F32)
    check_add(args, cotangents, implementation="mosaic_gpu", config=chosen, weight_offset=1.0)


@interpreted
def test_one_warp_a_row_loads_a_weight_that_registers_do_not_hold(monkeypatch):
    # Registers of one warp do not hold it from rows of 1728 elements on.
    monkeypatch.setattr(backward_kernel, "keeps_weight", lambda split: False)
    chosen = config(bwd_warps=1, bwd_stages=2)
    args, cotangents = make_add_args((8, 576), BF16, weight_dtype=F32)
    check_add(args, cotangents, implementation="mosaic_gpu", config=chosen, weight_offset=1.0)


@interpreted
@pytest.mark.parametrize(
    "tokens_per_block", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 5))]
)
def test_rows_are_dealt_to_blocks_and_partial_sums(set_rows_per_partial, tokens_per_block):
    # The tokens are as many as the blocks, fewer, and more than a partial sum of a block covers.
    set_rows_per_partial(tokens_per_block)
    for num_tokens, warps in ((4, 1), (22, 1), (2, 4), (7, 4)):
        stages = 2 if num_tokens % 2 else 0
        chosen = config(fwd_warps=warps, bwd_warps=warps, bwd_blocks=2, bwd_stages=stages)
        args = make_args((num_tokens, 128), BF16, F32)
        check(*args, implementation="mosaic_gpu", config=chosen)


@interpreted
@pytest.mark.parametrize(
    "hidden_size, dtype, warps, stages",
    [(32768, BF16, 16, 0), pytest.param(20480, F32, 32, 2, marks=pytest.mark.full)],
)
def test_columns_in_parts(hidden_size, dtype, warps, stages):
    split = split_row(hidden_size, warps, jnp.dtype(dtype).itemsize)
    assert split is not None and (column_parts(split) or 0) > 1
    chosen = config(fwd_warps=16, bwd_warps=warps, bwd_stages=stages)
    args, cotangents = make_add_args((2, hidden_size), dtype)
    check_add(args, cotangents, implementation="mosaic_gpu", config=chosen)


@interpreted
@pytest.mark.parametrize(
    "dtypes, warps",
    [
        pytest.param(dtypes, warps, marks=() if i == j + 1 else pytest.mark.full)
        for i, dtypes in enumerate(
            [(BF16, F32, BF16), (F32, BF16, F16), (F16, F32, F32), (BF16, F16, F32)]
        )
        for j, warps in enumerate((1, 4))
    ],
)
def test_three_dtypes(dtypes, warps):
    chosen = config(fwd_warps=warps, bwd_warps=warps)
    args, cotangents = make_add_args((5, 200), *dtypes)
    check_add(args, cotangents, implementation="mosaic_gpu", config=chosen, weight_offset=1.0)


@interpreted
@pytest.mark.parametrize(
    "warps, stages, rows, weight_offset",
    [
        (1, 0, 1, 0.0),
        (4, 2, 2, 1.0),
        pytest.param(1, 0, 1, 1.0, marks=pytest.mark.full),
        pytest.param(4, 2, 2, 0.0, marks=pytest.mark.full),
    ],
)
def test_llama_casting(warps, stages, rows, weight_offset):
    chosen = config(
        fwd_warps=warps, fwd_reread=rows > 1, bwd_warps=warps, bwd_stages=stages, bwd_rows=rows
    )
    x, weight, dy = make_args((5, 256), BF16, F32, weight_mean=1.0 - weight_offset)
    run = lambda **options: compiled(
        rms_norm, casting="llama", weight_offset=weight_offset, **options
    )((x, weight), dy)
    got = run(implementation="mosaic_gpu", config=chosen)
    exact = formula(x, weight, dy, weight_offset=weight_offset)
    names = ("y", "dx", "dweight")
    assert_as_accurate(got, run(implementation="reference"), exact, names=names)
    # The kernel multiplied the weight with rounded numbers, so the weight's gradient has them too.
    x_hat = formula(x, np.ones(256), x)[0]
    below, above = ((x_hat * (1 + e)).astype(BF16) for e in (-4 * EPS32, 4 * EPS32))
    sure = np.all(below == above, axis=0)
    assert np.mean(sure) > 0.9
    dweight = np.sum(np.asarray(dy, np.float64) * below.astype(np.float64), axis=0)
    np.testing.assert_allclose(np.asarray(got[2])[sure], dweight[sure], rtol=0, atol=1e-5)
    y = (below.astype(F32) * (np.asarray(weight) + np.float32(weight_offset))).astype(BF16)
    np.testing.assert_array_equal(np.asarray(got[0])[:, sure], y[:, sure])
