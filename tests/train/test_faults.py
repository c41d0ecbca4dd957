"""A run that is killed again and again ends as one that is not; see `tests/support/faults.py`."""

import dataclasses
import functools
import json

import jax.numpy as jnp
import pytest

import train.loop
from support import faults
from train.checkpoints.checkpoint import Checkpoints
from train.cli.command_line import parse_command_line
from train.step import init_state


@functools.cache
def state_of(seed):
    config = parse_command_line([*faults.SETTINGS, f"--seed={seed}", "--steps=3"])
    return init_state(config, train.loop.mesh_of(config))


# It takes 24 s. test_distributed.py and checkpoints/test_resume.py kill runs as well.
@pytest.mark.full
def test_killed_runs_end_as_whole_ones(tmp_path, monkeypatch):
    """Programs are compiled as in the other tests of the loop: fast and not optimized."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    *kills, end = faults.kill_and_compare(tmp_path, 2, seed=0)
    assert len(kills) == 2
    assert "1 SIGTERM, 1 SIGKILL" in end


@pytest.mark.parametrize(
    ("seed", "loss", "message"),
    [(1, 1.0, "Arrays are not equal"), (0, 2.0, r"'loss': 2\.0} in place of .*'loss': 1\.0")],
)
def test_runs_that_end_differently_are_told_apart(seed, loss, message, tmp_path):
    arguments = {}
    for name, seed_of, loss_of in (("whole", 0, 1.0), ("killed", seed, loss)):
        flags = [f"--name={name}", f"--runs-dir={tmp_path}", f"--seed={seed_of}", "--steps=3"]
        arguments[name] = [*faults.SETTINGS, *flags]
        config = parse_command_line(arguments[name])
        with Checkpoints(tmp_path / name / "checkpoints", keep=1) as checkpoints:
            state = state_of(config.seed)
            state = dataclasses.replace(state, step=jnp.full_like(state.step, 3))
            checkpoints.save(3, state, val_loss=None)
        row = {"step": 3, "loss": loss_of, "elapsed_s": len(name)}
        (tmp_path / name / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(AssertionError, match=message):
        faults.compare(tmp_path, arguments)
