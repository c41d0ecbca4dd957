"""The Mosaic GPU kernels of RMSNorm, interpreted: shapes, launch parameters, transformations.

What holds for every implementation is in test_rms_norm.py.
"""

import dataclasses
import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import add_rms_norm, rms_norm
from pallas_kernels.gpu.device import Device, target_device
from pallas_kernels.norm import Config, backward_kernel, forward_kernel, mosaic_gpu
from pallas_kernels.norm.config import Options
from pallas_kernels.norm.rows import column_parts, split_row
from support.norm_formulas import (
    add_formula,
    check,
    check_add,
    compiled,
    formula,
    make_add_args,
    make_args,
    plain_add,
)
from support.numerics import assert_as_accurate, quick_jit, rounded

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EPS32 = float(np.finfo(np.float32).eps)
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
BASE = Config(
    fwd_warps=4, fwd_reread=False, bwd_warps=4, bwd_blocks=1, bwd_stages=0, bwd_reread=False
)

kernel = functools.partial(rms_norm, implementation="mosaic_gpu")
add_kernel = functools.partial(add_rms_norm, implementation="mosaic_gpu")
interpreted = pytest.mark.usefixtures("interpreted")


def config(**changes):
    return dataclasses.replace(BASE, **changes)


def options(config, *, eps=1e-6, weight_offset=0.0, casting="float32"):
    return Options(eps, weight_offset, casting, config)


# Shapes.


# Rows around the tiles of 4 and 32 that blocks have, widths that no access of 16 bytes divides.
@interpreted
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((1, 64), BF16),
        ((2, 720), BF16),
        ((3, 96), F16),
        pytest.param((4, 130), BF16, marks=pytest.mark.full),
        pytest.param((5, 1024), BF16, marks=pytest.mark.full),
        pytest.param((7, 2880), BF16, marks=pytest.mark.full),
        pytest.param((31, 64), F32, marks=pytest.mark.full),
        ((33, 66), BF16),
        pytest.param((37, 64), F16, marks=pytest.mark.full),
        pytest.param((3, 4096), BF16, marks=pytest.mark.full),
        pytest.param((2, 4096), F32, marks=pytest.mark.full),
        pytest.param((5, 65), F32, marks=pytest.mark.full),
        pytest.param((1, 255), F32, marks=pytest.mark.full),
        ((4, 257), F32),
        pytest.param((2, 3, 720), F32, marks=pytest.mark.full),
        ((3, 2880), F16),
    ],
    ids=str,
)
def test_shapes_that_divide_nothing(shape, dtype):
    check_add(*make_add_args(shape, dtype), implementation="mosaic_gpu")


@interpreted
@pytest.mark.parametrize(
    # Rows that lie as those above, of each dtype and with each width of an access.
    "shape, dtype",
    [((1, 64), BF16), ((2, 720), BF16), ((33, 66), BF16), ((3, 2880), F16), ((4, 257), F32)],
    ids=str,
)
def test_shapes_that_divide_nothing_without_a_residual(shape, dtype):
    check(*make_args(shape, dtype), implementation="mosaic_gpu")


@interpreted
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_an_eps_of_zero(num_tokens):
    # The rows that a single token is padded with have no length to divide by.
    check(*make_args((num_tokens, 64)), implementation="mosaic_gpu", eps=0.0)


# Launch parameters.


