"""Quantization to FP8, each implementation, against the formula in NumPy and `ml_dtypes`."""

import functools
import logging

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from pallas_kernels.fp8 import (
    Quantized,
    casts,
    fp8_matmul,
    mosaic_gpu,
    quantize,
    quantize_both,
    quantize_transposed,
    reference,
    row_kernel,
)
from pallas_kernels.fp8.inputs import tiles_of_block
from pallas_kernels.fp8.recipes import Cast
from pallas_kernels.gpu.math import float32_to_int8, int8_to_float32
from support.numerics import quick_jit
from support.pairwise import pairwise

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
IMPLEMENTATIONS = ["reference", "mosaic_gpu"]
SCALINGS = ["tensor", "row"]

each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
each_scaling = pytest.mark.parametrize("scaling", SCALINGS)
each_dtype = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=jnp.dtype)


@pytest.fixture
def implementation(request):
    if request.param == "mosaic_gpu":
        request.getfixturevalue("interpreted")
    return request.param


def formula(x, dtype, scaling):
    """`(values, scale)`. A float32 product of two float32 numbers and the cast are IEEE's."""
    x = np.asarray(x).astype(np.float32)
    largest = np.float32(ml_dtypes.finfo(dtype).max)
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(axis=-1, keepdims=True) if scaling == "row" else np.abs(x).max()
        scale = np.where(amax < 2.0**-90, np.float32(1), amax * (np.float32(1) / largest))
        return (x * (1 / scale)).astype(dtype), scale


def assert_same(got: Quantized, x, dtype, scaling):
    """Asserts equal bits; a NaN equals every NaN."""
    values, scale = formula(x, dtype, scaling)
    assert got.values.dtype == dtype and got.scale.dtype == F32
    np.testing.assert_array_equal(np.asarray(got.scale), scale)
    np.testing.assert_array_equal(np.asarray(got.values, F32), values.astype(F32))


def check(x, dtype, scaling, implementation):
    both = functools.partial(
        quantize_both, dtype=dtype, scaling=scaling, implementation=implementation
    )
    row_major, transposed = quick_jit(both)(x)
    assert_same(row_major, x, dtype, scaling)
    assert_same(transposed, np.asarray(x).T, dtype, scaling)
    return row_major, transposed


def normal(shape, dtype=BF16):
    return jax.random.normal(jax.random.key(0), shape, dtype)


@pytest.mark.parametrize(
    "implementation, scaling, dtype, x_dtype, shape",
    pairwise(
        IMPLEMENTATIONS,
        SCALINGS,
        [E4M3, E5M2],
        [BF16, F16, F32],
        [(64, 64), (64, 320), (128, 192)],
    ),
    indirect=["implementation"],
    ids=str,
)
def test_both_orders_have_the_bits_of_the_formula(implementation, scaling, dtype, x_dtype, shape):
    check(normal(shape, x_dtype), dtype, scaling, implementation)


