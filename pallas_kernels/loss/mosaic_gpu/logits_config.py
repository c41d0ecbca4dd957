"""Launch parameters of the kernel over logits: measured ones, a guess, and candidates to time."""

import dataclasses
import math

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import tuning
from pallas_kernels.gpu.device import WARPS_PER_WARPGROUP, Device

LINE = 128  # columns that a warp handles at a time; rows of logits are padded to whole lines
_MAX_BARRIERS = 32  # in one barrier array of Mosaic GPU
_OTHER_SMEM = 2048  # bytes for barriers, partial statistics and alignment


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Launch parameters.

    Attributes:
      warpgroups: Number of warpgroups of a block, which has a multiprocessor to itself.
      slots: Number of slots of the ring in shared memory, for each warpgroup.
      max_lines: Largest number of lines of 128 columns in a slot, a multiple of 4.
    """

    warpgroups: int
    slots: int
    max_lines: int

    def __post_init__(self):
        if not 1 <= self.warpgroups <= 8:
            raise ValueError(f"warpgroups={self.warpgroups} must be from 1 to 8")
        if self.slots < 2 or self.slots * self.warpgroups > _MAX_BARRIERS:
            raise ValueError(
                f"slots={self.slots} must be at least 2, and warpgroups={self.warpgroups} times it "
                "at most 32"
            )
        if self.max_lines < 4 or self.max_lines % WARPS_PER_WARPGROUP:
            raise ValueError(
                f"max_lines={self.max_lines} must be a multiple of {WARPS_PER_WARPGROUP}"
            )


@dataclasses.dataclass(frozen=True)
class RowSplit:
    """How a row is dealt: slot `i` of warpgroup `w` is the row's slot `i·warpgroups + w`.

    Attributes:
      num_lines: Number of lines of a row.
      warpgroups: Number of warpgroups that share a row.
      lines: Number of lines in a slot.
      rounds: Number of slots of a row for each warpgroup.
    """

    num_lines: int
    warpgroups: int
    lines: int
    rounds: int

    @classmethod
    def make(cls, num_lines: int, config: Config) -> "RowSplit":
        """The split with as few rounds as `max_lines` allows, and then with the smallest slots."""
        rounds = math.ceil(num_lines / (config.warpgroups * config.max_lines))
        lines = math.ceil(num_lines / (config.warpgroups * rounds) / WARPS_PER_WARPGROUP)
        return cls(num_lines, config.warpgroups, lines * WARPS_PER_WARPGROUP, rounds)

    @property
    def columns(self) -> int:
        """Number of columns of all slots together; the last slots may reach beyond the row."""
        return self.warpgroups * self.rounds * self.lines * LINE


# Best configurations of `python -m benchmarks.kernels.tune linear_cross_entropy`, by device kind,
# dtype and columns. Speeds are fractions of the speed of a copy of as many bytes.
TUNED: dict[tuple[str, str, int], Config] = {
    # 2026-11-22 jax 0.11.2: fwd 0.88 of a copy
    ("NVIDIA H100 80GB HBM3", "bfloat16", 128256): Config(warpgroups=4, slots=8, max_lines=28),
}


def default_config(device: Device, num_columns: int, dtype: DTypeLike) -> Config:
    """Launch parameters to use: the user's, otherwise measured ones, otherwise a guess.

    Args:
      device: Device that runs the kernel.
      num_columns: Number of columns of the logits: the vocabulary, or a part of it.
      dtype: Dtype of the logits.
    """
    key = device.kind, tuning.dtype_name(dtype), num_columns
    users = tuning.lookup(Config, "linear_cross_entropy", *key)
    return users or TUNED.get(key) or guess_config(device, dtype)


def guess_config(device: Device, dtype: DTypeLike) -> Config:
    """Four warpgroups with 128 registers a lane, and slots that fill the shared memory."""
    warpgroups, slots = 4, 8
    lines = _lines_in_smem(device, dtype) // (warpgroups * slots)
    lines = lines // WARPS_PER_WARPGROUP * WARPS_PER_WARPGROUP
    return Config(warpgroups=warpgroups, slots=slots, max_lines=lines)


def _lines_in_smem(device: Device, dtype: DTypeLike) -> int:
    """Number of lines that the ring of a block has room for."""
    return (device.smem_bytes - _OTHER_SMEM) // (LINE * jnp.dtype(dtype).itemsize)


def check_fits(config: Config, device: Device, dtype: DTypeLike) -> None:
    """Raises ValueError if the ring does not fit the shared memory of a block."""
    lines = config.warpgroups * config.slots * config.max_lines
    num_bytes = lines * LINE * jnp.dtype(dtype).itemsize + _OTHER_SMEM
    if num_bytes > device.smem_bytes:
        raise ValueError(
            f"{config} takes {num_bytes} bytes of shared memory for {dtype}, a block of "
            f"{device.kind} can have {device.smem_bytes}; use fewer slots or lines"
        )


# Device that the candidates are made for. On another the tuner skips candidates that do not run.
_TUNED_FOR = Device("", (9, 0), 1)

# Largest numbers of lines of a slot, by warpgroups. A lane has a register for each line. At 128256
# columns ptxas for sm_90a counts these registers in all:
# - 2 warpgroups: 142 for 32 lines, 163 for 40.
# - 4 warpgroups: 124 for 24 lines, the limit of 128 for 36.
# - 8 warpgroups: the limit of 64 for 16 lines; 20 lines spill.
# More candidates spill where a row ends in the middle of a round; the tuner leaves them out.
# The lines of a slot are unrolled: with 4 warpgroups 20 lines take 10 s to compile, 44 take 40.
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
    # Different limits can give the same slots, and so the same kernel. It is timed once.
    return list(dict.fromkeys(found))
