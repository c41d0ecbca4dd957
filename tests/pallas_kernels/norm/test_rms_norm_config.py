"""How the RMSNorm kernels deal rows, choose and check launch parameters; no kernel runs."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm, rms_norm, tuning
from pallas_kernels.gpu.device import Device
from pallas_kernels.norm import Config, backward_kernel, mosaic_gpu
from pallas_kernels.norm import config as config_module
from pallas_kernels.norm.config import (
    backward_candidates,
    default_config,
    forward_candidates,
    guess_config,
)
from pallas_kernels.norm.rows import Rows, column_parts, ring_bytes, split_row, splits

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
H200 = Device("NVIDIA H200", (9, 0), 132)
DEVICES = [
    Device("NVIDIA A100-SXM4-80GB", (8, 0), 108),
    Device("NVIDIA L4", (8, 9), 58),
    H100,
    Device("NVIDIA B200", (10, 0), 148),
]
BASE = Config(fwd_warps=4, fwd_reread=False, bwd_warps=4, bwd_blocks=1, bwd_stages=0, bwd_rows=1)


def arrays(hidden_size, dtype: Any = BF16, residual_dtype: Any = None):
    """`x`, `weight` and `residual` without contents."""
    make: Any = lambda dtype, *shape: jax.ShapeDtypeStruct((*shape, hidden_size), dtype)
    residual = None if residual_dtype is None else make(residual_dtype, 8)
    return make(dtype, 8), make(F32), residual


# Rows.


def test_the_sizes_that_the_documentation_names(unchecked_shapes):
    refused = lambda size: mosaic_gpu.unsupported_reason(*arrays(size))
    for multiple, most in ((1, 512), (2, 1024), (8, 4128), (16, 8256), (32, 16384)):
        first = 64 + -64 % multiple
        sizes = [*range(first, most + 1, 7 * multiple), most]
        assert not any(map(refused, sizes)), multiple
    for size in (63, 513, 1026, 4136, 8272):
        assert refused(size)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_split_covers_the_row_and_nothing_else(itemsize):
    for hidden_size in (*range(64, 1400, 7), 2880, 4096, 5120, 16384, 20480, 32768, 65536):
        for split in splits(hidden_size, itemsize):
            times = np.zeros((split.warps, split.segment), int)
            for start, vector in split.chunks:
                assert start >= 0 and start + 32 * vector <= split.segment
                # A lane's access starts at a multiple of its own width.
                assert start % vector == split.segment % vector == 0
                times[:, start : start + 32 * vector] += 1
            # The last chunk repeats `overlap` elements of the chunks before it.
            last = split.chunks[-1]
            times[:, last.start : last.start + split.overlap] -= 1
            assert np.all(times == 1), split
            assert split.overlap < min(last.size, max(split.segment // 8, 32) + 1)
            assert split.warps * split.segment == hidden_size
            assert split.vector * itemsize <= 16
            assert split.chunks[0].vector == split.vector
            assert 32 * split.elements_per_lane == split.segment + split.overlap
            assert split.warpgroups * 4 == max(split.warps, 4)


@pytest.mark.parametrize(
    "hidden_size, warps, itemsize, vector",
    [
        (4096, 4, 2, 8),
        (4096, 4, 4, 4),
        (4096, 32, 2, 4),  # 128 elements a warp: an access of 8 a lane would be 256
        (130, 1, 2, 2),
        (65, 1, 4, 1),
        (720, 16, 2, 1),
        (100, 8, 2, None),  # does not divide
        (64, 4, 2, None),  # less than one element a lane
        (65536, 1, 2, None),  # too many accesses a lane
    ],
)
def test_the_widest_access_that_fits(hidden_size, warps, itemsize, vector):
    split = split_row(hidden_size, warps, itemsize)
    assert (split and split.vector) == vector


@pytest.mark.parametrize(
    "hidden_size, warps, vectors, overlap",
    [
        (2304, 4, [8, 8, 2], 0),
        (7168, 16, [8, 4, 2], 0),
        (2880, 4, [8, 8, 8], 48),  # a fifteenth of the segment is there twice
        (2112, 4, [8, 8, 1], 16),
        (4608, 8, [8, 8, 2], 0),
    ],
)
def test_narrower_chunks_follow_where_wide_ones_would_repeat_much(
    hidden_size, warps, vectors, overlap
):
    split = split_row(hidden_size, warps, 2)
    assert split is not None
    assert [chunk.vector for chunk in split.chunks] == vectors and split.overlap == overlap


@pytest.mark.parametrize("warps, rows_per_step", [(1, 1), (1, 2), (4, 1), (4, 3)])
def test_the_tiles_of_all_blocks_are_the_rows(warps, rows_per_step):
    split = split_row(256, warps, 2)
    assert split is not None
    num_rows = rows_per_step * (4 if warps == 1 else 1)
    for num_tokens in range(num_rows, 40):
        rows = Rows(split, num_tokens, rows_per_step)
        for num_blocks in range(1, min(7, rows.num_full_tiles) + 1):
            times = np.zeros(num_tokens, int)
            for block in range(num_blocks):
                steps = int(rows.num_steps(block, num_blocks))
                assert steps <= rows.max_steps(num_blocks)
                for step in range(steps):
                    tile = block + step * num_blocks
                    first = int(rows.first(tile))
                    # Rows that an earlier tile also has count as zeros.
                    unseen = num_rows * min(tile, rows.num_full_tiles)
                    assert 0 <= first and first + num_rows <= num_tokens
                    times[max(first, unseen) : first + num_rows] += 1
            assert np.all(times == 1)


def test_column_parts_are_whole_chunks_with_sums_that_fit_registers():
    for hidden_size in (64, 720, 4096, 16384, 20480, 32768, 65536):
        for split in splits(hidden_size, 2):
            if (parts := column_parts(split)) is not None:
                assert len(split.chunks) % parts == 0
                assert split.elements_per_lane // parts < split.registers
                assert parts == 1 or {chunk.vector for chunk in split.chunks} == {split.vector}


# Launch parameters.


@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.kind)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=jnp.dtype)
def test_the_guess_can_be_launched_at_every_width(unchecked_shapes, monkeypatch, device, dtype):
    monkeypatch.setattr(mosaic_gpu, "target_device", lambda: device)
    num_supported = 0
    for hidden_size in (*range(64, 2100, 10), *range(2048, 65537, 170), 16384, 20480, 32768, 65536):
        for residual_dtype in (None, dtype, F32):
            x, weight, residual = arrays(hidden_size, dtype, residual_dtype)
            if mosaic_gpu.unsupported_reason(x, weight, residual) is None:
                guess = guess_config(device, hidden_size, dtype, add=residual is not None)
                mosaic_gpu.check_config(guess, x, residual)
                assert guess.bwd_blocks >= 1 and (device.has_tma or not guess.bwd_stages)
                num_supported += 1
    assert num_supported > 500


@pytest.mark.parametrize("hidden_size", [64, 720, 2880, 4096, 8192, 16384, 28672, 65536])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=jnp.dtype)
@pytest.mark.parametrize("add", [False, True])
def test_every_candidate_can_be_launched(unchecked_shapes, monkeypatch, hidden_size, dtype, add):
    monkeypatch.setattr(mosaic_gpu, "target_device", lambda: H100)
    x, _, residual = arrays(hidden_size, dtype, dtype if add else None)
    base = guess_config(config_module._TUNED_FOR, hidden_size, dtype, add=add)
    forward = forward_candidates(hidden_size, dtype, add=add)
    backward = backward_candidates(hidden_size, dtype, add=add)
    assert forward and backward
    for chosen in (*forward, *backward):
        # The candidates come from an occupancy that counts shared memory.
        mosaic_gpu.check_config(chosen, x, residual)
    same = lambda a, b, part: all(
        getattr(a, f.name) == getattr(b, f.name)
        for f in dataclasses.fields(Config)
        if f.name.startswith(part)
    )
    assert all(same(chosen, base, "bwd") for chosen in forward)
    assert all(same(chosen, base, "fwd") for chosen in backward)


@pytest.mark.parametrize(
    "num_tokens, blocks, rows",
    [
        (1, 1, 1),
        (128, 128, 1),  # on as many multiprocessors
        (256, 132, 2),  # no multiprocessor is idle
        (1024, 256, 4),
        (4096, 1024, 4),
        (16384, 1056, 16),
        (100000, 1056, 95),
    ],
)
def test_blocks_have_a_few_rows_each(monkeypatch, num_tokens, blocks, rows):
    monkeypatch.setattr(backward_kernel, "target_device", lambda: H100)
    config = dataclasses.replace(BASE, bwd_blocks=8)
    dtype = jnp.dtype(BF16)
    plan = backward_kernel._plan(config, num_tokens, 1024, dtype, dtype, num_operands=2)
    assert (plan.num_blocks, plan.rows.max_steps(plan.num_blocks)) == (blocks, rows)


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("fwd_warps", 2, "fwd_warps=2 must be 1 or a multiple of 4 up to 32"),
        ("fwd_warps", 36, "fwd_warps=36 must be"),
        ("bwd_warps", 0, "bwd_warps=0 must be"),
        ("bwd_warps", -4, "bwd_warps=-4 must be"),
        ("bwd_blocks", 0, "bwd_blocks=0 must be at least 1"),
        ("bwd_rows", 0, "bwd_rows=0 must be at least 1"),
        ("bwd_stages", 1, "bwd_stages=1 must be 0 .* or at least 2"),
        ("bwd_stages", -1, "bwd_stages=-1 must be"),
        ("bwd_stages", 33, "bwd_stages=33 must be at most 32, the number of barriers"),
    ],
)
def test_invalid_configurations(field, value, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **{field: value})


@pytest.mark.parametrize("device, enough", [(H100, 29_000), (H200, 41_000)], ids=["h100", "h200"])
@pytest.mark.parametrize("add", [False, True])
def test_the_guess_on_hopper_brings_enough_rows_ahead(add, device, enough):
    """At each fifth multiple of 64; 0.4 s each."""
    for hidden_size in range(512, 16385, 320):
        guess = guess_config(device, hidden_size, BF16, add=add)
        split = split_row(hidden_size, guess.bwd_warps, 2)
        assert split is not None and guess.bwd_stages >= 2
        # The sums of `dweight` alone leave a quarter of the registers.
        assert split.elements_per_lane <= 64
        step_bytes = guess.bwd_blocks * ring_bytes(split, 1, 3 if add else 2, guess.bwd_rows, 2)
        assert guess.bwd_stages * step_bytes <= device.smem_bytes
        assert (guess.bwd_stages - 1) * step_bytes >= enough
        # No more than that: with one step less it would not be enough.
        assert guess.bwd_stages == 2 or (guess.bwd_stages - 2) * step_bytes < enough + 1000


@pytest.mark.parametrize(
    "device, hidden_size, chosen",
    [
        (H200, 1536, (4, 3, 3, 2)),
        (H200, 2048, (4, 3, 2, 2)),
        (H200, 4096, (8, 2, 3, 1)),
        (H200, 14336, (16, 1, 2, 1)),
        (H100, 2048, (4, 3, 3, 1)),
        (H100, 2560, (4, 3, 2, 1)),
        (H100, 4096, (8, 2, 2, 1)),
        (H100, 6144, (12, 1, 3, 1)),
    ],
)
def test_the_guess_is_like_the_fastest_of_a_few(device, hidden_size, chosen):
    """Of those in docs/lab/2026-11-26-norm-bytes-ahead.md; at 1536 with one step more."""
    guess = guess_config(device, hidden_size, BF16, add=False)
    assert (guess.bwd_warps, guess.bwd_blocks, guess.bwd_stages, guess.bwd_rows) == chosen


def test_an_unknown_device_has_the_rate_of_an_h200():
    unknown = Device("NVIDIA H300", (9, 0), 132)
    for hidden_size in (1024, 4096):
        guess = guess_config(unknown, hidden_size, BF16, add=True)
        assert guess == guess_config(H200, hidden_size, BF16, add=True)


@pytest.mark.parametrize(
    "hidden_size, changes, device, message",
    [
        (4096, {"fwd_warps": 12}, H100, r"hidden_size=4096 can be dealt to \[1, 4, 8, 16, 32\]"),
        (4096, {"bwd_warps": 20}, H100, "can be dealt to"),
        (65536, {"bwd_warps": 4}, H100, "can be dealt to"),
        (4096, {"bwd_stages": 2}, DEVICES[0], "bwd_stages=2 needs .*Hopper.* capability"),
        (4096, {"bwd_stages": 2}, DEVICES[1], "use bwd_stages=0"),
        (720, {"bwd_stages": 2}, H100, "multiple of 16 bytes, got 180 elements of bfloat16"),
        (4096, {"bwd_stages": 8}, H100, "take 196608 .*|"),
        (4096, {"bwd_stages": 5, "bwd_rows": 2}, H100, "times .*bwd_rows=2 rows of .* take 245760"),
        (4096, {"bwd_stages": 10}, H100, "take 245760 bytes .* can have 229376 for rows"),
        # Of the block's 232448 bytes, the sums and the places of buffers take some.
        (2560, {"bwd_stages": 15}, H100, "take 230400 bytes .* can have 228352 for rows"),
    ],
)
def test_configurations_that_do_not_fit(monkeypatch, hidden_size, changes, device, message):
    monkeypatch.setattr(mosaic_gpu, "target_device", lambda: device)
    chosen = dataclasses.replace(BASE, **changes)
    run = lambda x, weight, residual: add_rms_norm(
        x, residual, weight, implementation="mosaic_gpu", config=chosen
    )
    if message.endswith("|"):  # it fits
        jax.eval_shape(run, *arrays(hidden_size, BF16, BF16))
        return
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(run, *arrays(hidden_size, BF16, BF16))


@pytest.mark.parametrize(
    "hidden_size, dtypes, message",
    [
        (32, (BF16, BF16), "hidden_size=32 is below 64"),
        (1, (BF16, BF16), "hidden_size=1 is below 64"),
        (4099, (BF16, BF16), "no number of warps divides hidden_size=4099"),
        (2**20, (BF16, BF16), "no number of warps divides hidden_size=1048576"),
        (64, (jnp.float8_e4m3fn, BF16), "x is float8_e4m3fn, not bfloat16, float16 or float32"),
        (64, (BF16, jnp.float8_e5m2), "residual is float8_e5m2, not .*; cast residual to"),
    ],
)
@pytest.mark.parametrize("given", [None, BASE], ids=["", "config"])
def test_a_name_is_binding(hidden_size, dtypes, message, given):
    x, weight, residual = arrays(hidden_size, *dtypes)
    options = {"implementation": "mosaic_gpu", "config": given}
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu': {message}"):
        jax.eval_shape(lambda *a: add_rms_norm(a[0], a[2], a[1], **options), x, weight, residual)
    if "residual" not in message:
        with pytest.raises(NotImplementedError, match=message):
            jax.eval_shape(lambda *a: rms_norm(*a, **options), x, weight)


# The user's table.


def row(**changes):
    base = {
        "op": "rms_norm",
        "device_kind": H100.kind,
        "dtype": "bfloat16",
        "size": 4096,
        "config": dataclasses.asdict(BASE),
        "measured": "never",
    }
    return base | changes


def test_the_users_row_goes_before_the_one_that_comes_with_the_library(monkeypatch, tuned_file):
    library = dataclasses.replace(BASE, bwd_blocks=7)
    keys = [(H100.kind, "bfloat16", 4096, add) for add in (False, True)]
    monkeypatch.setattr(config_module, "TUNED", dict.fromkeys(keys, library))
    kept = row(op="add_rms_norm", config=None)  # the tuner found nothing faster
    tuned_file.write_text(json.dumps([row(), row(dtype="float32", size=64), kept]))
    choose = lambda *args, add=False: default_config(*args, add=add)
    assert choose(H100, 4096, BF16) == BASE
    assert choose(H100, 4096, F16) == BASE  # the same bytes
    assert choose(H100, 64, F32) == BASE
    # Each operation, dtype, width and device has a row of its own.
    assert choose(H100, 4096, BF16, add=True) == library
    assert choose(H100, 4096, F32) == guess_config(H100, 4096, F32, add=False)
    assert choose(H100, 2048, BF16) == guess_config(H100, 2048, BF16, add=False)
    assert choose(DEVICES[0], 4096, BF16) == guess_config(DEVICES[0], 4096, BF16, add=False)


def test_without_the_variable_there_is_no_table(monkeypatch):
    for value in (None, ""):
        monkeypatch.delenv(tuning.VARIABLE, raising=False)
        if value is not None:
            monkeypatch.setenv(tuning.VARIABLE, value)
        assert tuning.lookup(Config, "rms_norm", H100.kind, "bfloat16", 4096) is None


def test_a_table_that_is_missing(tuned_file):
    with pytest.raises(FileNotFoundError, match=r"tuned\.json"):
        default_config(H100, 4096, BF16, add=False)


BAD_FIELDS = dataclasses.asdict(BASE) | {"fwd_warp": 4}
BAD_VALUES = dataclasses.asdict(BASE) | {"bwd_stages": 1}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[{",
        "7",
        json.dumps(row()),
        json.dumps([{k: v for k, v in row().items() if k != "dtype"}]),
        json.dumps([row(config=3)]),
        json.dumps([row(size=[4096])]),
        json.dumps([row(config=BAD_FIELDS)]),
        json.dumps([row(config=BAD_VALUES)]),
        json.dumps([row(config={"fwd_warps": 4})]),
    ],
)
def test_a_malformed_table_names_the_variable_and_the_file(tuned_file, text):
    tuned_file.write_text(text)
    with pytest.raises(ValueError, match=rf"{tuning.VARIABLE}.*tuned\.json"):
        default_config(H100, 4096, BF16, add=False)


def test_a_row_that_does_not_fit_a_wider_residual(monkeypatch):
    """16384 on an H200: 4 warps read 16 bits, and cannot read 32."""
    monkeypatch.setattr(config_module, "target_device", lambda: H200)
    x = jnp.zeros((1, 16384), BF16)
    residual = jnp.zeros(x.shape, F32)
    assert config_module.config_of(x, x).fwd_warps == 4
    config = config_module.config_of(x, residual)
    assert split_row(16384, config.fwd_warps, 4) is not None