@pytest.mark.parametrize("row_major, transposed", [(True, True), (True, False), (False, True)])
@each_scaling
def test_a_part_of_an_array_on_a_mesh(interpreted, monkeypatch, scaling, row_major, transposed):
    """The maxima of a device are exchanged. On one device they are those of the array. 2 s."""
    monkeypatch.setattr(casts, "why_no_kernel", lambda _: None)  # kernels run on GPUs alone
    x, cast = normal((128, 192)), Cast(dtype=E4M3, scaling=scaling)
    mesh = jax.make_mesh((1,), ("data",), (AxisType.Auto,), devices=jax.devices()[:1])
    run = jax.shard_map(
        lambda a: casts.cast_part(
            a, cast, column_axes=("data",), row_major=row_major, transposed=transposed
        ),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    program = str(jax.make_jaxpr(run)(x))
    assert "fp8_quantize" in program
    assert ("fp8_amax" in program) == (scaling == "row" and row_major and transposed)
    for got, of_x, wanted in zip(quick_jit(run)(x), (x, x.T), (row_major, transposed), strict=True):
        if wanted:
            assert_same(got, of_x, E4M3, scaling)
        else:
            assert got is None


def test_a_part_without_a_kernel_is_told(monkeypatch, caplog):
    """Rows of a device that are no multiple of 64, as on a GPU."""
    monkeypatch.setattr(casts, "reason_not_here", lambda: None)
    x, cast = normal((100, 64)), Cast(dtype=E4M3, scaling="row")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            casts.cast_part(x, cast)
    (message,) = caplog.messages
    assert message.startswith("quantize: XLA quantizes a device's part: x has shape (100, 64); ")


@pytest.mark.parametrize("width, dtype", [(33088, BF16), (151936, BF16), (128256, F32)])
def test_rows_that_no_block_holds(interpreted, monkeypatch, width, dtype):
    """Another kernel reads them after a pass for their maxima. 1 s."""
    run = functools.partial(quantize, scaling="row", implementation="mosaic_gpu")
    program = str(jax.make_jaxpr(run)(jax.ShapeDtypeStruct((64, width), dtype)))
    assert "fp8_quantize" in program and "fp8_quantize_rows" not in program
    monkeypatch.setattr(row_kernel, "splits", lambda *_: [])
    x = normal((64, 128), dtype)
    assert_same(quick_jit(run)(x), x, E4M3, "row")


@pytest.mark.parametrize(
    "shape, x_dtype", [((256, 256), BF16), ((64, 512), F32), ((640, 64), F16)], ids=str
)
def test_strips_of_several_tiles(interpreted, shape, x_dtype):
    """A slot is filled again after all warps have read it, a buffer after TMA has stored it."""
    rows, columns = (jnp.exp2(jnp.arange(n) % 7) for n in shape)
    x = (normal(shape, F32) * rows[:, None] * columns / 64).astype(x_dtype)
    check(x, E4M3, "row", "mosaic_gpu")


@pytest.mark.parametrize("row, column", [(3, 5), (200, 200)])
def test_nan_in_a_tile_of_a_strip(interpreted, row, column):
    row_major, transposed = check(
        normal((256, 256)).at[row, column].set(jnp.nan), E4M3, "row", "mosaic_gpu"
    )
    for q, i in ((row_major, row), (transposed, column)):
        np.testing.assert_array_equal(np.isnan(np.asarray(q.scale))[:, 0], np.arange(256) == i)


def test_a_scale_for_each_row_and_one_for_all_columns(interpreted):
    x, of_rows, of_all = normal((64, 128)), jnp.exp2(jnp.arange(64.0) % 5)[:, None], jnp.float32(2)
    want = reference.values_of_both(x, of_rows, of_all, E4M3)
    got = quick_jit(functools.partial(mosaic_gpu.quantize, dtype=E4M3))(x, of_rows, of_all)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a, F32), np.asarray(b, F32))
    assert mosaic_gpu.quantize(x, None, None, E4M3) == (None, None)


def test_tiles_of_a_block():
    assert tiles_of_block(8, 1, most=4) == 4  # two blocks, as many as one multiprocessor wants
    assert tiles_of_block(4, 1, most=4) == 2
    assert tiles_of_block(7, 1, most=4) == 1
    assert tiles_of_block(1, 1, most=4) == 1


def test_int8_from_bits_and_back():
    values = jnp.arange(-127, 128, dtype=jnp.int8)
    in_float32 = int8_to_float32(values)
    np.testing.assert_array_equal(in_float32, np.arange(-127.0, 128.0))
    np.testing.assert_array_equal(float32_to_int8(in_float32), values)
    ties = jnp.float32([-126.5, -1.5, -0.5, 0.5, 1.5, 126.5])
    np.testing.assert_array_equal(float32_to_int8(ties), [-126, -2, 0, 0, 2, 126])


@each_scaling
@pytest.mark.parametrize("shape", [(1, 1), (3, 100), (0, 8), (8, 0)], ids=str)
def test_sizes_that_no_kernel_takes(scaling, shape):
    x = normal(shape)
    row_major, transposed = quick_jit(functools.partial(quantize_both, scaling=scaling))(x)
    assert (row_major.values.shape, transposed.values.shape) == (shape, shape[::-1])
    if x.size:
        check(x, E4M3, scaling, None)
    else:
        assert all(np.all(np.asarray(q.scale) == 1) for q in (row_major, transposed))


