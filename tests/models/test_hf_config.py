"""Hugging Face's config.json: the round trip, and configurations that are refused."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest

from models.config import LlamaConfig
from models.hf_config import config_from_hf, config_to_hf
from models.llama_hf import read_config
from models.rope import RopeParameters

VARIANTS = json.loads((Path(__file__).parents[1] / "golden" / "variants.json").read_text())

MINIMAL = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


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
    # Each of the two forms alone has the same meaning.
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
    # The rest of LlamaConfig is the rope's, refused (attention_dropout), said by the model type
    # (qk_norm), a Mistral's (sliding_window) or ours.
    rest = {field.name for field in dataclasses.fields(LlamaConfig)} - changed.keys()
    assert rest == {
        "attention_dropout",
        "qk_norm",
        "sliding_window",
        "implementation",
        "attention_implementation",
        "dtype",
        "fp8",
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
        (
            {"model_type": "qwen2"},
            "model_type='qwen2' is not supported; take .* 'llama', 'mistral' or 'qwen3'",
        ),
        ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe' is not supported; take"),
        ({"model_type": None}, "model_type=None is not supported; take"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] is not supported; take"),
        ({"hidden_size": None}, r"lacks \['hidden_size'\]; add the sizes"),
        ({"head_dim": 0}, "head_dim=0 must be at least 1; leave it out"),
        ({"sliding_window": 4096}, r"unknown configuration keys.*{'sliding_window': 4096}"),
        ({"quantization_config": {"bits": 4}}, "unknown configuration keys.*quantization_config"),
        ({"hidden_act": "mish"}, "hidden_act='mish' must be one of"),
        (
            {"partial_rotary_factor": 0.5},
            r"partial_rotary_factor=0\.5: Llama rotates whole heads; take",
        ),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rope_type='ntk' must be one of"),
        ({"rope_scaling": {"type": "linear"}}, r"needs \['factor'\]"),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1]}},
            r"unknown rope parameters.*{'mrope_section': \[2, 1, 1\]}. Remove",
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
    """Zero is refused too, and is not taken as the default."""
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
    with pytest.raises(
        ValueError, match=r"config\.json: an object is expected, got .*; take the config"
    ):
        read_config(tmp_path)


def test_a_long_value_does_not_make_a_long_message():
    with pytest.raises(ValueError, match="unknown configuration keys") as caught:
        config_from_hf(MINIMAL | {"other": "x" * 100_000})
    assert len(str(caught.value)) < 600


# Settings that transformers refuses to load, found in its code. A run must refuse them too.


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
