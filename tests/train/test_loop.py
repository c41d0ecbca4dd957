"""Whole runs of a tiny model, from the configuration to the files they leave."""

import dataclasses
import html
import json
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import train.loop
import train.outputs
import train.reporting.report
import train.setup
from models.llama_hf import load_pretrained
from models.sampling import generate
from models.sharding import batch_sharding, make_mesh
from support import tiny_run
from support.tokenizer_files import write_byte_level
from train import data
from train.config import DataConfig
from train.loop import run
from train.reporting.profiling import memory_report
from train.reporting.results import load_metrics
from train.step import init_state, make_train_step, model_graph

# The runs use the eight devices of the tests, so that each test sees the loop's placements.
CONFIG = dataclasses.replace(
    tiny_run.ON_LIBRARY,
    eval_every=2,
    eval_batches=3,
    sample_prompt="if ",
    sample_tokens=6,
    save=True,
)
# It takes the place of the standard library. It is the same everywhere, and every row of it has a
# document's end.
CORPUS = data.Corpus(
    {f"{i}.py": f"def f{i}(x):\n    return x + {i}\n".encode() for i in range(400)}
)


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
        load = data.load_tokenizer
        told = lambda config: printed.append("the tokenizer is read") or load(config)
        patch.setattr(data, "load_tokenizer", told)
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
    """Runs use one device, whose program compiles faster than one for eight."""
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    monkeypatch.setattr(train.loop, "mesh_of", lambda config: mesh)


@pytest.fixture(scope="module")
def initial():
    """The state before the first step."""
    mesh = make_mesh(data=4, fsdp=2)
    with jax.set_mesh(mesh):
        return init_state(CONFIG, mesh)


@pytest.fixture
def nothing_compiled(initial, finished, compiled, monkeypatch):
    """Runs take their first state and their steps from other runs, and compile neither."""
    copied = lambda *args: jax.tree.map(lambda a: jax.device_put(np.array(a), a.sharding), initial)
    monkeypatch.setattr(train.setup, "init_state", copied)
    monkeypatch.setattr(train.loop, "compile_steps", lambda *args: compiled[0])


@pytest.fixture(scope="module")
def by_hand(initial):
    """The same run in a few lines: metrics of its steps, and parameters before and after each."""
    mesh = make_mesh(data=4, fsdp=2)
    dataset = data.PackedDataset.from_documents(CORPUS.train, sequence_length=32)
    rows, params = [], {}
    with jax.set_mesh(mesh):
        state = initial
        shardings = jax.tree.map(lambda a: a.sharding, state)
        step = jax.jit(make_train_step(CONFIG), out_shardings=(shardings, None))
        for index in range(5):
            params[index] = state.params
            batch = dataset.batch(index, batch_size=16, seed=0)
            batch = {name: array.reshape(2, 8, 32) for name, array in batch.items()}
            batch = jax.device_put(batch, batch_sharding(mesh, batch_axis=1))
            state, values = step(state, batch)
            rows.append({name: value.item() for name, value in values.items()})
            rows[-1]["attended"] = tokens_attended_to(np.asarray(batch["segment_ids"]))
        params[5] = state.params
    return rows, params


def tokens_attended_to(segment_ids):
    """The mean number, of a mask that has one half for the token itself."""
    is_same = segment_ids[..., :, None] == segment_ids[..., None, :]
    return np.mean(np.sum(np.tril(is_same) - 0.5 * np.eye(is_same.shape[-1]), axis=-1))


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
            want |= {"mfu", "step_time_s", "skipped_steps", "data_wait_s", "labeled_share"}
            want |= {"mean_context"}
            assert 0.9 < row["labeled_share"] <= 1
            assert row["tokens"] == row["step"] * 2 * 8 * 32
            assert row["mfu"] is None  # the peak of a CPU is not known
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
        np.testing.assert_allclose(row["mean_context"], want["attended"], rtol=1e-6)
    assert trained[-1]["loss"] < trained[0]["loss"]


def test_held_out_loss_and_bits_per_byte(finished, by_hand):
    """The same figures from all logits, with the parameters at the step of the row."""
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


def test_the_tokenizer_is_read_once(finished):
    """A large one takes a second, and every evaluation writes a sample."""
    _, printed = finished
    assert printed.count("the tokenizer is read") == 1


def test_report_shows_the_samples(finished, by_hand):
    """The report has what was printed. The greedy sample is that of the final parameters."""
    folder, printed = finished
    page = html.unescape((folder / "report.html").read_text())
    model = nnx.merge(model_graph(CONFIG.model), jax.device_get(by_hand[1][5]))
    prompt = jnp.asarray(data.start_of_document("if ", data.BYTES), jnp.int32)[None]
    tokens = jax.device_get(generate(model, prompt, max_new_tokens=6))[0]
    greedy = "if " + data.BYTES.decode(tokens)
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

    assert "arguments 512.00 MiB" in report() and "in all 1.00 GiB" in report()
    assert "outputs that are not arguments 0.00 MiB" in report(donate_argnums=0)
    assert "in all 512.00 MiB" in report(donate_argnums=0)


@pytest.mark.usefixtures("nothing_compiled")
def test_a_second_run_repeats_the_first_in_a_folder_of_its_own(finished):
    folder, _ = finished
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
    """Random tokens of any vocabulary have no positions, and no held-out part."""
    config = dataclasses.replace(
        tiny_run.ON_LIBRARY,
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


# The normal run trains on a file in test_distributed.py.
@pytest.mark.full
@pytest.mark.usefixtures("nothing_compiled")
def test_text_of_ones_own(tmp_path, capsys):
    """The tokenizer of the text makes the prompt, reads the sample and counts the bytes."""
    text = tmp_path / "text.jsonl"
    pairs = [{"prompt": f"{i} = ", "completion": f"the fox {i}"} for i in range(300)]
    lines = [{"text": f"the quick brown fox jumps over {i}\n"} for i in range(300)]
    text.write_text("".join(json.dumps(record) + "\n" for record in pairs + lines))
    config = dataclasses.replace(
        tiny_run.ON_LIBRARY,
        runs_dir=tmp_path,
        data=dataclasses.replace(
            CONFIG.data,
            path=(text,),
            tokenizer=write_byte_level(tmp_path / "tokenizer.json"),
            cache_dir=tmp_path / "cache",
        ),
        steps=2,
        eval_every=1,
        eval_batches=3,
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
