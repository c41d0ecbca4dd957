"""Preferences and distillation through the training step, against formulas with all logits."""

import dataclasses
import functools
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.llama import Llama
from models.llama_hf import save_pretrained
from models.sharding import batch_sharding, make_mesh, parameter_shardings
from support import tiny_run
from support.numerics import assert_as_accurate
from support.textbook_llama import textbook_logits
from train.config import DataConfig, DistillConfig, DPOConfig
from train.data import IGNORED
from train.objectives import sequence_log_probs
from train.step import make_eval_step, make_gradients, model_graph
from train.teacher import load_frozen, teacher_model

V, ROWS, LENGTH, BETA = 64, 8, 16, 0.3
MODEL = dataclasses.replace(
    tiny_run.MODEL,
    vocab_size=V,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    initializer_range=0.2,  # so that the distributions are far from uniform
    remat="none",
)
BASE = dataclasses.replace(
    tiny_run.CONFIG,
    model=MODEL,
    data=DataConfig(source="synthetic", sequence_length=LENGTH, batch_size=ROWS),
)
OF_PAIRS = dataclasses.replace(BASE.data, path=(Path("pairs.jsonl"),))  # not read here
DPO = dataclasses.replace(BASE, objective="dpo", dpo=DPOConfig(beta=BETA), data=OF_PAIRS)
DISTILL = {
    "forward_kl": DistillConfig(),
    "reverse_kl": DistillConfig(divergence="reverse_kl", temperature=2.0),
    "jsd": DistillConfig(divergence="jsd", temperature=0.7, label_weight=0.25),
}

pytestmark = pytest.mark.usefixtures("fast_compilation")


@functools.cache
def one_device():
    return make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory):
    """A teacher with other sizes than the model. Its files are float32."""
    folder = tmp_path_factory.mktemp("teacher")
    model = dataclasses.replace(MODEL, hidden_size=24, num_hidden_layers=1)
    save_pretrained(Llama(model, rngs=nnx.Rngs(7)), folder)
    return folder


@functools.cache
def parameters():
    return nnx.state(Llama(MODEL, rngs=nnx.Rngs(0)), nnx.Param)


