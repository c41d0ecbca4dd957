"""RMSNorm and residual-add RMSNorm, each implementation, against formulas in float64 numpy."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm, rms_norm
from pallas_kernels.norm.config import Config
from support.norm_formulas import (
    add_formula,
    check,
    check_add,
    compiled,
    formula,
    graded,
    make_add_args,
    make_args,
)
from support.numerics import assert_as_accurate, quick_jit, rounded, value_and_grads

IMPLEMENTATIONS = ["reference", "mosaic_gpu"]
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EPS32 = float(np.finfo(np.float32).eps)

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)


def kernel_for_some(names, *cases):
    """A test of each implementation; a case is `(whether the normal run has the kernel, *values)`.

    A program with a kernel takes a second to interpret, and the kernel's own tests have more cases.
    """
    return pytest.mark.parametrize(
        f"implementation, {names}",
        [
            pytest.param(
                implementation,
                *values,
                marks=() if normal or implementation == "reference" else pytest.mark.full,
            )
            for normal, *values in cases
            for implementation in IMPLEMENTATIONS
        ],
        indirect=["implementation"],
        ids=str,
    )


@pytest.fixture
def implementation(request):
    if request.param == "mosaic_gpu":
        request.getfixturevalue("interpreted")
    return request.param


def hugging_face(x, weight, eps=1e-6):
    """transformers' LlamaRMSNorm, in JAX."""
    hidden = x.astype(F32)
    hidden = hidden * jax.lax.rsqrt(jnp.mean(hidden * hidden, -1, keepdims=True) + eps)
    return weight * hidden.astype(x.dtype)


# Token counts and widths around a tile of 128 and on no tile at all; up to four axes.
@kernel_for_some(
    "shape, dtype",
    (False, (64,), BF16),
    (True, (7, 1), BF16),
    (False, (7, 1), F32),
    (True, (2, 0, 64), BF16),
    (False, (1, 130), F32),
    (False, (127, 96), BF16),
    (False, (128, 128), F32),
    (False, (3, 43, 64), BF16),
    (False, (3, 43, 64), F32),
    (False, (2, 3, 5, 130), BF16),
    (True, (2, 3, 5, 130), F32),
)
def test_every_shape_is_exact_up_to_one_rounding(implementation, shape, dtype):
    args = make_args(shape, dtype)
    if implementation == "mosaic_gpu" and shape[-1] < 64:
        with pytest.raises(NotImplementedError, match="hidden_size=1 is below 64"):
            rms_norm(*args[:2], implementation=implementation)
        return
    # Without a large eps the terms of dx cancel where D = 1.
    check(*args, implementation=implementation, eps=0.5)


@kernel_for_some(
    "x_dtype, weight_dtype",
    (False, BF16, F32),
    (True, F32, BF16),
    (False, F16, F16),
    (False, F16, F32),
    (False, BF16, F16),
)
def test_mixed_dtypes(implementation, x_dtype, weight_dtype):
    check(*make_args((9, 96), x_dtype, weight_dtype), implementation=implementation)


@kernel_for_some("casting", (False, "float32"), (True, "gemma"))
def test_the_weight_offset_is_added_in_float32(implementation, casting):
    # The weights are around 2^-9, so 1 + weight rounds to 1 or 1.0078 in bfloat16.
    x, weight, dy = make_args((64, 96), BF16, weight_mean=0.0)
    check(x, weight / 64, dy, implementation=implementation, weight_offset=1.0, casting=casting)


# For the kernel test_add_rms_norm_takes_the_options_of_rms_norm has an eps.
@kernel_for_some("eps", (False, 1e-5), (False, 1e-2), (False, 3.0))
def test_eps_is_added_to_the_mean_square(implementation, eps):
    x, weight, dy = make_args((16, 64))
    check(x / 10, weight, dy, implementation=implementation, eps=eps)


