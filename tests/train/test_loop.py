"""Whole runs of a tiny model, from the configuration to the files they leave."""

import dataclasses
import errno
import html
import json
import math
import os
import signal
import threading
import time

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import SafetensorError

import train.loop
import train.outputs
import train.reporting.report
import train.setup
from models.llama_hf import load_pretrained
from models.sampling import generate
from models.sharding import batch_sharding, make_mesh
from support.tiny_run import MODEL
from support.tokenizer_files import write_byte_level
from train import data
from train.__main__ import main
from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig
from train.errors import RunError
from train.guard import initial_guard
from train.loop import run
from train.reporting.profiling import memory_report
from train.reporting.results import load_metrics
from train.step import TrainState, init_state, make_train_step, model_graph

# On the eight devices of the tests, so that the loop's placements are in every one of them.
CONFIG = TrainConfig(
    name="tiny",
    model=MODEL,
    data=DataConfig(source="stdlib", sequence_length=32, batch_size=8, accumulation_steps=2),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    mesh=MeshConfig(fsdp=2),
    steps=5,
    eval_every=2,
    eval_batches=3,
    log_every=1,
    sample_prompt="if ",
    sample_tokens=6,
    save=True,
)
# In place of the standard library: the same everywhere, and with a document's end in every row.
CORPUS = data.Corpus(
    {f"{i}.py": f"def f{i}(x):\n    return x + {i}\n".encode() for i in range(400)}
)
# For runs in which the model does not matter.
SMALL = dataclasses.replace(CONFIG, sample_tokens=0, save=False, eval_every=0)


pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module", autouse=True)
def corpus():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "stdlib_corpus", lambda: CORPUS)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory, compiled):
    """The folder of a run with everything on, and what it printed."""
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path_factory.mktemp("runs"))
    compile_steps = train.loop.compile_steps
    with pytest.MonkeyPatch.context() as patch:
        printed = []
        keep = lambda *args: compiled.append(compile_steps(*args)) or compiled[-1]
        # Drawing is slow, and the tests of reports draw all figures. Only loss.png has a title.
        draw = train.reporting.report.loss_png
        drawn = lambda metrics, title, *args: draw(metrics, title, *args) if title else b""
        patch.setattr(train.reporting.report, "loss_png", drawn)
        patch.setattr(train.reporting.report, "details_png", lambda *args: b"")
        patch.setattr(train.loop, "compile_steps", keep)
        patch.setattr("builtins.print", lambda *args: printed.append(" ".join(map(str, args))))
        patch.setattr(train.loop.Progress, "print", lambda self, text: printed.append(text))
        folder = run(config)
    return folder, "\n".join(printed)


@pytest.fixture(scope="module")
def compiled():
    """The steps that were compiled for the finished run."""
    return []


@pytest.fixture
def on_one_device(monkeypatch):
    """For runs that are not about placements: a program for one device compiles faster."""
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    monkeypatch.setattr(train.loop, "mesh_of", lambda config: mesh)


@pytest.fixture(scope="module")
def by_hand():
    """Metrics of the same run's steps, and the parameters before and after each, in a few lines."""
    mesh = make_mesh(data=4, fsdp=2)
    dataset = data.PackedDataset.from_documents(CORPUS.train, sequence_length=32)
    rows, params = [], {}
    with jax.set_mesh(mesh):
        state = init_state(CONFIG, mesh)
        shardings = jax.tree.map(lambda a: a.sharding, state)
        step = jax.jit(make_train_step(CONFIG), out_shardings=(shardings, None))
        for index in range(5):
            params[index] = state.params
            batch = dataset.batch(index, batch_size=16, seed=0)
            batch = {name: array.reshape(2, 8, 32) for name, array in batch.items()}
            batch = jax.device_put(batch, batch_sharding(mesh, batch_axis=1))
            state, values = step(state, batch)
            rows.append({name: value.item() for name, value in values.items()})
        params[5] = state.params
    return rows, params


def rows_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_files_of_a_run(finished):
    folder, _ = finished
    assert folder.name == "tiny"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "samples.jsonl",
        "loss.png",
        "report.html",
        "model/config.json",
        "model/model.safetensors",
    }
    assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    config = json.loads((folder / "config.json").read_text())
    assert config["config"]["model"]["hidden_size"] == 16
    assert config["config"]["data"]["accumulation_steps"] == 2
    assert config["data"] == CORPUS.fingerprint()
    assert config["environment"]["num_devices"] == 8


