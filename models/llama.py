"""Llama in Flax NNX, whose sublayers end with the addition and the next norm.

A sublayer is the attention or the MLP. The textbook layer is
`h += attention(norm(h)); h += mlp(norm(h))`. Here every sublayer ends with the addition and the
norm of the next sublayer, because one kernel computes both. So a sublayer returns the pair
`(normed, residual)`, and the first norm of the model is a separate operation. LMDeploy does the
same. Values and gradients are those of the textbook layer. Where the backward computes the norms
again, a layer returns only the residual stream; see `models.remat`.

The parameters have Hugging Face's names. The parameters of all layers are stacked on axis 0,
whether the layers run in a scan or unrolled.

If several devices share sequences (`models.sharding.sum_over_devices`), the pair has only a
device's share of the tokens, `[t, D]`. A sublayer gathers the normalized tokens of its sequences,
computes the device's heads or columns, and ends with `sharded_add_rms_norm`, which sums over the
devices. That function could also gather, but then the pair would have all tokens. Every remat
policy keeps the pair, and should keep only the device's share.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from models.attention import causal_attention
from models.config import AUTO_REMAT, LlamaConfig
from models.fp8 import check_fp8, quantize_weights
from models.layer_scan import layer_scan
from models.layers import MLP, Attention, Norm, OutputEmbedding
from models.projections import join_projections
from models.remat import remat_policy
from models.rope import rotary_cos_sin
from models.sharding import (
    check_mesh,
    check_tensor_parallel,
    embed_over_devices,
    keep_all_but_weights,
    parameter_path,
    parameter_shardings,
    split_as_table,
    split_batch,
    tensor_axis,
    tokens_of_sequences,
    weights_are_split,
    whole_weight,
    whole_weights,
)
from pallas_kernels.attention import document_bounds
from pallas_kernels.fp8 import RecipeName

# `(q, k, v, layer_input) -> (attn_out, layer_output)`
type Attend = Callable[[Any, Any, Any, Any], tuple[Any, Any]]


class _Carry(NamedTuple):
    """Input of a layer: the residual stream, and its norm unless the layer computes the norm."""

    normed: Float[Array, "*T D"] | None
    residual: Float[Array, "*T D"]


class Block(nnx.Module):
    """One layer. Its caller runs the first norm and the attention; `finish` is the rest."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.input_layernorm = Norm(config, config.hidden_size)
        self.self_attn = Attention(config, rngs=rngs)
        self.post_attention_layernorm = Norm(config, config.hidden_size)
        self.mlp = MLP(config, rngs=rngs)

    def finish(
        self,
        attn_out: Float[Array, "B S N H"],
        residual: Float[Array, "*T D"],
        next_norm: Norm | None,
    ) -> _Carry:
        """From the attention's output to what enters the next layer.

        Args:
          attn_out: Output of all heads.
          residual: Residual stream before the attention.
          next_norm: First norm of the next layer; None leaves that norm to the next layer.
        """
        out = self.self_attn.output(attn_out)
        normed, residual = self.post_attention_layernorm.add(out, residual)
        normed = tokens_of_sequences(normed, attn_out.shape[:2])
        mlp_out = checkpoint_name(self.mlp(normed), "mlp_out")
        if next_norm is None:
            return _Carry(None, split_batch(residual + mlp_out))
        normed, residual = next_norm.add(mlp_out, residual)
        return _Carry(split_batch(normed), split_batch(residual))


