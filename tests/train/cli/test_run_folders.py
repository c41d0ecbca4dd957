"""The folder of a finished run, and runs that start from such a folder."""

import dataclasses
import json
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx

import train.cli.command_line
import train.loop
import train.outputs
import train.setup
from models.llama_hf import load_pretrained
from models.sharding import make_mesh
from support import tiny_run
from support.tokenizer_files import write_byte_level
from train import data
from train.__main__ import main
from train.checkpoints.saved import read_run_config
from train.cli.command_line import parse_command_line
from train.errors import FolderError
from train.hf_folder import check_model, copy_tokenizer, load_params
from train.loop import run
from train.reporting.metrics import MetricsWriter
from train.reporting.results import load_metrics
from train.step import init_state

MODEL = dataclasses.replace(tiny_run.MODEL, bos_token_id=None, eos_token_id=(1, 257))

pytestmark = pytest.mark.usefixtures("one_device", "no_plots")


def host_params(model):
    return jax.device_get(nnx.state(model, nnx.Param))


def test_a_trace_and_the_compiled_step(finished):
    assert list((finished / "profile").rglob("*.xplane.pb"))
    assert "ENTRY" in (finished / "hlo" / "train_step.txt").read_text()
    memory = (finished / "hlo" / "memory.txt").read_text()
    assert "memory of the step: arguments" in memory and "temp_size_in_bytes" in memory


