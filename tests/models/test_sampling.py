"""Generation with a cache against a loop without one, and draws against their probabilities."""

import dataclasses
import functools
import math
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import LlamaConfig
from models.llama import Llama
from models.rope import RopeParameters
from models.sampling import extend, generate, init_cache

pytestmark = pytest.mark.usefixtures("fast_compilation")

CONFIG = LlamaConfig(
    vocab_size=24,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters=RopeParameters(rope_theta=100.0),
    dtype="float32",
    remat="none",
)
LENGTHS = jnp.array([6, 1, 4], jnp.int32)
B, P, NEW = 3, 6, 10
PROMPTS = jax.random.randint(jax.random.key(1), (B, P), 0, CONFIG.vocab_size, jnp.int32)


# The parts of a model that the checks of arguments read.
SHAPES = nnx.eval_shape(lambda: Llama(CONFIG, rngs=nnx.Rngs(0)))


def make_model(**changes: Any) -> Llama:
    """A model with random parameters, the same ones for the same shapes."""
    config = dataclasses.replace(CONFIG, **changes)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(2)

    def random(path, shape):
        if "norm" in jax.tree_util.keystr(path):
            return jnp.ones(shape.shape, shape.dtype)
        # Large enough for the likeliest token to change from place to place.
        return jnp.asarray(0.3 * rng.normal(size=shape.shape), shape.dtype)

    return nnx.merge(graphdef, jax.tree.map_with_path(random, shapes))


@functools.partial(jax.jit, static_argnums=0)
def next_logits(graphdef, state, tokens, lengths):
    """Logits of the token after the first `lengths` tokens, which do not see the later ones."""
    model = nnx.merge(graphdef, state)
    hidden = model(tokens)[jnp.arange(len(tokens)), lengths - 1]
    return model.logits(hidden)


def continued(model: Llama, prompts, lengths, num_new: int) -> np.ndarray:
    """Greedy continuations, the whole sequence run again for every token."""
    parts, rows = nnx.split(model), np.arange(len(prompts))
    tokens = np.pad(prompts, ((0, 0), (0, num_new)))
    for place in range(num_new):
        logits = next_logits(*parts, tokens, lengths + place)
        tokens[rows, lengths + place] = np.argmax(logits, axis=-1)
    places = lengths[:, None] + np.arange(num_new)
    return np.take_along_axis(tokens, places, axis=1)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"num_key_value_heads": 1}, id="mqa-scanned", marks=pytest.mark.full),
        pytest.param({}, id="gqa-scanned"),
        pytest.param({"scan_layers": False}, id="gqa-unrolled", marks=pytest.mark.full),
        pytest.param(
            {"num_key_value_heads": 4, "scan_layers": False, "qk_norm": True},
            id="mha-unrolled-qk_norm",
        ),
        pytest.param({"sliding_window": 3}, id="window"),
    ],
)
def test_greedy_equals_the_loop_without_a_cache(changes):
    model = make_model(**changes)
    expected = continued(model, PROMPTS, np.asarray(LENGTHS), NEW)
    assert len(np.unique(expected)) > 4, "the test needs varied tokens"
    got = generate(model, PROMPTS, max_new_tokens=NEW, prompt_lengths=LENGTHS)
    assert got.dtype == PROMPTS.dtype
    np.testing.assert_array_equal(got, expected)


def test_tokens_that_fill_up_a_prompt_are_not_read():
    other = jnp.where(jnp.arange(P) < LENGTHS[:, None], PROMPTS, (PROMPTS + 5) % CONFIG.vocab_size)
    assert np.any(other != PROMPTS)
    got, expected = (
        generate(make_model(), prompts, max_new_tokens=NEW, prompt_lengths=LENGTHS)
        for prompts in (other, PROMPTS)
    )
    chex.assert_trees_all_equal(got, expected)


def test_prompts_are_whole_without_lengths():
    got = generate(make_model(), PROMPTS, max_new_tokens=NEW)
    np.testing.assert_array_equal(got, continued(make_model(), PROMPTS, np.full(B, P), NEW))


