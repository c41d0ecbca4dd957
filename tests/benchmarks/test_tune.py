"""The search for launch parameters: candidates, checks, and the written rows, without a GPU."""

import dataclasses
import functools
import json
import math
import os
import time
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from benchmarks import timing
from benchmarks.agreement import Rejected
from benchmarks.kernels import ops, sweep, tune
from benchmarks.kernels.formulas import EPS
from benchmarks.kernels.tunables import TUNABLES
from pallas_kernels import tuning
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss.mosaic_gpu import logits as logits_kernel
from pallas_kernels.loss.mosaic_gpu import logits_config
from pallas_kernels.mlp import config as swiglu_config
from pallas_kernels.norm import config as norm_config
from pallas_kernels.norm.config import Config

L4, H200 = Device("NVIDIA L4", (8, 9), 58), Device("NVIDIA H200", (9, 0), 132)


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
    assert "printed nothing" in (sweep.spills("ptxas info    : 0 bytes gmem") or "")
    line = "    0 bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    assert sweep.spills(line.format(0, 0)) is None
    assert sweep.spills(line.format(0, 0) + line.format(1308, 1316)) == "spills 1308 bytes"


def test_output_of_another_language_is_captured(capfd):
    os.write(1, b"before\n")
    with sweep.captured_stdout() as file:
        os.write(1, b"inside\n")
        file.seek(0)
        assert file.read() == b"inside\n"
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "before\nafter\n"


def test_spills_are_of_the_candidate_that_a_thread_compiles():
    class Lowered:
        def __init__(self, spilled):
            self.spilled = spilled

        def compile(self):
            os.write(1, f"{self.spilled} bytes ".encode())
            time.sleep(0.01)  # another thread would write here
            os.write(1, b"spill stores\n")

    def reason(spilled):
        lowered: Any = Lowered(spilled)
        try:
            return sweep.without_spills(lowered)
        except Rejected as error:
            return str(error)

    with ThreadPoolExecutor(4) as pool:
        reasons = list(pool.map(reason, [8, 0, 16, 24]))
    assert reasons == ["spills 8 bytes", None, "spills 16 bytes", "spills 24 bytes"]


def test_error_is_judged_by_that_of_plain_jax():
    exact = {"y": np.linspace(1, 2, 100)}
    plain = {"y": exact["y"] + 1e-3}
    assert sweep.inaccuracy({"y": exact["y"] + 1.19e-3}, plain, exact) is None
    assert "y errs" in (sweep.inaccuracy({"y": exact["y"] + 1.21e-3}, plain, exact) or "")
    assert sweep.inaccuracy({"y": exact["y"] * np.nan}, plain, exact) is not None
    # If plain JAX is exact, rounding in float32 is still allowed.
    assert sweep.inaccuracy({"y": exact["y"] * (1 + 1e-7)}, exact, exact) is None


def test_the_best_of_a_sweep_is_the_fastest_that_works():
    slow, fast, broken = (_config(fwd_warps=warps) for warps in (4, 8, 16))
    timings = {
        slow: timing.Timing([2.0, 2.0]),
        fast: timing.Timing([1.0, 1.5]),
        broken: timing.Timing(error="spills 8 bytes"),
    }
    found = sweep.Sweep(timings, copy=timing.Timing([1.0]))
    assert found.best() == fast
    assert found.fraction(slow) == 0.5
    rows = tune.table(found).splitlines()[2:]
    assert ["fwd_warps=8" in rows[0], "fwd_warps=4" in rows[1]] == [True, True]
    assert "0.800 | 1250.0 | 1000.0 - 1500.0 |" in rows[0]
    assert "spills 8 bytes" in rows[2]
    assert sweep.Sweep({broken: timings[broken]}, timing.Timing([1.0])).best() is None


