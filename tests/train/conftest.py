"""Fixtures that several tests of training share."""

import dataclasses

import jax
import numpy as np
import pytest

import train.loop
import train.reporting.report
from models.sharding import make_mesh
from train.cli import commands
from train.setup import CompiledSteps


@pytest.fixture(scope="module")
def one_device():
    """The mesh of runs and commands. The eight devices are for the tests of meshes."""
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "mesh_of", lambda config: mesh)
        patch.setattr(commands, "_mesh", lambda flags: mesh)
        yield mesh


@pytest.fixture
def no_plots(monkeypatch):
    """Leaves the plots out of reports. They take longer to draw than a tiny run takes.

    Runs of module-scoped fixtures still draw them.
    """
    for name in ("loss_png", "details_png"):
        monkeypatch.setattr(train.reporting.report, name, lambda *args: b"")


@pytest.fixture(scope="session")
def compile_nothing():
    """Takes the place of `compile_steps`. Its step counts itself and computes nothing."""
    floats = dict.fromkeys(
        ("loss", "nll", "accuracy", "lr", "grad_norm", "mean_context"), np.float32(1)
    )
    integers = dict.fromkeys(("skipped_steps", "skipped_in_a_row", "num_tokens"), np.int32(0))
    next_state = lambda state: dataclasses.replace(state, step=state.step + 1)
    return lambda *args: CompiledSteps(
        lambda state, batch: (next_state(state), floats | integers), None
    )
