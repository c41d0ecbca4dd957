"""Files of rows, one JSON object with a step on each line, and files written in one piece."""

import contextlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.errors import DiskError, naming

type Row = dict[str, Any]


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file in one piece: if the process ends, the old or the new file is there.

    Raises:
      DiskError: The file cannot be written, for example on a full disk.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # which names the temporary file
            raise DiskError(f"{path}: {error.strerror or error}") from error
        raise


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a file.

    It leaves out a line that is no row, and an incomplete last line of a run that died. A warning
    names each of them.

    Raises:
      DiskError: The file cannot be read.
    """
    for number, (line, row) in enumerate(_lines(path), 1):
        if not line.endswith(b"\n"):
            text = line[:80].decode(errors="replace")
            warnings.warn(f"{path}: left out the incomplete last line {text!r}", stacklevel=3)
        elif row is None:
            _warn_of_line(path, number, line)
        else:
            yield row


def cut_rows(path: Path, last_step: int | None) -> tuple[Row, set[int]]:
    """Cuts off an incomplete last line and the rows after a step.

    An earlier line that is no row stays, and a warning names it.

    Args:
      path: Path of the file.
      last_step: Last step whose rows stay; None keeps the rows of all steps.

    Returns:
      The last row that stays, and the steps that have a row of training.

    Raises:
      DiskError: The file cannot be read or written.
    """
    end = size = 0
    last_row: Row = {}
    steps: set[int] = set()
    for number, (line, row) in enumerate(_lines(path), 1):
        end += len(line)
        if not line.endswith(b"\n") or (row and last_step is not None and row["step"] > last_step):
            break
        if row is None:
            _warn_of_line(path, number, line)
            continue
        size, last_row = end, row
        if "val_loss" not in row:
            steps.add(row["step"])
    with naming(path):
        os.truncate(path, size)
    return last_row, steps


def _lines(path: Path) -> Iterator[tuple[bytes, Row | None]]:
    with naming(path), path.open("rb") as file:
        for line in file:
            yield line, _row(line)


def _row(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _warn_of_line(path: Path, number: int, line: bytes) -> None:
    text = line[:80].decode(errors="replace")
    warnings.warn(f"{path}:{number} is no row and is left out: {text!r}", stacklevel=4)
