"""Items that a thread makes ahead of their consumer."""

import itertools
import threading
import time

import pytest

from train.data import (
    prefetch,
    timed,
)


def num_prefetch_threads():
    return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())


@pytest.mark.parametrize("size", [1, 2, 50])
def test_prefetch_gives_every_item_in_order(size):
    with prefetch(lambda: range(20), size) as items:
        assert list(items) == list(range(20))
        assert list(items) == []
    assert num_prefetch_threads() == 0


def test_prefetch_builds_ahead_of_the_consumer_but_not_further():
    built = []
    with prefetch(lambda: (built.append(i) or i for i in itertools.count()), 3) as items:
        assert next(items) == 0
        deadline = time.monotonic() + 10
        while len(built) < 5 and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.05)
        # One taken, three in the queue, one waiting for room.
        assert built == [0, 1, 2, 3, 4]
    assert num_prefetch_threads() == 0
    assert list(items) == []


def test_prefetch_raises_in_the_consumer():
    def fails():
        yield 1
        raise RuntimeError("disk full")

    with prefetch(fails) as items:
        assert next(items) == 1
        with pytest.raises(RuntimeError, match="disk full"):
            next(items)
    with pytest.raises(ValueError, match="size=0"), prefetch(fails, 0):
        pass
    assert num_prefetch_threads() == 0


@pytest.mark.parametrize("num_taken", [0, 1, 4])
@pytest.mark.parametrize("ending", ["endless", "error", "end"])
def test_prefetch_stops_when_the_consumer_leaves_early(num_taken, ending):
    def numbers():
        yield from range(5) if ending != "endless" else itertools.count()
        if ending == "error":
            raise RuntimeError("never asked for")

    for _ in range(20):  # races between the two threads
        with prefetch(numbers, 1) as items:
            assert [next(items) for _ in range(num_taken)] == list(range(num_taken))
    assert num_prefetch_threads() == 0


def test_the_time_of_waiting_is_told():
    def slow():
        yield 1
        time.sleep(0.1)
        yield 2

    (first, one), (second, two) = timed(slow())
    assert (one, two) == (1, 2)
    assert 0 <= first < 0.1 <= second < 5
    assert list(timed([])) == []
    with prefetch(lambda: range(3)) as items:
        assert [item for _, item in timed(items)] == [0, 1, 2]


def test_prefetch_stops_when_the_consumer_fails():
    with pytest.raises(KeyError), prefetch(itertools.count) as items:
        next(items)
        raise KeyError
    assert num_prefetch_threads() == 0
