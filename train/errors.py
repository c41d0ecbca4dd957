"""The errors of a run that are for its user, each in one line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


class RunError(RuntimeError):
    """Why a run cannot go on, in one line that needs no traceback."""


class DiskError(RunError):
    """A file that cannot be read or written."""


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Gives the errors of the disk the name of a file, which a full disk's do not have.

    Raises:
      DiskError: a file cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(f"{error.filename or path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise DiskError(f"{path}: {' '.join(str(error).split())}") from error
