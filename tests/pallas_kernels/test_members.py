"""Members of `jax.vmap` with weights or gradients of their own, on eight CPU devices.

About 25 small programs, 11 s on one core.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import operation
from support.numerics import assert_as_accurate
from support.partitioned import TanhMLP

pytestmark = pytest.mark.usefixtures("fast_compilation")

# No product of other sizes is E, so that the text of a program shows arrays of all members.
G, E, C, D, F = 2, 12, 10, 16, 32
AXES = {"expert": 4, "data": 2}


def mlp(x, w_in, w_out):
    return operation.call(TanhMLP(), x, w_in, w_out)[0]


def plain(x, w_in, w_out):
    return jnp.tanh(x @ w_in) @ w_out


def make_args(shapes, dtype):
    numbers = np.random.default_rng(0)
    draw = lambda shape: numbers.standard_normal(shape) / shape[-2] ** 0.5
    return [jnp.asarray(draw(shape), dtype) for shape in shapes]


def total(axes, fn):
    """The gradients of a sum over members, and the results of the members."""

    def loss(x, w_in, w_out, c):
        y = jax.vmap(fn, axes)(x, w_in, w_out)
        return jnp.sum(y * c), y

    return jax.grad(loss, (0, 1, 2), has_aux=True)


def each(fn):
    """The gradients of each member, for weights that all members share."""
    gradient = jax.grad(lambda x, w_in, w_out, c: jnp.sum(fn(x, w_in, w_out) * c), (0, 1, 2))
    return jax.vmap(gradient, (0, None, None, 0))


own = functools.partial(total, 0)
X, W_IN, W_OUT = (E, C, D), (E, D, F), (E, F, D)
SHAPES = X, W_IN, W_OUT, X
NESTED = tuple((G, *shape) for shape in SHAPES)
SHARED = X, W_IN[1:], W_OUT[1:], X
BOTH, EXPERT = P("expert", "data"), P("expert")
FSDP = P("expert", "data"), P("expert", None, "data")
COLUMNS = FSDP[::-1]
IN_GROUPS = P("data", "expert")
# Programs: function, shapes, specs, and the numbers of all-gathers, all-reduces and
# reduce-scatters. The compiler for CPUs gathers a weight once more for the backward. A collective
# in the body of a loop counts once.
PROGRAMS = {
    "experts": (own, SHAPES, (EXPERT,) * 4, (0, 0, 0)),
    "tokens": (own, SHAPES, (BOTH, EXPERT, EXPERT, BOTH), (0, 2, 0)),
    "fsdp": (own, SHAPES, (BOTH, *FSDP, BOTH), (4, 0, 2)),
    "columns": (own, SHAPES, (EXPERT, *COLUMNS, EXPERT), (0, 2, 0)),
    "nested": (lambda fn: own(jax.vmap(fn)), NESTED, (IN_GROUPS,) * 4, (0, 0, 0)),
    "batch of experts": (
        lambda fn: total((0, None, None), jax.vmap(fn)),
        (NESTED[0], *SHAPES[1:3], NESTED[3]),
        (IN_GROUPS, EXPERT, EXPERT, IN_GROUPS),
        (0, 2, 0),
    ),
    "shared tokens": (
        functools.partial(total, (None, 0, 0)),
        (X[1:], *SHAPES[1:]),
        (P("data"), EXPERT, EXPERT, BOTH),
        (0, 3, 0),
    ),
    "shared weight": (
        functools.partial(total, (0, 0, None)),
        (X, W_IN, W_OUT[1:], X),
        (BOTH, EXPERT, P(), BOTH),
        (0, 3, 0),
    ),
    "gradients": (each, SHARED, (BOTH, P(), P(), BOTH), (0, 2, 0)),
    "gradients, fsdp": (each, SHARED, (BOTH, P("data"), P(None, "data"), BOTH), (3, 0, 2)),
}


def assert_split(text, most):
    """Asserts that no device has all members, and that there are no collectives but these."""
    names = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
    found = [len(re.findall(rf"= [^=]*\b{name}(?:-start)?\(", text)) for name in names]
    assert all(n <= m for n, m in zip(found, (*most, 0, 0), strict=True)), found
    assert not re.findall(rf"\[(?:{G},)?{E},", text)


@functools.cache
def expected(name):
    """The results of plain JAX in float32 and in float64."""
    make, shapes, *_ = PROGRAMS[name]
    run = lambda dtype: jax.tree.leaves(jax.jit(make(plain))(*make_args(shapes, dtype)))
    with jax.enable_x64(True):
        exact = [np.asarray(a) for a in run(np.float64)]
    return run(np.float32), exact


def assert_accurate(got, name):
    got = jax.tree.leaves(got)
    assert_as_accurate(got, *expected(name), names=range(len(got)))


def shardings(specs):
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES), (AxisType.Auto,) * 2)
    return [NamedSharding(mesh, spec) for spec in specs]


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_device_computes_its_own_members(name):
    """0.5 s each."""
    make, shapes, specs, most = PROGRAMS[name]
    args = jax.device_put(make_args(shapes, np.float32), shardings(specs))
    compiled = jax.jit(make(mlp)).lower(*args).compile()
    assert_split(compiled.as_text(), most)
    assert_accurate(compiled(*args), name)


def test_shardings_of_a_jit_are_enough():
    """The types of the arguments have no mesh."""
    make, shapes, specs, most = PROGRAMS["tokens"]
    args = make_args(shapes, np.float32)
    compiled = jax.jit(make(mlp), in_shardings=shardings(specs)).lower(*args).compile()
    assert_split(compiled.as_text(), most)
    assert_accurate(compiled(*jax.device_put(args, shardings(specs))), "tokens")


def test_members_that_devices_do_not_divide(caplog):
    make, shapes, *_ = PROGRAMS["experts"]
    mesh = jax.make_mesh((8,), ("expert",), (AxisType.Auto,))
    split = lambda a: jax.lax.with_sharding_constraint(a, NamedSharding(mesh, EXPERT))
    got = jax.jit(lambda *args: make(mlp)(*map(split, args)))(*make_args(shapes, np.float32))
    assert_accurate(got, "experts")
    assert f"every device gathers an axis of {E} and computes all of it" in caplog.text


def test_batches_of_members_that_a_part_of_a_mesh_axis_splits():
    """Four devices have the members. The loop is over two batches, which two devices have each."""
    shapes = [(8, *shape[1:]) for shape in SHAPES]
    batches = lambda fn: lambda *args: jax.lax.map(lambda a: fn(*a), args, batch_size=4)
    make = lambda fn: jax.grad(
        lambda *args: jnp.sum(batches(fn)(*args[:3]) * args[3]), argnums=(0, 1, 2)
    )
    args = jax.device_put(make_args(shapes, np.float32), shardings([EXPERT] * 4))
    got = jax.jit(make(mlp))(*args)
    run = lambda dtype: jax.jit(make(plain))(*make_args(shapes, dtype))
    with jax.enable_x64(True):
        exact = jax.tree.map(np.asarray, run(np.float64))
    assert_as_accurate(got, run(np.float32), exact, names=range(3))


def test_explicit_axes_split_members_around_a_shard_map():
    _, shapes, specs, _ = PROGRAMS["tokens"]
    tokens, whole = P("data"), P()
    mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES))
    placed = [NamedSharding(mesh, spec) for spec in specs]
    with jax.set_mesh(mesh):
        inside = jax.shard_map(mlp, in_specs=(tokens, whole, whole), out_specs=tokens)
        args = jax.device_put(make_args(shapes, np.float32), placed)

        def loss(x, w_in, w_out, c):
            y = jax.vmap(inside, spmd_axis_name="expert")(x, w_in, w_out)
            return jnp.sum(y * c), y

        got = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*args)
    assert_accurate(got, "tokens")


def test_one_device_has_a_loop():
    """Forward and backward have one each, also for a batch of tokens around the members."""
    for name in ("experts", "batch of experts"):
        make, shapes, *_ = PROGRAMS[name]
        text = jax.jit(make(mlp)).lower(*make_args(shapes, np.float32)).as_text()
        assert text.count("stablehlo.while") == 2 and "custom_partition" not in text


def test_members_add_up_the_gradient_of_what_they_share():
    """On one device the loop adds them up, so that no array has the gradients of all members."""
    make, shapes, *_ = PROGRAMS["shared weight"]
    args = make_args(shapes, np.float32)
    compiled = jax.jit(make(mlp)).lower(*args).compile()
    text = str(compiled.as_text())
    assert f"f32[{E},{D},{F}]" in text
    assert f"f32[{E},{F},{D}]" not in text
    assert_accurate(compiled(*args), "shared weight")


def test_sums_over_members_do_not_round_to_16_bits():
    """The gradient of tokens that 64 members share."""
    shapes = X[1:], (64, D, F), (64, F, D), (64, C, D)
    make = functools.partial(total, (None, 0, 0))
    args = make_args(shapes, jnp.bfloat16)
    got, low = (jax.jit(make(fn))(*args)[0][:1] for fn in (mlp, plain))
    with jax.enable_x64(True):
        args = [np.asarray(a, np.float64) for a in args]
        exact = jax.tree.map(np.asarray, jax.jit(make(plain))(*args)[0][:1])
    assert_as_accurate(got, low, exact, names=["dx"])


class InFloat32(TanhMLP):
    """Returns gradients in float32, as the losses do."""

    def backward(self, wanted, saved, cotangents):
        gradients = super().backward(wanted, saved, cotangents)
        return [g.astype(jnp.float32) for g in gradients]


def test_gradients_are_cast_inside_of_the_loop():
    """No array has the float32 gradients of all members."""
    make, shapes, *_ = PROGRAMS["experts"]
    fn = lambda *args: operation.call(InFloat32(), *args)[0]
    text = jax.jit(make(fn)).lower(*make_args(shapes, jnp.bfloat16)).as_text()
    assert f"tensor<{E}x{D}x{F}xbf16>" in text and f"tensor<{E}x{D}x{F}xf32>" not in text


def test_members_in_an_exported_program():
    make, shapes, specs, _ = PROGRAMS["tokens"]
    args = make_args(shapes, np.float32)
    exported = jax.export.export(jax.jit(make(mlp)))(*args)
    assert_accurate(exported.call(*args), "tokens")
    split = jax.jit(make(mlp), in_shardings=shardings(specs))
    with pytest.raises(NotImplementedError, match="of tanh_mlp for 8 devices"):
        jax.export.export(split)(*args)