def test_the_directions_are_merged_by_the_names_of_the_fields():
    merged = tune.merged(_config(fwd_warps=8, bwd_warps=4), _config(fwd_warps=16, bwd_warps=12))
    assert merged == _config(fwd_warps=8, bwd_warps=12)
    of_swiglu = lambda fwd, bwd: swiglu_config.Config(fwd_accesses=fwd, bwd_accesses=bwd)
    assert tune.merged(of_swiglu(8, 1), of_swiglu(2, 4)) == of_swiglu(8, 4)


@pytest.mark.parametrize(
    ("default", "best", "keeps"),
    [
        ([1.02] * 8, [1.0] * 8, False),
        ([1.005] * 8, [1.0] * 8, True),  # less than 1 %
        ([1.02] * 6 + [0.9] * 2, [1.0] * 8, False),
        ([1.02] * 5 + [0.9] * 3, [1.0] * 8, True),  # slower in three of eight rounds
    ],
)
def test_a_gain_within_the_noise_keeps_the_default(default, best, keeps):
    first, second = _config(fwd_warps=4), _config(fwd_warps=8)
    timings = {first: timing.Timing(default), second: timing.Timing(best)}
    found = sweep.Sweep(timings, timing.Timing([1.0]))
    assert found.keeps_default() == keeps
    assert found.chosen() == (first if keeps else second)


def test_a_default_that_fails_is_replaced_by_any_candidate_that_works():
    broken, working = _config(fwd_warps=4), _config(fwd_warps=8)
    timings = {broken: timing.Timing(error="no"), working: timing.Timing([9.0])}
    found = sweep.Sweep(timings, timing.Timing([1.0]))
    assert found.chosen() == working
    assert found.speeds()["default"] is None


def test_a_sweep_times_the_candidates_that_pass_the_checks(monkeypatch):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    speeds = {4: 2.0, 8: 1.0, 12: 0.5, 16: 0.5, 20: 0.5, 24: 1.5, 28: 0.5}
    seen = []

    def fake(x, weight, *, implementation, config):
        y = pallas_kernels.rms_norm(x, weight, eps=EPS, implementation="reference")
        if config is None:
            return y
        assert implementation == "mosaic_gpu"
        if config.fwd_warps == 12:
            raise NotImplementedError("no such split")
        if config.fwd_warps == 16:
            raise Rejected("spills 8 bytes")
        return y * 1.01 if config.fwd_warps == 20 else y

    def compare(cases, *, rounds):
        seen.append([case.name for case in cases if case.error is None])
        return {
            case.name: timing.Timing(error=case.error)
            if case.error
            else timing.Timing(
                [1.0] * rounds
                if case.name == "copy"
                else [next(s for w, s in speeds.items() if f"fwd_warps={w}," in case.name)] * rounds
            )
            for case in cases
        }

    tunable = dataclasses.replace(TUNABLES["rms_norm"], fn=fake)
    monkeypatch.setitem(TUNABLES, "rms_norm", tunable)
    monkeypatch.setattr(timing, "compare", compare)
    monkeypatch.setattr(sweep, "without_spills", jax.stages.Lowered.compile)
    monkeypatch.setattr(sweep, "_FINALISTS", 1)
    candidates = [_config(fwd_warps=warps) for warps in speeds]
    # Time that is over leaves a candidate for each thread.
    monkeypatch.setattr(sweep, "_THREADS", 6)
    sets = ops.input_sets(tunable.inputs, (8, 64))
    found = sweep.sweep(
        "rms_norm", (8, 64), sets, "forward", candidates, rounds=5, deadline=-math.inf
    )
    default, fast, uncompiled, spilling, wrong, slow, late = (
        found.timings[config] for config in candidates
    )
    # The default is in the final, and another slow candidate is not.
    assert [len(some.times_ms) for some in (default, fast, slow)] == [5, 5, 3]
    assert found.chosen() == candidates[1]
    assert uncompiled.error == "NotImplementedError: no such split"
    assert spilling.error == "spills 8 bytes"
    assert "y errs" in (wrong.error or "")
    finalists = ["copy", str(candidates[0]), str(candidates[1])]
    assert seen == [[*finalists, str(candidates[5])], finalists]
    assert late.error == "left out: the time was over"
    assert found.left_out == 1


