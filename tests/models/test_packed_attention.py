"""Attention of rows of several documents, with cuDNN in plain JAX."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.documents import packed
from models import packed_attention as module
from models.packed_attention import documents_at_a_time, documents_of
from models.sharding import make_mesh
from support.emulated_cudnn import emulate
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

S, N, K, H = 58, 4, 2, 12
NAMES = ["out", "dq", "dk", "dv"]


def ids_of(*documents):
    """A row of documents `(number, length)`, the last of which fills the row."""
    numbers, lengths = zip(*documents, strict=True)
    return np.repeat(numbers, (*lengths[:-1], S - sum(lengths[:-1]))).astype(np.int32)


# By the documents of their rows; a call of cuDNN takes 8 of each row.
ROWS = {
    "one": ids_of((0, S)),
    "from 1, one token": ids_of((1, 29), (2, 1), (3, 0)),
    "padding": ids_of((1, 20), (2, 21), (0, 0)),
    "not in order": ids_of((5, 2), (2, 2), (9, 20), (-1, 7), (5, 11), (2, 0)),
    "8": ids_of(*((i, 7) for i in range(8))),
    "9": ids_of(*((i, 3) for i in range(9))),
    "16": ids_of(*((i, 1 + i % 4) for i in range(16))),
    "19, and two numbers": ids_of(*((i % 2, 3) for i in range(19))),
    "one token each": np.arange(S, dtype=np.int32),
}
BATCHES = {
    "one call": ["one", "from 1, one token", "padding", "not in order", "8"],
    "two calls": ["16", "9", "one"],
    "eight calls": ["one", "one token each", "19, and two numbers", "not in order"],
}


def segment_ids(batch):
    return jnp.asarray(np.stack([ROWS[name] for name in BATCHES[batch]]))


def numbers_of(ids):
    """The number of each token's document, in NumPy."""
    return np.cumsum(np.diff(ids, axis=-1, prepend=ids[..., :1]) != 0, axis=-1)