@each_implementation
@each_scaling
def test_one_order_has_the_bits_of_both(implementation, scaling):
    x = normal((64, 128))
    options = dict(scaling=scaling, implementation=implementation)
    of = lambda fn: quick_jit(functools.partial(fn, **options))(x)
    assert_same(of(quantize), x, E4M3, scaling)
    assert_same(of(quantize_transposed), np.asarray(x).T, E4M3, scaling)


@pytest.mark.parametrize(
    "width, dtype, x_dtype", [(64, E4M3, BF16), (320, E5M2, BF16), (1024, E4M3, F32)], ids=str
)
def test_rows_of_one_warp_and_of_several(interpreted, width, dtype, x_dtype):
    # A row of 1024 has four warps. A row of 320 has one, and its chunks of 256 overlap.
    x = normal((64, width), x_dtype).at[3, 5].set(np.nan).at[5].set(0).at[6, 63].set(np.inf)
    run = functools.partial(quantize, dtype=dtype, scaling="row", implementation="mosaic_gpu")
    assert_same(quick_jit(run)(x), x, dtype, "row")


@each_scaling
def test_leading_axes_are_rows(scaling):
    x = normal((2, 3, 32))
    got = quantize(x, scaling=scaling)
    assert got.scale.shape == ((2, 3, 1) if scaling == "row" else ())
    assert_same(got, x, E4M3, scaling)


@pytest.mark.parametrize(
    "implementation, scaling, dtype",
    pairwise(IMPLEMENTATIONS, SCALINGS, [E4M3, E5M2]),
    indirect=["implementation"],
    ids=str,
)
def test_the_largest_magnitude_becomes_the_largest_number(implementation, scaling, dtype):
    x = normal((64, 64)).at[:, 7].set(0).at[5].set(0)
    for got in check(x, dtype, scaling, implementation):
        largest = np.max(np.abs(np.asarray(got.values, F32)), axis=-1)
        of_zeros = np.argmin(largest)
        assert largest.max() == float(jnp.finfo(dtype).max) and largest[of_zeros] == 0
        assert scaling == "tensor" or float(got.scale[of_zeros, 0]) == 1


@each_scaling
def test_zeros_have_scale_1(scaling):
    for got in check(jnp.zeros((2, 8), BF16), E4M3, scaling, None):
        assert np.all(np.asarray(got.scale) == 1) and not np.any(np.asarray(got.values, F32))


@each_scaling
@each_dtype
def test_small_and_subnormal_numbers(scaling, dtype):
    # Rows below and above the limit of 2^-90, and subnormal numbers beside larger ones, which
    # become 0 whether or not the CPU flushes them.
    exponents = np.array([-149, -140, -127, -126, -110, -91, -90, -89, -60, 0])
    x = np.exp2(exponents, dtype=np.float64)[:, None] * np.array([1, 0.75, 2.0**-20, -(2.0**-30)])
    x = x.astype(np.float32)
    for a in (x, x[:6], x[5:8]):
        check(jnp.asarray(a), dtype, scaling, None)


@each_dtype
def test_ties_go_to_even_and_subnormal_results_are_rounded_once(dtype):
    # All numbers between two neighbours of the format, with a scale of 1.
    numbers = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    numbers = np.unique(numbers[np.isfinite(numbers)])
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = np.concatenate([numbers, middles, np.nextafter(middles, 1e9), np.nextafter(middles, -1e9)])
    got = quantize(jnp.asarray(x.astype(np.float32)[None]), dtype)
    assert float(got.scale) == 1
    assert_same(got, x.astype(np.float32)[None], dtype, "tensor")


@pytest.mark.parametrize(
    "implementation, scaling, dtype, bad",
    pairwise(IMPLEMENTATIONS, SCALINGS, [E4M3, E5M2], [np.nan, -np.inf]),
    indirect=["implementation"],
    ids=str,
)
def test_nan_and_infinity_arrive_as_nan(implementation, scaling, dtype, bad):
    x = normal((64, 64)).at[3, 5].set(bad)
    row_major, transposed = check(x, dtype, scaling, implementation)
    assert np.isnan(np.asarray(row_major.values, F32)[3, 5])
    assert np.isnan(np.asarray(transposed.values, F32)[5, 3])
    is_nan = np.isnan(np.asarray(row_major.dequantize()))
    transposed_is_nan = np.isnan(np.asarray(transposed.dequantize()))
    if scaling == "tensor":
        assert is_nan.all() and transposed_is_nan.all()
    else:
        assert is_nan[3].all() and transposed_is_nan[5].all()
        assert is_nan.sum() == transposed_is_nan.sum() == 64


