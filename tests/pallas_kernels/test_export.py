"""`jax.export` of operations from a CPU: platforms, meshes and symbolic sizes. 10 s."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels
from pallas_kernels import implementation as implementation_module
from pallas_kernels import (
    linear_cross_entropy,
    linear_cross_entropy_plan,
    linear_distillation_loss,
    rms_norm,
    swiglu_mlp,
)
from pallas_kernels.fp8 import casts, fp8_swiglu_mlp, gated_kernel

F32 = jnp.float32
T, D, F, V = 64, 16, 32, 48


def model(x, weights, labels):
    norm, w_gate, w_up, w_down, head = weights
    y = swiglu_mlp(rms_norm(x, norm), w_gate, w_up, w_down)
    return linear_cross_entropy(y, head, labels, reduction="sum")


def shapes(num_tokens: Any = T) -> tuple[Any, Any, Any]:
    array = lambda *shape: jax.ShapeDtypeStruct(shape, F32)
    weights = array(D), array(D, F), array(D, F), array(F, D), array(V, D)
    return array(num_tokens, D), weights, jax.ShapeDtypeStruct((num_tokens,), jnp.int32)


def arrays():
    numbers = np.random.default_rng(0)
    x, weights, _ = jax.tree.map(
        lambda a: jnp.asarray(numbers.standard_normal(a.shape), F32), shapes()
    )
    return x, weights, jnp.asarray(numbers.integers(0, V, T), jnp.int32)


def split(axis_type):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    x, weights, labels = shapes()
    put = lambda a, spec: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))
    whole = jax.tree.map(lambda a: put(a, P()), weights)
    return mesh, (put(x, P("data")), whole, put(labels, P("data")))


gradients = jax.grad(model, (0, 1))


def assert_equal_gradients(got):
    """Equal up to the order of float32 sums."""
    want = jax.tree.leaves(gradients(*arrays()))
    for one, other in zip(jax.tree.leaves(got), want, strict=True):
        assert np.linalg.norm(one - other) < 1e-5 * np.linalg.norm(other)


def test_one_program_for_two_platforms():
    exported = jax.export.export(jax.jit(gradients), platforms=["cpu", "cuda"])(*shapes())
    got = exported.call(*arrays())
    assert_equal_gradients(got)


# The normal run exports each operation alone, in test_arguments.py.
@pytest.mark.full
def test_the_kernels_for_one_gpu_that_is_not_here():
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    args = array(8, 128), array(128), *[array(128, 128)] * 4
    labels = jax.ShapeDtypeStruct((8,), jnp.int32)
    kernels: dict[str, Any] = {"implementation": "mosaic_gpu"}

    def loss(x, norm, w_gate, w_up, w_down, head, labels):
        y = swiglu_mlp(rms_norm(x, norm, **kernels), w_gate, w_up, w_down, **kernels)
        return linear_cross_entropy(y, head, labels, **kernels)

    run = jax.jit(jax.grad(loss, tuple(range(6))))
    exported = jax.export.export(run, platforms=["cuda"])(*args, labels)
    for name in ("rms_norm_bwd", "gated_matmul_backward", "linear_exponentials"):
        assert name in exported.mlir_module()


@pytest.mark.parametrize("how", ["explicit", "manual"])
def test_several_devices(how):
    mesh, args = split(AxisType.Explicit if how == "explicit" else AxisType.Auto)
    fn = gradients
    if how == "manual":
        local = lambda *args: jax.lax.psum(model(*args), "data")
        specs = P("data"), P(), P("data")
        fn = jax.grad(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P()), (0, 1))
    with jax.set_mesh(mesh):
        exported = jax.export.export(jax.jit(fn))(*args)
    assert exported.nr_devices == 8


def test_auto_axes_are_refused_with_a_remedy():
    mesh, args = split(AxisType.Auto)
    message = r"jax.export of \w+ for 8 devices: on Auto axes .* use a mesh of Explicit axes"
    with jax.set_mesh(mesh), pytest.raises(NotImplementedError, match=message):
        jax.export.export(jax.jit(gradients))(*args)


def test_open_sizes():
    (size,) = jax.export.symbolic_shape("t")
    exported = jax.export.export(jax.jit(gradients))(*shapes(size))
    got = exported.call(*arrays())
    assert_equal_gradients(got)
    text = str(pallas_kernels.explain(model, *shapes(size)))
    assert text.count("has symbolic sizes") == 3 and "linear_cross_entropy" in text
    named = functools.partial(linear_cross_entropy, implementation="xla")
    x, weights, labels = shapes(size)
    with pytest.raises(NotImplementedError, match="has symbolic sizes"):
        jax.eval_shape(named, x, weights[-1], labels)
    with pytest.raises(NotImplementedError, match=r"there is no plan: .* has symbolic sizes"):
        linear_cross_entropy_plan(x, weights[-1], labels)


def test_open_sizes_where_the_kernels_of_fp8_run(monkeypatch):
    """The MLP asks for the kernels of a GPU, and none of them takes a symbolic number of tokens."""
    for module in (casts, gated_kernel, implementation_module):
        monkeypatch.setattr(module, "reason_not_here", lambda: None)
    (size,) = jax.export.symbolic_shape("t")
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    weights = array(8192, 16384), array(8192, 16384), array(16384, 8192)

    def loss(x, *weights):
        return jnp.sum(fp8_swiglu_mlp(x, *weights, recipe="tensorwise"), dtype=jnp.float32)

    x = array(size, 8192)
    gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1, 2, 3)), x, *weights)
    assert [a.shape for a in gradients] == [a.shape for a in (x, *weights)]


@pytest.mark.parametrize("implementation", [None, "reference"])
@pytest.mark.parametrize("distils", [False, True], ids=["labels", "teacher"])
def test_open_sizes_of_a_split_vocabulary_are_refused_with_a_remedy(distils, implementation):
    (size,) = jax.export.symbolic_shape("t")
    x, (*_, weight), labels = shapes(size)
    options: Any = {"implementation": implementation, "vocab_axis": "data"}

    def loss(x, weight, labels):
        if distils:
            return linear_distillation_loss(x, weight, x, weight, **options)
        return linear_cross_entropy(x, weight, labels, **options)

    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P())
    with pytest.raises(
        ValueError,
        match=r"vocab_axis='data': .* has symbolic sizes; export with numbers to run a kernel",
    ):
        jax.eval_shape(split, x, weight, labels)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
@pytest.mark.parametrize("layout", ["vd", "dv"])
def test_an_open_vocabulary_is_refused_with_a_remedy(implementation, layout):
    (size,) = jax.export.symbolic_shape("v")
    x, _, labels = shapes()
    weight = jax.ShapeDtypeStruct((size, D) if layout == "vd" else (D, size), F32)
    loss = functools.partial(
        linear_cross_entropy, implementation=implementation, weight_layout=layout
    )
    with pytest.raises(
        NotImplementedError, match=r"symbolic size, V = v; .* so export with a number"
    ):
        jax.eval_shape(loss, x, weight, labels)


def test_a_number_of_positions_at_a_time_needs_their_number():
    (size,) = jax.export.symbolic_shape("t")
    weights = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 16), (8, 16), (16, 8))]
    of = functools.partial(swiglu_mlp, save="x", chunk_size=4)
    with pytest.raises(ValueError, match="chunk_size=4 needs a number of positions"):
        jax.eval_shape(of, jax.ShapeDtypeStruct((2, size, 8), jnp.float32), *weights)