def batch_of(accumulation_steps=1):
    """A batch [A, B, S], whose rows have from 1 to 14 labels."""
    rng = np.random.default_rng(0)
    tokens, labels = rng.integers(V, size=(2, ROWS, LENGTH), dtype=np.int32)
    column, row = np.arange(LENGTH), np.arange(ROWS)[:, None]
    labels[(column < row) | (column > 14 - row // 2)] = IGNORED
    batch = {"tokens": tokens, "labels": labels}
    # Near what the model gives, so that the loss is not saturated.
    batch["reference"] = np.float32(-5 * np.sum(labels != IGNORED, axis=1, keepdims=True))
    batch["reference"] += rng.normal(size=(ROWS, 1), scale=2).astype(np.float32)
    return {
        name: a.reshape(accumulation_steps, -1, a.shape[-1]).copy() for name, a in batch.items()
    }


def formula(config, logits, teacher_logits, batch):
    """The loss and the metrics of a whole batch [B, S], from all logits."""
    labels, counts = batch["labels"], batch["labels"] != IGNORED
    log_p = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    picked = jnp.where(counts, picked, 0)
    number = counts.sum()
    if config.objective == "dpo":
        rewards = BETA * (picked.sum(axis=1) - batch["reference"][:, 0])
        margins = rewards[::2] - rewards[1::2]
        metrics = {"reward_margin": margins.mean(), "reward_accuracy": (margins > 0).mean()}
        return -jnp.log(1 / (1 + jnp.exp(-margins))).mean(), metrics
    of = config.distill
    log_p, log_q = (jax.nn.log_softmax(z / of.temperature) for z in (logits, teacher_logits))
    kl = lambda log_a, log_b: jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)
    mixture = jnp.log((jnp.exp(log_p) + jnp.exp(log_q)) / 2)
    divergence = {
        "forward_kl": lambda: kl(log_q, log_p),
        "reverse_kl": lambda: kl(log_p, log_q),
        "jsd": lambda: (kl(log_q, mixture) + kl(log_p, mixture)) / 2,
    }[of.divergence]()
    divergence = jnp.where(counts, divergence, 0).sum() / number
    loss = (1 - of.label_weight) * of.temperature**2 * divergence
    if not of.label_weight:
        return loss, {"divergence": divergence}
    nll = -picked.sum() / number
    accuracy = ((logits.argmax(axis=-1) == labels) & counts).sum() / number
    metrics = {"divergence": divergence, "nll": nll, "accuracy": accuracy}
    return loss + of.label_weight * nll, metrics


def by_formula(config, params, teacher, batch, dtype):
    """Loss, metrics and gradients in float32 by our model, or in float64 by textbooks."""
    exact = dtype == jnp.float64
    batch = {name: jnp.asarray(a.reshape(-1, a.shape[-1])) for name, a in batch.items()}

    def logits_of(model, params):
        if not exact:
            llama = nnx.merge(model_graph(model), params)
            return llama.logits(llama(batch["tokens"]))
        return textbook_logits(
            nnx.to_pure_dict(params),
            config=model,
            tokens=batch["tokens"],
            positions=jnp.arange(LENGTH)[None],
            segment_ids=jnp.ones_like(batch["tokens"]),
            dtype=dtype,
        )

    def loss(params, *teacher):
        of_teacher = logits_of(teacher_model(config), *teacher) if teacher else None
        return formula(config, logits_of(config.model, params), of_teacher, batch)

    with jax.enable_x64(exact), jax.numpy_dtype_promotion("standard"):
        if exact:
            params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
        return jax.device_get(jax.jit(jax.value_and_grad(loss, has_aux=True))(params, *teacher))


def config_of(case, teacher_folder):
    if case == "dpo":
        return DPO
    distill = dataclasses.replace(DISTILL[case], teacher=teacher_folder)
    return dataclasses.replace(BASE, objective="distill", distill=distill)


def step_on(mesh, config, batch):
    """Metrics and gradients of the step on a mesh."""
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        params = jax.device_put(parameters(), parameter_shardings(parameters(), mesh))
        teacher = load_frozen(config, mesh)
        batch = jax.device_put(batch, batch_sharding(mesh, batch_axis=1))
        return jax.device_get(jax.jit(make_gradients(config))(params, batch, *teacher)), teacher


@pytest.mark.parametrize(
    "case",
    [
        "dpo",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("forward_kl", "reverse_kl")),
        "jsd",
    ],
)
def test_value_and_gradients_of_the_step(case, teacher_folder):
    """Two batches are added up. 5 s a case."""
    config = config_of(case, teacher_folder)
    batch = batch_of(accumulation_steps=2)
    (metrics, gradients), teacher = step_on(one_device(), config, batch)
    if teacher:
        assert {leaf.dtype for leaf in jax.tree.leaves(teacher)} == {jnp.dtype("bfloat16")}
    plain, exact = (
        by_formula(config, parameters(), teacher, batch, dtype)
        for dtype in (jnp.float32, jnp.float64)
    )
    (loss, of_metrics), _ = exact
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    contexts = {"mean_context"} | ({"teacher_mean_context"} if teacher else set())
    assert set(metrics) == {"loss", "grad_norm", "num_tokens", *contexts, *of_metrics}
    for name, value in of_metrics.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    assert metrics["num_tokens"] == np.sum(batch["labels"] != IGNORED)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(gradients)]
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(gradients)) > 1e-5
    # Two parts of the batch are added up in another order than in one sum.
    trees = map(jax.tree.leaves, (gradients, plain[1], exact[1]))
    assert_as_accurate(*trees, names=names, slack=4.0)


