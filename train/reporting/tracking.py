"""Sends the rows of metrics.jsonl to TensorBoard and to Weights & Biases as well.

Training needs neither package, and the requirements of the project have neither. A package is
imported only if its flag is given.
"""

import contextlib
import importlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from train.config import TrainConfig
from train.errors import RunError, text_of
from train.reporting.metrics import Metrics, jsonable


class Tracker(Protocol):
    """An object that takes rows of metrics."""

    def write(self, row: Metrics) -> None:
        """Shows the numbers of a row at its step."""
        ...

    def close(self) -> None:
        """Sends what is left."""
        ...


def check_installed(config: TrainConfig) -> None:
    """Checks that the packages for a configuration's trackers can be imported.

    Raises:
      RunError: A package is missing; the message says how to install it.
    """
    if config.tensorboard:
        _module("tensorboardX", "--tensorboard")
    if config.wandb:
        _module("wandb", "--wandb")


@contextlib.contextmanager
def trackers(config: TrainConfig, run_dir: Path, *, last_step: int) -> Iterator[list[Tracker]]:
    """The trackers that a configuration asks for; the end of the block closes them.

    Args:
      config: Configuration of the run.
      run_dir: Folder of the run.
      last_step: Step from which the run goes on. TensorBoard drops its rows of later steps, which
        are of a run that died.
    """
    with contextlib.ExitStack() as stack:
        found: list[Tracker] = []
        if config.tensorboard:
            found.append(_TensorBoard(run_dir / "tensorboard", last_step))
        if config.wandb:
            found.append(_WandB(config, run_dir))
        for tracker in found:
            stack.callback(tracker.close)
        yield found


class _TensorBoard:
    def __init__(self, folder: Path, last_step: int):
        module = _module("tensorboardX", "--tensorboard")
        self._writer = module.SummaryWriter(str(folder), purge_step=last_step + 1)

    def write(self, row: Metrics) -> None:
        for name, value in _numbers(row).items():
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class _WandB:
    def __init__(self, config: TrainConfig, run_dir: Path):
        module = _module("wandb", "--wandb")
        # A run that resumes finds its page by this id.
        id_file = run_dir / "wandb-id"
        if not id_file.exists():
            id_file.write_text(uuid.uuid4().hex)
        try:
            self._run = module.init(
                project=config.wandb,
                name=run_dir.name,
                id=id_file.read_text(),
                resume="allow",
                dir=str(run_dir),
                config=jsonable(config),
            )
        except Exception as error:  # the network, the account or the settings
            raise RunError(
                f"--wandb: {text_of(error)}; repair this, or leave the flag out"
            ) from error
        # Steps of its own would have to rise, and a run that resumes repeats some.
        self._run.define_metric("*", step_metric="step")

    def write(self, row: Metrics) -> None:
        self._run.log({"step": row["step"], **_numbers(row)})

    def close(self) -> None:
        self._run.finish()


def _numbers(row: Metrics) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "step" and value is not None}


def _module(name: str, flag: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RunError(
            f"{flag} needs {name}, which is not installed: python -m pip install {name}"
        ) from error
