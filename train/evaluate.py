"""Measures how well a model predicts text or preferences that are held out."""

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int32

from models.sharding import batch_sharding
from train import data
from train.config import TrainConfig
from train.distributed import to_devices
from train.objectives import metrics_of


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over the predicted tokens of a text; the sums of two texts add up.

    Attributes:
      nll: Negative log-likelihood in nats.
      correct: Number of tokens whose label has the largest logit.
      tokens: Number of predicted tokens.
      bytes: Number of bytes of text that the tokens stand for.
    """

    nll: float = 0.0
    correct: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nll / self.tokens

    @property
    def accuracy(self) -> float:
        """Share of the tokens that the model thought likeliest."""
        return self.correct / self.tokens

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of text, which can be compared between tokenizers."""
        return self.nll / self.bytes / math.log(2)


def held_out_metrics(
    config: TrainConfig,
    mesh: Mesh,
    eval_step: Callable[..., Any],
    params: nnx.State,
    held_out: data.Dataset | data.PairDataset,
) -> dict[str, float]:
    """The held-out metrics of a run, by their names in the rows.

    For text they are nats per token, accuracy, and bits per byte. For preferences they are the
    mean loss, the mean margin of rewards, and the share of pairs with a margin above 0.

    Raises:
      DataError: No token of the batches is predicted.
    """
    batches = held_out.eval_batches(config.data.batch_size, config.eval_batches)
    if isinstance(held_out, data.PairDataset):
        sharding = batch_sharding(mesh)
        sums = jax.device_get([eval_step(params, to_devices(batch, sharding)) for batch in batches])
        total = lambda name: sum(float(values[name]) for values in sums)
        names = {"loss": "loss_sum", **metrics_of(config)}
        return {f"val_{name}": total(names[name]) / total("num_pairs") for name in names}
    found = measure(eval_step, params, batches, held_out.token_bytes, mesh)
    if not found.bytes:
        raise data.DataError(
            f"the {config.eval_batches} held-out batches have no text to predict, but prompts or "
            "ends of documents alone; use a longer --data.sequence-length or more --eval-batches"
        )
    return {
        "val_loss": found.loss,
        "val_accuracy": found.accuracy,
        "val_bpb": found.bits_per_byte,
    }


def measure(
    eval_step: Callable[..., Any],
    params: nnx.State,
    batches: Iterable[data.Batch],
    token_bytes: Int32[np.ndarray, " V"],
    mesh: Mesh,
) -> Sums:
    """The sums over batches `[B, S]`; the host waits for the device once, at the end."""
    sums, num_bytes = [], 0
    for batch in batches:
        num_bytes += data.predicted_bytes(batch, token_bytes)
        sums.append(eval_step(params, to_devices(batch, batch_sharding(mesh))))
    if not num_bytes:
        return Sums()  # no text is predicted
    sums = jax.device_get(sums)
    return Sums(
        # As Python's numbers: int32 overflows, and a sum in float32 loses small terms.
        nll=sum(float(values["nll_sum"]) for values in sums),
        correct=sum(float(values["correct_sum"]) for values in sums),
        tokens=sum(int(values["num_tokens"]) for values in sums),
        bytes=num_bytes,
    )
