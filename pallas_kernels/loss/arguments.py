"""Checks of the arguments of the linear cross-entropy, and labels as its programs take them."""

import math
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import checkify
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.arguments import (
    BITS_OF_PRODUCTS,
    as_array,
    check_choice,
    check_config,
    check_integer,
    check_number,
    checked_dtype,
    floating_arrays,
    number,
    positive_number,
)
from pallas_kernels.gpu.kernel import varying_axes
from pallas_kernels.implementation import (
    Chosen,
    Implementation,
    check_config_has_kernel,
    check_implementation,
    choose_implementation,
    symbolic_reason,
)
from pallas_kernels.loss import low_rank
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.layout import Embedding, WeightLayout, sizes, unsupported_reason
from pallas_kernels.loss.mosaic_gpu import logits
from pallas_kernels.loss.plan import Request, Settings
from pallas_kernels.loss.token_loss import IGNORED, OUT_OF_RANGE, LossOptions
from pallas_kernels.partition import split_alike

type Reduction = Literal["mean", "sum", "none"]

_DTYPES_OF_WEIGHTS = jnp.floating, jnp.integer, jnp.bool_


def check_arrays(
    x: Any, weight: Any, labels: Any, bias: Any, token_weights: Any, weight_layout: Any
) -> tuple[Array, Embedding, Array | None]:
    """`(x, weight, bias)` as JAX arrays; both with the hidden units of a low-rank update.

    Raises:
      ValueError: Shapes disagree, or the layout is unknown.
      TypeError: An argument is no array, or its dtype does not suit it.
      NotImplementedError: V is symbolic (`jax.export.symbolic_shape`).
    """
    x, weight = checked_layer(x, weight, weight_layout)
    bias = checked_bias("", bias, sizes(weight, weight_layout)[0])
    as_array("labels", labels)
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"labels must have shape {x.shape[:-1]} (x is {x.shape}), got {labels.shape}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise TypeError(f"labels must be integers, got {labels.dtype}; cast labels to int32")
    if token_weights is not None:
        check_token_weights(token_weights, labels.shape)
    return x, weight, bias


def checked_layer(x: Any, weight: Any, weight_layout: Any) -> tuple[Array, Embedding]:
    """`(x, weight)` as JAX arrays of shapes that agree; with the hidden units of a `LoRA`."""
    if isinstance(weight, low_rank.LoRA):
        if isinstance(weight.weight, low_rank.LoRA):
            raise TypeError(
                "weight.weight is a LoRA; it must be an array: concatenate the columns of both a, "
                "each times its scale, and the rows of both b"
            )
        x, whole = checked_layer(x, weight.weight, weight_layout)
        return low_rank.extended(x, weight._replace(weight=whole), weight_layout)
    x, weight = floating_arrays(x=x, weight=weight, least_bits=BITS_OF_PRODUCTS)
    check_layer("", x, weight, weight_layout)
    return x, weight


def check_layer(prefix: str, x: Array, weight: Array, layout: Any) -> None:
    """Checks that hidden states and output embedding agree.

    Args:
      prefix: Beginning of the arguments' names.
      x: Hidden states.
      weight: Output embedding.
      layout: Layout of the weight.

    Raises:
      ValueError: They disagree, or the layout is unknown.
      NotImplementedError: V is symbolic (`jax.export.symbolic_shape`).
    """
    name = f"{prefix}weight_layout"
    check_choice(name, layout, WeightLayout)
    axes = f"[{', '.join(layout.upper())}]"
    if weight.ndim != 2 or 0 in weight.shape:
        raise ValueError(
            f"{prefix}weight must be {axes} with D >= 1 and V >= 1, got {weight.shape}"
        )
    if not isinstance(size := weight.shape[layout.index("v")], int):
        raise NotImplementedError(
            f"{prefix}weight {weight.shape} has a symbolic size, V = {size}; labels are compared "
            "with V, so export with a number for it"
        )
    check_hidden_size(prefix, x, weight, layout)


