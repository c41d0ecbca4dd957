"""Text without a download: the source of the running Python's standard library, as bytes.

The text has about 10 MB.
"""

import dataclasses
import hashlib
import sysconfig
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt16

from train.data.tokenizer import BOS, EOS

# Folders that differ between machines. Linux distributions put tests, Tk and pip's bootstrap into
# packages of their own; `config-*` and `_sysconfigdata*` hold the paths of Python's build.
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


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents by relative path, split by a hash of the path.

    The split of a document does not depend on other files, so it stays when the corpus gains a
    file.
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
            # The lengths distinguish corpora whose concatenations are equal.
            digest.update(f"{len(path.encode())} {len(content)} {path}".encode())
            digest.update(content)
        return {
            "sha256": digest.hexdigest(),
            "num_files": len(self.files),
            "num_bytes": sum(map(len, self.files.values())),
        }

    def _paths(self, *, held_out: bool) -> list[str]:
        # In the order of hashes, neighbours in the stream, which share rows, come from different
        # packages.
        hashes = {path: zlib.crc32(path.encode()) for path in self.files}
        split = [path for path in hashes if (hashes[path] % _HELD_OUT_EVERY == 0) == held_out]
        return sorted(split, key=lambda path: (hashes[path], path))


def _document(content: bytes) -> UInt16[np.ndarray, " _"]:
    return np.concatenate([[BOS], np.frombuffer(content, np.uint8), [EOS]]).astype(np.uint16)


def read_corpus(root: Path) -> Corpus:
    """All Python files under `root`.

    Empty files are left out. If files have equal contents, only the first by path is kept, so no
    held-out document is also a training document under another name.

    Raises:
      ValueError: There is none.
    """
    files: dict[str, bytes] = {}
    seen: set[bytes] = set()
    for path in sorted(root.rglob("*.py"), key=lambda path: path.relative_to(root).as_posix()):
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
        raise ValueError(f"no Python file under {root}; give another directory")
    return Corpus(files)


def stdlib_corpus() -> Corpus:
    """The source of the running Python's standard library.

    It differs between Python versions; `Corpus.fingerprint` tells them apart.
    """
    return read_corpus(Path(sysconfig.get_path("stdlib")))
