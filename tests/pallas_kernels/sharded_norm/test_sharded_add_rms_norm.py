"""The sharded residual-add RMSNorm on eight devices: the numbers of one, and what goes between."""

import functools
import math
import re
from collections import Counter

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import add_rms_norm, sharded_add_rms_norm
from pallas_kernels import implementation as implementation_module
from pallas_kernels.norm import Config, mosaic_gpu
from pallas_kernels.sharded_norm import mosaic_gpu as peer_kernel
from support.norm_formulas import add_formula
from support.numerics import assert_as_accurate, quick_jit, value_and_grads
from support.pairwise import pairwise

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
D = 64  # the least that the kernel takes
NAMES = ("y", "residual_out", "dpartial", "dresidual", "dweight")

GATHER, DTYPES = (True, False), (BF16, F32)
each_gather = pytest.mark.parametrize("gather", GATHER, ids=["gather", "shard"])


def forward_formula(options, x, residual, weight):
    """What the norm's forward kernel computes."""
    total = (x.astype(F32) + residual.astype(F32)).astype(x.dtype)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(total.astype(F32)), axis=-1) + options.eps)
    x_hat = total.astype(F32) * rstd[:, None]
    if options.casting == "llama":
        x_hat = x_hat.astype(x.dtype).astype(F32)
    return (x_hat * (weight.astype(F32) + options.weight_offset)).astype(x.dtype), total, rstd


def backward_formula(options, dy, dresidual_out, source, weight, rstd):
    x_hat, dy = source.astype(F32) * rstd[:, None], dy.astype(F32)
    dx_hat = dy * (weight.astype(F32) + options.weight_offset)
    mean = jnp.mean(dx_hat * x_hat, axis=-1, keepdims=True)
    dx = rstd[:, None] * (dx_hat - x_hat * mean)
    if dresidual_out is not None:
        dx += dresidual_out.astype(F32)
    return dx.astype(source.dtype), jnp.sum(dy * x_hat, axis=0)


@pytest.fixture
def kernel_formulas(monkeypatch, fresh_operations):
    """The default norm is the kernel's, with formulas in the kernels' place.

    To the interpreter the kernels of all devices are one.
    """
    monkeypatch.setattr(implementation_module, "runs_here", lambda: None)
    monkeypatch.setattr(mosaic_gpu, "forward", forward_formula)
    monkeypatch.setattr(mosaic_gpu, "backward", backward_formula)


@pytest.fixture
def implementation(request):
    if request.param != "xla_kernel":
        return request.param
    request.getfixturevalue("kernel_formulas")
    return "xla"


IMPLEMENTATIONS = ("reference", "xla", "xla_kernel")
NORMS = ("xla", "xla_kernel")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS, indirect=True)
each_norm = pytest.mark.parametrize("implementation", NORMS, indirect=True)


def in_pairs(names, *axes):
    """A test of a cross of parameters, of which `implementation` is the first."""
    ids = lambda value: value if isinstance(value, str) else getattr(value, "__name__", str(value))
    return pytest.mark.parametrize(
        f"implementation, {names}", pairwise(*axes), indirect=["implementation"], ids=ids
    )


def mesh_of(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: math.prod(axes.values())],
    )


def make_args(n, shape, dtypes=(F32, F32, F32), *, gather=True):
    """`(partials, residual, weight)` and cotangents of `(y, residual_out)`, as numpy arrays.

    Axis 0 of the partials, and of the cotangent of a gathered `y`, is that of the devices.
    """
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.normal(size=shape)
    args = normal(n, *shape), normal(*shape), 1 + normal(shape[-1]) / 8
    args = tuple(a.astype(dtype) for a, dtype in zip(args, dtypes, strict=True))
    dy = normal(n, *shape) if gather else normal(*shape)
    return args, (dy.astype(dtypes[0]), normal(*shape).astype(dtypes[0]))


