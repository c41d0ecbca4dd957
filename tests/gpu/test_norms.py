"""The RMSNorm kernels on a GPU, at real sizes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm, rms_norm
from pallas_kernels.norm.config import backward_candidates, forward_candidates
from support.norm_formulas import add_formula, formula
from support.numerics import assert_as_accurate
from support.on_gpu import graded, large, same_bits, sampled

pytestmark = pytest.mark.gpu

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
kernel = functools.partial(rms_norm, implementation="mosaic_gpu")
add_kernel = functools.partial(add_rms_norm, implementation="mosaic_gpu")
reference = functools.partial(rms_norm, implementation="reference")
add_reference = functools.partial(add_rms_norm, implementation="reference")
NORM_SHAPES = [
    ((16384, 4096), BF16),
    ((4096, 16384), BF16),
    ((16384, 2880), BF16),
    ((1000, 1024), BF16),
    ((4096, 4096), F32),
    ((513, 5120), F16),
]

each_norm_shape = pytest.mark.parametrize("shape, dtype", NORM_SHAPES, ids=str)


def norm_args(shape, dtype, weight_dtype=None):
    """`(x, residual, weight)` and the cotangents of `(y, residual_out)`."""
    keys = jax.random.split(jax.random.key(0), 5)
    x, residual, dy, dresidual_out = (jax.random.normal(key, shape, dtype) for key in keys[:4])
    weight = 1 + jax.random.normal(keys[4], shape[-1:]) / 8
    return (x, residual, weight.astype(weight_dtype or dtype)), (dy, dresidual_out)


ADD_NAMES = ("y", "residual_out", "dx", "dresidual", "dweight")


@each_norm_shape
@pytest.mark.parametrize("casting", ["float32", "llama"])
def test_rms_norm_at_real_sizes(shape, dtype, casting):
    (x, _, weight), (dy, _) = norm_args(shape, dtype)
    got = graded(kernel, casting=casting)((x, weight), dy)
    low_precision = graded(reference, casting=casting)((x, weight), dy)
    exact = formula(x, weight, dy)
    arrays = (sampled(tree) for tree in (got, low_precision, exact))
    assert_as_accurate(*arrays, names=("y", "dx", "dweight"))


def check_add_kernel(args, cotangents, **options):
    got = graded(add_kernel, **options)(args, cotangents)
    low_precision = graded(add_reference, **options)(args, cotangents)
    assert [a.dtype for a in got] == [a.dtype for a in low_precision]
    residual_out = got[1]
    np.testing.assert_array_equal(residual_out, low_precision[1])
    exact = add_formula(args, cotangents, residual_out, **options)
    assert_as_accurate(*(sampled(t) for t in (got, low_precision, exact)), names=ADD_NAMES)


@each_norm_shape
def test_add_rms_norm_at_real_sizes(shape, dtype):
    check_add_kernel(*norm_args(shape, dtype), weight_offset=1.0)


@pytest.mark.parametrize("dtypes", [(BF16, F32, BF16), (F32, BF16, F16), (F16, F32, F32)])
def test_norms_of_three_dtypes(dtypes):
    x_dtype, residual_dtype, weight_dtype = dtypes
    (x, residual, weight), cotangents = norm_args((1001, 4096), x_dtype, weight_dtype)
    check_add_kernel((x, residual.astype(residual_dtype) / 3, weight), cotangents)


# Some widths are no multiple of a 16-byte access; the rows are near the tile sizes 4 and 32.
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 33])
@pytest.mark.parametrize(
    "hidden_size, dtype",
    [
        (64, BF16),
        (96, F16),
        (130, BF16),
        (65, F32),
        (257, F32),
        (720, BF16),
        (2880, F32),
        (20480, F32),
        (32768, BF16),
        (65536, BF16),
    ],
    ids=str,
)
def test_norms_of_shapes_that_divide_nothing(num_tokens, hidden_size, dtype):
    check_add_kernel(*norm_args((num_tokens, hidden_size), dtype))


@each_norm_shape
@pytest.mark.parametrize("casting", ["float32", "llama"])
def test_add_rms_norm_is_the_norm_of_the_stored_sum(shape, dtype, casting):
    (x, residual, weight), _ = norm_args(shape, dtype)
    # Both have the same number of warps, because the order of the sum decides the last bit of rstd.
    options = {"casting": casting, "config": forward_candidates(shape[1], dtype, add=True)[0]}
    y, residual_out = jax.jit(functools.partial(add_kernel, **options))(x, residual, weight)
    again = jax.jit(functools.partial(kernel, **options))(residual_out, weight)
    np.testing.assert_array_equal(y, again)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=jnp.dtype)
def test_llama_casting_has_the_bits_of_the_reference(dtype):
    (x, _, weight), _ = norm_args((4096, 4096), dtype)
    run = lambda fn: np.asarray(jax.jit(functools.partial(fn, casting="llama"))(x, weight))
    x_f64 = np.asarray(x, np.float64)
    x_hat = x_f64 / np.sqrt(np.mean(np.square(x_f64), -1, keepdims=True) + 1e-6)
    # x·rstd may be off by an ulp of float32. Where that changes the rounding, the bits may differ.
    eps = 4 * float(np.finfo(np.float32).eps)
    sure = (x_hat * (1 - eps)).astype(dtype) == (x_hat * (1 + eps)).astype(dtype)
    assert np.mean(sure) > 0.99
    np.testing.assert_array_equal(run(kernel)[sure], run(reference)[sure])


@each_norm_shape
def test_repeated_norms_have_the_same_bits(shape, dtype):
    args, cotangents = norm_args(shape, dtype)
    run = graded(add_kernel)
    first = run(args, cotangents)
    for _ in range(20):
        assert np.all(same_bits(run(args, cotangents), first))


# One shape runs all parameters that the tuner tries, the others some: each one is a compilation.
@pytest.mark.parametrize(
    "shape, dtype, step",
    [
        ((1001, 4096), BF16, 1),
        ((999, 1024), BF16, 5),
        ((301, 16384), BF16, 5),
        ((77, 2880), F32, 5),
    ],
    ids=str,
)
def test_all_launch_parameters_give_the_same_norm(shape, dtype, step):
    args, cotangents = norm_args(shape, dtype, F32)
    candidates = [
        *forward_candidates(shape[-1], dtype, add=True),
        *backward_candidates(shape[-1], dtype, add=True),
    ]
    low_precision = graded(add_reference)(args, cotangents)
    exact = add_formula(args, cotangents, low_precision[1])
    num_run = 0
    for config in candidates[::step]:
        try:
            got = graded(add_kernel, config=config)(args, cotangents)
        except ValueError as error:  # parameters for Hopper, on an older GPU
            assert "bwd_stages" in str(error)
            continue
        assert_as_accurate(*(sampled(t) for t in (got, low_precision, exact)), names=ADD_NAMES)
        num_run += 1
    assert num_run >= 2


@large
def test_norms_of_more_elements_than_int32_can_count():
    # The rows repeat, so that every row can be compared with one of the first period.
    num_tokens, hidden_size, period = 2**21 + 4097, 1024, 4097
    rows, weight, dy_rows = (
        jax.random.normal(key, shape, BF16)
        for key, shape in zip(
            jax.random.split(jax.random.key(0), 3),
            ((period, hidden_size), (hidden_size,), (period, hidden_size)),
            strict=True,
        )
    )
    num_periods, num_left = divmod(num_tokens, period)
    repeat = lambda a: jnp.concatenate([jnp.tile(a, (num_periods, 1)), a[:num_left]])
    x, dy = jax.jit(repeat)(rows), jax.jit(repeat)(dy_rows)
    assert x.size > 2**31
    y, vjp = jax.vjp(jax.jit(kernel), x, weight.astype(F32))
    dx, dweight = vjp(dy)
    want_y, want_dx, _ = graded(kernel)((rows, weight.astype(F32)), dy_rows)
    for got, want in ((y, want_y), (dx, want_dx)):
        for start in (0, (num_periods // 2) * period, (num_periods - 1) * period):
            np.testing.assert_array_equal(got[start : start + period], want)
        np.testing.assert_array_equal(got[num_tokens - num_left :], want[:num_left])
    exact_y, exact_dx, dweight_of_period = formula(rows, weight, dy_rows)
    assert_as_accurate(
        (want_y, want_dx),
        (exact_y.astype(BF16), exact_dx.astype(BF16)),
        (exact_y, exact_dx),
        names=("y", "dx"),
    )
    rest = formula(rows[:num_left], weight, dy_rows[:num_left])[2]
    exact = num_periods * dweight_of_period + rest
    error = np.sqrt(np.mean(np.square(np.asarray(dweight, np.float64) - exact)))
    assert error <= 1e-5 * np.sqrt(np.mean(np.square(exact)))


def test_the_default_norms_are_the_kernels():
    (x, residual, weight), (dy, dresidual_out) = norm_args((4096, 4096), BF16)
    program = lambda fn, *args: str(graded(fn).lower(*args).compile().as_text())
    assert "mosaic_gpu" in program(rms_norm, (x, weight), dy)
    assert "mosaic_gpu" in program(add_rms_norm, (x, residual, weight), (dy, dresidual_out))
    assert "mosaic_gpu" not in program(reference, (x, weight), dy)
    # No kernel takes this width.
    assert "mosaic_gpu" not in program(rms_norm, (x[:, :48], weight[:48]), dy[:, :48])


def test_norms_under_transformations():
    # Rematerialization in a scan over layers, which the interpreter cannot run; then vmap.
    (x, _, weight), _ = norm_args((512, 1024), F32)
    weights = jnp.stack([weight, weight / 2, 2 * weight])
    policy = jax.checkpoint_policies.save_only_these_names("residual", "rstd", "normed")

    def gradients(norm):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(residual, weight):
            y, residual = norm(jnp.sin(residual), residual, weight)
            return residual + jnp.sin(y), None

        loss = lambda x, weights: jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0]))
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weights)

    chex.assert_trees_all_close(
        gradients(add_kernel), gradients(add_reference), rtol=1e-3, atol=1e-3
    )
    xs = x.reshape(4, 128, 1024)
    for axes, w in (((0, None), weight), ((0, 0), weights[jnp.array([0, 1, 2, 0])])):
        value = lambda norm: jax.jit(jax.vmap(norm, in_axes=axes))(xs, w)  # noqa: B023
        chex.assert_trees_all_close(value(kernel), value(reference), rtol=1e-5, atol=1e-5)
