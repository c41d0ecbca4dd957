"""Every field of a configuration changes something, or its change is refused.

The file is long because it has a table of all fields and the functions that observe them.
"""

import contextlib
import dataclasses
import functools
import io
import json
import math
import os
import re
import shutil
import sys
import tempfile
import types
from pathlib import Path
from typing import get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import train.loop
import train.outputs
import train.setup
import train.step
from models.config import LlamaConfig
from models.llama import Llama
from models.llama_hf import config_to_hf
from models.rope import RopeParameters, rotary_cos_sin
from models.sharding import make_mesh
from support.tokenizer_files import write_byte_level
from train import distributed
from train.config import (
    CheckpointConfig,
    DataConfig,
    DistillConfig,
    DistributedConfig,
    DPOConfig,
    MeshConfig,
    OptimizerConfig,
    TrainConfig,
    preset,
)
from train.data import Corpus, SyntheticDataset
from train.objectives import loss_and_sums
from train.optimizers import make_optimizer
from train.setup import Datasets, compile_steps
from train.step import init_state, jit_train_step, make_train_step, model_graph
from train.teacher import abstract_frozen

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
TOGETHER = {"num_processes": 2, "coordinator_address": "host:1"}


# Every field is read. An observer makes something visible of a configuration. A field is read if
# another value changes the result of its observer.


def changed(config, part, changes):
    """`config` with `changes` to its part of that name, or to itself."""
    if not part:
        return dataclasses.replace(config, **changes)
    name, _, rest = part.partition(".")
    return dataclasses.replace(config, **{name: changed(getattr(config, name), rest, changes)})


def program(fn, *args):
    """The program of a function, without addresses of Python objects."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*args)))


def update(config):
    def steps(params):
        optimizer = make_optimizer(config.optimizer, config.steps)
        return optimizer.update(params, optimizer.init(params), params)

    with jax.numpy_dtype_promotion("standard"):
        return program(steps, {"kernel": jnp.zeros(3), "weight": jnp.zeros(3)})


def model(config):
    def forward(tokens):
        llama = Llama(config.model, rngs=nnx.Rngs(0))
        return llama.logits(llama(tokens))

    with jax.numpy_dtype_promotion("standard"):
        return program(forward, jnp.zeros((1, 8), jnp.int32))


def norm_implementation(config):
    """The implementation that the norms get. Off the GPU it changes nothing else."""
    return nnx.eval_shape(lambda: Llama(config.model, rngs=nnx.Rngs(0))).norm.implementation


def recipe(config):
    """The FP8 recipe of an MLP's layers. Weights this small do not run in FP8."""
    return nnx.eval_shape(lambda: Llama(config.model, rngs=nnx.Rngs(0))).layers.mlp.recipe


def attention(config):
    """The implementations that the model names."""
    seen = []

    def attend(q, k, v, *, implementation, **options):
        seen.append(implementation)
        return q

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.nn, "dot_product_attention", attend)
        model(config)
    return seen


def checkpoint(config):
    return config_to_hf(config.model)


def rotation(config):
    options = {"head_dim": 16, "max_position_embeddings": config.model.max_position_embeddings}
    positions = jnp.arange(0, 64, 8, dtype=jnp.int32)[None]
    cos, sin = rotary_cos_sin(config.model.rope_parameters, positions, **options)
    return [cos.tolist(), sin.tolist()]


def loss(config):
    state = abstract_state(config.model)
    batch = {name: jnp.zeros((1, 8), jnp.int32) for name in ("tokens", "labels")}
    graphdef = model_graph(config.model)
    return program(
        lambda p: loss_and_sums(graphdef, p, batch, z_loss=config.z_loss)[0], state.params
    )


@functools.cache
def abstract_state(model):
    mesh = make_mesh(data=8, fsdp=1)
    config = dataclasses.replace(CONFIG, model=model)
    return jax.eval_shape(lambda: init_state(config, mesh))


def train_step(config):
    batch = {name: jnp.zeros((1, 8, 8), jnp.int32) for name in ("tokens", "labels")}
    if config.objective == "dpo":
        batch["reference"] = jnp.zeros((1, 8, 1))
    frozen = abstract_frozen(config, make_mesh(data=1, fsdp=1, devices=jax.devices()[:1]))
    with jax.numpy_dtype_promotion("standard"):
        return program(make_train_step(config), abstract_state(config.model), batch, *frozen)


