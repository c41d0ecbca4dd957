"""Reads the files of a Hugging Face folder, and checks them before.

A folder can come from anywhere. One of its files may be a pipe that never ends, may be larger than
the memory or damaged, or may name files outside of the folder. Each error names the file and the
reason.
"""

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# The index of a model of 670 billion parameters has 9 MiB, a tokenizer of 262,144 tokens 32 MiB.
MAX_JSON_BYTES = 64 * 1024**2
MAX_TOKENIZER_BYTES = 512 * 1024**2
_PIECE_BYTES = 64 * 1024**2


def check_file(file: Path, max_bytes: int | None = None) -> None:
    """Raises unless `file` is a regular file, or a link to one, of at most `max_bytes`.

    Raises:
      OSError: There is no such file, or its status cannot be read.
      ValueError: It is a folder, a pipe or a device, or it is too large.
    """
    _check_status(file, os.stat(file), max_bytes)


def read_json(file: Path) -> Any:
    """The content of a JSON file of at most `MAX_JSON_BYTES`.

    Raises:
      OSError: The file cannot be read.
      ValueError: It is not a regular file, is too large, or is not JSON.
    """
    # Without the flag, opening a pipe waits until another process writes.
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    try:
        _check_status(file, os.fstat(descriptor), MAX_JSON_BYTES)
    except ValueError:
        os.close(descriptor)
        raise
    with open(descriptor, "rb") as stream:
        content = stream.read(MAX_JSON_BYTES)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}; repair it, or download it again") from error


def _check_status(file: Path, status: os.stat_result, max_bytes: int | None) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"{file} is not a regular file but a {_kind(status.st_mode)}; put a copy of the file "
            "in its place"
        )
    if max_bytes is not None and status.st_size > max_bytes:
        raise ValueError(
            f"{file} has {status.st_size:,} bytes, more than the {max_bytes:,} that are read; "
            "put the right file in its place"
        )


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "folder", stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
    return kinds.get(stat.S_IFMT(mode), "device")


def check_stays_inside(file: Path, folder: Path) -> None:
    """Raises if `file` is a link that leads out of its folder.

    An export would copy any file of the reader's machine that a link leads to. A link may lead to a
    file in the folder, or to a blob in the cache of Hugging Face's hub. In that cache, a model lies
    in `<cache>/<model>/snapshots/<revision>`. Its files are links to `<cache>/<model>/blobs`, whose
    files may be links to `<cache>/blobs`.

    Raises:
      OSError: There is no such file.
      ValueError: The link leads to another place.
    """
    target, root = Path(os.path.realpath(file, strict=True)), folder.resolve()
    allowed = [root]
    for parent in root.parents:
        if parent.name == "snapshots":
            allowed += [parent.parent / "blobs", parent.parent.parent / "blobs"]
            break
    if not any(target.is_relative_to(place) for place in allowed):
        raise ValueError(
            f"{file} is a link that leaves its folder, to {target}. To use that file, put a copy "
            "of it in place of the link"
        )


