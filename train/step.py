"""The training step: pure functions from state and batch to state and metrics."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh
from jaxtyping import Array, Float, Key

from models.config import LlamaConfig
from models.llama import Llama
from models.sharding import parameter_path, parameter_shardings, replicated
from train.config import TrainConfig
from train.data import IGNORED
from train.guard import Guard, initial_guard, judge
from train.objectives import (
    Batch,
    distillation_loss_and_sums,
    loss_and_sums,
    metrics_of,
    num_pairs,
    preference_loss_and_sums,
)
from train.optimizers import learning_rate_schedule, make_optimizer
from train.teacher import teacher_model
from train.xla_flags import compiler_options

type Metrics = dict[str, Float[Array, ""]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step changes: arrays, or in their place their shapes or their shardings.

    Attributes:
      step: Number of steps taken or skipped, int32.
      params: Parameters of the model.
      opt_state: State of the optimizer.
      guard: Statistics that decide whether a step is skipped.
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
    init = functools.partial(_random_state, config)
    shardings = _shardings_of(abstract_state(config, mesh))
    return jax.jit(init, out_shardings=shardings)(jax.random.key(config.seed))


def state_with(config: TrainConfig, mesh: Mesh, params: nnx.State) -> TrainState:
    """The state before the first step, with `params` on the mesh; it takes over their memory."""
    begin = functools.partial(_state_of, config)
    shardings = _shardings_of(abstract_state(config, mesh))
    return jax.jit(begin, donate_argnums=0, out_shardings=shardings)(params)


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the state. The mesh's devices need not be in this machine."""
    shapes = jax.eval_shape(lambda: _random_state(config, jax.random.key(config.seed)))
    shardings = state_shardings(shapes, mesh)
    place = lambda a, sharding: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    return jax.tree.map(place, shapes, shardings)


def _random_state(config: TrainConfig, key: Key[Array, ""]) -> TrainState:
    return _state_of(config, nnx.state(Llama(config.model, rngs=nnx.Rngs(key)), nnx.Param))


def _state_of(config: TrainConfig, params: nnx.State) -> TrainState:
    opt_state = make_optimizer(config.optimizer, config.steps).init(params)
    return TrainState(jnp.zeros((), jnp.int32), params, opt_state, initial_guard())


def _shardings_of(state: TrainState) -> TrainState:
    return jax.tree.map(lambda a: a.sharding, state)


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


def make_gradients(config: TrainConfig) -> Callable[..., tuple[Metrics, nnx.State]]:
    """Makes a function from parameters and a batch `[A, B, S]` to metrics and gradients.

    With the objective `distill`, the function takes the parameters of the teacher, too.

    A is the number of accumulation steps. An example is a token with a label, or a pair with the
    objective `dpo`. The loss is the sum over all examples of the step divided by their number. So
    neither the split into A batches nor the split over devices changes it. The rope types "dynamic"
    and "longrope" are exceptions (`models/rope.py`). So is the FP8 recipe "tensorwise", which makes
    one scale of each of the A batches. The gradients of the A batches are added up in the
    parameters' dtype.
    """
    loss_of = _loss_of(config)
    names = metrics_of(config)
    windows = _windows(config)

    def gradients_of(
        params: nnx.State, batch: Batch, *frozen: nnx.State
    ) -> tuple[Metrics, nnx.State]:
        num_tokens = jnp.sum(batch["labels"] != IGNORED)
        number = num_pairs(batch["labels"]) if config.objective == "dpo" else num_tokens
        scale = 1 / jnp.maximum(number, 1).astype(jnp.float32)
        value_and_gradients = jax.value_and_grad(loss_of, has_aux=True)
        of_part = lambda part: value_and_gradients(params, part, scale, *frozen)

        def accumulate(total, part):
            return jax.tree.map(jnp.add, total, of_part(part)), None

        if len(batch["labels"]) == 1:
            part = jax.tree.map(lambda a: a[0], batch)
            (loss, sums), gradients = of_part(part)
        else:
            zero = jnp.zeros((), jnp.float32)  # also with jax_enable_x64
            zeros = (zero, dict.fromkeys(names.values(), zero))
            zeros = zeros, jax.tree.map(jnp.zeros_like, params)
            ((loss, sums), gradients), _ = jax.lax.scan(accumulate, zeros, batch)
        gradients = jax.tree.map(_in_rows, gradients)

        metrics = {
            "loss": loss,
            **{name: sums[of_sum] * scale for name, of_sum in names.items()},
            "grad_norm": optax.tree.norm(gradients),
            "num_tokens": num_tokens,
            **{name: _mean_context(batch, window) for name, window in windows.items()},
        }
        return metrics, gradients

    return gradients_of


def _windows(config: TrainConfig) -> dict[str, int | None]:
    """The sliding windows of the model and of a teacher, by the names of their mean contexts."""
    found = {"mean_context": config.model.sliding_window}
    if teacher := teacher_model(config):
        found["teacher_mean_context"] = teacher.sliding_window
    return found


