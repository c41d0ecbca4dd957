"""Preferences as rows: a chosen and a rejected sequence, one after the other.

A row is one sequence, filled up with tokens that have no label. So the sums of a sequence are sums
of a row, and the causal attention needs no mask.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, Int64, Integer, Shaped

from train.data.packing import IGNORED, permuted, walk


class Stream(NamedTuple):
    """Documents one after the other.

    Attributes:
      tokens: Tokens of all documents.
      offsets: Start of each document in the tokens.
      prompts: Number of tokens at each document's start that are a prompt; None for 0 everywhere.
    """

    tokens: Integer[np.ndarray, " T"]
    offsets: Int64[np.ndarray, " N"]
    prompts: Int32[np.ndarray, " N"] | None


@dataclasses.dataclass(frozen=True, eq=False)
class PairDataset:
    """Rows of S tokens, where pair i is the rows 2·i (chosen) and 2·i + 1 (rejected).

    A pair is left out if one of its sequences has more than S + 1 tokens.

    Attributes:
      streams: Documents, in which a rejected sequence follows each chosen one.
      sequence_length: Number of predicted tokens in a row, S.
      reference: Sum of the reference's log-probabilities of each pair's completions. None leaves
        them out of the batches.
    """

    streams: Sequence[Stream]
    sequence_length: int
    reference: Float32[np.ndarray, "pairs 2"] | None = None
    _documents: Int64[np.ndarray, "pairs 2"] = dataclasses.field(init=False, repr=False)
    num_left_out: int = dataclasses.field(init=False)

    def __post_init__(self):
        kept, total = [np.zeros((0, 2), np.int64)], 0
        for index, stream in enumerate(self.streams):
            sizes = np.diff(stream.offsets, append=len(stream.tokens)).reshape(-1, 2)
            (fitting,) = np.nonzero(sizes.max(axis=1, initial=0) <= self.sequence_length + 1)
            kept.append(np.stack([np.full_like(fitting, index), 2 * fitting], axis=1))
            total += len(sizes)
        # The stream of each pair, and the number of its first document there.
        object.__setattr__(self, "_documents", np.concatenate(kept))
        object.__setattr__(self, "num_left_out", total - self.num_pairs)

    @property
    def num_pairs(self) -> int:
        """The number of pairs in an epoch."""
        return len(self._documents)

    def batch(
        self, step: int, *, batch_size: int, seed: int, rows: Int[np.ndarray, " R"] | None = None
    ) -> dict[str, Shaped[np.ndarray, "R _"]]:
        """The batch of a step, as in `PackedDataset.batch`; `expand` describes its arrays.

        `batch_size` is even. A batch has whole pairs, unless `rows` are not pairs.
        """
        pairs, sides = np.divmod(walk(step, batch_size, seed, rows), 2)
        return self.expand(2 * self._shuffled(pairs, seed) + sides)

    def pairs_of_steps(self, steps: int, *, batch_size: int, seed: int) -> Int64[np.ndarray, " P"]:
        """The pairs in the batches of the first `steps` steps, in order."""
        number = min(steps * batch_size // 2, self.num_pairs)  # an epoch has all pairs
        return np.sort(self._shuffled(np.arange(number), seed))

    def _shuffled(self, numbers: Int64[np.ndarray, " R"], seed: int) -> Int64[np.ndarray, " R"]:
        """The pairs at `numbers` of the endless walk over epochs."""
        epochs, positions = np.divmod(numbers, self.num_pairs)
        return permuted(positions, self.num_pairs, seed=seed, epochs=epochs)

    def eval_batches(
        self, batch_size: int, limit: int | None = None
    ) -> Iterator[dict[str, Shaped[np.ndarray, "R _"]]]:
        """Batches of all pairs in order, or `limit` batches of pairs spread evenly.

        The last batch is filled up with rows without labels.
        """
        return self.batches_of(self.pairs_of_eval(batch_size, limit), batch_size)

    def pairs_of_eval(self, batch_size: int, limit: int | None) -> Int64[np.ndarray, " P"]:
        """The pairs in `eval_batches`."""
        number = self.num_pairs
        if limit is not None:
            number = min(limit * batch_size // 2, number)
        return np.arange(number) * self.num_pairs // max(number, 1)

    def batches_of(
        self, pairs: Int64[np.ndarray, " P"], batch_size: int
    ) -> Iterator[dict[str, Shaped[np.ndarray, "R _"]]]:
        """Batches of some pairs; the last is filled up with rows without labels."""
        rows = (2 * pairs[:, None] + np.arange(2)).reshape(-1)
        rows = np.append(rows, np.full(-len(rows) % batch_size, -1))
        for first in range(0, len(rows), batch_size):
            yield self.expand(rows[first : first + batch_size])

    def expand(self, rows: Int64[np.ndarray, " R"]) -> dict[str, Shaped[np.ndarray, "R _"]]:
        """The arrays of some rows; a row -1 has no labels.

        - `tokens`, int32 `[R, S]`: the sequence without its last token, then zeros.
        - `labels`, int32 `[R, S]`: the next token, or -100 if it is in the prompt or there is none.
        - `reference`, float32 `[R, 1]`, if there is one: sum of the reference's log-probabilities
          of the labels.
        """
        tokens = np.zeros((len(rows), self.sequence_length), np.int32)
        labels = np.full_like(tokens, IGNORED)
        reference = np.zeros((len(rows), 1), np.float32)
        for place, row in enumerate(rows.tolist()):
            if row < 0:
                continue
            index, first = self._documents[row // 2]
            stream, document = self.streams[index], int(first) + row % 2
            end = [*stream.offsets[document + 1 : document + 2], len(stream.tokens)][0]
            sequence = stream.tokens[stream.offsets[document] : end]
            prompt = 0 if stream.prompts is None else int(stream.prompts[document])
            prompt = max(prompt, 1)  # nothing predicts the first token
            tokens[place, : len(sequence) - 1] = sequence[:-1]
            labels[place, prompt - 1 : len(sequence) - 1] = sequence[prompt:]
            if self.reference is not None:
                reference[place] = self.reference[row // 2, row % 2]
        batch = {"tokens": tokens, "labels": labels}
        return batch if self.reference is None else batch | {"reference": reference}
