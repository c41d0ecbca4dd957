"""Writes the checkpoints and expected outputs in this folder with Hugging Face transformers.

Everything is random from fixed seeds and tiny. Norm weights, biases and the padding row are random
too, and the projections are large enough for attention to be far from uniform: otherwise a wrong
rope or a forgotten weight would hardly show. README.md has the command.
"""
# pyright: reportMissingImports=false

import json
import math
import os
import platform
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

FOLDER = Path(__file__).parent

SMALL: dict[str, Any] = dict(
    vocab_size=48,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
)
GQA = SMALL | dict(
    hidden_size=32,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
)

# Rope settings for the weights of `gqa` (heads of 8: wavelengths 6.3, 35, 199 and 1117 tokens) and
# 24 tokens. Each differs from the default type's logits by far more than rounding (checked below).
ROPE_CASES = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0, max_position_embeddings=16),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0),
    "yarn_mscale": dict(
        rope_type="yarn",
        factor=4.0,
        original_max_position_embeddings=16,
        beta_fast=2.0,
        beta_slow=0.25,
        mscale=0.7,
        mscale_all_dim=0.3,
        truncate=False,
    ),
    "yarn_attention_factor": dict(
        rope_type="yarn", factor=2.0, original_max_position_embeddings=32, attention_factor=1.25
    ),
    "longrope": dict(
        rope_type="longrope",
        original_max_position_embeddings=16,
        short_factor=[1.0, 1.25, 1.5, 2.0],
        long_factor=[1.0, 2.5, 4.0, 6.0],
    ),
    "longrope_factor": dict(
        rope_type="longrope",
        original_max_position_embeddings=16,
        factor=8.0,
        short_factor=[1.0, 1.0, 1.5, 1.5],
        long_factor=[1.5, 2.0, 3.0, 5.0],
    ),
    # Wavelengths under 16 are kept, over 64 divided: 1, 1 and 2 of the four channel pairs.
    "llama3": dict(
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
        max_position_embeddings=128,
    ),
}
ROPE_TOKENS, SHORT_TOKENS = 24, 12


def random_model(config: Any, seed: int) -> Any:
    """A float32 model with every parameter random."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.5 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.0 / math.sqrt(parameter.shape[1]) * noise)
    return model


def random_tokens(batch: int, length: int, vocab_size: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocab_size, (batch, length), generator=generator)


def load(folder: Path) -> Any:
    """The checkpoint as a user loads it, in float32 with the plain attention."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


def logits_of(model: Any, tokens: torch.Tensor, **kwargs) -> np.ndarray:
    with torch.no_grad():
        return model(tokens, use_cache=False, **kwargs).logits.numpy()


