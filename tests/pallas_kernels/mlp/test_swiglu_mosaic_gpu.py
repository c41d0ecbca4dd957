"""The Mosaic GPU kernels of SwiGLU, interpreted: tiles, launch parameters, transformations.

test_swiglu.py has the tests of every implementation.
"""

import dataclasses
import functools
import itertools
import json
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import swiglu
from pallas_kernels.gpu import device as gpu_device
from pallas_kernels.gpu import kernel as gpu_kernel_module
from pallas_kernels.gpu.device import Device
from pallas_kernels.mlp import Config, mosaic_gpu
from pallas_kernels.mlp.config import (
    backward_candidates,
    default_config,
    forward_candidates,
    guess_config,
)
from support.numerics import assert_as_accurate, quick_jit, rounded, value_and_grads
from support.swiglu_formulas import NAMES, formula, make_args

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
L4 = Device("NVIDIA L4", (8, 9), 58)
ONE = Config(fwd_accesses=1, bwd_accesses=1)  # tiles of one chunk, 1024 elements of 16 bits

kernel = functools.partial(swiglu, implementation="mosaic_gpu")
interpreted = pytest.mark.usefixtures("interpreted")


def graded(**options):
    """`(y, dgate, dup)` of the kernels, compiled."""
    fn = functools.partial(kernel, **options)
    return quick_jit(lambda gate, up, dy: value_and_grads(fn, (gate, up), dy))


def check(args, **options):
    got = graded(**options)(*args)
    assert [(a.shape, a.dtype) for a in got] == [(args[0].shape, args[0].dtype)] * 3
    exact = formula(*args)
    assert_as_accurate(got, rounded(exact, got), exact, names=NAMES)
    return got


# Tiles.


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize(
    "accesses", [3, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 8))]
)
def test_tiles_and_tail_are_the_array(itemsize, accesses):
    sizes = (*range(1, 1300), *range(4090, 4105), 8192, 9173, 11008 * 13, 2**20 + 8)
    for size in sizes:
        tiles, padding = mosaic_gpu.deal(size, itemsize, accesses)
        assert tiles.num_elements == size + padding and padding < 128
        assert padding == 0 or size < 128
        # Every access starts at a multiple of its own size, in each array of a batch.
        assert tiles.num_elements % tiles.vector == 0 and tiles.vector * itemsize <= 16
        tail = tiles.num_elements - tiles.num_tiles * tiles.tile
        assert tail == tiles.num_tail_chunks * tiles.chunk + tail % tiles.chunk
        assert tiles.is_ragged == (tail % tiles.chunk > 0)
        # The elements that the last chunk repeats belong to the last block.
        assert not tiles.is_ragged or tiles.num_tail_chunks > 0
        assert 0 <= tail < tiles.tile + tiles.chunk
        assert np.prod(tiles.shape) == tiles.num_elements
    for size in (4096, 14336 * 37):
        tiles, _ = mosaic_gpu.deal(size, itemsize, 1)
        assert tiles.vector * itemsize == 16 and not tiles.num_tail_chunks


# Tiles have 1024 or 512 elements. The sizes are one less and one more than tiles, with a chunk and
# without, primes, and less than a tile.
@interpreted
@pytest.mark.parametrize(
    "shape, dtype",
    [
        ((2, 1024), BF16),
        ((1, 1025), BF16),
        ((1, 127), F16),
        ((511,), F32),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ((1, 1023), BF16),
                ((1, 1032), BF16),
                ((2053,), F16),
                ((131, 31), BF16),
                ((1, 129), F32),
                ((4, 128), F32),
                ((3, 1, 516), F32),
            )
        ),
    ],
    ids=str,
)
def test_sizes_around_a_tile(shape, dtype):
    check(make_args(shape, dtype), config=ONE)


