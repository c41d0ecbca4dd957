"""Launch parameters of the RMSNorm kernels: the choices, the best measured ones, and a guess."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import tuning
from pallas_kernels.gpu.device import (
    BYTES_PER_ACCESS,
    LANES,
    MAX_REGISTERS_PER_LANE,
    MAX_WARPS,
    REGISTERS_PER_SM,
    WARPS_PER_WARPGROUP,
    Device,
)
from pallas_kernels.norm.rows import RowSplit, column_parts, ring_shape, splits


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How warps, blocks and shared memory share the rows.

    Attributes:
      fwd_warps: Number of warps that share a row in the forward: 1, or a multiple of 4 up to 32
        that divides the hidden size. With 1, a block has four warps and so four rows.
      fwd_reread: Whether the forward reads a row twice, the second time from the cache, and does
        not keep it in registers: fewer registers, so more rows at a time.
      bwd_warps: Number of warps that share a row in the backward, as `fwd_warps`.
      bwd_blocks: Number of thread blocks per multiprocessor in the backward. Each keeps its part of
        `dweight`, so more blocks mean more partial rows to add up.
      bwd_stages: Number of rows that the tensor memory accelerator (Hopper and later) brings into
        shared memory ahead of the computation; 0 loads rows directly.
      bwd_reread: Whether the backward reads a row twice, the second time from shared memory if the
        rows are there.
    """

    fwd_warps: int
    fwd_reread: bool
    bwd_warps: int
    bwd_blocks: int
    bwd_stages: int
    bwd_reread: bool

    def __post_init__(self):
        for name in ("fwd_warps", "bwd_warps"):
            warps = getattr(self, name)
            if warps != 1 and (warps % WARPS_PER_WARPGROUP or not 4 <= warps <= MAX_WARPS):
                raise ValueError(f"{name}={warps} must be 1 or a multiple of 4 up to {MAX_WARPS}")
        if self.bwd_blocks < 1:
            raise ValueError(f"{self.bwd_blocks=} must be at least 1")
        if self.bwd_stages < 0 or self.bwd_stages == 1:
            raise ValueError(f"{self.bwd_stages=} must be 0 (direct loads) or at least 2")


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """All of a norm that is not an array; hashable, because operations are static.

    Attributes:
      eps: Number added to the mean square.
      weight_offset: Number added to the weight.
      casting: Place where the result is rounded.
      config: Launch parameters.
    """

    eps: float
    weight_offset: float
    casting: str
    config: Config


def _config(*values: Any) -> Config:
    """A configuration from its fields in order."""
    names = (field.name for field in dataclasses.fields(Config))
    return Config(**dict(zip(names, values, strict=True)))


_H100 = "NVIDIA H100 80GB HBM3"
_H200 = "NVIDIA H200"

