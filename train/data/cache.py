"""Text tokenized once: streams of tokens on the disk, that training maps into memory.

A folder for each source, `CACHE/<key>/`. The key is a hash of every file's path, size and time of
change, of the tokenizer, of all settings that change tokens, and of the version of this format; so
an entry is never out of date, and any folder may be removed. In it, for `train` and `held_out`:

- `*.tokens`: the documents one after the other, little-endian uint16, or uint32 where the
  tokenizer has more than 65536 tokens.
- `*.offsets`: where each document starts, int64.
- `*.prompts`: how many tokens at its start are a prompt, int32.

Empty documents, and prompts without a completion, are left out.

While it is made, `progress.json` says how many bytes of these files count, and where in the text
to go on. It is replaced by renaming, after what it counts is on the disk: whoever is killed is gone
on from there, and the files come out the same byte for byte. At the end it becomes `index.json`,
which is what makes the entry complete. One process at a time holds the entry's `lock`, which the
operating system releases when the process ends, however it ends; others wait for it.

A document is held out if a hash of its content says so. That depends on nothing but its text, so
the same text is on the same side in every file, source and run.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Integer

from train.data.errors import DataError
from train.data.files import Document, Position, Reader
from train.data.packing import PackedDataset
from train.data.prefetch import prefetch
from train.data.progress import TokenizingProgress
from train.data.tokenizer import Tokenizer

FORMAT_VERSION = 1
SPLITS = ("train", "held_out")

# What is read ahead, tokenized in one call, and at most lost by a kill.
_BATCH_BYTES = 1 << 22
_BATCH_DOCUMENTS = 4096
_COMMIT_SECONDS = 5.0
_LOCK_TIMEOUT_S = 600.0
_LOCK_POLL_S = 0.2


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pallas-kernels/tokens`, in `~/.cache` without that variable."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pallas-kernels" / "tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The tokens of a source.

    Attributes:
      folder: where they are.
      index: number of tokens, documents and prompts by split, and a hash of all documents.
      tokenizer: that made them.
    """

    folder: Path
    index: dict[str, Any]
    tokenizer: Tokenizer

    def identity(self) -> dict[str, Any]:
        """What tells the tokens from others, wherever the text and the cache are."""
        return {name: self.index[name] for name in ("content_hash", *SPLITS)}

    def dataset(self, split: str, sequence_length: int) -> PackedDataset:
        """The rows of a split, mapped into memory.

        Raises:
          DataError: there are not enough tokens for one, or the files are damaged.
        """
        counts = self.index[split]
        tokens = self._map(f"{split}.tokens", _token_dtype(self.tokenizer), counts["tokens"])
        offsets = self._map(f"{split}.offsets", np.dtype("<i8"), counts["documents"])
        prompts = None
        if counts["prompts"]:
            prompts = self._map(f"{split}.prompts", np.dtype("<i4"), counts["documents"])
        return PackedDataset(tokens, offsets, sequence_length, prompts, self.tokenizer.token_bytes)

    def _map(self, name: str, dtype: np.dtype, count: int) -> np.ndarray:
        if not count:
            return np.zeros(0, dtype)
        try:
            return np.memmap(self.folder / name, dtype, "r", shape=(count,))
        except (OSError, ValueError) as error:
            raise DataError(
                f"{self.folder / name} is damaged ({error}); remove the folder to make it again"
            ) from error


