"""The training step against `jax.grad` of plain code, on one device and on eight."""

import dataclasses
import functools
import re
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from models.sharding import batch_sharding, make_mesh, parameter_path
from support.numerics import assert_trees_as_accurate
from support.textbook_llama import textbook_logits
from train.config import DataConfig, OptimizerConfig, TrainConfig, preset
from train.data import IGNORED, PackedDataset
from train.objectives import loss_and_sums
from train.optimizers import make_optimizer
from train.step import (
    init_state,
    make_eval_step,
    make_train_step,
    model_graph,
)

# It has every kind of parameter: an output embedding of its own and biases everywhere.
MODEL = dataclasses.replace(
    preset("demo").model,
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=32,
    tie_word_embeddings=False,
    attention_bias=True,
    mlp_bias=True,
    initializer_range=0.2,  # so that attention is far from uniform
    dtype="float32",
)
ROWS, LENGTH = 8, 16
Z_LOSS = 0.1
# The learning rate is at its peak from the first step on. Adam's eps is so large that the update is
# proportional to the gradient. An update that normalizes would blow up the rounding of gradients
# near 0 and hide a wrong scale.
LINEAR = OptimizerConfig(
    schedule="wsd", warmup_steps=0, learning_rate=1.0, eps=10.0, weight_decay=0.1, clip_norm=1e3
)
CONFIG = TrainConfig(
    name="test",
    model=MODEL,
    data=DataConfig(source="synthetic", sequence_length=LENGTH, batch_size=ROWS),
    optimizer=LINEAR,
    z_loss=Z_LOSS,
    steps=100,
    eval_every=0,
    sample_tokens=0,
    save=False,
)


@functools.cache
def one_device():
    return make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])


@functools.cache
def initial_state():
    return init_state(CONFIG, one_device())


@functools.cache
def state_0():
    """The initial state, with norms and biases moved off 1 and 0 so that decay would show."""

    def shift(path, p):
        moved = parameter_path(path)[-1] in ("weight", "bias")
        return jax.device_put(np.asarray(p) + np.float32(0.1), p.sharding) if moved else p

    params = jax.tree_util.tree_map_with_path(shift, initial_state().params)
    return dataclasses.replace(initial_state(), params=params)


# One program for all leaves. Each operation outside of a program compiles one of its own.
copied = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))


def batch_of(seed=0, accumulation_steps=1):
    """A batch [A, B, S]. Row r has about a share r/8 of its labels: from 0 of 16 up to 14."""
    rng = np.random.default_rng(seed)
    tokens, labels = rng.integers(MODEL.vocab_size, size=(2, ROWS, LENGTH), dtype=np.int32)
    has_label = rng.random((ROWS, LENGTH)) < np.arange(ROWS)[:, None] / ROWS
    assert 0 < has_label.sum() < has_label.size
    batch = {"tokens": tokens, "labels": np.where(has_label, labels, np.int32(IGNORED))}
    return jax.tree.map(lambda a: a.reshape(accumulation_steps, -1, LENGTH), batch)


@functools.cache
def compiled_step(accumulation_steps) -> Any:
    """The step of the default configuration, as the loop compiles it: it takes over the state."""
    jitted = jax.jit(make_train_step(CONFIG), donate_argnums=0)
    return jitted.lower(state_0(), batch_of(accumulation_steps=accumulation_steps)).compile()


def step(state, batch):
    """One step of the default configuration; the state is still there afterwards."""
    return compiled_step(len(batch["labels"]))(copied(state), batch)


