"""What several tests of training share."""

import jax
import pytest

import train.loop
from models.sharding import make_mesh
from train import commands


@pytest.fixture(scope="module")
def fast_compilation():
    """For programs that run for milliseconds and compile for seconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def one_device():
    """The mesh of runs and commands: the eight devices of the tests are for those about meshes."""
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "mesh_of", lambda config: mesh)
        patch.setattr(commands, "_mesh", lambda flags: mesh)
        yield mesh
