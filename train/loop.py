"""The training loop."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.config import AUTO_REMAT
from models.llama import Llama
from models.llama_hf import save_pretrained
from models.sampling import generate
from models.sharding import batch_sharding, check_tensor_parallel, make_mesh
from pallas_kernels import hardware
from train import data
from train.checkpoints.checkpoint import Checkpoints, check_config
from train.checkpoints.hf_folder import check_finite, check_model, copy_tokenizer, load_params
from train.config import TrainConfig
from train.distributed import (
    StopVote,
    Watchdog,
    gathered,
    is_first,
    of_first,
    rows_to_devices,
    to_devices,
)
from train.errors import RunError, naming
from train.evaluate import measure
from train.faults import save_failed_step, stop_signals
from train.planner.cache import cached
from train.planner.plan import Programs, plan, table, with_policies, with_remat
from train.planner.target import target_here
from train.reporting import metrics, report, tracking
from train.reporting.profiling import Profile, memory_report, write_hlo
from train.step import (
    Batch,
    TrainState,
    abstract_state,
    init_state,
    jit_train_step,
    make_eval_step,
    model_graph,
    state_with,
)


def run(config: TrainConfig) -> Path:
    """Trains, and returns the run's folder.

    It holds `config.json`, `metrics.jsonl` (a JSON object a line), `loss.png`, `report.html` and,
    if asked for, checkpoints, samples, the compiled step, a trace, and the model in Hugging Face's
    format.

    With checkpoints the folder is `runs_dir/name` and a run that is in it already is gone on with,
    with the bits it would have had; one that has all of its steps gets its model and its report
    again. Without, the folder is always a new one, and a run that a signal stops writes model and
    report of the steps that it took.

    Of several processes (`train.distributed`) all must call this; the folder is one that all share,
    in which process 0 writes, and all of them their part of a checkpoint.

    Raises:
      RunError: the run in the folder cannot be gone on with, a file cannot be written, too many
        steps in a row were skipped, or a package is missing.
      FolderError: the model to start from cannot be read, or is not the one of the configuration.
    """
    mesh = mesh_of(config)
    tracking.check_installed(config)
    if config.init_from:
        check_model(config.init_from, config.model)
    train_data, held_out, fingerprint = _datasets(config)
    written: dict[str, Any] = {"config": config, "data": fingerprint}
    if config.model.remat == AUTO_REMAT:
        config, written["plan"] = _with_planned_remat(config, mesh)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.distributed.step_timeout_s))
        stack.enter_context(jax.set_mesh(mesh))
        if not config.checkpoint.every:
            run_dir = Path(of_first(lambda: str(_new_run_dir(config.runs_dir, config.name))))
            stack.callback(_remove_if_empty, run_dir)
            checkpoints = restored = None
        else:
            run_dir = config.runs_dir / config.name
            check_config(run_dir, written["config"], fingerprint)
            checkpoints = Checkpoints(run_dir / "checkpoints", keep=config.checkpoint.keep)
            stack.enter_context(checkpoints)
            watchdog.begin_other("the restore of a checkpoint")
            restored = checkpoints.restore(abstract_state(config, mesh))
        watchdog.begin_other("the first state")
        first_step, state = restored or (0, _first_state(config, mesh))
        if first_step:
            print(f"{run_dir}: going on after step {first_step} of {config.steps}")
        if first_step < config.steps:
            watchdog.begin_other("the compilation")
            steps = _compile(config, mesh, state, train_data, held_out)
            # Not before: a run that cannot be compiled leaves nothing that another must agree with.
            with _writer(config, run_dir, first_step, written) as writer:
                if config.dump_hlo and is_first():
                    write_hlo(run_dir / "hlo", steps[0], memory_report(steps[0]))
                state, step = _train(
                    config,
                    mesh,
                    first_step,
                    state,
                    *steps,
                    train_data,
                    held_out,
                    writer,
                    checkpoints,
                    watchdog,
                )
            if step < config.steps and checkpoints:
                print(f"stopped after step {step}; the same command goes on from there")
                return run_dir
            if step < config.steps:
                lost = "" if config.save else ", and the parameters are not saved (--no-save)"
                print(
                    f"stopped after step {step} of {config.steps}; without --checkpoint.every "
                    f"nothing can go on from there{lost}"
                )
        watchdog.begin_other("the model and the report")
        _finish(config, run_dir, state)
    return run_dir


@contextlib.contextmanager
def _writer(
    config: TrainConfig, run_dir: Path, first_step: int, written: dict[str, Any]
) -> Iterator[metrics.MetricsWriter | metrics.SilentWriter]:
    """Writes what a run tells about itself, and the configuration of a run that begins."""
    if not is_first():
        yield metrics.SilentWriter(run_dir)
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    # A run that died before its first checkpoint measures its first parameters again.
    last_step = first_step or -1
    with (
        tracking.trackers(config, run_dir, last_step=last_step) as trackers,
        metrics.MetricsWriter(run_dir, last_step=last_step, trackers=trackers) as writer,
    ):
        # An earlier run that left one, but no checkpoint, may have had other settings.
        if not first_step:
            _keep_tokenizer(config, run_dir / "tokenizer")
            writer.write_config(written)
        yield writer


def _remove_if_empty(run_dir: Path) -> None:
    """Leaves no folder of a run that failed before it wrote something."""
    if is_first():
        with contextlib.suppress(OSError):
            run_dir.rmdir()


def _first_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    if config.init_from is None:
        return init_state(config, mesh)
    params = load_params(config.init_from, config.model, mesh)
    check_finite(str(config.init_from), params, "start from another model with --init-from")
    return state_with(config, mesh, params)


def _keep_tokenizer(config: TrainConfig, folder: Path) -> None:
    """Copies the tokenizer of a run, if it has one, for what reads its models."""
    if config.data.tokenizer:
        folder.mkdir(exist_ok=True)
        bos_token, eos_token = config.data.bos_token, config.data.eos_token
        copy_tokenizer(config.data.tokenizer, folder, bos_token=bos_token, eos_token=eos_token)


def _with_planned_remat(config: TrainConfig, mesh: Mesh) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration with the fastest policy that fits, and the choice for the run's files."""
    target = target_here(mesh)
    chosen = plan(with_policies(config), target, cached(Programs(target), target))
    print(table(chosen))
    # On another machine the memory may be a little larger, and with it the choice another.
    remat = of_first(lambda: chosen.best.remat)
    summary = {"remat": remat, "memory_bytes": chosen.best.bytes, "limit_bytes": target.limit_bytes}
    return with_remat(config, remat), summary