def on_mesh(mesh, leading=(), *, gather=True, fn=sharded_add_rms_norm, **options):
    """`fn` on global arrays as those of `make_args`.

    Args:
      mesh: with an axis `tensor`.
      leading: the mesh axis over which each axis in front of the tokens is split, or None.
      gather: whether `y` has a copy from each device.
      fn: what runs on each device.
      **options: of `fn`.
    """
    parts, tokens = P("tensor", *leading), P(*leading, "tensor")

    def local(partials, residual, weight):
        y, residual_out = fn(
            partials[0], residual, weight, axis_name="tensor", gather=gather, **options
        )
        return y[None] if gather else y, residual_out

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(parts, tokens, P()),
        out_specs=(parts if gather else tokens, tokens),
        check_vma=False,
    )


def graded(fn):
    return quick_jit(lambda args, cotangents: value_and_grads(fn, args, cotangents))


@functools.cache
def on_one_device(**options):
    """Each of several token shards by itself, on axis 0, with the weight in common."""
    norm = functools.partial(add_rms_norm, implementation="reference", **options)
    graded = lambda x, residual, weight, *dy: value_and_grads(norm, (x, residual, weight), dy)
    return quick_jit(jax.vmap(graded, in_axes=(0, 0, None, 0, 0)))


def check(mesh, shape, dtypes, leading=None, *, gather=True, implementation, **options):
    """Compares with `add_rms_norm` on one device, by the error that this makes."""
    n, leading = mesh.shape["tensor"], leading or (None,) * (len(shape) - 2)
    args, cotangents = make_args(n, shape, dtypes, gather=gather)
    run = on_mesh(mesh, leading, gather=gather, implementation=implementation, **options)
    compare(
        graded(run)(args, cotangents),
        args,
        cotangents,
        num_parts=mesh.shape.get(leading[0], 1) if leading else 1,
        gather=gather,
        # There each device rounds the gradients that its share of dy gives, and so is their sum.
        slack=1.2 * math.sqrt(2) if implementation == "reference" else 1.2,
        **options,
    )


def sum_over_devices(a):
    """As XLA for CPUs does it: float16 by itself, bfloat16 in float32."""
    a = np.asarray(a)
    compute = F32 if a.dtype == BF16 else a.dtype
    return functools.reduce(np.add, a.astype(compute)).astype(a.dtype)


def compare(results, args, cotangents, *, num_parts=1, gather=True, slack=1.2, **options):
    """Compares results of n devices for each of `num_parts` parts of axis 0 of the tokens."""
    (partials, residual, weight), (dy, dresidual_out) = args, cotangents
    y, residual_out, dpartials, dresidual, dweight = map(np.asarray, results)
    dtype, n, dy_low = partials.dtype, len(partials), dy
    assert {y.dtype, residual_out.dtype, dpartials.dtype} == {dtype}
    assert (dresidual.dtype, dweight.dtype) == (residual.dtype, weight.dtype)
    assert dpartials.shape == partials.shape and y.shape == dy.shape
    if gather:
        np.testing.assert_array_equal(y, np.broadcast_to(y[:1], y.shape))
        y, dy_low, dy = y[0], sum_over_devices(dy), np.sum(dy, axis=0, dtype=np.float64)
    np.testing.assert_array_equal(dpartials, np.broadcast_to(dpartials[:1], dpartials.shape))

    def shards(a):
        parts = np.split(a, num_parts)
        return np.stack([shard for part in parts for shard in np.split(part, n, axis=-2)])

    got = [*map(shards, (y, residual_out, dpartials[0], dresidual)), dweight]
    # The sums over devices are rounded, and the rest is what one device does.
    low = on_one_device(**options)(
        *map(shards, (sum_over_devices(partials), residual)),
        weight,
        *map(shards, (dy_low, dresidual_out)),
    )
    low[-1] = sum_over_devices(low[-1])
    numbers = {k: v for k, v in options.items() if k in ("eps", "weight_offset")}
    exact = add_formula(
        (None, None, weight), (shards(dy), shards(dresidual_out)), got[1], **numbers
    )
    exact[1] = shards(np.sum(partials, axis=0, dtype=np.float64) + residual.astype(np.float64))
    assert_as_accurate(got, low, exact, names=NAMES, slack=slack)


# Values and gradients.

MESHES = [
    {"tensor": 8},
    {"data": 2, "tensor": 4},
    {"data": 4, "tensor": 2},
    {"data": 8, "tensor": 1},
    {"tensor": 1},
]


