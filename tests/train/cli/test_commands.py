"""Finished runs and folders: exported, measured, sampled and compared by commands."""

import argparse
import dataclasses
import errno
import functools
import json
import math
import re
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
import safetensors.numpy
from flax import nnx
from safetensors import SafetensorError

import train.cli.command_line
import train.loop
import train.outputs
import train.setup
from models.llama_hf import load_pretrained
from models.rope import RopeParameters
from support import tiny_run
from train.__main__ import main
from train.checkpoints.saved import Saved, find_model
from train.cli import commands, compare
from train.data import HuggingFaceTokenizer
from train.errors import FolderError
from train.evaluate import Sums
from train.reporting.results import load_metrics

MODEL = dataclasses.replace(tiny_run.MODEL, bos_token_id=None, eos_token_id=(1, 257))

pytestmark = pytest.mark.usefixtures("one_device", "no_plots")


def fails(command, arguments, capsys):
    """The error of a command, which must be one line."""
    with pytest.raises(SystemExit) as exit_info:
        main([*command.split(), *(str(argument) for argument in arguments)])
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    line = error.splitlines()[-1]
    assert "Traceback" not in error and re.match(r"(python -m train \w+: )?error: ", line)
    return line


def host_params(model):
    return jax.device_get(nnx.state(model, nnx.Param))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("steps", "many", "config.steps='many' is not int"),
        ("steps", 2.5, "config.steps=2.5 is not int"),
        ("steps", True, "config.steps=True is not int"),
        ("steps", 0, "config: steps=0 must lie in [1, "),
        ("save", 1, "config.save=1 is not bool"),
        ("name", ["a"], "config.name=['a'] is not str"),
        ("model", [], "config.model=[] is not LlamaConfig"),
        ("model.hidden_size", "16", "config.model.hidden_size='16' is not int"),
        ("model.rms_norm_eps", {}, "config.model.rms_norm_eps={} is not float"),
        ("data.path", 7, "config.data.path=7 is not tuple"),
        ("data.weights", ["a"], "config.data.weights='a' is not float"),
        ("data.source", "disk", "config.data.source='disk' is not one of 'stdlib', "),
        ("optimizer.b1", "x", "config.optimizer.b1='x' is not float | None"),
        ("mesh.depth", 1, "config.mesh has entries that are unknown: depth"),
    ],
)
def test_a_field_of_a_wrong_type_is_named(field, value, message, finished, tmp_path, capsys):
    content = json.loads((finished / "config.json").read_text())
    *parts, name = field.split(".")
    functools.reduce(dict.__getitem__, parts, content["config"])[name] = value
    (tmp_path / "config.json").write_text(json.dumps(content))
    line = fails("sample", [tmp_path, "--prompt", "a"], capsys)
    assert f"{tmp_path / 'config.json'} is no configuration of this version: {message}" in line
    assert "; correct it, or take the version that wrote it" in line


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (
            lambda folder: shutil.rmtree(folder),
            "config.json does not exist; name the folder of a Hugging Face checkpoint",
        ),
        (
            lambda folder: (folder / "config.json").write_text("{"),
            "config.json is not JSON: .*; repair it",
        ),
        (
            lambda folder: write_model_type(folder, "gpt2"),
            "model_type='gpt2' is not supported; take .* 'llama', 'mistral' or 'qwen3'",
        ),
        (lambda folder: None, "the standard library is read as bytes; name other text with"),
    ],
)
def test_folders_that_cannot_be_started_from(prepare, message, finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    prepare(folder)
    line = fails("", ["--init-from", folder], capsys)
    assert re.search(message, line), line


def write_model_type(folder, model_type):
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"model_type": model_type}))


# Export


