"""The losses of the objectives, as sums over a batch, and their metrics.

Each loss is `scale` times a sum in nats. `scale` is a factor inside the loss: outside, it would
cost a product with every gradient. Only the loss has gradients. `linear_cross_entropy` describes
`counted_fraction`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Shaped

from models.llama import Llama
from models.sharding import sum_over_devices, tensor_axis
from pallas_kernels import (
    linear_cross_entropy,
    linear_distillation_loss,
    linear_log_probs,
    linear_token_loss,
)
from pallas_kernels.log_probs.objectives import dpo_loss
from train.config import TrainConfig
from train.data import IGNORED
from train.objective_config import DistillConfig

type Batch = dict[str, Shaped[Array, "..."]]
type Scale = Float[Array, ""] | float
type Sums = dict[str, Float[Array, ""]]

_OF_LABELS = {"nll": "nll_sum", "accuracy": "correct_sum"}
_OF_PAIRS = {"reward_margin": "reward_margin_sum", "reward_accuracy": "reward_accuracy_sum"}


def metrics_of(config: TrainConfig) -> dict[str, str]:
    """A step's metrics besides its loss: for each, the name of the sum that it is the mean of."""
    match config.objective:
        case "dpo":
            return _OF_PAIRS
        case "distill":
            labels = _OF_LABELS if config.distill.label_weight else {}
            return {"divergence": "divergence_sum"} | labels
        case _:
            return _OF_LABELS


def model_and_hidden(
    graphdef: nnx.GraphDef, params: nnx.State, batch: Batch
) -> tuple[Llama, Float[Array, "B S D"]]:
    """The model, and its hidden states of a batch."""
    model = nnx.merge(graphdef, params)
    positions, segment_ids = batch.get("positions"), batch.get("segment_ids")
    return model, model(batch["tokens"], positions=positions, segment_ids=segment_ids)


def loss_and_sums(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    batch: Batch,
    scale: Scale = 1.0,
    *,
    z_loss: float = 0.0,
    counted_fraction: float = 1.0,
) -> tuple[Float[Array, ""], Sums]:
    """The loss of the tokens of a batch `[B, S]`: `linear_cross_entropy` with `z_loss`.

    Returns:
      The loss, and two sums: "nll_sum", the negative log-likelihood without z-loss, and
      "correct_sum", the number of tokens whose label has the largest logit.
    """

    def of_batch(params, batch, scale):
        model, hidden = model_and_hidden(graphdef, params, batch)
        labels = batch["labels"]
        return _cross_entropy(model, hidden, labels, scale, counted_fraction, z_loss=z_loss)

    return sum_over_devices(of_batch)(params, batch, scale)


def _cross_entropy(
    model: Llama,
    hidden: Float[Array, "B S D"],
    labels: Shaped[Array, "B S"],
    scale: Scale,
    counted_fraction: float,
    *,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], Sums]:
    loss, metrics = linear_cross_entropy(
        hidden,
        model.output_weight,
        labels,
        token_weights=jnp.full(labels.shape, scale, jnp.float32),
        ignore_index=IGNORED,
        reduction="sum",
        z_loss=z_loss,
        counted_fraction=counted_fraction,
        vocab_axis=tensor_axis(),
        return_metrics=True,
        implementation=model.config.implementation,
    )
    # In float32, because XLA adds it up with the other sums in one exchange.
    count = jnp.sum(labels != IGNORED, dtype=jnp.float32)
    return loss, {"nll_sum": metrics.nll * count, "correct_sum": metrics.accuracy * count}


def num_pairs(labels: Shaped[Array, "*A B S"]) -> Shaped[Array, ""]:
    """The number of pairs of rows that have a label."""
    has_label = jnp.any(labels != IGNORED, axis=-1)
    return jnp.sum(jnp.any(has_label.reshape(-1, 2), axis=-1))


