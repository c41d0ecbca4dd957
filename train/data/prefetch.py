"""Batches made ahead of the step, and the time that the step waits for them."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
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
    items: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=size)
    stopped = threading.Event()

    def put(kind: str, value: Any) -> bool:
        if not stopped.is_set():
            items.put((kind, value))
        return not stopped.is_set()

    def produce() -> None:
        try:
            for item in make_iterator():
                if not put("item", item):
                    return
        except BaseException as error:  # any exception, or the consumer would wait for ever
            put("error", error)
        else:
            put("end", None)

    def consume() -> Generator[T]:
        while True:
            kind, value = items.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    consumer = consume()
    try:
        yield consumer
    finally:
        consumer.close()
        stopped.set()
        # The thread may be waiting for room for one last item; after that it sees `stopped`.
        while not items.empty():
            items.get_nowait()
        thread.join()


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