def test_tuning_sweeps_the_backward_with_the_best_forward(monkeypatch, capsys):
    forwards = [_config(fwd_warps=warps) for warps in (4, 8)]
    backwards = [_config(bwd_warps=warps) for warps in (4, 12)]
    tunable = dataclasses.replace(
        TUNABLES["add_rms_norm"],
        candidates={"forward": lambda *args: forwards, "backward": lambda *args: backwards},
    )
    monkeypatch.setitem(TUNABLES, "add_rms_norm", tunable)
    times = {"forward": {8: 1.0, 4: 2.0}, "backward": {12: 4.0, 4: 5.0, 20: 4.02}}
    default = _config(fwd_warps=4, bwd_warps=20)

    def run(direction, candidates):
        expected = {
            "forward": [(4, 20), (8, 20)],  # the default is one of the candidates
            "backward": [(8, 20), (8, 4), (8, 12)],
        }
        assert [(c.fwd_warps, c.bwd_warps) for c in candidates] == expected[direction]
        warps = {"forward": "fwd_warps", "backward": "bwd_warps"}[direction]
        timings = {
            config: timing.Timing([times[direction][getattr(config, warps)]])
            for config in candidates
        }
        return sweep.Sweep(timings, timing.Timing([1.0]))

    case = tune.Case("add_rms_norm", 64, "bfloat16")
    found = tune.tune(case, (16, 64), default, run)
    assert found is not None
    best = _config(fwd_warps=8, bwd_warps=20)  # the best backward gains half a percent
    assert found["config"] == dataclasses.asdict(best)
    assert found["measured"].endswith("fwd 1.00, bwd 0.25 of a copy")
    assert "add_rms_norm 64 bfloat16, backward, 16x64" in capsys.readouterr().out
    found["device_kind"] = "NVIDIA L4"
    assert eval("{" + tune.paste(found) + "\n}", {"_config": norm_config._config}) == {
        ("NVIDIA L4", "bfloat16", 64, True): best
    }
    broken = sweep.Sweep({best: timing.Timing(error="no")}, timing.Timing([1.0]))
    assert tune.tune(case, (16, 64), default, lambda *args: broken) is None


def test_the_cases_are_the_rows_of_all_cards():
    found = tune.cases_of_tables()
    assert len(found) == len(set(found))
    for module, op, variant in (
        (norm_config, "rms_norm", (False,)),
        (norm_config, "add_rms_norm", (True,)),
        (swiglu_config, "swiglu", ()),
        (logits_config, "linear_cross_entropy", ()),
    ):
        rows = {(dtype, size) for _, dtype, size, *rest in module.TUNED if tuple(rest) == variant}
        assert rows == {(case.dtype, case.size) for case in found if case.op == op}


