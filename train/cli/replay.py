"""`python -m train replay FOLDER`: repeats the forward and backward of the step that ended a run.

The folder is `failed-step-N` of the run. It has the step's first parameters and its batch, so other
devices and another version of the program can repeat the step.
"""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from models.sharding import batch_sharding, parameter_path
from train.checkpoints.saved import read_run_config
from train.cli.command_line import Parser, file_or_folder
from train.config import TrainConfig
from train.errors import FolderError
from train.objectives import metrics_of
from train.setup import check_dtype, mesh_of
from train.step import abstract_state, make_gradients
from train.teacher import load_frozen


def run(arguments: Sequence[str]) -> None:
    """Prints loss and gradient norm, and names parameters and gradients that are not finite."""
    parser = Parser("replay", "Repeats the forward and backward of the step that ended a run.")
    parser.add_argument(
        "folder", type=file_or_folder, help="folder failed-step-N in the folder of the run"
    )
    folder: Path = parser.parse_args(arguments).folder.absolute()
    config = _read_config(folder)
    check_dtype(config.model, f"{folder}: dtype", "take a GPU, as the run did")
    mesh = mesh_of(config)
    with jax.set_mesh(mesh):
        params = abstract_state(config, mesh).params
        with ocp.StandardCheckpointer() as checkpointer:
            values = checkpointer.restore(folder / "params", jax.tree.leaves(params))
        params = jax.tree.unflatten(jax.tree.structure(params), values)
        batch = jax.device_put(read_batch(folder), batch_sharding(mesh, batch_axis=1))
        frozen = load_frozen(config, mesh)
        metrics, gradients = jax.jit(make_gradients(config))(params, batch, *frozen)
    for name in ("loss", *metrics_of(config), "grad_norm", "num_tokens"):
        print(f"{name} {metrics[name].item():.6g}")
    for kind, tree in (("parameter", params), ("gradient of", gradients)):
        for path, array in jax.tree.leaves_with_path(tree):
            if wrong := int(jnp.sum(~jnp.isfinite(array))):
                name = ".".join(map(str, parameter_path(path)))
                print(f"{kind} {name}: {wrong} of {array.size} not finite")


def _read_config(folder: Path) -> TrainConfig:
    """The configuration of the run.

    Raises:
      FolderError: The folder is not the folder of a failed step.
    """
    if (folder / "config.pickle").exists():
        raise FolderError(
            f"{folder} is of an earlier version; its config.pickle is not read, because that would "
            "run the code in it; run the training again"
        )
    if not (folder / "batch.npz").is_file():
        raise FolderError(f"{folder} has no batch.npz; name a folder failed-step-N of a run")
    return read_run_config(folder)


def read_batch(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of the step's batch, `[A, B, S]`.

    Raises:
      ValueError: The file is damaged, or has Python objects in it.
    """
    with np.load(folder / "batch.npz", allow_pickle=False) as arrays:
        return dict(arrays)
