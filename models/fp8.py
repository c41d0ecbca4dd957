"""The layers' products in FP8, with weights that are quantized once in each forward.

`LlamaConfig.fp8` names a recipe of `pallas_kernels.fp8`. The forward quantizes the stacked weights
before the first layer, outside of `jax.checkpoint`. So a step that accumulates gradients quantizes
them once for each part of its batch. The layers then find a `QuantizedWeight` in the place of a
kernel, and multiply in FP8. A weight that is too small to gain from FP8 stays an array, and its
product stays in the compute dtype.

The projections q, k and v are one product (`models.projections`), which has two advantages in FP8.
The projections of keys and values alone would be too small to gain. And no product reads the input
of the projections in the compute dtype, so the layers keep only its FP8 copy.

Only the step knows of FP8. The parameters of a model, and the files, are those of any other Llama.
"""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array

from models.config import LlamaConfig
from models.projections import JOINED, join_projections
from models.sharding import fsdp_split, shape_over_tensor
from pallas_kernels.fp8 import (
    RECIPES,
    QuantizedWeight,
    RecipeName,
    quantize_weight,
)
from pallas_kernels.gpu.device import target_device


def check_fp8(recipe: RecipeName) -> None:
    """Raises unless the layers can run in FP8 here. On CPUs the products are emulated.

    Raises:
      ValueError: The default device is a GPU without FP8.
    """
    device = target_device()
    if not device.has_fp8:
        raise ValueError(
            f"fp8={recipe!r} needs a GPU with FP8, of compute capability (8, 9) or above, and "
            f"{device.kind} has {device.capability}; set fp8 to None (--model.fp8 None)"
        )


def describe(config: LlamaConfig, tensor: int = 1) -> str:
    """A line for the output of a run: which weights the recipe `config.fp8` takes.

    Args:
      config: Configuration with a recipe.
      tensor: Number of devices that share sequences. Each has its part of a weight.
    """
    assert config.fp8 is not None
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes = {
        ", ".join(JOINED): (hidden, (queries + 2 * keys) // tensor),
        "o_proj": (queries // tensor, hidden),
        "mlp": (hidden, config.intermediate_size // tensor),
    }
    gains = [name for name, shape in shapes.items() if RECIPES[config.fp8].gains(shape)]
    others = [name for name in shapes if name not in gains]
    line = f"FP8, {config.fp8}: {', '.join(gains) or 'no weight'}"
    if others:
        line += f"; too small, so in {config.dtype}: {', '.join(others)}"
    return f"{line}; evaluations and samples run in {config.dtype}"


def quantize_weights(state: nnx.State, recipe: RecipeName) -> nnx.State:
    """The state of stacked layers, with a `QuantizedWeight` for each kernel that gains from FP8.

    Where `tensor` splits the work, a kernel is the part of this device. Its scales are those of the
    device's part of the product, so that `whole_weights` can gather the FP8 copies over `fsdp`.

    Args:
      state: Part of the state of the layers, after `join_projections`; kernels are `[L, K, N]`,
        biases `[L, N]`.
      recipe: Name of a recipe.
    """

    def quantize(path: tuple[Any, ...], a: Array) -> Any:
        if a.ndim != 3:
            return a
        split = fsdp_split(path)
        quantized = jax.vmap(lambda w: quantize_weight(w, recipe, split=split))(a)
        return a if quantized.forward is None else quantized

    return jax.tree_util.tree_map_with_path(quantize, state)


def size_in_fp8(layers: nnx.State, recipe: RecipeName, tensor: int = 1) -> int:
    """The number of parameters that `quantize_weights` quantizes on each of `tensor` devices.

    Args:
      layers: State of the stacked layers, or its shapes.
      recipe: Name of a recipe.
      tensor: Number of devices that share sequences.
    """

    def part(path: tuple[Any, ...], a: Any) -> jax.ShapeDtypeStruct:
        # Without the shardings, which do not matter here.
        return jax.ShapeDtypeStruct(shape_over_tensor(path, a.shape, tensor), a.dtype)

    quantized = lambda layers: [
        quantize_weights(join_projections(part), recipe) for part in layers.values()
    ]
    shapes = jax.tree_util.tree_map_with_path(part, layers)
    is_weight = lambda a: isinstance(a, QuantizedWeight)
    leaves = jax.tree.leaves(jax.eval_shape(quantized, shapes), is_leaf=is_weight)
    return sum(leaf.weight.size for leaf in filter(is_weight, leaves))
