"""The training step: pure functions from state and batch to state and metrics."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from models.config import LlamaConfig
from models.llama import Llama
from models.sharding import (
    parameter_path,
    parameter_shardings,
    replicated,
    sum_over_devices,
    tensor_axis,
)
from pallas_kernels import linear_cross_entropy
from train.config import TrainConfig
from train.data import IGNORED
from train.guard import Guard, initial_guard, judge
from train.optimizers import learning_rate_schedule, make_optimizer
from train.xla_flags import compiler_options

type Batch = dict[str, Int[Array, "..."]]
type Metrics = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes; also its shapes, or its shardings.

    Attributes:
      step: number of steps taken or skipped, int32.
      params: parameters of the model.
      opt_state: state of the optimizer.
      guard: statistics that decide whether a step is skipped.
    """

    step: Any
    params: nnx.State
    opt_state: optax.OptState
    guard: Guard


@functools.cache
def model_graph(config: LlamaConfig) -> nnx.GraphDef:
    """The structure of the model, without its parameters; it takes 0.1 s to make."""
    return nnx.graphdef(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))


def init_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """The state before the first step. Each device makes its own part of an array."""
    init = _initializer(config)
    shardings = jax.tree.map(lambda a: a.sharding, abstract_state(config, mesh))
    return jax.jit(init, out_shardings=shardings)(jax.random.key(config.seed))


def state_with(config: TrainConfig, mesh: Mesh, params: nnx.State) -> TrainState:
    """The state before the first step, with `params` on the mesh; it takes over their memory."""
    begin = lambda params: _state_of(config, params)
    shardings = jax.tree.map(lambda a: a.sharding, abstract_state(config, mesh))
    return jax.jit(begin, donate_argnums=0, out_shardings=shardings)(params)


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state. The mesh's devices need not be in this machine."""
    init = _initializer(config)
    shapes = jax.eval_shape(lambda: init(jax.random.key(config.seed)))
    shardings = state_shardings(shapes, mesh)
    place = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return jax.tree.map(place, shapes, shardings)


def _initializer(config: TrainConfig) -> Callable[[Key[Array, ""]], TrainState]:
    def init(key: Key[Array, ""]) -> TrainState:
        return _state_of(config, nnx.state(Llama(config.model, rngs=nnx.Rngs(key)), nnx.Param))

    return init


def _state_of(config: TrainConfig, params: nnx.State) -> TrainState:
    opt_state = make_optimizer(config.optimizer, config.steps).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, initial_guard())


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """The sharding of each array of a state.

    An array whose path ends in a parameter's path and that has the parameter's shape, such as a
    moment, gets the parameter's sharding. Every other array is replicated.
    """
    params = parameter_shardings(state.params, mesh)
    leaves = zip(jax.tree.leaves_with_path(state.params), jax.tree.leaves(params), strict=True)
    beside = {(parameter_path(path), leaf.shape): sharding for (path, leaf), sharding in leaves}

    def sharding(path: tuple[Any, ...], leaf: Any) -> Any:
        names = parameter_path(path)
        ends = ((names[start:], leaf.shape) for start in range(len(names)))
        return next((beside[end] for end in ends if end in beside), replicated(mesh))

    opt_state = jax.tree_util.tree_map_with_path(sharding, state.opt_state)
    guard = jax.tree.map(lambda _: replicated(mesh), state.guard)
    return TrainState(replicated(mesh), params, opt_state, guard)


def loss_and_sums(
    graphdef: nnx.GraphDef,
    params: nnx.State,
    batch: Batch,
    *,
    z_loss: float = 0.0,
    counted_fraction: float = 1.0,
    scale: Float[Array, ""] | float = 1.0,
) -> tuple[Float[Array, ""], Metrics]:
    """`scale` times the summed loss of a batch `[B, S]`, in nats, and sums for metrics.

    The factor goes into the loss; outside of the loss it would be multiplied with every gradient.
    `linear_cross_entropy` describes `z_loss` and `counted_fraction`.

    Returns:
      The loss, and two sums: "nll_sum", the negative log-likelihood without z-loss, and
      "correct_sum", the number of tokens whose label has the largest logit. Only the loss has
      gradients.
    """

    def of_batch(params, batch, scale):
        model = nnx.merge(graphdef, params)
        hidden = model(
            batch["tokens"],
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
        )

        loss, metrics = linear_cross_entropy(
            hidden,
            model.output_weight,
            batch["labels"],
            token_weights=jnp.full(batch["labels"].shape, scale, jnp.float32),
            ignore_index=IGNORED,
            reduction="sum",
            z_loss=z_loss,
            counted_fraction=counted_fraction,
            vocab_axis=tensor_axis(),
            return_metrics=True,
            implementation=model.config.implementation,
        )
        # In float32, because XLA adds it up with the other sums in one exchange.
        count = jnp.sum(batch["labels"] != IGNORED, dtype=jnp.float32)
        return loss, {"nll_sum": metrics.nll * count, "correct_sum": metrics.accuracy * count}

    return sum_over_devices(of_batch)(params, batch, scale)


