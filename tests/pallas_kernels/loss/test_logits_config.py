"""Launch parameters of the kernel over logits: what fits, candidates of the tuner, its table."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from pallas_kernels import tuning
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.mosaic_gpu import logits_config
from pallas_kernels.loss.mosaic_gpu.logits import loss_of_logits, unsupported_reason
from pallas_kernels.loss.mosaic_gpu.logits_config import (
    LINE,
    Config,
    RowSplit,
    candidates,
    default_config,
    guess_config,
)
from pallas_kernels.loss.token_loss import LossOptions

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
BASE = Config(warpgroups=1, slots=2, max_lines=4)


def run_kernel(num_columns, config):
    """The statistics of one token."""
    options = LossOptions(label_smoothing=0.0, z_loss=0.0, logit_softcap=None)
    logits = jnp.zeros((1, num_columns + -num_columns % LINE), BF16)
    return loss_of_logits(
        logits, jnp.zeros(1, jnp.int32), options, num_columns=num_columns, config=config
    )


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"warpgroups": 0}, "^warpgroups=0 must be from 1 to 8"),
        ({"warpgroups": 9}, "^warpgroups=9 must be from 1 to 8"),
        ({"slots": 1}, "^slots=1 must be at least 2"),
        ({"warpgroups": 8, "slots": 5}, "and warpgroups=8 times it at most 32"),
        ({"max_lines": 0}, "^max_lines=0 must be a multiple of 4"),
        ({"max_lines": 6}, "^max_lines=6 must be a multiple of 4"),
    ],
    ids=str,
)
def test_wrong_configurations(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(BASE, **changes)


def test_more_slots_than_shared_memory_has(monkeypatch):
    monkeypatch.setattr(logits_kernel, "target_device", lambda: H100)
    config = Config(warpgroups=4, slots=8, max_lines=32)
    with pytest.raises(ValueError, match=r"264192 bytes of shared memory .*use fewer slots"):
        run_kernel(128, config)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=jnp.dtype)
def test_the_guess_fits_and_is_large(dtype):
    config = guess_config(H100, dtype)
    lines = config.warpgroups * config.slots * config.max_lines
    num_bytes = lines * LINE * jnp.dtype(dtype).itemsize
    assert 0.8 * H100.smem_bytes < num_bytes <= H100.smem_bytes
    # As the description says, a row of 16 bits and of this size stays in shared memory.
    if dtype == BF16:
        assert lines * LINE == 114688
        assert RowSplit.make(lines, config).rounds == config.slots


@pytest.mark.parametrize("num_columns", [1, 300, 32000, 50257, 128256])
def test_candidates_fit_and_are_different_kernels(num_columns):
    num_lines, found = -(-num_columns // LINE), candidates(num_columns, BF16)
    rings = set()
    for config in found:
        logits_config.check_fits(config, H100, BF16)
        split = RowSplit.make(num_lines, config)
        assert split.lines == config.max_lines
        assert split.warpgroups * split.rounds * split.lines >= num_lines
        rings.add((config.warpgroups, config.slots, split.lines))
        # With one more slot the memory or the barriers would not suffice.
        more = lambda config=config: dataclasses.replace(config, slots=config.slots + 1)
        with pytest.raises(ValueError, match=r"at most 32|use fewer slots"):
            logits_config.check_fits(more(), H100, BF16)
    assert len(rings) == len(found) >= 3
    # The guess runs where nobody has measured.
    guess = guess_config(H100, BF16)
    lines = RowSplit.make(num_lines, guess).lines
    assert (guess.warpgroups, guess.slots, lines) in rings


def row(config=BASE, **changes):
    base = {"op": "linear_cross_entropy", "device_kind": H100.kind, "dtype": "bfloat16"}
    return base | {"size": 50257, "config": dataclasses.asdict(config)} | changes


def test_the_users_row_then_the_librarys_then_the_guess(monkeypatch, tuned_file):
    library = dataclasses.replace(BASE, slots=5)
    keys = [(H100.kind, "bfloat16", size) for size in (50257, 32000)]
    monkeypatch.setattr(logits_config, "TUNED", dict.fromkeys(keys, library))
    tuned_file.write_text(json.dumps([row(), row(op="swiglu", size=32000)]))
    assert default_config(H100, 50257, BF16) == BASE
    assert default_config(H100, 50257, F16) == BASE  # the same bytes
    assert default_config(H100, 32000, BF16) == library
    # Each dtype, vocabulary (padded or not) and device has a row of its own.
    assert default_config(H100, 50257, F32) == guess_config(H100, F32)
    assert default_config(H100, 50304, BF16) == guess_config(H100, BF16)
    other = Device("NVIDIA H200", (9, 0), 132)
    assert default_config(other, 50257, BF16) == guess_config(other, BF16)


def test_the_kernel_takes_the_row_of_its_columns(monkeypatch, tuned_file):
    monkeypatch.setattr(logits_kernel, "target_device", lambda: H100)
    too_large = Config(warpgroups=2, slots=16, max_lines=40)
    tuned_file.write_text(json.dumps([row(size=300), row(too_large, size=301)]))
    with pytest.raises(ValueError, match=r"warpgroups=2, slots=16, max_lines=40\) takes"):
        run_kernel(301, None)


def test_a_row_with_wrong_fields_names_the_variable_and_the_file(tuned_file):
    tuned_file.write_text(json.dumps([row(config=BASE) | {"config": {"warpgroups": 4}}]))
    with pytest.raises(ValueError, match=rf"{tuning.VARIABLE}.*tuned\.json"):
        default_config(H100, 50257, BF16)


def test_unsupported_dtypes_and_devices(monkeypatch):
    for dtype in (BF16, F16):
        assert unsupported_reason(jnp.dtype(dtype)) is None
    assert "float32" in str(unsupported_reason(jnp.dtype(F32)))
    device = Device("NVIDIA A100-SXM4-80GB", (8, 0), 108)
    monkeypatch.setattr(logits_kernel, "target_device", lambda: device)
    assert "tensor memory accelerator" in str(unsupported_reason(jnp.dtype(BF16)))
