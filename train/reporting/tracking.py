"""The rows of metrics.jsonl elsewhere, too: TensorBoard and Weights & Biases.

Neither is needed to train and neither is installed with the rest; they are imported when asked for.
"""

import contextlib
import importlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from train.config import TrainConfig
from train.errors import RunError
from train.reporting.metrics import Metrics, jsonable


class Tracker(Protocol):
    """Takes rows."""

    def write(self, row: Metrics) -> None:
        """Shows the numbers of a row at its step."""
        ...

    def close(self) -> None:
        """Sends what is left."""
        ...


def check_installed(config: TrainConfig) -> None:
    """Whether what a configuration asks for can be imported.

    Raises:
      RunError: it cannot; with what to install.
    """
    if config.tensorboard:
        _module("tensorboardX", "--tensorboard")
    if config.wandb:
        _module("wandb", "--wandb")


@contextlib.contextmanager
def trackers(config: TrainConfig, run_dir: Path, *, last_step: int) -> Iterator[list[Tracker]]:
    """Those that a configuration asks for; closed on the way out.

    Args:
      config: of the run.
      run_dir: its folder.
      last_step: after which the run goes on; what they have of later steps is of a run that died.
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
        # By which a run that goes on finds itself.
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
        except Exception as error:  # of the network, the account or the settings
            raise RunError(f"--wandb: {' '.join(str(error).split())}") from error

    def write(self, row: Metrics) -> None:
        self._run.log(_numbers(row), step=row["step"])

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
