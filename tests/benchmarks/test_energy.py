"""The benchmark of energy: the samples of `nvidia-smi`, the parts of a step, and the table."""

import contextlib
import dataclasses

import jax
import pytest

from benchmarks.training import energy
from train.config import preset


@pytest.fixture
def nvidia_smi(tmp_path):
    """A program in place of `nvidia-smi`, which reports two lines and then waits."""
    path = tmp_path / "nvidia-smi"
    path.write_text("#!/bin/sh\nprintf '690.5, 1410\\n701.5, 1430\\n68'\nexec sleep 60\n")
    path.chmod(0o755)
    return str(path)


def test_samples_are_those_of_whole_lines(nvidia_smi):
    """1 s."""
    with energy.sampled(nvidia_smi) as found:
        energy.repeat(lambda: jax.numpy.zeros(2), 0.5)
        assert not found
    assert found == [(690.5, 1410.0), (701.5, 1430.0)]


@pytest.mark.parametrize("text", ["", "No devices were found\n", "[N/A], [N/A]\n"])
def test_no_sample_raises(text):
    with pytest.raises(ValueError, match="no power and clock"):
        energy.samples(text)


def test_every_part_runs(monkeypatch):
    """3 s."""
    config = preset("demo")
    data = dataclasses.replace(config.data, source="synthetic", batch_size=1, sequence_length=64)
    parts = energy.parts_of(dataclasses.replace(config, data=data), copied=2**10)
    monkeypatch.setattr(energy, "sampled", lambda: contextlib.nullcontext([(700.0, 1400.0)]))
    for part in parts:
        energy.measure(part, 0.01)
        assert len(energy.row(part)) == len(energy.COLUMNS)


def test_a_row_has_the_energy_of_an_operation():
    part = energy.Part("product", lambda: None, 2e12, [2.0, 3.0, 9.0], [600, 700, 800], [1, 2, 3])
    assert energy.row(part) == [
        "product", "3.000", "2.000 - 9.000", "667", "700", "2", "2.100", "1.05"
    ]  # fmt: skip
