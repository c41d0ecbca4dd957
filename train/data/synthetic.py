"""Random tokens."""

import dataclasses

import numpy as np
from jaxtyping import Int

from train.data.packing import Batch


@dataclasses.dataclass(frozen=True)
class SyntheticDataset:
    """Uniformly random tokens, to measure speed at any vocabulary and sequence length.

    Attributes:
      vocab_size: Number of tokens to draw from, [0, vocab_size).
      sequence_length: Number of tokens in a row, S.
    """

    vocab_size: int
    sequence_length: int

    def __post_init__(self):
        if self.vocab_size < 1 or self.sequence_length < 1:
            raise ValueError(
                f"vocab_size={self.vocab_size} and sequence_length={self.sequence_length} must be "
                "at least 1"
            )

    def batch(
        self, step: int, *, batch_size: int, seed: int, rows: Int[np.ndarray, " R"] | None = None
    ) -> Batch:
        """The batch of a step, a pure function of (seed, step). Every label is a token.

        `rows` selects rows of the batch; None takes all.
        """
        shape = (batch_size, self.sequence_length + 1)
        generator = np.random.Generator(np.random.Philox(key=[seed, step]))
        stream = generator.integers(self.vocab_size, size=shape, dtype=np.int32)
        if rows is not None:
            stream = stream[rows]
        return {"tokens": stream[:, :-1].copy(), "labels": stream[:, 1:].copy()}
