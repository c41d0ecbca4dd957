"""The user's own table of launch parameters.

The environment variable `PALLAS_KERNELS_TUNED` names a JSON file, which `make tune` writes
(`python -m benchmarks.kernels.tune`). The file is a list of objects with the keys `op`,
`device_kind`, `dtype`, `size` and `config`. `config` has the fields of the `Config` of the
operation's kernel, or is null where the library's own parameters are as fast. `size` is the length
of the arrays' last axis: the hidden size of a norm, the intermediate size of SwiGLU, the vocabulary
(columns of the logits) of the linear cross-entropy. A row of the file goes before the rows that
come with the library. A process reads the file once.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

VARIABLE = "PALLAS_KERNELS_TUNED"
KEYS = ("op", "device_kind", "dtype", "size")  # together they name the case of a row


def dtype_name(dtype: DTypeLike) -> str:
    """The dtype of the row to use: float16 takes the row of bfloat16.

    Only the size of the elements matters.
    """
    return {2: "bfloat16", 4: "float32"}[jnp.dtype(dtype).itemsize]


def row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    """The case of a row: its values of `KEYS`."""
    return tuple(row[name] for name in KEYS)


def lookup[Config](
    make: Callable[..., Config], op: str, device_kind: str, dtype: str, size: int
) -> Config | None:
    """The user's configuration for a case, which `make` makes of its fields, or None.

    Raises:
      ValueError: The file is malformed, or `make` does not take a field of the row.
      FileNotFoundError: There is no such file.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    key = (op, device_kind, dtype, size)
    fields = _read(path).get(key)
    if fields is None:
        return None
    try:
        return make(**fields)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}={path!r}, the row of {key}: {error}; "
            "write it again with `make tune` or `python -m benchmarks.kernels.tune --output`"
        ) from error


@functools.cache
def _read(path: str) -> dict[tuple[Any, ...], dict[str, Any]]:
    try:
        rows = json.loads(Path(path).read_text())
        return {row_key(row): dict(row["config"]) for row in rows if row["config"] is not None}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{VARIABLE}={path!r} must be a JSON list of objects with {(*KEYS, 'config')}; "
            f"write it with `make tune` or `python -m benchmarks.kernels.tune --output`: {error!r}"
        ) from error
