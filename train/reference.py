"""The reference of `dpo`: log-probabilities of all completions under the first parameters.

The loss needs one number for each completion, the sum of its log-probabilities. One pass before the
first step computes these sums, with the parameters that the run starts from. So a step needs no
second model, neither its memory nor its time. The pass reads only the preferences that the run
reads. It has no backward, so it takes about a third of the time of the training steps for the same
preferences. With checkpoints the sums are in the run's folder, for a run that resumes.
"""

import dataclasses
import io
import time
import zipfile
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float32

from models.sharding import batch_sharding, replicated
from train.config import TrainConfig
from train.data import PairDataset
from train.distributed import Watchdog, gathered, is_first, to_devices
from train.errors import RunError, naming
from train.formats import number_of
from train.objectives import sequence_log_probs
from train.reporting.rows import write_whole
from train.setup import Datasets
from train.step import model_graph

FILE = "reference_log_probs.npz"
_SPLITS = ("train", "held_out")


def with_reference(
    config: TrainConfig,
    mesh: Mesh,
    datasets: Datasets,
    run_dir: Path,
    step: int,
    params: nnx.State,
    watchdog: Watchdog,
) -> Datasets:
    """The preferences with the reference's log-probabilities.

    Args:
      config: Configuration of the run.
      mesh: Mesh in context.
      datasets: Preferences without them.
      run_dir: Folder of the run.
      step: Number of steps that the run has.
      params: Parameters after these steps.
      watchdog: Watchdog of the run, which is told of the pass.

    Raises:
      RunError: The run resumes, and its folder does not have the log-probabilities of these
        preferences; or they cannot be written.
    """
    file = run_dir / FILE
    if step:
        found = _read(file, datasets)
    else:
        found = _computed(config, mesh, datasets, params, watchdog)
        if config.checkpoint.every and is_first():
            buffer = io.BytesIO()
            np.savez(buffer, allow_pickle=False, **found)
            with naming(file):
                run_dir.mkdir(parents=True, exist_ok=True)
                write_whole(file, buffer.getvalue())
    return datasets._replace(
        **{
            name: dataclasses.replace(getattr(datasets, name), reference=a)
            for name, a in found.items()
        }
    )


def _computed(
    config: TrainConfig, mesh: Mesh, datasets: Datasets, params: nnx.State, watchdog: Watchdog
) -> dict[str, Float32[np.ndarray, "pairs 2"]]:
    """The log-probabilities of the pairs that the run reads; NaN for others."""
    of_train = datasets.train.pairs_of_steps(
        config.steps, batch_size=config.data.rows_per_step, seed=config.seed
    )
    needed = {"train": of_train}
    if isinstance(datasets.held_out, PairDataset):
        size = config.data.batch_size
        needed["held_out"] = datasets.held_out.pairs_of_eval(size, config.eval_batches)
    graphdef = model_graph(config.model)
    # The same model as in the step, also in FP8. So the rewards are 0 before the first step.
    log_probs = jax.jit(
        lambda params, batch: sequence_log_probs(
            graphdef, params, batch, counted_fraction=config.counted_fraction
        ),
        out_shardings=replicated(mesh),
    )
    start, found = time.perf_counter(), {}
    number = sum(map(len, needed.values()))
    of_them = number_of(number, "preference")
    print(f"reference: log-probabilities of {of_them}, before the first step")
    for name, pairs in needed.items():
        dataset = getattr(datasets, name)
        on_devices, on_host = [], []
        for batch in dataset.batches_of(pairs, config.data.batch_size):
            watchdog.begin_other(f"the reference of batch {len(on_host) + 1}")
            on_devices.append(log_probs(params, to_devices(batch, batch_sharding(mesh))))
            if len(on_devices) > 1:  # the devices have the next batch while the host waits
                on_host.append(gathered(on_devices.pop(0)))
        on_host += map(gathered, on_devices)
        of_pairs = np.concatenate(on_host).reshape(-1, 2)[: len(pairs)]
        found[name] = np.full((dataset.num_pairs, 2), np.nan, np.float32)
        found[name][pairs] = of_pairs
        if num_wrong := int(np.sum(~np.isfinite(of_pairs))):
            raise RunError(
                f"the reference gives {number_of(num_wrong, 'completion')} a probability that is "
                "not finite; start from another model with --init-from"
            )
    print(f"reference: took {time.perf_counter() - start:.1f} s")
    return found


def _read(file: Path, datasets: Datasets) -> dict[str, Float32[np.ndarray, "pairs 2"]]:
    remedy = "put it back, or start anew with another --name"
    try:
        # NumPy leaves a damaged file open that it has opened itself.
        with file.open("rb") as content, np.load(content, allow_pickle=False) as arrays:
            found = dict(arrays)
    except FileNotFoundError as error:
        raise RunError(f"{file} is missing, which a resumed run needs; {remedy}") from error
    except OSError as error:
        raise RunError(f"{file} cannot be read ({error.strerror or error}); {remedy}") from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise RunError(f"{file} is damaged ({error}); {remedy}") from error
    for name in _SPLITS:
        dataset, sums = getattr(datasets, name), found.get(name)
        expected = None if dataset is None else (dataset.num_pairs, 2)
        if expected != (None if sums is None else sums.shape):
            raise RunError(f"{file} is of other preferences; {remedy}")
    return found
