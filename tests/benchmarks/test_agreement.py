"""The relative error between results that should be equal."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.agreement import relative_error


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_error_is_the_largest_of_the_arrays_that_both_have(dtype):
    expected = [jnp.ones((3, 4), dtype), jnp.float32(2.0)]
    got = [expected[0].at[0, 0].set(1.5), jnp.float32(2.5), jnp.float32(7.0)]
    assert relative_error(got, expected) == pytest.approx(0.25)
    assert relative_error(got[:1], expected) == pytest.approx(0.5 / 12**0.5)


@pytest.mark.parametrize("place", [0, 1])
def test_nan_in_any_array_makes_the_error_nan(place):
    expected = [jnp.ones(3), jnp.ones(2)]
    got = list(expected)
    got[place] = got[place].at[0].set(jnp.nan)
    assert np.isnan(relative_error(got, expected))
