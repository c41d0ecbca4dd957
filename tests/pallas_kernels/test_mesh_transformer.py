"""A transformer in Flax NNX on eight CPU devices with Explicit axes, against one device.

`tests/aot/test_aot_mesh_transformer.py` compiles the same program for eight H100s.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding

from benchmarks.training import transformer

SIZES = transformer.Sizes(
    hidden=32,
    intermediate=64,
    num_heads=4,
    num_kv_heads=4,
    head_size=8,
    vocabulary=64,
    num_layers=2,
    dtype=jnp.float32,
)


@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("shape", [(8, 1), (2, 4)])
def test_explicit_axes_change_nothing(shape):
    """The loss, every gradient, and how each of them is split. It takes 4 s."""
    alone = dataclasses.replace(SIZES, has_mesh=False)
    params = nnx.state(transformer.Transformer(alone, nnx.Rngs(0)), nnx.Param)
    numbers = np.random.default_rng(0)
    tokens, labels = numbers.integers(0, SIZES.vocabulary, (2, 8, 16), np.int32)
    labels[numbers.random(labels.shape) < np.linspace(0, 0.9, 8)[:, None]] = -100
    segment_ids = np.cumsum(numbers.random(labels.shape) < 0.2, axis=1, dtype=np.int32)
    batch = tokens, labels, segment_ids
    expected = jax.jit(transformer.gradients_of(alone))(params, *batch)

    mesh = jax.make_mesh(shape, transformer.AXES)
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    params = jax.tree.map(place, params, transformer.specs(SIZES))
    batch = [place(a, transformer.TOKENS) for a in batch]
    with jax.set_mesh(mesh):
        found = jax.jit(transformer.gradients_of(SIZES))(params, *batch)
    assert jax.tree.map(jax.typeof, found[1]) == jax.tree.map(jax.typeof, params)
    for (path, a), b in zip(
        jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
    ):
        largest = np.abs(b).max()
        assert largest > 0
        np.testing.assert_allclose(a, b, atol=1e-5 * largest, rtol=0, err_msg=str(path))
