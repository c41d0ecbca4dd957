"""The linear cross-entropy compiles for an H100: the programs that XLA makes of whole losses."""

import dataclasses
import functools
import math
import re
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from aot.harness import CHIPS, Case, Program
from aot.loss_shapes import MIB, assert_runs_well, floats, labels_of
from benchmarks.training.schedule import Schedule
from pallas_kernels import LossPlan, linear_cross_entropy, linear_cross_entropy_plan
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss import plan as plan_module
from pallas_kernels.loss.mosaic_gpu import products

BF16 = jnp.bfloat16
# With a GPU XLA measures which GEMM is the fastest. Without one it takes Triton's by default. The
# calls of cuBLAS show what they add and where they write.
CUBLAS = {"xla_gpu_enable_triton_gemm": False}

each_chip = pytest.mark.parametrize("chip", ["h100"])


def oldest(case: str, *marks: Any) -> Any:
    """A case whose kernels other cases have, so that the oldest JAX is enough."""
    return pytest.param(case, marks=(pytest.mark.oldest, *marks))


def full(case: str) -> Any:
    """A case whose kernels and conditions other cases of the normal run have."""
    return pytest.param(case, marks=pytest.mark.full)


def plan_for_h100(loss: "Loss") -> LossPlan:
    """The plan of a loss with gradients, as `Loss.with_gradients` has it."""
    x, weight, labels = loss.arguments(jnp.float32)
    chip = CHIPS["h100"]
    device = Device(chip.device_kind, chip.compute_capability, chip.limits.num_sms)
    with (
        mock.patch.object(plan_module, "target_device", lambda: device),
        mock.patch.object(products, "target_device", lambda: device),
    ):
        return linear_cross_entropy_plan(x, weight, labels, implementation="mosaic_gpu")


# Whole losses.


@dataclasses.dataclass(frozen=True)
class Loss:
    """A float32 gradient of a bfloat16 weight, as `linear_cross_entropy` documents it."""

    tokens: int
    hidden: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}x{self.vocab}"

    def arguments(self, weight_dtype: Any = BF16, weight_layout: str = "vd") -> tuple[Any, ...]:
        x = floats(self.tokens, self.hidden, dtype=BF16)
        shape = self.vocab, self.hidden
        weight = floats(*(shape if weight_layout == "vd" else shape[::-1]), dtype=weight_dtype)
        return x, weight, labels_of(self.tokens)

    def alone(self) -> Case:
        loss = functools.partial(linear_cross_entropy, implementation="mosaic_gpu")
        return Case(loss, self.arguments())

    def with_gradients(
        self, weight_dtype: Any = BF16, compiler_options: Any = CUBLAS, **options
    ) -> Case:
        def run(x, weight, labels):
            loss = lambda x, weight: linear_cross_entropy(
                x, weight, labels, implementation="mosaic_gpu", **options
            )
            return jax.value_and_grad(loss, argnums=(0, 1))(x, weight.astype(jnp.float32))

        arguments = self.arguments(weight_dtype, options.get("weight_layout", "vd"))
        return Case(run, arguments, compiler_options=compiler_options)


@dataclasses.dataclass(frozen=True)
class Expected:
    """The program of a loss with its gradients.

    Attributes:
      num_chunks: Number of chunks of tokens whose share of `dweight` is added.
      num_bands: Number of bands of `dweight`, in a loop. A loop of two steps goes over the copies.
      mib: MiB beside arguments and results.
    """

    num_chunks: int
    num_bands: int
    mib: int


def losses_with_gradients(x, weight, labels, cotangents):
    """The losses of tokens, with gradients for any cotangents."""
    loss = functools.partial(linear_cross_entropy, reduction="none", implementation="mosaic_gpu")
    fn = lambda x, weight: loss(x, weight, labels)
    losses, vjp = jax.vjp(fn, x, weight.astype(jnp.float32))
    return losses, vjp(cotangents)


