"""Launch parameters of the kernel over logits: what can be chosen, what was measured, a guess."""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import tuning
from pallas_kernels.gpu.device import WARPS_PER_WARPGROUP, Device

LINE = 128  # columns that a warp handles at a time; rows of logits are padded to whole lines
_MAX_BARRIERS = 32  # of one Mosaic GPU barrier array
_OTHER_SMEM = 2048  # barriers, partial statistics, alignment


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Launch parameters.

    Attributes:
      warpgroups: of a block, which has a multiprocessor to itself.
      slots: of the ring in shared memory, for each warpgroup.
      max_lines: of 128 columns in a slot, at most; a multiple of 4.
    """

    warpgroups: int
    slots: int
    max_lines: int

    def __post_init__(self):
        if not 1 <= self.warpgroups <= 8:
            raise ValueError(f"{self.warpgroups=} must be from 1 to 8")
        if self.slots < 2 or self.slots * self.warpgroups > _MAX_BARRIERS:
            raise ValueError(
                f"{self.slots=} must be at least 2, and {self.warpgroups=} times it at most 32"
            )
        if self.max_lines < 4 or self.max_lines % WARPS_PER_WARPGROUP:
            raise ValueError(f"{self.max_lines=} must be a multiple of {WARPS_PER_WARPGROUP}")


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """How the lines of a row are dealt: slot `i` of warpgroup `w` is the row's `i·warpgroups + w`.

    Attributes:
      num_lines: of a row.
      warpgroups: that share it.
      lines: in a slot.
      rounds: slots of a warpgroup in a row.
    """

    num_lines: int
    warpgroups: int
    lines: int
    rounds: int

    @classmethod
    def make(cls, num_lines: int, config: Config) -> "RowSplit":
        """As few rounds as `max_lines` allows, and slots as small as they then can be."""
        rounds = math.ceil(num_lines / (config.warpgroups * config.max_lines))
        lines = math.ceil(num_lines / (config.warpgroups * rounds) / WARPS_PER_WARPGROUP)
        return cls(num_lines, config.warpgroups, lines * WARPS_PER_WARPGROUP, rounds)

    @property
    def columns(self) -> int:
        """Of all slots together: the row, and what the last ones reach beyond it."""
        return self.warpgroups * self.rounds * self.lines * LINE


# Best of `python -m benchmarks.kernels.tune linear_cross_entropy`, by device kind, dtype and
# columns. A speed is a fraction of the speed of a copy of as many bytes.
_TUNED: dict[tuple[str, str, int], Config] = {
    # 2026-11-22 jax 0.11.2: fwd 0.88 of a copy
    ("NVIDIA H100 80GB HBM3", "bfloat16", 128256): Config(warpgroups=4, slots=8, max_lines=28),
}


def default_config(device: Device, num_columns: int, dtype: DTypeLike) -> Config:
    """The launch parameters to use: the user's, else measured ones, else a guess.

    Args:
      device: where the kernel runs.
      num_columns: of the logits: the vocabulary, or the part of it that is there.
      dtype: of the logits.
    """
    key = device.kind, tuning.dtype_name(dtype), num_columns
    users = tuning.lookup(Config, "linear_cross_entropy", *key)
    return users or _TUNED.get(key) or guess_config(device, dtype)


def guess_config(device: Device, dtype: DTypeLike) -> Config:
    """Four warpgroups, 128 registers a lane, and as much of shared memory as slots can have."""
    warpgroups, slots = 4, 8
    lines = _lines_in_smem(device, dtype) // (warpgroups * slots)
    lines = lines // WARPS_PER_WARPGROUP * WARPS_PER_WARPGROUP
    return Config(warpgroups=warpgroups, slots=slots, max_lines=lines)


def _lines_in_smem(device: Device, dtype: DTypeLike) -> int:
    """Lines that the ring of a block can have."""
    return (device.smem_bytes - _OTHER_SMEM) // (LINE * jnp.dtype(dtype).itemsize)


def check_fits(config: Config, device: Device, dtype: DTypeLike) -> None:
    """Raises ValueError if a block cannot have the ring's memory."""
    lines = config.warpgroups * config.slots * config.max_lines
    num_bytes = lines * LINE * jnp.dtype(dtype).itemsize + _OTHER_SMEM
    if num_bytes > device.smem_bytes:
        raise ValueError(
            f"{config} takes {num_bytes} bytes of shared memory for {dtype}, a block of "
            f"{device.kind} can have {device.smem_bytes}; use less slots or lines"
        )


# What the candidates are made for; those that do not run elsewhere are skipped there.
_TUNED_FOR = Device("", (9, 0), 1)

# Lines of a slot, at most, by warpgroups. A lane has a register for each line. At 128256 columns
# ptxas for sm_90a counts 142 and 163 registers in all for 32 and 40 lines with 2 warpgroups; with 4
# it counts 124 for 24 lines and the limit of 128 for 36; with 8 the limit of 64 for 16, and 20
# lines spill. Where a row ends in the middle of a round some more do, which the tuner leaves out.
# The lines of a slot are unrolled: with 4 warpgroups 20 take 10 s to compile, 44 take 40.
_LINES = {2: (24, 32, 40), 4: (20, 24, 28, 32, 36), 8: (12, 16)}


def candidates(num_columns: int, dtype: DTypeLike) -> list[Config]:
    """Configurations worth timing, each with as many slots as there is room for."""
    num_lines, found = math.ceil(num_columns / LINE), []
    for warpgroups, most in _LINES.items():
        for max_lines in most:
            config = Config(warpgroups=warpgroups, slots=2, max_lines=max_lines)
            lines = RowSplit.make(num_lines, config).lines
            room = _lines_in_smem(_TUNED_FOR, dtype) // (warpgroups * lines)
            slots = min(room, _MAX_BARRIERS // warpgroups)
            found.append(Config(warpgroups=warpgroups, slots=slots, max_lines=lines))
    # Different limits can make the same slots. As kernels these would be one, compiled once.
    return list(dict.fromkeys(found))