def check_hidden_size(prefix: str, x: Array, weight: Array, layout: WeightLayout) -> None:
    """Raises ValueError if `x` and the weight disagree in D."""
    if x.ndim == 0 or x.shape[-1] != weight.shape[layout.index("d")]:
        raise ValueError(
            f"{prefix}x {x.shape} and {prefix}weight {weight.shape} must agree in D: "
            f"{prefix}weight_layout={layout!r} is [{', '.join(layout.upper())}]"
        )


def checked_bias(prefix: str, bias: Any, vocab_size: int) -> Array | None:
    """The bias as a JAX array, if there is one.

    Raises:
      ValueError: It has another shape than `[V]`.
      TypeError: It is no array, or its dtype does not suit it.
    """
    if bias is None:
        return None
    name = f"{prefix}bias"
    (bias,) = floating_arrays(**{name: bias}, least_bits=BITS_OF_PRODUCTS)
    if bias.shape != (vocab_size,):
        raise ValueError(f"{name} must have shape {(vocab_size,)}, got {bias.shape}")
    return bias


def check_token_weights(token_weights: Any, shape: tuple[Any, ...]) -> None:
    """Raises ValueError or TypeError unless the weights are numbers for tokens of this shape."""
    as_array("token_weights", token_weights)
    if token_weights.shape != shape:
        raise ValueError(
            f"token_weights must have the shape of the tokens, {shape}, got {token_weights.shape}"
        )
    if not any(jnp.issubdtype(token_weights.dtype, t) for t in _DTYPES_OF_WEIGHTS):
        raise TypeError(
            f"token_weights is {token_weights.dtype}, not a floating dtype, integers or bools; "
            "cast token_weights to float32"
        )


def checked_request(
    x: Array,
    weight: Embedding,
    bias: Array | None,
    *,
    ignore_index: int,
    reduction: Reduction,
    label_smoothing: float,
    z_loss: float,
    logit_softcap: float | None,
    chunk_size: int | None,
    vocab_chunk_size: int | None,
    max_logits_bytes: int | None,
    counted_fraction: float,
    vocab_axis: str | None,
    weight_layout: WeightLayout,
    accum_dtype: Any,
    implementation: Implementation | None,
    config: Config | None,
    also_unsupported: str | None = None,
) -> tuple[Request, str | None]:
    """The planner's request, and the reason why the kernels do not run; None if they do.

    `also_unsupported` is a reason that only the calling operation has.

    Raises:
      ValueError: An option is out of its range, or a name is unknown.
      TypeError: An option is of a wrong type.
      NotImplementedError: The caller names the kernels, and they do not take the arguments.
    """
    check_implementation(implementation)
    check_config(config, Config)
    open_sizes = symbolic_reason(x)
    chosen, why_no_kernel = choose_implementation(
        implementation,
        open_sizes
        or logits.unsupported_reason(x.dtype)
        or unsupported_reason(weight, weight_layout)
        or also_unsupported,
        fallback="xla" if open_sizes is None else "reference",
    )
    if open_sizes is not None and chosen == "xla":
        raise NotImplementedError(f"implementation='xla': {open_sizes}, or with 'reference'")
    check_config_has_kernel(config, implementation, chosen, why_no_kernel)
    check_choice("reduction", reduction, Reduction)
    check_integer("ignore_index", ignore_index, remedy="a label that no token has ignores none")
    options = _checked_options(label_smoothing, z_loss, logit_softcap)
    chunks = checked_chunks(
        chunk_size=chunk_size,
        vocab_chunk_size=vocab_chunk_size,
        max_logits_bytes=max_logits_bytes,
    )
    if vocab_chunk_size is not None and isinstance(weight, low_rank.TwoParts):
        raise ValueError(f"{vocab_chunk_size=} takes no LoRA; set chunk_size or max_logits_bytes")
    fraction = checked_fraction(counted_fraction)
    accum_dtype = checked_dtype("accum_dtype", accum_dtype)
    check_may_be_split(vocab_axis, chosen, open_sizes)
    settings = Settings(
        options=options,
        implementation=chosen,
        accum_dtype=accum_dtype,
        weight_layout=weight_layout,
        vocab_axes=() if vocab_axis is None else (vocab_axis,),
        config=config or Config(),
    )
    request = Request(
        settings=settings,
        x=jax.ShapeDtypeStruct((math.prod(x.shape[:-1]), x.shape[-1]), x.dtype),
        weight=jax.ShapeDtypeStruct(weight.shape, weight.dtype),
        has_bias=bias is not None,
        is_low_rank=isinstance(weight, low_rank.TwoParts),
        **chunks,
        counted_fraction=fraction,
    )
    return request, why_no_kernel


