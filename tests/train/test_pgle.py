"""Runs whose step is compiled again with measured latencies (`pgle`).

A CPU has no kernels to time, so JAX compiles the same program again. What the latencies are good
for shows on several GPUs alone. The step here counts itself and compiles in milliseconds.
"""

import contextlib
import dataclasses
import types
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import train.setup
from models.sharding import make_mesh
from support import tiny_run
from train.config import MeshConfig
from train.loop import _Loop, run
from train.reporting.results import load_metrics
from train.setup import CompiledSteps, compile_steps, open_datasets
from train.step import init_state
from train.xla_flags import calls_until_compiled_again, with_measured_latencies

CONFIG = dataclasses.replace(tiny_run.CONFIG, mesh=MeshConfig(fsdp=2), steps=8, pgle=True)

pytestmark = pytest.mark.usefixtures("no_plots", "counting_step")


@pytest.fixture
def counting_step(monkeypatch):
    """Takes the place of the step."""

    def step(state, batch):
        loss = state.step.astype(jnp.float32)
        floats = dict.fromkeys(("loss", "nll", "accuracy", "lr", "grad_norm", "mean_context"), loss)
        counts = dict.fromkeys(("skipped_steps", "skipped_in_a_row"), jnp.int32(0))
        num_tokens = jnp.int32(batch["tokens"].size)
        metrics = floats | counts | {"num_tokens": num_tokens}
        return dataclasses.replace(state, step=state.step + 1), metrics

    jitted = lambda config, state: jax.jit(step, donate_argnums=0)
    monkeypatch.setattr(train.setup, "jit_train_step", jitted)


@contextlib.contextmanager
def compilations() -> Iterator[list[str]]:
    """The names of the functions that are compiled in the context."""
    names: list[str] = []

    def listen(event: str, duration_secs: float, **metadata: Any) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(metadata.get("fun_name", ""))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.filterwarnings("ignore:PGLE collected an empty trace:RuntimeWarning")
def test_the_fourth_call_compiles_again():
    """0.1 s."""
    step = with_measured_latencies(jax.jit(lambda x, y: (x + y, y), donate_argnums=0))
    x, counts = jnp.zeros(8), []
    with compilations() as compiled:
        for _ in range(6):
            before = len(compiled)
            x, _ = step(x, 1.0)
            counts.append(len(compiled) - before)
    assert counts == [1, 0, 0, 1, 0, 0]
    assert counts.index(1, 1) + 1 == calls_until_compiled_again()
    assert x.tolist() == [6.0] * 8
    assert not jax.config.jax_enable_pgle


@pytest.mark.filterwarnings("ignore:PGLE collected an empty trace:RuntimeWarning")
def test_a_run_compiles_again_and_traces_later_steps(tmp_path):
    """4 s."""
    with compilations() as compiled:
        folder = run(dataclasses.replace(CONFIG, runs_dir=tmp_path, profile_steps="5:6"))
    # Ahead of time, at the first step, and at the fourth.
    assert sum("step" in name for name in compiled) == 3, compiled
    rows = load_metrics(folder).train
    assert [row["loss"] for row in rows] == list(range(8))
    assert list((folder / "profile").rglob("*.xplane.pb"))
    # No speed has the compilation in it: the clock starts anew at step 4.
    assert [row["tokens_per_s"] is None for row in rows] == [True] * 4 + [False] * 4
    assert not jax.config.jax_enable_pgle


@pytest.mark.parametrize(
    "first_step, steps, traced",
    [(0, "5:6", (5, 6)), (100, "90:110", (105, 110)), (100, "90:103", (105, 103))],
)
def test_a_resumed_run_traces_what_pgle_does_not(capsys, first_step, steps, traced):
    config = dataclasses.replace(CONFIG, steps=200, profile_steps=steps)
    programs = CompiledSteps(print, None, None, 4)
    loop: Any = types.SimpleNamespace(_config=config, _steps=programs, _last_early=first_step + 4)
    assert _Loop._traced(loop, first_step) == traced
    assert ("no trace up to step 104" in capsys.readouterr().out) == (first_step == 100)


def test_one_device_has_nothing_to_hide(capsys):
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    config = dataclasses.replace(CONFIG, mesh=MeshConfig())
    with jax.set_mesh(mesh):
        state = init_state(config, mesh)
        steps = compile_steps(config, mesh, state, open_datasets(config))
    assert steps.train is steps.program and not steps.num_early
    assert "pgle is left out" in capsys.readouterr().out
