"""The attention of packed documents on meshes and under `jax.vmap`, and what its programs repeat.

A CPU has no cuDNN, so an emulation takes its place.
"""

import contextlib
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.kernels.documents import packed
from benchmarks.kernels.formulas import attention as masked
from models import packed_attention
from models.documents import buckets, documents_in_a_call, documents_of
from models.llama import Llama
from models.sharding import make_mesh
from pallas_kernels import auto_axes, choices
from support.emulated_cudnn import emulate
from support.numerics import assert_as_accurate, quick_jit, value_and_grads
from support.split_llama import changed, loss_and_gradients, packed_batch
from train.step import model_graph

B, S, N, K, H = 4, 32, 4, 2, 8
NAMES = ("out", "dq", "dk", "dv")


@pytest.fixture(autouse=True)
def no_cudnn_needed(monkeypatch):
    emulate(monkeypatch)


def segment_ids() -> np.ndarray:
    """Rows of 1 to 16 documents, in two buckets. The last one needs up to two calls."""
    ids = np.stack([np.arange(S) * number // S for number in (1, 3, 9, 16)]).astype(np.int32)
    assert buckets(S) == (32, 8) and np.max(ids) >= documents_in_a_call(1)
    return ids


def arrays(*leading: int) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    shapes = [(*leading, B, S, heads, H) for heads in (N, K, K, N)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def float64_of(fn, args, cotangent):
    with jax.enable_x64():
        args, cotangent = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (args, cotangent))
        return value_and_grads(fn, args, cotangent)


@pytest.mark.parametrize(
    "axes", [(), pytest.param(("data", "fsdp"), marks=pytest.mark.full), ("fsdp",)]
)
def test_each_device_reads_the_documents_of_its_own_rows(axes):
    """3 s each. The documents may be split otherwise than the rows, or not at all."""
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    split_over = lambda *axes: NamedSharding(mesh, PartitionSpec(axes))
    *qkv, dout = jax.device_put(arrays(), split_over("data", "fsdp"))
    ids = segment_ids()
    documents = jax.device_put(documents_of(jnp.asarray(ids)), split_over(*axes))

    def grads(qkv, dout, documents):
        of_qkv = lambda q, k, v: packed_attention.packed_attention(q, k, v, documents)
        return value_and_grads(of_qkv, qkv, dout)

    with jax.set_mesh(mesh):
        got = quick_jit(grads)(qkv, dout, documents)
    of_mask = lambda q, k, v: masked(q, k, v, ids)
    *qkv, dout = arrays()
    expected = float64_of(of_mask, qkv, dout)
    assert_as_accurate(got, value_and_grads(of_mask, qkv, dout), expected, names=NAMES)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_each_device_computes_its_own_heads(kind):
    """5 s each."""
    mesh = jax.make_mesh((2, 2), ("data", "heads"), (kind,) * 2, devices=jax.devices()[:4])
    ids = segment_ids()
    of_ids = lambda fn: lambda q, k, v: fn(q, k, v, jnp.asarray(ids))
    split = NamedSharding(mesh, PartitionSpec("data", None, "heads"))
    with jax.set_mesh(mesh):
        *qkv, dout = jax.device_put(arrays(), split)
        compiled = quick_jit(functools.partial(value_and_grads, of_ids(packed))).lower(qkv, dout)
        compiled = compiled.compile()
        got = compiled(qkv, dout)
    assert not re.search("all-gather|all-to-all", str(compiled.as_text()))
    assert all(a.sharding.is_equivalent_to(split, 4) for a in got)
    *qkv, dout = arrays()
    of_mask = of_ids(masked)
    expected = float64_of(of_mask, qkv, dout)
    assert_as_accurate(got, value_and_grads(of_mask, qkv, dout), expected, names=NAMES)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            AxisType.Auto,
            r"along the mesh axes \('heads.1',\) gather .* divides the number of kv_heads",
        ),
        (
            AxisType.Explicit,
            r"axes \('heads',\) split them over 4 devices, .* the 2 heads of keys;",
        ),
    ],
)
def test_heads_that_are_gathered_are_told_once(kind, message, caplog, monkeypatch):
    """Four devices split four heads of queries and two heads of keys. 2 s each."""
    monkeypatch.setattr(choices, "_logged", set())
    auto_axes._warn_of_idle_axes.cache_clear()
    mesh = jax.make_mesh((4,), ("heads",), (kind,), devices=jax.devices()[:4])
    heads = NamedSharding(mesh, PartitionSpec(None, None, "heads"))
    with jax.set_mesh(mesh):
        q, k, v, _ = (a[:1, :8] for a in arrays())
        q = jax.device_put(q, heads)
        attend = lambda q: packed(q, k, v, jnp.zeros((1, 8), jnp.int32))
        quick_jit(lambda q: attend(attend(q)))(q)
    (told,) = [record.message for record in caplog.records if "heads" in record.message]
    assert re.search(message, told)


