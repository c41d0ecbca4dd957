"""The benchmark of the distillation losses without a GPU: the comparisons and the files."""

import dataclasses
import json
import re

import pytest

from benchmarks import ceilings, timing
from benchmarks.kernels import distillation

SHAPE = (32, 64, 96, 256)


@pytest.fixture
def without_gpu(monkeypatch, two_ms_a_call):
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(ceilings, "measure", lambda: "no ceilings")


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu")
@pytest.mark.parametrize("number", [2, pytest.param(None, id="all")])
def test_settings_agree_with_their_formulas_and_are_timed(tmp_path, capsys, monkeypatch, number):
    monkeypatch.setattr(distillation, "SETTINGS", distillation.SETTINGS[:number])
    distillation.main(["--shapes", "32x64x96x256", "--rounds", "2", "--output-dir", str(tmp_path)])
    (path,) = tmp_path.glob("distillation_h100_*.json")
    records = json.loads(path.read_text())["records"]
    assert [r["setting"] for r in records] == [s.name for s in distillation.SETTINGS]
    for record, setting in zip(records, distillation.SETTINGS, strict=True):
        assert "error" not in record, record
        assert record["num_products"] == 4 - setting.of_top_k - 2 * (not setting.gradients)
        assert record["over_products"] == 1.0
    assert "| forward KL | 2.0 | 4: 2.0 ms | 1.000 |" in capsys.readouterr().out


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu")
def test_a_wrong_result_is_not_timed():
    right = distillation.SETTINGS[0]
    wrong = dataclasses.replace(right, name="wrong", loss=lambda *args: 1.03 * right.loss(*args))
    records = distillation.measure(SHAPE, [right, wrong], rounds=2)
    assert "error" not in records[0]
    assert records[1]["error"] == "wrong result: relative error 3.0e-02"


@pytest.mark.usefixtures("without_gpu")
def test_a_shape_has_four_sizes():
    with pytest.raises(SystemExit):
        distillation.main(["--shapes", "32x64x96"])


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu", "peers_in_jax")
def test_peers_are_compared_with_the_same_results():
    """2 s."""
    records = distillation.measure(SHAPE, distillation.SETTINGS[:1], with_peers=True, rounds=1)
    of_setting, right, wrong = records
    assert of_setting["setting"] == distillation.SETTINGS[0].name
    assert right["setting"] == "right, Jensen-Shannon" and right["over_products"] == 1.0
    assert re.fullmatch(r"wrong result: relative error [23]\..e-02 of dweight", wrong["error"])
