"""The training loop."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from models.llama import AUTO_REMAT, Llama
from models.llama_hf import save_pretrained
from models.sampling import generate
from models.sharding import batch_sharding, make_mesh
from pallas_kernels import hardware
from train import data, metrics, report
from train.config import TrainConfig
from train.plan import Programs, plan, table, with_policies, with_remat
from train.plan_cache import cached
from train.plan_target import target_here
from train.step import (
    Batch,
    TrainState,
    init_state,
    jit_train_step,
    make_eval_step,
    memory_in_bytes,
    model_graph,
)


def run(config: TrainConfig) -> Path:
    """Trains, and returns the run's folder.

    It holds `config.json`, `metrics.jsonl` (a JSON object a line), `loss.png`, `report.html` and,
    if asked for, the model in Hugging Face's format.
    """
    mesh = _mesh(config)
    train_data, held_out, fingerprint = _datasets(config)
    written: dict[str, Any] = {"config": config, "data": fingerprint}
    if config.model.remat == AUTO_REMAT:
        config, written["plan"] = _with_planned_remat(config, mesh)
    run_dir = _new_run_dir(config.runs_dir, config.name)
    with jax.set_mesh(mesh), metrics.MetricsWriter(run_dir) as writer:
        writer.write_config(written)
        state = init_state(config, mesh)
        train_step, eval_step = _compile(config, mesh, state, train_data, held_out)
        state = _train(config, mesh, state, train_step, eval_step, train_data, held_out, writer)
        _finish(config, run_dir, state)
    return run_dir


def _with_planned_remat(config: TrainConfig, mesh: Mesh) -> tuple[TrainConfig, dict[str, Any]]:
    """The configuration with the fastest policy that fits, and the choice for the run's files."""
    target = target_here(mesh)
    chosen = plan(with_policies(config), target, cached(Programs(target), target))
    print(table(chosen))
    remat = chosen.best.remat
    summary = {"remat": remat, "memory_bytes": chosen.best.bytes, "limit_bytes": target.limit_bytes}
    return with_remat(config, remat), summary


def _train(
    config: TrainConfig,
    mesh: Mesh,
    state: TrainState,
    train_step: Callable[..., Any],
    eval_step: Callable[..., Any] | None,
    train_data: Any,
    held_out: data.PackedDataset | None,
    writer: metrics.MetricsWriter,
) -> TrainState:
    """Evaluates, steps, and reports the step before, whose numbers have arrived by then."""
    start = time.perf_counter()
    throughput = metrics.Throughput()
    flops = metrics.flops_per_token(config.model, config.data.sequence_length)
    device = hardware.lookup(jax.devices()[0].device_kind)
    elapsed = lambda: time.perf_counter() - start

    def log(step: int, values: dict[str, Any]) -> None:
        values = {name: value.item() for name, value in jax.device_get(values).items()}
        throughput.update(config.data.tokens_per_step)
        speed = throughput.tokens_per_s
        row = {
            "step": step,
            "loss": values["loss"],
            "nll": values["nll"],
            "accuracy": values["accuracy"],
            "lr": values["lr"],
            "grad_norm": values["grad_norm"],
            "tokens": step * config.data.tokens_per_step,
            "tokens_per_s": speed,
            "mfu": metrics.mfu(speed, flops, device, mesh.size),
            "step_time_s": throughput.step_time_s,
            **metrics.device_memory(),
            "elapsed_s": elapsed(),
        }
        writer.write(row)
        progress.update(step, row)

    def evaluate(step: int) -> None:
        if held_out is None or eval_step is None:
            return
        with throughput.pause():
            row = {
                "step": step,
                **_held_out_loss(config, mesh, eval_step, state.params, held_out),
                "elapsed_s": elapsed(),
            }
        writer.write(row)
        progress.update(step, row)

    with (
        metrics.Progress(config.steps, every=config.log_every) as progress,
        data.prefetch(lambda: _train_batches(config, mesh, train_data)) as batches,
    ):
        evaluate(0)
        pending = None
        for step, batch in enumerate(batches, start=1):
            state, values = train_step(state, batch)
            if pending is not None:
                log(*pending)
            pending = step, values
            last = step == config.steps
            if config.eval_every and (last or step % config.eval_every == 0):
                log(*pending)
                pending = None
                evaluate(step)
        if pending is not None:
            log(*pending)
    return state


def _held_out_loss(
    config, mesh, eval_step, params, held_out: data.PackedDataset
) -> dict[str, float]:
    """Nats per token, share of tokens predicted, and bits per byte of the held-out text."""
    sums, num_bytes = [], 0
    for batch in held_out.eval_batches(config.data.batch_size, config.eval_batches):
        num_bytes += data.predicted_bytes(batch)
        sums.append(eval_step(params, jax.device_put(batch, batch_sharding(mesh))))
    sums = jax.device_get(sums)
    nll = float(sum(values["nll_sum"] for values in sums))
    correct = float(sum(values["correct_sum"] for values in sums))
    num_tokens = int(sum(values["num_tokens"] for values in sums))
    return {
        "val_loss": nll / num_tokens,
        "val_accuracy": correct / num_tokens,
        "val_bpb": nll / num_bytes / math.log(2),
    }


