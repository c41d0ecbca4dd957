"""Fixtures that the tests of several operations share."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from flax import nnx

# JAX imports this module when it first interprets a kernel. The module adds an option to the key of
# JAX's caches, so everything that was compiled before would be compiled again.
from jax.experimental.pallas import tpu  # noqa: F401

from pallas_kernels import logs, tuning
from pallas_kernels.gpu.device import Device


@pytest.fixture
def tuned_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The path of the user's table of launch parameters. The test writes the table."""
    path = tmp_path / "tuned.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    yield path
    tuning._read.cache_clear()


@pytest.fixture(autouse=True)
def nothing_is_logged_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test sees its own warnings, of which a process has each once."""
    monkeypatch.setattr(logs, "_logged", set())


@pytest.fixture
def on_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations choose as for an H100, for tests that trace and compile nothing."""
    h100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
    for name, module in list(sys.modules.items()):
        if name.startswith("pallas_kernels.") and hasattr(module, "target_device"):
            monkeypatch.setattr(module, "target_device", lambda: h100)


@pytest.fixture(params=["graph_mode", "tree_mode"])
def nnx_mode(request):
    """NNX's two ways to see a module. A cached expectation comes from the first."""
    graph = request.param == "graph_mode"
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph):
        assert nnx.set_graph_mode.current_value() == graph
        yield
