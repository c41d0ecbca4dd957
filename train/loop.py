"""The training loop: `run` does a whole run, and `_Loop` its steps."""

import contextlib
import math
import threading
import time
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from models.config import AUTO_REMAT
from models.fp8 import check_fp8
from pallas_kernels import hardware
from train import data
from train.checkpoints.checkpoint import Checkpoints, check_config
from train.config import TrainConfig
from train.distributed import StopVote, Watchdog, is_first, of_first
from train.errors import RunError
from train.evaluate import held_out_metrics
from train.faults import save_failed_step, stop_signals
from train.hf_folder import check_model
from train.objectives import metrics_of
from train.outputs import (
    TEMPERATURE,
    Writer,
    check_sample,
    finish,
    new_run_dir,
    open_writer,
    remove_if_empty,
    sample,
)
from train.reference import with_reference
from train.reporting import metrics, tracking
from train.reporting.profiling import Profile, memory_report, write_hlo
from train.reporting.progress import Progress
from train.setup import (
    CompiledSteps,
    Datasets,
    batch_on_devices,
    check_dtype,
    compile_steps,
    first_state,
    mesh_of,
    open_datasets,
    step_batch,
    with_planned_remat,
)
from train.step import Batch, TrainState, abstract_state
from train.teacher import abstract_frozen, check_teacher, teacher_digest
from train.token_ids import tell_of_contradiction


def run(config: TrainConfig) -> Path:
    """Trains, and returns the folder of the run.

    The folder holds `config.json`, `metrics.jsonl` (a JSON object a line), `loss.png`,
    `report.html` and, if asked for, checkpoints, samples, the compiled step, a trace, and the model
    in Hugging Face's format.

    With checkpoints the folder is `runs_dir/name`. A run that is there already goes on, to the same
    bits as if it had not stopped (`pgle` may change the last bits). A run that has all of its steps
    writes its model and its report again. Without checkpoints the folder is always new, and a run
    that a signal stops writes the model and the report of the steps that it took.

    If there are several processes (`train.distributed`), all must call this function and share the
    folder. Process 0 writes its files; each process writes its part of a checkpoint.

    Raises:
      RunError: The run in the folder cannot go on, a file cannot be written, too many steps in a
        row were skipped, or a package is missing.
      FolderError: The model to start from, or the teacher, cannot be read or does not fit the
        configuration.
      DataError: The text or the tokenizer cannot be used.
      PlanError: `remat="auto"`, and no policy fits.
      ValueError: The mesh does not fit the devices, the batch or the model, or the model needs FP8
        or float16, which the devices do not have.
    """
    mesh = mesh_of(config)
    check_dtype(config.model)
    tracking.check_installed(config)
    if config.model.fp8:
        check_fp8(config.model.fp8)
    if config.init_from:
        check_model(config.init_from, config.model)
    check_teacher(config)
    abstract_frozen(config, mesh)  # raises if the mesh cannot split the parameters of a teacher
    tokenizer = data.load_tokenizer(config.data)
    check_sample(config, tokenizer)
    if is_first():
        tell_of_contradiction(config, tokenizer)
    datasets = open_datasets(config)
    written: dict[str, Any] = {"config": config, "data": datasets.fingerprint}
    if teacher := config.distill.teacher:
        written["data"] = datasets.fingerprint | {"teacher": teacher_digest(teacher)}
    if config.model.remat == AUTO_REMAT:
        config, written["plan"] = with_planned_remat(config, mesh)
    with contextlib.ExitStack() as stack:
        watchdog = stack.enter_context(Watchdog(config.distributed.step_timeout_s))
        stack.enter_context(jax.set_mesh(mesh))
        run_dir, checkpoints = _open_folder(config, written, stack)
        step, state = _restored_or_first_state(config, mesh, checkpoints, watchdog)
        if step:
            print(f"{run_dir}: going on after step {step} of {config.steps}")
        if step < config.steps:
            _check_skipped(config, run_dir, step, state)
            if config.objective == "dpo":
                datasets = with_reference(
                    config, mesh, datasets, run_dir, step, state.params, watchdog
                )
            watchdog.begin_other("the compilation")
            steps = compile_steps(config, mesh, state, datasets)
            # The files come after it: a run that cannot be compiled leaves no settings that the
            # next run of its name would have to agree with.
            with open_writer(config, run_dir, step, written) as writer:
                if config.dump_hlo and is_first():
                    write_hlo(run_dir / "hlo", steps.program, memory_report(steps.program))
                loop = _Loop(
                    config, tokenizer, mesh, datasets, steps, writer, checkpoints, watchdog
                )
                state, step = loop.run(step, state)
            if step < config.steps:
                _print_stopped(config, step)
                if checkpoints:
                    return run_dir
        watchdog.begin_other("the model and the report")
        finish(config, run_dir, state, tokenizer)
    return run_dir


