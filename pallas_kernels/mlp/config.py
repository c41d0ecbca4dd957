"""Launch parameters of the SwiGLU kernels: the choices, the best measured ones, and a guess."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import tuning
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import (
    BYTES_PER_ACCESS,
    LANES,
    WARPS_PER_WARPGROUP,
    Device,
    blocks_per_sm,
)

_MAX_ACCESSES = {"fwd_accesses": 8, "bwd_accesses": 4}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Launch parameters of the `swiglu` kernels: how many elements a thread block computes.

    A block is one warpgroup, 128 lanes. Each lane makes this many loads of 16 bytes from every
    array, all of them before it uses the first.

    Attributes:
      fwd_accesses: Number of loads in the forward, which reads two arrays; 1 to 8.
      bwd_accesses: Number of loads in the backward, which reads three arrays; 1 to 4. With 4, ptxas
        for sm_90a counts 108 registers a lane for 16-bit arrays.
    """

    fwd_accesses: int
    bwd_accesses: int

    def __post_init__(self):
        for name, most in _MAX_ACCESSES.items():
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must be from 1 to {most}")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Launch parameters of the kernels of `swiglu_mlp`; None is a guess from device and sizes.

    Attributes:
      forward: Launch parameters of the GEMM of gate and up.
      backward: Launch parameters of the GEMM of `dproduct`.
    """

    forward: hopper_gemm.Config | None = None
    backward: hopper_gemm.Config | None = None


_H100 = "NVIDIA H100 80GB HBM3"

# Best of `python -m benchmarks.kernels.tune swiglu` on 2**26 elements, by device kind, dtype and
# intermediate size. The speeds are fractions of the speed of a copy of as many bytes. 2026-11-21,
# jax 0.11.2.
TUNED: dict[tuple[str, str, int], Config] = {
    (_H100, "bfloat16", 8192): Config(fwd_accesses=1, bwd_accesses=1),  # fwd 1.01, bwd 1.00
    (_H100, "bfloat16", 14336): Config(fwd_accesses=1, bwd_accesses=1),  # fwd 1.01, bwd 1.00
}


def default_config(device: Device, intermediate_size: int, dtype: DTypeLike) -> Config:
    """The launch parameters to use: the user's, or measured ones, or a guess, in this order.

    Args:
      device: Device that runs the kernels.
      intermediate_size: Size of the last axis, F.
      dtype: Dtype of `gate` and `up`.
    """
    key = device.kind, tuning.dtype_name(dtype), intermediate_size
    return tuning.lookup(Config, "swiglu", *key) or TUNED.get(key) or guess_config(device, dtype)


# Bytes that the loads of one multiprocessor should have on their way. A load takes about a
# microsecond while the memory is busy. In that time a B200 moves 54 KB for each of its
# multiprocessors, an H100 25 KB, and an L4 5 KB. That follows from the bandwidths and the numbers
# of multiprocessors in pallas_kernels/hardware.py. 70 KB are a third more than a B200 needs,
# because a lane that computes or stores has nothing on its way. With 80 KB the guess for 16-bit
# arrays was 4 accesses in the forward and 2 in the backward. On an H200 (2026-11-27, jax 0.11.2) 4
# move 0.98 of a copy in the forward, and 2 move 1.02. In the backward 2 and 1 move 1.01.
_BYTES_ON_THEIR_WAY = 70 * 1024


def guess_config(device: Device, dtype: DTypeLike) -> Config:
    """The fewest accesses with which enough bytes are on their way.

    For 16-bit arrays 2 in the forward and 1 in the backward.
    """
    vector = BYTES_PER_ACCESS // jnp.dtype(dtype).itemsize

    def fewest(field: str, num_arrays: int, registers: Callable[[int], int]) -> int:
        # Powers of two, so that tiles divide most arrays.
        for accesses in (n for n in (1, 2, 4, 8) if n <= _MAX_ACCESSES[field]):
            lanes = _lanes_per_sm(device, registers(accesses * vector))
            if lanes * num_arrays * accesses * BYTES_PER_ACCESS >= _BYTES_ON_THEIR_WAY:
                return accesses
        return _MAX_ACCESSES[field]

    # Registers by elements a lane, as ptxas counts for sm_90a: 36, 56, 79 and 105 for 8, 16, 32 and
    # 64 in the forward; 39, 63 and 108 for 8, 16 and 32 in the backward.
    return Config(
        fwd_accesses=fewest("fwd_accesses", 2, lambda elements: 28 + 8 * elements // 5),
        bwd_accesses=fewest("bwd_accesses", 3, lambda elements: 16 + 3 * elements),
    )


def _lanes_per_sm(device: Device, registers: int) -> int:
    """Lanes that a multiprocessor has at a time, in whole blocks."""
    # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
    match device.capability:
        case (8, 6 | 7 | 9) | (12, _):
            most = 1536
        case _:
            most = 2048
    lanes_per_block = WARPS_PER_WARPGROUP * LANES
    return min(most, blocks_per_sm(registers, lanes_per_block) * lanes_per_block)


def forward_candidates(dtype: DTypeLike) -> list[Config]:
    """Configurations worth timing that differ in the forward alone."""
    base = guess_config(_TUNED_FOR, dtype)
    return [dataclasses.replace(base, fwd_accesses=accesses) for accesses in (1, 2, 4, 8)]


def backward_candidates(dtype: DTypeLike) -> list[Config]:
    """Configurations worth timing that differ in the backward alone."""
    base = guess_config(_TUNED_FOR, dtype)
    return [dataclasses.replace(base, bwd_accesses=accesses) for accesses in (1, 2, 4)]


# The device for which candidates are made. It decides only what does not vary in a sweep.
_TUNED_FOR = Device("", (9, 0), 1)
