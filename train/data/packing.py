"""Documents packed into rows without loss, addressed by step number.

The documents form one stream, which is cut into rows of S+1 tokens every S tokens. So an epoch
predicts each token once, except the first token of each document, and drops only the last partial
row. A row has pieces of several documents: `segment_ids` tells attention which piece a token is in,
and `positions` restart in every piece.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, Integer, UInt64

from train.data.errors import DataError
from train.data.tokenizer import BYTES
from train.formats import number_of

IGNORED = -100  # the label of a position that is not predicted

type Batch = dict[str, Int32[np.ndarray, "B S"]]

_OFFSETS_AT_ONCE = 1 << 20  # the table of offsets may be larger than the memory


@dataclasses.dataclass(frozen=True, eq=False)
class PackedDataset:
    """Rows of S+1 tokens, every S tokens, over a stream of concatenated documents.

    The arrays may be memory maps: a batch reads only its rows and expands them into four int32
    arrays, so no memory grows with the stream. Several threads may use a dataset.

    Attributes:
      tokens: The stream of tokens.
      document_offsets: Start of each document in the stream: first 0, then strictly increasing.
      sequence_length: Number of predicted tokens in a row, S.
      prompt_sizes: Number of tokens at each document's start that are not predicted; None for 0
        everywhere.
      token_bytes: Number of bytes of text that each token stands for, for `predicted_bytes`. Tokens
        are below its length V.
    """

    tokens: Integer[np.ndarray, " T"]
    document_offsets: Int64[np.ndarray, " _"]
    sequence_length: int
    prompt_sizes: Int32[np.ndarray, " _"] | None = None
    token_bytes: Int32[np.ndarray, " V"] = dataclasses.field(
        default_factory=lambda: BYTES.token_bytes
    )

    def __post_init__(self):
        offsets = self.document_offsets
        if self.sequence_length < 1:
            raise ValueError(f"sequence_length={self.sequence_length!r} must be at least 1")
        if self.num_rows < 1:
            raise DataError(
                f"{number_of(len(self.tokens), 'token')} in {number_of(len(offsets), 'document')} "
                f"cannot fill one row of sequence_length={self.sequence_length} (which needs "
                f"{self.sequence_length + 1}); use more text or a shorter --data.sequence-length"
            )
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] >= len(self.tokens):
            raise ValueError(
                f"document_offsets must start at 0 and stay below {len(self.tokens)}, got {offsets}"
            )
        if self.tokens.dtype.kind not in "iu":
            raise ValueError(f"tokens must be integers, got {self.tokens.dtype}")
        prompts = self.prompt_sizes
        if prompts is not None and len(prompts) != len(offsets):
            raise ValueError(f"{len(prompts)} prompt_sizes for {len(offsets)} documents")
        for first, starts, ends in self._some_documents():
            sizes = ends - starts
            if len(empty := np.flatnonzero(sizes <= 0)):
                raise ValueError(
                    "document_offsets must be strictly increasing: document "
                    f"{first + empty[0]} has {sizes[empty[0]]} tokens; leave out empty documents"
                )
            if prompts is not None:
                some = prompts[first : first + len(sizes)]
                if len(wrong := np.flatnonzero((some < 0) | (some > sizes))):
                    i = wrong[0]
                    raise ValueError(
                        f"prompt_sizes[{first + i}]={some[i]} must lie between 0 and the "
                        f"document's {sizes[i]} tokens"
                    )

    def _some_documents(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Parts of the table of offsets: the first document, then the starts and ends of all."""
        for first in range(0, len(self.document_offsets), _OFFSETS_AT_ONCE):
            starts = self.document_offsets[first : first + _OFFSETS_AT_ONCE]
            ends = self.document_offsets[first + 1 : first + _OFFSETS_AT_ONCE + 1]
            if len(ends) < len(starts):
                ends = np.append(ends, len(self.tokens))
            yield first, starts, ends

    @classmethod
    def from_documents(
        cls, documents: Sequence[Integer[np.ndarray, " _"]], *, sequence_length: int
    ) -> "PackedDataset":
        """A dataset of token arrays of the byte vocabulary, in the order given.

        Raises:
          ValueError: There are too few tokens for one row, or a document is empty.
        """
        sizes = np.array([len(document) for document in documents], np.int64)
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
        return cls(tokens, np.cumsum(sizes) - sizes, sequence_length)

    @property
    def num_rows(self) -> int:
        """The number of rows in an epoch."""
        return max(len(self.tokens) - 1, 0) // self.sequence_length

    @property
    def num_unread_tokens(self) -> int:
        """The number of tokens after the last full row, which no row predicts."""
        return (len(self.tokens) - 1) % self.sequence_length

    def count_records(self) -> tuple[int, int, int]:
        """The number of documents with a prompt, of the cut ones, and of those longer than a row.

        A document is cut if its predictions are in several rows, so that those in a later row are
        made without the tokens before it. One of more than S+1 tokens always is.
        """
        total = cut = longer = 0
        if self.prompt_sizes is None:
            return total, cut, longer
        for first, starts, ends in self._some_documents():
            of_record = self.prompt_sizes[first : first + len(starts)] > 0
            # The last prediction is made at the token before the last.
            last_rows = (ends - 2) // self.sequence_length
            total += int(np.sum(of_record))
            cut += int(np.sum(of_record & (last_rows > starts // self.sequence_length)))
            longer += int(np.sum(of_record & (ends - starts > self.sequence_length + 1)))
        return total, cut, longer

    def batch(
        self, step: int, *, batch_size: int, seed: int, rows: Int[np.ndarray, " R"] | None = None
    ) -> Batch:
        """The batch of a step: rows [step * B, (step + 1) * B) of an endless walk over epochs.

        Every epoch is another permutation of all rows, and a batch may span two epochs.
        `eval_batches` describes the arrays of a batch.

        Args:
          step: Number of the step, from 0.
          batch_size: Number of rows over all hosts, B.
          seed: Seed of the permutations.
          rows: Numbers of the rows to build, below B; None builds all. Each host builds the rows of
            its devices, and together they have the same global batch.

        Raises:
          ValueError: The batch has more rows than an epoch, or `step` or `seed` is negative.
        """
        if not 1 <= batch_size <= self.num_rows:
            raise DataError(
                f"{batch_size=} must be between 1 and {self.num_rows}, the number of rows that "
                f"{number_of(len(self.tokens), 'token')} make at "
                f"sequence_length={self.sequence_length}; use more text, a smaller "
                "--data.batch-size or a shorter --data.sequence-length"
            )
        return self.expand(self.shuffled(walk(step, batch_size, seed, rows), seed))

    def shuffled(self, numbers: Int64[np.ndarray, " R"], seed: int) -> Int64[np.ndarray, " R"]:
        """The rows at `numbers` of the endless walk over epochs."""
        epochs, positions = np.divmod(numbers, self.num_rows)
        return permuted(positions, self.num_rows, seed=seed, epochs=epochs)

    def eval_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Batches of all rows in order, all of one shape.

        If there are more than `limit` batches, `limit` batches have rows spread evenly over the
        text. A batch has four `[B, S]` arrays:

        - `tokens`.
        - `labels`: the next token of the same document. It is -100 at a document's last token, and
          if the next token belongs to the prompt.
        - `segment_ids`: a number for each piece of a document, from 1 in every row.
        - `positions`: the place in the piece, from 0.

        Rows that fill up the last batch have segment 0 and labels -100.
        """
        if batch_size < 1:
            raise ValueError(f"{batch_size=} must be at least 1")
        most = self.num_rows if limit is None else limit * batch_size
        rows = self.spread_rows(min(most, self.num_rows))
        for first in range(0, len(rows), batch_size):
            yield filled_up(self.expand(rows[first : first + batch_size]), batch_size)

    def spread_rows(self, count: int) -> Int64[np.ndarray, " R"]:
        """The numbers of `count` rows at equal distances."""
        return np.arange(count) * self.num_rows // max(count, 1)

    def expand(self, rows: Int64[np.ndarray, " R"]) -> Batch:
        """The four arrays of some rows of the stream.

        Raises:
          DataError: A token is outside of [0, V): the stream has another vocabulary, or its file
            changed after it was opened.
        """
        length = self.sequence_length
        starts = rows * length
        first = np.searchsorted(self.document_offsets, starts, side="right") - 1
        last = np.searchsorted(self.document_offsets, starts + length, side="right")
        tokens = np.empty((len(rows), length + 1), self.tokens.dtype)
        begins = np.zeros((len(rows), length + 1), bool)
        predicted = np.ones((len(rows), length), bool)
        for row, start in enumerate(starts.tolist()):
            tokens[row] = self.tokens[start : start + length + 1]
            offsets = self.document_offsets[first[row] : last[row]] - start
            begins[row, offsets[1:]] = True
            if self.prompt_sizes is not None:
                prompts = self.prompt_sizes[first[row] : last[row]]
                _exclude_prompts(predicted[row], offsets, prompts)
        vocab_size = len(self.token_bytes)
        if len(rows) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            row, column = np.argwhere((tokens < 0) | (tokens >= vocab_size))[0]
            raise DataError(
                f"token {tokens[row, column]} at index {starts[row] + column} of the stream is not "
                f"one of the {vocab_size} of its vocabulary; remove its cache folder"
            )
        tokens = tokens.astype(np.int32)
        predicted &= ~begins[:, 1:]
        index = np.arange(length, dtype=np.int32)
        begins = begins[:, :-1]
        piece_starts = np.maximum.accumulate(np.where(begins, index, np.int32(0)), axis=1)
        return {
            "tokens": tokens[:, :-1].copy(),
            "labels": np.where(predicted, tokens[:, 1:], np.int32(IGNORED)),
            "segment_ids": np.cumsum(begins, axis=1, dtype=np.int32) + np.int32(1),
            "positions": index - piece_starts,
        }


def _exclude_prompts(
    predicted: Bool[np.ndarray, " S"],
    offsets: Int64[np.ndarray, " D"],
    prompt_sizes: Int32[np.ndarray, " D"],
) -> None:
    """Clears `predicted` at the positions whose next token is in the prompt of a document."""
    for offset, size in zip(offsets.tolist(), prompt_sizes.tolist(), strict=True):
        predicted[max(offset - 1, 0) : max(offset + size - 1, 0)] = False


def filled_up(batch: dict[str, Int32[np.ndarray, "R S"]], batch_size: int) -> Batch:
    """The batch, filled up to `batch_size` rows with rows that predict nothing."""
    padding = ((0, batch_size - len(batch["tokens"])), (0, 0))
    return {
        name: np.pad(array, padding, constant_values=IGNORED if name == "labels" else 0)
        for name, array in batch.items()
    }


def walk(
    step: int, batch_size: int, seed: int, rows: Int[np.ndarray, " R"] | None
) -> Int64[np.ndarray, " R"]:
    """The places of a step's rows in the endless walk over epochs; only of `rows` if given."""
    if step < 0 or not 0 <= seed < 1 << 63:
        raise ValueError(f"{step=} and {seed=} must not be negative, and the seed below 2^63")
    if rows is None:
        rows = np.arange(batch_size)
    elif len(rows) and not 0 <= rows.min() <= rows.max() < batch_size:
        raise ValueError(f"{rows=} must lie in [0, {batch_size=})")
    return step * batch_size + rows.astype(np.int64)


def permuted(
    positions: Int64[np.ndarray, " R"], size: int, *, seed: int, epochs: Int64[np.ndarray, " R"]
) -> Int64[np.ndarray, " R"]:
    """The numbers at `positions` of a pseudo-random permutation of range(size), one per epoch.

    A Feistel network permutes the numbers below a power of four that is at least `size`. A result
    of `size` or more goes through the network again (cycle walking). So an epoch of any length
    costs no memory, and any position of it can be computed alone.
    """
    half = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
    mask = (np.uint64(1) << half) - np.uint64(1)
    key = _mix(_mix(np.full(len(epochs), seed, np.uint64)) + epochs.astype(np.uint64))
    values = positions.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for number in range(_FEISTEL_ROUNDS):
            mixed = _mix(right + _mix(key[outside] + np.uint64(number)))
            left, right = right, left ^ (mixed & mask)
        values[outside] = (left << half) | right
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


_FEISTEL_ROUNDS = 6


def _mix(x: UInt64[np.ndarray, " R"]) -> UInt64[np.ndarray, " R"]:
    """SplitMix64 (https://doi.org/10.1145/2714064.2660195): every bit depends on every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def predicted_bytes(batch: Batch, token_bytes: Int32[np.ndarray, " V"]) -> int:
    """The number of bytes of text that a batch predicts: the denominator of bits per byte.

    The end of a document is predicted, too, and its loss counts, but it stands for no byte of text.
    """
    labels = batch["labels"]
    return int(token_bytes[labels[labels != IGNORED]].sum(dtype=np.int64))