def contexts_of_rows(config: TrainConfig) -> dict[str, float]:
    """The mean contexts of a step whose rows have one document each, by their names."""
    length = config.data.sequence_length
    return {name: _context_of_row(length, window) for name, window in _windows(config).items()}


def _context_of_row(length: int, window: int | None) -> float:
    most = length if window is None else min(window, length)
    # The first tokens of a row attend to 1, 2, ..., most tokens, and the others to `most`.
    return (most * (most + 1) / 2 + most * (length - most)) / length - 0.5


def _mean_context(batch: Batch, window: int | None) -> Float[Array, ""]:
    """The mean number of tokens that a token attends to. The token itself counts half."""
    if "positions" not in batch:
        return jnp.asarray(_context_of_row(batch["labels"].shape[-1], window), jnp.float32)
    positions = batch["positions"]
    if window is not None:
        positions = jnp.minimum(positions, window - 1)
    return jnp.mean(positions, dtype=jnp.float32) + 0.5


def _in_rows(gradient: Float[Array, "..."]) -> Float[Array, "..."]:
    """The gradient in row-major order, as its parameter is.

    With `fsdp`, the gradient of a tied table leaves its reduce-scatter in column-major order.
    Without this constraint XLA scatters the gradient of the embeddings into columns, too. Then the
    optimizer transposes the table and its moments. On one GPU, and on a mesh with `data` alone, the
    constraint changes no kernel.
    """
    return with_layout_constraint(gradient, Layout(tuple(range(gradient.ndim))))


def _loss_of(config: TrainConfig) -> Callable[..., tuple[Float[Array, ""], Metrics]]:
    """A function `(params, batch, scale, *frozen)` to the loss of a batch `[B, S]`, and sums."""
    graphdef = model_graph(config.model)
    match config.objective:
        case "sft":
            loss = functools.partial(loss_and_sums, graphdef, z_loss=config.z_loss)
        case "dpo":
            loss = functools.partial(preference_loss_and_sums, graphdef, beta=config.dpo.beta)
        case "distill":
            teacher = teacher_model(config)
            assert teacher is not None  # `check_objective`
            graphdefs = graphdef, model_graph(teacher)
            loss = functools.partial(distillation_loss_and_sums, *graphdefs, config=config.distill)
    return functools.partial(loss, counted_fraction=config.counted_fraction)


def make_train_step(config: TrainConfig) -> Callable[..., tuple[TrainState, Metrics]]:
    """Makes the step: a function from a state and a batch `[A, B, S]` to a state and metrics.

    With the objective `distill`, the function takes the parameters of the teacher, too.
    `make_gradients` defines the loss, and `train.guard` which steps are skipped. The optimizer does
    not count skipped steps, so they do not move the learning rate.
    """
    gradients_of = make_gradients(config)
    optimizer = make_optimizer(config.optimizer, config.steps)
    schedule = learning_rate_schedule(config.optimizer, config.steps)

    def train_step(
        state: TrainState, batch: Batch, *frozen: nnx.State
    ) -> tuple[TrainState, Metrics]:
        metrics, gradients = gradients_of(state.params, batch, *frozen)
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
        # costs no memory and no pass. The update waits for the gradient norm, but clipping makes it
        # wait in any case.
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
    return jax.jit(
        make_train_step(config),
        donate_argnums=0,
        out_shardings=(_shardings_of(state), None),
        compiler_options=compiler_options(state.step.sharding.device_set, config.xla_options),
    )


def memory_in_bytes(compiled: Any) -> int:
    """Memory of a compiled step on each device: arguments, temporaries, outputs of its own."""
    sizes = compiled.memory_analysis()
    own_outputs = sizes.output_size_in_bytes - sizes.alias_size_in_bytes
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + own_outputs


def make_eval_step(config: TrainConfig) -> Callable[[nnx.State, Batch], Metrics]:
    """Makes a function from parameters and a batch `[B, S]` to sums over its examples.

    The sums are "nll_sum" and "correct_sum" of `loss_and_sums`, and "num_tokens". The model runs
    without FP8, because the files of the run hold the model without FP8.

    With the objective `dpo` the sums are "loss_sum", those of `preference_loss_and_sums`, and
    "num_pairs". Then the model runs as in training, also in FP8, because the reference ran so.
    """
    if config.objective == "dpo":
        loss_of = _loss_of(config)

        def eval_step(params: nnx.State, batch: Batch) -> Metrics:
            loss, sums = loss_of(params, batch, 1.0)
            return {**sums, "loss_sum": loss, "num_pairs": num_pairs(batch["labels"])}

        return eval_step
    graphdef = model_graph(dataclasses.replace(config.model, fp8=None))

    def eval_step(params: nnx.State, batch: Batch) -> Metrics:
        _, sums = loss_and_sums(graphdef, params, batch)
        return {**sums, "num_tokens": jnp.sum(batch["labels"] != IGNORED)}

    return eval_step
