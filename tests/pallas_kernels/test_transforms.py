"""Every transformation of every operation and implementation; docs/transforms.md shows the table.

The transformations of an operation are one program.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import add_rms_norm, linear_cross_entropy, rms_norm, swiglu, swiglu_mlp
from pallas_kernels.mlp import mosaic_gpu as swiglu_kernels
from pallas_kernels.mlp.reference import swiglu as swiglu_formula
from pallas_kernels.norm import mosaic_gpu as norm_kernels
from support.numerics import assert_as_accurate, quick_jit
from support.pages import ROOT
from support.transform_table import table, working
from support.transforms import (
    BASE,
    DEFAULT,
    DONATION,
    FORWARD_MODE,
    IMPLEMENTATIONS,
    MATRIX,
    NO_FORWARD_MODE,
    OPERATIONS,
    RAISES,
    VALUES,
    WORKS,
    Sizes,
    expected,
    make_call,
    run_all,
)

pytestmark = pytest.mark.usefixtures("fast_compilation")

F32 = jnp.float32
SIZES = Sizes(members=2, tokens=5, hidden=64, columns=96, vocabulary=80)
# Small sizes of the kernels with matrix products. A token has one large entry in the gradient of
# its logits, at the label. With few tokens the rounding of few entries decides the error.
SIZES_OF_PRODUCTS = Sizes(members=2, tokens=101, hidden=128, columns=128, vocabulary=128)
PRODUCTS = OPERATIONS[3:]


def sizes_of(dtype: Any) -> Sizes:
    return SIZES_OF_PRODUCTS if dtype == jnp.bfloat16 else SIZES


@functools.cache
def results(
    operation: str, implementation: str, dtype: Any, names: tuple[str, ...], device: str = "cpu"
) -> Any:
    """The results of transformations; the device is what operations choose for."""
    call = make_call(operation, implementation, sizes_of(dtype), dtype)
    donated = jax.tree.map(jnp.copy, call.floating_args)
    run = quick_jit(functools.partial(run_all, call, names), donate_argnums=1)
    found = jax.block_until_ready(run(call.args, donated))
    assert all(a.is_deleted() for a in donated)
    return jax.tree.map(np.asarray, found)


@functools.cache
def exact(operation: str, dtype: Any) -> Any:
    """The results of the formula in float64."""
    call = make_call(operation, "formula", sizes_of(dtype), dtype)
    with jax.enable_x64(True):
        args = jax.tree.map(
            lambda a: np.asarray(a, np.float64) if a.dtype == dtype else a, call.args
        )
        run = quick_jit(functools.partial(run_all, call, BASE))
        return jax.tree.map(np.asarray, run(args, args[: call.num_floating]))


def marks(transform: str, operation: str, implementation: str) -> Any:
    if operation == "rms_norm":  # `add_rms_norm` is the same operation with a residual
        return pytest.mark.full
    outcome = MATRIX[transform][operation][implementation]
    # The others raise alike.
    if outcome == RAISES and transform in FORWARD_MODE[1::2]:
        return pytest.mark.full
    # All operations have the same primitives. Those that are left use each of their rules.
    if outcome == WORKS and operation in ("swiglu_mlp", "linear_token_loss"):
        return pytest.mark.gpu if implementation == "mosaic_gpu" else pytest.mark.full
    if implementation == "mosaic_gpu":
        # The same primitives give the kernels the transformations of "xla".
        needs_gpu = operation in PRODUCTS and outcome == WORKS
        return pytest.mark.gpu if needs_gpu else ()
    if implementation == "xla":
        is_the_reference = operation not in PRODUCTS
        return pytest.mark.full if is_the_reference else ()
    # JAX transforms the reference, which is plain JAX, in all other ways.
    return () if transform in (*BASE, DONATION) else pytest.mark.full


CELLS = [
    pytest.param(*(cell := (transform, *which)), id="-".join(cell), marks=marks(*cell))
    for which in itertools.product(OPERATIONS, IMPLEMENTATIONS)
    for transform in (*VALUES, DONATION)
]


@pytest.fixture
def kernel_formulas(monkeypatch, fresh_operations):
    """On a CPU formulas are in the place of the kernels of norms and of `swiglu`.

    A transformation does not look into a kernel. Some do not take the effects of the interpreter.
    """
    if jax.default_backend() == "gpu":
        return
    monkeypatch.setattr(norm_kernels, "forward", norm_forward)
    monkeypatch.setattr(norm_kernels, "backward", norm_backward)
    gradients = lambda *args: jax.vjp(swiglu_formula, *args[:2])[1](args[2])
    monkeypatch.setattr(swiglu_kernels, "_forward_of", lambda *_: lambda *a: [swiglu_formula(*a)])
    monkeypatch.setattr(swiglu_kernels, "_backward_of", lambda *_: gradients)


def norm_forward(options, config, x, residual, weight):
    total = x if residual is None else x + residual
    rstd = jax.lax.rsqrt(jnp.mean(total * total, axis=-1) + options.eps)
    return total * rstd[:, None] * weight, None if residual is None else total, rstd


def norm_backward(options, config, dy, dresidual_out, source, weight, rstd):
    x_hat, dx_hat = source * rstd[:, None], dy * weight
    dx = rstd[:, None] * (dx_hat - x_hat * jnp.mean(dx_hat * x_hat, axis=-1, keepdims=True))
    return dx if dresidual_out is None else dx + dresidual_out, jnp.sum(dy * x_hat, axis=0)


@pytest.mark.parametrize("transform, operation, implementation", CELLS)
def test_each_cell(transform, operation, implementation, kernel_formulas):
    dtype = jnp.float32
    if operation in PRODUCTS and implementation == "mosaic_gpu":
        dtype = jnp.bfloat16
    if MATRIX[transform][operation][implementation] == RAISES:
        platform = "cuda" if implementation == "mosaic_gpu" else jax.default_backend()
        assert_raises(transform, operation, implementation, dtype, platform)
        return
    works = tuple(n for n in VALUES if MATRIX[n][operation][implementation] == WORKS)
    is_base = implementation == "reference" and transform in (*BASE, DONATION)
    found = results(operation, implementation, dtype, BASE if is_base else works)
    assert_accurate(found, transform, operation, dtype)


def assert_raises(transform, operation, implementation, dtype, platform):
    call = make_call(operation, implementation, sizes_of(dtype), dtype)
    run = jax.jit(lambda args: VALUES[transform].run(dataclasses.replace(call, args=args)))
    with pytest.raises(NotImplementedError, match=NO_FORWARD_MODE):
        run.trace(call.args).lower(lowering_platforms=(platform,))


def assert_accurate(found, transform, operation, dtype):
    args = make_call(operation, "formula", sizes_of(dtype), dtype).floating_args
    want = expected(transform, exact(operation, dtype), [np.asarray(a, np.float64) for a in args])
    # The reference of the loss has float32 logits; the formula rounds them as the kernels do.
    plain = "reference" if dtype == jnp.float32 else "formula"
    low_precision = expected(transform, results(operation, plain, dtype, BASE), args)
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(want)]
    leaves = map(jax.tree.leaves, (found[transform], low_precision, want))
    # The kernels of the loss round two operands of dweight, exponentials and scaled x, where the
    # formula rounds dlogits alone. On an H100 the errors have a ratio of 1.33, and of 1.47 where a
    # `dweight` for each member is rounded before the sum.
    is_of_kernels = operation in PRODUCTS[1:] and dtype == jnp.bfloat16
    assert_as_accurate(*leaves, names=names, slack=1.5 if is_of_kernels else 1.2)


# One program has all that work. The others raise alike, so one of them is enough.
SHORT = "add_rms_norm", "swiglu"
OF_DEFAULT = [
    pytest.param(t, o, marks=() if is_short else pytest.mark.full)
    for t, o in itertools.product(FORWARD_MODE, OPERATIONS)
    for is_short in [o in SHORT or (t == FORWARD_MODE[0] and o != "rms_norm")]
]


@pytest.mark.parametrize("device", ["cpu", "h100"])
@pytest.mark.parametrize("transform, operation", OF_DEFAULT)
def test_by_default_forward_mode_is_the_same_on_every_backend(
    transform, operation, device, kernel_formulas, request
):
    if device == "h100":
        request.getfixturevalue("on_h100")
    is_kernel = device == "h100" and operation != "swiglu"
    dtype = jnp.bfloat16 if operation in PRODUCTS else jnp.float32
    call = make_call(operation, DEFAULT, sizes_of(dtype), dtype)
    (choice,) = pallas_kernels.explain(call.fn, *call.args).choices
    assert (choice.implementation == "mosaic_gpu") == is_kernel
    if MATRIX[transform][operation][DEFAULT] == RAISES:
        platform = "cuda" if is_kernel else "cpu"
        assert_raises(transform, operation, DEFAULT, dtype, platform)
    elif not is_kernel:
        # `test_each_cell` runs it.
        assert choice.implementation == "reference"
        assert MATRIX[transform][operation]["reference"] == WORKS
    else:
        found = results(operation, DEFAULT, dtype, FORWARD_MODE, device)
        assert_accurate(found, transform, operation, dtype)


def test_the_page_has_all_transformations():
    """The functions of `support.transform_table` make the table and the list anew."""
    page = (ROOT / "docs/transforms.md").read_text()
    assert table() in page
    assert working() in page


# All operations in one model, on a mesh.


def model(x, weights, labels):
    norm, w_gate, w_up, w_down, head = weights
    y, total = add_rms_norm(swiglu_mlp(rms_norm(x, norm), w_gate, w_up, w_down), x, norm)
    return linear_cross_entropy(swiglu(y, total), head, labels, reduction="sum")


def sum_of_members(x, weights, labels, **options):
    return jnp.sum(jax.vmap(model, (0, None, 0), **options)(x, weights, labels))


def of_each_member(x, weights, labels, **options):
    return jax.vmap(jax.grad(model, (0, 1)), (0, None, 0), **options)(x, weights, labels)


of_sum = jax.grad(sum_of_members, (0, 1))
NUM_MEMBERS = 8


@functools.cache
def make_model_args():
    numbers = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(numbers.standard_normal(shape) / shape[0] ** 0.5, F32)
    x = normal(NUM_MEMBERS, 8, 16)
    weights = normal(16), normal(16, 32), normal(16, 32), normal(32, 16), normal(48, 16)
    return x, weights, jnp.asarray(numbers.integers(0, 48, (NUM_MEMBERS, 8)), jnp.int32)


@functools.cache
def on_one_device(fn):
    return jax.tree.map(np.asarray, jax.jit(fn)(*make_model_args()))


def assert_equal(got, want):
    """Allows another order of float32 sums."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(np.asarray(g) - w) < 2e-6 * np.linalg.norm(w)


