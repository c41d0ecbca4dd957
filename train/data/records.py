"""The fields of a record of JSON or parquet, and the rows of a parquet file."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from train.data.errors import DataError

_ROWS_AT_ONCE = 256  # of a parquet file


def utf8(record: dict[str, Any], name: str, where: str) -> bytes:
    """The text in a field of a record.

    Raises:
      DataError: The field has no text, or half of a surrogate pair.
    """
    value = record[name]
    if not isinstance(value, str):
        raise DataError(
            f"{where}: {name!r} is {shortened(value)}, not a text; repair or remove the record"
        )
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {name!r} has half of a surrogate pair at character {error.start}; repair or "
            "remove the record"
        ) from error


def shortened(value: Any) -> str:
    """A value as JSON, for messages."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def pyarrow_modules(path: Path) -> tuple[Any, Any]:
    """The modules `pyarrow` and `pyarrow.parquet`, to read the file at `path`.

    Raises:
      DataError: pyarrow is missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"{path}: parquet needs pyarrow; run `pip install pyarrow`") from error
    return pyarrow, pyarrow.parquet


def parquet_rows(file: Any, columns: list[str], skip: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows after the first `skip` rows, each with its number, from 1."""
    number = 0
    for group in range(file.num_row_groups):
        size = file.metadata.row_group(group).num_rows
        if number + size <= skip:
            number += size
            continue
        for batch in file.iter_batches(_ROWS_AT_ONCE, row_groups=[group], columns=columns):
            for record in batch.to_pylist():
                number += 1
                if number > skip:
                    yield number, record
