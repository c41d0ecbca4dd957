"""Launch parameters of the kernels.

The defaults were the fastest on an H200. With the defaults few kernels spill registers
(docs/lab/2026-11-30-attention-kernels-on-h200.md). A lane is a thread of the GPU, and a warpgroup
is 128 lanes.
"""

import dataclasses
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.arguments import check_config, check_integer
from pallas_kernels.gpu.device import MAX_REGISTERS_PER_LANE, REGISTERS_PER_SM, target_device

_LANES = 128  # lanes of a warpgroup
# Keys of a warpgroup in the kernel of `dk` and `dv`: the rows of a wgmma.
KEYS_OF_A_WARPGROUP = 64
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
      parts: Number of parts into which the heads of queries that share a head of keys are divided,
        from 1 to the number of these heads. Each part has blocks of its own. If there are several
        parts, each writes its sums of `dk` and `dv` to memory in float32, and XLA adds them up.
        `AttentionConfig(dkdv=None)` takes several parts if a device has few keys.
    """

    tile: int = 64
    stages: int = 3
    warpgroups: int = 2
    parts: int = 1

    def __post_init__(self):
        _make_integers(self)
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"warpgroups={self.warpgroups} must be from 1 to 4")
        if self.tile % 64 or not 64 <= self.tile <= 256:
            raise ValueError(f"tile={self.tile} must be a multiple of 64 from 64 to 256")
        if self.stages < 2:
            raise ValueError(f"stages={self.stages} must be at least 2")
        if self.parts < 1:
            raise ValueError(f"parts={self.parts} must be at least 1")

    @property
    def keys(self) -> int:
        """Number of keys of a block."""
        return KEYS_OF_A_WARPGROUP * self.warpgroups

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
    """Launch parameters of all kernels. `None` takes the defaults for the arrays of a device.

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


def forward_config(length: int, head_size: int, *, whole_rows: bool) -> ForwardConfig:
    """Launch parameters of the forward.

    Args:
      length: Number of tokens of a row.
      head_size: Numbers of a head in the kernel.
      whole_rows: Whether each row is one document.
    """
    # With heads of 128 a multiprocessor has one block of four warpgroups, which share their tiles
    # of keys.
    if head_size != 64:
        return ForwardConfig(warpgroups=4)
    # Tiles of 128 keys take 0.98 of the time in rows of 2048, and 0.90 in rows of 16384. In rows of
    # 1000 they take 1.5 of it, and with 8 documents in a row of 4096 they take 1.1 to 1.2.
    if whole_rows and length >= 2048:
        return ForwardConfig(warpgroups=4, block_kv=128, max_stages=2)
    # A multiprocessor has two blocks of two warpgroups.
    return ForwardConfig(warpgroups=2)


def queries_config(head_size: int) -> QueriesConfig:
    """Launch parameters of the gradient of the queries for heads of this size."""
    if head_size == 64:
        return QueriesConfig(warpgroups=2, stages=4)
    return QueriesConfig(warpgroups=3, stages=3)


def keys_config(shape: tuple[int, ...], group: int) -> KeysConfig:
    """Launch parameters of the gradients of the keys and values.

    Args:
      shape: Shape of the keys of a device, `[B, S, K, H]`.
      group: Number of heads of queries that share a head of keys.
    """
    # A multiprocessor has one block at a time. The first keys of a row have the most queries, so
    # their blocks are the longest: with as many blocks as multiprocessors, twice the mean. So there
    # are parts if the blocks are no more than that.
    num_rows, length, num_heads, _ = shape
    config = KeysConfig()
    num_blocks = num_rows * num_heads * pl.cdiv(length, config.keys)
    parts = min(2 * target_device().num_sms // max(num_blocks, 1), group)
    return dataclasses.replace(config, parts=max(parts, 1))
