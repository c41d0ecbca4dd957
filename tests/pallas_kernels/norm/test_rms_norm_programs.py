"""The kernels of RMSNorm in programs: when they run, and their transformations."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import add_rms_norm, rms_norm
from pallas_kernels.gpu.device import target_device
from pallas_kernels.norm import Config, mosaic_gpu
from support.jaxprs import equations
from support.norm_formulas import (
    add_formula,
    compiled,
    formula,
    make_add_args,
    make_args,
    plain_add,
)
from support.numerics import assert_as_accurate, quick_jit, rounded

BF16, F32 = jnp.bfloat16, jnp.float32
CONFIG = Config(fwd_warps=4, fwd_reread=False, bwd_warps=4, bwd_blocks=1, bwd_stages=0, bwd_rows=1)

kernel = functools.partial(rms_norm, implementation="mosaic_gpu")
add_kernel = functools.partial(add_rms_norm, implementation="mosaic_gpu")
interpreted = pytest.mark.usefixtures("interpreted")


# Which implementation runs.


def kernels(fn, *args):
    """Names of the kernels in the program, with the number of arrays that each reads."""
    found = []
    for eqn in equations(jax.make_jaxpr(fn)(*args).jaxpr):
        meshes = eqn.params.get("meshes", (eqn.params.get("mesh"),))
        if any(hasattr(mesh, "kernel_name") for mesh in meshes):
            found.append((eqn.params["name"], len(eqn.invars)))
    return sorted(found)


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
def test_the_default_where_no_kernel_can_run_is_the_reference(on_h100, shape, dtype):
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


def plain_forward(options, config, x, residual, weight):
    total = (x.astype(F32) + residual.astype(F32)).astype(x.dtype)
    rstd = jax.lax.rsqrt(jnp.mean(jnp.square(total.astype(F32)), axis=-1) + options.eps)
    y = total.astype(F32) * rstd[:, None] * weight.astype(F32)
    return y.astype(x.dtype), total, rstd


def plain_backward(options, config, dy, dresidual_out, source, weight, rstd):
    x_hat, dy = source.astype(F32) * rstd[:, None], dy.astype(F32)
    dx_hat = dy * weight.astype(F32)
    mean = jnp.mean(dx_hat * x_hat, axis=-1, keepdims=True)
    dx = rstd[:, None] * (dx_hat - x_hat * mean) + dresidual_out.astype(F32)
    return dx.astype(source.dtype), jnp.sum(dy * x_hat, axis=0)


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs eight devices")
def test_tokens_split_over_a_mesh(monkeypatch, mesh, fresh_operations):
    # The gradient rule must add up dweight over the devices, once. The interpreter knows only one
    # device, so formulas are in the place of the kernels.
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
        for of_weight in (P("fsdp"),) if way is not add_kernel else (P(), P("fsdp")):
            put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
            got = compiled(way)(
                (put(args[0], rows), put(args[1], rows), put(args[2], of_weight)),
                tuple(put(a, rows) for a in cotangents),
            )
            assert_as_accurate(got, low_precision, exact, names=names)


@interpreted
@pytest.mark.parametrize(
    "axes",
    [
        (0, 0, None),
        pytest.param((1, None, None), marks=pytest.mark.full),
        pytest.param((0, 0, 0), marks=pytest.mark.full),
    ],
    ids=str,
)
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


# `jax.checkpoint` does not take the effects of the interpreter, so the test reads the program.
@pytest.mark.parametrize(
    "saved, again",
    [
        (("residual", "rstd", "normed"), []),
        (("residual", "rstd"), ["rms_norm_fwd"]),
        (("residual",), ["add_rms_norm_fwd"]),
        ((), ["add_rms_norm_fwd"]),
    ],
    ids=str,
)
def test_a_policy_that_keeps_the_named_values_reruns_no_kernel(saved, again):
    """The norm of a sum that is kept runs without the addition."""
    (x, residual, weight), _ = make_add_args((5, 64))
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, residual):
        y, residual = add_kernel(x @ jnp.eye(64), residual, weight)
        return jnp.sum(jnp.sin(y) + jnp.sin(residual))

    gradients = jax.grad(layer, argnums=(0, 1))
    names = [name for name, _ in kernels(gradients, x, residual)]
    program = jax.make_jaxpr(gradients)(x, residual)
    products = [e for e in equations(program.jaxpr) if e.primitive.name == "dot_general"]
    # Of the forward and of `dx`. Only another addition needs the product again.
    assert len(products) == 2 + ("add_rms_norm_fwd" in again)
    assert names == ["add_rms_norm_bwd", "add_rms_norm_fwd", *again]


def test_a_cotangent_that_is_not_used_is_not_read():
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
    for chosen, eps in ((None, 0.1), (CONFIG, 0.1), (CONFIG, 3.0)):
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
    # JAX writes a program to a file only where flatbuffers is installed.
    pytest.importorskip("flatbuffers", reason="`Exported.serialize` needs flatbuffers")
    assert jax.export.deserialize(exported.serialize()).mlir_module() == program
