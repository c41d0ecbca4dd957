"""Launch parameters of the RMSNorm kernels: the choices, the best measured ones, and a guess."""

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import hardware, tuning
from pallas_kernels.gpu.device import (
    BYTES_PER_ACCESS,
    LANES,
    MAX_WARPS,
    WARPS_PER_WARPGROUP,
    Device,
    blocks_per_sm,
    target_device,
)
from pallas_kernels.norm.rows import (
    RowSplit,
    column_parts,
    ring_bytes,
    split_row,
    splits,
    sums_bytes,
    weight_bytes,
    widest_itemsize,
)

_MAX_BARRIERS = 32


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Launch parameters of the norms: how warps, blocks and shared memory share the rows.

    Attributes:
      fwd_warps: Number of warps that share a row in the forward: 1, or a multiple of 4 up to 32
        that divides the hidden size. With 1, a block has four warps and so four rows.
      fwd_reread: Whether the forward reads a row twice, the second time from the cache, in place of
        keeping it in registers. Fewer registers let more rows run at a time.
      bwd_warps: Number of warps that share a row in the backward, as `fwd_warps`.
      bwd_blocks: Number of thread blocks per multiprocessor in the backward. Each keeps its part of
        `dweight`, so more blocks mean more partial rows to add up.
      bwd_stages: Number of steps whose rows shared memory holds. The tensor memory accelerator
        (Hopper and later) brings them; 0 loads rows directly.
      bwd_rows: Number of rows that a block of the backward handles in one step. With one warp a
        row, it is the number of groups of four rows. With few tokens a step has fewer rows.
    """

    fwd_warps: int
    fwd_reread: bool
    bwd_warps: int
    bwd_blocks: int
    bwd_stages: int
    bwd_rows: int

    def __post_init__(self):
        for name in ("fwd_warps", "bwd_warps"):
            warps = getattr(self, name)
            if warps != 1 and (warps % WARPS_PER_WARPGROUP or not 4 <= warps <= MAX_WARPS):
                raise ValueError(f"{name}={warps} must be 1 or a multiple of 4 up to {MAX_WARPS}")
        for name in ("bwd_blocks", "bwd_rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.bwd_stages < 0 or self.bwd_stages == 1:
            raise ValueError(f"bwd_stages={self.bwd_stages} must be 0 (direct loads) or at least 2")
        if self.bwd_stages > _MAX_BARRIERS:
            raise ValueError(
                f"bwd_stages={self.bwd_stages} must be at most {_MAX_BARRIERS}, the number of "
                "barriers that Mosaic GPU has in a group; take fewer stages"
            )


def _config(*values: Any) -> Config:
    """A configuration from its fields in order."""
    names = (field.name for field in dataclasses.fields(Config))
    return Config(**dict(zip(names, values, strict=True)))


_H100 = "NVIDIA H100 80GB HBM3"
_H200 = "NVIDIA H200"

# By device kind, dtype, hidden size and whether a residual is added. The forward's part is the best
# of `python -m benchmarks.kernels.tune` on 2**26 elements (2026-11-21, jax 0.11.2). The backward's
# part is the model's choice, 0.92 to 1.02 of a copy from 2048 wide on in
# `python -m benchmarks.kernels.norm_widths` (2026-11-26). At 3072 the rows are the best of
# four, 1 to 3 % faster than the model's choice in one run. At 1600 and 5376 they are the best of
# five and six on an H100, 3 and 2 to 4 % faster in two runs. On an H200 they are the best of a
# sweep on 2**26 elements (2026-11-27), 2 to 3 % faster. At 896 (Qwen2.5 0.5B) the row is the best
# of thirteen, 10 % faster in one run.
TUNED: dict[tuple[str, str, int, bool], Config] = {
    (_H100, "bfloat16", 1024, False): _config(4, False, 4, 3, 3, 2),
    (_H100, "bfloat16", 1600, False): _config(4, False, 4, 3, 2, 2),
    (_H100, "bfloat16", 2048, False): _config(4, False, 4, 3, 3, 1),
    (_H100, "bfloat16", 2880, False): _config(4, False, 4, 3, 2, 1),
    (_H100, "bfloat16", 3072, False): _config(4, False, 8, 2, 3, 1),
    (_H100, "bfloat16", 4096, False): _config(4, False, 8, 2, 2, 1),
    (_H100, "bfloat16", 5120, False): _config(8, False, 20, 1, 3, 1),
    (_H100, "bfloat16", 5376, False): _config(4, False, 12, 1, 2, 2),
    (_H100, "bfloat16", 8192, False): _config(8, False, 16, 1, 2, 1),
    (_H100, "bfloat16", 16384, False): _config(4, False, 16, 1, 2, 1),
    (_H100, "bfloat16", 1024, True): _config(4, False, 4, 3, 2, 2),
    (_H100, "bfloat16", 2048, True): _config(4, False, 4, 3, 2, 1),
    (_H100, "bfloat16", 2880, True): _config(4, False, 4, 3, 2, 1),
    (_H100, "bfloat16", 3072, True): _config(4, False, 8, 2, 2, 1),
    (_H100, "bfloat16", 4096, True): _config(16, False, 8, 2, 2, 1),
    (_H100, "bfloat16", 5120, True): _config(8, False, 20, 1, 2, 1),
    (_H100, "bfloat16", 8192, True): _config(16, False, 16, 1, 2, 1),
    (_H100, "bfloat16", 16384, True): _config(16, False, 16, 1, 2, 1),
    (_H200, "bfloat16", 1024, False): _config(1, False, 4, 3, 2, 4),
    (_H200, "bfloat16", 1600, False): _config(1, False, 4, 4, 2, 2),
    (_H200, "bfloat16", 2048, False): _config(4, False, 4, 3, 2, 2),
    (_H200, "bfloat16", 4096, False): _config(4, False, 8, 2, 3, 1),
    (_H200, "bfloat16", 5120, False): _config(4, False, 20, 1, 3, 2),
    (_H200, "bfloat16", 5376, False): _config(4, False, 12, 1, 4, 2),
    (_H200, "bfloat16", 8192, False): _config(8, False, 16, 1, 3, 1),
    (_H200, "bfloat16", 16384, False): _config(4, False, 16, 1, 2, 1),
    (_H200, "bfloat16", 896, True): _config(1, False, 4, 5, 2, 2),
    (_H200, "bfloat16", 1024, True): _config(4, False, 4, 3, 3, 2),
    (_H200, "bfloat16", 2048, True): _config(4, False, 4, 3, 3, 1),
    (_H200, "bfloat16", 3072, True): _config(4, False, 8, 2, 3, 1),
    (_H200, "bfloat16", 4096, True): _config(16, False, 8, 2, 2, 1),
    (_H200, "bfloat16", 5120, True): _config(4, False, 20, 1, 2, 2),
    (_H200, "bfloat16", 8192, True): _config(16, False, 16, 1, 2, 1),
    (_H200, "bfloat16", 16384, True): _config(4, False, 16, 1, 2, 1),
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


def config_of(x: jax.Array, residual: jax.Array | None) -> Config:
    """The launch parameters to use for these arrays on the default device.

    A row of `TUNED` is for a residual in the dtype of `x`. Where the row does not fit a wider
    residual, the guess does.
    """
    key = target_device(), x.shape[-1], x.dtype
    config = default_config(*key, add=residual is not None)
    if split_row(x.shape[-1], config.fwd_warps, widest_itemsize(x, residual)) is None:
        return guess_config(*key, add=residual is not None)
    return config


def guess_config(device: Device, hidden_size: int, dtype: DTypeLike, *, add: bool) -> Config:
    """Launch parameters derived from registers and shared memory, for sizes without a figure."""
    itemsize = jnp.dtype(dtype).itemsize
    fwd = _forward_split(splits(hidden_size, itemsize), add=add)
    return Config(
        fwd_warps=fwd.warps,
        fwd_reread=20 + 7 * fwd.elements_per_lane // 4 > fwd.registers,
        **_backward_choices(device, hidden_size, itemsize, 3 if add else 2)[0],
    )


# Most elements of a lane in the forward: with one warp a row, with several, and with a residual.
# Many elements a lane are fast: on an H200, 16384 with 4 warps of 128 elements a lane runs at 0.97
# of a copy, and 13312 with 16 warps of 26 at 0.61. The reason: two blocks of four warps have twice
# as many bytes on their way. With a residual more bytes are on their way already. The residual may
# be float32, and 64 elements are 16 accesses of float32.
_MOST_ALONE, _MOST_SHARED, _MOST_WITH_RESIDUAL = 36, 128, 64


def _forward_split(candidates: list[RowSplit], *, add: bool) -> RowSplit:
    """The widest accesses, then the fewest warps whose lanes do not have too many elements."""
    most = _MOST_WITH_RESIDUAL if add else _MOST_SHARED
    few = [
        split
        for split in candidates
        if split.elements_per_lane <= (_MOST_ALONE if split.warps == 1 else most)
    ]
    return _widest(few)[0] if few else candidates[-1]


def _direct_split(candidates: list[RowSplit]) -> RowSplit:
    """For a backward that loads rows directly, in as many parts of the columns as a split needs.

    At most 32 elements a lane if possible, then the widest accesses, then the fewest warps.
    """
    elements = {s: s.elements_per_lane // n for s in candidates if (n := column_parts(s))}
    few = [s for s, number in elements.items() if number <= _MOST_ELEMENTS]
    return _widest(few)[0] if few else min(elements, key=lambda split: elements[split])


def _widest(candidates: list[RowSplit]) -> list[RowSplit]:
    """The candidates with the widest accesses."""
    vector = max(split.vector for split in candidates)
    return [split for split in candidates if split.vector == vector]


# Seconds for which a step should keep the memory busy. In a step, the blocks of a multiprocessor
# read and write at least the bytes that the memory moves for it in this time. The reason: they
# compute nothing while they wait for sums and barriers. As many bytes should be on their way at the
# same time, because a copy takes about a microsecond. With more bytes, the memory is slower:
# 16384 x 3072 on an H100 is at 0.91 of a copy with 110 KB in shared memory, and at 0.97 with 74 KB.
# With fewer bytes, it is idle: 16384 x 1536 on an H200 is at 0.81 with 55 KB, and at 0.91 with
# 74 KB.
_SECONDS_OF_A_STEP = 1.15e-6
# Fewest warps of a multiprocessor. 16384 x 2048 on an H200 is at 0.85 of a copy with 8 of them,
# and at 0.92 with 12.
_FEWEST_WARPS = 12
# Most elements of a lane, where a split allows it, and most steps in shared memory, always.
_MOST_ELEMENTS, _MOST_STAGES = 32, 4


def _backward_choices(
    device: Device, hidden_size: int, itemsize: int, num_operands: int
) -> list[dict[str, Any]]:
    """The backward's part of `Config`: all that fits the device, the most promising first.

    The tensor memory accelerator brings rows wherever it can. The criteria, the first one first:

    1. At most `_MOST_ELEMENTS` elements a lane, or as few as possible.
    2. Enough bytes on their way.
    3. Enough warps.
    4. Few accesses to a row, in halves of the fewest possible number.
    5. Enough bytes that a step reads and writes, or as many as possible.
    6. Few warps.
    7. Many blocks, because blocks need not wait for each other.
    8. Few bytes on their way: few rows in a step, then few steps.
    """
    ranks, widest = {}, BYTES_PER_ACCESS // itemsize
    # The rates of an H200 for a device that is not in the table.
    limits = hardware.known(device.kind) or hardware.known("H200")
    assert limits is not None
    enough = _SECONDS_OF_A_STEP * limits.hbm_bandwidth / limits.num_sms
    for split, rows in itertools.product(splits(hidden_size, itemsize), (1, 2, 4, 8)):
        is_aligned = split.segment * itemsize % BYTES_PER_ACCESS == 0
        if column_parts(split) != 1 or not device.has_tma or not is_aligned:
            continue
        step_bytes = ring_bytes(split, 1, num_operands, rows, itemsize)
        for blocks in range(1, _most_blocks(split, rows) + 1):
            most_stages = _most_stages(device, split, itemsize, num_operands, rows, blocks)
            for stages in range(2, most_stages + 1):
                ranks[split.warps, blocks, stages, rows] = (
                    max(split.elements_per_lane, _MOST_ELEMENTS),
                    blocks * (stages - 1) * step_bytes < enough,
                    blocks * split.lanes // LANES < _FEWEST_WARPS,
                    round(2 * split.warps * len(split.chunks) * LANES * widest / hidden_size),
                    -min(blocks * (step_bytes + step_bytes // num_operands), enough),
                    blocks * split.lanes,
                    -blocks,
                    rows,
                    stages,
                )
    return [_backward(*key) for key in sorted(ranks, key=lambda key: ranks[key])] or [
        _direct_loads(_direct_split(splits(hidden_size, itemsize)), num_operands)
    ]


def _direct_loads(split: RowSplit, num_operands: int) -> dict[str, Any]:
    """The backward's part of `Config` without the tensor memory accelerator."""
    if column_parts(split) != 1:
        return _backward(split.warps, 1, 0, 1)
    kept = blocks_per_sm(_registers_with_rows(split, num_operands), split.lanes)
    return _backward(split.warps, min(8, kept or _most_blocks(split, 1) or 1), 0, 1)


