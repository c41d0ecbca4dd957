"""Presets, flags and sizes of a configuration, and the errors for wrong values."""

import dataclasses
import re
from pathlib import Path

import pytest

from train.cli.command_line import parse_command_line
from train.config import (
    PRESET_NAMES,
    DataConfig,
    OptimizerConfig,
    TrainConfig,
    preset,
)
from train.data import DataError
from train.flag_errors import FlagError

MODEL = dataclasses.replace(
    preset("demo").model,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=32,
    dtype="float32",
)
CONFIG = TrainConfig(
    name="test",
    model=MODEL,
    data=DataConfig(source="stdlib", sequence_length=8, batch_size=8),
    optimizer=OptimizerConfig(warmup_steps=2),
    steps=4,
    eval_every=2,
    eval_batches=2,
    sample_tokens=4,
    log_every=2,
    save=True,
)
ONE_FILE = {"path": (Path("a"),)}
TOGETHER = {"num_processes": 2, "coordinator_address": "host:1"}


def changed(config, part, changes):
    """`config` with `changes` to its part of that name, or to itself."""
    if not part:
        return dataclasses.replace(config, **changes)
    name, _, rest = part.partition(".")
    return dataclasses.replace(config, **{name: changed(getattr(config, name), rest, changes)})


# Presets and the command line


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_the_command_line_gives_each_preset(name):
    config = preset(name)
    assert config.name == name
    assert config.data.sequence_length <= config.model.max_position_embeddings
    assert parse_command_line(["--preset", name]) == config
    assert hash(config) == hash(preset(name))


def test_the_preset_is_demo_unless_said():
    assert parse_command_line([]) == preset("demo")


def test_text_of_ones_own():
    flags = "--data.path a.txt b/ --data.weights 0.7 0.3 --data.tokenizer t --data.held-out-path c"
    data = parse_command_line(flags.split()).data
    assert data.path == (Path("a.txt"), Path("b"))
    assert data.weights == (0.7, 0.3)
    assert (data.tokenizer, data.held_out_path) == (Path("t"), (Path("c"),))
    assert data.is_packed and preset("demo").data.is_packed
    assert not preset("llama2-7b").data.is_packed


