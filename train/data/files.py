"""Reads documents from files, one at a time, from any document on.

| suffix | documents |
|---|---|
| text (`TEXT_SUFFIXES`) | the file; one of more than 64 KiB becomes pieces, cut at line ends |
| `.jsonl` | one object a line, with a text, messages, a prompt and completion, or a preference |
| `.parquet` | one row, with the same columns |
| `.bin` | token ids, little-endian, no header; each end-of-text token ends a document |
| `.npy` | the same token ids in one axis of any integer dtype |

The fields have TRL's names: "messages", "prompt" and "completion", and "prompt", "chosen" and
"rejected" for a preference. Prompts and what follows them are texts or lists of messages, which
`chat` makes into texts. The last one of "messages" is the completion. The field "tools" goes to
the chat template.

A reader holds a line, a batch of rows or a piece of a file at a time, never a whole file. It reads
only regular files and links to them, because a FIFO would block and a device has no end.

Above 450 lines, because the readers of all formats must count places in a file in the same way.
"""

import contextlib
import dataclasses
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Integer

from train.data.chat import ChatTemplate, is_messages
from train.data.errors import DataError
from train.data.records import parquet_rows, pyarrow_modules, shortened, utf8
from train.data.regular import check_regular, kind

TEXT_SUFFIXES = frozenset(
    ".c .cc .cpp .cs .css .cu .go .h .hpp .html .java .js .kt .lua .md .php .pl .py .r .rb .rs "
    ".rst .scala .sh .sql .swift .tex .ts .txt .yaml".split()
)
TOKEN_SUFFIXES = frozenset({".bin", ".npy"})
RECORD_SUFFIXES = frozenset({".jsonl", ".parquet"})
SUFFIXES = TEXT_SUFFIXES | TOKEN_SUFFIXES | RECORD_SUFFIXES

PIECE_BYTES = 1 << 16  # of a text file, unless `held_out` makes them smaller
_LINE_BYTES = 1 << 26  # ten times the longest book; a longer line is a file without line ends
_PIECE_TOKENS = 1 << 20  # of a document in a token file
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_COMPLETION: tuple[str, ...] = ("prompt", "completion")
_MESSAGES: tuple[str, ...] = ("messages",)
_PREFERENCE: tuple[str, ...] = ("prompt", "chosen", "rejected")


