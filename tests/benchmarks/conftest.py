"""For benchmarks without a GPU."""

import functools

import pytest

from benchmarks import timing


@pytest.fixture(scope="module", autouse=True)
def _quick_compilation(fast_compilation):
    """Nothing is timed here."""


@pytest.fixture
def two_ms_a_call(monkeypatch):
    """Calls run, and take 2 ms each, whatever a clock says: there is no CUPTI without a GPU."""

    def measure(calls):
        for call in calls:
            call()
        return 2.0 * len(calls)

    monkeypatch.setattr(timing, "compare", functools.partial(timing.compare, measure=measure))
