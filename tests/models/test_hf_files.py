"""Files of a Hugging Face folder that are damaged, endless, too large or elsewhere."""

import json
import os
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import models.hf_files
from models.hf_files import Checkpoint, check_file, check_stays_inside, read_json
from models.llama_hf import load_pretrained, read_config

GQA = Path(__file__).parents[1] / "golden" / "gqa"
INDEX = "model.safetensors.index.json"


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_folder(path: Path) -> None:
    path.mkdir()


def make_large(path: Path) -> None:
    """A sparse file, which takes no room on the disk."""
    with open(path, "wb") as file:
        file.truncate(2**40)


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path)


UNREADABLE = {
    make_pipe: "is not a regular file but a pipe; put a copy",
    make_endless: "is not a regular file but a device; put a copy",
    make_folder: "is not a regular file but a folder; put a copy",
    make_large: "has 1,099,511,627,776 bytes, more than",
    make_link_to_itself: "symbolic links",
}


@pytest.mark.parametrize("make", UNREADABLE)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_a_file_that_cannot_be_read_is_named(name, make, tmp_path):
    shutil.copy(GQA / "config.json", tmp_path)
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    pattern = f"{re.escape(UNREADABLE[make])}.*"
    with pytest.raises((OSError, ValueError), match=pattern) as caught:
        load_pretrained(tmp_path)
    assert name in str(caught.value)


