"""Rows of several sources, mixed by weight."""

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from jaxtyping import Int, Int32, Int64

from train.data.packing import Batch, PackedDataset, filled_up, walk
from train.formats import number_of

_PERIOD = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class MixtureDataset:
    """Rows of several sources, with the same shares in every stretch of the run.

    In every 10,000 consecutive rows of the walk, each source has its weight's share, rounded to one
    row and at least one. Its rows are spread evenly: among the first n rows, their number differs
    from n times the share by less than the number of sources. Each source has its own epochs.

    Attributes:
      sources: Datasets with one sequence length and one tokenizer.
      weights: Weight of the rows of each source; the weights need not add up to 1.
    """

    sources: tuple[PackedDataset, ...]
    weights: tuple[float, ...]

    def __post_init__(self):
        if not 1 <= len(self.sources) == len(self.weights) <= _PERIOD:
            raise ValueError(
                f"{number_of(len(self.weights), 'weight')} for "
                f"{number_of(len(self.sources), 'source')}; give 1 to {_PERIOD:,} sources, each "
                "with a weight"
            )
        # A sum that overflows makes every share 0.
        if not (all(weight > 0 for weight in self.weights) and math.isfinite(sum(self.weights))):
            raise ValueError(f"weights={self.weights} must be positive, and their sum finite")
        for name in ("sequence_length", "token_bytes"):
            first, *others = (getattr(source, name) for source in self.sources)
            if not all(np.array_equal(first, other) for other in others):
                raise ValueError(f"the sources differ in {name}; use the same for all")

    @property
    def token_bytes(self) -> Int32[np.ndarray, " V"]:
        """Bytes of text that each token stands for."""
        return self.sources[0].token_bytes

    @property
    def num_rows(self) -> int:
        """The number of rows of all sources."""
        return sum(source.num_rows for source in self.sources)

    def batch(
        self, step: int, *, batch_size: int, seed: int, rows: Int[np.ndarray, " R"] | None = None
    ) -> Batch:
        """The batch of a step, as in `PackedDataset.batch`; a pure function of (seed, step).

        If a source has fewer rows than its share of a batch, the batch repeats some of them.
        """
        numbers = walk(step, batch_size, seed, rows)
        periods, places = np.divmod(numbers, _PERIOD)
        pattern, ranks = self._period
        chosen = pattern[places]
        # How many rows of its own source come before each row.
        before = periods * self._shares[chosen] + ranks[places]
        row_in_source = np.empty_like(before)
        for index, source in enumerate(self.sources):
            mine = chosen == index
            # Different seeds, so that sources of equal length have different orders.
            row_in_source[mine] = source.shuffled(before[mine], seed + index)
        return self._expand(chosen, row_in_source)

    def eval_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """Rows of all sources by weight, in batches as in `PackedDataset.eval_batches`.

        No row comes twice: a source without further rows drops out.
        """
        if batch_size < 1:
            raise ValueError(f"{batch_size=} must be at least 1")
        most = self.num_rows if limit is None else min(limit * batch_size, self.num_rows)
        counts = [min(source.num_rows, most) for source in self.sources]
        chosen = _interleaved(counts, self.weights)[0][:most]
        row_in_source = np.empty_like(chosen)
        for index, source in enumerate(self.sources):
            mine = chosen == index
            row_in_source[mine] = source.spread_rows(int(np.count_nonzero(mine)))
        for first in range(0, most, batch_size):
            part = slice(first, first + batch_size)
            yield filled_up(self._expand(chosen[part], row_in_source[part]), batch_size)

    def _expand(
        self, chosen: Int64[np.ndarray, " R"], row_in_source: Int64[np.ndarray, " R"]
    ) -> Batch:
        shape = len(chosen), self.sources[0].sequence_length
        batch = {
            name: np.empty(shape, np.int32)
            for name in ("tokens", "labels", "segment_ids", "positions")
        }
        for index, source in enumerate(self.sources):
            mine = chosen == index
            for name, array in source.expand(row_in_source[mine]).items():
                batch[name][mine] = array
        return batch

    @functools.cached_property
    def _shares(self) -> Int64[np.ndarray, " N"]:
        """Rows of each source in a period, by largest remainders."""
        exact = np.array(self.weights) / sum(self.weights) * _PERIOD
        # A product such as 0.7 * 10000 may be just below the intended whole number.
        shares = np.maximum(np.floor(exact + 1e-6), 1).astype(np.int64)
        for _ in range(_PERIOD - shares.sum()):
            shares[np.argmax(exact - shares)] += 1
        for _ in range(shares.sum() - _PERIOD):
            shares[np.argmax(shares)] -= 1
        return shares

    @functools.cached_property
    def _period(self) -> tuple[Int64[np.ndarray, " P"], Int64[np.ndarray, " P"]]:
        """The source of each row of a period, and the number of earlier rows of that source."""
        shares = self._shares.tolist()
        return _interleaved(shares, shares)


def _interleaved(
    counts: Sequence[int], weights: Sequence[float | int]
) -> tuple[Int64[np.ndarray, " R"], Int64[np.ndarray, " R"]]:
    """The source of each row, and the row's number in its source, in one evenly mixed order.

    Row j of a source with weight w is at the place (j + 1/2) / w of the order.
    """
    sources = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    order = np.argsort((numbers + 0.5) / np.array(weights, float)[sources], kind="stable")
    return sources[order], numbers[order]