def long_train_step(config):
    # A device computes no fewer rows than a tile has.
    batch = {name: jnp.zeros((1, 64, 16), jnp.int32) for name in ("tokens", "labels")}
    with jax.numpy_dtype_promotion("standard"):
        return program(make_train_step(config), abstract_state(config.model), batch)


def compiler_options(config):
    """The settings that decide XLA's options for the step."""
    seen = []
    mesh = make_mesh(data=8, fsdp=1)
    with pytest.MonkeyPatch.context() as patch:
        options = lambda _, chosen, **of_model: seen.append((chosen, of_model))
        patch.setattr(train.step, "compiler_options", options)
        jit_train_step(config, train.step.abstract_state(config, mesh))
    return seen


def compiled_steps(config):
    """The compiled step, and the one that the loop calls."""
    state, mesh = abstract_state(config.model), make_mesh(data=8, fsdp=1)
    jitted = types.SimpleNamespace(lower=lambda *_: types.SimpleNamespace(compile=lambda: "step"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.setup, "jit_train_step", lambda *_: jitted)
        patch.setattr(train.setup, "memory_report", lambda _: "")
        patch.setattr(train.setup, "with_measured_latencies", lambda _: "step with latencies")
        random = Datasets(SyntheticDataset(16, config.data.sequence_length), None, {})
        steps = compile_steps(config, mesh, state, random)
    return steps.program, steps.train


def initial_parameters(config):
    return program(lambda: init_state(config, make_mesh(data=8, fsdp=1)).params)


def run(config):
    """All that the loop does and writes, except for times, with steps that compute nothing."""
    seen = []

    metrics_of_a_step = ("loss", "nll", "accuracy", "lr", "grad_norm", "mean_context")

    def compile_nothing(config, mesh, state, datasets):
        def train_step(state, batch):
            seen.append((dict(mesh.shape), np.asarray(batch["tokens"]).tolist()))
            values = {name: np.float32(1) for name in metrics_of_a_step}
            none = {
                name: np.int32(0) for name in ("skipped_steps", "skipped_in_a_row", "num_tokens")
            }
            return state, values | none

        def eval_step(params, batch):
            seen.append(np.asarray(batch["tokens"]).tolist())
            one = np.float32(1)
            return {"nll_sum": one, "correct_sum": one, "num_tokens": np.int32(1)}

        return train.setup.CompiledSteps(train_step, eval_step)

    def generate(model, prompts, **options):
        seen.append((prompts.tolist(), str(options)))
        return prompts

    def write_report(run_dir, *, samples, summary):
        seen.append((samples, summary))
        return "report.html"

    zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), abstract_state(config.model))

    def first_state(config, mesh):
        seen.append(config.init_from)
        return zeros

    def start_tracker(*args, **options):
        seen.append(f"{sorted(options)} {options.get('project')}")
        ignore = lambda *args, **options: None
        names = "add_scalar", "close", "define_metric", "log", "finish"
        return types.SimpleNamespace(**dict.fromkeys(names, ignore))

    tracker = types.SimpleNamespace(SummaryWriter=start_tracker, init=start_tracker)
    corpus = Corpus({f"{i}.py": bytes([i]) * 50 for i in range(200)})
    printed = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(train.loop, "compile_steps", compile_nothing)
        patch.setattr(train.outputs, "generate", generate)
        patch.setattr(train.loop, "first_state", first_state)
        patch.setattr(train.loop, "write_hlo", lambda folder, *_: seen.append(folder.name))
        patch.setattr(train.loop, "memory_report", lambda compiled: "")
        patch.setattr(jax.profiler, "start_trace", lambda folder: seen.append("trace"))
        patch.setattr(jax.profiler, "stop_trace", lambda: seen.append("end of trace"))
        for name in ("tensorboardX", "wandb"):
            patch.setitem(sys.modules, name, tracker)
        patch.setattr(train.outputs, "save_pretrained", lambda model, path: seen.append(path.name))
        patch.setattr(train.outputs.report, "write_report", write_report)
        patch.setattr(train.setup.data, "stdlib_corpus", lambda: corpus)
        run_dir = train.loop.run(config)
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        seen.append(sorted(path.name for path in run_dir.glob("checkpoints/*")))
    rows = [
        {key: value for key, value in json.loads(line).items() if not key.endswith("_s")}
        for line in lines
    ]
    return [str(run_dir), seen, rows, re.sub(r"eta \S+|\S+ tok/s", "", printed.getvalue())]


