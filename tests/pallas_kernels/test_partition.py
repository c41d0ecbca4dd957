"""Operations that partition themselves: values, gradients and collectives on eight CPU devices.

About 60 small programs, 7 s on one core.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import (
    linear_cross_entropy,
    linear_distillation_loss,
    operation,
    partition,
    rms_norm,
)
from pallas_kernels.layout import GradientOf, Roles, Tokens, Weight
from support.partitioned import TanhMLP

pytestmark = pytest.mark.usefixtures("fast_compilation")

SHAPE = B, S, D = 8, 8, 16
F = 32
TOKENS = P(("data", "fsdp"))
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mlp(x, w_in, w_out):
    return operation.call(TanhMLP(), x, w_in, w_out)[0]


def plain_mlp(x, w_in, w_out):
    return jnp.tanh(x @ w_in) @ w_out


def loss_of(fn):
    return lambda x, w_in, w_out, c: jnp.sum(fn(x, w_in, w_out) * c)


def make_args(dtype: Any = np.float32):
    shapes = SHAPE, (D, F), (F, D), SHAPE
    numbers = np.random.default_rng(0)
    sizes = 1, D**-0.5, F**-0.5, 1
    return [
        jnp.asarray(size * numbers.standard_normal(s), dtype)
        for s, size in zip(shapes, sizes, strict=True)
    ]


@functools.cache
def exact(fn=plain_mlp):
    with jax.enable_x64(True):
        args = make_args(np.float64)
        return [np.asarray(g) for g in jax.jit(jax.grad(loss_of(fn), (0, 1, 2)))(*args)]


def assert_accurate(got, want=None):
    """Allows a few ulps of float32, relative to the gradient's size."""
    for g, w in zip(got, exact() if want is None else want, strict=True):
        error = np.linalg.norm(np.asarray(g, np.float64) - w) / np.linalg.norm(w)
        assert error < 2e-6


def mesh_of(kind):
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "tensor"), axis_types=(kind,) * 3)


def put(mesh, specs):
    return [
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(make_args(), specs, strict=True)
    ]


def collectives(text):
    names = "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute"
    return tuple(len(re.findall(rf"= [^=]*\b{name}(?:-start)?\(", text)) for name in names)


# Layouts: the splits of tokens, w_in and w_out, and the collectives of a gradient. The compiler for
# CPUs gathers a weight once more for the backward, which the numbers include.
WHOLE = TOKENS, P(), P()
FSDP = TOKENS, P("fsdp"), P(None, "fsdp")
ROWS = TOKENS, P("fsdp"), P("fsdp")
BOTH = TOKENS, P("fsdp", "tensor"), P("tensor", "fsdp")
COLUMNS = P("data"), P(None, ("tensor", "fsdp")), P(("tensor", "fsdp"))
SEQUENCE = P(("data", "fsdp"), "tensor"), P(), P()
LAYOUTS = {
    "whole": (WHOLE, (0, 1, 0, 0, 0)),
    "fsdp": (FSDP, (3, 1, 2, 0, 0)),
    "fsdp by rows": (ROWS, (3, 1, 2, 0, 0)),
    "fsdp and tensor": (BOTH, (3, 2, 2, 0, 0)),
    "tensor": (COLUMNS, (0, 2, 0, 0, 0)),
    "sequence": (SEQUENCE, (0, 1, 0, 0, 0)),
}


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_need_only_the_collectives_of_the_layout(layout, kind):
    (x, w_in, w_out), most = LAYOUTS[layout]
    mesh = mesh_of(kind)
    args = put(mesh, (x, w_in, w_out, x))
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss_of(mlp), (0, 1, 2))).lower(*args).compile()
    assert all(n <= m for n, m in zip(collectives(compiled.as_text()), most, strict=True))
    got = compiled(*args)
    assert_accurate(got)
    assert all(
        g.sharding.is_equivalent_to(a.sharding, a.ndim) for g, a in zip(got, args[:3], strict=True)
    )