def test_one_row_a_step_and_the_held_out_rows_between(finished):
    rows = rows_of(finished[0])
    kinds = [(row["step"], "val_loss" in row) for row in rows]
    assert kinds == [
        *[(0, True), (1, False), (2, False), (2, True)],
        *[(3, False), (4, False), (4, True), (5, False), (5, True)],
    ]
    for row in rows:
        want = {"step", "elapsed_s"}
        if "val_loss" in row:
            want |= {"val_loss", "val_accuracy", "val_bpb"}
        else:
            want |= {"loss", "nll", "accuracy", "lr", "grad_norm", "tokens", "tokens_per_s"}
            want |= {"mfu", "step_time_s", "skipped_steps", "data_wait_s"}
            assert row["tokens"] == row["step"] * 2 * 8 * 32
            assert row["mfu"] is None  # of a CPU, whose peak is not known
            assert (row["tokens_per_s"] is None) == (row["step"] <= 2)
            assert 0 <= row["data_wait_s"] < 10
        assert set(row) - {"memory_gib", "peak_memory_gib"} == want
    elapsed = [row["elapsed_s"] for row in rows]
    assert elapsed == sorted(elapsed)
    loaded = load_metrics(finished[0])
    assert len(loaded.train) == 5 and len(loaded.held_out) == 4


def test_losses_are_those_of_stepping_by_hand(finished, by_hand):
    trained = [row for row in rows_of(finished[0]) if "loss" in row]
    for row, want in zip(trained, by_hand[0], strict=True):
        names = "loss", "nll", "accuracy", "lr", "grad_norm"
        assert {name: row[name] for name in names} == {name: want[name] for name in names}
        assert 0 <= row["accuracy"] <= 1
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_held_out_loss_and_bits_per_byte(finished, by_hand):
    """From all logits, for the parameters at the step of the row."""
    dataset = data.PackedDataset.from_documents(CORPUS.held_out, sequence_length=32)
    batches = list(dataset.eval_batches(8, 3))
    llama = lambda params: nnx.merge(model_graph(CONFIG.model), params)

    @jax.jit
    def log_probs(params, batch):
        options = {name: batch[name] for name in ("segment_ids", "positions")}
        return jax.nn.log_softmax(llama(params).logits(llama(params)(batch["tokens"], **options)))

    held_out = [row for row in rows_of(finished[0]) if "val_loss" in row]
    for row in held_out:
        params = jax.device_get(by_hand[1][row["step"]])
        nll = num_tokens = num_bytes = correct = 0
        for batch in batches:
            labels = batch["labels"]
            scores = np.asarray(log_probs(params, batch), np.float64)
            chosen = np.take_along_axis(scores, np.maximum(labels, 0)[..., None], -1)[..., 0]
            nll -= chosen[labels != -100].sum()
            num_tokens += np.sum(labels != -100)
            correct += np.sum(scores.argmax(-1) == labels)
            num_bytes += np.sum((labels >= 0) & (labels < 256))
        assert 0 < num_tokens - num_bytes < num_tokens / 20  # the ends of documents
        np.testing.assert_allclose(row["val_loss"], nll / num_tokens, rtol=1e-6)
        np.testing.assert_allclose(row["val_accuracy"], correct / num_tokens, rtol=1e-6)
        bpb = row["val_loss"] * num_tokens / num_bytes / math.log(2)
        np.testing.assert_allclose(row["val_bpb"], bpb, rtol=1e-12)
    assert held_out[-1]["val_loss"] < held_out[0]["val_loss"]


def test_saved_model_has_the_final_parameters(finished, by_hand):
    model = load_pretrained(finished[0] / "model", dtype="float32", remat="none")
    assert model.config == CONFIG.model
    got = jax.tree.map(np.asarray, nnx.state(model, nnx.Param))
    chex.assert_trees_all_equal(got, jax.tree.map(np.asarray, by_hand[1][5]))


