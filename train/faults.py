"""The end of a run before its last step: signals, and the files of a step that failed."""

import contextlib
import json
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx

from train.config import TrainConfig
from train.distributed import is_first
from train.reporting.metrics import jsonable


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """An event that SIGTERM and the first SIGINT set; a second SIGINT raises KeyboardInterrupt.

    Only the main thread may enter it, because Python lets no other thread handle signals.
    """
    stop = threading.Event()

    def handle(number: int, _: Any) -> None:
        # It must not print: the signal may have interrupted a print.
        stop.set()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def hide_given_up_transfers() -> None:
    """Hides the tracebacks of transfers that Orbax gave up when a save failed.

    The transfers report to an event loop that Orbax has closed by then. Only a program may call
    this, not a library, because it sets the hook of the whole process.
    """

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            sys.__unraisablehook__(unraisable)

    sys.unraisablehook = hook


def save_failed_step(
    run_dir: Path,
    config: TrainConfig,
    step: int,
    params: nnx.State,
    batch: Mapping[str, np.ndarray],
) -> Path:
    """Writes the files with which `train.cli.replay` runs a step's forward and backward again.

    Each process writes its own part of the parameters, so all processes must call this.

    Returns:
      The folder, with `config.json`, `batch.npz` (arrays `[A, B, S]`) and `params`.
    """
    folder = run_dir / f"failed-step-{step}"
    if is_first():
        folder.mkdir(exist_ok=True)
        content = {"config": jsonable(config)}
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        np.savez(folder / "batch.npz", allow_pickle=False, **batch)
    with ocp.StandardCheckpointer() as checkpointer:
        leaves = jax.tree.leaves(params)
        checkpointer.save((folder / "params").absolute(), leaves, force=True)
    return folder