def start(config):
    """The calls that tell JAX about the processes."""
    seen = []
    peers = types.SimpleNamespace(start=lambda: None, leave=lambda: None)

    def make_peers(client, index, timeout_s):
        seen.append(timeout_s)
        return peers

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax.distributed, "initialize", lambda **options: seen.append(options))
        patch.setattr(jax.distributed, "shutdown", lambda: None)
        patch.setattr(jax.config, "update", lambda *_: None)
        patch.setattr(distributed, "_Peers", make_peers)
        with distributed.started(config.distributed):
            pass
    return seen


def watch(config):
    """The time limit of a step."""
    with pytest.MonkeyPatch.context() as patch:
        seen = []
        real = distributed.Watchdog.__init__
        patch.setattr(
            distributed.Watchdog,
            "__init__",
            lambda self, limit: seen.append(limit) or real(self, limit),
        )
        run(config)
    return seen


# Text for the fields of `DataConfig`.
FILES = Path(tempfile.gettempdir()) / f"test_config_{os.getpid()}"
FROM_FILE = {"path": (FILES / "a.jsonl",), "cache_dir": Path("cache")}


@pytest.fixture(scope="module", autouse=True)
def files():
    FILES.mkdir()
    for name in ("a", "b"):
        records = [{"text": f"{name} the fox {i}", "other": f"{i} {name}"} for i in range(200)]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (FILES / f"{name}.jsonl").write_text(lines)
    # As uint32 these are the same without the zeros.
    documents = [np.array([first, *range(40), 257], "<u4") for first in range(100)]
    np.concatenate(documents).tofile(FILES / "tokens.bin")
    write_byte_level(FILES / "tokenizer.json")
    (FILES / "model").mkdir()
    (FILES / "model" / "config.json").write_text(json.dumps(config_to_hf(MODEL)))
    (FILES / "other").mkdir()
    other = dataclasses.replace(MODEL, num_hidden_layers=3)
    (FILES / "other" / "config.json").write_text(json.dumps(config_to_hf(other)))
    yield
    shutil.rmtree(FILES)


ROPE = {
    "yarn": RopeParameters(
        rope_type="yarn", rope_theta=1e4, original_max_position_embeddings=256, factor=4.0
    ),
    "llama3": RopeParameters(
        rope_type="llama3",
        rope_theta=1e4,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=16,
    ),
    "longrope": RopeParameters(
        rope_type="longrope",
        rope_theta=1e4,
        original_max_position_embeddings=16,
        short_factor=(1.0,) * 8,
        long_factor=(3.0,) * 8,
    ),
}
ROPE["short"] = dataclasses.replace(ROPE["longrope"], original_max_position_embeddings=1024)
ROPE["mscale"] = dataclasses.replace(ROPE["yarn"], mscale=1.0, mscale_all_dim=0.5)

