"""Steps with preferences and with a teacher, compiled for eight H100s that share parameters."""

import dataclasses
import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from aot.harness import missing_toolchain
from benchmarks.training.schedule import Schedule
from models.hf_config import config_to_hf
from models.presets import PRESETS
from train.planner import aot

pytestmark = pytest.mark.oldest
ROOT = pathlib.Path(__file__).parents[2]
L, D, F, S, V, DEVICES, ROWS = 2, 1024, 3072, 2048, 40960, 8, 4
T, OF_TEACHER = ROWS * S, 1536  # tokens of a device, hidden size of the teacher
CASES = {
    "dpo": "--objective=dpo --data.path=pairs.jsonl --counted-fraction=0.5 "
    "--model.no-tie-word-embeddings",
    "distill": "--objective=distill --distill.teacher={teacher} --distill.label-weight=0.5 "
    "--model.tie-word-embeddings",
}
# Each case runs in a process of its own, because JAX must not look for a GPU.
SCRIPT = """
import json, sys
from models.sharding import make_mesh
from tests.aot.harness import without_binaries
from train.planner import aot
from train.cli.command_line import parse_command_line
from train.planner.plan import Programs
from train.planner.target import target_elsewhere
from train.step import memory_in_bytes

config, chip = parse_command_line(sys.argv[1:]), aot.CHIPS["h100"]
mesh = make_mesh(data=1, fsdp=config.mesh.fsdp, devices=aot.devices(chip, config.mesh.fsdp))
programs = Programs(target_elsewhere(chip, mesh))
estimated = programs.estimate(config)[1]
compiled = programs.compile(config)
text = without_binaries(compiled.as_text())
print(json.dumps([text, estimated, memory_in_bytes(compiled)]))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Text, estimated memory and compiled memory of each case. 40 s on two cores."""
    if reason := missing_toolchain() or aot.missing_toolchain():
        (pytest.fail if "AOT_REQUIRED" in os.environ else pytest.skip)(str(reason))
    teacher = tmp_path_factory.mktemp("teacher")
    model = PRESETS["llama3.2-1b"]
    model = dataclasses.replace(model, hidden_size=OF_TEACHER, num_attention_heads=24, vocab_size=V)
    model = dataclasses.replace(model, num_hidden_layers=L, tie_word_embeddings=False)
    (teacher / "config.json").write_text(json.dumps(config_to_hf(model)))

    def compile_case(name):
        flags = [
            *("--preset", "llama3.2-1b", "--model.scan-layers"),
            *(f"--model.num-hidden-layers={L}", f"--model.vocab-size={V}"),
            *(f"--model.hidden-size={D}", f"--model.intermediate-size={F}"),
            *(f"--mesh.fsdp={DEVICES}", f"--data.batch-size={ROWS * DEVICES}"),
            *(f"--data.sequence-length={S}", "--model.remat=minimal"),
            *CASES[name].format(teacher=teacher).split(),
        ]
        process = subprocess.run(
            [sys.executable, "-c", SCRIPT, *flags],
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert process.returncode == 0, process.stderr[-4000:]
        return json.loads(process.stdout.splitlines()[-1])

    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return dict(zip(CASES, pool.map(compile_case, CASES), strict=True))


@functools.cache
def collectives(hlo: str) -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter(
        {
            (one.kind, tuple(shape)): one.times
            for one in Schedule(hlo).collectives()
            for shape in one.results
        }
    )


@pytest.mark.parametrize("case", CASES)
def test_no_logits_are_exchanged_or_kept(programs, case):
    hlo, _, _ = programs[case]
    assert "mosaic_gpu" in hlo
    largest = max(math.prod(shape) for _, shape in collectives(hlo))
    assert largest <= V * max(D, OF_TEACHER if case == "distill" else 0)
    shapes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"\[(\d+(?:,\d+)+)\]", hlo)}
    # The embeddings have an axis of hidden sizes, whole or split.
    hidden = {size // share for size in (D, OF_TEACHER) for share in (1, DEVICES)}
    of_logits = {shape for shape in shapes if V in shape and not hidden & {*shape}}
    most = max(math.prod(shape) // V for shape in of_logits)
    assert 128 <= most < T, of_logits  # a chunk of tokens


@pytest.mark.parametrize("case", CASES)
def test_the_stacks_of_a_loop_over_layers_are_split_and_not_filled(programs, case):
    hlo, _, _ = programs[case]
    found = re.findall(r"= \w+\[([\d,]+)\]\S* custom-call\(\S*\), custom_call_target=\"Alloc", hlo)
    stacks = {tuple(map(int, dims.split(","))) for dims in found}
    assert {(L, ROWS, S, D), (L, D // DEVICES, F), (L, F, D // DEVICES)} <= stacks
    largest = max(L * ROWS * S * F, L * D * F // DEVICES)
    assert max(map(math.prod, stacks)) <= largest
    filled = re.findall(r"= \w+\[([\d,]+)\]\S* fusion\(\), kind=kLoop", hlo)
    assert not stacks & {tuple(map(int, dims.split(","))) for dims in filled}


@pytest.mark.parametrize("case", CASES)
def test_tables_have_gradients_in_rows(programs, case):
    """In columns, the optimizer would transpose a table and its moments.

    The table of the student is tied: the gradient of the head is in columns, and transposed once.
    """
    hlo, _, _ = programs[case]
    scattered = re.findall(r"= f32\[([\d,]+\]\{[\d,]+)\S* scatter\(", hlo)
    assert set(scattered) == {f"{V},{D // DEVICES}]{{1,0"}
    transposed = re.findall(r"transpose_fusion\S* = \(f32\[([\d,]+)\]", hlo)
    assert not {str(V), str(V // DEVICES)} & set(",".join(transposed).split(","))
    summed = [shape for kind, shape in collectives(hlo) if kind == "reduce-scatter"]
    head = {shape for shape in summed if math.prod(shape) == V * D // DEVICES}
    assert head == {(V, D // DEVICES) if case == "distill" else (V // DEVICES, D)}


def test_pairs_exchange_a_number_for_each_token(programs):
    """The log-probabilities and the mask of all tokens, and the reference of all rows."""
    found = collectives(programs["dpo"][0])
    gathered = {shape for kind, shape in found if kind == "all-gather"}
    rows = ROWS * DEVICES
    assert gathered >= {(rows, S), (rows,)}


def test_a_teacher_is_gathered_once_and_has_no_gradients(programs):
    hlo = programs["distill"][0]
    found = collectives(hlo)
    of_teacher = {
        (kind, shape): times for (kind, shape), times in found.items() if OF_TEACHER in shape
    }
    assert of_teacher and all(kind == "all-gather" for kind, _ in of_teacher)
    # Gate and up have one shape, and layers run in a loop.
    assert of_teacher["all-gather", (OF_TEACHER, 8192)] == L
    assert not any(
        kind == "reduce-scatter" and shape == (V, OF_TEACHER // DEVICES) for kind, shape in found
    )
    assert f"bf16[{OF_TEACHER},8192]" in hlo and f"f32[{OF_TEACHER},8192]" not in hlo


@pytest.mark.parametrize("case", CASES)
def test_the_planner_estimates_the_memory(programs, case):
    _, estimated, memory = programs[case]
    assert estimated == pytest.approx(memory, rel=0.3)