@pytest.mark.parametrize("window", [None, 1, 4])
def test_a_cache_gives_the_hidden_states_of_the_whole(window):
    graphdef, state = nnx.split(make_model(sliding_window=window))
    expected = jax.jit(lambda state: nnx.merge(graphdef, state)(PROMPTS))(state)
    run = jax.jit(lambda state, *args: extend(nnx.merge(graphdef, state), *args))
    cache = init_cache(make_model(), B, P + 3)
    positions = jnp.broadcast_to(jnp.arange(P, dtype=jnp.int32), (B, P))
    chunks = []
    for chunk in (slice(0, 3), slice(3, 6)):
        hidden, cache = run(state, PROMPTS[:, chunk], positions[:, chunk], cache)
        chunks.append(hidden)
    chex.assert_trees_all_close(jnp.concatenate(chunks, axis=1), expected, rtol=0, atol=1e-5)
    # Keys and values of layers, rows, places: all but the 3 places left are filled.
    for array in cache:
        assert array.shape == (2, B, P + 3, CONFIG.num_key_value_heads, CONFIG.head_dim)
        filled = np.any(np.asarray(array), axis=(3, 4))
        np.testing.assert_array_equal(filled, np.broadcast_to(np.arange(P + 3) < P, filled.shape))


@pytest.mark.parametrize(
    "num_ends, pad_token_id", [pytest.param(1, 23, marks=pytest.mark.full), (3, None)]
)
def test_an_end_stops_its_row_and_fills_it(num_ends, pad_token_id):
    free = np.asarray(generate(make_model(), PROMPTS, max_new_tokens=NEW, prompt_lengths=LENGTHS))
    # The ends come at different places of the rows: at the first one and in the middle.
    ends = (int(free[0, 0]), int(free[1, 4]), int(free[2, 7]))[:num_ends]
    expected = free.copy()
    fill = ends[0] if pad_token_id is None else pad_token_id
    for row in expected:
        at = np.flatnonzero(np.isin(row, ends))
        if len(at):
            row[at[0] + 1 :] = fill
    assert np.any(expected != free) and np.any(expected == free)
    eos_token_id = ends[0] if num_ends == 1 else ends
    model = make_model(eos_token_id=eos_token_id, pad_token_id=pad_token_id)
    got = generate(model, PROMPTS, max_new_tokens=NEW, prompt_lengths=LENGTHS)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("temperature", [0.5, pytest.param(2.0, marks=pytest.mark.full)])
def test_draws_have_the_probabilities_of_the_softmax(temperature):
    num_draws, num_tokens = 20_000, 6
    model = make_model(vocab_size=num_tokens, num_hidden_layers=1)
    prompt = jnp.array([[1, 3]], jnp.int32)
    draw = functools.partial(
        generate, model, jnp.repeat(prompt, num_draws, 0), max_new_tokens=2, temperature=temperature
    )
    tokens = np.asarray(draw(key=jax.random.key(0)))
    chex.assert_trees_all_equal(tokens, draw(key=jax.random.key(0)))
    assert np.any(tokens != np.asarray(draw(key=jax.random.key(1))))

    # The probability of a pair is p(first) times p(second after first).
    lengths = jnp.full((num_tokens,), 2, jnp.int32)
    pairs = jnp.concatenate(
        [jnp.repeat(prompt, num_tokens, 0), jnp.arange(num_tokens, dtype=jnp.int32)[:, None]],
        axis=1,
    )
    first = next_logits(*nnx.split(model), pairs, lengths)[0]
    second = next_logits(*nnx.split(model), pairs, lengths + 1)
    probabilities = jax.nn.softmax(first / temperature)[:, None] * jax.nn.softmax(
        second / temperature
    )
    expected = num_draws * np.asarray(probabilities, np.float64)
    counts = np.zeros_like(expected)
    np.add.at(counts, (tokens[:, 0], tokens[:, 1]), 1)
    # Pearson's statistic over 36 cells has mean 35 and standard deviation 8.4. Rare cells would
    # raise the deviation, so the statistic leaves them out.
    common = expected > 5
    assert common.sum() > 10 and expected[common].sum() > 0.95 * num_draws
    statistic = np.sum((counts - expected)[common] ** 2 / expected[common])
    assert statistic < common.sum() + 5 * np.sqrt(2 * common.sum())


