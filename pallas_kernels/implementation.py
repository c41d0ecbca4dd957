"""Names of implementations."""

from typing import Literal

type Implementation = Literal["reference", "xla", "mosaic_gpu"]
