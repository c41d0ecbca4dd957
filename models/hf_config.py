"""Hugging Face's config.json, read and written.

`config_from_hf` refuses a configuration that would compute something else here than in
transformers: an unknown key with a value, a value of a wrong kind, a setting without an
implementation here.

Source: transformers 5.23, `models/llama/configuration_llama.py`,
`models/mistral/configuration_mistral.py` and `models/qwen3/configuration_qwen3.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from models.config import LlamaConfig
from models.rope import OPTIONAL_FIELDS, REQUIRED_FIELDS, RopeParameters


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or isinstance(value, float)


# The kinds of a JSON value, each with its test.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a whole number": _is_whole,
    "a number": _is_number,
    "true or false": lambda value: isinstance(value, bool),
    "a text": lambda value: isinstance(value, str),
    "an object": lambda value: isinstance(value, dict),
    "a list of numbers": lambda value: isinstance(value, list) and all(map(_is_number, value)),
    "a token or a list of tokens": (
        lambda value: _is_whole(value) or (isinstance(value, list) and all(map(_is_whole, value)))
    ),
}
_FIELDS = {
    "attention_bias": "true or false",
    "attention_dropout": "a number",
    "bos_token_id": "a whole number",
    "eos_token_id": "a token or a list of tokens",
    "head_dim": "a whole number",
    "hidden_act": "a text",
    "hidden_size": "a whole number",
    "initializer_range": "a number",
    "intermediate_size": "a whole number",
    "max_position_embeddings": "a whole number",
    "mlp_bias": "true or false",
    "num_attention_heads": "a whole number",
    "num_hidden_layers": "a whole number",
    "num_key_value_heads": "a whole number",
    "pad_token_id": "a whole number",
    "rms_norm_eps": "a number",
    "tie_word_embeddings": "true or false",
    "vocab_size": "a whole number",
}
# The sizes that every config.json must have.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# The values that transformers takes for keys that config.json lacks.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_DEFAULTS = {
    "llama": _LLAMA_DEFAULTS,
    "mistral": _LLAMA_DEFAULTS | {"max_position_embeddings": 131_072, "num_key_value_heads": 8},
    "qwen3": _LLAMA_DEFAULTS
    | {"bos_token_id": None, "eos_token_id": None, "head_dim": 128}
    | {"max_position_embeddings": 32_768, "num_key_value_heads": 32},
}
# Keys of biases that transformers does not read, because the model has no such biases.
_NO_BIASES = {"llama": (), "mistral": ("attention_bias", "mlp_bias"), "qwen3": ("mlp_bias",)}
_WINDOW_KEYS = {
    "llama": (),
    "mistral": ("sliding_window",),
    "qwen3": ("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
}
_DEFAULT_WINDOW = 4096  # `sliding_window` of a Mistral or Qwen 3 whose config.json lacks the key
_QWEN3_WHOLE_LAYERS = 28  # `max_window_layers` of a Qwen 3 without it: first layers, without window
_ROPE_FIELDS = {
    "attention_factor": "a number",
    "beta_fast": "a number",
    "beta_slow": "a number",
    "factor": "a number",
    "high_freq_factor": "a number",
    "long_factor": "a list of numbers",
    "low_freq_factor": "a number",
    "mscale": "a number",
    "mscale_all_dim": "a number",
    "original_max_position_embeddings": "a whole number",
    "short_factor": "a list of numbers",
    "truncate": "true or false",
}
_ROPE_KEYS = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
# Keys that never change what the model computes, grouped by the reason.
_HARMLESS = {
    "it says where the checkpoint comes from, and what wrote it": """
        _commit_hash _name_or_path architectures model_type name_or_path transformers_version
        unsloth_fixed unsloth_version
    """,
    "nanotron's mark in converted models (SmolLM2), which nothing else reads": "is_llama_config",
    "it says how transformers runs the same function: kernels, dtypes, a cache, slices": """
        _attn_implementation _attn_implementation_autoset _flash_attn_2_enabled attn_implementation
        chunk_size_feed_forward dtype pretraining_tp torch_dtype torchscript use_bfloat16 use_cache
    """,
    "another program's settings for running it, in the browser": "transformers.js_config",
    "it says which outputs transformers returns, and in what form": """
        output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    """,
    "it is about classes or a task, and a language model has neither": """
        finetuning_task id2label label2id problem_type task_specific_params tf_legacy_loss
    """,
    "it is about encoders and decoders, and Llama's class is neither": """
        decoder_start_token_id is_decoder is_encoder_decoder tie_encoder_decoder
    """,
    "it is the tokenizer's": "max_sequence_length prefix sep_token_id tokenizer_class",
    "a setting of generation, which older versions kept in config.json": """
        bad_words_ids begin_suppress_tokens cache_implementation diversity_penalty do_sample
        early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
        forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
        no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values
        repetition_penalty suppress_tokens temperature top_k top_p typical_p
    """,
}
_HARMLESS_KEYS = {key for keys in _HARMLESS.values() for key in keys.split()}
# Keys with one value that does not change what the model computes.
_HARMLESS_VALUES = {
    "activation": "swiglu",  # Falcon 3's name for the MLP that `hidden_act` "silu" makes
    "add_cross_attention": False,  # there is no encoder to attend to
    "rope_interleaved": False,  # nanotron's name for the layout of pairs that Llama does not have
}


def config_from_hf(hf_config: dict[str, Any]) -> LlamaConfig:
    """The `LlamaConfig` of a config.json; our own fields, such as `dtype`, have their defaults.

    A Mistral is a Llama with `sliding_window`, which may be null. A Qwen 3 is a Llama with
    `qk_norm`. It may have a window that is at least as long as the longest sequence, because such
    a window hides nothing.

    The rotary settings are in `rope_parameters` (transformers 5), or in `rope_theta` and
    `rope_scaling` (older versions). `rope_scaling` is null or has a `rope_type`, whose older name
    is `type`. If a file has both forms, `rope_scaling` wins, as in transformers.

    Raises:
      ValueError: The model is none of the three, or a size is missing. Or a value is of a wrong
        kind or out of its range. Or a key is unknown and may change the function.
      NotImplementedError: The model needs a feature that `LlamaConfig` does not have.
    """
    if not isinstance(hf_config, dict):
        raise ValueError(
            f"an object is expected, got {_short(hf_config)}; take the config.json of a model"
        )
    model_type = hf_config.get("model_type")
    if not (isinstance(model_type, str) and model_type in _DEFAULTS):
        raise ValueError(
            f"model_type={_short(model_type)} is not supported; take a model of type 'llama', "
            "'mistral' or 'qwen3'"
        )
    if missing := [name for name in _SIZES if hf_config.get(name) is None]:
        raise ValueError(f"the configuration lacks {missing}; add the sizes of the model")
    _check_keys(hf_config, model_type)

    fields = {name: _checked(name, hf_config[name], _FIELDS[name]) for name in _SIZES}
    for name, default in _DEFAULTS[model_type].items():
        value = hf_config.get(name, default)
        # Null means "no token" or "no setting" where transformers reads it as None. For all other
        # keys it means the default.
        if value is None and not name.endswith("token_id") and name != "num_key_value_heads":
            value = default
        fields[name] = None if value is None else _checked(name, value, _FIELDS[name])
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if fields["head_dim"] is None:
        del fields["head_dim"]
    elif fields["head_dim"] < 1:
        raise ValueError(
            f"head_dim={fields['head_dim']} must be at least 1; leave it out for the default"
        )
    if isinstance(fields["eos_token_id"], list):
        fields["eos_token_id"] = tuple(fields["eos_token_id"])
    if model_type == "mistral":
        window = hf_config.get("sliding_window", _DEFAULT_WINDOW)
        if window is not None:
            fields["sliding_window"] = _checked("sliding_window", window, "a whole number")
    rope = _rope_from_hf(hf_config, fields["max_position_embeddings"])
    config = LlamaConfig(**fields, qk_norm=model_type == "qwen3", rope_parameters=rope)
    if model_type == "qwen3":
        _check_window_of_qwen3(_window_of_qwen3(hf_config), config)
    return config


def _check_keys(hf_config: dict[str, Any], model_type: str) -> None:
    """Raises unless each key is read, is harmless, or has the value that switches it off."""
    no_biases = _NO_BIASES[model_type]
    known = {*_FIELDS, *_ROPE_KEYS, *_HARMLESS_KEYS, *_WINDOW_KEYS[model_type]} - {*no_biases}
    off = _HARMLESS_VALUES | dict.fromkeys(no_biases, False)
    unknown = {
        key: value
        for key, value in hf_config.items()
        if key not in known
        and value not in (None, {}, [])
        and not (key in off and value == off[key])
    }
    if unknown:
        raise ValueError(
            "unknown configuration keys, which may change what the model computes: "
            f"{_short(unknown)}. Remove them from the configuration if they do not"
        )


def _window_of_qwen3(hf_config: dict[str, Any]) -> Any:
    """The window of those layers of a Qwen 3 that have one; None if no layer has."""
    types = hf_config.get("layer_types")
    if types is not None:
        if not (isinstance(types, list) and all(kind == "full_attention" for kind in types)):
            raise NotImplementedError(
                f"layer_types={_short(types)}: only 'full_attention' is implemented. If the window "
                "of the other layers hides no position, set layer_types to null"
            )
        return None
    read = lambda key, default: default if (value := hf_config.get(key)) is None else value
    first = _checked(
        "max_window_layers", read("max_window_layers", _QWEN3_WHOLE_LAYERS), "a whole number"
    )
    uses = _checked("use_sliding_window", read("use_sliding_window", False), "true or false")
    if not uses or first >= hf_config["num_hidden_layers"]:
        return None
    return hf_config.get("sliding_window", _DEFAULT_WINDOW)


def _check_window_of_qwen3(window: Any, config: LlamaConfig) -> None:
    """Raises if a window of the attention would hide any position of a sequence."""
    if window is None:
        return
    _checked("sliding_window", window, "a whole number")
    longest = config.max_position_embeddings
    if config.rope_parameters.rope_type == "dynamic":
        raise NotImplementedError(
            f"sliding_window={window} with the rope type 'dynamic', which has no longest sequence: "
            "a Qwen 3 with a window is not implemented. Set sliding_window to null"
        )
    if window < longest:
        raise NotImplementedError(
            f"sliding_window={window} is shorter than max_position_embeddings={longest}: a "
            f"Qwen 3 with a window is not implemented. For sequences of at most {window} tokens, "
            f"which the window leaves as they are, set max_position_embeddings to {window}"
        )


def _rope_from_hf(hf_config: dict[str, Any], max_position_embeddings: int) -> RopeParameters:
    settings: dict[str, Any] = {}
    for key in ("rope_parameters", "rope_scaling"):
        if (value := hf_config.get(key)) is not None:
            settings = dict(_checked(key, value, "an object")) or settings
    older_type = settings.pop("type", "default")
    rope_type = _checked("rope_type", settings.pop("rope_type", older_type), "a text")
    if rope_type not in REQUIRED_FIELDS:
        raise ValueError(f"{rope_type=} must be one of {sorted(REQUIRED_FIELDS)}")
    theta = settings.pop("rope_theta", None)
    if theta is None:
        theta = hf_config.get("rope_theta")
    theta = 10_000.0 if theta is None else _checked("rope_theta", theta, "a number")
    partial = settings.pop("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(
            f"partial_rotary_factor={_short(partial)}: Llama rotates whole heads; take a model "
            "whose factor is 1"
        )
    settings.pop("finetuned", None)  # a remark in the first YaRN checkpoints
    unknown = {k: v for k, v in settings.items() if k not in _ROPE_FIELDS and v is not None}
    if unknown:
        raise ValueError(
            f"unknown rope parameters, which may change the rotation: {_short(unknown)}. Remove "
            "them from the configuration if they do not"
        )

    # Like transformers, leave aside the settings that another rope type would read.
    read = (*REQUIRED_FIELDS[rope_type], *OPTIONAL_FIELDS[rope_type])
    given = {name: settings[name] for name in read if settings.get(name) is not None}
    if (name := "original_max_position_embeddings") in read:
        if hf_config.get(name) is not None:
            given[name] = hf_config[name]
        given.setdefault(name, max_position_embeddings)
    values: dict[str, Any] = {
        name: _checked(name, value, _ROPE_FIELDS[name]) for name, value in given.items()
    }
    return RopeParameters(rope_type=rope_type, rope_theta=theta, **values)


def _checked(name: str, value: Any, kind: str) -> Any:
    """The value in the type of our field, if it is of this kind."""
    if not _KINDS[kind](value):
        raise ValueError(f"{name}={_short(value)} must be {kind}")
    try:
        if kind == "a number":
            return float(value)
        return tuple(map(float, value)) if kind == "a list of numbers" else value
    except OverflowError as error:
        raise ValueError(f"{name}={_short(value)} is too large") from error


def _short(value: Any) -> str:
    """A value of config.json for a message, cut to 300 characters."""
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The content of config.json for transformers 5 and, by the legacy keys, for 4.43 and later.

    With `qk_norm` it is that of a Qwen 3, which transformers knows from 4.51 on. With
    `sliding_window` it is that of a Mistral. Version 4.46 had other rules for "yarn" and
    "longrope", and so computes other logits with them.
    """
    hf_config = {name: getattr(config, name) for name in sorted(_FIELDS)}
    for name, kind in _FIELDS.items():
        if kind == "a number":  # transformers 5 refuses a whole number here
            hf_config[name] = float(hf_config[name])
    if isinstance(config.eos_token_id, tuple):
        hf_config["eos_token_id"] = list(config.eos_token_id)
    rope: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(config.rope_parameters).items()
        if value is not None
    }
    if rope["rope_type"] == "yarn" and "factor" not in rope:
        # transformers 5 refuses a YaRN without a factor; ours is computed from these numbers.
        original = rope["original_max_position_embeddings"]
        rope["factor"] = config.max_position_embeddings / original
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    model_type = "llama"
    if config.qk_norm:
        model_type = "qwen3"
    elif config.sliding_window is not None:
        model_type = "mistral"
        hf_config["sliding_window"] = config.sliding_window
    for name in _NO_BIASES[model_type]:
        del hf_config[name]
    return hf_config | {
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "dtype": config.param_dtype,
        "model_type": model_type,
        "rope_parameters": rope,
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "rope_theta": config.rope_parameters.rope_theta,
        "torch_dtype": config.param_dtype,
        "use_cache": True,
    }
