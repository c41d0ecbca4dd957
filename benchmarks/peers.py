"""PyTorch libraries for the same operations, which the benchmarks run beside ours.

    python -m benchmarks.peers

prints which of them are installed, in which versions. The benchmarks `bench`, `loss`, `log_probs`,
`distillation` and `attention` of `benchmarks.kernels` measure them with `--peers`. This project
does not require them:

    pip install torch liger-kernel quack-kernels nvidia-cutlass-dsl==4.7.1 cut-cross-entropy tokamax
    pip install --no-deps nvidia-cudnn-frontend  # it asks for nvidia-cutlass-dsl 4.8, unused here
    pip install --no-build-isolation 'transformer-engine[core-cu13,jax]'  # compiles C++

FlashAttention-3 (`flash-attn-3`) is built from its source, the folder `hopper` of
https://github.com/Dao-AILab/flash-attention.
"""

import dataclasses
import functools
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from benchmarks import agreement, timing
from benchmarks.kernels.formulas import Arrays, as_tuple, wrong_result
from benchmarks.libraries import PEERS, Peer, torch

type Direction = Literal["forward", "backward", "forward+backward"]

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "liger-kernel",
    "torchao",
    "quack-kernels",
    "cut-cross-entropy",
    "nvidia-cudnn-frontend",
    "tokamax",
    "transformer-engine",
    "flash-attn-3",
)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A peer that is ready to run in one direction.

    Attributes:
      calls: One call for each set of inputs; it returns outputs or gradients by name.
      num_bytes: Function that returns the peak memory of a call beyond its inputs, in bytes.
    """

    calls: list[Callable[[], dict[str, Any]]]
    num_bytes: Callable[[], int]


def versions() -> dict[str, str | None]:
    """The version of every package, None for a package that is not installed."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def missing() -> list[str]:
    """The packages that are not installed."""
    return [package for package, version in versions().items() if version is None]


def require_torch() -> None:
    """Ends the program if PyTorch is not installed, without which no peer of it runs."""
    if "torch" in missing():
        sys.exit("--peers needs torch, which is not installed")


def peers_of(op: str) -> list[Peer]:
    """The installed peers of an operation."""
    absent = missing()
    # All of them need PyTorch.
    return [p for p in PEERS if p.op == op and p.package not in absent and "torch" not in absent]


def reset() -> None:
    """Clears the programs of `torch.compile` and gives PyTorch's unused memory back.

    Call it before each shape: after eight shapes `torch.compile` would silently stop compiling.
    """
    torch().compiler.reset()
    torch().cuda.empty_cache()


def prepare(peer: Peer, sets: list[Arrays], direction: Direction) -> Prepared:
    """Copies the inputs to PyTorch; for the backward it also runs the forward once on each set."""
    # A compiled backward would reuse the memory of its residuals, and could run only once.
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    fn, formula = peer.load(), peer.formula
    calls = []
    for arrays in sets:
        inputs = {name: _to_torch(arrays[name]) for name in formula.inputs}
        variables = {
            name: t.requires_grad_() for name, t in inputs.items() if t.is_floating_point()
        }
        if direction == "forward+backward":
            # A teacher has no gradient.
            variables = {name: variables[name] for name in formula.gradients}
            for name in inputs.keys() - variables.keys():
                inputs[name].requires_grad_(False)
        forward = functools.partial(_outputs, fn, formula, inputs)
        given = [f"d{name}" for name in formula.outputs if direction != "forward"]
        cotangents = [_to_torch(arrays[name]) for name in given if name in arrays]
        match direction:
            case "forward":
                call = forward
            case "backward":
                call = functools.partial(
                    _gradients, forward(), variables, cotangents, retain_graph=True
                )
            case "forward+backward":
                call = functools.partial(_both, forward, variables, cotangents)
        calls.append(functools.partial(_synchronized, call))

    def num_bytes() -> int:
        before = torch().cuda.memory_allocated()
        torch().cuda.reset_peak_memory_stats()
        calls[0]()
        return torch().cuda.max_memory_allocated() - before

    return Prepared(calls, num_bytes)


def case_of(
    peer: Peer,
    name: str,
    arrays: Arrays,
    direction: Direction,
    expected: Sequence[jax.Array],
) -> timing.Case:
    """A peer as a case, with its memory beside arguments and results.

    Its outputs and gradients are compared with `expected`, which has those of the formula in order.
    """
    # The gradients have the dtypes of the arguments.
    gradients = () if direction == "forward" else peer.formula.gradients
    results = sum(arrays[name].nbytes for name in gradients)
    names = *peer.formula.outputs, *(f"d{name}" for name in gradients)
    by_name = dict(zip(names, expected, strict=True))
    prepared: list[Prepared] = []

    def calls() -> list[Callable[[], dict[str, Any]]]:
        prepared.append(prepare(peer, [arrays], direction))
        return prepared[0].calls

    wrong = lambda got: wrong_result(to_jax(got), by_name)
    return agreement.checked(name, calls, wrong, lambda calls: prepared[0].num_bytes() - results)


def to_jax(tensors: dict[str, Any]) -> Arrays:
    """PyTorch's results as JAX arrays."""
    dense = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    return {name: jnp.asarray(jax.dlpack.from_dlpack(t)) for name, t in dense.items()}


def _to_torch(array: jax.Array) -> Any:
    # A copy, because kernels that work in place must not change the inputs of other peers.
    tensor = torch().from_dlpack(jax.block_until_ready(array)).clone()
    return tensor if tensor.is_floating_point() else tensor.long()  # labels must be int64


def _outputs(fn, formula, inputs) -> dict[str, Any]:
    return dict(zip(formula.outputs, as_tuple(fn(*inputs.values())), strict=True))


def _gradients(outputs, variables, cotangents, **options) -> dict[str, Any]:
    tensors = list(outputs.values()), list(variables.values())
    found = torch().autograd.grad(*tensors, cotangents, **options)
    return {f"d{name}": gradient for name, gradient in zip(variables, found, strict=True)}


def _both(forward, variables, cotangents) -> dict[str, Any]:
    outputs = forward()
    # A loss has no cotangent.
    return outputs | _gradients(outputs, variables, cotangents or None)


def _synchronized(fn: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found = fn()
    if torch().cuda.is_available():
        torch().cuda.synchronize()
    return found


def main() -> None:
    """Prints the version of each package, or that it is not installed."""
    for package, version in versions().items():
        print(f"{package}: {version or 'not installed'}")


if __name__ == "__main__":
    main()
