"""The values that a configuration's numbers and names may have. No range holds NaN or infinity."""

import dataclasses
from typing import Any

import numpy as np

# The largest values that the programs have room for: an int32 counts steps and tokens, and XLA
# turns a larger float into infinity.
_MOST_INT = 2**31 - 1
_MOST_FLOAT = 3.4e38
# float32 has no normal number between it and 0, and the operations of `pallas_kernels` refuse one.
_LEAST_FLOAT = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `least` to `most`; `most` itself is not in the range if `below` is set."""

    least: int | float
    most: int | float
    below: bool = False

    def fault(self, value: int | float) -> str | None:
        """Why a number, which may be NaN, cannot be used, as "must ..."; None if it can be."""
        if not (self.least <= value <= self.most) or (self.below and value == self.most):
            return f"must lie in {self}"
        if 0 < value < _LEAST_FLOAT:
            return f"must be 0 or at least {_LEAST_FLOAT:.3g}, the smallest normal float32"
        return None

    def __str__(self) -> str:
        return f"[{self.least}, {self.most}{')' if self.below else ']'}"


COUNT = Range(0, _MOST_INT)
SIZE = Range(1, _MOST_INT)
# `jax.random.key` takes larger seeds, but ignores the bits past 32.
SEED = Range(0, 2**32 - 1)
NOT_NEGATIVE = Range(0, _MOST_FLOAT)
# float32 loses a smaller number when it is squared or added.
POSITIVE = Range(1e-30, _MOST_FLOAT)
SHARE = Range(0, 1)
POSITIVE_SHARE = Range(1e-30, 1)
BELOW_ONE = Range(0, 1, below=True)
# Three years; the clocks of threads take no more than 290.
SECONDS = Range(0, 10**8)
WHOLE_SECONDS = Range(1, 10**8)


def check_ranges(config: Any, **ranges: Range) -> None:
    """Checks that the fields of a configuration are in their ranges.

    Args:
      config: A dataclass.
      **ranges: The range of each field, by name. None is in every range. For a tuple, each entry
        must be in the range.

    Raises:
      ValueError: A field is out of its range, or a positive number that is too small for float32.
        The message has the field's name and value, and the range.
    """
    for name, allowed in ranges.items():
        value = getattr(config, name)
        entries = value if isinstance(value, tuple) else (value,)
        for entry in entries:
            if entry is not None and (fault := allowed.fault(entry)):
                raise ValueError(f"{name}={value} {fault}")


def check_folder_name(name: str) -> None:
    """Checks that a folder may have this name, also with a number appended.

    Raises:
      ValueError: It may not; the message says why.
    """
    # Linux allows 255 bytes.
    if not name.strip() or name in (".", "..") or len(name.encode()) > 200:
        reason = "must be the name of a folder, of 1 to 200 bytes"
    elif "/" in name:
        reason = "must be the name of a folder, without a slash; --runs-dir says where it is"
    elif not name.isprintable():
        reason = "must not have line breaks or other characters that cannot be printed"
    else:
        return
    raise ValueError(f"name={name!r} {reason}")
