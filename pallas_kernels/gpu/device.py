"""The GPU that kernels are compiled for, and its limits."""

import dataclasses
from typing import Any

import jax

from pallas_kernels import hardware

WARPS_PER_WARPGROUP = 4
LANES = 32
MAX_WARPS = 32  # 1024 threads, the limit of a block
BYTES_PER_ACCESS = 16  # the widest load or store of a lane

# Limits of a multiprocessor and of a lane, on every architecture since Volta.
REGISTERS_PER_SM = 65536
MAX_REGISTERS_PER_LANE = 255


@dataclasses.dataclass(frozen=True, slots=True)
class Device:
    """The properties of a device on which launch parameters depend.

    Attributes:
      kind: Value of `jax.Device.device_kind`.
      capability: Compute capability, such as `(9, 0)`; None if the device is no NVIDIA GPU.
      num_sms: Number of streaming multiprocessors; 1 if the device is no NVIDIA GPU.
    """

    kind: str
    capability: tuple[int, int] | None
    num_sms: int

    @property
    def has_tma(self) -> bool:
        """Whether the device has a tensor memory accelerator, as Hopper and later have.

        True for a device that is no NVIDIA GPU: the kernel is interpreted there, or exported for a
        GPU that has one.
        """
        return self.capability is None or self.capability >= (9, 0)

    @property
    def has_fp8(self) -> bool:
        """Whether tensor cores multiply FP8, as those of Ada, Hopper and later do.

        True for a device that is no NVIDIA GPU: the products are emulated there.
        """
        return self.capability is None or self.capability >= (8, 9)

    @property
    def smem_bytes(self) -> int:
        """Shared memory that one thread block may ask for."""
        match self.capability:
            case None | (9 | 10 | 11, _):
                return hardware.SMEM_SM90
            case (8, 0 | 7):
                return hardware.SMEM_SM80
            case _:
                return hardware.SMEM_SM86


def blocks_per_sm(registers: int, lanes: int) -> int:
    """Blocks that a multiprocessor holds at a time; 0 if a lane cannot have so many registers.

    Args:
      registers: Number of registers of a lane.
      lanes: Number of lanes of a block.
    """
    if registers > MAX_REGISTERS_PER_LANE:
        return 0
    registers = -(-registers // 8) * 8  # the hardware hands them out in eights
    return REGISTERS_PER_SM // (registers * lanes)


def target_device() -> Device:
    """The device that Pallas compiles for: JAX's default device.

    On a machine without a GPU the kernels can still be interpreted, or exported. Their launch
    parameters are then for a GPU with one multiprocessor: right anywhere, fast nowhere. A machine
    without a GPU cannot run the kernels; `gpu_kernel` says so when they are compiled for it.
    """
    device: Any = jax.config.jax_default_device
    if device is None or isinstance(device, str):
        device = jax.devices(device)[0]
    # A CPU has no compute capability, and other makers' GPUs have no pair of numbers.
    major, dot, minor = str(getattr(device, "compute_capability", "")).partition(".")
    if not dot:
        return Device(device.device_kind, None, 1)
    return Device(device.device_kind, (int(major), int(minor)), device.core_count)


def reason_not_here() -> str | None:
    """Why no kernel can be compiled for the default device, or None if it can."""
    device = target_device()
    if device.capability is None:
        return f"the device is {device.kind!r}, not an NVIDIA GPU"
    if device.capability < (8, 0):
        return f"compute capability {device.capability} is below (8, 0), that of the A100"
    return None
