"""Times the same training step in PyTorch: transformers' Llama, with and without Liger-Kernel.

    python -m benchmarks.training.train_step_torch --preset llama3.2-1b --variants liger liger:full

The set-up is that of `benchmarks.training.train_step`: float32 parameters and AdamW moments (fused
AdamW), bfloat16 compute (autocast), clipped gradients, random tokens, wall time, median over
rounds. A variant is `huggingface` or `liger`. The suffix `:full` checkpoints every layer, and
`:compile` uses `torch.compile`. The benchmark needs torch, transformers and liger-kernel, which
this project does not require. JAX only tells the device and counts the FLOPs.
"""

import argparse
import dataclasses
import gc
import importlib
import time
from pathlib import Path
from typing import Any

import jax

from benchmarks import peers
from benchmarks.training.train_step import add_workload, speed_cells, workload
from models.config import LlamaConfig
from models.llama_hf import config_to_hf
from train.config import TrainConfig

_OPTIONS = ("full", "compile")


@dataclasses.dataclass
class Measured:
    """The measurements of a variant; `bytes` is PyTorch's peak."""

    name: str
    times_s: list[float]
    bytes: int
    loss: float


def model_of(config: LlamaConfig, name: str, device: str) -> Any:
    """Transformers' Llama with new parameters, patched by Liger if the variant says so.

    Raises:
      ValueError: The name of the variant has an unknown part.
    """
    library, *options = name.split(":")
    if library not in ("huggingface", "liger") or not set(options) <= set(_OPTIONS):
        raise ValueError(
            f"variant {name!r} must be huggingface or liger, with :full or :compile after it"
        )
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    fields = config_to_hf(config) | {"use_cache": False}
    hf_config = transformers.LlamaConfig(**fields, attn_implementation="sdpa")
    with torch.device(device):
        model = transformers.LlamaForCausalLM(hf_config).to(torch.float32)
    if library == "liger":
        patch = importlib.import_module("liger_kernel.transformers")
        patch.apply_liger_kernel_to_llama(model=model)
    if "full" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return torch.compile(model) if "compile" in options else model


def measure(config: TrainConfig, name: str, rounds: int, steps: int) -> Measured:
    """Trains a variant for a few steps on one batch."""
    torch = importlib.import_module("torch")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = model_of(config.model, name, device)
    adamw = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=adamw.learning_rate,
        betas=adamw.decays,
        eps=adamw.eps,
        weight_decay=adamw.weight_decay,
        fused=device == "cuda",
    )
    shape = config.data.batch_size, config.data.sequence_length
    tokens = torch.randint(config.model.vocab_size, shape, device=device)

    def step() -> Any:
        with torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), adamw.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    finished = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: list[float] = []
    loss: Any = None
    for measured in [False] + [True] * rounds:
        finished()
        start = time.perf_counter()
        for _ in range(steps):
            loss = step()
        finished()
        if measured:
            times.append((time.perf_counter() - start) / steps)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Measured(name, times, peak, float(loss))


def report(config: TrainConfig, results: list[Measured]) -> str:
    """The table in Markdown, with the columns of `benchmarks.training.train_step`."""
    device = jax.devices()[0]
    installed = {name: version for name, version in peers.versions().items() if version}
    versions = ", ".join(f"{name} {version}" for name, version in installed.items())
    lines = [
        f"# Training step of {config.name} in PyTorch, "
        f"{config.data.batch_size} x {config.data.sequence_length} tokens",
        "",
        f"{time.strftime('%Y-%m-%d')}, {device.device_kind}, {versions}. Parameters and AdamW "
        "moments float32, compute bfloat16 by autocast.",
        "",
        "| variant | ms/step | min - max | tokens/s | MFU | memory | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        cells = [
            result.name,
            *speed_cells(config, result.times_s),
            f"{result.bytes / 2**30:.1f} GiB",
            f"{result.loss:.3f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Parses the command line, measures, prints and writes the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_workload(parser)
    parser.add_argument("--variants", nargs="+", default=["liger", "liger:full"])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2, help="steps in a round")
    parser.add_argument("--output", type=Path, help="file to write the table to")
    arguments = parser.parse_args()
    config = workload(arguments)
    torch = importlib.import_module("torch")
    results = []
    for name in arguments.variants:
        results.append(measure(config, name, arguments.rounds, arguments.steps))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    text = report(config, results)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
