"""Times the same training step in PyTorch: transformers' Llama, with and without Liger-Kernel.

    python -m benchmarks.training.train_step_torch --preset llama3.2-1b --variants liger \
        liger_loss:compile liger_loss:compile:fp8=tensorwise

The set-up is that of `benchmarks.training.train_step`: float32 parameters and AdamW moments (fused
AdamW), bfloat16 compute (autocast), clipped gradients, random tokens, wall time, median over
rounds. A variant is `huggingface`, `liger` with all of Liger's kernels, or `liger_loss` with its
loss alone. Options may follow:

- `:full` checkpoints every layer.
- `:compile` uses `torch.compile` for each layer, as torchtitan does. The loss is not compiled.
- `:cudnn` allows cuDNN's attention alone. Without it PyTorch chooses.
- `:fp8=RECIPE` trains the layers' linear maps in FP8 by torchao, with a recipe of its
  `Float8LinearConfig.from_recipe_name`. The output layer stays in bfloat16.

Each variant runs in a process of its own, because Liger's patches change the classes of
transformers for good. The benchmark needs torch, transformers and, for some variants, liger-kernel
or torchao, which this project does not require. JAX only tells the device and counts the FLOPs.
"""

import contextlib
import importlib
from typing import Any

from benchmarks.training import train_step
from benchmarks.training.variants import Measured, compare, timed
from models.config import LlamaConfig
from models.llama_hf import config_to_hf
from train.config import TrainConfig

_LIBRARIES = ("huggingface", "liger", "liger_loss")
_OPTIONS = ("full", "compile", "cudnn", "fp8=")


def options_of(name: str) -> tuple[str, dict[str, str]]:
    """The library of a variant, and its options: `huggingface:compile` -> `{"compile": ""}`.

    Raises:
      ValueError: The name of the variant has an unknown part.
    """
    library, *parts = name.split(":")
    options = train_step.options_of(parts, _OPTIONS)
    if library not in _LIBRARIES or options is None:
        raise ValueError(
            f"variant {name!r} must be one of {', '.join(_LIBRARIES)}, with :full, :compile, "
            ":cudnn or :fp8=RECIPE after it"
        )
    return library, options


def model_of(config: LlamaConfig, name: str, device: str) -> Any:
    """Transformers' Llama with new parameters, and what the options of the variant make of it."""
    library, options = options_of(name)
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    fields = config_to_hf(config) | {"use_cache": False}
    hf_config = transformers.LlamaConfig(**fields, attn_implementation="sdpa")
    with torch.device(device):
        model = transformers.LlamaForCausalLM(hf_config).to(torch.float32)
    if library != "huggingface":
        patch = importlib.import_module("liger_kernel.transformers")
        others = dict.fromkeys(("rope", "rms_norm", "swiglu"), library == "liger")
        patch.apply_liger_kernel_to_llama(model=model, **others)
    if "fp8" in options:
        float8 = importlib.import_module("torchao.float8")
        float8.convert_to_float8_training(
            model,
            config=float8.Float8LinearConfig.from_recipe_name(options["fp8"]),
            module_filter_fn=lambda module, path: path != "lm_head",
        )
    if "full" in options:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if "compile" in options:
        for layer in model.model.layers:
            layer.compile()
    return model.train()


def attention_of(name: str) -> contextlib.AbstractContextManager[None]:
    """The context in which the model runs: cuDNN's attention alone if the variant says so."""
    if "cudnn" not in options_of(name)[1]:
        return contextlib.nullcontext()
    attention = importlib.import_module("torch.nn.attention")
    return attention.sdpa_kernel(attention.SDPBackend.CUDNN_ATTENTION)


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
        with attention_of(name), torch.autocast(device, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), adamw.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    finished = torch.cuda.synchronize if device == "cuda" else lambda: None
    times, loss = timed(step, finished, rounds, steps)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    return Measured(name, times, peak, float(loss))


def main() -> None:
    """Parses the command line, measures, prints and writes the table."""
    compare(
        measure,
        options_of,
        description=__doc__,
        default=["liger", "liger:full"],
        module="benchmarks.training.train_step_torch",
        setup="Parameters and AdamW moments float32, compute bfloat16 by autocast. Memory is the "
        "peak of PyTorch's allocator.",
    )


if __name__ == "__main__":
    main()
