"""Finds a model on the disk: of a run, of a checkpoint, or in a Hugging Face folder."""

import builtins
import contextlib
import dataclasses
import json
import pathlib
import types
import typing
from pathlib import Path
from typing import Any

from flax import nnx
from jax.sharding import Mesh

from models.config import LlamaConfig
from models.llama import abstract_parameters
from models.presets import PRESETS
from train.checkpoints.checkpoint import read_params
from train.checkpoints.files import saved_steps
from train.config import TrainConfig, fast_dtype
from train.errors import FolderError, text_of
from train.hf_folder import (
    has_tokenizer,
    is_hf_folder,
    load_params,
    read_model_config,
    stored_dtype,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A model on the disk whose parameters are not read yet.

    Attributes:
      name: Name of the model, for messages.
      model: Configuration of the model, without rematerialization.
      folder: Folder of the checkpoints, or the Hugging Face folder.
      step: Step of the checkpoint; None for a Hugging Face folder.
      tokenizer: Tokenizer as in `DataConfig`.
      bos_token: Token as in `DataConfig`.
      eos_token: Token as in `DataConfig`.
      sequence_length: Length of the rows in training; None if it is not known.
    """

    name: str
    model: LlamaConfig
    folder: Path
    step: int | None = None
    tokenizer: Path | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    sequence_length: int | None = None

    def load(self, mesh: Mesh) -> nnx.State:
        """The parameters, split over the mesh.

        Raises:
          FolderError: A file of a Hugging Face folder is missing, damaged or of another model.
          RunError: A checkpoint is missing, damaged or of another model.
        """
        if self.step is None:
            return load_params(self.folder, self.model, mesh)
        return read_params(self.folder, self.step, abstract_parameters(self.model, mesh))


def find_model(source: Path, *, step: int | None = None, best: bool = False) -> Saved:
    """The model that `source` names.

    Args:
      source: A run, one of its checkpoints (`run/checkpoints/120`), or a Hugging Face folder.
      step: Step of the run's checkpoint; None takes the newest.
      best: Take the checkpoint with the lowest held-out loss.

    Raises:
      FolderError: There is no such model; the message names the checkpoints that exist.
    """
    chooses = best or step is not None
    if is_hf_folder(source):
        if chooses:
            raise FolderError(
                f"{source} is a Hugging Face folder with one model; leave out --step and --best"
            )
        return _in_hf_folder(source)
    if source.parent.name == "checkpoints" and source.name.isdecimal():
        if chooses:
            raise FolderError(f"{source} is a checkpoint; to choose another, name its run")
        source, step = source.parent.parent, int(source.name)
    config = read_run_config(source)
    folder = source / "checkpoints"
    steps = saved_steps(folder)
    if steps:
        step = _chosen(folder, steps, step, best)
        copy = source / "tokenizer"
        return Saved(
            name=f"{source}, step {step}",
            model=dataclasses.replace(config.model, remat="none"),
            folder=folder,
            step=step,
            tokenizer=copy if has_tokenizer(copy) else config.data.tokenizer,
            bos_token=config.data.bos_token,
            eos_token=config.data.eos_token,
            sequence_length=config.data.sequence_length,
        )
    if chooses:
        raise FolderError(f"{source} has no checkpoints; leave out --step and --best")
    if step is not None:
        raise FolderError(f"{source} has no checkpoints, and so no {step}; name the run alone")
    if not is_hf_folder(source / "model"):
        raise FolderError(
            f"{source} has neither checkpoints nor a model: the run has not ended, or ran with "
            "--no-save; start it again with --save or --checkpoint.every"
        )
    like = dataclasses.replace(config.model, remat="none")
    return dataclasses.replace(
        _in_hf_folder(source / "model", like), sequence_length=config.data.sequence_length
    )


def _in_hf_folder(folder: Path, like: LlamaConfig | None = None) -> Saved:
    """The model in a Hugging Face folder. `like` says how it runs here; its sizes are not used."""
    if like is None:
        like = dataclasses.replace(PRESETS["demo"], dtype=fast_dtype(), remat="none")
    model = read_model_config(folder, like)
    return Saved(
        name=str(folder),
        model=dataclasses.replace(model, param_dtype=stored_dtype(folder)),
        folder=folder,
        tokenizer=folder if has_tokenizer(folder) else None,
    )


def _chosen(folder: Path, steps: dict[int, float | None], step: int | None, best: bool) -> int:
    measured = {step: loss for step, loss in steps.items() if loss is not None}
    if best and step is not None:
        raise FolderError("--best and --step exclude each other; leave out one")
    if best and not measured:
        raise FolderError(
            f"{folder}: no checkpoint has a held-out loss; leave out --best, or choose with --step"
        )
    if best:
        return min(measured, key=lambda step: measured[step])
    if step is not None and step not in steps:
        raise FolderError(f"{folder} has no step {step}; it has {', '.join(map(str, steps))}")
    return max(steps) if step is None else step


def read_run_config(run_dir: Path) -> TrainConfig:
    """The configuration in a run's config.json; missing fields have their defaults.

    Raises:
      FolderError: The file is missing, or is not the configuration of a run.
    """
    file = run_dir / "config.json"
    if not file.is_file():
        raise FolderError(
            f"{run_dir} is neither a run, nor a checkpoint of one, nor a Hugging Face folder: it "
            "has no config.json"
        )
    try:
        content = json.loads(file.read_text())
        if not isinstance(content, dict) or "config" not in content:
            raise FolderError("it has no entry config; name the folder of a run")
        return _typed(TrainConfig, content["config"], "config")
    except (KeyError, TypeError, ValueError, NotImplementedError) as error:
        reason = f"{type(error).__name__}: " if isinstance(error, KeyError | TypeError) else ""
        raise FolderError(
            f"{file} is no configuration of this version: {reason}{text_of(error)}; correct it, or "
            "take the version that wrote it"
        ) from error


def _typed(hint: Any, value: Any, where: str) -> Any:
    """The part of a configuration from which `train.reporting.metrics.jsonable` made `value`.

    Args:
      hint: Type that the part must have.
      value: Value from JSON.
      where: Name of the part, for errors.

    Raises:
      FolderError: The value has another type.
    """
    wrong = FolderError(f"{where}={value!r} is not {_name_of(hint)}")
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        if not isinstance(value, dict):
            raise wrong
        hints = typing.get_type_hints(hint)
        if unknown := value.keys() - hints.keys():
            raise FolderError(f"{where} has entries that are unknown: {', '.join(sorted(unknown))}")
        parts = {name: _typed(hints[name], part, f"{where}.{name}") for name, part in value.items()}
        try:
            return hint(**parts)
        except (ValueError, NotImplementedError) as error:
            raise FolderError(f"{where}: {error}") from error
    arguments = typing.get_args(hint)
    match typing.get_origin(hint) or hint:
        case types.UnionType | typing.Union:
            for kind in arguments:
                with contextlib.suppress(FolderError):
                    return _typed(kind, value, where)
        case builtins.tuple if isinstance(value, list):
            return tuple(_typed(arguments[0], entry, where) for entry in value)
        case typing.Literal if value in arguments:
            return value
        case pathlib.Path if isinstance(value, str):
            return Path(value)
        case builtins.float if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        case kind if isinstance(kind, type) and type(value) is kind:
            return value
    raise wrong


def _name_of(hint: Any) -> str:
    if typing.get_origin(hint) is typing.Literal:
        return f"one of {', '.join(map(repr, typing.get_args(hint)))}"
    return hint.__name__ if isinstance(hint, type) else str(hint)
