"""What only a GPU can show: cuDNN, real sizes, memory in use. Run with `pytest -m gpu`."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.llama import PRESETS, Llama
from numerics import assert_as_accurate
from pallas_kernels import linear_cross_entropy
from train.config import preset
from train.data import SyntheticDataset
from train.loop import run

pytestmark = pytest.mark.gpu


def as_float64(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


# First in this file, because the peak is that of the whole process.
def test_training_on_the_gpu_fits_the_memory_it_announced(tmp_path, capsys):
    base = preset("llama3.2-1b")
    config = dataclasses.replace(
        base,
        runs_dir=tmp_path,
        steps=3,
        optimizer=dataclasses.replace(base.optimizer, warmup_steps=1),
        data=dataclasses.replace(base.data, batch_size=1, sequence_length=2048),
        model=dataclasses.replace(base.model, num_hidden_layers=4),
    )
    run(config)
    announced = float(capsys.readouterr().out.split("in all ")[1].split(" GiB")[0])
    in_use = jax.local_devices()[0].memory_stats()["peak_bytes_in_use"] / 2**30
    assert announced * 0.9 <= in_use <= announced * 1.15


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
def test_cudnn_attention_is_the_default_and_as_accurate_as_xla(packed):
    config = dataclasses.replace(
        PRESETS["llama3.2-1b"], num_hidden_layers=2, vocab_size=1024, initializer_range=0.05
    )
    batch = SyntheticDataset(config.vocab_size, 1024, packed=packed).batch(0, batch_size=2, seed=0)
    if packed:
        batch["segment_ids"][:, 300:] += 1
        batch["positions"][:, 300:] -= 300
    batch = jax.tree.map(jnp.asarray, batch)
    params = nnx.state(Llama(config, rngs=nnx.Rngs(0)), nnx.Param)
    direction = jax.random.normal(jax.random.key(1), (2, 1024, config.hidden_size))

    def value_and_grads(**changes):
        changed = dataclasses.replace(config, **changes)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(changed, rngs=nnx.Rngs(0))))

        def value(params):
            hidden = nnx.merge(graphdef, params)(
                batch["tokens"],
                positions=batch.get("positions"),
                segment_ids=batch.get("segment_ids"),
            )
            return jnp.sum(hidden.astype(jnp.float32) * direction), hidden

        # JAX's own XLA attention in 16 bits does not lower under strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            grads, hidden = jax.jit(jax.grad(value, has_aux=True))(params)
        return as_float64(hidden) + as_float64(grads)

    with jax.default_matmul_precision("highest"):
        exact = value_and_grads(dtype="float32")
    names = [
        "hidden",
        *(jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)),
    ]
    assert_as_accurate(
        value_and_grads(),
        value_and_grads(attention_implementation="xla"),
        exact,
        names=names,
    )


def test_default_attention_runs_cudnn():
    config = dataclasses.replace(PRESETS["llama3.2-1b"], num_hidden_layers=1, vocab_size=1024)
    model = Llama(config, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 256), jnp.int32)
    graphdef, state = nnx.split(model)
    program = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens)).lower(state).as_text()
    assert "cudnn" in program


@pytest.mark.parametrize("shape", [(4096, 2048, 128256), (1000, 1024, 32001)], ids=str)
def test_linear_cross_entropy_at_real_sizes(shape):
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num_tokens, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (vocab_size, hidden_size), jnp.bfloat16) * 0.02
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size).at[::7].set(-100)

    def plain(x, weight):
        logits = (x @ weight.T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
        losses = jax.nn.logsumexp(logits, axis=-1) - picked
        valid = labels >= 0
        return jnp.sum(jnp.where(valid, losses, 0)) / jnp.sum(valid, dtype=jnp.float32)

    ours = lambda x, weight: linear_cross_entropy(x, weight, labels)
    graded = lambda fn: jax.jit(jax.value_and_grad(fn, argnums=(0, 1)))
    with jax.default_matmul_precision("highest"):
        exact = as_float64(graded(plain)(x.astype(jnp.float32), weight.astype(jnp.float32)))
    assert_as_accurate(
        as_float64(graded(ours)(x, weight)),
        as_float64(graded(plain)(x, weight)),
        exact,
        names=("loss", "dx", "dweight"),
    )
    chex.assert_trees_all_equal(graded(ours)(x, weight), graded(ours)(x, weight))