def _checked_options(label_smoothing: Any, z_loss: Any, logit_softcap: Any) -> LossOptions:
    smoothing = number("label_smoothing", label_smoothing, remedy="0.0 is none")
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{label_smoothing=} must lie in [0, 1]; 0.0 is none")
    check_number("z_loss", z_loss, least=0.0, remedy="0.0 is none")
    softcap = checked_softcap("logit_softcap", logit_softcap)
    return LossOptions(label_smoothing=smoothing, z_loss=float(z_loss), logit_softcap=softcap)


def checked_softcap(name: str, softcap: Any) -> float | None:
    """The bound of logits as a float, if there is one.

    Raises:
      ValueError: It is no positive number of float32.
      TypeError: It is no number.
    """
    if softcap is None:
        return None
    return positive_number(name, softcap, remedy="None turns the cap off")


def checked_temperature(temperature: Any) -> float:
    """The divisor of the logits as a float.

    Raises:
      ValueError: It is no positive number of float32.
      TypeError: It is no number.
    """
    return positive_number("temperature", temperature, remedy="1.0 leaves the logits as they are")


def checked_fraction(counted_fraction: Any) -> float:
    """The largest share of the tokens that count as a float.

    Raises:
      ValueError: It is not in (0, 1].
      TypeError: It is no number.
    """
    found = number("counted_fraction", counted_fraction, remedy="1.0 expects all tokens")
    if not 0 < found <= 1:
        raise ValueError(f"{counted_fraction=} must lie in (0, 1]; 1.0 expects all tokens to count")
    return found


def checked_chunks(**sizes: Any) -> dict[str, int | None]:
    """The options that choose the chunks as integers; a caller gives at most one.

    Raises:
      ValueError: A size is below 1, or there are several.
      TypeError: A size is no integer.
    """
    given = {}
    for name, size in sizes.items():
        if size is None:
            continue
        check_integer(name, size, remedy="None chooses one")
        given[name] = operator.index(size)
        if given[name] < 1:
            raise ValueError(f"{name}={size} must be at least 1; None chooses one")
    if len(given) > 1:
        named = " and ".join(f"{name}={size}" for name, size in given.items())
        raise ValueError(f"{named} each choose the chunks; give one of them")
    return dict.fromkeys(sizes) | given


def check_may_be_split(vocab_axis: str | None, chosen: Chosen, open_sizes: str | None) -> None:
    """Raises a ValueError if the vocabulary is split, and sizes are open or the reference runs."""
    if vocab_axis is not None and open_sizes is not None:
        raise ValueError(f"{vocab_axis=}: {open_sizes}, as for a split vocabulary")
    if vocab_axis is not None and chosen == "reference":
        raise ValueError(
            f"{vocab_axis=}: implementation='reference' has the whole vocabulary; gather the "
            "weight and leave vocab_axis=None, or take implementation='xla'"
        )