def test_report_shows_the_samples(finished, by_hand):
    """As printed, and the greedy one as the final parameters generate it."""
    folder, printed = finished
    page = html.unescape((folder / "report.html").read_text())
    model = nnx.merge(model_graph(CONFIG.model), jax.device_get(by_hand[1][5]))
    prompt = jnp.asarray(data.encode("if "), jnp.int32)[None]
    greedy = "if " + data.decode(jax.device_get(generate(model, prompt, max_new_tokens=6))[0])
    assert f"<pre>{greedy}</pre>" in page
    blocks = printed.split("--- sample at temperature ")[1:]
    assert len(blocks) == 2
    for block in blocks:
        temperature, _, text = block.partition(" ---\n")
        assert text.startswith("if ")
        assert f"temperature {temperature}" in page
    parameters = sum(leaf.size for leaf in jax.tree.leaves(by_hand[1][5]))
    assert f"{parameters:,}" in page


def test_kernels_and_memory_are_told_before_the_first_step(finished):
    _, printed = finished
    texts = "kernels: none; add_rms_norm", "compiled the step in", "memory of the step:", "step 0/5"
    kernels, compiled, memory, first = (printed.index(text) for text in texts)
    assert kernels < compiled < memory < first < printed.index("step 1/5")
    assert printed.index("step 1/5") < printed.index("report:")


def test_memory_report_counts_donated_arguments_once():
    big = jax.ShapeDtypeStruct((2**27,), jnp.float32)  # half a GiB

    def report(**options):
        lowered = jax.jit(lambda a: a + 1, **options).lower(big)
        return memory_report(lowered.compile())

    assert "arguments 0.50 GiB" in report() and "in all 1.00 GiB" in report()
    assert "outputs that are not arguments 0.00 GiB" in report(donate_argnums=0)
    assert "in all 0.50 GiB" in report(donate_argnums=0)


def test_a_second_run_repeats_the_first_in_a_folder_of_its_own(finished, compiled, monkeypatch):
    folder, _ = finished
    monkeypatch.setattr(train.loop, "compile_steps", lambda *args: compiled[0])
    config = dataclasses.replace(CONFIG, runs_dir=folder.parent, sample_tokens=0, save=False)
    again = run(config)
    assert again == folder.parent / "tiny-2"
    assert not (again / "model").exists()
    assert "<h2>Samples" not in (again / "report.html").read_text()
    timeless = lambda rows: [{k: v for k, v in row.items() if k[-2:] != "_s"} for row in rows]
    assert timeless(rows_of(again)) == timeless(rows_of(folder))


@pytest.mark.full
@pytest.mark.usefixtures("on_one_device")
def test_synthetic_tokens(tmp_path):
    """Random tokens of any vocabulary, without positions and without anything held out."""
    config = dataclasses.replace(
        SMALL,
        runs_dir=tmp_path,
        model=dataclasses.replace(CONFIG.model, vocab_size=100, num_hidden_layers=1),
        data=DataConfig(source="synthetic", sequence_length=16, batch_size=8),
        steps=2,
        eval_every=1,
    )
    rows = rows_of(run(config))
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert "val_loss" not in row
        assert row["loss"] == pytest.approx(math.log(100), rel=0.05)


def test_text_of_ones_own(tmp_path, capsys, finished, compiled, monkeypatch):
    """Its tokenizer makes the prompt, reads the sample and counts the bytes."""
    monkeypatch.setattr(train.loop, "compile_steps", lambda *args: compiled[0])
    text = tmp_path / "text.jsonl"
    pairs = [{"prompt": f"{i} = ", "completion": f"the fox {i}"} for i in range(300)]
    lines = [{"text": f"the quick brown fox jumps over {i}\n"} for i in range(300)]
    text.write_text("".join(json.dumps(record) + "\n" for record in pairs + lines))
    config = dataclasses.replace(
        SMALL,
        runs_dir=tmp_path,
        data=dataclasses.replace(
            CONFIG.data,
            path=(text,),
            tokenizer=write_byte_level(tmp_path / "tokenizer.json"),
            cache_dir=tmp_path / "cache",
        ),
        steps=2,
        eval_every=1,
        sample_prompt="the fox",
        sample_tokens=3,
    )
    folder = run(config)
    rows = rows_of(folder)
    tokenizer = data.load_tokenizer(config.data)
    _, held_out, fingerprint = data.open_files(config.data, vocab_size=320, evaluates=True)
    assert json.loads((folder / "config.json").read_text())["data"] == fingerprint
    assert held_out is not None
    labels = np.stack([batch["labels"] for batch in held_out.eval_batches(8, 3)])
    predicted = labels[labels != -100]
    num_bytes = sum(len(tokenizer.decode([token]).encode()) for token in predicted)
    assert num_bytes > 1.5 * len(predicted)
    for row in rows:
        if "val_loss" in row:
            bpb = row["val_loss"] * len(predicted) / num_bytes / math.log(2)
            assert row["val_bpb"] == pytest.approx(bpb, rel=1e-6)
    assert "\nthe fox" in capsys.readouterr().out


