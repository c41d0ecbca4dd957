"""Hugging Face's config.json: published ones, the round trip, and those that are refused."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from models.config import LlamaConfig
from models.hf_config import config_from_hf, config_to_hf
from models.llama_hf import read_config
from models.presets import PRESETS
from models.rope import RopeParameters

VARIANTS = json.loads((Path(__file__).parents[1] / "golden" / "variants.json").read_text())

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
MINIMAL = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def test_published_llama31_is_our_preset():
    preset = PRESETS["llama3.1-8b"]
    assert config_from_hf(LLAMA31_8B) == dataclasses.replace(
        preset, eos_token_id=(128001, 128008, 128009)
    )


def test_absent_keys_take_transformers_defaults():
    assert config_from_hf(MINIMAL) == LlamaConfig(
        vocab_size=48,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=RopeParameters(rope_type="default", rope_theta=10000.0),
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_config_round_trip(variant):
    config = config_from_hf(VARIANTS[variant])
    hf_config = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(hf_config) == config
    # Each of the two forms alone says the same.
    legacy = {key: value for key, value in hf_config.items() if key != "rope_parameters"}
    new = {k: v for k, v in hf_config.items() if k not in ("rope_theta", "rope_scaling")}
    assert config_from_hf(legacy) == config_from_hf(new) == config


def test_every_field_of_the_configuration_is_read_and_written():
    changed = {
        "attention_bias": True,
        "bos_token_id": None,
        "eos_token_id": [3, 4],
        "head_dim": 4,
        "hidden_act": "gelu",
        "initializer_range": 0.5,
        "max_position_embeddings": 77,
        "mlp_bias": True,
        "num_key_value_heads": 1,
        "pad_token_id": 5,
        "rms_norm_eps": 1e-3,
        "tie_word_embeddings": True,
        **{name: 4 * value for name, value in MINIMAL.items() if name != "model_type"},
    }
    base = config_from_hf(MINIMAL)
    written = config_to_hf(config_from_hf(MINIMAL | changed))
    for name, value in changed.items():
        assert written[name] == value, name
        assert getattr(config_from_hf(MINIMAL | {name: value}), name) != getattr(base, name), name
    # The rest of LlamaConfig is the rope's, refused (attention_dropout) or ours.
    rest = {field.name for field in dataclasses.fields(LlamaConfig)} - changed.keys()
    assert rest == {
        "attention_dropout",
        "implementation",
        "attention_implementation",
        "dtype",
        "mlp_chunk_size",
        "param_dtype",
        "remat",
        "rope_parameters",
        "scan_layers",
    }
    for name in ("dtype", "torch_dtype"):
        assert config_to_hf(dataclasses.replace(base, param_dtype="bfloat16"))[name] == "bfloat16"


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, {"rope_theta": 1e4}),
        ({"rope_theta": 5e5, "rope_scaling": None}, {"rope_theta": 5e5}),
        ({"rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2}},
            {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        ),
        (
            {"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        # Settings that this type does not read are left aside, as in transformers.
        (
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "beta_fast": 3.0}},
            {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
                "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            },
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4, "finetuned": True, "truncate": False}},
            {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 2048,
            },
        ),
        (
            {
                "original_max_position_embeddings": 256,
                "partial_rotary_factor": 1.0,
                "rope_scaling": {
                    "rope_type": "longrope",
                    "short_factor": [1, 1, 2, 2],
                    "long_factor": [2, 2, 4, 4],
                    "original_max_position_embeddings": 512,
                },
            },
            {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 256,
                "short_factor": (1.0, 1.0, 2.0, 2.0),
                "long_factor": (2.0, 2.0, 4.0, 4.0),
            },
        ),
    ],
)
def test_forms_of_the_rotary_settings(rope, expected):
    assert config_from_hf(MINIMAL | rope).rope_parameters == RopeParameters(**expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "qwen2"}, "model_type='qwen2', only 'llama' and 'mistral'"),
        ({"model_type": None}, "model_type=None, only 'llama'"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\], only 'llama'"),
        ({"hidden_size": None}, r"lacks \['hidden_size'\]"),
        ({"sliding_window": 4096}, r"unknown configuration keys.*{'sliding_window': 4096}"),
        ({"quantization_config": {"bits": 4}}, "unknown configuration keys.*quantization_config"),
        ({"hidden_act": "mish"}, "hidden_act='mish' must be one of"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5: Llama rotates whole heads"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type='ntk' must be one of"),
        ({"rope_scaling": {"type": "linear"}}, r"needs \['factor'\]"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
            r"unknown rope parameters.*{'mrope_section': \[2, 1, 1\]}",
        ),
    ],
)
def test_configurations_that_are_refused(changes, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MINIMAL | changes))
    with pytest.raises(ValueError, match=rf"config\.json: .*{message}"):
        read_config(tmp_path)


def test_keys_that_switch_something_off_are_accepted():
    off = {"quantization_config": None, "sliding_window": None, "pruned_heads": {}}
    assert config_from_hf(MINIMAL | off) == config_from_hf(MINIMAL)


def test_attention_dropout_is_refused():
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.1"):
        config_from_hf(MINIMAL | {"attention_dropout": 0.1})


# Published configurations

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
# What transformers 4.46 writes besides, if it is asked for all keys.
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
# The configuration, and the fields in which it is not what its own keys say by name.
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
    "Mistral with the window of its context": (MISTRAL | {"sliding_window": 32768}, {}),
    "Mistral with absent keys": (
        {name: MISTRAL[name] for name in MISTRAL if name not in ("num_key_value_heads",)}
        | {"num_hidden_layers": 2},
        {"num_key_value_heads": 8},
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
    for field in fields & published.keys():
        given = published[field]
        assert getattr(config, field) == (tuple(given) if isinstance(given, list) else given)
    for field, value in computed.items():
        assert getattr(config, field) == value, field
    assert config.rope_parameters.rope_theta == published.get("rope_theta", 1e4)
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 4096}, r"sliding_window=4096 is shorter than max_position_emb.*=32768"),
        ({"sliding_window": ...}, r"sliding_window=4096 is shorter"),  # the default
        ({"sliding_window": True}, r"sliding_window=True must be a whole number"),
        (
            {"sliding_window": 32768, "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            "the rope type 'dynamic', whose sequences have no longest length",
        ),
        ({"attention_bias": True}, r"unknown configuration keys.*{'attention_bias': True}"),
        ({"rope_interleaved": True}, r"unknown configuration keys.*{'rope_interleaved': True}"),
        ({"activation": "geglu"}, r"unknown configuration keys.*{'activation': 'geglu'}"),
    ],
)
def test_mistrals_that_are_more_than_a_llama(changes, message):
    hf_config = {key: value for key, value in (MISTRAL | changes).items() if value is not ...}
    with pytest.raises((ValueError, NotImplementedError), match=message):
        config_from_hf(hf_config)


def test_a_mistral_of_short_sequences_needs_no_window():
    """The remedy that the refusal names."""
    short = {"sliding_window": 4096, "max_position_embeddings": 4096}
    assert config_from_hf(MISTRAL | short).max_position_embeddings == 4096


# Values

WHOLE = ("vocab_size", "num_hidden_layers", "num_key_value_heads", "head_dim")
WHOLE += ("max_position_embeddings", "pad_token_id")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *((name, value) for name in WHOLE for value in (-1, True, 8.0, "8", [8], {}, 2**31)),
        *((name, 0) for name in WHOLE[:-1]),
        *(("bos_token_id", value) for value in (-1, 1.0, "1", [1])),
        *(("eos_token_id", value) for value in (-1, 2.0, "2", [2, "3"], [-1], {"a": 2})),
        ("pad_token_id", 48),
        *(
            (name, value)
            for name in ("rms_norm_eps", "initializer_range")
            for value in (-1.0, math.nan, math.inf, "1e-6", True, [0.1], 10**400)
        ),
        ("rms_norm_eps", 1e39),
        ("initializer_range", 1.5),  # transformers refuses it
        ("attention_dropout", "0"),
        *((name, 1) for name in ("attention_bias", "mlp_bias", "tie_word_embeddings")),
        ("tie_word_embeddings", "false"),
        *(("hidden_act", value) for value in ("", ["silu"], 3)),
        *(("rope_theta", value) for value in (0, 1, -1e4, math.nan, math.inf, 1e39, "1e4", True)),
        *((key, 3) for key in ("rope_parameters", "rope_scaling")),
        *((key, ["yarn"]) for key in ("rope_parameters", "rope_scaling")),
    ],
)
def test_values_that_are_refused(field, value, unchecked_shapes):
    """A zero too, which is no default."""
    with pytest.raises(ValueError, match=re.escape(field)) as caught:
        config_from_hf(MINIMAL | {field: value})
    assert "must be" in str(caught.value) or "too large" in str(caught.value)
    assert len(str(caught.value)) < 400


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "factor": 8.0}


@pytest.mark.parametrize(
    ("rope_type", "settings", "field"),
    [
        *(("linear", {"factor": v}, "factor") for v in (0, 0.5, math.nan, math.inf, "2", True)),
        *(("linear", {"factor": 2.0, "rope_theta": v}, "rope_theta") for v in (0, math.inf, "1")),
        *(("llama3", LLAMA3 | {name: 0}, name) for name in LLAMA3),
        *(("llama3", LLAMA3 | {name: math.inf}, name) for name in LLAMA3),
        *(
            ("yarn", {"factor": 2.0, name: value}, name)
            for name in ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            for value in (0, -1.0, math.nan, math.inf, "1")
        ),
        *(
            ("yarn", {"factor": 2.0, name: value}, name)
            for name in ("original_max_position_embeddings",)
            for value in (0, 1, -8, 64.0, True, "64")
        ),
        ("yarn", {"factor": 2.0, "truncate": 1}, "truncate"),
        ("yarn", {"original_max_position_embeddings": 4096}, "max_position_embeddings=2048"),
        *(
            ("longrope", {"short_factor": v, "long_factor": [1.0] * 4}, "short_factor")
            for v in ([0.0] * 4, [math.nan] * 4, [math.inf] * 4, "1", 1.0, ["1"] * 4)
        ),
        (["yarn"], {}, "rope_type"),
        (None, {}, "rope_type"),
    ],
)
def test_rotary_settings_that_are_refused(rope_type, settings, field, unchecked_shapes):
    settings = {"rope_type": rope_type} | settings
    with pytest.raises(ValueError, match=field) as caught:
        config_from_hf(MINIMAL | {"rope_parameters": settings})
    assert re.search("must be|is below", str(caught.value))


def test_a_length_of_zero_beside_the_rotary_settings_is_refused(unchecked_shapes):
    changes = {
        "original_max_position_embeddings": 0,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0},
    }
    with pytest.raises(ValueError, match="original_max_position_embeddings=0 must be greater"):
        config_from_hf(MINIMAL | changes)


@pytest.mark.parametrize("content", [[], 3, None, "llama"])
def test_a_configuration_that_is_no_object_is_refused(content, tmp_path, unchecked_shapes):
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"config\.json: an object is expected"):
        read_config(tmp_path)


def test_a_long_value_does_not_make_a_long_message():
    with pytest.raises(ValueError, match="unknown configuration keys") as caught:
        config_from_hf(MINIMAL | {"other": "x" * 100_000})
    assert len(str(caught.value)) < 600


# What transformers refuses to load, found in it by hand: it must not be trained or written.


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    heads = {"hidden_size": 50, "num_attention_heads": 6, "head_dim": 20}
    with pytest.raises(ValueError, match=r"hidden_size=50 is not a multiple .*=6.* transformers"):
        config_from_hf(MINIMAL | heads)


def test_whole_numbers_and_a_missing_factor_are_written_for_transformers(unchecked_shapes):
    yarn = RopeParameters(rope_type="yarn", rope_theta=1e4, original_max_position_embeddings=512)
    config = dataclasses.replace(config_from_hf(MINIMAL), rms_norm_eps=0, rope_parameters=yarn)
    written = config_to_hf(config)
    assert isinstance(written["rms_norm_eps"], float)
    assert written["rope_parameters"]["factor"] == written["rope_scaling"]["factor"] == 4.0


@pytest.mark.parametrize("name", ["dtype", "param_dtype"])
@pytest.mark.parametrize("dtype", ["int32", "bool", "complex64", "float8_e4m3fn"])
def test_dtypes_that_no_model_has_are_refused(name, dtype):
    with pytest.raises(ValueError, match=f"{name}='{dtype}' must be one of bfloat16"):
        dataclasses.replace(config_from_hf(MINIMAL), **{name: dtype})
