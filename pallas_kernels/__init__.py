"""Operations for training a Llama on NVIDIA GPUs, each with an exact gradient.

- `rms_norm`: RMSNorm.
- `add_rms_norm`: residual addition, then RMSNorm.
- `swiglu`: the gated activation of Llama's MLP.
- `swiglu_mlp`: the whole gated MLP; its argument `save` says what is kept for the backward.
- `linear_cross_entropy`: output projection and cross-entropy, without all logits in memory.
- `linear_cross_entropy_plan`: the program that `linear_cross_entropy` would run, as a `LossPlan`.
- `linear_log_probs`: log-probabilities of labels and entropies, without all logits in memory.
- `linear_token_loss`: a loss that your function makes of log-probabilities, such as that of PPO.
- `linear_distillation_loss`: divergence of a student's next-token distribution from a teacher's.
- `linear_distillation_loss_top_k`: the same for `k` stored log-probabilities of the teacher a
  token.
- `LoRA`: a low-rank update of a frozen output embedding, for the losses and log-probabilities.
- `document_attention`: causal attention of each document by itself, in rows of several documents.
- `document_bounds`: where the documents of rows begin and end, for `document_attention`.
- `sharded_add_rms_norm`: `add_rms_norm` of sums over devices, for tensor parallelism.
- `explain`: which implementation each operation in a function runs, and why, as an `Explanation`.
- `patch`: puts the norms and the MLP into an existing Flax NNX model, and returns a `Patched`.
- `require_kernels`: a context in which an operation that would not run its kernel raises.

The operations run on any mesh, and each device computes its own tokens (`docs/meshes.md`). In
`document_attention` a device computes its own rows and heads. Only `sharded_add_rms_norm` must be
called inside of `jax.shard_map`.

With `return_metrics=True`, `linear_cross_entropy` returns `LossMetrics` as its second result.
Layers that call the operations are in `pallas_kernels.layers` (Flax NNX), `pallas_kernels.linen`
(Flax Linen) and `pallas_kernels.equinox`. `pallas_kernels.fp8` has linear layers and MLPs in FP8,
and `pallas_kernels.log_probs.objectives` has losses for `linear_token_loss`.

Shape letters used everywhere: B batch, S sequence, T tokens (B·S, or any leading axes), D hidden
size, F intermediate size, V vocabulary, N query heads, K key/value heads, H head size, L layers.
"""

import typing as _typing

from pallas_kernels._version import __version__  # first, because it checks JAX's version
from pallas_kernels.attention import document_attention, document_bounds
from pallas_kernels.choices import Explanation, explain, require_kernels
from pallas_kernels.distillation import (
    linear_distillation_loss,
    linear_distillation_loss_top_k,
)
from pallas_kernels.log_probs import linear_log_probs, linear_token_loss
from pallas_kernels.loss import (
    LoRA,
    LossMetrics,
    LossPlan,
    linear_cross_entropy,
    linear_cross_entropy_plan,
)
from pallas_kernels.mlp import swiglu, swiglu_mlp
from pallas_kernels.norm import add_rms_norm, rms_norm
from pallas_kernels.sharded_norm import sharded_add_rms_norm

if _typing.TYPE_CHECKING:
    from pallas_kernels.patching import patch

__all__ = [
    "Explanation",
    "LoRA",
    "LossMetrics",
    "LossPlan",
    "__version__",
    "add_rms_norm",
    "document_attention",
    "document_bounds",
    "explain",
    "linear_cross_entropy",
    "linear_cross_entropy_plan",
    "linear_distillation_loss",
    "linear_distillation_loss_top_k",
    "linear_log_probs",
    "linear_token_loss",
    "patch",
    "require_kernels",
    "rms_norm",
    "sharded_add_rms_norm",
    "swiglu",
    "swiglu_mlp",
]


def __getattr__(name: str) -> _typing.Any:
    """Imports `patch` on its first use, because it needs Flax, and the functions do not."""
    if name != "patch":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pallas_kernels.patching import patch

    return patch
