"""Names of implementations, and the choice of one.

An operation has up to three implementations, each a module of its folder:

- `"reference"`: the formula in plain JAX, differentiated by JAX. The tests compare with it.
- `"xla"`: the best algorithm for XLA, in plain JAX. It is the reference where no other is better.
- `"mosaic_gpu"`: Mosaic GPU kernels.

A caller may also ask for `"require"`: the kernel that None would take, or an error that says why
none runs. `choices.py` raises it.
"""

from typing import Any, Literal, get_args

from pallas_kernels import partition
from pallas_kernels.gpu.device import reason_not_here

# Values of an operation's argument `implementation`, beside None.
type Implementation = Literal["reference", "xla", "mosaic_gpu", "require"]
# Implementations that can run.
type Chosen = Literal["reference", "xla", "mosaic_gpu"]


def check_implementation(name: Any) -> None:
    """Raises ValueError unless the name is that of an implementation, or None."""
    names = get_args(Implementation.__value__)
    if name is not None and name not in names:
        raise ValueError(f"implementation={name!r} must be None or one of {names}")


def choose_implementation(
    asked_for: Implementation | None,
    unsupported: str | None,
    *,
    fallback: Chosen,
) -> tuple[Chosen, str | None]:
    """The implementation to run, and the reason why it is not the kernel.

    A named implementation runs, or the call raises. With None and "require" the kernel runs if it
    takes the arguments and the mesh, and the default device is a GPU that can run it. For
    "require", `choices.record` turns another choice into an error.

    Args:
      asked_for: Name that the caller gave.
      unsupported: Reason why the kernel does not take the arguments, if there is one.
      fallback: Implementation to run in the kernel's place.

    Raises:
      NotImplementedError: The caller asked for the kernel, which does not take the arguments.
    """
    unsupported = unsupported or partition.unsupported_reason()
    if asked_for == "mosaic_gpu":
        if unsupported is not None:
            raise NotImplementedError(f"implementation='mosaic_gpu': {unsupported}")
        return asked_for, None
    if asked_for == "reference" or asked_for == "xla":
        return asked_for, by_name(asked_for)
    reason = unsupported or reason_not_here()
    return ("mosaic_gpu", None) if reason is None else (fallback, reason)


def symbolic_reason(*arrays: Any) -> str | None:
    """Why no kernel and no loop over chunks takes the arrays, or None if sizes are numbers.

    `jax.export.symbolic_shape` makes sizes that are symbols.
    """
    for a in arrays:
        if not all(isinstance(size, int) for size in a.shape):
            return (
                f"an array of shape {a.shape} has symbolic sizes; export with numbers to run a "
                "kernel"
            )
    return None


def by_name(name: Chosen, kernel: str = "None takes the kernel where it runs") -> str:
    """The reason why no kernel runs where the caller named another implementation.

    Args:
      name: Name that the caller gave.
      kernel: Statement about the value of `implementation` that takes the kernel.
    """
    return f"the caller asked for implementation={name!r}; implementation={kernel}"


def check_config_has_name(config: Any, implementation: Implementation | None) -> None:
    """Raises ValueError if there are launch parameters and the caller has not named the kernel."""
    if config is not None and implementation != "mosaic_gpu":
        raise ValueError(
            f"{config=} is for implementation='mosaic_gpu' by name, got {implementation=}; leave "
            "config=None, or ask for implementation='mosaic_gpu'"
        )


def check_config_has_kernel(
    config: Any, asked_for: Implementation | None, implementation: Chosen, reason: str | None
) -> None:
    """Raises ValueError if there are launch parameters and no kernel runs.

    Args:
      config: Launch parameters, or None.
      asked_for: Name that the caller gave.
      implementation: Implementation that runs.
      reason: Reason why it is not the kernel.
    """
    if config is not None and implementation != "mosaic_gpu":
        why = "" if implementation == asked_for else f", and it runs because {reason}"
        raise ValueError(
            f"{config=}: {implementation=} has no launch parameters{why}; leave config=None, or "
            "ask for implementation='mosaic_gpu'"
        )
