"""The lock of a cache entry: one process makes the entry, and others wait for it."""

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Callable, Iterator

from train.data.errors import DataError
from train.data.folder import OwnFolder

_TIMEOUT_S = 600.0
_POLL_S = 0.2


@contextlib.contextmanager
def locked(folder: OwnFolder, name: str) -> Iterator[Callable[[], None]]:
    """Holds the folder's `lock`, after a wait for another holder.

    It yields a function that the holder must call while it makes progress. A holder that does not
    call it for ten minutes hangs or was stopped; a killed holder has no lock. The clocks of two
    machines may differ by more than ten minutes. So a waiting process only looks for a change of
    the file's time, and counts the minutes with its own clock.

    Args:
      folder: Folder of the entry.
      name: Name of the source, for messages.

    Raises:
      DataError: The holder made no progress for ten minutes.
    """
    with folder.open("lock", "append") as file:
        seen, since, waiting = -1, time.monotonic(), False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read(200).decode(errors="replace") or "another process"
            if not waiting:
                print(f"{name}: waiting for {holder}, which tokenizes it", flush=True)
                waiting = True
            touched = os.fstat(file.fileno()).st_mtime_ns
            if touched != seen:
                seen, since = touched, time.monotonic()
            if time.monotonic() - since > _TIMEOUT_S:
                raise DataError(
                    f"{folder.path / 'lock'} is held by {holder}, which made no progress for "
                    f"{_TIMEOUT_S:.0f} s; end it, or name another folder with --data.cache-dir"
                )
            time.sleep(_POLL_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
        file.flush()
        yield lambda: os.utime(file.fileno())
        file.truncate(0)
