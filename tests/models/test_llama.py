"""The model against a textbook Llama, packed documents, tokens, dtypes and Flax."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import LlamaConfig
from models.llama import Llama
from support.attention_formulas import emulate
from support.numerics import assert_trees_as_accurate, quick_jit
from support.small_llama import (
    CONFIG,
    PAD,
    B,
    S,
    call,
    changed,
    differ,
    hidden_of,
    make_model,
    random_tokens,
    value_and_gradients,
)
from support.textbook_llama import textbook_logits

pytestmark = pytest.mark.usefixtures("fast_compilation")

# Every row: two documents and padding.
FIRST, SECOND, PADDING = LENGTHS = 8, 8, 4
PACKING = {
    "segment_ids": jnp.asarray([np.repeat([1, 2, 0], LENGTHS)] * B, jnp.int32),
    "positions": jnp.asarray([np.concatenate([np.arange(n) for n in LENGTHS])] * B, jnp.int32),
}
DOCUMENTS = slice(0, FIRST), slice(FIRST, FIRST + SECOND)


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


# The positions have gaps. Only differences of positions matter, so a restart alone changes nothing.
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

# Heads of 12 channels are too small for the kernel, so plain JAX norms them.
NORMED = {"qk_norm": True, "head_dim": 12, "tie_word_embeddings": True, "num_hidden_layers": 1}


# test_tensor_parallel.py compares heads in groups in both dtypes, and tied embeddings.
@pytest.mark.parametrize(
    "changes, dtype",
    [
        pytest.param({}, "float32", id="gqa", marks=pytest.mark.full),
        pytest.param(TIED, "float32", id="mha_tied", marks=pytest.mark.full),
        pytest.param(TIED, "bfloat16", id="mha_tied_bf16", marks=pytest.mark.full),
        pytest.param(BIASED, "float32", id="mqa_biases_gelu", marks=pytest.mark.full),
        pytest.param(BIASED, "bfloat16", id="mqa_biases_gelu_bf16"),
        pytest.param(NORMED, "float32", id="qk_norm", marks=pytest.mark.full),
        pytest.param(NORMED, "bfloat16", id="qk_norm_bf16"),
        pytest.param({"sliding_window": 3}, "float32", id="window"),
    ],
)
def test_equals_the_textbook_in_values_and_gradients(changes, dtype):
    assert_equals_the_textbook(changed(**changes), dtype)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"scan_layers": False}, id="unrolled", marks=pytest.mark.full),
        pytest.param({"remat": "full"}, id="scanned"),
        pytest.param({"sliding_window": 3}, id="window"),
    ],
)
def test_documents_one_by_one_equal_the_textbook(monkeypatch, fresh_operations, changes):
    """An emulation of the kernels computes the documents. 4 s."""
    emulate(monkeypatch)
    config = changed(attention_implementation="mosaic_gpu", **changes)
    assert_equals_the_textbook(config, "float32")


def assert_equals_the_textbook(config, dtype):
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


def test_a_window_in_rows_of_one_document():
    """`segment_ids` of one number change nothing. A window as long as the row is no window."""
    tokens = random_tokens(CONFIG)
    one_document = jnp.zeros_like(tokens)
    of_window = lambda window, **kwargs: hidden_of(changed(sliding_window=window), tokens, **kwargs)
    short = of_window(S - 1)
    chex.assert_trees_all_equal(short, of_window(S - 1, segment_ids=one_document))
    whole = of_window(None)
    chex.assert_trees_all_equal(of_window(S), whole)
    # The last token does not see the first one.
    chex.assert_trees_all_equal(short[:, : S - 1], whole[:, : S - 1])
    assert differ(short[:, S - 1], whole[:, S - 1])


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
    # The norm rounds before the weight and after it.
    x_hat = x_hat.astype(jnp.bfloat16).astype(jnp.float32)
    expected = (x_hat * params["norm"]["weight"]).astype(jnp.bfloat16)
    # An x_hat half way between two numbers may be rounded the other way.
    assert np.mean(hidden == expected) > 0.99


def test_a_too_long_sequence_raises():
    config = changed(max_position_embeddings=S)
    assert jax.eval_shape(make_model(config), random_tokens(config)).shape == (B, S, 32)
    with pytest.raises(
        ValueError, match=f"sequence_length={S + 1} exceeds max_position_embeddings={S}"
    ):
        make_model(config)(random_tokens(config, (B, S + 1)))


@pytest.mark.parametrize(
    "tokens, packing, message",
    [
        ((S,), {}, r"tokens.shape=\(20,\) must be \[B, S\]; give a single row an axis"),
        (
            (B, S),
            {"positions": (S,)},
            r"positions.shape=\(20,\) must be \(2, 20\), .* or \(1, 20\)",
        ),
        ((B, S), {"segment_ids": (1, S)}, r"segment_ids.shape=\(1, 20\) must be \(2, 20\)"),
        ((B, S), {"segment_ids": (B, S + 1)}, r"segment_ids.shape=\(2, 21\) must be \(2, 20\)"),
    ],
)
def test_shapes_that_do_not_fit_raise(tokens, packing, message, unchecked_shapes):
    ids = lambda shape: jnp.zeros(shape, jnp.int32)
    with pytest.raises(ValueError, match=message):
        make_model(CONFIG)(ids(tokens), **{name: ids(shape) for name, shape in packing.items()})


# Packed documents


# The normal run has packed rows in the textbook's comparison, and in tests/train/test_step.py.
@pytest.mark.full
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


@pytest.mark.parametrize("window", [None, 3])
def test_a_batch_without_rows(window):
    """1 s each."""
    config = changed(CONFIG, sliding_window=window)
    hidden, gradients = value_and_gradients(config, jnp.ones((0, S, 32)), random_tokens(config)[:0])
    assert hidden.shape == (0, S, 32)
    assert not any(np.any(a) for a in jax.tree.leaves(gradients))


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


# The normal run has it in test_tensor_parallel.py.
@pytest.mark.full
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
    # The key by which `jax.jit` decides whether to compile again.
    assert graphdef == nnx.graphdef(merged) and hash(graphdef) == hash(nnx.graphdef(merged))


def traced_anew() -> list[str]:
    """The programs that make the parameters, and the hidden states with their gradients."""
    # `make_model` would return the model that was made before.
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


@pytest.mark.full
def test_flax_tree_mode_changes_nothing():
    before = traced_anew()
    with nnx.set_graph_mode(False), nnx.set_graph_updates(False):
        assert not nnx.set_graph_mode.current_value()
        assert traced_anew() == before
    assert all("mul" in program for program in before)