# What goes wrong


@pytest.fixture
def no_compilation(monkeypatch):
    def fail(*args):
        raise AssertionError("the error must come before anything is made or compiled")

    monkeypatch.setattr(train.setup, "init_state", fail)


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("model", {"vocab_size": 257}, "vocab_size=257 .* 258"),
        ("data", {"batch_size": 12}, "batch_size=12 .* 8 devices"),
        ("mesh", {"fsdp": 3}, "data=2 times fsdp=3 .* 8"),
        ("mesh", {"fsdp": 16}, "fsdp=16"),
        ("mesh", {"tensor": 2}, "tensor=2 does not divide num_key_value_heads=1"),
        ("mesh", {"tensor": 3}, "fsdp=2 times tensor=3 must be .* 8"),
    ],
)
def test_impossible_runs_are_refused_and_leave_nothing(
    part, changes, message, tmp_path, no_compilation
):
    changed = dataclasses.replace(getattr(SMALL, part), **changes)
    config = dataclasses.replace(SMALL, runs_dir=tmp_path, **{part: changed})
    with pytest.raises(ValueError, match=message):
        run(config)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def fake_steps(monkeypatch):
    """Replaces model and steps by `train_step(step number) -> loss`."""

    def install(train_step):
        steps = iter(range(1, 10**6))
        values = lambda loss: {
            "loss": np.float32(loss),
            "lr": np.float32(1),
            "nll": np.float32(loss),
            "accuracy": np.float32(0.5),
            "grad_norm": np.float32(loss),
            "skipped_steps": np.int32(0),
            "skipped_in_a_row": np.int32(0),
        }

        def compile_nothing(*args):
            take = lambda state, batch: (state, values(train_step(next(steps))))
            return train.setup.CompiledSteps(take, None)

        state = TrainState(0, nnx.State({}), (), initial_guard())
        monkeypatch.setattr(train.setup, "init_state", lambda *args: state)
        monkeypatch.setattr(train.loop, "compile_steps", compile_nothing)
        monkeypatch.setattr(train.loop, "finish", lambda *args: None)

    return install


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("save", [True, False])
def test_a_signal_without_checkpoints_leaves_model_and_report(
    number, save, tmp_path, fake_steps, monkeypatch, capsys
):
    def train_step(step):
        if step == 4:
            os.kill(os.getpid(), number)
        return step

    fake_steps(train_step)
    finished = []
    monkeypatch.setattr(train.loop, "finish", lambda *args: finished.append(args[1]))
    handler = signal.getsignal(number)
    folder = run(dataclasses.replace(SMALL, runs_dir=tmp_path, steps=100, save=save))
    assert finished == [folder]  # which writes what `save` says
    assert [row["step"] for row in load_metrics(folder).train] == [1, 2, 3, 4]
    assert signal.getsignal(number) == handler
    printed = capsys.readouterr().out
    assert "stopped after step 4 of 100; without --checkpoint.every no run can go on" in printed
    assert ("the parameters are not saved (--no-save)" in printed) == (not save)