def loss_sum(
    graphdef: nnx.GraphDef, params: nnx.State, batch: Batch, *, z_loss: float = 0.0
) -> Float[Array, ""]:
    """The summed loss of a batch `[B, S]`, in nats; divide by the number of its labels."""
    return loss_and_sums(graphdef, params, batch, z_loss=z_loss)[0]


def make_gradients(
    config: TrainConfig,
) -> Callable[[nnx.State, Batch], tuple[Metrics, nnx.State]]:
    """Makes a function from parameters and a batch `[A, B, S]` to metrics and gradients.

    A is the number of accumulation steps. The loss is the sum over all tokens of the step divided
    by their number, so neither the split into A batches nor the split over devices changes it. The
    gradients of the A batches are added up in the parameters' dtype.
    """
    graphdef = model_graph(config.model)

    def gradients_of(params: nnx.State, batch: Batch) -> tuple[Metrics, nnx.State]:
        num_tokens = jnp.sum(batch["labels"] != IGNORED)
        scale = 1 / jnp.maximum(num_tokens, 1).astype(jnp.float32)

        def loss_of(params: nnx.State, part: Batch) -> tuple[Float[Array, ""], Metrics]:
            return loss_and_sums(
                graphdef,
                params,
                part,
                z_loss=config.z_loss,
                counted_fraction=config.counted_fraction,
                scale=scale,
            )

        value_and_gradients = jax.value_and_grad(loss_of, has_aux=True)

        def accumulate(total, part):
            return jax.tree.map(jnp.add, total, value_and_gradients(params, part)), None

        if len(batch["labels"]) == 1:
            part = jax.tree.map(lambda a: a[0], batch)
            (loss, sums), gradients = value_and_gradients(params, part)
        else:
            zero = jnp.zeros(())
            zeros = (zero, {"nll_sum": zero, "correct_sum": zero})
            zeros = zeros, jax.tree.map(jnp.zeros_like, params)
            ((loss, sums), gradients), _ = jax.lax.scan(accumulate, zeros, batch)

        metrics = {
            "loss": loss,
            "nll": sums["nll_sum"] * scale,
            "accuracy": sums["correct_sum"] * scale,
            "grad_norm": optax.tree.norm(gradients),
            "num_tokens": num_tokens,
        }
        return metrics, gradients

    return gradients_of


def make_train_step(
    config: TrainConfig,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Makes the step: a function from a state and a batch `[A, B, S]` to a state and metrics.

    `make_gradients` defines the loss, and `train.guard` which steps are skipped. The optimizer does
    not count skipped steps, so they do not move the learning rate.
    """
    gradients_of = make_gradients(config)
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)

    def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        metrics, gradients = gradients_of(state.params, batch)
        taken, guard = judge(
            state.guard,
            state.step,
            metrics["loss"],
            metrics["grad_norm"],
            max_skipped_steps=config.max_skipped_steps,
            spike_factor=config.skip_loss_spikes,
        )
        # optax mixes an int32 count with Python floats, which strict promotion forbids.
        with jax.numpy_dtype_promotion("standard"):
            updates, opt_state = optimizer.update(
                gradients, state.opt_state, state.params, taken=taken
            )
            learning_rate = jnp.asarray(schedule(state.step - state.guard.skipped), jnp.float32)
        # XLA makes this choice in the loop that writes the new parameters over the old ones, so it
        # costs no memory and no pass. The update must wait for the gradient norm, but it has to
        # wait for it because of clipping, too.
        new: Any = optax.apply_updates(state.params, updates)
        params = jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, state.params)
        metrics |= {
            "lr": learning_rate,
            "skipped_steps": guard.skipped,
            "skipped_in_a_row": guard.in_a_row,
        }
        return TrainState(state.step + 1, params, opt_state, guard), metrics

    return train_step


def jit_train_step(config: TrainConfig, state: TrainState) -> Any:
    """The jitted step for a state, or for its shapes and shardings. It donates the state."""
    shardings = jax.tree.map(lambda a: a.sharding, state)
    devices = jax.tree.leaves(shardings)[0].device_set
    options = compiler_options(devices, config.xla_options, scan_layers=config.model.scan_layers)
    return jax.jit(
        make_train_step(config),
        donate_argnums=0,
        out_shardings=(shardings, None),
        compiler_options=options,
    )


def memory_in_bytes(compiled: Any) -> int:
    """Memory of a compiled step on each device: arguments, temporaries, outputs of its own."""
    sizes = compiled.memory_analysis()
    own_outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + own_outputs


def make_eval_step(config: TrainConfig) -> Callable[[nnx.State, Batch], Metrics]:
    """Makes a function from parameters and a batch `[B, S]` to sums over its tokens.

    The sums are "nll_sum" and "correct_sum" of `loss_and_sums`, and "num_tokens". The model runs
    without FP8, because that is the model in the files.
    """
    graphdef = model_graph(dataclasses.replace(config.model, fp8=None))

    def eval_step(params: nnx.State, batch: Batch) -> Metrics:
        return {
            **loss_and_sums(graphdef, params, batch)[1],
            "num_tokens": jnp.sum(batch["labels"] != IGNORED),
        }

    return eval_step
