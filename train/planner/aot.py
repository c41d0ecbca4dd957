"""Compiles for GPUs that are not in this machine, with JAX, XLA and NVIDIA's assembler.

The compilers get the description of a GPU from this module. They produce the program that the GPU
would run, with its kernels and cuDNN's attention, for one device or several. Two things differ from
a machine with the GPU: nothing runs, and XLA cannot time GEMMs, so it may choose another algorithm
for one. The memory of a 1B step compiled in this way agreed with the peak on an H100 to 0.1 GiB
with scanned layers, and to 1.1 of 33 GiB with unrolled layers.
"""

import dataclasses
import difflib
import functools
import importlib.util
import pathlib
from typing import Any

from jax.experimental import topologies

from pallas_kernels import hardware
from train.flag_errors import FlagError


@dataclasses.dataclass(frozen=True, slots=True)
class Chip:
    """The properties of a GPU that `pallas_kernels.hardware` does not have.

    Attributes:
      device_kind: `jax.Device.device_kind`, the key of its row in `pallas_kernels.hardware`.
      compute_capability: Major and minor version.
      l2_mib: Second-level cache, MiB.
      host_bandwidth: Bandwidth to the host's memory in one direction, bytes/s; 80 % of the bus's
        rate.
      link_bandwidth: Bandwidth to the other GPUs of its host in one direction, bytes/s, over NVLink
        or the bus.
    """

    device_kind: str
    compute_capability: tuple[int, int]
    l2_mib: int
    host_bandwidth: float
    link_bandwidth: float

    @property
    def limits(self) -> hardware.Hardware:
        """The row of the GPU in `pallas_kernels.hardware`."""
        limits = hardware.lookup(self.device_kind)
        assert limits is not None, f"{self.device_kind} is not in pallas_kernels/hardware.py"
        return limits

    def target_config(self) -> str:
        """XLA's description of the device, a `GpuTargetConfigProto` as text."""
        major, minor = self.compute_capability
        limits = self.limits
        # https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
        data_center = (major, minor) == (8, 0) or major in (9, 10)
        # A block may use all of a multiprocessor's shared memory except 1 KiB.
        return f"""
            gpu_device_info {{
              threads_per_block_limit: 1024
              threads_per_warp: 32
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: {limits.smem_bytes}
              shared_memory_per_core: {limits.smem_bytes + 1024}
              threads_per_core_limit: {2048 if data_center else 1536}
              core_count: {limits.num_sms}
              fpus_per_core: {64 if (major, minor) == (8, 0) else 128}
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
              memory_bandwidth: {int(limits.hbm_bandwidth)}
              l2_cache_size: {self.l2_mib << 20}
              clock_rate_ghz: 1.5
              device_memory_size: {limits.hbm_bytes}
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              registers_per_core_limit: 65536
              registers_per_block_limit: 65536
              runtime_version: "12.9.0"
            }}
            platform_name: "CUDA"
            dnn_version_info {{ major: 9 minor: 10 }}
            device_description_str: "{self.device_kind}"
        """


_PCIE4, _PCIE5, _C2C = 25e9, 50e9, 360e9