def _train_batches(config: TrainConfig, mesh: Mesh, dataset: Any) -> Iterator[Batch]:
    """Batches `[A, B, S]` on the devices, in the order of the steps."""
    for step in range(config.steps):
        yield _to_devices(mesh, _step_batch(config, dataset, step))


def _step_batch(config: TrainConfig, dataset: Any, step: int) -> dict[str, np.ndarray]:
    rows = dataset.batch(step, batch_size=config.data.rows_per_step, seed=config.seed)
    split = lambda a: a.reshape(config.data.accumulation_steps, config.data.batch_size, -1)
    return {name: split(array) for name, array in rows.items()}


def _to_devices(mesh: Mesh, batch: dict[str, np.ndarray]) -> Batch:
    return jax.device_put(batch, batch_sharding(mesh, batch_axis=1))


def _mesh(config: TrainConfig) -> Mesh:
    num_devices = jax.device_count()
    data_axis, fsdp = config.mesh.data, config.mesh.fsdp
    if data_axis == -1:
        data_axis = max(1, num_devices // fsdp)
    mesh = make_mesh(data=data_axis, fsdp=fsdp)
    if config.data.batch_size % mesh.size:
        raise ValueError(
            f"batch_size={config.data.batch_size} must be a multiple of the {mesh.size} devices"
        )
    return mesh


def _datasets(config: TrainConfig):
    """Training data, held-out data and what identifies them."""
    length = config.data.sequence_length
    if config.data.source == "synthetic":
        return data.SyntheticDataset(config.model.vocab_size, length), None, {}
    if config.model.vocab_size < data.BYTE_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={config.model.vocab_size} is too small for bytes, which take "
            f"{data.BYTE_VOCAB_SIZE}"
        )
    corpus = data.stdlib_corpus()
    train_data = data.PackedDataset.from_documents(corpus.train, sequence_length=length)
    held_out = data.PackedDataset.from_documents(corpus.held_out, sequence_length=length)
    return train_data, held_out, corpus.fingerprint()


def _new_run_dir(runs_dir: Path, name: str) -> Path:
    """`runs_dir/name`, or the first of `name-2`, `name-3`, ... that does not exist."""
    candidates = (name if number == 1 else f"{name}-{number}" for number in range(1, 10**6))
    for candidate in candidates:
        with contextlib.suppress(FileExistsError):
            (runs_dir / candidate).mkdir(parents=True)
            return runs_dir / candidate
    raise FileExistsError(
        f"{runs_dir / name} and a million numbered folders exist; choose a --name"
    )


def _compile(config: TrainConfig, mesh: Mesh, state: TrainState, train_data, held_out):
    """Both steps, compiled ahead of time, and a report of the memory they need."""
    batch = _to_devices(mesh, _step_batch(config, train_data, 0))
    start = time.perf_counter()
    train_step = jit_train_step(config, state).lower(state, batch).compile()
    print(f"compiled the step in {time.perf_counter() - start:.1f} s")
    print(memory_report(train_step))
    eval_step = None
    if held_out is not None and config.eval_every:
        eval_batch = next(held_out.eval_batches(config.data.batch_size, 1))
        eval_batch = jax.device_put(eval_batch, batch_sharding(mesh))
        eval_step = jax.jit(make_eval_step(config)).lower(state.params, eval_batch).compile()
    return train_step, eval_step


def memory_report(compiled: Any) -> str:
    """What a compiled step needs on each device, against what the device has."""
    sizes = compiled.memory_analysis()
    gib = lambda size: f"{size / 2**30:.2f} GiB"
    peak = memory_in_bytes(compiled)
    parts = [
        f"memory of the step: arguments {gib(sizes.argument_size_in_bytes)}",
        f"temporaries {gib(sizes.temp_size_in_bytes)}",
        f"outputs that are not arguments {
            gib(sizes.output_size_in_bytes - sizes.alias_size_in_bytes)
        }",
        f"in all {gib(peak)}",
    ]
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit:
        parts.append(f"of {gib(limit)} ({peak / limit:.0%})")
    return ", ".join(parts)


def _finish(config: TrainConfig, run_dir: Path, state: TrainState) -> None:
    """The saved model, the text sample, the plot and the report."""
    model: Llama = nnx.merge(model_graph(config.model), state.params)
    if config.save:
        save_pretrained(model, run_dir / "model")
    samples = []
    if config.sample_tokens:
        prompt = jnp.asarray(data.encode(config.sample_prompt), jnp.int32)[None]
        for temperature in (0.0, 0.8):
            tokens = generate(
                model,
                prompt,
                max_new_tokens=config.sample_tokens,
                temperature=temperature,
                key=jax.random.key(config.seed),
            )
            text = config.sample_prompt + data.decode(jax.device_get(tokens)[0])
            samples.append((f"temperature {temperature}", text))
            print(f"\n--- sample at temperature {temperature} ---\n{text}")
    parameters = sum(leaf.size for leaf in jax.tree.leaves(state.params))
    page = report.write_report(run_dir, samples=samples, summary={"Parameters": parameters})
    print(f"\nreport: {page}")