def on_mesh(kind):
    mesh = jax.make_mesh((8,), ("data",), (kind,))
    x, weights, labels = make_model_args()
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    whole = jax.tree.map(lambda a: put(a, P()), weights)
    return mesh, (put(x, P("data")), whole, put(labels, P("data")))


@pytest.mark.parametrize(
    "kind, options",
    [
        pytest.param(AxisType.Auto, {}, id="auto", marks=pytest.mark.full),
        pytest.param(AxisType.Auto, {"spmd_axis_name": "data"}, id="auto, named"),
        pytest.param(AxisType.Explicit, {}, id="explicit", marks=pytest.mark.full),
        pytest.param(
            AxisType.Explicit,
            {"spmd_axis_name": "data"},
            id="explicit, named",
            marks=pytest.mark.full,
        ),
    ],
)
def test_vmap_of_members_that_a_mesh_splits(kind, options):
    mesh, args = on_mesh(kind)
    with jax.set_mesh(mesh):
        gradient = jax.grad(functools.partial(sum_of_members, **options), (0, 1))
        assert_equal(jax.jit(gradient)(*args), on_one_device(of_sum))
        each = jax.jit(functools.partial(of_each_member, **options))
        assert_equal(each(*args), on_one_device(of_each_member))


WHOLE = (P(),) * 5
COLUMNS = P(), P(None, "tensor"), P(None, "tensor"), P("tensor"), P("tensor")
ROWS = P(), P("tensor"), P("tensor"), P(None, "tensor"), P(None, "tensor")
OWN = tuple(P("data", *spec) for spec in COLUMNS)


