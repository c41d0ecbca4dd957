"""Launch parameters of the kernels.

The defaults were the fastest on an H200 for rows of documents. With the defaults few kernels spill
registers (docs/lab/2026-11-30-attention-kernels-on-h200.md). A lane is a thread of the GPU, and a
warpgroup is 128 lanes.
"""

import dataclasses
from typing import Any

from pallas_kernels.arguments import check_config, check_integer
from pallas_kernels.gpu.device import MAX_REGISTERS_PER_LANE, REGISTERS_PER_SM

_LANES = 128  # lanes of a warpgroup
# Registers of a lane of the warpgroup that loads. They leave 240 to each lane of two computing
# warpgroups. With 40 and 232, the kernel of `dk` and `dv` spilled for heads of 128 numbers.
LOADER_REGISTERS = 24


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ForwardConfig:
    """Launch parameters of the forward.

    Attributes:
      warpgroups: Number of warpgroups in a block, 1 to 4.
      block_kv: Number of keys in a tile, a multiple of 64 up to 256.
      max_stages: Largest number of tiles of keys that shared memory holds, and as many tiles of
        values; at least 1.
    """

    warpgroups: int
    block_kv: int = 64
    max_stages: int = 4

    def __post_init__(self):
        _make_integers(self)
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be from 1 to 4")
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(f"block_kv={self.block_kv} must be a multiple of 64 up to 256")
        if self.max_stages < 1:
            raise ValueError(f"max_stages={self.max_stages} must be at least 1")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class QueriesConfig:
    """Launch parameters of the gradient of the queries.

    Attributes:
      warpgroups: Number of warpgroups in a block, 1 to 4.
      stages: Number of tiles of keys that shared memory holds, and as many tiles of values; at
        least 2.
    """

    warpgroups: int
    stages: int

    def __post_init__(self):
        _make_integers(self)
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be from 1 to 4")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeysConfig:
    """Launch parameters of the gradients of the keys and values.

    Attributes:
      tile: Number of queries in a tile, a multiple of 64 up to 256.
      stages: Number of tiles that shared memory holds; at least 2.
      warpgroups: Number of computing warpgroups in a block, 1 to 4. One more loads the tiles.
    """

    tile: int = 64
    stages: int = 3
    warpgroups: int = 2

    def __post_init__(self):
        _make_integers(self)
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be from 1 to 4")
        if self.tile % 64 or not 64 <= self.tile <= 256:
            raise ValueError(f"tile={self.tile} must be a multiple of 64 from 64 to 256")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")

    @property
    def registers(self) -> int:
        """Registers of a computing lane: its share of what the loading warpgroup leaves.

        The number is a multiple of 8. A block keeps the registers that it is launched with, the
        same number for each lane. With three warpgroups that is 168, so one lane of each warpgroup
        has 504 together and not 512. A lane that asks for more than is left waits forever.
        """
        warpgroups = self.warpgroups + 1
        launched = REGISTERS_PER_SM // (warpgroups * _LANES) // 8 * 8
        free = launched * warpgroups - LOADER_REGISTERS
        return min(free // self.warpgroups, MAX_REGISTERS_PER_LANE) // 8 * 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AttentionConfig:
    """Launch parameters of all kernels. `None` takes the defaults for the head size.

    Attributes:
      forward: Parameters of the forward.
      dq: Parameters of the gradient of the queries.
      dkdv: Parameters of the gradients of the keys and values.
    """

    forward: ForwardConfig | None = None
    dq: QueriesConfig | None = None
    dkdv: KeysConfig | None = None

    def __post_init__(self):
        check_config(self.forward, ForwardConfig, name="forward")
        check_config(self.dq, QueriesConfig, name="dq")
        check_config(self.dkdv, KeysConfig, name="dkdv")


def _make_integers(config: Any) -> None:
    """Makes all parameters Python's integers; a TypeError if one is no integer."""
    remedy = f"the docstring of {type(config).__name__} says which integers it may be"
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        check_integer(field.name, value, remedy=remedy)
        # An integer of JAX has no hash, which static arguments need.
        object.__setattr__(config, field.name, int(value))


def forward_config(head_size: int) -> ForwardConfig:
    """Launch parameters of the forward for heads of this size."""
    # With heads of 64 a multiprocessor has two blocks of two warpgroups.
    # With heads of 128 it has one block of four warpgroups, which share their tiles of keys.
    return ForwardConfig(warpgroups=2 if head_size == 64 else 4)


def queries_config(head_size: int) -> QueriesConfig:
    """Launch parameters of the gradient of the queries for heads of this size."""
    if head_size == 64:
        return QueriesConfig(warpgroups=2, stages=4)
    return QueriesConfig(warpgroups=3, stages=3)