def _open_folder(
    config: TrainConfig, written: dict[str, Any], stack: contextlib.ExitStack
) -> tuple[Path, Checkpoints | None]:
    """The folder of the run, and its checkpoints if it has them.

    At its end, `stack` closes the checkpoints. Without checkpoints it removes the folder if it is
    empty.
    """
    if not config.checkpoint.every:
        run_dir = Path(of_first(lambda: str(new_run_dir(config.runs_dir, config.name))))
        stack.callback(remove_if_empty, run_dir)
        return run_dir, None
    run_dir = config.runs_dir / config.name
    check_config(run_dir, written["config"], written["data"])
    checkpoints = Checkpoints(run_dir / "checkpoints", keep=config.checkpoint.keep)
    return run_dir, stack.enter_context(checkpoints)


def _restored_or_first_state(
    config: TrainConfig, mesh: Mesh, checkpoints: Checkpoints | None, watchdog: Watchdog
) -> tuple[int, TrainState]:
    """The number of steps that the run has, and the state after them."""
    restored = None
    if checkpoints:
        watchdog.begin_other("the restore of a checkpoint")
        restored = checkpoints.restore(abstract_state(config, mesh))
    watchdog.begin_other("the first state")
    return restored or (0, first_state(config, mesh))


def _check_skipped(config: TrainConfig, run_dir: Path, step: int, state: TrainState) -> None:
    """Refuses a state after so many skipped steps in a row that all further ones are skipped.

    A run ends before it saves such a state, so a resume has it only with a lower limit.

    Raises:
      RunError: The limit is not above the number of skipped steps in a row.
    """
    number, limit = int(state.guard.in_a_row), config.max_skipped_steps
    if number >= limit:
        raise RunError(
            f"{run_dir}: the last {number} of its {step} steps were skipped, and "
            f"--max-skipped-steps {limit} ends a run after {limit} in a row; to go on, set it to "
            f"{number + 1} or more"
        )


def _print_stopped(config: TrainConfig, step: int) -> None:
    if config.checkpoint.every:
        print(f"stopped after step {step}; the same command goes on from there")
        return
    lost = "" if config.save else ", and the parameters are not saved (--no-save)"
    print(
        f"stopped after step {step} of {config.steps}; without --checkpoint.every no run can go on "
        f"from there{lost}"
    )


