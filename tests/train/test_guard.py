"""Steps that are skipped: which, and that they change nothing."""

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train.loop
import train.setup
import train.step
from models.sharding import make_mesh, parameter_path
from support import tiny_run
from train.cli import replay
from train.config import CheckpointConfig
from train.errors import FolderError, RunError
from train.guard import WINDOW, initial_guard, judge
from train.loop import run
from train.reporting.metrics import jsonable
from train.reporting.results import load_metrics
from train.setup import CompiledSteps
from train.step import init_state, jit_train_step

CONFIG = dataclasses.replace(tiny_run.CONFIG, max_skipped_steps=3)
pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module", autouse=True)
def runs_on_one_device():
    with pytest.MonkeyPatch.context() as patch:
        for module in (train.loop, replay):
            patch.setattr(module, "mesh_of", lambda config: one_device())
        yield


def losses_judged(losses, *, grad_norms=None, **options):
    """Whether each step of a series is taken, and the statistics after it."""
    options = {"max_skipped_steps": 10**6, "spike_factor": 0.0} | options
    one = jax.jit(lambda *args: judge(*args, **options))
    guard, taken, guards = initial_guard(), [], []
    for step, loss in enumerate(losses):
        norm = 1.0 if grad_norms is None else grad_norms[step]
        take, guard = one(guard, jnp.int32(step), jnp.float32(loss), jnp.float32(norm))
        taken.append(bool(take))
        guards.append(jax.device_get(guard))
    return taken, guards


def test_a_step_that_is_not_finite_is_skipped_and_counted():
    losses = [1, math.nan, math.inf, 1, 1, -math.inf, 1]
    norms = [1, 1, 1, math.nan, 1, 1, math.inf]
    taken, guards = losses_judged(losses, grad_norms=norms)
    assert taken == [True, False, False, False, True, False, False]
    assert [int(guard.skipped) for guard in guards] == [0, 1, 2, 3, 3, 4, 5]
    assert [int(guard.in_a_row) for guard in guards] == [0, 1, 2, 3, 0, 1, 2]
    assert float(guards[-1].loss_mean) == 1.0 and float(guards[-1].loss_variance) == 0.0


def test_nothing_is_taken_after_too_many_in_a_row():
    taken, guards = losses_judged([math.nan] * 3 + [1.0] * 3, max_skipped_steps=3)
    assert not any(taken)
    assert int(guards[-1].in_a_row) == 6


def test_mean_and_variance_of_the_first_losses_are_the_plain_ones():
    losses = np.random.default_rng(0).normal(3, 0.5, WINDOW)
    _, guards = losses_judged(losses)
    for n in (1, 2, 10, WINDOW):
        np.testing.assert_allclose(guards[n - 1].loss_mean, np.mean(losses[:n]), rtol=1e-5)
        np.testing.assert_allclose(guards[n - 1].loss_variance, np.var(losses[:n]), atol=1e-5)


def test_old_losses_are_forgotten():
    _, guards = losses_judged([10.0] * WINDOW + [1.0] * 5 * WINDOW)
    assert abs(guards[-1].loss_mean - 1) < 0.1


def test_spikes_are_skipped_once_the_mean_is_known_and_do_not_enter_it():
    losses = np.random.default_rng(0).normal(3, 0.1, WINDOW)
    losses[[5, 100, 101]] = 6.0
    losses[110] = 0.1  # far below
    taken, guards = losses_judged(losses, spike_factor=6.0)
    assert [step for step, take in enumerate(taken) if not take] == [100, 101]
    assert guards[99].loss_mean == guards[101].loss_mean
    assert all(losses_judged(losses)[0])


def one_device():
    return make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])


def batch_of(seed):
    tokens = np.random.default_rng(seed).integers(64, size=(1, 8, 16), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(tokens)}


@pytest.fixture(scope="module")
def first_state():
    return init_state(CONFIG, one_device())


