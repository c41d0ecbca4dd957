"""Times the same training step with the layers of NVIDIA's TransformerEngine for JAX.

    python -m benchmarks.training.train_step_te --preset llama3.2-1b --variants logits ours \
        ours:fp8=current

The set-up is that of `benchmarks.training.train_step`: float32 parameters and AdamW moments (by
optax), bfloat16 compute, clipped gradients, random tokens, the same options of XLA, wall time,
median over rounds. The layers are TransformerEngine's `TransformerLayer` in a Python loop. It has
RMSNorm, the gated MLP, a rotary embedding (that of Llama 2) and cuDNN's attention. No activation is
recomputed.

TransformerEngine has no loss for JAX. `logits` makes all logits, as its examples do, and leaves
their loss to optax. `ours` is `pallas_kernels.linear_cross_entropy`. `:fp8=current` or
`:fp8=delayed` may follow, to multiply in FP8 with one scale for each tensor. The scale comes from
the tensor itself, or from its maxima in the last 1024 steps.

The benchmark needs transformer-engine and transformer-engine-jax, which this project does not
require. Each variant runs in a process of its own.
"""

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from benchmarks.training import train_step
from benchmarks.training.variants import Measured, compare, timed
from models.config import LlamaConfig
from pallas_kernels import linear_cross_entropy
from train.config import TrainConfig
from train.data import SyntheticDataset
from train.step import memory_in_bytes
from train.xla_flags import compiler_options

_LOSSES = ("logits", "ours")
_RECIPES = {"current": "Float8CurrentScaling", "delayed": "DelayedScaling"}


def options_of(name: str) -> tuple[str, str | None]:
    """The loss of a variant, and its FP8 recipe: `ours:fp8=current` -> `("ours", "current")`.

    Raises:
      ValueError: The name of the variant has an unknown part.
    """
    loss, *parts = name.split(":")
    options = train_step.options_of(parts, ("fp8=",))
    if loss not in _LOSSES or options is None or not set(options.values()) <= _RECIPES.keys():
        raise ValueError(
            f"variant {name!r} must be one of {', '.join(_LOSSES)}, with :fp8=current or "
            ":fp8=delayed after it"
        )
    return loss, options.get("fp8")


def autocast(recipe: str | None) -> contextlib.AbstractContextManager[None]:
    """The context in which TransformerEngine multiplies with this recipe; None is bfloat16."""
    te = importlib.import_module("transformer_engine.jax")
    resource = importlib.import_module("transformer_engine.jax.sharding").MeshResource()
    if recipe is None:
        return te.autocast(enabled=False, mesh_resource=resource)
    recipes = importlib.import_module("transformer_engine.common.recipe")
    return te.autocast(
        enabled=True, recipe=getattr(recipes, _RECIPES[recipe])(), mesh_resource=resource
    )


def logits_loss(hidden: Any, weight: Any, labels: Any) -> Any:
    """The mean loss by float32 logits of all tokens."""
    logits = jnp.einsum("bsd,vd->bsv", hidden, weight, preferred_element_type=jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


class Model(nn.Module):
    """A Llama of TransformerEngine's layers.

    Attributes:
      config: Sizes of the model.
      loss: Name of the loss.
    """

    config: LlamaConfig
    loss: str

    @nn.compact
    def __call__(self, tokens: Any, labels: Any) -> Any:
        """The mean loss of a batch."""
        te = importlib.import_module("transformer_engine.jax.flax")
        config, init = self.config, nn.initializers.normal(0.02)
        table = config.vocab_size, config.hidden_size
        embedding = self.param("embedding", init, table, jnp.float32)
        output = embedding
        if not config.tie_word_embeddings:
            output = self.param("output", init, table, jnp.float32)
        x = embedding.astype(config.dtype)[tokens]
        for _ in range(config.num_hidden_layers):
            layer = te.TransformerLayer(
                hidden_size=config.hidden_size,
                mlp_hidden_size=config.intermediate_size,
                num_attention_heads=config.num_attention_heads,
                num_gqa_groups=config.num_key_value_heads,
                layernorm_type="rmsnorm",
                layernorm_epsilon=config.rms_norm_eps,
                hidden_dropout=0.0,
                attention_dropout=0.0,
                mha_kernel_init=init,
                mlp_kernel_init=init,
                mlp_activations=("silu", "linear"),
                self_attn_mask_type="causal",
                enable_relative_embedding=False,
                enable_rotary_pos_emb=True,
                rotary_pos_emb_windows=(1, int(config.rope_parameters.rope_theta)),
                rotary_pos_emb_group_method="alternate",
                scale_attn_logits=True,
                scaled_query_init=False,
            )
            x = layer(x)
        x = te.LayerNorm(epsilon=config.rms_norm_eps, layernorm_type="rmsnorm")(x)
        loss = linear_cross_entropy if self.loss == "ours" else logits_loss
        return loss(x, output.astype(config.dtype), labels)


def make_step(
    model: Model, optimizer: optax.GradientTransformation
) -> Callable[[Any, Any], tuple[Any, Any]]:
    """The training step, from `(parameters, scales of FP8, optimizer state)` to a new one.

    TransformerEngine returns new scales as the gradients of the old ones.
    """

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, scales, opt_state = state

        def loss_of(variables: Any) -> Any:
            return model.apply(variables, batch["tokens"], batch["labels"])

        loss, gradients = jax.value_and_grad(loss_of)({"params": params, **scales})
        updates, opt_state = optimizer.update(gradients.pop("params"), opt_state, params)
        return (optax.apply_updates(params, updates), gradients, opt_state), loss

    return step


def measure(config: TrainConfig, name: str, rounds: int, steps: int) -> Measured:
    """Trains a variant for a few steps on one batch."""
    loss_name, recipe = options_of(name)
    model = Model(config.model, loss_name)
    adamw = config.optimizer
    b1, b2 = adamw.decays
    optimizer = optax.chain(
        optax.clip_by_global_norm(adamw.clip_norm),
        optax.adamw(adamw.learning_rate, b1, b2, adamw.eps, weight_decay=adamw.weight_decay),
    )
    data = config.data
    rows = SyntheticDataset(config.model.vocab_size, data.sequence_length)
    batch = jax.device_put(rows.batch(0, batch_size=data.batch_size, seed=0))

    def init(key: Any) -> Any:
        variables = dict(model.init(key, batch["tokens"], batch["labels"]))
        params = variables.pop("params")
        return params, variables, optimizer.init(params)

    with autocast(recipe):
        state = jax.jit(init)(jax.random.key(0))
        step = jax.jit(
            make_step(model, optimizer),
            donate_argnums=0,
            compiler_options=compiler_options(jax.devices()[:1]),
        )
        compiled = step.lower(state, batch).compile()

    def run() -> Any:
        nonlocal state
        state, loss = compiled(state, batch)
        return loss

    times, loss = timed(run, lambda: jax.block_until_ready(state), rounds, steps)
    return Measured(name, times, memory_in_bytes(compiled), float(loss))


def main() -> None:
    """Parses the command line, measures, prints and writes the table."""
    compare(
        measure,
        options_of,
        description=__doc__,
        default=["logits", "ours"],
        module="benchmarks.training.train_step_te",
        setup="Parameters and AdamW moments float32, compute bfloat16. Memory is arguments plus "
        "temporaries of the compiled step.",
    )


if __name__ == "__main__":
    main()
