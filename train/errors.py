"""The errors that are for the user of a run, each in one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


class RunError(RuntimeError):
    """Why a run cannot go on, in one line that needs no traceback."""


class DiskError(RunError):
    """A file that cannot be read or written."""


class FolderError(ValueError):
    """Why a folder cannot be read or used, in one line that needs no traceback."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the name of a file to errors of the disk; the error of a full disk has none.

    Raises:
      DiskError: a file cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(f"{error.filename or path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise DiskError(f"{path}: {' '.join(str(error).split())}") from error
