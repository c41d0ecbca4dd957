"""Batches made ahead of the step, and the time that the step waits for them."""

import collections
import contextlib
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any


@contextlib.contextmanager
def prefetch[T](make_iterator: Callable[[], Iterable[T]], size: int = 2) -> Iterator[Iterator[T]]:
    """Runs an iterator on a background thread, up to `size` items ahead of its consumer.

    `with prefetch(lambda: (dataset.batch(step, ...) for step in range(n))) as batches:`. If the
    iterator raises an exception, the consumer gets it in place of the next item. The end of the
    block stops the thread, after the item that it is making.
    """
    if size < 1:
        raise ValueError(f"{size=} must be at least 1")
    iterator, end = iter(make_iterator()), object()
    with ThreadPoolExecutor(1, "prefetch") as thread:
        make: Callable[[], Any] = lambda: thread.submit(next, iterator, end)
        # One more is in the making.
        ahead = collections.deque(make() for _ in range(size + 1))

        def consume() -> Generator[T]:
            while (item := ahead.popleft().result()) is not end:
                ahead.append(make())
                yield item

        consumer = consume()
        try:
            yield consumer
        finally:
            consumer.close()
            thread.shutdown(cancel_futures=True)


def timed[T](items: Iterable[T]) -> Iterator[tuple[float, T]]:
    """Each item, with the seconds of waiting for it."""
    iterator = iter(items)
    while True:
        start = time.perf_counter()
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield time.perf_counter() - start, item
