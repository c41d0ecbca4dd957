"""Times the linear cross-entropy with its gradients by chunk size, beside its three bare GEMMs.

    python -m benchmarks.loss_chunks --tokens 16384 --hidden-size 2048 --vocab-size 128256

bfloat16, random data; wall time, median over interleaved rounds.
"""

import argparse
import functools
import importlib.metadata
import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks.ceilings import seconds
from pallas_kernels import linear_cross_entropy


def main() -> None:
    """Parses the command line, measures and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--vocab-size", type=int, default=128256)
    parser.add_argument("--chunks", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--rounds", type=int, default=10)
    sizes = parser.parse_args()

    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (sizes.tokens, sizes.hidden_size), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (sizes.vocab_size, sizes.hidden_size), jnp.bfloat16) / 50
    labels = jax.random.randint(keys[2], (sizes.tokens,), 0, sizes.vocab_size)
    # The GEMMs run on 2048 tokens, as many times as it takes: all logits would not fit everywhere.
    part = x[:2048]
    dlogits = jax.random.normal(keys[3], (len(part), sizes.vocab_size), jnp.bfloat16)
    gemms = [
        (jax.jit(lambda a, b: a @ b.T), part, weight),
        (jax.jit(lambda a, b: a @ b), dlogits, weight),
        (jax.jit(lambda a, b: a.T @ b), dlogits, part),
    ]

    losses = {}
    for chunk_size in sizes.chunks:
        loss = functools.partial(linear_cross_entropy, chunk_size=chunk_size)
        program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        losses[chunk_size] = program.lower(x, weight, labels).compile()
    times: dict[int, list[float]] = {chunk_size: [] for chunk_size in losses}
    gemm_times = []
    for _ in range(sizes.rounds):
        parts = [
            seconds(lambda fn=fn, a=a, b=b: fn(a, b), repeats=1, calls=8) for fn, a, b in gemms
        ]
        gemm_times.append(sum(parts) * sizes.tokens / len(part))
        for chunk_size, program in losses.items():
            run = functools.partial(program, x, weight, labels)
            times[chunk_size].append(seconds(run, repeats=1, calls=3))

    limit = statistics.median(gemm_times)
    print(
        f"{sizes.tokens} x {sizes.hidden_size} x {sizes.vocab_size}, {time.strftime('%Y-%m-%d')}, "
        f"{jax.devices()[0].device_kind}, jax {importlib.metadata.version('jax')}; three GEMMs "
        f"{limit * 1e3:.1f} ms\n\n"
        "| chunk | ms | of the three GEMMs | temporaries |\n|---|---|---|---|"
    )
    for chunk_size, program in losses.items():
        measured = statistics.median(times[chunk_size])
        analysis = program.memory_analysis()
        assert analysis is not None
        print(
            f"| {chunk_size} | {measured * 1e3:.1f} | {measured / limit:.2f} | "
            f"{analysis.temp_size_in_bytes / 2**20:.0f} MiB |"
        )


if __name__ == "__main__":
    main()
