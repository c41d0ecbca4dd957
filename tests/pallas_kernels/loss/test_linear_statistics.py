"""Statistics of logits by the Mosaic GPU kernel, interpreted, against float64."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gpu.device import Device
from pallas_kernels.gpu.hopper_gemm import Config
from pallas_kernels.loss.mosaic_gpu import linear_launch
from pallas_kernels.loss.mosaic_gpu.linear_exponentials import Repetition, linear_exponentials
from pallas_kernels.loss.mosaic_gpu.linear_launch import default_config, unsupported_reason
from pallas_kernels.loss.mosaic_gpu.statistics import linear_statistics
from pallas_kernels.loss.token_loss import LogitStatistics
from support.numerics import quick_jit

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
BASE = Config(tile_n=128, stages=3, cluster=1, band=2, blocks=2)
interpreted = pytest.mark.usefixtures("interpreted")
full = pytest.mark.full


def make_args(num_tokens, hidden_size, vocab_size, dtype=BF16, *, bias=False, scale=1.0, seed=0):
    """Logits of a standard deviation of `scale`; labels in all places, in and out of range."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_tokens, hidden_size)) * scale / np.sqrt(hidden_size)
    weight = rng.standard_normal((vocab_size, hidden_size))
    labels = rng.integers(0, vocab_size, num_tokens)
    special = (0, vocab_size - 1, vocab_size, -100, 2**30, -1)[:num_tokens]
    labels[-len(special) :] = special
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(weight, dtype),
        jnp.asarray(rng.standard_normal(vocab_size), F32) if bias else None,
        jnp.asarray(labels, jnp.int32),
    )


def formula(x, weight, bias, labels, *, softcap=None, first_column=0):
    """The statistics in float64, in the order of `LogitStatistics`."""
    z = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    if bias is not None:
        z = z + np.asarray(bias, np.float64)
    if softcap is not None:
        z = softcap * np.tanh(z / softcap)
    columns = first_column + np.arange(z.shape[1])
    labels = np.asarray(labels, np.int64)[:, None]
    largest = np.max(z, axis=1)
    top = np.where(np.isfinite(largest), largest, 0)
    with np.errstate(divide="ignore"):
        lse = top + np.log(np.sum(np.exp(z - top[:, None]), axis=1))
    part = lambda mask: np.max(np.where(mask, z, -np.inf), axis=1)
    return lse, part(columns == labels), largest, part(columns < labels), np.sum(z, axis=1)


@functools.cache
def compiled(**options):
    """One program for all values of the same shapes."""
    return quick_jit(lambda *args: linear_statistics(*args, **options)[0])


def check(args, *, softcap=None, config=None, with_total=True):
    got = compiled(softcap=softcap, config=config, with_total=with_total)(*args)
    exact = formula(*args, softcap=softcap)
    compare(got, exact, with_total=with_total)
    return got, exact


def compare(got, exact, *, with_total=True):
    """Allows a few float32 roundings of the largest number that was added up."""
    largest = exact[2]
    for name, g, e in zip(LogitStatistics._fields, got, exact, strict=True):
        g = np.asarray(g, np.float64)
        assert g.dtype == np.float64 and g.shape == e.shape
        if name == "total":
            if not with_total:
                np.testing.assert_array_equal(g, 0)
                continue
            slack = 1e-4
        else:
            slack = 4e-6
        np.testing.assert_array_equal(g[~np.isfinite(e)], e[~np.isfinite(e)], err_msg=name)
        finite = np.isfinite(e)
        # Where terms cancel, the largest number of the row decides the rounding.
        size = 1 + np.abs(e) + np.where(np.isfinite(largest), np.abs(largest), 0)
        error = np.abs(g[finite] - e[finite])
        np.testing.assert_array_less(error, slack * size[finite], err_msg=name)


# Shapes.