@pytest.mark.parametrize("make", [make_pipe, make_endless, make_folder])
@pytest.mark.parametrize("name", ["model.safetensors", "model-1.safetensors"])
def test_weights_that_are_no_file_are_named(name, make, tmp_path):
    make(tmp_path / name)
    if name != "model.safetensors":
        write_index(tmp_path, {"a": name})
    with pytest.raises(ValueError, match=rf"{name} is not a regular file but a "):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe{", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}"]
)
def test_files_that_are_not_json_are_refused(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is not JSON: .*; repair it"):
        read_config(tmp_path)


def test_files_within_their_bounds_are_read(tmp_path, monkeypatch):
    file = tmp_path / "file.json"
    file.write_text("[1]")
    check_file(file, 3)
    assert read_json(file) == [1]
    monkeypatch.setattr(models.hf_files, "MAX_JSON_BYTES", 2)
    with pytest.raises(ValueError, match="has 3 bytes, more than the 2 that are read; put"):
        read_json(file)


# safetensors


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def write_safetensors(file: Path, header: Any, num_bytes: int, header_size: int | None = None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if header_size is None else header_size
    file.write_bytes(struct.pack("<Q", size) + text + bytes(num_bytes))


FOUR = entry("F32", [4], 0, 16)
TWICE = json.dumps({"a": FOUR, "b": entry("F32", [4], 16, 32)}).encode().replace(b'"b"', b'"a"')
DAMAGED = {
    "data cut off": ({"a": FOUR}, 12),
    "data too long": ({"a": FOUR}, 20),
    "overlapping": ({"a": FOUR, "b": entry("F32", [4], 8, 24)}, 24),
    "outside": ({"a": FOUR, "b": entry("F32", [4], 160, 176)}, 32),
    "a hole": ({"a": FOUR, "b": entry("F32", [4], 20, 36)}, 36),
    "another size than its shape": ({"a": entry("F32", [5], 0, 16)}, 16),
    "below zero": ({"a": entry("F32", [-4], 0, 16)}, 16),
    "beyond 64 bits": ({"a": entry("F32", [2**40, 2**40], 0, 16)}, 16),
    "unknown dtype": ({"a": entry("Q7", [4], 0, 16)}, 16),
    "no dtype": ({"a": {"shape": [4], "data_offsets": [0, 16]}}, 16),
    "twice": (TWICE, 32),
    "a list": ([1], 0),
    "no JSON": (b"\xff{{", 0),
    "header longer than the file": ({"a": FOUR}, 16, 10**6),
    "header longer than all files": ({"a": FOUR}, 16, 2**64 - 1),
    "header cut off": ({"a": FOUR}, 16, 20),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_safetensors_are_named(name, tmp_path):
    write_safetensors(tmp_path / "model.safetensors", *DAMAGED[name])
    with pytest.raises(
        ValueError, match=r"model\.safetensors is damaged or incomplete: .*; download"
    ):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_a_file_without_a_header_is_named(content, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(
        ValueError, match=r"model\.safetensors is damaged or incomplete: .*; download"
    ):
        Checkpoint(tmp_path)


def test_a_file_cut_off_anywhere_is_named(tmp_path):
    content = (GQA / "model.safetensors").read_bytes()
    for size in (0, 4, 8, 100, 1000, len(content) // 2, len(content) - 1):
        (tmp_path / "model.safetensors").write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged or incomplete"):
            Checkpoint(tmp_path)


def test_a_dtype_of_8_bits_is_no_parameter(tmp_path):
    write_safetensors(tmp_path / "model.safetensors", {"a": entry("F8_E4M3", [16], 0, 16)}, 16)
    with pytest.raises(ValueError, match=r"a in model\.safetensors has dtype F8_E4M3, expected a"):
        Checkpoint(tmp_path).check({"a": (16,)})


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ({"a": ml_dtypes.bfloat16, "b": ml_dtypes.bfloat16}, "bfloat16"),
        ({"a": np.float16, "layers.0.rotary_emb.inv_freq": np.float32}, "float16"),
        ({"a": ml_dtypes.bfloat16, "b": np.float32}, "float32"),
        ({"a": ml_dtypes.bfloat16, "b": np.float16}, "float32"),
        ({"a": np.float64}, "float32"),
    ],
)
def test_the_dtype_that_holds_all_parameters(dtypes, expected, tmp_path):
    tensors = {name: np.zeros(2, dtype) for name, dtype in dtypes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert Checkpoint(tmp_path).dtype == expected


@pytest.mark.parametrize("name", ["layers.²", "layers." + "9" * 5000, "layers.-1", "", "."])
def test_any_name_of_a_tensor_can_be_sorted(name, tmp_path):
    save_file({name: np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="is not part of the model"):
        Checkpoint(tmp_path).check({})


# Indexes


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({}, "it has no object 'weight_map'; download"),
        ([], "it has no object 'weight_map'; download"),
        ({"weight_map": None}, "it has no object 'weight_map'; download"),
        ({"weight_map": ["a"]}, "it has no object 'weight_map'; download"),
        ({"weight_map": {"a": 3}}, "the file of 'a' must be a text, got 3; download"),
        ({"weight_map": {"a": ["b.safetensors"]}}, "the file of 'a' must be a text"),
        ({"weight_map": {"a": "../gqa.safetensors"}}, "names files outside of its folder: .*; put"),
        ({"weight_map": {"a": "/etc/x.safetensors"}}, "names files outside of its folder: .*; put"),
        ({"weight_map": {"a": "b/c.safetensors"}}, "names files outside of its folder: .*; put"),
        ({"weight_map": {"a": ".."}}, "names files that are not safetensors: .*; save"),
        ({"weight_map": {"a": ""}}, "names files that are not safetensors: .*; save"),
        (
            {"weight_map": {"a": "b\0.safetensors"}},
            "names files that are not safetensors: .*; save",
        ),
        (
            {"weight_map": {"a": "pytorch_model.bin"}},
            "names files that are not safetensors: .*; save",
        ),
    ],
)
def test_a_bad_index_is_refused(index, message, tmp_path):
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"index\.json.*{message}"):
        Checkpoint(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    one = np.ones(2, np.float32)
    save_file({"a": one, "b": one}, tmp_path / "1.safetensors")
    save_file({"b": 2 * one}, tmp_path / "2.safetensors")
    write_index(tmp_path, {"a": "1.safetensors", "b": "2.safetensors"})
    with pytest.raises(
        ValueError, match=r"1\.safetensors has 'b', which is in 2\.safetensors acc.*; download"
    ):
        Checkpoint(tmp_path)
    write_index(tmp_path, {"a": "1.safetensors"})
    with pytest.raises(ValueError, match=r"1\.safetensors has 'b', which is nowhere according"):
        Checkpoint(tmp_path)


# Links


def hub_cache(cache: Path) -> Path:
    """A model as Hugging Face's hub caches it; one of its blobs is in the cache's own store."""
    blobs, store = cache / "models--org--name" / "blobs", cache / "blobs" / "ab"
    snapshot = cache / "models--org--name" / "snapshots" / "0123"
    for folder in (blobs, store, snapshot):
        folder.mkdir(parents=True)
    for file in sorted(GQA.iterdir()):
        (blobs / file.stem).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.stem)
    (blobs / "model").rename(store / "abcd")
    (blobs / "model").symlink_to("../../blobs/ab/abcd")
    return snapshot


def test_a_model_in_the_cache_of_the_hub_is_read(tmp_path):
    snapshot = hub_cache(tmp_path)
    assert sorted(Checkpoint(snapshot).read("model.norm.weight")) == sorted(
        load_file(GQA / "model.safetensors")["model.norm.weight"]
    )
    assert read_config(snapshot) == read_config(GQA)
    for file in snapshot.iterdir():
        check_stays_inside(file, snapshot)


def test_links_that_leave_their_folder_are_refused(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("secret")
    folder = hub_cache(tmp_path / "cache")
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "file").write_text("")
    (plain / "link").symlink_to("file")
    (tmp_path / "link to plain").symlink_to(plain)
    check_stays_inside(plain / "link", plain)
    check_stays_inside(tmp_path / "link to plain" / "link", tmp_path / "link to plain")

    # A blob, or the folder of the blobs, may itself be a link elsewhere.
    (folder / "a").symlink_to("../../blobs/a")
    (folder.parents[1] / "blobs" / "a").symlink_to(secret)
    (plain / "a").symlink_to("../secret")
    (plain / "snapshots" / "1").mkdir(parents=True)
    (plain / "blobs").symlink_to(tmp_path)
    (plain / "snapshots" / "1" / "a").symlink_to("../../blobs/secret")
    for place in (folder, plain, plain / "snapshots" / "1"):
        with pytest.raises(ValueError, match=f"a is a link that leaves its folder, to {secret}"):
            check_stays_inside(place / "a", place)
