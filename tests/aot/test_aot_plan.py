"""The planner compiles programs for GPUs that are not here."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from aot.harness import missing_toolchain
from train.planner import aot

pytestmark = pytest.mark.oldest
ROOT = pathlib.Path(__file__).parents[2]
# The first of the two layers stands alone, and the second one repeats.
SMALL = (
    "--preset llama3.2-1b --model.num-hidden-layers 2 --model.vocab-size 32000 "
    "--sequence-length 1024 --model.remat minimal"
)
# Milliseconds. The last one is from train_step_mlp_kernels_llama3.2-1b_h100_202611.md, and the
# others are from train_step_scanned_llama3.2-1b_h100_202611.md, both in benchmarks/results.
MEASURED = {
    "scan-layers minimal": 262.7,
    "no-scan-layers minimal": 255.7,
    "no-scan-layers mlp_inputs": 284.5,
}
# With our attention, from benchmarks/results/train_step_whole_rows_llama3.2-1b_h200_202611.md.
MEASURED_ON_H200 = {"scan-layers minimal": 243.5, "no-scan-layers minimal": 242.5}
# Milliseconds of a layer, from benchmarks/results/tensor_parallel_llama3.1-8b_h200_x4_202611.md.
MEASURED_LAYER = 7.78
LAYERS = 4
LAYERS_OF_8B = (
    f"--preset llama3.1-8b --model.num-hidden-layers {LAYERS} --model.vocab-size 1024 "
    "--model.param-dtype bfloat16 --model.no-scan-layers --model.remat minimal "
    "--model.attention-implementation cudnn --data.batch-size 1 --data.sequence-length 8192"
)
# It runs in a process of its own, because JAX must not look for a GPU. It runs the command for one
# device, compiles the programs of two and of four, and estimates the times that were measured.
SCRIPT = f"""
import json, re
import jax
from models.sharding import BATCH_AXES, make_mesh
from train.cli import plan as plan_command
from train.planner import aot, cost
from train.cli.command_line import parse_command_line
from train.planner.plan import Programs, abstract_batch
from train.planner.target import target_elsewhere
from train.step import abstract_state, make_gradients, memory_in_bytes

small = {SMALL!r}.split()
plan_command.run([*small, "--device", "h100", "--batch-size", "1", "--no-cache"])

def programs(fsdp, tensor=1, chip="h100"):
    devices = aot.devices(aot.CHIPS[chip], fsdp * tensor)
    mesh = make_mesh(data=1, fsdp=fsdp, tensor=tensor, devices=devices)
    return Programs(target_elsewhere(aot.CHIPS[chip], mesh))

flags = [flag.replace("--sequence", "--data.sequence") for flag in small]
two, config = programs(2), parse_command_line([*flags, "--data.batch-size", "2"])
estimated = two.estimate(config)[1]
compiled = two.compile(config)
hlo = compiled.as_text()
found = {{
    "estimated": estimated,
    "memory": memory_in_bytes(compiled),
    "mosaic_gpu": hlo.count('custom_call_target="mosaic_gpu'),
    "attention": len(set(re.findall(r"attention_(?:forward|backward_dq|backward_dkdv)", hlo))),
    "cudnn": len(re.findall(r'custom_call_target="__cudnn', hlo)),
    "gathers": len(re.findall(r" all-gather(?:-start)?\\(", hlo)),
}}
four = programs(2, tensor=2)
found["of four"] = four.estimate(config)[1], four.memory(config)

target = programs(1, tensor=4, chip="h200").target
layers = parse_command_line({LAYERS_OF_8B!r}.split())
params, batch = abstract_state(layers, target.mesh).params, abstract_batch(layers, target.mesh)
with jax.set_mesh(target.mesh), jax.default_device(target.mesh.devices.flat[0]):
    gradients = jax.jit(make_gradients(layers)).trace(params, batch)
program = cost.Program(
    target.rates,
    bytes_per_device=lambda a: cost.nbytes(a) / 4,
    num_devices=4,
    hidden_axes=BATCH_AXES,
)
found["layer"] = 1e3 / {LAYERS} * program.estimate(gradients.jaxpr).seconds

one = programs(1)
for name in {MEASURED!r}:
    layers, remat = name.split()
    flags = (
        f"--preset llama3.2-1b --model.{{layers}} --model.remat {{remat}} "
        "--model.attention-implementation cudnn"
    )
    found[name] = one.estimate(parse_command_line(flags.split()))[0] * 1e3
one = programs(1, chip="h200")
for name in {MEASURED_ON_H200!r}:
    layers, remat = name.split()
    flags = f"--preset llama3.2-1b --model.{{layers}} --model.remat {{remat}}"
    found[f"h200 {{name}}"] = one.estimate(parse_command_line(flags.split()))[0] * 1e3
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def output():
    if reason := missing_toolchain() or aot.missing_toolchain():
        # `make test-aot` installs it, and must not pass if nothing was checked.
        (pytest.fail if "AOT_REQUIRED" in os.environ else pytest.skip)(str(reason))
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    print(process.stdout)
    table, _, last = process.stdout.rstrip().rpartition("\n")
    return table, json.loads(last)


def test_command_for_one_device(output):
    table, _ = output
    (chosen,) = (line.split() for line in table.splitlines() if line.startswith("*"))
    assert chosen[:4] == ["*", "minimal", "1x1x1", "1"] and chosen[5] == "yes"
    # 188M parameters with their moments are 2.1 GiB.
    assert 2.1 < float(chosen[4]) < 4
    assert "1 x NVIDIA H100 80GB HBM3" in table
    assert "python -m train --preset llama3.2-1b" in table


def test_two_devices_share_parameters_and_run_kernels(output):
    table, found = output
    (chosen,) = (line.split() for line in table.splitlines() if line.startswith("*"))
    # A device has as many rows as one device alone, and half of the parameters and moments.
    assert found["memory"] / 2**30 < float(chosen[4]) - 0.8
    assert found["estimated"] == pytest.approx(found["memory"], rel=0.25)
    assert found["mosaic_gpu"] >= 4 and found["gathers"] >= 2
    # A layer has three kernels of attention.
    assert found["attention"] == 3 and not found["cudnn"]


def test_four_devices_share_sequences_and_parameters(output):
    _, found = output
    estimated, memory = found["of four"]
    # A device has half of the parameters, moments and tokens that it has with one other.
    assert memory < 0.6 * found["memory"]
    assert estimated == pytest.approx(memory, rel=0.25)


def test_estimates_agree_with_what_was_measured(output):
    _, found = output
    assert found["layer"] == pytest.approx(MEASURED_LAYER, rel=0.05)
    of_h200 = {f"h200 {name}": milliseconds for name, milliseconds in MEASURED_ON_H200.items()}
    for name, milliseconds in (MEASURED | of_h200).items():
        assert found[name] == pytest.approx(milliseconds, rel=0.05), name
