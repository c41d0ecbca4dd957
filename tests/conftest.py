"""Set-up of all tests: eight CPU devices and strict dtypes; `-m gpu` runs those that need a GPU."""

import jax
import jaxtyping
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config):
    # The other tests mean the eight CPU devices, also on a machine with a GPU.
    if config.option.markexpr != "gpu":
        jax.config.update("jax_platforms", "cpu")


def pytest_collection_modifyitems(items):
    if jax.default_backend() != "gpu":
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU and `pytest -m gpu`"))


@pytest.fixture
def unchecked_shapes():
    """Without jaxtyping's checks, as users run the library, so that its own errors are reached."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
