"""The gated MLP: values, gradients, what it keeps and what it computes again."""

import dataclasses
import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import implementation as implementation_module
from pallas_kernels import swiglu_mlp
from pallas_kernels.gpu import hopper_gemm
from pallas_kernels.gpu.device import Device
from pallas_kernels.gpu.hopper_gemm import Config
from pallas_kernels.mlp import MLPConfig, gated_matmul
from pallas_kernels.mlp.api import choose_swiglu_mlp
from support.numerics import assert_as_accurate, quick_jit, value_and_grads

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
NAMES = ("y", "dx", "dw_gate", "dw_up", "dw_down")
SAVES = ("all", "gate_up", "x")
H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
FORWARD = Config(tile_n=128, stages=3, cluster=1, band=2, blocks=2)
BACKWARD = dataclasses.replace(FORWARD, tile_n=256, stages=2)

interpreted = pytest.mark.usefixtures("interpreted")


def make_args(shape, intermediate_size, dtype, weight_dtype=None, *, scale=1.0, seed=0):
    """x, the three weights and a cotangent; gates of a standard deviation of `scale`."""
    rng = np.random.default_rng(seed)
    hidden_size = shape[-1]
    normal = lambda *shape: rng.standard_normal(shape)
    x, dy = normal(*shape) * scale, normal(*shape)
    w_gate, w_up = normal(2, hidden_size, intermediate_size) / np.sqrt(hidden_size)
    w_down = normal(intermediate_size, hidden_size) / np.sqrt(max(1, intermediate_size))
    weight_dtype = weight_dtype or dtype
    return (
        jnp.asarray(x, dtype),
        jnp.asarray(w_gate, weight_dtype),
        jnp.asarray(w_up, weight_dtype),
        jnp.asarray(w_down, weight_dtype),
        jnp.asarray(dy, dtype),
    )


def plain(x, w_gate, w_up, w_down):
    """As it is written without us, every step in the dtype of `x`."""
    w_gate, w_up, w_down = (w.astype(x.dtype) for w in (w_gate, w_up, w_down))
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down


def exact(*args):
    """Value and gradients in float64."""
    x, w_gate, w_up, w_down, dy = (np.asarray(a, np.float64) for a in args)
    shape = x.shape
    x, dy = x.reshape(-1, shape[-1]), dy.reshape(-1, shape[-1])
    gate, up = x @ w_gate, x @ w_up
    sigmoid = 1 / (1 + np.exp(-np.clip(gate, -700, None)))
    product = gate * sigmoid * up
    dproduct = dy @ w_down.T
    dgate = dproduct * up * sigmoid * (1 + gate * (1 - sigmoid))
    dup = dproduct * gate * sigmoid
    dx = dgate @ w_gate.T + dup @ w_up.T
    y = product @ w_down
    return y.reshape(shape), dx.reshape(shape), x.T @ dgate, x.T @ dup, product.T @ dy


@functools.cache
def graded(**options):
    fn = functools.partial(swiglu_mlp, **options)
    return quick_jit(lambda *args: value_and_grads(fn, args[:-1], args[-1]))


graded_plain = quick_jit(lambda *args: value_and_grads(plain, args[:-1], args[-1]))


def check(args, **options):
    got = graded(**options)(*args)
    assert [(a.shape, a.dtype) for a in got] == [(a.shape, a.dtype) for a in (args[0], *args[:-1])]
    assert_as_accurate(got, graded_plain(*args), exact(*args), names=NAMES)
    return got


# Values and gradients.


# The reference keeps everything.
WAYS = [("reference", "all"), *(("xla", save) for save in SAVES)]
SHAPES = [
    ((2, 13, 24), 40, F32, F32),
    ((5, 64), 129, BF16, F32),
    ((31, 17), 7, BF16, BF16),
    ((13, 3, 20), 33, F16, F16),
    ((24,), 40, F32, F32),
]


# The normal run has all ways for the first two shapes, and one for each other.
@pytest.mark.parametrize(
    "shape, intermediate_size, dtype, weight_dtype, implementation, save",
    [
        pytest.param(*shape, *way, marks=() if i < 2 or i % 4 == j else pytest.mark.full)
        for i, shape in enumerate(SHAPES)
        for j, way in enumerate(WAYS)
    ],
    ids=str,
)
def test_xla(implementation, save, shape, intermediate_size, dtype, weight_dtype):
    args = make_args(shape, intermediate_size, dtype, weight_dtype)
    check(args, implementation=implementation, save=save)


