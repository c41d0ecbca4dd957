"""Times the loss with its gradients on a mesh of eight CPU devices, against plain JAX.

    JAX_PLATFORMS=cpu python -m benchmarks.kernels.mesh

The tokens are split over the devices, and the weight is whole. Before the operations partitioned
themselves, every device computed all tokens. Medians over interleaved rounds, float32.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.kernels import shapes
from pallas_kernels import linear_cross_entropy

_NUM_DEVICES = 8


def plain_loss(x: Any, weight: Any, labels: Any) -> Any:
    """The mean loss with all logits in memory, as XLA partitions it."""
    logits = x @ weight.T
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label_logits)


def measure(shape: shapes.Shape, rounds: int) -> dict[str, float]:
    """Median seconds of each loss."""
    num_tokens, hidden_size, vocab_size = shape
    numbers = np.random.default_rng(0)
    x = numbers.standard_normal((num_tokens, hidden_size), np.float32)
    weight = numbers.standard_normal((vocab_size, hidden_size), np.float32) * hidden_size**-0.5
    labels = numbers.integers(0, vocab_size, num_tokens).astype(np.int32)
    mesh = jax.make_mesh((_NUM_DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    put = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))
    tokens = PartitionSpec("data")
    args = put(x, tokens), put(weight, PartitionSpec()), put(labels, tokens)
    losses = {"plain JAX": plain_loss, "linear_cross_entropy": linear_cross_entropy}
    runs = {name: jax.jit(jax.value_and_grad(fn, (0, 1))) for name, fn in losses.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        jax.block_until_ready(run(*args))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(*args))
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    """Prints a line for each loss."""
    parser = argparse.ArgumentParser(description="the loss on a mesh of eight CPU devices")
    parser.add_argument("--shape", type=shapes.parse, default=(4096, 512, 8192))
    parser.add_argument("--rounds", type=int, default=10)
    flags = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", _NUM_DEVICES)
    found = measure(flags.shape, flags.rounds)
    for name, seconds in found.items():
        print(f"{name}: {seconds * 1e3:.0f} ms, {seconds / found['plain JAX']:.2f}")


if __name__ == "__main__":
    main()
