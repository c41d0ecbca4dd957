"""Products of the gradients by the Mosaic GPU kernel, interpreted, against float64."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.device import Device
from pallas_kernels.gpu.hopper_gemm import Config
from pallas_kernels.loss.mosaic_gpu import products as module
from pallas_kernels.loss.mosaic_gpu.products import (
    best_tile,
    default_config,
    product,
    unsupported_reason,
)
from support.numerics import assert_as_accurate, quick_jit

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
A100 = Device("NVIDIA A100-SXM4-40GB", (8, 0), 108)
BASE = Config(tile_n=128, stages=3, cluster=1, band=2, blocks=2)
interpreted = pytest.mark.usefixtures("interpreted")


def make_args(depth, num_rows, num_columns, dtype=BF16):
    rng = np.random.default_rng(0)
    a = jnp.asarray(rng.standard_normal((depth, num_rows)), dtype)
    return a, jnp.asarray(rng.standard_normal((depth, num_columns)), dtype)


weight_gradient = functools.partial(product, a_layout="KM")


@functools.cache
def compiled(a_layout="KM", **options):
    return quick_jit(functools.partial(product, a_layout=a_layout, **options))


def check(args, **options):
    got = compiled(**options)(*args)
    chex.assert_type(got, options["dtype"])
    assert_is_the_product(got, *args)
    return got


def assert_is_the_product(got, a, b):
    """Asserts that `got` errs no more than NumPy's float32 product, rounded to its dtype."""
    exact = np.asarray(a, np.float64).T @ np.asarray(b, np.float64)
    plain = np.asarray(a, np.float32).T @ np.asarray(b, np.float32)
    assert_as_accurate([got], [plain.astype(got.dtype)], [exact], names=["product"])


