"""Collectives of training steps in which devices share sequences, for four and eight H100s."""

import functools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from aot.harness import missing_toolchain
from benchmarks.training.schedule import Collective, Schedule
from train.planner import aot

pytestmark = pytest.mark.oldest
ROOT = pathlib.Path(__file__).parents[2]
L, D, F, S, V = 2, 2048, 8192, 2048, 128256
ROWS = 8  # rows of each share of the batch
T = ROWS * S
# Sizes of fsdp and tensor, and flags. With so many tokens the loss makes logits in chunks.
CASES = {
    "unrolled": (1, 4, "--model.no-scan-layers"),
    "scanned": (2, 2, "--model.scan-layers"),
    "fp8": (4, 2, "--model.scan-layers --model.fp8=tensorwise"),  # 30 s
    "fp8 by row": (4, 2, "--model.no-scan-layers --model.fp8=rowwise"),  # 30 s
}
# On a device of two, columns of q with k and v, of o's input, and of the MLP.
QKV, HEADS, COLUMNS = (D + 2 * 512) // 2, D // 2, F // 2
# Numbers of maxima that the devices of `fsdp` exchange for the four weights of each layer: one a
# weight, or one for each of the columns that `fsdp` splits, or rows of down.
MAXIMA = {"fp8": 4 * L, "fp8 by row": (QKV + 3 * COLUMNS) * L}
# "fp8 by row" has its conditions. test_aot_fp8.py has one scale a tensor on a mesh, and
# test_aot_fp8_llama.py in a loop over layers.
FULL = {"fp8"}
# Each case runs in a process of its own, because JAX must not look for a GPU.
SCRIPT = """
import json, sys
from models.sharding import make_mesh
from tests.aot.harness import without_binaries
from train.planner import aot
from train.cli.command_line import parse_command_line
from train.planner.plan import Programs
from train.planner.target import target_elsewhere

config = parse_command_line(sys.argv[1:])
fsdp, tensor, chip = config.mesh.fsdp, config.mesh.tensor, aot.CHIPS["h100"]
mesh = make_mesh(data=1, fsdp=fsdp, tensor=tensor, devices=aot.devices(chip, fsdp * tensor))
compiled = Programs(target_elsewhere(chip, mesh)).compile(config)
print(json.dumps(without_binaries(compiled.as_text())))
"""


