"""Makes a file of tokens from a folder of text, for a run on a machine without that text.

    python -m benchmarks.training.make_tokens FOLDER tokens.npz --megabytes 160

It takes the text files of the folder and of the folders below it. Files of equal content count
once. The hash of a file's content gives the order of the files and decides which are held out. The
order is followed until the files have as much text as asked for. A byte-level BPE is trained on the
first part of it.

The file has four arrays. `train` and `held_out` are tokens in uint16, where an end-of-text token
ends each document. `end_of_text` is that token, and `token_bytes` has the bytes of text that each
token stands for. LZMA makes the file 30 % smaller than `numpy.savez_compressed` would, and
`numpy.load` reads it.
"""

import contextlib
import hashlib
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import command
from benchmarks.training.data import train_tokenizer
from train.data.files import TEXT_SUFFIXES, find_files
from train.data.tokenizer import HuggingFaceTokenizer

_AT_ONCE = 256  # documents that are encoded together
_TOKENIZER_BYTES = 30 * 10**6  # of text, on which the BPE is trained


def read_documents(folder: Path, num_bytes: int) -> dict[str, bytes]:
    """Texts by the hash of their content, in the order of the hashes.

    Args:
      folder: Folder of the text files. Files that are not UTF-8 are left out.
      num_bytes: Size from which no further text is taken.
    """
    found = {}
    for path in find_files(folder):
        content = path.read_bytes()
        if path.suffix.lower() in TEXT_SUFFIXES and content.strip():
            with contextlib.suppress(UnicodeDecodeError):
                content.decode()
                found[hashlib.sha256(content).hexdigest()] = content
    chosen: dict[str, bytes] = {}
    size = 0
    for key in sorted(found):
        if size >= num_bytes:
            break
        chosen[key] = found[key]
        size += len(found[key])
    return chosen


def is_held_out(key: str, every: int) -> bool:
    """Whether the document with this hash is held out; one in `every` is."""
    # The first digits give the order, so the choice takes the last digits.
    return int(key[-8:], 16) % every == 0


def encode(texts: Sequence[bytes], tokenizer: HuggingFaceTokenizer) -> np.ndarray:
    """The tokens of all texts, uint16, with an end-of-text token after each."""
    parts = [np.zeros(0, np.uint16)]
    for first in range(0, len(texts), _AT_ONCE):
        for tokens in tokenizer.encode(texts[first : first + _AT_ONCE]):
            parts.append(np.append(tokens, tokenizer.eos).astype(np.uint16))
    return np.concatenate(parts)


def write_arrays(path: Path, **arrays: np.ndarray) -> None:
    """Writes an `.npz` file whose members are compressed with LZMA."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for name, array in arrays.items():
            with file.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Parses the command line, reads the folder and writes the file."""
    parser = command.parser("benchmarks.training.make_tokens", __doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--megabytes", type=float, default=160, help="text to take")
    parser.add_argument("--vocab-size", type=int, default=16_384)
    parser.add_argument("--held-out-every", type=int, default=100, metavar="FILES")
    args = parser.parse_args(argv)
    documents = read_documents(args.folder, round(args.megabytes * 10**6))
    train, held_out = [], []
    for key, text in documents.items():
        (held_out if is_held_out(key, args.held_out_every) else train).append(text)
    sample, size = [], 0
    for text in train:
        if size >= _TOKENIZER_BYTES:
            break
        sample.append(text.decode())
        size += len(text)
    with tempfile.TemporaryDirectory() as folder:
        path = train_tokenizer(sample, Path(folder, "tokenizer.json"), args.vocab_size)
        tokenizer = HuggingFaceTokenizer(path)
    arrays = {"train": encode(train, tokenizer), "held_out": encode(held_out, tokenizer)}
    write_arrays(
        args.output,
        **arrays,
        end_of_text=np.array(tokenizer.eos, np.uint16),
        token_bytes=tokenizer.token_bytes,
    )
    for name, texts in (("train", train), ("held_out", held_out)):
        num_bytes = sum(map(len, texts))
        print(f"{name}: {len(texts)} files, {num_bytes:,} bytes, {len(arrays[name]):,} tokens")
    print(f"{args.output}: {args.output.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
