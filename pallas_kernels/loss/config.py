"""Launch parameters of the linear cross-entropy's kernels."""

import dataclasses

from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.loss.mosaic_gpu import logits_config


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Launch parameters of `implementation="mosaic_gpu"`, one set for each kind of kernel.

    Attributes:
      logits: Kernel over logits in memory. None takes the user's parameters
        (`pallas_kernels.tuning`), then measured ones, then a guess.
      linear: GEMMs of the logits, which store statistics or exponentials. None derives the
        parameters from device and sizes.
      dweight: GEMM that writes a part of `dweight` to its place. None derives them, too.
      dx: GEMM that makes `dx` from exponentials in the memory of `dweight`. None derives them, too.
    """

    logits: logits_config.Config | None = None
    linear: hopper_gemm.Config | None = None
    dweight: hopper_gemm.Config | None = None
    dx: hopper_gemm.Config | None = None
