"""Tokenizers: bytes, or a tokenizer.json of Hugging Face's tokenizers."""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import tokenizers
from jaxtyping import Int32, Integer

from train.data.errors import DataError
from train.data.regular import read_regular

BOS = 256
EOS = 257
BYTE_VOCAB_SIZE = 258

# The largest tokenizer.json that is known has 34 MB, and 262,144 tokens.
_FILE_BYTES = 1 << 29
_VOCAB_SIZE = 1 << 24

# The tokens that begin and end a text if no tokenizer_config.json names them; the first that the
# tokenizer has counts.
_BOS_TOKENS = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>")
_EOS_TOKENS = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>")


@runtime_checkable
class Tokenizer(Protocol):
    """The interface of a tokenizer.

    Attributes:
      vocab_size: Largest token plus one.
      bos: Token before a document, or None.
      eos: Token after a document.
      fingerprint: Text that differs between tokenizers that make different tokens.
      token_bytes: Number of bytes of text that each token stands for.
    """

    vocab_size: int
    bos: int | None
    eos: int
    fingerprint: str
    token_bytes: Int32[np.ndarray, " V"]

    def encode(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        """The tokens of each text, without BOS and EOS.

        Raises:
          UnicodeDecodeError: A text is not UTF-8, and the tokenizer needs UTF-8.
        """
        ...

    def encode_after(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        """The tokens of each text, where each goes on after another text.

        `encode` may put a space in front of a text, as Llama 2's tokenizer does. This does not.

        Raises:
          UnicodeDecodeError: A text is not UTF-8, and the tokenizer needs UTF-8.
        """
        ...

    def decode(self, tokens: Iterable[Any]) -> str:
        """The text of tokens, without special tokens; broken UTF-8 is replaced."""
        ...


class ByteTokenizer:
    """A token for each byte, for text in any encoding, and two tokens for begin and end."""

    vocab_size = BYTE_VOCAB_SIZE
    bos: int | None = BOS
    eos = EOS
    fingerprint = "bytes"

    def __init__(self):
        self.token_bytes = (np.arange(BYTE_VOCAB_SIZE) < BOS).astype(np.int32)

    def encode(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        """See `Tokenizer`."""
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode_after(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        """See `Tokenizer`."""
        return self.encode(texts)

    def decode(self, tokens: Iterable[Any]) -> str:
        """See `Tokenizer`."""
        return bytes(t for t in map(int, tokens) if t < BOS).decode(errors="replace")


BYTES = ByteTokenizer()


def start_of_document(text: str, tokenizer: Tokenizer) -> Integer[np.ndarray, " S"]:
    """BOS, if the tokenizer has one, and the tokens of `text`."""
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    return np.concatenate([np.array(bos, np.int64), tokenizer.encode([text.encode()])[0]])


def decode_after(prompt: Iterable[Any], tokens: Iterable[Any], tokenizer: Tokenizer) -> str:
    """The text that `tokens` add to the text of `prompt`.

    `tokenizer.decode(tokens)` may lack their first space, because it takes off the space that
    `encode` puts in front of a text.
    """
    prompt, tokens = list(prompt), list(tokens)
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
    if whole.startswith(before):
        return whole[len(before) :]
    return tokenizer.decode(tokens)  # a decoder that changes the text before


class HuggingFaceTokenizer:
    """A tokenizer.json, without the special tokens, truncation and padding that it may add.

    If a text spells out a special token, it becomes that token, as in Hugging Face's libraries.

    A tokenizer of bytes (Llama 3, GPT-2, Qwen) counts the bytes of text exactly, after its
    normalizer if it has one. Other tokenizers change the text: they put a space in front or
    normalize Unicode. For them a token stands for the bytes of its own text in UTF-8, and an
    unknown or special token for none.

    Attributes:
      path: Path of the file.
      tokens_of_bytes: Whether the tokenizer counts bytes exactly.
    """

    def __init__(self, path: Path, *, bos_token: str | None = None, eos_token: str | None = None):
        """Reads `path`, or tokenizer.json in the folder `path`.

        Args:
          path: Path of the file or of its folder.
          bos_token: Token that begins a document; "" for none. None takes the token that
            tokenizer_config.json names or, without that file, a usual name.
          eos_token: Token that ends a document. None chooses as for `bos_token`; "" is refused.

        Raises:
          DataError: The file cannot be read, or has no such token.
        """
        if path.is_dir():
            path = path / "tokenizer.json"
        self.path = path
        content = _read_tokenizer(path)
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the bindings raise `Exception` itself
            raise DataError(
                f"{path} is not a tokenizer.json of Hugging Face's tokenizers ({error}); name one "
                "with --data.tokenizer"
            ) from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab().values(), default=-1)
        if self.vocab_size > _VOCAB_SIZE:
            raise DataError(
                f"{path} has a token {self.vocab_size - 1}, above the allowed {_VOCAB_SIZE - 1}; "
                "repair its vocabulary"
            )
        self.bos = self._special("bos_token", bos_token, _BOS_TOKENS)
        if eos_token == "":
            raise DataError(
                "--data.eos-token '' names no token, and every text needs one that ends it; name "
                f"one of {path}, or leave the flag out"
            )
        eos = self._special("eos_token", eos_token, _EOS_TOKENS)
        if eos is None:
            raise DataError(
                f"{path} does not say which token ends a text; name one with --data.eos-token"
            )
        self.eos = eos
        description = json.loads(content)
        self._after, suffix = self._tokenizer, ""
        parts = ("normalizer", "pre_tokenizer")
        plain = description | {p: _without_space_in_front(description.get(p)) for p in parts}
        if any(plain[p] != description.get(p) for p in parts):
            self._after, suffix = tokenizers.Tokenizer.from_str(json.dumps(plain)), " after"
            self._after.no_truncation()
            self._after.no_padding()
        digest = hashlib.sha256(content + f"{self.bos} {self.eos}{suffix}".encode())
        self.fingerprint = digest.hexdigest()
        self.tokens_of_bytes = "ByteLevel" in _types(description.get("decoder"))
        self.token_bytes = self._token_bytes()

    def encode(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        """See `Tokenizer`. This uses all cores."""
        return _encoded(self._tokenizer, texts)

    def encode_after(self, texts: Sequence[bytes]) -> list[Integer[np.ndarray, " _"]]:
        """See `Tokenizer`. This uses all cores."""
        return _encoded(self._after, texts)

    def decode(self, tokens: Iterable[Any]) -> str:
        """See `Tokenizer`."""
        known = [t for t in map(int, tokens) if t < self.vocab_size]  # a model may have more tokens
        return self._tokenizer.decode(known, skip_special_tokens=True)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """The content of tokenizer_config.json beside the file; nothing if there is none.

        Raises:
          DataError: It cannot be read.
        """
        file = self.path.with_name("tokenizer_config.json")
        try:
            content = json.loads(read_regular(file, _FILE_BYTES))
        except FileNotFoundError:
            return {}
        except DataError:  # it is a ValueError with a remedy of its own
            raise
        except (OSError, ValueError, RecursionError) as error:
            raise DataError(f"{file} cannot be read: {error}; repair or remove it") from error
        if not isinstance(content, dict):
            raise DataError(f"{file} is no JSON object; repair or remove it")
        return content

    @property
    def vocabulary(self) -> dict[str, int]:
        """The number of each token."""
        return self._tokenizer.get_vocab()

    def token(self, index: int | None) -> str | None:
        """The text of a token."""
        return None if index is None else self._tokenizer.id_to_token(index)

    def _token_bytes(self) -> Int32[np.ndarray, " V"]:
        sizes = np.zeros(self.vocab_size, np.int32)
        added = self._tokenizer.get_added_tokens_decoder()
        unknown = getattr(self._tokenizer.model, "unk_token", None)
        for token, index in self._tokenizer.get_vocab().items():
            if index in added:
                sizes[index] = 0 if added[index].special else len(added[index].content.encode())
            elif token == unknown:
                continue
            elif self.tokens_of_bytes:
                sizes[index] = len(token)  # one character stands for each byte
            elif re.fullmatch(r"<0x[0-9A-F]{2}>", token):
                sizes[index] = 1
            else:
                sizes[index] = len(token.replace("▁", " ").encode())
        return sizes

    def _special(self, name: str, given: str | None, usual: Sequence[str]) -> int | None:
        if given == "":
            return None
        if given is None:
            # Without a token in tokenizer_config.json, the usual names.
            found = (token_text(self.config[name]),) if name in self.config else usual
            indices = (self._tokenizer.token_to_id(token) for token in found if token is not None)
            return next((i for i in indices if i is not None), None)
        index = self._tokenizer.token_to_id(given)
        if index is None:
            flag = f"--data.{name.replace('_', '-')}"
            raise DataError(
                f"{self.path} has no token {given!r}; name one of its tokens with {flag}"
            )
        return index


def _read_tokenizer(path: Path) -> bytes:
    try:
        return read_regular(path, _FILE_BYTES)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); --data.tokenizer names a tokenizer.json or "
            "its folder"
        ) from error


def token_text(value: Any) -> str | None:
    """The text of a special token in tokenizer_config.json; None if the value is no token.

    A token is a text, or an object with the text as its "content".
    """
    match value:
        case str():
            return value
        case {"content": str(content)}:
            return content
        case _:
            return None


def _encoded(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[bytes]
) -> list[Integer[np.ndarray, " _"]]:
    decoded = [text.decode() for text in texts]
    encodings = tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
    return [np.array(encoding.ids, np.uint32) for encoding in encodings]


def _without_space_in_front(part: Any) -> Any:
    """A normalizer or pre-tokenizer of a tokenizer.json that puts nothing in front of a text.

    SentencePiece's tokenizers have the normalizer Prepend or the pre-tokenizer Metaspace for that,
    and GPT-2's the field "add_prefix_space".
    """
    match part:
        case {"type": "Sequence"}:
            names = part.keys() & {"normalizers", "pretokenizers"}
            return part | {
                name: [p for p in map(_without_space_in_front, part[name]) if p is not None]
                for name in names
            }
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace"}:
            return part | {"prepend_scheme": "never"} | _no_prefix_space(part)
        case {"add_prefix_space": True}:
            return part | _no_prefix_space(part)
        case _:
            return part


def _no_prefix_space(part: dict[str, Any]) -> dict[str, Any]:
    return {"add_prefix_space": False} if "add_prefix_space" in part else {}


def _types(decoder: Any) -> set[str]:
    """The types of a component of a tokenizer.json, and of its parts."""
    if not isinstance(decoder, dict):
        return set()
    parts = [_types(part) for part in decoder.get("decoders", [])]
    return {str(decoder.get("type"))}.union(*parts)
