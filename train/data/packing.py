"""Documents packed into rows without loss, addressed by step number.

Documents are concatenated and the stream is cut into rows of S+1 tokens every S tokens: each token
that is not the first of its document is predicted once per epoch, and only the last partial row is
dropped. A row therefore holds pieces of several documents; `segment_ids` tells attention which, and
`positions` restart in every piece.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Bool, Int, Int32, Int64, Integer, UInt64

from train.data.errors import DataError
from train.data.tokenizer import BYTES

IGNORED = -100  # the label of a position that is not predicted

type Batch = dict[str, Int32[np.ndarray, "B S"]]

_OFFSETS_AT_ONCE = 1 << 20  # of a table that may be larger than the memory


@dataclasses.dataclass(frozen=True, eq=False)
class PackedDataset:
    """Rows of S+1 tokens, every S tokens, over a stream of concatenated documents.

    The arrays may be memory maps: a row is read and expanded into its four int32 arrays when a
    batch asks for it, and nothing grows with the stream. Safe to use from several threads.

    Attributes:
      tokens: the stream.
      document_offsets: where each document starts in it: 0 first, strictly increasing.
      sequence_length: S.
      prompt_sizes: tokens at each document's start that are not predicted; None: 0 everywhere.
      token_bytes: bytes of text that each token stands for, for `predicted_bytes`. Tokens are
        below its length V.
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
            raise ValueError(f"{self.sequence_length=} must be at least 1")
        if self.num_rows < 1:
            raise DataError(
                f"{len(self.tokens)} tokens in {len(offsets)} documents do not fill one row of "
                f"sequence_length={self.sequence_length} (which takes {self.sequence_length + 1}); "
                "use more text or a shorter sequence"
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
        for first in range(0, len(offsets), _OFFSETS_AT_ONCE):
            ends = offsets[first + 1 : first + _OFFSETS_AT_ONCE + 1]
            if first + _OFFSETS_AT_ONCE >= len(offsets):
                ends = np.append(ends, len(self.tokens))
            sizes = ends - offsets[first : first + _OFFSETS_AT_ONCE]
            if np.any(sizes <= 0):
                raise ValueError("document_offsets must be strictly increasing: no empty documents")
            if prompts is not None:
                some = prompts[first : first + _OFFSETS_AT_ONCE]
                if np.any((some < 0) | (some > sizes)):
                    raise ValueError("prompt_sizes must lie between 0 and the document's tokens")

    @classmethod
    def from_documents(
        cls, documents: Sequence[Integer[np.ndarray, " _"]], *, sequence_length: int
    ) -> "PackedDataset":
        """Concatenates token arrays of the byte vocabulary in the order given.

        Raises:
          ValueError: too few tokens for one row, or an empty document.
        """
        sizes = np.array([len(document) for document in documents], np.int64)
        tokens = np.concatenate(documents) if documents else np.zeros(0, np.uint16)
        return cls(tokens, np.cumsum(sizes) - sizes, sequence_length)

    @property
    def num_rows(self) -> int:
        """Rows in an epoch."""
        return max(len(self.tokens) - 1, 0) // self.sequence_length

    def batch(
        self, step: int, *, batch_size: int, seed: int, rows: Int[np.ndarray, " R"] | None = None
    ) -> Batch:
        """The batch of a step: rows [step * B, (step + 1) * B) of an endless walk over epochs.

        Every epoch is another permutation of all rows, and a batch may span two epochs. See
        `eval_batches` for the contents of a batch.

        Args:
          step: from 0.
          batch_size: B, over all hosts.
          seed: of the permutations.
          rows: which of the B rows to build, as a host does that feeds some of the devices; None
            builds all. Every host that is given its rows together make the same global batch.

        Raises:
          ValueError: the batch has more rows than the corpus, or `step` or `seed` is negative.
        """
        if not 1 <= batch_size <= self.num_rows:
            raise DataError(
                f"{batch_size=} must be between 1 and the {self.num_rows} rows that "
                f"{len(self.tokens)} tokens make at sequence_length={self.sequence_length}; use "
                "more text, a smaller batch or a shorter sequence"
            )
        return self.expand(self.shuffled(walk(step, batch_size, seed, rows), seed))

    def shuffled(self, numbers: Int64[np.ndarray, " R"], seed: int) -> Int64[np.ndarray, " R"]:
        """The rows at `numbers` of the endless walk over epochs."""
        epochs, positions = np.divmod(numbers, self.num_rows)
        return permuted(positions, self.num_rows, seed=seed, epochs=epochs)

    def eval_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """All rows in order, in batches of one shape.

        Of a longer text `limit` batches, whose rows are spread evenly over it. A batch has four
        [B, S] arrays: `tokens`; `labels`, the next token of the same document, -100 at a document's
        last token and where the next token belongs to its prompt; `segment_ids`, from 1 in every
        row, one for each piece of a document; `positions`, from 0 in every piece. Rows that fill up
        the last batch have segment 0 and labels -100.
        """
        if batch_size < 1:
            raise ValueError(f"{batch_size=} must be at least 1")
        most = self.num_rows if limit is None else limit * batch_size
        rows = self.spread_rows(min(most, self.num_rows))
        for first in range(0, len(rows), batch_size):
            yield filled_up(self.expand(rows[first : first + batch_size]), batch_size)

    def spread_rows(self, count: int) -> Int64[np.ndarray, " R"]:
        """`count` rows at equal distances."""
        return np.arange(count) * self.num_rows // max(count, 1)

    def expand(self, rows: Int64[np.ndarray, " R"]) -> Batch:
        """The four arrays of these rows of the stream.

        Raises:
          DataError: a token is outside of [0, V), so the stream is not of this vocabulary, or its
            file changed since it was opened.
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
                f"one of the {vocab_size} of its vocabulary"
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
    """Clears `predicted` where the next token is in the prompt of a document of the row."""
    for offset, size in zip(offsets.tolist(), prompt_sizes.tolist(), strict=True):
        predicted[max(offset - 1, 0) : max(offset + size - 1, 0)] = False


def filled_up(batch: dict[str, Int32[np.ndarray, "R S"]], batch_size: int) -> Batch:
    """Rows of a batch with rows that predict nothing up to `batch_size`."""
    padding = ((0, batch_size - len(batch["tokens"])), (0, 0))
    return {
        name: np.pad(array, padding, constant_values=IGNORED if name == "labels" else 0)
        for name, array in batch.items()
    }


def walk(
    step: int, batch_size: int, seed: int, rows: Int[np.ndarray, " R"] | None
) -> Int64[np.ndarray, " R"]:
    """Numbers of the rows of a step's batch, or of those `rows` of it, counted from step 0."""
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
    """What stands at `positions` of a pseudo-random permutation of range(size), one per epoch.

    A Feistel network permutes the numbers below a power of four that is at least `size`, and what
    lands at `size` or above goes through it again (cycle walking). So an epoch of any length costs
    no memory, and any position of it can be asked for.
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
    """How many bytes of text a batch predicts: the denominator of bits per byte.

    The end of a document is predicted too, and its loss counts, but it stands for no byte of text.
    """
    labels = batch["labels"]
    return int(token_bytes[labels[labels != IGNORED]].sum(dtype=np.int64))
