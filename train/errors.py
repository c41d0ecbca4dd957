"""Errors that the user of a run can repair, each in one line."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError


class RunError(RuntimeError):
    """Why a run cannot go on, in one line that needs no traceback."""


class DiskError(RunError):
    """A file that cannot be read or written."""


class FolderError(ValueError):
    """Why a folder cannot be read or used, in one line that needs no traceback."""


def text_of(error: BaseException) -> str:
    """The text of an error in one line."""
    return " ".join(str(error).split())


def one_line(error: BaseException) -> str:
    """An error in one line: its kind and its text, cut, and without TensorStore's settings."""
    # TensorStore's text has the long name of the file, then the error, then its own settings.
    text = re.sub(r" \[\w+='.*", "", text_of(error))
    text = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
    return f"{type(error).__name__}: {text}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether XLA says that a device has too little memory.

    The code is RESOURCE_EXHAUSTED or INTERNAL, which other errors have too. So the text decides.
    """
    return "out of memory" in str(error).lower()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Adds the name of a file to errors of the disk; the error of a full disk has none.

    Raises:
      DiskError: A file cannot be read or written.
    """
    try:
        yield
    except OSError as error:
        raise DiskError(f"{error.filename or path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise DiskError(f"{path}: {text_of(error)}") from error
