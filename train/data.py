"""Training batches: text without a download, packed without loss, addressed by step number.

The corpus is the source of the Python standard library that runs this, as bytes: some 10 MB that
every machine has. Documents are concatenated and the stream is cut into rows of S+1 tokens every
S tokens: each token that is not a BOS is predicted once per epoch, and only the last partial row
is dropped. A row therefore holds pieces of several documents; `segment_ids` tells attention
which, and `positions` restart in every piece.

A batch is a pure function of (seed, step): a restarted run needs the step number alone to go on
with the batches it would have seen, and any process can build any batch.
"""

import contextlib
import dataclasses
import functools
import hashlib
import queue
import sysconfig
import threading
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, Int32, Int64, Integer, UInt16

BOS = 256
EOS = 257
BYTE_VOCAB_SIZE = 258
IGNORED = -100  # the label of a position that is not predicted

type Batch = dict[str, Int32[np.ndarray, "B S"]]

# Not the same on every machine: Linux distributions package tests, Tk and pip's bootstrap apart,
# and `config-*` and `_sysconfigdata*` name the paths Python was built in.
_EXCLUDED_DIRECTORIES = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
    }
)
_EXCLUDED_PREFIXES = ("config-", "_sysconfigdata", "sitecustomize")
_HELD_OUT_EVERY = 20


def encode(text: str) -> UInt16[np.ndarray, " S"]:
    """BOS and the UTF-8 bytes of `text`: the start of a document, as a prompt."""
    return np.concatenate([[BOS], np.frombuffer(text.encode(), np.uint8)]).astype(np.uint16)