def test_export_of_every_kind(finished, tmp_path, capsys):
    def exported(name, *arguments):
        commands.export([*map(str, arguments), str(tmp_path / name)])
        assert (tmp_path / name / "tokenizer.json").exists()
        return load_pretrained(tmp_path / name, dtype="float32", remat=MODEL.remat)

    model = load_pretrained(finished / "model", dtype="float32", remat=MODEL.remat)
    newest = exported("newest", finished)
    assert newest.config == model.config == MODEL
    chex.assert_trees_all_equal(host_params(newest), host_params(model))
    chex.assert_trees_all_equal(
        host_params(exported("copy", finished / "model")), host_params(model)
    )
    earlier = host_params(exported("two", finished, "--step", 2))
    same = jax.tree.map(lambda a, b: np.array_equal(a, b), earlier, host_params(model))
    assert not any(jax.tree.leaves(same))
    named = exported("named", finished / "checkpoints" / "2")
    chex.assert_trees_all_equal(host_params(named), earlier)
    small = exported("small", finished, "--dtype", "bfloat16")
    for dtype, arguments in {"bfloat16": (), "float32": ("--dtype", "float32")}.items():
        name = f"small in {dtype}"
        exported(name, tmp_path / "small", *arguments)
        tensors = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        assert {str(tensor.dtype) for tensor in tensors.values()} == {dtype}
    rounded = jax.tree.map(lambda a: a.astype("bfloat16").astype("float32"), host_params(model))
    chex.assert_trees_all_equal(host_params(small), rounded)
    assert "bfloat16" in (tmp_path / "small" / "config.json").read_text()
    assert "step 2: written to" in capsys.readouterr().out


def test_the_best_has_the_lowest_held_out_loss(finished):
    losses = {row["step"]: row["val_loss"] for row in load_metrics(finished).held_out}
    losses.pop(0)
    best = min(losses, key=lambda step: losses[step])
    assert find_model(finished, best=True).step == best
    assert find_model(finished).step == 4


def test_a_finished_run_without_checkpoints(finished, tmp_path, capsys):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints")
    assert find_model(copy).folder == copy / "model"
    line = fails("export", [copy, tmp_path / "out", "--best"], capsys)
    assert "has no checkpoints; leave out --step and --best" in line
    line = fails("export", [copy / "checkpoints" / "4", tmp_path / "out"], capsys)
    assert "has no checkpoints, and so no 4; name the run alone" in line
    line = fails("", ["--init-from", copy], capsys)
    assert f"{copy} is a run; name its model, {copy / 'model'}" in line
    shutil.rmtree(copy / "model")
    assert "neither checkpoints nor a model" in fails("export", [copy, tmp_path / "out"], capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is neither a run, nor a checkpoint of one, nor a Hugging Face"),
        (["RUN", "--step", 3], "has no step 3; it has 2, 4"),
        (["RUN", "--step", 2, "--best"], "exclude each other"),
        (["RUN/checkpoints/2", "--best"], "is a checkpoint; to choose another, name its run"),
        (["RUN/checkpoints/3"], "has no step 3"),
        (["RUN/model", "--best"], "is a Hugging Face folder with one model; leave out"),
    ],
)
def test_models_that_are_not_there(arguments, message, finished, tmp_path, capsys):
    arguments = [str(argument).replace("RUN", str(finished)) for argument in arguments]
    assert message in fails("export", [*arguments, tmp_path / "out"], capsys)
    assert not (tmp_path / "out").exists()


def test_export_overwrites_no_model(finished, capsys):
    line = fails("export", [finished, finished / "model"], capsys)
    assert "has a config.json; name a folder without a model" in line


def test_a_damaged_checkpoint_is_said_and_not_deleted(finished, tmp_path, capsys):
    copy = Path(shutil.copytree(finished, tmp_path / "run"))
    file = copy / "checkpoints" / "4" / "checksums" / "metadata"
    checksums = json.loads(file.read_text())
    file.write_text(json.dumps({name: value ^ 1 for name, value in checksums.items()}))
    line = fails("export", [copy, tmp_path / "out"], capsys)
    assert "checkpoints/4 cannot be read: ValueError: " in line and "checksum is wrong in" in line
    assert line.rstrip().endswith(f"; choose another step of {copy} with --step")
    assert file.exists()
    commands.export([str(copy), str(tmp_path / "out"), "--step", "2"])


# Measuring


