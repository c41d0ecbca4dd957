"""Compares the training of another project's model before and after `pallas_kernels.patch`.

A test file has a project's model, batch and loss in a `Project`. The checks are the same for all.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from aot.harness import Case, Failure, Program, compile_cases, missing_toolchain
from pallas_kernels import patch
from pallas_kernels.patching.classes import set_class
from support.numerics import assert_as_accurate, quick_jit

NUM_BATCHES = 16
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a model and of its batch.

    Attributes:
      width: D.
      hidden: F.
      heads: Number of query heads.
      kv_heads: Number of heads of keys and values.
      head_dim: Size of a head.
      vocab: V.
      sequences: Number of sequences of a batch.
      length: Tokens of a sequence.
    """

    width: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    sequences: int
    length: int


# Runs on a CPU. Two layers in both.
SMALL = Size(128, 512, 4, 2, 32, 512, 1, 64)
# The widths of Llama 3.2 1B; compiled for an H100, and run nowhere.
REAL = Size(2048, 8192, 32, 8, 64, 128256, 16, 1024)


@dataclasses.dataclass(frozen=True)
class Project:
    """A model of another project and its training loss.

    Attributes:
      build: Makes the model for a size and the dtype of its activations.
      batch: Makes the arrays of a batch from a random key and a size.
      loss: Loss of a model and a batch, as the project computes it.
      patched_loss: Same loss from `Patched`, the model and the batch.
    """

    build: Callable[[Size, Any], nnx.Module]
    batch: Callable[[jax.Array, Size], dict[str, jax.Array]]
    loss: Callable[[nnx.Module, dict[str, jax.Array]], jax.Array]
    patched_loss: Callable[[Any, nnx.Module, dict[str, jax.Array]], jax.Array]


def small_model(project: Project, dtype: Any) -> nnx.Module:
    """The small model with random numbers in every parameter.

    Many projects set norms to one and projections to zero until a checkpoint is loaded. Errors of
    a product with zeros would stay unseen. The numbers fit in bf16, so that models with bf16 and
    with float32 parameters get the same.
    """
    model = project.build(SMALL, dtype)
    state = nnx.state(model, nnx.Param)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(state))))

    def fill(a: jax.Array) -> jax.Array:
        key = next(keys)
        is_constant = bool((a == a.reshape(-1)[0]).all())
        noise = 0.1 * jax.random.normal(key, a.shape)
        return (a + noise).astype(jnp.bfloat16).astype(a.dtype) if is_constant else a

    nnx.update(model, jax.tree.map(fill, state))
    return model


def cast_parameters(model: nnx.Module, dtype: Any) -> nnx.Module:
    """Rounds the parameters to bf16, as loaders of checkpoints do, and stores them in `dtype`."""
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16), nnx.state(model, nnx.Param))
    nnx.update(model, jax.tree.map(lambda a: a.astype(dtype), rounded))
    return model


def assert_tree_is_kept(project: Project) -> None:
    """`patch` changes neither the parameters, nor their paths, nor what sharding them needs."""
    model = small_model(project, jnp.bfloat16)

    def leaves() -> dict[Any, Any]:
        flat = nnx.to_flat_state(nnx.state(model))
        return {path: (v, v.get_metadata()) for path, v in flat}

    before = leaves()
    assert patch(model).replaced
    after = leaves()
    assert list(after) == list(before)
    for path, (variable, metadata) in before.items():
        assert type(after[path][0]) is type(variable), path
        assert after[path][1] == metadata, path
        old, new = variable.get_value(), after[path][0].get_value()
        assert old is new or bool((old == new).all()), path


def assert_same_training(project: Project, num_replaced: int) -> None:
    """The patched model's losses and gradients err no more than the project's own do.

    The project's model with float32 activations gives the exact numbers: its error is 2^16 times
    smaller than bf16's.
    """
    names, exact = _losses_and_gradients(project, small_model(project, jnp.float32), project.loss)
    _, own = _losses_and_gradients(project, small_model(project, jnp.bfloat16), project.loss)
    model = small_model(project, jnp.bfloat16)
    patched = patch(model)
    print(patched)
    assert len(patched.replaced) == num_replaced
    loss = lambda model, batch: project.patched_loss(patched, model, batch)
    got_names, got = _losses_and_gradients(project, model, loss)
    assert got_names == names
    for name, g, o, e in zip(names, got, own, exact, strict=True):
        errors = (np.sqrt(np.mean(np.square(a - e))) for a in (g, o))
        print(f"{name}: %.2e, the project's own %.2e" % tuple(errors))
    print("losses", got[0].mean(), own[0].mean(), exact[0].mean())
    assert_as_accurate(got, own, exact, names=names)