@interpreted
@pytest.mark.parametrize(
    "hidden_size, dtype, residual",
    [
        pytest.param(512, BF16, False, marks=pytest.mark.full),
        (512, BF16, True),
        pytest.param(720, F32, True, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_all_forward_configurations_agree(hidden_size, dtype, residual):
    (x, r, weight), _ = make_add_args((5, hidden_size), dtype, weight_dtype=F32)

    def run(config):
        forward = functools.partial(forward_kernel.forward, options(config))
        return quick_jit(forward)(x, r if residual else None, weight)

    y, residual_out, rstd = run(BASE)
    exact = formula(residual_out if residual else x, weight, x)[0]
    assert_as_accurate([y], rounded([exact], [y]), [exact], names=["y"])
    for warps, reread in itertools.product((1, 4, 8, 16), (False, True)):
        chosen = config(fwd_warps=warps, fwd_reread=reread)
        if chosen == BASE:
            continue
        other, total, other_rstd = run(chosen)
        chex.assert_trees_all_equal(total, residual_out)
        # The order in which a row is added up differs, nothing else.
        np.testing.assert_allclose(other_rstd, rstd, rtol=4 * EPS32)
        same = np.asarray(other_rstd) == np.asarray(rstd)
        assert same.any()
        np.testing.assert_array_equal(np.asarray(other)[same], np.asarray(y)[same])


# Rows in shared memory need parts of rows of a multiple of 16 bytes. With and without a residual go
# both dtypes, one warp a row, several, and several warpgroups, and each way to read a row.
@interpreted
@pytest.mark.parametrize(
    "hidden_size, dtype, warps, residual",
    [
        pytest.param(512, BF16, 1, True, marks=pytest.mark.full),
        pytest.param(512, BF16, 4, False, marks=pytest.mark.full),
        (512, BF16, 16, True),
        (720, F32, 1, False),
        pytest.param(720, F32, 4, True, marks=pytest.mark.full),
        pytest.param(720, BF16, 1, False, marks=pytest.mark.full),
        pytest.param(720, F16, 8, False, marks=pytest.mark.full),
        pytest.param(720, F16, 8, True, marks=pytest.mark.full),
    ],
    ids=str,
)
@pytest.mark.parametrize("every_way", [False, pytest.param(True, marks=pytest.mark.full)])
def test_all_backward_configurations_agree(
    monkeypatch, hidden_size, dtype, warps, residual, every_way
):
    # With 11 rows and one warp a row the last tile repeats a row, in one block of several or not.
    shape = (11 if warps == 1 else 5, hidden_size)
    source, weight, dy = make_args(shape, dtype, F32)
    dresidual = make_args(shape, dtype, seed=1)[0] if residual else None
    zero = np.zeros_like(dy)
    exact = add_formula((None, None, weight), (dy, dresidual if residual else zero), source)[2::2]
    mean_square = np.mean(np.square(np.asarray(source, np.float64)), -1)
    rstd = jnp.asarray(1 / np.sqrt(mean_square + 1e-6), F32)
    whole_accesses = hidden_size // warps * jnp.dtype(dtype).itemsize % 16 == 0
    stages = (0, 2, 3) if whole_accesses else (0,)
    ways = [*itertools.product(stages, (False, True))]
    if not every_way:  # each number of stages, and both ways to read a row with and without them
        ways = [way for way in ways if way not in ((2, True), (3, False))]
    for i, (stages, reread) in enumerate(ways):
        # In turn: one block or three, one partial sum a block or one for every second row.
        blocks, rows_per_partial = ((1, 256), (3, 2), (1, 2), (3, 256))[i % 4]
        monkeypatch.setattr(backward_kernel, "_ROWS_PER_PARTIAL", rows_per_partial)
        chosen = config(bwd_warps=warps, bwd_blocks=blocks, bwd_stages=stages, bwd_reread=reread)
        backward = functools.partial(backward_kernel.backward, options(chosen))
        got = quick_jit(backward)(dy, dresidual, source, weight, rstd)
        assert_as_accurate(got, rounded(exact, got), exact, names=("dx", "dweight"))


@interpreted
@pytest.mark.parametrize(
    "tokens_per_block", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (2, 5))]
)
def test_rows_are_dealt_to_blocks_and_partial_sums(monkeypatch, tokens_per_block):
    # Tokens that are as many as blocks, less, and more than one block's partial sum covers.
    monkeypatch.setattr(backward_kernel, "_ROWS_PER_PARTIAL", tokens_per_block)
    for num_tokens, warps in ((4, 1), (13, 1), (22, 1), (1, 4), (2, 4), (7, 4)):
        stages = 2 if num_tokens % 2 else 0
        chosen = config(fwd_warps=warps, bwd_warps=warps, bwd_blocks=2, bwd_stages=stages)
        args = make_args((num_tokens, 128), BF16, F32)
        check(*args, implementation="mosaic_gpu", config=chosen)


@interpreted
@pytest.mark.parametrize(
    "hidden_size, dtype, warps, stages",
    [(32768, BF16, 16, 0), pytest.param(20480, F32, 32, 2, marks=pytest.mark.full)],
)
def test_columns_in_parts(hidden_size, dtype, warps, stages):
    split = split_row(hidden_size, warps, jnp.dtype(dtype).itemsize)
    assert split is not None and (column_parts(split) or 0) > 1
    chosen = config(fwd_warps=16, bwd_warps=warps, bwd_stages=stages)
    args, cotangents = make_add_args((2, hidden_size), dtype)
    check_add(args, cotangents, implementation="mosaic_gpu", config=chosen)


@interpreted
@pytest.mark.parametrize(
    "dtypes, warps",
    [
        pytest.param(dtypes, warps, marks=() if i % 2 == j else pytest.mark.full)
        for i, dtypes in enumerate(
            [(BF16, F32, BF16), (F32, BF16, F16), (F16, F32, F32), (BF16, F16, F32)]
        )
        for j, warps in enumerate((1, 4))
    ],
)
def test_three_dtypes(dtypes, warps):
    chosen = config(fwd_warps=warps, bwd_warps=warps)
    args, cotangents = make_add_args((5, 200), *dtypes)
    check_add(args, cotangents, implementation="mosaic_gpu", config=chosen, weight_offset=1.0)


@interpreted
@pytest.mark.parametrize("warps, stages, reread", [(1, 0, False), (4, 2, True)])
@pytest.mark.parametrize("weight_offset", [0.0, 1.0])
def test_llama_casting(warps, stages, reread, weight_offset):
    chosen = config(
        fwd_warps=warps, fwd_reread=reread, bwd_warps=warps, bwd_stages=stages, bwd_reread=reread
    )
    x, weight, dy = make_args((5, 256), BF16, F32, weight_mean=1.0 - weight_offset)
    run = lambda **options: compiled(
        rms_norm, casting="llama", weight_offset=weight_offset, **options
    )((x, weight), dy)
    got = run(implementation="mosaic_gpu", config=chosen)
    exact = formula(x, weight, dy, weight_offset=weight_offset)
    names = ("y", "dx", "dweight")
    assert_as_accurate(got, run(implementation="reference"), exact, names=names)
    # The weight was multiplied with rounded numbers, so they are its gradient's too.
    x_hat = formula(x, np.ones(256), x)[0]
    below, above = ((x_hat * (1 + e)).astype(BF16) for e in (-4 * EPS32, 4 * EPS32))
    sure = np.all(below == above, axis=0)
    assert np.mean(sure) > 0.9
    dweight = np.sum(np.asarray(dy, np.float64) * below.astype(np.float64), axis=0)
    np.testing.assert_allclose(np.asarray(got[2])[sure], dweight[sure], rtol=0, atol=1e-5)
    y = (below.astype(F32) * (np.asarray(weight) + np.float32(weight_offset))).astype(BF16)
    np.testing.assert_array_equal(np.asarray(got[0])[:, sure], y[:, sure])


# Which implementation runs.


def kernels(fn, *args):
    """Names of the kernels in the program, with the number of arrays that each reads."""

    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            meshes = eqn.params.get("meshes", (eqn.params.get("mesh"),))
            if any(hasattr(mesh, "kernel_name") for mesh in meshes):
                yield eqn.params["name"], len(eqn.invars)
                continue
            for inner in jax.tree.leaves(list(eqn.params.values())):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from walk(getattr(inner, "jaxpr", inner))

    return sorted(walk(jax.make_jaxpr(fn)(*args).jaxpr))


@pytest.fixture
def on_h100(monkeypatch):
    from pallas_kernels.gpu import device as gpu_device
    from pallas_kernels.gpu import kernel as gpu_kernel_module

    for module in (gpu_device, gpu_kernel_module, mosaic_gpu, backward_kernel):
        monkeypatch.setattr(module, "target_device", lambda: H100)


def test_the_default_without_a_gpu_is_the_reference():
    x, weight, _ = make_args((8, 64))
    assert target_device().capability is None
    assert not kernels(rms_norm, x, weight)
    assert not kernels(add_rms_norm, x, x, weight)


def test_the_default_on_an_h100_is_the_kernel(on_h100):
    x, weight, _ = make_args((8, 4096), BF16)
    assert kernels(rms_norm, x, weight) == [("rms_norm_fwd", 2)]
    assert kernels(add_rms_norm, x, x, weight) == [("add_rms_norm_fwd", 3)]
    assert kernels(jax.grad(lambda x: jnp.sum(rms_norm(x, weight))), x) == [
        ("rms_norm_bwd", 4),
        ("rms_norm_fwd", 2),
    ]


@pytest.mark.parametrize("shape, dtype", [((8, 32), BF16), ((8, 4099), BF16)], ids=str)
def test_the_default_for_what_no_kernel_can_do_is_the_reference(on_h100, shape, dtype):
    x, weight, _ = make_args(shape, dtype)
    assert not kernels(rms_norm, x, weight)


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("how", ["argument", "context", "constraint"])
def test_the_default_for_arrays_of_several_devices_is_the_kernel(on_h100, mesh, how):
    x, weight, _ = make_args((8, 64))
    sharding = NamedSharding(mesh, P(("data", "fsdp")))
    if how == "argument":
        found = kernels(rms_norm, jax.device_put(x, sharding), weight)
    elif how == "context":
        with jax.set_mesh(mesh):
            found = kernels(rms_norm, x, weight)
    else:
        constrain = lambda x: jax.lax.with_sharding_constraint(x, sharding)
        found = kernels(lambda x: rms_norm(constrain(x), weight), x)
    assert found == [("rms_norm_fwd", 2)]


def test_the_default_inside_of_shard_map_is_the_kernel(on_h100, mesh):
    x, weight, _ = make_args((8, 64))
    rows = P(("data", "fsdp"))
    fn = jax.shard_map(rms_norm, mesh=mesh, in_specs=(rows, P()), out_specs=rows, check_vma=False)
    for argument in (x, jax.device_put(x, NamedSharding(mesh, rows))):
        assert kernels(fn, argument, weight) == [("rms_norm_fwd", 2)]


# Transformations.


def plain_forward(options, x, residual, weight):
    total = (x.astype(F32) + residual.astype(F32)).astype(x.dtype)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(total.astype(F32)), axis=-1) + options.eps)
    y = total.astype(F32) * rstd[:, None] * weight.astype(F32)
    return y.astype(x.dtype), total, rstd


