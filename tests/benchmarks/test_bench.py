"""The parts of the benchmarks that decide what a figure means, without a GPU."""

import dataclasses
import functools
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from benchmarks import peers, timing
from benchmarks.kernels import bench, ops, shapes, tune
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


def test_every_call_walks_on_through_the_inputs_and_rounds_interleave():
    seen = []

    def case(name, num_sets):
        calls = [functools.partial(lambda *where: seen.append(where), name, i) for i in range(3)]
        return timing.Case(name, calls[:num_sets])

    def measure(calls):
        for call in calls:
            call()
        return 10.0 * len(calls)

    timings = timing.compare(
        [case("a", 3), case("b", 3)], rounds=2, calls_per_round=2, measure=measure
    )
    names = [name for name, _ in seen]
    assert len(names) == 12  # the first round is the warm-up
    for start in range(0, 12, 4):
        assert names[start : start + 4] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    assert [i for _, i in seen] == [i % 3 for i in range(12)]
    assert timings["a"].times_ms == [10.0, 10.0]  # per call


def test_the_order_changes_from_round_to_round_but_not_from_run_to_run():
    def order_of_rounds():
        seen = []
        cases = [timing.Case(name, [functools.partial(seen.append, name)]) for name in "abc"]
        timing.compare(cases, rounds=7, calls_per_round=1, measure=lambda calls: calls[0]() or 1.0)
        return ["".join(seen[i : i + 3]) for i in range(0, 24, 3)]

    orders = order_of_rounds()
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 2
    assert order_of_rounds() == orders


def test_a_case_that_raises_is_out_and_keeps_its_message():
    attempts = []

    def fail():
        attempts.append(1)
        raise NotImplementedError("no such width\nand more")

    cases = [timing.Case("bad", [fail]), timing.Case("good", [lambda: None])]
    timings = timing.compare(cases, rounds=3, calls_per_round=1, measure=lambda calls: 2.0)
    assert timings["bad"].summary() == {"error": "NotImplementedError: no such width"}
    assert len(attempts) == 1
    assert timings["good"].times_ms == [2.0] * 3


def test_a_case_that_fails_later_has_no_figure():
    def measure(calls):
        raise RuntimeError("CUPTI saw no kernel")

    timings = timing.compare([timing.Case("a", [lambda: None])], rounds=2, measure=measure)
    assert timings["a"].summary() == {"error": "RuntimeError: CUPTI saw no kernel"}


def test_names_of_cases_are_unique():
    case = timing.Case("a", [lambda: None])
    with pytest.raises(ValueError, match="unique"):
        timing.compare([case, case], rounds=1)


def test_summary_is_median_and_range():
    summary = timing.Timing([3.0, 1.0, 2.0, 9.0]).summary()
    assert summary == {"median_ms": 2.5, "min_ms": 1.0, "max_ms": 9.0}


def test_rotation_exceeds_the_cache():
    assert timing.rotation(2**20) * 2**20 >= 4 * 126e6
    assert timing.rotation(2**31) == 1


@pytest.mark.parametrize(
    ("op", "direction", "arrays"),
    [
        ("rms_norm", "forward", 2),  # x, y
        ("rms_norm", "backward", 3),  # x, dy, dx
        ("add_rms_norm", "forward", 4),  # x, residual, y, residual_out
        ("add_rms_norm", "backward", 4),  # residual_out, dy, dresidual_out, dx
        ("swiglu", "forward", 3),  # gate, up, y
        ("swiglu", "backward", 5),  # gate, up, dy, dgate, dup
    ],
)
def test_the_copy_moves_what_the_operation_must(op, direction, arrays, monkeypatch):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    limit = ops.OPS[op].limit((64, 128), direction)
    num_bytes = arrays * 64 * 128 * 2
    assert limit.amount == num_bytes
    (call,) = limit.calls
    assert isinstance(call, functools.partial)
    (source,) = call.args
    assert source.nbytes + call().nbytes == num_bytes
    assert not np.any(np.asarray(call() == source))  # an elementwise kernel, not a memcpy


