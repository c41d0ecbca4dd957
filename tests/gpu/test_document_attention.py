"""The kernels of attention of documents, against float32 and cuDNN with a mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.kernels import documents, formulas
from benchmarks.kernels.documents import by_kernels
from pallas_kernels.gpu.device import target_device
from support.numerics import assert_as_accurate, value_and_grads
from support.on_gpu import as_float64, large

pytestmark = pytest.mark.gpu
NAMES = ["out", "dq", "dk", "dv"]
UNEVEN, LARGE, PADDED = (3, 1000, 8, 2, 64), (2, 4096, 8, 8, 128), (1, 2048, 4, 2, 96)
SHORT, SHORTEST, LONG = (3, 64, 4, 2, 64), (2, 8, 4, 2, 64), (1, 16384, 8, 2, 64)


@pytest.fixture(autouse=True)
def hopper():
    if target_device().capability != (9, 0):
        pytest.skip("the kernels are for Hopper")


def inputs(shape, num_documents, dtype):
    """Queries, keys, values, a cotangent, and rows of so many documents and of one."""
    batch_size, length, num_heads, num_kv_heads, head_dim = shape
    rng = np.random.default_rng(0)
    heads = (num_heads, num_kv_heads, num_kv_heads, num_heads)
    arrays = [jnp.asarray(rng.normal(size=(batch_size, length, n, head_dim)), dtype) for n in heads]
    ids = documents.random_segment_ids(jax.random.key(1), batch_size, length, num_documents)
    return arrays, ids.at[1:2].set(0)


def computed(fn, arrays, ids, *, jit=jax.jit):
    *arrays, cotangent = arrays
    # JAX's attention with a mask does not lower in 16 bits under strict promotion.
    with jax.numpy_dtype_promotion("strict" if fn is by_kernels else "standard"):
        of_arrays = lambda *arrays: value_and_grads(lambda *a: fn(*a, ids), arrays, cotangent)
        return as_float64(jit(of_arrays)(*arrays))


def exact_of(arrays, ids):
    return computed(formulas.attention, [a.astype(jnp.float32) for a in arrays], ids)


@pytest.mark.parametrize(
    "shape, num_documents, dtype",
    [
        *((UNEVEN, number, dtype) for number in (1, 5, 40) for dtype in ("bfloat16", "float16")),
        (LARGE, 7, "bfloat16"),
        (LARGE, 60, "bfloat16"),
        (LARGE, 60, "float16"),
        (PADDED, 20, "bfloat16"),
        (SHORT, 9, "bfloat16"),
        (SHORTEST, 3, "bfloat16"),
        (LONG, 12, "bfloat16"),
    ],
)
def test_as_accurate_as_with_a_mask(shape, num_documents, dtype):
    arrays, ids = inputs(shape, num_documents, dtype)
    got, masked = (computed(fn, arrays, ids) for fn in (by_kernels, documents.masked))
    assert_as_accurate(got, masked, exact_of(arrays, ids), names=NAMES)


@pytest.mark.parametrize("shape", [UNEVEN, (2, 4096, 14, 2, 64), (1, 4096, 8, 8, 128)], ids=str)
@pytest.mark.parametrize("window", [1, 100, 1000])
def test_windows(shape, window):
    """In rows of five documents and, where there are several rows, of one."""
    arrays, ids = inputs(shape, 5, "bfloat16")

    def with_mask(q, k, v, ids):
        distance = jnp.arange(shape[1])[:, None] - jnp.arange(shape[1])
        mask = (ids[:, :, None] == ids[:, None]) & (distance < window)
        of_jax = jax.nn.dot_product_attention
        return of_jax(q, k, v, mask=mask[:, None], is_causal=True, implementation="cudnn")

    ours = lambda *a: by_kernels(*a, window=window)
    exactly = lambda *a: formulas.attention(*a, window=window)
    of = lambda fn, arrays: as_float64(
        jax.jit(lambda *qkv: value_and_grads(lambda *a: fn(*a, ids), qkv, arrays[3]))(*arrays[:3])
    )
    with jax.numpy_dtype_promotion("standard"):
        masked = of(with_mask, arrays)
    exact = of(exactly, [a.astype(jnp.float32) for a in arrays])
    assert_as_accurate(of(ours, arrays), masked, exact, names=NAMES)


@pytest.mark.parametrize(
    "shape",
    [UNEVEN, (2, 4104, 14, 2, 64), (1, 4096, 16, 2, 128), (2, 2048, 16, 16, 128), PADDED],
    ids=str,
)
def test_rows_of_one_document(shape):
    """Without bounds. In some shapes blocks share the heads that have the same keys."""
    arrays, ids = inputs(shape, 1, "bfloat16")
    without_bounds = lambda *qkv: value_and_grads(by_kernels, qkv, arrays[3])
    got = as_float64(jax.jit(without_bounds)(*arrays[:3]))
    masked = computed(documents.masked, arrays, ids)
    assert_as_accurate(got, masked, exact_of(arrays, ids), names=NAMES)


@pytest.mark.parametrize("length", [136, 4104])
@pytest.mark.parametrize("head_size", [64, 128])
def test_equal_calls_have_equal_results(length, head_size):
    """A race would show in some of 50 calls. The last block of a row has 8 tokens."""
    arrays, ids = inputs((2, length, 4, 2, head_size), 5, "bfloat16")
    *arrays, cotangent = arrays
    attend = lambda q, k, v: by_kernels(q, k, v, ids)
    run = jax.jit(lambda *a: value_and_grads(attend, a, cotangent))
    first = run(*arrays)
    for _ in range(50):
        assert all((a == b).all() for a, b in zip(run(*arrays), first, strict=True))


def test_documents_of_one_token():
    """500 of them before a longer one."""
    arrays, _ = inputs(UNEVEN, 1, "bfloat16")
    ids = jnp.tile(jnp.minimum(jnp.arange(1000, dtype=jnp.int32), 500), (3, 1))
    got, masked = (computed(fn, arrays, ids) for fn in (by_kernels, documents.masked))
    assert_as_accurate(got, masked, exact_of(arrays, ids), names=NAMES)


@large
def test_more_elements_than_31_bits_count():
    """Queries of 2.2 · 10⁹ elements; the last documents are compared."""
    num_documents, size, num_compared = 1400, 384, 170
    shape = (1, num_documents * size, 32, 8, 128)
    *arrays, _ = documents.arrays_of(shape, 1).values()
    of_documents = jnp.repeat(jnp.arange(num_documents, dtype=jnp.int32), size)[None]

    def run(q, k, v, cotangent):
        attend = lambda q, k, v: by_kernels(q, k, v, of_documents)
        return value_and_grads(attend, (q, k, v), cotangent)

    def last(a):
        """The last documents and an eighth of the heads, with a row for each document."""
        num_heads = a.shape[2] // 8
        return a[:, -num_compared * size :, -num_heads:].reshape(-1, size, num_heads, a.shape[3])

    got = as_float64([*map(last, jax.jit(run)(*arrays))])
    rows = [*map(last, arrays)]
    ids = jnp.zeros((num_compared, size), jnp.int32)
    plain, exact = computed(documents.masked, rows, ids), exact_of(rows, ids)
    assert_as_accurate(got, plain, exact, names=NAMES)


def test_without_jit():
    arrays, ids = inputs(UNEVEN, 20, "bfloat16")
    got = computed(by_kernels, arrays, ids, jit=lambda fn: fn)
    assert_as_accurate(got, computed(by_kernels, arrays, ids), exact_of(arrays, ids), names=NAMES)


def test_members_of_vmap():
    """Two members of different numbers of documents."""
    several, ids = inputs(UNEVEN, 20, "bfloat16")
    members = [jnp.stack([a, a[::-1]]) for a in several]
    all_ids = jnp.stack([ids, inputs(UNEVEN, 3, "bfloat16")[1]])
    *arrays, cotangent = members
    of_members = lambda q, k, v: jax.vmap(by_kernels)(q, k, v, all_ids)
    of_arrays = lambda *arrays: value_and_grads(of_members, arrays, cotangent)
    got = as_float64(jax.jit(of_arrays)(*arrays))
    for i in range(2):
        of_member, ids = [a[i] for a in members], all_ids[i]
        plain, exact = computed(by_kernels, of_member, ids), exact_of(of_member, ids)
        assert_as_accurate([a[i] for a in got], plain, exact, names=NAMES)


@pytest.mark.gpus
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data")], ids=["rows", "heads"])
def test_two_gpus(spec):
    if jax.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    arrays, ids = inputs((4, 1000, 8, 2, 64), 20, "bfloat16")
    split = [jax.device_put(a, NamedSharding(mesh, spec)) for a in arrays]
    of_ids = jax.device_put(ids, NamedSharding(mesh, P(spec[0])))
    got = computed(by_kernels, split, of_ids)
    masked, exact = computed(documents.masked, arrays, ids), exact_of(arrays, ids)
    assert_as_accurate(got, masked, exact, names=NAMES)
