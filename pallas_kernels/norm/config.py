"""Launch parameters of the RMSNorm kernels: the choices, the best measured ones, and a guess."""

import dataclasses
import itertools
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
from pallas_kernels.norm.rows import RowSplit, column_parts, ring_bytes, ring_shapes, splits


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
TUNED: dict[tuple[str, str, int, bool], Config] = {
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
        or TUNED.get((*key, add))
        or guess_config(device, hidden_size, dtype, add=add)
    )


def guess_config(device: Device, hidden_size: int, dtype: DTypeLike, *, add: bool) -> Config:
    """Launch parameters derived from registers and shared memory, for sizes without a figure."""
    itemsize = jnp.dtype(dtype).itemsize
    fwd = _pick(splits(hidden_size, itemsize), lambda split: 1)
    return Config(
        fwd_warps=fwd.warps,
        # One block at a time would leave the memory idle while it adds up its row.
        fwd_reread=_blocks_per_sm(fwd, 12 + 2 * fwd.elements_per_lane) < 2,
        **_backward_choices(device, hidden_size, itemsize, 3 if add else 2)[0],
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


# Bytes of a multiprocessor's rows, read and written, that are in the works at a time. With fewer
# the memory is idle while the blocks add up their rows. Tuned rows of the table have 37 to 98 KB.
_BYTES_IN_THE_WORKS = 36_000
# Warps of a multiprocessor. 16384 x 4096 on an H200: 8 of them 108.3 us, 16 of them 105.5.
_FEWEST_WARPS = 12
# Elements of a lane are at most so many where a split allows it, and rows ahead always.
_MOST_ELEMENTS, _MOST_STAGES = 32, 8


def _backward_choices(
    device: Device, hidden_size: int, itemsize: int, num_operands: int
) -> list[dict[str, Any]]:
    """The backward's part of `Config`: all that fits the device, the most promising first.

    The tensor memory accelerator brings rows wherever it can, as many ahead as shared memory holds.
    Enough bytes and warps in the works come first, then a row that stays in registers between its
    sum and its gradient. Then fewer warps are better, and then fewer partial rows of `dweight`.
    """
    ranks = {}
    for split, reread in itertools.product(splits(hidden_size, itemsize), (False, True)):
        is_aligned = split.segment * itemsize % BYTES_PER_ACCESS == 0
        if column_parts(split) != 1 or not device.has_tma or not is_aligned:
            continue
        rows = split.lanes // LANES // split.warps
        row_bytes = (num_operands + 1) * hidden_size * itemsize * rows
        for blocks in range(1, _most_blocks(split, num_operands, reread) + 1):
            stages = _most_stages(device, split, itemsize, num_operands, blocks)
            if stages >= 2:
                ranks[split.warps, blocks, stages, reread] = (
                    max(split.elements_per_lane, _MOST_ELEMENTS),
                    blocks * row_bytes < _BYTES_IN_THE_WORKS,
                    blocks * split.lanes // LANES < _FEWEST_WARPS,
                    reread,
                    blocks * split.lanes,
                    blocks * rows,
                )
    return [_backward(*key) for key in sorted(ranks, key=lambda key: ranks[key])] or [
        _direct_loads(_pick(splits(hidden_size, itemsize), column_parts), num_operands)
    ]


def _direct_loads(split: RowSplit, num_operands: int) -> dict[str, Any]:
    """The backward's part of `Config` without the tensor memory accelerator."""
    if column_parts(split) != 1:
        return _backward(split.warps, 1, 0, True)
    reread = _most_blocks(split, num_operands, False) == 0
    blocks = max(1, _most_blocks(split, num_operands, reread))
    return _backward(split.warps, blocks, 0, reread)


def _backward(warps: int, blocks: int, stages: int, reread: bool) -> dict[str, Any]:
    """The backward's part of `Config`."""
    return {
        "bwd_warps": warps,
        "bwd_blocks": blocks,
        "bwd_stages": stages,
        "bwd_reread": reread,
    }


def _most_stages(
    device: Device, split: RowSplit, itemsize: int, num_operands: int, blocks: int
) -> int:
    """Rows that each of so many blocks has in shared memory."""
    # Barriers and sums take less than 4096 bytes, buffers begin at multiples of 1024, and the
    # driver takes 1024 for each block.
    other = 1024 * (len(ring_shapes(split, 1, num_operands)) + 4)
    available = (device.smem_bytes + 1024) // blocks - other
    return min(_MOST_STAGES, available // ring_bytes(split, 1, num_operands, itemsize))


def _most_blocks(split: RowSplit, num_operands: int, reread: bool) -> int:
    """Blocks of the backward, up to 8, whose registers a multiprocessor has.

    The registers are those that ptxas counts for sm_90a (`tests/aot`).
    """
    elements = split.elements_per_lane
    registers = 16 + (7 + 2 * num_operands) * elements // 2
    if reread:
        registers = registers_with_weight(split)
        # Without the weight it computes addresses again, and spills nothing down to this number.
        least = 32 + 2 * elements + (39 if split.overlap else 0)
        most = split.registers // 8 * 8  # the hardware counts in eights
        registers = min(registers, most) if least <= most else MAX_REGISTERS_PER_LANE + 1
    return min(8, _blocks_per_sm(split, registers))


def registers_with_weight(split: RowSplit) -> int:
    """Registers of a backward that reads rows twice, and has the weight in registers."""
    return 40 + 4 * split.elements_per_lane


def _blocks_per_sm(split: RowSplit, registers: int) -> int:
    """Blocks that a multiprocessor holds at a time if a lane has so many registers."""
    if registers > MAX_REGISTERS_PER_LANE:
        return 0
    return REGISTERS_PER_SM // (-(-registers // 8) * 8 * split.lanes)


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
    """Configurations worth timing that differ in the backward alone, the most promising first."""
    itemsize, num_operands = jnp.dtype(dtype).itemsize, 3 if add else 2
    base = guess_config(_TUNED_FOR, hidden_size, dtype, add=add)
    choices = _backward_choices(_TUNED_FOR, hidden_size, itemsize, num_operands)
    choices += [choice | {"bwd_stages": 3} for choice in choices if choice["bwd_stages"] > 3]
    choices += [
        _direct_loads(split, num_operands)
        for split in splits(hidden_size, itemsize)
        if column_parts(split) and split.elements_per_lane <= _MOST_ELEMENTS
    ]
    return [dataclasses.replace(base, **choice) for choice in choices]
