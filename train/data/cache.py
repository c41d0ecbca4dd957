"""The cache of tokens: text is tokenized once, and training maps the tokens into memory.

Each source has an entry, the folder `CACHE/<key>/`. The key is a hash of every file's path, size
and time of change, of the tokenizer, of all settings that change tokens, and of the version of this
format. So an entry is never out of date, and any entry may be removed. An entry belongs to one
user, and no link in it is followed. It has three files for each split, `train` and `held_out`:

- `*.tokens`: the documents one after the other, as little-endian uint16, or uint32 if the tokenizer
  has more than 65536 tokens.
- `*.offsets`: the start of each document in the tokens, int64.
- `*.prompts`: the number of tokens at each document's start that are a prompt, int32.

A preference is two documents in a row, the chosen one and the rejected one, of the same split.

Empty documents, and prompts without a completion, are left out. The index has their number, and
that of the records whose text is in the field that the reader names.

While a process makes an entry, `progress.json` holds the sizes of the files that are valid so far,
their checksums, and the place in the text to continue from. It is replaced by a rename, after the
bytes it counts are on the disk. So another process can continue after a kill, and the files become
the same byte for byte. At the end `progress.json` becomes `index.json`, and the entry is complete.
One process at a time holds the entry's `lock`, and others wait. The operating system releases the
lock when the process ends, for whatever reason.

Opening an entry reads its files whole, once, and compares the checksums, so damage ends the run
before its first step.

A hash of a document's content decides whether it is held out (`held_out`).
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from jaxtyping import Integer

from train.data import index as index_file
from train.data.errors import DataError
from train.data.files import PIECE_BYTES, Document, Position, Reader, has_records
from train.data.folder import OwnFolder
from train.data.held_out import digest_of, is_held_out
from train.data.index import PARTS, SPLITS
from train.data.lock import locked
from train.data.packing import PackedDataset
from train.data.pairs import Stream
from train.data.prefetch import prefetch
from train.data.progress import TokenizingProgress
from train.data.tokenizer import Tokenizer

# Version 1 had no checksums. The hash of version 2 did not tell where a prompt ends.
FORMAT_VERSION = 3

# Size of a batch of documents. One call tokenizes a batch while the next is read. A kill loses at
# most one batch and the seconds since the last commit.
_BATCH_BYTES = 1 << 22
_BATCH_DOCUMENTS = 4096
_COMMIT_SECONDS = 5.0


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/pallas-kernels/tokens`, or in `~/.cache` if that variable is not set.

    Raises:
      DataError: The user has no home.
    """
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise DataError(
            f"no folder for the cache ({error}); name one with --data.cache-dir"
        ) from error
    return Path(base) / "pallas-kernels" / "tokens"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Entry:
    """The tokens of a source.

    Attributes:
      folder: Folder of the files.
      index: Number of tokens, documents and prompts by split, a hash of all documents, and the
        checksums of the files.
      tokenizer: Tokenizer that made the tokens.
    """

    folder: Path
    index: dict[str, Any]
    tokenizer: Tokenizer

    def identity(self) -> dict[str, Any]:
        """JSON that identifies the tokens, wherever the text and the cache are."""
        return {name: self.index[name] for name in ("content_hash", *SPLITS)}

    def dataset(self, split: str, sequence_length: int) -> PackedDataset:
        """The rows of a split.

        Raises:
          DataError: The split has too few tokens for a row, or a file is damaged.
        """
        stream = self.stream(split)
        return PackedDataset(
            stream.tokens,
            stream.offsets,
            sequence_length,
            stream.prompts,
            self.tokenizer.token_bytes,
        )

    def stream(self, split: str) -> Stream:
        """The documents of a split, mapped into memory after its files were read and checked.

        Raises:
          DataError: A file is damaged.
        """
        counts = self.index[split]
        try:
            with OwnFolder(self.folder) as folder:
                tokens = self._map(folder, split, "tokens")
                offsets = self._map(folder, split, "offsets")
                prompts = self._map(folder, split, "prompts") if counts["prompts"] else None
        except FileNotFoundError as error:
            raise index_file.damaged(
                self.folder, str(error.filename), str(error.strerror)
            ) from error
        except OSError as error:
            raise _cannot_be_used(self.folder, error) from error
        return Stream(tokens, offsets, prompts)

    def _map(self, folder: OwnFolder, split: str, part: str) -> np.ndarray:
        name, (count_name, dtype) = f"{split}.{part}", _parts(self.tokenizer)[part]
        count = self.index[split][count_name]
        if not count:
            return np.zeros(0, dtype)
        with folder.open(name, "read") as file:
            index_file.check_content(
                folder,
                name,
                file,
                count * dtype.itemsize,
                self.index["checksums"][name],
                dtype=dtype,
                below=self.tokenizer.vocab_size if part == "tokens" else None,
            )
            return np.memmap(file, dtype, "r", shape=(count,))