def _backward(warps: int, blocks: int, stages: int, rows: int) -> dict[str, Any]:
    """The backward's part of `Config`."""
    return {"bwd_warps": warps, "bwd_blocks": blocks, "bwd_stages": stages, "bwd_rows": rows}


def _most_stages(
    device: Device, split: RowSplit, itemsize: int, num_operands: int, rows: int, blocks: int
) -> int:
    """Steps whose rows each of so many blocks has in shared memory."""
    available = smem_for_rows(device, split, num_operands, blocks)
    if not keeps_weight(split):
        available -= weight_bytes(split, itemsize)
    return min(_MOST_STAGES, available // ring_bytes(split, 1, num_operands, rows, itemsize))


def smem_for_rows(device: Device, split: RowSplit, num_operands: int, blocks: int) -> int:
    """Bytes of shared memory that each of `blocks` blocks has for rows and the weight."""
    # Barriers take less than 1024 bytes, and so do the sums of rows. The driver takes 1024 for each
    # block. Each buffer of rows may lose up to 1024, because it begins at a multiple of 1024.
    other = 1024 * (len(split.widths) + 3)
    if split.warps == 1:  # the sums of `dweight` of four warps
        other += sums_bytes(split)
    return (device.smem_bytes + 1024) // blocks - other


def _most_blocks(split: RowSplit, rows: int) -> int:
    """Blocks of the backward, up to 8, whose registers a multiprocessor has.

    The registers are those that ptxas counts for sm_90a (`tests/aot`).
    """
    # A kernel that does not keep the weight spills nothing with this number or more, because it
    # computes addresses again.
    least = 32 + 2 * split.elements_per_lane + (39 if split.overlap else 0)
    most = split.registers // 8 * 8  # the hardware counts in eights
    elements = split.elements_per_lane
    registers = 40 + 5 * elements if rows == 1 else 32 + (2 + 2 * rows) * elements
    registers = min(registers, most)
    return min(8, blocks_per_sm(registers, split.lanes)) if least <= most else 0


def keeps_weight(split: RowSplit) -> bool:
    """Whether a lane's part of the weight fits registers."""
    return 40 + 4 * split.elements_per_lane <= split.registers


def _registers_with_rows(split: RowSplit, num_operands: int) -> int:
    """Registers of a backward that keeps a row in registers."""
    return 16 + (7 + 2 * num_operands) * split.elements_per_lane // 2


def keeps_rows(split: RowSplit, num_operands: int) -> bool:
    """Whether a row that is loaded directly fits registers, so that it is read once."""
    return blocks_per_sm(_registers_with_rows(split, num_operands), split.lanes) > 0


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
    choices += [
        _direct_loads(split, num_operands)
        for split in splits(hidden_size, itemsize)
        if column_parts(split) and split.elements_per_lane <= _MOST_ELEMENTS
    ]
    return [dataclasses.replace(base, **choice) for choice in choices]
