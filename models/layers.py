"""The layers of a Llama: norms, the projections of the attention, and the MLP.

Their parameters have Hugging Face's names. Each operation of `pallas_kernels` gets
`config.implementation`, except for the operations of FP8. An operation of FP8 runs where the kernel
of a layer is a `QuantizedWeight` (`models.fp8`).
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from models.config import ACTIVATIONS, AUTO_REMAT, LlamaConfig
from models.projections import is_quantized, kernel_of, project
from models.remat import remat_policy
from models.rope import apply_rotary
from models.sharding import tensor_axis
from pallas_kernels import add_rms_norm, rms_norm, sharded_add_rms_norm
from pallas_kernels.fp8 import RecipeName, fp8_swiglu_mlp
from pallas_kernels.layers import SwiGLU


class Norm(nnx.Module):
    """RMSNorm, with or without a residual addition before it."""

    def __init__(self, config: LlamaConfig, size: int):
        self.weight = nnx.Param(jnp.ones((size,), config.param_dtype))
        self.eps = config.rms_norm_eps
        self.implementation = config.implementation

    @property
    def _options(self) -> dict[str, Any]:
        return {"eps": self.eps, "casting": "llama", "implementation": self.implementation}

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The norm of every token, or of every head of every token."""
        return rms_norm(x, self.weight[...], **self._options)

    def add(
        self, x: Float[Array, "B S D"], residual: Float[Array, "*T D"]
    ) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
        """`(norm(x + residual), x + residual)`.

        Where devices share sequences, `x` is one device's summand for all of their tokens, and
        `residual` and the results are this device's share of the tokens.
        """
        weight = self.weight[...]
        if axis := tensor_axis():
            partial = x.reshape(-1, x.shape[-1])
            return sharded_add_rms_norm(
                partial, residual, weight, axis_name=axis, gather=False, **self._options
            )
        return add_rms_norm(x, residual, weight, **self._options)


class Attention(nnx.Module):
    """The projections of grouped-query attention, and the norms of its queries and keys, if any.

    The caller computes the attention between `project` and `output`.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        def linear(size_in: int, size_out: int) -> nnx.Linear:
            return nnx.Linear(
                size_in,
                size_out,
                use_bias=config.attention_bias,
                dtype=config.dtype,
                param_dtype=config.param_dtype,
                kernel_init=nnx.initializers.normal(config.initializer_range),
                rngs=rngs,
            )

        num_channels = config.num_attention_heads * config.head_dim
        num_kv_channels = config.num_key_value_heads * config.head_dim
        self.q_proj = linear(config.hidden_size, num_channels)
        self.k_proj = linear(config.hidden_size, num_kv_channels)
        self.v_proj = linear(config.hidden_size, num_kv_channels)
        self.o_proj = linear(num_channels, config.hidden_size)
        self.q_norm = Norm(config, config.head_dim) if config.qk_norm else None
        self.k_norm = Norm(config, config.head_dim) if config.qk_norm else None
        self.head_dim = config.head_dim
        self.recipe: RecipeName | None = config.fp8

    def project(
        self, x: Float[Array, "B S D"], cos: Float[Array, "#B S h"], sin: Float[Array, "#B S h"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Queries, keys and values. The first two are normed, with `qk_norm`, and then rotated."""
        heads = lambda a: a.reshape(*a.shape[:-1], a.shape[-1] // self.head_dim, self.head_dim)
        q, k, v = map(heads, project(x, (self.q_proj, self.k_proj, self.v_proj), self.recipe))
        if self.q_norm is not None and self.k_norm is not None:
            q = self.q_norm(checkpoint_name(q, "q_proj"))
            k = self.k_norm(checkpoint_name(k, "k_proj"))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return checkpoint_name(q, "q"), checkpoint_name(k, "k"), checkpoint_name(v, "v")

    def output(self, attn_out: Float[Array, "B S N H"]) -> Float[Array, "B S D"]:
        """The output projection of all heads."""
        attn_out = checkpoint_name(attn_out, "attn_out")
        (out,) = project(jax.lax.collapse(attn_out, -2), (self.o_proj,), self.recipe)
        return checkpoint_name(out, "attn_proj")


class MLP(SwiGLU):
    """The gated MLP with the configured activation; with `silu` it is SwiGLU."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config.hidden_size,
            config.intermediate_size,
            use_bias=config.mlp_bias,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            kernel_init=nnx.initializers.normal(config.initializer_range),
            save=_kept_by_mlp(config),
            chunk_size=config.mlp_chunk_size or None,
            implementation=config.implementation,
            rngs=rngs,
        )
        self.hidden_act = config.hidden_act
        self.recipe: RecipeName | None = config.fp8

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The MLP of every token."""
        projections = self.gate_proj, self.up_proj, self.down_proj
        if self.recipe is not None and is_quantized(*projections):
            return fp8_swiglu_mlp(x, *map(kernel_of, projections), recipe=self.recipe)
        if self.hidden_act == "silu":
            return super().__call__(x)
        gate = checkpoint_name(self.gate_proj(x), "gate")
        up = checkpoint_name(self.up_proj(x), "up")
        return self.down_proj(ACTIVATIONS[self.hidden_act](gate) * up)


def _kept_by_mlp(config: LlamaConfig) -> Literal["all", "gate_up", "x"]:
    """The tensors that the MLP keeps for its backward: all, gate and up, or only its input.

    A policy that keeps everything keeps all of them. The input alone is faster if the policy keeps
    `residual` and `rstd`, but neither gate nor up. The backward of the norm after the MLP then
    needs no output of the MLP, so the MLP's forward runs only once, and never writes gate and up.
    The backward recomputes them in either case.
    """
    if config.mlp_chunk_size:
        return "x"
    if config.remat == AUTO_REMAT or config.mlp_bias:
        return "gate_up"
    policy = remat_policy(config.remat)
    if policy.tensors is None:
        return "all"
    kept = policy.kept
    return "x" if {"residual", "rstd"} <= kept and not {"gate", "up"} & kept else "gate_up"


class OutputEmbedding(nnx.Module):
    """The weight `[V, D]` of a model whose output embedding is not its input embedding."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        shape = config.vocab_size, config.hidden_size
        init = nnx.initializers.normal(config.initializer_range)
        self.weight = nnx.Param(init(rngs.params(), shape, config.param_dtype))