# Rows around the 128 of a block, columns around tiles of 128 and 256, depths around steps of 64.
@interpreted
@pytest.mark.parametrize(
    "num_tokens, hidden_size, vocab_size, dtype, bias, softcap",
    [
        pytest.param(1, 8, 1, BF16, False, None, marks=full),
        pytest.param(1, 64, 1000, BF16, True, None, marks=full),
        pytest.param(127, 72, 100, BF16, False, None, marks=full),
        pytest.param(128, 128, 256, BF16, False, None, marks=full),
        (129, 64, 257, F16, True, 2.0),
        pytest.param(200, 72, 300, BF16, False, 30.0, marks=full),
        pytest.param(7, 72, 129, BF16, True, 30.0, marks=full),
        pytest.param(7, 8, 129, F16, False, None, marks=full),
    ],
)
def test_shapes_that_divide_nothing(num_tokens, hidden_size, vocab_size, dtype, bias, softcap):
    args = make_args(num_tokens, hidden_size, vocab_size, dtype, bias=bias, scale=3.0)
    check(args, softcap=softcap)


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(), marks=full),
        pytest.param(dict(stages=2), marks=full),
        pytest.param(dict(tile_n=64, band=1, stages=2), marks=full),
        pytest.param(dict(tile_n=192, blocks=7), marks=full),
        pytest.param(dict(tile_n=192, blocks=1, band=9), marks=full),
        pytest.param(dict(cluster=2, blocks=4), marks=full),
        pytest.param(dict(cluster=2, band=1, blocks=6), marks=full),
        dict(tile_n=192, cluster=2, band=1, blocks=6, stages=2),
    ],
    ids=str,
)
def test_all_configurations_agree(changes):
    # Three blocks of rows, so that the last cluster has a block without rows; three steps in D.
    args = make_args(300, 192, 300, bias=True)
    check(args, softcap=None, config=dataclasses.replace(BASE, **changes))


@interpreted
def test_more_stages_than_steps_and_more_blocks_than_tiles():
    config = dataclasses.replace(BASE, stages=4, cluster=2, blocks=6)
    check(make_args(5, 64, 100), softcap=None, config=config)


# Values.


@interpreted
def test_parts_of_a_vocabulary_combine():
    args = make_args(64, 64, 501, bias=True, scale=4.0)
    x, weight, bias, labels = args
    assert bias is not None

    # The first column is traced, as it is for the part of a device.
    @quick_jit
    def statistics(first, x, weight, bias, labels):
        options = {"softcap": None, "with_total": True}
        return linear_statistics(x, weight, bias, labels - first, **options)[0]

    parts = []
    for start in (0, 167, 334):
        columns = slice(start, start + 167)
        part = (x, weight[columns], bias[columns], labels)
        got = statistics(jnp.asarray(start, jnp.int32), *part)
        compare(got, formula(*part, first_column=start))
        parts.append(got)
    lse, label_logit, largest, largest_before, total = (
        np.stack(field) for field in zip(*parts, strict=True)
    )
    combined = (
        np.logaddexp.reduce(lse, axis=0),
        np.max(label_logit, axis=0),
        np.max(largest, axis=0),
        np.max(largest_before, axis=0),
        np.sum(total, axis=0),
    )
    compare(combined, formula(*args))


@interpreted
@pytest.mark.parametrize(
    "columns", [(0, 1, 1), (5, 133, 5), (127, 128, 128), (3, 200, 131)], ids=str
)
def test_ties_with_the_label(columns):
    # The first of equal logits is the largest, so it matters which columns precede the label.
    x, weight = np.ones((20, 64), BF16), np.zeros((300, 64), BF16)
    weight[list(columns)] = 0.5
    labels = np.resize(columns, 20).astype(np.int32)
    got, _ = check((x, weight, np.zeros(300, np.float32), labels), softcap=None, config=BASE)
    first = labels == min(columns)
    np.testing.assert_array_equal(got.largest, got.label_logit)
    np.testing.assert_array_equal(got.largest_before < got.label_logit, first)


@interpreted
@pytest.mark.parametrize("scale", [1e3, 1e-3])
def test_huge_and_tiny_logits(scale):
    got, _ = check(make_args(40, 64, 300, scale=scale), softcap=None, with_total=False)
    assert np.all(np.isfinite(got.lse))


@interpreted
@pytest.mark.parametrize("allowed", [slice(0, 0), slice(299, 300), slice(0, 1), slice(128, 130)])
def test_logits_of_minus_infinity(allowed):
    x, weight, _, labels = make_args(20, 64, 300)
    bias = np.full(300, -np.inf, np.float32)
    bias[allowed] = 0
    check((x, weight, bias, labels), softcap=None, config=BASE)