def _train(
    config: TrainConfig,
    mesh: Mesh,
    first_step: int,
    state: TrainState,
    train_step: Callable[..., Any],
    eval_step: Callable[..., Any] | None,
    train_data: Any,
    held_out: data.Dataset | None,
    writer: metrics.MetricsWriter | metrics.SilentWriter,
    checkpoints: Checkpoints | None,
    watchdog: Watchdog,
) -> tuple[TrainState, int]:
    """Evaluates, steps, and reports the step before, whose numbers have arrived by then.

    Returns:
      The last state, and its step: the last of the run, or the one at which a signal asked to stop.
    """
    start = time.perf_counter() - writer.elapsed_s
    throughput = metrics.Throughput()
    flops = metrics.flops_per_token(config.model, config.data.sequence_length)
    device = hardware.lookup(jax.devices()[0].device_kind)
    elapsed = lambda: time.perf_counter() - start

    def log(step: int, values: dict[str, Any], wait_s: float) -> None:
        watchdog.begin(f"step {step}")
        values = {name: value.item() for name, value in jax.device_get(values).items()}
        # Results of a step are read once the next has been sent to the device, which takes until
        # there is room in its queue. The last has no next one, and would seem up to a step shorter.
        if step < config.steps or throughput.tokens_per_s is None:
            throughput.update(config.data.tokens_per_step)
        speed = throughput.tokens_per_s
        row = {
            "step": step,
            "loss": values["loss"],
            "nll": values["nll"],
            "accuracy": values["accuracy"],
            "lr": values["lr"],
            "grad_norm": values["grad_norm"],
            "skipped_steps": values["skipped_steps"],
            "tokens": step * config.data.tokens_per_step,
            "tokens_per_s": speed,
            "mfu": metrics.mfu(speed, flops, device, mesh.size),
            "step_time_s": throughput.step_time_s,
            "data_wait_s": wait_s,
            **metrics.device_memory(),
            "elapsed_s": elapsed(),
        }
        writer.write(row)
        progress.update(step, row)
        if values["skipped_in_a_row"]:
            found = f"loss {values['loss']}, gradient norm {values['grad_norm']}"
            progress.print(f"step {step} was skipped: {found}")
        if values["skipped_in_a_row"] >= config.max_skipped_steps:
            batch = _step_batch(config, train_data, step - 1)
            folder = save_failed_step(writer.run_dir, config, step, state.params, batch)
            raise RunError(
                f"{config.max_skipped_steps} steps in a row were skipped; to see what is wrong "
                f"with the last: python -m train replay {folder}"
            )

    def evaluate(step: int) -> float | None:
        if held_out is None or eval_step is None:
            return None
        watchdog.begin_other(f"the evaluation after step {step}")
        with throughput.pause():
            row = {
                "step": step,
                **_held_out_loss(config, mesh, eval_step, state.params, held_out),
            }
            if config.sample_tokens:
                text = _sample(config, state.params, _TEMPERATURE)
                writer.write_sample(step, f"temperature {_TEMPERATURE}", text)
            row["elapsed_s"] = elapsed()
        writer.write(row)
        progress.update(step, row)
        return row["val_loss"]

    # Python handles signals in the main thread alone.
    in_main_thread = threading.current_thread() is threading.main_thread()
    with (
        stop_signals() if in_main_thread else contextlib.nullcontext() as stop,
        metrics.Progress(config.steps, every=config.log_every) as progress,
        Profile(writer.run_dir / "profile", config.profiled if is_first() else None) as profile,
        data.prefetch(lambda: _train_batches(config, mesh, train_data, first_step)) as batches,
    ):
        if first_step == 0:
            evaluate(0)
        pending = None
        step = first_step
        vote = StopVote(mesh)
        watchdog.begin(f"the batch of step {first_step + 1}")
        for step, (wait_s, batch) in enumerate(data.timed(batches), start=first_step + 1):
            profile.begin(step)
            state, values = train_step(state, batch)
            with throughput.pause():
                profile.end(step, values)
            if pending is not None:
                log(*pending)
            pending = step, values, wait_s
            last = step == config.steps
            stopping = stop is not None and vote.stops(stop.is_set())
            evaluates = config.eval_every and (last or step % config.eval_every == 0)
            saves = checkpoints and (last or stopping or step % config.checkpoint.every == 0)
            # A resume needs the rows up to its checkpoint, so they are written before it.
            if evaluates or saves:
                log(*pending)
                pending = None
            val_loss = evaluate(step) if evaluates else None
            if checkpoints:
                checkpoints.check()
                if saves:
                    watchdog.begin_other(f"the checkpoint of step {step}")
                    with throughput.pause():
                        writer.sync()
                        checkpoints.save(step, state, val_loss=val_loss)
            if stopping:
                break
            watchdog.begin(f"the batch of step {step + 1}")
        if pending is not None:
            log(*pending)
        if checkpoints:
            watchdog.begin_other(f"the checkpoint of step {step}")
            checkpoints.wait()
    return state, step


