"""Every optimizer trains and skips steps to the bit. Its state lies beside the parameters."""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train.step
from models.sharding import make_mesh, parameter_path
from support import tiny_run
from support.numerics import assert_as_accurate
from train.config import OptimizerConfig
from train.optimizers import make_optimizer
from train.step import abstract_state, init_state, make_train_step, state_with

CONFIG = dataclasses.replace(
    tiny_run.CONFIG,
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, schedule="wsd"),
    steps=100,
)
# The normal run compares the updates of these optimizers with their formulas.
SIMPLE = "lion", "sgd"
RATES = {"adamw": 1e-2, "lion": 2e-3, "adafactor": 1e-2, "muon": 1e-2, "sgd": 1.0}


def config_of(name, **changes):
    optimizer = dataclasses.replace(
        CONFIG.optimizer, name=name, learning_rate=RATES[name], **changes
    )
    return dataclasses.replace(CONFIG, optimizer=optimizer)


@functools.cache
def parameters():
    """The initial parameters of the model, on the host."""
    return jax.device_get(init_state(CONFIG, one_device()).params)


def one_device():
    return make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])


def batch_of(seed=0):
    tokens = np.random.default_rng(seed).integers(64, size=(1, 8, 16), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(tokens)}


def gradients_of_squares(config):
    """Takes the place of the model: the loss is the mean square of all parameters less 0.1."""

    def gradients_of(params, batch):
        flat = lambda params: jnp.concatenate([p.ravel() for p in jax.tree.leaves(params)])
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean((flat(p) - 0.1) ** 2))(params)
        bias = jnp.mean(batch["tokens"].astype(jnp.float32))  # so that batches differ
        gradients = jax.tree.map(lambda g: g * bias, gradients)
        return {"loss": loss, "grad_norm": optax.tree.norm(gradients)}, gradients

    return gradients_of


# The compiler takes far longer for a model than for its optimizer.
@pytest.mark.parametrize(
    ("name", "of_model"),
    [
        pytest.param(name, of_model, marks=pytest.mark.full if of_model or name in SIMPLE else ())
        for of_model in (False, True)
        for name in RATES
    ],
)
def test_it_trains_and_skips_steps_that_are_not_finite(name, of_model, monkeypatch):
    if not of_model:
        monkeypatch.setattr(train.step, "make_gradients", gradients_of_squares)
    config = config_of(name)
    step = jax.jit(make_train_step(config))
    state = state_with(config, one_device(), jax.device_put(parameters(), jax.devices()[0]))
    losses = []
    for _ in range(20):
        state, metrics = step(state, batch_of())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]

    in_norm = lambda path: parameter_path(path) == ("norm", "weight")
    poison = lambda path, a: a.at[3].set(jnp.nan) if in_norm(path) else a
    params = jax.tree_util.tree_map_with_path(poison, state.params)
    before = dataclasses.replace(state, params=params)
    after, metrics = step(before, batch_of())
    assert not math.isfinite(metrics["grad_norm"])
    chex.assert_trees_all_equal(after.params, before.params)
    chex.assert_trees_all_equal(after.opt_state, before.opt_state)
    assert int(metrics["skipped_steps"]) == 1

    # The next step does not see the skipped one.
    after, metrics = step(dataclasses.replace(after, params=state.params), batch_of(1))
    other, expected = step(state, batch_of(1))
    chex.assert_trees_all_equal(after.params, other.params)
    chex.assert_trees_all_equal(after.opt_state, other.opt_state)
    assert metrics["lr"] == expected["lr"]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.full if n in SIMPLE else ()) for n in RATES]
)
def test_a_skip_takes_at_most_the_state_once_more(name):
    """The bound is for temporaries of the compiled update. AdamW needs nothing."""
    optimizer = make_optimizer(OptimizerConfig(name=name), steps=1000)
    params = {"layers": {"kernel": jnp.zeros((2, 512, 256))}, "weight": jnp.zeros(4096)}
    state = optimizer.init(params)

    def update(params, state, gradients, taken):
        updates, state = optimizer.update(gradients, state, params, taken=taken)
        new = optax.apply_updates(params, updates)
        return jax.tree.map(lambda n, o: jnp.where(taken, n, o), new, params), state

    def temporaries(taken):
        step = lambda params, state, gradients, skips: update(
            params, state, gradients, taken or ~skips
        )
        args = params, state, params, jnp.zeros((), bool)
        with jax.numpy_dtype_promotion("standard"):
            compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    extra = temporaries(None) - temporaries(True)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert extra <= (0 if name == "adamw" else size) + 1024