IDS_OF_MEMBERS = np.stack(
    [segment_ids()[order] for order in ([0, 1, 2, 3], [3, 1, 0, 2], [1, 1, 1, 3])]
)


def of_members(fn):
    return lambda q, k, v: jax.vmap(fn)(q, k, v, IDS_OF_MEMBERS)


def assert_equals_members_with_a_mask(got):
    *qkv, dout = arrays(3)
    plain = value_and_grads(of_members(masked), qkv, dout)
    expected = float64_of(of_members(masked), qkv, dout)
    assert_as_accurate(got, plain, expected, names=NAMES)


@pytest.mark.parametrize(
    "context", ["none", pytest.param("one device", marks=pytest.mark.full), "shard_map"]
)
def test_members_of_vmap(context):
    """3 s each. XLA splits nothing on a mesh of one device, and inside of `jax.shard_map`."""
    *qkv, dout = arrays(3)
    attend = of_members(packed)
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    if context == "shard_map":
        mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
        rows = PartitionSpec(None, "fsdp")
        of_rows = lambda q, k, v, ids: jax.vmap(packed)(q, k, v, ids)
        split = jax.shard_map(of_rows, in_specs=rows, out_specs=rows)
        attend = lambda q, k, v: split(q, k, v, IDS_OF_MEMBERS)
    with contextlib.nullcontext() if context == "none" else jax.set_mesh(mesh):
        got = quick_jit(functools.partial(value_and_grads, attend))(qkv, dout)
    assert_equals_members_with_a_mask(got)


def test_gradients_of_members():
    """`jax.vmap` of the gradients. 3 s."""

    def gradients(q, k, v, dout, ids):
        return value_and_grads(lambda q, k, v: packed(q, k, v, ids), (q, k, v), dout)

    assert_equals_members_with_a_mask(quick_jit(jax.vmap(gradients))(*arrays(3), IDS_OF_MEMBERS))


def attentions(jaxpr) -> Counter[str]:
    """How often cuDNN is called, by the primitive."""
    found = Counter()
    for eqn in jaxpr.eqns:
        if "dot_product_attention" in (name := eqn.primitive.name):
            found[name.removeprefix("dot_product_attention_").removesuffix("_wrapper")] += 1
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=_is_jaxpr):
            found += attentions(getattr(value, "jaxpr", value)) if _is_jaxpr(value) else Counter()
    return found


def _is_jaxpr(value) -> bool:
    return hasattr(getattr(value, "jaxpr", value), "eqns")


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_backward_repeats_no_attention(tensor):
    """A layer calls cuDNN for the one bucket of a row and in the loop, forward and backward."""
    options = {"dtype": "bfloat16", "head_dim": 16, "attention_implementation": "cudnn"}
    config = changed(**options)
    params = nnx.eval_shape(lambda: nnx.state(Llama(config, rngs=nnx.Rngs(0)), nnx.Param))
    mesh = make_mesh(data=1, fsdp=2, tensor=tensor, devices=jax.devices()[: 2 * tensor])
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        step = functools.partial(loss_and_gradients, model_graph(config))
        jaxpr = jax.make_jaxpr(step)(params, packed_batch()).jaxpr
    assert attentions(jaxpr) == {"fwd": 2, "bwd": 2}


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"dtype": "float32", "head_dim": 16}, "takes bfloat16 and float16, not float32"),
        ({"dtype": "bfloat16", "head_dim": 10}, "takes heads of 8, 16, ... or 128 channels here"),
    ],
)
def test_what_cudnn_refuses_is_said_before_it_compiles(changes, reason):
    config = changed(attention_implementation="cudnn", **changes)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    batch = jax.tree.map(jnp.asarray, packed_batch())
    run = lambda model: model(batch["tokens"], segment_ids=batch["segment_ids"])
    with pytest.raises(NotImplementedError, match=reason):
        nnx.eval_shape(run, model)


def test_sums_that_cudnn_does_not_find():
    """The queries of all devices may be larger. The output is NaN if a device's are not known."""
    of = lambda heads: jax.ShapeDtypeStruct((3, 2**17, heads, 128), jnp.bfloat16)
    args = of(32), of(8), of(8), jax.ShapeDtypeStruct((3, 2**17), jnp.int32)
    mesh_of = lambda number: make_mesh(data=1, fsdp=number, devices=jax.devices()[:number])
    with jax.set_mesh(mesh_of(1)), pytest.raises(NotImplementedError, match="4831838208 sums need"):
        jax.eval_shape(packed, *args)
    with jax.set_mesh(mesh_of(2)):
        assert jax.eval_shape(packed, *args) == of(32)
    jaxpr = jax.make_jaxpr(packed)(*args).jaxpr
    assert not attentions(jaxpr) and "nan" in str(jaxpr)
    smaller = [jax.ShapeDtypeStruct((2, *a.shape[1:]), a.dtype) for a in args]
    num_buckets = len(buckets(2**17))
    assert attentions(jax.make_jaxpr(packed)(*smaller).jaxpr) == {"fwd": num_buckets + 1}
