"""Hugging Face folders that a run starts from or leaves: their model, parameters and tokenizer."""

import dataclasses
import json
import shutil
from pathlib import Path

from flax import nnx
from jax.sharding import Mesh

from models.llama import LlamaConfig
from models.llama_hf import CONFIG_FILE, config_from_hf, load_pretrained

TOKENIZER_FILE = "tokenizer.json"
_TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
_BESIDE_THE_TOKENIZER = (_TOKENIZER_CONFIG_FILE, "special_tokens_map.json", "chat_template.jinja")
# What a folder does not say: how the model runs here.
_OWN_FIELDS = (
    "dtype",
    "param_dtype",
    "scan_layers",
    "remat",
    "mlp_chunk_size",
    "kernels",
    "attention_implementation",
)


class FolderError(ValueError):
    """Why a folder cannot be read or used, in one line that needs no traceback."""


def is_hf_folder(folder: Path) -> bool:
    """Whether its config.json is Hugging Face's; a run has another one of that name."""
    try:
        content = json.loads((folder / CONFIG_FILE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and "model_type" in content


def read_model_config(folder: Path, like: LlamaConfig) -> LlamaConfig:
    """The model in a folder, with the fields of `like` for how it runs.

    Raises:
      FolderError: config.json is missing or broken, or the model is none that is implemented.
    """
    file = folder / CONFIG_FILE
    own = {name: getattr(like, name) for name in _OWN_FIELDS}
    try:
        return dataclasses.replace(config_from_hf(json.loads(file.read_text())), **own)
    except OSError as error:
        raise FolderError(
            f"{file} cannot be read ({error.strerror}): not a Hugging Face folder"
        ) from error
    except (ValueError, NotImplementedError, TypeError, AttributeError) as error:
        raise FolderError(f"{file}: {_one_line(error)}") from error


def check_model(folder: Path, config: LlamaConfig) -> None:
    """Whether `config` is the model in a folder.

    Raises:
      FolderError: it is not; with the fields that differ.
    """
    found = read_model_config(folder, config)
    differences = [
        f"{field.name} {getattr(found, field.name)!r}, not {getattr(config, field.name)!r}"
        for field in dataclasses.fields(LlamaConfig)
        if getattr(found, field.name) != getattr(config, field.name)
    ]
    if differences:
        raise FolderError(
            f"the model in {folder} has {'; '.join(differences)}. Leave out these --model flags"
        )


def load_params(folder: Path, config: LlamaConfig, mesh: Mesh) -> nnx.State:
    """The parameters of the model in a folder, split over the mesh.

    Raises:
      FolderError: the files are missing or damaged, or are of another model than `config`.
    """
    check_model(folder, config)
    own = {name: getattr(config, name) for name in _OWN_FIELDS}
    try:
        model = load_pretrained(folder, mesh=mesh, **own)
    except (OSError, ValueError, NotImplementedError) as error:
        raise FolderError(_one_line(error)) from error
    return nnx.state(model, nnx.Param)


def has_tokenizer(folder: Path) -> bool:
    """Whether there is a tokenizer of Hugging Face's tokenizers in it."""
    return (folder / TOKENIZER_FILE).is_file()


def copy_tokenizer(
    tokenizer: Path | None,
    folder: Path,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> None:
    """Copies a tokenizer's files into a folder, with a model; nothing for that of bytes.

    Args:
      tokenizer: tokenizer.json, or its folder.
      folder: where to.
      bos_token: as in `DataConfig`; where it is set, the copy says so.
      eos_token: likewise.
    """
    if tokenizer is None:
        return
    file = tokenizer / TOKENIZER_FILE if tokenizer.is_dir() else tokenizer
    beside = {name: file.with_name(name) for name in _BESIDE_THE_TOKENIZER}
    for name, source in {TOKENIZER_FILE: file, **beside}.items():
        if source.is_file() and source.resolve() != (folder / name).resolve():
            shutil.copyfile(source, folder / name)
    given = {"bos_token": bos_token, "eos_token": eos_token}
    given = {name: token or None for name, token in given.items() if token is not None}
    if given:
        config_file = folder / _TOKENIZER_CONFIG_FILE
        content = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if config_file.is_file():
            content = json.loads(config_file.read_text())
        config_file.write_text(json.dumps(content | given, indent=2) + "\n")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
