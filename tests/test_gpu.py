"""What only a GPU can show: cuDNN, real sizes, memory in use. Run with `make test-gpu`."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.llama import Llama
from models.presets import PRESETS
from models.remat import POLICIES
from models.sharding import batch_sharding, make_mesh, parameter_shardings
from pallas_kernels import add_rms_norm, linear_cross_entropy, rms_norm, swiglu, swiglu_mlp
from pallas_kernels.mlp import config as swiglu_config
from pallas_kernels.mlp import mosaic_gpu as swiglu_kernels
from pallas_kernels.norm.config import backward_candidates, forward_candidates
from support.norm_formulas import add_formula, formula
from support.numerics import assert_as_accurate, assert_trees_as_accurate, value_and_grads
from support.swiglu_formulas import formula as swiglu_formula
from train.data import SyntheticDataset
from train.step import loss_and_sums, model_graph
from train.xla_flags import compiler_options

pytestmark = pytest.mark.gpu
# Tests of more than 20 GiB: one process runs all of them, so that several can share the GPU.
large = pytest.mark.xdist_group("large")


def as_float64(tree):
    return [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)]


def sampled(tree):
    """Every seventh row of a matrix, and its last rows, in float64; all of the rest."""

    def sample(a):
        if a.ndim < 2:
            return a
        return a[np.r_[: a.shape[0] : 7, a.shape[0] - min(64, a.shape[0]) : a.shape[0]]]

    return as_float64([sample(a) for a in tree])


def test_training_on_the_gpu_fits_the_memory_it_announced(tmp_path):
    """In a process of its own, because the peak is that of a whole process."""
    flags = [
        "--preset=llama3.2-1b",
        f"--runs-dir={tmp_path}",
        "--steps=3",
        "--log-every=1",
        "--optimizer.warmup-steps=1",
        "--data.batch-size=1",
        "--data.sequence-length=2048",
        "--model.num-hidden-layers=4",
        "--no-save",
    ]
    environment = dict(os.environ)
    environment.pop("XLA_PYTHON_CLIENT_ALLOCATOR", None)  # some allocators do not count
    root = pathlib.Path(__file__).parents[1]
    command = [sys.executable, "-m", "train", *flags]
    process = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stderr[-4000:]
    announced = float(process.stdout.split("in all ")[1].split(" GiB")[0])
    (metrics,) = tmp_path.glob("*/metrics.jsonl")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    peak = max(row.get("peak_memory_gib", 0.0) for row in rows)
    assert announced * 0.9 <= peak <= announced * 1.15


ONE = (1, 1, 1)


@functools.cache
def small_llama(mesh_shape, dtype="bfloat16", **changes):
    """Loss, sums and gradients of two layers of 1B for one batch, on data x fsdp x tensor GPUs.

    Compiled with the options of a training step.
    """
    sizes = {"num_hidden_layers": 2, "vocab_size": 32000}
    changes = {"remat": "mlp_inputs"} | changes
    config = dataclasses.replace(PRESETS["llama3.2-1b"], **sizes, dtype=dtype, **changes)
    data, fsdp, tensor = mesh_shape
    devices = jax.devices()[: data * fsdp * tensor]
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)
    params = nnx.state(Llama(config, rngs=nnx.Rngs(0)))
    shardings = parameter_shardings(params, mesh)
    tokens = SyntheticDataset(config.vocab_size, 1024).batch(0, batch_size=4, seed=0)
    batch = jax.device_put(tokens, batch_sharding(mesh))

    def compute(params):
        loss = lambda params: loss_and_sums(model_graph(config), params, batch)
        return jax.value_and_grad(loss, has_aux=True)(params)

    with (
        jax.set_mesh(mesh),
        # `jax.nn.dot_product_attention` does not lower in 16 bits under strict promotion.
        jax.numpy_dtype_promotion("standard"),
        jax.default_matmul_precision("highest" if dtype == "float32" else "default"),
    ):
        options = compiler_options(devices, scan_layers=config.scan_layers)
        gradients = jax.jit(compute, out_shardings=(None, shardings), compiler_options=options)
        found = gradients(jax.device_put(params, shardings))
    return as_float64(found)


def assert_llama_is_as_accurate(got, low_precision):
    """By the errors against float32 without kernels."""
    exact = small_llama(ONE, "float32", implementation="xla")
    assert_trees_as_accurate(got, low_precision, exact, slack=2.0)


@pytest.mark.gpus
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 1, 4)], ids=str)
def test_several_gpus_compute_what_one_does(shape):
    if jax.device_count() < np.prod(shape):
        pytest.skip(f"needs {np.prod(shape)} GPUs, there are {jax.device_count()}")
    assert_llama_is_as_accurate(small_llama(shape), small_llama(ONE))


@pytest.mark.parametrize("remat", POLICIES)
def test_scanned_layers_compute_what_unrolled_ones_do(remat):
    unrolled = small_llama(ONE, remat="minimal", scan_layers=False)
    assert_llama_is_as_accurate(small_llama(ONE, remat=remat), unrolled)


@pytest.mark.parametrize("packed", [False, True], ids=["causal", "packed"])
def test_cudnn_attention_is_the_default_and_as_accurate_as_xla(packed):
    config = dataclasses.replace(
        PRESETS["llama3.2-1b"], num_hidden_layers=2, vocab_size=1024, initializer_range=0.05
    )
    batch = SyntheticDataset(config.vocab_size, 1024, packed=packed).batch(0, batch_size=2, seed=0)
    if packed:
        batch["segment_ids"][:, 300:] += 1
        batch["positions"][:, 300:] -= 300
    batch = jax.tree.map(jnp.asarray, batch)
    params = nnx.state(Llama(config, rngs=nnx.Rngs(0)), nnx.Param)
    direction = jax.random.normal(jax.random.key(1), (2, 1024, config.hidden_size))

    def value_and_grads(**changes):
        changed = dataclasses.replace(config, **changes)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: Llama(changed, rngs=nnx.Rngs(0))))

        def value(params):
            hidden = nnx.merge(graphdef, params)(
                batch["tokens"],
                positions=batch.get("positions"),
                segment_ids=batch.get("segment_ids"),
            )
            return jnp.sum(hidden.astype(jnp.float32) * direction), hidden

        # JAX's own XLA attention in 16 bits does not lower under strict promotion.
        with jax.numpy_dtype_promotion("standard"):
            grads, hidden = jax.jit(jax.grad(value, has_aux=True))(params)
        return as_float64(hidden) + as_float64(grads)

    with jax.default_matmul_precision("highest"):
        exact = value_and_grads(dtype="float32")
    names = [
        "hidden",
        *(jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)),
    ]
    assert_as_accurate(
        value_and_grads(),
        value_and_grads(attention_implementation="xla"),
        exact,
        names=names,
    )


def test_default_attention_runs_cudnn():
    config = dataclasses.replace(PRESETS["llama3.2-1b"], num_hidden_layers=1, vocab_size=1024)
    model = Llama(config, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 256), jnp.int32)
    graphdef, state = nnx.split(model)
    program = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens)).lower(state).as_text()
    assert "cudnn" in program


# Sizes of rows: 512 of them have a multiple of 256 bytes, whether one row has or not.
@pytest.mark.parametrize("hidden_size", [64, 96, 128])
def test_parts_of_arrays_that_begin_anywhere(hidden_size):
    """XLA gives them to kernels where they lie, and has results written where they belong."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (1025, hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (hidden_size + 3,))
    head = jax.random.normal(keys[2], (1925, hidden_size), jnp.bfloat16)
    bias = jax.random.normal(keys[3], (1926,))
    tokens = jax.random.randint(keys[4], (1025,), 0, len(head))

    def compute(x, tokens, weight, head, bias):
        def loss(x):
            kernel: Any = {"implementation": "mosaic_gpu"}
            normed, total = add_rms_norm(x, swiglu(x, x, **kernel), weight, **kernel)
            loss = functools.partial(linear_cross_entropy, total, head, tokens, **kernel)
            losses = loss(bias=bias, vocab_chunk_size=512) + loss(chunk_size=128)
            return losses + jnp.sum(normed.astype(jnp.float32)), normed

        return jax.value_and_grad(loss, has_aux=True)(x)

    @jax.jit
    def by_parts(x, tokens, weight, head, bias):
        def step(i, found):
            start = 1 + 512 * i
            part = lambda a: jax.lax.dynamic_slice_in_dim(a, start, 512)
            put = lambda a, part: jax.lax.dynamic_update_slice_in_dim(a, part, start, 0)
            losses, normed, dx = found
            (loss, one), of_x = compute(part(x), part(tokens), weight[3:], head, bias[1:])
            return losses.at[i].set(loss), put(normed, one), put(dx, of_x)

        return jax.lax.fori_loop(0, 2, step, (jnp.zeros(2), jnp.zeros_like(x), jnp.zeros_like(x)))

    losses, normed, dx = by_parts(x, tokens, weight, head, bias)
    for i, rows in enumerate((slice(1, 513), slice(513, 1025))):
        (loss, one), of_x = jax.jit(compute)(x[rows], tokens[rows], weight[3:], head, bias[1:])
        # XLA may add up the loss in another order.
        np.testing.assert_allclose(losses[i], loss, rtol=1e-6)
        chex.assert_trees_all_equal((normed[rows], dx[rows]), (one, of_x))