def _held_out_loss(config, mesh, eval_step, params, held_out: data.Dataset) -> dict[str, float]:
    """Nats per token, share of tokens predicted, and bits per byte of the held-out text."""
    batches = held_out.eval_batches(config.data.batch_size, config.eval_batches)
    sums = measure(eval_step, params, batches, held_out.token_bytes, mesh)
    if not sums.bytes:
        raise data.DataError(
            f"the {config.eval_batches} held-out batches hold prompts alone; use a longer "
            "--data.sequence-length or more --eval-batches"
        )
    return {
        "val_loss": sums.loss,
        "val_accuracy": sums.accuracy,
        "val_bpb": sums.bits_per_byte,
    }


def _train_batches(
    config: TrainConfig, mesh: Mesh, dataset: Any, first_step: int
) -> Iterator[Batch]:
    """Batches `[A, B, S]` on the devices, in the order of the steps."""
    for step in range(first_step, config.steps):
        yield _batch_on_devices(config, mesh, dataset, step)


def _step_batch(config: TrainConfig, dataset: Any, step: int) -> dict[str, np.ndarray]:
    rows = dataset.batch(step, batch_size=config.data.rows_per_step, seed=config.seed)
    split = lambda a: a.reshape(config.data.accumulation_steps, config.data.batch_size, -1)
    return {name: split(array) for name, array in rows.items()}


def _to_devices(mesh: Mesh, batch: dict[str, np.ndarray]) -> Batch:
    return to_devices(batch, batch_sharding(mesh, batch_axis=1))


def _batch_on_devices(config: TrainConfig, mesh: Mesh, dataset: Any, step: int) -> Batch:
    sharding = batch_sharding(mesh, batch_axis=1)
    if sharding.is_fully_addressable:
        return _to_devices(mesh, _step_batch(config, dataset, step))
    rows_of = lambda rows: dataset.batch(
        step, batch_size=config.data.rows_per_step, seed=config.seed, rows=rows
    )
    shape = config.data.accumulation_steps, config.data.batch_size
    return rows_to_devices(rows_of, shape, sharding)


