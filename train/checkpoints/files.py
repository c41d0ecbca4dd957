"""The files of checkpoints: their names, the lock of their writer, and errors of reading."""

import errno
import fcntl
import json
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from train.errors import RunError, one_line


def locked(folder: Path) -> int:
    """Locks a folder until the descriptor is closed or the process ends, for whatever reason.

    Raises:
      RunError: Another process has the lock, or the file of the lock cannot be made.
    """
    # A file beside the folder, because NFS locks only files that are open for writing.
    path = folder.with_name(f"{folder.name}.lock")
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise RunError(
            f"{path} cannot be made: {error.strerror}; repair this, or choose another --runs-dir"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise RunError(
                f"another process is training in {folder.parent}; end it, or choose another --name"
            ) from None
        raise RunError(
            f"{path} cannot be locked: {error.strerror}; choose a --runs-dir on a disk with locks"
        ) from error
    return lock


def steps_in(folder: Path) -> list[int]:
    """The steps of the undamaged checkpoints in a folder; the folder need not exist."""
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def stored_val_loss(folder: Path) -> float | None:
    """The held-out loss in the folder of a checkpoint; None if it was not measured.

    Raises:
      ValueError: The file of metrics is malformed.
      RunError: The file cannot be read.
    """
    path = folder / "metrics" / "metrics"
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}; nothing was changed. Check its permissions, "
            "then try again"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is malformed: {error}") from error
    match content:
        case {"val_loss": float(loss)} if math.isfinite(loss):
            return loss
    raise ValueError(f"{path} is malformed: it has no held-out loss")


# Codes of TensorStore's errors that do not come from the content of a file. UNKNOWN stands for an
# errno without a code of its own, for example the one of a broken disk. Damage has the codes
# DATA_LOSS, OUT_OF_RANGE or NOT_FOUND.
_CODES = re.compile(
    "(ABORTED|CANCELLED|DEADLINE_EXCEEDED|INTERNAL|PERMISSION_DENIED|RESOURCE_EXHAUSTED"
    "|UNAUTHENTICATED|UNAVAILABLE|UNKNOWN):"
)
# The errors of a file that is missing or has become a folder.
_MALFORMED = (None, errno.ENOENT, errno.EISDIR, errno.ENOTDIR)


def saved_steps(folder: Path) -> dict[int, float | None]:
    """The held-out loss of each checkpoint in a folder, by step; None if it was not measured.

    A malformed file of metrics counts as not measured, with a warning.
    """
    losses: dict[int, float | None] = {}
    for step in steps_in(folder):
        losses[step] = None
        try:
            losses[step] = stored_val_loss(folder / str(step))
        except ValueError as error:
            warnings.warn(f"step {step} counts as not measured: {error}", stacklevel=2)
    return losses


def not_damage(error: BaseException, folder: Path) -> str | None:
    """The reason why a checkpoint cannot be read now, or None if it is damaged.

    TensorStore reports some errors of reading as if the file were too short. So this function reads
    all files of the folder once more.

    Args:
      error: Error of reading the checkpoint.
      folder: Folder of the checkpoint.
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
    """Checks that a checkpoint's folder is named by the step of its state.

    Raises:
      RunError: The folder has another name.
    """
    step = int(state["step"])
    if folder.name != str(step):
        raise RunError(
            f"{folder} is the checkpoint of step {step} under another name; rename it to {step} or "
            "move it away"
        )