@pytest.mark.parametrize("name", ["adafactor", "muon"])
def test_the_state_lies_beside_the_parameters(name):
    """Optimizers whose state has other shapes than the parameters."""
    mesh = make_mesh(data=2, fsdp=4)
    state = abstract_state(config_of(name), mesh)
    shards = {
        parameter_path(path)[-4:]: (leaf.shape, leaf.sharding.shard_shape(leaf.shape))
        for path, leaf in jax.tree.leaves_with_path(state.opt_state)
        if leaf.ndim
    }
    if name == "muon":
        assert shards["layers", "mlp", "up_proj", "kernel"] == ((2, 16, 32), (2, 4, 32))
        assert shards["adam", "embed_tokens", "embedding"] == ((64, 16), (64, 4))
    else:
        assert shards["embed_tokens", "embedding"] == ((64, 16), (64, 4))
        assert all(whole == part for whole, part in shards.values() if len(whole) < 2)


# The formulas

PARAMS = {
    "layers": {"kernel": np.random.default_rng(0).normal(size=(2, 6, 4))},
    "weight": np.ones(3),
}
GRADIENTS = [
    jax.tree.map(lambda p, seed=seed: np.random.default_rng(seed).normal(size=p.shape), PARAMS)
    for seed in (1, 2)
]


def updates_of(config, gradients=GRADIENTS):
    """The updates of float32 parameters for each of the gradients; the parameters stay."""
    single = lambda tree: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), tree)
    optimizer = make_optimizer(config, steps=10)
    state = optimizer.init(single(PARAMS))
    found = []
    with jax.numpy_dtype_promotion("standard"):
        for gradient in gradients:
            updates, state = optimizer.update(single(gradient), state, single(PARAMS))
            found.append(updates)
    return found


def formula(name, **changes):
    fixed: dict[str, Any] = {"learning_rate": 0.5, "warmup_steps": 0, "schedule": "wsd"}
    return OptimizerConfig(**{"name": name, "clip_norm": 0.0, **fixed, **changes})


def test_lion_is_its_formula():
    """https://arxiv.org/abs/2302.06675, algorithm 2."""
    first, second = GRADIENTS
    _, got = updates_of(formula("lion", weight_decay=0.2))
    direction = lambda g0, g1: np.sign(0.9 * 0.01 * g0 + 0.1 * g1)
    want = jax.tree.map(direction, first, second)
    kernel = -0.5 * (want["layers"]["kernel"] + 0.2 * PARAMS["layers"]["kernel"])
    np.testing.assert_allclose(got["layers"]["kernel"], kernel, rtol=1e-5)
    np.testing.assert_allclose(got["weight"], -0.5 * want["weight"], rtol=1e-6)


def test_sgd_is_its_formula():
    first, second = GRADIENTS
    _, got = updates_of(formula("sgd", b1=0.8, weight_decay=0.2))
    want = jax.tree.map(lambda g0, g1: -0.5 * (0.8 * g0 + g1), first, second)
    kernel = want["layers"]["kernel"] - 0.1 * PARAMS["layers"]["kernel"]
    np.testing.assert_allclose(got["layers"]["kernel"], kernel, rtol=1e-5)
    np.testing.assert_allclose(got["weight"], want["weight"], rtol=1e-6)


def test_adafactor_normalizes_and_keeps_hardly_anything():
    got, _ = updates_of(formula("adafactor", weight_decay=0.0))
    want = jax.tree.map(lambda g: -0.5 * np.sign(g), GRADIENTS[0])
    chex.assert_trees_all_close(got, want, atol=1e-4)
    big = {"kernel": jnp.zeros((2, 256, 512))}
    state = make_optimizer(formula("adafactor"), steps=10).init(big)
    assert sum(leaf.size for leaf in jax.tree.leaves(state)) < 2 * (256 + 512) + 10