CHIPS = {
    "h100": Chip("NVIDIA H100 80GB HBM3", (9, 0), 50, _PCIE5, 450e9),
    "h100-pcie": Chip("NVIDIA H100 PCIe", (9, 0), 50, _PCIE5, _PCIE5),
    "h100-nvl": Chip("NVIDIA H100 NVL", (9, 0), 50, _PCIE5, 300e9),
    "h200": Chip("NVIDIA H200", (9, 0), 50, _PCIE5, 450e9),
    "h200-nvl": Chip("NVIDIA H200 NVL", (9, 0), 50, _PCIE5, 450e9),
    "gh200": Chip("NVIDIA GH200 480GB", (9, 0), 50, _C2C, 450e9),
    "gh200-144gb": Chip("NVIDIA GH200 144G HBM3e", (9, 0), 50, _C2C, 450e9),
    "b200": Chip("NVIDIA B200", (10, 0), 126, _PCIE5, 900e9),
    "gb200": Chip("NVIDIA GB200", (10, 0), 126, _C2C, 900e9),
    "a100": Chip("NVIDIA A100-SXM4-80GB", (8, 0), 40, _PCIE4, 300e9),
    "a100-40gb": Chip("NVIDIA A100-SXM4-40GB", (8, 0), 40, _PCIE4, 300e9),
    "a100-pcie": Chip("NVIDIA A100 80GB PCIe", (8, 0), 40, _PCIE4, _PCIE4),
    "l4": Chip("NVIDIA L4", (8, 9), 48, _PCIE4, _PCIE4),
    "l40": Chip("NVIDIA L40", (8, 9), 96, _PCIE4, _PCIE4),
    "l40s": Chip("NVIDIA L40S", (8, 9), 96, _PCIE4, _PCIE4),
    "a10": Chip("NVIDIA A10", (8, 6), 6, _PCIE4, _PCIE4),
    "a10g": Chip("NVIDIA A10G", (8, 6), 6, _PCIE4, _PCIE4),
    "a40": Chip("NVIDIA A40", (8, 6), 6, _PCIE4, _PCIE4),
    "rtx-a6000": Chip("NVIDIA RTX A6000", (8, 6), 6, _PCIE4, _PCIE4),
    "rtx-6000-ada": Chip("NVIDIA RTX 6000 Ada Generation", (8, 9), 96, _PCIE4, _PCIE4),
    "rtx-3090": Chip("NVIDIA GeForce RTX 3090", (8, 6), 6, _PCIE4, _PCIE4),
    "rtx-4090": Chip("NVIDIA GeForce RTX 4090", (8, 9), 72, _PCIE4, _PCIE4),
    "rtx-5090": Chip("NVIDIA GeForce RTX 5090", (12, 0), 96, _PCIE5, _PCIE5),
}


def chip(name: str) -> Chip:
    """The GPU called `name`: a key of `CHIPS`, or a name or device kind of `hardware`.

    Raises:
      FlagError: No GPU has that name; the message names similar ones.
    """
    for key, found in CHIPS.items():
        if name.lower().replace(" ", "-") in _names(key, found):
            return found
    close = difflib.get_close_matches(name.lower(), CHIPS, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}? There are" if close else "there are"
    raise FlagError(f"--device {name!r} is unknown; {hint} {', '.join(CHIPS)}")


def chip_of_kind(device_kind: str) -> Chip | None:
    """The GPU of a device in this machine; None if it is not in `CHIPS`."""
    return next((chip for chip in CHIPS.values() if chip.device_kind == device_kind), None)


def _names(key: str, chip: Chip) -> set[str]:
    names = (key, chip.limits.name, chip.device_kind, chip.device_kind.removeprefix("NVIDIA "))
    return {name.lower().replace(" ", "-") for name in names}


def missing_toolchain() -> str | None:
    """The package that is missing to compile for a GPU here, or None."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "JAX's CUDA 13 plugin"
    if not _in_wheels("cu13", "bin/ptxas"):
        return "NVIDIA's assembler (nvidia-cuda-nvcc)"
    if not _in_wheels("cudnn", "lib/libcudnn.so.9"):
        return "cuDNN (nvidia-cudnn-cu13)"
    return None


def _in_wheels(package: str, file: str) -> bool:
    if importlib.util.find_spec("nvidia") is None:
        return False
    spec = importlib.util.find_spec(f"nvidia.{package}")
    folders = (spec and spec.submodule_search_locations) or ()
    return any(pathlib.Path(folder, file).exists() for folder in folders)


def devices(chip: Chip, number: int) -> list[Any]:
    """`number` GPUs of one host, for compilation only.

    Set `jax_platforms` to "cpu" before the call, so that JAX does not look for real GPUs.

    Raises:
      RuntimeError: The compilers are not installed.
    """
    if missing := missing_toolchain():
        raise RuntimeError(
            f"compiling for {chip.device_kind} needs {missing}, which is not installed here. "
            "Run `make plan ARGS=...`, which installs it in an environment of its own, or "
            "`pip install -e '.[aot]'` (Linux; no GPU is needed)"
        )
    return list(_topology(chip, number).devices)


@functools.cache  # a program takes only arrays and meshes of the same device objects
def _topology(chip: Chip, number: int) -> Any:
    return topologies.get_topology_desc(
        platform="cuda", target_config=chip.target_config(), topology=f"1x1x{number}"
    )