@in_pairs("axes, dtype, gather", IMPLEMENTATIONS, MESHES, DTYPES, GATHER)
def test_meshes(implementation, axes, dtype, gather):
    shape, leading = (3 * axes["tensor"], D), ()
    if "data" in axes:
        shape, leading = (2 * axes["data"], *shape), ("data",)
    mesh = mesh_of(**axes)
    check(mesh, shape, (dtype,) * 3, leading, gather=gather, implementation=implementation)


@each_implementation
@pytest.mark.parametrize(
    "shape",
    [
        (4, D),
        (2, 3, 4, D),
        *(pytest.param(s, marks=pytest.mark.full) for s in ((12, D), (4 * 13, D), (3, 8, D))),
    ],
    ids=str,
)
def test_token_counts_and_leading_axes(implementation, shape):
    check(mesh_of(tensor=4), shape, (BF16, BF16, F32), implementation=implementation)


@in_pairs("axes, gather", IMPLEMENTATIONS, [{"tensor": 8}, {"data": 2, "tensor": 4}], GATHER)
def test_no_tokens(implementation, axes, gather):
    shape, leading = ((2, 0, D), ("data",)) if "data" in axes else ((0, D), ())
    args, cotangents = make_args(axes["tensor"], shape, gather=gather)
    run = on_mesh(mesh_of(**axes), leading, gather=gather, implementation=implementation)
    *empty, dweight = graded(run)(args, cotangents)
    assert [a.shape for a in empty] == [a.shape for a in (*cotangents, *args[:2])]
    assert dweight.shape == (D,) and not np.any(dweight)


OPTIONS = [
    {"casting": "float32", "eps": 0.3, "weight_offset": 0.5},
    {"casting": "llama"},
    {"casting": "gemma", "weight_offset": 1.0},
]


@in_pairs("options, dtype", IMPLEMENTATIONS, OPTIONS, DTYPES)
def test_options_of_the_norm(implementation, options, dtype):
    mesh = mesh_of(tensor=4)
    check(mesh, (12, D), (dtype,) * 3, implementation=implementation, **options)


@each_implementation
@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param((F16, F16, F16), marks=pytest.mark.full),
        (BF16, F32, F32),
        (F32, BF16, BF16),
    ],
    ids=str,
)
def test_mixed_dtypes(implementation, dtypes):
    check(mesh_of(tensor=4), (12, D), dtypes, implementation=implementation)


@in_pairs("used, gather", IMPLEMENTATIONS, [0, 1], GATHER)
def test_one_output_unused(implementation, used, gather):
    args, cotangents = make_args(4, (12, D), gather=gather)
    fn = on_mesh(mesh_of(tensor=4), gather=gather, implementation=implementation)
    run = quick_jit(jax.grad(lambda args: jnp.vdot(fn(*args)[used], cotangents[used])))
    only = [np.zeros_like(c) for c in cotangents]
    only[used] = cotangents[used]
    compare((*quick_jit(fn)(*args), *run(args)), args, only, gather=gather)


@each_implementation
def test_a_gathered_result_that_leaves_as_one_array(implementation):
    # Its cotangent is then one array as well, of which `shard_map` gives each device a share.
    args, (dy, dresidual_out) = make_args(8, (16, D))
    local = functools.partial(
        sharded_add_rms_norm, axis_name="tensor", implementation=implementation
    )
    run = jax.shard_map(
        lambda partials, residual, weight: local(partials[0], residual, weight),
        mesh=mesh_of(tensor=8),
        in_specs=(P("tensor"), P("tensor"), P()),
        out_specs=(P(), P("tensor")),
        check_vma=False,
    )
    y, *others = graded(run)(args, (dy[0], dresidual_out))
    only_first = np.concatenate([dy[:1], np.zeros_like(dy[1:])])
    copies = np.broadcast_to(y, dy.shape)
    compare((copies, *others), args, (only_first, dresidual_out))