LOSSES = {
    Loss(8192, 4096, 128256): Expected(0, 29, 160),
    Loss(8192, 4096, 32000): Expected(0, 5, 160),
    Loss(32768, 4096, 128256): Expected(12, 29, 640),
    Loss(8192, 2304, 256000): Expected(4, 44, 640),
    Loss(8192, 3584, 152064): Expected(0, 41, 480),
    Loss(4096, 8192, 128256): Expected(0, 49, 160),
}
SMALLEST = Loss(8192, 4096, 128256)
# The others differ from them in sizes alone. Tiles of D = 2304 are narrower, and its tokens come in
# chunks.
NORMAL = {"gradients": (SMALLEST, Loss(8192, 2304, 256000)), "loss": (SMALLEST,)}
GRADIENTS, ALONE = (
    [
        pytest.param(f"{kind}-{loss}", marks=() if loss in normal else pytest.mark.full)
        for loss in LOSSES
    ]
    for kind, normal in NORMAL.items()
)
ODD = Loss(8192, 4096, 32001)
ON_A_MESH = Loss(8 * 2048, 2048, 32000)

CASES = {
    **{f"loss-{loss}": loss.alone() for loss in LOSSES},
    **{f"gradients-{loss}": loss.with_gradients() for loss in LOSSES},
    "by-chunks": SMALLEST.with_gradients(chunk_size=2048),
    "small-bands": SMALLEST.with_gradients(max_logits_bytes=32 * MIB),
    "small-bands-by-default": SMALLEST.with_gradients(
        max_logits_bytes=32 * MIB, compiler_options={}
    ),
    "bfloat16-in-place": Case(
        jax.value_and_grad(
            functools.partial(linear_cross_entropy, implementation="mosaic_gpu"), argnums=(0, 1)
        ),
        Loss(4096, 4096, 128256).arguments(),
    ),
    "none": Case(
        losses_with_gradients,
        (*SMALLEST.arguments(), floats(SMALLEST.tokens)),
        compiler_options=CUBLAS,
    ),
    "by-columns": Case(
        jax.value_and_grad(
            functools.partial(
                linear_cross_entropy, implementation="mosaic_gpu", vocab_chunk_size=2048
            ),
            argnums=(0, 1),
        ),
        SMALLEST.arguments(),
        compiler_options=CUBLAS,
    ),
    "dv-bfloat16": SMALLEST.with_gradients(weight_layout="dv", compiler_options={}),
    "dv-float32": SMALLEST.with_gradients(jnp.float32, weight_layout="dv"),
    "by-columns-float32": SMALLEST.with_gradients(jnp.float32, vocab_chunk_size=2048),
    "odd-vocabulary": ODD.with_gradients(),
    "counted": SMALLEST.with_gradients(counted_fraction=0.5),
    "counted-on-a-mesh": dataclasses.replace(
        ON_A_MESH.with_gradients(counted_fraction=0.5),
        mesh={"data": 8},
        specs=(P("data"), P(), P("data")),
    ),
}


@dataclasses.dataclass(frozen=True)
class Gemm:
    """A matrix product in a program.

    Attributes:
      shape: Shape of its result.
      adds: Whether it adds to an array in place.
    """

    shape: tuple[int, ...]
    adds: bool


def sizes(dims: str) -> tuple[int, ...]:
    return tuple(int(size) for size in dims.split(",") if size)


def gemms(program: Program) -> list[Gemm]:
    found = []
    for line in program.hlo.splitlines():
        if "__cublas" in line:
            beta = re.search(r'"beta":(\d)', line)
            dims = re.search(r" = \(?\w+\[([\d,]*)\]", line)
            assert beta and dims, line
            adds = beta[1] == "1"
            in_place = "output_to_operand_aliasing={{0}: (2, {})}" in line
            assert adds == in_place, line
            found.append(Gemm(sizes(dims[1]), adds))
    return found


def makers(program: Program, shape: tuple[int, ...]) -> set[str]:
    """Opcodes of the instructions, also inside of fusions, whose result is of this shape."""
    dims = ",".join(map(str, shape))
    return set(re.findall(rf"^  (?:ROOT )?%\S+ = \w+\[{dims}\]\S* ([\w-]+)\(", program.hlo, re.M))