# The linear cross-entropy.

ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-3, "logit_softcap": 20.0}


def assert_loss_is_as_accurate(shape, *, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16, **options):
    """Loss and gradients beside those of all logits in `dtype`, and the same bits again."""
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (num_tokens, hidden_size), dtype)
    weight = (jax.random.normal(keys[1], (vocab_size, hidden_size)) * 0.05).astype(weight_dtype)
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size).at[::7].set(-100)
    bias = jax.random.normal(keys[3], (vocab_size,))
    loss_options = {k: v for k, v in options.items() if k in ALL_OPTIONS or k == "reduction"}

    @jax.custom_jvp
    def with_rounded_gradient(logits):
        return logits

    @with_rounded_gradient.defjvp
    def _(primals, tangents):
        # A cast to 16 bits and back is dropped by XLA.
        bits = jnp.finfo(dtype)
        rounded = jax.lax.reduce_precision(tangents[0], bits.nexp, bits.nmant)
        return primals[0], rounded

    def exact(x, weight, bias):
        floats = x.astype(jnp.float32), weight.astype(jnp.float32)
        return linear_cross_entropy(
            *floats, labels, bias=bias, implementation="xla", chunk_size=1024, **loss_options
        )

    def plain(x, weight, bias):
        """With logits and their gradients rounded to `dtype`."""
        logits = with_rounded_gradient((x @ weight.astype(dtype).T).astype(jnp.float32) + bias)
        capped = logits
        if cap := loss_options.get("logit_softcap"):
            capped = cap * jnp.tanh(logits / cap)
        lse = jax.nn.logsumexp(capped, axis=-1)
        picked = jnp.take_along_axis(capped, jnp.maximum(labels, 0)[:, None], axis=-1)[:, 0]
        smoothing = loss_options.get("label_smoothing", 0.0)
        losses = lse - (1 - smoothing) * picked - smoothing * jnp.mean(capped, axis=-1)
        losses += loss_options.get("z_loss", 0.0) * jnp.square(lse)
        losses = jnp.where(labels >= 0, losses, 0)
        if loss_options.get("reduction") == "none":
            return losses
        return jnp.sum(losses) / jnp.sum(labels >= 0, dtype=jnp.float32)

    def ours(x, weight, bias):
        return linear_cross_entropy(
            x, weight, labels, bias=bias, implementation="mosaic_gpu", **options
        )

    cotangent = jax.random.normal(keys[0], labels.shape) + 1
    if loss_options.get("reduction") != "none":
        cotangent = jnp.float32(1)
    graded = lambda fn: jax.jit(lambda *args: value_and_grads(fn, args, cotangent))
    arguments = x, weight, bias
    with jax.default_matmul_precision("highest"):
        want = sampled(graded(exact)(*arguments))
    got = graded(ours)(*arguments)
    names = ("loss", "dx", "dweight", "dbias")
    assert_as_accurate(sampled(got), sampled(graded(plain)(*arguments)), want, names=names)
    chex.assert_trees_all_equal(got, graded(ours)(*arguments))
    # The loss alone has logits that are not rounded.
    alone = jax.jit(ours)(*arguments)
    np.testing.assert_allclose(alone, want[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(4096, 2048, 128256), (1000, 1024, 32001)], ids=str)
