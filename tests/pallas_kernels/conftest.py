"""What the tests of several operations share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pallas_kernels import tuning


@pytest.fixture
def tuned_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where the user's table of launch parameters is; the test writes it."""
    path = tmp_path / "tuned.json"
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    yield path
    tuning._read.cache_clear()
