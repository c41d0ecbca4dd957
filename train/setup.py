"""The start of a run: the mesh, the data, the first state, and the compiled steps."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.config import LlamaConfig
from models.fp8 import describe
from models.llama import abstract_parameters
from models.sharding import batch_sharding, check_tensor_parallel, make_mesh
from pallas_kernels.choices import Explanation, recording
from train import data
from train.config import TrainConfig
from train.distributed import of_first, rows_to_devices, to_devices
from train.flag_errors import FlagError
from train.hf_folder import check_finite, load_params
from train.planner.cache import cached
from train.planner.plan import Programs, plan, table, with_policies, with_remat
from train.planner.target import target_here
from train.reporting.profiling import memory_report
from train.step import (
    Batch,
    TrainState,
    init_state,
    jit_train_step,
    make_eval_step,
    state_with,
)
from train.teacher import load_frozen
from train.xla_flags import calls_until_compiled_again, with_measured_latencies


class Datasets(NamedTuple):
    """The text of a run.

    Attributes:
      train: Batches by step number.
      held_out: Batches for evaluations; None if the run has no evaluations or no such text.
      fingerprint: JSON that identifies the text, so that a resume refuses another one.
    """

    train: Any
    held_out: data.Dataset | data.PairDataset | None
    fingerprint: dict[str, Any]


class CompiledSteps(NamedTuple):
    """The programs of a run.

    Attributes:
      train: Takes and donates a state, takes a batch and `frozen`, and returns the new state and
        metrics.
      evaluate: Takes parameters and a batch and returns sums; None without held-out text.
      program: The step compiled ahead of time, for its text and its memory. With `pgle` the steps
        run other programs.
      num_early: Number of first calls of `train` that JAX profiles or compiles for `pgle`.
      frozen: Parameters that no step changes: those of a teacher.
    """

    train: Callable[..., Any]
    evaluate: Callable[..., Any] | None
    program: Any = None
    num_early: int = 0
    frozen: tuple[nnx.State, ...] = ()


def mesh_of(config: TrainConfig) -> Mesh:
    """The mesh over all devices.

    Raises:
      ValueError: The sizes of the mesh do not fit the devices, the batch or the model.
    """
    data_axis, fsdp, tensor = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    if data_axis == -1:
        data_axis, rest = divmod(jax.device_count(), fsdp * tensor)
        if rest:
            raise ValueError(
                f"fsdp={fsdp} times tensor={tensor} must divide the number of devices, "
                f"{jax.device_count()}; choose other sizes"
            )
    mesh = make_mesh(data=data_axis, fsdp=fsdp, tensor=tensor)
    num_parts = data_axis * fsdp
    check_batch_size(config, num_parts)
    check_tensor_parallel(
        tensor,
        num_key_value_heads=config.model.num_key_value_heads,
        num_tokens=config.data.batch_size // num_parts * config.data.sequence_length,
    )
    abstract_parameters(config.model, mesh)  # raises if the mesh cannot split the parameters
    return mesh


def check_dtype(
    model: LlamaConfig, name: str = "--model.dtype", remedy: str = "take bfloat16 or float32"
) -> None:
    """Checks that the devices compute in the dtype of a model.

    Args:
      model: Configuration of the model.
      name: Name of the dtype in the message, which begins with it.
      remedy: End of the message.

    Raises:
      FlagError: XLA has no product of float16 with sums in float32 for a CPU.
    """
    if model.dtype == "float16" and jax.default_backend() == "cpu":
        raise FlagError(
            f"{name} float16 cannot be computed on a CPU, where XLA multiplies no float16 with "
            f"sums in float32; {remedy}"
        )


def check_batch_size(config: TrainConfig, num_parts: int) -> None:
    """Checks that a batch can be split over `num_parts` devices, data * fsdp.

    Raises:
      FlagError: A device would have a part of an example.
    """
    rows, multiple = config.data.batch_size, config.rows_of_example * num_parts
    if rows % multiple:
        pairs = f", times the {config.rows_of_example} rows of a preference"
        raise FlagError(
            f"--data.batch-size {rows} must be a multiple of the {num_parts} devices that share "
            f"its rows, data * fsdp{pairs if config.rows_of_example > 1 else ''}; take "
            f"{multiple * -(-rows // multiple)}"
        )


def open_datasets(config: TrainConfig) -> Datasets:
    """Opens the text that a configuration names, and tokenizes it if no cache has it.

    Raises:
      DataError: The text cannot be used, or the vocabulary is too small for it.
    """
    length = config.data.sequence_length
    if config.data.path:
        data.check_effects(config.data)
        options = {"vocab_size": config.model.vocab_size, "evaluates": config.eval_every > 0}
        if config.objective == "dpo":  # whose pairs are never cut
            return Datasets(*data.open_preferences(config.data, **options))
        train_data, held_out, fingerprint = data.open_files(config.data, **options)
        flag = "--data.sequence-length"
        data.tell_of_cut_records(config.data.path, train_data, flag)
        if held_out is not None:
            paths = config.data.held_out_path or config.data.path
            data.tell_of_cut_records(paths, held_out, flag, note=", held out")
        return Datasets(train_data, held_out, fingerprint)
    if config.data.source == "synthetic":
        if config.eval_every:
            print(
                "random tokens have no held-out text, so there are no evaluations; name text of "
                "your own with --data.path"
            )
        return Datasets(data.SyntheticDataset(config.model.vocab_size, length), None, {})
    if config.model.vocab_size < data.BYTE_VOCAB_SIZE:
        raise data.DataError(
            f"vocab_size={config.model.vocab_size} is too small for bytes; take a model with at "
            f"least {data.BYTE_VOCAB_SIZE}"
        )
    corpus = data.stdlib_corpus()
    train_data = data.PackedDataset.from_documents(corpus.train, sequence_length=length)
    held_out = None
    try:
        if config.eval_every:
            held_out = data.PackedDataset.from_documents(corpus.held_out, sequence_length=length)
    except data.DataError as error:
        raise data.DataError(
            f"the standard library, held out: {error}; --data.path names other text, and "
            "--eval-every 0 turns evaluations off"
        ) from error
    return Datasets(train_data, held_out, corpus.fingerprint())


def with_planned_remat(config: TrainConfig, mesh: Mesh) -> tuple[TrainConfig, dict[str, Any]]:
    """Plans the rematerialization policy.

    Returns:
      The configuration with the fastest policy that fits, and the choice for `config.json`.

    Raises:
      PlanError: No policy fits.
    """
    target = target_here(mesh)
    chosen = plan(with_policies(config), target, cached(Programs(target), target))
    print(table(chosen))
    # Another machine may have a little more memory and would choose another policy.
    remat = of_first(lambda: chosen.best.remat)
    summary = {"remat": remat, "memory_bytes": chosen.best.bytes, "limit_bytes": target.limit_bytes}
    return with_remat(config, remat), summary


def first_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """The state before the first step: random parameters, or those of `--init-from`."""
    if config.init_from is None:
        return init_state(config, mesh)
    params = load_params(config.init_from, config.model, mesh)
    check_finite(str(config.init_from), params, "start from another model with --init-from")
    return state_with(config, mesh, params)


def compile_steps(
    config: TrainConfig, mesh: Mesh, state: TrainState, datasets: Datasets
) -> CompiledSteps:
    """Compiles the training step and, if the run has evaluations, the evaluation step.

    It prints which operations of the training step run kernels, the time of its compilation, and
    its memory.
    """
    batch = batch_on_devices(config, mesh, datasets.train, 0)
    if config.model.fp8 is not None:
        print(describe(config.model, config.mesh.tensor))
    frozen = load_frozen(config, mesh)
    start = time.perf_counter()
    step = jit_train_step(config, state)
    with recording() as choices:
        lowered = step.lower(state, batch, *frozen)
    print(Explanation(tuple(choices)).summary)
    program = lowered.compile()
    print(f"compiled the step in {time.perf_counter() - start:.1f} s")
    print(memory_report(program))
    train_step, num_early = program, 0
    if config.pgle and mesh.size == 1:
        print("pgle is left out, because one device exchanges nothing")
    elif config.pgle:
        # Only a call of the jitted function is profiled and compiled again.
        train_step, num_early = with_measured_latencies(step), calls_until_compiled_again()
    eval_step = None
    if datasets.held_out is not None and config.eval_every:
        eval_batch = next(datasets.held_out.eval_batches(config.data.batch_size, 1))
        eval_batch = to_devices(eval_batch, batch_sharding(mesh))
        eval_step = jax.jit(make_eval_step(config)).lower(state.params, eval_batch).compile()
    return CompiledSteps(train_step, eval_step, program, num_early, frozen)


def batch_on_devices(config: TrainConfig, mesh: Mesh, dataset: Any, step: int) -> Batch:
    """The batch `[A, B, S]` after `step` steps; each process makes the rows of its devices."""
    rows_of = lambda rows: dataset.batch(
        step, batch_size=config.data.rows_per_step, seed=config.seed, rows=rows
    )
    shape = config.data.accumulation_steps, config.data.batch_size
    return rows_to_devices(rows_of, shape, batch_sharding(mesh, batch_axis=1))


def step_batch(config: TrainConfig, dataset: Any, step: int) -> dict[str, np.ndarray]:
    """The batch `[A, B, S]` after `step` steps, in the memory of the host."""
    rows = dataset.batch(step, batch_size=config.data.rows_per_step, seed=config.seed)
    split = lambda a: a.reshape(config.data.accumulation_steps, config.data.batch_size, -1)
    return {name: split(array) for name, array in rows.items()}