def compile_case(name: str) -> str:
    """The optimized program, in the order in which it runs."""
    fsdp, tensor, flags = CASES[name]
    flags = [
        *("--preset", "llama3.2-1b", "--model.no-tie-word-embeddings", *flags.split()),
        *(f"--model.num-hidden-layers={L}", f"--model.vocab-size={V}", "--model.remat=minimal"),
        *(f"--mesh.fsdp={fsdp}", f"--mesh.tensor={tensor}"),
        *(f"--data.batch-size={ROWS * fsdp}", f"--data.sequence-length={S}"),
    ]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, *flags],
        cwd=ROOT,
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(process.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def programs(request):
    """Text of each case that a selected test reads."""
    if reason := missing_toolchain() or aot.missing_toolchain():
        # `make test-aot` installs it, and must not pass if nothing was checked.
        (pytest.fail if "AOT_REQUIRED" in os.environ else pytest.skip)(str(reason))
    cases = {
        str(item.callspec.params["case"]): None
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    }
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return dict(zip(cases, pool.map(compile_case, cases), strict=True))


def each(cases: Iterable[str]) -> pytest.MarkDecorator:
    """The mark of a test of these cases."""
    return pytest.mark.parametrize(
        "case", [pytest.param(c, marks=pytest.mark.full if c in FULL else ()) for c in cases]
    )


@functools.cache
def collectives(hlo: str) -> list[Collective]:
    return Schedule(hlo).collectives()


def of_tokens(hlo: str, tensor: int) -> Counter[str]:
    """How often a step gathers all tokens, and splits sums over them."""
    wanted = {("all-gather", (T, D)), ("reduce-scatter", (T // tensor, D))}
    found: Counter[str] = Counter()
    for collective in collectives(hlo):
        for shape in collective.results:
            if (collective.kind, tuple(size for size in shape if size > 1)) in wanted:
                found[collective.kind] += collective.times
    return found


@each(CASES)
def test_a_sublayer_gathers_tokens_once_and_scatters_their_sums_once(programs, case):
    fsdp, tensor, _ = CASES[case]
    forward = backward = Counter({"all-gather": 2 * L, "reduce-scatter": 2 * L})
    # Of inputs that are kept in parts. In FP8 they are kept whole.
    again = Counter({} if case in MAXIMA else {"all-gather": 2 * L})
    loss = Counter({"all-gather": 1, "reduce-scatter": 1})  # forward and backward
    # The backward gathers and the forward sums. With `fsdp` the arrays have the tokens of all of
    # its devices, split by channels.
    embeddings = Counter({} if fsdp > 1 else {"all-gather": 1, "reduce-scatter": 1})
    found = of_tokens(programs[case], tensor)
    assert found == forward + backward + again + loss + embeddings


@each(CASES)
def test_no_activations_are_summed_on_all_devices(programs, case):
    """All-reduces sum only gradients of norms, and scalars, and find maxima of weights."""
    sizes = [
        collective.times * sum(map(math.prod, collective.results))
        for collective in collectives(programs[case])
        if collective.kind == "all-reduce"
    ]
    least = (2 * L + 1) * D + MAXIMA.get(case, 0)
    assert least <= sum(sizes) < least + 64


@each(CASES)
def test_the_loss_gathers_statistics_in_its_loop_and_no_weight(programs, case):
    fsdp, tensor, _ = CASES[case]
    found = collectives(programs[case])
    loops = {
        collective.computation
        for collective in found
        for shape in collective.results
        if shape[:2] == (5, tensor) and collective.times > 1
    }
    (loop,) = loops
    (inside,) = (collective for collective in found if collective.computation == loop)
    assert inside.kind == "all-gather" and len(inside.results) == 1
    of_weight = [  # transposed or not
        collective.times
        for collective in found
        if collective.kind == "all-gather" and V // tensor * D in map(math.prod, collective.results)
    ]
    assert of_weight == ([1] if fsdp > 1 else [])


@pytest.mark.parametrize("case", ["scanned"])
def test_the_residual_stream_is_kept_in_parts(programs, case):
    """The loop over layers of the forward keeps the inputs of both halves, normed and not."""
    _, tensor, _ = CASES[case]
    (carried, *_) = re.findall(r"= \((.*)\) while\(", programs[case].partition("\nENTRY")[2])
    kept = Counter(
        tuple(map(int, dims.split(","))) for dims in re.findall(r"bf16\[([\d,]+)\]", carried)
    )
    assert kept[L, T // tensor, D] == 4
    assert kept[L, ROWS, S, F // tensor] == 2  # as large as the whole stream would be
    assert not {(L, T, D), (L, ROWS, S, D)} & kept.keys()


@each(MAXIMA)
def test_weights_in_fp8_are_gathered_in_fp8(programs, case):
    """Forward copies and dgrad copies of all four weights; o is too small for FP8."""
    gathered: dict[str, set[int]] = {"f8e4m3fn": set(), "bf16": set()}
    for line in programs[case].splitlines():
        if match := re.search(r"= (.*) all-gather-start\(", line):
            results = match[1].rpartition(", (")[2] if "), (" in match[1] else match[1]
            for kind, dims in re.findall(r"(f8e4m3fn|bf16)\[([\d,]+)\]", results):
                gathered[kind].add(math.prod(map(int, dims.split(","))))
    assert gathered["f8e4m3fn"] >= {QKV * D, COLUMNS * D}
    assert not gathered["bf16"] & {QKV * D, COLUMNS * D}
    assert HEADS * D in gathered["bf16"]


@each(MAXIMA)
def test_products_are_in_fp8(programs, case):
    """Kernels make what products with weights in FP8 have as results, and other GEMMs do not."""
    wanted = {(T, QKV), (D, QKV), (T, COLUMNS), (D, COLUMNS)}  # of forward or dgrad, and of wgrad
    shapes = lambda call: {
        (int(a), int(b))
        for a, b in re.findall(rf"= \(?bf16\[(\d+),(\d+)\].* {call}", programs[case])
    }
    assert shapes(r'custom-call\(.*custom_call_target="mosaic_gpu') >= wanted
    others = shapes(r"dot\(") | shapes(r'custom-call\(.*custom_call_target="__cublas')
    assert (T, D) in others  # o is too small for FP8
    assert not others & wanted


@each(MAXIMA)
def test_scales_take_one_exchange_a_step(programs, case):
    """The maxima of the weights of all layers."""
    sizes = [
        math.prod(collective.results[0])
        for collective in collectives(programs[case])
        if collective.kind == "all-reduce"
    ]
    assert sizes.count(MAXIMA[case]) == 1