def plain_loss(params, batch, *, model=MODEL):
    """The mean loss over all labels of a batch [A, B, S], from all logits at once.

    Returns:
      The loss, and its part without z-loss.
    """
    tokens, labels = (batch[name].reshape(-1, LENGTH) for name in ("tokens", "labels"))
    llama = nnx.merge(model_graph(model), params)
    logits = llama.logits(llama(tokens))
    lse = jax.nn.logsumexp(logits, axis=-1)
    counts = labels != IGNORED
    label_logits = jnp.take_along_axis(logits, jnp.where(counts, labels, 0)[..., None], -1)[..., 0]
    mean = lambda losses: jnp.sum(losses, where=counts) / jnp.sum(counts).astype(jnp.float32)
    return mean(lse - label_logits + Z_LOSS * lse**2), mean(lse - label_logits)


plain_gradients = jax.jit(jax.value_and_grad(plain_loss, has_aux=True))


def named(params):
    """Arrays by dotted path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(parameter_path(path)): np.asarray(leaf, np.float64) for path, leaf in leaves}


def moments(state):
    """The two moments of Adam."""
    return optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")


def assert_close(got, want, *, ulps=32):
    """Equal up to `ulps` float32 roundings of the largest element of each array.

    Two sums of 128 tokens in different orders differ by about sqrt(128) = 11 roundings. The
    backward pass through two layers adds a few.
    """
    chex.assert_trees_all_equal_structs(got, want)
    got, want = named(got), named(want)
    for name, expected in want.items():
        allowed = ulps * np.finfo(np.float32).eps * max(np.max(np.abs(expected)), 1e-6)
        np.testing.assert_allclose(got[name], expected, rtol=0, atol=allowed, err_msg=name)


def global_norm(grads):
    return float(np.sqrt(sum(np.sum(g**2) for g in named(grads).values())))


@pytest.fixture(scope="module")
def plain():
    """Loss, loss without z-loss, and gradients of the test batch in the test state."""
    (loss, nll), grads = plain_gradients(state_0().params, batch_of())
    return float(loss), float(nll), grads


@functools.cache
def exact_gradients():
    """The gradients of `plain_loss` of the test batch in the test state, in float64."""
    tokens, labels = (batch_of()[name].reshape(-1, LENGTH) for name in ("tokens", "labels"))

    def loss(params):
        logits = textbook_logits(
            params,
            config=MODEL,
            tokens=tokens,
            positions=jnp.arange(LENGTH)[None],
            segment_ids=jnp.ones_like(tokens),
            dtype=jnp.float64,
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        losses += Z_LOSS * jax.nn.logsumexp(logits, axis=-1) ** 2
        return jnp.mean(losses, where=labels != IGNORED)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = nnx.to_pure_dict(state_0().params)
        params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), params)
        return jax.tree.map(np.asarray, jax.jit(jax.grad(loss))(params))


@pytest.mark.parametrize("accumulation_steps", [1, 2, pytest.param(4, marks=pytest.mark.full)])
def test_loss_and_gradients_do_not_depend_on_the_split(plain, accumulation_steps):
    loss, nll, grads = plain
    batch = batch_of(accumulation_steps=accumulation_steps)
    new_state, metrics = step(state_0(), batch)

    counts = np.sum(np.asarray(batch["labels"]) != IGNORED, axis=(1, 2))
    assert len(set(counts)) == accumulation_steps, "the parts must differ in their labels"
    assert int(metrics["num_tokens"]) == counts.sum()
    assert loss > nll + 1  # 0.1 · log(64)² is 1.7
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["nll"], nll, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"], global_norm(grads), rtol=1e-6)
    b1, _ = LINEAR.decays
    got = jax.device_get(nnx.to_pure_dict(moments(new_state)[0]))
    got = jax.tree.map(lambda mu: mu / np.float32(1 - b1), got)
    # The step sums over the tokens of a part and then over the parts, the plain loss over all
    # tokens. The ratio of the two errors scatters, up to 2.8 on the CPUs tried.
    assert_trees_as_accurate(got, nnx.to_pure_dict(grads), exact_gradients(), slack=4.0)

    params = named(state_0().params)
    for name, grad in named(grads).items():
        decay = 0.1 * params[name] if decays(name) else 0.0
        want = params[name] - (grad / (np.abs(grad) + LINEAR.eps) + decay)
        np.testing.assert_allclose(named(new_state.params)[name], want, atol=1e-6, err_msg=name)


def test_positions_without_a_label_do_not_matter():
    state, batch = state_0(), batch_of()
    half = LENGTH // 2
    batch["labels"][..., half:] = IGNORED
    want_state, want = step(state, batch)
    other = jax.tree.map(np.copy, batch)
    other["tokens"][..., half:] = 1
    got_state, got = step(state, other)
    chex.assert_trees_all_equal(got, want)
    chex.assert_trees_all_equal(got_state, want_state)

    # A part without labels adds neither to the sum nor to the count that divides it.
    batch["labels"][:, : ROWS // 2] = IGNORED
    want_state, want = step(state, batch)
    parts = jax.tree.map(lambda a: a.reshape(2, -1, LENGTH), batch)
    for both in (parts, jax.tree.map(np.flipud, parts)):
        got_state, got = step(state, both)
        np.testing.assert_allclose(got["loss"], want["loss"], rtol=1e-6)
        assert_close(got_state.params, want_state.params)


def test_a_packed_row_is_its_documents():
    params = state_0().params
    total = jax.jit(lambda batch: loss_and_sums(model_graph(MODEL), params, batch)[0])
    rng = np.random.default_rng(0)
    documents = [rng.integers(MODEL.vocab_size, size=n, dtype=np.int32) for n in (5, 7, 5)]
    dataset = PackedDataset.from_documents(documents, sequence_length=LENGTH)
    packed = next(dataset.eval_batches(1))
    # Each row is a document, and the positions after its end have no label.
    alone = {"tokens": np.zeros((3, 6), np.int32), "labels": np.full((3, 6), IGNORED, np.int32)}
    for row, document in enumerate(documents):
        # The packed row ends one token before the last document does.
        alone["tokens"][row, : len(document) - 1] = document[:-1]
        alone["labels"][row, : len(document) - 1] = document[1:]
    apart = float(total(alone))
    assert np.sum(packed["labels"] != IGNORED) == sum(map(len, documents)) - len(documents)
    np.testing.assert_allclose(total(packed), apart, rtol=1e-6)
    # Rotations are relative: positions may start anywhere, but must not run twice as fast.
    without = {name: array for name, array in packed.items() if name != "segment_ids"}
    faster = packed | {"positions": 2 * packed["positions"]}
    for wrong in (without, faster):
        assert abs(float(total(wrong)) / apart - 1) > 1e-3


def test_eval_step_sums_the_negative_log_likelihood(plain):
    _, nll, _ = plain
    params, batch = state_0().params, batch_of()
    flat = jax.tree.map(lambda a: a[0], batch)
    result = jax.jit(make_eval_step(CONFIG))(params, flat)
    count = np.sum(np.asarray(flat["labels"]) != IGNORED)
    assert int(result["num_tokens"]) == count
    np.testing.assert_allclose(result["nll_sum"], nll * count, rtol=1e-6)

    # It has as many matrix products as a forward over all logits, so none for gradients.
    products = lambda fn, batch: str(jax.make_jaxpr(fn)(params, batch)).count("dot_general[")
    assert products(make_eval_step(CONFIG), flat) == products(plain_loss, batch) > 0


def decays(name):
    return name.endswith(("kernel", "embedding")) or name == "lm_head.weight"


def test_a_batch_without_labels_only_decays():
    state, batch = state_0(), batch_of()
    batch["labels"][:] = IGNORED
    new_state, metrics = step(state, batch)
    assert float(metrics["loss"]) == 0 and float(metrics["grad_norm"]) == 0
    assert int(metrics["num_tokens"]) == 0
    before, after = named(state.params), named(new_state.params)
    kinds = {False: 0, True: 0}
    for name, old in before.items():
        kinds[decays(name)] += 1
        assert np.all(old == 0) or np.any(old), name
        if decays(name):
            np.testing.assert_allclose(after[name], old * (1 - 0.1), rtol=1e-6, err_msg=name)
        else:
            assert np.all(old != 0), f"{name} would show no decay"
            np.testing.assert_array_equal(after[name], old, err_msg=name)
    # 7 kernels and 2 embeddings decay; 7 biases and 3 norms do not.
    assert kinds == {True: 9, False: 10}


def test_three_steps_are_adamw_of_the_clipped_gradient():
    """The formulas are those of https://arxiv.org/abs/1711.05101, in float64."""
    optimizer = OptimizerConfig(
        learning_rate=0.01, warmup_steps=2, eps=0.01, weight_decay=0.3, clip_norm=0.05
    )
    config = dataclasses.replace(CONFIG, optimizer=optimizer, steps=10)
    step = jax.jit(make_train_step(config))
    state = state_0()
    params = named(state.params)
    mu, nu = ({name: np.zeros_like(p) for name, p in params.items()} for _ in range(2))
    for count in range(3):
        batch = batch_of(seed=count)
        _, grads = plain_gradients(state.params, batch)
        state, metrics = step(state, batch)
        norm = global_norm(grads)
        assert norm > 2 * 0.05
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        lr = [0.0, 0.005, 0.01][count]
        np.testing.assert_allclose(metrics["lr"], lr, rtol=1e-6)
        for name, g in named(grads).items():
            g *= 0.05 / norm
            mu[name] = 0.9 * mu[name] + 0.1 * g
            nu[name] = 0.95 * nu[name] + 0.05 * g**2
            m, n = mu[name] / (1 - 0.9 ** (count + 1)), nu[name] / (1 - 0.95 ** (count + 1))
            decay = 0.3 * params[name] if decays(name) else 0.0
            params[name] = params[name] - lr * (m / (np.sqrt(n) + 0.01) + decay)
            np.testing.assert_allclose(
                named(state.params)[name], params[name], atol=2e-6, err_msg=f"{name} {count=}"
            )