@pytest.mark.usefixtures("interpreted")
@each_gather
def test_the_kernels_themselves(monkeypatch, gather):
    # `vmap` binds the axis on one device, which is all that the interpreter has.
    monkeypatch.setattr(implementation_module, "runs_here", lambda: None)
    n, shape = 2, (8, D)
    args, cotangents = make_args(n, shape, (BF16, BF16, F32), gather=gather)
    split = lambda a: a.reshape(n, -1, D)
    fn = functools.partial(sharded_add_rms_norm, axis_name="tensor", gather=gather)
    on_each = jax.vmap(
        lambda *args_and_cotangents: value_and_grads(
            fn, args_and_cotangents[:3], args_and_cotangents[3:]
        ),
        in_axes=(0, 0, None, 0, 0),
        axis_name="tensor",
    )
    (partials, residual, weight), (dy, dresidual_out) = args, cotangents
    y, residual_out, dpartials, dresidual, dweights = quick_jit(on_each)(
        partials, split(residual), weight, dy if gather else split(dy), split(dresidual_out)
    )
    dweight = jnp.sum(dweights, axis=0)
    residual_out, dresidual, y = (
        a.reshape(shape) if a.ndim == 3 and a.shape[1] < 8 else a
        for a in (residual_out, dresidual, y)
    )
    compare((y, residual_out, dpartials, dresidual, dweight), args, cotangents, gather=gather)


# What goes between devices, and what is kept.

COLLECTIVES = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"


def collectives(fn, *args) -> Counter[tuple[str, tuple[int, ...]]]:
    """How many collectives a compiled function has, by name and shape of the result."""
    program = quick_jit(fn).lower(*args).compile().as_text()
    assert program is not None
    found = re.findall(rf" = (\(?[^()]+\)?) ({COLLECTIVES})(?:-start)?\(", program)
    assert len(found) == len(re.findall(rf" (?:{COLLECTIVES})(?:-start)?\(", program))
    return Counter(
        (name, tuple(int(size) for size in dims.split(",") if size))
        for results, name in found
        for dims in re.findall(r"\w\[([\d,]*)\]", results)
    )


