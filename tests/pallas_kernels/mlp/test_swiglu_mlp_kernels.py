"""The gated MLP by its kernels, interpreted, and when they run."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import implementation as implementation_module
from pallas_kernels import swiglu_mlp
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import Device
from pallas_kernels.gpu.hopper_gemm import Config
from pallas_kernels.mlp import MLPConfig, gated_matmul
from pallas_kernels.mlp.api import choose_swiglu_mlp
from support.mlp_formulas import NAMES, check, exact, graded, make_args, plain
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
FORWARD = Config(tile_n=128, stages=3, cluster=1, band=2, blocks=2)
BACKWARD = dataclasses.replace(FORWARD, tile_n=192, stages=2)

interpreted = pytest.mark.usefixtures("interpreted")


# Values and gradients.


# The numbers of rows are near the 128 of a block and the 8 of a TMA tile. The numbers of columns
# are near the 192 of a tile, and two end with a third of a tile. Some depths have fewer steps than
# stages.
@interpreted
@pytest.mark.parametrize(
    "shape, intermediate_size, dtype, save",
    [
        pytest.param((1, 128), 128, BF16, "gate_up", marks=pytest.mark.full),
        pytest.param((2, 61, 128), 256, BF16, "gate_up", marks=pytest.mark.full),
        pytest.param((129, 256), 384, BF16, "gate_up", marks=pytest.mark.full),
        ((127, 128), 256, F16, "all"),
        # One block of columns: half a tile of the forward, a third of one of the backward.
        ((65, 192), 64, BF16, "x"),
        pytest.param((65, 192), 320, BF16, "x", marks=pytest.mark.full),
        pytest.param((129, 192), 320, BF16, "x", marks=pytest.mark.full),
        pytest.param((257, 128), 128, BF16, "x", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_kernels(shape, intermediate_size, dtype, save):
    check(make_args(shape, intermediate_size, dtype), implementation="mosaic_gpu", save=save)


@interpreted
def test_kernels_take_float32_weights():
    check(make_args((70, 128), 128, BF16, F32), implementation="mosaic_gpu")


@interpreted
def test_gradients_where_the_last_weight_is_frozen():
    """2 s; the backward kernel then writes no product."""
    x, w_gate, w_up, w_down, dy = args = make_args((75, 128), 128, BF16)

    def mlp(fn):
        return lambda x, w_gate, w_up: fn(x, w_gate, w_up, w_down)

    graded = lambda fn: value_and_grads(mlp(fn), (x, w_gate, w_up), dy)
    kernels = functools.partial(swiglu_mlp, implementation="mosaic_gpu")
    assert_as_accurate(graded(kernels), graded(plain), exact(*args)[:-1], names=NAMES[:-1])


@interpreted
@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic_gpu"])
def test_huge_gates(implementation):
    """silu saturates, its derivative is 0 or 1, and no product is 0 times infinity."""
    # The arguments of `test_kernels_take_float32_weights`, for one program.
    args = make_args((70, 128), 128, BF16, F32, scale=1e4)
    got = check(args, implementation=implementation)
    assert all(np.all(np.isfinite(np.asarray(a, np.float32))) for a in got)


@interpreted
@pytest.mark.full
def test_chunks_with_kernels():
    args = make_args((131, 128), 128, BF16)
    check(args, implementation="mosaic_gpu", save="x", chunk_size=70)


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        dict(stages=2, tile_n=64, cluster=2, blocks=4, band=1),
        # One block, whose warpgroups take turns: the backward has four tiles.
        pytest.param(dict(tile_n=64, blocks=1), marks=pytest.mark.full),
        pytest.param(dict(stages=2, tile_n=64), marks=pytest.mark.full),
        pytest.param(dict(cluster=2, blocks=4, band=1), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_all_configurations_agree(changes):
    args = make_args((130, 256), 128, BF16)
    options = dict(implementation="mosaic_gpu", save="gate_up")
    base = MLPConfig(forward=FORWARD, backward=BACKWARD)
    config = MLPConfig(
        forward=dataclasses.replace(FORWARD, **changes),
        backward=dataclasses.replace(BACKWARD, **{"stages": 3} | changes),
    )
    got = check(args, config=config, **options)
    # Every configuration adds in the order of K. A CPU's compiler still fuses other multiplications
    # with additions in each interpreted program.
    if jax.default_backend() == "gpu":
        chex.assert_trees_all_equal(got, graded(config=base, **options)(*args))


@interpreted
def test_the_product_is_that_of_the_kept_projections():
    x, w_gate, w_up, *_ = make_args((65, 128), 128, BF16)
    run = quick_jit(gated_matmul.gated_matmul, static_argnames="keep")
    product, gate, up = run(x, w_gate, w_up, keep=True)
    if jax.default_backend() == "gpu":
        np.testing.assert_array_equal(product, run(x, w_gate, w_up, keep=False)[0])
    gate, up = gate.astype(F32), up.astype(F32)
    # The kernel's exponential may differ from XLA's by an ulp of float32.
    want = np.asarray((gate * jax.nn.sigmoid(gate) * up).astype(BF16), np.float32)
    np.testing.assert_allclose(np.asarray(product, np.float32), want, rtol=2**-7, atol=0)


@interpreted
def test_a_wrong_row_stays_in_its_row():
    args = make_args((70, 128), 128, BF16, F32)
    x = args[0].at[66].set(jnp.nan)
    y, dx, *_ = graded(implementation="mosaic_gpu")(x, *args[1:])
    bad = np.isnan(np.asarray(y, np.float32)).any(axis=1)
    assert np.flatnonzero(bad).tolist() == [66]
    assert np.flatnonzero(np.isnan(np.asarray(dx, np.float32)).any(axis=1)).tolist() == [66]


def test_default_configurations_fit():
    of_forward = lambda keep: functools.partial(gated_matmul.default_config, keep=keep)
    piece = 2 * 64 * 64 * 2  # bytes, of both warpgroups
    for tokens, hidden_size, columns in ((8192, 4096, 14336), (16384, 2048, 8192), (1, 128, 128)):
        for make, num_b, extra, in_turns in (
            (of_forward(keep=False), 2, 2 * piece, False),  # the product of a tile
            (of_forward(keep=True), 2, 5 * piece, False),  # all but one of gate, up and product
            (gated_matmul.default_backward_config, 1, 2 * (3 * 2 + 2) * 64 * 32 * 2, True),
        ):
            config = make(tokens, columns, hidden_size, H100)
            loop = hopper_gemm.MainLoop(
                config=config,
                num_rows=tokens,
                num_columns=columns,
                depth=hidden_size,
                dtype=BF16,
                num_b=num_b,
                in_turns=in_turns,
            )
            loop.check_fits(H100, extra_bytes=extra)
            assert config.blocks <= H100.num_sms
            # Every cluster has a tile.
            assert config.blocks // config.cluster <= loop.groups * loop.column_tiles


@interpreted
def test_kernels_under_vmap_and_scan():
    x, *weights, _ = make_args((2, 9, 128), 128, BF16)
    fn = functools.partial(swiglu_mlp, implementation="mosaic_gpu")
    step = lambda c, x: (c, fn(x, *weights))
    scanned = lambda x: jax.lax.scan(step, None, x)[1]
    by_vmap = quick_jit(jax.vmap(fn, in_axes=(0, None, None, None)))(x, *weights)
    low, want = plain(x, *weights), exact(x, *weights, x)[0]
    for got in (by_vmap, quick_jit(scanned)(x)):
        assert_as_accurate([got], [low], [want], names=["y"])


@interpreted
def test_a_second_derivative_of_the_kernels_is_refused():
    x, *weights, _ = make_args((3, 128), 128, BF16)
    loss = lambda x: jnp.sum(swiglu_mlp(x, *weights, implementation="mosaic_gpu"))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x)


# Which implementation runs.


def kernels_run(monkeypatch, x, weights, *, chunk_size=None, device=H100):
    """Whether the forward's and the backward's GEMM are kernels by default."""
    monkeypatch.setattr(gated_matmul, "target_device", lambda: device)
    monkeypatch.setattr(implementation_module, "reason_not_here", lambda: None)
    chosen, reason = choose_swiglu_mlp(x, weights, chunk_size, None, None)
    assert chosen == "mosaic_gpu" or reason
    return chosen == "mosaic_gpu", reason is None


def abstract_args(num_tokens, *, hidden_size=128, dtype=BF16):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    across, down = (array(*s) for s in ((hidden_size, 256), (256, hidden_size)))
    return array(num_tokens, hidden_size), (across, across, down)


def test_the_kernels_run_where_they_are_faster(monkeypatch):
    run = functools.partial(kernels_run, monkeypatch)

    def choice(*args, **options):
        x, weights = abstract_args(*args, **options)
        return jax.eval_shape(lambda *a: choices.append(run(a[0], a[1:])), x, *weights)

    choices = []
    choice(2048)
    choice(2047)
    choice(2048, dtype=F32)
    choice(2048, hidden_size=160)
    assert choices == [(True, True), (True, False), (False, False), (False, False)]


def test_the_kernels_run_on_a_mesh_and_not_on_other_devices(monkeypatch):
    x, weights = abstract_args(4096)
    a100 = Device("NVIDIA A100-SXM4-80GB", (8, 0), 108)
    found = []
    trace = lambda **options: jax.eval_shape(
        lambda *a: found.append(kernels_run(monkeypatch, a[0], a[1:], **options)), x, *weights
    )
    trace(device=a100)
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))):
        trace()
    assert found == [(False, False), (True, True)]


@pytest.mark.parametrize(
    "shape, intermediate_size, dtype, message",
    [
        ((4, 128), 160, BF16, "not multiples of 64; pad 160 to 192 with zeros"),
        ((4, 72), 100, BF16, "not multiples of 64; pad 72 to 128 and 100 to 128 with zeros"),
        ((4, 128), 128, F32, "not all bfloat16 or float16"),
    ],
)
def test_the_kernels_say_what_they_do_not_take(shape, intermediate_size, dtype, message):
    args = make_args(shape, intermediate_size, dtype)[:-1]
    with pytest.raises(NotImplementedError, match=f"implementation='mosaic_gpu': .*{message}"):
        swiglu_mlp(*args, implementation="mosaic_gpu")
    swiglu_mlp(*args)


def test_the_kernels_are_for_hopper(monkeypatch):
    device = Device("NVIDIA A100-SXM4-40GB", (8, 0), 108)
    monkeypatch.setattr(gated_matmul, "target_device", lambda: device)
    args = make_args((4, 128), 128, BF16)[:-1]
    with pytest.raises(NotImplementedError, match="wgmma needs compute capability"):
        swiglu_mlp(*args, implementation="mosaic_gpu")


def test_a_configuration_that_does_not_fit():
    args = make_args((4, 128), 256, BF16)[:-1]
    config = MLPConfig(forward=dataclasses.replace(FORWARD, stages=8))
    with pytest.raises(ValueError, match=r"takes .* bytes of shared memory"):
        swiglu_mlp(*args, implementation="mosaic_gpu", config=config)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(tile_n=100), "^tile_n=100 must be a multiple of 64"),
        (dict(tile_n=320), "from 64 to 256"),
        (dict(stages=1), "^stages=1 must be at least 2"),
        (dict(cluster=4), "^cluster=4 must be 1 or 2"),
        (dict(band=0), "^band=0 must be at least 1"),
        (dict(blocks=3, cluster=2), "^blocks=3 must be a positive multiple"),
    ],
)
def test_wrong_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FORWARD, **change)