@pytest.mark.parametrize(
    "specs",
    [
        (TOKENS, P(None, ("fsdp", "tensor")), P(("fsdp", "tensor")), TOKENS),
        # The rows of both weights, over an axis that splits no tokens: it splits F then.
        (P("data"), P("fsdp"), P("fsdp"), P("data")),
    ],
    ids=["another order", "rows"],
)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_weights_are_brought_into_the_split_that_stays(kind, specs):
    """0.4 s each."""
    mesh = mesh_of(kind)
    args = put(mesh, specs)
    with jax.set_mesh(mesh):
        assert_accurate(jax.jit(jax.grad(loss_of(mlp), (0, 1, 2)))(*args))


def _dweight(key, place):
    """The gradient of a weight, with float32 sums only where a device has many columns."""
    del key, place

    def run(x, dy, weight):
        dtype = jnp.float32 if len(weight) > F // 2 else weight.dtype
        return (jnp.einsum("bsf,bsd->fd", dy, x).astype(dtype),)

    return run


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_a_device_may_have_a_gradient_in_another_dtype(kind):
    """0.3 s each."""
    mesh = mesh_of(kind)
    x, w_in, w_out, _ = make_args()
    roles = Roles(
        (Tokens(("d",)), Tokens(("f",)), Weight(("f", "d"))),
        (GradientOf(2),),
        ("f",),
    )
    arrays = x, x @ w_in, w_out.astype(jnp.bfloat16)
    specs = P("data"), P("data", None, "tensor"), P("tensor")
    args = [jax.device_put(a, NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)]
    compute = jax.jit(lambda *args: partition.partitioned(_dweight, None, roles, *args)[0])
    with jax.set_mesh(mesh):
        got = compute(*args)
    # Auto axes keep the dtype of the whole arrays, which JAX knows before XLA splits them.
    assert got.dtype == (jnp.float32 if kind == AUTO else jnp.bfloat16)
    want = np.einsum("bsf,bsd->fd", *(np.asarray(a, np.float64) for a in arrays[1::-1]))
    error = np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)
    assert error < 2**-8


def test_shardings_of_arguments_are_enough():
    mesh = mesh_of(AUTO)
    args = put(mesh, (*FSDP, TOKENS))
    assert_accurate(jax.jit(jax.grad(loss_of(mlp), (0, 1, 2)))(*args))
    shardings = [a.sharding for a in args]
    by_jit = jax.jit(jax.grad(loss_of(mlp), (0, 1, 2)), in_shardings=shardings)
    compiled = by_jit.lower(*make_args()).compile()
    assert collectives(compiled.as_text())[0] <= 3
    assert_accurate(compiled(*args))


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_inside_of_shard_map(kind, check_vma):
    mesh = mesh_of(kind)
    tokens = P(("data", "fsdp"), "tensor")
    args = put(mesh, (tokens, P(), P(), tokens))
    split = jax.shard_map(
        mlp, mesh=mesh, in_specs=(tokens, P(), P()), out_specs=tokens, check_vma=check_vma
    )
    with jax.set_mesh(mesh):
        compiled = jax.jit(jax.grad(loss_of(split), (0, 1, 2))).lower(*args).compile()
    assert collectives(compiled.as_text()) <= (0, 1, 0, 0, 0)
    assert_accurate(compiled(*args))


def test_explicit_axes_inside_of_a_shard_map_over_others():
    mesh = mesh_of(EXPLICIT)
    args = put(mesh, (TOKENS, P(), P(), TOKENS))
    split = jax.shard_map(
        mlp, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=P("data"), axis_names={"data"}
    )
    with jax.set_mesh(mesh):
        assert_accurate(jax.jit(jax.grad(loss_of(split), (0, 1, 2)))(*args))