# Best of `python -m benchmarks.kernels.tune` on 2**26 elements, by device kind, dtype, hidden size
# and whether a residual is added. The speeds are fractions of the speed of a copy of as many bytes.
# 2026-11-21, jax 0.11.2.
_TUNED: dict[tuple[str, str, int, bool], Config] = {
    (_H100, "bfloat16", 1024, False): _config(4, False, 4, 6, 3, True),  # fwd 1.00, bwd 0.98
    (_H100, "bfloat16", 2048, False): _config(4, False, 8, 3, 2, False),  # fwd 1.00, bwd 0.98
    (_H100, "bfloat16", 2880, False): _config(4, False, 4, 3, 2, True),  # fwd 0.99, bwd 0.96
    (_H100, "bfloat16", 4096, False): _config(4, False, 8, 2, 3, True),  # fwd 1.00, bwd 0.97
    (_H100, "bfloat16", 5120, False): _config(8, False, 8, 2, 2, True),  # fwd 1.00, bwd 0.95
    (_H100, "bfloat16", 8192, False): _config(8, False, 16, 1, 3, True),  # fwd 1.00, bwd 0.96
    (_H100, "bfloat16", 16384, False): _config(4, False, 32, 1, 0, True),  # fwd 0.98, bwd 0.90
    (_H100, "bfloat16", 1024, True): _config(4, False, 4, 6, 3, True),  # fwd 0.99, bwd 1.00
    (_H100, "bfloat16", 2048, True): _config(4, False, 4, 3, 2, False),  # fwd 0.99, bwd 1.00
    (_H100, "bfloat16", 2880, True): _config(4, False, 4, 2, 2, False),  # fwd 0.99, bwd 0.98
    (_H100, "bfloat16", 4096, True): _config(16, False, 8, 2, 2, True),  # fwd 1.00, bwd 1.00
    (_H100, "bfloat16", 5120, True): _config(8, False, 20, 1, 3, True),  # fwd 0.99, bwd 0.97
    (_H100, "bfloat16", 8192, True): _config(16, False, 16, 1, 2, False),  # fwd 1.00, bwd 0.99
    (_H100, "bfloat16", 16384, True): _config(16, False, 32, 1, 0, True),  # fwd 0.99, bwd 0.92
    (_H200, "bfloat16", 1024, False): _config(1, False, 4, 7, 2, False),  # fwd 0.96, bwd 0.95
    (_H200, "bfloat16", 2048, False): _config(4, False, 4, 5, 2, True),  # fwd 0.97, bwd 0.96
    (_H200, "bfloat16", 4096, False): _config(4, False, 4, 3, 2, True),  # fwd 0.97, bwd 0.95
    (_H200, "bfloat16", 5120, False): _config(4, False, 8, 2, 3, True),  # fwd 0.99, bwd 0.84
    (_H200, "bfloat16", 8192, False): _config(8, False, 16, 1, 3, True),  # fwd 0.95, bwd 0.84
    (_H200, "bfloat16", 16384, False): _config(4, False, 16, 1, 2, True),  # fwd 0.95, bwd 0.83
    (_H200, "bfloat16", 1024, True): _config(4, False, 4, 7, 3, True),  # fwd 0.99, bwd 1.00
    (_H200, "bfloat16", 2048, True): _config(4, False, 4, 3, 2, False),  # fwd 0.99, bwd 0.99
    (_H200, "bfloat16", 4096, True): _config(16, False, 8, 2, 2, False),  # fwd 0.97, bwd 0.99
    (_H200, "bfloat16", 5120, True): _config(4, False, 20, 1, 3, True),  # fwd 0.97, bwd 0.85
    (_H200, "bfloat16", 8192, True): _config(16, False, 16, 1, 2, True),  # fwd 0.97, bwd 0.96
    (_H200, "bfloat16", 16384, True): _config(4, False, 32, 1, 0, True),  # fwd 0.96, bwd 0.83
}


def default_config(device: Device, hidden_size: int, dtype: DTypeLike, *, add: bool) -> Config:
    """The launch parameters to use: the user's, or measured ones, or a guess, in this order.

    Args:
      device: Device that runs the kernels.
      hidden_size: Size of a row, D.
      dtype: Dtype of `x`.
      add: Whether a residual is added.
    """
    key = device.kind, tuning.dtype_name(dtype), hidden_size
    return (
        tuning.lookup(Config, "add_rms_norm" if add else "rms_norm", *key)
        or _TUNED.get((*key, add))
        or guess_config(device, hidden_size, dtype, add=add)
    )


def guess_config(device: Device, hidden_size: int, dtype: DTypeLike, *, add: bool) -> Config:
    """Launch parameters derived from registers and shared memory, for sizes without a figure."""
    itemsize = jnp.dtype(dtype).itemsize
    fwd = _pick(splits(hidden_size, itemsize), lambda split: 1)
    bwd = _pick(splits(hidden_size, itemsize), column_parts)
    blocks, stages, reread = _guess_backward(device, bwd, itemsize, num_operands=3 if add else 2)
    return Config(
        fwd_warps=fwd.warps,
        # One block at a time would leave the memory idle while it adds up its row.
        fwd_reread=_blocks_per_sm(fwd, 12 + 2 * fwd.elements_per_lane) < 2,
        bwd_warps=bwd.warps,
        bwd_blocks=blocks,
        bwd_stages=stages,
        bwd_reread=reread,
    )


