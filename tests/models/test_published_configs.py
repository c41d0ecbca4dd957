"""The config.json of published models, as `config_from_hf` reads them."""

import dataclasses
import json

import pytest

from models.config import LlamaConfig
from models.hf_config import config_from_hf, config_to_hf
from models.presets import PRESETS

LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.1",
    "use_cache": True,
    "vocab_size": 49152,
}
MISTRAL = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
LLAMA2 = {
    "_name_or_path": "meta-llama/Llama-2-7b-hf",
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
# The keys that transformers 4.46 adds if it is asked for all keys.
ALL_KEYS = json.loads("""{
    "return_dict": true, "output_hidden_states": false, "output_attentions": false,
    "torchscript": false, "use_bfloat16": false, "tf_legacy_loss": false, "pruned_heads": {},
    "chunk_size_feed_forward": 0, "is_encoder_decoder": false, "is_decoder": false,
    "cross_attention_hidden_size": null, "add_cross_attention": false,
    "tie_encoder_decoder": false, "max_length": 20, "min_length": 0, "do_sample": false,
    "early_stopping": false, "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0,
    "temperature": 1.0, "top_k": 50, "top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0,
    "length_penalty": 1.0, "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": null, "num_return_sequences": 1, "output_scores": false,
    "return_dict_in_generate": false, "forced_bos_token_id": null, "forced_eos_token_id": null,
    "remove_invalid_values": false, "exponential_decay_length_penalty": null,
    "suppress_tokens": null, "begin_suppress_tokens": null, "finetuning_task": null,
    "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1},
    "tokenizer_class": null, "prefix": null, "sep_token_id": null,
    "decoder_start_token_id": null, "task_specific_params": null, "problem_type": null,
    "_attn_implementation_autoset": false
}""")
# Each configuration, and the fields whose values its keys do not name.
PUBLISHED: dict[str, tuple[dict, dict]] = {
    "SmolLM2-135M": (SMOLLM2, {"head_dim": 64}),
    "SmolLM2-135M-Instruct": (
        SMOLLM2
        | {"pad_token_id": 2, "eos_token_id": 2}
        | {"transformers.js_config": {"kv_cache_dtype": {"fp16": "float16"}}},
        {"head_dim": 64},
    ),
    "Mistral-7B-v0.3": (MISTRAL, {"head_dim": 128}),
    "Mistral-7B-v0.3, all keys": (MISTRAL | ALL_KEYS, {"head_dim": 128}),
    "Mistral-Nemo": (
        MISTRAL | {"hidden_size": 5120, "head_dim": 128, "max_position_embeddings": 131072},
        {},
    ),
    "Mistral-7B-v0.1": (
        MISTRAL | {"rope_theta": 10000.0, "sliding_window": 4096, "vocab_size": 32000},
        {"head_dim": 128},
    ),
    "Mistral without the key of its window": (
        {name: MISTRAL[name] for name in MISTRAL if name != "sliding_window"},
        {"sliding_window": 4096},
    ),
    "Mistral with a window and the rope type dynamic": (
        MISTRAL
        | {"sliding_window": 32768, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {},
    ),
    "Mistral with absent keys": (
        {name: MISTRAL[name] for name in MISTRAL if name not in ("num_key_value_heads",)}
        | {"num_hidden_layers": 2},
        {"num_key_value_heads": 8},
    ),
    "Qwen3-0.6B": (QWEN3, {"qk_norm": True}),
    "Qwen3-0.6B, all keys": (QWEN3 | ALL_KEYS, {"qk_norm": True}),
    "Qwen3-0.6B as transformers 5 writes it": (
        QWEN3 | {"layer_types": ["full_attention"] * 28},
        {"qk_norm": True},
    ),
    "Qwen 3 with absent keys": (
        {k: v for k, v in QWEN3.items() if k not in ("num_key_value_heads", "head_dim")}
        | {"num_attention_heads": 32},
        {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "Qwen 3 with the window of its context": (
        QWEN3 | {"use_sliding_window": True, "sliding_window": 40960, "max_window_layers": 0},
        {"sliding_window": None},
    ),
    "Qwen 3 whose layers are all below those with a window": (
        QWEN3 | {"use_sliding_window": True, "sliding_window": 4096},
        {"sliding_window": None},
    ),
    "Llama-2-7b": (LLAMA2, {"head_dim": 128}),
    "Llama-2-7b, all keys": (LLAMA2 | ALL_KEYS, {"head_dim": 128}),
    "huggyllama": (
        LLAMA2 | {"max_sequence_length": 2048, "pad_token_id": 0, "rms_norm_eps": 1e-6},
        {},
    ),
    "CodeLlama-7b": (LLAMA2 | {"rope_theta": 1000000, "vocab_size": 32016}, {}),
    "TinyLlama-1.1B": (
        LLAMA2
        | {"hidden_size": 2048, "num_hidden_layers": 22, "num_key_value_heads": 4}
        | {"intermediate_size": 5632, "max_position_embeddings": 2048},
        {"head_dim": 64},
    ),
    "deepseek-coder-1.3b": (
        LLAMA2
        | {"bos_token_id": 32013, "eos_token_id": 32014, "vocab_size": 32256}
        | {"rope_scaling": {"factor": 4.0, "type": "linear"}, "rope_theta": 100000},
        {},
    ),
    "Falcon3-7B": (
        LLAMA2
        | {"activation": "swiglu", "head_dim": 256, "hidden_size": 3072, "rope_theta": 1000042}
        | {"num_attention_heads": 12, "num_key_value_heads": 4, "bos_token_id": None},
        {},
    ),
    "Llama-3.2 of unsloth": (
        LLAMA31_8B | {"head_dim": 128, "pad_token_id": 128004, "unsloth_fixed": True},
        {},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations_are_read(name):
    published, computed = PUBLISHED[name]
    config = config_from_hf(published)
    fields = {field.name for field in dataclasses.fields(LlamaConfig)} - {"dtype"}
    for field in (fields - computed.keys()) & published.keys():
        given = published[field]
        assert getattr(config, field) == (tuple(given) if isinstance(given, list) else given)
    for field, value in computed.items():
        assert getattr(config, field) == value, field
    assert config.rope_parameters.rope_theta == published.get("rope_theta", 1e4)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": True}, r"sliding_window=True must be a whole number"),
        ({"sliding_window": 0}, r"sliding_window=0 must be a whole number from 1"),
        ({"attention_bias": True}, r"unknown configuration keys.*{'attention_bias': True}"),
        ({"rope_interleaved": True}, r"unknown configuration keys.*{'rope_interleaved': True}"),
        ({"activation": "geglu"}, r"unknown configuration keys.*{'activation': 'geglu'}"),
    ],
)
def test_mistrals_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(MISTRAL | changes)


@pytest.mark.parametrize(("window", "model_type"), [(4096, "mistral"), (None, "llama")])
def test_what_a_mistral_is_written_as(window, model_type):
    written = config_to_hf(config_from_hf(MISTRAL | {"sliding_window": window}))
    assert written["model_type"] == model_type
    assert written["architectures"] == [f"{model_type.capitalize()}ForCausalLM"]
    assert written.get("sliding_window") == window
    assert ("attention_bias" in written) == (model_type == "llama")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 27},
            r"sliding_window=4096 is shorter than max_position_embeddings=40960",
        ),
        (
            {"use_sliding_window": True, "sliding_window": ..., "max_window_layers": 0},
            r"sliding_window=4096 is shorter",  # the default
        ),
        (
            {"use_sliding_window": True, "sliding_window": 40960, "max_window_layers": 0}
            | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "the rope type 'dynamic', which has no longest sequence",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "only 'full_attention'"),
        ({"layer_types": "full_attention"}, r"layer_types='full_attention': only"),
        ({"use_sliding_window": 1}, "use_sliding_window=1 must be true or false"),
        ({"max_window_layers": "28"}, "max_window_layers='28' must be a whole number"),
        ({"mlp_bias": True}, r"unknown configuration keys.*{'mlp_bias': True}"),
        ({"num_experts": 128}, r"unknown configuration keys.*{'num_experts': 128}"),
    ],
)
def test_qwens_that_are_more_than_a_llama_with_norms(changes, message):
    hf_config = {key: value for key, value in (QWEN3 | changes).items() if value is not ...}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        config_from_hf(hf_config)


def test_a_qwen_of_short_sequences_needs_no_window():
    """The error message names this remedy."""
    windows = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 0}
    config = config_from_hf(QWEN3 | windows | {"max_position_embeddings": 4096})
    assert config.max_position_embeddings == 4096 and config.sliding_window is None


def test_published_qwen3_is_our_preset():
    assert config_from_hf(QWEN3) == PRESETS["qwen3-0.6b"]


def test_published_llama31_is_our_preset():
    preset = PRESETS["llama3.1-8b"]
    assert config_from_hf(LLAMA31_8B) == dataclasses.replace(
        preset, eos_token_id=(128001, 128008, 128009)
    )