def test_eval_is_the_held_out_loss_of_the_run(finished, config, capsys):
    last = load_metrics(finished).held_out[-1]
    dev = str(config.data.held_out_path[0])
    options = ["--cache-dir", str(config.data.cache_dir), "--batch-size", "8"]
    for source in (finished, finished / "model"):
        length = [] if source == finished else ["--sequence-length", "16"]
        capsys.readouterr()
        commands.evaluate([str(source), "--path", dev, *options, *length])
        line = capsys.readouterr().out.splitlines()[-1]
        assert f": {last['val_loss']:.4f} nats per token, accuracy " in line
        assert f"accuracy {last['val_accuracy']:.4f}, {last['val_bpb']:.4f} bits per byte" in line

    text = str(config.data.path[0])
    commands.evaluate([str(finished), "--path", dev, text, *options, "--batches", "1"])
    lines = capsys.readouterr().out.splitlines()[-3:]
    numbers = [float(re.findall(r": ([\d.]+) nats", line)[0]) for line in lines]
    assert min(numbers[:2]) <= numbers[2] <= max(numbers[:2]) and lines[2].startswith("all: ")


def test_eval_tells_of_the_tokens_after_the_last_row(finished, config, tmp_path, capsys):
    """100 bytes and an end are 100 tokens to predict: six rows of 16, and four."""
    text = tmp_path / "a.txt"
    text.write_text("x" * 100)
    options = ["--cache-dir", str(config.data.cache_dir), "--sequence-length", "16"]
    commands.evaluate([str(finished), "--path", str(text), *options])
    read, *_, left_out, line = capsys.readouterr().out.splitlines()
    assert read.startswith(f"{text}: 101 tokens in 1 document; in ")
    assert left_out.startswith(
        f"{text}: its end, 4 tokens, fills no row of 16 and is not measured;"
    )
    assert line.endswith("(96 tokens, 96 bytes)")
    commands.evaluate([str(finished), "--path", str(text), *options, "--batches", "1"])
    assert "is not measured" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--path", "missing.txt"], "missing.txt"),
        (["--path", "DEV", "--sequence-length", 65], "exceeds the 64 positions of the model"),
        (["--path", "DEV", "--batch-size", 0], "argument --batch-size: 0 must lie in [1, "),
        (["--path", "DEV", "--batches", 0], "argument --batches: 0 must lie in"),
        (["--path", "DEV", "--sequence-length", -1], "--sequence-length: -1 must lie in"),
        (["--path", "DEV", "--text-field", ""], "argument --text-field: the value is empty"),
        (["--path", "DEV", "--fsdp", 0], "argument --fsdp: 0 must lie in"),
        (["--path", "DEV", "--step", -1], "argument --step: -1 must lie in"),
        (["--path", ""], "argument --path: the value is empty"),
        (["--path", "DEV", "--tokenizer", "nowhere"], "nowhere cannot be read"),
        (["--path", "DEV", "--text-field", "body"], "--text-field"),
        (["--path", "SHORT"], "short.txt: 6 tokens in 1 document cannot fill one row"),
        (["--path", "SHORT"], "use more text or a shorter --sequence-length"),
        (["--path", "EMPTY"], "is empty: it has no text"),
        (["--path", "EMPTY", "--text-field", "body"], "--text-field body has no effect"),
        (["--path", "PAIRS"], "only training with --objective dpo reads preferences"),
    ],
)
def test_text_that_cannot_be_measured(options, message, finished, config, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    files = {"DEV": str(config.data.held_out_path[0]), "PAIRS": str(tmp_path / "pairs.jsonl")}
    files |= {name.upper(): str(tmp_path / f"{name}.txt") for name in ("short", "empty")}
    options = [files.get(option, option) for option in options]
    line = fails("eval", [finished, "--cache-dir", tmp_path, *options], capsys)
    assert message in line and "--data." not in line


def test_eval_takes_the_rows_of_training_where_the_rope_type_is_dynamic():
    """Such a model may be trained on rows that are longer than its positions."""
    rope = RopeParameters(rope_type="dynamic", rope_theta=1e4, factor=2.0)
    model = dataclasses.replace(MODEL, rope_parameters=rope)
    length = 2 * model.max_position_embeddings
    saved = Saved(name="run", model=model, folder=Path("run"), sequence_length=length)
    flags = argparse.Namespace(sequence_length=None, batch_size=1, path=[Path("a.txt")])
    flags.text_field, flags.token_dtype, flags.cache_dir = "text", "uint16", None
    assert commands._eval_config(saved, flags).data.sequence_length == length


def test_a_run_without_a_model_says_how_to_get_one(finished, tmp_path):
    shutil.copy(finished / "config.json", tmp_path)
    with pytest.raises(
        FolderError, match=r"or ran with --no-save; .* --save or --checkpoint\.every"
    ):
        find_model(tmp_path)


# Sampling


def test_samples_share_no_key_with_the_parameters():
    words = lambda key: jax.random.key_data(key).tolist()
    rngs = nnx.Rngs(jax.random.key(3))
    of_params = [words(rngs.params()) for _ in range(40)]
    # `generate` splits the key.
    of_samples = [words(key) for key in jax.random.split(train.outputs.sample_key(3), 40)]
    assert not [key for key in of_samples if key in of_params]
    assert words(jax.random.split(jax.random.key(3), 40)[1]) in of_params  # as it was


def sampled(capsys, source, *options):
    capsys.readouterr()
    commands.sample([str(source), "--prompt", "the fox", "--max-new-tokens", "5", *options])
    return capsys.readouterr().out


def test_samples(finished, capsys):
    greedy = sampled(capsys, finished, "--temperature", "0")
    run_says = (finished / "samples.jsonl").read_text().splitlines()[-1]
    assert sampled(capsys, finished) == json.loads(run_says)["text"] + "\n"
    assert sampled(capsys, finished / "model", "--temperature", "0") == greedy
    assert sampled(capsys, finished, "--top-k", "1", "--temperature", "9") == greedy
    hot = [sampled(capsys, finished, "--temperature", "9", "--seed", s) for s in "12"]
    assert hot[0] != hot[1]


def test_nothing_is_printed_after_the_end(finished, capsys, monkeypatch):
    """The end is a token of the text here, which the tokenizer does not leave out."""
    found = []
    generate = train.outputs.generate
    monkeypatch.setattr(
        train.outputs, "generate", lambda *a, **k: found.append(generate(*a, **k)) or found[-1]
    )
    assert sampled(capsys, finished, "--temperature", "0") != "the fox\n"
    first = HuggingFaceTokenizer(finished / "tokenizer").token(int(found[0][0, 0]))
    options = "--temperature", "0", "--eos-token", first
    assert sampled(capsys, finished, *options) == "the fox\n"
    assert len(set(found[1][0].tolist())) == 1


def test_a_folder_without_a_tokenizer_is_of_bytes(finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    (folder / "tokenizer.json").unlink()
    commands.sample([str(folder), "--prompt", "a", "--max-new-tokens", "2"])
    output = capsys.readouterr()
    assert output.out.startswith("a") and "has no tokenizer: a token is a byte" in output.err
    line = fails("sample", [folder, "--prompt", "a", "--bos-token", "<s>"], capsys)
    assert "--bos-token '<s>' is for a tokenizer, and" in line
    assert "name one with --tokenizer, or leave the flag out" in line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-new-tokens", 100], "exceeds max_position_embeddings=64; take shorter prompts"),
        (["--temperature", -1], "argument --temperature: -1 must lie in [0, 3.4e+38]"),
        (["--temperature", "nan"], "argument --temperature: nan must lie in"),
        (["--max-new-tokens", 0], "argument --max-new-tokens: 0 must lie in"),
        (["--max-new-tokens", "x"], "argument --max-new-tokens: 'x' is not a whole number"),
        (["--seed", -1], "argument --seed: -1 must lie in [0, 4294967295]"),
        (["--seed", 2**32], "argument --seed: 4294967296 must lie in"),
        (["--top-k", 0], "argument --top-k: 0 must lie in"),
        (["--top-k", 10**6], "top_k=1000000 must be between 1 and"),
        (["--prompt", ""], "the prompt has no tokens"),
        (["--prompt", "\udcff"], "--prompt is not UTF-8; give it in this encoding"),
    ],
)
def test_samples_that_cannot_be_drawn(options, message, finished, capsys):
    arguments = [finished, "--prompt", "the fox", *options]
    assert message in fails("sample", arguments, capsys)