@pytest.mark.parametrize(
    ("op", "shape"),
    [
        ("rms_norm", (32, 64)),
        ("add_rms_norm", (32, 64)),
        ("swiglu", (32, 64)),
        ("linear_cross_entropy", (16, 8, 50)),
    ],
)
def test_plain_contenders_agree_with_their_formulas(op, shape, monkeypatch):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    op = ops.OPS[op]
    sets = ops.input_sets(op.inputs, shape)
    for contender in op.contenders:
        if contender.name in ("mosaic_gpu", "default"):
            continue
        expected = ops.exact(contender.formula, sets[0])
        for direction in op.directions:
            (call,) = ops.prepare(contender, sets, direction).calls
            got = call()
            names = set()
            if direction != "backward":
                names |= set(contender.formula.outputs)
            if direction != "forward":
                names |= {f"d{name}" for name in contender.formula.gradients}
            assert set(got) == names
            assert ops.wrong_result(got, expected) is None


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm", "swiglu"])
def test_the_kernel_is_measured_beside_xla_and_the_default(op):
    assert [c.name for c in ops.OPS[op].contenders[:3]] == ["mosaic_gpu", "reference", "default"]


def test_the_backward_runs_on_what_another_forward_kept(monkeypatch):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    op = ops.OPS["rms_norm"]
    (reference,) = [c for c in op.contenders if c.name == "reference"]
    sets = ops.input_sets(op.inputs, (32, 64))
    kept = ops.keep(reference, sets)
    assert any(array is sets[0]["x"] for array in kept[0])  # not a copy
    (call,) = ops.prepare(reference, sets, "backward", kept=kept).calls
    assert ops.wrong_result(call(), ops.exact(reference.formula, sets[0])) is None
    with pytest.raises(ValueError, match="the forward kept"):
        ops.prepare(reference, sets, "backward", kept=[kept[0][:1]])


def test_a_wrong_result_is_refused():
    expected = {"y": jnp.ones(8), "dx": jnp.ones(8)}
    assert ops.wrong_result({"y": jnp.ones(8) * 1.01}, expected) is None
    reason = ops.wrong_result({"y": jnp.ones(8), "dx": jnp.ones(8) * 1.03}, expected)
    assert reason is not None and "dx" in reason
    assert ops.wrong_result({"y": jnp.full(8, jnp.nan)}, expected) is not None


def test_reference_keeps_no_float32_copy_for_its_backward():
    (reference,) = [c for c in ops.OPS["rms_norm"].contenders if c.name == "reference"]
    x, weight = jnp.zeros((32, 64), jnp.bfloat16), jnp.zeros(64, jnp.bfloat16)
    vjp = jax.eval_shape(lambda *args: jax.vjp(reference.fn, *args)[1], x, weight)
    kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size >= 32 * 64]
    assert [leaf.dtype for leaf in kept] == [jnp.bfloat16]


def _record(direction, shape, columns, num_bytes):
    limit = ops.Limit("copy", 3e9, "GB/s", 1e9, [])
    return bench.record(shape, direction, limit, timing.Timing([1.0]), columns, num_bytes)


def _result(records):
    header = {"device": "NVIDIA H100 80GB HBM3", "date": "2026-11-21", "versions": "jax 0.11.2"}
    header |= {"command": "python -m benchmarks.kernels.bench", "rounds": 12, "ceilings": "fast"}
    return {"op": "rms_norm", **header, "records": records}


def test_tables():
    columns = {
        "mosaic_gpu": timing.Timing([1.25, 1.0, 2.0]),
        "Liger": timing.Timing(error="ValueError: too wide"),
    }
    records = [
        _record("forward", (16, 32), columns, {"mosaic_gpu": 2**20}),
        _record("backward", (16, 32), {"mosaic_gpu": timing.Timing([0.5])}, {"mosaic_gpu": 1}),
    ]
    text = bench.markdown(json.loads(json.dumps(_result(records))))
    forward, backward = text.split("## backward")
    assert "| shape | copy, GB/s | mosaic_gpu | Liger |\n|---|---|---|---|\n" in forward
    assert "| 16x32 | 3000 | 0.80 (1250) | failed |" in forward
    assert "| 16x32 | 3000 | 2.00 (500.0) |" in backward
    assert "- forward, 16x32, Liger: ValueError: too wide" in text


def test_memory_is_reported_where_forward_and_backward_are_one():
    columns = {"xla": timing.Timing([2.0]), "CCE": timing.Timing(error="OutOfMemory: no")}
    records = [_record("forward+backward", (4, 8, 16), columns, {"xla": 3 * 2**20})]
    text = bench.markdown(_result(records))
    assert "| 4x8x16 | 3000 | 0.50 (2000) | failed |" in text
    assert "| shape | xla | CCE |\n|---|---|---|\n| 4x8x16 | 3 | failed |" in text