PARTS = {
    TrainConfig: "",
    DataConfig: "data",
    OptimizerConfig: "optimizer",
    MeshConfig: "mesh",
    CheckpointConfig: "checkpoint",
    DistributedConfig: "distributed",
    DPOConfig: "dpo",
    DistillConfig: "distill",
    LlamaConfig: "model",
    RopeParameters: "model.rope_parameters",
}
OF_PAIRS = dataclasses.replace(
    CONFIG, objective="dpo", data=dataclasses.replace(CONFIG.data, **FROM_FILE)
)
OF_TEACHER = dataclasses.replace(
    CONFIG, objective="distill", distill=DistillConfig(teacher=FILES / "model")
)
# Another value for every field, and the observer that sees it or the error that refuses it. Both
# configurations have the settings of a third entry, or are made from that configuration.
FIELDS = {
    TrainConfig: {
        "name": ("other", run),
        "runs_dir": (Path("elsewhere"), run),
        "init_from": (FILES / "model", run),
        "objective": ("dpo", ValueError),
        "steps": (6, run),
        "seed": (1, initial_parameters),
        "z_loss": (0.1, loss),
        "counted_fraction": (0.5, long_train_step),
        "max_skipped_steps": (5, train_step),
        "skip_loss_spikes": (6.0, train_step),
        "eval_every": (3, run),
        "eval_batches": (1, run),
        "log_every": (1, run),
        "sample_prompt": ("class", run),
        "sample_tokens": (5, run),
        "save": (False, run),
        "tensorboard": (True, run),
        "wandb": ("project", run),
        "pgle": (True, compiled_steps, {"steps": 6}),
        "profile_steps": ("2:3", run),
        "dump_hlo": (True, run),
        "xla_options": (("none",), compiler_options),
    },
    DataConfig: {
        "source": ("synthetic", run),
        "path": ((FILES / "b.jsonl",), run, FROM_FILE),
        "weights": ((9.0, 1.0), run, FROM_FILE | {"path": (FILES / "a.jsonl", FILES / "b.jsonl")}),
        "tokenizer": (FILES / "tokenizer.json", run, FROM_FILE),
        "bos_token": ("", run, FROM_FILE | {"tokenizer": FILES / "tokenizer.json"}),
        "eos_token": ("t", run, FROM_FILE | {"tokenizer": FILES / "tokenizer.json"}),
        "text_field": ("other", run, FROM_FILE),
        "token_dtype": ("uint32", run, FROM_FILE | {"path": (FILES / "tokens.bin",)}),
        "held_out_fraction": (0.5, run, FROM_FILE),
        "held_out_path": ((FILES / "b.jsonl",), run, FROM_FILE),
        "cache_dir": (Path("elsewhere"), run, FROM_FILE),
        "sequence_length": (4, run),
        "batch_size": (16, run),
        "accumulation_steps": (2, run),
    },
    OptimizerConfig: {
        "name": ("sgd", update),
        "learning_rate": (0.1, update),
        "schedule": ("wsd", update),
        "warmup_steps": (1, update),
        "decay_fraction": (0.5, update, {"schedule": "wsd"}),
        "final_fraction": (0.2, update),
        "b1": (0.8, update),
        "b2": (0.8, update),
        "eps": (0.1, update),
        "weight_decay": (0.2, update),
        "clip_norm": (0.5, update),
        "momentum_dtype": ("bfloat16", update),
    },
    MeshConfig: {"data": (2, ValueError), "fsdp": (2, run), "tensor": (2, run)},
    CheckpointConfig: {"every": (2, run), "keep": (1, run, CheckpointConfig(every=1))},
    DistributedConfig: {
        "cluster": ("slurm", start),
        "coordinator_address": ("other:1", start, TOGETHER),
        "num_processes": (3, start, TOGETHER),
        "process_id": (1, start, TOGETHER),
        "initialization_timeout_s": (5, start, TOGETHER),
        "heartbeat_timeout_s": (5, start, TOGETHER),
        "step_timeout_s": (5.0, watch),
    },
    DPOConfig: {"beta": (0.2, train_step, OF_PAIRS)},
    DistillConfig: {
        "teacher": (FILES / "other", train_step, OF_TEACHER),
        "divergence": ("jsd", train_step, OF_TEACHER),
        "temperature": (2.0, train_step, OF_TEACHER),
        "label_weight": (0.5, train_step, OF_TEACHER),
    },
    LlamaConfig: {
        "vocab_size": (384, model),
        "hidden_size": (32, model),
        "intermediate_size": (64, model),
        "num_hidden_layers": (3, model),
        "num_attention_heads": (8, model),
        "num_key_value_heads": (1, model),
        "head_dim": (8, model),
        "hidden_act": ("relu", model),
        "max_position_embeddings": (4, ValueError),
        "initializer_range": (0.1, model),
        "rms_norm_eps": (0.1, model),
        "tie_word_embeddings": (False, model),
        "attention_bias": (True, model),
        "qk_norm": (True, model),
        "mlp_bias": (True, model),
        "sliding_window": (4, model),
        "attention_dropout": (0.1, NotImplementedError),
        "bos_token_id": (1, checkpoint),
        "eos_token_id": ((2, 3), checkpoint),
        "pad_token_id": (0, model),
        "dtype": ("bfloat16", model),
        "param_dtype": ("bfloat16", model),
        "scan_layers": (False, model),
        "remat": ("full", model),
        "mlp_chunk_size": (4, model, {"remat": "full"}),
        "implementation": ("xla", norm_implementation),
        "fp8": ("tensorwise", recipe),
        "attention_implementation": ("cudnn", attention),
    },
    RopeParameters: {
        "rope_type": ("linear", rotation, {"factor": 2.0, "rope_type": "dynamic"}),
        "rope_theta": (5e5, rotation),
        "factor": (2.0, rotation, ROPE["yarn"]),
        "low_freq_factor": (2.0, rotation, ROPE["llama3"]),
        "high_freq_factor": (8.0, rotation, ROPE["llama3"]),
        "original_max_position_embeddings": (32, rotation, ROPE["llama3"]),
        "attention_factor": (2.0, rotation, ROPE["yarn"]),
        "beta_fast": (2.0, rotation, ROPE["yarn"]),
        "beta_slow": (0.1, rotation, ROPE["yarn"]),
        "mscale": (2.0, rotation, ROPE["mscale"]),
        "mscale_all_dim": (2.0, rotation, ROPE["mscale"]),
        "truncate": (False, rotation, ROPE["yarn"]),
        "short_factor": ((5.0,) * 8, rotation, ROPE["short"]),
        "long_factor": ((5.0,) * 8, rotation, ROPE["longrope"]),
    },
}


