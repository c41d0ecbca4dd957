"""Sets up all tests: eight CPU devices and strict dtypes.

`-m gpu` runs the tests for a GPU. `--full` adds the tests with the marker `full`.
"""

import gc
import itertools
import pathlib
import re
import types

import jax
import jaxtyping
import numpy as np
import pytest
from jax import core
from jax._src import callback
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.pallas.mosaic_gpu.interpret.race_detection_state import GPURaceDetectionState
from jax.experimental.pallas import mosaic_gpu as plgpu

# By default Python looks for cycles after every 700 new objects, and tracing makes millions. This
# took 5.8 of 28 s of tests/models/test_remat.py, and takes 2.1 now.
gc.set_threshold(20_000, 20, 20)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="add the tests with the marker full")


def pytest_configure(config):
    # Without these markers the tests use the eight CPU devices, even on a machine with a GPU.
    if not re.search(r"(?<!not )\bgpus?\b", config.option.markexpr):
        jax.config.update("jax_platforms", "cpu")
        # Programs run for milliseconds, so most optimizations take longer than they save.
        jax.config.update("jax_disable_most_optimizations", True)


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(config, items):
    if not config.option.full:
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("full")]
    on_gpu = jax.default_backend() == "gpu"
    for item in items:
        if not on_gpu and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and `pytest -m gpu`"))
        # A GPU runs the kernels compiled that other machines interpret.
        options = item.callspec.params if hasattr(item, "callspec") else {}
        kernel = options.get("implementation") == "mosaic_gpu"
        if on_gpu and (kernel or "interpreted" in getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.gpu)
    if on_gpu:  # real sizes take longest, so they come first
        items.sort(key=lambda item: _REAL_SIZES not in item.path.parents)


def pytest_collection_finish():
    """Tells the garbage collector to skip modules and tests, which live to the end."""
    gc.collect()
    gc.freeze()


_REAL_SIZES = pathlib.Path(__file__).parent / "gpu"
_MAPS = pathlib.Path("/proc/self/maps")
_MANY_MAPS = 30000
_TESTS = itertools.count()


@pytest.fixture(autouse=True)
def clear_caches_in_time():
    """Frees the compiled programs before the process runs out of memory maps.

    A program takes several of the 65530 maps that Linux gives a process by default. Without a free
    map XLA ends with a segmentation fault. To count 15,000 maps takes 18 ms, longer than most
    tests, and no 20 tests make 30,000.
    """
    yield
    if next(_TESTS) % 20 == 0 and _MAPS.exists() and _MAPS.read_bytes().count(b"\n") > _MANY_MAPS:
        jax.clear_caches()


@pytest.fixture(scope="module")
def fast_compilation():
    """Compiles without most optimizations on a GPU too, for programs that run for milliseconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")


@pytest.fixture
def unchecked_shapes():
    """Turns jaxtyping's checks off, as for users, so that the library's own errors are raised."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def fresh_operations():
    """Operations are traced anew, for a test that replaces a part of them, and after it."""

    from pallas_kernels import auto_axes, operation  # not before jaxtyping's import hook

    def forget():
        for made in (operation._forward, operation._backward, auto_axes.over_auto_axes):
            made.cache_clear()

    forget()
    yield
    forget()


@pytest.fixture
def interpreted(monkeypatch):
    """Runs Mosaic GPU kernels in JAX's interpreter, where a race between threads fails the test.

    The interpreter checks the algorithm and its synchronization, not whether it lowers. On a GPU
    (`-m gpu`) the kernels run compiled.
    """
    if jax.default_backend() == "gpu":
        yield
        return
    # JAX 0.11 only prints a race, and each kernel starts a new record.
    records = []

    def new_record(**options):
        records.append(GPURaceDetectionState(**options))
        return records[-1]

    monkeypatch.setattr(gpu_callbacks, "GPURaceDetectionState", new_record)

    # The interpreter is Python in callbacks of a program, a dozen integers each. JAX puts them on a
    # device, which takes half of the time of the interpreter; it reads them with NumPy afterwards.
    def copies(args, device):
        return [np.array(a) for a in args]

    def integer(value):
        return value if isinstance(value, core.Tracer) else int(value)

    monkeypatch.setattr(callback, "api", types.SimpleNamespace(device_put=copies))
    monkeypatch.setattr(shared_memory, "_to_int", integer)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
        jax.effects_barrier()
    finally:
        # After an exception in a kernel the interpreter would reject the kernels of later tests.
        gpu_callbacks.reset_gpu_interpret_mode_state()
    assert not any(r.races_found for r in records), "a data race; see the captured output"
