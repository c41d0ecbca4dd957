"""A folder of the cache that is safe from links of other users.

Other users may know the folder's name and write to the folder above it, for example `/tmp`. They
could put a link in the place of the folder or of its files. So the folder must belong to the user
who runs this code, or to root. It is made with mode 0700. It is opened once, and its path is not
looked up again. No link in it is followed.
"""

import contextlib
import os
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from train.data.errors import DataError
from train.data.regular import kind

_FLAGS = {
    "read": os.O_RDONLY,
    "append": os.O_RDWR | os.O_CREAT | os.O_APPEND,
    "create": os.O_WRONLY | os.O_CREAT | os.O_EXCL,
}
# O_NONBLOCK, so that a FIFO in the place of a file does not block.
_ALWAYS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class OwnFolder(contextlib.AbstractContextManager):
    """An open folder that belongs to this user; a context manager that closes it.

    Attributes:
      path: Path of the folder, for messages.
    """

    def __init__(self, path: Path, *, make: bool = False):
        """Opens the folder.

        Args:
          path: Path of the folder.
          make: Make the folder, and the folders above it, if they are missing.

        Raises:
          DataError: The path is a link or no folder, or the folder belongs to another user.
          OSError: The folder cannot be opened or made.
        """
        self.path = path
        if make:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        if (found := path.lstat().st_mode) and not stat.S_ISDIR(found):
            raise DataError(
                f"{path} is {kind(found) or 'a file'}, not a folder of the cache; remove it, or "
                "name another folder with --data.cache-dir"
            )
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _ALWAYS)
        owner = os.fstat(self._fd).st_uid
        if owner not in (os.geteuid(), 0):  # root may write anywhere anyway
            os.close(self._fd)
            raise DataError(
                f"{path} belongs to user {owner}, who could change the training data; name "
                "another folder with --data.cache-dir"
            )

    def __exit__(self, *exception: object) -> None:
        os.close(self._fd)

    def open(self, name: str, mode: Literal["read", "append", "create"]) -> BinaryIO:
        """Opens a file of the folder to read it, to read and extend it, or to create it.

        Raises:
          DataError: The file is no regular file, or a file to write has a second name elsewhere.
          OSError: The file cannot be opened.
        """
        path = self.path / name
        try:
            descriptor = os.open(name, _FLAGS[mode] | _ALWAYS, 0o600, dir_fd=self._fd)
        except OSError:
            with contextlib.suppress(OSError):
                found = os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode
                if kind(found):
                    raise _not_ours(path, kind(found)) from None
            raise
        status = os.fstat(descriptor)
        found = kind(status.st_mode)
        if mode != "read" and status.st_nlink > 1:
            found = found or "a file with a second name elsewhere"
        if found:
            os.close(descriptor)
            raise _not_ours(path, found)
        return os.fdopen(
            descriptor, "rb" if mode == "read" else "ab+" if mode == "append" else "wb"
        )

    def has(self, name: str) -> bool:
        """Whether the folder has an entry of this name, of any kind."""
        try:
            os.stat(name, dir_fd=self._fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def rename(self, old: str, new: str) -> None:
        """Renames a file of the folder, and replaces another if there is one."""
        os.replace(old, new, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def write(self, name: str, content: bytes) -> None:
        """Writes a file in one step: after a kill, the old or the new file is there."""
        part = f"{name}.part"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part, dir_fd=self._fd)
        with self.open(part, "create") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.rename(part, name)


def _not_ours(path: Path, found: str | None) -> DataError:
    return DataError(
        f"{path} is {found}, which the cache never makes; remove the folder to make it again"
    )