def compiled_step(state):
    return jit_train_step(CONFIG, state).lower(state, batch_of(0)).compile()


@pytest.fixture(scope="module")
def compiled(first_state):
    """The compiled step. All tests of steps and runs share it."""
    return compiled_step(first_state)


@pytest.fixture(scope="module")
def step(compiled):
    """The step, which leaves its arguments as they are."""
    copied = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
    return lambda state, batch: compiled(copied(state), batch)


def poisoned(state, value=jnp.nan):
    """The state with one parameter that is not finite: the loss and all gradients are neither."""
    in_norm = lambda path: parameter_path(path) == ("norm", "weight")
    poison = lambda path, a: a.at[3].set(value) if in_norm(path) else a
    params = jax.tree_util.tree_map_with_path(poison, state.params)
    return dataclasses.replace(state, params=params)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_leaves_parameters_and_moments_as_they_are(step, first_state, bad):
    state, _ = step(first_state, batch_of(0))
    state, _ = step(state, batch_of(1))
    before = poisoned(state, bad)
    after, metrics = step(before, batch_of(2))
    assert not math.isfinite(metrics["grad_norm"])
    chex.assert_trees_all_equal(after.params, before.params)
    chex.assert_trees_all_equal(after.opt_state, before.opt_state)
    assert (int(after.step), int(metrics["skipped_steps"])) == (3, 1)

    # The skipped step changes neither the next step nor its learning rate.
    after, metrics = step(dataclasses.replace(after, params=state.params), batch_of(3))
    other, expected = step(state, batch_of(3))
    chex.assert_trees_all_equal(after.params, other.params)
    assert metrics["lr"] == expected["lr"]
    assert int(metrics["skipped_in_a_row"]) == 0


def test_with_64_bits_the_statistics_stay_in_32(first_state):
    """The program of a run is compiled ahead of time, and refuses a state of another dtype."""
    batch = jax.tree.map(lambda a: a.reshape(2, -1, *a.shape[2:]), batch_of(0))
    with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
        state, _ = jax.eval_shape(train.step.make_train_step(CONFIG), first_state, batch)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, first_state)


# The normal run has it for each optimizer in test_optimizers.py.
@pytest.mark.full
def test_skipping_takes_no_memory(compiled, first_state, monkeypatch):
    """A step that never skips needs as much memory, apart from a few scalars."""

    def temporaries(program):
        memory = program.memory_analysis()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(first_state))
        assert memory.alias_size_in_bytes == size
        return memory.temp_size_in_bytes

    monkeypatch.setattr("train.step.judge", lambda guard, *args, **options: (True, guard))
    always = compiled_step(first_state)
    assert temporaries(compiled) <= temporaries(always) + 1024


def test_a_run_that_only_skips_ends_and_its_step_can_be_replayed(
    tmp_path, compiled, monkeypatch, capsys
):
    monkeypatch.setattr(train.setup, "init_state", lambda *args: poisoned(init_state(*args)))
    monkeypatch.setattr(train.loop, "compile_steps", lambda *args: CompiledSteps(compiled, None))
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path)
    with pytest.raises(RunError, match=r"^3 steps in a row .* replay (\S+)$") as caught:
        run(config)
    assert "\n" not in str(caught.value)
    assert (
        "step 2 was skipped, not finite: loss nan, gradient norm nan\n" in capsys.readouterr().out
    )
    rows = load_metrics(tmp_path / "tiny").train
    assert [row["skipped_steps"] for row in rows] == [1, 2, 3]
    folder = str(caught.value).split()[-1]
    assert folder == str(tmp_path / "tiny" / "failed-step-3")
    expected = train.setup.step_batch(config, train.setup.open_datasets(config).train, 2)
    chex.assert_trees_all_equal(dict(np.load(f"{folder}/batch.npz")), expected)

    capsys.readouterr()
    replay.run([folder])
    lines = capsys.readouterr().out.splitlines()
    assert "loss nan" in lines and "num_tokens 128" in lines
    assert "parameter norm.weight: 1 of 16 not finite" in lines
    assert any(line.startswith("gradient of embed_tokens.embedding: ") for line in lines)


