"""The layers' products in FP8: weights that are quantized once a step, and the projections.

`LlamaConfig.fp8` names a recipe of `pallas_kernels.fp8`. The step quantizes the stacked weights
before the first layer, outside of `jax.checkpoint`. The layers then find a `QuantizedWeight` in the
place of a kernel, and multiply in FP8. A weight that is too small to gain stays an array, and its
product stays in the compute dtype.

Only the step knows of FP8. The parameters of a model, and the files, are those of any other Llama.
"""

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from models.config import LlamaConfig
from models.sharding import tensor_axis
from pallas_kernels.fp8 import (
    RECIPES,
    QuantizedWeight,
    RecipeName,
    fp8_linears,
    quantize_weight,
)
from pallas_kernels.gpu.device import target_device
from pallas_kernels.implementation import Implementation


def check_fp8(recipe: RecipeName) -> None:
    """Raises unless the layers can run in FP8 here. On CPUs the products are emulated.

    Raises:
      ValueError: The default device is a GPU without FP8, or devices share sequences.
    """
    device = target_device()
    if not device.has_fp8:
        raise ValueError(
            f"fp8={recipe!r} needs a GPU with FP8, of compute capability (8, 9) or above, and "
            f"{device.kind} has {device.capability}; set fp8 to None (--model.fp8 None)"
        )
    if tensor_axis():
        check_tensor(recipe, jax.lax.axis_size("tensor"))


def check_tensor(recipe: RecipeName, tensor: int) -> None:
    """Raises if `tensor` devices share sequences.

    Raises:
      ValueError: `tensor` is above 1.
    """
    if tensor > 1:
        raise ValueError(
            f"fp8={recipe!r} does not work with {tensor=} yet; use --mesh.fsdp in place of "
            "--mesh.tensor, or --model.fp8 None"
        )


def describe(config: LlamaConfig) -> str:
    """A line for the output of a run: which weights the recipe `config.fp8` takes."""
    assert config.fp8 is not None
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = {
        "q_proj": (hidden, queries),
        "k_proj": (hidden, keys),
        "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
        "mlp": (hidden, config.intermediate_size),
    }
    gains = [name for name, shape in shapes.items() if RECIPES[config.fp8].gains(shape)]
    others = [name for name in shapes if name not in gains]
    line = f"FP8, {config.fp8}: {', '.join(gains) or 'no weight'}"
    if others:
        line += f"; too small, so in {config.dtype}: {', '.join(others)}"
    return f"{line}; evaluations and samples run in {config.dtype}"


def quantize_weights(state: nnx.State, recipe: RecipeName) -> nnx.State:
    """The state of stacked layers, with a `QuantizedWeight` for each kernel that gains from FP8.

    Args:
      state: Part of the state of the layers; kernels are `[L, K, N]`, biases `[L, N]`.
      recipe: Name of a recipe.
    """

    def quantize(a: Array) -> Any:
        if a.ndim != 3 or not RECIPES[recipe].gains(a.shape[1:]):
            return a
        return jax.vmap(lambda w: quantize_weight(w, recipe, implementation=implementation))(a)

    # XLA does not partition a kernel. On a mesh it would gather the weights in front of it.
    is_split = jax.sharding.get_abstract_mesh().size > 1
    implementation: Implementation | None = "reference" if is_split else None
    return jax.tree.map(quantize, state)


def is_quantized(*projections: nnx.Linear) -> bool:
    """Whether the kernel of one of the projections is a `QuantizedWeight`."""
    return any(isinstance(kernel_of(p), QuantizedWeight) for p in projections)


def kernel_of(projection: nnx.Linear) -> Any:
    """The kernel of a projection: an array or a `QuantizedWeight`."""
    return projection.kernel.get_value()


def project(
    x: Float[Array, "*T K"], projections: Sequence[nnx.Linear], recipe: RecipeName | None
) -> list[Float[Array, "*T _"]]:
    """The results of several projections of `x`, which is quantized once for all of them."""
    if recipe is None or not is_quantized(*projections):
        return [projection(x) for projection in projections]
    results = fp8_linears(x, [kernel_of(p) for p in projections], recipe=recipe)
    return [
        y if p.bias is None else y + p.bias[...] for y, p in zip(results, projections, strict=True)
    ]
