"""Attention of rows of several documents, with cuDNN in plain JAX."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.kernels.documents import packed
from models import documents as module
from models import packed_attention
from models.sharding import make_mesh
from support.emulated_cudnn import emulate
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

N, K, H = 4, 2, 12
NAMES = ["out", "dq", "dk", "dv"]
# The length of the rows, the largest length at which there is no further bucket, and the buckets.
LENGTHS = {
    "one": (58, 1024, (58,)),
    "two": (64, 1024, (64, 16)),
    "three": (64, 4, (64, 16, 4)),
    # A row has 14 documents of 9 tokens, and the call of the second bucket has room for 12.
    "full": (128, 8, (128, 32, 8)),
}


def segment_ids(batch, length):
    """Rows of documents of every bucket."""

    def of_rest(number, *documents):
        """A row of documents `(number, length)`, and one with this number to its end."""
        numbers, sizes = zip(*documents, (number, length), strict=True)
        return np.repeat(numbers, sizes)[:length].astype(np.int32)

    rows = {
        "one": of_rest(0),
        "from 1, one token": of_rest(3, (1, 29), (2, 1)),
        "padding": of_rest(0, (1, 20), (2, 21)),
        "not in order": of_rest(2, (5, 2), (2, 2), (9, 20), (-1, 7), (5, 11)),
        "largest of a bucket": of_rest(4, (0, 16), (1, 17), (2, 4), (3, 5)),
        "nine": of_rest(8, *((i, 4) for i in range(8))),
        "19, and two numbers": of_rest(0, *((1 + i % 2, 3) for i in range(18))),
        "one token each": np.arange(length, dtype=np.int32),
        "nine tokens each": np.arange(length, dtype=np.int32) // 9,
    }
    return jnp.asarray(np.stack([rows[name] for name in BATCHES[batch]]))


BATCHES = {
    "few": ["one", "from 1, one token", "padding", "largest of a bucket", "not in order"],
    "many": ["one", "one token each", "19, and two numbers", "nine"],
    "nines": ["nine tokens each", "largest of a bucket"],
}


def numbers_of(ids):
    """The number of each token's document, in NumPy."""
    return np.cumsum(np.diff(ids, axis=-1, prepend=ids[..., :1]) != 0, axis=-1)


def inputs(shape, dtype=jnp.float32, more=()):
    """Queries, keys, values and a cotangent of rows `[B, S]`, rounded to `dtype`."""
    rng = np.random.default_rng(0)
    shapes = ((*more, *shape, heads, H) for heads in (N, K, K, N))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def formula(q, k, v, ids):
    """The attention with a mask. Logits and sums are float32 or wider."""
    wide = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    queries = q.reshape(*q.shape[:2], K, -1, H).astype(wide)
    logits = jnp.einsum("bskgh,btkh->bkgst", queries, k.astype(wide)) * H**-0.5
    is_new = jnp.diff(ids, axis=1, prepend=ids[:, :1]) != 0
    numbers = jnp.cumsum(is_new, axis=1, dtype=jnp.int32)
    mask = (numbers[:, :, None] == numbers[:, None]) & jnp.tri(q.shape[1], dtype=bool)
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
    "lengths, batch, dtype",
    [
        ("one", "few", "float32"),
        pytest.param("one", "many", "bfloat16", marks=pytest.mark.full),
        pytest.param("two", "few", "float32", marks=pytest.mark.full),
        pytest.param("two", "many", "float32", marks=pytest.mark.full),
        ("two", "many", "bfloat16"),
        ("three", "few", "bfloat16"),
        ("three", "many", "float32"),
        ("full", "nines", "float32"),
    ],
)
@pytest.mark.usefixtures("cudnn")
def test_equals_the_attention_with_a_mask(monkeypatch, lengths, batch, dtype):
    """3 s each."""
    length, last, _ = LENGTHS[lengths]
    monkeypatch.setattr(module, "_LAST", last)
    ids = segment_ids(batch, length)
    assert_equals_the_formula(inputs(ids.shape, dtype), ids)


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
    ids = segment_ids("many", 64)
    assert_equals_the_formula(inputs(ids.shape), ids, transform)


@pytest.mark.usefixtures("cudnn")
def test_members_that_share_documents_and_keys():
    """Members of members, where XLA partitions nothing. 2 s."""
    ids = segment_ids("many", 64)
    q, *_, cotangent = inputs(ids.shape, more=(2, 2))
    _, k, v, _ = inputs(ids.shape)
    twice = lambda fn: jax.vmap(jax.vmap(fn, (0, None, None, None)), (0, None, None, None))
    with jax.set_mesh(make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])):
        assert_equals_the_formula([q, k, v, cotangent], ids, twice)