def test_flags_override_the_preset():
    got = parse_command_line(
        """--optimizer.learning-rate 0.5 --optimizer.schedule wsd --data.batch-size 16
        --model.remat attention,up --model.eos-token-id 3 4 --model.rope-parameters.rope-theta 5e5
        --mesh.fsdp 2 --runs-dir elsewhere --no-save --preset llama2-7b""".split()
    )
    base = preset("llama2-7b")
    replace = dataclasses.replace
    rope = replace(base.model.rope_parameters, rope_theta=5e5)
    want = replace(
        base,
        optimizer=replace(base.optimizer, learning_rate=0.5, schedule="wsd"),
        data=replace(base.data, batch_size=16),
        model=replace(base.model, remat="attention,up", eos_token_id=(3, 4), rope_parameters=rope),
        mesh=replace(base.mesh, fsdp=2),
        runs_dir=Path("elsewhere"),
    )
    assert got == want
    assert parse_command_line(["--no-save"]) == replace(preset("demo"), save=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--preset llama9", "'llama9'.*llama3.2-1b"),
        ("--preset", "^--preset: .*expected one argument"),
        ("--init-from", "^--init-from: expected one argument"),
        ("--optimizer.learning-rat 1", r"rat.*did you mean --optimizer\.learning-rate\?"),
        ("--pre demo", "--pre"),
        ("--steps many", "^--steps: .*'many'"),
        ("--steps", "--steps"),
        ("--optimizer.schedule linear", "linear.*cosine.*wsd"),
        ("--optimizer.b1 x", r"^--optimizer\.b1: .*'x'"),
        ("--model.remat most", r"^--model\.remat: .*'most'.*minimal"),
        ("--model.num-attention-heads 5 --model.num-key-value-heads 2", "=5 .*=2"),
        ("--model.attention-dropout 0.1", r"attention_dropout=0\.1 is not implemented"),
        ("--data.eos-token=", r"^--data\.eos-token: the value is empty; give a value or leave"),
        ("--data.batch-size 0", r"^--data\.batch-size: batch_size=0"),
        ("--steps 5", r"^--optimizer\.warmup-steps: .*warmup_steps=20.*steps=5"),
        ("--data.source stdlib --data.path a", "^--data.source stdlib has no effect with"),
        ("--model.dtype float64", r"^--model\.dtype: dtype='float64' must be one of bfloat16"),
        ("--z-loss 1e-40", r"^--z-loss: z_loss=1e-40 must be 0 or at least 1\.18e-38"),
        (
            "--model.rms-norm-eps 1e-40",
            r"^--model\.rms-norm-eps: .*=1e-40 must be 0 or .* 1\.18e-38 to 3\.4e\+38, .*float32;",
        ),
        ("--data.weights 1 2 --data.path a", r"^--data\.weights: .*2 weights for 1 path;"),
        ("--data.weights 3 --data.path a", r"^--data\.weights 3\.0 has no effect.* one path"),
        ("--checkpoint.keep 2", r"^--checkpoint\.keep 2 has no effect without --checkpoint\.every"),
        (
            "--data.cache-dir tokens",
            r"^--data\.cache-dir: cache_dir=tokens is for text of your own",
        ),
        (
            "--preset llama3.2-1b --data.path a --data.held-out-path b c",
            r"^--data\.held-out-path b c has no effect with --eval-every 0",
        ),
        (
            "--preset llama3.2-1b --sample-prompt Hello",
            "^--sample-prompt 'Hello' has no effect with --sample-tokens 0",
        ),
        ("--eval-batches=8 --eval-every 0", "^--eval-batches 8 has no effect with --eval-every 0"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments, message, capsys):
    with pytest.raises(FlagError, match=message) as caught:
        parse_command_line(arguments.split())
    assert not re.search("[\n│─╭]|Error parsing", str(caught.value))
    assert not any(capsys.readouterr())


@pytest.mark.parametrize("flag", ["--data.token-dtype uint16", "--data.text-field text"])
def test_defaults_that_are_given_without_effect_are_refused(flag):
    with pytest.raises(DataError, match=f"^{flag} has no effect, because no file is a .*leave it"):
        parse_command_line(["--data.path", "a.txt", *flag.split()])
    parse_command_line(["--data.path", "a.txt", "b.bin", "c.jsonl", *flag.split()])


def test_help_names_presets_and_flags(capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_command_line(["--help"])
    assert exit_info.value.code == 0
    output = capsys.readouterr().out
    assert "usage: python -m train" in output
    for name in ("--preset", *PRESET_NAMES, "--optimizer.learning-rate", "--no-save", "--steps"):
        assert name in output


def test_unknown_preset():
    with pytest.raises(ValueError, match=r"'llama3-8b'; did you mean llama3\.1-8b\?"):
        preset("llama3-8b")
    with pytest.raises(ValueError, match=r"'llama9'; .*[Tt]here are demo, llama3\.2-1b"):
        preset("llama9")


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("data", {"sequence_length": 0}, "sequence_length=0"),
        ("data", {"batch_size": -1}, "batch_size=-1"),
        ("data", {"accumulation_steps": 0}, "accumulation_steps=0"),
        ("data", {"held_out_fraction": 1.0}, r"held_out_fraction=1\.0 .*\[0, 1\)"),
        ("data", {"path": (Path("a"),), "weights": (1.0, 2.0)}, "2 weights for 1 path;"),
        ("data", {"path": (Path("a"),), "weights": (0.0,)}, r"weights=\(0\.0,\) must lie in"),
        ("data", {"text_field": ""}, "text_field=''"),
        ("data", {"batch_size": 2**30, "sequence_length": 8}, r"below 2\*\*31 tokens"),
        ("data", {"sequence_length": 33}, "=33 exceeds .*max_position_embeddings=32"),
        ("model", {"dtype": "int32"}, "dtype='int32' must be one of bfloat16, float16"),
        ("model", {"param_dtype": "bool"}, "param_dtype='bool' must be one of"),
        ("", {"name": ""}, "name='' must be the name of a folder"),
        ("", {"name": " "}, "name=' ' must be the name of a folder"),
        ("", {"name": ".."}, r"name='\.\.' must be the name of a folder"),
        ("", {"name": "../a"}, "name='../a' .* without a slash; --runs-dir"),
        ("", {"name": "a\nb"}, "must not have line breaks"),
        ("", {"name": "é" * 101}, "of 1 to 200 bytes"),
        ("data", {"path": (Path("a"), Path("a"))}, "same file twice"),
        ("data", {"tokenizer": Path("a")}, "tokenizer=a is for text of your own"),
        ("data", {"text_field": "a"}, "text_field=a is for text of your own"),
        ("data", {"held_out_fraction": 0.5}, r"held_out_fraction=0\.5 is for text of your own"),
        ("data", {"held_out_path": (Path("a"),)}, "held_out_path=a is for text of your own"),
        (
            "data",
            ONE_FILE | {"held_out_path": (Path("b"),), "held_out_fraction": 0.1},
            r"held_out_fraction=0\.1 has no effect with held_out_path",
        ),
        ("distill", {"temperature": 1e-25}, r"temperature=1e-25 must lie in"),
        ("optimizer", {"warmup_steps": -1}, "warmup_steps=-1"),
        ("optimizer", {"warmup_steps": 4}, "warmup_steps=4.*steps=4"),
        ("optimizer", {"clip_norm": -1.0}, r"clip_norm=-1\.0"),
        ("optimizer", {"decay_fraction": 1.5}, r"decay_fraction=1\.5"),
        ("optimizer", {"final_fraction": -0.5}, r"final_fraction=-0\.5"),
        ("optimizer", {"name": "sgd", "b2": 0.9}, r"b2=0\.9: sgd has no b2; leave it out"),
        ("optimizer", {"name": "lion", "eps": 0.1}, r"eps=0\.1: lion has no eps; leave it out"),
        ("optimizer", {"decay_fraction": 0.5}, "decay_fraction=0.5 is for schedule='wsd'"),
        ("optimizer", {"name": "adafactor", "momentum_dtype": "float32"}, "adafactor has no"),
        ("checkpoint", {"every": -1}, "every=-1"),
        ("checkpoint", {"keep": 0}, "keep=0"),
        ("mesh", {"data": 0}, "data=0"),
        ("mesh", {"fsdp": 0}, "fsdp=0"),
        ("mesh", {"tensor": 0}, "tensor=0"),
        ("distributed", {"num_processes": 0}, "num_processes=0"),
        ("distributed", {"process_id": -1}, "process_id=-1"),
        ("distributed", {"process_id": 1}, "process_id=1 must be below num_processes=1"),
        ("distributed", {"num_processes": 2}, "coordinator_address=None must be host:port"),
        ("distributed", TOGETHER | {"coordinator_address": "host"}, "'host' must be host:port"),
        ("distributed", TOGETHER | {"cluster": "slurm"}, "'slurm' sets .* leave them out"),
        ("distributed", {"initialization_timeout_s": 0}, "initialization_timeout_s=0"),
        ("distributed", {"heartbeat_timeout_s": 0}, "heartbeat_timeout_s=0"),
        ("distributed", {"step_timeout_s": -1.0}, r"step_timeout_s=-1\.0"),
        ("", {"steps": 0}, "steps=0"),
        ("", {"max_skipped_steps": 0}, "max_skipped_steps=0"),
        ("", {"xla_options": ("fast",)}, "'fast' must be name=value"),
        ("", {"skip_loss_spikes": -1.0}, r"skip_loss_spikes=-1\.0"),
        ("", {"eval_every": -1}, "eval_every=-1"),
        ("", {"eval_batches": 0}, "eval_batches=0"),
        ("", {"log_every": 0}, "log_every=0"),
        ("", {"sample_tokens": -1}, "sample_tokens=-1"),
        ("", {"profile_steps": "2"}, "profile_steps='2' must name steps A:B"),
        ("", {"profile_steps": "3:2"}, "1 <= A <= B <= 4"),
        ("", {"profile_steps": "1:5"}, "profile_steps='1:5'"),
        ("", {"pgle": True}, "pgle compiles again at step 4, and the run has steps=4"),
        ("", {"profile_steps": "4:6", "pgle": True, "steps": 9}, "'4:6' must begin after step 4"),
        # 1 + 4 + 28 tokens.
        ("", {"sample_tokens": 28}, "33 tokens.*max_position_embeddings=32"),
    ],
)
def test_values_out_of_range_are_printed(part, changes, message):
    with pytest.raises(ValueError, match=message):
        changed(CONFIG, part, changes)


def test_numbers_may_be_zero():
    config = parse_command_line(["--z-loss", "0", "--model.rms-norm-eps", "0"])
    assert config.z_loss == config.model.rms_norm_eps == 0
    changed(CONFIG, "", {"z_loss": 1.2e-38})


def test_derived_sizes():
    data = DataConfig(source="stdlib", sequence_length=8, batch_size=4, accumulation_steps=3)
    assert data.rows_per_step == 12
    assert data.tokens_per_step == 96