def tokenized(
    reader: Reader,
    tokenizer: Tokenizer,
    *,
    held_out_fraction: float,
    cache_dir: Path,
    name: str,
) -> Entry:
    """The tokens of all of the reader's documents, from the cache where they are in it.

    Args:
      reader: of the documents.
      tokenizer: makes the tokens, unless the files have them.
      held_out_fraction: share of the documents that go to `held_out`.
      cache_dir: the folder of all entries.
      name: of the source, for messages.

    Raises:
      DataError: the text cannot be read or is not what it should be, the cache cannot be written,
        or another process holds it without getting on.
    """
    fingerprint = _fingerprint(reader, tokenizer, held_out_fraction)
    text = json.dumps(fingerprint, sort_keys=True)
    folder = cache_dir / hashlib.sha256(text.encode()).hexdigest()[:32]
    try:
        if not (folder / "index.json").is_file():
            folder.mkdir(parents=True, exist_ok=True)
            with _locked(folder, name) as lock:
                # Another process may have made it meanwhile.
                if not (folder / "index.json").is_file():
                    writing = _Writing(reader, tokenizer, held_out_fraction, folder)
                    writing.run(lock, name)
                    if _fingerprint(reader, tokenizer, held_out_fraction) != fingerprint:
                        raise DataError(f"{name} changed while it was read; start again")
                    (folder / "progress.json").replace(folder / "index.json")
        index = json.loads((folder / "index.json").read_text())
    except OSError as error:
        raise DataError(
            f"the cache {folder} cannot be used ({error.strerror or error}); name another folder "
            "with --data.cache-dir"
        ) from error
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder} is damaged ({error}); remove it to make it again") from error
    return Entry(folder=folder, index=index, tokenizer=tokenizer)


def _token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _fingerprint(reader: Reader, tokenizer: Tokenizer, held_out_fraction: float) -> dict[str, Any]:
    """All that the files of an entry depend on."""
    files = []
    for path in reader.files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror})") from error
        files.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
    return {
        "version": FORMAT_VERSION,
        "files": files,
        "tokenizer": tokenizer.fingerprint,
        "text_field": reader.text_field,
        "token_dtype": reader.token_dtype,
        "held_out_fraction": held_out_fraction,
    }


class _Writing:
    """Makes an entry, from the beginning or from where another process was killed."""

    def __init__(
        self, reader: Reader, tokenizer: Tokenizer, held_out_fraction: float, folder: Path
    ):
        self.reader, self.tokenizer, self.folder = reader, tokenizer, folder
        self.held_out_fraction = held_out_fraction
        progress = _read_progress(folder)
        self.position = Position(**progress["position"])
        self.counts: dict[str, dict[str, int]] = {split: progress[split] for split in SPLITS}
        self.content_hash: str = progress["content_hash"]
        # The files of a split: what says how many items each has, and the dtype of an item.
        self._parts = {
            "tokens": ("tokens", _token_dtype(tokenizer)),
            "offsets": ("documents", np.dtype("<i8")),
            "prompts": ("documents", np.dtype("<i4")),
        }

    @property
    def num_tokens(self) -> int:
        """Tokens of both splits so far."""
        return sum(self.counts[split]["tokens"] for split in SPLITS)

    def run(self, lock: Path, name: str) -> None:
        """Reads, tokenizes and writes all that is missing."""
        sizes = [path.stat().st_size for path in self.reader.files]
        before = np.cumsum([0, *sizes]).tolist()
        with contextlib.ExitStack() as stack:
            files = {
                (split, part): stack.enter_context(self._open(split, part))
                for split in SPLITS
                for part in self._parts
            }
            done = before[self.position.file] + self.position.num_bytes
            progress = stack.enter_context(
                TokenizingProgress(name, before[-1], done, self.num_tokens)
            )
            committed = time.monotonic()
            batches = _batches(self.reader.documents(self.position))
            # Reading and parsing go on while a batch is tokenized.
            for batch in stack.enter_context(prefetch(lambda: batches)):
                self._write(batch, files)
                self.position = batch[-1].after
                done = before[self.position.file] + self.position.num_bytes
                progress.update(done, self.num_tokens)
                if time.monotonic() - committed >= _COMMIT_SECONDS:
                    self._commit(files)
                    lock.touch()  # for those who wait
                    committed = time.monotonic()
            self._commit(files)

    def _open(self, split: str, part: str) -> BinaryIO:
        """The file, cut to what was committed and open at its end."""
        count, dtype = self._parts[part]
        path = self.folder / f"{split}.{part}"
        size = self.counts[split][count] * dtype.itemsize
        if (path.stat().st_size if path.exists() else 0) < size:
            raise DataError(f"{path} is damaged; remove the folder to make it again")
        file = path.open("ab")
        file.truncate(size)
        return file

    def _commit(self, files: dict[tuple[str, str], BinaryIO]) -> None:
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        part = self.folder / "progress.json.part"
        with part.open("w") as file:
            position = dataclasses.asdict(self.position)
            json.dump(
                {"position": position, "content_hash": self.content_hash, **self.counts}, file
            )
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.folder / "progress.json")

    def _write(self, batch: list[Document], files: dict[tuple[str, str], BinaryIO]) -> None:
        items = {key: [] for key in files}
        for document, tokens, prompt_size in self._tokenize(batch):
            digest = hashlib.blake2b(document.content, digest_size=16).digest()
            # A chain, because the state of a hash cannot be written to progress.json.
            chain = bytes.fromhex(self.content_hash) + digest
            self.content_hash = hashlib.blake2b(chain, digest_size=16).hexdigest()
            # The document is held out if its hash, as a fraction of 1, is below the share.
            is_held_out = int.from_bytes(digest[:8]) < self.held_out_fraction * 2**64
            split = SPLITS[is_held_out]
            counts = self.counts[split]
            items[split, "tokens"].append(tokens)
            items[split, "offsets"].append([counts["tokens"]])
            items[split, "prompts"].append([prompt_size])
            counts["tokens"] += len(tokens)
            counts["documents"] += 1
            counts["prompts"] += prompt_size > 0
        for (split, part), values in items.items():
            files[split, part].write(_joined(values, self._parts[part][1]).tobytes())

    def _tokenize(
        self, batch: list[Document]
    ) -> Iterator[tuple[Document, Integer[np.ndarray, " _"], int]]:
        """Each document that is not empty, its tokens, and how many of them are a prompt."""
        documents = [document for document in batch if not document.is_empty]
        texts = [text for document in documents for text in (document.prompt or b"", document.text)]
        try:
            encoded = iter(self.tokenizer.encode(texts))
        except UnicodeDecodeError:
            raise _not_utf8(documents) from None
        for document, prompt, text in zip(documents, encoded, encoded, strict=True):
            if document.tokens is not None:
                yield document, document.tokens, 0
                continue
            bos = [self.tokenizer.bos] if document.begins and self.tokenizer.bos is not None else []
            eos = [self.tokenizer.eos] if document.ends else []
            tokens = _joined([bos, prompt, text, eos], _token_dtype(self.tokenizer))
            yield document, tokens, 0 if document.prompt is None else len(bos) + len(prompt)


