"""The kernels of documents in the Llama's program, and what they refuse there."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from models.llama import Llama
from models.sharding import make_mesh
from support.jaxprs import equations
from support.split_llama import changed, loss_and_gradients, packed_batch
from train.step import model_graph


def in_whole_eights(batch):
    """Rows of 24 tokens, because the kernels take a multiple of 8."""
    return {name: array[:, :24] for name, array in batch.items()}


@pytest.mark.parametrize("tensor", [1, 2])
def test_the_backward_repeats_no_attention(tensor):
    """The layers share the body of a loop, which has one attention forward and one backward."""
    options = {"dtype": "bfloat16", "head_dim": 16, "attention_implementation": "mosaic_gpu"}
    config = changed(**options)
    params = nnx.eval_shape(lambda: nnx.state(Llama(config, rngs=nnx.Rngs(0)), nnx.Param))
    mesh = make_mesh(data=1, fsdp=2, tensor=tensor, devices=jax.devices()[: 2 * tensor])
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        step = functools.partial(loss_and_gradients, model_graph(config))
        jaxpr = jax.make_jaxpr(step)(params, in_whole_eights(packed_batch())).jaxpr
    found = Counter(
        equation.primitive.name
        for equation in equations(jaxpr)
        if getattr(equation.params.get("operation"), "name", None) == "document_attention"
    )
    assert found == {"operation": 1, "operation_backward": 1}


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"dtype": "float32"}, "q, k and v are float32, .* the kernels take bfloat16 or float16"),
        ({"dtype": "bfloat16", "head_dim": 136}, "heads have 136 numbers; the kernels take up to"),
        ({"dtype": "bfloat16"}, "rows have 28 tokens; pad them to a multiple of 8"),
    ],
)
def test_what_the_kernels_refuse_is_said_before_they_compile(options, reason):
    config = changed(attention_implementation="mosaic_gpu", **options)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    batch = jax.tree.map(jnp.asarray, packed_batch())
    run = lambda model: model(batch["tokens"], segment_ids=batch["segment_ids"])
    with pytest.raises(NotImplementedError, match=reason):
        nnx.eval_shape(run, model)