def test_linear_cross_entropy_at_real_sizes(shape):
    assert_loss_is_as_accurate(shape)


@pytest.mark.parametrize(
    "options",
    [
        {"chunk_size": 100},
        {"chunk_size": 100, "dtype": jnp.float16},
        {"vocab_chunk_size": 8192},
        {"vocab_chunk_size": 1000, "weight_dtype": jnp.float32, **ALL_OPTIONS},
        {"reduction": "none", "chunk_size": 512, **ALL_OPTIONS},
        {"reduction": "none", "vocab_chunk_size": 30000},
        {"vocab_chunk_size": 8192, **ALL_OPTIONS},
        {"vocab_chunk_size": 30000, "dtype": jnp.float16},
    ],
    ids=str,
)
def test_linear_cross_entropy_with_options(options):
    assert_loss_is_as_accurate((1000, 1024, 50257), **options)


@large
def test_linear_cross_entropy_of_more_logits_than_int32_can_count():
    assert_loss_is_as_accurate((17408, 128, 128256), chunk_size=17408)


# Weights of size 12 put labels too far below the largest logit for exponentials that are made once,
# the last has more logits than int32 can count.
@pytest.mark.parametrize(
    "shape, options, size",
    [
        ((4096, 2048, 128256), {"chunk_size": 2048}, 1),
        ((1000, 1024, 32001), {"chunk_size": 400}, 1),
        ((1000, 1024, 32001), {"chunk_size": 400}, 12),
        ((1000, 1024, 32001), {"chunk_size": 400, "z_loss": 1e-2}, 1),
        ((4096, 2048, 128256), {"vocab_chunk_size": 2048}, 1),
        ((1000, 1024, 32001), {"vocab_chunk_size": 3000}, 12),
        # In place of a float32 gradient, of one of 16 bits, with 904 tokens beside, with 3 chunks.
        ((4096, 2048, 128256), {}, 1),
        ((2000, 2048, 128256), {"max_logits_bytes": 2**24, "z_loss": 1e-2}, 12),
        ((5000, 2048, 32000), {}, 1),
        ((10000, 2048, 32000), {"max_logits_bytes": 2**27}, 1),
        pytest.param((17408, 128, 128256), {"chunk_size": 17408}, 1, marks=large),
    ],
    ids=str,
)
def test_linear_cross_entropy_by_exponentials(shape, options, size):
    """Without a bias; the way of `pallas_kernels/loss/mosaic_gpu/exponentials.py`."""
    num_tokens, hidden_size, vocab_size = shape
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (num_tokens, hidden_size), jnp.bfloat16)
    weight = size * jax.random.normal(keys[1], (vocab_size, hidden_size)) / hidden_size**0.5
    weight = weight.astype(jnp.bfloat16)
    labels = jax.random.randint(keys[2], (num_tokens,), 0, vocab_size).at[::7].set(-100)
    z_loss = options.get("z_loss", 0.0)

    def exact(x, weight):
        return linear_cross_entropy(
            x, weight, labels, implementation="xla", chunk_size=1024, z_loss=z_loss
        )

    def ours(x, weight):
        return linear_cross_entropy(x, weight, labels, implementation="mosaic_gpu", **options)

    @jax.jit
    def plain(x, weight):
        """With the same roundings, except for tokens whose exponentials are made again."""
        dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        logits = dot("td,vd->tv", x, weight)
        counts = (labels >= 0).astype(jnp.float32)
        column = jnp.maximum(labels, 0)[:, None]
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        offset = jnp.take_along_axis(logits, column, axis=-1)
        offset = jnp.where(lse - offset > 40, lse, offset)
        total = jnp.exp(lse - offset) / (1 + 2 * z_loss * lse)
        losses = lse - jnp.take_along_axis(logits, column, axis=-1) + z_loss * jnp.square(lse)
        onehot = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == column
        dz = jnp.exp(logits - offset) - jnp.where(onehot, total, 0)
        bits = jnp.finfo(x.dtype)
        rounded = jax.lax.reduce_precision(dz, bits.nexp, bits.nmant)
        at_label = lambda a: jnp.sum(jnp.where(onehot, a, 0), axis=1, keepdims=True)
        factor = counts[:, None] / jnp.sum(counts) / total * at_label(dz) / at_label(rounded)
        dz = rounded.astype(x.dtype)
        dx = dot("tv,vd->td", dz, weight) * factor
        if "vocab_chunk_size" in options:
            # By then the logsumexp is known, and the kernel stores dlogits.
            dlogits = jnp.exp(logits - lse) * (1 + 2 * z_loss * lse) - onehot.astype(jnp.float32)
            dlogits *= counts[:, None] / jnp.sum(counts)
            dz = jax.lax.reduce_precision(dlogits, bits.nexp, bits.nmant).astype(x.dtype)
            dx, dweight = dot("tv,vd->td", dz, weight), dot("tv,td->vd", dz, x)
        else:
            scaled = (x.astype(jnp.float32) * factor).astype(x.dtype)
            dweight = dot("tv,td->vd", dz, scaled)
        loss = jnp.sum(losses[:, 0] * counts) / jnp.sum(counts)
        return loss, dx.astype(x.dtype), dweight.astype(x.dtype)

    names = ("loss", "dx", "dweight")
    arguments, one = (x, weight), jnp.float32(1)
    with jax.default_matmul_precision("highest"):
        want = sampled(graded(exact)(jax.tree.map(lambda a: a.astype(jnp.float32), arguments), one))
    got = graded(ours)(arguments, one)
    assert_as_accurate(sampled(got), sampled(plain(*arguments)), want, names=names, slack=1.3)
    chex.assert_trees_all_equal(got, graded(ours)(arguments, one))
    if size > 1:
        assert want[0] > 44


