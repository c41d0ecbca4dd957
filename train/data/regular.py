"""Files of others, looked at before they are opened: a FIFO or a device would never end."""

import os
import stat
from pathlib import Path

from train.data.errors import DataError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a character device",
    stat.S_IFBLK: "a block device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
}


def kind(mode: int) -> str | None:
    """The name of a file's type by its `st_mode`; None for a regular file."""
    return None if stat.S_ISREG(mode) else _KINDS.get(stat.S_IFMT(mode), "no regular file")


def check_regular(path: Path) -> os.stat_result:
    """The status of a regular file, or of the one that a link leads to.

    Raises:
      DataError: it is something else.
      OSError: there is no such file, or its status cannot be read.
    """
    status = path.stat()
    if found := kind(status.st_mode):
        raise DataError(f"{path} is {found}, not a regular file; name a file with what is in it")
    return status


def read_regular(path: Path, limit: int) -> bytes:
    """All of a regular file of at most `limit` bytes.

    Raises:
      DataError: it is something else, or longer.
      OSError: it cannot be read.
    """
    size = check_regular(path).st_size
    if size > limit:
        raise DataError(f"{path} has {size:,} bytes, more than the {limit:,} that one may have")
    return path.read_bytes()
