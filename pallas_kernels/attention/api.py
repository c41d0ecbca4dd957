"""The public attention of rows that hold several documents."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.arguments import (
    BITS_OF_PRODUCTS,
    check_config,
    floating_arrays,
    positive_number,
)
from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.attention.bounds import Bounds, whole_rows
from pallas_kernels.attention.config import AttentionConfig
from pallas_kernels.attention.reference import attention_reference
from pallas_kernels.choices import record
from pallas_kernels.implementation import (
    Chosen,
    Implementation,
    check_config_has_kernel,
    check_implementation,
    choose_implementation,
    symbolic_reason,
)
from pallas_kernels.layout import warn_of_idle_axes
from pallas_kernels.partition import explicit_splits, mesh_of, split_as


def document_attention(
    q: Float[Array, "B S N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    bounds: Bounds | None,
    *,
    scale: float | None = None,
    implementation: Implementation | None = None,
    config: AttentionConfig | None = None,
) -> Float[Array, "B S N H"]:
    """The causal attention of each document by itself (https://arxiv.org/abs/1706.03762).

    The result of a token is `softmax(scale · q·k) · v`, over the tokens from the beginning of its
    document, or of its window, to the token itself. The kernels skip each tile of keys that no
    query of a block attends to. They need no mask, and a row may have any number of documents.
    Logits, softmax and sums are float32. The kernels round the exponentials of the softmax to the
    dtype of `v` before their product with `v`. The result is rounded once, to the dtype of `q`.
    Each gradient has the dtype of its argument. The gradients of `k` and `v` are added up over
    heads in float32. Two calls of the kernels with equal arguments have equal results and
    gradients, bit by bit.

    The forward keeps `q`, `k`, `v`, the bounds, the result, and one float32 number for each token
    and head for the backward. The kernels use the algorithm of https://arxiv.org/abs/2407.08608,
    with two kernels for the gradients. They need no workspace, unless a device has at most one
    block of 128 keys for each multiprocessor, counted over rows and key/value heads. Then the
    backward has several float32 arrays of the size of `k` and of `v`.

        bounds = document_bounds(segment_ids)  # with window=W for a sliding window
        out = document_attention(q, k, v, bounds)

    Args:
      q: Queries. Queries, keys and values may have any floating dtype of 16 bits or more.
      k: Keys; N is a multiple of K, and head n of the queries reads head `n // (N // K)`.
      v: Values.
      bounds: Beginnings and ends of the documents, from `document_bounds`. `None` is for rows of
        one document. On Auto axes split the rows of the bounds over the mesh axes of the rows of
        `q`, or over the first of these axes, or not at all. With another split, XLA gathers the
        results without a warning.
      scale: Positive factor of the products of queries and keys: a number, or an array without
        axes that JAX does not trace. `None` is `1 / √H`.
      implementation: Name of the program. `None`, the default, runs the kernels if JAX's default
        device and the arguments allow it, and plain JAX otherwise. `"mosaic_gpu"` is the kernels,
        for Hopper GPUs. They take bfloat16 and float16, and heads of up to 128 numbers. S must be a
        multiple of 8. Heads are padded with zeros to 64 or 128 numbers. `"reference"` is plain JAX,
        which keeps the scores of all pairs of tokens in float32; `"xla"` is the same. `"require"`
        runs the kernels, or raises. On a mesh each device computes its own rows and heads.
      config: Launch parameters of the kernels. `None` takes measured parameters.

    Returns:
      The attention, of the shape and dtype of `q`, and split by Explicit axes as `q` is.

    Raises:
      ValueError: The shapes disagree, a name is unknown, the scale is no positive number of
        float32, or `config` is given and plain JAX runs, or a kernel cannot be launched with it.
      TypeError: An array has a dtype that is not allowed, or an option has a wrong type.
      NotImplementedError: The caller asked for the kernels or requires them, and they do not run.
        Or the kernels are differentiated twice or in forward mode (`jax.jvp`). Or the members of
        `jax.vmap` have more than 65535 rows together. Or N, K or H is symbolic
        (`jax.export.symbolic_shape`).
    """
    q, k, v = floating_arrays(q=q, k=k, v=v, least_bits=BITS_OF_PRODUCTS)
    _check_shapes(q, k, v, bounds)
    if scale is None:
        scale = q.shape[-1] ** -0.5
    scale = positive_number("scale", scale, remedy="None is 1 / √H")
    sharding, num_kv_heads = jax.typeof(q).sharding, k.shape[2]
    q, k, v = (_with_whole_rows(a, num_kv_heads) for a in (q, k, v))
    chosen, reason = choose_attention(q, k, v, implementation, config)
    record("document_attention", (q, k, v), implementation, chosen, reason)
    if chosen == "mosaic_gpu" and q.size:
        out = mosaic_gpu.attention(q, k, v, bounds, scale=scale, config=config)
    else:
        begins = (bounds or whole_rows(*q.shape[:2])).begins
        arrays = q, *_split_as_queries(q, k, v, begins)
        out = attention_reference(*arrays, scale=scale)[0].astype(q.dtype)
    # In jax.set_mesh an array that was made outside of it has an empty mesh, and no split.
    if sharding.mesh.empty or jax.typeof(out).sharding == sharding:
        return out
    return jax.sharding.reshard(out, sharding)


def choose_attention(
    q: Array,
    k: Array,
    v: Array,
    implementation: Implementation | None = None,
    config: AttentionConfig | None = None,
) -> tuple[Chosen, str | None]:
    """The implementation that `document_attention` runs, and the reason if it is not the kernels.

    Raises:
      ValueError: The name is unknown, or `config` is given and plain JAX runs, or a kernel cannot
        be launched with it.
      TypeError: `config` is no `AttentionConfig`.
      NotImplementedError: The caller asked for the kernels, which do not take the arguments.
    """
    check_implementation(implementation)
    check_config(config, AttentionConfig)
    unsupported = symbolic_reason(q, k, v) or mosaic_gpu.unsupported_reason(q, k, v)
    chosen, reason = choose_implementation(implementation, unsupported, fallback="reference")
    check_config_has_kernel(config, implementation, chosen, reason)
    if config is not None and q.size:
        mosaic_gpu.check_launch(config, q, k)
    return chosen, reason


def _with_whole_rows(a: Float[Array, "B S _ H"], num_kv_heads: int) -> Float[Array, "B S _ H"]:
    """The array, split by Explicit axes over rows, and over heads if the devices divide the keys'.

    No Explicit axis splits the tokens of a row or the numbers of a head.
    """
    mesh, splits = jax.typeof(a).sharding.mesh, explicit_splits(a)
    num_devices = math.prod(mesh.shape[name] for name in splits[2])
    heads = splits[2] if num_kv_heads % num_devices == 0 else ()
    wanted = (splits[0], (), heads, ())
    if wanted == splits:
        return a
    several = {name for split in splits for name in split if mesh.shape[name] > 1}
    if idle := tuple(sorted(several - {*splits[0], *heads})):
        warn_of_idle_axes(idle, mosaic_gpu.PARTS)
    return split_as(wanted, a)


def _split_as_queries(q: Array, k: Array, v: Array, begins: Array) -> list[Array]:
    """Keys, values and bounds, split by Explicit axes over rows and heads as the queries are.

    JAX does not combine arrays that Explicit axes split in different ways.
    """
    mesh = mesh_of((q, k, v, begins))
    rows, _, heads, _ = explicit_splits(q)
    of_keys = rows, (), heads, ()
    return [
        split_as(of_keys, k, mesh),
        split_as(of_keys, v, mesh),
        split_as((rows, ()), begins, mesh),
    ]


def _check_shapes(q: Array, k: Array, v: Array, bounds: Any) -> None:
    """Raises an error if the arguments do not fit together, or sizes of heads are symbols."""
    if not (bounds is None or isinstance(bounds, Bounds)):
        raise TypeError(
            "bounds must be what document_bounds returns, or None for rows of one document, got "
            f"{type(bounds).__name__}"
        )
    for name, a, dims in (("q", q, "NH"), ("k", k, "KH"), ("v", v, "KH")):
        for dim, size in zip(dims, a.shape[2:], strict=False):
            if not isinstance(size, int):
                raise NotImplementedError(
                    f"{name} {a.shape} has a symbolic size, {dim} = {size}; only B and S may be "
                    "symbols, so export with a number for it"
                )
    if q.ndim != 4 or not q.shape[3]:
        raise ValueError(f"q must be [B, S, N, H], got {q.shape}")
    of_keys = (*q.shape[:2], *k.shape[2:3], q.shape[3])
    if k.shape != of_keys or v.shape != of_keys or not k.shape[2] or q.shape[2] % k.shape[2]:
        raise ValueError(
            f"k and v must be [B, S, K, H] for q {q.shape}, where K divides N = {q.shape[2]}, got "
            f"{k.shape} and {v.shape}"
        )
    if bounds is None:
        return
    for name, bound in bounds._asdict().items():
        shape, dtype = (getattr(bound, of, None) for of in ("shape", "dtype"))
        if shape != q.shape[:2] or dtype != jnp.int32:
            raise ValueError(f"bounds.{name} must be int32 {q.shape[:2]}, got {dtype} {shape}")