@pytest.fixture
def fake_card(monkeypatch):
    """An L4 with two cases, whose sweeps are replaced: the norm's forward gains, nothing else.

    Returns:
      The norm's best parameters, and a list that gets the operation and direction of each sweep.
    """
    base = norm_config.guess_config(L4, 64, "bfloat16", add=False)
    changed = {
        "forward": dataclasses.replace(base, fwd_reread=not base.fwd_reread),
        "backward": dataclasses.replace(base, bwd_blocks=base.bwd_blocks + 1),
    }
    of_swiglu = swiglu_config.guess_config(L4, "bfloat16")
    kinds = {
        "rms_norm": ({d: lambda *_, d=d: [changed[d]] for d in changed}, (64, False)),
        "swiglu": ({"forward": lambda *_: [of_swiglu]}, (128,)),
    }
    for op in list(TUNABLES):
        if op not in kinds:
            monkeypatch.delitem(TUNABLES, op)
            continue
        candidates, key = kinds[op]
        table = {("NVIDIA H100 80GB HBM3", "bfloat16", *key): None}
        small = dataclasses.replace(TUNABLES[op], candidates=candidates, tuned=table)
        monkeypatch.setitem(TUNABLES, op, small)

    swept = []

    def fake_sweep(op, shape, sets, direction, candidates, *, rounds, deadline):
        swept.append((op, direction))
        fast = changed["forward"].fwd_reread
        times = {c: 0.8 if getattr(c, "fwd_reread", None) == fast else 1.0 for c in candidates}
        timings = {config: timing.Timing([ms] * rounds) for config, ms in times.items()}
        return sweep.Sweep(timings, timing.Timing([1.0]))

    monkeypatch.setattr(tune, "sweep", fake_sweep)
    monkeypatch.setattr(ops, "input_sets", lambda inputs, shape: [])
    monkeypatch.setattr(timing, "require_gpu", lambda: L4.kind)
    monkeypatch.setattr(tune, "target_device", lambda: L4)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "")  # to be put back
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    return changed["forward"], swept


def test_one_command_tunes_every_case_and_goes_on(fake_card, monkeypatch, tmp_path, capsys):
    path, (best, swept) = tmp_path / "tuned.json", fake_card
    monkeypatch.setenv(tuning.VARIABLE, str(path))  # not read, there is no such file
    argv = ["--output", str(path)]

    tune.main([*argv, "--seconds", "0"])
    out = capsys.readouterr().out
    assert "PALLAS_KERNELS_TUNED is ignored here" in out
    assert "--seconds=0 left out: rms_norm 64 bfloat16, swiglu 128 bfloat16. Run it again" in out
    assert not path.exists()

    tune.main(argv)
    lines = capsys.readouterr().out.splitlines()
    assert "| rms_norm 64 bfloat16 forward | 1.000 | 1.250 | +25.0 % | 2 |" in lines
    # The backward takes turns with the forward that won, at 0.8 of the copy's time.
    assert "| rms_norm 64 bfloat16 backward | 1.250 | 1.250 | +0.0 %, default kept | 2 |" in lines
    assert "| swiglu 128 bfloat16 forward | 1.000 | 1.000 | +0.0 %, default kept | 1 |" in lines
    assert lines[-1] == (
        "Overall gain +7.7 %, the geometric mean of 3 kernels, of which 2 keep their default. "
        f"To use the rows: export PALLAS_KERNELS_TUNED={path}"
    )
    of_norm, of_swiglu = json.loads(path.read_text())
    assert of_norm["config"] == dataclasses.asdict(best)
    assert of_swiglu["config"] is None

    # What the file has is not measured again, unless the flag or the operation's name asks for it.
    assert len(swept) == 3
    tune.main(argv)
    again = capsys.readouterr().out.splitlines()
    assert f"{path} has 2 cases; --again measures them, too" in again
    assert again[-1] == lines[-1] and len(swept) == 3
    tune.main([*argv, "--again"])
    assert len(swept) == 6
    tune.main([*argv, "swiglu", "--hidden-sizes", "128"])
    assert swept[6:] == [("swiglu", "forward")]
    assert len(json.loads(path.read_text())) == 2

    # The kernels find the rows of this card. A case without a row has the library's parameters.
    monkeypatch.setenv(tuning.VARIABLE, str(path))
    try:
        choose = functools.partial(norm_config.default_config, add=False)
        assert choose(L4, 64, jnp.bfloat16) == best
        assert choose(H200, 64, jnp.bfloat16) != best
        guess = swiglu_config.guess_config(L4, jnp.bfloat16)
        assert swiglu_config.default_config(L4, 128, jnp.bfloat16) == guess
    finally:
        tuning._read.cache_clear()


