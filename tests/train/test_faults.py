"""A run that is killed again and again ends as an undisturbed one (`tests/support/faults.py`)."""

import dataclasses
import json

import jax.numpy as jnp
import pytest

from support import faults
from train.checkpoints.checkpoint import Checkpoints
from train.cli.command_line import parse_command_line
from train.step import init_state


@pytest.fixture(scope="module")
def state(one_device):
    """The state of both runs after three steps."""
    state = init_state(parse_command_line([*faults.SETTINGS, "--steps=3"]), one_device)
    return dataclasses.replace(state, step=jnp.full_like(state.step, 3))


# It takes 24 s. test_distributed.py and checkpoints/test_resume.py kill runs as well.
@pytest.mark.full
def test_killed_runs_end_as_whole_ones(tmp_path, monkeypatch):
    """The programs are compiled without optimizations, as in the other tests of the loop."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    *kills, end = faults.kill_and_compare(tmp_path, 2, seed=0)
    assert len(kills) == 2
    assert "1 SIGTERM, 1 SIGKILL" in end


@pytest.mark.parametrize(
    ("added", "loss", "message"),
    [
        pytest.param(1, 1.0, "Arrays are not equal", marks=pytest.mark.full),
        (0, 2.0, r"'loss': 2\.0} in place of .*'loss': 1\.0"),
    ],
)
def test_runs_that_end_differently_are_told_apart(
    added, loss, message, state, one_device, tmp_path, monkeypatch
):
    monkeypatch.setattr(faults, "mesh_of", lambda config: one_device)
    arguments = {}
    for name, more, loss_of in (("whole", 0, 1.0), ("killed", added, loss)):
        flags = [f"--name={name}", f"--runs-dir={tmp_path}", "--steps=3"]
        arguments[name] = [*faults.SETTINGS, *flags]
        skipped = state.guard.skipped + more
        guard = dataclasses.replace(state.guard, skipped=skipped)
        with Checkpoints(tmp_path / name / "checkpoints", keep=1) as checkpoints:
            checkpoints.save(3, dataclasses.replace(state, guard=guard), val_loss=None)
        row = {"step": 3, "loss": loss_of, "elapsed_s": len(name)}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(AssertionError, match=message):
        faults.compare(tmp_path, arguments)