@pytest.mark.usefixtures("cudnn")
def test_with_x64():
    """Numbers of documents keep 32 bits. 2 s."""
    ids = segment_ids("many", 64)
    with jax.enable_x64(True):
        assert_equals_the_formula(inputs(ids.shape), ids)


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_call_of_cudnn_gets_each_document_by_itself(monkeypatch, lengths):
    """The first element of each document in all rows, and the lengths."""
    length, last, buckets = LENGTHS[lengths]
    monkeypatch.setattr(module, "_LAST", last)
    found = []
    primitive = types.SimpleNamespace(bind=lambda *args, **options: found.append((args, options)))
    ids = segment_ids("nines" if lengths == "full" else "many", length)
    batch_size = len(ids)
    q, k, v, _ = inputs(ids.shape, jnp.bfloat16)
    documents = module.documents_of(ids)
    assert module.buckets(length) == buckets
    computed = []
    for bucket, largest in enumerate(buckets):
        calls = int(module.num_calls_of_last(documents)) if largest == buckets[-1] else 1
        for index in range(calls):
            part = module.part_of(documents, bucket, index)
            packed_attention._bind(primitive, part, largest, q, k, v)
            args, options = found.pop()
            assert options["mask_type"] == packed_attention.cudnn.MaskType.PADDING_CAUSAL
            assert options["scale"] == pytest.approx(H**-0.5)
            num_rows = batch_size * length // largest
            assert [a.shape for a in args[:3]] == [(num_rows, largest, n, H) for n in (N, K, K)]
            sizes, sizes_k, offsets, offsets_k = map(np.asarray, args[4:8])
            assert sizes.shape == (num_rows, 3) and offsets.shape == (num_rows, 4)
            np.testing.assert_array_equal(sizes_k, sizes)
            np.testing.assert_array_equal(offsets_k * N, offsets * K)
            # The documents of all rows come first, in order, and then the ends of the arrays.
            begins, ends = np.split(offsets.reshape(-1) // (N * H), [sizes.size])
            np.testing.assert_array_equal(ends, batch_size * length)
            of_call = list(zip(begins, sizes.reshape(-1), strict=True))
            assert all(b % length == 0 for b, size in of_call if size == 0)  # the end of a row
            of_call = [(b, size) for b, size in of_call if size]
            assert all(size <= largest for _, size in of_call)
            is_computed = np.zeros((batch_size * length,), bool)
            for b, size in of_call:
                is_computed[b : b + size] = True
            np.testing.assert_array_equal(part.is_here.reshape(-1), is_computed)
            computed += of_call
    numbers = np.asarray(numbers_of(np.asarray(ids)) + length * np.arange(batch_size)[:, None])
    _, begins, sizes = np.unique(numbers, return_index=True, return_counts=True)
    assert sorted(computed) == list(zip(begins, sizes, strict=True))


@pytest.mark.parametrize(
    "length, last",
    [*((length, 1024) for length in (1, 2, 7, 8, 24, 61, 64)), (128, 8), (512, 8), (256, 1)],
)
def test_documents(monkeypatch, length, last):
    """Up to 1 s each."""
    monkeypatch.setattr(module, "_LAST", last)
    rng = np.random.default_rng(length)
    rows = [rng.integers(0, most, length) for most in (1, 2, 3, length) for _ in range(2)]
    # As many documents as there can be that are longer than those of a bucket.
    all_largest = (*module.buckets(length), 0)
    rows += [np.arange(length) // (largest + 1) for largest in all_largest[1:]]
    ids = np.stack(rows).astype(np.int32)
    documents = module.documents_of(jnp.asarray(ids))
    assert {a.dtype.name for a in jax.tree.leaves(documents)} == {"int32"}
    documents = jax.tree.map(np.asarray, documents)
    for row in range(len(ids)):
        begins = [t for t in range(length) if t == 0 or ids[row, t] != ids[row, t - 1]]
        sizes = np.diff([*begins, length])
        positions = np.concatenate([np.arange(size) for size in sizes])
        np.testing.assert_array_equal(documents.positions[row], positions)
        found, first = [], 0
        for bucket, largest in enumerate(module.buckets(length)):
            is_last = bucket + 1 == len(module.buckets(length))
            room = module.documents_in_a_call(bucket)
            of_bucket, sizes_here = (
                a[row, first : None if is_last else first + room]
                for a in (documents.begins, documents.lengths)
            )
            here = of_bucket[of_bucket < length]
            np.testing.assert_array_equal(of_bucket[: len(here)], np.sort(here))
            assert len(of_bucket) % room == 0
            assert (sizes_here[len(here) :] == 0).all()
            sizes_here = sizes_here[: len(here)]
            np.testing.assert_array_equal(sizes_here, sizes[np.searchsorted(begins, here)])
            assert (sizes_here <= largest).all()
            if not is_last and len(here) < room:
                assert (documents.begins[row, first + room :] == length).all()
            places = np.repeat(first + np.arange(len(here)), sizes_here)
            is_here = np.isin(np.repeat(begins, sizes), here)
            np.testing.assert_array_equal(documents.places[row, is_here], places)
            found, first = [*found, *here], first + room
        assert sorted(found) == begins


def test_buckets():
    found = [module.buckets(length) for length in (2, 1000, 1024, 4096, 8192, 542720)]
    assert found == [
        (2,),
        (1000, 250),
        (1024, 256),
        (4096, 1024),
        (8192, 2048, 512),
        (542720, 135680, 33920, 8480, 2120, 530),
    ]
