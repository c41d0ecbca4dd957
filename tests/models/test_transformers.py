"""Loaded checkpoints compute the recorded outputs of transformers in tests/golden, and live ones.

The live tests need torch and transformers, and are skipped without them.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from models.llama import Llama
from models.llama_hf import load_pretrained, save_pretrained
from pallas_kernels import linear_cross_entropy

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("gqa", "mha_tied", "head_dim", "biases", "qwen3", "padded_sharded", "bfloat16")
VARIANTS = json.loads((GOLDEN / "variants.json").read_text())

pytestmark = pytest.mark.usefixtures("fast_compilation")

# float32 rounding, summed in another order: the errors measured are at most 5e-6 for logits of 19.
TOLERANCE: dict[str, Any] = {"atol": 1e-5, "rtol": 1e-6}


def expected_of(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / case / "expected.npz") as file:
        return dict(file)


def logits_of(model: Llama, tokens, **kwargs) -> jax.Array:
    return jax.jit(lambda tokens: model.logits(model(tokens, **kwargs)))(jnp.asarray(tokens))


def loss_and_gradients(
    model: Llama, tokens, labels, folder: Path
) -> tuple[jax.Array, dict[str, np.ndarray]]:
    """Mean cross-entropy of the next tokens, and its gradients by Hugging Face's names."""
    graphdef, params = nnx.split(model)

    @jax.value_and_grad
    def loss(params):
        model = nnx.merge(graphdef, params)
        hidden = model(jnp.asarray(tokens))[:, :-1]
        return linear_cross_entropy(hidden, model.output_weight, jnp.asarray(labels)[:, 1:])

    value, gradients = jax.jit(loss)(params)
    save_pretrained(nnx.merge(graphdef, gradients), folder)
    return value, load_file(folder / "model.safetensors")


def assert_gradients_close(
    gradients: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> None:
    assert sorted(gradients) == sorted(expected)
    for name, gradient in gradients.items():
        # The tolerance is a share of a tensor's largest gradient; at most 1.5e-6 was measured.
        atol = 1e-5 * np.abs(expected[name]).max()
        np.testing.assert_allclose(gradient, expected[name], atol=atol, rtol=0, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_golden_hidden_states_and_logits(case):
    expected = expected_of(case)
    model = load_pretrained(GOLDEN / case, dtype="float32")
    hidden = model(jnp.asarray(expected["tokens"]))
    chex.assert_trees_all_close(hidden, expected["hidden"], **TOLERANCE)
    chex.assert_trees_all_close(model.logits(hidden), expected["logits"], **TOLERANCE)


# `padded_sharded` has heads in groups and a padding token, `biases` all biases and one key head.
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case == "padded_sharded" else pytest.mark.full)
        for case in CASES[:-1]
    ],
)
def test_golden_loss_and_gradients(case, tmp_path):
    expected = expected_of(case)
    model = load_pretrained(GOLDEN / case, dtype="float32")
    loss, gradients = loss_and_gradients(model, expected["tokens"], expected["labels"], tmp_path)
    np.testing.assert_allclose(loss, expected["loss"], **TOLERANCE)
    prefix = "gradient/"
    assert_gradients_close(
        gradients, {n.removeprefix(prefix): g for n, g in expected.items() if n.startswith(prefix)}
    )


def test_golden_padding_row_is_used_but_not_trained(tmp_path):
    expected = expected_of("padded_sharded")
    gradient = expected["gradient/model.embed_tokens.weight"]
    assert (expected["tokens"] == 0).any() and not gradient[0].any() and gradient[3:].any()
    model = load_pretrained(GOLDEN / "padded_sharded")
    assert model.embed_tokens.embedding[0].any()


RUN_ALWAYS = ("dynamic", "yarn_mscale", "gelu", "mistral")