def test_a_step_repeats_itself():
    state, batch = state_0(), batch_of()
    first = step(state, batch)
    chex.assert_trees_all_equal(step(state, batch), first)
    assert int(first[0].step) == 1 and first[0].step.dtype == jnp.int32
    chex.assert_trees_all_equal_shapes_and_dtypes(first[0], state)


def test_compiled_step_updates_the_state_in_place_and_stays_on_the_device():
    """A program that is compiled ahead of time never compiles again.

    It refuses inputs of another dtype, weak type or placement.
    """
    step = compiled_step(1)
    state = copied(state_0())
    batch = jax.device_put(batch_of(), batch_sharding(one_device()))
    inputs = jax.tree.leaves(state)
    assert step.memory_analysis().alias_size_in_bytes == sum(leaf.nbytes for leaf in inputs)
    program = step.as_text()
    assert "dot" in program
    assert not re.findall(r"\b(?:infeed|outfeed|send|recv)(?:-done)?\(|callback", program)

    batches = [batch, jax.tree.map(jnp.array, batch), jax.tree.map(jnp.array, batch)]
    metrics = {}
    with jax.transfer_guard("disallow"):
        for part in batches:
            state, metrics = step(state, part)
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device"):
            step(state, batch_of())
    assert all(leaf.is_deleted() for leaf in inputs)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves([batches, state, metrics]))
    assert int(state.step) == 3


