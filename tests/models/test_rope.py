"""Rotary embedding against tables that Hugging Face transformers computed (tests/golden)."""

import json
import math
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.rope import RopeParameters, apply_rotary, rotary_cos_sin

GOLDEN = Path(__file__).parents[1] / "golden"
TABLES = json.loads((GOLDEN / "rope_tables.json").read_text())
EPS = np.finfo(np.float32).eps

pytestmark = pytest.mark.usefixtures("fast_compilation")


def rope_parameters(settings: dict) -> RopeParameters:
    fields: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()
    }
    return RopeParameters(**fields)


@pytest.mark.parametrize("length", ["short", "long"])
@pytest.mark.parametrize("name", TABLES)
def test_matches_hugging_face(name, length):
    with np.load(GOLDEN / "rope_tables.npz") as file:
        expected = {key: file[f"{name}/{length}/{key}"] for key in ("positions", "cos", "sin")}
        inv_freq = file[f"{name}/{length}/inv_freq"]
    compute = jax.jit(
        lambda positions: rotary_cos_sin(
            rope_parameters(TABLES[name]), positions, head_dim=64, max_position_embeddings=16384
        )
    )
    cos, sin = compute(jnp.asarray(expected["positions"]))
    assert cos.dtype == sin.dtype == jnp.float32
    # The power may differ by 2 ulp between libraries, and the angle by as much. Then cos, sin and
    # the factor (at most 1.28 here) round once each.
    angles = expected["positions"][..., None] * inv_freq
    tolerance = 1.3 * (2 * EPS * angles + 2 * EPS)
    assert np.all(np.abs(cos - expected["cos"]) <= tolerance)
    assert np.all(np.abs(sin - expected["sin"]) <= tolerance)


def test_the_length_changes_dynamic_and_longrope_only():
    with np.load(GOLDEN / "rope_tables.npz") as file:
        changed = {
            name
            for name in TABLES
            if np.any(file[f"{name}/short/inv_freq"] != file[f"{name}/long/inv_freq"])
        }
    assert changed == {"dynamic", "longrope"}


@pytest.mark.parametrize("name", ["dynamic", "longrope"])
def test_the_longest_row_decides_for_the_batch(name):
    compute = lambda positions: rotary_cos_sin(
        rope_parameters(TABLES[name]), positions, head_dim=64, max_position_embeddings=4096
    )
    short = jnp.array([[1, 2, 3, 4095]], dtype=jnp.int32)
    limit, beyond = compute(short), compute(short.at[0, 3].set(4096))
    assert np.abs(limit[0][0, 0] - beyond[0][0, 0]).max() > 1e-6
    both = compute(jnp.concatenate([short, short.at[0, 3].set(4096)]))
    chex.assert_trees_all_equal(both[0][0, :3], beyond[0][0, :3])


def test_dynamic_is_unscaled_up_to_the_limit_and_continuous_after_it():
    compute = lambda last, rope_type, **kwargs: rotary_cos_sin(
        RopeParameters(rope_type=rope_type, rope_theta=1e4, **kwargs),
        jnp.array([[1, last]], dtype=jnp.int32),
        head_dim=8,
        max_position_embeddings=1000,
    )
    default = compute(999, "default")
    chex.assert_trees_all_equal(compute(999, "dynamic", factor=1.1), default)
    chex.assert_trees_all_close(
        compute(1000, "dynamic", factor=1.1)[0][0, 0], default[0][0, 0], rtol=0.01
    )


def test_yarn_and_longrope_take_a_missing_factor_from_the_context_length():
    positions = jnp.arange(5, dtype=jnp.int32)[None]
    for extra in (
        {"rope_type": "yarn"},
        {"rope_type": "longrope", "short_factor": (1.0,) * 4, "long_factor": (2.0,) * 4},
    ):
        common = {"rope_theta": 1e4, "original_max_position_embeddings": 32, **extra}
        missing, given = (
            rotary_cos_sin(rope, positions, head_dim=8, max_position_embeddings=256)
            for rope in (RopeParameters(**common), RopeParameters(factor=8.0, **common))
        )
        chex.assert_trees_all_equal(missing, given)
        factor = 0.1 * math.log(8) + 1 if extra["rope_type"] == "yarn" else math.sqrt(1.6)
        np.testing.assert_allclose(given[0][0, 0], factor, rtol=1e-6)