def preference_loss_and_sums(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    batch: Batch,
    scale: Scale = 1.0,
    *,
    beta: float,
    counted_fraction: float = 1.0,
) -> tuple[Float[Array, ""], Sums]:
    """The loss of the pairs of a batch (`dpo_loss`), and sums for metrics.

    Rows 2·i and 2·i + 1 are the chosen and the rejected sequence of a pair. `batch["reference"]`
    has the sum of the reference's log-probabilities of each row.

    Returns:
      The loss, and two sums over pairs. "reward_margin_sum" is the sum of the margins: the reward
      of the chosen sequence less that of the rejected one. "reward_accuracy_sum" is the number of
      pairs with a margin above 0. A reward is `beta` times the sum of
      `log_probs - reference_log_probs`.
    """
    in_pairs = lambda a: a.reshape(-1, 2, a.shape[-1])

    def token_fn(log_probs, entropy, data):
        mask = data["mask"]
        # The rewards need only the sum of the reference's log-probabilities, so each token gets an
        # equal part of it.
        lengths = jnp.maximum(jnp.sum(mask, axis=-1, keepdims=True, dtype=jnp.float32), 1)
        reference = jnp.broadcast_to(data["reference"] / lengths, log_probs.shape)
        pairs = map(in_pairs, (log_probs, reference, mask))
        losses = jax.vmap(functools.partial(dpo_loss, beta=beta))(*pairs)
        is_pair = jnp.any(in_pairs(mask), axis=(1, 2))
        rewards = beta * jnp.sum(jnp.where(mask, log_probs - reference, 0.0), axis=-1)
        margins = jnp.where(is_pair, rewards[::2] - rewards[1::2], 0.0)
        return data["scale"] * jnp.sum(losses, where=is_pair), {
            "reward_margin_sum": jnp.sum(margins),
            "reward_accuracy_sum": jnp.sum(margins > 0, dtype=jnp.float32),
        }

    def of_batch(params, batch, scale):
        model, hidden = model_and_hidden(graphdef, params, batch)
        mask = batch["labels"] != IGNORED
        return linear_token_loss(
            hidden,
            model.output_weight,
            batch["labels"],
            token_fn,
            {
                "mask": mask,
                "reference": batch["reference"],
                "scale": jnp.asarray(scale, jnp.float32),
            },
            has_aux=True,
            ignore_index=IGNORED,
            counted_fraction=counted_fraction,
            vocab_axis=tensor_axis(),
            implementation=model.config.implementation,
        )

    return sum_over_devices(of_batch)(params, batch, scale)


def sequence_log_probs(
    graphdef: nnx.GraphDef, params: nnx.State, batch: Batch, *, counted_fraction: float = 1.0
) -> Float[Array, " B"]:
    """The sum of the log-probabilities of each row's labels."""
    num_rows = len(batch["labels"])

    def of_batch(params, batch):
        model, hidden = model_and_hidden(graphdef, params, batch)
        log_probs = linear_log_probs(
            hidden,
            model.output_weight,
            batch["labels"],
            ignore_index=IGNORED,
            counted_fraction=counted_fraction,
            vocab_axis=tensor_axis(),
            implementation=model.config.implementation,
        )
        # A device has a part of the rows, and `sum_over_devices` adds up what the devices return.
        return jnp.zeros(num_rows, jnp.float32).at[batch["row"]].set(jnp.sum(log_probs, axis=-1))

    rows = jnp.arange(num_rows)
    return sum_over_devices(of_batch)(params, batch | {"row": rows})


def distillation_loss_and_sums(
    graphdef: nnx.GraphDef,
    teacher_graphdef: nnx.GraphDef,
    params: nnx.State,
    batch: Batch,
    scale: Scale,
    teacher: nnx.State,
    *,
    config: DistillConfig,
    counted_fraction: float = 1.0,
) -> tuple[Float[Array, ""], Sums]:
    """The loss of `DistillConfig` at the tokens of a batch that have a label.

    Returns:
      The loss, and "divergence_sum", the sum of the divergences. With `label_weight` there are
      also the sums of `loss_and_sums`.
    """

    def of_batch(both, batch, scale):
        params, teacher = both
        model, hidden = model_and_hidden(graphdef, params, batch)
        frozen, teacher_hidden = model_and_hidden(teacher_graphdef, teacher, batch)
        labels = batch["labels"]
        factor = scale * (1 - config.label_weight) * config.temperature**2
        loss = linear_distillation_loss(
            hidden,
            model.output_weight,
            jax.lax.stop_gradient(teacher_hidden),
            frozen.output_weight,
            divergence="jensen_shannon" if config.divergence == "jsd" else config.divergence,
            temperature=config.temperature,
            token_weights=jnp.where(labels != IGNORED, factor, 0.0).astype(jnp.float32),
            reduction="sum",
            counted_fraction=counted_fraction,
            vocab_axis=tensor_axis(),
            implementation=model.config.implementation,
        )
        sums: dict[str, Any] = {"divergence_sum": loss / factor}
        if weight := config.label_weight:
            of_labels, sums_of_labels = _cross_entropy(
                model, hidden, labels, scale * weight, counted_fraction
            )
            loss += of_labels
            sums |= sums_of_labels
        return loss, jax.lax.stop_gradient(sums)

    return sum_over_devices(of_batch)((params, teacher), batch, scale)
