"""`maxtext`: its Llama with scanned layers, trained with the loss of its pre-training loop."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import maxtext
from flax import nnx
from jax.sharding import Mesh
from maxtext.configs import pyconfig
from maxtext.models import models
from maxtext.trainers.pre_train.train import loss_fn
from maxtext.utils import maxtext_utils

from foreign import comparison
from foreign.comparison import IGNORED, Project, Size
from train.planner import aot


@functools.cache
def configuration(size: Size, dtype: str) -> Any:
    options = {
        "run_name": "test",
        "base_output_directory": "unused",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "decoder_block": "llama2",
        "attention": "dot_product",
        "base_num_decoder_layers": 2,
        "base_emb_dim": size.width,
        "base_mlp_dim": size.hidden,
        "base_num_query_heads": size.heads,
        "base_num_kv_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "vocab_size": size.vocab,
        "max_target_length": size.length,
        "per_device_batch_size": size.sequences,
        "dtype": dtype,
        "weight_dtype": "float32",
    }
    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    return pyconfig.initialize(["", base, *(f"{name}={value}" for name, value in options.items())])


def build(size: Size, dtype: Any, devices: Any = None) -> nnx.Module:
    config = configuration(size, jnp.dtype(dtype).name)
    mesh = Mesh(maxtext_utils.create_device_mesh(config, devices), config.mesh_axes)
    return models.Transformer(config, mesh, None, rngs=nnx.Rngs(params=0, dropout=1))


def batch(key: jax.Array, size: Size) -> dict[str, jax.Array]:
    tokens = jax.random.randint(key, (size.sequences, size.length + 1), 0, size.vocab)
    shape = size.sequences, size.length
    segments = jnp.broadcast_to(jnp.arange(size.length) < size.length - 9, shape)  # the rest pads
    return {
        "inputs": tokens[:, :-1],
        "inputs_position": jnp.broadcast_to(jnp.arange(size.length), shape),
        "inputs_segmentation": segments.astype(jnp.int32),
        "targets": tokens[:, 1:],
        "targets_segmentation": segments.astype(jnp.int32),
    }


def loss(model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    value, _ = loss_fn(model, model.config, dict(batch), None, None)
    return value


def patched_loss(patched: Any, model: Any, batch: dict[str, jax.Array]) -> jax.Array:
    labels = jnp.where(batch["targets_segmentation"] != 0, batch["targets"], IGNORED)
    return patched.loss(
        model,
        labels,
        decoder_input_tokens=batch["inputs"],
        decoder_positions=batch["inputs_position"],
        decoder_segment_ids=batch["inputs_segmentation"],
        enable_dropout=False,
    )


PROJECT = Project(build, batch, loss, patched_loss)
H100 = aot.devices(aot.CHIPS["h100"], 1)
CASES = comparison.cases(PROJECT, functools.partial(build, devices=H100))


def test_parameters_stay():
    comparison.assert_tree_is_kept(PROJECT)


def test_loss_and_gradients():
    comparison.assert_same_training(PROJECT, num_replaced=4)


def test_program_for_an_h100():
    # The body of the scan computes its layer once more for the backward pass.
    calls = {
        "gated_matmul": 2,
        "gated_matmul_backward": 1,
        "linear_exponentials": 2,
        "linear_exponentials_again": 2,
        "rms_norm_bwd": 3,
        "rms_norm_fwd": 5,
    }
    comparison.assert_kernels_replace_logits("foreign.test_maxtext", calls)