def test_apply_rotary_turns_pairs_of_the_two_halves():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    angles = jax.random.normal(jax.random.key(1), (2, 3, 4))
    y = apply_rotary(x, jnp.cos(angles), jnp.sin(angles))
    pairs = lambda a: np.asarray(a[..., :4]) + 1j * np.asarray(a[..., 4:])
    turned = pairs(x) * np.exp(1j * np.asarray(angles))[:, :, None, :]
    np.testing.assert_allclose(pairs(y), turned, atol=4 * EPS, rtol=4 * EPS)


def test_apply_rotary_rounds_once_and_broadcasts_over_the_batch():
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8), jnp.bfloat16)
    angles = jax.random.normal(jax.random.key(1), (1, 3, 4))
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    y = apply_rotary(x, cos, sin)
    assert y.dtype == jnp.bfloat16
    chex.assert_trees_all_equal(y, apply_rotary(x.astype(jnp.float32), cos, sin).astype(y.dtype))


def test_scores_depend_on_relative_positions():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 16))
    rope = RopeParameters(rope_type="default", rope_theta=1e4)

    def score(q_position, k_position):
        positions = jnp.array([[q_position, k_position]], dtype=jnp.int32)
        cos, sin = rotary_cos_sin(rope, positions, head_dim=16, max_position_embeddings=64)
        turn = lambda x, i: apply_rotary(x, cos[:, i : i + 1], sin[:, i : i + 1])
        return jnp.sum(turn(q, 0) * turn(k, 1))

    np.testing.assert_allclose(score(20, 13), score(47, 40), rtol=1e-4)


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "ntk", "rope_theta": 1e4}, "'ntk' must be one of"),
        ({"rope_theta": 1.0}, r"rope_theta=1\.0 must be greater than 1"),
        ({"rope_type": "linear", "rope_theta": 1e4}, r"needs \['factor'\]"),
        (
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5},
            r"factor=0\.5 must be at least",
        ),
        ({"rope_theta": 1e4, "factor": 8.0}, r"'default' does not read {'factor': 8\.0}"),
        (LLAMA3 | {"high_freq_factor": 1.0}, r"high_freq_factor=1\.0 must be greater than .*=1\.0"),
        (LLAMA3 | {"original_max_position_embeddings": 0}, "original_max_position_embeddings=0"),
        (YARN | {"beta_fast": 0.5}, r"beta_fast=0\.5 .* at least .*beta_slow=None"),
        (YARN | {"attention_factor": -1.0}, r"attention_factor=-1\.0 must be positive"),
        (
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 64,
                "short_factor": (1.0, 0.0),
                "long_factor": (1.0, 2.0),
            },
            r"short_factor=\(1\.0, 0\.0\) .* must be positive",
        ),
    ],
)
def test_wrong_parameters_raise(settings, message):
    with pytest.raises(ValueError, match=message):
        RopeParameters(**settings)


def test_head_size_that_does_not_fit_raises():
    positions = jnp.zeros((1, 2), jnp.int32)

    def compute(head_dim, **settings):
        rope = RopeParameters(rope_theta=1e4, **settings)
        return rotary_cos_sin(rope, positions, head_dim=head_dim, max_position_embeddings=64)

    with pytest.raises(ValueError, match="head_dim=7 must be even"):
        compute(7)
    with pytest.raises(ValueError, match="head_dim=2 must be at least 4"):
        compute(2, rope_type="dynamic", factor=2.0)
    with pytest.raises(
        ValueError, match=r"len\(short_factor\)=3 .* must be half of head_dim=8; give"
    ):
        compute(
            8,
            rope_type="longrope",
            original_max_position_embeddings=32,
            short_factor=(1.0,) * 3,
            long_factor=(2.0,) * 3,
        )