def test_dequantized_numbers_err_by_half_a_unit():
    x = normal((64, 256), F32)
    for dtype, bits in ((E4M3, 3), (E5M2, 2)):
        for got in (quantize(x, dtype), quantize(x, dtype, scaling="row")):
            error = np.abs(np.asarray(got.dequantize()) - np.asarray(x))
            # Half of the last bit, or of the smallest subnormal number.
            least = float(jnp.finfo(dtype).smallest_subnormal) * np.asarray(got.scale)
            allowed = np.maximum(2.0 ** -(bits + 1) * np.abs(np.asarray(x)), least / 2)
            assert np.all(error <= allowed * 1.00001)
            assert got.dequantize(BF16).dtype == BF16


def test_a_quantized_tensor_is_a_pytree():
    got = jax.jit(lambda q: q)(quantize(normal((4, 8))))
    assert isinstance(got, Quantized)
    assert [leaf.dtype for leaf in jax.tree.leaves(got)] == [E4M3, F32]


@pytest.mark.parametrize(
    "x, options, error, message",
    [
        (normal((4, 8)), dict(dtype=BF16), ValueError, "bfloat16 is no dtype of FP8; take"),
        (normal((4, 8)), dict(scaling="column"), ValueError, "scaling='column' must be one of"),
        (normal((4, 8)), dict(implementation="triton"), ValueError, "'triton' must be None or"),
        (normal(()), {}, ValueError, r"at least one axis, got shape \(\)"),
        (normal((4, 8)).astype(E4M3), {}, TypeError, "of less than 16 bits; cast x"),
        (jnp.ones((4, 8), jnp.int32), {}, TypeError, "x is int32, not a floating dtype"),
        (
            normal((60, 64)),
            dict(implementation="mosaic_gpu"),
            NotImplementedError,
            r"shape \(60, 64\); the kernel takes .* multiples of 64, so pad x",
        ),
    ],
    ids=str,
)
def test_errors(unchecked_shapes, x, options, error, message):
    with pytest.raises(error, match=message):
        quantize(x, **options)


def test_other_functions_need_two_axes(unchecked_shapes):
    for function in (quantize_both, quantize_transposed):
        with pytest.raises(ValueError, match="x must have 2 axes, got shape"):
            function(normal((2, 4, 8)))


def test_equal_calls_launch_one_kernel(monkeypatch):
    """Each kernel is lowered once for all of its calls."""
    lowered = []
    lower = lowering.lower_unpipelined_jaxpr_to_module

    def counted(*args, **kwargs):
        lowered.append(lower(*args, **kwargs))
        return lowered[-1]

    monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", counted)
    quantize_rows = functools.partial(quantize_both, scaling="row", implementation="mosaic_gpu")
    product = functools.partial(fp8_matmul, implementation="mosaic_gpu")

    def run(*arrays):
        both = [quantize_rows(x) for x in arrays]
        return [product(q, q) for q, _ in both], both

    x = jax.ShapeDtypeStruct((64, 128), BF16)
    program = jax.jit(run).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    # The maxima, the values and the product, of two arrays.
    assert program.count("@mosaic_gpu") == 6 and len(lowered) == 3


@pytest.mark.parametrize("fn", [quantize, quantize_transposed, quantize_both])
def test_there_is_no_gradient(fn):
    """A cast to FP8 and back would round the cotangent, for instance to 0."""
    x = jnp.ones((4, 8))
    total = lambda x: jnp.sum(jax.tree.leaves(fn(x))[0].astype(F32))
    with pytest.raises(NotImplementedError, match="quantization to FP8 has no gradient"):
        jax.grad(total)(x)
    jax.grad(lambda x: total(jax.lax.stop_gradient(x)))(x)


def test_a_product_has_no_gradient():
    a = quantize(jnp.ones((4, 8)))
    of = lambda scale: jnp.sum(fp8_matmul(Quantized(a.values, scale), a).astype(F32))
    with pytest.raises(NotImplementedError, match="fp8_matmul has no gradient"):
        jax.grad(of)(a.scale)
