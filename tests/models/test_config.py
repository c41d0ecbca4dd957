"""Every field of the configuration changes something, and wrong values are refused."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.config import LlamaConfig
from models.llama import Llama
from models.llama_hf import config_to_hf
from models.presets import PRESETS
from models.rope import OPTIONAL_FIELDS, REQUIRED_FIELDS, RopeParameters, rotary_cos_sin
from models.sampling import generate
from support.small_llama import (
    CONFIG,
    PAD,
    S,
    changed,
    differ,
    hidden_of,
    make_model,
    random_tokens,
)

pytestmark = pytest.mark.usefixtures("fast_compilation")


def structure(config):
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    return jax.tree.map(lambda a: (a.shape, a.dtype.name), nnx.to_pure_dict(nnx.state(model)))


@functools.partial(jax.jit, static_argnums=0)
def _initial_parameters(config, key):
    return nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(key))))


def initial_parameters(config, seed=0):
    return jax.device_get(_initial_parameters(config, jax.random.key(seed)))


def hidden_states(config):
    return hidden_of(config, random_tokens(config))


def program(config):
    graphdef, state = nnx.split(make_model(config))
    loss = lambda state: jnp.sum(nnx.merge(graphdef, state)(random_tokens(config)))
    return str(jax.make_jaxpr(jax.grad(loss))(state))


def generated(config):
    return generate(make_model(config), random_tokens(config, (4, 5)), max_new_tokens=12)


def norm_implementation(config):
    return make_model(config).norm.implementation


def recipe(config):
    return make_model(config).layers.mlp.recipe


def exported(config):
    return config_to_hf(config)


# Another value for every field, and the observer that must see the change.
PERTURBATIONS = {
    "vocab_size": (49, structure),
    "hidden_size": (36, structure),
    "intermediate_size": (81, structure),
    "num_hidden_layers": (3, structure),
    "num_attention_heads": (2, structure),
    "num_key_value_heads": (4, structure),
    "head_dim": (16, structure),
    "hidden_act": ("relu", hidden_states),
    "max_position_embeddings": (S - 1, hidden_states),
    "initializer_range": (0.03, initial_parameters),
    "rms_norm_eps": (1e-4, hidden_states),
    "tie_word_embeddings": (True, structure),
    "attention_bias": (True, structure),
    "mlp_bias": (True, structure),
    "qk_norm": (True, structure),
    "sliding_window": (S - 1, hidden_states),
    "attention_dropout": (0.1, hidden_states),
    # The model starts no text. A tokenizer does, from the exported configuration.
    "bos_token_id": (1, exported),
    "eos_token_id": (tuple(range(24)), generated),
    # A test below compares the gradients.
    "pad_token_id": (PAD, program),
    "rope_parameters": (RopeParameters(rope_theta=101.0), hidden_states),
    "dtype": ("bfloat16", hidden_states),
    "param_dtype": ("bfloat16", structure),
    "scan_layers": (False, program),
    "remat": ("full", program),
    "mlp_chunk_size": (3, program),
    # Off the GPU no kernel runs, so the test sees only the implementation that the norms get.
    "implementation": ("xla", norm_implementation),
    # The weights here are too small for FP8: what is seen is that the layers are told.
    "fp8": ("tensorwise", recipe),
    "attention_implementation": ("cudnn", hidden_states),
}


def observed(observe, config: LlamaConfig, **changes) -> Any:
    """The result of `observe`, or the error that the changed configuration raises."""
    try:
        return observe(changed(config, **changes))
    except (ValueError, NotImplementedError, RuntimeError) as error:
        return type(error).__name__


@functools.cache
def observed_before(observe) -> Any:
    """An observation of `CONFIG`, which several tests compare with. It must repeat itself."""
    before = observed(observe, CONFIG)
    assert not differ(before, observed(observe, CONFIG))
    return before


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LlamaConfig)])
def test_every_field_is_read(field):
    assert field in PERTURBATIONS, f"say in PERTURBATIONS what a change of {field} changes"
    value, observe = PERTURBATIONS[field]
    assert value != getattr(CONFIG, field)
    before = observed_before(observe)
    assert not isinstance(before, str) or observe is program
    assert differ(before, observed(observe, CONFIG, **{field: value}))


def test_the_context_length_reaches_the_rotary_embedding():
    dynamic = RopeParameters(rope_type="dynamic", rope_theta=100.0, factor=4.0)
    config = changed(rope_parameters=dynamic, max_position_embeddings=S // 2, num_hidden_layers=1)
    before = observed(hidden_states, config)
    assert np.all(np.isfinite(before))
    assert differ(before, observed(hidden_states, config, max_position_embeddings=S // 2 + 1))


ROPE: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {
        "original_max_position_embeddings": 128,
        "factor": 4.0,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 0.5,
        "truncate": False,
    },
    "longrope": {
        "original_max_position_embeddings": 128,
        "short_factor": (1.0, 1.5) * 8,
        "long_factor": (2.0, 3.0) * 8,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
}
ROPE_PERTURBATIONS = {
    "rope_theta": 11_000.0,
    "factor": 5.0,
    "low_freq_factor": 1.5,
    "high_freq_factor": 5.0,
    "original_max_position_embeddings": 150,
    "attention_factor": 1.7,
    "beta_fast": 20.0,
    "beta_slow": 3.0,
    "mscale": 0.8,
    "mscale_all_dim": 0.6,
    "truncate": True,
    "short_factor": (1.0, 1.6) * 8,
    "long_factor": (2.0, 3.1) * 8,
}


def rotary_tables(rope_type: str, **changes: Any) -> np.ndarray:
    """cos and sin of a short sequence and of one past the context length."""
    rope = RopeParameters(
        **{"rope_type": rope_type, "rope_theta": 10_000.0} | ROPE[rope_type] | changes
    )
    tables = [
        rotary_cos_sin(
            rope,
            jnp.arange(length, dtype=jnp.int32)[None],
            head_dim=32,
            max_position_embeddings=512,
        )
        for length in (100, 600)
    ]
    return np.concatenate(jax.tree.leaves(tables), axis=1)


@pytest.mark.parametrize("rope_type", REQUIRED_FIELDS)
def test_every_rotary_field_is_read_by_the_types_that_accept_it(rope_type):
    before = rotary_tables(rope_type)
    for field in ("rope_theta", *REQUIRED_FIELDS[rope_type], *OPTIONAL_FIELDS[rope_type]):
        after = rotary_tables(rope_type, **{field: ROPE_PERTURBATIONS[field]})
        assert differ(before, after), field
    for other in set(REQUIRED_FIELDS) - {rope_type}:
        assert differ(before, rotary_tables(other)), other


def test_every_rotary_field_belongs_to_a_type():
    read = {
        name for fields in (REQUIRED_FIELDS, OPTIONAL_FIELDS) for t in fields for name in fields[t]
    }
    fields = {field.name for field in dataclasses.fields(RopeParameters)}
    assert fields == read | {"rope_type", "rope_theta"}
    assert fields == {"rope_type", *ROPE_PERTURBATIONS}


@pytest.mark.parametrize(
    "changes, message",
    [
        (
            {"num_key_value_heads": 3},
            r"num_attention_heads=4 must be a multiple of .*num_key_value_heads=3",
        ),
        (
            {"hidden_size": 30, "head_dim": 0},
            r"hidden_size=30 is not a multiple of .*=4, and transformers does not load",
        ),
        ({"head_dim": 7}, r"head_dim=7 must be even"),
        *(
            ({"sliding_window": 4, name: True}, f"=4 makes a Mistral, .* no {name} .* {name}=False")
            for name in ("attention_bias", "mlp_bias", "qk_norm")
        ),
        ({"sliding_window": 0}, "sliding_window=0 must be a whole number from 1"),
        ({"qk_norm": True, "mlp_bias": True}, r"qk_norm=True makes a Qwen 3.* set mlp_bias=False"),
        (
            {"hidden_act": "gelu", "implementation": "require"},
            r"implementation='require': no kernel computes an MLP with hidden_act='gelu'",
        ),
        (
            {"mlp_chunk_size": 8, "mlp_bias": True},
            "mlp_chunk_size=8 is for .* set mlp_chunk_size=0",
        ),
        ({"fp8": "tensorwise", "mlp_bias": True}, "fp8='tensorwise' is for .* set fp8=None"),
        (
            {"hidden_act": "swish", "implementation": "require"},
            r"hidden_act='swish' must be one of \['gelu'",
        ),
        ({"remat": "everything"}, r"remat='everything': \['everything'\] unknown"),
    ],
)
def test_wrong_configurations_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        changed(**changes)


@pytest.mark.parametrize(
    "name, value, choices",
    [
        ("attention_implementation", "", "xla, cudnn, mosaic_gpu"),
        ("attention_implementation", "flash", "xla, cudnn, mosaic_gpu"),
        ("implementation", "triton", "reference, xla, mosaic_gpu, require"),
    ],
)
def test_an_unknown_choice_raises(unchecked_shapes, name, value, choices):
    with pytest.raises(ValueError, match=f"{name}='{value}' must be None or one of {choices}$"):
        changed(**{name: value})


def test_attention_dropout_raises():
    with pytest.raises(NotImplementedError, match=r"attention_dropout=0\.1.* set it to 0\.0"):
        changed(attention_dropout=0.1)


def test_a_missing_head_size_is_computed():
    assert CONFIG.head_dim == 8
    assert changed(head_dim=0, num_attention_heads=2).head_dim == 16


@pytest.mark.parametrize(
    "preset, num_parameters",
    [
        ("llama3.2-1b", 1_235_814_400),
        ("llama3.2-3b", 3_212_749_824),
        ("llama3.1-8b", 8_030_261_248),
        ("llama3.1-70b", 70_553_706_496),
        ("llama2-7b", 6_738_415_616),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-1.7b", 1_720_574_976),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_presets_have_the_published_number_of_parameters(preset, num_parameters):
    model = nnx.eval_shape(lambda: Llama(PRESETS[preset], rngs=nnx.Rngs(0)))
    assert sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model))) == num_parameters


def test_initial_parameters():
    config = changed(initializer_range=0.03, attention_bias=True, mlp_bias=True, hidden_size=64)
    params = initial_parameters(config)
    matrices = []
    for path, leaf in jax.tree.leaves_with_path(params):
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            assert np.all(leaf == 1), name
        elif "bias" in name:
            assert np.all(leaf == 0), name
        else:
            # The standard error of the deviation of the smallest matrix, 4096 numbers, is 1.1 %.
            np.testing.assert_allclose(np.std(leaf), 0.03, rtol=0.06, err_msg=name)
            assert np.abs(np.mean(leaf)) < 0.002, name
            matrices.extend(leaf if leaf.ndim == 3 else [leaf])
    assert len(matrices) == 2 + 7 * config.num_hidden_layers
    first_numbers = [float(matrix[0, 0]) for matrix in matrices]
    assert len(set(first_numbers)) == len(first_numbers), "two matrices start with one key"
    assert differ(params, initial_parameters(config, 1))
