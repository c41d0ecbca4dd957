"""A small run of GRPO: a Llama learns to sort digits from rewards.

    python -m train.grpo --output grpo.csv --chart grpo.png

A prompt is a few digits and ">", such as "5293140>". The right completion has the same digits in
order. The model first learns from right completions, until it sorts some of the prompts. After that
it learns only from completions that it draws itself. For each prompt it draws a group of
completions, and a right completion gets a reward. The advantage of a completion is its reward less
the mean reward of the group, divided by the standard deviation of the rewards of the group
(https://arxiv.org/abs/2402.03300).

`policy_loss` is the part to copy. `linear_token_loss` computes the loss of all completions and its
gradients in three matrix products, and never has all logits in memory. The prompts take no time in
these products: their labels are ignored, and `counted_fraction` says how many tokens are left.
"""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import tyro
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from models.config import LlamaConfig
from models.llama import Llama
from models.rope import RopeParameters
from models.sampling import generate
from pallas_kernels import linear_cross_entropy, linear_log_probs, linear_token_loss
from pallas_kernels.log_probs.objectives import clipped_policy_loss
from train.data import IGNORED
from train.ranges import COUNT, NOT_NEGATIVE, SEED, SHARE, SIZE, Range, check_ranges

_END = 10  # the token ">"; digits are tokens 0 to 9
_WARM_UP_RATE = 3e-3  # learning rate
_GROUP = Range(2, SIZE.most)  # an advantage is a reward less the mean of its group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of a run.

    Attributes:
      digits: Number of digits of a prompt.
      warm_up: Number of first steps, in which the model learns from right completions.
      steps: Number of batches of its own completions that the model then learns from.
      prompts: Number of prompts of a batch.
      group: Number of completions that the model draws for a prompt.
      updates: Number of updates of the parameters for each batch. In the first update the ratio of
        probabilities is 1.
      learning_rate: Learning rate after the warm-up.
      clip_low: How far below 1 the ratio is clipped.
      clip_high: How far above 1 the ratio is clipped.
      kl_weight: Weight of the divergence from the model after the warm-up.
      seed: Seed of parameters, prompts and draws.
      output: CSV file with a line for each batch.
      chart: PNG file with the curve of rewards.
    """

    digits: int = 7
    warm_up: int = 45
    steps: int = 300
    prompts: int = 32
    group: int = 8
    updates: int = 2
    learning_rate: float = 3e-4
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_weight: float = 0.0
    seed: int = 0
    output: Path | None = None
    chart: Path | None = None

    def __post_init__(self):
        check_ranges(
            self,
            digits=SIZE,
            warm_up=COUNT,
            steps=COUNT,
            prompts=SIZE,
            group=_GROUP,
            updates=SIZE,
            learning_rate=NOT_NEGATIVE,
            clip_low=SHARE,
            clip_high=NOT_NEGATIVE,
            kl_weight=NOT_NEGATIVE,
            seed=SEED,
        )

    @property
    def model(self) -> LlamaConfig:
        """A model of 0.4M parameters, of sizes that the kernels take."""
        return LlamaConfig(
            vocab_size=128,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=2 * self.digits + 1,
            rms_norm_eps=1e-5,
            rope_parameters=RopeParameters(rope_type="default", rope_theta=10_000.0),
            tie_word_embeddings=True,
            remat="none",
        )


def draw_prompts(key: Key[Array, ""], number: int, digits: int) -> Int[Array, "B P"]:
    """Random digits, each followed by ">"."""
    drawn = jax.random.randint(key, (number, digits), 0, 10)
    return jnp.concatenate([drawn, jnp.full((number, 1), _END)], axis=1)


def right_completions(prompts: Int[Array, "B P"]) -> Int[Array, "B _"]:
    """The digits of each prompt in order."""
    return jnp.sort(prompts[:, :-1], axis=1)


def rewards_of(prompts: Int[Array, "B P"], completions: Int[Array, "B _"]) -> Float[Array, " B"]:
    """1 for a right completion, else 0."""
    return jnp.all(completions == right_completions(prompts), axis=1).astype(jnp.float32)


def advantages_of(rewards: Float[Array, " B"], group: int) -> Float[Array, " B"]:
    """`(reward - mean) / (deviation + 1e-4)` in each group of rewards; 0 where all are equal.

    The deviation is the root of the mean of the squared distances, over `group` and not
    `group - 1` rewards.
    """
    of_group = rewards.reshape(-1, group)
    centered = of_group - jnp.mean(of_group, axis=1, keepdims=True)
    return (centered / (jnp.std(of_group, axis=1, keepdims=True) + 1e-4)).reshape(-1)


def tokens_and_labels(
    prompts: Int[Array, "B P"], completions: Int[Array, "B _"]
) -> tuple[Int[Array, "B S"], Int[Array, "B S"]]:
    """The input of the model, and the next token at each place of it; ignored in the prompt."""
    whole = jnp.concatenate([prompts, completions], axis=1)
    labels = whole.at[:, : prompts.shape[1]].set(IGNORED)
    return whole[:, :-1], labels[:, 1:]


def log_probs_of(model: Llama, tokens: Array, labels: Array) -> Float[Array, "B S"]:
    """Log-probabilities of the completions, without gradients; 0 in the prompts."""
    return jax.lax.stop_gradient(linear_log_probs(model(tokens), model.output_weight, labels))


def policy_loss(
    config: Config, model: Llama, tokens: Array, labels: Array, data: dict[str, Array]
) -> Float[Array, ""]:
    """The clipped loss of completions, from their advantages and earlier log-probabilities."""

    def token_fn(log_probs: Array, entropy: None, data: dict[str, Array]) -> Float[Array, ""]:
        return clipped_policy_loss(
            log_probs,
            data["old"],
            jnp.broadcast_to(data["advantages"][:, None], log_probs.shape),
            data["mask"],
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            reference_log_probs=data.get("reference"),
            kl_weight=config.kl_weight,
            aggregation="seq-mean-token-mean",
        )

    return linear_token_loss(
        model(tokens),
        model.output_weight,
        labels,
        token_fn,
        data | {"mask": labels != IGNORED},
        # Half of the tokens have a label: `digits` of 2·digits.
        counted_fraction=0.5,
    )


class Trainer:
    """Parameters, and the compiled functions that change them."""

    def __init__(self, config: Config):
        self.config = config
        # The parameters come from the key of the seed, and everything that is drawn from this one.
        self.key = jax.random.fold_in(jax.random.key(config.seed), 2**31)
        model = Llama(config.model, rngs=nnx.Rngs(config.seed))
        self.graphdef, self.params = nnx.split(model, nnx.Param)
        clipped = lambda rate: optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, weight_decay=0.0)
        )
        self.warm_up_optimizer = clipped(_WARM_UP_RATE)
        self.optimizer = clipped(config.learning_rate)
        self._warm_up = jax.jit(self._warm_up_step)
        self._update = jax.jit(self._update_step)
        self._log_probs = jax.jit(lambda params, *args: log_probs_of(self._model(params), *args))

    def _model(self, params: Any) -> Llama:
        return nnx.merge(self.graphdef, params)

    def next_key(self) -> Key[Array, ""]:
        """A key that was not used."""
        self.key, key = jax.random.split(self.key)
        return key

    def _warm_up_step(self, params: Any, opt_state: Any, key: Any) -> tuple[Any, Any]:
        number = self.config.prompts * self.config.group
        prompts = draw_prompts(key, number, self.config.digits)
        tokens, labels = tokens_and_labels(prompts, right_completions(prompts))

        def loss(params):
            model = self._model(params)
            return linear_cross_entropy(
                model(tokens), model.output_weight, labels, counted_fraction=0.5
            )

        updates, opt_state = self.warm_up_optimizer.update(
            jax.grad(loss)(params), opt_state, params
        )
        return optax.apply_updates(params, updates), opt_state

    def _update_step(self, params: Any, opt_state: Any, *batch: Any) -> tuple[Any, Any]:
        loss = lambda params: policy_loss(self.config, self._model(params), *batch)
        updates, opt_state = self.optimizer.update(jax.grad(loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def warm_up(self) -> None:
        """Learns from right completions."""
        opt_state = self.warm_up_optimizer.init(self.params)
        for _ in range(self.config.warm_up):
            self.params, opt_state = self._warm_up(self.params, opt_state, self.next_key())

    def complete(
        self, prompts: Array, temperature: float, key: Key[Array, ""] | None = None
    ) -> Int[Array, "B _"]:
        """A completion of each prompt; without a key the temperature is 0."""
        return generate(
            self._model(self.params),
            prompts,
            max_new_tokens=self.config.digits,
            temperature=temperature,
            key=key,
        )

    def accuracy(self) -> float:
        """Share of 512 new prompts whose likeliest completion is right."""
        prompts = draw_prompts(jax.random.key(2**31 - 1), 512, self.config.digits)
        return float(jnp.mean(rewards_of(prompts, self.complete(prompts, 0.0))))

    def learn(self) -> list[dict[str, Any]]:
        """Learns from rewards; a row of numbers for each batch."""
        config, rows = self.config, list[dict[str, Any]]()
        opt_state, reference = self.optimizer.init(self.params), self.params
        for step in range(config.steps):
            prompts = draw_prompts(self.next_key(), config.prompts, config.digits)
            prompts = jnp.repeat(prompts, config.group, axis=0)
            completions = self.complete(prompts, 1.0, self.next_key())
            rewards = rewards_of(prompts, completions)
            tokens, labels = tokens_and_labels(prompts, completions)
            data = {
                "advantages": advantages_of(rewards, config.group),
                "old": self._log_probs(self.params, tokens, labels),
            }
            if config.kl_weight:
                data["reference"] = self._log_probs(reference, tokens, labels)
            for _ in range(config.updates):
                self.params, opt_state = self._update(self.params, opt_state, tokens, labels, data)
            row: dict[str, Any] = {"step": step, "reward": float(jnp.mean(rewards))}
            if step % 10 == 9:
                row["accuracy"] = self.accuracy()
                print(f"step {step + 1}: reward {row['reward']:.3f}, right {row['accuracy']:.3f}")
            rows.append(row)
        return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draws the rewards of the batches, and the share of new prompts that are sorted right."""
    # Imported here, because matplotlib takes a second.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    steps = [row["step"] + 1 for row in rows]
    axes.plot(steps, [row["reward"] for row in rows], color="#33418a", alpha=0.5, label="reward")
    measured = [row for row in rows if "accuracy" in row]
    axes.plot(
        [row["step"] + 1 for row in measured],
        [row["accuracy"] for row in measured],
        color="#c1440e",
        marker="o",
        label="new prompts, likeliest completion",
    )
    axes.set(xlabel="batches of completions", ylabel="share that is right", ylim=(0, 1))
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def main(config: Config) -> None:
    """Trains, prints, and writes the files that the configuration names."""
    for path in filter(None, (config.output, config.chart)):
        if not path.parent.is_dir():
            raise SystemExit(f"error: {path.parent} is not a folder; make it for {path.name}")
        if path.is_dir():
            raise SystemExit(f"error: {path} is a folder; name a file")
    trainer = Trainer(config)
    trainer.warm_up()
    print(f"after the warm-up: right {trainer.accuracy():.3f}")
    rows = trainer.learn()
    if config.output is not None:
        with config.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["step", "reward", "accuracy"])
            writer.writeheader()
            writer.writerows(rows)
    if config.chart is not None:
        draw(rows, config.chart)


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