# Instructions that make no new array. A fusion makes what the instructions in it make.
MAKES_NOTHING = {"parameter", "get-tuple-element", "bitcast", "fusion"}


def names_of(program: Program) -> set[str]:
    return {kernel.name for kernel in program.kernels}


def loops(program: Program) -> list[int]:
    return [int(n) for n in re.findall(r'"known_trip_count":\{"n":"(\d+)"', program.hlo)]


# The GEMM that stores exponentials, and its repetition in place.
EXPONENTIALS = {"linear_exponentials", "linear_exponentials_again"}
IN_PLACE = EXPONENTIALS | {"input_gradient", "weight_gradient_rows"}


def assert_nothing_runs_beside(program: Program) -> None:
    """Asserts that nothing outside of loops is asynchronous.

    XLA orders a program so that other work runs beside an asynchronous instruction, and then more
    arrays are alive at a time: 2.1 to 3.6 GiB more in the step of a Llama of 1B.
    """
    _, entry = program.hlo.split("\nENTRY ")
    assert "-start(" not in entry


def assert_in_place(
    program: Program, weight_shape: tuple[int, int], *, of_weight: frozenset[str] = frozenset()
) -> None:
    """Asserts that nothing copies an array of this size, nor the exponentials in it.

    In the loop over bands a kernel reads exponentials from the array that it writes to.

    Args:
      program: Program of a loss with gradients.
      weight_shape: Shape of the weight and of its gradient.
      of_weight: Opcodes that make the weight itself.
    """
    v, d = weight_shape
    makes = makers(program, (v, d)) - MAKES_NOTHING
    assert makes <= {"dynamic-update-slice", "custom-call"} | of_weight
    assert "copy" not in makers(program, (v, 2 * d))
    assert_nothing_runs_beside(program)
    fused = re.findall(r"^%dynamic-slice-fusion\S* .*?^}", program.hlo, re.M | re.S)
    both = [body for body in fused if "mosaic_gpu" in body and " dynamic-slice(" in body]
    both = [body for body in both if "ROOT" in body and " dynamic-update-slice(" in body]
    assert any(len(re.findall(rf"= f32\[{v},{d}\]\S* parameter", body)) == 1 for body in both)


