"""Measures how well a model predicts text: nats per token, accuracy and bits per byte."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Int32

from models.sharding import batch_sharding
from train import data
from train.distributed import to_devices


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
        mine, others = dataclasses.astuple(self), dataclasses.astuple(other)
        return Sums(*(a + b for a, b in zip(mine, others, strict=True)))

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


def measure_preferences(
    eval_step: Callable[..., Any],
    params: nnx.State,
    batches: Iterable[data.Batch],
    mesh: Mesh,
) -> dict[str, float]:
    """Means over the pairs of batches `[B, S]`: "loss", "reward_margin" and "reward_accuracy"."""
    sharding = batch_sharding(mesh)
    sums = jax.device_get([eval_step(params, to_devices(batch, sharding)) for batch in batches])
    total = {name: sum(float(values[name]) for values in sums) for name in sums[0]}
    number = total.pop("num_pairs")
    return {name.removesuffix("_sum"): value / number for name, value in total.items()}


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