def test_a_model_that_is_not_finite_is_not_used(finished, tmp_path, capsys):
    folder = Path(shutil.copytree(finished / "model", tmp_path / "model"))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = np.inf
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    (tmp_path / "text.txt").write_text("some text to measure, " * 99)
    text = ["--path", tmp_path / "text.txt", "--cache-dir", tmp_path / "cache"]
    for command, options in (("sample", ["--prompt", "the fox"]), ("eval", text)):
        line = fails(command, [folder, *options], capsys)
        assert line.startswith(f"python -m train {command}: error: {folder}: the parameter "), line
        assert line.endswith("norm.weight has values that are not finite; take another model"), line


def test_a_loss_that_is_not_finite_is_an_error(finished, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("some text to measure, " * 99)
    monkeypatch.setattr(commands, "measure", lambda *args: Sums(math.nan, 0.0, 1, 1))
    options = ["--path", tmp_path / "text.txt", "--cache-dir", tmp_path / "cache"]
    line = fails("eval", [finished, *options], capsys)
    assert f"{tmp_path / 'text.txt'}: the loss of {finished}, step 4 is nan" in line


# Full disks


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
]


@pytest.mark.parametrize("error", FULL)
def test_an_export_to_a_full_disk(error, finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(commands, "save_pretrained", functools.partial(throw, error))
    line = fails("export", [finished, tmp_path / "out"], capsys)
    assert f"{tmp_path / 'out'}: " in line and "No space left" in line, line


@pytest.mark.parametrize(
    ("module", "writer", "file"),
    [
        (train.outputs, "save_pretrained", "model"),
        (train.outputs.report, "write_report", "report.html"),
        (train.loop, "open_datasets", ""),
    ],
)
def test_a_run_on_a_full_disk(module, writer, file, finished, config, capsys, monkeypatch):
    """The run has all of its steps, so it writes model and report again."""
    monkeypatch.setattr(module, writer, functools.partial(throw, FULL[0]))
    monkeypatch.setattr(train.cli.command_line, "parse_command_line", lambda arguments: config)
    line = fails("--steps", ["4"], capsys)
    assert line == f"error: {finished / file}: No space left on device"


def throw(error, *args, **options):
    raise error


# Comparing


def test_compare(finished, config, tmp_path, capsys, monkeypatch):
    copy = Path(shutil.copytree(finished, tmp_path / "<b>"))
    content = json.loads((copy / "config.json").read_text())
    content["config"]["optimizer"]["learning_rate"] = 0.125
    content["environment"]["started"] = "later"
    (copy / "config.json").write_text(json.dumps(content))
    output = tmp_path / "page.html"
    compare.run([str(finished), str(copy), "--output", str(output)])
    assert capsys.readouterr().out == f"{output}\n"
    page = output.read_text()
    settings = page[page.index("Different settings") : page.index("<h2>Commands")]
    row = "<tr><th>optimizer.learning_rate</th><td>0.01</td><td>0.125</td></tr>"
    assert settings.count("<tr>") == 2 and row in settings
    assert "&lt;b&gt;" in page and "<b>" not in page
    assert page.count("data:image/png;base64,") == 2 * 4  # of each panel, light and dark
    monkeypatch.chdir(tmp_path)
    compare.run([str(finished), str(finished)])
    assert capsys.readouterr().out == f"{tmp_path / 'compare.html'}\n"
    assert "<p>None.</p>" in (tmp_path / "compare.html").read_text()
    line = fails("compare", [finished, tmp_path], capsys)
    assert line.endswith(f"{tmp_path} is not a run: it has no metrics.jsonl; name a run")