@interpreted
@pytest.mark.parametrize("size", [3072, pytest.param(3080, marks=pytest.mark.full), 2999])
def test_arrays_beyond_32_bits_are_rows(monkeypatch, size):
    monkeypatch.setattr(mosaic_gpu, "_MAX_INDEX", 2048)
    tiles, padding = mosaic_gpu.deal(size, 2, 2)
    assert not tiles.num_tail_chunks and (padding == 0) == (size == 3072)
    check(make_args((size,), BF16))


# Values.


@interpreted
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=jnp.dtype)
def test_finite_arguments_give_no_nan(dtype):
    most = float(jnp.finfo(dtype).max)
    tiny = float(jnp.finfo(dtype).tiny)
    values = [0, tiny, 1, 10, 1e4, most]
    values = sorted({sign * v for v in values for sign in (-1, 1)})
    args = [jnp.asarray(a, dtype) for a in zip(*itertools.product(values, repeat=3), strict=True)]
    got, exact = graded()(*args), formula(*args)
    for name, g, e in zip(NAMES, got, exact, strict=True):
        g = np.asarray(g, np.float64)
        assert not np.any(np.isnan(g)), name
        assert np.all(np.isfinite(g) | (np.abs(e) > 0.99 * most)), name


@interpreted
def test_gates_that_saturate():
    gate, up = jnp.array([-1e4, 1e4, -jnp.inf]), jnp.array([2.0, 2.0, 2.0])
    y = np.asarray(kernel(gate, up))
    assert y[0] == 0 and np.signbit(y[0]) and y[1] == 2e4 and np.isnan(y[2])


# Launch parameters.


@interpreted
@pytest.mark.parametrize(
    "size, dtype", [pytest.param(8192, BF16, marks=pytest.mark.full), (4100, F32)], ids=str
)
def test_all_launch_parameters_agree(size, dtype):
    args = make_args((size,), dtype)
    want = check(args, config=ONE)
    for accesses in (2, 4, 8):
        config = Config(fwd_accesses=accesses, bwd_accesses=min(4, accesses))
        got = check(args, config=config)
        if jax.default_backend() == "gpu":
            chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize(
    "device, dtype, fwd, bwd",
    [(H100, BF16, 2, 1), (H100, F16, 2, 1), (H100, F32, 2, 1), (L4, BF16, 2, 1), (L4, F32, 2, 1)],
    ids=str,
)
def test_the_guess(device, dtype, fwd, bwd):
    assert guess_config(device, dtype) == Config(fwd_accesses=fwd, bwd_accesses=bwd)
    assert default_config(device, 5632, dtype) == guess_config(device, dtype)


def test_measured_rows_go_before_the_guess():
    assert default_config(H100, 14336, F16) == default_config(H100, 14336, BF16) == ONE
    assert default_config(H100, 14336, F32) == guess_config(H100, F32)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=jnp.dtype)
def test_candidates_differ_in_one_direction(dtype):
    base = guess_config(H100, dtype)
    forward, backward = forward_candidates(dtype), backward_candidates(dtype)
    assert base in forward and base in backward
    assert len({config.fwd_accesses for config in forward}) == len(forward) > 2
    assert len({config.bwd_accesses for config in backward}) == len(backward) > 2
    assert {config.bwd_accesses for config in forward} == {base.bwd_accesses}
    assert {config.fwd_accesses for config in backward} == {base.fwd_accesses}


@pytest.mark.parametrize("field, value", [("fwd_accesses", 0), ("fwd_accesses", 9)])
def test_invalid_launch_parameters(field, value):
    with pytest.raises(ValueError, match=f"{field}={value} must be from 1 to 8"):
        dataclasses.replace(ONE, **{field: value})
    with pytest.raises(ValueError, match="bwd_accesses=5 must be from 1 to 4"):
        dataclasses.replace(ONE, bwd_accesses=5)