def test_every_field_is_listed():
    """A field that is added must be added to `FIELDS`, too."""
    for cls, part in PARTS.items():
        parts = {p.rpartition(".")[2] for p in PARTS.values() if p.rpartition(".")[0] == part}
        names = {field.name for field in dataclasses.fields(cls)}
        assert set(FIELDS[cls]) == names - (parts if part in ("", "model") else set()), cls


def base_of(cls, name):
    """A configuration that reads a field."""
    before = FIELDS[cls][name][2] if len(FIELDS[cls][name]) > 2 else {}
    if isinstance(before, TrainConfig):
        return before
    if dataclasses.is_dataclass(before):
        before = {field.name: getattr(before, field.name) for field in dataclasses.fields(before)}
    return changed(CONFIG, PARTS[cls], before)


def part_of(config, cls):
    return functools.reduce(getattr, filter(None, PARTS[cls].split(".")), config)


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        # In the normal run tests/models/test_config.py has the fields of the model.
        pytest.param(cls, name, marks=pytest.mark.full if cls is LlamaConfig else ())
        for cls, fields in FIELDS.items()
        for name in fields
    ],
)
def test_every_field_is_read(cls, name):
    other, observer, *_ = FIELDS[cls][name]
    base = base_of(cls, name)
    assert getattr(part_of(base, cls), name) != other
    if isinstance(observer, type):
        observe = run if cls is MeshConfig else model
        observe(base)
        with pytest.raises(observer, match=str(other)):
            observe(changed(base, PARTS[cls], {name: other}))
        return
    assert observed(observer, base) != observer(changed(base, PARTS[cls], {name: other}))


@functools.cache
def observed(observer, config):
    """An observation that several tests compare with. It must repeat itself."""
    seen = observer(config)
    assert observer(config) == seen
    return seen


def numbers():
    """Class and name of every field for numbers, without the ids of tokens."""
    for cls in PARTS:
        for name, hint in get_type_hints(cls).items():
            if re.search(r"\b(int|float)\b", str(hint)) and not name.endswith("_token_id"):
                yield cls, name, hint


@pytest.mark.parametrize(("cls", "name", "hint"), list(numbers()))
def test_no_field_takes_a_number_that_cannot_be(cls, name, hint):
    """NaN, infinities, and numbers that are too small or too large for the programs."""
    base = base_of(cls, name)
    bad = [math.nan, math.inf, -math.inf] + [-5.0] * (not name.startswith("mscale"))
    if "float" not in str(hint):  # the memory limits the sizes of a model
        bad = [-5] if cls in (LlamaConfig, RopeParameters) else [-5, 2**64]
    if name in ("short_factor", "long_factor", "weights"):
        bad = [(value,) * (2 if name == "weights" else 8) for value in bad]
    for value in bad:
        with pytest.raises((ValueError, NotImplementedError), match=name):
            changed(base, PARTS[cls], {name: value})


def test_the_seed_orders_the_data_and_draws_the_sample():
    """The test above shows that the seed draws the initial parameters."""
    _, seen, _, _ = observed(run, CONFIG)
    _, other, _, _ = run(dataclasses.replace(CONFIG, seed=1))
    assert len(seen) == len(other)
    differ = [a != b for a, b in zip(seen, other, strict=True)]
    # The first state, three evaluations of two batches and a sample around four steps, the model,
    # two samples, the report, the checkpoints.
    held_out, step = [False, False, True], [True]
    assert differ == [
        False,
        *held_out,
        *step * 2,
        *held_out,
        *step * 2,
        *held_out,
        False,
        *step * 2,
        False,
        False,
    ]
