"""The configurations of published models."""

from typing import Any

from models.config import LlamaConfig
from models.rope import RopeParameters


def _llama(**fields: Any) -> LlamaConfig:
    return LlamaConfig(
        **{"rms_norm_eps": 1e-5, "tie_word_embeddings": False, "bos_token_id": 128000} | fields
    )


def _qwen3(**fields: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=151936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rms_norm_eps=1e-6,
        qk_norm=True,
        bos_token_id=151643,
        eos_token_id=151645,
        rope_parameters=RopeParameters(rope_type="default", rope_theta=1_000_000.0),
        **fields,
    )


def _llama3_rope(factor: float) -> RopeParameters:
    return RopeParameters(
        rope_type="llama3",
        rope_theta=500_000.0,
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


# Values of the published checkpoints' config.json. `demo` is a byte-level model for two CPU cores:
# 258 tokens (bytes, begin, end) rounded up to a multiple of 64.
PRESETS = {
    "demo": _llama(
        vocab_size=320,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=256,
        eos_token_id=257,
        rope_parameters=RopeParameters(rope_type="default", rope_theta=10_000.0),
        remat="none",
    ),
    "llama3.2-1b": _llama(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        eos_token_id=128001,
        rope_parameters=_llama3_rope(32.0),
    ),
    "llama3.2-3b": _llama(
        vocab_size=128256,
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131072,
        tie_word_embeddings=True,
        eos_token_id=128001,
        rope_parameters=_llama3_rope(32.0),
    ),
    "llama3.1-8b": _llama(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        eos_token_id=128001,
        rope_parameters=_llama3_rope(8.0),
    ),
    "llama3.1-70b": _llama(
        vocab_size=128256,
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        max_position_embeddings=131072,
        eos_token_id=128001,
        rope_parameters=_llama3_rope(8.0),
    ),
    "llama2-7b": _llama(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=32,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=RopeParameters(rope_type="default", rope_theta=10_000.0),
    ),
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-1.7b": _qwen3(
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=28,
        num_attention_heads=16,
        tie_word_embeddings=True,
    ),
    "qwen3-4b": _qwen3(
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=True,
    ),
    "qwen3-8b": _qwen3(
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=36,
        num_attention_heads=32,
        tie_word_embeddings=False,
    ),
}