def test_the_users_table_goes_first(tuned_file):
    row = {"op": "swiglu", "device_kind": H100.kind, "dtype": "bfloat16", "size": 14336}
    tuned_file.write_text(json.dumps([row | {"config": dataclasses.asdict(ONE)}]))
    assert default_config(H100, 14336, F16) == ONE
    assert default_config(H100, 5632, BF16) == guess_config(H100, BF16)


# Which implementation runs.


def launches(fn, *args):
    """Names of the kernels in the program."""
    return sorted(re.findall(r"\bname=(swiglu_\w+)", str(jax.make_jaxpr(fn)(*args))))


@pytest.mark.parametrize(
    "dtypes, message",
    [
        (
            (jnp.float8_e4m3fn, BF16),
            "gate is float8_e4m3fn, not bfloat16, float16 or float32; cast gate and up to",
        ),
        ((BF16, F32), "gate is bfloat16 and up is float32; the kernels take one dtype"),
    ],
)
@pytest.mark.parametrize("config", [None, ONE], ids=["", "config"])
def test_a_name_is_binding(dtypes, message, config):
    gate, up = (jax.ShapeDtypeStruct((4, 64), dtype) for dtype in dtypes)
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu': {message}"):
        jax.eval_shape(functools.partial(kernel, config=config), gate, up)
    assert not launches(swiglu, gate, up)


@pytest.fixture
def on_h100(monkeypatch):
    for module in (gpu_device, gpu_kernel_module, mosaic_gpu):
        monkeypatch.setattr(module, "target_device", lambda: H100)


@pytest.fixture
def mesh():
    return jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def test_the_default_on_an_h100_is_the_reference(on_h100):
    gate, up, _ = make_args((8, 64), BF16)
    assert not launches(swiglu, gate, up)
    assert launches(kernel, gate, up) == ["swiglu_fwd"]
    with pytest.raises(ValueError, match="for implementation='mosaic_gpu' by name, got"):
        swiglu(gate, up, config=ONE)


@pytest.mark.parametrize("how", ["argument", "context"])
def test_the_default_for_arrays_of_several_devices_is_the_reference(on_h100, mesh, how):
    gate, up, _ = make_args((8, 64), BF16)
    if how == "argument":
        sharding = NamedSharding(mesh, P(("data", "fsdp")))
        assert not launches(swiglu, jax.device_put(gate, sharding), up)
    else:
        with jax.set_mesh(mesh):
            assert not launches(swiglu, gate, up)


# Transformations.


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="needs eight devices")
def test_tokens_split_over_a_mesh(monkeypatch, mesh):
    # The interpreter knows only one device, so formulas are in the place of the kernels.
    sizes = []

    def elementwise(compute, arrays, *, num_results, accesses, name):
        sizes.append(arrays[0].shape)
        results = compute(*(a.astype(F32) for a in arrays))
        assert len(results) == num_results and accesses >= 1 and name.startswith("swiglu")
        return tuple(a.astype(arrays[0].dtype) for a in results)

    monkeypatch.setattr(mosaic_gpu, "_elementwise", elementwise)
    args = make_args((16, 64), BF16)
    rows = P(("data", "fsdp"))
    sharded = jax.shard_map(
        kernel, mesh=mesh, in_specs=(rows, rows), out_specs=rows, check_vma=False
    )
    got = quick_jit(lambda gate, up, dy: value_and_grads(sharded, (gate, up), dy))(
        *(jax.device_put(a, NamedSharding(mesh, rows)) for a in args)
    )
    assert set(sizes) == {(2, 64)}
    exact = formula(*args)
    assert_as_accurate(got, rounded(exact, got), exact, names=NAMES)


@interpreted
@pytest.mark.parametrize("axes", [(0, 0), (1, None)], ids=str)
def test_vmap_is_the_loop(axes):
    gate, up, dy = make_args((5, 77), F32)
    more = [
        a if axis is None else jnp.stack([a, 2 * a, -a], axis)
        for a, axis in zip((gate, up), axes, strict=True)
    ]
    gradients = lambda gate, up: value_and_grads(kernel, (gate, up), dy)
    got = quick_jit(jax.vmap(gradients, in_axes=axes))(*more)
    for i, factor in enumerate((1, 2, -1)):
        exact = formula(factor * gate, up if axes[1] is None else factor * up, dy)
        one = [a[i] for a in got]
        assert_as_accurate(one, rounded(exact, one), exact, names=NAMES)