def plain_backward(options, dy, dresidual_out, source, weight, rstd):
    x_hat, dy = source.astype(F32) * rstd[:, None], dy.astype(F32)
    dx_hat = dy * weight.astype(F32)
    mean = jnp.mean(dx_hat * x_hat, axis=-1, keepdims=True)
    dx = rstd[:, None] * (dx_hat - x_hat * mean) + dresidual_out.astype(F32)
    return dx.astype(source.dtype), jnp.sum(dy * x_hat, axis=0)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs eight devices")
def test_tokens_split_over_a_mesh(monkeypatch, mesh, fresh_operations):
    # To the interpreter the kernels of all devices are one, so the gradient rule is tested with
    # formulas in their place: that it adds up dweight over the devices, and only once.
    monkeypatch.setattr(mosaic_gpu, "forward", plain_forward)
    monkeypatch.setattr(mosaic_gpu, "backward", plain_backward)
    args, cotangents = make_add_args((16, 64), BF16, weight_dtype=F32)
    rows = P(("data", "fsdp"))
    manual = functools.partial(
        jax.shard_map, add_kernel, mesh=mesh, in_specs=(rows, rows, P()), out_specs=(rows, rows)
    )
    exact = add_formula(args, cotangents, compiled(plain_add)(args, cotangents)[1])
    low_precision = compiled(plain_add)(args, cotangents)
    names = ("y", "residual_out", "dx", "dresidual", "dweight")
    for way in (add_kernel, manual(check_vma=True), manual(check_vma=False)):
        for of_weight in (P(), P("fsdp")):
            put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
            got = compiled(way)(
                (put(args[0], rows), put(args[1], rows), put(args[2], of_weight)),
                tuple(put(a, rows) for a in cotangents),
            )
            assert_as_accurate(got, low_precision, exact, names=names)


