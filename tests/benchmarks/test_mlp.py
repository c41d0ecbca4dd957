"""The benchmark of the gated MLP without a GPU: the comparisons and the tables."""

import functools

import pytest

from benchmarks.kernels import mlp
from pallas_kernels.gpu.device import Device
from pallas_kernels.mlp import gated_matmul

H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)


@pytest.fixture
def records(two_ms_a_call):
    shape = (32, 128, 256)
    return [{"shape": shape} | mlp.measure(part, 2) for part in mlp.parts(shape, sweep=False)]


@pytest.mark.full
def test_ways_that_run_here_agree_and_the_others_are_listed(records):
    assert [record["part"] for record in records] == ["projections", "gradients", "mlp"]
    for record in records:
        timed = {way["name"] for way in record["ways"] if "error" not in way}
        failed = {way["name"]: way["error"] for way in record["ways"] if "error" in way}
        # Kernels do not compile for a CPU. All other ways agree.
        assert all("kernel" in name or "mosaic_gpu" in name for name in failed), failed
        assert not any("wrong result" in error for error in failed.values())
        assert timed and not any("kernel" in name for name in timed)
    text = mlp.table(records)
    assert "## 32x128x256, mlp: GEMMs 2.000 ms" in text
    assert "| xla, save=x | 2.000 | 1.000 |" in text
    assert mlp.summary(records).splitlines()[-1] == (
        "| 32x128x256 | - (1.000) | - (1.000) | - (1.000) |"
    )


def test_the_summary_has_a_row_for_each_shape():
    way = lambda name, ms: {"name": name, "median_ms": ms}
    records = [
        {"shape": [64, 128, 256], "part": "mlp", "gemms_ms": 4.0}
        | {"ways": [way("mosaic_gpu, save=gate_up", 5.0), way("xla, save=gate_up", 6.0)]},
        {"shape": [64, 128, 512], "part": "gradients", "gemms_ms": 2.0}
        | {"ways": [way("kernel", 3.0), {"name": "XLA", "error": "does not fit"}]},
    ]
    assert mlp.summary(records).splitlines()[-2:] == [
        "| 64x128x256 | - (-) | - (-) | 1.250 (1.500) |",
        "| 64x128x512 | - (-) | 1.500 (-) | - (-) |",
    ]


def test_a_wrong_result_is_not_timed(two_ms_a_call):
    part = mlp.parts((32, 128, 256), sweep=False)[0]
    right = next(iter(part.ways.values()))
    wrong = lambda *arrays: tuple(a * 1.03 for a in right(*arrays))
    ways = {"right": right, "wrong": wrong}
    found = mlp.measure(mlp.Part(part.name, part.inputs, part.gemms, ways), 2)
    assert "wrong result: relative error 3." in found["ways"][1]["error"]


def test_sweep_has_the_default_once_and_fits_the_kernel():
    of_forward = functools.partial(gated_matmul.default_config, keep=True)
    for make in (of_forward, gated_matmul.default_backward_config):
        base = make(8192, 14336, 4096, H100)
        assert list(mlp.variants(base, sweep=False)) == [("", base)]
        names, configs = zip(*mlp.variants(base, sweep=True), strict=True)
        assert configs.count(base) == 1 and len(set(names)) == len(names) == 7
        assert {config.cluster for config in configs} == {1, 2}
