"""The files of a run: its folder, the rows of metrics while it trains, and the report and model."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Key

from models.config import LlamaConfig
from models.llama import Llama
from models.llama_hf import save_pretrained
from models.sampling import generate
from train import data
from train.checkpoints.files import steps_in
from train.config import TrainConfig
from train.distributed import gathered, is_first
from train.errors import naming
from train.hf_folder import copy_tokenizer
from train.reporting import metrics, report, tracking
from train.step import TrainState, model_graph
from train.token_ids import before_end

# For the samples during a run. At temperature 0 a small model soon repeats itself.
TEMPERATURE = 0.8

type Writer = metrics.MetricsWriter | metrics.SilentWriter


def new_run_dir(runs_dir: Path, name: str) -> Path:
    """Makes `runs_dir/name`, or the first of `name-2`, `name-3`, ... that does not exist.

    If the name has a number, it prints why, and how a run with checkpoints goes on.
    """
    candidates = (name if number == 1 else f"{name}-{number}" for number in range(1, 10**6))
    for candidate in candidates:
        with contextlib.suppress(FileExistsError):
            (runs_dir / candidate).mkdir(parents=True)
            if candidate != name:
                _tell_of_number(runs_dir / name, runs_dir / candidate)
            return runs_dir / candidate
    raise FileExistsError(
        f"{runs_dir / name} and a million numbered folders exist; choose a --name"
    )


def _tell_of_number(taken: Path, run_dir: Path) -> None:
    text = f"{taken} exists, so this run is {run_dir}"
    if steps := steps_in(taken / "checkpoints"):
        text += (
            f" and starts at step 0; --checkpoint.every N resumes {taken} after step {max(steps)}"
        )
    print(text, flush=True)


def remove_if_empty(run_dir: Path) -> None:
    """Removes the folder of a run that failed before it wrote a file."""
    if is_first():
        with contextlib.suppress(OSError):
            run_dir.rmdir()


@contextlib.contextmanager
def open_writer(
    config: TrainConfig, run_dir: Path, first_step: int, written: dict[str, Any]
) -> Iterator[Writer]:
    """Opens the run's files of rows, in process 0 alone.

    Args:
      config: The configuration of the run.
      run_dir: The folder of the run.
      first_step: Number of steps that the run has already.
      written: Content of `config.json`, which a run writes when it begins.

    Raises:
      RunError: A file cannot be written, or a tracker cannot be reached.
    """
    if not is_first():
        yield metrics.SilentWriter(run_dir)
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    # A run that died before its first checkpoint evaluates step 0 again. -1 drops its rows.
    last_step = first_step or -1
    with (
        tracking.trackers(config, run_dir, last_step=last_step) as trackers,
        metrics.MetricsWriter(run_dir, last_step=last_step, trackers=trackers) as writer,
    ):
        # They replace the files of a run that died before its first checkpoint. That run may have
        # had other settings.
        if not first_step:
            keep_tokenizer(config, run_dir / "tokenizer")
            writer.write_config(written)
        yield writer


def keep_tokenizer(config: TrainConfig, folder: Path) -> None:
    """Copies the tokenizer of a run, if it has one, for the programs that read its models."""
    bos_token, eos_token = config.data.bos_token, config.data.eos_token
    copy_tokenizer(config.data.tokenizer, folder, bos_token=bos_token, eos_token=eos_token)


def finish(
    config: TrainConfig, run_dir: Path, state: TrainState, tokenizer: data.Tokenizer
) -> None:
    """Writes the model, the text samples, the plot and the report.

    Raises:
      RunError: A file cannot be written; the files before it and the rows of metrics stay.
    """
    if config.save:
        model: Llama = nnx.merge(model_graph(config.model), state.params)
        with naming(run_dir / "model"):
            save_pretrained(model, run_dir / "model")
            if is_first():
                keep_tokenizer(config, run_dir / "model")
    samples = []
    if config.sample_tokens:
        for temperature in (0.0, TEMPERATURE):
            text = sample(config, tokenizer, state.params, temperature)
            samples.append((f"temperature {temperature}", text))
            print(f"\n--- sample at temperature {temperature} ---\n{text}")
    if not is_first():
        return
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    with naming(run_dir / "report.html"):
        page = report.write_report(run_dir, samples=samples, summary={"Parameters": parameters})
    print(f"\nreport: {page}")


def check_sample(config: TrainConfig, tokenizer: data.Tokenizer) -> None:
    """Checks that a sample can begin, before the first step.

    Raises:
      DataError: The prompt has no tokens.
    """
    if config.sample_tokens and not len(data.start_of_document(config.sample_prompt, tokenizer)):
        raise data.DataError(
            "the prompt has no tokens; give some text with --sample-prompt, or set "
            "--sample-tokens 0"
        )


def sample_key(seed: int) -> Key[Array, ""]:
    """The key of the draws of samples. That of the seed itself draws the parameters."""
    return jax.random.fold_in(jax.random.key(seed), 2**31)


def sample(
    config: TrainConfig, tokenizer: data.Tokenizer, params: nnx.State, temperature: float
) -> str:
    """The prompt of a configuration, and the text that the model continues it with."""
    return continued(
        config.sample_prompt,
        tokenizer,
        config.model,
        params,
        seed=config.seed,
        max_new_tokens=config.sample_tokens,
        temperature=temperature,
    )


def continued(
    prompt: str,
    tokenizer: data.Tokenizer,
    model: LlamaConfig,
    params: nnx.State,
    *,
    seed: int,
    **options: Any,
) -> str:
    """A prompt, and the text that a model continues it with; `options` are those of `generate`."""
    start = data.start_of_document(prompt, tokenizer)
    tokens = generate(
        nnx.merge(model_graph(model), params),
        jnp.asarray(start, jnp.int32)[None],
        key=sample_key(seed),
        **options,
    )
    answer = before_end(gathered(tokens)[0], model)
    return prompt + data.decode_after(start, answer, tokenizer)