class _Loop:
    """The steps of a run, with the evaluations, rows of metrics and checkpoints between them.

    The row of a step is written after the next step was sent to the device. The numbers of the row
    have arrived by then, so the device never waits for the host.
    """

    def __init__(
        self,
        config: TrainConfig,
        tokenizer: data.Tokenizer,
        mesh: Mesh,
        datasets: Datasets,
        steps: CompiledSteps,
        writer: Writer,
        checkpoints: Checkpoints | None,
        watchdog: Watchdog,
    ):
        self._config, self._mesh, self._datasets, self._steps = config, mesh, datasets, steps
        self._writer, self._checkpoints, self._watchdog = writer, checkpoints, watchdog
        self._tokenizer = tokenizer
        self._start = time.perf_counter() - writer.elapsed_s
        self._throughput = metrics.Throughput()
        self._progress = Progress(config.steps, every=config.log_every)
        self._flops = metrics.flops_of_run(config)
        self._device = hardware.lookup(jax.devices()[0].device_kind)
        self._last_early = 0  # the last step that JAX profiles or compiles for `pgle`
        # The step that has no row yet: its number, values, and seconds of waiting for its batch.
        self._pending: tuple[int, dict[str, Any], float] | None = None
        self._told_of_many_labels = self._told_of_no_labels = False

    def run(self, first_step: int, state: TrainState) -> tuple[TrainState, int]:
        """Trains from a state, which it takes over.

        Args:
          first_step: Number of steps that led to the state.
          state: Parameters, optimizer state and counters.

        Returns:
          The last state, and its step: the last step of the run, or the one at which a signal asked
          to stop.
        """
        config, self._state, step = self._config, state, first_step
        # Python handles signals in the main thread alone.
        in_main_thread = threading.current_thread() is threading.main_thread()
        self._last_early = first_step + self._steps.num_early
        traced = self._traced(first_step) if is_first() else None
        batches_on_devices = lambda: (
            batch_on_devices(config, self._mesh, self._datasets.train, number)
            for number in range(first_step, config.steps)
        )
        with (
            stop_signals() if in_main_thread else contextlib.nullcontext() as stop,
            self._progress,
            Profile(self._writer.run_dir / "profile", traced) as profile,
            data.prefetch(batches_on_devices) as batches,
        ):
            if first_step == 0:
                self._evaluate(0)
            vote = StopVote(self._mesh)
            self._watchdog.begin(f"the batch of step {first_step + 1}")
            for step, (wait_s, batch) in enumerate(data.timed(batches), start=first_step + 1):
                self._dispatch(step, batch, wait_s, profile)
                stopping = stop is not None and vote.stops(stop.is_set())
                self._evaluate_and_save(step, stopping)
                if stopping:
                    break
                self._watchdog.begin(f"the batch of step {step + 1}")
            self._log_pending()
            if self._checkpoints:
                self._watchdog.begin_other(f"the checkpoint of step {step}")
                self._checkpoints.wait()
        return self._state, step

    def _traced(self, first_step: int) -> tuple[int, int] | None:
        """The steps of the trace, without those that JAX profiles itself (`pgle`)."""
        if self._config.profiled is None or not self._steps.num_early:
            return self._config.profiled
        first, last = self._config.profiled
        if first <= self._last_early and last > first_step:
            print(
                f"profile_steps={self._config.profile_steps!r}: no trace up to step "
                f"{self._last_early}, because pgle profiles these steps"
            )
        return max(first, self._last_early + 1), last

    def _dispatch(self, step: int, batch: Batch, wait_s: float, profile: Profile) -> None:
        """Sends a step to the devices, then writes the row of the step before."""
        if step <= self._last_early:
            self._watchdog.begin_other(f"step {step}, profiled or compiled again for pgle")
        profile.begin(step)
        self._state, values = self._steps.train(self._state, batch, *self._steps.frozen)
        if self._steps.num_early and step == self._last_early:
            self._throughput = metrics.Throughput()  # counts only the final program
        with self._throughput.pause():
            profile.end(step, values)
        self._log_pending()
        self._pending = step, values, wait_s

    def _evaluate_and_save(self, step: int, stopping: bool) -> None:
        """Evaluates and saves the state after a step, each if its turn has come."""
        config, last = self._config, step == self._config.steps
        evaluates = config.eval_every and (last or step % config.eval_every == 0)
        saves = self._checkpoints and (last or stopping or step % config.checkpoint.every == 0)
        # A resume needs the rows up to its checkpoint, so they are written before it.
        if evaluates or saves:
            self._log_pending()
        val_loss = self._evaluate(step) if evaluates else None
        if self._checkpoints:
            self._checkpoints.check()
            if saves:
                self._watchdog.begin_other(f"the checkpoint of step {step}")
                with self._throughput.pause():
                    self._writer.sync()
                    self._checkpoints.save(step, self._state, val_loss=val_loss)

    def _log_pending(self) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._log(*pending)

    def _log(self, step: int, values: dict[str, Any], wait_s: float) -> None:
        """Writes and shows the row of a step, whose numbers this waits for.

        Raises:
          RunError: Too many steps in a row were skipped.
        """
        self._watchdog.begin(f"step {step}")
        values = {name: value.item() for name, value in jax.device_get(values).items()}
        # The host sends the next step, and then reads the results of this one. To send a step, it
        # waits until there is room in the device's queue. No step follows the last one, so the last
        # one would seem up to a step shorter.
        if step < self._config.steps or self._throughput.tokens_per_s is None:
            tokens = self._config.data.tokens_per_step
            self._throughput.update(tokens, tokens * self._flops(values))
        row = self._row(step, values, wait_s)
        self._writer.write(row)
        self._progress.update(step, row)
        self._tell_of_no_labels(step, row["labeled_share"])
        self._tell_of_many_labels(step, row["labeled_share"])
        if values["skipped_in_a_row"]:
            found = f"loss {values['loss']}, gradient norm {values['grad_norm']}"
            is_finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
            why = "a spike of the loss (--skip-loss-spikes)" if is_finite else "not finite"
            self._progress.print(f"step {step} was skipped, {why}: {found}")
        if values["skipped_in_a_row"] >= self._config.max_skipped_steps:
            self._give_up(step)

    def _row(self, step: int, values: dict[str, Any], wait_s: float) -> dict[str, Any]:
        speed = self._throughput
        names = "loss", *metrics_of(self._config), "lr", "grad_norm", "skipped_steps"
        contexts = "mean_context", "teacher_mean_context"
        return {
            "step": step,
            **{name: values[name] for name in names},
            "tokens": step * self._config.data.tokens_per_step,
            "labeled_share": values["num_tokens"] / self._config.data.tokens_per_step,
            **{name: values[name] for name in contexts if name in values},
            "tokens_per_s": speed.tokens_per_s,
            "mfu": metrics.mfu(speed.flops_per_s, self._device, self._mesh.size),
            "step_time_s": speed.step_time_s,
            "data_wait_s": wait_s,
            **metrics.device_memory(),
            "elapsed_s": self._elapsed_s(),
        }

    def _tell_of_no_labels(self, step: int, share: float) -> None:
        """Says once that the loss of a step is 0 because nothing was to be predicted."""
        if not share and not self._told_of_no_labels:
            self._told_of_no_labels = True
            self._progress.print(
                f"step {step}: no token of its batches has a label, so its loss and gradient are 0 "
                "(its rows hold prompts alone); use a longer --data.sequence-length, or more rows"
            )

    def _tell_of_many_labels(self, step: int, share: float) -> None:
        """Says once that batches have more labels than the loss expects, which takes longer."""
        if self._config.mesh.tensor > 1:  # the fraction has no effect, which the log says
            return
        if share > self._config.counted_fraction and not self._told_of_many_labels:
            self._told_of_many_labels = True
            self._progress.print(
                f"step {step}: {share:.3f} of the tokens of its batches have a label, more than "
                f"counted_fraction={self._config.counted_fraction}; the loss of such a batch takes "
                "the time of 1.0"
            )

    def _give_up(self, step: int) -> None:
        """Saves a skipped step for `replay`, and raises the error that ends the run."""
        config = self._config
        batch = step_batch(config, self._datasets.train, step - 1)
        folder = save_failed_step(self._writer.run_dir, config, step, self._state.params, batch)
        limit = config.max_skipped_steps
        skipped = "a step was" if limit == 1 else f"{limit} steps in a row were"
        raise RunError(
            f"{skipped} skipped; to see what is wrong with the last: python -m train replay "
            f"{folder}"
        )

    def _evaluate(self, step: int) -> float | None:
        """Writes the held-out row after a step and a sample, and returns the held-out loss."""
        held_out, eval_step = self._datasets.held_out, self._steps.evaluate
        if held_out is None or eval_step is None:
            return None
        self._watchdog.begin_other(f"the evaluation after step {step}")
        with self._throughput.pause():
            params = self._state.params
            losses = held_out_metrics(self._config, self._mesh, eval_step, params, held_out)
            row = {"step": step, **losses}
            if self._config.sample_tokens:
                text = sample(self._config, self._tokenizer, params, TEMPERATURE)
                self._writer.write_sample(step, f"temperature {TEMPERATURE}", text)
            row["elapsed_s"] = self._elapsed_s()
        self._writer.write(row)
        self._progress.update(step, row)
        return row["val_loss"]

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._start
