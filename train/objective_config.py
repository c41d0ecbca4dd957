"""The settings of each objective of a run, and checks that refuse settings of other objectives."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

from train.ranges import BELOW_ONE, POSITIVE, Range, check_ranges

# The loss has the square of a temperature, which must stay far from the ends of float32.
_TEMPERATURE = Range(1e-3, 1e3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig:
    """Direct preference optimization (https://arxiv.org/abs/2305.18290).

    Attributes:
      beta: Factor of the rewards. A larger factor keeps the model closer to the reference, which is
        the model that the run starts from.
    """

    beta: float = 0.1

    def __post_init__(self):
        check_ranges(self, beta=POSITIVE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Distillation of a teacher's next-token distributions (https://arxiv.org/abs/1503.02531).

    Let D be the divergence of a token, nll the cross-entropy of its label, and T the temperature.
    The loss of the token is `(1 - label_weight) * T**2 * D + label_weight * nll`. With the factor
    `T**2` the size of the gradients hardly depends on T.

    Attributes:
      teacher: A Hugging Face folder with the teacher. It must have the tokenizer and the vocabulary
        of the run. Its parameters are frozen, in bfloat16.
      divergence: Divergence of model and teacher. `forward_kl` is KL(teacher ‖ model), `reverse_kl`
        is KL(model ‖ teacher), and `jsd` is the Jensen-Shannon divergence of both.
      temperature: Divisor of the logits of both models, in [1e-3, 1e3].
      label_weight: Share of the cross-entropy of the labels in the loss, in [0, 1).
    """

    teacher: Path | None = None
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    temperature: float = 1.0
    label_weight: float = 0.0

    def __post_init__(self):
        check_ranges(self, temperature=_TEMPERATURE, label_weight=BELOW_ONE)


# The defaults. `check_objective` refuses other values in runs with another objective.
NO_DPO, NO_DISTILL = DPOConfig(), DistillConfig()


def check_objective(config: Any) -> None:
    """Refuses a `TrainConfig` with settings that its objective ignores, or without one it needs.

    Raises:
      ValueError: A setting is for another objective, or missing; the message says what to change.
    """
    objective = config.objective
    for name, default in (("dpo", NO_DPO), ("distill", NO_DISTILL)):
        if objective != name and (given := getattr(config, name)) != default:
            fields = [field.name for field in dataclasses.fields(given)]
            different = [f for f in fields if getattr(given, f) != getattr(default, f)]
            flags = [f"--{name}.{f.replace('_', '-')} {getattr(given, f)}" for f in different]
            are, them = ("is", "it") if len(flags) == 1 else ("are", "them")
            raise ValueError(
                f"{' and '.join(flags)} {are} for --objective {name}, not {objective}; leave "
                f"{them} out, or set --objective {name}"
            )
    if objective != "sft" and config.z_loss:
        raise ValueError(
            f"z_loss={config.z_loss} is for objective='sft', not {objective!r}; leave it out"
        )
    if objective == "dpo":
        _check_dpo(config)
    elif objective == "distill" and config.distill.teacher is None:
        raise ValueError(
            "objective='distill' needs a teacher; name its folder with --distill.teacher"
        )


def _check_dpo(config: Any) -> None:
    if not config.data.path:
        raise ValueError("objective='dpo' needs preferences; name their files with data.path")
    for name, default in (("weights", ()), ("text_field", "text")):
        if (value := getattr(config.data, name)) != default:
            raise ValueError(
                f"data.{name}={value!r} is not for the preferences of objective='dpo'; leave it out"
            )
    if config.data.batch_size % 2:
        raise ValueError(
            f"data.batch_size={config.data.batch_size} must be even: with objective='dpo' a chosen "
            "and a rejected completion take a row each"
        )