def test_the_default_loss_is_the_kernels():
    x, weight = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((1000, 128), jnp.bfloat16)
    labels = jnp.zeros(256, jnp.int32)
    program = jax.jit(jax.value_and_grad(lambda x: linear_cross_entropy(x, weight, labels)))
    assert "mosaic_gpu" in program.lower(x).as_text()


# The RMSNorm kernels.

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
kernel = functools.partial(rms_norm, implementation="mosaic_gpu")
add_kernel = functools.partial(add_rms_norm, implementation="mosaic_gpu")
reference = functools.partial(rms_norm, implementation="reference")
add_reference = functools.partial(add_rms_norm, implementation="reference")

NORM_SHAPES = [
    ((16384, 4096), BF16),
    ((4096, 16384), BF16),
    ((16384, 2880), BF16),
    ((1000, 1024), BF16),
    ((4096, 4096), F32),
    ((513, 5120), F16),
]
each_norm_shape = pytest.mark.parametrize("shape, dtype", NORM_SHAPES, ids=str)


def norm_args(shape, dtype, weight_dtype=None):
    """`(x, residual, weight)` and the cotangents of `(y, residual_out)`."""
    keys = jax.random.split(jax.random.key(0), 5)
    x, residual, dy, dresidual_out = (jax.random.normal(key, shape, dtype) for key in keys[:4])
    weight = 1 + jax.random.normal(keys[4], shape[-1:]) / 8
    return (x, residual, weight.astype(weight_dtype or dtype)), (dy, dresidual_out)


