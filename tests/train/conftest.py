"""What several tests of training share."""

import jax
import pytest


@pytest.fixture(scope="module")
def fast_compilation():
    """For programs that run for milliseconds and compile for seconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
