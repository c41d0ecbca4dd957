"""Whole runs on preferences and with a teacher: what they learn, resume and refuse."""

import dataclasses
import functools
import json
import re
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

import train.loop
from models.llama import Llama
from models.llama_hf import save_pretrained
from models.sharding import make_mesh
from support import tiny_run
from support.faults import timeless
from support.tokenizer_files import write_byte_level, write_config
from train.__main__ import main
from train.checkpoints.saved import read_run_config
from train.config import (
    CheckpointConfig,
    DataConfig,
    DistillConfig,
    DPOConfig,
    MeshConfig,
    OptimizerConfig,
)
from train.errors import FolderError, RunError
from train.loop import run
from train.planner import aot
from train.planner.cache import cached
from train.planner.plan import Programs, abstract_batch, plan, table
from train.planner.target import target_elsewhere
from train.reporting.metrics import MetricsWriter, jsonable
from train.setup import batch_on_devices, mesh_of, open_datasets
from train.teacher import abstract_frozen, check_teacher, teacher_digest

pytestmark = pytest.mark.usefixtures("one_device", "no_plots")
TEACHER = dataclasses.replace(tiny_run.MODEL, hidden_size=24, num_hidden_layers=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Preferences, a text, and a teacher."""
    folder = tmp_path_factory.mktemp("files")
    # The right answer has other letters.
    pairs = [{"prompt": f"{i}:", "chosen": "ab" * 3, "rejected": "xy" * 3} for i in range(60)]
    texts = [{"text": f"the fox number {i} jumps"} for i in range(100)]
    for name, records in (("pairs", pairs), ("text", texts)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text(lines)
    save_pretrained(Llama(TEACHER, rngs=nnx.Rngs(7)), folder / "teacher")
    return folder


def config_of(objective, folder, runs_dir):
    name = "pairs" if objective == "dpo" else "text"
    settings = {
        "dpo": {"dpo": DPOConfig(beta=0.2)},
        "distill": {"distill": DistillConfig(teacher=folder / "teacher")},
    }
    return dataclasses.replace(
        tiny_run.CONFIG,
        model=tiny_run.MODEL,
        data=DataConfig(
            source="stdlib",
            path=(folder / f"{name}.jsonl",),
            cache_dir=folder / "cache",
            held_out_fraction=0.2,
            sequence_length=16,
            batch_size=8,
            accumulation_steps=2,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        checkpoint=CheckpointConfig(every=3),
        objective=objective,
        runs_dir=runs_dir,
        eval_every=4,
        **settings[objective],
    )


def rows_of(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [timeless(json.loads(line)) for line in lines]


class KilledError(Exception):
    pass


@pytest.mark.parametrize("objective", ["dpo", pytest.param("distill", marks=pytest.mark.full)])
def test_a_run_learns_and_resumes_to_the_same_losses(objective, folder, tmp_path, monkeypatch):
    """15 s each: three runs, which share their programs."""
    programs, compile_steps = [], train.loop.compile_steps

    def compile_once(*args):
        if not programs:
            programs.append(compile_steps(*args))
        return programs[0]

    monkeypatch.setattr(train.loop, "compile_steps", compile_once)
    whole = rows_of(run(config_of(objective, folder, tmp_path / "whole")))
    steps = [row for row in whole if "loss" in row]
    held_out = [row for row in whole if "val_loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 9))
    assert [row["step"] for row in held_out] == [0, 4, 8]
    if objective == "dpo":
        # Before the first step the model is the reference.
        assert steps[0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
        assert held_out[0]["val_loss"] == pytest.approx(np.log(2), rel=1e-5)
        assert steps[-1]["loss"] < 0.5 and held_out[-1]["val_loss"] < 0.5
        assert steps[-1]["reward_accuracy"] == held_out[-1]["val_reward_accuracy"] == 1
        assert held_out[-1]["val_reward_margin"] > 1
        assert "nll" not in steps[0] and "val_bpb" not in held_out[0]
    else:
        assert steps[-1]["divergence"] < 0.8 * steps[0]["divergence"]
        assert "val_bpb" in held_out[0] and "nll" not in steps[0]

    write = MetricsWriter.write

    def die(self, row):
        if row["step"] == 6 and "loss" in row:
            raise KilledError
        write(self, row)

    config = config_of(objective, folder, tmp_path / "killed")
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr(MetricsWriter, "write", die)
        run(config)
    if objective == "dpo":
        reference = tmp_path / "killed" / "tiny" / "reference_log_probs.npz"
        content = reference.read_bytes()
        for damage, message in (
            (reference.unlink, "is missing.*put it back"),
            (lambda: reference.write_bytes(content[:-30]), "is damaged"),
            (lambda: np.savez(reference, train=np.zeros((3, 2))), "is of other preferences"),
        ):
            damage()
            with pytest.raises(RunError, match=f"reference_log_probs.npz {message}"):
                run(config)
        reference.write_bytes(content)
    assert rows_of(run(config)) == whole
    assert read_run_config(tmp_path / "killed" / "tiny") == config


def test_label_weight_adds_the_loss_of_the_labels(folder, tmp_path):
    """6 s."""
    config = config_of("distill", folder, tmp_path)
    distill = dataclasses.replace(
        config.distill, label_weight=0.5, divergence="jsd", temperature=2.0
    )
    config = dataclasses.replace(
        config, distill=distill, steps=2, eval_every=0, checkpoint=CheckpointConfig()
    )
    for row in rows_of(run(config)):
        expected = 0.5 * 4 * row["divergence"] + 0.5 * row["nll"]
        assert row["loss"] == pytest.approx(expected, rel=1e-5)
        assert 0 <= row["accuracy"] <= 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--objective dpo", r"objective='dpo' needs preferences; .*data\.path"),
        (
            "--objective dpo --data.path {pairs} --data.batch-size 3",
            r"--data\.batch-size: .*=3 must be",
        ),
        ("--objective dpo --data.path {pairs} --z-loss 0.1", r"z_loss=0\.1 is for objective='sft'"),
        (
            "--objective dpo --data.path {pairs} --data.text-field x",
            r"data\.text_field='x' is not for the preferences",
        ),
        (
            "--dpo.beta 0.2",
            r"error: --dpo\.beta 0\.2 is for --objective dpo, not sft; leave it out, or set --obj",
        ),
        (
            "--distill.teacher x --distill.label-weight 0.5",
            r"error: --distill\.teacher x and --distill\.label-weight 0\.5 are for --objective "
            r"distill, not sft; leave them out, or set --objective distill",
        ),
        ("--objective distill", r"objective='distill' needs a teacher; .* --distill\.teacher"),
        ("--objective distill --distill.teacher nowhere", r"nowhere.*config\.json"),
        (
            "--objective distill --distill.teacher {teacher} --model.vocab-size 300",
            r"teacher.* has a vocabulary of 320 tokens, and the model one of 300",
        ),
        (
            "--objective distill --distill.teacher {teacher} --data.sequence-length 65 "
            "--sample-tokens 0",
            r"has 64 positions, fewer than the 65 tokens",
        ),
    ],
)
def test_settings_that_do_not_go_together(flags, message, folder, capsys):
    names = {name: folder / name for name in ("teacher", "text.jsonl", "pairs.jsonl")}
    names = {str(name).partition(".")[0]: str(path) for name, path in names.items()}
    with pytest.raises(SystemExit) as exit_info:
        main(flags.format(**names).split())
    error = capsys.readouterr().err
    assert exit_info.value.code == 2 and error.count("\n") == 1
    assert re.search(message, error), error


def test_the_heads_of_a_teacher_must_split(folder, tmp_path):
    config = config_of("distill", folder, tmp_path)
    config = dataclasses.replace(config, mesh=MeshConfig(tensor=2))
    message = r"teacher has 1 key/value head, which mesh\.tensor=2 does not divide; .*tensor=1"
    with pytest.raises(FolderError, match=message):
        check_teacher(config)


def test_the_parameters_of_a_teacher_must_split(folder, tmp_path, monkeypatch):
    """The error comes before the text is read."""
    mesh = make_mesh(data=1, fsdp=5, devices=jax.devices()[:5])
    monkeypatch.setattr(train.loop, "mesh_of", lambda config: mesh)
    monkeypatch.setattr(train.loop, "open_datasets", pytest.fail)
    with pytest.raises(FolderError, match=r"^the teacher in .*/teacher: .*fsdp=5 does not divide"):
        run(config_of("distill", folder, tmp_path))


def test_tokenizers_must_be_the_same(folder, tmp_path):
    config = config_of("distill", folder, tmp_path)
    check_teacher(config)  # bytes
    (tmp_path / "tokenizer").mkdir()
    write_byte_level(tmp_path / "tokenizer" / "tokenizer.json")
    write_config(tmp_path / "tokenizer", eos_token="<|end_of_text|>")
    data = dataclasses.replace(config.data, tokenizer=tmp_path / "tokenizer")
    with pytest.raises(FolderError, match=r"has no tokenizer\.json to compare"):
        check_teacher(dataclasses.replace(config, data=data))
    # Its own, with other numbers for some tokens.
    teacher = tmp_path / "teacher"
    save_pretrained(Llama(TEACHER, rngs=nnx.Rngs(7)), teacher)
    special = ("<|end_of_text|>", "<|begin_of_text|>")
    write_byte_level(teacher / "tokenizer.json", special=special)
    write_config(teacher, eos_token="<|end_of_text|>")
    distill = dataclasses.replace(config.distill, teacher=teacher)
    other = dataclasses.replace(config, distill=distill, data=data)
    with pytest.raises(FolderError) as error:
        check_teacher(other)
    message = str(error.value)
    assert str(teacher) in message and str(tmp_path / "tokenizer") in message
    assert "'<|begin_of_text|>' is token 1 of the teacher and 0 of the run" in message
    with pytest.raises(FolderError, match=r"but the run reads bytes; .*--data\.tokenizer"):
        check_teacher(dataclasses.replace(other, data=config.data))
    data = dataclasses.replace(data, tokenizer=teacher)
    check_teacher(dataclasses.replace(other, data=data))


def test_a_resume_refuses_another_teacher_in_the_same_folder(folder, tmp_path, monkeypatch):
    """3 s: the run ends before it compiles."""
    teacher = Path(shutil.copytree(folder / "teacher", tmp_path / "teacher"))
    config = config_of("distill", folder, tmp_path)
    config = dataclasses.replace(config, distill=DistillConfig(teacher=teacher))
    digest = teacher_digest(teacher)
    run_dir = tmp_path / "tiny"
    (run_dir / "checkpoints" / "3").mkdir(parents=True)
    written = {"config": config, "data": open_datasets(config).fingerprint | {"teacher": digest}}
    (run_dir / "config.json").write_text(json.dumps(jsonable(written)))

    def die(*args, **options):
        raise KilledError

    with monkeypatch.context() as patch:  # the same teacher, in other files
        patch.setattr(train.loop, "Checkpoints", die)
        (teacher / "model.safetensors").unlink()
        save_pretrained(Llama(TEACHER, rngs=nnx.Rngs(7)), teacher, max_shard_size=10_000)
        assert (teacher / "model.safetensors.index.json").exists()
        with pytest.raises(KilledError):
            run(config)
    save_pretrained(Llama(TEACHER, rngs=nnx.Rngs(8)), teacher)
    with pytest.raises(RunError, match=rf"started with corpus\.teacher '{digest}', now '\w+'\. Go"):
        run(config)
    save_pretrained(Llama(TEACHER, rngs=nnx.Rngs(7)), teacher)
    assert teacher_digest(teacher) == digest
    content = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(content | {"rms_norm_eps": 0.1}))
    assert teacher_digest(teacher) != digest


@pytest.mark.parametrize("objective", ["dpo", "distill"])
def test_the_planner_counts_what_the_objective_holds(objective, folder, tmp_path, monkeypatch):
    """4 s each."""
    monkeypatch.setenv("TRAIN_PLAN_CACHE", str(tmp_path / "plans"))
    mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    target = target_elsewhere(aot.CHIPS["h100"], mesh)
    config = config_of(objective, folder, tmp_path)
    sft = dataclasses.replace(config, objective="sft", dpo=DPOConfig(), distill=DistillConfig())
    programs = Programs(target)
    monkeypatch.setattr(programs, "compile", functools.cache(programs.compile))
    chosen = plan([config], target, cached(programs, target))
    frozen = abstract_frozen(config, mesh)
    size = sum(np.prod(a.shape) * 2 for a in jax.tree.leaves(frozen))
    estimated = programs.estimate(config)[1] - programs.estimate(sft)[1]
    assert "counted" in table(chosen) if size else "takes no memory in a step" in table(chosen)
    if objective == "distill":
        embedding = TEACHER.vocab_size * 24 * 2
        assert size > embedding and estimated > size / 2 * 0.9
        step = programs.compile(config).memory_analysis().argument_size_in_bytes
        plain = programs.compile(sft).memory_analysis().argument_size_in_bytes
        # The norms are on both devices.
        assert size / 2 <= step - plain < size / 2 + 24 * 2 * 4
    # The batch of training has the shapes that the planner compiled.
    datasets = open_datasets(config)
    dataset = datasets.train
    if objective == "dpo":
        dataset = dataclasses.replace(
            dataset, reference=np.zeros((dataset.num_pairs, 2), np.float32)
        )
    batch = batch_on_devices(config, mesh, dataset, 0)
    describe = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), tree)
    assert describe(abstract_batch(config, mesh)) == describe(batch)


def test_a_pair_stays_on_one_device(folder, tmp_path):
    config = config_of("dpo", folder, tmp_path)
    assert mesh_of(dataclasses.replace(config, data=rows(config, 16))).size == 8
    with pytest.raises(ValueError, match=r"-size 8 .* 8 devices .*, times the 2 rows .*; take 16"):
        mesh_of(config)


def rows(config, batch_size):
    return dataclasses.replace(config.data, batch_size=batch_size)


def test_a_failed_step_is_repeated(folder, tmp_path, monkeypatch, capsys, one_device):
    """A teacher whose loss is not finite ends the run, and `replay` repeats the step. 8 s."""
    config = config_of("distill", folder, tmp_path)
    config = dataclasses.replace(config, max_skipped_steps=1, eval_every=0)
    monkeypatch.setattr(train.loop, "check_teacher", lambda config: None)
    initial = train.loop.first_state

    def broken(config, mesh):
        state = initial(config, mesh)
        return dataclasses.replace(state, params=jax.tree.map(lambda a: a * np.nan, state.params))

    monkeypatch.setattr(train.loop, "first_state", broken)
    with pytest.raises(RunError, match=r"^a step was skipped; .* replay ") as error:
        run(config)
    row = rows_of(tmp_path / "tiny")[0]
    assert row["teacher_mean_context"] == row["mean_context"] > 0  # neither has a window
    monkeypatch.setattr("train.cli.replay.mesh_of", lambda config: one_device)
    capsys.readouterr()
    main(["replay", str(error.value).split()[-1]])
    printed = capsys.readouterr().out
    assert "divergence nan" in printed and "not finite" in printed