@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", GRADIENTS)
def test_loss_with_gradients(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB", *program.kernels)
    loss, expected = next((k, n) for k, n in LOSSES.items() if case == f"gradients-{k}")
    assert program.temp_bytes <= expected.mib * MIB
    for kernel in program.kernels:
        assert_runs_well(kernel)
        assert kernel.tma_loads > 0 and kernel.tma_stores > 0
    assert names_of(program) == IN_PLACE
    weight_shape = (loss.vocab, loss.hidden)
    assert_in_place(program, weight_shape)
    chunk_loop = [expected.num_chunks] if expected.num_chunks else []
    assert sorted(loops(program)) == sorted([expected.num_bands, 2, *chunk_loop])
    # XLA makes the GEMMs of the chunks: dx, and the sum of dweight.
    found = gemms(program)
    of_weight = [gemm for gemm in found if gemm.shape == weight_shape]
    assert len(found) == (2 if expected.num_chunks else 0)
    assert [gemm.adds for gemm in of_weight] == [True] * (len(found) // 2)
    # All other arrays fit the logits of a chunk.
    shapes = {sizes(dims) for dims in re.findall(r"\w\[([\d,]+)\]", program.hlo)}
    of_weight = {weight_shape, (loss.vocab, 2 * loss.hidden), (*weight_shape, 2)}
    assert all(math.prod(s) <= 512 * MIB // 2 for s in shapes - of_weight)


@each_chip
@pytest.mark.parametrize(
    "case", ["small-bands", oldest("small-bands-by-default", pytest.mark.full)]
)
def test_small_bands(compiled, chip, case):
    """Where all tokens fit in place, the limit on logits bounds the copied exponentials."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB")
    t, d, v = SMALLEST.tokens, SMALLEST.hidden, SMALLEST.vocab
    # Exponentials of 1280 columns, and x times its factors.
    assert program.temp_bytes <= 2 * t * 1280 + 2 * t * d + MIB
    for kernel in program.kernels:
        assert_runs_well(kernel)
    assert names_of(program) == IN_PLACE
    assert sorted(loops(program)) == [2, 124]
    assert_in_place(program, (v, d))


@each_chip
@pytest.mark.parametrize("case", ["bfloat16-in-place"])
def test_bfloat16_in_place(compiled, chip, case):
    """4096 tokens fit a gradient of 16 bits, and the program has no gradient of 32 bits."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB")
    assert program.temp_bytes <= 160 * MIB
    for kernel in program.kernels:
        assert_runs_well(kernel)
    assert names_of(program) == IN_PLACE
    assert "f32[128256,4096]" not in program.hlo


@each_chip
@pytest.mark.oldest  # "gradients" of test_aot_log_probs.py has its kernels and conditions
@pytest.mark.parametrize("case", [full("none")])
def test_losses_that_are_not_added_up(compiled, chip, case):
    """The backward makes dlogits from the logsumexp, once and in place."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB")
    assert program.temp_bytes <= 160 * MIB
    names = {"linear_statistics", "linear_exponentials", "input_gradient", "weight_gradient_rows"}
    assert names_of(program) == names
    assert sorted(loops(program)) == [2, 29]
    assert_in_place(program, (SMALLEST.vocab, SMALLEST.hidden))


@each_chip
@pytest.mark.parametrize("case", ["dv-bfloat16", oldest("dv-float32", pytest.mark.full)])
def test_a_weight_of_columns(compiled, chip, case):
    """Neither a weight `[D, V]` nor its gradient has a copy, transposed or not."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB", *program.kernels)
    d, v = SMALLEST.hidden, SMALLEST.vocab
    # A float32 weight is rounded once for the products.
    rounded = 2 * d * v if case == "dv-float32" else 0
    assert program.temp_bytes <= 160 * MIB + rounded
    for kernel in program.kernels:
        assert_runs_well(kernel)
        assert kernel.tma_loads > 0 and kernel.tma_stores > 0
    assert names_of(program) == EXPONENTIALS | {"input_gradient", "weight_gradient_columns"}
    assert not makers(program, (v, d))
    makes = makers(program, (d, v)) - MAKES_NOTHING
    assert makes <= {"custom-call", *(["convert"] if rounded else [])}
    # The label's entries go into the exponentials, which are in the memory of the gradient.
    assert makers(program, (d, 2 * v)) - MAKES_NOTHING == {"scatter"}
    assert_nothing_runs_beside(program)
    assert loops(program) == [24]


@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", ["odd-vocabulary"])
def test_a_vocabulary_that_is_no_multiple_of_a_block(compiled, chip, case):
    """Rows of zeros follow the weight and its gradient."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB")
    v, d = ODD.vocab + -ODD.vocab % 128, ODD.hidden
    # The gradient with these rows, and the memory of a vocabulary of whole blocks.
    assert program.temp_bytes <= 4 * v * d + 160 * MIB
    assert names_of(program) == IN_PLACE
    assert sorted(loops(program)) == [2, 5]
    assert_in_place(program, (v, d), of_weight=frozenset({"pad"}))


@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", ["counted"])
def test_rows_of_the_tokens_that_count(compiled, chip, case):
    """The programs of few rows and of all of them share their memory."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB")
    assert program.temp_bytes <= 160 * MIB
    assert names_of(program) == IN_PLACE
    # A loop over bands and one over copies, in each program.
    assert sorted(loops(program)) == [2, 2, 29, 29]
    assert_in_place(
        program, (SMALLEST.vocab, SMALLEST.hidden), of_weight=frozenset({"conditional"})
    )


