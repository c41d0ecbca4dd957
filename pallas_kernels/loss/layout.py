"""Layouts of the output embedding.

A layout is the order of the embedding's axes, in the letters that the `einsum`s of the loss use:

- `"vd"`: `[V, D]`, a row for each vocabulary entry. Hugging Face and `flax.nnx.Embed` have it.
- `"dv"`: `[D, V]`, a column for each entry. It is the kernel of a `flax.nnx.Linear`.

The gradient has the layout of the embedding. Nothing transposes one or the other.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.loss.low_rank import TwoParts
from pallas_kernels.loss.mosaic_gpu.logits_config import LINE

type WeightLayout = Literal["vd", "dv"]
OneArray = Float[Array, "V D"] | Float[Array, "D V"]
Embedding = OneArray | TwoParts


def column_axis(layout: WeightLayout) -> int:
    """The axis of the embedding whose entries are columns of the logits.

    It is the first or the last one, and so holds for the bias, too.
    """
    return 0 if layout == "vd" else -1


def sizes(weight: Any, layout: WeightLayout) -> tuple[int, int]:
    """`(V, D)` of an embedding, or of its shape and dtype."""
    return weight.shape[layout.index("v")], weight.shape[layout.index("d")]


def padding(vocab_size: int) -> int:
    """Number of entries of zeros after the vocabulary, with which the kernels have whole lines."""
    return -vocab_size % LINE


def entries(
    weight: Embedding, columns: Int[Array, " T"], layout: WeightLayout
) -> Float[Array, "T _"]:
    """The vectors of some vocabulary entries, which must exist."""
    if isinstance(weight, TwoParts):
        parts = weight.frozen, weight.low_rank
        return jnp.concatenate([entries(a, columns, layout) for a in parts], axis=-1)
    place: Any = (slice(None),) * layout.index("v") + (columns,)
    found = weight.at[place].get(mode="promise_in_bounds")
    return found if layout == "vd" else found.T


def unsupported_reason(weight: Any, layout: WeightLayout) -> str | None:
    """Why the kernels cannot read the embedding where it lies, or None if they can."""
    vocab_size, _ = sizes(weight, layout)
    missing = padding(vocab_size)
    if layout == "vd" or not missing:
        return None
    return (
        f"weight is [D, V], and its rows of V = {vocab_size} on a device are no multiple of "
        f"{LINE}; pad the vocabulary, so that a device has {vocab_size + missing} columns, or give "
        'a weight [V, D] with weight_layout="vd"'
    )


def pad_columns(a: Any, number: int, layout: WeightLayout) -> Any:
    """The embedding or the bias, with zeros for `number` more vocabulary entries; a copy."""
    if isinstance(a, TwoParts):
        return jax.tree.map(lambda part: pad_columns(part, number, layout), a)
    widths = [(0, 0)] * a.ndim
    widths[column_axis(layout)] = 0, number
    return jnp.pad(a, widths)