def write_case(
    name: str,
    config: dict,
    seed: int,
    *,
    config_class=LlamaConfig,
    save=None,
    dtype=None,
    pad=0,
    gradients=True,
) -> None:
    """Checkpoint `name` with its tokens, labels, hidden states, logits, loss and gradients."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    model = random_model(config_class(**config), seed)
    if dtype is not None:
        model = model.to(dtype)
    model.save_pretrained(folder, **(save or {}))
    (folder / "generation_config.json").unlink()
    for file in folder.iterdir():
        file.chmod(0o644)

    model = load(folder)
    tokens = random_tokens(2, 24, config["vocab_size"], seed + 1)
    labels = tokens.clone()
    if pad:
        # One in the middle too: others attend to it, but its embedding gets no gradient.
        tokens[1, 4] = config["pad_token_id"]
        tokens[0, -pad:] = config["pad_token_id"]
        labels[0, -pad:] = -100
    output = model(tokens, labels=labels, output_hidden_states=True, use_cache=False)
    output.loss.backward()
    expected = {
        "tokens": tokens.numpy().astype(np.int32),
        "labels": labels.numpy().astype(np.int32),
        "logits": output.logits.detach().numpy(),
        "loss": output.loss.detach().numpy(),
        "hidden": output.hidden_states[-1].detach().numpy(),
    }
    for parameter_name, parameter in model.named_parameters() if gradients else ():
        expected[f"gradient/{parameter_name}"] = parameter.grad.numpy()
    np.savez_compressed(folder / "expected.npz", **expected)


def write_packed() -> None:
    """`gqa` on rows of several documents, which Hugging Face finds by restarting positions."""
    model = load(FOLDER / "gqa")
    tokens = random_tokens(2, 24, GQA["vocab_size"], 40)
    lengths = [[9, 4, 11], [1, 23]]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    logits = logits_of(model, tokens, position_ids=positions)
    for row, row_lengths in enumerate(lengths):
        start = 0
        for length in row_lengths:
            alone = logits_of(model, tokens[row : row + 1, start : start + length])
            np.testing.assert_allclose(logits[row, start : start + length], alone[0], atol=1e-5)
            start += length
    np.savez_compressed(
        FOLDER / "packed.npz",
        tokens=tokens.numpy().astype(np.int32),
        positions=positions.numpy().astype(np.int32),
        segment_ids=np.array(
            [[i + 1 for i, n in enumerate(row) for _ in range(n)] for row in lengths], np.int32
        ),
        logits=logits,
    )


def variants() -> dict[str, dict]:
    """config.json contents for the weights of `gqa`: rope types, activations, older forms."""
    base = json.loads((FOLDER / "gqa" / "config.json").read_text())
    configs = {}
    for name, settings in ROPE_CASES.items():
        settings = dict(settings)
        longest = settings.pop("max_position_embeddings", base["max_position_embeddings"])
        rope = {"rope_theta": 1000.0, **settings}
        configs[name] = base | {"max_position_embeddings": longest, "rope_parameters": rope}

    for activation in ("gelu", "gelu_pytorch_tanh", "relu"):
        configs[activation] = base | {"hidden_act": activation}

    no_biases = {k: v for k, v in base.items() if k not in ("attention_bias", "mlp_bias")}
    configs["mistral"] = no_biases | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 5,
    }

    # As transformers 4.43 to 4.57 wrote it: Llama 3.1 looks like this on the Hub.
    old = {key: value for key, value in base.items() if key not in ("rope_parameters", "dtype")}
    configs["old_llama3"] = old | {
        "_name_or_path": "somewhere/else",
        "eos_token_id": [2, 5, 7],
        "max_position_embeddings": 128,
        "rope_theta": 1000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_type": "llama3",
        },
        "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0",
    }
    # As transformers 4.31 wrote it: the older `type`, and no `head_dim`, `mlp_bias` or biases.
    newer_keys = ("head_dim", "mlp_bias", "attention_bias", "attention_dropout")
    configs["old_linear"] = {key: value for key, value in old.items() if key not in newer_keys} | {
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "rope_theta": 1000.0,
        "torch_dtype": "float16",
        "transformers_version": "4.31.0",
    }
    # LLaMA 1 had no `rope_theta` at all, and Llama 2 a `rope_scaling` of null.
    configs["old_default"] = configs["old_linear"] | {"rope_scaling": None}
    del configs["old_default"]["rope_theta"]
    return configs


def write_variants() -> None:
    """Logits of the weights of `gqa` under each config of `variants`."""
    tokens = random_tokens(1, ROPE_TOKENS, GQA["vocab_size"], 50)
    default = logits_of(load(FOLDER / "gqa"), tokens)
    expected = {"tokens": tokens.numpy().astype(np.int32)}
    configs = variants()
    for name, config in configs.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            shutil.copy(FOLDER / "gqa" / "model.safetensors", folder)
            (folder / "config.json").write_text(json.dumps(config))
            # A "dynamic" model remembers long sequences: load it anew for the short one.
            expected[f"{name}/logits"] = logits_of(load(folder), tokens)
            if name in ("dynamic", "longrope", "longrope_factor"):
                short = logits_of(load(folder), tokens[:, :SHORT_TOKENS])
                expected[f"{name}/short_logits"] = short
                long = expected[f"{name}/logits"][:, :SHORT_TOKENS]
                assert np.abs(short - long).max() > 0.02, name
        effect = np.abs(expected[f"{name}/logits"] - default).max()
        if name in ("old_llama3", "old_linear"):
            same = expected.pop(f"{name}/logits")
            np.testing.assert_array_equal(same, expected[f"{name[4:]}/logits"])
            continue
        print(f"{name}: logits differ from those of `gqa` by {effect:.3f}")
        assert effect > 0.2, name
    np.savez_compressed(FOLDER / "variants.npz", **expected)
    (FOLDER / "variants.json").write_text(json.dumps(configs, indent=1) + "\n")


def write_rope_tables() -> None:
    """Inverse frequencies, cos and sin of published models' settings at head size 64."""
    channels = np.arange(32)
    tables = {
        "default": dict(rope_type="default", rope_theta=10000.0),
        "linear": dict(rope_type="linear", rope_theta=10000.0, factor=2.5),
        "dynamic": dict(rope_type="dynamic", rope_theta=10000.0, factor=1.1),
        "yarn": dict(
            rope_type="yarn",
            rope_theta=10000.0,
            factor=16.0,
            original_max_position_embeddings=4096,
        ),
        # The ramp ends past the last of the 32 channel pairs.
        "yarn_low_base": dict(
            rope_type="yarn",
            rope_theta=100.0,
            factor=4.0,
            original_max_position_embeddings=4096,
        ),
        "longrope": dict(
            rope_type="longrope",
            rope_theta=10000.0,
            original_max_position_embeddings=4096,
            short_factor=(1 + channels / 100).tolist(),
            long_factor=(1 + channels / 2).tolist(),
        ),
        "llama3": dict(
            rope_type="llama3",
            rope_theta=500000.0,
            factor=32.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
    }
    position_sets = {
        "short": torch.tensor([[0, 1, 7, 100, 1000, 4095]]),
        "long": torch.tensor([[0, 1, 100, 16383, 16384, 131071]]),
    }
    expected = {}
    for name, rope in tables.items():
        config = LlamaConfig(
            hidden_size=512,
            num_attention_heads=8,
            max_position_embeddings=16384,
            rope_parameters=rope,
        )
        for length, positions in position_sets.items():
            rotary = LlamaRotaryEmbedding(config)
            cos, sin = rotary(torch.zeros(1), positions)
            half = cos.shape[-1] // 2
            expected |= {
                f"{name}/{length}/positions": positions.numpy().astype(np.int32),
                f"{name}/{length}/inv_freq": rotary.inv_freq.numpy().copy(),
                f"{name}/{length}/cos": cos[..., :half].numpy(),
                f"{name}/{length}/sin": sin[..., :half].numpy(),
            }
    np.savez_compressed(FOLDER / "rope_tables.npz", **expected)
    (FOLDER / "rope_tables.json").write_text(json.dumps(tables) + "\n")


def main() -> None:
    """Writes everything."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the initialization that `random_model` overwrites
    write_case("gqa", GQA, 10)
    write_case("mha_tied", SMALL | dict(num_key_value_heads=2, tie_word_embeddings=True), 12)
    heads = dict(head_dim=12, num_attention_heads=4, num_key_value_heads=2)
    write_case("head_dim", SMALL | heads, 14)
    write_case("biases", SMALL | dict(attention_bias=True, mlp_bias=True), 16)
    padded = SMALL | dict(pad_token_id=0)
    write_case("padded_sharded", padded, 18, pad=5, save=dict(max_shard_size="6KB"))
    write_case("bfloat16", SMALL, 20, dtype=torch.bfloat16, gradients=False)
    qwen3 = SMALL | heads | dict(tie_word_embeddings=True)
    write_case("qwen3", qwen3, 22, config_class=Qwen3Config)
    write_packed()
    write_variants()
    write_rope_tables()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "numpy": np.__version__,
        "machine": platform.machine(),
    }
    (FOLDER / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
