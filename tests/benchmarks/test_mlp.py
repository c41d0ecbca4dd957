"""The benchmark of the gated MLP without a GPU: the comparisons and the tables."""

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


def test_a_wrong_result_is_not_timed(two_ms_a_call):
    part = mlp.parts((32, 128, 256), sweep=False)[0]
    right = part.ways[0].fn
    wrong = mlp.Way("wrong", lambda *arrays: tuple(a * 1.03 for a in right(*arrays)))
    found = mlp.measure(mlp.Part(part.name, part.inputs, part.gemms, [part.ways[0], wrong]), 2)
    assert "wrong result: relative error 3." in found["ways"][1]["error"]


def test_sweep_has_the_default_once_and_fits_the_kernel():
    for make in (gated_matmul.default_config, gated_matmul.default_backward_config):
        base = make(8192, 14336, 4096, H100)
        assert list(mlp.variants(base, sweep=False)) == [("", base)]
        names, configs = zip(*mlp.variants(base, sweep=True), strict=True)
        assert configs.count(base) == 1 and len(set(names)) == len(names) == 7
        assert {config.cluster for config in configs} == {1, 2}