def test_bfloat16_compute_keeps_float32_state(plain):
    loss, state = plain[0], state_0()
    model = dataclasses.replace(MODEL, dtype="bfloat16")
    step = make_train_step(dataclasses.replace(CONFIG, model=model))
    with jax.numpy_dtype_promotion("standard"):  # for jax.nn.dot_product_attention
        new_state, metrics = jax.jit(step)(state, batch_of())
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    floats = [state.params, new_state.params, *moments(new_state)]
    assert {leaf.dtype for leaf in jax.tree.leaves(floats)} == {np.dtype("float32")}
    assert metrics["loss"].dtype == metrics["grad_norm"].dtype == jnp.float32
    # bfloat16 has 8 bits: the loss moves, but less than a percent.
    assert 0 < abs(float(metrics["loss"]) / loss - 1) < 0.01
    # Parameters change by less than bfloat16 could hold: they were not rounded on the way.
    for name, value in named(new_state.params).items():
        assert np.mean(value.astype(jnp.bfloat16).astype(np.float64) == value) < 0.5, name


def run_on(mesh, num_steps=3):
    """Losses of a few steps on packed text, the states before and after, and the program."""
    # The usual Adam, because its normalization must not depend on the mesh either.
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_steps=1, eps=1e-4, clip_norm=0.5)
    config = dataclasses.replace(CONFIG, optimizer=optimizer, z_loss=1e-3)
    rng = np.random.default_rng(1)
    documents = [rng.integers(MODEL.vocab_size, size=11, dtype=np.int32) for _ in range(40)]
    dataset = PackedDataset.from_documents(documents, sequence_length=LENGTH)
    rows = [dataset.batch(i, batch_size=ROWS, seed=0) for i in range(num_steps)]
    batches = jax.device_put(
        jax.tree.map(lambda a: a[None], rows), batch_sharding(mesh, batch_axis=1)
    )
    with jax.set_mesh(mesh):
        first = init_state(config, mesh)
        shardings = jax.tree.map(lambda a: a.sharding, first)
        step = jax.jit(make_train_step(config), out_shardings=(shardings, None))
        compiled: Any = step.lower(first, batches[0]).compile()
        state, losses, norms = first, [], []
        for batch in batches:
            state, metrics = compiled(state, batch)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
    return losses, norms, first, state, compiled.as_text()