@pytest.mark.parametrize("weight_spec", [P(), P("data")], ids=["whole weight", "split weight"])
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_plain_jax_on_explicit_axes_inside_of_a_shard_map_over_others(kind, weight_spec):
    """Gradients, and their derivatives, of arrays that vary over an axis outside."""
    kinds = kind, EXPLICIT
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=kinds)
    x, c = make_args()[0], make_args()[3]
    scales = jnp.linspace(0.5, 1.5, 2 * D).reshape(2, D)
    weight = scales if weight_spec else scales[0]
    norm = lambda x, w: rms_norm(x, w, implementation="reference")
    of_device = lambda x, w: norm(x, w[0] if weight_spec else w)
    split = jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(P("data"), weight_spec),
        out_specs=P("data"),
        axis_names={"data"},
    )

    def derivatives(fn):
        gradient = jax.grad(lambda x, w, c: jnp.sum(fn(x, w) * c), (0, 1))
        return jax.jit(lambda *args: (gradient(*args), jax.jvp(gradient, args, args)[1]))

    whole = lambda x, w: jnp.concatenate(
        [norm(part, w[i] if weight_spec else w) for i, part in enumerate(jnp.split(x, 2))]
    )
    want = derivatives(whole)(x, weight, c)
    tokens = NamedSharding(mesh, TOKENS)
    args = jax.device_put((x, weight, c), (tokens, NamedSharding(mesh, weight_spec), tokens))
    with jax.set_mesh(mesh):
        got = derivatives(split)(*args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_auto_axes_inside_of_a_shard_map_over_others_have_a_reason():
    mesh = mesh_of(AUTO)
    reasons = []

    def local(x):
        reasons.append(partition.unsupported_reason())
        return x

    x = put(mesh, (TOKENS, P(), P(), TOKENS))[0]
    with jax.set_mesh(mesh):
        specs = {"in_specs": P("data"), "out_specs": P("data"), "axis_names": {"data"}}
        jax.jit(jax.shard_map(local, **specs))(x)
        assert partition.unsupported_reason() is None
    assert "'fsdp', 'tensor'" in reasons[0] and "axis_names" in reasons[0]


# Transformations on one device, and on eight with a split batch.


def through_scan(fn):
    def scanned(x, w_in, w_out):
        body = jax.checkpoint(lambda h, w: (h + jnp.sin(fn(h, *w)), None))
        return jax.lax.scan(body, x, (jnp.stack([w_in] * 2), jnp.stack([w_out] * 2)))[0]

    return scanned


def test_scan_and_checkpoint():
    want = exact(through_scan(plain_mlp))
    gradient = jax.grad(loss_of(through_scan(mlp)), (0, 1, 2))
    assert_accurate(jax.jit(gradient)(*make_args()), want)
    mesh = mesh_of(AUTO)
    args = put(mesh, (*FSDP, TOKENS))
    assert_accurate(jax.jit(gradient)(*args), want)


def test_only_wanted_gradients_are_computed():
    args = make_args()
    for wanted in range(3):
        got = jax.jit(jax.grad(loss_of(mlp), wanted))(*args)
        assert_accurate([got], [exact()[wanted]])
    jaxpr = str(jax.make_jaxpr(jax.grad(loss_of(mlp), 0))(*args))
    assert "wanted=(True, False, False)" in jaxpr


def test_vmap_before_the_gradient_is_one_call():
    gradient = jax.grad(loss_of(jax.vmap(mlp, (0, None, None))), (0, 1, 2))
    jaxpr = str(jax.make_jaxpr(gradient)(*make_args()))
    # One gradient of a weight, not one for each member.
    assert f"f32[{B},{D},{F}]" not in jaxpr
    assert_accurate(jax.jit(gradient)(*make_args()))
    # JAX refuses a weight that is split over an Explicit axis over which `vmap` splits members.
    for kind, layout in ((AUTO, FSDP), (EXPLICIT, WHOLE)):
        mesh = mesh_of(kind)
        args = put(mesh, (*layout, TOKENS))
        with jax.set_mesh(mesh):
            assert_accurate(jax.jit(gradient)(*args))


def test_weights_gathered_inside_of_vmap():
    """docs/transforms.md advises this where Explicit axes split both members and weights."""
    gather = lambda w: jax.sharding.reshard(w, P())
    batched = lambda x, *ws: jax.vmap(lambda x: mlp(x, *map(gather, ws)))(x)
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        gradient = jax.jit(jax.grad(loss_of(batched), (0, 1, 2)))
        assert_accurate(gradient(*put(mesh, (*FSDP, TOKENS))))


def test_the_gradient_before_vmap_is_one_for_each_member():
    x, w_in, w_out, c = make_args()
    gradient = jax.grad(loss_of(mlp), (0, 1, 2))
    dx, dw_in, dw_out = jax.jit(jax.vmap(gradient, (0, None, None, 0)))(x, w_in, w_out, c)
    assert dw_in.shape == (B, D, F)
    for member in range(0, B, 3):
        alone = gradient(x[member], w_in, w_out, c[member])
        for got, want in zip((dx, dw_in, dw_out), alone, strict=True):
            np.testing.assert_allclose(got[member], want, rtol=1e-4, atol=1e-5)
    assert_accurate((dx, dw_in.sum(0), dw_out.sum(0)))


def test_vmap_over_weights():
    x, w_in, w_out, c = make_args()
    stacked = np.stack([w_in] * B), np.stack([w_out] * B)
    dx, *dw = jax.jit(jax.grad(loss_of(jax.vmap(mlp)), (0, 1, 2)))(x, *stacked, c)
    assert_accurate((dx, *(g.sum(0) for g in dw)))


def test_forward_mode_and_second_derivatives_are_refused():
    x, w_in, w_out, _ = make_args()
    fn = lambda x: jnp.sum(mlp(x, w_in, w_out))
    twice = jax.grad(lambda x: jnp.sum(jax.grad(fn)(x)))
    for derivative in (jax.jacfwd(fn), jax.hessian(fn), twice):
        with pytest.raises(NotImplementedError, match="tanh_mlp has a gradient rule of its own"):
            derivative(x[0, 0])


def test_a_program_names_the_options():
    """A compilation cache compares names, so functions with other options have other names."""

    class Other(TanhMLP):
        pass

    def text(op):
        return jax.jit(lambda *args: operation.call(op, *args)[0]).lower(*make_args()[:3]).as_text()

    names = [set(re.findall(r"@(tanh_mlp_\w{12})", text(op))) for op in (TanhMLP(), Other())]
    assert all(names) and not names[0] & names[1]


@pytest.mark.parametrize("without_pointer", [True, False])
def test_a_compilation_cache_keeps_options_apart(without_pointer, tmp_path):
    """By default JAX puts the callback's address into the key, so that nothing is ever found.

    Programs are compiled and not run.
    """

    @dataclasses.dataclass(frozen=True)
    class WithOption(TanhMLP):
        option: int

    mesh = mesh_of(AUTO)
    args = put(mesh, (*FSDP, TOKENS))[:3]
    hits = []
    listen = lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None

    def num_hits(option):
        jax.clear_caches()  # so that the function is lowered anew, as in another process
        before = len(hits)
        run = lambda *args: operation.call(WithOption(option), *args)[0]
        jax.jit(run).lower(*args).compile()
        return len(hits) - before

    options = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
        "jax_remove_custom_partitioning_ptr_from_cache_key": without_pointer,
    }
    old = {name: getattr(jax.config, name) for name in options}
    jax.monitoring.register_event_listener(listen)
    try:
        for name, value in options.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        found = [num_hits(option) for option in (1, 2, 1, 2)]
    finally:
        jax.monitoring.unregister_event_listener(listen)
        for name, value in old.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
    assert found == ([0, 0, 1, 1] if without_pointer else [0, 0, 0, 0])


