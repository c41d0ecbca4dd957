"""The files of checkpoints: which there are, who writes them, and whether they can be read."""

import errno
import fcntl
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from train.errors import RunError


def locked(folder: Path) -> int:
    """A lock that the system releases however the process ends, until it is closed."""
    # Not the folder itself: NFS locks only what is open for writing.
    path = folder.with_name(f"{folder.name}.lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(f"{path} cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise RunError(f"another process is training in {folder.parent}") from None
        raise RunError(f"{path} cannot be locked: {error.strerror}") from error
    return lock


def steps_in(folder: Path) -> list[int]:
    """The steps of the checkpoints in a folder, which need not exist; none of those set aside."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def stored_val_loss(folder: Path) -> float | None:
    """The held-out loss in the folder of a checkpoint, if it has one.

    Raises:
      ValueError: the file of it is malformed.
      RunError: it cannot be read.
    """
    path = folder / "metrics" / "metrics"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; nothing was changed") from error
    except ValueError as error:
        raise ValueError(f"{path} is malformed: {error}") from error
    match content:
        case {"val_loss": float(loss)} if math.isfinite(loss):
            return loss
    raise ValueError(f"{path} is malformed: it has no held-out loss")


# Codes of TensorStore's errors that say nothing about the content of a file. UNKNOWN stands for an
# errno that it has no code for, such as that of a broken disk. Damage is DATA_LOSS, OUT_OF_RANGE or
# NOT_FOUND.
_CODES = re.compile(
    "(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED"
    "|UNAUTHENTICATED|UNAVAILABLE|UNKNOWN):"
)
# Another kind of file, or none, where one was written.
_MALFORMED = (None, errno.ENOENT, errno.EISDIR, errno.ENOTDIR)


def not_damage(error: BaseException, folder: Path) -> str | None:
    """Why a checkpoint could not be read, if not for what is in its files; None: it is damaged.

    TensorStore reports some errors of reading as if the file were too short. So all files of the
    folder are read once more.

    Args:
      error: of reading.
      folder: of the checkpoint.
    """
    cause: BaseException | None = error
    while cause is not None:
        if (
            isinstance(cause, (MemoryError, jax.errors.JaxRuntimeError))
            or (isinstance(cause, OSError) and cause.errno not in _MALFORMED)
            or _CODES.match(str(cause))
        ):
            return one_line(cause)
        cause = cause.__cause__ or cause.__context__
    path = folder
    try:
        for path in _files_in(folder):
            with path.open("rb") as file:
                while file.read(2**24):
                    pass
    except OSError as found:
        if found.errno not in _MALFORMED:
            return f"{found.filename or path}: {found.strerror}"
    return None


def _files_in(folder: Path) -> Iterator[Path]:
    def fail(error: OSError) -> None:
        raise error

    for parent, _, names in folder.walk(on_error=fail):
        yield from (parent / name for name in sorted(names))


def check_step(folder: Path, state: Mapping[str, Any]) -> None:
    """Whether a checkpoint's folder has the name of the step in it.

    Raises:
      RunError: it has another.
    """
    step = int(state["step"])
    if folder.name != str(step):
        raise RunError(
            f"{folder} is the checkpoint of step {step} under another name; rename it to {step} or "
            "move it away"
        )


def one_line(error: BaseException) -> str:
    """An error for a message: its kind and its text, without TensorStore's settings."""
    # TensorStore names the file first, at length, then what happened, and last its own settings.
    text = re.sub(r" \[\w+='.*", "", " ".join(str(error).split()))
    text = text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"
    return f"{type(error).__name__}: {text}"