@dataclasses.dataclass(frozen=True, slots=True)
class Position:
    """A place between two documents.

    Attributes:
      file: Index of the file.
      offset: Place in the file, in bytes of text, rows of a parquet file, or tokens.
      line: Number of lines or rows before the place.
      num_bytes: Number of bytes of the file before the place, for a progress bar.
    """

    file: int = 0
    offset: int = 0
    line: int = 0
    num_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A document, or a piece of a long one.

    Attributes:
      path: File of the document.
      after: Start of the next document.
      line: Line or row in the file, from 1; 0 if the file has none.
      text: Text in UTF-8, after the prompt if there is one.
      prompt: Text before it that is not predicted.
      rejected: The other text after the prompt, of a preference; `text` is the chosen one.
      tokens: Tokens of a token file, in place of text.
      begins: Whether this is the first piece.
      ends: Whether this is the last piece.
    """

    path: Path
    after: Position
    line: int = 0
    text: bytes = b""
    prompt: bytes | None = None
    rejected: bytes | None = None
    tokens: Integer[np.ndarray, " _"] | None = None
    begins: bool = True
    ends: bool = True

    @property
    def where(self) -> str:
        """The file and the line, for messages."""
        return f"{self.path}:{self.line}" if self.line else str(self.path)

    @property
    def content(self) -> bytes:
        """The bytes that distinguish it from other documents."""
        if self.tokens is not None:
            return self.tokens.astype("<u4").tobytes()
        return b"".join(self.texts)

    @property
    def texts(self) -> tuple[bytes, ...]:
        """The prompt, empty if there is none, and the texts that may follow it."""
        return self.prompt or b"", self.text, *(() if self.rejected is None else (self.rejected,))

    @property
    def goes_on(self) -> bool:
        """Whether the texts after the prompt go on after a prompt, or after an earlier piece."""
        return not self.begins if self.prompt is None else bool(self.prompt)

    @property
    def num_bytes(self) -> int:
        """The number of bytes that it holds."""
        return sum(map(len, self.texts)) + (0 if self.tokens is None else self.tokens.nbytes)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to predict. A preference ends in a token that is predicted."""
        return self.rejected is None and not len(self.text if self.tokens is None else self.tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reader:
    """All documents of some files, in the order of the files.

    Attributes:
      files: Files, from `find_files`.
      text_field: Field, or column, of the text.
      token_dtype: Dtype of `.bin` files, which holds every id below `vocab_size`.
      vocab_size: Bound of the ids in token files.
      end_of_text: Id that ends a document in token files.
      preferences: Whether every record is a preference.
      chat_template: Template for messages, of files that have records.
      piece_bytes: Largest size of a piece of a text file.
    """

    files: tuple[Path, ...]
    text_field: str
    token_dtype: Literal["uint16", "uint32"]
    vocab_size: int
    end_of_text: int
    preferences: bool = False
    chat_template: ChatTemplate | None = None
    piece_bytes: int = PIECE_BYTES

    def __post_init__(self):
        for path in self.files:
            is_bin = path.suffix.lower() == ".bin"
            if is_bin and self.vocab_size - 1 > np.iinfo(self.token_dtype).max:
                raise DataError(
                    f"{path}: --data.token-dtype {self.token_dtype} cannot hold the tokenizer's "
                    f"{self.vocab_size:,} tokens; write the file as uint32, and set "
                    "--data.token-dtype uint32"
                )

    def documents(self, start: Position = Position()) -> Iterator[Document]:
        """The documents from `start` on.

        Raises:
          DataError: A file cannot be read or used; the message names the file, the place and the
            remedy.
        """
        for index in range(start.file, len(self.files)):
            begin = start if index == start.file else Position(file=index)
            path = self.files[index]
            try:
                check_regular(path)
                yield from self._read(path, begin)
            except OSError as error:
                raise DataError(
                    f"{path} cannot be read ({error.strerror or error}); check the file and its "
                    "permissions"
                ) from error

    def _read(self, path: Path, begin: Position) -> Iterator[Document]:
        suffix = path.suffix.lower()
        if self.preferences and suffix not in RECORD_SUFFIXES:
            raise DataError(
                f"{path} has no preferences, which are records in .jsonl or .parquet; name those "
                "files alone with --data.path"
            )
        match suffix:
            case ".jsonl":
                return self._json_lines(path, begin)
            case ".parquet":
                return self._parquet(path, begin)
            case suffix if suffix in TOKEN_SUFFIXES:
                return self._tokens(path, begin)
            case _:
                return _text(path, begin, self.piece_bytes)

    def _json_lines(self, path: Path, begin: Position) -> Iterator[Document]:
        with path.open("rb") as file:
            file.seek(begin.offset)
            offset, number = begin.offset, begin.line
            while line := file.readline(_LINE_BYTES + 1):
                offset, number = offset + len(line), number + 1
                if len(line) > _LINE_BYTES:
                    raise DataError(
                        f"{path}:{number}: the line has more than {_LINE_BYTES:,} bytes; put each "
                        "document on a line of its own, or remove the line"
                    )
                after = Position(begin.file, offset, number, offset)
                if number == 1:
                    line = line.removeprefix(_BYTE_ORDER_MARK)
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    record = json.loads(line)
                except UnicodeDecodeError as error:
                    raise DataError(
                        f"{where}: not UTF-8 at byte {error.start} of the line; convert the file"
                    ) from error
                except ValueError as error:
                    raise DataError(
                        f"{where}: not JSON ({error}); repair or remove the line"
                    ) from error
                except RecursionError as error:
                    raise DataError(f"{where}: nested too deeply; remove the line") from error
                if not isinstance(record, dict):
                    raise DataError(
                        f"{where}: a JSON object is expected, not {shortened(record)}; repair or "
                        "remove the line"
                    )
                yield self._document(path, after, number, record, where)

    def _document(
        self, path: Path, after: Position, number: int, record: dict[str, Any], where: str
    ) -> Document:
        fields = self._fields(list(record), where)
        if self.preferences and fields != _PREFERENCE:
            missing = [name for name in _PREFERENCE if name not in fields]
            raise DataError(
                f"{where}: no field {', '.join(map(repr, missing))}; a preference has "
                f"'prompt', 'chosen' and 'rejected', but it has {shortened(list(record))}"
            )
        if fields == (self.text_field,):
            return Document(path, after, number, utf8(record, self.text_field, where))
        if fields == _MESSAGES:
            record, fields = record | _last_message_apart(record["messages"], where), _COMPLETION
        from_messages = any(is_messages(record[name]) for name in fields)
        if from_messages:
            prompt, text, *rejected = self._from_messages(record, fields, where)
        else:
            prompt, text, *rejected = (utf8(record, name, where) for name in fields)
        return Document(
            path,
            after,
            number,
            text,
            prompt,
            rejected[0] if rejected else None,
            # The template writes the tokens that begin and end a text, if the model has them.
            begins=not from_messages,
            ends=not from_messages,
        )

    def _fields(self, names: list[str], where: str) -> tuple[str, ...]:
        """The fields that hold the texts, of the fields or columns that there are."""
        if self.preferences:
            return tuple(name for name in _PREFERENCE if name in names)
        for fields in ((self.text_field,), _COMPLETION, _MESSAGES):
            if set(fields) <= set(names):
                return fields
        remedy = "name one with --data.text-field"
        if set(_PREFERENCE) <= set(names):
            remedy += (
                "; only training with --objective dpo reads preferences, so elsewhere write the "
                "chosen text as 'completion'"
            )
        raise DataError(
            f"{where}: no field {self.text_field!r} or 'messages', and not both of 'prompt' and "
            f"'completion'; it has {shortened(names)}; {remedy}"
        )

    def _from_messages(
        self, record: dict[str, Any], fields: tuple[str, ...], where: str
    ) -> tuple[bytes, ...]:
        """The texts of fields that are lists of messages."""
        if self.chat_template is None:
            raise DataError(
                f"{where}: messages need a chat template; name a tokenizer that has one with "
                "--data.tokenizer, or write texts in place of messages"
            )
        for name in fields:
            if record[name] == []:
                raise DataError(
                    f"{where}: {name!r} is an empty list; give it at least one message, or remove "
                    "the record"
                )
            if not is_messages(record[name]):
                raise DataError(
                    f"{where}: {name!r} is no list of messages, but another field is one; write "
                    "all of them as texts, or all as lists of messages"
                )
        answers = {name: record[name] for name in fields[1:]}
        tools = _tools(record.get("tools"), where)
        return self.chat_template.texts(record[fields[0]], answers, where, tools=tools)

    def _parquet(self, path: Path, begin: Position) -> Iterator[Document]:
        pyarrow, parquet = pyarrow_modules(path)
        size = path.stat().st_size
        try:
            with parquet.ParquetFile(path) as file:
                names = file.schema_arrow.names
                columns = list(self._fields(names, str(path)))
                if columns != [self.text_field] and "tools" in names:
                    columns.append("tools")
                for number, record in parquet_rows(file, columns, begin.offset):
                    read = size * number // max(file.metadata.num_rows, 1)
                    after = Position(begin.file, number, number, read)
                    yield self._document(path, after, number, record, f"{path}:{number}")
        except pyarrow.ArrowException as error:
            raise DataError(f"{path} is not a parquet file: {error}; write it again") from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} holds text that is not UTF-8: {error}; write it again"
            ) from error

    def _tokens(self, path: Path, begin: Position) -> Iterator[Document]:
        tokens = _open_tokens(path, self.token_dtype)
        start = begin.offset
        while start < len(tokens):
            piece = np.asarray(tokens[start : start + _PIECE_TOKENS])
            bad = np.flatnonzero((piece < 0) | (piece >= self.vocab_size))
            if len(bad):
                # A .npy file has its own dtype.
                or_dtype = (
                    ", or its dtype with --data.token-dtype"
                    if path.suffix.lower() == ".bin"
                    else ""
                )
                raise DataError(
                    f"{path}: token {piece[bad[0]]} at index {start + bad[0]} is not one of the "
                    f"tokenizer's {self.vocab_size}; name the tokenizer that made the file with "
                    f"--data.tokenizer{or_dtype}"
                )
            ends = (np.flatnonzero(piece == self.end_of_text) + 1).tolist()
            if start + len(piece) == len(tokens) or not ends:
                ends = sorted({*ends, len(piece)})
            first = 0
            for end in ends:
                num_bytes = (start + end) * tokens.itemsize
                after = Position(begin.file, start + end, num_bytes=num_bytes)
                yield Document(path, after, tokens=piece[first:end])
                first = end
            start += first


