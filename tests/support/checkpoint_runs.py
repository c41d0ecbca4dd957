"""A tiny run that saves checkpoints, and how tests read the checkpoints again."""

import dataclasses

import pytest

import train.loop
from support import tiny_run
from train.config import CheckpointConfig, MeshConfig

# For a test in which Orbax reads or writes while something else fails: its cancelled tasks may warn
# when they are collected. The fixture `collected` collects them before the next test.
CANCELLED = pytest.mark.filterwarnings(
    "ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"
)
CONFIG = dataclasses.replace(
    tiny_run.CONFIG, mesh=MeshConfig(fsdp=2), checkpoint=CheckpointConfig(every=3)
)


def like(config=CONFIG):
    """Shapes, dtypes and shardings of the state on the mesh of the run."""
    return train.loop.abstract_state(config, train.loop.mesh_of(config))


def restore(checkpoints, like):
    """Step and state of the newest checkpoint, which must be there."""
    restored = checkpoints.restore(like)
    assert restored is not None
    return restored