def graded(fn, **options):
    """The values and all gradients of `fn`, compiled."""
    fn = functools.partial(fn, **options)
    return jax.jit(lambda args, cotangents: value_and_grads(fn, args, cotangents))


ADD_NAMES = ("y", "residual_out", "dx", "dresidual", "dweight")


@each_norm_shape
@pytest.mark.parametrize("casting", ["float32", "llama"])
def test_rms_norm_at_real_sizes(shape, dtype, casting):
    (x, _, weight), (dy, _) = norm_args(shape, dtype)
    got = graded(kernel, casting=casting)((x, weight), dy)
    low_precision = graded(reference, casting=casting)((x, weight), dy)
    exact = formula(x, weight, dy)
    arrays = (sampled(tree) for tree in (got, low_precision, exact))
    assert_as_accurate(*arrays, names=("y", "dx", "dweight"))


def check_add_kernel(args, cotangents, **options):
    got = graded(add_kernel, **options)(args, cotangents)
    low_precision = graded(add_reference, **options)(args, cotangents)
    assert [a.dtype for a in got] == [a.dtype for a in low_precision]
    residual_out = got[1]
    np.testing.assert_array_equal(residual_out, low_precision[1])
    exact = add_formula(args, cotangents, residual_out, **options)
    assert_as_accurate(*(sampled(t) for t in (got, low_precision, exact)), names=ADD_NAMES)


@each_norm_shape
def test_add_rms_norm_at_real_sizes(shape, dtype):
    check_add_kernel(*norm_args(shape, dtype), weight_offset=1.0)


@pytest.mark.parametrize("dtypes", [(BF16, F32, BF16), (F32, BF16, F16), (F16, F32, F32)])
def test_norms_of_three_dtypes(dtypes):
    x_dtype, residual_dtype, weight_dtype = dtypes
    (x, residual, weight), cotangents = norm_args((1001, 4096), x_dtype, weight_dtype)
    check_add_kernel((x, residual.astype(residual_dtype) / 3, weight), cotangents)


# Widths that no access of 16 bytes divides, and rows around the tiles of 4 and 32.
@pytest.mark.parametrize("num_tokens", [1, 3, 5, 33])
@pytest.mark.parametrize(
    "hidden_size, dtype",
    [
        (64, BF16),
        (96, F16),
        (130, BF16),
        (65, F32),
        (257, F32),
        (720, BF16),
        (2880, F32),
        (20480, F32),
        (32768, BF16),
        (65536, BF16),
    ],
    ids=str,
)
def test_norms_of_shapes_that_divide_nothing(num_tokens, hidden_size, dtype):
    check_add_kernel(*norm_args((num_tokens, hidden_size), dtype))


@each_norm_shape
@pytest.mark.parametrize("casting", ["float32", "llama"])
def test_add_rms_norm_is_the_norm_of_the_stored_sum(shape, dtype, casting):
    (x, residual, weight), _ = norm_args(shape, dtype)
    # With the same number of warps, because the order of the sum decides the last bit of rstd.
    options = {"casting": casting, "config": forward_candidates(shape[1], dtype, add=True)[0]}
    y, residual_out = jax.jit(functools.partial(add_kernel, **options))(x, residual, weight)
    again = jax.jit(functools.partial(kernel, **options))(residual_out, weight)
    np.testing.assert_array_equal(y, again)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=jnp.dtype)
def test_llama_casting_has_the_bits_of_the_reference(dtype):
    (x, _, weight), _ = norm_args((4096, 4096), dtype)
    run = lambda fn: np.asarray(jax.jit(functools.partial(fn, casting="llama"))(x, weight))
    x_f64 = np.asarray(x, np.float64)
    x_hat = x_f64 / np.sqrt(np.mean(np.square(x_f64), -1, keepdims=True) + 1e-6)
    # x·rstd may be an ulp of float32 off: where that decides how it rounds, the bits may differ.
    eps = 4 * float(np.finfo(np.float32).eps)
    sure = (x_hat * (1 - eps)).astype(dtype) == (x_hat * (1 + eps)).astype(dtype)
    assert np.mean(sure) > 0.99
    np.testing.assert_array_equal(run(kernel)[sure], run(reference)[sure])


@each_norm_shape
def test_repeated_norms_have_the_same_bits(shape, dtype):
    args, cotangents = norm_args(shape, dtype)
    run = graded(add_kernel)
    first = run(args, cotangents)
    same = jax.jit(lambda a, b: jnp.array([jnp.array_equal(*p) for p in zip(a, b, strict=True)]))
    for _ in range(20):
        assert np.all(same(run(args, cotangents), first))


