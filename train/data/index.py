"""`progress.json` and `index.json`: the contents of an entry's files, and their checksums.

The checksum is CRC-32. It misses one damaged file in four billion. Its state is a single number, so
another process can continue it after a kill. Opening a file reads it once, which takes 1.1 s a GiB
on one core, if the file is in memory.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from train.data.errors import DataError
from train.data.folder import OwnFolder

SPLITS = ("train", "held_out")
PARTS = ("tokens", "offsets", "prompts")

_LIMIT_BYTES = 1 << 16  # for an index, which has about 500
_PIECE_BYTES = 1 << 18
_ANNOUNCED_BYTES = 1 << 32  # a file that takes seconds to read


def beginning() -> dict[str, Any]:
    """The index of an entry that has no documents yet."""
    return {
        "position": {"file": 0, "offset": 0, "line": 0, "num_bytes": 0},
        "content_hash": "",
        "left_out": 0,
        "of_text_field": 0,
        "checksums": {f"{split}.{part}": 0 for split in SPLITS for part in PARTS},
        **{split: {"tokens": 0, "documents": 0, "prompts": 0} for split in SPLITS},
    }


def write(folder: OwnFolder, name: str, index: dict[str, Any]) -> None:
    """Writes an index, with a checksum of its own."""
    folder.write(name, json.dumps({**index, "checksum": _checksum(index)}).encode())


def read(folder: OwnFolder, name: str) -> dict[str, Any]:
    """Reads an index.

    Raises:
      DataError: The file is damaged; the message names the wrong field.
      OSError: The file cannot be read.
    """
    with folder.open(name, "read") as file:
        content = file.read(_LIMIT_BYTES + 1)
    try:
        if len(content) > _LIMIT_BYTES:
            raise ValueError(f"it has more than {_LIMIT_BYTES:,} bytes")
        index = json.loads(content)
        _check(index, {**beginning(), "checksum": 0})
        bytes.fromhex(index["content_hash"])
        if index.pop("checksum") != _checksum(index):
            raise ValueError("its checksum is wrong")
    except (ValueError, RecursionError) as error:
        raise damaged(folder.path, name, str(error)) from error
    return index


def damaged(folder: Path, name: str, reason: str) -> DataError:
    """An error that names the file, the damage and the remedy."""
    return DataError(
        f"{folder / name} is damaged ({reason}); remove the folder {folder} to make it again"
    )


def check_content(
    folder: OwnFolder,
    name: str,
    file: BinaryIO,
    size: int,
    checksum: int,
    *,
    dtype: np.dtype,
    below: int | None = None,
) -> None:
    """Checks the first `size` bytes of a file, in pieces.

    Args:
      folder: Folder of the file.
      name: Name of the file.
      file: The file, open at its start.
      size: Number of bytes to check; more may follow.
      checksum: Checksum that the bytes must have.
      dtype: Dtype of the items.
      below: Number that every item must be below; None for no bound.

    Raises:
      DataError: The file is too short, its checksum is wrong, or an item is out of bounds.
      OSError: The file cannot be read.
    """
    if (found := os.fstat(file.fileno()).st_size) < size:
        raise damaged(folder.path, name, f"it has {found:,} bytes, but {size:,} were written")
    if size >= _ANNOUNCED_BYTES:
        print(f"checking {folder.path / name}, {size / 2**30:.1f} GiB", flush=True)
    actual = 0
    for first in range(0, size, _PIECE_BYTES):
        piece = file.read(min(_PIECE_BYTES, size - first))
        actual = zlib.crc32(piece, actual)
        if below is not None:
            items = np.frombuffer(piece, dtype)
            if items.max() >= below:
                index = int(np.argmax(items >= below))
                raise damaged(
                    folder.path,
                    name,
                    f"token {items[index]} at index {first // dtype.itemsize + index} is not one "
                    f"of the tokenizer's {below}",
                )
    if actual != checksum:
        raise damaged(
            folder.path, name, f"its checksum is {actual:08x}, but {checksum:08x} was written"
        )


def _checksum(index: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


def _check(value: Any, like: Any, field: str = "") -> None:
    """Checks that `value` has the fields of `like`, with the same types."""
    shown = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:37]}..."
    match like:
        case dict():
            if not isinstance(value, dict):
                raise ValueError(f"{field or 'it'} is {shown}, not an object")
            for key in like:
                inner = f"{field}.{key}" if field else key
                if key not in value:
                    raise ValueError(f"no field {inner}")
                _check(value[key], like[key], inner)
        case str() if not isinstance(value, str):
            raise ValueError(f"{field} is {shown}, not a text")
        case int() if type(value) is not int or not 0 <= value < 1 << 63:
            raise ValueError(f"{field} is {shown}, not a whole number from 0 to 2^63 - 1")