@interpreted
def test_a_nan_stays_in_its_row():
    x, *others = make_args(140, 64, 300)
    broken = np.array(x)
    broken[3, 7] = np.nan
    run = compiled(softcap=None)
    got, clean = (jax.device_get(run(a, *others)) for a in (broken, x))
    assert np.isnan(got.lse[3])
    for g, c in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.delete(g, 3), np.delete(c, 3))


# Exponentials.


def check_exponentials(got, args, offset):
    """Compares the results of a call without a bias with float64."""
    got, offset = jax.device_get((got, offset))
    x, weight, _, labels = args
    exact = formula(*args)
    z = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    exponentials = np.exp2(z * np.log2(np.e) - np.asarray(offset, np.float64)[:, None])
    num_columns = len(weight)
    values = np.asarray(got.values, np.float64)
    chex.assert_type(got.values, x.dtype)
    # The rounding to the 8 digits of bfloat16, and the error of the logit.
    np.testing.assert_allclose(values[:, :num_columns], exponentials, rtol=2**-8)
    assert np.all(values[:, num_columns:] == 0)
    np.testing.assert_allclose(got.sum_exp, np.sum(exponentials, axis=1), rtol=1e-5)
    labels = np.asarray(labels)
    is_column = (labels >= 0) & (labels < num_columns)
    of_label = exponentials[np.arange(len(x)), np.where(is_column, labels, 0)]
    np.testing.assert_allclose(got.of_label, np.where(is_column, of_label, 0), rtol=1e-5)
    lse = (offset + np.log2(got.sum_exp)) / np.float32(np.log2(np.e))
    found = lse, got.label_logit, got.largest, got.largest_before, np.zeros_like(lse)
    compare(found, exact, with_total=False)


def padded(weight):
    return np.pad(np.asarray(weight), ((0, -len(weight) % 128), (0, 0)))


@functools.cache
def compiled_exponentials(num_columns, config):
    """One program for all values of the same shapes."""

    def run(x, weight, labels, offset, options):
        return linear_exponentials(
            x, weight, labels, offset, num_columns=num_columns, config=config, **options
        )

    return quick_jit(run)


def run_exponentials(args, offset, config=None, **options):
    x, weight, _, labels = args
    run = compiled_exponentials(len(weight), config)
    return run(x, padded(weight), labels, offset, options)


@interpreted
@pytest.mark.parametrize(
    "num_tokens, hidden_size, vocab_size",
    [
        pytest.param(1, 8, 1, marks=full),
        pytest.param(7, 72, 129, marks=full),
        pytest.param(128, 64, 256, marks=full),
        (129, 72, 257),
        pytest.param(200, 72, 300, marks=full),
    ],
)
def test_exponentials_of_shapes_that_divide_nothing(num_tokens, hidden_size, vocab_size):
    args = make_args(num_tokens, hidden_size, vocab_size, scale=3.0)
    offset = jnp.linspace(-20, 20, num_tokens)
    check_exponentials(run_exponentials(args, offset), args, offset)


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(dict(), marks=full),
        pytest.param(dict(band=1), marks=full),
        pytest.param(dict(tile_n=192, blocks=7), marks=full),
        pytest.param(dict(tile_n=192, blocks=1, band=9), marks=full),
        dict(cluster=2, blocks=4),
    ],
    ids=str,
)
def test_all_configurations_store_the_same(changes):
    args = make_args(300, 192, 300)
    offset = jnp.linspace(-20, 20, 300)
    config = dataclasses.replace(BASE, **changes)
    check_exponentials(run_exponentials(args, offset, config), args, offset)


@interpreted
def test_a_scale_multiplies_the_exponentials_that_are_stored():
    x, weight, bias, labels = jax.device_get(make_args(140, 64, 300))
    offset = np.linspace(-20, 20, 140, dtype=np.float32)
    # The scale is a power of 2, which rounds nothing, 0 for the token of NaN, and NaN for another.
    scale = np.exp2(np.arange(140, dtype=np.float32) % 7 - 3)
    scale[[3, 130, 5]] = -1, 0, np.nan
    broken = x.copy()
    broken[130] = np.nan
    got = run_exponentials((broken, weight, bias, labels), offset, scale=scale)
    got = jax.device_get(got)
    assert np.all(np.asarray(got.values)[130] == 0) and np.isnan(got.sum_exp[130])
    assert np.all(np.isnan(np.asarray(got.values, F32)[5, :300])) and got.sum_exp[5] > 0
    others = np.setdiff1d(np.arange(140), [5, 130])
    scale[130] = 1
    values = got.values / scale[:, None].astype(got.values.dtype)
    check_exponentials(
        jax.tree.map(lambda a: a[others], got._replace(values=values)),
        (x[others], weight, bias, labels[others]),
        offset[others],
    )


