"""The model against a textbook Llama written here, and every promise of its configuration."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import LlamaConfig
from models.llama import Llama
from models.llama_hf import config_to_hf
from models.presets import PRESETS
from models.rope import OPTIONAL_FIELDS, REQUIRED_FIELDS, RopeParameters, rotary_cos_sin
from models.sampling import generate
from support.numerics import assert_trees_as_accurate, quick_jit
from support.textbook_llama import textbook_logits

pytestmark = pytest.mark.usefixtures("fast_compilation")

CONFIG = LlamaConfig(
    vocab_size=48,
    hidden_size=32,
    intermediate_size=80,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters=RopeParameters(rope_theta=100.0),
    dtype="float32",
    remat="none",
)
B, S = 2, 20

# Every row: two documents and padding.
FIRST, SECOND, PADDING = LENGTHS = 8, 8, 4
PACKING = {
    "segment_ids": jnp.asarray([np.repeat([1, 2, 0], LENGTHS)] * B, jnp.int32),
    "positions": jnp.asarray([np.concatenate([np.arange(n) for n in LENGTHS])] * B, jnp.int32),
}
DOCUMENTS = slice(0, FIRST), slice(FIRST, FIRST + SECOND)


def changed(config: LlamaConfig = CONFIG, **changes: Any) -> LlamaConfig:
    return dataclasses.replace(config, **changes)


@functools.cache
def make_model(config: LlamaConfig) -> Llama:
    """A model with parameters far from their initial values: no norm is the identity, no bias 0."""
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def random(path, shape):
        center = 1.0 if "norm" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(center + 0.15 * rng.normal(size=shape.shape), shape.dtype)

    return nnx.merge(graphdef, jax.tree.map_with_path(random, shapes))


def random_tokens(config: LlamaConfig, shape=(B, S), seed=0) -> jax.Array:
    # 0 is left out: it is the padding token where there is one.
    return jax.random.randint(jax.random.key(seed), shape, 1, config.vocab_size, jnp.int32)


def call(graphdef, state, args, kwargs) -> jax.Array:
    return nnx.merge(graphdef, state)(*args, **kwargs)


_call = jax.jit(call, static_argnums=0)


def hidden_of(config: LlamaConfig, *args, **kwargs) -> jax.Array:
    # jax.nn.dot_product_attention does not lower in 16 bits under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        return _call(*nnx.split(make_model(config)), args, kwargs)


@functools.partial(jax.jit, static_argnums=0)
def _value_and_gradients(graphdef, state, cotangent, args, kwargs):
    hidden, vjp = jax.vjp(lambda state: call(graphdef, state, args, kwargs), state)
    return hidden, nnx.to_pure_dict(vjp(cotangent)[0])


def value_and_gradients(config: LlamaConfig, cotangent, *args, **kwargs):
    """Hidden states and the gradients of `sum(hidden * cotangent)`."""
    with jax.numpy_dtype_promotion("standard"):
        return _value_and_gradients(*nnx.split(make_model(config)), cotangent, args, kwargs)


# The textbook


def with_gradients(fn, params):
    """The logits `fn(params)` and the gradients of their sum with fixed random weights."""

    def compute(params):
        logits, vjp = jax.vjp(fn, params)
        cotangent = np.random.default_rng(1).normal(size=logits.shape).astype(np.float32)
        return logits, vjp(jnp.asarray(cotangent, logits.dtype))[0]

    return jax.jit(compute)(params)


@functools.cache
def in_float64(config: LlamaConfig):
    params = nnx.to_pure_dict(nnx.state(make_model(config)))
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
        return with_gradients(textbook(config, jnp.float64), params)


# With gaps: only differences of positions matter, so that restarting them alone changes nothing.
ROWS = PACKING | {"positions": 3 * PACKING["positions"] // 2}


def textbook(config: LlamaConfig, dtype):
    return functools.partial(
        textbook_logits, config=config, tokens=random_tokens(config), dtype=dtype, **ROWS
    )


TIED = {"tie_word_embeddings": True, "num_key_value_heads": 4}
BIASED = {
    "attention_bias": True,
    "mlp_bias": True,
    "head_dim": 12,
    "num_key_value_heads": 1,
    "hidden_act": "gelu_pytorch_tanh",
    "rms_norm_eps": 0.1,
}


# test_tensor_parallel.py compares heads in groups in both dtypes, and tied embeddings.
@pytest.mark.parametrize(
    "changes, dtype",
    [
        pytest.param({}, "float32", id="gqa", marks=pytest.mark.full),
        pytest.param(TIED, "float32", id="mha_tied", marks=pytest.mark.full),
        pytest.param(TIED, "bfloat16", id="mha_tied_bf16", marks=pytest.mark.full),
        pytest.param(BIASED, "float32", id="mqa_biases_gelu", marks=pytest.mark.full),
        pytest.param(BIASED, "bfloat16", id="mqa_biases_gelu_bf16"),
    ],
)
def test_equals_the_textbook_in_values_and_gradients(changes, dtype):
    config = changed(**changes)
    graphdef, state = nnx.split(make_model(changed(config, dtype=dtype)))

    def carried(state):
        model = nnx.merge(graphdef, state)
        return model.logits(model(random_tokens(config), **ROWS))

    with jax.numpy_dtype_promotion("standard"):
        logits, gradients = with_gradients(carried, state)
    got = logits, nnx.to_pure_dict(gradients)
    plain = with_gradients(textbook(config, jnp.dtype(dtype)), nnx.to_pure_dict(state))
    exact = in_float64(config)
    assert len(jax.tree.leaves(got)) == 1 + len(jax.tree.leaves(state))
    # The ratio of the two errors scatters around 0.95 with the tokens drawn, from 0.5 to 1.7.
    assert_trees_as_accurate(got, plain, exact, slack=2.0)


def test_norms_round_as_hugging_face():
    config = changed(dtype="bfloat16", num_hidden_layers=1)
    graphdef, state = nnx.split(make_model(config))
    # Layers that add nothing, so that the hidden states are the norm of the embeddings.
    silent = lambda path: "o_proj" in str(path) or "down_proj" in str(path)
    state = jax.tree.map_with_path(lambda path, a: jnp.zeros_like(a) if silent(path) else a, state)
    tokens, params = random_tokens(config), nnx.to_pure_dict(state)
    with jax.numpy_dtype_promotion("standard"):
        hidden = quick_jit(call, static_argnums=0)(graphdef, state, (tokens,), {})
    x = params["embed_tokens"]["embedding"][tokens].astype(jnp.bfloat16).astype(jnp.float32)
    x_hat = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.rms_norm_eps)
    # Rounded before the weight as well as after it.
    x_hat = x_hat.astype(jnp.bfloat16).astype(jnp.float32)
    expected = (x_hat * params["norm"]["weight"]).astype(jnp.bfloat16)
    # An x_hat in the middle of two numbers may be rounded the other way.
    assert np.mean(hidden == expected) > 0.99


# Every field of the configuration


def structure(config):
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda a: (a.shape, a.dtype.name), nnx.to_pure_dict(nnx.state(model)))


@functools.partial(jax.jit, static_argnums=0)
def _initial_parameters(config, key):
    return nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(key))))


def initial_parameters(config, seed=0):
    return jax.device_get(_initial_parameters(config, jax.random.key(seed)))


def hidden_states(config):
    return hidden_of(config, random_tokens(config))


def program(config):
    graphdef, state = nnx.split(make_model(config))
    loss = lambda state: jnp.sum(nnx.merge(graphdef, state)(random_tokens(config)))
    return str(jax.make_jaxpr(jax.grad(loss))(state))


def embedding_gradients(config):
    tokens = random_tokens(config)
    hidden, gradients = value_and_gradients(config, jnp.ones((B, S, 32), config.dtype), tokens)
    return hidden, gradients["embed_tokens"]["embedding"]


def generated(config):
    return generate(make_model(config), random_tokens(config, (4, 5)), max_new_tokens=12)


def norm_implementation(config):
    return make_model(config).norm.implementation


def exported(config):
    return config_to_hf(config)


# A token that occurs, so that its gradient is not 0 anyway.
PAD = int(random_tokens(CONFIG)[0, 2])
# For every field another value, and where the change must show.
PERTURBATIONS = {
    "vocab_size": (49, structure),
    "hidden_size": (36, structure),
    "intermediate_size": (81, structure),
    "num_hidden_layers": (3, structure),
    "num_attention_heads": (2, structure),
    "num_key_value_heads": (4, structure),
    "head_dim": (16, structure),
    "hidden_act": ("relu", hidden_states),
    "max_position_embeddings": (S - 1, hidden_states),
    "initializer_range": (0.03, initial_parameters),
    "rms_norm_eps": (1e-4, hidden_states),
    "tie_word_embeddings": (True, structure),
    "attention_bias": (True, structure),
    "mlp_bias": (True, structure),
    "attention_dropout": (0.1, hidden_states),
    # Nothing computed here starts a text; a tokenizer does, from the exported configuration.
    "bos_token_id": (1, exported),
    "eos_token_id": (tuple(range(24)), generated),
    "pad_token_id": (PAD, embedding_gradients),
    "rope_parameters": (RopeParameters(rope_theta=101.0), hidden_states),
    "dtype": ("bfloat16", hidden_states),
    "param_dtype": ("bfloat16", structure),
    "scan_layers": (False, program),
    "remat": ("full", program),
    "mlp_chunk_size": (3, program),
    # Off the GPU no kernel runs: what is seen is that the norms are told.
    "implementation": ("xla", norm_implementation),
    "attention_implementation": ("cudnn", hidden_states),
}


def observed(observe, config: LlamaConfig, **changes) -> Any:
    """What `observe` returns, or the error that the changed configuration raises on the way."""
    try:
        return observe(changed(config, **changes))
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return type(error).__name__


def differ(a, b) -> bool:
    leaves, others = jax.tree.leaves_with_path(a), jax.tree.leaves_with_path(b)
    same = len(leaves) == len(others) and all(
        path == other_path and np.array_equal(leaf, other)
        for (path, leaf), (other_path, other) in zip(leaves, others, strict=True)
    )
    return not same


@functools.cache
def observed_before(observe) -> Any:
    """Of `CONFIG`, with which several fields are compared; it is the same when made again."""
    before = observed(observe, CONFIG)
    assert not differ(before, observed(observe, CONFIG))
    return before


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LlamaConfig)])
def test_every_field_is_read(field):
    assert field in PERTURBATIONS, f"say in PERTURBATIONS what a change of {field} changes"
    value, observe = PERTURBATIONS[field]
    assert value != getattr(CONFIG, field)
    before = observed_before(observe)
    assert not isinstance(before, str) or observe is program
    assert differ(before, observed(observe, CONFIG, **{field: value}))


def test_the_context_length_reaches_the_rotary_embedding():
    dynamic = RopeParameters(rope_type="dynamic", rope_theta=100.0, factor=4.0)
    config = changed(rope_parameters=dynamic, max_position_embeddings=S // 2, num_hidden_layers=1)
    before = observed(hidden_states, config)
    assert np.all(np.isfinite(before))
    assert differ(before, observed(hidden_states, config, max_position_embeddings=S // 2 + 1))


ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {
        "original_max_position_embeddings": 128,
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "longrope": {
        "original_max_position_embeddings": 128,
        "short_factor": (1.0, 1.5) * 8,
        "long_factor": (2.0, 3.0) * 8,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
ROPE_PERTURBATIONS = {
    "rope_theta": 11_000.0,
    "factor": 5.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 150,
    "attention_factor": 1.7,
    "beta_fast": 20.0,
    "beta_slow": 3.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
    "truncate": True,
    "short_factor": (1.0, 1.6) * 8,
    "long_factor": (2.0, 3.1) * 8,
}


def rotary_tables(rope_type: str, **changes: Any) -> np.ndarray:
    """cos and sin of a short sequence and of one past the context length."""
    rope = RopeParameters(
        **{"rope_type": rope_type, "rope_theta": 10_000.0} | ROPE[rope_type] | changes
    )
    tables = [
        rotary_cos_sin(
            rope,
            jnp.arange(length, dtype=jnp.int32)[None],
            head_dim=32,
            max_position_embeddings=512,
        )
        for length in (100, 600)
    ]
    return np.concatenate(jax.tree.leaves(tables), axis=1)


@pytest.mark.parametrize("rope_type", REQUIRED_FIELDS)
def test_every_rotary_field_is_read_by_the_types_that_accept_it(rope_type):
    before = rotary_tables(rope_type)
    for field in ("rope_theta", *REQUIRED_FIELDS[rope_type], *OPTIONAL_FIELDS[rope_type]):
        after = rotary_tables(rope_type, **{field: ROPE_PERTURBATIONS[field]})
        assert differ(before, after), field
    for other in set(REQUIRED_FIELDS) - {rope_type}:
        assert differ(before, rotary_tables(other)), other


def test_every_rotary_field_belongs_to_a_type():
    read = {
        name for fields in (REQUIRED_FIELDS, OPTIONAL_FIELDS) for t in fields for name in fields[t]
    }
    fields = {field.name for field in dataclasses.fields(RopeParameters)}
    assert fields == read | {"rope_type", "rope_theta"}
    assert fields == {"rope_type", *ROPE_PERTURBATIONS}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads=4 must be a multiple of .*num_key_value_heads=3",
        ),
        (
            {"hidden_size": 30, "head_dim": 0},
            r"hidden_size=30 is not a multiple of .*=4, and transformers does not load",
        ),
        ({"head_dim": 7}, r"head_dim=7 must be even"),
        ({"hidden_act": "swish"}, r"hidden_act='swish' must be one of \['gelu'"),
        ({"remat": "everything"}, r"remat='everything': \['everything'\] unknown"),
    ],
)
def test_wrong_configurations_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        changed(**changes)


def test_attention_dropout_raises():
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.1.* set it to 0\.0"):
        changed(attention_dropout=0.1)


def test_a_missing_head_size_is_computed():
    assert CONFIG.head_dim == 8
    assert changed(head_dim=0, num_attention_heads=2).head_dim == 16


def test_a_too_long_sequence_raises():
    config = changed(max_position_embeddings=S)
    assert jax.eval_shape(make_model(config), random_tokens(config)).shape == (B, S, 32)
    with pytest.raises(
        ValueError, match=f"sequence_length={S + 1} exceeds max_position_embeddings={S}"
    ):
        make_model(config)(random_tokens(config, (B, S + 1)))


@pytest.mark.parametrize(
    "preset, num_parameters",
    [
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama2-7b", 6_738_415_616),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, num_parameters):
    model = nnx.eval_shape(lambda: Llama(PRESETS[preset], rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == num_parameters


def test_initial_parameters():
    config = changed(initializer_range=0.03, attention_bias=True, mlp_bias=True, hidden_size=64)
    params = initial_parameters(config)
    matrices = []
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            assert np.all(leaf == 1), name
        elif "bias" in name:
            assert np.all(leaf == 0), name
        else:
            # The standard error of the deviation of the smallest matrix, 4096 numbers, is 1.1 %.
            np.testing.assert_allclose(np.std(leaf), 0.03, rtol=0.06, err_msg=name)
            assert np.abs(np.mean(leaf)) < 0.002, name
            matrices.extend(leaf if leaf.ndim == 3 else [leaf])
    assert len(matrices) == 2 + 7 * config.num_hidden_layers
    first_numbers = [float(matrix[0, 0]) for matrix in matrices]
    assert len(set(first_numbers)) == len(first_numbers), "two matrices start with one key"
    assert differ(params, initial_parameters(config, 1))


# Packed documents


def test_packed_documents_equal_the_documents_alone():
    tokens = random_tokens(CONFIG)
    cotangent = jax.random.normal(jax.random.key(1), (B, S, 32))
    cotangent = jnp.where(PACKING["segment_ids"][..., None] > 0, cotangent, 0.0)
    hidden, gradients = value_and_gradients(CONFIG, cotangent, tokens, **PACKING)
    alone = [
        jax.device_get(value_and_gradients(CONFIG, cotangent[:, document], tokens[:, document]))
        for document in DOCUMENTS
    ]
    for document, (hidden_alone, _) in zip(DOCUMENTS, alone, strict=True):
        chex.assert_trees_all_close(hidden[:, document], hidden_alone, rtol=0, atol=1e-5)
    summed = jax.tree.map(np.add, alone[0][1], alone[1][1])
    # The output embedding takes no part, and has gradients of 0.
    scaled = lambda tree: jax.tree.map(lambda a, e: a / max(np.abs(e).max(), 1e-30), tree, summed)
    chex.assert_trees_all_close(
        scaled(jax.device_get(gradients)), scaled(summed), rtol=0, atol=3e-6
    )
    # The comparison does see it when one document attends to the other.
    unseparated = {"positions": PACKING["positions"]}
    leaky = hidden_of(CONFIG, tokens, **unseparated)[:, DOCUMENTS[1]]
    assert np.abs(leaky - alone[1][0]).max() > 0.1


@pytest.mark.parametrize("kept, replaced", [(0, 1), (1, 0)])
def test_nothing_leaks_between_documents(kept, replaced):
    tokens = random_tokens(CONFIG)
    others = tokens.at[:, DOCUMENTS[replaced]].set(
        random_tokens(CONFIG, seed=5)[:, DOCUMENTS[replaced]]
    )
    cotangent = jnp.zeros((B, S, 32)).at[:, DOCUMENTS[kept]].set(1.0)
    before, after = (
        value_and_gradients(CONFIG, cotangent, tokens, **PACKING) for tokens in (tokens, others)
    )
    select = lambda hidden, document: np.asarray(hidden)[:, DOCUMENTS[document]]
    assert differ(select(before[0], replaced), select(after[0], replaced))
    chex.assert_trees_all_equal(select(before[0], kept), select(after[0], kept))
    only_replaced = np.setdiff1d(others[:, DOCUMENTS[replaced]], others[:, DOCUMENTS[kept]])
    gradient = np.asarray(after[1]["embed_tokens"]["embedding"])
    assert len(only_replaced) and not np.any(gradient[only_replaced])
    assert np.all(np.any(gradient[others[:, DOCUMENTS[kept]]], axis=-1))


def test_padding_is_finite_and_changes_nothing():
    tokens = random_tokens(CONFIG)
    # A row of padding alone beside a packed one.
    packing = {name: a * jnp.array([[1], [0]], jnp.int32) for name, a in PACKING.items()}
    before = value_and_gradients(CONFIG, jnp.ones((B, S, 32)), tokens, **packing)
    chex.assert_tree_all_finite(before)
    other = tokens.at[:, FIRST + SECOND :].set(3).at[1].set(3)
    after = value_and_gradients(CONFIG, jnp.ones((B, S, 32)), other, **packing)
    documents = slice(0, FIRST + SECOND)
    assert differ(np.asarray(before[0])[1], np.asarray(after[0])[1])
    chex.assert_trees_all_equal(before[0][0, documents], after[0][0, documents])


@pytest.mark.parametrize("packing", [{}, PACKING], ids=["whole", "packed"])
def test_no_token_sees_a_later_one(packing):
    tokens = random_tokens(CONFIG)
    before = np.asarray(hidden_of(CONFIG, tokens, **packing))
    for t in (1, 6, S - 1):
        token = (tokens[:, t] + 1) % CONFIG.vocab_size
        after = np.asarray(hidden_of(CONFIG, tokens.at[:, t].set(token), **packing))
        np.testing.assert_array_equal(before[:, :t], after[:, :t])
        assert np.all(np.any(before[:, t] != after[:, t], axis=-1))


def test_positions_count_from_0_and_one_segment_is_the_whole_row():
    tokens = random_tokens(CONFIG)
    expected = hidden_of(CONFIG, tokens)
    positions = jnp.broadcast_to(jnp.arange(S, dtype=jnp.int32), (B, S))
    segment_ids = jnp.full((B, S), 3, jnp.int32)
    got = hidden_of(CONFIG, tokens, positions=positions, segment_ids=segment_ids)
    chex.assert_trees_all_close(got, expected, rtol=0, atol=1e-5)


# Tokens


@pytest.mark.parametrize("token", [CONFIG.vocab_size, -1, -100, 2**31 - 1])
def test_a_token_out_of_range_makes_its_row_nan(token):
    tokens = random_tokens(CONFIG)
    good = hidden_of(CONFIG, tokens)
    hidden = hidden_of(CONFIG, tokens.at[0, 3].set(token))
    assert np.all(np.isnan(hidden[0, 3:]))
    chex.assert_trees_all_equal(hidden[1], good[1])


def test_the_padding_token_is_read_but_not_trained():
    tokens = random_tokens(CONFIG)
    cotangent = jax.random.normal(jax.random.key(1), (B, S, 32))
    hidden, gradients = value_and_gradients(changed(pad_token_id=PAD), cotangent, tokens)
    expected_hidden, expected = value_and_gradients(CONFIG, cotangent, tokens)
    chex.assert_trees_all_close(hidden, expected_hidden, rtol=0, atol=1e-5)
    embedding = expected["embed_tokens"]["embedding"]
    assert np.any(embedding[PAD]) and not np.any(gradients["embed_tokens"]["embedding"][PAD])
    expected["embed_tokens"]["embedding"] = embedding.at[PAD].set(0)
    chex.assert_trees_all_close(gradients, expected, rtol=1e-5, atol=1e-4)


def test_embedding_gradients_are_summed_in_float32():
    config = changed(num_hidden_layers=1, dtype="bfloat16")
    num_rows, length = 128, 32
    tokens = jnp.full((num_rows, length), 5, jnp.int32)
    one_row = jax.random.normal(jax.random.key(0), (1, length, 32), jnp.bfloat16)

    def gradient(rows):
        cotangent = jnp.where(jnp.arange(num_rows)[:, None, None] < rows, one_row, 0.0)
        gradients = value_and_gradients(config, cotangent.astype(jnp.bfloat16), tokens)[1]
        return np.asarray(gradients["embed_tokens"]["embedding"][5])

    # Every row contributes the same. In bfloat16 a sum of 4096 terms stops growing at 256 of them.
    many = num_rows * gradient(1)
    np.testing.assert_allclose(gradient(num_rows), many, rtol=0, atol=1e-4 * np.abs(many).max())


# Dtypes and Flax


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtypes(dtype, param_dtype):
    config = changed(dtype=dtype, param_dtype=param_dtype, attention_bias=True, mlp_bias=True)
    graphdef, state = nnx.split(make_model(config))

    def loss(state):
        model = nnx.merge(graphdef, state)
        hidden = model(random_tokens(config))
        logits = model.logits(hidden)
        return jnp.sum(logits), (hidden, logits)

    with jax.numpy_dtype_promotion("standard"):
        (_, (hidden, logits)), gradients = jax.eval_shape(
            jax.value_and_grad(loss, has_aux=True), state
        )
    assert hidden.dtype == dtype and logits.dtype == jnp.float32
    assert logits.shape == (B, S, config.vocab_size)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((state, gradients))} == {param_dtype}


def test_split_and_merge_give_the_model_back():
    model = make_model(CONFIG)
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    assert not jax.tree.leaves(rest)
    merged = nnx.merge(graphdef, params, rest)
    assert merged.config == CONFIG
    chex.assert_trees_all_equal(nnx.state(merged), nnx.state(model))
    # What decides whether `jax.jit` compiles again.
    assert graphdef == nnx.graphdef(merged) and hash(graphdef) == hash(nnx.graphdef(merged))


def traced_anew() -> list[str]:
    """The programs that make the parameters, and the hidden states with their gradients."""
    # Not `make_model`, which keeps what was made before.
    initialize = lambda key: nnx.state(Llama(CONFIG, rngs=nnx.Rngs(key)))
    graphdef, state = nnx.split(Llama(CONFIG, rngs=nnx.Rngs(0)))

    def value_and_gradients(state):
        hidden, vjp = jax.vjp(lambda s: call(graphdef, s, (random_tokens(CONFIG),), {}), state)
        return hidden, vjp(jnp.ones_like(hidden))

    programs = (
        jax.make_jaxpr(initialize)(jax.random.key(0)),
        jax.make_jaxpr(value_and_gradients)(state),
    )
    return list(map(str, programs))


def test_flax_tree_mode_changes_nothing():
    before = traced_anew()
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        assert not nnx.set_graph_mode.current_value()
        assert traced_anew() == before
    assert all("mul" in program for program in before)