@pytest.fixture(scope="module")
def on_one_device():
    return run_on(one_device())


# The normal run has whole runs on other devices, in checkpoints/test_resume.py.
@pytest.mark.full
@pytest.mark.parametrize(("data", "fsdp"), [(8, 1), (2, 4), (1, 8)])
def test_a_mesh_changes_nothing_but_the_placement(on_one_device, data, fsdp):
    losses, norms, first, last, program = run_on(make_mesh(data=data, fsdp=fsdp))
    want_losses, want_norms, want_first, want_last, _ = on_one_device
    chex.assert_trees_all_equal(
        jax.tree.map(np.asarray, first.params), jax.tree.map(np.asarray, want_first.params)
    )
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    np.testing.assert_allclose(norms, want_norms, rtol=1e-5)
    assert_close(last.params, want_last.params, ulps=1000)

    for state in (first, last):
        for moment in moments(state):
            same = jax.tree.map(
                lambda m, p: m.sharding.is_equivalent_to(p.sharding, p.ndim), moment, state.params
            )
            assert all(jax.tree.leaves(same))
    for name, leaf in zip(named(last.params), jax.tree.leaves(last.params), strict=True):
        share = leaf.addressable_shards[0].data.size * fsdp
        assert share == (leaf.size if decays(name) else leaf.size * fsdp), name
    # With whole copies of the model on every device, only gradients and sums of losses move.
    assert "all-reduce" in program
    assert ("all-gather" in program) == (fsdp > 1)


def test_initial_state():
    first = initial_state()
    other = named(init_state(dataclasses.replace(CONFIG, seed=1), one_device()).params)
    for name, values in named(first.params).items():
        assert not decays(name) or not np.any(values == other[name]), name
    assert int(first.step) == 0
    assert all(not np.any(leaf) for leaf in jax.device_get(jax.tree.leaves(moments(first))))
    structure = jax.eval_shape(make_optimizer(LINEAR, CONFIG.steps).init, first.params)
    chex.assert_trees_all_equal_shapes_and_dtypes(first.opt_state, structure)