def _read_progress(folder: Path) -> dict[str, Any]:
    """What was committed; a start from nothing where nothing was."""
    try:
        return json.loads((folder / "progress.json").read_text())
    except FileNotFoundError:
        zeros = {split: {"tokens": 0, "documents": 0, "prompts": 0} for split in SPLITS}
        return {"position": dataclasses.asdict(Position()), "content_hash": "", **zeros}


def _joined(arrays: list[Any], dtype: np.dtype) -> np.ndarray:
    parts = [np.asarray(array).astype(dtype) for array in arrays]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents for one call of the tokenizer, which works on them on all cores."""
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= _BATCH_BYTES or len(batch) == _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _not_utf8(documents: list[Document]) -> DataError:
    """Of the first of the documents that is not UTF-8."""
    for document in documents:
        try:
            document.text.decode()
        except UnicodeDecodeError as error:
            offset = document.after.offset - len(document.text) + error.start
            return DataError(
                f"{document.path}: not UTF-8 at byte {offset}; convert the file, or train on bytes "
                "(without --data.tokenizer)"
            )
    raise AssertionError("a text was not UTF-8")


@contextlib.contextmanager
def _locked(folder: Path, name: str) -> Iterator[Path]:
    """Holds the entry's lock, after waiting for whoever holds it.

    The holder touches the file as it gets on. One that has not for ten minutes hangs or was
    stopped; one that was killed holds no lock.
    """
    path = folder / "lock"
    with path.open("a+") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                file.seek(0)
                holder = file.read() or "another process"
            if not waiting:
                print(f"{name}: waiting for {holder}, which tokenizes it", flush=True)
                waiting = True
            if time.time() - path.stat().st_mtime > _LOCK_TIMEOUT_S:
                raise DataError(
                    f"{path} is held by {holder}, which made no progress for "
                    f"{_LOCK_TIMEOUT_S:.0f} s; end it, or name another folder with "
                    "--data.cache-dir"
                )
            time.sleep(_LOCK_POLL_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield path
        file.truncate(0)