def test_the_time_is_shared_over_the_candidates(fake_card, monkeypatch):
    del fake_card
    now, given = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def measure(case, args, compile_seconds):
        for direction in TUNABLES[case.op].candidates:
            given.append(compile_seconds(direction))
            now[0] += 10.0

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "_OTHER_SECONDS", 9.0)
    with pytest.raises(SystemExit):  # no entry was made
        tune.main(["--seconds", "59"])
    # Candidates take 1, 1 and 0.5 s to compile, the rest of each sweep 9 s.
    assert given == pytest.approx([59 / 29.5, 49 / 19.5, 0.5 * 39 / 9.5])


def test_left_out_candidates_and_failed_defaults_are_in_the_report():
    speeds = {"best": 0.9, "keeps_default": False, "candidates": 9, "left_out": 3}
    entry = {"op": "swiglu", "size": 64, "dtype": "bfloat16"}
    entries = [
        entry | {"speeds": {"forward": speeds | {"default": None}}},
        entry,  # of an older version
    ]
    found = tune.report(entries)
    line = "| swiglu 64 bfloat16 forward | | 0.900 | the default fails | 9, 3 of them left out |"
    assert line in found.splitlines()
    assert "3 candidates were left out, because the time was over" in found
    assert tune.overall(entries) == "No gain was measured."


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dtype", "float32"], "--dtype needs an operation"),
        (["--hidden-sizes", "64"], "--hidden-sizes needs an operation"),
        (["--output", "nowhere/tuned.json"], "there is no folder nowhere"),
    ],
)
def test_flags_that_cannot_be_followed_are_errors(argv, message, capsys):
    with pytest.raises(SystemExit):
        tune.main(argv)
    assert message in capsys.readouterr().err


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
    entry = {"op": op, "device_kind": L4.kind, "dtype": "bfloat16", "size": 14336}
    row = tune.paste(entry | {"config": dataclasses.asdict(config), "measured": "measured"})
    table = eval("{" + row + "\n}", {"Config": type(config)})
    assert table == {("NVIDIA L4", "bfloat16", 14336): config}


class InTurn(Executor):
    """Runs everything in the calling thread; JAX's interpreter is switched on in one thread."""

    def __init__(self, max_workers):
        pass

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


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
    monkeypatch.setattr(tune, "target_device", lambda: L4)
    monkeypatch.setattr(sweep, "ThreadPoolExecutor", InTurn)
    # The default does not fit.
    monkeypatch.setattr(logits_config, "guess_config", lambda *args: large)
    monkeypatch.setattr(sweep, "spills", lambda ptxas: None)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "")  # to be put back
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)

    table = tmp_path.with_suffix(".json")
    argv = ["linear_cross_entropy", "--vocab-sizes", "300", "--num-elements", "900"]
    tune.main([*argv, "--dtype", "float16", "--rounds", "1", "--output", str(table)])
    assert shapes_seen == {(3, 384)}
    lines = capsys.readouterr().out.splitlines()
    assert "linear_cross_entropy 300 float16, forward, 3x300" in lines
    assert "| warpgroups=1, slots=2, max_lines=4 | 1.000 | 1000.0 | 1000.0 - 1000.0 |" in lines
    failed = [next(line for line in lines if f"slots={n}," in line) for n in (16, 3)]
    assert "use fewer slots" in failed[0] and "dlogits errs" in failed[1]

    (row,) = json.loads(table.read_text())
    # float16 shares the row of bfloat16.
    assert (row["op"], row["size"], row["dtype"]) == ("linear_cross_entropy", 300, "bfloat16")
    monkeypatch.setenv(tuning.VARIABLE, str(table))
    try:
        assert logits_config.default_config(L4, 300, jnp.float16) == good
    finally:
        tuning._read.cache_clear()


def test_the_loss_is_not_tuned_for_a_dtype_that_its_kernel_does_not_take():
    contender = sweep.contender("linear_cross_entropy", logits_config.candidates(300, "float32")[0])
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