# All parameters that the tuner tries at one shape, some of them at others: each is a compilation.
@pytest.mark.parametrize(
    "shape, dtype, step",
    [
        ((1001, 4096), BF16, 1),
        ((999, 1024), BF16, 5),
        ((301, 16384), BF16, 5),
        ((77, 2880), F32, 5),
    ],
    ids=str,
)
def test_all_launch_parameters_give_the_same_norm(shape, dtype, step):
    args, cotangents = norm_args(shape, dtype, F32)
    candidates = [
        *forward_candidates(shape[-1], dtype, add=True),
        *backward_candidates(shape[-1], dtype, add=True),
    ]
    low_precision = graded(add_reference)(args, cotangents)
    exact = add_formula(args, cotangents, low_precision[1])
    num_run = 0
    for config in candidates[::step]:
        try:
            got = graded(add_kernel, config=config)(args, cotangents)
        except ValueError as error:  # parameters made for Hopper, on a GPU before it
            assert "bwd_stages" in str(error)
            continue
        assert_as_accurate(*(sampled(t) for t in (got, low_precision, exact)), names=ADD_NAMES)
        num_run += 1
    assert num_run >= 2


@large
def test_norms_of_more_elements_than_int32_can_count():
    # The rows repeat, so that all of them can be compared with the first ones.
    num_tokens, hidden_size, period = 2**21 + 4097, 1024, 4097
    rows, weight, dy_rows = (
        jax.random.normal(key, shape, BF16)
        for key, shape in zip(
            jax.random.split(jax.random.key(0), 3),
            ((period, hidden_size), (hidden_size,), (period, hidden_size)),
            strict=True,
        )
    )
    num_periods, num_left = divmod(num_tokens, period)
    repeat = lambda a: jnp.concatenate([jnp.tile(a, (num_periods, 1)), a[:num_left]])
    x, dy = jax.jit(repeat)(rows), jax.jit(repeat)(dy_rows)
    assert x.size > 2**31
    y, vjp = jax.vjp(jax.jit(kernel), x, weight.astype(F32))
    dx, dweight = vjp(dy)
    want_y, want_dx, _ = graded(kernel)((rows, weight.astype(F32)), dy_rows)
    for got, want in ((y, want_y), (dx, want_dx)):
        for start in (0, (num_periods // 2) * period, (num_periods - 1) * period):
            np.testing.assert_array_equal(got[start : start + period], want)
        np.testing.assert_array_equal(got[num_tokens - num_left :], want[:num_left])
    exact_y, exact_dx, dweight_of_period = formula(rows, weight, dy_rows)
    assert_as_accurate(
        (want_y, want_dx),
        (exact_y.astype(BF16), exact_dx.astype(BF16)),
        (exact_y, exact_dx),
        names=("y", "dx"),
    )
    rest = formula(rows[:num_left], weight, dy_rows[:num_left])[2]
    exact = num_periods * dweight_of_period + rest
    error = np.sqrt(np.mean(np.square(np.asarray(dweight, np.float64) - exact)))
    assert error <= 1e-5 * np.sqrt(np.mean(np.square(exact)))


def test_the_default_norms_are_the_kernels():
    (x, residual, weight), (dy, dresidual_out) = norm_args((4096, 4096), BF16)
    program = lambda fn, *args: str(graded(fn).lower(*args).compile().as_text())
    assert "mosaic_gpu" in program(rms_norm, (x, weight), dy)
    assert "mosaic_gpu" in program(add_rms_norm, (x, residual, weight), (dy, dresidual_out))
    assert "mosaic_gpu" not in program(reference, (x, weight), dy)
    # What no kernel can do.
    assert "mosaic_gpu" not in program(rms_norm, (x[:, :48], weight[:48]), dy[:, :48])


def test_norms_under_transformations():
    # Rematerialization, which the interpreter cannot do, in a scan over layers; then vmap.
    (x, _, weight), _ = norm_args((512, 1024), F32)
    weights = jnp.stack([weight, weight / 2, 2 * weight])
    policy = jax.checkpoint_policies.save_only_these_names("residual", "rstd", "normed")

    def gradients(norm):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(residual, weight):
            y, residual = norm(jnp.sin(residual), residual, weight)
            return residual + jnp.sin(y), None

        loss = lambda x, weights: jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0]))
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, weights)

    chex.assert_trees_all_close(
        gradients(add_kernel), gradients(add_reference), rtol=1e-3, atol=1e-3
    )
    xs = x.reshape(4, 128, 1024)
    for axes, w in (((0, None), weight), ((0, 0), weights[jnp.array([0, 1, 2, 0])])):
        value = lambda norm: jax.jit(jax.vmap(norm, in_axes=axes))(xs, w)  # noqa: B023
        chex.assert_trees_all_close(value(kernel), value(reference), rtol=1e-5, atol=1e-5)


