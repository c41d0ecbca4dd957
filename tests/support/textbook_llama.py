"""Llama as textbooks write it: separate additions and norms, all on one device."""

import jax
import jax.numpy as jnp

from models.config import ACTIVATIONS, LlamaConfig


def textbook_logits(params, *, config: LlamaConfig, tokens, positions, segment_ids, dtype):
    """The logits of Hugging Face's formulas in `dtype`, with norms, angles and softmax in float32.

    If `dtype` is float64, everything is in float64.
    """
    at_least_float32 = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    params = jax.tree.map(lambda a: jnp.asarray(a, dtype), params)
    H = config.head_dim

    def norm(x, weight):
        x_wide = x.astype(at_least_float32)
        mean_square = jnp.mean(x_wide**2, axis=-1, keepdims=True)
        return weight * (x_wide / jnp.sqrt(mean_square + config.rms_norm_eps)).astype(dtype)

    def linear(x, layer):
        return x @ layer["kernel"] + layer.get("bias", jnp.zeros((), dtype))

    i = jnp.arange(0, H, 2, dtype=at_least_float32)
    angles = positions[..., None].astype(at_least_float32) / config.rope_parameters.rope_theta ** (
        i / H
    )
    angles = jnp.concatenate([angles, angles], axis=-1)[:, :, None, :]
    cos, sin = jnp.cos(angles).astype(dtype), jnp.sin(angles).astype(dtype)

    def rotate(x):
        return x * cos + jnp.concatenate([-x[..., H // 2 :], x[..., : H // 2]], axis=-1) * sin

    def attention(x, layer):
        heads = lambda name: linear(x, layer[name]).reshape(*x.shape[:2], -1, H)
        groups = config.num_attention_heads // config.num_key_value_heads
        q, k = heads("q_proj"), heads("k_proj")
        if config.qk_norm:
            q, k = norm(q, layer["q_norm"]["weight"]), norm(k, layer["k_norm"]["weight"])
        q, k = rotate(q), rotate(k)
        k, v = jnp.repeat(k, groups, axis=2), jnp.repeat(heads("v_proj"), groups, axis=2)
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k).astype(at_least_float32) / H**0.5
        order = jnp.arange(x.shape[1])
        visible = (order[:, None] >= order) & (segment_ids[:, :, None] == segment_ids[:, None])
        if config.sliding_window is not None:
            visible &= order[:, None] - order < config.sliding_window
        weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
        out = jnp.einsum("bnqk,bknh->bqnh", weights.astype(dtype), v)
        return linear(out.reshape(*x.shape[:2], -1), layer["o_proj"])

    def mlp(x, layer):
        gate = ACTIVATIONS[config.hidden_act](linear(x, layer["gate_proj"]))
        return linear(gate * linear(x, layer["up_proj"]), layer["down_proj"])

    embedding = params["embed_tokens"]["embedding"]
    h = embedding[tokens]
    for index in range(config.num_hidden_layers):
        layer = jax.tree.map(lambda a, index=index: a[index], params["layers"])
        h = h + attention(norm(h, layer["input_layernorm"]["weight"]), layer["self_attn"])
        h = h + mlp(norm(h, layer["post_attention_layernorm"]["weight"]), layer["mlp"])
    output = embedding if config.tie_word_embeddings else params["lm_head"]["weight"]
    return (norm(h, params["norm"]["weight"]) @ output.T).astype(at_least_float32)
