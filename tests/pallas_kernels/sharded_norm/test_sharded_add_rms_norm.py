"""The sharded residual-add RMSNorm on eight devices: values, gradients, arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from pallas_kernels import implementation as implementation_module
from pallas_kernels import sharded_add_rms_norm
from pallas_kernels.norm import Config
from support.numerics import quick_jit, value_and_grads
from support.sharded_norm import (
    BF16,
    DTYPES,
    F16,
    F32,
    GATHER,
    IMPLEMENTATIONS,
    NORMS,
    D,
    check,
    compare,
    each_gather,
    each_implementation,
    graded,
    in_pairs,
    make_args,
    mesh_of,
    on_mesh,
    some_of,
)

# Values and gradients.

MESHES = [
    {"tensor": 8},
    {"data": 2, "tensor": 4},
    {"data": 4, "tensor": 2},
    {"data": 8, "tensor": 1},
    {"tensor": 1},
]


# The reference has one mesh in the normal run.
@some_of(
    "axes, dtype, gather",
    IMPLEMENTATIONS,
    MESHES,
    DTYPES,
    GATHER,
    normal=[
        ("reference", MESHES[1], BF16, True),
        *(
            (norm, axes, DTYPES[(i + j) % 2], GATHER[(i + 2 * j) % 4 // 2])
            for i, axes in enumerate(MESHES)
            for j, norm in enumerate(NORMS)
        ),
    ],
)
def test_meshes(implementation, axes, dtype, gather):
    shape, leading = (3 * axes["tensor"], D), ()
    if "data" in axes:
        shape, leading = (2 * axes["data"], *shape), ("data",)
    mesh = mesh_of(**axes)
    check(mesh, shape, (dtype,) * 3, leading, gather=gather, implementation=implementation)


SHAPES = (4, D), (2, 3, 4, D), (12, D), (4 * 13, D), (3, 8, D)


@some_of(
    "shape",
    IMPLEMENTATIONS,
    SHAPES,
    normal=[("reference", SHAPES[1]), ("xla", SHAPES[0]), ("xla_kernel", SHAPES[1])],
)
def test_token_counts_and_leading_axes(implementation, shape):
    check(mesh_of(tensor=4), shape, (BF16, BF16, F32), implementation=implementation)


@in_pairs(
    "axes, gather",
    [*IMPLEMENTATIONS, "mosaic_gpu"],
    [{"tensor": 8}, {"data": 2, "tensor": 4}],
    GATHER,
)
def test_no_tokens(implementation, axes, gather):
    """The kernel would raise on a CPU; there is nothing to launch."""
    if jax.device_count() < 8:
        pytest.skip("needs eight devices; nothing is launched, so eight CPU devices show the same")
    cases = [((2, 0, D), ("data",))] if "data" in axes else [((0, D), ()), ((0, 16, D), (None,))]
    for shape, leading in cases:
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


@some_of(
    "options, dtype",
    IMPLEMENTATIONS,
    OPTIONS,
    DTYPES,
    normal=[
        ("reference", OPTIONS[0], F32),
        ("xla", OPTIONS[0], BF16),
        ("xla", OPTIONS[1], BF16),
        ("xla_kernel", OPTIONS[1], BF16),
        ("xla_kernel", OPTIONS[2], F32),
    ],
)
def test_options_of_the_norm(implementation, options, dtype):
    mesh = mesh_of(tensor=4)
    check(mesh, (12, D), (dtype,) * 3, implementation=implementation, **options)


MIXED = (BF16, F32, F32), (F32, BF16, BF16), (F16, F16, F16)


@some_of(
    "dtypes",
    IMPLEMENTATIONS,
    MIXED,
    normal=[("reference", MIXED[0]), ("xla", MIXED[1]), ("xla_kernel", MIXED[0])],
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
    # The cotangent of `y` is one array as well, and `shard_map` gives each device a share of it.
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
    # The interpreter knows only one device, and `vmap` binds the axis there.
    monkeypatch.setattr(implementation_module, "reason_not_here", lambda: None)
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


# Arguments.

CONFIG = Config(fwd_warps=1, fwd_reread=False, bwd_warps=1, bwd_blocks=1, bwd_stages=0, bwd_rows=1)


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
            "is for the norm between XLA's collectives; .* implementation='xla'",
        ),
        ({"casting": "fp32"}, "casting='fp32' must be one of"),
        ({"casting": "fp32", "implementation": "reference"}, "casting='fp32' must be one of"),
        (
            {"config": CONFIG, "implementation": "reference"},
            "is for the norm between XLA's collectives; .* implementation='xla'",
        ),
        ({"config": CONFIG}, "has no launch parameters"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_arguments(unchecked_shapes, arguments, message):
    assert call_on_shards()
    with pytest.raises(ValueError, match=message):
        call_on_shards(**arguments)


def test_several_axes_are_refused(unchecked_shapes):
    with pytest.raises(
        TypeError, match=r"axis_name=\('tensor',\) must be the name of one mesh axis"
    ):
        call_on_shards(axis_name=("tensor",))


def test_outside_of_shard_map():
    x = jnp.ones((8, D))
    with pytest.raises(ValueError, match="axis_name='tensor' is not bound"):
        sharded_add_rms_norm(x, x, x[0], axis_name="tensor")
