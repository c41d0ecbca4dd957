"""The optimizers and the learning rate.

Each optimizer can skip a step: its `update` takes a bool `taken`. If it is False, the state stays
as it is, to the bit, and the caller must ignore the updates.

AdamW is written so that this costs no memory. The other optimizers are optax's, followed by a
choice between the old state and the new state (`_skippable`). Their updates come from the new
state. Where XLA does not fuse the choice with the code that reads both states, it holds the state
twice for a moment. At worst that is the whole state: 4 bytes a parameter for Lion, SGD and the
matrices of Muon, 8 bytes for the parameters that Muon leaves to AdamW, and next to nothing for
Adafactor. On a CPU this happens for SGD and not for Lion.

Parameters are float32 unless `param_dtype` names another dtype. An update below half an ulp of its
parameter vanishes. AdamW's updates are about as large as the learning rate. Up to a rate of 2e-3
they are below half an ulp of a bfloat16 near 1. So with bfloat16 parameters the norms never change,
and kernels lose most of the small steps at the end of a run.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from models.sharding import parameter_path
from train.config import OptimizerConfig

# Root mean square of Muon's updates. With it they are as long as AdamW's, so they use AdamW's
# learning rate and weight decay (https://arxiv.org/abs/2502.16982).
_MUON_RMS = 0.2


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Learning rate by step: a linear warm-up, then half a cosine, or a plateau and a fall.

    The first step has the rate at 0, and the last one the rate at `steps - 1`.
    """
    peak, last = config.learning_rate, config.learning_rate * config.final_fraction
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup_steps, steps, last)
    warmup = optax.linear_schedule(0.0, peak, config.warmup_steps)
    rest = steps - config.warmup_steps
    decay_steps = min(rest, max(1, round(config.decay_fraction * steps)))
    return optax.join_schedules(
        [
            warmup,
            optax.constant_schedule(peak),
            optax.linear_schedule(peak, last, decay_steps),
        ],
        [config.warmup_steps, steps - decay_steps],
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformationExtraArgs:
    """The optimizer of clipped gradients, with the learning rate of `learning_rate_schedule`."""
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    schedule = learning_rate_schedule(config, steps)
    b1, b2 = config.decays
    match config.name:
        case "adamw":
            return optax.chain(clip, _adamw(config, schedule))
        case "muon":
            direction = _muon(config)
        case "lion":
            direction = optax.scale_by_lion(b1, b2, config.momentum_dtype)
        case "adafactor":
            direction = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
        case "sgd":
            direction = optax.trace(b1, accumulator_dtype=config.momentum_dtype)
    decayed = optax.add_decayed_weights(config.weight_decay, _decays)
    rate = optax.scale_by_learning_rate(schedule)
    return optax.chain(clip, _skippable(optax.chain(direction, decayed, rate)))


def _muon(config: OptimizerConfig) -> optax.GradientTransformationExtraArgs:
    """Directions of Muon for the matrices of layers, and of AdamW for the other parameters.

    `optax.contrib.muon` has one switch for Nesterov's momentum of both. It would make AdamW NAdamW.
    """
    b1, b2 = config.decays
    momentum = optax.contrib.scale_by_muon(
        beta=b1,
        eps=config.eps,
        mu_dtype=config.momentum_dtype,
        weight_dimension_numbers=_matrices,
    )
    # A chain of one, because checkpoints have its name in the state.
    adam = optax.chain(optax.scale_by_adam(0.9, b2, config.eps, mu_dtype=config.momentum_dtype))
    return optax.partition({"muon": optax.chain(momentum, _muon_scale()), "adam": adam}, _labels)


def _muon_scale() -> optax.GradientTransformation:
    """Gives orthogonal matrices `[L, in, out]` the root mean square `_MUON_RMS`."""
    scale = lambda u: u * (_MUON_RMS * max(u.shape[1:]) ** 0.5)
    return optax.stateless(lambda updates, _: jax.tree.map(scale, updates))


def _skippable(
    optimizer: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that can skip steps; the docstring of the module says what it costs."""

    def update(
        updates: Any, state: Any, params: Any = None, *, taken: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        updates, new = optimizer.update(updates, state, params)
        return updates, jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, state)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _adamw(
    config: OptimizerConfig, schedule: optax.Schedule
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` that can skip steps.

    Its updates come from the moments that it stores, old or new. optax computes them from the new
    moments. A step that can be skipped then needs both, and XLA, which writes the moments in place,
    first copies old moments, for example those of gate and up.
    """
    b1, b2 = config.decays
    adam = optax.scale_by_adam(b1, b2, config.eps, mu_dtype=config.momentum_dtype)

    def update(
        updates: Any, state: Any, params: Any = None, *, taken: Any = True, **_: Any
    ) -> tuple[Any, Any]:
        keep = lambda new, old: jnp.where(taken, new, old)
        mu = optax.tree.cast(
            optax.tree.update_moment(updates, state.mu, b1, 1), config.momentum_dtype
        )
        nu = optax.tree.update_moment_per_elem_norm(updates, state.nu, b2, 2)
        mu, nu = jax.tree.map(keep, (mu, nu), (state.mu, state.nu))
        count = keep(state.count + 1, state.count)
        rate = jnp.asarray(schedule(state.count))

        def step_of(m, v, param, decay):
            direction = m / (jnp.sqrt(v) + config.eps)
            direction = direction + config.weight_decay * param if decay else direction
            return -rate.astype(direction.dtype) * direction

        wide = jax.tree.map(lambda m, v: m.astype(v.dtype), mu, nu)
        updates = jax.tree.map(
            step_of,
            optax.tree.bias_correction(wide, b1, count),
            optax.tree.bias_correction(nu, b2, count),
            params,
            _decays(params),
        )
        return updates, optax.ScaleByAdamState(count=count, mu=mu, nu=nu)

    return optax.GradientTransformationExtraArgs(adam.init, update)


def _decays(params: Any) -> Any:
    """Whether each parameter has weight decay: embeddings and kernels have."""

    def is_matrix(path: tuple[Any, ...], _: Any) -> bool:
        names = parameter_path(path)
        return names[-1] in ("kernel", "embedding") or names[0] == "lm_head"

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _labels(params: Any) -> Any:
    """The optimizer of each parameter: "muon" for the kernels of layers, "adam" for the others."""

    def label(path: tuple[Any, ...], _: Any) -> str:
        names = parameter_path(path)
        return "muon" if names[0] == "layers" and names[-1] == "kernel" else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def _matrices(updates: Any) -> Any:
    """The two axes of each matrix; axis 0 is that of the layers."""
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(1, 2), updates)
