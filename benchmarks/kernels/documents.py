"""Inputs of `benchmarks/kernels/attention.py`, and attention of rows of several documents.

A token attends to earlier tokens of its own document. `segment_ids` `[B, S]` are the numbers of the
documents, which count from 0 in every row.
"""

import importlib
from typing import Literal

import jax
import jax.numpy as jnp

from benchmarks.kernels.formulas import Arrays
from benchmarks.kernels.shapes import Shape
from pallas_kernels.attention import (
    AttentionConfig,
    document_attention,
    document_bounds,
)

type Direction = Literal["forward", "forward+backward"]


def specs_of(shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """The inputs by name, and the cotangent."""
    batch_size, length, num_heads, num_kv_heads, head_size = shape
    of_queries = jax.ShapeDtypeStruct((batch_size, length, num_heads, head_size), jnp.bfloat16)
    of_keys = jax.ShapeDtypeStruct((batch_size, length, num_kv_heads, head_size), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((batch_size, length), jnp.int32)
    floats = {"q": of_queries, "k": of_keys, "v": of_keys, "dout": of_queries}
    return floats | {"segment_ids": ids}


def arrays_of(shape: Shape, num_documents: int) -> Arrays:
    """Random inputs and a random cotangent, in rows of so many documents of random lengths."""
    key_of_documents, *keys = jax.random.split(jax.random.key(0), 5)
    specs = specs_of(shape)
    batch_size, length = specs.pop("segment_ids").shape
    arrays = {
        name: jax.random.normal(key, spec.shape, spec.dtype)
        for key, (name, spec) in zip(keys, specs.items(), strict=True)
    }
    ids = random_segment_ids(key_of_documents, batch_size, length, num_documents)
    return arrays | {"segment_ids": ids}


def masked(q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """cuDNN's attention with a mask of S² elements for each row."""
    mask = (segment_ids[:, :, None] == segment_ids[:, None])[:, None]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="cudnn")


def by_kernels(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None = None,
    *,
    window: int | None = None,
    config: AttentionConfig | None = None,
) -> jax.Array:
    """Our kernels, which skip tiles of other documents; None is for rows of one document."""
    if window is not None and segment_ids is None:
        segment_ids = jnp.zeros(q.shape[:2], jnp.int32)
    bounds = None if segment_ids is None else document_bounds(segment_ids, window=window)
    return document_attention(q, k, v, bounds, implementation="mosaic_gpu", config=config)


def by_transformer_engine(
    q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array, *, num_documents: int
) -> jax.Array:
    """TransformerEngine's attention: cuDNN computes all documents of all rows in one call.

    A row has at most `num_documents` documents.
    """
    te = importlib.import_module("transformer_engine.jax.attention")
    numbers = segment_ids + 1  # 0 would be padding
    positions = positions_of(segment_ids)
    return te.fused_attn(
        (q, k, v),
        bias=None,
        sequence_descriptor=te.SequenceDescriptor.from_segment_ids_and_pos(numbers, positions),
        seed=None,
        attn_bias_type=te.AttnBiasType.NO_BIAS,
        attn_mask_type=te.AttnMaskType.PADDING_CAUSAL_MASK,
        qkv_layout=te.QKVLayout.THD_THD_THD,
        softmax_type=te.AttnSoftmaxType.VANILLA_SOFTMAX,
        scaling_factor=q.shape[-1] ** -0.5,
        dropout_probability=0.0,
        is_training=True,
        max_segments_per_seq=num_documents,
    )


def positions_of(segment_ids: jax.Array) -> jax.Array:
    """The position of each token in its document, from 0."""
    return jnp.arange(segment_ids.shape[1], dtype=jnp.int32) - document_bounds(segment_ids).begins


def random_segment_ids(
    key: jax.Array, batch_size: int, length: int, num_documents: int
) -> jax.Array:
    """Rows of so many documents, each of which begins at a random token."""
    begins = lambda key: 1 + jax.random.permutation(key, length - 1)[: num_documents - 1]
    of_rows = jax.vmap(begins)(jax.random.split(key, batch_size))
    is_begun = of_rows[:, None] <= jnp.arange(length)[:, None]
    return jnp.sum(is_begun, axis=2, dtype=jnp.int32)
