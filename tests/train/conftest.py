"""What several tests of training share."""

import jax
import pytest

import train.loop
import train.reporting.report
from models.sharding import make_mesh
from train.cli import commands


@pytest.fixture(scope="module")
def one_device():
    """The mesh of runs and commands: the eight devices of the tests are for those about meshes."""
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "mesh_of", lambda config: mesh)
        patch.setattr(commands, "_mesh", lambda flags: mesh)
        yield mesh


@pytest.fixture
def no_plots(monkeypatch):
    """Reports without plots, which take more time to draw than all else of a tiny run.

    Runs of fixtures of a module have them.
    """
    for name in ("loss_png", "details_png"):
        monkeypatch.setattr(train.reporting.report, name, lambda *args: b"")
