"""The configuration of a training run, as frozen dataclasses, and its presets.

`train.cli.command_line` makes a flag of each field. The text of the field in "Attributes" is the
help of the flag. The module is long because the texts are long.
"""

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Literal

from models.config import LlamaConfig
from models.presets import PRESETS as MODELS
from pallas_kernels.gpu.device import target_device
from train import xla_flags
from train.formats import number_of
from train.objective_config import NO_DISTILL, NO_DPO, DistillConfig, DPOConfig, check_objective
from train.ranges import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SECONDS,
    SEED,
    SHARE,
    SIZE,
    WHOLE_SECONDS,
    check_folder_name,
    check_ranges,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The tokens of a run.

    Attributes:
      source: Text to train on if there is no `path`. `stdlib` is the source of the running Python's
        standard library, as bytes; `synthetic` is random tokens, for measuring speed.
      path: Files and folders to train on: text, `.jsonl`, `.parquet`, and token ids in `.bin` and
        in `.npy` (docs/data.md).
      weights: Share of the rows from each path, as relative numbers. Without weights each path has
        the share that it has of all rows.
      tokenizer: A tokenizer.json of Hugging Face's tokenizers, or a folder with one. None makes
        each byte a token. For files of token ids, name the tokenizer that made them.
      bos_token: Token that begins a document; "" for none. None takes the token that
        tokenizer_config.json beside the tokenizer names. If it names none, None takes a usual
        token.
      eos_token: Token that ends a document; every tokenizer needs one. None chooses the token as
        for `bos_token`. In files of token ids it separates documents.
      text_field: Field of the text in `.jsonl` and `.parquet`. Records without this field have
        the fields "prompt" and "completion", or "messages". Then only the completion, or the last
        message, has a loss.
      token_dtype: Dtype of the token ids in `.bin`. It must hold every id of the tokenizer: a
        tokenizer with more than 65,536 tokens needs uint32.
      held_out_fraction: Share of the documents that are held out, chosen by a hash of their
        content.
      held_out_path: Files and folders that are held out, in place of a share of `path`.
      cache_dir: Folder for the cache of tokens, which takes 2 or 4 bytes a token. None takes the
        folder `pallas-kernels/tokens` in `$XDG_CACHE_HOME` or `~/.cache`.
      sequence_length: Number of tokens in a row of a batch, S.
      batch_size: Number of rows in a batch, B, over all devices. One forward and backward computes
        a batch.
      accumulation_steps: Number of batches whose gradients are added up for one step of the
        optimizer.
    """

    source: Literal["stdlib", "synthetic"]
    path: tuple[Path, ...] = ()
    weights: tuple[float, ...] = ()
    tokenizer: Path | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    text_field: str = "text"
    token_dtype: Literal["uint16", "uint32"] = "uint16"
    held_out_fraction: float = 0.05
    held_out_path: tuple[Path, ...] = ()
    cache_dir: Path | None = None
    sequence_length: int
    batch_size: int
    accumulation_steps: int = 1

    def __post_init__(self):
        check_ranges(
            self,
            weights=POSITIVE,
            held_out_fraction=BELOW_ONE,
            sequence_length=SIZE,
            batch_size=SIZE,
            accumulation_steps=SIZE,
        )
        if self.tokens_per_step not in range(2**31):  # counted in an int32
            raise ValueError(
                f"batch_size={self.batch_size} times accumulation_steps={self.accumulation_steps} "
                f"times sequence_length={self.sequence_length} must stay below 2**31 tokens; make "
                "one of them smaller"
            )
        if self.weights and len(self.weights) != len(self.path):
            raise ValueError(
                f"weights={self.weights}: {number_of(len(self.weights), 'weight')} for "
                f"{number_of(len(self.path), 'path')}; give each path a weight"
            )
        if not self.text_field:
            raise ValueError("text_field='' must be the name of a field, as in 'text'")
        if len(set(self.path)) < len(self.path):
            raise ValueError(
                f"path={' '.join(map(str, self.path))} names the same file twice; name it once and "
                "raise its weight"
            )
        if self.held_out_path and self.held_out_fraction != DataConfig.held_out_fraction:
            raise ValueError(
                f"held_out_fraction={self.held_out_fraction} has no effect with held_out_path, "
                "which names all held-out text; leave one of them out"
            )
        of_text = (
            *("tokenizer", "held_out_path", "text_field", "token_dtype", "held_out_fraction"),
            "cache_dir",
        )
        for name in of_text:
            value = getattr(self, name)
            if value != getattr(DataConfig, name) and not self.path:
                shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
                raise ValueError(
                    f"{name}={shown} is for text of your own; name the text with path, or leave "
                    f"{name} out"
                )

    @property
    def is_packed(self) -> bool:
        """Whether rows hold documents, not random tokens."""
        return bool(self.path) or self.source == "stdlib"

    @property
    def rows_per_step(self) -> int:
        """Number of rows in one step of the optimizer."""
        return self.batch_size * self.accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens in one step of the optimizer."""
        return self.rows_per_step * self.sequence_length