@pytest.mark.parametrize(
    ("kind", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_short_names(kind, short):
    assert bench.short_name(kind) == short


def test_shapes_are_read_as_they_are_written():
    for shape in (*shapes.NORM, *shapes.SWIGLU, *shapes.LOSS):
        assert shapes.parse(shapes.label(shape)) == shape


def test_benchmarks_end_with_a_message_without_a_gpu():
    for main, argv in (
        (bench.main, []),
        (tune.main, ["rms_norm", "--hidden-sizes", "64"]),
        (tune.main, ["linear_cross_entropy", "--vocab-sizes", "64"]),
    ):
        with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
            main(argv)


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--implementations", "reference", "cuDNN"], "rms_norm: no column is called cuDNN"),
        (["--ops", "rms_norm", "--shapes", "8x8x8"], "rms_norm: shapes are like 32768x2048"),
    ],
)
def test_what_cannot_be_measured_is_said_before_measuring(argv, message, monkeypatch):
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA L4")
    with pytest.raises(SystemExit, match=message):
        bench.main(argv)


def test_peers_that_are_not_installed_are_named_and_left_out(monkeypatch):
    versions = {"torch": "2.11", "triton": "3.6", "liger-kernel": None}
    monkeypatch.setattr(peers, "PACKAGES", tuple(versions))

    def version(name):
        if versions[name] is None:
            raise peers.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(peers.importlib.metadata, "version", version)
    assert peers.versions() == versions
    assert peers.missing() == ["liger-kernel"]
    names = {peer.name for peer in peers.peers_of("add_rms_norm")}
    assert "torch.compile" in names and "Liger" not in names
    versions["torch"] = None
    assert peers.peers_of("add_rms_norm") == []


def test_spills_are_found_in_what_ptxas_says():
    assert "no output" in (tune.spills("ptxas info    : 0 bytes gmem") or "")
    line = "    0 bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
    assert tune.spills(line.format(0, 0)) is None
    assert tune.spills(line.format(0, 0) + line.format(1308, 1316)) == "spills 1308 bytes"


def test_what_another_language_prints_is_captured(capfd):
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
    # Where plain JAX is exact, rounding in float32 is still allowed.
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


def test_a_sweep_refuses_and_times(monkeypatch, tmp_path):
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)
    speeds = {4: 2.0, 8: 1.0, 12: 0.5, 16: 0.5, 20: 0.5}
    seen = []

    def fake(x, weight, *, implementation, config):
        y = pallas_kernels.rms_norm(x, weight, eps=ops.EPS, implementation="reference")
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

    tunable = dataclasses.replace(tune._TUNABLES["rms_norm"], fn=fake)
    monkeypatch.setitem(tune._TUNABLES, "rms_norm", tunable)
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
        tune._TUNABLES["add_rms_norm"],
        candidates={"forward": lambda *args: forwards, "backward": lambda *args: backwards},
    )
    monkeypatch.setitem(tune._TUNABLES, "add_rms_norm", tunable)
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
def test_what_is_swept(op, dtype):
    for candidates in tune._TUNABLES[op].candidates.values():
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


@pytest.mark.usefixtures("interpreted")
def test_the_loss_is_tuned_from_flags_to_lookup(monkeypatch, tmp_path, capsys):
    # All but ptxas and CUPTI; 300 columns are two lines and a part of one.
    good, wrong, large = (
        logits_config.Config(warpgroups=1, slots=slots, max_lines=lines)
        for slots, lines in ((2, 4), (3, 4), (16, 64))
    )
    tunable = tune._TUNABLES["linear_cross_entropy"]
    swept = {"forward": lambda *args: [large, wrong, good]}
    swept = dataclasses.replace(tunable, candidates=swept)
    monkeypatch.setitem(tune._TUNABLES, "linear_cross_entropy", swept)
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
    # The row of 16 bits.
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


def test_new_entries_replace_those_of_the_same_case():
    def entry(size, measured, **changed):
        key = {"op": "rms_norm", "device_kind": "NVIDIA L4", "dtype": "bfloat16"} | changed
        return key | {"size": size, "config": {}, "measured": measured}

    old = [entry(1024, "old"), entry(2048, "old")]
    new = [entry(1024, "new"), entry(1024, "new", op="add_rms_norm"), entry(4096, "new")]
    assert tune.merge_entries(old, new) == [new[0], old[1], new[1], new[2]]
    for changed in ({"dtype": "float32"}, {"device_kind": "NVIDIA H200"}):
        assert len(tune.merge_entries(old, [entry(1024, "new", **changed)])) == 3