def _pick(candidates: list[RowSplit], parts: Callable[[RowSplit], int | None]) -> RowSplit:
    """At most 32 elements a lane if possible, then the widest accesses, then the fewest warps.

    16 elements are enough for a warp that has a row for itself: rows that are longer are shared.
    `parts` says in how many parts a split is handled, None if it is not possible.
    """
    elements = {s: s.elements_per_lane // n for s in candidates if (n := parts(s))}
    few = [s for s, number in elements.items() if number <= (16 if s.warps == 1 else 32)]
    return _widest(few)[0] if few else min(elements, key=lambda split: elements[split])


def _widest(candidates: list[RowSplit]) -> list[RowSplit]:
    """The candidates with the widest accesses."""
    vector = max(split.vector for split in candidates)
    return [split for split in candidates if split.vector == vector]


def _guess_backward(
    device: Device, split: RowSplit, itemsize: int, *, num_operands: int
) -> tuple[int, int, bool]:
    """`(blocks per multiprocessor, stages, reread)`."""
    if column_parts(split) != 1:
        return 1, 0, True
    if device.has_tma and split.segment * itemsize % BYTES_PER_ACCESS == 0:
        blocks = _most_blocks(device, split, itemsize, num_operands, 2, True)
        if blocks:
            return min(4, blocks), 2, True
    reread = 16 + 6 * split.elements_per_lane > split.registers
    return max(1, _most_blocks(device, split, itemsize, num_operands, 0, reread)), 0, reread


def _most_blocks(
    device: Device, split: RowSplit, itemsize: int, num_operands: int, stages: int, reread: bool
) -> int:
    """Blocks of the backward, up to 8, that a multiprocessor holds at a time.

    Registers as ptxas counts them for sm_90a: 56, 96 and 200 for 8, 16 and 32 elements a lane, and
    56, 80 and 165 if they are read twice.
    """
    elements = split.elements_per_lane
    registers = 40 + 7 * elements // 2 if reread else 16 + 6 * elements
    if registers > split.registers:
        registers = split.registers if reread else MAX_REGISTERS_PER_LANE + 1
    blocks = _blocks_per_sm(split, registers)
    if stages:
        ring_bytes = math.prod(ring_shape(split, stages, num_operands)) * itemsize
        blocks = min(blocks, device.smem_bytes // ring_bytes)
    return min(8, blocks)


def _blocks_per_sm(split: RowSplit, registers: int) -> int:
    """Blocks that a multiprocessor holds at a time if a lane has so many registers."""
    if registers > MAX_REGISTERS_PER_LANE:
        return 0
    return REGISTERS_PER_SM // (registers * split.warpgroups * WARPS_PER_WARPGROUP * LANES)


# The device for which candidates are made. Another device skips candidates that it cannot run.
_TUNED_FOR = Device("", (9, 0), 1)


def forward_candidates(hidden_size: int, dtype: DTypeLike, *, add: bool) -> list[Config]:
    """Configurations worth timing that differ in the forward alone."""
    base = guess_config(_TUNED_FOR, hidden_size, dtype, add=add)
    return [
        dataclasses.replace(base, fwd_warps=split.warps, fwd_reread=reread)
        for split in _widest(splits(hidden_size, jnp.dtype(dtype).itemsize))
        for reread in (False, True)
    ]


def backward_candidates(hidden_size: int, dtype: DTypeLike, *, add: bool) -> list[Config]:
    """Configurations worth timing that differ in the backward alone."""
    itemsize = jnp.dtype(dtype).itemsize
    base = guess_config(_TUNED_FOR, hidden_size, dtype, add=add)
    candidates = []
    possible = [split for split in splits(hidden_size, itemsize) if column_parts(split)]
    few = [split for split in possible if split.elements_per_lane <= 32]
    for split in _widest(few) if few else possible:
        for stages, reread in ((0, False), (0, True), (2, False), (2, True), (3, True)):
            most = _most_blocks(_TUNED_FOR, split, itemsize, 3 if add else 2, stages, reread)
            candidates += [
                dataclasses.replace(
                    base,
                    bwd_warps=split.warps,
                    bwd_blocks=blocks,
                    bwd_stages=stages,
                    bwd_reread=reread,
                )
                for blocks in (most, most - 1)
                if blocks > 0
            ]
    return candidates
