"""The parts of `train.distributed` that need no second process."""

import os
import re
import time

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from models.sharding import make_mesh
from train import distributed
from train.config import DistributedConfig
from train.errors import RunError


@pytest.fixture
def ends_at_once(monkeypatch):
    """A context for code that would end the process with status 1."""

    def end(status):
        raise SystemExit(status)

    monkeypatch.setattr(os, "_exit", end)
    return pytest.raises(SystemExit, match=r"^1$")


def test_a_missing_process_is_named(ends_at_once, capfd):
    with ends_at_once:
        distributed._nobody_came(DistributedConfig(cluster="slurm", initialization_timeout_s=7))
    error = capfd.readouterr().err
    assert error.startswith("error: not all processes met at the address that slurm gives within 7")


def test_a_stuck_process_shows_its_stacks_and_ends(ends_at_once, monkeypatch, capfd):
    """The second of two processes waits until the first has shown its stacks."""
    slept = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(time, "sleep", slept.append)
    with ends_at_once:
        distributed.Watchdog(1.0)._bark("step 8", 6.0)
    assert slept == [3 * distributed._POLL_S]
    error = capfd.readouterr().err
    assert re.search(r'test_one_process\.py", line \d+ in test_a_stuck_process', error)
    assert "error: process 1: step 8 was not finished within 6 s (--distributed.step" in error


def test_one_process_starts_nothing(monkeypatch):
    def initialize(**options):
        raise AssertionError

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    with distributed.started(DistributedConfig()):
        pass


def test_a_launcher_that_did_not_launch_is_named(monkeypatch):
    def initialize(**options):
        raise KeyError("SLURM_JOB_ID")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda *_: None)
    with (
        pytest.raises(RunError, match=r"^slurm does not say .*SLURM_JOB_ID.*--distributed\.coord"),
        distributed.started(DistributedConfig(cluster="slurm")),
    ):
        pass


def test_other_flags_and_help_are_left_alone():
    flags = "--help --steps 3 --distributed.process-id 1 --distributed.num-processes 2 -h --no-save"
    address = ["--distributed.coordinator-address=host:1"]
    assert distributed.flags([*flags.split(), *address]) == DistributedConfig(
        process_id=1, num_processes=2, coordinator_address="host:1"
    )


def test_rows_are_made_for_the_devices_that_are_here():
    mesh = make_mesh(data=4, fsdp=2)
    sharding = NamedSharding(mesh, PartitionSpec(None, ("data", "fsdp")))
    whole = np.arange(3 * 16 * 5).reshape(48, 5)
    asked = []

    def rows_of(rows):
        asked.extend(rows)
        return {"tokens": whole[rows]}

    batch = distributed.rows_to_devices(rows_of, (3, 16), sharding)["tokens"]
    assert batch.sharding == sharding
    np.testing.assert_array_equal(batch, whole.reshape(3, 16, 5))
    assert sorted(asked) == list(range(48))


@pytest.fixture
def barks(monkeypatch):
    found = []

    def bark(self, what, limit_s):
        found.append((what, limit_s))
        self._ended.set()

    monkeypatch.setattr(distributed.Watchdog, "_bark", bark)
    return found


def test_the_watchdog_counts_from_the_last_beginning(barks):
    with distributed.Watchdog(0.5) as watchdog:
        for step in range(8):
            watchdog.begin(f"step {step}")
            time.sleep(0.1)
        watchdog.begin_other("the compilation")
        time.sleep(1)
        assert not barks
        watchdog.begin("step 9")
        time.sleep(1.5)
    assert barks == [("step 9", 0.5)]


def test_without_a_limit_nothing_is_watched(barks):
    with distributed.Watchdog(0.0) as watchdog:
        watchdog.begin("step 1")
        time.sleep(0.3)
    assert not barks
