"""Fixtures that the tests of checkpoints share."""

import dataclasses
import functools
import gc
import time
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import train.loop
from train.step import abstract_state


@pytest.fixture(scope="module")
def programs_once(tmp_path_factory):
    """Runs of equal settings share their compiled steps, and the disk keeps other programs.

    A tiny run takes milliseconds and compiles for seconds. Use it with `one_device`: a CPU program
    for several devices can hang when it comes from the disk.
    """
    compile_steps = train.loop.compile_steps
    programs = {}

    def compile_once(config, mesh, *args):
        key = config.model, config.optimizer, config.data, config.steps, mesh
        if key not in programs:
            programs[key] = compile_steps(config, mesh, *args)
        return programs[key]

    cached = functools.cache(abstract_state)
    set_compilation(cache=str(tmp_path_factory.mktemp("programs")), cache_from_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.loop, "compile_steps", compile_once)
        without_folder = lambda config: dataclasses.replace(config, runs_dir=Path("runs"))
        state = lambda config, mesh: cached(without_folder(config), mesh)
        patch.setattr(train.loop, "abstract_state", state)
        yield
    set_compilation(cache=None, cache_from_s=1.0)


def set_compilation(*, cache, cache_from_s):
    jax.config.update("jax_compilation_cache_dir", cache)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", cache_from_s)
    compilation_cache.reset_cache()


@pytest.fixture
def collected():
    """Collects objects of Orbax before the next test.

    Orbax may read or write when something else fails. Its tasks then report to an event loop that
    it has closed, some of them only when they are collected.
    """
    yield
    gc.collect()
    time.sleep(0.2)