@pytest.mark.parametrize("sizes", [(2, 4), (1, 8)], ids=str)
@pytest.mark.parametrize("tokens", [P(), P("b")], ids=str)
def test_explicit_axes_that_split_nothing_beside_auto_axes(sizes, tokens):
    """JAX cannot compile a function that XLA partitions on such a mesh. 1 s."""
    mesh = jax.make_mesh(sizes, ("a", "b"), (EXPLICIT, AUTO))
    x, *others = make_args()
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, tokens))
        assert_accurate(jax.jit(jax.grad(loss_of(mlp), (0, 1, 2)))(x, *others))


def test_plain_jax_stays_split_over_auto_axes_beside_explicit_ones():
    """XLA splits the reference over the Auto axis, as it does any program. 1 s."""
    mesh = jax.make_mesh((2, 4), ("a", "b"), (EXPLICIT, AUTO))
    x, weight = jnp.ones(SHAPE), jnp.ones(D)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P("a", "b")))
        norm = functools.partial(rms_norm, implementation="reference")
        compiled = jax.jit(norm).lower(x, weight).compile()
    assert collectives(compiled.as_text()) == (0, 0, 0, 0, 0)


def plain_loss(x, weight, target, token_weights):
    """The mean cross-entropy of labels, or the mean KL divergence of a teacher's hidden states."""
    log_p = jax.nn.log_softmax(x @ weight.T)
    if target.ndim == 2:
        losses = -jnp.take_along_axis(log_p, target[..., None], axis=-1)[..., 0]
    else:
        log_q = jax.nn.log_softmax(target @ jax.lax.stop_gradient(weight).T)
        losses = jnp.sum(jnp.exp(log_q) * (log_q - log_p), axis=-1)
    return jnp.sum(token_weights * losses) / jnp.sum(token_weights)