def num_parts(vocab_axis: str | None, operation: str, weight: Embedding, **of_tokens: Any) -> int:
    """Number of devices over which the vocabulary is split.

    Args:
      vocab_axis: Name of the mesh axis, or None for a whole vocabulary.
      operation: Name of the public function.
      weight: Output embedding.
      **of_tokens: Arrays of the tokens, or pytrees of them, by the names of the arguments.

    Raises:
      TypeError: The axis is no name.
      ValueError: The axis is not bound, or by its type the weight is whole on all of its devices.
        Or by its type an array of the tokens differs between them. Each device would take the
        tokens of all for its own, and losses or gradients would be wrong.
    """
    if vocab_axis is None:
        return 1
    if not isinstance(vocab_axis, str):
        raise TypeError(f"{vocab_axis=} must be the name of a mesh axis, or None")
    if vocab_axis not in jax.sharding.get_abstract_mesh().manual_axes:
        raise ValueError(
            f"{vocab_axis=} is not bound; call {operation} inside of jax.shard_map over a mesh "
            "with this axis, or leave it out where the weight is whole"
        )
    size = jax.lax.axis_size(vocab_axis)
    # With check_vma=False no type says over which axes an array varies.
    is_checked = vocab_axis in varying_axes(jax.lax.axis_index(vocab_axis))
    if size == 1 or not is_checked:
        return size
    if vocab_axis not in varying_axes(low_rank.arguments(weight)[0]):
        raise ValueError(
            f"{vocab_axis=} does not split the weight, which is the same on all {size} devices of "
            "this axis; split its vocabulary in the in_specs of jax.shard_map, or call "
            f"{operation} without vocab_axis"
        )
    for name, arrays in of_tokens.items():
        if name == "x" and isinstance(weight, low_rank.TwoParts):
            name = "x or weight.b"
        if vocab_axis in varying_axes(arrays):
            raise ValueError(
                f"{name} differs by its type between the {size} devices of {vocab_axis=}, which "
                "must have the same tokens; split the tokens over another axis in the in_specs of "
                "jax.shard_map, or gather them with jax.lax.all_gather(..., tiled=True, "
                "to='invarying')"
            )
    return size


def labels_and_weights(
    x: Array,
    labels: Any,
    token_weights: Any,
    vocab_size: int,
    ignore_index: int,
    check: bool,
    operation: str,
) -> tuple[Int[Array, "*T"], Bool[Array, "*T"], Float[Array, "*T"]]:
    """`(labels, counts, weights)`: int32, whether each is not `ignore_index`, and token weights.

    An ignored label becomes -1. A label out of range becomes -2, or -1 where its weight is 0.
    Explicit axes split all three as the tokens of `x`.
    """
    kind = jnp.iinfo(labels.dtype)
    in_range, column = columns_of(labels, vocab_size)
    ignored = labels != labels  # no label, if the dtype does not hold `ignore_index`
    if kind.min <= ignore_index <= kind.max:
        ignored = labels == np.asarray(ignore_index, labels.dtype)
    if check:
        _check_labels(labels, ~(in_range | ignored), vocab_size, ignore_index, operation)
    weights = ~ignored if token_weights is None else token_weights
    arrays = map(jnp.asarray, (~ignored, in_range, column, weights))
    counts, in_range, column, weights = split_alike(x, *arrays)
    weights = jnp.where(counts, weights.astype(jnp.float32), 0.0)
    outside = jnp.where(weights == 0, IGNORED, OUT_OF_RANGE)
    return jnp.where(counts & in_range, column, outside), counts, weights


def columns_of(ids: Any, vocab_size: int) -> tuple[Any, Int[Array, "*T"]]:
    """`(in_range, columns)`: whether ids of any integer dtype are columns, and int32, 0 if not.

    Ids are compared before they are cast, and NumPy compares NumPy's: JAX would cut them to 32
    bits, and 2^32 + 1 would be column 1. A narrow dtype may not hold `vocab_size`.
    """
    in_range = (ids >= 0) & (ids <= min(vocab_size - 1, int(jnp.iinfo(ids.dtype).max)))
    return in_range, jnp.where(in_range, ids, 0).astype(jnp.int32)


def _check_labels(
    labels: Any, wrong: Any, vocab_size: int, ignore_index: int, operation: str
) -> None:
    if labels.size == 0:
        return
    where = "label {label} at token {position}"
    numbers = {}
    if isinstance(labels, jax.Array):
        numbers["position"] = jnp.argmax(wrong)
        numbers["label"] = labels.reshape(-1)[numbers["position"]]
    else:  # NumPy's labels may have 64 bits, which an array of JAX would cut to 32
        position = np.argmax(wrong)
        where = where.format(label=labels.reshape(-1)[position], position=position)
    checkify.check(
        ~jnp.any(wrong),
        f"{operation}: {where} is neither in [0, {vocab_size}) nor {ignore_index=}",
        **numbers,
    )
