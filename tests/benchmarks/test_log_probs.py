"""The benchmark of log-probabilities without a GPU: the comparisons and the files."""

import dataclasses
import json
import re

import pytest

from benchmarks import ceilings, timing
from benchmarks.kernels import log_probs


@pytest.fixture
def without_gpu(monkeypatch, two_ms_a_call):
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(ceilings, "measure", lambda: "no ceilings")


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu")
def test_settings_that_run_here_are_timed_and_the_others_listed(tmp_path, capsys):
    log_probs.main(["--shapes", "32x64x256", "--rounds", "2", "--output-dir", str(tmp_path)])
    (path,) = tmp_path.glob("log_probs_h100_*.json")
    records = json.loads(path.read_text())["records"]
    assert [r["setting"] for r in records] == [s.name for s in log_probs.SETTINGS]
    for record in records:
        if record["setting"].startswith("XLA"):
            assert record["median_ms"] == 2.0 and record["temporary_bytes"] > 0
        else:  # kernels do not compile for a CPU
            assert "wrong result" not in record["error"]
    assert "| XLA chunks, entropies | 2.0 | 1.000 |" in capsys.readouterr().out


@pytest.mark.usefixtures("without_gpu")
def test_a_wrong_result_is_not_timed():
    right = next(s for s in log_probs.SETTINGS if s.name == "XLA, all logits, entropies")

    def scaled(x, weight, labels):
        results, entropy = right.results(x, weight, labels)
        return results, entropy * 1.03

    wrong = dataclasses.replace(right, name="wrong", results=scaled)
    of_right, of_wrong = log_probs.measure((32, 64, 256), [right, wrong], rounds=1)
    assert "error" not in of_right
    assert "wrong result: relative error" in of_wrong["error"]


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu", "peers_in_jax")
def test_peers_are_compared_with_the_same_results():
    """3 s."""
    settings = [s for s in log_probs.SETTINGS if s.name.startswith("XLA chunks")]
    settings.append(dataclasses.replace(settings[0], entropy=False, name="XLA", results=_alone))
    records = log_probs.measure((32, 64, 256), settings, with_peers=True, rounds=1)
    found = {r["setting"]: r for r in records}
    of_peers = {name for name in found if name.startswith(("right", "wrong"))}
    kinds = (
        "log-probabilities alone",
        "entropies alone",
        "entropies",
        "policy loss",
        "preference loss",
    )
    assert of_peers == {f"{peer}, {kind}" for peer in ("right", "wrong") for kind in kinds}
    for name in of_peers:
        if name.startswith("right"):
            assert found[name]["over_gemms"] == 1.0 and found[name]["temporary_bytes"] > 0
        else:
            array = {
                "wrong, log-probabilities alone": "log_probs",
                "wrong, entropies alone": "entropy",
            }.get(name, "dweight")
            message = rf"wrong result: relative error [23]\..e-02 of {array}"
            assert re.fullmatch(message, found[name]["error"])


def _alone(x, weight, labels):
    return log_probs.linear_log_probs(x, weight, labels, implementation="xla"), None