@in_pairs("axes, dtype, gather", NORMS, [{"tensor": 8}, {"data": 2, "tensor": 4}], DTYPES, GATHER)
def test_between_devices(implementation, axes, dtype, gather):
    n, leading = axes["tensor"], ("data",) if "data" in axes else ()
    shape = (2,) * len(leading) + (40, D)
    whole, shard = ((1,) * len(leading) + (size, D) for size in (40, 40 // n))
    args, cotangents = make_args(n, shape, (dtype,) * 3, gather=gather)
    fn = on_mesh(mesh_of(**axes), leading, gather=gather, implementation=implementation)
    forward = Counter({("reduce-scatter", shard): 1, ("all-gather", whole): int(gather)})
    assert collectives(fn, *args) == +forward
    # dweight is summed over all devices, once.
    backward = Counter({("all-gather", whole): 1, ("reduce-scatter", shard): int(gather)})
    backward += Counter({("all-reduce", (D,)): 1})
    run = functools.partial(value_and_grads, fn)
    assert collectives(run, args, cotangents) == forward + backward


def test_a_weight_that_is_stored_in_parts_is_gathered_once():
    axes = {"data": 2, "fsdp": 2, "tensor": 2}
    mesh, split = mesh_of(**axes), ("data", "fsdp")
    dtypes = (F32,) * 3
    (partials, residual, weight), cotangents = make_args(2, (4, 6, D), dtypes)
    stored = jax.device_put(weight, NamedSharding(mesh, P("fsdp")))
    args = partials, residual, stored
    run = functools.partial(value_and_grads, on_mesh(mesh, (split,), implementation="xla"))
    compare(quick_jit(run)(args, cotangents), args, cotangents, num_parts=4)
    moved = collectives(run, args, cotangents)
    of_weight = {key: number for key, number in moved.items() if len(key[1]) == 1}
    assert of_weight == {("all-gather", (D,)): 1, ("all-reduce", (D,)): 1}


def kept(fn, args):
    """Shapes and dtypes of the arrays that are saved for the backward."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args))
    return Counter((a.shape, str(a.dtype)) for a in leaves if a.ndim)


def kept_on_one_device(n, args, **options):
    """`kept` of what one device of n runs."""
    found = []

    def local(partial, residual, weight, **options):
        fn = functools.partial(sharded_add_rms_norm, **options)
        found.append(kept(fn, (partial, residual, weight)))
        return fn(partial, residual, weight)

    jax.eval_shape(on_mesh(mesh_of(tensor=n), fn=local, **options), *args)
    return found[0]


@each_gather
def test_kept_with_the_kernel(kernel_formulas, gather):
    args, _ = make_args(8, (40, D), (BF16, BF16, F32))
    assert kept_on_one_device(8, args, gather=gather) == Counter(
        {
            ((5, D), "bfloat16"): 1,  # residual_out
            ((5,), "float32"): 1,  # rstd
            ((D,), "float32"): 1,  # the weight
        }
    )


@each_norm
@each_gather
def test_kept_is_a_part_of_what_one_device_keeps(implementation, gather):
    n, num_tokens = 8, 40
    args, _ = make_args(n, (num_tokens, D), (BF16, BF16, BF16))
    got = kept_on_one_device(n, args, implementation=implementation, gather=gather)
    on_one = kept(add_rms_norm, (args[0][0], *args[1:]))
    assert any(num_tokens in shape for shape, _ in on_one)
    part = lambda shape: tuple(size // n if size == num_tokens else size for size in shape)
    assert got == Counter({(part(shape), dtype): k for (shape, dtype), k in on_one.items()})


# Transformations.


@each_norm
def test_remat_keeps_names_and_does_not_sum_again(implementation):
    policy = jax.checkpoint_policies.save_only_these_names("residual", "rstd", "normed")

    def block(partial, residual, weight, **options):
        y, residual_out = sharded_add_rms_norm(partial, residual, weight, **options)
        return jnp.sin(y), residual_out  # whose backward wants y

    def with_policy(*args, **options):
        return jax.checkpoint(functools.partial(block, **options), policy=policy)(*args)

    args, cotangents = make_args(8, (40, D))
    run = lambda fn: functools.partial(
        value_and_grads, on_mesh(mesh_of(tensor=8), fn=fn, implementation=implementation)
    )
    chex.assert_trees_all_close(
        quick_jit(run(with_policy))(args, cotangents), quick_jit(run(block))(args, cotangents)
    )
    again = collectives(run(with_policy), args, cotangents)
    again.subtract(collectives(run(block), args, cotangents))
    assert +again == Counter({("all-gather", (40, D)): 1}) and not -again


@each_implementation
def test_scan_over_layers(implementation):
    n, num_layers, tokens = 4, 3, 8
    rng = np.random.default_rng(0)
    shares = rng.uniform(0.5, 1.5, size=(num_layers, n)).astype(np.float32)
    weights = rng.uniform(0.5, 1.5, size=(num_layers, D)).astype(np.float32)
    x, dx_out = rng.normal(size=(2, tokens, D)).astype(np.float32)

    def layers(norm, partial_of, x, y, shares, weights):
        def layer(carry, layer):
            share, weight = layer
            y, residual = carry
            return norm(partial_of(jnp.sin(y), share), residual, weight), None

        return jax.lax.scan(layer, (y, x), (shares, weights))[0]

    def sharded(x, shares, weights):
        y = jax.lax.all_gather(x, "tensor", tiled=True)
        norm = functools.partial(
            sharded_add_rms_norm, axis_name="tensor", implementation=implementation
        )
        return layers(norm, lambda a, share: a * share, x, y, shares, weights)[1]

    def on_one(x, shares, weights):
        norm = functools.partial(add_rms_norm, implementation="reference")
        return layers(norm, lambda a, share: a * jnp.sum(share), x, x, shares, weights)[1]

    on_all = jax.shard_map(
        sharded,
        mesh=mesh_of(tensor=n),
        in_specs=(P("tensor"), P(None, "tensor"), P()),
        out_specs=P("tensor"),
        check_vma=False,
    )
    got, expected = (graded(fn)((x, shares, weights), dx_out) for fn in (on_all, on_one))
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * np.max(np.abs(b)))


@each_implementation
def test_vmap_is_a_leading_axis(implementation):
    args, cotangents = make_args(4, (3, 8, D))

    def mapped(partial, residual, weight, **options):
        fn = functools.partial(sharded_add_rms_norm, **options)
        return jax.vmap(fn, in_axes=(0, 0, None))(partial, residual, weight)

    run = lambda fn: graded(
        on_mesh(mesh_of(tensor=4), (None,), fn=fn, implementation=implementation)
    )(args, cotangents)
    chex.assert_trees_all_close(run(mapped), run(sharded_add_rms_norm), atol=1e-6)


# Arguments.

CONFIG = Config(
    fwd_warps=1, fwd_reread=False, bwd_warps=1, bwd_blocks=1, bwd_stages=0, bwd_reread=False
)


@each_gather
def test_no_name_is_xla(gather):
    args, _ = make_args(8, (16, D))

    def program(name):
        fn = on_mesh(mesh_of(tensor=8), gather=gather, implementation=name)
        return str(jax.make_jaxpr(fn)(*args))

    assert program(None) == program("xla") != program("reference")


def call_on_shards(partial=(16, 8), residual=(2, 8), weight=(8,), **options):
    """Traces the call on one of eight devices, with arrays of these shapes there."""
    shapes = partial, residual, weight
    local = lambda: sharded_add_rms_norm(
        *(jnp.ones(shape) for shape in shapes), **({"axis_name": "tensor"} | options)
    )
    mapped = jax.shard_map(
        lambda: jax.tree.map(jnp.sum, local()),
        mesh=mesh_of(data=1, tensor=8),
        in_specs=(),
        out_specs=P(),
        check_vma=False,
    )
    return jax.eval_shape(mapped)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            {"partial": (17, 8)},
            r"num_tokens=17 \(axis -2 of partial, \(17, 8\)\) must be divisible by the 8 devices "
            "of axis_name='tensor'; pad to 24 tokens",
        ),
        ({"partial": (16, 5, 8), "residual": (2, 5, 8)}, "num_tokens=5 .* pad to 8"),
        (
            {"residual": (16, 8)},
            r"residual must be the token shard .* \(2, 8\) for partial \(16, 8\), got \(16, 8\); "
            "split axis -2 by 'tensor'",
        ),
        ({"partial": (4, 16, 8)}, r"residual must be .* \(4, 2, 8\) .* got \(2, 8\)"),
        ({"partial": (8,)}, r"partial must be \[..., T, D\], got \(8,\)"),
        ({"weight": (7,)}, r"weight must have shape \(8,\) \(partial is \(16, 8\)\), got \(7,\)"),
        ({"axis_name": "fsdp"}, "axis_name='fsdp' is not bound; .* inside of jax.shard_map"),
        ({"implementation": "triton"}, r"'triton' must be None or one of \('reference',"),
        (
            {"config": CONFIG, "implementation": "mosaic_gpu"},
            "implementation='mosaic_gpu' has no launch parameters",
        ),
        ({"casting": "fp32"}, "casting='fp32' must be one of"),
        ({"casting": "fp32", "implementation": "reference"}, "casting='fp32' must be one of"),
        (
            {"config": CONFIG, "implementation": "reference"},
            "implementation='reference' has no launch parameters",
        ),
        ({"config": CONFIG}, "has no launch parameters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments(unchecked_shapes, arguments, message):
    assert call_on_shards()
    with pytest.raises(ValueError, match=message):
        call_on_shards(**arguments)


def test_outside_of_shard_map():
    x = jnp.ones((8, D))
    with pytest.raises(ValueError, match="axis_name='tensor' is not bound"):
        sharded_add_rms_norm(x, x, x[0], axis_name="tensor")


# The kernel over peer memory. The interpreter has one device, so here only what is refused; the
# compilers see it in tests/aot, and GPUs below.


@pytest.mark.parametrize(
    "shapes, dtypes, message",
    [
        (((16, 8), (2, 8), (8,)), (F32, F32, F32), "hidden_size=8 cannot be dealt to 4 warps"),
        (((16, 256), (2, 256), (256,)), (BF16, F32, F32), "partial is bfloat16 and residual float"),
        (((16, 256), (2, 256), (256,)), (jnp.float8_e5m2, F32, F32), "partial is float8_e5m2, not"),
        (((16, 256), (2, 256), (256,)), (BF16, BF16, F32), "the device is 'cpu', not an NVIDIA"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_kernel_refuses(shapes, dtypes, message):
    def local():
        arrays = (jnp.ones(s, dtype) for s, dtype in zip(shapes, dtypes, strict=True))
        y, _ = sharded_add_rms_norm(*arrays, axis_name="tensor", implementation="mosaic_gpu")
        return jnp.sum(y)

    mapped = jax.shard_map(
        local, mesh=mesh_of(tensor=8), in_specs=(), out_specs=P(), check_vma=False
    )
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu': {message}"):
        jax.eval_shape(mapped)


def test_the_kernel_refuses_several_processes(monkeypatch):
    monkeypatch.setattr(peer_kernel, "runs_here", lambda: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    x = jnp.ones((16, 256), BF16)
    assert "there are 2 processes" in str(peer_kernel.unsupported_reason(x, x, x))


needs_gpus = [
    pytest.mark.gpu,
    pytest.mark.gpus,
    pytest.mark.skipif(jax.device_count() < 2, reason="needs several GPUs in one host"),
]


def gpu_meshes():
    n = jax.device_count()
    return [mesh_of(tensor=n)] + ([mesh_of(data=n // 2, tensor=2)] if n >= 4 else [])


class TestOnGpus:
    pytestmark = needs_gpus

    @pytest.mark.parametrize("gather", [True, False])
    @pytest.mark.parametrize("dtype", [BF16, F32], ids=jnp.dtype)
    @pytest.mark.parametrize(
        "tokens, hidden_size", [(1, 256), (37, 2880), (300, 4096), (2048, 4096), (129, 8192)]
    )
    def test_values_and_gradients(self, tokens, hidden_size, dtype, gather):
        for mesh in gpu_meshes():
            shape = tokens * mesh.shape["tensor"], hidden_size
            check(mesh, shape, (dtype, dtype, F32), gather=gather, implementation="mosaic_gpu")

    def test_leading_axes(self):
        mesh = gpu_meshes()[0]
        shape = 3, 10 * mesh.shape["tensor"], 1024
        check(mesh, shape, (BF16, BF16, BF16), implementation="mosaic_gpu", casting="llama")

    @pytest.mark.parametrize("gather", [True, False])
    def test_repeated_runs_have_the_same_bits(self, gather):
        mesh = gpu_meshes()[0]
        n = mesh.shape["tensor"]
        args, cotangents = make_args(n, (256 * n, 4096), (BF16, BF16, F32), gather=gather)
        run = graded(on_mesh(mesh, gather=gather, implementation="mosaic_gpu"))
        first = run(args, cotangents)
        for _ in range(20):
            chex.assert_trees_all_equal(run(args, cotangents), first)

    def test_operands_may_be_overwritten_at_once(self):
        """Devices that are late still read them; XLA uses their memory again as soon as it may."""
        mesh = gpu_meshes()[0]
        n = mesh.shape["tensor"]
        (partials, residual, weight), _ = make_args(n, (64 * n, 4096), (F32, F32, F32))

        def layers(implementation, partials, residual, weight):
            busy, columns = jnp.ones((1024, 1024), F32), jnp.arange(4096, dtype=F32)

            def layer(carry, number):
                partials, residual, busy = carry
                y, residual = on_mesh(mesh, implementation=implementation)(
                    partials, residual, weight
                )
                # Each device has another amount of other work, and another one in each layer.
                late = jax.shard_map(
                    lambda a, number: jax.lax.fori_loop(
                        0,
                        (jax.lax.axis_index("tensor") * 7 + number * 3) % 11,
                        lambda _, a: a @ a / 1024,
                        a,
                    ),
                    mesh=mesh,
                    in_specs=(P(), P()),
                    out_specs=P(),
                    check_vma=False,
                )
                # Every layer has sums of its own, and forgets how the last ones were rounded.
                sums = jnp.sin(columns + number.astype(F32)) + y / 8
                return (sums, residual * 0.5, late(busy, number)), None

            carry, _ = jax.lax.scan(layer, (partials, residual, busy), jnp.arange(200))
            return carry[:2]

        got, want = (
            quick_jit(functools.partial(layers, implementation))(partials, residual, weight)
            for implementation in ("mosaic_gpu", "xla")
        )
        # A stale or early row is wrong by its size, the order of additions by a few epsilons.
        chex.assert_trees_all_close(got, want, rtol=0, atol=1e-4)
