"""A training run as a frozen dataclass, and its presets; `train.cli.command_line` reads its flags."""

import dataclasses
import difflib
import re
from pathlib import Path
from typing import Literal

from models.config import LlamaConfig
from models.presets import PRESETS as MODELS
from pallas_kernels.gpu.device import target_device
from train import xla_flags
from train.ranges import (
    BELOW_ONE,
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
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
    """Where the tokens come from.

    Attributes:
      source: what to train on without a `path`. `stdlib`: the source of the running Python's
        standard library, as bytes. `synthetic`: random tokens, for measuring speed.
      path: files and folders to train on: text, `.jsonl`, `.parquet`, token ids in `.bin` or
        `.npy`; see `train.data.files`.
      weights: of the rows from each path; without them, a path counts by its size.
      tokenizer: a tokenizer.json of Hugging Face's tokenizers, or its folder; None: bytes. Of files
        with token ids, the one that made them.
      bos_token: begins a document; None: what tokenizer_config.json beside the tokenizer says or,
        without that file, one of the usual names. "" for nothing.
      eos_token: ends a document; None: likewise. Separates documents in files with token ids.
      text_field: the field of the text in `.jsonl` and `.parquet`. Records without it have "prompt"
        and "completion", of which only the completion is learned.
      token_dtype: of the token ids in `.bin`.
      held_out_fraction: share of the documents that are held out, by a hash of their content.
      held_out_path: files and folders to hold out in place of a share of `path`.
      cache_dir: where tokens are kept, 2 or 4 bytes each; None: `pallas-kernels/tokens` in
        `$XDG_CACHE_HOME` or `~/.cache`.
      sequence_length: S, tokens in a row.
      batch_size: B, rows in a forward and backward, over all devices.
      accumulation_steps: batches whose gradients are added up into one step.
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
                f"batch_size={self.batch_size} times {self.accumulation_steps=} times "
                f"{self.sequence_length=} must stay below 2**31 tokens"
            )
        if self.weights and len(self.weights) != len(self.path):
            raise ValueError(
                f"{len(self.weights)} weights for {len(self.path)} paths; give each path one"
            )
        if not self.text_field:
            raise ValueError("text_field='' must be the name of a field")
        if len(set(self.path)) < len(self.path):
            raise ValueError("path names the same file twice; raise its weight instead")
        for name in ("tokenizer", "held_out_path"):
            if getattr(self, name) and not self.path:
                raise ValueError(f"{name} is for text of your own; name it with path")

    @property
    def is_packed(self) -> bool:
        """Whether rows hold documents, and not random tokens."""
        return bool(self.path) or self.source == "stdlib"

    @property
    def rows_per_step(self) -> int:
        """Sequences in one step of the optimizer."""
        return self.batch_size * self.accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step of the optimizer."""
        return self.rows_per_step * self.sequence_length


# By optimizer: b1 and b2, None where it reads none.
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

    Besides parameters and gradients each takes memory for its state, in bytes a parameter:

    | name | state | learning rate, beside AdamW's |
    |---|---|---|
    | `adamw` (https://arxiv.org/abs/1711.05101) | 8 | |
    | `lion` (https://arxiv.org/abs/2302.06675) | 4 | a fifth, and five times the weight decay |
    | `adafactor` (https://arxiv.org/abs/1804.04235), without momentum | about 0 | the same |
    | `muon` (https://kellerjordan.github.io/posts/muon), for the matrices of the layers, and AdamW
      for the rest | 4 and 8 | the same |
    | `sgd` with momentum | 4 | a hundred times, or more |

    Attributes:
      name: which.
      learning_rate: its highest value.
      schedule: after the warm-up, `cosine` falls to the end along half a cosine; `wsd` (warm-up,
        stable, decay; https://arxiv.org/abs/2404.06395) stays up and falls linearly over the last
        `decay_fraction` of the steps.
      warmup_steps: steps of the linear rise from 0.
      decay_fraction: share of the steps in which `wsd` falls.
      final_fraction: the last learning rate, as a share of the highest.
      b1: decay of the first moment, or momentum; None: 0.9, and for the matrices of `muon` 0.95.
        (Its AdamW has 0.9 in any case.) `adafactor` has none.
      b2: decay of the second moment, and of what `lion` keeps; None: 0.95, and 0.99 for `lion`.
        `adafactor` and `sgd` have none.
      eps: added to the root of the second moment by `adamw` and `muon`.
      weight_decay: of embeddings and kernels; norms and biases do not decay.
      clip_norm: longest gradient; longer ones are scaled down. 0 turns it off.
      momentum_dtype: of the first moment; None: that of the parameters. bfloat16 saves 2 bytes a
        parameter. `adafactor` has none.
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
                raise ValueError(f"{name}={getattr(self, name)} is not read by {self.name}")

    @property
    def decays(self) -> tuple[float, float]:
        """`b1` and `b2`, or what is usual; 0 for one that the optimizer does not read."""
        b1, b2 = _DECAYS[self.name]
        return (
            (b1 or 0.0) if self.b1 is None else self.b1,
            (b2 or 0.0) if self.b2 is None else self.b2,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh.

    Attributes:
      data: copies of the model; -1 takes all devices that the others leave.
      fsdp: devices over which parameters and optimizer state are split.
      tensor: devices that share each sequence: its attention by heads, its MLP and vocabulary by
        columns, its residual stream by tokens.
    """

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        check_ranges(self, fsdp=SIZE, tensor=SIZE)
        if self.data != -1:
            check_ranges(self, data=SIZE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, in the run's folder.

    Attributes:
      every: steps between them; the last step has one, too. With checkpoints, the same command goes
        on with the run in the folder `name`. 0 makes none.
      keep: how many of the newest are kept, besides the one with the lowest held-out loss.
    """

    every: int = 0
    keep: int = 2

    def __post_init__(self):
        check_ranges(self, every=COUNT, keep=SIZE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistributedConfig:
    """The processes that train together; see `train.distributed`.

    Attributes:
      cluster: who says which processes there are: `slurm` (`srun`) or `ompi` (Open MPI's `mpirun`),
        with a process for each GPU. None: the next three.
      coordinator_address: `host:port` of process 0, with a port that is free there.
      num_processes: in all; 1 needs no others. Each has the GPUs that it can see.
      process_id: of this process, from 0.
      initialization_timeout_s: seconds within which all processes must have started.
      heartbeat_timeout_s: seconds after which a process that is not heard of is taken for dead,
        which ends the others.
      step_timeout_s: seconds after which a step, or the wait for its batch, ends the process with
        the stacks of its threads. Compilation, evaluation, checkpoints and the files at the end may
        take ten times as long. 0: no limit.
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
                f"coordinator_address={address!r} must be host:port of process 0, for "
                f"num_processes={self.num_processes}"
            )
        if self.cluster and (address or self.num_processes > 1):
            raise ValueError(
                f"cluster={self.cluster!r} says what coordinator_address, num_processes and "
                "process_id are; leave them out"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
      name: of the folder in `runs_dir`; without checkpoints a number is appended if it exists.
      runs_dir: where runs are written.
      init_from: a Hugging Face folder whose parameters the run starts with. Its model, and its
        tokenizer if it has one, are the defaults of the flags; None draws parameters at random.
      model: the architecture.
      data: the tokens.
      optimizer: the optimizer.
      mesh: the devices.
      checkpoint: when the state is saved.
      distributed: the processes.
      steps: of the optimizer.
      seed: of the parameters and of the order of the data.
      z_loss: weight of the squared logsumexp in the loss.
      max_skipped_steps: steps skipped in a row that end the run. Skipped is a step whose loss or
        gradient is not finite.
      skip_loss_spikes: skip steps whose loss is so many standard deviations above the running mean
        (6 is usual); the formula is in `train.guard.judge`. 0 skips none.
      eval_every: steps between measurements of the held-out loss; 0 never measures it.
      eval_batches: batches in a measurement, from all over the held-out text.
      log_every: steps between lines of output where there is no terminal.
      sample_prompt: beginning of the text that is generated at every evaluation and at the end.
      sample_tokens: its length; 0 generates none.
      save: whether the trained model is written to the run's folder, in Hugging Face's format.
      tensorboard: write the metrics for TensorBoard, too, to `tensorboard` in the run's folder.
      wandb: the project of Weights & Biases to send the metrics to; None sends nothing.
      profile_steps: `A:B` writes a trace of the steps A to B, counted from 1, to `profile` in the
        run's folder.
      dump_hlo: write the compiled step and what memory it takes to `hlo` in the run's folder.
      xla_options: options of XLA for the step on GPUs, as `name=value`, besides those of
        `train.xla_flags`, or in place of one; `none` leaves those out.
    """

    name: str
    runs_dir: Path = Path("runs")
    init_from: Path | None = None
    model: LlamaConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    distributed: DistributedConfig = DistributedConfig()
    steps: int
    seed: int = 0
    z_loss: float = 0.0
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
            max_skipped_steps=SIZE,
            skip_loss_spikes=NOT_NEGATIVE,
            eval_every=COUNT,
            eval_batches=SIZE,
            log_every=SIZE,
            sample_tokens=COUNT,
        )
        longest = self.model.max_position_embeddings
        grows = self.model.rope_parameters.rope_type == "dynamic"
        if self.data.sequence_length > longest and not grows:
            raise ValueError(
                f"data.sequence_length={self.data.sequence_length} exceeds "
                f"model.max_position_embeddings={longest}; shorten the rows or raise it"
            )
        if self.optimizer.warmup_steps >= self.steps:
            raise ValueError(
                f"{self.optimizer.warmup_steps=} must be below {self.steps=}; shorten the warm-up"
            )
        # Found out here and not after the last step.
        sample_size = 1 + len(self.sample_prompt.encode()) + self.sample_tokens
        if self.sample_tokens and sample_size > self.model.max_position_embeddings:
            raise ValueError(
                f"a sample of {sample_size} tokens (prompt and {self.sample_tokens=}) exceeds "
                f"{self.model.max_position_embeddings=}"
            )
        first, last = self.profiled or (1, 1)
        if not 1 <= first <= last <= self.steps:
            raise ValueError(
                f"profile_steps={self.profile_steps!r} must name steps A:B with 1 <= A <= B <= "
                f"{self.steps}"
            )

    @property
    def profiled(self) -> tuple[int, int] | None:
        """The first and the last step of which a trace is written; (0, 0) if they are misspelt."""
        if self.profile_steps is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.profile_steps)
        return (int(found[1]), int(found[2])) if found else (0, 0)


PRESET_NAMES = tuple(MODELS)


def preset(name: str) -> TrainConfig:
    """The run called `name`: `demo` trains on text, the others run a Llama on random tokens.

    Raises:
      ValueError: there is no such preset; says which is close.
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
    """Of the computation: XLA emulates bfloat16 on a CPU, at half the speed of float32."""
    return "float32" if target_device().capability is None else "bfloat16"