def _last_message_apart(messages: Any, where: str) -> dict[str, Any]:
    """The last message as the completion of the others."""
    if not is_messages(messages) or len(messages) < 2:
        raise DataError(
            f"{where}: 'messages' is {shortened(messages)}, not a list of two or more messages "
            "with roles; repair or remove the record"
        )
    role = messages[-1]["role"]
    if role != "assistant":
        raise DataError(
            f"{where}: the last message is of {role!r}, and it is the one to learn; end the record "
            "with a message of 'assistant'"
        )
    return {"prompt": messages[:-1], "completion": messages[-1:]}


def _tools(value: Any, where: str) -> list[Any] | None:
    """The tools of a record, which may be JSON in a text, as in TRL."""
    tools = value
    if isinstance(value, str):
        with contextlib.suppress(ValueError, RecursionError):
            tools = json.loads(value)
    is_list = isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)
    if tools is not None and not is_list:
        raise DataError(
            f"{where}: 'tools' is {shortened(value)}, not a list of objects or such a list as "
            "JSON; repair or remove it"
        )
    return tools


def find_files(path: Path) -> tuple[Path, ...]:
    """`path`, or the files with a known suffix in the folder `path` and below it, sorted.

    Hidden files and folders are left out. Links to folders are left out, too, because two of them
    may lead to the same text, or in a circle. So are files that are not regular files. One line
    tells how many links and files of these two kinds there are, and one line how many files have
    another suffix.

    Raises:
      DataError: No file was found, or `path` is neither a folder nor a regular file.
      OSError: A folder or file cannot be read.
    """
    if path.is_dir():
        files, left_out, others = _walk(path)
        if others:
            suffixes = sorted({file.suffix or file.name for file in others})
            more = " ..." if len(suffixes) > 10 else ""
            print(
                f"{path}: {len(others)} of other types left out: {' '.join(suffixes[:10])}{more}",
                flush=True,
            )
        if left_out:
            first, found = left_out[0]
            print(f"{path}: {len(left_out)} left out, the first: {first} is {found}", flush=True)
        if not files:
            raise DataError(f"{path} has no file with text or tokens ({_known_suffixes()})")
        return tuple(files)
    try:
        check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(
            f"{path} does not exist; give the path of a file or folder that does"
        ) from None
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(
            f"{path}: the format of a file with the suffix {path.suffix!r} is not known; "
            f"decompress, convert or rename it to one of {_known_suffixes()}"
        )
    return (path,)


