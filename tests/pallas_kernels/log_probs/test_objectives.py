"""Losses of policies and preferences against loops over sequences and tokens in float64."""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import linear_token_loss
from pallas_kernels.log_probs import objectives
from support.log_prob_formulas import arrays_of
from support.loss_formulas import F32, as_jax
from support.numerics import quick_jit

B, S = 4, 5
MASK = np.arange(S) < np.array([[5], [3], [1], [4]])
COUNTS = jnp.asarray(MASK)
NAN = np.where(MASK, 0, np.nan)


def make_numbers(seed=0):
    """Numbers of the tokens; NaN where a token does not count."""
    rng = np.random.default_rng(seed)
    log_probs = -rng.uniform(0.1, 3, (B, S))
    old, reference = (log_probs + rng.normal(0, 0.3, (B, S)) for _ in range(2))
    tokens = {"log_probs": log_probs, "old": old, "reference": reference}
    tokens["advantages"] = rng.normal(size=(B, S))
    return {name: a + NAN for name, a in tokens.items()} | {"of_sequences": rng.normal(size=B)}


def lists(a):
    """The tokens that count, of each sequence."""
    return [list(row[keep]) for row, keep in zip(a, MASK, strict=True)]


def mean(values):
    return sum(values) / len(values)


def joined(rows):
    return list(itertools.chain.from_iterable(rows))


def log_sigmoid(a):
    return -math.log1p(math.exp(-a))


def policy(n, low, high, kl_weight=0.0):
    """The losses of the tokens, in lists."""
    found = []
    names = "log_probs", "old", "reference", "advantages"
    for rows in zip(*(lists(n[name]) for name in names), strict=True):
        found.append([])
        for log_prob, old, reference, advantage in zip(*rows, strict=True):
            ratio = math.exp(log_prob - old)
            clipped = min(max(ratio, 1 - low), 1 + high)
            d = reference - log_prob
            loss = -min(ratio * advantage, clipped * advantage)
            found[-1].append(loss + kl_weight * (math.exp(d) - d - 1))
    return found


def gspo(n):
    found = []
    for new, old, a in zip(lists(n["log_probs"]), lists(n["old"]), n["of_sequences"], strict=True):
        ratio = math.exp(mean(new) - mean(old))
        found.append(-min(ratio * a, min(max(ratio, 0.9), 1.2) * a))
    return mean(found)


def rewards(n):
    pairs = zip(lists(n["log_probs"]), lists(n["reference"]), strict=True)
    return [sum(new) - sum(reference) for new, reference in pairs]