def nested(x, weights, labels):
    each = jax.vmap(of_each_member, (0, None, 0))(x[:, None], weights, labels[:, None])
    return jax.tree.map(lambda a: jnp.squeeze(a, 1), each)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "run, tokens, specs",
    [
        pytest.param(of_each_member, P("data"), COLUMNS, id="columns"),
        pytest.param(
            of_each_member, P("data", "tensor"), WHOLE, id="sequence", marks=pytest.mark.full
        ),
        pytest.param(nested, P(("data", "tensor")), WHOLE, id="nested", marks=pytest.mark.full),
        pytest.param(of_each_member, P("data"), ROWS, id="rows", marks=pytest.mark.full),
        pytest.param(None, P("data"), OWN, id="weights of their own", marks=pytest.mark.full),
    ],
)
def test_gradients_of_members_that_a_mesh_splits(run, tokens, specs, kind):
    """Another axis splits what a member has."""
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), (kind,) * 2)
    x, weights, labels = make_model_args()
    want = on_one_device(of_each_member)
    if run is None:
        weights = jax.tree.map(lambda a: jnp.stack([a] * NUM_MEMBERS), weights)
        run = jax.vmap(jax.grad(model, (0, 1)))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        args = put(x, tokens), tuple(map(put, weights, specs)), put(labels, tokens)
        assert_equal(jax.jit(run)(*args), want)


