"""Settings of the loss's kernels for tests that interpret them."""

import functools
import math

import jax
import pytest

from pallas_kernels.loss import cost
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.mosaic_gpu import logits_config
from support.jaxprs import equations
from support.loss_formulas import (
    BF16,
    D,
    full,
    loss_of,
    make_arrays,
)
from support.numerics import quick_jit

# Few threads take less time to interpret than the default; test_logits_kernel.py has more.
ONE_WARPGROUP = Config(logits=logits_config.Config(warpgroups=1, slots=2, max_lines=4))
# 9 tokens make chunks of 1 and 8. 250 columns make chunks of 50, 100 and 100, padded to 128 each.
KT, KV = 9, 250
KERNEL_STRATEGIES = {
    "tokens": {"chunk_size": 8},
    "columns": {"chunk_size": None, "vocab_chunk_size": 100},
    "exponentials": {"chunk_size": 8, "bias_in_weight": True},
    # The limit makes three bands, and copies of 128 rows of 128 numbers of 16 bits.
    "in place": {
        "chunk_size": None,
        "max_logits_bytes": 2**15,
        "bias_in_weight": True,
        "lines": True,
    },
}
BY_KERNEL_STRATEGY = {
    name: {"implementation": "mosaic_gpu", "config": ONE_WARPGROUP, **chunks}
    for name, chunks in KERNEL_STRATEGIES.items()
}


def kernel_strategies(*names):
    """All strategies. The normal run has those with these names."""
    cases = [
        pytest.param(strategy, id=name, marks=() if name in names else full)
        for name, strategy in BY_KERNEL_STRATEGY.items()
    ]
    return pytest.mark.parametrize("strategy", cases)


# A program takes seconds to compile. "columns" and "in place" have all loops of the others, and
# "tokens" has the kernel over logits in memory.
two_kernel_strategies = kernel_strategies("columns", "in place")
two_other_kernel_strategies = kernel_strategies("tokens", "in place")
# With this weight the z-loss takes all of softmax from a token whose logits are all -16: its lse is
# log(KV) - 16, and 1 + 2 · z_loss · lse is 0.
Z_LOSS = 0.5 / (16 - math.log(KV))
ALL_OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-2, "logit_softcap": 1.5}


def kernel_arrays(dtype=BF16, **options):
    return make_arrays((KT,), D, KV, dtype, **options)


def prefer_in_place(monkeypatch):
    """Makes the planner take no chunks alone, which are faster at the sizes of these tests."""
    monkeypatch.setattr(cost, "of_chunks", lambda *_: math.inf)


def in_place_loss(max_logits_bytes, reduction, **options):
    """The loss that keeps exponentials in the memory of `dweight`, for any number of tokens."""
    options |= {"max_logits_bytes": max_logits_bytes, "reduction": reduction}
    return functools.partial(loss_of, implementation="mosaic_gpu", **options)


def kernel_names(fn, *args) -> set[str]:
    """Names of the kernels, and of the functions that are compiled, in the program of `fn`."""
    return names_in(jax.make_jaxpr(fn)(*args))


def run_and_kernel_names(fn, *args):
    """The results of `fn`, compiled, and `kernel_names`. To trace `fn` twice would take seconds."""
    traced = quick_jit(fn).trace(*args)
    return traced.lower().compile()(*args), names_in(traced.jaxpr)


def names_in(program) -> set[str]:
    """The names in the equations of a traced program."""
    return {str(e.params["name"]) for e in equations(program.jaxpr) if "name" in e.params}
