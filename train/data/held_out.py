"""Which documents are held out: those whose hash, as a fraction of 1, is below the share.

So the same document is on the same side in every file, source and run. A prompt with its completion
has the hash of the joined text, and is on the same side as that text. A text of a few hundred KiB
has few pieces of 64 KiB. Most often none of them is held out, or far more than the share. Such a
text gets smaller pieces.
"""

import dataclasses
import hashlib

from train.data.files import PIECE_BYTES, TEXT_SUFFIXES, Document, Reader

# Down to 1 KiB, a page of a book; a smaller piece teaches little.
_SIZES = tuple(PIECE_BYTES >> halvings for halvings in range(7))
_SMALL_BYTES = 1 << 24  # 256 pieces; for a share of 5%, above 10% are held out once in 1,800 texts


def digest_of(document: Document) -> bytes:
    """The hash of a document's content, of 16 bytes."""
    return hashlib.blake2b(document.content, digest_size=16).digest()


def is_held_out(digest: bytes, fraction: float) -> bool:
    """Whether the document with a hash is held out."""
    return int.from_bytes(digest[:8]) < fraction * 2**64


def with_both_sides(reader: Reader, fraction: float, name: str) -> Reader:
    """The reader, with pieces that are halved until some are held out, but at most twice the share.

    If no size down to 1 KiB does that, the pieces have the size that comes nearest to the share,
    among those with pieces on both sides. They stay as they are if there is no such size, or if the
    files have more than 16 MiB. A line tells of smaller pieces. They depend on the text and
    `fraction` alone, so a run that resumes has the same ones.

    Args:
      reader: Reader with pieces of the usual size.
      fraction: Share of the documents to hold out.
      name: Name of the source, for the line.

    Raises:
      DataError: A file cannot be read or used.
    """
    if not 0 < fraction < 1 or not _is_small_text(reader):
        return reader
    shares: dict[int, float] = {}
    for size in _SIZES:
        share = _share(dataclasses.replace(reader, piece_bytes=size), fraction)
        if 0 < share < 1:
            shares[size] = share
            if share <= 2 * fraction:
                break
    size = min(shares, key=lambda size: abs(shares[size] - fraction), default=PIECE_BYTES)
    if size < PIECE_BYTES:
        print(
            f"{name}: read in pieces of {size >> 10} KiB, because larger ones hold out all of the "
            f"text, none, or more than {2 * fraction:.0%}; --data.held-out-path names other text "
            "to hold out",
            flush=True,
        )
    return dataclasses.replace(reader, piece_bytes=size)


def _is_small_text(reader: Reader) -> bool:
    has_text = any(path.suffix.lower() in TEXT_SUFFIXES for path in reader.files)
    try:
        return has_text and sum(path.stat().st_size for path in reader.files) <= _SMALL_BYTES
    except OSError:
        return False  # the error of reading the files names the one


def _share(reader: Reader, fraction: float) -> float:
    """The share of the bytes that is held out, without documents that are left out."""
    sizes = [0, 0]
    for document in reader.documents():
        if not document.is_empty:
            sizes[is_held_out(digest_of(document), fraction)] += document.num_bytes
    return sizes[True] / max(sum(sizes), 1)
