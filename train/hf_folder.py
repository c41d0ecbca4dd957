"""Hugging Face folders that a run starts from or writes: model, parameters and tokenizer."""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from models.config import LlamaConfig
from models.hf_files import (
    CONFIG_FILE,
    INDEX_FILE,
    MAX_JSON_BYTES,
    MAX_TOKENIZER_BYTES,
    WEIGHTS_FILE,
    Checkpoint,
    check_file,
    check_stays_inside,
    read_json,
)
from models.llama_hf import check_pretrained, load_pretrained, read_config
from models.sharding import parameter_path
from train.errors import FolderError, text_of

TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_BESIDE_THE_TOKENIZER = (_TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")
# Fields that say how the model runs here. A folder does not have them.
_OWN_FIELDS = (
    "dtype",
    "param_dtype",
    "scan_layers",
    "remat",
    "mlp_chunk_size",
    "implementation",
    "fp8",
    "attention_implementation",
)


@contextlib.contextmanager
def folder_errors() -> Iterator[None]:
    """Turns the errors of `models`, which name the file and the remedy, into FolderErrors."""
    try:
        yield
    except (OSError, ValueError, NotImplementedError) as error:
        raise FolderError(text_of(error)) from error


def is_hf_folder(folder: Path) -> bool:
    """Whether the folder's config.json is Hugging Face's; the config.json of a run is not.

    Raises:
      FolderError: config.json cannot be read, is a pipe, a device or a folder, or is too large.
    """
    file = folder / CONFIG_FILE
    if not _is_there(file, MAX_JSON_BYTES):
        return False
    try:
        content = read_json(file)
    except OSError as error:
        raise FolderError(text_of(error)) from error
    except ValueError:
        return False
    return isinstance(content, dict) and "model_type" in content


def read_model_config(folder: Path, like: LlamaConfig) -> LlamaConfig:
    """The configuration of the model in a folder; `like` says how it runs.

    If the folder has weights, the shapes in their headers must fit the configuration. Otherwise a
    wrong config.json could ask for more memory than the machine has.

    Raises:
      FolderError: config.json is missing, broken or that of a run, the model is not implemented, or
        the weights are of another model.
    """
    own = {name: getattr(like, name) for name in _OWN_FIELDS}
    try:
        config = dataclasses.replace(read_config(folder), **own)
        if any(os.path.lexists(folder / name) for name in (WEIGHTS_FILE, INDEX_FILE)):
            check_pretrained(folder, config)
        return config
    except (OSError, ValueError, NotImplementedError) as error:
        if not is_hf_folder(folder) and is_hf_folder(folder / "model"):
            raise FolderError(f"{folder} is a run; name its model, {folder / 'model'}") from error
        raise FolderError(text_of(error)) from error


def stored_dtype(folder: Path) -> str:
    """The dtype of the parameters in a folder; float32 if they have several.

    Raises:
      FolderError: A file is missing or damaged.
    """
    with folder_errors():
        return Checkpoint(folder).dtype


def check_model(folder: Path, config: LlamaConfig) -> None:
    """Checks that `config` is the model in a folder, with any tokens that begin and end a text.

    Raises:
      FolderError: It is not; the message names the fields that differ.
    """
    found = read_model_config(folder, config)
    differences = [
        f"{field.name} {getattr(found, field.name)!r}, not {getattr(config, field.name)!r}"
        for field in dataclasses.fields(LlamaConfig)
        if field.name not in ("bos_token_id", "eos_token_id")
        and getattr(found, field.name) != getattr(config, field.name)
    ]
    if differences:
        raise FolderError(
            f"the model in {folder} has {'; '.join(differences)}. Leave these --model flags out"
        )


def load_params(folder: Path, config: LlamaConfig, mesh: Mesh) -> nnx.State:
    """The parameters of the model in a folder, split over the mesh.

    Raises:
      FolderError: A file is missing or damaged, or the model differs from `config`.
    """
    check_model(folder, config)
    own = {name: getattr(config, name) for name in _OWN_FIELDS}
    with folder_errors():
        return nnx.state(load_pretrained(folder, mesh=mesh, **own), nnx.Param)


def check_finite(name: str, params: nnx.State, remedy: str) -> None:
    """Checks that all parameters are finite; a single NaN makes every result NaN.

    Args:
      name: Name of the model, for the message.
      params: Parameters of the model.
      remedy: Remedy, for the end of the message.

    Raises:
      FolderError: A parameter has values that are NaN or infinite.
    """
    finite = jax.jit(lambda params: jax.tree.map(lambda a: jnp.isfinite(a).all(), params))(params)
    for path, is_finite in jax.tree.leaves_with_path(jax.device_get(finite)):
        if not is_finite:
            parameter = ".".join(map(str, parameter_path(path)))
            raise FolderError(
                f"{name}: the parameter {parameter} has values that are not finite; {remedy}"
            )


def has_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer.json.

    Raises:
      FolderError: tokenizer.json is a pipe, a device or a folder, or is too large.
    """
    return _is_there(folder / TOKENIZER_FILE, MAX_TOKENIZER_BYTES)


def _is_there(file: Path, most: int) -> bool:
    with folder_errors():
        try:
            check_file(file, most)
        except (FileNotFoundError, NotADirectoryError):
            return False
    return True


def copy_tokenizer(
    tokenizer: Path | None,
    folder: Path,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> None:
    """Copies a tokenizer's files into a folder.

    For a link, the file that it leads to is copied, if `check_stays_inside` allows it.

    Args:
      tokenizer: A tokenizer.json, or its folder; None for bytes, which have no files.
      folder: Folder to copy to; it is made if it is missing.
      bos_token: Token as in `DataConfig`; if it is not None, the copy names it.
      eos_token: Token as in `DataConfig`; if it is not None, the copy names it.

    Raises:
      FolderError: A file cannot be read, or is a link that leaves its folder. Nothing is copied.
    """
    if tokenizer is None:
        return
    file = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
    sources = {name: file.with_name(name) for name in _BESIDE_THE_TOKENIZER}
    sources = {name: path for name, path in sources.items() if os.path.lexists(path)}
    given = {"bos_token": bos_token, "eos_token": eos_token}
    given = {name: token or None for name, token in given.items() if token is not None}
    content = {"tokenizer_class": "PreTrainedTokenizerFast"}
    with folder_errors():
        # A file that the user named may be a link to anywhere.
        for path in sources.values() if file == tokenizer else (file, *sources.values()):
            check_stays_inside(path, file.parent)
        check_file(file, MAX_TOKENIZER_BYTES)
        for path in sources.values():
            check_file(path, MAX_JSON_BYTES)
        if given and (config_file := sources.get(_TOKENIZER_CONFIG_FILE)):
            content = read_json(config_file)
            if not isinstance(content, dict):
                raise FolderError(f"{config_file} must be a JSON object; repair or remove it")

    folder.mkdir(parents=True, exist_ok=True)
    for name, source in {TOKENIZER_FILE: file, **sources}.items():
        if source.resolve() != (folder / name).resolve():
            (folder / name).unlink(missing_ok=True)  # a link there must not lead the copy away
            shutil.copyfile(source, folder / name)
    if given:
        config_file = folder / _TOKENIZER_CONFIG_FILE
        config_file.unlink(missing_ok=True)
        config_file.write_text(json.dumps(content | given, indent=2) + "\n")
