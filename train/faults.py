"""How a run ends before its last step: signals, and what the step that failed leaves."""

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
from train.reporting.metrics import jsonable


@contextlib.contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """SIGTERM and the first SIGINT set the event; a second SIGINT raises KeyboardInterrupt.

    Only for the main thread: Python allows no other to handle signals.
    """
    stop = threading.Event()

    def handle(*_: Any) -> None:
        # Nothing is printed: the signal may have come in the middle of a print, which forbids it.
        stop.set()
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
    """Keeps what Orbax was still writing when a save failed from printing tracebacks.

    It reports to an event loop that Orbax has closed by then. For a program, not for a library: the
    hook is that of the process.
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
    """Writes what `train.cli.replay` needs to run a step's forward and backward again.

    Of several processes each writes its parameters, so all have to call this.

    Returns:
      The folder: `config.json`, `batch.npz` with arrays `[A, B, S]`, and `params`.
    """
    folder = run_dir / f"failed-step-{step}"
    if jax.process_index() == 0:
        folder.mkdir(exist_ok=True)
        content = {"config": jsonable(config)}
        (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
        np.savez(folder / "batch.npz", allow_pickle=False, **batch)
    with ocp.StandardCheckpointer() as checkpointer:
        leaves = jax.tree.leaves(params)
        checkpointer.save((folder / "params").absolute(), leaves, force=True)
    return folder