class Llama(nnx.Module):
    """The model, from tokens `[B, S]` to normalized hidden states `[B, S, D]`.

    `logits` computes logits from the hidden states. `linear_cross_entropy` computes the loss
    without all logits in memory.

    Args:
      config: Sizes and options.
      rngs: Source of the initial parameters.
    """

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            param_dtype=config.param_dtype,
            embedding_init=nnx.initializers.normal(config.initializer_range),
            rngs=rngs,
        )
        # One layer after the other, so that only one layer's random bits are in memory.
        keys = jax.random.split(rngs.params(), config.num_hidden_layers)
        graphdef = nnx.graphdef(nnx.eval_shape(lambda: Block(config, rngs=nnx.Rngs(0))))
        state = jax.lax.map(lambda key: nnx.state(Block(config, rngs=nnx.Rngs(key))), keys)
        self.layers = nnx.merge(graphdef, state)
        self.norm = Norm(config, config.hidden_size)
        if not config.tie_word_embeddings:
            self.lm_head = OutputEmbedding(config, rngs=rngs)

    def __call__(
        self,
        tokens: Int[Array, "B S"],
        *,
        positions: Int[Array, "#B S"] | None = None,
        segment_ids: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S D"]:
        """Normalized hidden states of the last layer, in the compute dtype.

        Args:
          tokens: Token ids. An id outside of `[0, V)` makes the hidden states of its row NaN.
          positions: Position of each token in its document, or one row of positions for all rows;
            `None` counts from 0 in every row.
          segment_ids: Number of each token's document in its row. A token attends to earlier tokens
            of its own document, or to those of them in its `sliding_window`. A document begins
            wherever the number changes, also where an earlier number comes again. `None` treats
            each row as one document.

        Raises:
          ValueError: The sequence is longer than `max_position_embeddings`, or a shape is wrong.
        """
        _check_shapes(tokens, positions, segment_ids)
        sequence_length = tokens.shape[1]
        limit = self.config.max_position_embeddings
        if not self.config.fits(sequence_length):
            raise ValueError(
                f"{sequence_length=} exceeds max_position_embeddings={limit}; raise it, with "
                "rope_parameters that scale the positions"
            )
        if positions is None:
            positions = jnp.arange(sequence_length, dtype=jnp.int32)[None]
        window = self.config.sliding_window
        if window is not None and window >= sequence_length:
            window = None  # it hides no token
        bounds = None  # the kernels are faster if they know that a token attends to all before it
        if segment_ids is not None:
            bounds = document_bounds(segment_ids, window=window)
            window = None  # a row has several, and only the bounds say where
        elif window is not None:
            bounds = document_bounds(jnp.zeros_like(tokens), window=window)

        def attend(q, k, v, _):
            implementation = self.config.attention_implementation
            return causal_attention(q, k, v, bounds, implementation, window=window), None

        return self.run_layers(tokens, positions, attend, fp8=self.config.fp8)[0]

    def run_layers(
        self,
        tokens: Int[Array, "B S"],
        positions: Int[Array, "#B S"],
        attend: Attend,
        layer_inputs: Any = None,
        fp8: RecipeName | None = None,
    ) -> tuple[Float[Array, "B S D"], Any]:
        """The model with the attention as an argument.

        Args:
          tokens: Token ids, as in `__call__`.
          positions: Positions of the tokens, for the rotary embedding.
          attend: Attention of one layer, `(q, k, v, layer_input) -> (attn_out, layer_output)`.
          layer_inputs: Pytree with axis 0 the layers, such as a key/value cache; each layer gets
            its slice.
          fp8: Recipe, `config.fp8`, by which the layers multiply in FP8; None for `config.dtype`.

        Returns:
          The hidden states, and the layers' outputs, stacked.
        """
        config = self.config
        self._check(tokens)
        if fp8 is not None:
            check_fp8(fp8)
        cos_sin = rotary_cos_sin(
            config.rope_parameters,
            positions,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
        )

        # A layer ends with the first norm of the next layer, because one kernel computes the
        # addition and the norm. If the policy does not keep that norm, only the residual enters a
        # layer, and the layer computes the norm. Then there is half as much to keep, and the
        # backward need not repeat the addition, for which it would run the down projection again.
        # Over `tensor` a layer always ends with the norm: the addition is a sum over devices, and
        # the operation that exchanges the summands also computes the norm.
        policy = remat_policy(config.remat)
        carries_norm = policy.tensors is None or "normed" in policy.kept or bool(tensor_axis())

        residual = self._embed(tokens)
        carry, next_norms = _Carry(None, residual), None
        if carries_norm:
            first_norms, last_norm = nnx.state(self.layers.input_layernorm), nnx.state(self.norm)
            first_norm = jax.tree.map(lambda a: a[0], first_norms)
            carry = _Carry(self._norm_of(first_norm)(residual), residual)
            shifted = lambda first, last: jnp.concatenate([first[1:], last[None]])
            next_norms = jax.tree.map(shifted, first_norms, last_norm)

        # The weights are rounded here, once. Inside of a layer each would be rounded twice, in the
        # forward and again in the backward. Norms take their weights as they are.
        rounded = lambda path, a: a if _is_of_norm(path) else a.astype(config.dtype)
        state = nnx.state(self.layers)
        state["self_attn"] = join_projections(state["self_attn"])
        for name in ("self_attn", "mlp"):
            state[name] = jax.tree_util.tree_map_with_path(rounded, state[name])
            if fp8 is not None:
                state[name] = quantize_weights(state[name], fp8)

        layer = self._layer(attend, cos_sin, tokens.shape, carries_norm)
        carry, outputs = self._run(layer, carry, (state, next_norms, layer_inputs))
        normed = self.norm(carry.residual) if carry.normed is None else carry.normed
        return tokens_of_sequences(normed, tokens.shape), outputs

    def _check(self, tokens: Int[Array, "B S"]) -> None:
        """Raises a ValueError if the layers cannot run as they are configured, or on the mesh."""
        config = self.config
        check_mesh(self.embed_tokens.embedding[...])
        if config.remat == AUTO_REMAT:
            raise ValueError(
                f"remat={config.remat!r} is not a policy: `python -m train` replaces it with one "
                "that fits the device (train.planner.plan); set one of those in models.remat"
            )
        if axis := tensor_axis():
            check_tensor_parallel(
                jax.lax.axis_size(axis),
                num_key_value_heads=config.num_key_value_heads,
                num_tokens=math.prod(tokens.shape),
            )

    def _norm_of(self, state: nnx.State) -> Norm:
        return nnx.merge(nnx.graphdef(self.norm), state)

    def _layer(
        self,
        attend: Attend,
        cos_sin: tuple[Float[Array, "#B S h"], Float[Array, "#B S h"]],
        batch_shape: tuple[int, ...],
        carries_norm: bool,
    ) -> Callable[[_Carry, Any], tuple[_Carry, Any]]:
        """The function of one layer, which keeps for its backward what the policy says.

        Args:
          attend: Attention of one layer.
          cos_sin: Cosines and sines of the rotary embedding.
          batch_shape: Shape `(B, S)` of this device's sequences.
          carries_norm: Whether the norm of the residual enters the layer with it.

        Returns:
          A function `(carry, (state, next_norm, layer_input)) -> (carry, layer_output)`.
        """
        policy = remat_policy(self.config.remat)
        graphdef = nnx.graphdef(self.layers)
        # Each half asks for all weights of the layer; XLA gathers only those that the half reads.
        block_of = lambda state: nnx.merge(graphdef, whole_weights(state))

        # The inputs of a `jax.checkpoint` stay on the device, unless its function tags them with a
        # name that is offloaded. So the halves tag their inputs, or else the layer does. Both
        # together would make two copies in host memory.
        name_input = lambda a: checkpoint_name(a, "layer_input")
        of_half, of_layer = (name_input, _same) if policy.attention else (_same, name_input)

        def project(state, entering):
            normed, block = of_half(entering), block_of(state)
            if not carries_norm:
                normed = block.input_layernorm(normed)
            return block.self_attn.project(tokens_of_sequences(normed, batch_shape), *cos_sin)

        def finish(state, attn_out, residual, next_norm):
            next_norm = None if next_norm is None else self._norm_of(next_norm)
            return block_of(state).finish(attn_out, of_half(residual), next_norm)

        def layer(carry, state, next_norm, layer_input):
            normed, residual = jax.tree.map(of_layer, carry)
            q, k, v = project(state, residual if normed is None else normed)
            attn_out, output = attend(q, k, v, layer_input)
            return finish(state, attn_out, residual, next_norm), output

        checkpoint = policy.checkpoint
        if policy.tensors is None and tensor_axis():
            checkpoint = functools.partial(jax.checkpoint, policy=keep_all_but_weights)
        # XLA copies what goes through the barrier of a checkpoint; in Llama 1B a layer has 0.12 GB
        # of weights. Whole weights need no barrier, because nothing is computed from them alone.
        # Where `fsdp` splits weights, XLA would keep some gathered weights without a barrier.
        unrolled = not self.config.scan_layers
        split = weights_are_split()
        if policy.attention:
            project = checkpoint(project, prevent_cse=unrolled and (split, True))
            finish = checkpoint(finish, prevent_cse=unrolled and (split, True, True, split))
        else:
            layer = checkpoint(layer, prevent_cse=unrolled and (True, split, split, True))
        return lambda carry, inputs: layer(carry, *inputs)

    def _run(self, layer: Callable[..., Any], carry: _Carry, inputs: Any) -> tuple[_Carry, Any]:
        """All layers, scanned or unrolled: the last carry, and the layers' outputs, stacked."""
        if self.config.scan_layers:
            offloads = remat_policy(self.config.remat).offloaded
            return (jax.lax.scan if offloads else layer_scan)(layer, carry, inputs)
        outputs = []
        for layer_inputs in _unstack(inputs, self.config.num_hidden_layers):
            carry, output = layer(carry, layer_inputs)
            outputs.append(output)
        return carry, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outputs)

    def _embed(self, tokens: Int[Array, "B S"]) -> Float[Array, "*T D"]:
        """The embeddings of the tokens, in the compute dtype; of this device's share of them."""
        table = self.embed_tokens.embedding[...]

        def look_up(tokens: Any, first_row: Any = 0) -> Any:
            # The gather comes before the rounding, so that the gradient is scattered and summed in
            # param_dtype. Negative tokens are out of range too, and do not count from the end.
            embedded = table.at[tokens].get(
                mode="fill", fill_value=jnp.nan, wrap_negative_indices=False
            )
            embedded = split_as_table(embedded)
            if self.config.pad_token_id is not None:
                is_pad = (tokens == self.config.pad_token_id - first_row)[..., None]
                embedded = jnp.where(is_pad, jax.lax.stop_gradient(embedded), embedded)
            return embedded.astype(self.config.dtype)

        if tensor_axis():
            return embed_over_devices(look_up, tokens, len(table))
        return split_batch(look_up(split_as_table(tokens)))

    @property
    def output_weight(self) -> Float[Array, "V D"]:
        """The output embedding, for `linear_cross_entropy`; if tied, the input embedding.

        Inside of `models.sharding.sum_over_devices`, pass `vocab_axis=tensor_axis()` with it.
        """
        if self.config.tie_word_embeddings:
            return whole_weight(self.embed_tokens.embedding[...], 1)
        return whole_weight(self.lm_head.weight[...], 1)

    def logits(self, hidden: Float[Array, "*T D"]) -> Float[Array, "*T V"]:
        """Logits of hidden states, float32; a loss needs only `output_weight`."""
        return jnp.einsum(
            "...d,vd->...v",
            hidden,
            self.output_weight.astype(hidden.dtype),
            preferred_element_type=jnp.float32,
        )