@kernel_for_some(
    "dtype, jit",
    (True, BF16, False),
    (False, BF16, True),
    (False, F16, False),
    (True, F16, True),
    (False, F32, False),
    (True, F32, True),
)
def test_llama_casting_has_the_bits_of_hugging_face(implementation, dtype, jit):
    x, weight, _ = make_args((64, 256), dtype)
    norm = functools.partial(rms_norm, implementation=implementation)
    llama = functools.partial(norm, casting="llama")
    got = (jax.jit(llama) if jit else llama)(x, weight)
    if dtype == F32:
        # Nothing is rounded in between, so only the last bit of the square root may differ.
        exact = formula(x, weight, x)[0]
        assert_as_accurate([got], rounded([exact], [got]), [exact], names=["y"])
        return
    x_hat, ones = formula(x, np.ones(256), x)[0], np.asarray(weight)
    # x·rstd may be an ulp of float32 off. Where this decides the rounding, the bits may differ.
    below, above = ((x_hat * (1 + e)).astype(dtype) for e in (-4 * EPS32, 4 * EPS32))
    sure = below == above
    assert np.mean(sure) > 0.99
    # NumPy rounds a product of bfloat16 or float16 numbers once.
    expected = below * ones
    np.testing.assert_array_equal(np.asarray(got)[sure], expected[sure])
    assert np.mean(np.asarray(norm(x, weight)) != expected) > 0.1  # casting="float32" differs


# The kernel's own test of this casting compares its values and gradients.
@kernel_for_some("dtype", (False, BF16))
def test_llama_casting_has_gradients_as_accurate_as_hugging_face(implementation, dtype):
    x, weight, dy = make_args((64, 256), dtype)
    got = compiled(rms_norm, casting="llama", implementation=implementation)((x, weight), dy)
    low_precision = compiled(hugging_face)((x, weight), dy)
    exact = formula(x, weight, dy)
    assert_as_accurate(got, low_precision, exact, names=("y", "dx", "dweight"))


@kernel_for_some("weight_dtype", (False, F32))
def test_llama_casting_with_a_weight_of_another_dtype(implementation, weight_dtype):
    x, weight, _ = make_args((64, 256), BF16, weight_dtype)
    got = rms_norm(x, weight, casting="llama", implementation=implementation)
    chex.assert_type(got, BF16)
    # The norm of Hugging Face in float32, rounded at the end, is the best in bfloat16.
    expected = (hugging_face(x, jnp.ones(256, BF16)).astype(F32) * weight).astype(BF16)
    assert np.mean(np.asarray(got) != np.asarray(expected)) < 0.01


@pytest.mark.parametrize("dtype", [BF16, F16], ids=jnp.dtype)
def test_rounding_in_between_survives_the_compiler(dtype):
    # XLA for GPUs drops `astype(bfloat16).astype(float32)` and keeps reduce_precision. Only the
    # optimized program of a GPU would show it.
    x, weight, _ = make_args((4, 64), dtype)
    llama = functools.partial(rms_norm, casting="llama", implementation="reference")
    add = functools.partial(add_rms_norm, implementation="reference")
    plain = functools.partial(rms_norm, implementation="reference")
    count = lambda fn, *args: str(jax.make_jaxpr(fn)(*args)).count("reduce_precision")
    assert count(llama, x, weight) == 1
    assert count(add, x, x, weight) == 1
    assert count(plain, x, weight) == 0


# Residual addition.


@kernel_for_some(
    "shape, dtypes",
    (False, (129, 96), (BF16, BF16, BF16)),
    (False, (3, 43, 64), (F32, F32, F32)),
    (True, (37, 130), (BF16, F32, F32)),
    (False, (37, 130), (F32, BF16, BF16)),
    (False, (37, 64), (F16, F16, F16)),
    (True, (0, 64), (BF16, BF16, BF16)),
    (False, (64,), (BF16, BF16, F32)),
)
def test_add_rms_norm(implementation, shape, dtypes):
    args, cotangents = make_add_args(shape, *dtypes)
    check_add(args, cotangents, implementation=implementation)