@interpreted
def test_a_repetition_that_is_needed_overwrites_the_first_results():
    args = jax.device_get(make_args(140, 64, 300))
    offset = np.linspace(-20, 20, 140, dtype=np.float32)
    first = run_exponentials(args, offset)
    keep = np.arange(140) != 130
    # The repetition has a row of NaN with a scale of 0.
    broken = args[0].copy()
    broken[130] = np.nan
    again = broken, *args[1:]
    repetition = Repetition(jax.tree.map(jnp.copy, first), jnp.bool_(True))
    scale = keep.astype(np.float32)
    got = run_exponentials(again, offset + 3, scale=scale, repetition=repetition)
    got = jax.device_get(got)
    assert np.all(np.asarray(got.values)[130] == 0) and np.isnan(got.sum_exp[130])
    others = np.flatnonzero(keep)
    x, weight, bias, labels = args
    check_exponentials(
        jax.tree.map(lambda a: a[others], got),
        (x[others], weight, bias, labels[others]),
        (offset + 3)[others],
    )


@interpreted
def test_a_repetition_that_is_not_needed_changes_nothing():
    args = make_args(140, 64, 300)
    offset = np.linspace(-20, 20, 140, dtype=np.float32)
    first = run_exponentials(args, offset)
    repetition = Repetition(jax.tree.map(jnp.copy, first), jnp.bool_(False))
    scale = np.zeros(140, np.float32)
    got = run_exponentials(args, offset + 3, scale=scale, repetition=repetition)
    chex.assert_trees_all_equal(got, first)


# What can run.


def test_unsupported_arguments(monkeypatch):
    x, weight, *_ = make_args(8, 64, 16)
    assert unsupported_reason(x, weight) is None
    for name, arguments in {
        "float32": (x.astype(F32), weight),
        "float16": (x.astype(F16), weight),
        "are empty": (x, weight[:0]),
    }.items():
        assert name in str(unsupported_reason(*arguments))
    for capability in ((8, 0), (10, 0)):
        device = Device("another", capability, 100)
        monkeypatch.setattr(linear_launch, "target_device", lambda device=device: device)
        assert "(9, x)" in str(unsupported_reason(x, weight))
        with pytest.raises(NotImplementedError, match="wgmma"):
            linear_statistics(x, weight, None, jnp.zeros(8, jnp.int32), softcap=None)


@pytest.mark.parametrize(
    "changes",
    [
        dict(tile_n=512),
        dict(tile_n=100),
        dict(stages=1),
        dict(cluster=3),
        dict(band=0),
        dict(cluster=2, blocks=3),
    ],
    ids=str,
)
def test_wrong_configurations(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        dataclasses.replace(BASE, **changes)


def test_more_stages_than_shared_memory_has(monkeypatch):
    monkeypatch.setattr(linear_launch, "target_device", lambda: H100)
    x, weight, bias, labels = make_args(8, 64, 16)
    config = dataclasses.replace(BASE, tile_n=192, stages=6)
    with pytest.raises(ValueError, match="245760 bytes of shared memory"):
        linear_statistics(x, weight, bias, labels, softcap=None, config=config)
    # The stored exponentials need 32768 more.
    with pytest.raises(ValueError, match="278528 bytes of shared memory"):
        linear_exponentials(x, weight, labels, jnp.zeros(8), num_columns=16, config=config)


def test_default_configurations():
    config = default_config(8192, 128256, 4096, H100)
    assert (config.tile_n, config.cluster, config.blocks, config.band) == (192, 2, 132, 8)
    small = default_config(1, 1, 8, H100)
    assert (small.tile_n, small.cluster, small.blocks) == (128, 1, 1)