def test_gradients_of_members_on_a_mesh_with_auto_axes_name_the_remedy():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), (AxisType.Explicit, AxisType.Auto))
    x, weights, labels = make_model_args()
    split = NamedSharding(mesh, P("data"))
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match="make them Explicit"):
        jax.jit(of_each_member).trace(
            jax.device_put(x, split), weights, jax.device_put(labels, split)
        )


@pytest.mark.parametrize(
    "layout",
    [
        "explicit",
        *(pytest.param(n, marks=pytest.mark.full) for n in ("checked", "auto", "unchecked")),
    ],
)
def test_second_derivatives_of_kernels_of_norms_on_a_mesh(layout, kernel_formulas, on_h100):
    numbers = np.random.default_rng(0)
    x, dx = (jnp.asarray(numbers.standard_normal((8, 5, 64)), F32) for _ in range(2))
    weight, dweight = (jnp.asarray(numbers.standard_normal(64), F32) for _ in range(2))

    def tangents(norm, *args):
        def loss(x, weight):
            return sum(jnp.sum(jnp.sin(a)) for a in norm(x, weight))

        return jax.jvp(jax.grad(loss, (0, 1)), args[:2], args[2:])

    def norm(x, weight, **options):
        return add_rms_norm(rms_norm(x, weight, **options), x, weight, **options)

    plain = functools.partial(tangents, functools.partial(norm, implementation="reference"))
    want = jax.tree.map(np.asarray, jax.jit(plain)(x, weight, dx, dweight))
    mesh = jax.make_mesh((8,), ("data",), (getattr(AxisType, layout.title(), AxisType.Auto),))
    if "checked" in layout:
        specs = {"in_specs": (P("data"), P()), "out_specs": P("data")}
        norm = jax.shard_map(norm, mesh=mesh, check_vma=layout == "checked", **specs)
    split, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    args = jax.device_put((x, weight, dx, dweight), (split, whole) * 2)
    with jax.set_mesh(mesh):
        found = pallas_kernels.explain(norm, *args[:2]).choices
        assert [c.implementation for c in found] == ["mosaic_gpu"] * 2
        assert_equal(jax.jit(functools.partial(tangents, norm))(*args), want)


@pytest.mark.parametrize("is_split", [False, True], ids=["one device", "auto"])
def test_second_derivatives_of_norms_with_a_weight_for_each_member(
    is_split, kernel_formulas, on_h100
):
    """The gradients before `jax.vmap`, and after it."""
    numbers = np.random.default_rng(0)
    arrays = [jnp.asarray(numbers.standard_normal((8, *s)), F32) for s in ((5, 64), (64,)) * 2]

    def loss(norm, x, weight):
        return jnp.sum(jnp.sin(norm(x, weight)))

    def tangents(norm, *args):
        each = jax.vmap(jax.grad(functools.partial(loss, norm), (0, 1)))
        together = jax.grad(functools.partial(loss, jax.vmap(norm)), (0, 1))
        return [jax.jvp(gradient, args[:2], args[2:]) for gradient in (each, together)]

    plain = functools.partial(rms_norm, implementation="reference")
    want = jax.tree.map(np.asarray, jax.jit(functools.partial(tangents, plain))(*arrays))
    if is_split:
        mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
        arrays = jax.device_put(arrays, NamedSharding(mesh, P("data")))
    assert_equal(jax.jit(functools.partial(tangents, rms_norm))(*arrays), want)


@pytest.mark.parametrize("check_vma", [True, pytest.param(False, marks=pytest.mark.full)])
def test_vmap_inside_of_shard_map_and_around_it(check_vma):
    mesh, args = on_mesh(AxisType.Auto)
    specs = {"mesh": mesh, "in_specs": (P("data"), P(), P("data")), "check_vma": check_vma}

    def total(*args):
        return jax.lax.psum(sum_of_members(*args), "data")

    inside = jax.shard_map(total, out_specs=P(), **specs)
    assert_equal(jax.jit(jax.grad(inside, (0, 1)))(*args), on_one_device(of_sum))

    def around(x, weights, labels):
        return jnp.sum(jax.vmap(inside, (0, None, 0))(x[None], weights, labels[None]))

    assert_equal(jax.jit(jax.grad(around, (0, 1)))(*args), on_one_device(of_sum))
