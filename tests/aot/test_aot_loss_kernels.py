"""The kernels of the linear cross-entropy compile for an H100."""

import functools

import jax.numpy as jnp
import pytest

from aot.harness import Case, Program
from aot.loss_shapes import MIB, assert_runs_well, floats, labels_of
from pallas_kernels.loss.mosaic_gpu import products
from pallas_kernels.loss.mosaic_gpu.logits import LINE, loss_of_logits
from pallas_kernels.loss.mosaic_gpu.statistics import linear_statistics
from pallas_kernels.loss.token_loss import LossOptions

BF16 = jnp.bfloat16
OPTIONS = LossOptions(label_smoothing=0.0, z_loss=0.0, logit_softcap=None)

each_chip = pytest.mark.parametrize("chip", ["h100"])


# The kernel over logits in memory.

LOGITS_TOKENS = 2048


def loss_and_gradient(logits, labels, coefficients, *, num_columns):
    return loss_of_logits(
        logits, labels, OPTIONS, num_columns=num_columns, coefficients=coefficients
    )


def loss_only(logits, labels, *, num_columns):
    return loss_of_logits(logits, labels, OPTIONS, num_columns=num_columns)[0]


def gradient_only(logits, labels, coefficients, lse, *, num_columns):
    return loss_of_logits(
        logits, labels, OPTIONS, num_columns=num_columns, coefficients=coefficients, lse=lse
    )[1]


def logits_cases() -> dict[str, Case]:
    """Cases that the whole losses do not have: a padded vocabulary, and each half by itself.

    A case takes 10 seconds of a core. A half reads each row once, however long it is.
    """
    cases = {}
    t, row = LOGITS_TOKENS, floats(LOGITS_TOKENS)
    for function, rows, vocabularies in (
        (loss_and_gradient, (row,), (32001, 151936)),
        (loss_only, (), (256001,)),
        (gradient_only, (row, row), (256001,)),
    ):
        for vocab in vocabularies:
            logits = floats(t, vocab + -vocab % LINE, dtype=BF16)
            donated = None if function is loss_only else 0
            of_columns = functools.partial(function, num_columns=vocab)
            args = (logits, labels_of(t), *rows)
            cases[f"{function.__name__}-{vocab}"] = Case(of_columns, args, donated=donated)
    return cases


LOGITS_CASES = logits_cases()


@pytest.mark.parametrize(
    "chip, case",
    [("b200", "loss_and_gradient-32001"), *(("h100", name) for name in LOGITS_CASES)],
)
def test_kernel_over_logits(compiled, chip, case):
    """Blackwell runs this kernel of the loss alone. 3 s there."""
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s", *program.kernels, sep="\n")
    (kernel,) = program.kernels
    assert_runs_well(kernel, chip)
    # All logits go through TMA. Lanes load and store only single numbers of a row.
    assert kernel.tma_loads > 0 and (kernel.tma_stores > 0) == ("gradient" in case)
    assert set(kernel.loads) | set(kernel.stores) <= {2, 4}, kernel
    # XLA copies nothing: the gradient is where the logits were.
    moves = {"parameter", "bitcast", "get-tuple-element", "tuple", "custom-call"}
    assert {part.opcode for part in program.instructions.values()} <= moves
    assert program.temp_bytes < MIB


def gradient_of_a_slice(logits, labels, coefficients):
    rows = slice(100, 600)
    return loss_of_logits(
        logits[rows],
        labels[rows],
        OPTIONS,
        num_columns=logits.shape[1],
        coefficients=coefficients[rows],
    )


SLICE_CASES = {
    "slice": Case(
        gradient_of_a_slice,
        (floats(LOGITS_TOKENS, 32000, dtype=BF16), labels_of(LOGITS_TOKENS), floats(LOGITS_TOKENS)),
    )
}


@each_chip
@pytest.mark.parametrize("case", SLICE_CASES)
def test_no_slice_is_fused_with_the_kernel(compiled, chip, case):
    """In a fusion XLA would not know that the kernel's result is where its operand was."""
    program: Program = compiled(chip, case)
    assert sum(part.is_kernel for part in program.instructions.values()) == 1


# The GEMM that stores statistics in the place of logits.

STATISTICS_SHAPES = [(8192, 4096, 128256), (16384, 2048, 128256)]
# The options are a bias, a softcap and the sum of the logits, which label smoothing needs.
STATISTICS_CASES = {
    f"statistics-{t}x{d}x{v}{'-options' * options}": Case(
        lambda x, weight, bias, labels, options=options: linear_statistics(
            x,
            weight,
            bias if options else None,
            labels,
            softcap=30.0 if options else None,
            with_total=options,
        ),
        (floats(t, d, dtype=BF16), floats(v, d, dtype=BF16), floats(v), labels_of(t)),
    )
    for t, d, v in STATISTICS_SHAPES
    for options in (False, True)
}


# The second shape differs in sizes alone.
@each_chip
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.full if "-16384x" in case else ())
        for case in STATISTICS_CASES
    ],
)
def test_linear_statistics(compiled, chip, case):
    program: Program = compiled(chip, case)
    print(f"{program.seconds:.1f} s, {program.temp_bytes / MIB:.1f} MiB", *program.kernels)
    (kernel,) = program.kernels
    assert_runs_well(kernel)
    assert kernel.tma_loads > 0
    # Five numbers of each token in 132 parts are 41 MiB for 16384 tokens.
    assert program.temp_bytes <= 48 * MIB


# A product whose result is narrower than its tiles: dx or dweight at D = 64.

NARROW_CASES = {
    "narrow": Case(
        functools.partial(products.product, a_layout="KM", dtype=BF16),
        (floats(64, 128, dtype=BF16), floats(64, 64, dtype=BF16)),
    )
}


@each_chip
@pytest.mark.parametrize("case", NARROW_CASES)
def test_nothing_is_stored_past_a_single_block_of_columns(compiled, chip, case):
    """Mosaic leaves the number of a single block out, so such a store would overwrite the block."""
    (kernel,) = compiled(chip, case).kernels
    assert kernel.tma_stores == 1  # a tile has two blocks


CASES = {**LOGITS_CASES, **SLICE_CASES, **STATISTICS_CASES, **NARROW_CASES}
