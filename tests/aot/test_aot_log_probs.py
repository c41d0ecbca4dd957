"""Log-probabilities compile for an H100: their kernels, memory, and what XLA puts around them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case, Program
from aot.loss_shapes import MIB, assert_runs_well, floats, labels_of
from aot.test_aot_linear_cross_entropy import (
    assert_in_place,
    assert_nothing_runs_beside,
    full,
    makers,
    oldest,
)
from pallas_kernels import linear_log_probs, linear_token_loss

BF16 = jnp.bfloat16
CUBLAS = {"xla_gpu_enable_triton_gemm": False}
each_chip = pytest.mark.parametrize("chip", ["h100"])
_log_probs = functools.partial(linear_log_probs, implementation="mosaic_gpu")


def arguments(tokens: int, hidden: int, vocab: int, layout: str = "vd") -> tuple[Any, ...]:
    shape = (vocab, hidden) if layout == "vd" else (hidden, vocab)
    return (
        floats(tokens, hidden, dtype=BF16),
        floats(*shape, dtype=BF16),
        labels_of(tokens),
        floats(tokens),
        floats(tokens),
    )


def backward(**options: Any) -> Any:
    """Results and gradients for given cotangents; a float32 gradient of a bfloat16 weight."""

    def run(x, weight, labels, g, h):
        fn = lambda x, weight: _log_probs(x, weight, labels, **options)
        results, vjp = jax.vjp(fn, x, weight.astype(jnp.float32))
        return results, vjp((g, h) if options.get("return_entropy") else g)

    return run


def value(**options: Any) -> Any:
    return lambda x, weight, labels, g, h: _log_probs(x, weight, labels, **options)


def token_loss(**options: Any) -> Any:
    """Loss and gradients; a float32 gradient of a bfloat16 weight."""

    def token_fn(log_probs, entropy, data):
        losses = -data[0] * jnp.exp(log_probs)
        losses = losses if entropy is None else losses + data[1] * entropy
        return losses if options.get("per_token") else jnp.sum(losses)

    def run(x, weight, labels, g, h):
        loss = lambda x, weight: linear_token_loss(
            x, weight, labels, token_fn, (g, h), implementation="mosaic_gpu", **options
        )
        return jax.value_and_grad(loss, argnums=(0, 1))(x, weight.astype(jnp.float32))

    return run


SIZES = 8192, 4096, 128256
ENTROPY = {"return_entropy": True, "temperature": 0.7}
CASES = {
    "value": Case(value(), arguments(*SIZES)),
    "value-entropy": Case(value(**ENTROPY), arguments(*SIZES)),
    "value-argmax": Case(value(return_argmax=True), arguments(*SIZES)),
    "value-entropy-argmax": Case(
        value(**ENTROPY, return_argmax=True, logit_softcap=30.0), arguments(*SIZES)
    ),
    "gradients": Case(backward(), arguments(*SIZES), compiler_options=CUBLAS),
    "gradients-entropy": Case(backward(**ENTROPY), arguments(*SIZES), compiler_options=CUBLAS),
    "gradients-softcap": Case(
        backward(**ENTROPY, logit_softcap=30.0), arguments(*SIZES), compiler_options=CUBLAS
    ),
    "gradients-dv": Case(
        backward(**ENTROPY, weight_layout="dv"),
        arguments(*SIZES, layout="dv"),
        compiler_options=CUBLAS,
    ),
    "gradients-kept": Case(
        backward(keep_exponentials=True), arguments(*SIZES), compiler_options=CUBLAS
    ),
    "gradients-kept-entropy": Case(
        backward(**ENTROPY, keep_exponentials=True), arguments(*SIZES), compiler_options=CUBLAS
    ),
    "gradients-long": Case(
        backward(**ENTROPY), arguments(32768, 4096, 128256), compiler_options=CUBLAS
    ),
}

CASES |= {
    "gradients-counted": Case(
        backward(**ENTROPY, counted_fraction=0.5), arguments(*SIZES), compiler_options=CUBLAS
    ),
    "token-loss": Case(token_loss(), arguments(*SIZES), compiler_options=CUBLAS),
    # Half of these tokens is not D, so a pass over it has not the shape of the weight.
    "token-loss-entropy": Case(
        token_loss(with_entropy=True), arguments(6144, *SIZES[1:]), compiler_options=CUBLAS
    ),
    "token-loss-counted": Case(
        token_loss(counted_fraction=0.5), arguments(*SIZES), compiler_options=CUBLAS
    ),
    "single-tokens": Case(
        token_loss(per_token=True), arguments(32768, 4096, 128256), compiler_options=CUBLAS
    ),
    "single-tokens-entropy": Case(
        token_loss(per_token=True, with_entropy=True),
        arguments(32768, 4096, 128256),
        compiler_options=CUBLAS,
    ),
    "token-loss-dv": Case(
        token_loss(with_entropy=True, weight_layout="dv"),
        arguments(*SIZES, layout="dv"),
        compiler_options=CUBLAS,
    ),
}


@each_chip
@pytest.mark.parametrize(
    "case", [full("value"), "value-entropy", full("value-argmax"), "value-entropy-argmax"]
)
def test_values_take_one_kernel_and_no_logits(compiled, chip, case):
    program = compiled(chip, case)
    assert program.calls == {"linear_statistics": 1}
    (kernel,) = program.kernels
    assert_runs_well(kernel)
    # Six numbers of each token in 132 parts are 25 MiB.
    assert program.temp_bytes <= 32 * MIB


# Four products, of which one makes dlogits in the memory of `dweight`. The temporary memory holds
# copies of dlogits (96 MiB at most), and x without the tokens that do not count (64 MiB).
@each_chip
@pytest.mark.parametrize(
    "case", [oldest("gradients"), full("gradients-entropy"), "gradients-softcap", "gradients-dv"]
)
def test_gradients_in_place(compiled, chip, case):
    program = compiled(chip, case)
    of_weight = "weight_gradient_columns" if case.endswith("dv") else "weight_gradient_rows"
    assert set(program.calls) == {
        "linear_statistics",
        "linear_exponentials",
        "input_gradient",
        of_weight,
    }
    assert program.calls["linear_exponentials"] == program.calls["input_gradient"] == 1
    for kernel in program.kernels:
        assert_runs_well(kernel)
    assert program.temp_bytes <= 160 * MIB, program.temp_bytes / MIB
    _, hidden, vocab = SIZES
    if case.endswith("dv"):
        assert_nothing_runs_beside(program)
    else:
        assert_in_place(program, (vocab, hidden))


@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", [full("gradients-long")])
def test_gradients_of_more_tokens(compiled, chip, case):
    """The tokens that the memory of `dweight` cannot hold come in chunks of at most 512 MiB."""
    program = compiled(chip, case)
    for kernel in program.kernels:
        assert_runs_well(kernel)
    assert program.temp_bytes <= 700 * MIB, program.temp_bytes / MIB


def assert_no_conditions(program: Program) -> None:
    """Asserts that no array in memory says something about each logit."""
    sizes = [
        math.prod(dims)
        for instruction in program.instructions.values()
        for dtype, dims in instruction.outputs
        if dtype == "pred"
    ]
    _, _, vocab = SIZES
    assert max(sizes) < 1024 * vocab


@each_chip
@pytest.mark.parametrize(
    "case", ["gradients-kept", oldest("gradients-kept-entropy", pytest.mark.full)]
)
def test_kept_exponentials(compiled, chip, case):
    """One array of all exponentials, and products by cuBLAS. 20 s for both."""
    program = compiled(chip, case)
    assert set(program.calls) == {"linear_exponentials", "linear_exponentials_again"}
    for kernel in program.kernels:
        assert_runs_well(kernel)
    tokens, _, vocab = SIZES
    assert "copy" not in makers(program, (tokens, vocab))
    assert_no_conditions(program)
    assert program.temp_bytes <= 2 * tokens * vocab + 300 * MIB, program.temp_bytes / MIB


# Three products. The pass over the exponentials for the entropy works in place.
@each_chip
@pytest.mark.parametrize("case", [full("token-loss"), "token-loss-entropy", full("token-loss-dv")])
def test_a_loss_of_tokens_in_place(compiled, chip, case):
    program = compiled(chip, case)
    of_weight = "weight_gradient_columns" if case.endswith("dv") else "weight_gradient_rows"
    assert set(program.calls) == {
        "linear_exponentials",
        "linear_exponentials_again",
        "input_gradient",
        of_weight,
    }
    assert program.calls["linear_exponentials"] == program.calls["input_gradient"] == 1
    for kernel in program.kernels:
        assert_runs_well(kernel)
    assert program.temp_bytes <= 160 * MIB, program.temp_bytes / MIB
    _, hidden, vocab = SIZES
    if case.endswith("dv"):
        assert_nothing_runs_beside(program)
    else:
        assert_in_place(program, (vocab, hidden))


# The exponentials of a chunk wait for its cotangents, so no kernel computes the logits again.
@each_chip
@pytest.mark.parametrize(
    "case", [oldest("single-tokens", pytest.mark.full), "single-tokens-entropy"]
)
def test_losses_of_single_tokens_in_chunks(compiled, chip, case):
    program = compiled(chip, case)
    exponentials = {"linear_exponentials", "linear_exponentials_again"}
    assert set(program.calls) == exponentials | {"input_gradient", "weight_gradient_rows"}
    assert program.calls["linear_exponentials"] == 2  # in place, and in the loop over chunks
    for kernel in program.kernels:
        assert_runs_well(kernel)
    assert_no_conditions(program)
    assert program.temp_bytes <= 600 * MIB, program.temp_bytes / MIB


# "counted" of test_aot_linear_cross_entropy.py has the same condition.
@each_chip
@pytest.mark.oldest
@pytest.mark.parametrize("case", [full("gradients-counted"), full("token-loss-counted")])
def test_fewer_rows_and_all_rows_share_memory(compiled, chip, case):
    program = compiled(chip, case)
    for kernel in program.kernels:
        assert_runs_well(kernel)
    assert program.calls["input_gradient"] == 2
    assert program.temp_bytes <= 200 * MIB, program.temp_bytes / MIB
