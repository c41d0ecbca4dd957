"""The user's own table of launch parameters.

The environment variable `PALLAS_KERNELS_TUNED` names a JSON file as `python -m benchmarks.tune`
writes it: a list of objects with the keys `op`, `device_kind`, `dtype`, `hidden_size`, `config`
(the fields of the operation's `Config`) and `measured` (free text). A row here goes before the rows
that come with the library. The file is read once in a process.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIABLE = "PALLAS_KERNELS_TUNED"
_KEYS = ("op", "device_kind", "dtype", "hidden_size")


def lookup[Config](
    make: Callable[..., Config], op: str, device_kind: str, dtype: str, hidden_size: int
) -> Config | None:
    """The user's configuration for these, made of its fields, or None.

    Raises:
      ValueError: the file is not as described, or a field of the row is not one of `make`'s.
      FileNotFoundError: there is no such file.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    key = (op, device_kind, dtype, hidden_size)
    fields = _read(path).get(key)
    if fields is None:
        return None
    try:
        return make(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}={path!r}, the row of {key}: {error}; "
            "write it again with `python -m benchmarks.tune --output`"
        ) from error


@functools.cache
def _read(path: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    try:
        rows = json.loads(Path(path).read_text())
        return {tuple(row[key] for key in _KEYS): dict(row["config"]) for row in rows}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}={path!r} must be a JSON list of objects with {(*_KEYS, 'config')}; "
            f"write it with `python -m benchmarks.tune --output`: {error!r}"
        ) from error