def test_a_sample_at_every_evaluation(finished, config):
    rows = [json.loads(line) for line in (finished / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2, 4]
    assert all(row["text"].startswith("the fox") for row in rows)
    page = (finished / "report.html").read_text()
    assert page.count("<summary>step ") == 3 and "<h2>Details</h2>" in page
    # A run that goes on after step 2 writes the later ones again.
    copy = Path(shutil.copytree(finished, config.runs_dir / "copy", dirs_exist_ok=True))
    MetricsWriter(copy, last_step=2).close()
    rows = [json.loads(line) for line in (copy / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 2]


def test_the_tokenizer_is_beside_the_model(finished, config):
    for folder in (finished / "model", finished / "tokenizer"):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            assert (folder / name).exists()
        # The copy has what the flags said.
        content = json.loads((folder / "tokenizer_config.json").read_text())
        assert content == {"bos_token": None, "eos_token": "<|end_of_text|>"}
    ours = data.load_tokenizer(config.data)
    copied = data.HuggingFaceTokenizer(finished / "model")
    assert (copied.bos, copied.eos) == (ours.bos, ours.eos) == (None, 1)


def test_a_tokenizer_of_a_single_file_gets_a_config_where_flags_say_more(tmp_path):
    file = write_byte_level(tmp_path / "other.json")
    (tmp_path / "out").mkdir()
    copy_tokenizer(file, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["tokenizer.json"]
    copy_tokenizer(file, tmp_path / "out", eos_token="fox")
    content = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert content == {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "fox"}
    copy_tokenizer(tmp_path / "out", tmp_path / "out")  # onto itself


def test_the_configuration_comes_back_from_the_run(finished, config):
    assert read_run_config(finished) == config


def test_a_run_in_float16_is_not_computed_on_a_cpu(finished, config, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(finished / "checkpoints", folder / "checkpoints")
    content = json.loads((finished / "config.json").read_text())
    content["config"]["model"]["dtype"] = "float16"
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "batch.npz").touch()  # without it `replay` would refuse the folder

    def line_of(command):
        with pytest.raises(SystemExit, match=r"^2$"):
            main(command)
        return capsys.readouterr().err.splitlines()[-1]

    cannot = "dtype float16 cannot be computed on a CPU, where XLA multiplies no float16 with sums"
    sample = ["--prompt", "the fox", "--max-new-tokens", "2"]
    for command in (
        ["sample", str(folder), *sample],
        ["eval", str(folder), "--path", str(config.data.path[0])],
    ):
        line = line_of(command)
        assert f"{command[0]}: error: {folder}, step 4: {cannot}" in line
        assert "take a GPU, or `export` the model and name the exported folder" in line
    assert f"error: {folder}: {cannot} in float32; take a GPU" in line_of(["replay", str(folder)])

    main(["export", str(folder), str(tmp_path / "exported")])
    main(["sample", str(tmp_path / "exported"), *sample])
    assert "the fox" in capsys.readouterr().out


def flags_of(config, folder, *more):
    return [
        *("--init-from", str(folder), "--data.path", str(config.data.path[0])),
        *("--data.sequence-length", "16", "--data.batch-size", "8", "--steps", "4"),
        *("--data.cache-dir", str(config.data.cache_dir), "--optimizer.warmup-steps", "1"),
        *("--data.held-out-fraction", "0.2", "--eval-batches", "2", "--sample-tokens", "0"),
        *("--runs-dir", str(folder.parent / "from"), *more),
    ]


def test_a_run_starts_with_the_parameters_of_a_folder(
    finished, config, compiled, monkeypatch, capsys
):
    monkeypatch.setattr(train.loop, "compile_steps", lambda *args: compiled[0])
    folder = finished / "model"
    from_folder = parse_command_line(flags_of(config, folder, "--name", "next"))
    assert from_folder.model == MODEL
    assert from_folder.data.tokenizer == folder
    assert from_folder.init_from == folder
    said = f"{folder} has 64 positions, so --data.sequence-length is 64 by default, not 256"
    assert said in capsys.readouterr().out
    rows = load_metrics(run(from_folder))
    # The measurement before the first step uses the trained parameters.
    untrained = load_metrics(finished).held_out[0]["val_loss"]
    assert rows.held_out[0]["val_loss"] < untrained - 0.05
    assert rows.train[0]["loss"] < untrained - 0.05
    capsys.readouterr()


def test_parameters_of_a_folder_are_split_over_the_mesh(finished):
    mesh = make_mesh(data=4, fsdp=2)
    params = load_params(finished / "model", MODEL, mesh)
    config = dataclasses.replace(read_run_config(finished), init_from=finished / "model")
    state = train.setup.first_state(config, mesh)
    want = init_state(dataclasses.replace(config, init_from=None), mesh)
    shardings = lambda tree: jax.tree.map(lambda a: a.sharding, tree)
    assert jax.tree.structure(state) == jax.tree.structure(want)
    assert jax.tree.leaves(shardings(state)) == jax.tree.leaves(shardings(want))
    chex.assert_trees_all_equal(jax.device_get(state.params), jax.device_get(params))
    model = load_pretrained(finished / "model", dtype="float32")
    chex.assert_trees_all_equal(jax.device_get(params), host_params(model))


def test_flags_that_contradict_the_folder(finished, config):
    flags = flags_of(config, finished / "model", "--model.hidden-size", "32")
    flags += ["--model.rms-norm-eps", "0.1", "--model.remat", "full"]
    with pytest.raises(FolderError) as caught:
        run(parse_command_line(flags))
    message = str(caught.value)
    assert "hidden_size 16, not 32; rms_norm_eps 1e-05, not 0.1. Leave these" in message
    assert "remat" not in message and "\n" not in message


def test_a_folder_without_a_tokenizer(finished, config, tmp_path, capsys):
    folder = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    found = parse_command_line(flags_of(config, folder))
    assert found.data.tokenizer is None
    assert "has no tokenizer.json: a token is a byte" in capsys.readouterr().out
    other = config.data.tokenizer
    found = parse_command_line(flags_of(config, folder, "--data.tokenizer", str(other)))
    assert found.data.tokenizer == other
    # Only the line about the length of rows is left.
    (line,) = capsys.readouterr().out.splitlines()
    assert "--data.sequence-length" in line


def test_damaged_weights_are_named_in_one_line(finished, tmp_path, one_device):
    folder = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    file = folder / "model.safetensors"
    check_model(folder, MODEL)
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(FolderError, match=r"model\.safetensors is damaged") as caught:
        load_params(folder, MODEL, one_device)
    assert "\n" not in str(caught.value)


def test_a_run_does_not_start_with_parameters_that_are_not_finite(finished, config, tmp_path):
    folder = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.inf
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    start = flags_of(config, folder, "--name", "next")
    with pytest.raises(FolderError, match=r"norm\.weight has .* not finite; .* --init-from"):
        train.setup.first_state(parse_command_line(start), make_mesh(data=8, fsdp=1))
