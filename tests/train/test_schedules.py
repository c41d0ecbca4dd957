"""Learning rates over the steps of a run, and gradients that are clipped."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.config import OptimizerConfig
from train.optimizers import learning_rate_schedule, make_optimizer


@pytest.mark.parametrize(("clip_norm", "scale"), [(0.0, 1.0), (6.0, 1.0), (1.0, 0.2)])
def test_clipping_scales_longer_gradients(clip_norm, scale):
    config = OptimizerConfig(schedule="wsd", warmup_steps=0, clip_norm=clip_norm)
    optimizer = make_optimizer(config, steps=10)
    params = {"kernel": jnp.ones(2), "weight": jnp.ones(1)}
    grads = {"kernel": jnp.array([0.0, 3.0]), "weight": jnp.array([4.0])}  # of length 5
    update = lambda grads, params: optimizer.update(grads, optimizer.init(params), params)
    with jax.numpy_dtype_promotion("standard"):
        _, opt_state = jax.jit(update)(grads, params)
    mu = optax.tree.get(opt_state, "mu")
    chex.assert_trees_all_close(mu, jax.tree.map(lambda g: 0.1 * scale * g, grads), rtol=1e-6)


def learning_rates(schedule, steps):
    with jax.numpy_dtype_promotion("standard"):
        return [np.asarray(schedule(jnp.asarray(step, jnp.int32))).item() for step in steps]


@pytest.mark.parametrize("warmup", [0, 1, 10])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedule_is_its_formula(schedule, warmup):
    steps, peak, last, decay = 50, 0.3, 0.03, 15
    config = OptimizerConfig(
        learning_rate=peak,
        schedule=schedule,
        warmup_steps=warmup,
        decay_fraction=0.3 if schedule == "wsd" else 0.2,  # others take the default alone
        final_fraction=0.1,
    )
    lr = learning_rate_schedule(config, steps)

    def formula(t):
        if t < warmup:
            return peak * t / warmup
        if schedule == "cosine":
            share = (t - warmup) / (steps - warmup)
            return last + (peak - last) * (1 + np.cos(np.pi * share)) / 2
        return peak + (last - peak) * max(0.0, (t - (steps - decay)) / decay)

    got = learning_rates(lr, range(steps + 5))
    want = [formula(min(t, steps)) for t in range(steps + 5)]
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=1e-8)
    assert got[warmup] == pytest.approx(peak) and got[0] == (0.0 if warmup else got[warmup])
    assert got[steps] == got[steps + 4] == pytest.approx(last)
    if schedule == "wsd":
        assert got[warmup : steps - decay + 1] == [got[warmup]] * (steps - decay + 1 - warmup)
        assert got[steps - decay + 1] < got[warmup]


def test_decay_longer_than_the_run_starts_after_the_warmup():
    config = OptimizerConfig(schedule="wsd", warmup_steps=4, decay_fraction=1.0, learning_rate=1.0)
    got = learning_rates(learning_rate_schedule(config, 10), (2, 4, 7, 10))
    np.testing.assert_allclose(got, [0.5, 1.0, 0.55, 0.1], rtol=1e-6)