# test_rope.py compares the tables of each rope type. The logits show that the model uses them.
@pytest.mark.parametrize(
    "variant",
    [pytest.param(name, marks=() if name in RUN_ALWAYS else pytest.mark.full) for name in VARIANTS],
)
def test_golden_variants_of_the_configuration(variant, tmp_path):
    folder = tmp_path / variant
    folder.mkdir()
    shutil.copy(GOLDEN / "gqa" / "model.safetensors", folder)
    (folder / "config.json").write_text(json.dumps(VARIANTS[variant]))
    model = load_pretrained(folder, dtype="float32")
    with np.load(GOLDEN / "variants.npz") as file:
        # Older forms of two configurations share the record of the newer forms.
        name = variant if f"{variant}/logits" in file else variant.removeprefix("old_")
        tokens, logits = file["tokens"], file[f"{name}/logits"]
        short_logits = file.get(f"{name}/short_logits")
    chex.assert_trees_all_close(logits_of(model, tokens), logits, **TOLERANCE)
    if short_logits is not None:
        short = logits_of(model, tokens[:, : short_logits.shape[1]])
        chex.assert_trees_all_close(short, short_logits, **TOLERANCE)


def test_golden_packed_documents():
    model = load_pretrained(GOLDEN / "gqa", dtype="float32")
    with np.load(GOLDEN / "packed.npz") as file:
        arrays = {name: jnp.asarray(file[name]) for name in ("positions", "segment_ids")}
        logits = logits_of(model, file["tokens"], **arrays)
        chex.assert_trees_all_close(logits, file["logits"], **TOLERANCE)


# transformers itself

MINIMAL = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
LIVE = [
    {"num_key_value_heads": 1},
    {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 12},
    {"model_type": "mistral", "num_key_value_heads": 1, "sliding_window": 5},
    {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 12},
    {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
]


# The strict warnings of this repository are off, because transformers and torch warn themselves.
@pytest.mark.filterwarnings("default")
# The golden files have the numbers of the others.
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=() if name == "qwen3" else pytest.mark.full)
        for name, settings in zip(
            ("gqa", "qwen3", "mistral", "tied_biases", "llama3"), LIVE, strict=True
        )
    ],
)
def test_live_transformers(settings, tmp_path):
    torch = pytest.importorskip("torch", reason="the live comparison needs torch")
    transformers = pytest.importorskip(
        "transformers", reason="the live comparison needs transformers"
    )

    def load(folder):
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )

    settings = {"model_type": "llama", "max_position_embeddings": 128} | MINIMAL | settings
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**settings)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    theirs.save_pretrained(tmp_path / "theirs")
    theirs = load(tmp_path / "theirs")

    tokens = torch.randint(3, 48, (2, 24), generator=generator)
    output = theirs(tokens, labels=tokens, use_cache=False)
    output.loss.backward()
    ours = load_pretrained(tmp_path / "theirs", dtype="float32")
    our_tokens = tokens.numpy().astype(np.int32)
    logits = logits_of(ours, our_tokens)
    np.testing.assert_allclose(logits, output.logits.detach().numpy(), **TOLERANCE)
    loss, gradients = loss_and_gradients(ours, our_tokens, our_tokens, tmp_path / "gradients")
    np.testing.assert_allclose(loss, output.loss.detach().numpy(), **TOLERANCE)
    assert_gradients_close(
        gradients, {name: parameter.grad.numpy() for name, parameter in theirs.named_parameters()}
    )

    for max_shard_size in (5 * 1024**3, 4000):
        save_pretrained(ours, tmp_path / "ours", max_shard_size=max_shard_size)
        reloaded = load(tmp_path / "ours")
        state, reloaded_state = theirs.state_dict(), reloaded.state_dict()
        assert set(state) == set(reloaded_state)
        for name, tensor in state.items():
            assert torch.equal(tensor, reloaded_state[name]), name
        with torch.no_grad():
            assert torch.equal(reloaded(tokens, use_cache=False).logits, output.logits)