class Checkpoint:
    """The safetensors files of a folder; `read` reads one tensor at a time.

    Raises:
      FileNotFoundError: A file is missing; also if the folder has weights only as pickles.
      ValueError: A file is damaged, or the index does not fit the files.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        if os.path.lexists(folder / WEIGHTS_FILE):
            self._files = {WEIGHTS_FILE: _open(folder / WEIGHTS_FILE)}
            self._file_of = dict.fromkeys(self._files[WEIGHTS_FILE].keys(), WEIGHTS_FILE)
        elif os.path.lexists(folder / INDEX_FILE):
            self._file_of = _read_index(folder / INDEX_FILE)
            self._files = {name: _open(folder / name) for name in set(self._file_of.values())}
            self._check_index()
        else:
            pickles = [f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth")]
            remedy = "name a folder with the weights of a model"
            if pickles:
                remedy = (
                    f"{sorted(pickles)} are not read, because unpickling runs the code in a file: "
                    "save the model again with transformers, as safetensors"
                )
            raise FileNotFoundError(
                f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; {remedy}"
            )

    def _check_index(self) -> None:
        """Raises unless the index names each tensor of each file, at its place."""
        in_files = {name: set(file.keys()) for name, file in self._files.items()}
        for tensor, file in self._file_of.items():
            if tensor not in in_files[file]:
                raise ValueError(
                    f"{self.folder / file} lacks {tensor!r}, which {INDEX_FILE} names; download "
                    "both files again"
                )
        for file, tensors in in_files.items():
            for tensor in sorted(tensors, key=natural):
                if (indexed := self._file_of.get(tensor)) != file:
                    said = f"is in {indexed}" if indexed else "is nowhere"
                    raise ValueError(
                        f"{self.folder / file} has {tensor!r}, which {said} according to "
                        f"{INDEX_FILE}; download both files again"
                    )

    @property
    def num_tensors(self) -> int:
        """Number of tensors in all files."""
        return len(self._file_of)

    @property
    def _parameters(self) -> set[str]:
        """The names of all tensors, without the rotary frequencies in checkpoints of before 2023.

        The configuration gives these frequencies.
        """
        return {name for name in self._file_of if not name.endswith(".rotary_emb.inv_freq")}

    @property
    def dtype(self) -> str:
        """The dtype of the parameters if they have one of 16 bits; otherwise float32."""
        names = {"BF16": "bfloat16", "F16": "float16"}
        found = {names.get(self._slice(name).get_dtype(), "float32") for name in self._parameters}
        return found.pop() if len(found) == 1 else "float32"

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Raises a ValueError unless the files have the expected tensors, of floats, and no others.

        Args:
          expected: Shape of each tensor, by name.
        """
        found = self._parameters
        problems = [f"{name} is missing" for name in sorted(expected.keys() - found, key=natural)]
        for name in sorted(found, key=natural):
            tensor = self._slice(name)
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            where = f"{name} in {self._file_of[name]}"
            if name not in expected:
                problems.append(f"{where}, of shape {shape}, is not part of the model")
            elif shape != expected[name]:
                problems.append(f"{where} has shape {shape}, expected {expected[name]}")
            elif dtype not in ("F64", "F32", "F16", "BF16"):
                problems.append(f"{where} has dtype {dtype}, expected a float of 16 bits or more")
        if problems:
            more = f"\n... and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise ValueError(
                f"{self.folder} does not fit its {CONFIG_FILE}; take both from one model:\n"
                + "\n".join(problems[:20])
                + more
            )

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> np.ndarray:
        """A tensor, read into memory."""
        return self._files[self._file_of[name]].get_tensor(name)

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors of one shape have the same values; reads pieces of 64 MiB."""
        a, b = self._slice(name), self._slice(other)
        num_rows, *row = a.get_shape()
        step = max(1, _PIECE_BYTES // (8 * int(np.prod(row, dtype=np.int64)) or 1))
        for start in range(0, num_rows, step):
            end = min(start + step, num_rows)
            pieces = (tensor[start:end].astype(np.float64) for tensor in (a, b))
            if not np.array_equal(*pieces, equal_nan=True):
                return False
        return True

    def digest(self) -> str:
        """A hash of the name, dtype and shape of each tensor, and of a part of its values.

        It reads vectors whole, and the first, the middle and the last row of other tensors. It does
        not depend on the number of files.
        """
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self._file_of):
            tensor = self._slice(name)
            shape = tuple(tensor.get_shape())
            digest.update(f"{name} {tensor.get_dtype()} {shape}\n".encode())
            if len(shape) < 2:
                digest.update(self.read(name).tobytes())
                continue
            for row in (0, shape[0] // 2, shape[0] - 1) if shape[0] else ():
                digest.update(tensor[row : row + 1].tobytes())
        return digest.hexdigest()

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)


def _open(file: Path) -> safe_open:
    try:
        check_file(file)
    except FileNotFoundError as error:
        if file.is_symlink():
            raise FileNotFoundError(
                f"{file} is a link to {file.readlink()}, which does not exist; download it again"
            ) from error
        raise FileNotFoundError(
            f"{file}, which {INDEX_FILE} names, does not exist; download it again"
        ) from error
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete: {error}; download it again") from error


def _read_index(file: Path) -> dict[str, str]:
    content = read_json(file)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict):
        raise ValueError(
            f"{file} is not an index of tensors: it has no object 'weight_map'; download it again"
        )
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise ValueError(
                f"{file}: the file of {tensor!r} must be a text, got {name!r}; download it again"
            )
    files = sorted(set(weight_map.values()))
    if outside := [name for name in files if "/" in name]:
        raise ValueError(
            f"{file} names files outside of its folder: {outside}; put them into the folder, and "
            "name them without a path"
        )
    if other := [name for name in files if not re.fullmatch(r"[^\0]+\.safetensors", name)]:
        raise ValueError(
            f"{file} names files that are not safetensors: {other}; save the model again with "
            "transformers, as safetensors"
        )
    return weight_map


def natural(name: str) -> list[tuple[int, str]]:
    """A sort key that puts layer 10 after layer 9."""
    parts: Iterable[str] = name.split(".")
    return [(int(p), "") if re.fullmatch(r"[0-9]{1,9}", p) else (-1, p) for p in parts]
