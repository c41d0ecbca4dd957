"""Which documents are held out: those whose hash, as a fraction of 1, is below the share.

So the same document is on the same side in every file, source and run. A prompt with its completion
has the hash of the joined text, and is on the same side as that text. A text of a few hundred KiB
has few pieces of 64 KiB, and most often all of them are on one side. Such a text gets smaller
pieces.
"""

import dataclasses
import hashlib

from train.data.files import PIECE_BYTES, TEXT_SUFFIXES, Document, Reader

_LEAST_PIECE_BYTES = 1 << 10  # a page of a book; a smaller piece teaches little
_SMALL_BYTES = 1 << 24  # 256 pieces, which are on one side once in 500,000 texts if 5% is held out


def digest_of(document: Document) -> bytes:
    """The hash of a document's content, of 16 bytes."""
    return hashlib.blake2b(document.content, digest_size=16).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether the document with a hash is held out."""
    return int.from_bytes(digest[:8]) < fraction * 2**64


def with_both_sides(reader: Reader, fraction: float, name: str) -> Reader:
    """The reader, with pieces that are halved until one is held out and another is not.

    Pieces stay as they are if none of 1 KiB or more do, and in files of more than 16 MiB. A line
    tells of smaller pieces. They depend on the text and `fraction` alone, so a run that resumes has
    the same ones.

    Args:
      reader: Reader with pieces of the usual size.
      fraction: Share of the documents to hold out.
      name: Name of the source, for the line.

    Raises:
      DataError: A file cannot be read or used.
    """
    if not 0 < fraction < 1 or not _is_small_text(reader):
        return reader
    size = PIECE_BYTES
    while size >= _LEAST_PIECE_BYTES:
        smaller = dataclasses.replace(reader, piece_bytes=size)
        if _has_both_sides(smaller, fraction):
            if size < PIECE_BYTES:
                print(
                    f"{name}: read in pieces of {size >> 10} KiB, because all pieces of "
                    f"{2 * size >> 10} KiB are held out, or none; --data.held-out-path names "
                    "other text to hold out",
                    flush=True,
                )
            return smaller
        size //= 2
    return reader


def _is_small_text(reader: Reader) -> bool:
    has_text = any(path.suffix.lower() in TEXT_SUFFIXES for path in reader.files)
    try:
        return has_text and sum(path.stat().st_size for path in reader.files) <= _SMALL_BYTES
    except OSError:
        return False  # the error of reading the files names the one


def _has_both_sides(reader: Reader, fraction: float) -> bool:
    sides = set[bool]()
    for document in reader.documents():
        if not document.is_empty:
            sides.add(is_held_out(digest_of(document), fraction))
        if len(sides) == 2:
            return True
    return False