@kernel_for_some(
    "casting, jit",
    (False, "float32", False),
    (False, "float32", True),
    (False, "llama", False),
    (True, "llama", True),
)
def test_add_rms_norm_is_the_norm_of_the_stored_sum(implementation, casting, jit):
    (x, residual, weight), _ = make_add_args((64, 256), BF16, BF16, BF16)
    options = {"casting": casting, "implementation": implementation}
    add = functools.partial(add_rms_norm, **options)
    y, residual_out = (jax.jit(add) if jit else add)(x, residual, weight)
    norm = rms_norm(residual_out, weight, **options)
    exact = formula(residual_out, weight, x)[0]
    assert_as_accurate([y], [norm], [exact], names=["y"])
    # The norm of the sum before rounding differs by more, half an ulp of the sum.
    unrounded = formula(x.astype(F32) + residual.astype(F32), weight, x)[0]
    with pytest.raises(AssertionError):
        assert_as_accurate([y], [norm], [unrounded], names=["y"], slack=0.8)


@each_implementation
def test_add_rms_norm_takes_the_options_of_rms_norm(implementation):
    (x, residual, weight), _ = make_add_args((8, 64), F32, F32, F32)
    options = {"eps": 0.3, "weight_offset": 0.7, "implementation": implementation}
    y, residual_out = add_rms_norm(x, residual, weight, **options)
    exact = formula(residual_out, weight, x, eps=0.3, weight_offset=0.7)[0]
    assert_as_accurate([y], [y], [exact], names=["y"], slack=0)


@each_implementation
@pytest.mark.parametrize("used", [0, 1], ids=["y", "residual_out"])
def test_add_rms_norm_with_one_output_unused(implementation, used):
    args, cotangents = make_add_args((16, 64), F32, F32, F32)
    got = jax.jit(
        jax.grad(
            lambda *args: jnp.vdot(
                add_rms_norm(*args, implementation=implementation)[used], cotangents[used]
            ),
            argnums=(0, 1, 2),
        )
    )(*args)
    zero = jnp.zeros((16, 64))
    only = (cotangents[0], zero) if used == 0 else (zero, cotangents[1])
    exact = add_formula(args, only, args[0] + args[1])[2:]
    assert_as_accurate(got, rounded(exact, got), exact, names=("dx", "dresidual", "dweight"))


# JAX adds up the gradients of an array that is used twice, so the kernel is left to the full run.
@kernel_for_some("dtype", (False, F32))
def test_add_rms_norm_of_one_array_with_itself(implementation, dtype):
    (x, _, weight), (dy, dresidual_out) = make_add_args((16, 64), dtype)
    fn = lambda x, weight: add_rms_norm(x, x, weight, implementation=implementation)
    got = compiled(fn)((x, weight), (dy, dresidual_out))
    y, residual_out, dx, _, dweight = add_formula((x, x, weight), (dy, dresidual_out), x + x)
    exact = [y, residual_out, 2 * dx, dweight]
    assert_as_accurate(got, rounded(exact, got), exact, names=("y", "residual_out", "dx", "dw"))


# Rows at the ends of the number range. The tests of a dtype share a program.


def options_for(dtype):
    # With this eps dx, about dy / sqrt(eps), stays within float16.
    return {"eps": 1e-2 if dtype == F16 else 1e-6}


@each_implementation
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=jnp.dtype)
def test_zero_rows(implementation, dtype):
    x, weight, dy = make_args((8, 64), dtype, F32)
    x = x.at[::2].set(0)
    y, _, _ = check(x, weight, dy, implementation=implementation, **options_for(dtype))
    assert np.all(np.asarray(y)[::2] == 0)


@each_implementation
@pytest.mark.parametrize(
    "dtype, scale", [(BF16, 1e-30), (BF16, 1e-10), (F32, 1e-30), (F32, 1e-4), (F16, 1e-4)]
)
def test_tiny_rows(implementation, dtype, scale):
    x, weight, dy = make_args((8, 64), F32)
    x = (x * scale).astype(dtype)
    check(x, weight, dy.astype(dtype), implementation=implementation, **options_for(dtype))