# The SwiGLU kernels.

swiglu_kernel = functools.partial(swiglu, implementation="mosaic_gpu")
swiglu_reference = functools.partial(swiglu, implementation="reference")
SWIGLU_NAMES = ("y", "dgate", "dup")

each_swiglu_shape = pytest.mark.parametrize(
    "shape, dtype",
    [
        ((16384, 14336), BF16),
        ((16384, 8192), BF16),
        ((4096, 14336), F32),
        ((8191, 11008), F16),  # no tile divides it
        ((1009, 1001), BF16),  # no access of 16 bytes does
        ((7, 143), BF16),
        ((3, 5), F32),
    ],
    ids=str,
)


def swiglu_args(shape, dtype):
    """`(gate, up)` and the cotangent of the product."""
    keys = jax.random.split(jax.random.key(0), 3)
    gate, up, dy = (2 * jax.random.normal(key, shape, dtype) for key in keys)
    return (gate, up), dy


@each_swiglu_shape
def test_swiglu_at_real_sizes(shape, dtype):
    args, dy = swiglu_args(shape, dtype)
    got = graded(swiglu_kernel)(args, dy)
    low_precision = graded(swiglu_reference)(args, dy)
    # In float64 a part of the rows is enough to compute; all of them are compared with XLA's.
    part = lambda a: a[np.r_[: a.shape[0] : 61, a.shape[0] - 1]]
    gate, up = args
    exact = swiglu_formula(part(gate), part(up), part(dy))
    some, some_low_precision = (as_float64([part(a) for a in t]) for t in (got, low_precision))
    assert_as_accurate(some, some_low_precision, exact, names=SWIGLU_NAMES)
    for name, a, b in zip(SWIGLU_NAMES, got, low_precision, strict=True):
        # The numbers that both round differ in the last bits of float32; products of a few hundred
        # times a derivative of silu near 0 do by more than that of the result.
        a, b = a.astype(F32), b.astype(F32)
        distance = jnp.abs(a - b) / (1 + jnp.abs(b))
        assert float(jnp.max(distance)) <= max(2 * float(jnp.finfo(dtype).eps), 1e-4), name


@each_swiglu_shape
def test_repeated_swiglu_and_its_product_have_the_same_bits(shape, dtype):
    (gate, up), dy = swiglu_args(shape, dtype)
    run = graded(swiglu_kernel)
    first = run((gate, up), dy)
    backward = jax.jit(functools.partial(swiglu_kernels.backward, emit_product=True))
    same = jax.jit(lambda a, b: jnp.array([jnp.array_equal(*p) for p in zip(a, b, strict=True)]))
    for _ in range(20):
        assert np.all(same(run((gate, up), dy), first))
        dgate, dup, product = backward(gate, up, dy)
        assert np.all(same((product, dgate, dup), tuple(first)))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=jnp.dtype)
def test_all_launch_parameters_give_the_same_swiglu(dtype):
    args, dy = swiglu_args((1001, 2880), dtype)
    want = graded(swiglu_kernel)(args, dy)
    for config in (
        *swiglu_config.forward_candidates(dtype),
        *swiglu_config.backward_candidates(dtype),
    ):
        chex.assert_trees_all_equal(graded(swiglu_kernel, config=config)(args, dy), want)


