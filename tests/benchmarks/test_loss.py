"""The benchmark of the loss without a GPU: the comparisons and the files."""

import functools
import json
import re

import pytest

from benchmarks import ceilings, timing
from benchmarks.kernels import loss

XLA = ["XLA chunks", "XLA, all logits"]


@pytest.fixture
def without_gpu(monkeypatch, two_ms_a_call):
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(ceilings, "measure", lambda: "no ceilings")


def _measure(settings):
    return loss.measure((32, 64, 256), settings, with_peers=False, rounds=2)


@pytest.mark.usefixtures("without_gpu")
def test_settings_that_run_here_are_timed_and_the_others_listed():
    records = _measure(loss.SETTINGS)
    assert {r["setting"] for r in records} == {s.name for s in loss.SETTINGS}
    for record in records:
        if record["setting"] in XLA:
            assert record["median_ms"] == 2.0 and record["gemms_ms"] == 2.0
            assert record["temporary_bytes"] > 0
        else:  # kernels do not compile for a CPU
            assert "wrong result" not in record["error"]
    text = loss.table(records)
    assert "## 32x64x256, three GEMMs 2.0 ms" in text
    assert "| XLA chunks | 2.0 | 1.000 |" in text


@pytest.fixture
def right():
    return next(s for s in loss.SETTINGS if s.name == "XLA, all logits").loss


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("gradients", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_wrong_result_is_not_timed(right, gradients):
    settings = [
        loss.Setting(name, functools.partial(_scaled, right, scale), gradients=gradients)
        for name, scale in {"right": 1.0, "wrong": 1.03, "not a number": float("nan")}.items()
    ]
    wrong = {r["setting"]: r["error"] for r in _measure(settings) if "error" in r}
    assert wrong == {
        "wrong": "wrong result: relative error 3.0e-02",
        "not a number": "wrong result: relative error nan",
    }


def _scaled(fn, scale, *args):
    return fn(*args) * scale


@pytest.mark.usefixtures("without_gpu", "peers_in_jax")
def test_a_peer_with_a_wrong_gradient_is_not_timed():
    right, wrong = loss.measure((32, 64, 256), [], with_peers=True, rounds=1)
    assert right["setting"] == "right" and right["median_ms"] == 2.0
    assert right["temporary_bytes"] > 0
    assert wrong.keys() == {"shape", "setting", "error"}
    assert re.fullmatch(r"wrong result: relative error [23]\..e-02 of dweight", wrong["error"])
    assert f"| wrong | {wrong['error']} |" in loss.table([right, wrong])


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu")
def test_a_setting_gets_and_returns_weights_in_its_layout(right):
    def of_layout(x, weight, labels, weight_layout="vd"):
        return right(x, weight if weight_layout == "vd" else weight.T, labels)

    kinds = "float32", "bfloat16", "frozen"
    settings = [loss.Setting(kind, of_layout, kind) for kind in kinds]
    settings += [setting.with_layout("dv") for setting in settings]
    assert ["error" in r for r in _measure(settings)] == [False] * 6
    assert [s.name for s in settings[3:]] == [f"{kind}, weight [D, V]" for kind in kinds]


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu")
def test_measured_shapes_are_kept_if_a_later_one_fails(monkeypatch, tmp_path):
    def measure(shape, *args, original=loss.measure, **options):
        if shape == (16, 64, 128):
            raise RuntimeError("out of time")
        return original(shape, *args, **options)

    monkeypatch.setattr(loss, "measure", measure)
    arguments = ["--output-dir", str(tmp_path), "--rounds", "1", "--settings", *XLA]
    with pytest.raises(RuntimeError, match="out of time"):
        loss.main([*arguments, "--shapes", "32x64x256", "8x64x128", "16x64x128"])
    (path,) = tmp_path.glob("linear_cross_entropy_h100_*.json")
    contents = json.loads(path.read_text())
    assert [r["shape"] for r in contents["records"]] == 2 * [[32, 64, 256]] + 2 * [[8, 64, 128]]
    assert "## 8x64x128" in path.with_suffix(".md").read_text()
    assert "16x64x128" in contents["command"]
