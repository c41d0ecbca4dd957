"""Checks of a file's type before it is opened: reading a FIFO or a device may never end."""

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
    """The status of a regular file, or of the regular file that a link leads to.

    Raises:
      DataError: The path is no regular file.
      OSError: The path does not exist, or its status cannot be read.
    """
    status = path.stat()
    if found := kind(status.st_mode):
        raise DataError(f"{path} is {found}, not a regular file; copy its content into a file")
    return status


def read_regular(path: Path, limit: int) -> bytes:
    """The content of a regular file with at most `limit` bytes.

    Raises:
      DataError: The path is no regular file, or the file is longer.
      OSError: The file cannot be read.
    """
    size = check_regular(path).st_size
    if size > limit:
        raise DataError(
            f"{path} has {size:,} bytes, more than the allowed {limit:,}; put the right file in "
            "its place"
        )
    return path.read_bytes()