@pytest.mark.full
def test_low_temperatures_approach_the_greedy_tokens():
    """The lowest possible temperature too, at which no logit overflows."""
    model = make_model()
    greedy = generate(model, PROMPTS, max_new_tokens=NEW)
    for temperature in (1e-5, float(np.finfo(np.float32).tiny)):
        cold = generate(
            model, PROMPTS, max_new_tokens=NEW, temperature=temperature, key=jax.random.key(0)
        )
        chex.assert_trees_all_equal(cold, greedy)


def test_top_k_draws_from_the_likeliest():
    model = make_model(vocab_size=16, num_hidden_layers=1)
    prompts = jnp.full((500, 2), 3, jnp.int32)
    options = {"max_new_tokens": 1, "temperature": 9.0, "key": jax.random.key(0)}
    lengths = jnp.full((1,), 2, jnp.int32)
    (logits,) = next_logits(*nnx.split(model), prompts[:1], lengths)
    likeliest = set(np.argsort(logits)[-3:].tolist())
    assert set(np.asarray(generate(model, prompts, top_k=3, **options)).flat) == likeliest
    assert len(set(np.asarray(generate(model, prompts, **options)).flat)) > 10
    every = generate(model, prompts, top_k=16, **options)
    chex.assert_trees_all_equal(every, generate(model, prompts, **options))


@pytest.mark.parametrize(
    "shape, kwargs, message",
    [
        *(
            ((1, 4), {"top_k": k}, rf"top_k={k} must be between 1 and vocab_size=24")
            for k in (0, -1, 25)
        ),
        *(((1, 4), {"top_k": k}, f"top_k={k} must be a whole number") for k in (True, 2.0)),
        ((1, 0), {}, r"prompts\.shape=\(1, 0\): a prompt must have at least 1 token"),
        ((4,), {}, r"prompts must have 2 axes, got the shape \(4,\)"),
        *(
            ((1, 4), {"max_new_tokens": n}, f"max_new_tokens={n} must be at least 1")
            for n in (0, -1)
        ),
        *(
            ((1, 4), {"max_new_tokens": n}, f"max_new_tokens={n} must be a whole number")
            for n in (True, 2.0)
        ),
        *(
            ((1, 4), {"temperature": t, "key": 0}, f"temperature={t} must be a finite number of at")
            for t in (-0.5, math.nan, math.inf, -math.inf)
        ),
        *(
            ((1, 4), {"temperature": t, "key": 0}, rf"temperature={t} must be 0 or have .* float32")
            for t in (1e-39, 10**39)
        ),
        ((1, 4), {"temperature": 0.5}, "temperature=0.5 draws tokens .* pass a jax.random.key"),
        (
            (1, 4),
            {"max_new_tokens": 29},
            r"prompt_size=4 \+ max_new_tokens=29 exceeds max_position_embeddings=32; take shorter",
        ),
    ],
)
def test_wrong_arguments_raise(shape, kwargs, message, unchecked_shapes):
    prompts = jnp.ones(shape, jnp.int32)
    with pytest.raises(ValueError, match=message):
        generate(SHAPES, prompts, **{"max_new_tokens": 2} | kwargs)