@interpreted
@pytest.mark.parametrize("axes", [(0, 0, None), (1, None, None), (0, 0, 0)], ids=str)
def test_vmap_is_the_loop(axes):
    args, cotangents = make_add_args((5, 96))
    more = [
        a if axis is None else jnp.stack([a, 2 * a, -a], axis)
        for a, axis in zip(args, axes, strict=True)
    ]
    value_and_grads = lambda *args: jax.vjp(add_kernel, *args)[1](cotangents)
    got = quick_jit(jax.vmap(value_and_grads, in_axes=axes))(*more)
    for i, factor in enumerate((1, 2, -1)):
        one = tuple(a if axis is None else factor * a for a, axis in zip(args, axes, strict=True))
        exact = add_formula(one, cotangents, one[0] + one[1])[2:]
        gradients = [a[i] for a in got]
        names = ("dx", "dresidual", "dweight")
        assert_as_accurate(gradients, rounded(exact, gradients), exact, names=names)


@interpreted
def test_scanned_layers():
    x, weight, _ = make_args((5, 64))
    weights = jnp.stack([weight, weight / 2, 2 * weight])

    def gradients(norm):
        def layer(residual, weight):
            y, residual = norm(jnp.sin(residual), residual, weight)
            return residual + jnp.sin(y), None

        loss = lambda x, weights: jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0]))
        return quick_jit(jax.grad(loss, argnums=(0, 1)))(x, weights)

    want = gradients(functools.partial(add_rms_norm, implementation="reference"))
    chex.assert_trees_all_close(gradients(add_kernel), want, rtol=1e-4, atol=1e-5)


