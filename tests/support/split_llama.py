"""A Llama on meshes of up to eight CPU devices, and its compiled programs."""

import dataclasses
import functools
from typing import Any

import chex
import jax
import numpy as np
from flax import nnx

from models.config import LlamaConfig
from models.llama import Llama
from models.rope import RopeParameters
from models.sharding import batch_sharding, make_mesh, parameter_path, parameter_shardings
from train.objectives import loss_and_sums
from train.step import model_graph

# No two of these sizes, or of their parts on up to eight devices, are equal, so a size in a
# compiled program says what it is of.
CONFIG = LlamaConfig(
    vocab_size=1008,
    hidden_size=64,
    intermediate_size=144,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=10,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    rope_parameters=RopeParameters(rope_theta=100.0),
    dtype="float32",
    remat="minimal",
)
BIASES = {"attention_bias": True, "mlp_bias": True}
L, D, F, V, Q, KV = 3, 64, 144, 1008, 80, 40
# On four devices of `data` and `fsdp` three rows each, which two devices share as 1.5 rows each.
B, S = 12, 28
Z_LOSS = 0.01


def changed(**changes: Any) -> LlamaConfig:
    return dataclasses.replace(CONFIG, **changes)


def mesh_of(data: int, fsdp: int, tensor: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: data * fsdp * tensor]
    return make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=devices)


def parameters(config: LlamaConfig = CONFIG) -> nnx.State:
    """Random numpy arrays: no norm is the identity, no bias 0."""
    shapes = nnx.state(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)

    def random(path, shape):
        center = 1.0 if "norm" in parameter_path(path)[-2] else 0.0
        return np.asarray(center + 0.15 * rng.normal(size=shape.shape), shape.dtype)

    return jax.tree.map_with_path(random, shapes)


def packed_batch() -> dict[str, np.ndarray]:
    """Rows of two documents of lengths that differ by row, some with padding at the end."""
    rng = np.random.default_rng(1)
    column, row = np.arange(S), np.arange(B)[:, None]
    boundary, end = 3 + row % 20, S - row % 3
    labels = rng.integers(V, size=(B, S))
    labels[(column == boundary - 1) | (column >= end - 1)] = -100
    batch = {
        "tokens": rng.integers(V, size=(B, S)),
        "labels": labels,
        "segment_ids": np.where(column < boundary, 1, 2) * (column < end),
        "positions": np.where(column < boundary, column, column - boundary) * (column < end),
    }
    return {name: np.asarray(array, np.int32) for name, array in batch.items()}


def loss_and_gradients(graphdef, params, batch):
    loss = lambda params: loss_and_sums(graphdef, params, batch, z_loss=Z_LOSS)
    return jax.value_and_grad(loss, has_aux=True)(params)


def forward(graphdef, params, batch):
    return loss_and_sums(graphdef, params, batch)


def lowered(config: LlamaConfig, mesh, batch=None, fn=loss_and_gradients, params=None):
    """The program on a mesh, and its arguments."""
    params = parameters(config) if params is None else params
    shardings = parameter_shardings(params, mesh)
    params = jax.device_put(params, shardings)
    batch = jax.device_put(packed_batch() if batch is None else batch, batch_sharding(mesh))
    out = None if fn is forward else (None, shardings)
    # jax.nn.dot_product_attention does not lower in 16 bits under strict promotion.
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        program = jax.jit(fn, static_argnums=0, out_shardings=out)
        return program.lower(model_graph(config), params, batch), params, batch


@functools.cache
def compiled(config: LlamaConfig, mesh):
    """The program of loss and gradients on a mesh, and its arguments."""
    program, params, batch = lowered(config, mesh)
    return program.compile(), params, batch


def on_mesh(config: LlamaConfig, mesh):
    """`((loss, sums), gradients)`."""
    program, params, batch = compiled(config, mesh)
    return program(params, batch)


@functools.cache
def on_one_device(config: LlamaConfig):
    return on_mesh(config, mesh_of(1, 1, 1))


def assert_close(got, want):
    """Allows some float32 epsilons of the largest element, as sums in another order need them."""
    scale = jax.tree.map(lambda w: max(np.abs(w).max(), 1e-30), want)  # no token may be right
    scaled = lambda tree: jax.tree.map(lambda a, s: np.asarray(a) / s, tree, scale)
    chex.assert_trees_all_close(scaled(got), scaled(want), rtol=0, atol=5e-6)


# The textbook and unrolled layers take as long to compile as there are layers.
TWO_LAYERS = {"num_hidden_layers": 2}
UNROLLED = TWO_LAYERS | {"scan_layers": False}
VARIANTS = {
    "untied_scanned_biases": changed(**TWO_LAYERS, **BIASES),
    "tied_unrolled_full": changed(**UNROLLED, tie_word_embeddings=True, qk_norm=True, remat="full"),
}