def test_a_run_that_fails_before_its_first_step_leaves_nothing(tmp_path, fake_steps, monkeypatch):
    def fail(*args):
        raise ValueError("too long")

    fake_steps(float)
    monkeypatch.setattr(train.loop, "compile_steps", fail)
    with pytest.raises(ValueError, match="too long"):
        run(dataclasses.replace(SMALL, runs_dir=tmp_path))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("I/O error")]
)
def test_a_full_disk_at_the_model_keeps_the_metrics(error, tmp_path, fake_steps, monkeypatch):
    finish = train.loop.finish
    fake_steps(float)
    monkeypatch.setattr(train.loop, "finish", finish)
    monkeypatch.setattr(train.outputs.nnx, "merge", lambda *args: None)

    def full(model, folder):
        raise error

    monkeypatch.setattr(train.outputs, "save_pretrained", full)
    with pytest.raises(RunError, match=r"tiny/model: (No space left|I/O error)"):
        run(dataclasses.replace(SMALL, runs_dir=tmp_path, save=True))
    assert len(load_metrics(tmp_path / "tiny").train) == SMALL.steps


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_run_leaves_its_rows_and_no_thread(error, tmp_path, fake_steps):
    def train_step(step):
        if step == 4:
            raise error
        return step

    fake_steps(train_step)
    config = dataclasses.replace(SMALL, runs_dir=tmp_path, steps=100)
    raised = []

    def interrupted():
        try:
            run(config)
        except BaseException as caught:
            raised.append(type(caught))

    # On a thread, so that a run that waits for ever for its prefetcher fails the test.
    thread = threading.Thread(target=interrupted, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert raised == [error]
    assert not [t for t in threading.enumerate() if t.name == "prefetch"]
    # The third step's values were asked for when the fourth would have run.
    assert [row["step"] for row in load_metrics(tmp_path / "tiny").train] == [1, 2]


def test_held_out_rows_of_prompts_alone_are_an_error(tmp_path):
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"prompt": "long " * 500, "completion": "x"}) + "\n")
    options = {"source": "stdlib", "path": (text,), "cache_dir": tmp_path / "cache"}
    config = DataConfig(**options, held_out_path=(text,), sequence_length=32, batch_size=8)
    _, held_out, _ = data.open_files(config, vocab_size=320, evaluates=True)
    assert held_out is not None
    config = dataclasses.replace(SMALL, data=config, eval_batches=1)
    with pytest.raises(data.DataError, match="the 1 held-out batches hold prompts alone; use"):
        train.loop._held_out_loss(
            config, make_mesh(data=4, fsdp=2), lambda *args: {}, nnx.State({}), held_out
        )


def test_a_loss_that_is_not_finite_is_recorded(tmp_path, fake_steps):
    fake_steps(lambda step: math.nan if step == 2 else 1.0)
    folder = run(dataclasses.replace(SMALL, runs_dir=tmp_path))
    losses = [row["loss"] for row in load_metrics(folder).train]
    np.testing.assert_array_equal(losses, [1, math.nan, 1, 1, 1])


def test_waiting_for_a_batch_is_told(tmp_path, fake_steps, monkeypatch):
    fake_steps(float)
    batch = data.PackedDataset.batch

    def slow(self, step, **options):
        time.sleep(0.3 if step == 3 else 0)
        return batch(self, step, **options)

    monkeypatch.setattr(data.PackedDataset, "batch", slow)
    waits = [
        row["data_wait_s"] for row in rows_of(run(dataclasses.replace(SMALL, runs_dir=tmp_path)))
    ]
    assert len(waits) == 5
    assert max(waits[:3] + waits[4:]) < 0.2 < waits[3] < 5


def test_a_step_is_logged_after_the_next_is_dispatched(tmp_path, fake_steps, monkeypatch):
    """So that the device has work while the host waits for the numbers of the last step."""
    events = []
    fake_steps(lambda step: events.append(f"step {step}") or 1.0)
    write = train.loop.metrics.MetricsWriter.write

    def spy(self, row):
        events.append(f"log {row['step']}")
        write(self, row)

    monkeypatch.setattr(train.loop.metrics.MetricsWriter, "write", spy)
    run(dataclasses.replace(SMALL, runs_dir=tmp_path, steps=3))
    assert events == ["step 1", "step 2", "log 1", "step 3", "log 2", "log 3"]


def test_folders_are_numbered(tmp_path, fake_steps):
    fake_steps(float)
    (tmp_path / "runs" / "tiny-3").mkdir(parents=True)
    config = dataclasses.replace(SMALL, runs_dir=tmp_path / "runs")
    assert [run(config).name for _ in range(3)] == ["tiny", "tiny-2", "tiny-4"]
    assert not any((tmp_path / "runs" / "tiny-3").iterdir())


def test_help_of_the_module(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert not caught.value.code
    printed = capsys.readouterr().out
    assert "usage: python -m train" in printed
    assert "--preset" in printed