# The tokens are near the 64 of a step. The rows are a block, a half and more. The columns are tiles
# of each width, and a part of a tile.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, num_rows, hidden_size, dtype, result",
    [
        (1, 128, 128, BF16, F32),
        pytest.param(63, 128, 128, F16, F16, marks=pytest.mark.full),
        pytest.param(64, 256, 128, BF16, BF16, marks=pytest.mark.full),
        pytest.param(65, 384, 128, BF16, F32, marks=pytest.mark.full),
        (131, 192, 320, BF16, BF16),
        pytest.param(131, 128, 192, BF16, BF16, marks=pytest.mark.full),
        pytest.param(131, 128, 384, F16, F32, marks=pytest.mark.full),
        (65, 256, 256, F16, F16),
        pytest.param(7, 128, 256, BF16, BF16, marks=pytest.mark.full),
        pytest.param(200, 256, 256, BF16, F32, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_shapes(num_tokens, num_rows, hidden_size, dtype, result):
    check(make_args(num_tokens, num_rows, hidden_size, dtype), dtype=result)


# A tile of 192 columns of 16 bits is stored in 3 parts.
CHANGES = [
    {},
    {"stages": 2},
    {"tile_n": 64, "band": 1},
    {"tile_n": 192, "blocks": 7},
    {"tile_n": 192, "blocks": 1, "band": 9},
    {"cluster": 2, "blocks": 4},
    {"cluster": 2, "band": 1, "blocks": 6},
]
# The normal run has a case that changes every parameter.
SOME_CHANGES = [({"stages": 2, "tile_n": 64, "cluster": 2, "band": 1, "blocks": 6}, F32)]


@interpreted
@pytest.mark.parametrize(
    "changes, dtype",
    [
        *SOME_CHANGES,
        *(
            pytest.param(changes, dtype, marks=pytest.mark.full)
            for changes in CHANGES
            for dtype in (F32, BF16)
            if (changes, dtype) not in SOME_CHANGES
        ),
    ],
    ids=str,
)
def test_all_configurations_agree(changes, dtype):
    # Two clusters of blocks have 6 tiles of 128 columns or 4 of 192 each, and 3 steps of tokens.
    config = dataclasses.replace(BASE, **changes)
    args = make_args(150, 512, 384)
    got = check(args, dtype=dtype, config=config)
    # A CPU's compiler fuses other multiplications with additions in each interpreted program.
    if jax.default_backend() == "gpu":
        chex.assert_trees_all_equal(got, compiled(dtype=dtype, config=BASE)(*args))


@interpreted
def test_repeated_runs_have_the_same_bits():
    args = make_args(100, 256, 128)
    chex.assert_trees_all_equal(*(compiled(dtype=F32)(*args) for _ in range(3)))


@interpreted
def test_nan_stays_in_its_row():
    dlogits, x = make_args(100, 256, 128)  # the program of the test above
    got = np.asarray(compiled(dtype=F32)(dlogits.at[99, 130].set(jnp.nan), x))
    assert np.isnan(got[130]).all() and np.isfinite(np.delete(got, 130, axis=0)).all()


@interpreted
def test_parts_are_written_where_they_belong():
    """As the loss does in a loop."""
    dlogits, x = make_args(64, 384, 128)

    @quick_jit
    def by_parts(dlogits, x):
        def step(i, dweight):
            part = jax.lax.dynamic_slice_in_dim(dlogits, 128 * i, 128, axis=1)
            part = weight_gradient(part, x, dtype=F32)
            return jax.lax.dynamic_update_slice_in_dim(dweight, part, 128 * i, axis=0)

        return jax.lax.fori_loop(0, 3, step, jnp.zeros((384, 128)))

    assert_is_the_product(by_parts(dlogits, x), dlogits, x)


# An `a` that is not transposed: columns past K are not read, and it may be in parts.


@interpreted
@pytest.mark.parametrize(
    "num_rows, depth, num_columns, dtype, result",
    [
        pytest.param(128, 1, 128, BF16, F32, marks=pytest.mark.full),
        pytest.param(128, 64, 192, F16, F16, marks=pytest.mark.full),
        (256, 65, 128, BF16, BF16),
        pytest.param(384, 200, 256, BF16, F32, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_rows(num_rows, depth, num_columns, dtype, result):
    a, b = make_args(depth, num_rows, num_columns, dtype)
    # What is after K, up to a multiple of 64, is multiplied with zeros.
    width = 256
    wide = jnp.full((num_rows, width), jnp.nan, dtype)
    wide = wide.at[:, : depth + -depth % 64].set(1).at[:, :depth].set(a.T)
    got = compiled(a_layout="MK", dtype=result)(wide, b)
    assert_is_the_product(got, a, b)
    if jax.default_backend() == "gpu":
        chex.assert_trees_all_equal(got, compiled(dtype=result)(a, b))


@interpreted
@pytest.mark.parametrize(
    "depths, num_columns",
    [
        pytest.param((128, 1), 128, marks=pytest.mark.full),
        ((128, 128, 30), 192),
        pytest.param((128, 70), 192, marks=pytest.mark.full),
        pytest.param((256, 128), 128, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_parts(depths, num_columns):
    a, b = make_args(sum(depths), 256, num_columns)
    ends = np.cumsum(depths)
    parts = [a[end - depth : end].T for depth, end in zip(depths, ends, strict=True)]
    parts = [jnp.pad(part, ((0, 0), (0, -part.shape[1] % 128))) for part in parts]
    got = quick_jit(lambda b, *a: product(a, b, a_layout="MK", dtype=F32))(b, *parts)
    assert_is_the_product(got, a, b)
    if jax.default_backend() == "gpu":
        chex.assert_trees_all_equal(got, compiled(dtype=F32)(a, b))


# The loss makes dx so: for some rows, with factors, and with b from a row on.
SOME_ROWS = {(1, 64), (130, 128)}


@interpreted
@pytest.mark.parametrize(
    "num_rows, first_row_of_b",
    [
        pytest.param(rows, first, marks=() if (rows, first) in SOME_ROWS else pytest.mark.full)
        for rows in (1, 7, 8, 63, 65, 128, 130, 256)
        for first in (0, 64, 128)
    ],
)
def test_some_rows_with_factors(num_rows, first_row_of_b):
    a, b = make_args(192, 256, 128)
    factor = jnp.asarray(np.random.default_rng(1).uniform(0.1, 3, num_rows), F32)
    options = {"num_rows": num_rows, "first_row_of_b": first_row_of_b, "dtype": BF16}
    # The result has no other columns.
    got = quick_jit(
        lambda a, b, factor: product(a, b, a_layout="KM", row_factor=factor, **options)
    )(a.at[:, num_rows:].set(jnp.nan), b, factor)
    chex.assert_shape(got, (num_rows, 128))
    chex.assert_type(got, BF16)

    def plain(dtype):
        turned = np.roll(np.asarray(b, dtype), -first_row_of_b, axis=0)
        return np.asarray(a, dtype)[:, :num_rows].T @ turned * np.asarray(factor, dtype)[:, None]

    low = plain(np.float32).astype(BF16)
    assert_as_accurate([got], [low], [plain(np.float64)], names=["dx"])


# Arguments that the kernel refuses.


@pytest.mark.parametrize(
    "device, dlogits, x, dtype, message",
    [
        (A100, (8, 128, BF16), (8, 128, BF16), F32, r"capability \(9, x\)"),
        (H100, (8, 128, F32), (8, 128, F32), F32, "float32, float32, not all bfloat16 or float16"),
        (H100, (8, 128, F16), (8, 128, BF16), F32, "float16, bfloat16, not all"),
        (H100, (0, 128, BF16), (0, 128, BF16), F32, "empty"),
        (H100, (8, 128, BF16), (8, 96, BF16), F32, "b of .* not a multiple of 64"),
        (H100, (8, 96, BF16), (8, 128, BF16), F32, "a of .* not a multiple of 64"),
        (H100, (8, 128, BF16), (8, 128, BF16), jnp.float8_e4m3fn, "the result is float8_e4m3fn"),
    ],
    ids=str,
)
def test_unsupported(monkeypatch, device, dlogits, x, dtype, message):
    monkeypatch.setattr(module, "target_device", lambda: device)
    dlogits, x = (jnp.zeros(a[:2], a[2]) for a in (dlogits, x))
    assert unsupported_reason(dlogits, x, dtype) is not None
    with pytest.raises(NotImplementedError, match=message):
        weight_gradient(dlogits, x, dtype=dtype)


def test_wrong_configuration(monkeypatch):
    monkeypatch.setattr(module, "target_device", lambda: H100)
    config = dataclasses.replace(BASE, tile_n=256, stages=5)
    with pytest.raises(ValueError, match="278528 bytes of shared memory"):
        weight_gradient(*make_args(8, 128, 256), dtype=F32, config=config)


def test_more_rows_than_there_are(monkeypatch):
    monkeypatch.setattr(module, "target_device", lambda: H100)
    a, b = jnp.zeros((64, 128), BF16), jnp.zeros((64, 128), BF16)
    with pytest.raises(ValueError, match="a has 128 of the num_rows=192 of the result"):
        product(a, b, a_layout="KM", dtype=F32, num_rows=192)


@pytest.mark.parametrize(
    "a_layout, shapes",
    [("MK", [(128, 128)]), ("MK", [(128, 128), (128, 128)]), ("KM", [(320, 128)])],
)
def test_operands_that_disagree(monkeypatch, a_layout, shapes):
    monkeypatch.setattr(module, "target_device", lambda: H100)
    a = [jnp.zeros(shape, BF16) for shape in shapes]
    with pytest.raises(ValueError, match=r"of the 384 in K that b of shape \(384, 128\) has"):
        product(a, jnp.zeros((384, 128), BF16), a_layout=a_layout, dtype=F32)


def test_default_configurations():
    config = default_config(2048, 4096, 8192, H100)
    assert config == Config(tile_n=256, stages=4, cluster=1, band=8, blocks=132)
    assert default_config(2048, 2880, 8192, H100).tile_n == 192
    assert default_config(2048, 1152, 8192, H100).tile_n == 192
    assert default_config(2048, 640, 8192, H100).tile_n == 128
    assert default_config(2048, 1600, 8192, H100).tile_n == 256  # the last tile is a quarter


def test_tiles_that_keep_all_multiprocessors_busy():
    # Four tiles for each multiprocessor, two, and three, which then are narrower.
    assert best_tile(4224, 4096, H100) == (4 * 272, 256)
    assert best_tile(2048, 4096, H100) == (2 * 272, 256)
    assert best_tile(4096, 2304, H100) == (3 * 208, 192)