def suffixes_in(path: Path) -> frozenset[str]:
    """The suffixes, in lower case, of the files that `find_files` finds."""
    files = _walk(path)[0] if path.is_dir() else [path]
    return frozenset(file.suffix.lower() for file in files)


def has_records(files: tuple[Path, ...]) -> bool:
    """Whether a file has records, whose fields may be messages."""
    return any(path.suffix.lower() in RECORD_SUFFIXES for path in files)


def _walk(top: Path) -> tuple[list[Path], list[tuple[Path, str]], list[Path]]:
    """The files in a folder and below it, those left out with the reason, and those of other types.

    The first two lists are sorted.
    """

    def fail(error: OSError) -> None:
        raise error  # os.walk would silently leave out a folder that cannot be listed

    files, left_out, others = [], [], []
    for root, folders, names in os.walk(top, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        left_out += [
            (Path(root, f), "a link to a folder") for f in folders if Path(root, f).is_symlink()
        ]
        for name in names:
            file = Path(root, name)
            if name.startswith("."):
                continue
            if file.suffix.lower() not in SUFFIXES:
                others.append(file)
                continue
            try:
                found = kind(file.stat().st_mode)
            except OSError as error:
                if not file.is_symlink() or error.errno not in (errno.ENOENT, errno.ELOOP):
                    raise
                found = "a link to nothing"
            if found:
                left_out.append((file, found))
            else:
                files.append(file)
    parts = lambda file: file.relative_to(top).parts
    return sorted(files, key=parts), sorted(left_out, key=lambda entry: parts(entry[0])), others


def _known_suffixes() -> str:
    return " ".join(sorted(SUFFIXES))


def _text(path: Path, begin: Position, piece_bytes: int) -> Iterator[Document]:
    with path.open("rb") as file:
        marked = file.read(len(_BYTE_ORDER_MARK)) == _BYTE_ORDER_MARK
        first = len(_BYTE_ORDER_MARK) if marked else 0
        offset = max(begin.offset, first)
        while True:
            file.seek(offset)
            piece = file.read(piece_bytes + 1)  # a byte more shows whether this is the last piece
            if not piece:
                return
            last = len(piece) <= piece_bytes
            size = len(piece) if last else _cut(piece)
            after = Position(begin.file, offset + size, num_bytes=offset + size)
            yield Document(path, after, text=piece[:size], begins=offset == first, ends=last)
            if last:
                return
            offset += size


def _cut(piece: bytes) -> int:
    """The size of a piece that ends, before its last byte, with a line, a word or a character."""
    for separator in (b"\n", b" "):
        if size := piece.rfind(separator, 0, -1) + 1:
            return size
    size = len(piece) - 1
    while size > 1 and piece[size] & 0xC0 == 0x80:  # inside of a UTF-8 sequence
        size -= 1
    return size


def _open_tokens(path: Path, dtype: str) -> np.ndarray:
    if path.suffix.lower() == ".npy":
        try:
            tokens = np.lib.format.open_memmap(path, mode="r")
        except OSError:
            raise
        except Exception as error:  # NumPy parses the header as Python, which may raise anything
            raise DataError(
                f"{path} is not an .npy file of numbers: {error}; write it again"
            ) from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{path} has shape {tokens.shape} and dtype {tokens.dtype}; write one axis of "
                "integers"
            )
        return tokens
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size % width:
        raise DataError(
            f"{path}: {size} bytes are no whole number of {dtype}; name the dtype of the tokens "
            "with --data.token-dtype"
        )
    return np.memmap(path, np.dtype(dtype).newbyteorder("<"), "r") if size else np.zeros(0, dtype)
