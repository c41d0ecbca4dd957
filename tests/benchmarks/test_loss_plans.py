"""The benchmark of the loss's plans without a GPU: the sweep, its files and the fit."""

import json

import numpy as np
import pytest

from benchmarks import ceilings, timing
from benchmarks.kernels import loss_plans
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss import cost, plan
from pallas_kernels.loss.mosaic_gpu import linear_launch, logits, products

SHAPE = 600, 64, 256


@pytest.fixture
def without_gpu(monkeypatch, two_ms_a_call):
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(ceilings, "measure", lambda: "no ceilings")
    # Kernels do not compile for a CPU. XLA's plans are chunks of tokens.
    monkeypatch.setattr(loss_plans, "_IMPLEMENTATION", "xla")
    monkeypatch.setattr(loss_plans, "LIMITS", {"default": None, "small": 2**18})


@pytest.fixture
def h100(monkeypatch):
    device = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
    for module in (plan, logits, products, linear_launch):
        monkeypatch.setattr(module, "target_device", lambda: device)


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu")
def test_a_sweep_times_every_plan_by_itself(monkeypatch, tmp_path):
    sizes = []
    compiled = loss_plans.compiled

    def recorded(shape, chosen, number, arguments):
        program = compiled(shape, chosen, number, arguments)
        # The logits of a chunk are in the compiled program.
        assert f"f32[{min(chosen.chunk_size, shape[0])},256]" in program.as_text()
        sizes.append(chosen.chunk_size)
        return program

    monkeypatch.setattr(loss_plans, "compiled", recorded)
    arguments = ["--output-dir", str(tmp_path), "--rounds", "1", "--plans", "3"]
    loss_plans.main([*arguments, "--shapes", "600x64x256", "300x64x256"])
    (path,) = tmp_path.glob("loss_plans_h100_*.json")
    first, second = json.loads(path.read_text())["records"]
    assert (first["shape"], second["shape"]) == ([600, 64, 256], [300, 64, 256])
    plans = first["plans"]
    assert len({p["plan"] for p in plans}) == len(plans) >= 2
    assert [p["chunk_size"] for p in plans] == sizes[: len(plans)]
    assert all(p["over_gemms"] == 1.0 for p in plans)
    assert plans[0]["plan"] == first["chosen"]["default"]
    # The limit leaves out the plans with more logits.
    assert 0 < len(loss_plans.measured(first, 2**18)) < len(plans)
    assert "| 600x64x256 | 2.0 ms | chunks of" in path.with_suffix(".md").read_text()


@pytest.mark.full
@pytest.mark.usefixtures("without_gpu")
def test_a_wrong_plan_is_not_timed(monkeypatch):
    compiled = loss_plans.compiled

    def wrong(shape, chosen, number, arguments):
        program = compiled(shape, chosen, number, arguments)
        return (lambda *args: (2 * program(*args)[0], program(*args)[1])) if number else program

    monkeypatch.setattr(loss_plans, "compiled", wrong)
    record = loss_plans.measure(SHAPE, rounds=1, most=2, seconds=1e9)
    right, other = record["plans"]
    assert right["median_ms"] == 2.0
    assert "wrong result: relative error 1.0e+00" in other["error"]


@pytest.mark.usefixtures("without_gpu")
def test_a_sweep_ends_in_time(capsys, tmp_path):
    arguments = ["--output-dir", str(tmp_path), "--seconds", "0", "--shapes", "600x64x256"]
    loss_plans.main(arguments)
    assert "no time is left for 600x64x256" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("h100")
def test_a_sweep_has_every_class_of_plans():
    candidates, chosen = loss_plans.selected((8192, 2560, 151936), 8)
    assert set(chosen) == {"default", "1 GiB"} and set(chosen.values()) <= set(candidates)
    names = " ".join(candidates)
    assert "beside" in names and "in place, chunks of" in names
    assert any(name.startswith("chunks of") for name in candidates)


def made_up(rates, shapes):
    """Records whose times are those of the estimate by other rates."""
    records = []
    for shape in shapes:
        candidates, chosen = loss_plans.selected(shape, 8)
        plans = []
        for name, candidate in candidates.items():
            p = {"plan": name, "logits_bytes": candidate.num_bytes}
            p |= loss_plans._contents(candidate.plan)
            milliseconds = 1e3 * loss_plans.estimate(shape, p, rates)
            plans.append(p | {"median_ms": milliseconds, "over_gemms": milliseconds})
        limits = {"default": 2**29, "1 GiB": 2**30}
        records.append({"shape": list(shape), "limits": limits, "chosen": chosen, "plans": plans})
    return json.loads(json.dumps(records))


@pytest.mark.usefixtures("h100")
def test_a_fit_finds_the_rates(capsys, tmp_path):
    rates = cost.Rates(flops=600e12, bandwidth=1.5e12, exposed=0.5, launch=20e-6)
    records = made_up(rates, [(8192, 2560, 151936), (16384, 2048, 128256), (8192, 4096, 32000)])
    np.testing.assert_allclose(loss_plans.fit(records), rates, rtol=1e-2)
    path = tmp_path / "plans.json"
    path.write_text(json.dumps({"records": records}))
    loss_plans.main(["--fit", str(path)])
    before, after = capsys.readouterr().out.split("fitted")
    assert "flops=7.8e+14" in before and "flops=6e+14" in after
    assert "error 0.0 %" in after and "error 0.0 %" not in before
    assert "at most" in after


@pytest.mark.usefixtures("h100")
def test_an_estimate_from_a_file_is_the_planners():
    shape = 8192, 2560, 151936
    for candidate in plan.candidates(loss_plans.request_of(shape, None))[0]:
        record = json.loads(json.dumps(loss_plans._contents(candidate.plan)))
        assert loss_plans.estimate(shape, record, cost.H100_RATES) == candidate.seconds


def test_the_regret_is_of_plans_that_the_limit_allows():
    plans = [
        {"plan": "small", "logits_bytes": 10, "over_gemms": 1.2},
        {"plan": "fast", "logits_bytes": 20, "over_gemms": 1.0},
        {"plan": "failed", "logits_bytes": 20, "error": "wrong"},
    ]
    record = {"plans": plans, "limits": {"default": 10, "1 GiB": 20}}
    assert loss_plans.regret(record, "default", "small") == (1.2, 0.0, "small")
    assert loss_plans.regret(record, "1 GiB", "small") == (1.2, pytest.approx(0.2), "fast")
    assert loss_plans.regret(record, "1 GiB", "failed") is None
