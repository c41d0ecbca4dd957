"""One finished run, which the tests of several commands read."""

import dataclasses
import json

import jax
import pytest

import train.cli.command_line
import train.loop
import train.outputs
import train.reporting.report
import train.setup
from models.sharding import make_mesh
from support import tiny_run
from support.tokenizer_files import write_byte_level, write_config
from train.config import CheckpointConfig, DataConfig, OptimizerConfig, TrainConfig
from train.loop import run

MODEL = dataclasses.replace(tiny_run.MODEL, bos_token_id=None, eos_token_id=(1, 257))


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """A run on text with a tokenizer, which writes all that a run can write."""
    folder = tmp_path_factory.mktemp("runs")
    for name, first in (("text", 0), ("dev", 500)):
        lines = [{"text": f"the quick fox {i} jumps\n"} for i in range(first, first + 300)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "tokenizer").mkdir()
    write_byte_level(folder / "tokenizer" / "tokenizer.json")
    write_config(folder / "tokenizer", eos_token="<|end_of_text|>")
    return TrainConfig(
        name="tiny",
        runs_dir=folder,
        model=MODEL,
        data=DataConfig(
            source="stdlib",
            path=(folder / "text.jsonl",),
            held_out_path=(folder / "dev.jsonl",),
            tokenizer=folder / "tokenizer",
            bos_token="",
            cache_dir=folder / "cache",
            sequence_length=16,
            batch_size=8,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
        checkpoint=CheckpointConfig(every=2, keep=9),
        steps=4,
        eval_every=2,
        eval_batches=10**6,
        sample_prompt="the fox",
        sample_tokens=5,
        save=True,
        profile_steps="2:3",
        dump_hlo=True,
    )


@pytest.fixture(scope="session")
def compiled():
    """The steps that were compiled for the finished run."""
    return []


@pytest.fixture(scope="session")
def finished(config, compiled):
    """The folder of a run on one device."""
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    compile_steps = train.loop.compile_steps
    keep = lambda *args: compiled.append(compile_steps(*args)) or compiled[-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "mesh_of", lambda config: mesh)
        patch.setattr(train.loop, "compile_steps", keep)
        patch.setattr(train.reporting.report, "details_png", lambda *args: b"")
        return run(config)