def test_muon_makes_matrices_of_layers_orthogonal_and_leaves_the_rest_to_adam():
    got, _ = updates_of(formula("muon", weight_decay=0.0))
    scale = 0.5 * 0.2 * math.sqrt(6)
    for layer in range(2):
        values = np.linalg.svd(got["layers"]["kernel"][layer], compute_uv=False) / scale
        assert np.all((values > 0.5) & (values < 1.5)), values
        along = np.asarray(got["layers"]["kernel"]) * GRADIENTS[0]["layers"]["kernel"]
        assert np.sum(along[layer]) < 0
    decayed, _ = updates_of(formula("muon", weight_decay=0.3))
    chex.assert_trees_all_equal(decayed["weight"], got["weight"])
    decay = decayed["layers"]["kernel"] - got["layers"]["kernel"]
    np.testing.assert_allclose(decay, -0.15 * PARAMS["layers"]["kernel"], atol=1e-6)


def adamw_updates(gradients, b1, b2, dtype):
    """AdamW's updates without decay, algorithm 2 of https://arxiv.org/abs/1711.05101."""
    m = v = np.zeros_like(gradients[0], dtype)
    found = []
    for step, gradient in enumerate(np.asarray(gradients, dtype), start=1):
        m = dtype(b1) * m + dtype(1 - b1) * gradient
        v = dtype(b2) * v + dtype(1 - b2) * gradient**2
        root = np.sqrt(v / dtype(1 - b2**step)) + dtype(1e-8)
        found.append(dtype(-0.5) * (m / dtype(1 - b1**step)) / root)
    return found


def test_muon_leaves_the_other_parameters_to_adamw():
    got = [updates["weight"] for updates in updates_of(formula("muon"))]
    gradients = [gradient["weight"] for gradient in GRADIENTS]
    single, exact = (adamw_updates(gradients, 0.9, 0.95, dtype) for dtype in (np.float32, float))
    assert_as_accurate(got, single, exact, names=["step 1", "step 2"])


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "sgd"])
def test_momentum_in_bfloat16(name):
    """Only the stored momentum is rounded, so the updates are nearly the same."""
    config = formula(name, momentum_dtype="bfloat16")
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), PARAMS)
    dtypes = lambda config: {
        leaf.dtype.name
        for leaf in jax.tree.leaves(make_optimizer(config, steps=10).init(params))
        if leaf.ndim > 1
    }
    assert "bfloat16" in dtypes(config) and dtypes(formula(name)) == {"float32"}
    if name != "lion":  # whose sign turns where the momentum is near 0
        chex.assert_trees_all_close(updates_of(config), updates_of(formula(name)), atol=0.05)


def test_bfloat16_parameters_lose_updates_below_half_an_ulp():
    """Between 0.5 and 1 an ulp of bfloat16 is 2**-8. It swallows each of a thousand updates of
    1e-3."""
    optimizer = optax.sgd(1e-3)

    def after_a_thousand(dtype):
        param: Any = jnp.ones((), dtype)
        state = optimizer.init(param)
        for _ in range(1000):
            updates, state = optimizer.update(jnp.ones((), dtype), state)
            param = optax.apply_updates(param, updates)
        return float(param)

    assert after_a_thousand(jnp.bfloat16) == 1.0
    assert after_a_thousand(jnp.float32) == pytest.approx(0.0, abs=1e-4)


def test_norms_with_bfloat16_parameters_do_not_move():
    """Their weights begin at 1, and AdamW moves them by about the learning rate."""
    optimizer: Any = make_optimizer(formula("adamw", learning_rate=1e-3), steps=10)
    moved = {}
    for dtype in ("float32", "bfloat16"):
        params: Any = {"norm": {"weight": jnp.ones(8, dtype)}}
        state = optimizer.init(params)
        for seed in range(5):
            gradient = np.random.default_rng(seed).normal(1, 0.1, size=8)
            gradients = {"norm": {"weight": jnp.asarray(gradient, dtype)}}
            with jax.numpy_dtype_promotion("standard"):
                updates, state = optimizer.update(gradients, state, params)
            assert np.all(np.asarray(updates["norm"]["weight"], np.float32) < -5e-4)
            params = jax.tree.map(jnp.add, params, updates)
        moved[dtype] = bool(jnp.any(params["norm"]["weight"] != 1))
    assert moved == {"float32": True, "bfloat16": False}
