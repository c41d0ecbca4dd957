"""What a training run is: a frozen dataclass, presets, and the command line made from them."""

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import tyro

from models.llama import PRESETS as MODELS
from models.llama import LlamaConfig
from pallas_kernels.mosaic_gpu import target_device


def _check_at_least(least: int, config: Any, *names: str) -> None:
    for name in names:
        if getattr(config, name) < least:
            raise ValueError(f"{name}={getattr(config, name)} must be at least {least}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the tokens come from.

    Attributes:
      source: `stdlib`: the source of the running Python's standard library, as bytes. `synthetic`:
        random tokens, for measuring speed.
      sequence_length: S, tokens in a row.
      batch_size: B, rows in a forward and backward, over all devices.
      accumulation_steps: batches whose gradients are added up into one step.
    """

    source: Literal["stdlib", "synthetic"]
    sequence_length: int
    batch_size: int
    accumulation_steps: int = 1

    def __post_init__(self):
        _check_at_least(1, self, "sequence_length", "batch_size", "accumulation_steps")

    @property
    def rows_per_step(self) -> int:
        """Sequences in one step of the optimizer."""
        return self.batch_size * self.accumulation_steps

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one step of the optimizer."""
        return self.rows_per_step * self.sequence_length


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with decoupled weight decay (https://arxiv.org/abs/1711.05101) and its learning rate.

    Attributes:
      learning_rate: its highest value.
      schedule: after the warm-up, `cosine` falls to the end along half a cosine; `wsd` (warm-up,
        stable, decay; https://arxiv.org/abs/2404.06395) stays up and falls linearly over the last
        `decay_fraction` of the steps.
      warmup_steps: steps of the linear rise from 0.
      decay_fraction: share of the steps in which `wsd` falls.
      final_fraction: the last learning rate, as a share of the highest.
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the root of the second moment.
      weight_decay: of embeddings and kernels; norms and biases do not decay.
      clip_norm: longest gradient; longer ones are scaled down. 0 turns it off.
    """

    learning_rate: float = 3e-4
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 100
    decay_fraction: float = 0.2
    final_fraction: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    def __post_init__(self):
        _check_at_least(0, self, "warmup_steps", "clip_norm")
        for name in ("decay_fraction", "final_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}={getattr(self, name)} must lie in [0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis of the mesh.

    Attributes:
      data: copies of the model; -1 takes all devices that `fsdp` leaves.
      fsdp: devices over which parameters and optimizer state are split.
    """

    data: int = -1
    fsdp: int = 1

    def __post_init__(self):
        _check_at_least(1, self, "fsdp")
        if self.data != -1:
            _check_at_least(1, self, "data")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    Attributes:
      name: of the folder in `runs_dir`; a number is appended if it exists.
      runs_dir: where runs are written.
      model: the architecture.
      data: the tokens.
      optimizer: the optimizer.
      mesh: the devices.
      steps: of the optimizer.
      seed: of the parameters and of the order of the data.
      z_loss: weight of the squared logsumexp in the loss.
      eval_every: steps between measurements of the held-out loss; 0 never measures it.
      eval_batches: batches in a measurement, from the start of the held-out text.
      log_every: steps between lines of output where there is no terminal.
      sample_prompt: beginning of the text that is generated at the end.
      sample_tokens: its length; 0 generates none.
      save: whether the trained model is written to the run's folder, in Hugging Face's format.
    """

    name: str
    runs_dir: Path = Path("runs")
    model: LlamaConfig
    data: DataConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()
    steps: int
    seed: int = 0
    z_loss: float = 0.0
    eval_every: int
    eval_batches: int = 8
    log_every: int = 10
    sample_prompt: str = "def "
    sample_tokens: int
    save: bool

    def __post_init__(self):
        _check_at_least(1, self, "steps", "eval_batches", "log_every")
        _check_at_least(0, self, "eval_every", "sample_tokens")
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
        # XLA emulates bfloat16 on a CPU, at half the speed of float32.
        dtype = "float32" if target_device().capability is None else "bfloat16"
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


def parse_command_line(arguments: Sequence[str]) -> TrainConfig:
    """`--preset NAME` and a flag for every field of its `TrainConfig`."""
    prog = "python -m train"
    parser = argparse.ArgumentParser(prog, add_help=False, allow_abbrev=False)
    parser.add_argument("--preset", default="demo")
    chosen, rest = parser.parse_known_args(arguments)
    try:
        default = preset(chosen.preset)
    except ValueError as error:
        parser.error(str(error))
    description = (
        f"Trains a Llama. --preset {{{','.join(PRESET_NAMES)}}} (default demo) sets the defaults "
        f"of all other flags; these are those of {chosen.preset}. `{prog} plan --help`: what fits "
        "on a device, here or not."
    )
    return tyro.cli(
        TrainConfig,
        prog=prog,
        description=description,
        default=default,
        args=rest,
    )
