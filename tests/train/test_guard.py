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
from support.tiny_run import CONFIG
from train.cli import replay
from train.errors import FolderError, RunError
from train.guard import WINDOW, initial_guard, judge
from train.loop import run
from train.reporting.metrics import jsonable
from train.reporting.results import load_metrics
from train.step import init_state, jit_train_step, make_train_step

pytestmark = pytest.mark.usefixtures("no_plots")


@pytest.fixture(scope="module", autouse=True)
def runs_on_one_device():
    with pytest.MonkeyPatch.context() as patch:
        for module in (train.loop, replay):
            patch.setattr(module, "mesh_of", lambda config: one_device())
        yield


def losses_judged(losses, *, grad_norms=None, **options):
    """Which of a series of steps are taken, and what is known after each."""
    options = {"max_skipped_steps": 10**6, "spike_factor": 0.0} | options
    one = jax.jit(lambda *args: judge(*args, **options))
    guard, taken, guards = initial_guard(), [], []
    for step, loss in enumerate(losses):
        norm = 1.0 if grad_norms is None else grad_norms[step]
        take, guard = one(guard, jnp.int32(step), jnp.float32(loss), jnp.float32(norm))
        taken.append(bool(take))
        guards.append(jax.device_get(guard))
    return taken, guards


def test_what_is_not_finite_is_skipped_and_counted():
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
def step():
    return jax.jit(make_train_step(CONFIG))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_skipped_step_leaves_parameters_and_moments_as_they_are(step, bad):
    state, _ = step(init_state(CONFIG, one_device()), batch_of(0))
    state, _ = step(state, batch_of(1))
    # One parameter is enough for a loss and gradients that are not finite.
    poison = lambda path, a: a.at[..., 0].set(bad) if "norm" in jax.tree_util.keystr(path) else a
    params = jax.tree_util.tree_map_with_path(poison, state.params)
    before = dataclasses.replace(state, params=params)
    after, metrics = step(before, batch_of(2))
    assert not math.isfinite(metrics["grad_norm"])
    chex.assert_trees_all_equal(after.params, before.params)
    chex.assert_trees_all_equal(after.opt_state, before.opt_state)
    assert (int(after.step), int(metrics["skipped_steps"])) == (3, 1)

    # Then all goes on as if the step had not been, the learning rate included.
    after, metrics = step(dataclasses.replace(after, params=state.params), batch_of(3))
    other, expected = step(state, batch_of(3))
    chex.assert_trees_all_equal(after.params, other.params)
    assert metrics["lr"] == expected["lr"]
    assert int(metrics["skipped_in_a_row"]) == 0


def test_skipping_takes_no_memory(monkeypatch):
    """The compiled step needs as much as one that updates in any case, to a few scalars."""
    state = init_state(CONFIG, one_device())

    def temporaries():
        compiled = jit_train_step(CONFIG, state).lower(state, batch_of(0)).compile()
        memory = compiled.memory_analysis()
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert memory.alias_size_in_bytes == size
        return memory.temp_size_in_bytes

    skipping = temporaries()
    monkeypatch.setattr("train.step.judge", lambda guard, *args, **options: (True, guard))
    always = temporaries()
    assert skipping <= always + 1024


@pytest.fixture
def poisoned(monkeypatch):
    """Runs begin with a parameter that is not finite."""

    def init(config, mesh):
        state = init_state(config, mesh)
        in_norm = lambda path: parameter_path(path) == ("norm", "weight")
        poison = lambda path, a: a.at[3].set(jnp.nan) if in_norm(path) else a
        params = jax.tree_util.tree_map_with_path(poison, state.params)
        return dataclasses.replace(state, params=params)

    monkeypatch.setattr(train.setup, "init_state", init)


def test_a_run_that_only_skips_ends_and_its_step_can_be_replayed(tmp_path, poisoned, capsys):
    config = dataclasses.replace(CONFIG, runs_dir=tmp_path, max_skipped_steps=3)
    with pytest.raises(RunError, match=r"^3 steps in a row .* replay (\S+)$") as caught:
        run(config)
    assert "\n" not in str(caught.value)
    assert "step 2 was skipped: loss nan, gradient norm nan\n" in capsys.readouterr().out
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
    with pytest.raises(FolderError, match="nowhere is no failed-step-N of a run"):
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
    # Nor of the batch.
    (tmp_path / "config.pickle").unlink()
    objects = np.empty(1, object)
    np.savez(tmp_path / "batch.npz", tokens=objects)
    (tmp_path / "config.json").write_text(json.dumps({"config": jsonable(CONFIG)}))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        replay.read_batch(tmp_path)


def test_the_linter_refuses_pickle():
    """Everywhere but in two files of the tests, which say why."""
    root = Path(train.loop.__file__).parents[1]
    found = subprocess.run(
        [sys.executable, "-m", *"ruff check --quiet --stdin-filename train/new.py -".split()],
        input='"""Doc."""\n\nimport pickle\n\npickle.loads(b"")\n',
        capture_output=True,
        text=True,
        cwd=root,
    ).stdout
    assert "TID251" in found and "S301" in found, found


def test_steps_that_are_skipped_now_and_then_do_not_end_a_run(tmp_path, monkeypatch):
    """Two batches of eight whose gradient is not finite."""
    real = train.setup.step_batch

    def step_batch(config, dataset, step):
        batch = real(config, dataset, step)
        if step in (2, 5):
            batch["labels"] = np.full_like(batch["labels"], -100)
        return batch

    def gradients_of(config):
        inner = make_gradients(config)

        def poisoned(params, batch):
            metrics, gradients = inner(params, batch)
            bad = jnp.where(metrics["num_tokens"] == 0, jnp.nan, 1.0)
            return metrics | {"grad_norm": metrics["grad_norm"] * bad}, gradients

        return poisoned

    make_gradients = train.step.make_gradients
    monkeypatch.setattr(train.step, "make_gradients", gradients_of)
    monkeypatch.setattr(train.setup, "step_batch", step_batch)
    rows = load_metrics(run(dataclasses.replace(CONFIG, runs_dir=tmp_path, max_skipped_steps=2)))
    assert [row["skipped_steps"] for row in rows.train] == [0, 0, 1, 1, 1, 2, 2, 2]
    rates = [row["lr"] for row in rows.train]
    assert rates[3] == rates[2]
