"""The target of a plan: devices, in this machine or not, and the memory of a step on each.

The limit is the memory that XLA may allocate, less 5 %. XLA takes 75 % of a GPU's memory unless
`XLA_CLIENT_MEM_FRACTION` (or `XLA_PYTHON_CLIENT_MEM_FRACTION`) sets another share. A step that
needs more than XLA's share fails, whatever memory the card has. A device in this machine reports
what its allocator may take. The 5 % are for batches that wait, for fragmented memory, and for
differences between compiling here and there. CUDA's context and the libraries are outside of XLA's
share.
"""

import dataclasses
import os

import jax
from jax.sharding import Mesh

from pallas_kernels import hardware
from train.planner import aot, cost

MARGIN = 0.05
DEFAULT_FRACTION = 0.75
_GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """The devices of a plan.

    Attributes:
      mesh: Mesh of devices in this machine, or of `train.planner.aot.devices`.
      device_kind: JAX's name for each device.
      pool_bytes: Memory that XLA may allocate on each device.
      pool: Origin of `pool_bytes`, in words.
      is_share: Whether `pool_bytes` is the share that `XLA_CLIENT_MEM_FRACTION` sets.
      rates: Speeds of each device.
      description: Everything that changes the compiled program, for the key of the cache.
    """

    mesh: Mesh
    device_kind: str
    pool_bytes: int
    pool: str
    is_share: bool
    rates: cost.Rates
    description: str

    @property
    def limit_bytes(self) -> int:
        """The memory that a step may take on each device."""
        return int(self.pool_bytes * (1 - MARGIN))


def memory_fraction() -> float:
    """The share of a GPU's memory that XLA takes, from the environment.

    Raises:
      ValueError: The variable is not a number above 0 and at most 1.
    """
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return 1.0
    names = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    for name in names:
        if text := os.environ.get(name):
            try:
                fraction = float(text)
            except ValueError:
                raise ValueError(
                    f"{name}={text!r} is not a number; set the share of a GPU's memory, as in 0.92"
                ) from None
            if not 0 < fraction <= 1:  # or NaN
                raise ValueError(f"{name}={text!r} must be above 0 and at most 1, as in 0.92")
            return fraction
    return DEFAULT_FRACTION


def target_here(mesh: Mesh, memory_bytes: int | None = None) -> Target:
    """The target for devices in this machine; `memory_bytes` replaces the memory they have."""
    device = mesh.local_mesh.devices.flat[0]  # a device of another process reports no memory
    reported = (device.memory_stats() or {}).get("bytes_limit")
    if memory_bytes is not None:
        pool_bytes, pool = _pool(memory_bytes)
    elif reported:
        pool_bytes, pool = reported, "the share that XLA's allocator may take here"
    else:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        pool_bytes = physical // jax.local_device_count()
        pool = "each device's share of this machine's memory"
    return Target(
        mesh=mesh,
        device_kind=device.device_kind,
        pool_bytes=pool_bytes,
        pool=pool,
        is_share=memory_bytes is not None or bool(reported),
        rates=_rates(hardware.lookup(device.device_kind), aot.chip_of_kind(device.device_kind)),
        description=f"{device.device_kind} {device.client.platform_version}",
    )


def target_elsewhere(chip: aot.Chip, mesh: Mesh, memory_bytes: int | None = None) -> Target:
    """The target for a mesh of `aot.devices`; `memory_bytes` replaces the memory they have."""
    pool_bytes, pool = _pool(chip.limits.hbm_bytes if memory_bytes is None else memory_bytes)
    return Target(
        mesh=mesh,
        device_kind=chip.device_kind,
        pool_bytes=pool_bytes,
        pool=pool,
        is_share=True,
        rates=_rates(chip.limits, chip),
        description=chip.target_config(),
    )


def _pool(memory_bytes: int) -> tuple[int, str]:
    fraction = memory_fraction()
    pool = f"XLA's {fraction:.0%} of {memory_bytes / _GIB:.1f} GiB"
    return int(memory_bytes * fraction), pool


def _rates(limits: hardware.Hardware | None, chip: aot.Chip | None) -> cost.Rates:
    """The speeds of a device. Unknown ones are an A100's, which only put programs in order."""
    return cost.Rates(
        flops=limits.bf16_flops if limits else 312e12,
        bandwidth=limits.hbm_bandwidth if limits else 2e12,
        host_bandwidth=chip.host_bandwidth if chip else 25e9,  # PCIe 4.0 x16, 80 % of 31.5 GB/s
        link_bandwidth=chip.link_bandwidth if chip else 0.0,
        known=limits is not None,
    )