@each_implementation
@pytest.mark.parametrize("dtype, largest", [(BF16, 1.8e18), (F32, 1.8e18), (F16, 6.5e4)])
def test_huge_rows_up_to_the_documented_limit(implementation, dtype, largest):
    # 64 elements of 1.8e18 have a norm of 1.44e19, a square of 2.1e38 and a mean square of 3.2e36.
    x, weight, dy = make_args((8, 64), F32)
    x = (jnp.sign(x) * largest).astype(dtype)
    args = x, weight, dy.astype(dtype)
    y, *_ = graded(*args, implementation=implementation, **options_for(dtype))
    exact = formula(x, weight, x)[0]
    assert_as_accurate([y], rounded([exact], [y]), [exact], names=["y"])


@each_implementation
def test_a_row_beyond_the_documented_limit_is_zero_with_zero_gradients(implementation):
    x, weight, dy = make_args((8, 64), F32)
    x = x.at[1].set(3e18)  # a norm of 2.4e19, though the mean square would fit
    y, dx, dweight = graded(x, weight, dy, implementation=implementation)
    assert np.all(np.asarray(y)[1] == 0) and np.all(np.asarray(dx)[1] == 0)
    rest = formula(np.delete(x, 1, axis=0), weight, np.delete(dy, 1, axis=0))
    got = [np.delete(y, 1, axis=0), np.delete(dx, 1, axis=0), dweight]
    assert_as_accurate(got, rounded(rest, got), rest, names=("y", "dx", "dweight"))


@each_implementation
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_row_stays_in_its_row(implementation, value):
    x, weight, dy = make_args((8, 64), F32)
    good = graded(x, weight, dy, implementation=implementation)
    bad = graded(x.at[2, 7].set(value), weight, dy, implementation=implementation)
    for name, g, b in zip(("y", "dx"), good, bad, strict=False):
        others = lambda a: np.delete(np.asarray(a), 2, axis=0)
        np.testing.assert_array_equal(others(b), others(g), err_msg=name)
    assert np.isnan(np.asarray(bad[0])[2, 7])
    assert np.isnan(np.asarray(bad[2])).any()


# Sums over many tokens.


@pytest.mark.parametrize(
    "implementation, num_tokens",
    [
        pytest.param(
            name, n, marks=() if n == 32768 or (name, n) == ("reference", 128) else pytest.mark.full
        )
        for n in (128, 2048, 32768)
        for name in IMPLEMENTATIONS
    ],
    indirect=["implementation"],
)
def test_the_error_of_dweight_does_not_grow_with_the_tokens(
    implementation, num_tokens, set_rows_per_partial
):
    hidden_size = 8
    if implementation == "mosaic_gpu":
        # The interpreter takes milliseconds for a row, so there are fewer, in shorter partial sums.
        hidden_size, num_tokens = 64, num_tokens // 64
        set_rows_per_partial(8)
    # The gradients have random signs, so the sum grows like sqrt(T) and its terms do not cancel.
    x, weight, dy = make_args((num_tokens, hidden_size), BF16, F32)
    got = compiled(rms_norm, implementation=implementation)((x, weight), dy)[2:]
    exact = formula(x, weight, dy)[2:]
    one_by_one = formula(x, weight, dy, compute=np.float32)[2:]
    assert_as_accurate(got, one_by_one, exact, names=["dweight"], slack=1.5)


@each_implementation
def test_dweight_of_bfloat16_is_rounded_once(implementation):
    num_tokens = 256 if implementation == "mosaic_gpu" else 4096  # interpreted by rows
    x, weight, dy = make_args((num_tokens, 64), BF16)
    check(x, weight, dy, implementation=implementation)


# Transformations.


