"""Training and the Llama on a GPU: memory in use, cuDNN attention, scanned layers, several GPUs."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from benchmarks.kernels import documents
from models.llama import Llama
from models.presets import PRESETS
from models.remat import POLICIES
from models.sharding import batch_sharding, make_mesh, parameter_shardings
from pallas_kernels.gpu.device import target_device
from support.numerics import assert_as_accurate, assert_trees_as_accurate
from support.on_gpu import as_float64, large
from train.data import SyntheticDataset
from train.objectives import loss_and_sums
from train.step import model_graph
from train.xla_flags import compiler_options

pytestmark = pytest.mark.gpu


@large
def test_training_on_the_gpu_fits_the_memory_it_announced(tmp_path):
    """The run is a process of its own, because the peak belongs to a whole process.

    That process takes three quarters of the card's memory at once, as every run does.
    """
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
    environment.pop("XLA_PYTHON_CLIENT_ALLOCATOR", None)  # not every allocator counts memory
    root = pathlib.Path(__file__).parents[2]
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
    """Losses, sums for metrics and gradients of two layers of 1B, on data x fsdp x tensor GPUs.

    The loss of a batch is one number, whose error may be near 0 by chance. So there are the losses
    of 32 batches, and as many sums. The gradients are those of the first batch. The program is
    compiled with the options of a training step.
    """
    sizes = {"num_hidden_layers": 2, "vocab_size": 32000}
    changes = {"remat": "mlp_inputs"} | changes
    config = dataclasses.replace(PRESETS["llama3.2-1b"], **sizes, dtype=dtype, **changes)
    data, fsdp, tensor = mesh_shape
    devices = jax.devices()[: data * fsdp * tensor]
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)
    params = nnx.state(Llama(config, rngs=nnx.Rngs(0)))
    shardings = parameter_shardings(params, mesh)
    dataset = SyntheticDataset(config.vocab_size, 1024)

    def batch(step):
        return jax.device_put(dataset.batch(step, batch_size=4, seed=0), batch_sharding(mesh))

    def compute(params, batch):
        loss = lambda params: loss_and_sums(model_graph(config), params, batch)
        return jax.value_and_grad(loss, has_aux=True)(params)

    with (
        jax.set_mesh(mesh),
        # `jax.nn.dot_product_attention` does not lower in 16 bits under strict promotion.
        jax.numpy_dtype_promotion("standard"),
        jax.default_matmul_precision("highest" if dtype == "float32" else "default"),
    ):
        options = compiler_options(devices)
        run = jax.jit(compute, out_shardings=(None, shardings), compiler_options=options)
        params = jax.device_put(params, shardings)
        found = [run(params, batch(step))[0] for step in range(32)]
        _, gradients = run(params, batch(0))
        # The counts of right tokens are left out: the weights are random, so they are 0 or 1.
        losses = jnp.stack([loss for loss, _ in found])
        nll_sums = jnp.stack([sums["nll_sum"] for _, sums in found])
        return as_float64((losses, nll_sums, gradients))


def assert_llama_is_as_accurate(got, low_precision, **changes):
    """Compares the errors against float32 without kernels."""
    exact = small_llama(ONE, "float32", implementation="xla", **changes)
    assert_trees_as_accurate(got, low_precision, exact, slack=2.0)


@pytest.mark.gpus
@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk_norm"])
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2), (1, 1, 4)], ids=str)
def test_several_gpus_compute_what_one_does(shape, qk_norm):
    skip_without_gpus_for(shape)
    of_shape, of_one = (small_llama(sizes, qk_norm=qk_norm) for sizes in (shape, ONE))
    assert_llama_is_as_accurate(of_shape, of_one, qk_norm=qk_norm)


@pytest.mark.gpus
@pytest.mark.parametrize("scan_layers", [True, False], ids=["scanned", "unrolled"])
@pytest.mark.parametrize("shape", [(2, 1, 1), (1, 2, 1), (1, 1, 2), (1, 2, 2)], ids=str)
def test_several_gpus_compute_in_fp8_what_one_does(shape, scan_layers):
    skip_without_gpus_for(shape)
    options = {"fp8": "rowwise", "scan_layers": scan_layers}
    of_shape, of_one = (small_llama(sizes, **options) for sizes in (shape, ONE))
    assert_llama_is_as_accurate(of_shape, of_one, scan_layers=scan_layers)


def skip_without_gpus_for(shape):
    if jax.device_count() < np.prod(shape):
        pytest.skip(f"needs {np.prod(shape)} GPUs, there are {jax.device_count()}")


@pytest.mark.parametrize("head_dim", [64, 128])
def test_norms_of_queries_and_keys(head_dim):
    """By kernels, with a row for each head, and without."""
    changes = {"qk_norm": True, "head_dim": head_dim}
    plain = small_llama(ONE, implementation="xla", **changes)
    assert_llama_is_as_accurate(small_llama(ONE, **changes), plain, **changes)


@pytest.mark.parametrize("remat", POLICIES)
def test_scanned_layers_compute_what_unrolled_ones_do(remat):
    unrolled = small_llama(ONE, remat="minimal", scan_layers=False)
    assert_llama_is_as_accurate(small_llama(ONE, remat=remat), unrolled)


def skip_without_cudnn_for(head_dim):
    capability = target_device().capability
    if head_dim > 128 and (capability is None or capability[0] != 9):
        pytest.skip("cuDNN takes heads above 128 channels on Hopper")


@pytest.mark.parametrize("head_dim", [64, 192, 256])
@pytest.mark.parametrize(
    "num_documents, scan_layers, window",
    [
        (1, True, None),
        (2, True, None),
        (20, True, None),
        (20, False, None),
        (1, True, 300),
        (3, True, 300),
    ],
    ids=[
        "one document",
        "2 documents",
        "20 documents",
        "20 documents, unrolled",
        "window",
        "3 documents and a window",
    ],
)
def test_default_attention_is_as_accurate_as_xla(num_documents, scan_layers, window, head_dim):
    """On Hopper our kernels compute heads of 64, and cuDNN those of 192 and 256."""
    config = dataclasses.replace(
        PRESETS["llama3.2-1b"],
        num_hidden_layers=2,
        vocab_size=1024,
        initializer_range=0.05,
        head_dim=head_dim,
        scan_layers=scan_layers,
        sliding_window=window,
    )
    skip_without_cudnn_for(head_dim)
    batch = SyntheticDataset(config.vocab_size, 1024).batch(0, batch_size=2, seed=0)
    if num_documents > 1:
        ids = documents.random_segment_ids(jax.random.key(2), 2, 1024, num_documents)
        batch |= {"segment_ids": 1 + ids, "positions": documents.positions_of(ids)}
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


def test_default_attention_runs_our_kernels_on_hopper():
    config = dataclasses.replace(PRESETS["llama3.2-1b"], num_hidden_layers=1, vocab_size=1024)
    model = Llama(config, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 256), jnp.int32)
    graphdef, state = nnx.split(model)
    program = jax.jit(lambda state: nnx.merge(graphdef, state)(tokens)).lower(state).as_text()
    is_hopper = target_device().capability == (9, 0)
    assert ("attention_forward" in program, "cudnn" in program) == (is_hopper, not is_hopper)
