"""Llama in Flax NNX, with the residual stream and its norm carried from half-layer to half-layer.

The textbook layer is `h += attention(norm(h)); h += mlp(norm(h))`. Here the first norm stands alone
and every half-layer ends in `add_rms_norm` with the weight of the norm that comes next, so the
carry is the pair `(normed, residual)` and no norm is ever run without the addition before it.
(LMDeploy's arrangement; values and gradients are the textbook's.) Where the backward makes norms
again, a layer hands on the residual alone; see `models.remat`.

Parameter names are Hugging Face's. The layers' parameters are stacked on axis 0, scanned or
unrolled alike.

Where several devices share sequences (`models.sharding.sum_over_devices`), the carry is a device's
share of the tokens, `[t, D]`: a half-layer gathers the normed tokens of its sequences, works on the
device's heads or columns, and ends in `sharded_add_rms_norm`, which sums over the devices. The
gather is not that function's, so that the carry, which every policy keeps, is the share.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from models.config import ACTIVATIONS, AUTO_REMAT, LlamaConfig
from models.layer_scan import layer_scan
from models.remat import remat_policy
from models.rope import apply_rotary, rotary_cos_sin
from models.sharding import (
    check_tensor_parallel,
    embed_over_devices,
    keep_all_but_weights,
    map_over_batch,
    split_batch,
    tensor_axis,
    tokens_of_sequences,
    whole_weight,
    whole_weights,
)
from pallas_kernels import add_rms_norm, rms_norm, sharded_add_rms_norm
from pallas_kernels.gpu.device import runs_here
from pallas_kernels.layers import AddRMSNorm, LinearCrossEntropy, RMSNorm, SwiGLU


class Attention(nnx.Module):
    """The four projections of grouped-query attention, without what is between them."""

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
        self.head_dim = config.head_dim

    def project(
        self, x: Float[Array, "B S D"], cos: Float[Array, "#B S h"], sin: Float[Array, "#B S h"]
    ) -> tuple[Float[Array, "B S N H"], Float[Array, "B S K H"], Float[Array, "B S K H"]]:
        """Queries and keys with their positions, and values."""
        heads = lambda a: a.reshape(*a.shape[:-1], -1, self.head_dim)
        q = apply_rotary(heads(self.q_proj(x)), cos, sin)
        k = apply_rotary(heads(self.k_proj(x)), cos, sin)
        v = heads(self.v_proj(x))
        return checkpoint_name(q, "q"), checkpoint_name(k, "k"), checkpoint_name(v, "v")

    def output(self, attn_out: Float[Array, "B S N H"]) -> Float[Array, "B S D"]:
        """The output projection of the heads."""
        attn_out = checkpoint_name(attn_out, "attn_out")
        out = self.o_proj(attn_out.reshape(*attn_out.shape[:-2], -1))
        return checkpoint_name(out, "attn_proj")


class MLP(SwiGLU):
    """The gated MLP with the configured activation; `silu` makes it SwiGLU."""

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
            implementation=_mlp_implementation(config),
            rngs=rngs,
        )
        self.hidden_act = config.hidden_act

    def __call__(self, x: Float[Array, "*T D"]) -> Float[Array, "*T D"]:
        """The MLP of every token."""
        if self.hidden_act == "silu":
            return super().__call__(x)
        gate = checkpoint_name(self.gate_proj(x), "gate")
        up = checkpoint_name(self.up_proj(x), "up")
        return self.down_proj(ACTIVATIONS[self.hidden_act](gate) * up)


class _Carry(NamedTuple):
    """What enters a layer: the residual stream, and its norm unless the layer makes that itself."""

    normed: Float[Array, "*T D"] | None
    residual: Float[Array, "*T D"]


class Block(nnx.Module):
    """One layer, cut in two at the attention."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        norm_options = _norm_options(config)
        self.input_layernorm = RMSNorm(config.hidden_size, **norm_options)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = AddRMSNorm(config.hidden_size, **norm_options)
        self.mlp = MLP(config, rngs=rngs)

    def finish(
        self,
        attn_out: Float[Array, "B S N H"],
        residual: Float[Array, "*T D"],
        next_weight: Float[Array, " D"] | None,
    ) -> _Carry:
        """From the attention's output to what the next layer gets.

        Args:
          attn_out: of all heads.
          residual: before the attention.
          next_weight: of the next layer's first norm; None leaves that norm to the next layer.
        """
        add_norm = functools.partial(_add_norm, self.input_layernorm.options)
        weight = self.post_attention_layernorm.weight[...]
        normed, residual = add_norm(weight, self.self_attn.output(attn_out), residual)
        normed = tokens_of_sequences(normed, attn_out.shape[:2])
        mlp_out = checkpoint_name(self.mlp(normed), "mlp_out")
        if next_weight is None:
            return _Carry(None, split_batch(residual + mlp_out))
        normed, residual = add_norm(next_weight, mlp_out, residual)
        return _Carry(split_batch(normed), split_batch(residual))


