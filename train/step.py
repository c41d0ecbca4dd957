"""The training step: pure functions from state and batch to state and metrics."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from models.llama import Llama, LlamaConfig
from models.sharding import parameter_path, parameter_shardings, replicated, sum_over_batch
from pallas_kernels import linear_cross_entropy
from train.config import OptimizerConfig, TrainConfig
from train.data import IGNORED

type Batch = dict[str, Int[Array, "..."]]
type Metrics = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a step changes, or the shapes or shardings of it.

    Attributes:
      step: how many steps were taken, an int32.
      params: of the model.
      opt_state: of the optimizer.
    """

    step: Any
    params: nnx.State
    opt_state: optax.OptState


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: a linear warm-up, then half a cosine, or a plateau and a fall."""
    peak, last = config.learning_rate, config.learning_rate * config.final_fraction
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    rest = steps - config.warmup_steps
    if config.schedule == "cosine":
        return optax.join_schedules(
            [warmup, optax.cosine_decay_schedule(peak, rest, config.final_fraction)],
            [config.warmup_steps],
        )
    decay_steps = min(rest, max(1, round(config.decay_fraction * steps)))
    return optax.join_schedules(
        [
            warmup,
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, last, decay_steps),
        ],
        [config.warmup_steps, steps - decay_steps],
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """AdamW over clipped gradients, with the learning rate of `learning_rate_schedule`."""

    def decays(params: Any) -> Any:
        matrices = ("kernel", "embedding")
        is_matrix = lambda path, _: (
            parameter_path(path)[-1] in matrices or parameter_path(path)[0] == "lm_head"
        )
        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity(),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decays,
        ),
    )


def model_graph(config: LlamaConfig) -> nnx.GraphDef:
    """The structure of the model, without its parameters."""
    return nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))


def init_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """The state before the first step, each array made where it lies on the mesh."""
    optimizer = make_optimizer(config.optimizer, config.steps)

    def init(key: Key[Array, ""]) -> TrainState:
        params = nnx.state(Llama(config.model, rngs=nnx.Rngs(key)), nnx.Param)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    key = jax.random.key(config.seed)
    shardings = state_shardings(jax.eval_shape(init, key), optimizer, mesh)
    return jax.jit(init, out_shardings=shardings)(key)


def state_shardings(
    state: TrainState, optimizer: optax.GradientTransformation, mesh: Mesh
) -> TrainState:
    """Where each array of a state lies: the optimizer's moments beside their parameters."""
    params = parameter_shardings(state.params, mesh)
    opt_state = optax.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        state.opt_state,
        params,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(replicated(mesh), params, opt_state)


def loss_sum(
    graphdef: nnx.GraphDef, params: nnx.State, batch: Batch, *, z_loss: float = 0.0
) -> Float[Array, ""]:
    """The summed loss of a batch `[B, S]`, in nats; divide by the number of its labels."""
    model = nnx.merge(graphdef, params)
    hidden = model(
        batch["tokens"],
        positions=batch.get("positions"),
        segment_ids=batch.get("segment_ids"),
    )

    def of_shard(weight, tokens):
        hidden, labels = tokens
        return linear_cross_entropy(
            hidden, weight, labels, ignore_index=IGNORED, reduction="sum", z_loss=z_loss
        )

    return sum_over_batch(of_shard)(model.output_weight, (hidden, batch["labels"]))


def make_train_step(
    config: TrainConfig,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """The step for batches `[A, B, S]`, A the number of accumulation steps.

    The loss is the sum over all tokens of the step divided by their number, so that neither the
    split into A batches nor that over devices changes it. Gradients are added up in the parameters'
    dtype.
    """
    graphdef = model_graph(config.model)
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        num_tokens = jnp.sum(batch["labels"] != IGNORED)
        scale = 1 / jnp.maximum(num_tokens, 1).astype(jnp.float32)

        def loss_of(params: nnx.State, part: Batch) -> Float[Array, ""]:
            return loss_sum(graphdef, params, part, z_loss=config.z_loss) * scale

        def accumulate(total, part):
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(loss_of)(state.params, part)
            ), None

        if len(batch["labels"]) == 1:
            part = jax.tree.map(lambda a: a[0], batch)
            loss, gradients = jax.value_and_grad(loss_of)(state.params, part)
        else:
            zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.params)
            (loss, gradients), _ = jax.lax.scan(accumulate, zeros, batch)

        # optax mixes an int32 count with Python floats, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
            learning_rate = jnp.asarray(schedule(state.step), jnp.float32)
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(gradients),
            "lr": learning_rate,
            "num_tokens": num_tokens,
        }
        params: Any = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, opt_state), metrics

    return train_step


def make_eval_step(config: TrainConfig) -> Callable[[nnx.State, Batch], Metrics]:
    """Summed negative log-likelihood and number of tokens of a batch `[B, S]`; no gradient work."""
    graphdef = model_graph(config.model)

    def eval_step(params: nnx.State, batch: Batch) -> Metrics:
        return {
            "nll_sum": loss_sum(graphdef, params, batch),
            "num_tokens": jnp.sum(batch["labels"] != IGNORED),
        }

    return eval_step
