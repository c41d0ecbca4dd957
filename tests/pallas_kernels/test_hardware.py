import warnings

import pytest

from pallas_kernels import hardware
from pallas_kernels.hardware import lookup


@pytest.fixture(autouse=True)
def _forget_lookups():
    lookup.cache_clear()


# (device kind, name, dense bf16 FLOP/s, bytes/s, SMs). Every pair of neighbours is a trap for
# substring matching.
KNOWN = [
    ("NVIDIA H100 80GB HBM3", "H100 SXM", 989.4e12, 3352e9, 132),
    ("NVIDIA H100 PCIe", "H100 PCIe", 756e12, 2039e9, 114),
    ("NVIDIA H100 NVL", "H100 NVL", 835.5e12, 3900e9, 132),
    ("NVIDIA H200", "H200 SXM", 989.4e12, 4800e9, 132),
    ("NVIDIA H200 NVL", "H200 NVL", 835.5e12, 4800e9, 132),
    ("NVIDIA GH200 480GB", "GH200 96GB", 989.4e12, 4000e9, 132),
    ("NVIDIA GH200 144G HBM3e", "GH200 144GB", 989.4e12, 4900e9, 132),
    ("NVIDIA B200", "B200", 2250e12, 8000e9, 148),
    ("NVIDIA GB200", "GB200", 2500e12, 8000e9, 152),
    ("NVIDIA A100-SXM4-40GB", "A100 SXM 40GB", 312e12, 1555e9, 108),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM 80GB", 312e12, 2039e9, 108),
    ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB", 312e12, 1935e9, 108),
    ("NVIDIA A10", "A10", 125e12, 600e9, 72),
    ("NVIDIA A10G", "A10G", 70e12, 600e9, 80),
    ("NVIDIA L4", "L4", 121e12, 300e9, 58),
    ("NVIDIA L40", "L40", 181e12, 864e9, 142),
    ("NVIDIA L40S", "L40S", 362e12, 864e9, 142),
    ("NVIDIA GeForce RTX 3090", "RTX 3090", 71e12, 936e9, 82),
    ("NVIDIA GeForce RTX 4090", "RTX 4090", 165.2e12, 1008e9, 128),
    ("NVIDIA GeForce RTX 5090", "RTX 5090", 209.5e12, 1792e9, 170),
    ("A100-SXM4-80GB", "A100 SXM 80GB", 312e12, 2039e9, 108),  # as old drivers name it
]


@pytest.mark.parametrize("kind, name, flops, bandwidth, num_sms", KNOWN, ids=lambda x: str(x))
def test_known_devices(kind, name, flops, bandwidth, num_sms):
    found = lookup(kind)
    assert found is not None
    assert (found.name, found.bf16_flops, found.hbm_bandwidth, found.num_sms) == (
        name,
        flops,
        bandwidth,
        num_sms,
    )


@pytest.mark.parametrize(
    "kind",
    [
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",  # a seventh of the device
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA RTX A1000",  # contains "A10"
        "NVIDIA H20",
        "NVIDIA H100",
        "Tesla V100-SXM2-16GB",
        "TPU v5e",
        "",
    ],
)
def test_a_device_outside_the_table_is_never_guessed(kind):
    with pytest.warns(UserWarning, match=r"add a row .* to pallas_kernels/hardware\.py"):
        assert lookup(kind) is None


def test_an_unknown_device_warns_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [lookup("NVIDIA X1"), lookup("NVIDIA X1"), lookup("NVIDIA X2")] == [None] * 3
    assert [str(w.message).split("'")[1] for w in caught] == ["NVIDIA X1", "NVIDIA X2"]


def test_cpu_has_no_peak_and_no_warning():
    assert lookup("cpu") is None  # warnings are errors in this suite


@pytest.mark.parametrize("kind, row", hardware._TABLE, ids=lambda x: x if type(x) is str else "")
def test_rows_are_plausible(kind, row):
    assert lookup(f"NVIDIA {kind}") is row
    assert row.source.startswith("https://")
    assert 60e12 < row.bf16_flops < 2600e12
    assert 300e9 <= row.hbm_bandwidth <= 8e12
    assert 24 * 2**30 <= row.hbm_bytes < 200 * 2**30
    # The CUDA driver reports these as sharedMemPerBlockOptin for sm_80, sm_86/89/120, sm_90/100.
    assert row.smem_bytes in {166912, 101376, 232448}
    # GB200 has the most dense bf16 per SM, 16.4 TFLOP/s: a row above it took the sparse rate.
    assert row.bf16_flops / row.num_sms < 17e12


def test_device_kinds_are_unique():
    kinds = [kind for kind, _ in hardware._TABLE]
    assert len(set(kinds)) == len(kinds)