# Tiles divide the first; the second is padded.
@large
@pytest.mark.parametrize("width", [1024, 1025])
def test_swiglu_of_more_elements_than_int32_can_count(width):
    # The rows repeat, so that all of them can be compared with the first ones.
    num_tokens, period = 2**21 + 4097, 4097
    (gate_rows, up_rows), dy_rows = swiglu_args((period, width), BF16)
    num_periods, num_left = divmod(num_tokens, period)
    repeat = jax.jit(lambda a: jnp.concatenate([jnp.tile(a, (num_periods, 1)), a[:num_left]]))
    gate, up = repeat(gate_rows), repeat(up_rows)
    assert gate.size > 2**31
    pairs = [(jax.jit(swiglu_kernel)(gate, up), jax.jit(swiglu_kernel)(gate_rows, up_rows))]
    if width == 1024:
        backward = jax.jit(lambda *args: swiglu_kernels.backward(*args)[:2])
        of_all = backward(gate, up, repeat(dy_rows))
        pairs += zip(of_all, backward(gate_rows, up_rows, dy_rows), strict=True)
    for got, want in pairs:
        for start in (0, (num_periods // 2) * period, (num_periods - 1) * period):
            np.testing.assert_array_equal(got[start : start + period], want)
        np.testing.assert_array_equal(got[num_tokens - num_left :], want[:num_left])


def test_swiglu_of_finite_numbers_is_no_nan():
    for dtype in (BF16, F16, F32):
        values = jnp.array([0, 1, 10, 89, 103, 1e4, float(jnp.finfo(dtype).max)], F32)
        values = jnp.concatenate([values, -values]).astype(dtype)
        gate, up, dy = (a.ravel() for a in jnp.meshgrid(values, values, values))
        got = graded(swiglu_kernel)((gate, up), dy)
        assert not any(bool(jnp.any(jnp.isnan(a))) for a in got)


def test_swiglu_under_transformations():
    # A batch of arrays of an odd number of elements, which start at no multiple of 16 bytes.
    (gate, up), dy = swiglu_args((5, 33, 1001), BF16)
    both = lambda fn: jax.jit(jax.vmap(lambda g, u, dy: value_and_grads(fn, (g, u), dy)))
    for size in (1001, 1000, 64):
        args = [a[..., :size] for a in (gate, up, dy)]
        got, want = (as_float64(both(fn)(*args)) for fn in (swiglu_kernel, swiglu_reference))
        exact = swiglu_formula(*args)
        assert_as_accurate(got, want, exact, names=SWIGLU_NAMES)

    # Rematerialization, which the interpreter cannot do, in a scan over layers.
    (x, _), _ = swiglu_args((512, 1024), F32)
    scales = jnp.array([1.0, 0.5, 2.0])
    policy = jax.checkpoint_policies.save_only_these_names("gate", "up")

    def gradients(fn):
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(carry, scale):
            return carry + jnp.sin(fn(scale * carry, jnp.cos(carry))), None

        loss = lambda x, scales: jnp.sum(jnp.sin(jax.lax.scan(layer, x, scales)[0]))
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(x, scales)

    chex.assert_trees_all_close(
        gradients(swiglu_kernel), gradients(swiglu_reference), rtol=1e-3, atol=1e-2
    )


# The gated MLP.

MLP_NAMES = ("y", "dx", "dw_gate", "dw_up", "dw_down")


def mlp_args(shape, dtype, weight_dtype, num_layers=()):
    """`(x, w_gate, w_up, w_down)` and the cotangent of the result, for `(tokens, D, F)`."""
    num_tokens, hidden_size, intermediate_size = shape
    keys = jax.random.split(jax.random.key(0), 5)

    def weight(key, size_in, size_out):
        initial = jax.random.normal(key, (*num_layers, size_in, size_out)) / np.sqrt(size_in)
        return initial.astype(weight_dtype)

    x, dy = (jax.random.normal(key, (num_tokens, hidden_size), dtype) for key in keys[:2])
    w_gate, w_up = (weight(key, hidden_size, intermediate_size) for key in keys[2:4])
    return (x, w_gate, w_up, weight(keys[4], intermediate_size, hidden_size)), dy


def assert_mlp_is_as_accurate(mlp, args, dy):
    """Value and gradients of `mlp(swiglu_mlp)`, beside the formula in its dtypes, and again."""
    kernels, reference = (
        graded(mlp(functools.partial(swiglu_mlp, implementation=name)))
        for name in ("mosaic_gpu", "reference")
    )
    got = kernels(args, dy)
    low_precision = reference(args, dy)
    floats = jax.tree.map(lambda a: a.astype(F32), (args, dy))
    with jax.default_matmul_precision("highest"):
        exact = reference(*floats)
    some = map(sampled, (got, low_precision, exact))
    assert_as_accurate(*some, names=MLP_NAMES)
    for _ in range(5):
        chex.assert_trees_all_equal(kernels(args, dy), got)


@pytest.mark.parametrize("save", ["all", "gate_up", "x"])
@pytest.mark.parametrize(
    "shape, dtype, weight_dtype",
    [
        ((8192, 4096, 14336), BF16, BF16),
        ((4096, 2048, 8192), BF16, F32),
        ((2049, 2048, 5632), F16, F16),  # no tile divides the tokens
        ((1, 1024, 2816), BF16, BF16),
    ],
    ids=str,
)
def test_mlp_at_real_sizes(shape, dtype, weight_dtype, save):
    args, dy = mlp_args(shape, dtype, weight_dtype)
    assert_mlp_is_as_accurate(lambda fn: functools.partial(fn, save=save), args, dy)


# In a scan the kernels write gate and up into the arrays of all layers, and read them there.
@pytest.mark.parametrize("kept", [("gate", "up"), ("gate", "up", "mlp_product"), ()], ids=str)
def test_mlp_in_a_scan_over_layers(kept):
    (x, *weights), dy = mlp_args((2100, 1024, 2816), BF16, BF16, num_layers=(3,))
    policy = jax.checkpoint_policies.save_only_these_names(*kept)

    def layers(fn):
        layer = jax.checkpoint(
            lambda x, weights: (x + fn(x, *weights, save="all"), None), policy=policy
        )
        return lambda x, *weights: jax.lax.scan(layer, x, weights)[0]

    assert_mlp_is_as_accurate(layers, (x, *weights), dy)
