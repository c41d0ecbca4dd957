"""Devices that share sequences: the numbers of one device, and layouts that are refused."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import LlamaConfig
from models.remat import POLICIES
from models.sampling import generate
from models.sharding import (
    batch_sharding,
    check_tensor_parallel,
    make_mesh,
    parameter_path,
    parameter_shardings,
    replicated,
    sum_over_devices,
    tensor_axis,
)
from support.numerics import assert_trees_as_accurate
from support.split_llama import (
    BIASES,
    CONFIG,
    KV,
    TWO_LAYERS,
    VARIANTS,
    Z_LOSS,
    D,
    F,
    L,
    Q,
    V,
    assert_close,
    changed,
    lowered,
    mesh_of,
    on_mesh,
    on_one_device,
    packed_batch,
    parameters,
)
from support.textbook_llama import textbook_logits
from train.config import DataConfig, OptimizerConfig, TrainConfig
from train.step import init_state, make_train_step, model_graph

pytestmark = pytest.mark.usefixtures("fast_compilation")


@functools.cache
def by_the_textbook(config: LlamaConfig, dtype: str):
    """`((loss, sums), gradients)` in `dtype`; the dtype of the configuration does not matter."""
    batch = packed_batch()
    labels = batch.pop("labels")

    def loss(params):
        logits = textbook_logits(params, config=config, dtype=jnp.dtype(dtype), **batch)
        lse = jax.nn.logsumexp(logits, axis=-1)
        counts = labels != -100
        nll = lse - jnp.take_along_axis(logits, np.maximum(labels, 0)[..., None], -1)[..., 0]
        correct = jnp.sum(jnp.argmax(logits, axis=-1) == labels).astype(logits.dtype)
        total = lambda a: jnp.sum(jnp.where(counts, a, 0.0))
        return total(nll + Z_LOSS * lse**2), {"nll_sum": total(nll), "correct_sum": correct}

    with jax.enable_x64(dtype == "float64"), jax.numpy_dtype_promotion("standard"):
        params = nnx.to_pure_dict(parameters(config))
        params = jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
        found = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
        return jax.tree.map(np.asarray, found)


def check(config: LlamaConfig, got, *, slack: float = 2.0):
    """Compares with the textbook on one device, by the error that it makes in the same precision.

    The ratio of the two errors scatters around 1 with the order of sums.
    """
    got = got[0], nnx.to_pure_dict(got[1])
    dtype = config.dtype
    config = dataclasses.replace(config, dtype="float32")  # one entry for all dtypes
    low, exact = by_the_textbook(config, dtype), by_the_textbook(config, "float64")
    assert all(np.any(leaf) for leaf in jax.tree.leaves(exact[1]))
    assert_trees_as_accurate(got, low, exact, slack=slack)


# The cases split or copy the parameters, or both; `full` has each variant.
@pytest.mark.parametrize(
    "data, fsdp, tensor, variant",
    [
        pytest.param(1, 1, 4, "untied_scanned_biases", marks=pytest.mark.full),
        (1, 2, 2, "tied_unrolled_full"),
        pytest.param(2, 2, 2, "untied_scanned_biases", marks=pytest.mark.full),
        pytest.param(1, 1, 2, "tied_unrolled_full", marks=pytest.mark.full),
        pytest.param(2, 1, 2, "untied_scanned_biases", marks=pytest.mark.full),
        pytest.param(2, 2, 2, "tied_unrolled_full", marks=pytest.mark.full),
        pytest.param(1, 4, 2, "untied_scanned_biases", marks=pytest.mark.full),
    ],
)
def test_loss_and_gradients_are_those_of_one_device(data, fsdp, tensor, variant):
    config = VARIANTS[variant]
    mesh = mesh_of(data, fsdp, tensor)
    got = on_mesh(config, mesh)
    check(config, got)
    assert_close(got, on_one_device(config))
    shardings = parameter_shardings(got[1], mesh)
    for gradient, sharding in zip(*map(jax.tree.leaves, (got[1], shardings)), strict=True):
        assert gradient.sharding.is_equivalent_to(sharding, gradient.ndim)


def test_a_window_in_rows_of_one_document():
    """Each device makes the bounds of its own rows."""
    config = changed(**TWO_LAYERS, sliding_window=5)
    batch = {name: packed_batch()[name] for name in ("tokens", "labels")}

    def on(mesh):
        program, params, arguments = lowered(config, mesh, batch=batch)
        return program.compile()(params, arguments)

    assert_close(on(mesh_of(1, 2, 2)), on(mesh_of(1, 1, 1)))


HOST = "attention,residual,gate@host"


# The normal run has `none`, `minimal` and `full` in other tests.
@pytest.mark.full
@pytest.mark.parametrize("remat", [*POLICIES, "q,mlp_out,attn_proj", HOST])
def test_no_policy_changes_the_numbers(remat):
    assert_close(on_mesh(changed(remat=remat), mesh_of(1, 2, 2)), on_one_device(CONFIG))


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        BIASES | {"hidden_act": "gelu", "implementation": "xla"},
        BIASES | {"hidden_act": "gelu"},
        {"implementation": "xla"},
    ],
    ids=str,
)
def test_other_layers(changes):
    config = changed(**TWO_LAYERS, **changes)
    check(config, on_mesh(config, mesh_of(2, 2, 2)))


@pytest.mark.full
def test_in_bfloat16():
    config = dataclasses.replace(VARIANTS["untied_scanned_biases"], dtype="bfloat16")
    check(config, on_mesh(config, mesh_of(2, 2, 2)))


def test_rows_of_one_document_whose_padding_token_is_read_but_not_trained():
    batch = {name: array for name, array in packed_batch().items() if name in ("tokens", "labels")}
    config = changed(tie_word_embeddings=False, pad_token_id=int(batch["tokens"][0, 0]))
    programs = [lowered(config, mesh_of(*m), batch=batch) for m in ((1, 2, 2), (1, 1, 1))]
    got, want = (program.compile()(*arguments) for program, *arguments in programs)
    assert_close(got, want)
    gradient = got[1]["embed_tokens"]["embedding"][...]
    assert not np.any(gradient[config.pad_token_id]) and np.any(gradient)


@functools.cache
def hidden_states():
    """A function of `(params, batch)` on two devices, which share all rows, so no sum is left."""

    def states(params, batch):
        model = nnx.merge(model_graph(CONFIG), params)
        return model(batch["tokens"], segment_ids=batch["segment_ids"])

    return jax.jit(lambda params, batch: sum_over_devices(states)(params, batch))


@pytest.mark.parametrize("token", [-1, V, -(2**31), 2**31 - 1])
def test_a_token_on_no_device_makes_its_row_nan(token):
    batch = packed_batch()
    batch["tokens"][4, 0] = token
    mesh = mesh_of(1, 1, 2)
    params = jax.device_put(parameters(), parameter_shardings(parameters(), mesh))
    with jax.set_mesh(mesh):
        states = hidden_states()(params, jax.device_put(batch, batch_sharding(mesh)))
    is_nan = np.isnan(states)
    assert np.all(is_nan[4]) and not np.any(np.delete(is_nan, 4, axis=0))


# Refused layouts.


def test_heads_that_cannot_be_shared_raise():
    config = changed(num_key_value_heads=2)
    message = r"tensor=4 does not divide num_key_value_heads=2, .* use tensor=2, and fsdp for"
    with pytest.raises(ValueError, match=message):
        lowered(config, mesh_of(1, 1, 4))
    check_tensor_parallel(2, num_key_value_heads=2, num_tokens=6)


def test_tokens_that_cannot_be_shared_raise():
    batch = {name: array[:3, :27] for name, array in packed_batch().items()}
    with pytest.raises(ValueError, match=r"tensor=2 does not divide the 81 tokens .* multiple"):
        lowered(CONFIG, mesh_of(1, 1, 2), batch=batch)


def test_a_vocabulary_that_cannot_be_split_raises():
    config = changed(vocab_size=1010)
    message = r"embed_tokens\.embedding \(1010, 64\): tensor=4 does not divide 1010; use fewer"
    with pytest.raises(ValueError, match=message):
        parameter_shardings(parameters(config), mesh_of(1, 1, 4))


def test_a_mesh_has_the_axis_if_it_has_devices():
    assert dict(make_mesh(data=2, fsdp=2, tensor=2).shape) == {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(data=2, fsdp=4, tensor=1).shape) == {"data": 2, "fsdp": 4}
    with pytest.raises(ValueError, match=r"data=2 times fsdp=3 times tensor=2 must be .*, 8"):
        make_mesh(data=2, fsdp=3, tensor=2)
    assert tensor_axis() is None


# The placement of parameters.


def test_parameters_are_split():
    # No model has both, the biases of an MLP and the norms of queries and keys.
    shards = {}
    for config in (changed(**BIASES), changed(qk_norm=True)):
        params = parameters(config)
        shardings = parameter_shardings(params, mesh_of(2, 2, 2))
        shards |= {
            parameter_path(path)[-2:]: sharding.shard_shape(param.shape)
            for (path, param), sharding in zip(
                jax.tree.leaves_with_path(params), jax.tree.leaves(shardings), strict=True
            )
        }
    assert shards == {
        ("embed_tokens", "embedding"): (V // 2, D // 2),
        ("lm_head", "weight"): (V // 2, D // 2),
        ("q_proj", "kernel"): (L, D // 2, Q // 2),
        ("q_proj", "bias"): (L, Q // 2),
        ("k_proj", "kernel"): (L, D // 2, KV // 2),
        ("k_proj", "bias"): (L, KV // 2),
        ("v_proj", "kernel"): (L, D // 2, KV // 2),
        ("v_proj", "bias"): (L, KV // 2),
        ("q_norm", "weight"): (L, CONFIG.head_dim),
        ("k_norm", "weight"): (L, CONFIG.head_dim),
        ("o_proj", "kernel"): (L, Q // 2, D // 2),
        ("o_proj", "bias"): (L, D),
        ("gate_proj", "kernel"): (L, D // 2, F // 2),
        ("gate_proj", "bias"): (L, F // 2),
        ("up_proj", "kernel"): (L, D // 2, F // 2),
        ("up_proj", "bias"): (L, F // 2),
        ("down_proj", "kernel"): (L, F // 2, D // 2),
        ("down_proj", "bias"): (L, D),
        ("input_layernorm", "weight"): (L, D),
        ("post_attention_layernorm", "weight"): (L, D),
        ("norm", "weight"): (D,),
    }


# The training step, and the model after it.

SMALL = changed(
    vocab_size=64,
    num_hidden_layers=2,
    hidden_size=32,
    head_dim=4,
    intermediate_size=64,
    initializer_range=0.2,
    **BIASES,
)


@functools.cache
def trained(data, fsdp, tensor):
    """Losses, gradient norms and accuracies of three steps, and the state after them."""
    config = TrainConfig(
        name="test",
        model=SMALL,
        data=DataConfig(source="synthetic", sequence_length=16, batch_size=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1, eps=1e-4, clip_norm=0.5),
        steps=10,
        z_loss=1e-3,
        eval_every=0,
        sample_tokens=0,
        save=False,
    )
    mesh = mesh_of(data, fsdp, tensor)
    rng = np.random.default_rng(0)
    with jax.set_mesh(mesh):
        state = init_state(config, mesh)
        shardings = jax.tree.map(lambda a: a.sharding, state)
        step = jax.jit(make_train_step(config), donate_argnums=0, out_shardings=(shardings, None))
        losses, norms, accuracies = [], [], []
        for _ in range(3):
            tokens, labels = rng.integers(64, size=(2, 2, 8, 16), dtype=np.int32)
            labels[0, 3:] = -100  # the two batches of a step have other numbers of labels
            batch = {"tokens": tokens, "labels": labels}
            batch = jax.device_put(batch, batch_sharding(mesh, batch_axis=1))
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
            accuracies.append(float(metrics["accuracy"]))
    return losses, norms, accuracies, state


# In the normal run, tests/train compares whole runs on meshes. This file compares gradients.
@pytest.mark.full
@pytest.mark.parametrize(
    "data, fsdp, tensor", [(1, 2, 1), (1, 1, 2), (1, 2, 2), (2, 1, 4), (2, 2, 2)]
)
def test_training_is_that_of_one_device(data, fsdp, tensor):
    losses, norms, accuracies, state = trained(data, fsdp, tensor)
    want_losses, want_norms, want_accuracies, want = trained(1, 1, 1)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-5)
    # Accuracies are counts of right tokens over the number of labels, so they differ by rounding.
    np.testing.assert_allclose(accuracies, want_accuracies, rtol=1e-6)
    assert any(accuracies)
    assert want_losses[2] != want_losses[0]
    for got, expected in zip(*map(jax.tree.leaves, (state.params, want.params)), strict=True):
        scale = np.abs(expected).max()
        np.testing.assert_allclose(got / scale, expected / scale, rtol=0, atol=1e-4)


@pytest.mark.full
def test_text_is_that_of_one_device():
    prompts = np.arange(12, dtype=np.int32).reshape(3, 4)
    texts = []
    for sizes in ((1, 1, 1), (1, 2, 2)):
        mesh = mesh_of(*sizes)
        params = parameters(SMALL)
        params = jax.device_put(params, parameter_shardings(params, mesh))
        with jax.set_mesh(mesh):
            model = nnx.merge(model_graph(SMALL), params)
            placed = jax.device_put(prompts, replicated(mesh))
            texts.append(np.asarray(generate(model, placed, max_new_tokens=6)))
    np.testing.assert_array_equal(*texts)