def pairs(values):
    return [values[i] - values[i + B // 2] for i in range(B // 2)]


def dpo(n):
    margins = [0.3 * a for a in pairs(rewards(n))]
    return -mean([0.9 * log_sigmoid(a) + 0.1 * log_sigmoid(-a) for a in margins])


def orpo(n):
    means = list(map(mean, lists(n["log_probs"])))
    odds = [math.log(math.exp(m) / (1 - math.exp(m))) for m in means]
    chosen = joined(lists(n["log_probs"])[: B // 2])
    return -mean(chosen) - 0.4 * mean(list(map(log_sigmoid, pairs(odds))))


def simpo(n):
    margins = pairs(list(map(mean, lists(n["log_probs"]))))
    return -mean([log_sigmoid(2.5 * a - 0.7) for a in margins])


DESIRABLE = np.array([True, False, False, True])


def kto(n):
    sigmoid = lambda a: 1 / (1 + math.exp(-a))
    margins = [0.3 * (r - 0.2) for r in rewards(n)]
    return mean(
        [
            1.5 * (1 - sigmoid(m)) if d else 0.5 * (1 - sigmoid(-m))
            for m, d in zip(margins, DESIRABLE, strict=True)
        ]
    )


def of_policy(n, **options):
    return objectives.clipped_policy_loss(
        n["log_probs"], n["old"], n["advantages"], COUNTS, **options
    )


def with_kl(n, **options):
    options |= {"clip_low": 0.1, "clip_high": 0.28, "kl_weight": 0.5}
    return of_policy(n, reference_log_probs=n["reference"], **options)


CASES = {
    "PPO": (of_policy, lambda n: mean(joined(policy(n, 0.2, 0.2)))),
    "DAPO with KL": (with_kl, lambda n: mean(joined(policy(n, 0.1, 0.28, 0.5)))),
    "GRPO": (
        functools.partial(with_kl, aggregation="seq-mean-token-mean"),
        lambda n: mean(list(map(mean, policy(n, 0.1, 0.28, 0.5)))),
    ),
    "sums": (
        functools.partial(of_policy, aggregation="seq-mean-token-sum"),
        lambda n: mean(list(map(sum, policy(n, 0.2, 0.2)))),
    ),
    "Dr. GRPO": (
        functools.partial(of_policy, aggregation="seq-mean-token-sum-norm", max_length=7),
        lambda n: mean(list(map(sum, policy(n, 0.2, 0.2)))) / 7,
    ),
    "GSPO": (
        lambda n: objectives.gspo_loss(
            n["log_probs"], n["old"], n["of_sequences"], COUNTS, clip_low=0.1, clip_high=0.2
        ),
        gspo,
    ),
    "DPO": (
        lambda n: objectives.dpo_loss(
            n["log_probs"], n["reference"], COUNTS, beta=0.3, label_smoothing=0.1
        ),
        dpo,
    ),
    "ORPO": (lambda n: objectives.orpo_loss(n["log_probs"], COUNTS, weight=0.4), orpo),
    "SimPO": (lambda n: objectives.simpo_loss(n["log_probs"], COUNTS, beta=2.5, gamma=0.7), simpo),
    "KTO": (
        lambda n: objectives.kto_loss(
            n["log_probs"],
            n["reference"],
            COUNTS,
            jnp.asarray(DESIRABLE),
            jnp.float32(0.2),
            beta=0.3,
            desirable_weight=1.5,
            undesirable_weight=0.5,
        ),
        kto,
    ),
}


@pytest.mark.parametrize("fn, plain", CASES.values(), ids=CASES)
def test_value_and_gradient(fn, plain):
    numbers = make_numbers()
    args = as_jax({name: a.astype(np.float32) for name, a in numbers.items()})
    of_log_probs = lambda log_probs: fn(args | {"log_probs": log_probs})
    value, gradient = quick_jit(jax.value_and_grad(of_log_probs))(args["log_probs"])
    np.testing.assert_allclose(value, plain(numbers), rtol=1e-5)
    want = np.zeros((B, S))
    for place in zip(*np.nonzero(MASK), strict=True):
        step = np.zeros((B, S))
        step[place] = 1e-6
        up, down = (
            plain(numbers | {"log_probs": numbers["log_probs"] + sign * step}) for sign in (1, -1)
        )
        want[place] = (up - down) / 2e-6
    assert want.any()
    np.testing.assert_allclose(gradient, want, rtol=1e-4, atol=1e-6)


# The test above has the gradients of all of them.
AS_TOKEN_FN = "GRPO", "GSPO", "DPO", "KTO"


@pytest.mark.parametrize(
    "fn, _",
    [
        pytest.param(*case, id=name, marks=() if name in AS_TOKEN_FN else pytest.mark.full)
        for name, case in CASES.items()
    ],
)
def test_as_a_loss_of_tokens(fn, _):
    """As `token_fn` the gradients are those of the reference."""
    arrays, labels = as_jax(arrays_of((B, S), 8, 13, F32, bias=False))
    labels = jnp.where(COUNTS, jnp.abs(labels) % 13, -100)
    names = ("old", "reference", "advantages", "of_sequences")
    data = {name: jnp.asarray(make_numbers()[name], F32) for name in names}

    def token_fn(log_probs, entropy, data):
        return fn(data | {"log_probs": log_probs})

    def run(arrays, implementation):
        loss = lambda a: linear_token_loss(
            labels=labels, token_fn=token_fn, token_data=data, implementation=implementation, **a
        )
        return jax.value_and_grad(loss)(arrays)

    got, want = (quick_jit(run, static_argnums=1)(arrays, name) for name in ("xla", "reference"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.isfinite(a).all() and np.any(a)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * float(jnp.max(jnp.abs(b))))


def test_the_policy_that_sampled_has_a_ratio_of_1():
    n = as_jax({name: a.astype(np.float32) for name, a in make_numbers().items()})
    fn = lambda a: objectives.clipped_policy_loss(a, None, n["advantages"], COUNTS)
    value, gradient = jax.value_and_grad(fn)(n["log_probs"])
    want = np.where(MASK, -n["advantages"], 0) / MASK.sum()
    np.testing.assert_allclose(value, want.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, want, rtol=1e-5)


def test_a_ratio_that_is_clipped_has_no_gradient_however_large_it_is():
    log_probs, old = jnp.array([[-2.0, -200.0]]), jnp.array([[-2.0, -300.0]])
    counts = jnp.ones((1, 2))
    of = lambda a: objectives.clipped_policy_loss(a, old, counts, counts)
    value, gradient = jax.value_and_grad(of)(log_probs)
    np.testing.assert_allclose(value, -1.1, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[-0.5, 0.0]], rtol=1e-6)


def test_a_penalty_stays_finite_however_far_the_reference_is():
    zeros = jnp.zeros((1, 2))
    loss = lambda a: objectives.clipped_policy_loss(
        a, None, zeros, jnp.ones((1, 2)), reference_log_probs=zeros, kl_weight=0.04
    )
    value, gradient = jax.value_and_grad(loss)(jnp.array([[-100.0, -1.0]]))
    assert np.isfinite(value) and np.all(np.isfinite(gradient)) and gradient[0, 1] < 0


def test_no_sequences():
    none = jnp.zeros((0, S))
    of_no_sequence = jnp.zeros(0, bool)
    assert objectives.dpo_loss(none, none, none) == 0
    assert objectives.simpo_loss(none, none) == 0
    assert objectives.orpo_loss(none, none) == 0
    assert objectives.kto_loss(none, none, none, of_no_sequence, jnp.float32(0)) == 0


def test_nothing_that_counts():
    n = as_jax({name: a.astype(np.float32) for name, a in make_numbers().items()})
    for options in ({}, {"aggregation": "seq-mean-token-mean"}):
        fn = lambda a, options=options: objectives.clipped_policy_loss(
            a, n["old"], n["advantages"], jnp.zeros((B, S)), **options
        )
        value, gradient = jax.value_and_grad(fn)(n["log_probs"])
        assert value == 0 and not np.any(gradient)


def test_errors(unchecked_shapes):
    a = jnp.zeros((3, 2))
    wrong: Any = "mean"
    with pytest.raises(ValueError, match="aggregation='mean' must be one of"):
        objectives.aggregate(a, a, wrong)
    with pytest.raises(ValueError, match="max_length=None: give a divisor"):
        objectives.aggregate(a, a, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="max_length=3"):
        objectives.aggregate(a, a, max_length=3)
    with pytest.raises(ValueError, match="max_length=0 must be a finite number of at least 1"):
        objectives.aggregate(a, a, "seq-mean-token-sum-norm", max_length=0)
    with pytest.raises(ValueError, match=r"needs reference_log_probs; .* or kl_weight=0\.0"):
        objectives.clipped_policy_loss(a, a, a, a, kl_weight=0.1)
    square, mask, numbers = jnp.ones((3, 3)), jnp.ones((3, 3)), jnp.ones(3)
    # Broadcasting would compute another loss of each of them.
    with pytest.raises(ValueError, match=r"advantages must have the shape of log_probs, \(3, 3\)"):
        objectives.clipped_policy_loss(square, square, numbers, mask)
    with pytest.raises(ValueError, match=r"advantages .* each of 3 sequences, .* \(3, 1\)"):
        objectives.gspo_loss(square, square, numbers[:, None], mask)
    with pytest.raises(ValueError, match=r"is_desirable .* each of 3 sequences, .* \(3, 1\)"):
        objectives.kto_loss(square, square, mask, numbers[:, None] > 0, jnp.float32(0))
    with pytest.raises(ValueError, match=r"kl must be a scalar, got the shape \(3,\)"):
        objectives.kto_loss(square, square, mask, numbers > 0, numbers)
    with pytest.raises(ValueError, match="reference_log_probs must have the shape of log_probs"):
        objectives.dpo_loss(square, numbers, mask)
    with pytest.raises(ValueError, match=r"mask must have the shape of values, .* got \(3,\)"):
        objectives.aggregate(square, numbers)
    with pytest.raises(ValueError, match="3 sequences are no pairs"):
        objectives.simpo_loss(a, a)