# Rows around the 128 of a block and the 8 of a TMA tile, columns around the 256 of a tile, and half
# a tile at the end. Depths of less steps than stages and more.
@interpreted
@pytest.mark.parametrize(
    "shape, intermediate_size, dtype, save",
    [
        pytest.param((1, 128), 128, BF16, "gate_up", marks=pytest.mark.full),
        pytest.param((2, 61, 128), 256, BF16, "gate_up", marks=pytest.mark.full),
        pytest.param((129, 256), 384, BF16, "gate_up", marks=pytest.mark.full),
        ((127, 128), 256, F16, "all"),
        pytest.param((129, 192), 320, BF16, "x", marks=pytest.mark.full),
        # One block of columns: half a tile of the forward, a quarter of one of the backward.
        ((129, 192), 64, BF16, "x"),
        pytest.param((257, 128), 128, BF16, "x", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_kernels(shape, intermediate_size, dtype, save):
    check(make_args(shape, intermediate_size, dtype), implementation="mosaic_gpu", save=save)


@interpreted
def test_kernels_take_float32_weights():
    args = make_args((33, 128), 128, BF16, F32)
    check(args, implementation="mosaic_gpu")


@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic_gpu"])
def test_no_tokens(implementation):
    args = make_args((0, 128), 128, BF16)
    y, dx, *dweights = graded(implementation=implementation)(*args)
    assert y.shape == dx.shape == (0, 128)
    assert not any(np.any(a) for a in dweights)


@interpreted
@pytest.mark.parametrize("implementation", ["reference", "xla", "mosaic_gpu"])
def test_huge_gates(implementation):
    """silu saturates; its derivative is 0 or 1, and nothing is 0 times infinity."""
    # The shape of `test_a_wrong_row_stays_in_its_row`, for one program.
    got = check(make_args((70, 128), 128, BF16, scale=1e4), implementation=implementation)
    assert all(np.all(np.isfinite(np.asarray(a, np.float32))) for a in got)


def test_float32_weights_get_unrounded_gradients():
    """The sum over tokens is float32 and stays it."""
    args = make_args((64, 32), 16, BF16, F32)
    got = graded(implementation="xla")(*args)
    weights = (a.astype(BF16) for a in args[1:-1])
    rounded_weights = graded(implementation="xla")(args[0], *weights, args[-1])
    for name, wide, narrow in zip(NAMES[2:], got[2:], rounded_weights[2:], strict=True):
        assert wide.dtype == F32
        # All that the narrow gradient lacks is one rounding.
        assert_as_accurate([narrow], [wide.astype(BF16)], [wide], names=[name])
        assert np.any(wide != narrow.astype(F32))


# Parts of the sequence at a time: with a rest, one by one, with none, and longer than it is.
@pytest.mark.parametrize(
    "shape, chunk_size, dtype, weight_dtype",
    [
        pytest.param(*chunks, *dtypes, marks=() if i in (0, 1 + j % 2) else pytest.mark.full)
        for j, chunks in enumerate([((2, 13, 24), 5), ((7, 16), 1), ((2, 6, 8), 3), ((7, 16), 9)])
        for i, dtypes in enumerate([(F32, F32), (BF16, F32), (F16, F16)])
    ],
    ids=str,
)
def test_chunks(shape, chunk_size, dtype, weight_dtype):
    args = make_args(shape, 40, dtype, weight_dtype)
    check(args, implementation="xla", save="x", chunk_size=chunk_size)


@interpreted
def test_chunks_with_kernels():
    args = make_args((131, 128), 128, BF16)
    check(args, implementation="mosaic_gpu", save="x", chunk_size=70)


def test_the_error_does_not_grow_with_the_number_of_chunks():
    args = make_args((512, 16), 24, BF16, F32)
    wanted = exact(*args)[2:]

    def errors(chunk_size):
        got = graded(implementation="xla", save="x", chunk_size=chunk_size)(*args)[2:]
        return [np.linalg.norm(np.asarray(g) - w) for g, w in zip(got, wanted, strict=True)]

    few, many = errors(256), errors(2)
    assert all(b < 1.1 * a for a, b in zip(few, many, strict=True)), (few, many)


def test_chunks_have_no_array_of_all_positions():
    shape, intermediate_size = (3, 32, 8), 40
    args = make_args(shape, intermediate_size, F32)[:-1]
    options = dict(save="x", chunk_size=8, implementation="xla")
    grad = jax.grad(lambda *args: jnp.sum(swiglu_mlp(*args, **options)), argnums=(0, 1, 2, 3))
    text = str(quick_jit(grad).lower(*args).compile().as_text())
    assert "[3,8,40]" in text or "[24,40]" in text
    assert not re.search(r"\[3,32,40\]|\[96,40\]|\[4,3,8,40\]", text)


# What is kept and what is computed again.


def gemms(fn, *args):
    """How many matrix products the compiled program has."""
    text = str(quick_jit(fn).lower(*args).compile().as_text())
    return len(re.findall(r"(?m)^\s*(?:ROOT )?%?[\w.-]+ = \S+ (?:dot|custom-call)\(", text))


@pytest.mark.parametrize("save, kept", [("all", 3), ("gate_up", 2), ("x", 0)])
def test_residuals(save, kept):
    """Beside the arguments only what `save` names, and no array of its size."""
    tokens, hidden_size, intermediate_size = 13, 24, 40
    args = make_args((tokens, hidden_size), intermediate_size, F32)[:-1]
    fn = functools.partial(swiglu_mlp, save=save, implementation="xla")
    vjp = jax.eval_shape(lambda *args: jax.vjp(fn, *args)[1], *args)
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.shape)
    assert shapes == sorted([*(a.shape for a in args), *[(tokens, intermediate_size)] * kept])


def test_gemms():
    """With `save="x"` gate and up run again although XLA could see that they ran."""
    args = make_args((13, 24), 40, F32)
    count = lambda **options: gemms(
        lambda *args: value_and_grads(
            functools.partial(swiglu_mlp, **options), args[:-1], args[-1]
        ),
        *args,
    )
    assert gemms(functools.partial(swiglu_mlp, implementation="xla"), *args[:-1]) == 3
    assert count(save="all", implementation="xla") == 9
    assert count(save="gate_up", implementation="xla") == 9
    assert count(save="x", implementation="xla") == 11


@pytest.mark.parametrize(
    "names, expected",
    [(("gate", "up"), 9), (("gate", "up", "mlp_product"), 9), (("gate",), 10), ((), 11)],
)
def test_checkpoint_policies_know_the_names(names, expected):
    args = make_args((13, 24), 40, F32)
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    fn = jax.checkpoint(functools.partial(swiglu_mlp, implementation="xla"), policy=policy)
    assert gemms(lambda *args: value_and_grads(fn, args[:-1], args[-1]), *args) == expected


# Which implementation runs.


def kernels_run(monkeypatch, x, weights, *, chunk_size=None, device=H100):
    """Whether the forward's and the backward's GEMM are kernels if nothing is asked for."""
    monkeypatch.setattr(gated_matmul, "target_device", lambda: device)
    monkeypatch.setattr(implementation_module, "runs_here", lambda: None)
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


# The kernels themselves.


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        dict(stages=2, tile_n=64, cluster=2, blocks=4, band=1),
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
    # Each sum is taken in the order of K. A CPU's compiler fuses other multiplications with
    # additions in each interpreted program.
    if jax.default_backend() == "gpu":
        chex.assert_trees_all_equal(got, graded(config=base, **options)(*args))


@interpreted
def test_kept_projections_are_those_of_the_product():
    x, w_gate, w_up, *_ = make_args((65, 128), 128, BF16)
    run = quick_jit(gated_matmul.gated_matmul, static_argnames="keep")
    product, gate, up = run(x, w_gate, w_up, keep=True)
    if jax.default_backend() == "gpu":
        np.testing.assert_array_equal(product, run(x, w_gate, w_up, keep=False)[0])
    gate, up = gate.astype(F32), up.astype(F32)
    # One ulp of float32, because XLA's exponential is another.
    want = np.asarray((gate * jax.nn.sigmoid(gate) * up).astype(BF16), np.float32)
    np.testing.assert_allclose(np.asarray(product, np.float32), want, rtol=2**-7, atol=0)


@interpreted
def test_a_wrong_row_stays_in_its_row():
    args = make_args((70, 128), 128, BF16)
    x = args[0].at[66].set(jnp.nan)
    y, dx, *_ = graded(implementation="mosaic_gpu")(x, *args[1:])
    bad = np.isnan(np.asarray(y, np.float32)).any(axis=1)
    assert np.flatnonzero(bad).tolist() == [66]
    assert np.flatnonzero(np.isnan(np.asarray(dx, np.float32)).any(axis=1)).tolist() == [66]


def test_default_configurations_fit():
    for tokens, hidden_size, columns in ((8192, 4096, 14336), (16384, 2048, 8192), (1, 128, 128)):
        for make, num_b, extra in (
            (gated_matmul.default_config, 2, 2 * 2 * 64 * 64 * 2),
            (gated_matmul.default_backward_config, 1, 2 * 3 * 3 * 64 * 32 * 2),
        ):
            config = make(tokens, columns, hidden_size, H100)
            loop = hopper_gemm.MainLoop(
                config=config,
                num_rows=tokens,
                num_columns=columns,
                depth=hidden_size,
                dtype=BF16,
                num_b=num_b,
            )
            assert loop.smem_bytes + extra <= H100.smem_bytes
            assert config.blocks <= H100.num_sms
            # Every tile has one cluster, and no cluster is without.
            assert config.blocks // config.cluster <= loop.groups * loop.column_tiles


# Transformations.


@pytest.mark.parametrize("save", [pytest.param("all", marks=pytest.mark.full), "gate_up", "x"])
def test_vmap_scan_and_checkpoint(save):
    args = make_args((4, 13, 24), 40, F32)
    fn = functools.partial(swiglu_mlp, save=save, implementation="xla")
    want = graded(implementation="xla", save=save)(*args)
    mapped = jax.vmap(fn, in_axes=(0, None, None, None))

    def scanned(x, *weights):
        return jax.lax.scan(lambda c, x: (c, fn(x, *weights)), None, x)[1]

    for other in (mapped, scanned, jax.checkpoint(fn)):
        got = quick_jit(lambda *args, f=other: value_and_grads(f, args[:-1], args[-1]))(*args)
        chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


def test_weights_that_the_caller_transposes():
    """As Equinox and PyTorch store them. XLA for CPUs could not run the gradients' products."""
    x, *weights, dy = args = make_args((2, 13, 24), 40, BF16, F32)
    fn = lambda x, *weights: swiglu_mlp(x, *(w.T for w in weights), implementation="xla")
    y, dx, *dw = quick_jit(lambda *args: value_and_grads(fn, args[:-1], args[-1]))(
        x, *(w.T for w in weights), dy
    )
    got = [y, dx, *(g.T for g in dw)]
    assert_as_accurate(got, graded_plain(*args), exact(*args), names=NAMES)


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


def test_on_a_mesh_xla_splits_it():
    """Tokens over one axis, F over the other: the only sums over devices are the GEMMs'."""
    args = make_args((16, 24), 40, F32)
    want = graded(implementation="xla")(*args)
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    columns = P(None, "tensor")
    specs = (P("data"), columns, columns, P("tensor"), P("data"))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    compiled = graded().lower(*(put(a, s) for a, s in zip(args, specs, strict=True))).compile()
    got = compiled(*(put(a, s) for a, s in zip(args, specs, strict=True)))
    chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)
    assert not re.search(r"all-gather|all-to-all|collective-permute", str(compiled.as_text()))


def test_second_derivatives():
    args = make_args((3, 8), 8, F32)[:-1]
    loss = lambda implementation: (
        lambda x: jnp.sum(swiglu_mlp(x, *args[1:], implementation=implementation) ** 2)
    )
    hessian = jax.hessian(loss("reference"))(args[0])
    eps = 1e-2
    step = jnp.zeros_like(args[0]).at[1, 2].set(eps)
    gradient = jax.grad(loss("reference"))
    slope = (gradient(args[0] + step) - gradient(args[0] - step)) / (2 * eps)
    np.testing.assert_allclose(hessian[..., 1, 2], slope, rtol=0.02, atol=2e-3)
    with pytest.raises(NotImplementedError, match="swiglu_mlp has a gradient rule of its own"):
        jax.hessian(loss("xla"))(args[0])


@interpreted
def test_a_second_derivative_of_the_kernels_is_refused():
    x, *weights, _ = make_args((3, 128), 128, BF16)
    loss = lambda x: jnp.sum(swiglu_mlp(x, *weights, implementation="mosaic_gpu"))
    with pytest.raises(NotImplementedError, match="no second derivative"):
        jax.grad(lambda x: jnp.sum(jax.grad(loss)(x)))(x)


# What is refused.


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(w_gate=jnp.zeros((40, 24))), r"w_gate must be \[D, F\], got \(40, 24\) for x"),
        (
            dict(w_up=jnp.zeros((24, 41))),
            r"w_up must be \(24, 40\), like w_gate, .* got \(24, 41\)",
        ),
        (dict(w_down=jnp.zeros((24, 40))), r"w_down \(40, 24\), got .* \(24, 40\)"),
        (dict(save="gate"), "save='gate' must be one of"),
        (dict(chunk_size=4), "chunk_size=4 must .* needs save='x' .* got save='gate_up'"),
        (dict(chunk_size=0, save="x"), "chunk_size=0 must be at least 1"),
        (dict(x=jnp.zeros(24), chunk_size=4, save="x"), r"x \[..., S, D\].* x \(24,\)"),
        (dict(implementation="triton"), "implementation='triton' must be None or one of"),
        (dict(config=MLPConfig()), "implementation=None has no launch parameters"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_arguments(unchecked_shapes, change, message):
    args = dict(zip(("x", "w_gate", "w_up", "w_down"), make_args((13, 24), 40, F32), strict=False))
    with pytest.raises(ValueError, match=message):
        swiglu_mlp(**args | change)


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
        (dict(tile_n=100), "tile_n=100 must be a multiple of 64"),
        (dict(tile_n=320), "from 64 to 256"),
        (dict(stages=1), "stages=1 must be at least 2"),
        (dict(cluster=4), "cluster=4 must be 1 or 2"),
        (dict(band=0), "band=0 must be at least 1"),
        (dict(blocks=3, cluster=2), "blocks=3 must be a positive multiple"),
    ],
)
def test_wrong_configurations(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(FORWARD, **change)