# The usual b1 and b2 of each optimizer; None if it does not use them.
_DECAYS: dict[str, tuple[float | None, float | None]] = {
    "adamw": (0.9, 0.95),
    "lion": (0.9, 0.99),
    "adafactor": (None, None),
    "muon": (0.95, 0.95),
    "sgd": (0.9, None),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, its decoupled weight decay and its learning rate.

    The table has the memory of each optimizer's state, in bytes a parameter:

    | name | state | learning rate, compared with AdamW's |
    |---|---|---|
    | `adamw` (https://arxiv.org/abs/1711.05101) | 8 | |
    | `lion` (https://arxiv.org/abs/2302.06675) | 4 | a fifth, and five times the weight decay |
    | `adafactor` (https://arxiv.org/abs/1804.04235), without momentum | about 0 | the same |
    | `muon` (https://kellerjordan.github.io/posts/muon), for the matrices of the layers, and AdamW
      for the rest | 4 and 8 | the same |
    | `sgd` with momentum | 4 | a hundred times, or more |

    Attributes:
      name: Name of the optimizer.
      learning_rate: Highest learning rate.
      schedule: Schedule of the learning rate after the warm-up. With `cosine` the rate falls along
        half a cosine until the end of the run. With `wsd` (warm-up, stable, decay;
        https://arxiv.org/abs/2404.06395) the rate stays at the highest, and falls linearly over the
        steps that `decay_fraction` names.
      warmup_steps: Number of steps in which the rate rises linearly from 0. The rate of the first
        step is 0.
      decay_fraction: Share of all steps, at the end of the run, in which the rate falls with `wsd`.
      final_fraction: Learning rate at the end of the schedule, as a share of the highest. The rate
        of the last step is a little higher.
      b1: Decay of the first moment, or momentum. With `lion` it is not a decay: the update is the
        sign of b1 times the moment plus (1 - b1) times the gradient. None is 0.9, and 0.95 for the
        matrices of `muon`; the AdamW of `muon` always has 0.9. `adafactor` has no b1.
      b2: Decay of the second moment, or of the one moment of `lion`. None is 0.95, or 0.99 for
        lion. `adafactor` and `sgd` have no b2.
      eps: Number that `adamw` and `muon` add to the root of the second moment. `muon` also adds it
        to the norm of a matrix before it divides the matrix by the norm.
      weight_decay: Weight decay of embeddings and kernels; norms and biases do not decay.
      clip_norm: Largest allowed norm of all gradients together. Larger gradients are scaled down to
        this norm. 0 turns clipping off.
      momentum_dtype: Dtype of the first moment; None is the dtype of the parameters. With float32
        parameters, bfloat16 saves two bytes a parameter. `adafactor` has no first moment.
    """

    name: Literal["adamw", "lion", "adafactor", "muon", "sgd"] = "adamw"
    learning_rate: float = 3e-4
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 100
    decay_fraction: float = 0.2
    final_fraction: float = 0.1
    b1: float | None = None
    b2: float | None = None
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    momentum_dtype: Literal["float32", "bfloat16"] | None = None

    def __post_init__(self):
        check_ranges(
            self,
            learning_rate=NOT_NEGATIVE,
            warmup_steps=COUNT,
            decay_fraction=SHARE,
            final_fraction=SHARE,
            b1=BELOW_ONE,
            b2=BELOW_ONE,
            eps=POSITIVE,
            weight_decay=NOT_NEGATIVE,
            clip_norm=NOT_NEGATIVE,
        )
        b1, b2 = _DECAYS[self.name]
        for name, usual in (("b1", b1), ("b2", b2), ("momentum_dtype", b1)):
            if usual is None and getattr(self, name) is not None:
                value = getattr(self, name)
                raise ValueError(f"{name}={value}: {self.name} has no {name}; leave it out")
        if self.eps != OptimizerConfig.eps and self.name not in ("adamw", "muon"):
            raise ValueError(f"eps={self.eps}: {self.name} has no eps; leave it out")
        if self.decay_fraction != OptimizerConfig.decay_fraction and self.schedule != "wsd":
            raise ValueError(
                f"decay_fraction={self.decay_fraction} is for schedule='wsd'; leave it out"
            )

    @property
    def decays(self) -> tuple[float, float]:
        """`b1` and `b2`, or their usual values; 0 for a decay that the optimizer does not have."""
        b1, b2 = _DECAYS[self.name]
        return (
            (b1 or 0.0) if self.b1 is None else self.b1,
            (b2 or 0.0) if self.b2 is None else self.b2,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The number of devices along each axis of the mesh.

    Attributes:
      data: Number of copies of the model, each of which computes its own rows of a batch. -1 takes
        all devices that the other axes leave.
      fsdp: Number of devices over which parameters and optimizer state are split.
      tensor: Number of devices that share each sequence. They split the attention by heads, the MLP
        and the vocabulary by columns, and the residual stream by tokens.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        check_ranges(self, fsdp=SIZE, tensor=SIZE)
        if self.data != -1 and (fault := SIZE.fault(self.data)):
            raise ValueError(f"data={self.data} {fault}, or be -1 for all devices that are left")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """The checkpoints in the run's folder.

    Attributes:
      every: Number of steps between checkpoints; the last step has a checkpoint, too. With
        checkpoints, the same command resumes the run in the folder `name`. 0 writes no checkpoints.
      keep: Number of newest checkpoints that the run keeps. The run also keeps the checkpoint with
        the lowest held-out loss.
    """

    every: int = 0
    keep: int = 2

    def __post_init__(self):
        check_ranges(self, every=COUNT, keep=SIZE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The processes that train together (docs/multihost.md).

    Attributes:
      cluster: Launcher of the processes: `slurm` (`srun`) or `ompi` (Open MPI's `mpirun`), with a
        process for each GPU. None takes the next three settings instead.
      coordinator_address: Address of process 0, as `host:port` with a free port of that host.
      num_processes: Number of processes. Each process uses the GPUs that it can see.
      process_id: Number of this process, from 0.
      initialization_timeout_s: Seconds within which all processes must have started.
      heartbeat_timeout_s: Seconds without a sign of life after which a process counts as dead and
        the others end.
      step_timeout_s: Limit in seconds for a step, and for the wait for its batch. After this time
        the process prints the stacks of its threads and ends. Compilation, evaluation, checkpoints
        and the files at the end may take ten times as long. 0 sets no limit.
    """

    cluster: Literal["slurm", "ompi"] | None = None
    coordinator_address: str | None = None
    num_processes: int = 1
    process_id: int = 0
    initialization_timeout_s: int = 300
    heartbeat_timeout_s: int = 60
    step_timeout_s: float = 1800.0

    def __post_init__(self):
        check_ranges(
            self,
            num_processes=SIZE,
            process_id=COUNT,
            initialization_timeout_s=WHOLE_SECONDS,
            heartbeat_timeout_s=WHOLE_SECONDS,
            step_timeout_s=SECONDS,
        )
        if self.process_id >= self.num_processes:
            raise ValueError(
                f"process_id={self.process_id} must be below num_processes={self.num_processes}"
            )
        address = self.coordinator_address
        if self.num_processes > 1 and not re.fullmatch(r".+:\d+", address or ""):
            raise ValueError(
                f"coordinator_address={address!r} must be host:port of process 0, because "
                f"num_processes={self.num_processes}"
            )
        if self.cluster and (address or self.num_processes > 1):
            raise ValueError(
                f"cluster={self.cluster!r} sets coordinator_address, num_processes and process_id; "
                "leave them out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
      name: Name of the folder in `runs_dir`. Without checkpoints, a number is appended if the
        folder exists.
      runs_dir: Folder of all runs.
      init_from: A Hugging Face folder whose parameters the run starts from. Its model, and its
        tokenizer if it has one, set the defaults of the flags. None draws random parameters.
      objective: Goal of the run. `sft` learns to predict the tokens of the text, or only the tokens
        of completions. `dpo` learns from pairs of a chosen and a rejected completion. `distill`
        learns the next-token distributions of a teacher, on the same data as `sft`.
      dpo: Settings of the objective `dpo`.
      distill: Settings of the objective `distill`.
      model: The sizes of the Llama, and how it runs.
      data: The text to train on and to hold out, and the size of a batch.
      optimizer: The optimizer and the learning rate.
      mesh: The number of devices along each axis of the mesh.
      checkpoint: The checkpoints of the run.
      distributed: The processes that train together.
      steps: Number of optimizer steps.
      seed: Seed of the parameters and of the order of the data.
      z_loss: Weight of the squared logsumexp in the loss.
      counted_fraction: Largest share of a batch's tokens that is expected to have a label, above 0
        and at most 1. Tokens of prompts, for example, have none, and the loss skips tokens without
        a label. A batch with a larger share has the same loss, but takes as long as with 1.0. The
        setting has no effect if `mesh.tensor` is more than 1.
      max_skipped_steps: Number of skipped steps in a row after which the run ends. A step is
        skipped if its loss or gradient is not finite.
      skip_loss_spikes: Number of standard deviations by which a loss may exceed the running mean of
        the losses. A step with a larger loss is skipped, too. 6 is usual; 0 turns this off. The
        formula is in `train.guard.judge`.
      eval_every: Number of steps between evaluations of the held-out loss; 0 runs no evaluation.
      eval_batches: Number of batches in an evaluation, spread over the held-out text.
      log_every: Number of steps between printed lines where the output is not a terminal. On a
        terminal the run shows a progress bar.
      sample_prompt: Beginning of the text that is generated at every evaluation and at the end.
      sample_tokens: Number of tokens of the generated text; 0 generates none.
      save: Whether the run writes the trained model to its folder, in Hugging Face's format.
      tensorboard: Whether the run writes the metrics for TensorBoard, to `tensorboard` in its
        folder.
      wandb: Project of Weights & Biases that gets the metrics; None sends nothing.
      pgle: Whether XLA compiles the step again after three steps, with the measured times of its
        kernels (profile-guided latency estimation). XLA then schedules the exchange between GPUs by
        these times. It costs two more compilations, also in a resumed run.
      profile_steps: Steps `A:B`, counted from 1, whose trace is written to `profile` in the run's
        folder. With `pgle` the trace cannot have the first four steps after a start.
      dump_hlo: Whether the compiled step and its memory are written to `hlo` in the run's folder.
        With `pgle` this is the step before it is compiled again.
      xla_options: Options of XLA for the step on GPUs, as `name=value`. They are added to the
        defaults in `train.xla_flags`, or replace one of them; `none` drops the defaults.
    """

    name: str
    runs_dir: Path = Path("runs")
    init_from: Path | None = None
    objective: Literal["sft", "dpo", "distill"] = "sft"
    dpo: DPOConfig = NO_DPO
    distill: DistillConfig = NO_DISTILL
    model: LlamaConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    steps: int
    seed: int = 0
    z_loss: float = 0.0
    counted_fraction: float = 1.0
    max_skipped_steps: int = 10
    skip_loss_spikes: float = 0.0
    eval_every: int
    eval_batches: int = 8
    log_every: int = 10
    sample_prompt: str = "def "
    sample_tokens: int
    save: bool
    tensorboard: bool = False
    wandb: str | None = None
    pgle: bool = False
    profile_steps: str | None = None
    dump_hlo: bool = False
    xla_options: tuple[str, ...] = ()

    def __post_init__(self):
        check_folder_name(self.name)
        xla_flags.parse(self.xla_options)
        check_ranges(
            self,
            steps=SIZE,
            seed=SEED,
            z_loss=NOT_NEGATIVE,
            counted_fraction=POSITIVE_SHARE,
            max_skipped_steps=SIZE,
            skip_loss_spikes=NOT_NEGATIVE,
            eval_every=COUNT,
            eval_batches=SIZE,
            log_every=SIZE,
            sample_tokens=COUNT,
        )
        check_objective(self)
        longest = self.model.max_position_embeddings
        if not self.model.fits(self.data.sequence_length):
            raise ValueError(
                f"data.sequence_length={self.data.sequence_length} exceeds "
                f"model.max_position_embeddings={longest}; shorten the rows, or raise the maximum"
            )
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps} must be below "
                f"steps={self.steps}; shorten the warm-up"
            )
        # Checked here, because samples are generated after the last step.
        sample_size = 1 + len(self.sample_prompt.encode()) + self.sample_tokens
        if self.sample_tokens and sample_size > longest:
            raise ValueError(
                f"a sample of up to {sample_size} tokens (sample_prompt={self.sample_prompt!r} and "
                f"sample_tokens={self.sample_tokens}) exceeds model.max_position_embeddings="
                f"{longest}; ask for fewer sample_tokens, or shorten sample_prompt"
            )
        first, last = self.profiled or (1, 1)
        if not 1 <= first <= last <= self.steps:
            raise ValueError(
                f"profile_steps={self.profile_steps!r} must name steps A:B with 1 <= A <= B <= "
                f"{self.steps}"
            )
        of_pgle = xla_flags.calls_until_compiled_again() if self.pgle else 0
        if self.steps <= of_pgle:
            raise ValueError(
                f"pgle compiles again at step {of_pgle}, and the run has steps={self.steps}; "
                "leave pgle out, or take more steps"
            )
        if self.profiled and first <= of_pgle:
            raise ValueError(
                f"profile_steps={self.profile_steps!r} must begin after step {of_pgle}, because "
                "pgle profiles the steps before and JAX has one profiler; name later steps"
            )

    @property
    def rows_of_example(self) -> int:
        """Number of rows that belong together on one device: two for a preference, else one."""
        return 2 if self.objective == "dpo" else 1

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last step of the trace; (0, 0) if the field is misspelt."""
        if self.profile_steps is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        return (int(found[1]), int(found[2])) if found else (0, 0)


PRESET_NAMES = tuple(MODELS)


def preset(name: str) -> TrainConfig:
    """The run called `name`: `demo` trains on text, the others train a Llama on random tokens.

    Raises:
      ValueError: No preset has that name; the message names a similar one.
    """
    if name not in MODELS:
        close = difflib.get_close_matches(name, PRESET_NAMES, n=1)
        hint = f"did you mean {close[0]}? There" if close else "there"
        raise ValueError(f"no preset {name!r}; {hint} are {', '.join(PRESET_NAMES)}")
    model = MODELS[name]
    if name == "demo":
        dtype = fast_dtype()
        return TrainConfig(
            name=name,
            model=dataclasses.replace(model, dtype=dtype),
            data=DataConfig(source="stdlib", sequence_length=256, batch_size=8),
            optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20),
            steps=300,
            eval_every=50,
            sample_tokens=400,
            save=True,
        )
    return TrainConfig(
        name=name,
        model=model,
        data=DataConfig(source="synthetic", sequence_length=4096, batch_size=4),
        optimizer=OptimizerConfig(warmup_steps=10),
        steps=50,
        eval_every=0,
        sample_tokens=0,
        save=False,
    )


def fast_dtype() -> str:
    """The dtype to compute in. On a CPU XLA emulates bfloat16, at half the speed of float32."""
    return "float32" if target_device().capability is None else "bfloat16"