@interpreted
def test_scanned_layers():
    gate, up, _ = make_args((5, 64), F32)
    scales = jnp.array([1.0, 0.5, 2.0])

    def gradients(fn):
        def layer(carry, scale):
            return jnp.sin(fn(scale * carry, up)) + carry, None

        loss = lambda gate, scales: jnp.sum(jnp.sin(jax.lax.scan(layer, gate, scales)[0]))
        return quick_jit(jax.grad(loss, argnums=(0, 1)))(gate, scales)

    want = gradients(functools.partial(swiglu, implementation="reference"))
    chex.assert_trees_all_close(gradients(kernel), want, rtol=1e-4, atol=1e-5)


def test_nothing_but_gate_and_up_is_kept():
    gate, up, _ = make_args((8, 64), BF16)
    kept = jax.tree.leaves(jax.eval_shape(lambda *args: jax.vjp(kernel, *args)[1], gate, up))
    assert [(a.shape, a.dtype) for a in kept] == [(gate.shape, BF16), (up.shape, BF16)]


# `jax.checkpoint` does not take the effects of the interpreter, so the test reads the program.
@pytest.mark.parametrize("saved, num_products", [(("gate", "up"), 4), ((), 6)], ids=str)
def test_a_rematerialized_layer_runs_the_forward_once(saved, num_products):
    x, weight, direction = make_args((64, 64), F32)
    policy = jax.checkpoint_policies.save_only_these_names(*saved)

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x):
        gate = checkpoint_name(x @ weight, "gate")
        up = checkpoint_name(x @ weight.T, "up")
        return jnp.vdot(kernel(gate, up), direction)

    gradient = jax.grad(layer)
    assert launches(gradient, x) == ["swiglu_bwd", "swiglu_fwd"]
    products = re.findall(r":f32\[64,64\] = dot_general", str(jax.make_jaxpr(gradient)(x)))
    assert len(products) == num_products


def test_a_result_that_is_not_used_has_no_backward():
    gate, up, _ = make_args((8, 64), F32)
    fn = lambda gate: (kernel(gate, up), jnp.sum(gate))[1]
    assert "swiglu_bwd" not in launches(jax.grad(fn), gate)


@interpreted
@pytest.mark.parametrize("twice", [jax.grad, jax.jacfwd, jax.linearize], ids=lambda f: f.__name__)
def test_a_second_derivative_is_refused(twice):
    gate, up, _ = make_args((5, 64), F32)
    once = jax.grad(lambda gate: jnp.sum(jnp.square(kernel(gate, up))))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        if twice is jax.linearize:
            jax.linearize(once, gate)
        else:
            twice(lambda gate: jnp.sum(once(gate)))(gate)


@interpreted
def test_a_donated_argument():
    gate, up, dy = make_args((5, 64), F32)
    exact = formula(gate, up, dy)[:1]
    given = jnp.copy(gate)
    # A kernel's results never share the memory of its arguments, which the caller may still need.
    got = jax.jit(kernel, donate_argnums=0)(given, up)
    assert_as_accurate([got], rounded(exact, [got]), exact, names=["y"])
    assert given.is_deleted()


def test_lowers_where_indices_have_64_bits(on_h100):
    with jax.enable_x64(True):
        for size in (4096, 7007):
            gate = jax.ShapeDtypeStruct((size,), BF16)
            gradient = jax.jit(jax.grad(lambda gate: jnp.sum(kernel(gate, gate))))
            program = gradient.trace(gate).lower(lowering_platforms=("cuda",)).as_text()
            assert "mosaic_gpu" in program