def decode(tokens: Iterable[Any]) -> str:
    """The text of a token sequence; BOS and EOS are dropped, broken UTF-8 is replaced."""
    return bytes(token for token in map(int, tokens) if token < BOS).decode(errors="replace")


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents by relative path, split by a hash of the path.

    The split does not depend on the other files, so a corpus that gains a file keeps every
    document on its side.
    """

    files: dict[str, bytes]

    @property
    def train(self) -> list[UInt16[np.ndarray, " _"]]:
        """Token arrays of the training documents, in hash order."""
        return [_document(self.files[path]) for path in self._paths(held_out=False)]

    @property
    def held_out(self) -> list[UInt16[np.ndarray, " _"]]:
        """Token arrays of about one document in twenty, never trained on, in hash order."""
        return [_document(self.files[path]) for path in self._paths(held_out=True)]

    def fingerprint(self) -> dict[str, str | int]:
        """SHA-256 over the sorted paths and contents, with the number of files and bytes."""
        digest = hashlib.sha256()
        for path, content in sorted(self.files.items()):
            # The lengths keep two corpora apart whose concatenations are the same.
            digest.update(f"{len(path.encode())} {len(content)} {path}".encode())
            digest.update(content)
        return {
            "sha256": digest.hexdigest(),
            "num_files": len(self.files),
            "num_bytes": sum(map(len, self.files.values())),
        }

    def _paths(self, *, held_out: bool) -> list[str]:
        # Hash order: neighbours in the stream, which share a row, come from different packages.
        hashes = {path: zlib.crc32(path.encode()) for path in self.files}
        split = [path for path in hashes if (hashes[path] % _HELD_OUT_EVERY == 0) == held_out]
        return sorted(split, key=lambda path: (hashes[path], path))


def _document(content: bytes) -> UInt16[np.ndarray, " _"]:
    return np.concatenate([[BOS], np.frombuffer(content, np.uint8), [EOS]]).astype(np.uint16)


def read_corpus(root: Path, pattern: str = "*.py") -> Corpus:
    """All files under `root` whose name matches `pattern`.

    Empty files are left out, and of files with equal contents the first by path is kept, so that
    no held-out document is also a training document under another name.

    Raises:
      ValueError: no file matches.
    """
    files: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for path in sorted(root.rglob(pattern), key=lambda path: path.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        excluded = not _EXCLUDED_DIRECTORIES.isdisjoint(relative.parts[:-1]) or any(
            part.startswith(_EXCLUDED_PREFIXES) for part in relative.parts
        )
        if excluded or not path.is_file():
            continue
        content = path.read_bytes()
        if content and content not in seen:
            seen.add(content)
            files[relative.as_posix()] = content
    if not files:
        raise ValueError(f"no file under {root} matches {pattern!r}; give another directory")
    return Corpus(files)


def stdlib_corpus() -> Corpus:
    """The source of the running Python's standard library.

    It differs between Python versions; `Corpus.fingerprint` tells them apart.
    """
    return read_corpus(Path(sysconfig.get_path("stdlib")))


@dataclasses.dataclass(frozen=True, eq=False)
class PackedDataset:
    """Rows of S+1 tokens, every S tokens, over a stream of concatenated documents.

    Only the stream is kept, 2 bytes a token for byte-level text; a row is expanded into its four
    int32 arrays when a batch asks for it. Safe to use from several threads.

    Attributes:
      tokens: the stream.
      document_offsets: where each document starts in it: 0 first, strictly increasing.
      sequence_length: S.
    """

    tokens: Integer[np.ndarray, " T"]
    document_offsets: Int64[np.ndarray, " _"]
    sequence_length: int

    def __post_init__(self):
        offsets = self.document_offsets
        if self.sequence_length < 1:
            raise ValueError(f"{self.sequence_length=} must be at least 1")
        if self.num_rows < 1:
            raise ValueError(
                f"{len(self.tokens)} tokens in {len(offsets)} documents do not fill one row of "
                f"{self.sequence_length=} (which takes {self.sequence_length + 1}); use more text "
                "or a shorter sequence"
            )
        if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] >= len(self.tokens):
            raise ValueError(
                f"document_offsets must start at 0 and stay below {len(self.tokens)}, got {offsets}"
            )
        if np.any(np.diff(offsets) <= 0):
            raise ValueError("document_offsets must be strictly increasing: no empty documents")

    @classmethod
    def from_documents(
        cls, documents: Sequence[Integer[np.ndarray, " _"]], *, sequence_length: int
    ) -> "PackedDataset":
        """Concatenates token arrays in the order given.

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

    def batch(self, step: int, *, batch_size: int, seed: int) -> Batch:
        """The batch of a step: rows [step * B, (step + 1) * B) of an endless walk over epochs.

        Every epoch is another permutation of all rows, and a batch may span two epochs. See
        `eval_batches` for the contents of a batch.

        Raises:
          ValueError: the batch has more rows than the corpus, or `step` or `seed` is negative.
        """
        if not 1 <= batch_size <= self.num_rows:
            raise ValueError(
                f"{batch_size=} must be between 1 and the {self.num_rows} rows that "
                f"{len(self.tokens)} tokens make at {self.sequence_length=}; use more text, a "
                "smaller batch or a shorter sequence"
            )
        if step < 0 or seed < 0:
            raise ValueError(f"{step=} and {seed=} must not be negative")
        epoch, first = divmod(step * batch_size, self.num_rows)
        rows = _epoch_order(seed, epoch, self.num_rows)[first : first + batch_size]
        if len(rows) < batch_size:
            rest = _epoch_order(seed, epoch + 1, self.num_rows)[: batch_size - len(rows)]
            rows = np.concatenate([rows, rest])
        return self._expand(rows)

    def eval_batches(self, batch_size: int, limit: int | None = None) -> Iterator[Batch]:
        """All rows in order, in batches of one shape, `limit` of them at most.

        A batch has four [B, S] arrays: `tokens`; `labels`, the next token of the same document,
        -100 at a document's last token; `segment_ids`, from 1 in every row, one for each piece of
        a document; `positions`, from 0 in every piece. Rows that fill up the last batch have
        segment 0 and labels -100.
        """
        if batch_size < 1:
            raise ValueError(f"{batch_size=} must be at least 1")
        for index in range(-(-self.num_rows // batch_size)):
            if index == limit:
                return
            first = index * batch_size
            rows = np.arange(first, min(first + batch_size, self.num_rows))
            padding = ((0, batch_size - len(rows)), (0, 0))
            yield {
                name: np.pad(array, padding, constant_values=IGNORED if name == "labels" else 0)
                for name, array in self._expand(rows).items()
            }

    def _expand(self, rows: Int[np.ndarray, " B"]) -> Batch:
        indices = rows[:, None] * self.sequence_length + np.arange(self.sequence_length + 1)
        tokens = self.tokens[indices]
        document = np.searchsorted(self.document_offsets, indices, side="right") - 1
        piece_start = np.maximum(self.document_offsets[document], indices[:, :1])
        predicted = document[:, 1:] == document[:, :-1]
        return {
            "tokens": tokens[:, :-1].astype(np.int32),
            "labels": np.where(predicted, tokens[:, 1:].astype(np.int32), np.int32(IGNORED)),
            "segment_ids": (document - document[:, :1] + 1)[:, :-1].astype(np.int32),
            "positions": (indices - piece_start)[:, :-1].astype(np.int32),
        }


@functools.lru_cache(maxsize=4)  # the epochs that the steps in flight are in
def _epoch_order(seed: int, epoch: int, num_rows: int) -> Int64[np.ndarray, " _"]:
    # The raw stream of a bit generator never changes between NumPy versions; that of
    # `Generator.permutation` may, and a run resumed after an upgrade would repeat rows.
    keys = np.random.Philox(key=[seed, epoch]).random_raw(num_rows)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False  # shared by every caller through the cache
    return order


def predicted_bytes(batch: Batch) -> int:
    """How many bytes of text a byte-level batch predicts: the denominator of bits per byte.

    EOS is predicted too, and its loss counts, but it stands for no byte of text.
    """
    labels = batch["labels"]
    return int(np.count_nonzero((labels >= 0) & (labels < BOS)))


@dataclasses.dataclass(frozen=True)
class SyntheticDataset:
    """Uniformly random tokens, to measure speed at any vocabulary and sequence length.

    Attributes:
      vocab_size: tokens are drawn from [0, vocab_size).
      sequence_length: S.
      packed: False leaves `segment_ids` and `positions` out of the batch, so that attention is
        plain causal; True gives them, with one segment a row.
    """

    vocab_size: int
    sequence_length: int
    packed: bool = False

    def batch(self, step: int, *, batch_size: int, seed: int) -> Batch:
        """The batch of a step, a pure function of (seed, step). Every label is a token."""
        shape = (batch_size, self.sequence_length + 1)
        generator = np.random.Generator(np.random.Philox(key=[seed, step]))
        stream = generator.integers(self.vocab_size, size=shape, dtype=np.int32)
        batch = {"tokens": stream[:, :-1].copy(), "labels": stream[:, 1:].copy()}
        if self.packed:
            positions = np.arange(self.sequence_length, dtype=np.int32)
            batch["segment_ids"] = np.ones_like(batch["tokens"])
            batch["positions"] = np.tile(positions, (batch_size, 1))
        return batch


@contextlib.contextmanager
def prefetch[T](make_iterator: Callable[[], Iterable[T]], size: int = 2) -> Iterator[Iterator[T]]:
    """Runs an iterator on a background thread, up to `size` items ahead of its consumer.

    `with prefetch(lambda: (dataset.batch(step, ...) for step in range(n))) as batches:`. An
    exception in the iterator is raised where the consumer asks for the item that it replaced.
    Leaving the block stops the thread and waits for the item it is building.
    """
    if size < 1:
        raise ValueError(f"{size=} must be at least 1")
    items: queue.Queue[tuple[str, Any]] = queue.Queue(maxsize=size)
    stopped = threading.Event()

    def put(kind: str, value: Any) -> bool:
        if not stopped.is_set():
            items.put((kind, value))
        return not stopped.is_set()

    def produce() -> None:
        try:
            for item in make_iterator():
                if not put("item", item):
                    return
        except BaseException as error:  # whatever it was, the consumer must not wait for ever
            put("error", error)
        else:
            put("end", None)

    def consume() -> Generator[T]:
        while True:
            kind, value = items.get()
            if kind == "end":
                return
            if kind == "error":
                raise value
            yield value

    thread = threading.Thread(target=produce, name="prefetch", daemon=True)
    thread.start()
    consumer = consume()
    try:
        yield consumer
    finally:
        consumer.close()
        stopped.set()
        # The thread may be waiting for room for one last item; after that it sees `stopped`.
        while not items.empty():
            items.get_nowait()
        thread.join()