def tokenized(
    reader: Reader,
    tokenizer: Tokenizer,
    *,
    held_out_fraction: float,
    cache_dir: Path,
    name: str,
) -> Entry:
    """The tokens of all documents of a reader, from the cache if it has them.

    Args:
      reader: Reader of the documents.
      tokenizer: Tokenizer of the text, or the one that made files with token ids.
      held_out_fraction: Share of the documents that go to `held_out`.
      cache_dir: Folder of all entries.
      name: Name of the source, for messages.

    Raises:
      DataError: The text cannot be read or used, the cache cannot be written, or another process
        holds the lock without progress.
    """
    fingerprint = _fingerprint(reader, tokenizer, held_out_fraction)
    path = cache_dir / _key(fingerprint)
    try:
        with OwnFolder(path, make=True) as folder:
            if not folder.has("index.json"):
                with locked(folder, name) as touch:
                    # Another process may have made the entry during the wait.
                    if not folder.has("index.json"):
                        _tell_of_older(fingerprint, cache_dir, name)
                        writing = _Writing(reader, tokenizer, held_out_fraction, folder)
                        writing.run([size for _, size, _ in fingerprint["files"]], touch, name)
                        if _fingerprint(reader, tokenizer, held_out_fraction) != fingerprint:
                            raise DataError(f"{name} changed while it was read; start again")
                        folder.rename("progress.json", "index.json")
            index = index_file.read(folder, "index.json")
    except OSError as error:
        raise _cannot_be_used(path, error) from error
    return Entry(folder=path, index=index, tokenizer=tokenizer)


def _cannot_be_used(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"the cache {folder} cannot be used ({error.strerror or error}); name another folder with "
        "--data.cache-dir"
    )


def _key(fingerprint: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:32]


def _tell_of_older(fingerprint: dict[str, Any], cache_dir: Path, name: str) -> None:
    """Prints why text is tokenized again that an earlier version of this code has tokenized."""
    for version in range(1, FORMAT_VERSION):
        older = cache_dir / _key(fingerprint | {"version": version})
        if older.is_dir():
            print(
                f"{name}: tokenizing again, because {older} is of version {version} of the cache, "
                f"and this is version {FORMAT_VERSION}; that folder may be removed",
                flush=True,
            )


def _token_dtype(tokenizer: Tokenizer) -> np.dtype:
    return np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")


def _parts(tokenizer: Tokenizer) -> dict[str, tuple[str, np.dtype]]:
    """For each file of a split, the name of the count of its items, and their dtype."""
    return {
        "tokens": ("tokens", _token_dtype(tokenizer)),
        "offsets": ("documents", np.dtype("<i8")),
        "prompts": ("documents", np.dtype("<i4")),
    }


def _fingerprint(reader: Reader, tokenizer: Tokenizer, held_out_fraction: float) -> dict[str, Any]:
    """Everything that the files of an entry depend on."""
    files = []
    for path in reader.files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(
                f"{path} cannot be read ({error.strerror}); check the file and its permissions"
            ) from error
        files.append([str(path.absolute()), status.st_size, status.st_mtime_ns])
    # Only where files are read in this way, so that other text keeps its key.
    of_reading = {}
    if reader.piece_bytes != PIECE_BYTES:
        of_reading["piece_bytes"] = reader.piece_bytes
    if reader.preferences:
        of_reading["preferences"] = True
    if reader.chat_template is not None:
        # Not "template": older entries with that name lack tools and some special tokens.
        of_reading["chat"] = dataclasses.asdict(reader.chat_template)
    return {
        "version": FORMAT_VERSION,
        "files": files,
        "tokenizer": tokenizer.fingerprint,
        "text_field": reader.text_field,
        "token_dtype": reader.token_dtype,
        "held_out_fraction": held_out_fraction,
        **of_reading,
    }


