"""Fixtures that the tests of the norms share."""

from collections.abc import Callable, Iterator

import pytest

from pallas_kernels.norm import backward_kernel
from support.norm_formulas import compiled


@pytest.fixture
def set_rows_per_partial(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the number of rows that a partial sum of `dweight` covers, in programs of this test.

    The tests have a few rows, so a block may have a single one.
    """

    def set_rows(number: int) -> None:
        monkeypatch.setattr(backward_kernel, "_ROWS_PER_PARTIAL", number)
        monkeypatch.setattr(backward_kernel, "_ROWS_PER_BLOCK", 1)
        compiled.cache_clear()

    yield set_rows
    compiled.cache_clear()