class Llama(nnx.Module):
    """The model, from tokens to normalized hidden states; logits and loss are made from those.

    Args:
      config: the architecture.
      rngs: source of the initial parameters.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(config.initializer_range)
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            param_dtype=config.param_dtype,
            embedding_init=init,
            rngs=rngs,
        )
        # One layer after the other, so that only one layer's random bits are in memory.
        keys = jax.random.split(rngs.params(), config.num_hidden_layers)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
        state = jax.lax.map(lambda key: nnx.state(Block(config, rngs=nnx.Rngs(key))), keys)
        self.layers = nnx.merge(graphdef, state)
        self.norm = RMSNorm(config.hidden_size, **_norm_options(config))
        if not config.tie_word_embeddings:
            self.lm_head = LinearCrossEntropy(
                config.hidden_size,
                config.vocab_size,
                param_dtype=config.param_dtype,
                kernel_init=init,
                rngs=rngs,
            )

    @property
    def output_weight(self) -> Float[Array, "V D"]:
        """The output embedding, for `pallas_kernels.linear_cross_entropy`; the input's if tied.

        Inside of `models.sharding.sum_over_devices` its `vocab_axis` must be `tensor_axis()`.
        """
        if self.config.tie_word_embeddings:
            return whole_weight(self.embed_tokens.embedding[...], 1)
        return whole_weight(self.lm_head.weight[...], 1)

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        positions: Int[Array, "B S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Normalized hidden states of the last layer, in the compute dtype.

        Args:
          tokens: a token outside of `[0, V)` makes its row's states NaN.
          positions: of each token in its document; `None` counts from 0 in every row.
          segment_ids: documents packed into a row; a token attends to earlier ones of its own
            segment. `None` takes a row for one document.

        Raises:
          ValueError: the sequence is longer than `max_position_embeddings`.
        """
        sequence_length = tokens.shape[1]
        limit = self.config.max_position_embeddings
        if sequence_length > limit and self.config.rope_parameters.rope_type != "dynamic":
            raise ValueError(
                f"{sequence_length=} exceeds max_position_embeddings={limit}; raise it, with "
                "rope_parameters that scale the positions"
            )
        if positions is None:
            positions = jnp.arange(sequence_length, dtype=jnp.int32)[None]
        return self.run_layers(tokens, positions, self._attention(segment_ids))[0]

    def _attention(self, segment_ids: Int[Array, "B S"] | None) -> Callable[..., Any]:
        """The attention of whole sequences, for `run_layers`."""
        mask = None
        if segment_ids is not None:
            mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]

        def attend(q, k, v, _):
            implementation = self.config.attention_implementation
            if implementation is None:
                implementation = "cudnn" if _cudnn_attention_runs(q) else "xla"
            return jax.nn.dot_product_attention(
                q, k, v, mask=mask, is_causal=True, implementation=implementation
            ), None

        if tensor_axis():
            # Made again, and not kept: cuDNN's rule keeps an empty array, and the compiler of JAX
            # 0.11.2 ends with a segmentation fault where one leaves a scan inside of shard_map.
            attend = jax.checkpoint(attend, policy=_keep_all_but_fills, prevent_cse=False)
        return attend

    def run_layers(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "#B S"],
        attend: Callable[[Any, Any, Any, Any], tuple[Any, Any]],
        layer_inputs: Any = None,
    ) -> tuple[Float[Array, "B S D"], Any]:
        """The model with the attention as an argument.

        Args:
          tokens: as in `__call__`.
          positions: of the tokens, for the rotary embedding.
          attend: `(q, k, v, layer_input) -> (attn_out, layer_output)`, called in every layer.
          layer_inputs: a pytree with axis 0 the layers, such as a key/value cache; each layer gets
            its slice.

        Returns:
          The hidden states and the layers' outputs, stacked.
        """
        config = self.config
        shape = tokens.shape
        if config.remat == AUTO_REMAT:
            raise ValueError(
                f"remat={config.remat!r} is not a policy: `python -m train` replaces it with one "
                "that fits the device (train.planner.plan); set one of those in models.remat"
            )
        if axis := tensor_axis():
            check_tensor_parallel(
                jax.lax.axis_size(axis),
                num_key_value_heads=config.num_key_value_heads,
                num_tokens=math.prod(shape),
            )
        dtype = jnp.dtype(config.dtype)
        graphdef, state = nnx.split(self.layers)
        # Rounded once for all layers and for the backward: inside of the layers it would be done
        # twice.
        for name in ("self_attn", "mlp"):
            state[name] = jax.tree.map(lambda a: a.astype(dtype), state[name])
        cos, sin = rotary_cos_sin(
            config.rope_parameters,
            positions,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
        )

        # Each half asks for all weights of the layer; those that it does not read are not gathered.
        block_of = lambda state: nnx.merge(graphdef, whole_weights(state))

        # A layer ends with the next one's first norm: one kernel adds and norms. Where that norm is
        # not kept it is the layer's own to make again, and the residual all that enters: half as
        # much to keep, and no sum to make again, which would take the down projection. (Over
        # `tensor` the sum is one of parts, and the kernel is the one that exchanges them.)
        policy = remat_policy(config.remat)
        carries_norm = policy.tensors is None or "normed" in policy.kept or tensor_axis()
        norm = functools.partial(_norm, self.norm.options)

        # What enters a checkpoint stays on the device, unless the checkpoint reads it by a name.
        # (Only once: two names would be two copies in host memory.)
        name_input = lambda a: checkpoint_name(a, "layer_input")
        of_half, of_layer = (name_input, _same) if policy.attention else (_same, name_input)

        def project(state, entering):
            normed, block = of_half(entering), block_of(state)
            if not carries_norm:
                normed = norm(block.input_layernorm.weight[...], normed)
            normed = tokens_of_sequences(normed, shape)
            return block.self_attn.project(normed, cos, sin)

        def finish(state, attn_out, residual, next_weight):
            return block_of(state).finish(attn_out, of_half(residual), next_weight)

        def layer(carry, inputs):
            state, next_weight, layer_input = inputs
            normed, residual = jax.tree.map(of_layer, carry)
            q, k, v = project(state, residual if normed is None else normed)
            attn_out, output = attend(q, k, v, layer_input)
            return finish(state, attn_out, residual, next_weight), output

        if policy.tensors is None and tensor_axis():
            keep = functools.partial(
                jax.checkpoint, policy=keep_all_but_weights, prevent_cse=not config.scan_layers
            )
            project, finish = keep(project), keep(finish)
        elif policy.attention:
            project = policy.checkpoint(project, in_scan=config.scan_layers)
            finish = policy.checkpoint(finish, in_scan=config.scan_layers)
        else:
            layer = policy.checkpoint(layer, in_scan=config.scan_layers)

        residual = self._embed(tokens)
        last_weight = self.norm.weight[...]
        if carries_norm:
            weights = self.layers.input_layernorm.weight[...]
            carry = _Carry(norm(weights[0], residual), residual)
            next_weights = jnp.concatenate([weights[1:], last_weight[None]])
        else:
            carry = _Carry(None, residual)
            next_weights = None
        inputs = (state, next_weights, layer_inputs)
        if config.scan_layers:
            scan = jax.lax.scan if policy.offloaded else layer_scan
            carry, outputs = scan(layer, carry, inputs)
        else:
            of_layers = []
            for layer_slice in _unstack(inputs, config.num_hidden_layers):
                carry, output = layer(carry, layer_slice)
                of_layers.append(output)
            outputs = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layers)
        normed, residual = carry
        if normed is None:
            normed = norm(last_weight, residual)
        return tokens_of_sequences(normed, shape), outputs

    def _embed(self, tokens: Int[Array, "B S"]) -> Float[Array, "*T D"]:
        table = self.embed_tokens.embedding[...]

        def look_up(tokens: Any, first_row: Any = 0) -> Any:
            # Gathered before it is rounded, so that the gradient is scattered and summed in
            # param_dtype.
            # Negative tokens are out of range too, and do not count from the end.
            embedded = table.at[tokens].get(
                mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
            )
            if self.config.pad_token_id is not None:
                is_pad = (tokens == self.config.pad_token_id - first_row)[..., None]
                embedded = jnp.where(is_pad, jax.lax.stop_gradient(embedded), embedded)
            return embedded.astype(self.config.dtype)

        if tensor_axis():
            return embed_over_devices(look_up, tokens, len(table))
        return split_batch(look_up(tokens))

    def logits(self, hidden: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
        """Logits of hidden states, float32; a loss needs only `output_weight`."""
        return jnp.einsum(
            "...d,vd->...v",
            hidden,
            self.output_weight.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )


def _kept_by_mlp(config: LlamaConfig) -> Literal["gate_up", "x"]:
    """Its input alone, if the policy keeps what follows it and so runs its forward only once.

    Then gate and up are never written in the forward, which is faster, and are made again in the
    backward as they would be anyway.
    """
    if config.mlp_chunk_size:
        return "x"
    if config.remat == AUTO_REMAT or config.mlp_bias:
        return "gate_up"
    kept = remat_policy(config.remat).kept
    return "x" if {"residual", "rstd"} <= kept and not {"gate", "up"} & kept else "gate_up"


def _mlp_implementation(config: LlamaConfig) -> Literal["reference", "xla"] | None:
    if config.kernels:
        return None
    return "reference" if config.mlp_bias else "xla"  # the former is that of the activation alone


def _norm_options(config: LlamaConfig) -> dict[str, Any]:
    return {
        "eps": config.rms_norm_eps,
        "casting": "llama",
        "param_dtype": config.param_dtype,
        "implementation": None if config.kernels else "reference",
    }


# On a mesh the norms run on each device's part of the batch, because XLA cannot split a kernel.


def _norm(
    options: dict[str, Any], weight: Float[Array, " D"], x: Float[Array, "*T D"]
) -> Float[Array, "*T D"]:
    return map_over_batch(lambda weight, x: rms_norm(x, weight, **options))(weight, x)


def _add_norm(
    options: dict[str, Any],
    weight: Float[Array, " D"],
    x: Float[Array, "B S D"],
    residual: Float[Array, "*T D"],
) -> tuple[Float[Array, "*T D"], Float[Array, "*T D"]]:
    if axis := tensor_axis():
        partial = x.reshape(-1, x.shape[-1])
        return sharded_add_rms_norm(
            partial, residual, weight, axis_name=axis, gather=False, **options
        )

    def add_norm(weight, tokens):
        x, residual = tokens
        return add_rms_norm(x, residual, weight, **options)

    return map_over_batch(add_norm)(weight, (x, residual))


def _same(a: Any) -> Any:
    return a


def _keep_all_but_fills(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint`."""
    return primitive.name != "broadcast_in_dim"


def _unstack(tree: Any, num_slices: int) -> list[Any]:
    """Slices along axis 0; unlike those of `a[i]`, their gradients meet in one concatenation."""
    leaves, structure = jax.tree.flatten(tree)
    split = [jax.lax.split(a, (1,) * num_slices) for a in leaves]
    return [structure.unflatten([parts[i][0] for parts in split]) for i in range(num_slices)]


def _cudnn_attention_runs(q: Float[Array, "B S N H"]) -> bool:
    """cuDNN's attention takes 16-bit floats and head sizes up to 128 that are a multiple of 8.

    As the kernels it runs on the default device, which may be one that is only compiled for.
    """
    return (
        runs_here() is None
        and q.dtype in (jnp.bfloat16, jnp.float16)
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 128
    )