@pytest.mark.parametrize(
    "prompts, lengths, message",
    [
        ([[1, 2, 24]], None, r"prompts\[0, 2\]=24 is no token of vocab_size=24"),
        ([[1, 2], [-1, 3]], None, r"prompts\[1, 0\]=-1 is no token"),
        ([[1, 2], [1, 2]], [2, 0], r"prompt_lengths\[1\]=0 must be from 1 to 2"),
        ([[1, 2], [1, 2]], [3, 2], r"prompt_lengths\[0\]=3 must be from 1 to 2"),
        ([[1, 2]], [-1], r"prompt_lengths\[0\]=-1 must be from 1 to 2"),
        ([[1, 2], [1, 2]], [2], r"lengths\.shape=\(1,\) must be the number of prompts, \(2,\)"),
        ([[1, 2]], [[2]], r"prompt_lengths must have 1 axes, got the shape \(1, 1\)"),
        ([[1.0, 2.0]], None, "prompts must be signed integers such as int32, got float32"),
        (np.ones((1, 2), np.uint32), None, "prompts must be signed integers .* got uint32"),
        (np.ones((1, 2), np.bool_), None, "prompts must be signed integers .* got bool"),
        ([[1, 2]], [2.0], "prompt_lengths must be signed integers .* got float32"),
    ],
)
def test_wrong_prompts_raise(prompts, lengths, message, unchecked_shapes):
    lengths = None if lengths is None else jnp.asarray(lengths)
    with pytest.raises(ValueError, match=message):
        generate(SHAPES, jnp.asarray(prompts), max_new_tokens=2, prompt_lengths=lengths)


def test_what_is_no_array_raises(unchecked_shapes):
    prompts = jnp.ones((1, 2), jnp.int32)
    lists: Any = [[1, 2]], [2]
    text: Any = "a"
    with pytest.raises(ValueError, match="prompts must be an array, got list; pass jnp"):
        generate(SHAPES, lists[0], max_new_tokens=2)
    with pytest.raises(ValueError, match="prompt_lengths must be an array, got list"):
        generate(SHAPES, prompts, max_new_tokens=2, prompt_lengths=lists[1])
    with pytest.raises(TypeError, match="temperature must be a number, got 'a'"):
        generate(SHAPES, prompts, max_new_tokens=2, temperature=text)
    with pytest.raises(ValueError, match="there must be at least 1 prompt"):
        generate(SHAPES, prompts[:0], max_new_tokens=2)


def test_a_dtype_that_does_not_hold_the_vocabulary_raises(unchecked_shapes):
    config = dataclasses.replace(CONFIG, vocab_size=129)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    prompts = jnp.ones((1, 2), jnp.int8)
    with pytest.raises(ValueError, match=r"dtype\('int8'\) does not hold .* vocab_size=129; cast"):
        generate(model, prompts, max_new_tokens=2)


def damaged_model() -> Llama:
    """Its logits are NaN after token 3."""
    model = make_model(num_hidden_layers=1)
    model.embed_tokens.embedding[...] = model.embed_tokens.embedding[...].at[3].set(jnp.nan)
    return model


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="greedy", marks=pytest.mark.full),
        pytest.param({"temperature": 0.5, "top_k": 2}, id="drawn"),
    ],
)
def test_logits_that_are_not_finite_raise(options):
    prompts = jnp.array([[1, 2], [1, 3]], jnp.int32)
    key = jax.random.key(0) if options else None
    with pytest.raises(
        FloatingPointError, match=r"new token 0 of row 1 are not finite.* float32; load"
    ):
        generate(damaged_model(), prompts, max_new_tokens=2, key=key, **options)


def test_under_a_trace_a_token_below_zero_says_what_cannot_be_raised():
    graphdef, state = nnx.split(make_model(num_hidden_layers=1))
    call = jax.jit(
        lambda state, prompts, lengths: generate(
            nnx.merge(graphdef, state), prompts, max_new_tokens=2, prompt_lengths=lengths
        )
    )
    prompts, lengths = jnp.array([[1, 2], [1, 3]], jnp.int32), jnp.array([2, 2], jnp.int32)
    assert np.all(np.asarray(call(state, prompts, lengths)) >= 0)
    for wrong in (
        (nnx.state(damaged_model()), prompts, lengths),
        (state, prompts, lengths.at[1].set(0)),
        (state, prompts, lengths.at[1].set(3)),
        (state, prompts.at[1, 1].set(CONFIG.vocab_size), lengths),
        (state, prompts.at[1, 0].set(-1), lengths),
    ):
        tokens = np.asarray(call(*wrong))
        assert (tokens[0] >= 0).all() and (tokens[1] == -1).all(), tokens


def test_the_context_can_be_filled():
    model = make_model(num_hidden_layers=1)
    assert generate(model, jnp.ones((1, 4), jnp.int32), max_new_tokens=28).shape == (1, 28)