def _check_shapes(tokens: Array, positions: Array | None, segment_ids: Array | None) -> None:
    if tokens.ndim != 2:
        raise ValueError(f"{tokens.shape=} must be [B, S]; give a single row an axis: tokens[None]")
    one_row = (1, tokens.shape[1])
    if positions is not None and positions.shape not in (tokens.shape, one_row):
        raise ValueError(
            f"{positions.shape=} must be {tokens.shape}, the shape of the tokens, or {one_row}"
        )
    # XLA's mask would broadcast one row, and cuDNN would read past its end.
    if segment_ids is not None and segment_ids.shape != tokens.shape:
        raise ValueError(
            f"{segment_ids.shape=} must be {tokens.shape}, the shape of the tokens; give each row "
            "its own numbers, for example with jnp.broadcast_to"
        )


def _same(a: Any) -> Any:
    return a


def _is_of_norm(path: tuple[Any, ...]) -> bool:
    """Whether a parameter of a sublayer is the weight of a norm."""
    return parameter_path(path)[-2] in ("q_norm", "k_norm")


def _unstack(tree: Any, num_slices: int) -> list[Any]:
    """Slices along axis 0. Unlike with `a[i]`, one concatenation makes the gradient of an array."""
    leaves, structure = jax.tree.flatten(tree)
    split = [jax.lax.split(a, (1,) * num_slices) for a in leaves]
    return [structure.unflatten([parts[i][0] for parts in split]) for i in range(num_slices)]


def abstract_parameters(config: LlamaConfig, mesh: Mesh) -> nnx.State:
    """Shapes, dtypes and shardings of the parameters on a mesh."""
    shapes = nnx.eval_shape(lambda: nnx.state(Llama(config, rngs=nnx.Rngs(0)), nnx.Param))
    place = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return jax.tree.map(place, shapes, parameter_shardings(shapes, mesh))
