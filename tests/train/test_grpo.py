"""The GRPO example: rewards, advantages, the loss against a plain formula, and a short run."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.llama import Llama
from support.numerics import assert_as_accurate, quick_jit, rounded
from train import grpo
from train.data import IGNORED

CONFIG = grpo.Config(digits=3, prompts=2, group=3, kl_weight=0.04)


def batch():
    """Two prompts with three completions each, of which some are right."""
    prompts = jnp.repeat(jnp.array([[5, 2, 9, 10], [0, 7, 1, 10]]), 3, axis=0)
    right = grpo.right_completions(prompts)
    completions = right.at[jnp.array([1, 4, 5]), 0].add(1)
    return prompts, completions


def test_rewards_and_advantages():
    prompts, completions = batch()
    rewards = grpo.rewards_of(prompts, completions)
    np.testing.assert_array_equal(rewards, [1, 0, 1, 1, 0, 0])
    advantages = np.asarray(grpo.advantages_of(rewards, 3)).reshape(2, 3)
    np.testing.assert_allclose(advantages.sum(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(advantages.std(axis=1), 1, rtol=1e-3)
    equal = grpo.advantages_of(jnp.ones(3), 3)
    np.testing.assert_array_equal(equal, 0)


def test_the_prompt_is_not_learned():
    prompts, completions = batch()
    tokens, labels = grpo.tokens_and_labels(prompts, completions)
    assert tokens.shape == labels.shape == (6, 6)
    np.testing.assert_array_equal(labels[:, :3], IGNORED)
    np.testing.assert_array_equal(labels[:, 3:], completions)
    np.testing.assert_array_equal(tokens[:, :4], prompts)


@pytest.mark.usefixtures("fast_compilation")
def test_the_loss_is_that_of_all_logits():
    """Value and gradients, against a formula with all logits. 5 s."""
    config = dataclasses.replace(CONFIG.model, dtype="float32")
    graphdef, params = nnx.split(Llama(config, rngs=nnx.Rngs(0)), nnx.Param)
    prompts, completions = batch()
    tokens, labels = grpo.tokens_and_labels(prompts, completions)
    mask = labels != IGNORED
    noise = jax.random.normal(jax.random.key(1), (2, *labels.shape))

    def of_logits(model):
        log_p = jax.nn.log_softmax(model.logits(model(tokens)).astype(jnp.float32))
        picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        return jnp.where(mask, picked, 0.0)

    start = of_logits(nnx.merge(graphdef, params))
    data = {
        "advantages": grpo.advantages_of(grpo.rewards_of(prompts, completions), 3),
        # Some ratios are clipped: at 0.8 and 1.28 for a difference of -0.22 and 0.25.
        "old": start + 0.3 * noise[0],
        "reference": start + 0.3 * noise[1],
    }

    def plain(params):
        log_probs = of_logits(nnx.merge(graphdef, params))
        ratio = jnp.exp(log_probs - data["old"])
        advantage = data["advantages"][:, None]
        clipped = jnp.clip(ratio, 1 - CONFIG.clip_low, 1 + CONFIG.clip_high)
        losses = -jnp.minimum(ratio * advantage, clipped * advantage)
        of_kl = data["reference"] - log_probs
        losses += CONFIG.kl_weight * (jnp.exp(of_kl) - of_kl - 1)
        return jnp.mean(jnp.sum(jnp.where(mask, losses, 0.0), axis=1) / CONFIG.digits)

    def ours(params):
        return grpo.policy_loss(CONFIG, nnx.merge(graphdef, params), tokens, labels, data)

    got, want = (quick_jit(jax.value_and_grad(fn))(params) for fn in (ours, plain))
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    scale = max(float(jnp.max(jnp.abs(a))) for a in jax.tree.leaves(want[1]))
    assert scale > 1e-3
    for a, b in zip(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)


class Head:
    """What the loss needs of a model: hidden states and the weight of the output layer."""

    def __init__(self, hidden, output_weight):
        self.hidden, self.output_weight = hidden, output_weight

    def __call__(self, tokens):
        return self.hidden


def step_in_float64(config, labels, hidden, weight, rewards, old, reference):
    """Loss, gradients in the hidden states and the weight, and the ratios, in NumPy."""
    exp = np.exp
    advantages = []
    for group in rewards.reshape(-1, config.group):
        deviation = np.sqrt(np.mean((group - np.mean(group)) ** 2))
        advantages += [(reward - np.mean(group)) / (deviation + 1e-4) for reward in group]
    loss, dhidden, dweight, ratios = 0.0, np.zeros_like(hidden), np.zeros_like(weight), []
    for b, t in np.argwhere(labels != IGNORED):
        logits = weight @ hidden[b, t]
        p = exp(logits - np.max(logits))
        p /= np.sum(p)
        log_prob = np.log(p[labels[b, t]])
        ratio = exp(log_prob - old[b, t])
        low, high = 1 - config.clip_low, 1 + config.clip_high
        whole, clipped = ratio * advantages[b], min(max(ratio, low), high) * advantages[b]
        d = reference[b, t] - log_prob
        share = 1 / (np.sum(labels[b] != IGNORED) * len(labels))  # of a sequence, then of all
        loss += share * (-min(whole, clipped) + config.kl_weight * (exp(d) - d - 1))
        slope = -whole if whole <= clipped else 0.0  # of the ratio, in the log-probability
        slope += config.kl_weight * (1 - exp(d))
        dlogits = share * slope * ((np.arange(len(p)) == labels[b, t]) - p)
        dhidden[b, t] = dlogits @ weight
        dweight += np.outer(dlogits, hidden[b, t])
        ratios.append(ratio * np.sign(advantages[b]))
    return loss, dhidden, dweight, np.array(ratios)


@pytest.mark.usefixtures("unchecked_shapes")  # the head is no Llama
def test_a_step_is_that_of_the_paper_in_float64():
    """Advantages, ratios that are clipped on both sides, the KL penalty and the means. 2 s."""
    config = dataclasses.replace(CONFIG, prompts=4, group=4, kl_weight=0.5)
    rng = np.random.default_rng(0)
    prompts = np.repeat(rng.integers(10, size=(4, 4)), 4, axis=0).astype(np.int32)
    completions = rng.integers(10, size=(16, 3)).astype(np.int32)
    rewards = np.array([0, 0, 1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 0, 1, 0, 1.0])
    tokens, labels = grpo.tokens_and_labels(jnp.asarray(prompts), jnp.asarray(completions))
    labels = labels.at[::3, -1].set(IGNORED)  # completions that end earlier
    hidden, weight = rng.normal(size=(16, 6, 32)), rng.normal(size=(128, 32)) / 4
    hidden, weight = (a.astype(np.float32) for a in (hidden, weight))
    model: Any = Head(hidden, weight)
    log_probs = np.asarray(grpo.log_probs_of(model, tokens, labels))
    old, reference = (log_probs + 0.3 * rng.normal(size=(2, 16, 6))).astype(np.float32)
    data = {
        "advantages": grpo.advantages_of(jnp.asarray(rewards, jnp.float32), 4),
        "old": jnp.asarray(old),
        "reference": jnp.asarray(reference),
    }

    def loss(hidden, weight):
        model: Any = Head(hidden, weight)
        return grpo.policy_loss(config, model, tokens, labels, data)

    value, grads = quick_jit(jax.value_and_grad(loss, argnums=(0, 1)))(hidden, weight)
    arrays = (hidden, weight, rewards, old, reference)
    in_float64 = [np.asarray(a, np.float64) for a in arrays]
    *exact, ratios = step_in_float64(config, np.asarray(labels), *in_float64)
    # Clipped below where the advantage is negative, and above where it is positive; and not.
    assert np.sum(ratios > 1.28) > 2 and np.sum((ratios < 0) & (ratios > -0.8)) > 2
    assert np.sum(ratios == 0) == 11 and np.sum((ratios > 0) & (ratios < 1.28)) > 2
    got = [value, *grads]
    names = ["loss", "gradient in the hidden states", "gradient in the weight"]
    assert_as_accurate(got, rounded(exact, got), exact, names=names)


def test_a_short_run(tmp_path, capsys):
    """Completions are rewarded, and the files are written. 12 s."""
    config = grpo.Config(
        digits=2,
        warm_up=25,
        steps=10,
        prompts=16,
        group=4,
        output=tmp_path / "grpo.csv",
        chart=tmp_path / "grpo.png",
    )
    with jax.numpy_dtype_promotion("standard"):  # of JAX's own attention
        grpo.main(config)
    with (tmp_path / "grpo.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(10))
    assert all(0 <= float(row["reward"]) <= 1 for row in rows)
    assert rows[-1]["accuracy"] and not rows[0]["accuracy"]
    assert (tmp_path / "grpo.png").stat().st_size > 10_000
    assert "after the warm-up: right" in capsys.readouterr().out


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"output": Path("nowhere/a.csv")}, r"nowhere is not a folder; make it for a\.csv"),
        ({"chart": Path("nowhere/a.png")}, r"nowhere is not a folder; make it for a\.png"),
        ({"output": Path("/")}, "/ is a folder; name a file"),
    ],
)
def test_a_run_that_would_fail_does_not_begin(changes, message):
    with pytest.raises(SystemExit, match=message):
        grpo.main(dataclasses.replace(CONFIG, **changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"digits": 0}, r"digits=0 must lie in \[1, "),
        ({"group": 1}, r"group=1 must lie in \[2, "),
        ({"learning_rate": float("nan")}, "learning_rate=nan must lie in"),
        ({"clip_low": 1.5}, r"clip_low=1\.5 must lie in"),
        ({"kl_weight": -1.0}, r"kl_weight=-1\.0 must lie in"),
    ],
)
def test_numbers_out_of_range_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **changes)


def test_keys_are_used_once():
    """No draw has the key of a parameter, and measuring the accuracy changes no later draw."""
    trainer = grpo.Trainer(dataclasses.replace(CONFIG, kl_weight=0.0))
    words = lambda key: jax.random.key_data(key).tolist()
    before = words(trainer.key)
    with jax.numpy_dtype_promotion("standard"):
        trainer.accuracy()
    assert words(trainer.key) == before
    rngs = nnx.Rngs(CONFIG.seed)
    of_params = [words(rngs.params()) for _ in range(40)]
    assert not [key for _ in range(5) if (key := words(trainer.next_key())) in of_params]
