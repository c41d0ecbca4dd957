"""Attention of documents on meshes and under `jax.vmap`, with plain JAX in the kernels' place.

The tests take 15 s together.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import document_attention, document_bounds
from pallas_kernels.attention.reference import attention_reference
from pallas_kernels.implementation import Implementation
from support.attention_formulas import emulate, exact_value_and_gradients
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

B, S, N, K, H, MEMBERS = 4, 32, 4, 2, 8, 2
SCALE = H**-0.5
NAMES = ("out", "dq", "dk", "dv")
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=str)

pytestmark = pytest.mark.skipif(
    jax.default_backend() == "gpu", reason="runs no kernel, and needs several devices"
)


@pytest.fixture(autouse=True)
def no_kernels_needed(monkeypatch, fresh_operations):
    emulate(monkeypatch)


def segment_ids() -> np.ndarray:
    """Rows of 1 to 16 documents."""
    return np.stack([np.arange(S) * number // S for number in (1, 3, 9, 16)]).astype(np.int32)


IDS_OF_MEMBERS = np.stack([segment_ids(), segment_ids()[::-1]])


def arrays(*leading: int) -> list[jax.Array]:
    """Queries, keys, values and a cotangent."""
    rng = np.random.default_rng(0)
    shapes = [(*leading, B, S, heads, H) for heads in (N, K, K, N)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def attend(q, k, v, ids, implementation: Implementation = "mosaic_gpu"):
    return document_attention(q, k, v, document_bounds(ids), implementation=implementation)


def reference(q, k, v, ids):
    return attention_reference(q, k, v, document_bounds(ids).begins, scale=SCALE)[0]


def gradients(q, k, v, dout, ids, fn=attend):
    return value_and_grads(lambda *qkv: fn(*qkv, ids), (q, k, v), dout)


@functools.cache
def expected(*leading: int):
    """The output and the gradients by the reference, in float32 and in float64."""
    ids = (IDS_OF_MEMBERS if leading else segment_ids()).reshape(-1, S)
    args = [a.reshape(-1, *a.shape[-3:]) for a in arrays(*leading)]
    in_float32 = quick_jit(functools.partial(gradients, fn=reference))(*args, ids)
    bounds = document_bounds(jnp.asarray(ids))
    both = in_float32, exact_value_and_gradients(args, bounds, scale=SCALE)
    shape_of = lambda a: (*leading, B, *a.shape[1:])
    return [[np.asarray(a).reshape(shape_of(a)) for a in of_one] for of_one in both]


def assert_as_expected(got, *leading: int):
    assert_as_accurate(got, *expected(*leading), names=NAMES)


def mesh_of(kind, **sizes: int):
    num_devices = int(np.prod([*sizes.values()]))
    kinds = (kind,) * len(sizes)
    return jax.make_mesh((*sizes.values(),), (*sizes,), kinds, devices=jax.devices()[:num_devices])


def on_mesh(mesh, spec, ids, fn=gradients, leading=()):
    """Results of `fn` for arrays that are split alike, and the program."""
    with jax.set_mesh(mesh):
        args = jax.device_put(arrays(*leading), NamedSharding(mesh, spec))
        compiled = quick_jit(fn).lower(*args, ids).compile()
        got = compiled(*args, ids)
    return got, str(compiled.as_text())


def assert_split(got, mesh, spec):
    assert all(a.sharding.is_equivalent_to(NamedSharding(mesh, spec), a.ndim) for a in got)


def exchanged(program: str) -> set[str]:
    """The dtypes of the arrays that devices exchange."""
    collective = r"(?:all-gather|all-to-all|all-reduce|collective-permute|reduce-scatter)"
    return {
        dtype
        for line in program.splitlines()
        if re.search(rf" {collective}(?:-start)?\(", line)
        for dtype in re.findall(r"\b(\w\d+)\[", line)
    }


@KINDS
@pytest.mark.parametrize("axes", [("data", "fsdp"), ("data",), ("fsdp",), ()], ids=str)
def test_each_device_reads_the_documents_of_its_own_rows(kind, axes):
    """The documents may be split otherwise than the rows, or not at all."""
    mesh = mesh_of(kind, data=2, fsdp=2)
    ids = jax.device_put(segment_ids(), NamedSharding(mesh, P(axes)))
    rows = P(("data", "fsdp"))
    got, program = on_mesh(mesh, rows, ids)
    assert_as_expected(got)
    # Neither of the two splits refines the other. XLA splits the call, and gathers its results.
    if (kind, axes) != (AUTO, ("fsdp",)):
        assert exchanged(program) <= {"s32"}
        assert_split(got, mesh, rows)


@KINDS
@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
def test_rows_of_one_document_need_no_bounds(kind, implementation):
    """Devices exchange nothing."""

    def whole_rows(q, k, v, dout, ids):
        attend = lambda q, k, v: document_attention(q, k, v, None, implementation=implementation)
        return value_and_grads(attend, (q, k, v), dout)

    mesh, spec = mesh_of(kind, data=2, heads=2), P("data", None, "heads")
    got, program = on_mesh(mesh, spec, segment_ids(), whole_rows)
    assert not exchanged(program)
    assert_split(got, mesh, spec)
    ids, args = np.zeros((B, S), np.int32), arrays()
    plain = quick_jit(functools.partial(gradients, fn=reference))(*args, ids)
    exact = exact_value_and_gradients(args, document_bounds(jnp.asarray(ids)), scale=SCALE)
    assert_as_accurate(got, plain, exact, names=NAMES)


@KINDS
@pytest.mark.parametrize("spec", [P("data"), P(None, None, "data")], ids=str)
def test_the_reference_is_split_by_rows_and_heads(kind, spec):
    mesh = mesh_of(kind, data=2)
    fn = functools.partial(gradients, fn=functools.partial(attend, implementation="reference"))
    got, program = on_mesh(mesh, spec, segment_ids(), fn)
    assert not exchanged(program)
    assert_split(got, mesh, spec)
    assert_as_expected(got)


@pytest.mark.parametrize("implementation", ["reference", "mosaic_gpu"])
def test_keys_and_documents_that_explicit_axes_split_otherwise(implementation):
    """Each gradient is split as its argument. 2 s."""
    mesh = mesh_of(EXPLICIT, x=2, y=2)
    specs = P("x"), P(), P(None, None, "y"), P(), P("y")
    fn = functools.partial(attend, implementation=implementation)
    with jax.set_mesh(mesh):
        shardings = [NamedSharding(mesh, spec) for spec in specs]
        args = jax.device_put([*arrays(), jnp.asarray(segment_ids())], shardings)
        out, vjp = jax.vjp(lambda *qkv: quick_jit(fn)(*qkv, args[4]), *args[:3])
        got = [out, *vjp(jax.device_put(args[3], shardings[0]))]
    for a, spec in zip(got, (specs[0], *specs[:3]), strict=True):
        assert_split([a], mesh, spec)
    assert_as_expected(got)


def test_sequences_that_explicit_axes_split():
    """The reference and the bounds gather them, and the results are split as before."""
    mesh, spec = mesh_of(EXPLICIT, x=2), P(None, "x")
    fn = functools.partial(gradients, fn=functools.partial(attend, implementation="reference"))
    ids = jax.device_put(segment_ids(), NamedSharding(mesh, spec))
    got, _ = on_mesh(mesh, spec, ids, fn)
    assert_split(got, mesh, spec)
    assert_as_expected(got)


@KINDS
def test_each_device_computes_its_own_heads(kind):
    mesh = mesh_of(kind, data=2, heads=2)
    ids = jax.device_put(segment_ids(), NamedSharding(mesh, P("data")))
    heads = P("data", None, "heads")
    got, program = on_mesh(mesh, heads, ids)
    assert not exchanged(program)
    assert_split(got, mesh, heads)
    assert_as_expected(got)


@pytest.mark.parametrize(
    ("kind", "spec", "message"),
    [
        (AUTO, P(None, None, "x"), r"axes \('x.1',\) gather .* divides the number of kv_heads"),
        (AUTO, P(None, "x"), r"axes \('x',\) gather .* split neither its rows nor"),
        (EXPLICIT, P(None, None, "x"), r"axes \('x',\) gather .* divides the number of kv_heads"),
        (EXPLICIT, P(None, "x"), r"axes \('x',\) gather .* split neither its rows nor"),
        (EXPLICIT, P(None, None, None, "x"), r"axes \('x',\) gather .* split neither its rows nor"),
    ],
    ids=["auto heads", "auto tokens", "explicit heads", "explicit tokens", "explicit numbers"],
)
def test_queries_that_are_gathered_are_told_once(kind, spec, message, caplog):
    """Four devices split four heads of queries and two heads of keys."""
    mesh = mesh_of(kind, x=4)
    q, k, v, _ = arrays()
    ids = jnp.asarray(segment_ids())
    with jax.set_mesh(mesh):
        q = jax.device_put(q, NamedSharding(mesh, spec))
        got = quick_jit(lambda q: [attend(q, k, v, ids), attend(2 * q, k, v, ids)])(q)
    (told,) = [text for text in caplog.messages if "gather" in text]
    assert re.search(message, told)
    plain, exact = expected()
    assert_as_accurate(got[:1], plain[:1], exact[:1], names=["out"])


@KINDS
@pytest.mark.parametrize("implementation", ["mosaic_gpu", "reference"])
def test_arrays_that_were_made_outside_of_the_mesh(kind, implementation):
    args, ids = arrays(), jnp.asarray(segment_ids())
    fn = functools.partial(gradients, fn=functools.partial(attend, implementation=implementation))
    with jax.set_mesh(mesh_of(kind, data=2)):
        got = quick_jit(fn)(*args, ids)
    assert_as_expected(got)


of_members = functools.partial(gradients, fn=jax.vmap(attend))


def test_members_of_vmap():
    """2 s."""
    assert_as_expected(quick_jit(of_members)(*arrays(MEMBERS), IDS_OF_MEMBERS), MEMBERS)


def test_gradients_of_members():
    """`jax.vmap` of the gradients."""
    got = quick_jit(jax.vmap(gradients))(*arrays(MEMBERS), IDS_OF_MEMBERS)
    assert_as_expected(got, MEMBERS)


@KINDS
def test_members_on_a_mesh(kind):
    """Some axes split the members, and some the rows."""
    mesh = mesh_of(kind, member=2, data=2)
    ids = jax.device_put(IDS_OF_MEMBERS, NamedSharding(mesh, P("member", "data")))
    spec = P("member", "data")
    got, program = on_mesh(mesh, spec, ids, of_members, (MEMBERS,))
    assert not exchanged(program)
    assert_split(got, mesh, spec)
    assert_as_expected(got, MEMBERS)


def test_members_inside_of_shard_map():
    rows = P(None, "data")
    local = jax.shard_map(of_members, in_specs=rows, out_specs=rows)
    mesh = mesh_of(AUTO, data=2)
    ids = jax.device_put(IDS_OF_MEMBERS, NamedSharding(mesh, rows))
    got, program = on_mesh(mesh, rows, ids, local, (MEMBERS,))
    assert not exchanged(program)
    assert_split(got, mesh, rows)
    assert_as_expected(got, MEMBERS)


def test_members_that_share_documents_and_keys():
    """Members of members. A shared array has the sum of the members' gradients. 3 s."""
    q, _, _, dout = (a.reshape(MEMBERS, 1, *a.shape[1:]) for a in arrays(MEMBERS))
    _, k, v, _ = arrays()
    ids = jnp.asarray(segment_ids())
    twice = lambda fn: jax.vmap(jax.vmap(fn, (0, None, None, None)), (0, None, None, None))
    got = quick_jit(functools.partial(gradients, fn=twice(attend)))(q, k, v, dout, ids)
    by_reference = functools.partial(gradients, fn=twice(reference))
    plain = quick_jit(by_reference)(q, k, v, dout, ids)
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) for a in (q, k, v, dout)]
        exact = quick_jit(by_reference)(*wide, ids)
    assert_as_accurate(got, plain, exact, names=NAMES)


def test_with_x64():
    """Bounds keep 32 bits, and gradients the dtypes of their arguments."""
    with jax.enable_x64(True):
        got = quick_jit(gradients)(*arrays(), jnp.asarray(segment_ids(), jnp.int64))
        assert [a.dtype for a in got] == [jnp.float32] * 4
    assert_as_expected(got)
