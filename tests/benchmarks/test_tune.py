"""The search for launch parameters: candidates, checks, and the written rows, without a GPU."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from benchmarks import timing
from benchmarks.kernels import tune
from benchmarks.kernels.formulas import EPS
from benchmarks.kernels.tunables import TUNABLES
from pallas_kernels import tuning
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.mosaic_gpu import logits_config
from pallas_kernels.mlp import config as swiglu_config
from pallas_kernels.norm import config as norm_config
from pallas_kernels.norm.config import Config


def _config(**values):
    fields = {
        field: {"int": 4, "bool": False}[getattr(kind, "__name__", kind)]
        for field, kind in Config.__annotations__.items()
    }
    return Config(**fields | values)


@pytest.mark.parametrize(
    ("op", "given", "needed"),
    [
        ("linear_cross_entropy", "--hidden-sizes", "--vocab-sizes"),
        ("swiglu", "--vocab-sizes", "--hidden-sizes"),
    ],
)
def test_every_tuned_operation_needs_its_sizes(op, given, needed, capsys):
    with pytest.raises(SystemExit):
        tune.main([op, given, "64"])
    assert f"{op} needs {needed}" in capsys.readouterr().err


def test_spills_are_found_in_the_output_of_ptxas():
    assert "printed nothing" in (tune.spills("ptxas info    : 0 bytes gmem") or "")
    line = "    0 bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    assert tune.spills(line.format(0, 0)) is None
    assert tune.spills(line.format(0, 0) + line.format(1308, 1316)) == "spills 1308 bytes"


def test_output_of_another_language_is_captured(capfd):
    os.write(1, b"before\n")
    with tune.captured_stdout() as file:
        os.write(1, b"inside\n")
        file.seek(0)
        assert file.read() == b"inside\n"
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"


def test_error_is_judged_by_that_of_plain_jax():
    exact = {"y": np.linspace(1, 2, 100)}
    plain = {"y": exact["y"] + 1e-3}
    assert tune.inaccuracy({"y": exact["y"] + 1.19e-3}, plain, exact) is None
    assert "y errs" in (tune.inaccuracy({"y": exact["y"] + 1.21e-3}, plain, exact) or "")
    assert tune.inaccuracy({"y": exact["y"] * np.nan}, plain, exact) is not None
    # If plain JAX is exact, rounding in float32 is still allowed.
    assert tune.inaccuracy({"y": exact["y"] * (1 + 1e-7)}, exact, exact) is None


def test_the_best_of_a_sweep_is_the_fastest_that_works():
    slow, fast, broken = (_config(fwd_warps=warps) for warps in (4, 8, 16))
    timings = {
        slow: timing.Timing([2.0, 2.0]),
        fast: timing.Timing([1.0, 1.5]),
        broken: timing.Timing(error="spills 8 bytes"),
    }
    found = tune.Sweep(timings, copy=timing.Timing([1.0]))
    assert found.best() == fast
    assert found.fraction(slow) == 0.5
    rows = tune.table(found).splitlines()[2:]
    assert ["fwd_warps=8" in rows[0], "fwd_warps=4" in rows[1]] == [True, True]
    assert "0.800 | 1250.0 | 1000.0 - 1500.0 |" in rows[0]
    assert "spills 8 bytes" in rows[2]
    assert tune.Sweep({broken: timings[broken]}, timing.Timing([1.0])).best() is None


def test_the_directions_are_merged_by_the_names_of_the_fields():
    merged = tune.merged(_config(fwd_warps=8, bwd_warps=4), _config(fwd_warps=16, bwd_warps=12))
    assert merged == _config(fwd_warps=8, bwd_warps=12)
    of_swiglu = lambda fwd, bwd: swiglu_config.Config(fwd_accesses=fwd, bwd_accesses=bwd)
    assert tune.merged(of_swiglu(8, 1), of_swiglu(2, 4)) == of_swiglu(8, 4)


def test_a_sweep_times_the_candidates_that_pass_the_checks(monkeypatch):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    speeds = {4: 2.0, 8: 1.0, 12: 0.5, 16: 0.5, 20: 0.5}
    seen = []

    def fake(x, weight, *, implementation, config):
        y = pallas_kernels.rms_norm(x, weight, eps=EPS, implementation="reference")
        if config is None:
            return y
        assert implementation == "mosaic_gpu"
        if config.fwd_warps == 12:
            raise NotImplementedError("no such split")
        spilled = 8 if config.fwd_warps == 16 else 0
        os.write(1, f"{spilled} bytes spill stores\n".encode())  # as ptxas does
        return y * 1.01 if config.fwd_warps == 20 else y

    def compare(cases, *, rounds):
        seen.append([case.name for case in cases])
        return {
            case.name: timing.Timing(
                [1.0] * rounds
                if case.name == "copy"
                else [next(s for w, s in speeds.items() if f"fwd_warps={w}," in case.name)] * rounds
            )
            for case in cases
        }

    tunable = dataclasses.replace(TUNABLES["rms_norm"], fn=fake)
    monkeypatch.setitem(TUNABLES, "rms_norm", tunable)
    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(tune, "_FINALISTS", 1)
    candidates = [_config(fwd_warps=warps) for warps in speeds]
    found = tune.sweep(
        "rms_norm",
        (8, 64),
        np.dtype(jnp.bfloat16),
        "forward",
        candidates,
        rounds=5,
    )
    slow, fast, uncompiled, spilling, wrong = (found.timings[config] for config in candidates)
    assert (len(slow.times_ms), len(fast.times_ms)) == (3, 5)  # screened, and in the final
    assert found.best() == candidates[1]
    assert uncompiled.error == "NotImplementedError: no such split"
    assert spilling.error == "spills 8 bytes"
    assert "y errs" in (wrong.error or "")
    assert seen == [
        ["copy", str(candidates[0]), str(candidates[1])],
        ["copy", str(candidates[1])],
    ]


def test_tuning_sweeps_the_backward_with_the_best_forward(monkeypatch, capsys):
    forwards = [_config(fwd_warps=warps) for warps in (4, 8)]
    backwards = [_config(bwd_warps=warps) for warps in (4, 12)]
    tunable = dataclasses.replace(
        TUNABLES["add_rms_norm"],
        candidates={"forward": lambda *args: forwards, "backward": lambda *args: backwards},
    )
    monkeypatch.setitem(TUNABLES, "add_rms_norm", tunable)
    times = {"forward": {8: 1.0, 4: 2.0}, "backward": {12: 4.0, 4: 5.0}}

    def run(direction, candidates):
        if direction == "backward":
            assert [config.fwd_warps for config in candidates] == [8, 8]
        warps = {"forward": "fwd_warps", "backward": "bwd_warps"}[direction]
        timings = {
            config: timing.Timing([times[direction][getattr(config, warps)]])
            for config in candidates
        }
        return tune.Sweep(timings, timing.Timing([1.0]))

    found = tune.tune("add_rms_norm", (16, 64), "bfloat16", run)
    best = _config(fwd_warps=8, bwd_warps=12)
    assert found == (best, "fwd 1.00, bwd 0.25 of a copy")
    assert "add_rms_norm backward, 16x64 bfloat16" in capsys.readouterr().out
    row = tune.paste("add_rms_norm", "NVIDIA L4", "bfloat16", 64, best, "measured")
    assert eval("{" + row + "\n}", {"_config": norm_config._config}) == {
        ("NVIDIA L4", "bfloat16", 64, True): best
    }
    broken = tune.Sweep({best: timing.Timing(error="no")}, timing.Timing([1.0]))
    assert tune.tune("rms_norm", (16, 64), "bfloat16", lambda *args: broken) is None


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "swiglu", "linear_cross_entropy"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_operation_has_several_distinct_candidates(op, dtype):
    for candidates in TUNABLES[op].candidates.values():
        found = candidates(4096, dtype)
        assert len(set(found)) == len(found) >= 3


@pytest.mark.parametrize(
    ("op", "config"),
    [
        ("swiglu", swiglu_config.Config(fwd_accesses=8, bwd_accesses=1)),
        ("linear_cross_entropy", logits_config.Config(warpgroups=2, slots=3, max_lines=4)),
    ],
)
def test_a_pasted_row_is_a_row_of_its_table(op, config):
    row = tune.paste(op, "NVIDIA L4", "bfloat16", 14336, config, "measured")
    table = eval("{" + row + "\n}", {"Config": type(config)})
    assert table == {("NVIDIA L4", "bfloat16", 14336): config}


@pytest.mark.full
@pytest.mark.usefixtures("interpreted")
def test_the_loss_is_tuned_from_flags_to_lookup(monkeypatch, tmp_path, capsys):
    # Only ptxas and CUPTI are replaced. 300 columns are two lines and a part of a third.
    good, wrong, large = (
        logits_config.Config(warpgroups=1, slots=slots, max_lines=lines)
        for slots, lines in ((2, 4), (3, 4), (16, 64))
    )
    tunable = TUNABLES["linear_cross_entropy"]
    swept = {"forward": lambda *args: [large, wrong, good]}
    swept = dataclasses.replace(tunable, candidates=swept)
    monkeypatch.setitem(TUNABLES, "linear_cross_entropy", swept)
    run_kernel, shapes_seen = logits_kernel.loss_of_logits, set()

    def loss_of_logits(logits, *args, config, **options):
        shapes_seen.add(logits.shape)
        if config != wrong:
            return run_kernel(logits, *args, config=config, **options)
        found, dlogits = run_kernel(logits, *args, config=good, **options)
        return found, dlogits * 1.01

    monkeypatch.setattr(logits_kernel, "loss_of_logits", loss_of_logits)
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA L4")
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    compare = functools.partial(timing.compare, measure=lambda calls: 4.0)
    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(tune, "spills", lambda ptxas: None)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "")  # to be put back
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)

    table = tmp_path.with_suffix(".json")
    argv = ["linear_cross_entropy", "--vocab-sizes", "300", "--num-elements", "900"]
    tune.main([*argv, "--dtype", "float16", "--rounds", "1", "--output", str(table)])
    assert shapes_seen == {(3, 384)}
    lines = capsys.readouterr().out.splitlines()
    assert "linear_cross_entropy forward, 3x300 float16" in lines
    assert "| warpgroups=1, slots=2, max_lines=4 | 1.000 | 1000.0 | 1000.0 - 1000.0 |" in lines
    failed = [next(line for line in lines if f"slots={n}," in line) for n in (16, 3)]
    assert "use less slots" in failed[0] and "dlogits errs" in failed[1]

    (row,) = json.loads(table.read_text())
    # float16 shares the row of bfloat16.
    assert (row["op"], row["size"], row["dtype"]) == ("linear_cross_entropy", 300, "bfloat16")
    monkeypatch.setenv(tuning.VARIABLE, str(table))
    try:
        device = Device("NVIDIA L4", (8, 9), 58)
        assert logits_config.default_config(device, 300, jnp.float16) == good
    finally:
        tuning._read.cache_clear()


def test_the_loss_is_not_tuned_for_a_dtype_that_its_kernel_does_not_take():
    contender = tune.contender("linear_cross_entropy", logits_config.candidates(300, "float32")[0])
    logits, labels = jnp.zeros((2, 384)), jnp.zeros(2, jnp.int32)
    with pytest.raises(NotImplementedError, match="logits are float32"):
        contender.fn(logits, labels)


def test_new_entries_replace_old_ones_of_the_same_case():
    def entry(size, measured, **changed):
        key = {"op": "rms_norm", "device_kind": "NVIDIA L4", "dtype": "bfloat16"} | changed
        return key | {"size": size, "config": {}, "measured": measured}

    old = [entry(1024, "old"), entry(2048, "old")]
    new = [entry(1024, "new"), entry(1024, "new", op="add_rms_norm"), entry(4096, "new")]
    assert tune.merge_entries(old, new) == [new[0], old[1], new[1], new[2]]
    for changed in ({"dtype": "float32"}, {"device_kind": "NVIDIA H200"}):
        assert len(tune.merge_entries(old, [entry(1024, "new", **changed)])) == 3
