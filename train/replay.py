"""`python -m train replay FOLDER`: the forward and backward of a step that a run ended with.

The folder is `failed-step-N` of the run. It has the parameters with which the step began and the
step's batch, so the devices and the program need not be those of the run.
"""

import pickle
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from models.sharding import batch_sharding, parameter_path
from train.loop import mesh_of
from train.step import abstract_state, make_gradients


def run(arguments: Sequence[str]) -> None:
    """Prints loss and gradient norm, and the parameters and gradients that are not finite."""
    if len(arguments) != 1:
        sys.exit("usage: python -m train replay FOLDER, where FOLDER is failed-step-N of a run")
    if not (Path(arguments[0]) / "config.pickle").exists():
        sys.exit(f"error: {arguments[0]} is no failed-step-N of a run: it has no config.pickle")
    folder = Path(arguments[0]).absolute()
    config = pickle.loads((folder / "config.pickle").read_bytes())
    mesh = mesh_of(config)
    with jax.set_mesh(mesh):
        params = abstract_state(config, mesh).params
        with ocp.StandardCheckpointer() as checkpointer:
            values = checkpointer.restore(folder / "params", jax.tree.leaves(params))
        params = jax.tree.unflatten(jax.tree.structure(params), values)
        batch = jax.device_put(
            dict(np.load(folder / "batch.npz")), batch_sharding(mesh, batch_axis=1)
        )
        metrics, gradients = jax.jit(make_gradients(config))(params, batch)
    for name in ("loss", "nll", "accuracy", "grad_norm", "num_tokens"):
        print(f"{name} {metrics[name].item():.6g}")
    for kind, tree in (("parameter", params), ("gradient of", gradients)):
        for path, array in jax.tree.leaves_with_path(tree):
            if wrong := int(jnp.sum(~jnp.isfinite(array))):
                name = ".".join(map(str, parameter_path(path)))
                print(f"{kind} {name}: {wrong} of {array.size} not finite")
