"""Attention of documents as an operation on one device, and what it refuses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import document_attention, document_bounds
from pallas_kernels.attention import AttentionConfig, Bounds, mosaic_gpu
from pallas_kernels.attention.api import choose_attention
from pallas_kernels.choices import Choice
from pallas_kernels.gpu.device import Device
from support.attention_formulas import (
    emulate,
    exact_value_and_gradients,
    rounded_value_and_gradients,
)
from support.jaxprs import equations
from support.numerics import assert_as_accurate, quick_jit, rounded, value_and_grads

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
B, S, N, K, H = 1, 24, 2, 1, 64
IDS = jnp.asarray([[3] * 5 + [1] + [7] * 12 + [3] * 6], jnp.int32)
BOUNDS = document_bounds(IDS)
NAMES = ["out", "dq", "dk", "dv"]
of_kernels = functools.partial(document_attention, implementation="mosaic_gpu")


def test_bounds():
    begins, ends = document_bounds(jnp.asarray([[4, 4, 9, 4, 4, 4], [0, 1, 1, 1, 1, 2]], jnp.int32))
    np.testing.assert_array_equal(begins, [[0, 0, 2, 3, 3, 3], [0, 1, 1, 1, 1, 5]])
    np.testing.assert_array_equal(ends, [[2, 2, 3, 6, 6, 6], [1, 5, 5, 5, 5, 6]])
    assert begins.dtype == ends.dtype == jnp.int32


@pytest.mark.parametrize("window", [1, 3, 6, 2**40])
def test_bounds_of_a_window(window):
    """Token t attends to token j by `begins` just if it does so by `ends`."""
    begins, ends = document_bounds(IDS, window=window)
    token = np.arange(S)
    ahead, ids = token[:, None] - token, np.asarray(IDS[0])
    numbers = np.cumsum(np.diff(ids, prepend=ids[0]) != 0)  # documents that share an id are two
    seen = (0 <= ahead) & (ahead < window) & (numbers[:, None] == numbers)
    causal = ahead >= 0
    np.testing.assert_array_equal(causal & (np.asarray(begins).T <= token), seen)
    np.testing.assert_array_equal(causal & (token[:, None] < np.asarray(ends)), seen)


@pytest.mark.parametrize(
    ("window", "error", "message"),
    [
        (0, ValueError, "window=0 must be at least 1; None is no limit"),
        (2.5, TypeError, "window must be an integer, got 2.5; None is no limit"),
        (True, TypeError, "window must be an integer, got True"),
    ],
)
def test_windows_are_positive_integers(unchecked_shapes, window, error, message):
    with pytest.raises(error, match=message):
        document_bounds(IDS, window=window)


@pytest.mark.parametrize(
    ("ids", "error", "message"),
    [
        ([[1, 2]], TypeError, "segment_ids must be an array, got a list; make it a jax.Array"),
        (np.full((1, 4), np.nan), TypeError, "segment_ids is float64, not of integers; cast it"),
        (np.zeros(4, np.int32), ValueError, r"segment_ids must be \[B, S\], got \(4,\)"),
    ],
    ids=["list", "float64", "one axis"],
)
def test_bounds_refuse(unchecked_shapes, ids, error, message):
    with pytest.raises(error, match=message):
        document_bounds(ids)


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
def test_bounds_of_any_integers(unchecked_shapes, dtype):
    """Numbers of 64 bits in NumPy, which differ in their upper half alone, are two documents."""
    ids = np.asarray([[0, 0, 1, 1]], dtype)
    ids = ids << 32 if dtype == np.int64 else ids
    np.testing.assert_array_equal(document_bounds(ids).begins, [[0, 0, 2, 2]])


def arrays(*leading: int, dtypes=(BF16,) * 4, head_size=H, heads=(N, K)) -> list[jax.Array]:
    """Queries, keys, values and a cotangent."""
    rng = np.random.default_rng(0)
    num_heads = (heads[i] for i in (0, 1, 1, 0))
    shapes = [(*leading, B, S, n, head_size) for n in num_heads]
    normal = lambda shape, dtype: jnp.asarray(rng.normal(size=shape), dtype)
    return [normal(*each) for each in zip(shapes, dtypes, strict=True)]


def assert_equals_the_formula(got, args, *, scale, names=NAMES, bounds=BOUNDS):
    plain = quick_jit(functools.partial(rounded_value_and_gradients, scale=scale))(args, bounds)
    exact = exact_value_and_gradients(args, bounds, scale=scale)
    which = [NAMES.index(name) for name in names]
    assert [a.dtype for a in got] == [plain[i].dtype for i in which]
    assert_as_accurate(got, [plain[i] for i in which], [exact[i] for i in which], names=names)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("head_size", "dtype", "heads", "scale"), [(40, F16, (4, 2), 0.3), (96, BF16, (2, 1), None)]
)
def test_heads_of_any_size(head_size, dtype, heads, scale):
    """The kernels compute them with zeros up to 64 or 128. 3 s each."""
    *args, dout = arrays(dtypes=(dtype,) * 4, head_size=head_size, heads=heads)
    attend = lambda q, k, v: of_kernels(q, k, v, BOUNDS, scale=scale)
    got = value_and_grads(attend, args, dout)
    assert_equals_the_formula(got, (*args, dout), scale=scale or head_size**-0.5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "reference"])
def test_rows_of_one_document_have_no_bounds(implementation):
    """3 s."""
    *args, dout = arrays(heads=(4, 2))
    attend = lambda q, k, v: document_attention(q, k, v, None, implementation=implementation)
    got = value_and_grads(attend, args, dout)
    bounds = document_bounds(jnp.zeros((B, S), jnp.int32))
    assert_equals_the_formula(got, (*args, dout), scale=H**-0.5, bounds=bounds)


@pytest.mark.usefixtures("interpreted")
def test_members_of_vmap():
    """Two members, each with gradients of its own, in one call. 4 s."""
    *args, dout = arrays(2)
    attend = jax.vmap(lambda q, k, v: of_kernels(q, k, v, BOUNDS))
    got = value_and_grads(attend, args, dout)
    for i in range(2):
        of_member = [a[i] for a in (*args, dout)]
        assert_equals_the_formula([a[i] for a in got], of_member, scale=H**-0.5)


def test_members_with_too_many_rows_are_an_error():
    """The blocks of an axis of the grid have numbers of 16 bits."""
    of = lambda heads: jax.ShapeDtypeStruct((70000, 1, 8, heads, H), jnp.bfloat16)
    bounds = document_bounds(jnp.zeros((1, 8), jnp.int32))
    attend = functools.partial(document_attention, implementation="mosaic_gpu")
    of_member = jax.vmap(lambda q, k, v: attend(q, k, v, bounds))
    with pytest.raises(NotImplementedError, match="have 70000 rows together"):
        jax.eval_shape(of_member, of(N), of(K), of(K))


@pytest.mark.usefixtures("interpreted")
def test_a_gradient_of_keys_alone():
    """2 s."""
    q, k, v, dout = arrays()
    _, vjp = jax.vjp(lambda k: of_kernels(q, k, v, BOUNDS), k)
    assert_equals_the_formula(vjp(dout), (q, k, v, dout), scale=H**-0.5, names=["dk"])


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("dtypes", [(F32,) * 4, (BF16, F32, F16, BF16)], ids=["float32", "mixed"])
def test_the_reference_rounds_its_results_once(implementation, dtypes):
    """In float32 inside, whatever the dtypes are."""
    *args, dout = arrays(dtypes=dtypes, head_size=12)
    options = {"implementation": implementation, "scale": 0.4}
    attend = lambda q, k, v: document_attention(q, k, v, BOUNDS, **options)
    got = quick_jit(functools.partial(value_and_grads, attend))(args, dout)
    assert [a.dtype for a in got] == [dtypes[0], *dtypes[:3]]
    exact = exact_value_and_gradients((*args, dout), BOUNDS, scale=0.4)
    assert_as_accurate(got, rounded(exact, got), exact, names=NAMES)


def test_a_caller_and_the_backward_keep_one_output(monkeypatch, fresh_operations):
    """The caller multiplies the output by a matrix, whose gradient reads the output, too."""
    emulate(monkeypatch)
    *args, _ = arrays()
    weight = jnp.zeros((N, H, 3), BF16)
    project = lambda w, q, k, v: jnp.einsum("bsnh,nhd->bsd", of_kernels(q, k, v, BOUNDS), w)
    kept = jax.tree.leaves(jax.eval_shape(lambda *a: jax.vjp(project, *a)[1], weight, *args))
    of_queries = [a for a in kept if a.size == args[0].size and a.dtype == BF16]
    assert len(of_queries) == 2  # the queries and the output


@pytest.mark.parametrize(("kept", "forwards"), [(("context",), 1), ((), 2)])
def test_a_checkpoint_that_keeps_the_context_does_not_run_the_forward_again(kept, forwards):
    """The interpreter does not run in a checkpoint, so the test counts the operations."""
    policy = jax.checkpoint_policies.save_only_these_names(*kept)

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(q, k, v):
        return jnp.sum(of_kernels(jnp.sin(q), k, v, BOUNDS).astype(jnp.float32) ** 2)

    arrays = [jax.ShapeDtypeStruct((B, S, heads, H), BF16) for heads in (N, K, K)]
    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2)))(*arrays).jaxpr
    names = [e.primitive.name for e in equations(program)]
    assert (names.count("operation"), names.count("operation_backward")) == (forwards, 1)


def test_export_with_symbolic_sizes():
    """Plain JAX takes any number of rows and tokens."""
    *args, _ = arrays(heads=(4, 2), head_size=16)
    sizes = [f"b, s, {', '.join(map(str, a.shape[2:]))}" for a in args]
    specs = jax.export.symbolic_args_specs([*args, IDS], [*sizes, "b, s"])
    attend = jax.jit(lambda q, k, v, ids: document_attention(q, k, v, document_bounds(ids)))
    got = jax.export.export(attend)(*specs).call(*args, IDS)
    exact = exact_value_and_gradients((*args, args[0]), BOUNDS, scale=0.25)
    assert_as_accurate([got], rounded(exact[:1], [got]), exact[:1], names=["out"])


@pytest.mark.parametrize("implementation", [None, "mosaic_gpu"])
@pytest.mark.parametrize("shape", [(0, 8, 2, 1), (1, 0, 2, 1), (1, 8, 0, 1)], ids=str)
def test_empty_arrays(implementation, shape):
    batch_size, length, num_heads, num_kv_heads = shape
    q = jnp.zeros((batch_size, length, num_heads, H), BF16)
    k = jnp.ones((batch_size, length, num_kv_heads, H), BF16)
    bounds = document_bounds(jnp.zeros((batch_size, length), jnp.int32))
    attend = lambda q, k, v: document_attention(q, k, v, bounds, implementation=implementation)
    out, *gradients = jax.jit(functools.partial(value_and_grads, attend))((q, k, k), q)
    assert out.shape == q.shape and out.dtype == BF16
    assert [g.shape for g in gradients] == [q.shape, k.shape, k.shape]
    assert not any(np.any(g) for g in gradients)


# What it refuses, and what it chooses.

KEYS, QUERIES = jnp.zeros((1, 8, 2, 16), BF16), jnp.zeros((1, 8, 4, 16), BF16)
ROW = Bounds(jnp.zeros((1, 8), jnp.int32), jnp.full((1, 8), 8, jnp.int32))
WITHOUT_NUMBERS = {"q": QUERIES[..., :0], "k": KEYS[..., :0], "v": KEYS[..., :0]}
IN_FLOAT32 = {"q": QUERIES.astype(F32), "k": KEYS.astype(F32), "v": KEYS.astype(F32)}
OF_KEYS = r"k and v must be \[B, S, K, H\] for q \(1, 8, 4, 16\), where K divides N = 4, got "


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": QUERIES[0]}, ValueError, r"q must be \[B, S, N, H\], got \(8, 4, 16\)"),
        (WITHOUT_NUMBERS, ValueError, r"q must be \[B, S, N, H\], got \(1, 8, 4, 0\)"),
        ({"k": KEYS[:, :7]}, ValueError, OF_KEYS + r"\(1, 7, 2, 16\) and \(1, 8, 2, 16\)"),
        ({"v": KEYS[..., :8]}, ValueError, OF_KEYS + r"\(1, 8, 2, 16\) and \(1, 8, 2, 8\)"),
        ({"k": QUERIES[:, :, :3], "v": QUERIES[:, :, :3]}, ValueError, OF_KEYS),
        ({"k": KEYS[:, :, :0], "v": KEYS[:, :, :0]}, ValueError, OF_KEYS),
        ({"bounds": tuple(ROW)}, TypeError, "returns, or None for rows of one document, got tuple"),
        (
            {"bounds": ROW._replace(begins=ROW.begins[0])},
            ValueError,
            r"bounds.begins must be int32 \(1, 8\), got int32 \(8,\)",
        ),
        (
            {"bounds": ROW._replace(ends=ROW.ends.astype(F32))},
            ValueError,
            r"bounds.ends must be int32 \(1, 8\), got float32",
        ),
        ({"q": QUERIES.astype(jnp.int32)}, TypeError, "q is int32, not a floating dtype"),
        ({"k": KEYS.astype(jnp.float8_e4m3fn)}, TypeError, "of less than 16 bits; cast k to bf"),
        ({"v": [1.0]}, TypeError, "v must be an array, got a list"),
        ({"scale": 0}, ValueError, "scale=0 must be above 0; None is 1 / √H"),
        ({"scale": -0.5}, ValueError, "scale=-0.5 must be above 0; None is 1 / √H"),
        ({"scale": np.nan}, ValueError, "scale=nan must be above 0; None is 1 / √H"),
        ({"scale": np.inf}, ValueError, "scale=inf must be a finite number"),
        (
            {"scale": 1e39},
            ValueError,
            r"scale=1e\+39 must be .* to 3.4e\+38, because .* float32; N",
        ),
        (
            {"scale": 1e-46},
            ValueError,
            "scale=1e-46 must be 0 or have a magnitude from 1.18e-38 to",
        ),
        ({"scale": "1"}, TypeError, "scale must be a number, got '1'"),
        ({"scale": np.ones(1)}, TypeError, r"scale must be a number, got array\(\[1.\]\); None"),
        ({"implementation": "cudnn"}, ValueError, "'cudnn' must be None or one of"),
        ({"config": {}}, TypeError, r"must be a pallas_kernels\S+\.AttentionConfig, or None"),
        ({"config": AttentionConfig()}, ValueError, "it runs because the device is 'cpu'"),
        (
            {"config": AttentionConfig(), "implementation": "reference"},
            ValueError,
            "'reference' has no launch parameters; leave config=None",
        ),
        (
            IN_FLOAT32 | {"implementation": "mosaic_gpu"},
            NotImplementedError,
            "'mosaic_gpu': q, k and v are float32, float32, float32; the kernels take bfloat16",
        ),
        ({"implementation": "require"}, NotImplementedError, "required by .* device is 'cpu'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refuses(unchecked_shapes, change, error, message):
    args = {"q": QUERIES, "k": KEYS, "v": KEYS, "bounds": ROW} | change
    positional = [args.pop(name) for name in ("q", "k", "v", "bounds")]
    with pytest.raises(error, match=message):
        document_attention(*positional, **args)


@pytest.mark.parametrize("as_type", [np.float32, np.asarray, jnp.asarray])
def test_a_scale_is_a_number_or_an_array_without_axes(unchecked_shapes, as_type):
    q, k, v, _ = arrays()
    got = document_attention(q, k, v, BOUNDS, scale=as_type(0.25))
    np.testing.assert_array_equal(got, document_attention(q, k, v, BOUNDS, scale=0.25))


def test_a_traced_scale_is_refused(unchecked_shapes):
    attend = lambda scale: document_attention(QUERIES, KEYS, KEYS, ROW, scale=scale)
    with pytest.raises(TypeError, match=r"got a traced array, .* static .*; None is 1 / √H"):
        jax.eval_shape(attend, 0.25)


def symbolic(names: str) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Queries, keys, values and ids with the sizes B, S, N, K, H, some of which are symbols."""
    b, s, n, k, h = jax.export.symbolic_shape(names)
    array = lambda *shape: jax.ShapeDtypeStruct(shape, F32)
    of_keys = array(b, s, k, h)
    return array(b, s, n, h), of_keys, of_keys, jax.ShapeDtypeStruct((b, s), jnp.int32)