def _losses_and_gradients(
    project: Project, model: nnx.Module, loss: Callable[..., jax.Array]
) -> tuple[list[str], list[np.ndarray]]:
    """The loss and the gradients of each of several batches."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    step = quick_jit(
        lambda params, batch: jax.value_and_grad(
            lambda params: loss(nnx.merge(graphdef, params, rest), batch).astype(jnp.float32)
        )(params)
    )
    results = []
    for key in jax.random.split(jax.random.key(2), NUM_BATCHES):
        leaves = jax.tree.leaves(step(params, project.batch(key, SMALL)))
        results.append([np.asarray(a, np.float64) for a in leaves])
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(params)]
    return ["loss", *paths], [np.stack(arrays) for arrays in zip(*results, strict=True)]


def cases(project: Project, build: Callable[[Size, Any], nnx.Module] | None = None) -> dict:
    """A step's loss and gradients at real widths, before and after `patch`, for an H100."""
    return {
        name: Case(*_training(project, build or project.build, name == "patched"))
        for name in ("before", "patched")
    }


def _training(project: Project, build: Any, is_patched: bool) -> tuple[Any, tuple[Any, ...]]:
    model = nnx.eval_shape(lambda: build(REAL, jnp.bfloat16))
    patched = None
    if is_patched:
        # `patch` runs modules, which needs devices that are here. A model with a mesh of GPUs takes
        # its classes from one with a mesh of the CPU.
        twin = nnx.eval_shape(lambda: project.build(REAL, jnp.bfloat16))
        patched = patch(twin)
        kinds = {path: type(module) for path, module in nnx.iter_modules(twin)}
        for path, module in nnx.iter_modules(model):
            set_class(module, kinds[path])
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def training(params: Any, rest: Any, batch: Any) -> Any:
        def loss(params: Any) -> jax.Array:
            merged = nnx.merge(graphdef, params, rest)
            if patched is None:
                return project.loss(merged, batch)
            return project.patched_loss(patched, merged, batch)

        return jax.value_and_grad(loss)(params)

    batch = jax.eval_shape(lambda: project.batch(jax.random.key(0), REAL))
    return training, (params, rest, batch)


def compile_for_h100(module: str) -> dict[str, Program]:
    """The programs of a test module's `CASES`."""
    if missing := missing_toolchain():
        raise RuntimeError(missing)
    found = compile_cases("h100", [(module, "before"), (module, "patched")])
    programs = {name: program for (_, name), program in found.items()}
    for name, program in programs.items():
        if isinstance(program, Failure):
            raise AssertionError(f"{name} does not compile:\n{program.message}")
        print(
            f"{name}: {program.seconds:.0f} s, {program.temp_bytes / 2**20:.0f} MiB",
            calls_of(program),
        )
    return programs  # pyright: ignore[reportReturnType]


def assert_kernels_replace_logits(module: str, calls: dict[str, int]) -> None:
    """Only the patched program calls kernels, as often as `calls` says, and it has no logits."""
    programs = compile_for_h100(module)
    assert has_logits(programs["before"])
    assert not calls_of(programs["before"])
    assert not has_logits(programs["patched"])
    assert calls_of(programs["patched"]) == calls


def calls_of(program: Program) -> dict[str, int]:
    """The number of calls of each Mosaic GPU kernel in a program. A loop's body counts once."""
    return dict(sorted(program.calls.items()))


def has_logits(program: Program) -> bool:
    """Whether an array has as many numbers as half of the logits, and their last axis."""
    tokens = REAL.sequences * REAL.length
    return any(
        REAL.vocab in shape and np.prod(shape, dtype=np.int64) >= tokens * REAL.vocab // 2
        for instruction in program.instructions.values()
        for _, shape in instruction.outputs
    )