def test_replay_of_something_else(tmp_path):
    with pytest.raises(FolderError, match=r"nowhere has no batch\.npz; name a folder failed-"):
        replay.run(["nowhere"])
    (tmp_path / "batch.npz").touch()
    with pytest.raises(FolderError, match=r"has no config\.json"):
        replay.run([str(tmp_path)])


def test_replay_runs_no_code_of_a_folder(tmp_path):
    """The configuration of earlier versions was a pickle, which may run anything."""
    code = f"cos\nsystem\n(S'touch {tmp_path}/ran'\ntR."
    (tmp_path / "config.pickle").write_text(code)
    (tmp_path / "batch.npz").touch()
    with pytest.raises(FolderError, match=r"config\.pickle is not read, because that would run"):
        replay.run([str(tmp_path)])
    assert not (tmp_path / "ran").exists()
    # It does not run code of the batch either.
    (tmp_path / "config.pickle").unlink()
    objects = np.empty(1, object)
    np.savez(tmp_path / "batch.npz", tokens=objects)
    (tmp_path / "config.json").write_text(json.dumps({"config": jsonable(CONFIG)}))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        replay.read_batch(tmp_path)


def test_the_linter_refuses_pickle():
    """Two files of the tests may use it, and say why."""
    root = Path(train.loop.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-m", *"ruff check --quiet --stdin-filename train/new.py -".split()],
        input='"""Doc."""\n\nimport pickle\n\npickle.loads(b"")\n',
        capture_output=True,
        text=True,
        cwd=root,
    ).stdout
    assert "TID251" in found and "S301" in found, found


def test_steps_that_are_skipped_now_and_then_do_not_end_a_run(tmp_path, step, monkeypatch):
    """Three of eight steps are not finite, one or two in a row."""

    def train_step(state, batch):
        if int(state.step) not in (2, 3, 6):
            return step(state, batch)
        after, metrics = step(poisoned(state), batch)
        return dataclasses.replace(after, params=state.params), metrics

    monkeypatch.setattr(train.loop, "compile_steps", lambda *args: CompiledSteps(train_step, None))
    rows = load_metrics(run(dataclasses.replace(CONFIG, runs_dir=tmp_path)))
    assert [row["skipped_steps"] for row in rows.train] == [0, 0, 1, 2, 2, 2, 3, 3]
    rates = [row["lr"] for row in rows.train]
    assert rates[2] == rates[3] == rates[4] != rates[5]


def test_a_lower_limit_than_the_skipped_steps_of_a_checkpoint_is_refused(
    tmp_path, step, monkeypatch, capsys
):
    """All steps would be skipped, with a line that calls their losses a spike."""
    ends_at = [4]

    def train_step(state, batch):
        if int(state.step) in ends_at:
            raise KeyboardInterrupt
        if int(state.step) not in (2, 3):
            return step(state, batch)
        after, metrics = step(poisoned(state), batch)
        return dataclasses.replace(after, params=state.params), metrics

    monkeypatch.setattr(train.loop, "compile_steps", lambda *args: CompiledSteps(train_step, None))
    config = dataclasses.replace(
        CONFIG, runs_dir=tmp_path, checkpoint=CheckpointConfig(every=4), steps=6
    )
    with pytest.raises(KeyboardInterrupt):
        run(config)
    ends_at.clear()
    capsys.readouterr()
    message = (
        r"last 2 of its 4 steps were skipped, and --max-skipped-steps 2 .* set it to 3 or more"
    )
    with pytest.raises(RunError, match=message):
        run(dataclasses.replace(config, max_skipped_steps=2))
    assert "spike" not in capsys.readouterr().out
    rows = load_metrics(run(config)).train
    assert [row["skipped_steps"] for row in rows] == [0, 0, 1, 2, 2, 2]