def inputs(batch_size, dtype=jnp.float32, more=()):
    """Queries, keys, values and a cotangent, rounded to `dtype`."""
    rng = np.random.default_rng(0)
    shapes = ((*more, batch_size, S, heads, H) for heads in (N, K, K, N))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def formula(q, k, v, ids):
    """The attention with a mask. Logits and sums are float32 or wider."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    queries = q.reshape(*q.shape[:2], K, -1, H).astype(wide)
    logits = jnp.einsum("bskgh,btkh->bkgst", queries, k.astype(wide)) * H**-0.5
    is_new = jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    numbers = jnp.cumsum(is_new, axis=1, dtype=jnp.int32)
    mask = (numbers[:, :, None] == numbers[:, None]) & jnp.tri(S, dtype=bool)
    logits = jnp.where(mask[:, None, None], logits, -jnp.inf)
    # The operands of both products are rounded, as in cuDNN.
    probabilities = jax.nn.softmax(logits, axis=-1).astype(q.dtype).astype(wide)
    out = jnp.einsum("bkgst,btkh->bskgh", probabilities, v.astype(wide))
    return out.astype(q.dtype).reshape(q.shape)


def assert_equals_the_formula(arrays, ids, transform=lambda fn: fn):
    """Compares value and gradients of `transform(packed)` and `transform(formula)`."""
    *arrays, cotangent = arrays

    def compute(fn, arrays, cotangent):
        of_arrays = lambda q, k, v: transform(fn)(q, k, v, ids)
        return quick_jit(functools.partial(value_and_grads, of_arrays))(arrays, cotangent)

    got, plain = (compute(fn, arrays, cotangent) for fn in (packed, formula))
    assert [a.dtype for a in got] == [a.dtype for a in plain]
    with jax.enable_x64(True):
        in_float64 = lambda a: jnp.asarray(np.asarray(a, np.float64))
        exact = compute(formula, [*map(in_float64, arrays)], in_float64(cotangent))
    assert_as_accurate(got, plain, exact, names=NAMES)


@pytest.fixture
def cudnn(monkeypatch):
    emulate(monkeypatch)


@pytest.mark.parametrize(
    "batch, dtype",
    [
        ("one call", "float32"),
        pytest.param("one call", "bfloat16", marks=pytest.mark.full),
        pytest.param("two calls", "float32", marks=pytest.mark.full),
        ("two calls", "bfloat16"),
        ("eight calls", "float32"),
        ("eight calls", "bfloat16"),
    ],
)
@pytest.mark.usefixtures("cudnn")
def test_equals_the_attention_with_a_mask(batch, dtype):
    """2 s each."""
    ids = segment_ids(batch)
    assert_equals_the_formula(inputs(len(ids), dtype), ids)


def in_a_scan(fn):
    """Two layers, the second with the output of the first as queries, computed again backward."""

    def of_arrays(q, k, v, ids):
        layer = jax.checkpoint(lambda q, scale: (fn(q * scale, k, v * scale, ids), None))
        return jax.lax.scan(layer, q, jnp.asarray([1.0, 3.0], q.dtype))[0]

    return of_arrays


def with_documents_outside(fn):
    """As in the model: what is computed again has the documents as no argument."""
    return lambda q, k, v, ids: jax.checkpoint(lambda q, k, v: fn(q, k, v, ids))(q, k, v)


@pytest.mark.parametrize("transform", [in_a_scan, with_documents_outside])
@pytest.mark.usefixtures("cudnn")
def test_layers_that_are_computed_again(transform):
    """2 s each."""
    ids = segment_ids("two calls")
    assert_equals_the_formula(inputs(len(ids)), ids, transform)


@pytest.mark.usefixtures("cudnn")
def test_members_that_share_documents_and_keys():
    """Members of members, where XLA partitions nothing. 2 s."""
    ids = segment_ids("two calls")
    q, *_, cotangent = inputs(3, more=(2, 2))
    _, k, v, _ = inputs(3)
    twice = lambda fn: jax.vmap(jax.vmap(fn, (0, None, None, None)), (0, None, None, None))
    with jax.set_mesh(make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])):
        assert_equals_the_formula([q, k, v, cotangent], ids, twice)


def test_a_call_of_cudnn_gets_each_document_by_itself():
    """The first element of each document in all rows, and the lengths."""
    found = []
    primitive = types.SimpleNamespace(bind=lambda *args, **options: found.append((args, options)))
    ids = segment_ids("two calls")
    q, k, v, _ = inputs(3, jnp.bfloat16)
    documents = documents_of(ids)
    for first in (0, 8):
        module._bind(primitive, q, k, v, documents, first)
        args, options = found.pop()
        assert options["mask_type"] == module.cudnn.MaskType.PADDING_CAUSAL
        assert options["scale"] == pytest.approx(H**-0.5)
        lengths, lengths_k, offsets, offsets_k = map(np.asarray, args[4:8])
        assert lengths.shape == (3, 8) and offsets.shape == (3, 9)
        np.testing.assert_array_equal(lengths_k, lengths)
        # Documents that a row lacks begin behind the row. Then come the ends of the arrays.
        begins = []
        for row, numbers in enumerate(numbers_of(np.asarray(ids))):
            for place in range(8):
                here = np.flatnonzero(numbers == first + place)
                begins.append(row * S + (here[0] if len(here) else S))
                assert lengths[row, place] == len(here)
        begins = np.array([*begins, 3 * S, 3 * S, 3 * S]).reshape(3, 9)
        np.testing.assert_array_equal(offsets, begins * N * H)
        np.testing.assert_array_equal(offsets_k, begins * K * H)


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 24, 61])
def test_documents(length):
    rng = np.random.default_rng(length)
    count = documents_at_a_time(length)
    for most in (1, 3, length):
        ids = rng.integers(0, most, (5, length)).astype(np.int32)
        documents = documents_of(jnp.asarray(ids))
        for row in range(5):
            begins = [t for t in range(length) if t == 0 or ids[row, t] != ids[row, t - 1]]
            parts = [np.arange(e - b) for b, e in zip(begins, [*begins[1:], length], strict=True)]
            expected = np.repeat(np.arange(len(parts)), [*map(len, parts)])
            np.testing.assert_array_equal(documents.numbers[row], expected)
            np.testing.assert_array_equal(documents.positions[row], np.concatenate(parts))
            of_row = np.asarray(documents.begins[row])
            np.testing.assert_array_equal(of_row[: len(begins)], begins)
            assert (of_row[len(begins) :] == length).all()
            # `Documents.some` takes M + 1 entries from a multiple of M. No slice passes the end.
            assert len(of_row) % count == 1
        assert {a.dtype.name for a in documents} == {"int32"}


def test_documents_at_a_time():
    found = [documents_at_a_time(length) for length in (2, 4096, 8192, 2**19)]
    assert found == [8, 8, 16, 64]