# By the program, because the interpreter has effects, which `jax.checkpoint` does not take.
@pytest.mark.parametrize(
    "saved, runs", [(("residual", "rstd", "normed"), 1), (("residual",), 2), ((), 2)], ids=str
)
def test_a_policy_that_keeps_the_named_values_reruns_no_kernel(saved, runs):
    (x, residual, weight), _ = make_add_args((5, 64))
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, residual):
        y, residual = add_kernel(x, residual, weight)
        return jnp.sum(jnp.sin(y) + jnp.sin(residual))

    names = [name for name, _ in kernels(jax.grad(layer, argnums=(0, 1)), x, residual)]
    assert names == ["add_rms_norm_bwd"] + ["add_rms_norm_fwd"] * runs


def test_what_is_not_used_is_not_read():
    (x, residual, weight), _ = make_add_args((5, 64))
    of = lambda pick: lambda *args: sum(jnp.sum(jnp.sin(a)) for a in pick(add_kernel(*args)))
    both = kernels(jax.grad(of(lambda out: out)), x, residual, weight)
    only_y = kernels(jax.grad(of(lambda out: out[:1])), x, residual, weight)
    assert both == [("add_rms_norm_bwd", 5), ("add_rms_norm_fwd", 3)]
    assert only_y == [("add_rms_norm_fwd", 3), ("rms_norm_bwd", 4)]


@interpreted
def test_a_sum_that_is_used_alone_has_no_gradient_of_the_norm():
    (x, residual, weight), (_, dresidual_out) = make_add_args((5, 64))
    x = x.at[2, 7].set(np.inf)
    fn = lambda *args: jnp.vdot(add_kernel(*args)[1], dresidual_out)
    dx, dresidual, dweight = jax.grad(fn, argnums=(0, 1, 2))(x, residual, weight)
    np.testing.assert_array_equal(dx, dresidual_out)
    np.testing.assert_array_equal(dresidual, dresidual_out)
    assert not np.any(dweight)


@interpreted
def test_options_as_static_arguments():
    x, weight, dy = make_args((5, 128))
    fn = jax.jit(kernel, static_argnames=("eps", "weight_offset", "casting", "config"))
    for chosen, eps in ((None, 0.1), (BASE, 0.1), (BASE, 3.0)):
        y = fn(x, weight, eps=eps, weight_offset=1.0, casting="gemma", config=chosen)
        exact = formula(x, weight, dy, eps=eps, weight_offset=1.0)[:1]
        assert_as_accurate([y], rounded(exact, [y]), exact, names=["y"])


def test_export_without_a_gpu(on_h100):
    x, weight, dy = make_args((8, 1024), BF16)
    fn = lambda x, weight: jax.grad(lambda x: jnp.vdot(rms_norm(x, weight), dy))(x)
    exported = jax.export.export(jax.jit(fn), platforms=["cuda"])(x, weight)
    assert exported.platforms == ("cuda",)
    program = exported.mlir_module()
    assert "mosaic_gpu" in program
    # Written to a file only where flatbuffers is installed.
    pytest.importorskip("flatbuffers", reason="`Exported.serialize` needs flatbuffers")
    assert jax.export.deserialize(exported.serialize()).mlir_module() == program