@pytest.mark.parametrize("case", ["dpo", pytest.param("forward_kl", marks=pytest.mark.full)])
def test_gradients_of_a_step_in_bfloat16(case, teacher_folder):
    """As accurate as those of float32 logits. 9 s a case."""
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    config = dataclasses.replace(config_of(case, teacher_folder), model=model)
    batch = batch_of()
    (_, gradients), teacher = step_on(one_device(), config, batch)
    plain, exact = (
        by_formula(config, parameters(), teacher, batch, dtype)[1]
        for dtype in (jnp.float32, jnp.float64)
    )
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(gradients)]
    # A norm has 16 numbers, so the ratio of two errors scatters: up to 1.17 here.
    trees = map(jax.tree.leaves, (gradients, plain, exact))
    assert_as_accurate(*trees, names=names, slack=1.5)


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        pytest.param("dpo", (2, 2, 1), marks=pytest.mark.full),
        ("dpo", (1, 2, 2)),
        ("forward_kl", (2, 2, 1)),
        pytest.param("jsd", (1, 2, 2), marks=pytest.mark.full),
        pytest.param("jsd", (1, 4, 1), marks=pytest.mark.full),
    ],
)
def test_a_mesh_changes_nothing(case, sizes, teacher_folder):
    """6 s a case."""
    config = config_of(case, teacher_folder)
    data, fsdp, tensor = sizes
    mesh = make_mesh(
        data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: data * fsdp * tensor]
    )
    (want, want_gradients), _ = step_on(one_device(), config, batch_of())
    (got, gradients), teacher = step_on(mesh, config, batch_of())
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, atol=1e-6, err_msg=name)
    scale = lambda tree: jax.tree.map(lambda a, w: a / np.abs(w).max(), tree, want_gradients)
    chex.assert_trees_all_close(scale(gradients), scale(want_gradients), rtol=0, atol=1e-5)
    for leaf in jax.tree.leaves(teacher):
        is_split = leaf.ndim > 1 and leaf.shape[-2] > 1
        share = leaf.size // (fsdp * tensor) if is_split else leaf.size
        assert leaf.addressable_shards[0].data.size == share


@pytest.mark.parametrize(
    "sizes", [*(pytest.param(s, marks=pytest.mark.full) for s in ((1, 1, 1), (2, 2, 1))), (1, 2, 2)]
)
def test_log_probabilities_of_sequences(sizes):
    """Those of the model itself as reference make every reward 0. 3 s a case."""
    data, fsdp, tensor = sizes
    mesh = make_mesh(
        data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: data * fsdp * tensor]
    )
    batch = {name: jnp.asarray(a[0]) for name, a in batch_of().items() if name != "reference"}
    graphdef = model_graph(MODEL)
    llama = nnx.merge(graphdef, parameters())
    log_p = jax.nn.log_softmax(llama.logits(llama(batch["tokens"])))
    labels = batch["labels"]
    picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    want = np.sum(np.asarray(picked), axis=1, where=labels != IGNORED)
    with jax.set_mesh(mesh):
        params = jax.device_put(parameters(), parameter_shardings(parameters(), mesh))
        batch = jax.device_put(batch, batch_sharding(mesh))
        got = jax.jit(functools.partial(sequence_log_probs, graphdef))(params, batch)
        np.testing.assert_allclose(got, want, rtol=1e-5)
        reference = jax.device_put(np.asarray(got)[:, None], batch_sharding(mesh))
        sums = jax.jit(make_eval_step(DPO))(params, batch | {"reference": reference})
    assert int(sums["num_pairs"]) == ROWS // 2
    np.testing.assert_allclose(sums["loss_sum"], ROWS / 2 * np.log(2), rtol=1e-5)
    np.testing.assert_allclose(sums["reward_margin_sum"], 0, atol=1e-4)


def test_rows_without_labels_are_no_pairs():
    """Those that fill up the last batch of an evaluation. 2 s."""
    batch = {name: a[0] for name, a in batch_of().items()}
    padded = {
        name: np.concatenate([a, np.full_like(a, IGNORED if name == "labels" else 0)])
        for name, a in batch.items()
    }
    step = jax.jit(make_eval_step(DPO))
    chex.assert_trees_all_close(
        step(parameters(), padded), step(parameters(), batch), rtol=1e-5, atol=1e-6
    )


def test_preferences_with_64_bits():
    """Sums stay in float32, which `linear_token_loss` asks of its function."""
    batch = {name: a[0] for name, a in batch_of().items()}
    log_probs = functools.partial(sequence_log_probs, model_graph(MODEL))
    with jax.enable_x64(), jax.numpy_dtype_promotion("standard"):
        sums = jax.eval_shape(make_eval_step(DPO), parameters(), batch)
        of_rows = jax.eval_shape(log_probs, parameters(), batch)
    assert sums["loss_sum"].dtype == of_rows.dtype == jnp.float32
