"""The peak rates of GPUs: the denominators of MFU and of every bandwidth fraction we report.

Rates are the vendor's *dense* ones with float32 accumulation. Datasheets print the rate with 2:4
sparsity in large type, twice what a matmul can reach, and for GeForce cards also the rate with
float16 accumulation. A device that is not in the table has no peak here: guessing one from a
similar name gives a wrong figure that looks like a measurement.
"""

import dataclasses
import functools
import warnings

# Shared memory one thread block may ask for, by compute capability:
# https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
SMEM_SM80 = 163 * 1024
SMEM_SM86 = 99 * 1024  # also sm_89 and sm_120
SMEM_SM90 = 227 * 1024  # also sm_100

_GIB = 2**30

_AMPERE = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/"
    "nvidia-ampere-architecture-whitepaper.pdf"
)
_A100_80GB = (
    "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
    "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
)
_H100 = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-tensor-core-gpu-datasheet"
_HOPPER = "https://resources.nvidia.com/en-us-hopper-architecture/nvidia-h100-tensor-c"
_H200 = "https://www.nvidia.com/en-us/data-center/h200/"
_GH200 = "https://resources.nvidia.com/en-us-grace-cpu/grace-hopper-superchip"
_B200 = "https://resources.nvidia.com/en-us-dgx-systems/dgx-b200-datasheet"
_GB200 = "https://www.nvidia.com/en-us/data-center/gb200-nvl72/"
_L4 = "https://www.nvidia.com/en-us/data-center/l4/"
_L40 = "https://www.nvidia.com/en-us/data-center/l40/"
_L40S = "https://www.nvidia.com/en-us/data-center/l40s/"
_A10 = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a10/pdf/a10-datasheet.pdf"
_A10G = (
    "https://d1.awsstatic.com/product-marketing/ec2/NVIDIA_AWS_A10G_DataSheet_FINAL_02_17_2022.pdf"
)
_A40 = "https://images.nvidia.com/content/Solutions/data-center/a40/nvidia-a40-datasheet.pdf"
_GA102 = (
    "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf"
)
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
_BLACKWELL = (
    "https://images.nvidia.com/aem-dam/Solutions/geforce/blackwell/"
    "nvidia-rtx-blackwell-gpu-architecture.pdf"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Hardware:
    """Limits of one device.

    Attributes:
      name: Name of the device in tables.
      bf16_flops: Rate of dense bfloat16 matmuls with float32 accumulation, FLOP/s.
      hbm_bandwidth: Bandwidth of device memory, bytes/s.
      hbm_bytes: Device memory as sold (NVIDIA's GB are GiB); the driver reports a little less.
      num_sms: Number of streaming multiprocessors.
      smem_bytes: Shared memory that one thread block may ask for.
      source: Page that publishes rate, bandwidth and size.
    """

    name: str
    bf16_flops: float
    hbm_bandwidth: float
    hbm_bytes: int
    num_sms: int
    smem_bytes: int
    source: str


# One row per `jax.Device.device_kind`, without the leading "NVIDIA " and "GeForce ". The whole
# name must match, not a part of it: "A10" is in "A100", "H200" in "GH200", "L4" in "L40S", and
# "RTX 4090 Laptop GPU" or "H100 80GB HBM3 MIG 1g.10gb" are different, slower devices.
# If a datasheet has only the rate with sparsity, the row has half of it. SM counts of A100, H100,
# H200, B200 and GB200 are from XLA's descriptions of these devices
# (github.com/openxla/xla, xla/backends/gpu/target_config/specs).
_TABLE: tuple[tuple[str, Hardware], ...] = tuple(
    (device_kind, Hardware(name, flops, bandwidth, size * _GIB, num_sms, smem, source))
    for device_kind, name, flops, bandwidth, size, num_sms, smem, source in (
        ("A100-SXM4-40GB", "A100 SXM 40GB", 312e12, 1555e9, 40, 108, SMEM_SM80, _AMPERE),
        ("A100-PCIE-40GB", "A100 PCIe 40GB", 312e12, 1555e9, 40, 108, SMEM_SM80, _AMPERE),
        ("A100-SXM4-80GB", "A100 SXM 80GB", 312e12, 2039e9, 80, 108, SMEM_SM80, _A100_80GB),
        ("A100 80GB PCIe", "A100 PCIe 80GB", 312e12, 1935e9, 80, 108, SMEM_SM80, _A100_80GB),
        ("H100 80GB HBM3", "H100 SXM", 989.4e12, 3352e9, 80, 132, SMEM_SM90, _H100),
        ("H100 PCIe", "H100 PCIe", 756e12, 2039e9, 80, 114, SMEM_SM90, _HOPPER),
        ("H100 NVL", "H100 NVL", 835.5e12, 3.9e12, 94, 132, SMEM_SM90, _H100),
        ("H200", "H200 SXM", 989.4e12, 4.8e12, 141, 132, SMEM_SM90, _H200),
        ("H200 141GB HBM3e", "H200 SXM", 989.4e12, 4.8e12, 141, 132, SMEM_SM90, _H200),
        ("H200 NVL", "H200 NVL", 835.5e12, 4.8e12, 141, 132, SMEM_SM90, _H200),
        # 120GB and 480GB are the processor's memory; the GPU beside it has 96 GB in both.
        ("GH200 120GB", "GH200 96GB", 989.4e12, 4.0e12, 96, 132, SMEM_SM90, _GH200),
        ("GH200 480GB", "GH200 96GB", 989.4e12, 4.0e12, 96, 132, SMEM_SM90, _GH200),
        ("GH200 144G HBM3e", "GH200 144GB", 989.4e12, 4.9e12, 144, 132, SMEM_SM90, _GH200),
        ("B200", "B200", 2250e12, 8.0e12, 180, 148, SMEM_SM90, _B200),
        ("GB200", "GB200", 2500e12, 8.0e12, 186, 152, SMEM_SM90, _GB200),
        ("L4", "L4", 121e12, 300e9, 24, 58, SMEM_SM86, _L4),
        ("L40", "L40", 181e12, 864e9, 48, 142, SMEM_SM86, _L40),
        ("L40S", "L40S", 362e12, 864e9, 48, 142, SMEM_SM86, _L40S),
        ("A10", "A10", 125e12, 600e9, 24, 72, SMEM_SM86, _A10),
        ("A10G", "A10G", 70e12, 600e9, 24, 80, SMEM_SM86, _A10G),
        ("A40", "A40", 149.7e12, 696e9, 48, 84, SMEM_SM86, _A40),
        ("RTX A6000", "RTX A6000", 154.8e12, 768e9, 48, 84, SMEM_SM86, _GA102),
        ("RTX 3090", "RTX 3090", 71e12, 936e9, 24, 82, SMEM_SM86, _GA102),
        ("RTX 4090", "RTX 4090", 165.2e12, 1008e9, 24, 128, SMEM_SM86, _ADA),
        ("RTX 6000 Ada Generation", "RTX 6000 Ada", 364.2e12, 960e9, 48, 142, SMEM_SM86, _ADA),
        ("RTX 5090", "RTX 5090", 209.5e12, 1792e9, 32, 170, SMEM_SM86, _BLACKWELL),
    )
)


@functools.cache  # so that an unknown device warns once, not once per step
def lookup(device_kind: str) -> Hardware | None:
    """The limits of a device, by `jax.Device.device_kind`.

    A CPU gives None silently: it has no figure worth quoting. Any other device outside the table
    gives None and a warning.
    """
    found = known(device_kind)
    if found is None and device_kind != "cpu":
        warnings.warn(
            f"no peak rates are known for {device_kind=}, so MFU and bandwidth fractions are left "
            "out; add a row with its datasheet to pallas_kernels/hardware.py",
            stacklevel=2,
        )
    return found


def known(device_kind: str) -> Hardware | None:
    """The limits of a device in the table, and None, without a warning, of any other."""
    name = device_kind.removeprefix("NVIDIA ").removeprefix("GeForce ")
    return dict(_TABLE).get(name)