def of_ids(q, k, v, ids):
    return document_attention(q, k, v, document_bounds(ids))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("1, 8, n, 2, 16", r"q \(1, 8, n, 16\) has a symbolic size, N = n; only B and S may be"),
        (
            "1, 8, 4, k, 16",
            r"k \(1, 8, k, 16\) has a symbolic size, K = k; .* export with a number",
        ),
        ("b, 8, 4, 2, h", r"q \(b, 8, 4, h\) has a symbolic size, H = h"),
    ],
)
def test_sizes_of_heads_are_no_symbols(names, message):
    with pytest.raises(NotImplementedError, match=message):
        jax.export.export(jax.jit(of_ids))(*symbolic(names))


def test_no_forward_mode_and_no_second_derivative(monkeypatch, fresh_operations):
    emulate(monkeypatch)
    attend = lambda q: of_kernels(q, KEYS, KEYS, ROW)
    loss = lambda q: jnp.sum(attend(q).astype(F32))
    message = "document_attention has a gradient rule of its own, so it has no forward mode"
    with pytest.raises(NotImplementedError, match=message):
        jax.jvp(attend, (QUERIES,), (QUERIES,))
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(jax.grad(lambda q: loss(jax.grad(loss)(q))), QUERIES)


def chosen(shape=(1, 8, 4, 128), dtype=BF16, keys=None):
    def choose(q, k):
        found.append(choose_attention(q, k, k))
        return q

    found = []
    k = jax.ShapeDtypeStruct((*shape[:2], 2, shape[3]), keys or dtype)
    jax.eval_shape(choose, jax.ShapeDtypeStruct(shape, dtype), k)
    return found[0]


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({}, None),
        ({"dtype": F16, "shape": (65535, 8, 2, 1)}, None),
        ({"dtype": F32}, "q, k and v are float32, float32, float32; the kernels take bfloat16 or"),
        ({"keys": F16}, "q, k and v are bfloat16, float16, float16; the kernels take bfloat16 or"),
        ({"shape": (1, 8, 4, 129)}, "heads have 129 numbers; the kernels take up to 128"),
        ({"shape": (1, 12, 4, 64)}, "rows have 12 tokens; pad them to a multiple of 8"),
        ({"shape": (65536, 8, 2, 8)}, "there are 65536 rows; the kernels take up to 65535"),
        ({"shape": (1, 4194240, 4, 8)}, None),
        (
            {"shape": (1, 4194248, 4, 8)},
            "rows have 4194248 tokens; where 2 heads of queries share a head of keys, the kernels "
            "take up to 4194240",
        ),
    ],
    ids=str,
)
def test_what_the_kernels_take(on_h100, arrays, reason):
    implementation, found = chosen(**arrays)
    assert implementation == ("mosaic_gpu" if reason is None else "reference")
    assert found is None if reason is None else found is not None and found.startswith(reason)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)], ids=str)
def test_kernels_are_for_hopper(on_h100, monkeypatch, capability):
    monkeypatch.setattr(mosaic_gpu, "target_device", lambda: Device("a GPU", capability, 132))
    reason = f"wgmma needs compute capability (9, x), a GPU has {capability}"
    assert chosen() == ("reference", reason)


def test_explain_lists_it(on_h100):
    attend = lambda q, k, ids: document_attention(q, k, k, document_bounds(ids))
    (choice,) = pallas_kernels.explain(attend, QUERIES, KEYS, ROW.begins).choices
    arrays = ("bfloat16[1,8,4,16]", "bfloat16[1,8,2,16]", "bfloat16[1,8,2,16]")
    assert choice == Choice("document_attention", arrays, "mosaic_gpu", None)
    text = str(pallas_kernels.explain(attend, *(a[:, :7] for a in (QUERIES, KEYS, ROW.begins))))
    assert "reference; rows have 7 tokens; pad them to a multiple of 8" in text