class _Writing:
    """Makes an entry, from its beginning or from the last commit of a process that was killed."""

    def __init__(
        self, reader: Reader, tokenizer: Tokenizer, held_out_fraction: float, folder: OwnFolder
    ):
        self.reader, self.tokenizer, self.folder = reader, tokenizer, folder
        self.held_out_fraction = held_out_fraction
        found = folder.has("progress.json")
        index = index_file.read(folder, "progress.json") if found else index_file.beginning()
        self.position = Position(**index["position"])
        if not 0 <= self.position.file < max(len(reader.files), 1):
            reason = f"no file {self.position.file} of {len(reader.files)}"
            raise index_file.damaged(folder.path, "progress.json", reason)
        self.counts: dict[str, dict[str, int]] = {split: index[split] for split in SPLITS}
        self.checksums: dict[str, int] = index["checksums"]
        self.content_hash: str = index["content_hash"]
        self.num_left_out: int = index["left_out"]
        self.num_of_text_field: int = index["of_text_field"]
        self._parts = _parts(tokenizer)

    @property
    def num_tokens(self) -> int:
        """The number of tokens of both splits so far."""
        return sum(self.counts[split]["tokens"] for split in SPLITS)

    def run(self, sizes: list[int], touch: Callable[[], None], name: str) -> None:
        """Reads, tokenizes and writes the documents that are missing.

        Args:
          sizes: Sizes of the reader's files, in bytes.
          touch: Function that tells waiting processes of progress.
          name: Name of the source, for messages.
        """
        before = np.cumsum([0, *sizes]).tolist()
        with contextlib.ExitStack() as stack:
            files = {
                (split, part): stack.enter_context(self._open(split, part))
                for split in SPLITS
                for part in PARTS
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
                    touch()
                    committed = time.monotonic()
            self._commit(files)

    def _open(self, split: str, part: str) -> BinaryIO:
        """Opens a file at its end, after a check of the committed part; cuts off the rest."""
        name, (count, dtype) = f"{split}.{part}", self._parts[part]
        size = self.counts[split][count] * dtype.itemsize
        file = self.folder.open(name, "append")
        try:
            file.seek(0)
            index_file.check_content(
                self.folder, name, file, size, self.checksums[name], dtype=dtype
            )
            file.truncate(size)
        except BaseException:
            file.close()
            raise
        return file

    def _commit(self, files: dict[tuple[str, str], BinaryIO]) -> None:
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
        index_file.write(
            self.folder,
            "progress.json",
            {
                "position": dataclasses.asdict(self.position),
                "content_hash": self.content_hash,
                "checksums": self.checksums,
                "left_out": self.num_left_out,
                "of_text_field": self.num_of_text_field,
                **self.counts,
            },
        )

    def _write(self, batch: list[Document], files: dict[tuple[str, str], BinaryIO]) -> None:
        items = {key: [] for key in files}
        for document, sequences in self._tokenize(batch):
            digest = digest_of(document)
            # A chain of hashes, because progress.json cannot hold the state of one hash.
            chain = bytes.fromhex(self.content_hash) + digest
            if document.prompt is not None:  # the digest does not tell where it ends
                chain += repr([len(text) for text in document.texts]).encode()
            elif has_records((document.path,)):
                self.num_of_text_field += 1
            self.content_hash = hashlib.blake2b(chain, digest_size=16).hexdigest()
            split = SPLITS[is_held_out(digest, self.held_out_fraction)]
            counts = self.counts[split]
            for tokens, prompt_size in sequences:
                items[split, "tokens"].append(tokens)
                items[split, "offsets"].append([counts["tokens"]])
                items[split, "prompts"].append([prompt_size])
                counts["tokens"] += len(tokens)
                counts["documents"] += 1
                counts["prompts"] += prompt_size > 0
        for (split, part), values in items.items():
            content = _joined(values, self._parts[part][1]).tobytes()
            name = f"{split}.{part}"
            self.checksums[name] = zlib.crc32(content, self.checksums[name])
            files[split, part].write(content)

    def _tokenize(
        self, batch: list[Document]
    ) -> Iterator[tuple[Document, list[tuple[Integer[np.ndarray, " _"], int]]]]:
        """Each document that is not empty, with its tokens and the number of those in its prompt.

        A preference has two sequences of tokens, the chosen one first.
        """
        documents = [document for document in batch if not document.is_empty]
        self.num_left_out += len(batch) - len(documents)
        first, later = [], []
        for document in documents:
            prompt, *texts = document.texts
            first.append(prompt)
            (later if document.goes_on else first).extend(texts)
        try:
            from_start = iter(self.tokenizer.encode(first))
            after_start = iter(self.tokenizer.encode_after(later))
        except UnicodeDecodeError:
            raise _not_utf8(documents) from None
        for document in documents:
            prompt = next(from_start)
            encoded = after_start if document.goes_on else from_start
            texts = list(itertools.islice(encoded, len(document.texts) - 1))
            if document.tokens is not None:
                yield document, [(document.tokens, 0)]
                continue
            bos = [self.tokenizer.bos] if document.begins and self.tokenizer.bos is not None else []
            eos = [self.tokenizer.eos] if document.ends else []
            prompt_size = 0 if document.prompt is None else len(bos) + len(prompt)
            dtype = _token_dtype(self.tokenizer)
            yield (
                document,
                [(_joined([bos, prompt, text, eos], dtype), prompt_size) for text in texts],
            )


def _joined(arrays: list[Any], dtype: np.dtype) -> np.ndarray:
    parts = [np.asarray(array).astype(dtype) for array in arrays]
    return np.concatenate(parts) if parts else np.zeros(0, dtype)


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Lists of documents, each for one call of the tokenizer, which uses all cores."""
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
    """The error for the first of the documents that is not UTF-8."""
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