def mesh_of(config: TrainConfig) -> Mesh:
    """The mesh of all devices.

    Raises:
      ValueError: the devices cannot be split so, or they cannot share the batch.
    """
    data_axis, fsdp, tensor = config.mesh.data, config.mesh.fsdp, config.mesh.tensor
    if data_axis == -1:
        data_axis = max(1, jax.device_count() // (fsdp * tensor))
    mesh = make_mesh(data=data_axis, fsdp=fsdp, tensor=tensor)
    rows, num_parts = config.data.batch_size, data_axis * fsdp
    if rows % num_parts:
        raise ValueError(
            f"batch_size={rows} must be a multiple of data * fsdp, the {num_parts} devices it is "
            "split over"
        )
    check_tensor_parallel(
        tensor,
        num_key_value_heads=config.model.num_key_value_heads,
        num_tokens=rows // num_parts * config.data.sequence_length,
    )
    return mesh


def _datasets(config: TrainConfig):
    """Training data, held-out data and what identifies them."""
    length = config.data.sequence_length
    if config.data.path:
        return data.open_files(
            config.data, vocab_size=config.model.vocab_size, evaluates=config.eval_every > 0
        )
    if config.data.source == "synthetic":
        return data.SyntheticDataset(config.model.vocab_size, length), None, {}
    if config.model.vocab_size < data.BYTE_VOCAB_SIZE:
        raise data.DataError(
            f"vocab_size={config.model.vocab_size} is too small for bytes, which take "
            f"{data.BYTE_VOCAB_SIZE}"
        )
    corpus = data.stdlib_corpus()
    train_data = data.PackedDataset.from_documents(corpus.train, sequence_length=length)
    held_out = data.PackedDataset.from_documents(corpus.held_out, sequence_length=length)
    return train_data, held_out, corpus.fingerprint()


def _new_run_dir(runs_dir: Path, name: str) -> Path:
    """`runs_dir/name`, or the first of `name-2`, `name-3`, ... that does not exist."""
    candidates = (name if number == 1 else f"{name}-{number}" for number in range(1, 10**6))
    for candidate in candidates:
        with contextlib.suppress(FileExistsError):
            (runs_dir / candidate).mkdir(parents=True)
            return runs_dir / candidate
    raise FileExistsError(
        f"{runs_dir / name} and a million numbered folders exist; choose a --name"
    )


def _compile(config: TrainConfig, mesh: Mesh, state: TrainState, train_data, held_out):
    """Both steps, compiled ahead of time, and a report of the memory they need."""
    batch = _batch_on_devices(config, mesh, train_data, 0)
    start = time.perf_counter()
    train_step = jit_train_step(config, state).lower(state, batch).compile()
    print(f"compiled the step in {time.perf_counter() - start:.1f} s")
    print(memory_report(train_step))
    eval_step = None
    if held_out is not None and config.eval_every:
        eval_batch = next(held_out.eval_batches(config.data.batch_size, 1))
        eval_batch = to_devices(eval_batch, batch_sharding(mesh))
        eval_step = jax.jit(make_eval_step(config)).lower(state.params, eval_batch).compile()
    return train_step, eval_step


def _finish(config: TrainConfig, run_dir: Path, state: TrainState) -> None:
    """The saved model, the text samples, the plot and the report.

    Raises:
      RunError: one of them cannot be written; those before it and the rows of metrics are kept.
    """
    if config.save:
        model: Llama = nnx.merge(model_graph(config.model), state.params)
        with naming(run_dir / "model"):
            save_pretrained(model, run_dir / "model")
            if is_first():
                _keep_tokenizer(config, run_dir / "model")
    samples = []
    if config.sample_tokens:
        for temperature in (0.0, _TEMPERATURE):
            text = _sample(config, state.params, temperature)
            samples.append((f"temperature {temperature}", text))
            print(f"\n--- sample at temperature {temperature} ---\n{text}")
    if not is_first():
        return
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    with naming(run_dir / "report.html"):
        page = report.write_report(run_dir, samples=samples, summary={"Parameters": parameters})
    print(f"\nreport: {page}")


# Of the samples during a run: what is likeliest repeats itself.
_TEMPERATURE = 0.8


def _sample(config: TrainConfig, params: nnx.State, temperature: float) -> str:
    """The prompt of a configuration and what the model makes of it."""
    tokenizer = data.load_tokenizer(config.data)
    tokens = generate(
        nnx.merge(model_graph(config.model), params),
        jnp.asarray(data.start_of_document(config.sample_prompt, tokenizer), jnp.int32)[None],
        max_new_tokens=config.sample_tokens,
        temperature=temperature,
        key=jax.random.key(config.seed),
    )
    return config.sample_prompt + tokenizer.decode(gathered(tokens)[0])