@pytest.mark.parametrize(
    "of_x, of_target, of_weights, implementation",
    [
        (P("a", "b"), P(), P("b", "a"), "xla"),
        (P(), P(None, "a"), P("a", "b"), "reference"),
        pytest.param(P("a", "b"), P("b", "a"), P(None, "a"), "xla", marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("distils", [False, True], ids=["labels", "teacher"])
def test_numbers_of_tokens_that_are_split_otherwise(
    distils, of_x, of_target, of_weights, implementation
):
    """Labels and weights follow `x`, or the first of them that Explicit axes split; 0.5 s each."""
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(EXPLICIT,) * 2)
    numbers = np.random.default_rng(1)
    normal = lambda *shape: numbers.standard_normal(shape).astype(np.float32)
    target = normal(*SHAPE) if distils else numbers.integers(F, size=(B, S)).astype(np.int32)
    arrays = normal(*SHAPE), normal(F, D), target, numbers.uniform(0.5, 2, (B, S)).astype("float32")
    with jax.enable_x64(True):
        wide = [np.asarray(a, np.float64) if a.dtype == np.float32 else a for a in arrays]
        want = jax.grad(plain_loss, (0, 1, 3))(*wide)

    def loss(x, weight, target, token_weights):
        options = {"token_weights": token_weights, "implementation": implementation}
        if distils:
            return linear_distillation_loss(x, weight, target, weight, **options)
        return linear_cross_entropy(x, weight, target, **options)

    with jax.set_mesh(mesh):
        specs = of_x, P(), of_target, of_weights
        given = [
            jax.device_put(a, NamedSharding(mesh, spec))
            for a, spec in zip(arrays, specs, strict=True)
        ]
        got = jax.jit(jax.grad(loss, (0, 1, 3)))(*given)
    assert_accurate(got, [np.asarray(a) for a in want])
    assert jax.typeof(got[2]).sharding.spec == jax.typeof(given[3]).sharding.spec