# For the kernel test_rms_norm_programs.py maps the norm with a residual.
@kernel_for_some("dtype", (False, F32))
def test_vmap_is_the_loop(implementation, dtype):
    x, weight, dy = make_args((3, 5, 64), dtype)
    fn = functools.partial(rms_norm, implementation=implementation)
    weights = jnp.stack([weight, 2 * weight, -weight])
    mapped = jax.vmap(lambda *args: value_and_grads(fn, args[:2], args[2]))
    got = quick_jit(mapped)(x, weights, dy)
    for i in range(3):
        exact = formula(x[i], weights[i], dy[i])
        one = [a[i] for a in got]
        assert_as_accurate(one, rounded(exact, one), exact, names=("y", "dx", "dweight"))


@each_implementation
def test_repeated_calls_have_the_same_bits(implementation):
    args = make_args((33, 96), BF16)
    run = functools.partial(graded, *args, implementation=implementation)
    chex.assert_trees_all_equal(run(), run())


@kernel_for_some("dtype", (False, F32))
def test_the_weight_may_be_a_constant(implementation, dtype):
    x, weight, dy = make_args((16, 64), dtype)
    fn = lambda x: rms_norm(x, weight, implementation=implementation)
    exact = formula(x, weight, dy)[:2]
    got = compiled(fn)((x,), dy)
    assert_as_accurate(got, rounded(exact, got), exact, names=("y", "dx"))


# Arguments.


def test_no_name_and_xla_are_the_reference_on_a_cpu():
    x, weight, _ = make_args((4, 100), BF16)
    for name in (None, "xla"):
        for norm, args in ((rms_norm, (x, weight)), (add_rms_norm, (x, x, weight))):
            want = norm(*args, implementation="reference")
            chex.assert_trees_all_equal(norm(*args, implementation=name), want)


CONFIG = Config(fwd_warps=1, fwd_reread=False, bwd_warps=1, bwd_blocks=1, bwd_stages=0, bwd_rows=1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"weight": np.ones(7, np.float32)}, r"weight must have shape \(8,\).*got \(7,\)"),
        ({"weight": np.ones((1, 8), np.float32)}, r"weight must have shape \(8,\)"),
        ({"x": np.float32(1)}, "weight must have shape"),
        ({"casting": "fp32"}, r"casting='fp32' must be one of \('float32', 'llama', 'gemma'\)"),
        ({"implementation": "triton"}, "implementation='triton' must be None or one of"),
        (
            {"config": CONFIG},
            "'reference' has no launch parameters, and it runs because ",
        ),
    ],
)
def test_wrong_arguments(unchecked_shapes, change, message):
    arguments = {"x": np.ones((3, 8), np.float32), "weight": np.ones(8, np.float32)} | change
    with pytest.raises(ValueError, match=message):
        rms_norm(**arguments)
    with pytest.raises(ValueError, match=message):
        add_rms_norm(residual=arguments["x"], **arguments)


def test_launch_parameters_of_another_type(unchecked_shapes):
    wrong: Any = 1
    x, weight, _ = make_args((3, 8))
    with pytest.raises(TypeError, match=r"config=1 must be a .*, or None for the default"):
        rms_norm(x, weight, config=wrong)


def test_a_residual_of_another_shape(unchecked_shapes):
    x, weight, _ = make_args((3, 8))
    with pytest.raises(ValueError, match=r"residual .* \(3, 8\), got \(8,\)"):
        add_rms_norm(x, x[0], weight)


@pytest.mark.parametrize(
    ("of_x", "of_residual", "lines"), [(BF16, F32, 1), (BF16, BF16, 0), (F32, BF16, 0)]
)
def test_a_line_tells_that_the_residual_stream_is_rounded(of_x, of_residual, lines, caplog):
    (x, residual, weight), _ = make_add_args((4, 64), of_x, of_residual, F32)
    for _ in range(2):
        _, residual_out = add_rms_norm(x, residual, weight)
        assert residual_out.dtype == of_x
    assert caplog.text.count("add_rms_norm rounds the residual stream to bfloat16") == lines