@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", ["counted-on-a-mesh"])
def test_rows_of_the_tokens_that_count_on_a_mesh(compiled, chip, case):
    """Each device has rows of its own tokens, and exchanges the loss and `dweight` alone."""
    program: Program = compiled(chip, case)
    assert names_of(program) == EXPONENTIALS  # one chunk of 2048 tokens
    exchanged = Schedule(program.hlo).collectives()
    assert {collective.kind for collective in exchanged} == {"all-reduce"}
    entries = sum(math.prod(shape) for collective in exchanged for shape in collective.results)
    of_weight = ON_A_MESH.vocab * ON_A_MESH.hidden
    assert of_weight <= entries <= of_weight + 4


@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", ["by-chunks"])
def test_by_token_chunks(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB")
    assert program.temp_bytes <= 640 * MIB
    assert_nothing_runs_beside(program)
    assert names_of(program) == EXPONENTIALS
    # No kernel is in a fusion; test_aot_loss_kernels.py says why.
    assert sum(part.is_kernel for part in program.instructions.values()) == 4
    # XLA makes two GEMMs for the first chunk, and two in the loop over the others.
    weight_shape = (SMALLEST.vocab, SMALLEST.hidden)
    found = gemms(program)
    assert len(found) == 4
    of_weight = [gemm for gemm in found if gemm.shape == weight_shape]
    assert sorted(gemm.adds for gemm in of_weight) == [False, True]
    assert loops(program) == [3]
    # Nothing else makes an array of the weight's size: no cast, and no copy or sum of the gradient.
    assert makers(program, weight_shape) <= MAKES_NOTHING


@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", ALONE)
def test_loss_alone(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB")
    loss = next(k for k in LOSSES if case == f"loss-{k}")
    # 4 statistics of each of 132 parts: 17 MiB for 8192 tokens.
    assert program.temp_bytes <= loss.tokens * (4 * 4 * 132 + 96)
    assert {kernel.name for kernel in program.kernels} == {"linear_statistics"}
    assert not makers(program, (loss.vocab, loss.hidden)) - MAKES_NOTHING


# test_aot_slices.py has the kernels of a bfloat16 weight, and finds them in place.
@each_chip
@pytest.mark.parametrize("case", [full("by-columns"), oldest("by-columns-float32")])
def test_by_column_chunks(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB")
    # dx in float32, the logits of 2048 columns, and 4 MiB of their statistics.
    t, d = SMALLEST.tokens, SMALLEST.hidden
    assert program.temp_bytes <= 4 * t * d + 2 * t * 2048 + 5 * MIB
    assert names_of(program) == {"linear_exponentials", "linear_statistics", "weight_gradient"}
    for kernel in program.kernels:
        assert_runs_well(kernel)
    # Slices of dweight are written into zeros, in place. A float32 weight is rounded in slices: a
    # rounded copy of the whole weight would exceed the memory above.
    makes = makers(program, (SMALLEST.vocab, d)) - MAKES_NOTHING
    assert makes <= {"pad", "broadcast", "dynamic-update-slice", "convert", "custom-call"}
    # In the loop over columns a kernel writes its result to its place in dweight.
    fused = re.findall(r"^%dynamic-slice-fusion\S* .*?^}", program.hlo, re.M | re.S)
    assert any("mosaic_gpu" in body and " dynamic-update-slice(" in body for body in fused)


@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", GRADIENTS)
def test_the_plan_says_what_memory_the_program_takes(compiled, chip, case):
    program: Program = compiled(chip, case)
    loss = next(k for k in LOSSES if case == f"gradients-{k}")
    plan = plan_for_h100(loss)
    print(f"{program.temp_bytes / MIB:.1f} MiB", plan)
    assert (plan.name, plan.num_products) == ("in place", 3)
    # Beside exponentials there are `x` times its factors, and a few numbers a token and cluster.
    beside = loss.tokens * (2 * loss.hidden + 20 * 66 + 400)
    assert plan.logits_bytes <= program.temp_bytes <= plan.logits_bytes + beside
