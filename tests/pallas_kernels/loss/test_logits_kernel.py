"""Loss statistics and gradients of logits by the Mosaic GPU kernel, interpreted."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.loss import token_loss
from pallas_kernels.loss.mosaic_gpu.logits import loss_of_logits
from pallas_kernels.loss.mosaic_gpu.logits_config import LINE, Config, RowSplit
from pallas_kernels.loss.token_loss import LogitStatistics, LossOptions
from support.numerics import assert_as_accurate, quick_jit, rounded

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
EPS32 = float(np.finfo(np.float32).eps)
# The 13 lines of a row fill 4 slots of up to 4 lines, and the ring holds 2 slots.
BASE = Config(warpgroups=1, slots=2, max_lines=4)
NUM_COLUMNS = 1600
STATISTICS = LogitStatistics._fields
PLAIN = LossOptions(label_smoothing=0.0, z_loss=0.0, logit_softcap=None)
ALL = LossOptions(label_smoothing=0.1, z_loss=1e-2, logit_softcap=10.0)
interpreted = pytest.mark.usefixtures("interpreted")
full = pytest.mark.full


def make_args(num_tokens, num_columns, dtype=BF16, *, bias=False, seed=0):
    """Logits with NaN in the padding; labels in all places, in and out of range."""
    rng = np.random.default_rng(seed)
    logits = np.full((num_tokens, num_columns + -num_columns % LINE), np.nan)
    logits[:, :num_columns] = 3 * rng.standard_normal((num_tokens, num_columns))
    labels = rng.integers(0, num_columns, num_tokens)
    special = (0, num_columns - 1, 2**30, -100, 2**31 - 1, num_columns // 2)[:num_tokens]
    labels[: len(special)] = special
    return {
        "logits": jnp.asarray(logits, dtype),
        "labels": jnp.asarray(labels, jnp.int32),
        "coefficients": jnp.asarray(rng.uniform(0.5, 2, num_tokens), F32),
        "bias": jnp.asarray(rng.standard_normal(num_columns), F32) if bias else None,
    }


@functools.cache
def compiled(mode, num_columns, options, config, vocab_size):
    """`(statistics, dlogits)` by the kernel, or by `mode` only one of the two."""

    def run(logits, labels, coefficients, bias, lse):
        return loss_of_logits(
            logits,
            labels,
            options,
            num_columns=num_columns,
            coefficients=None if mode == "statistics" else coefficients,
            lse=lse if mode == "gradient" else None,
            vocab_size=vocab_size,
            bias=bias,
            config=config,
        )

    return quick_jit(run)


def run(
    args, mode="both", *, num_columns=NUM_COLUMNS, options=PLAIN, config=BASE, lse=None, vocab=None
):
    return compiled(mode, num_columns, options, config, vocab)(**args, lse=lse)


@functools.partial(quick_jit, static_argnums=(0, 1))
def token_loss_formulas(options, vocab, logits, labels, coefficients, bias, lse):
    if bias is not None:
        logits += bias
    found = token_loss.statistics(logits, labels, options)
    lse = found.lse if lse is None else lse
    return found, token_loss.dlogits(logits, lse, labels, coefficients, options, vocab)


def formulas(args, dtype, *, num_columns=NUM_COLUMNS, options=PLAIN, lse=None, vocab=None):
    """`(statistics, dlogits)` by `token_loss`, in this dtype."""
    with jax.enable_x64(True):
        cast = lambda a: None if a is None else jnp.asarray(np.asarray(a).astype(dtype))
        found, dlogits = token_loss_formulas(
            options,
            vocab or num_columns,
            jnp.asarray(np.asarray(args["logits"])[:, :num_columns].astype(dtype)),
            args["labels"],
            *map(cast, (args["coefficients"], args["bias"], lse)),
        )
        return [np.asarray(a) for a in found], np.asarray(dlogits)


def check_statistics(got, args, *, num_columns=NUM_COLUMNS, **options):
    options["num_columns"] = num_columns
    low, exact = (formulas(args, dtype, **options)[0] for dtype in (np.float32, np.float64))
    chosen = options.get("options", PLAIN)
    if chosen.logit_softcap is None:
        assert_as_accurate(got[:-1], low[:-1], exact[:-1], names=STATISTICS[:-1])
    else:
        # The kernel's tanh is right to a rounding of 1, not of its own value.
        for name, g, e in zip(STATISTICS[:-1], got, exact, strict=False):
            atol = 4 * EPS32 * chosen.logit_softcap
            np.testing.assert_allclose(g, e, rtol=4 * EPS32, atol=atol, err_msg=name)
    if chosen.label_smoothing:
        # Terms cancel, so the error is that of a sum of absolute values. A capped logit errs by the
        # rounding of the cap.
        logits = np.asarray(args["logits"], np.float64)[:, :num_columns]
        if args["bias"] is not None:
            logits = logits + np.asarray(args["bias"], np.float64)
        size = np.sum(np.abs(logits) + (chosen.logit_softcap or 0), axis=1)
        np.testing.assert_array_less(np.abs(got.total - exact[-1]), 4 * EPS32 * size)


def check_gradient(got, args, *, num_columns=NUM_COLUMNS, **options):
    assert got.dtype == args["logits"].dtype and got.shape == args["logits"].shape
    np.testing.assert_array_equal(np.asarray(got[:, num_columns:], np.float32), 0)
    _, low = formulas(args, np.float32, num_columns=num_columns, **options)
    _, exact = formulas(args, np.float64, num_columns=num_columns, **options)
    got = [got[:, :num_columns]]
    assert_as_accurate(got, rounded([low], got), [exact], names=["dlogits"])


def check(args, *, alone=True, **options):
    """Compares statistics and gradient with the formulas.

    With `alone` it also runs the programs that make only one of the two. A program takes seconds to
    interpret.
    """
    config = options.pop("config", BASE)
    found, gradient = run(args, "both", config=config, **options)
    check_statistics(found, args, **options)
    check_gradient(gradient, args, **options)
    if alone:
        statistics, nothing = run(args, "statistics", config=config, **options)
        assert nothing is None
        check_statistics(statistics, args, **options)
        nothing, other = run(args, "gradient", config=config, lse=found.lse, **options)
        assert nothing is None
        check_gradient(other, args, lse=found.lse, **options)
    return found, gradient


# Values.


# Each dtype with both options; `alone` adds the programs of the statistics and of the gradient.
@interpreted
@pytest.mark.parametrize(
    "dtype, options, alone",
    [
        pytest.param(BF16, PLAIN, False, marks=full),
        (BF16, ALL, False),
        pytest.param(BF16, ALL, True, marks=full),
        (F16, PLAIN, False),
        pytest.param(F16, PLAIN, True, marks=full),
        pytest.param(F16, ALL, False, marks=full),
        pytest.param(F32, PLAIN, False, marks=full),
        pytest.param(F32, ALL, True, marks=full),
    ],
    ids=lambda value: {PLAIN: "plain", ALL: "all"}.get(value),
)
def test_dtypes_and_options(dtype, options, alone):
    args = make_args(6, NUM_COLUMNS, dtype, bias=options is ALL)
    check(args, options=options, alone=alone)


@interpreted
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"label_smoothing": 0.2}, marks=full),
        pytest.param({"label_smoothing": 1.0}, marks=full),
        pytest.param({"z_loss": 0.1}, marks=full),
        pytest.param({"logit_softcap": 4.0}, marks=full),
    ],
    ids=str,
)
def test_options_alone(changes):
    options = dataclasses.replace(PLAIN, **changes)
    check(make_args(6, 300), num_columns=300, options=options, alone=False)


@interpreted
@pytest.mark.parametrize(
    "num_columns", [512, *(pytest.param(n, marks=full) for n in (1, 100, 127, 128, 129, 513))]
)
def test_columns_around_a_line_and_a_slot(num_columns):
    args = make_args(6, num_columns, bias=True)
    check(args, num_columns=num_columns, options=ALL, alone=num_columns == 513)


@interpreted
def test_a_part_of_the_vocabulary():
    # The lse over the whole vocabulary is given, and smoothing spreads over the whole vocabulary.
    args = make_args(6, NUM_COLUMNS)
    lse = run(args)[0].lse + 1
    options = {"options": ALL, "vocab": 3 * NUM_COLUMNS, "lse": lse}
    _, gradient = run(args, "gradient", **options)
    check_gradient(gradient, args, **options)


@interpreted
@pytest.mark.parametrize("label", [300, 383])
def test_a_label_in_the_padding_is_no_column(label):
    args = make_args(6, 300)
    check(args | {"labels": jnp.full(6, label, jnp.int32)}, num_columns=300, alone=False)


# Launch parameters.

# (columns, warpgroups, slots, max_lines), and how the kernel deals the lines of the row: slots of
# a warpgroup (if these are more than the ring has, it reads some twice), lines of a slot, lines of
# the last slot, warpgroups without a slot in the last round.
DEALS = [
    ((500, 1, 2, 4), (1, 4, 4, 0)),
    ((1600, 1, 2, 4), (4, 4, 1, 0)),
    ((2500, 1, 3, 8), (3, 8, 4, 0)),
    ((1100, 2, 2, 4), (2, 4, 1, 1)),
    ((4200, 2, 3, 4), (5, 4, 1, 1)),
    ((600, 4, 2, 4), (1, 4, 1, 2)),
    ((4400, 4, 2, 4), (3, 4, 3, 3)),
]


@pytest.mark.parametrize("deal, expected", DEALS, ids=str)
def test_deals_of_a_row_to_slots(deal, expected):
    num_columns, warpgroups, slots, max_lines = deal
    config = Config(warpgroups=warpgroups, slots=slots, max_lines=max_lines)
    num_lines = -(-num_columns // LINE)
    split = RowSplit.make(num_lines, config)
    used = -(-num_lines // split.lines)
    assert expected == (
        split.rounds,
        split.lines,
        num_lines - (used - 1) * split.lines,
        warpgroups * split.rounds - used,
    )


# One, two and four warpgroups. Some rows are larger than the ring, which is then filled again.
@interpreted
@pytest.mark.parametrize(
    "deal, alone",
    [
        *((DEALS[i][0], False) for i in (1, 5)),
        *(pytest.param(DEALS[i][0], False, marks=full) for i in (0, 2, 3, 6)),
        *(pytest.param(DEALS[i][0], True, marks=full) for i in (1, 4, 6)),
    ],
    ids=str,
)
def test_rows_dealt_to_slots(deal, alone):
    num_columns, warpgroups, slots, max_lines = deal
    config = Config(warpgroups=warpgroups, slots=slots, max_lines=max_lines)
    # With the number of tokens of the other tests, so that equal rows share a program.
    args = make_args(6, num_columns, bias=True, seed=1)
    check(args, num_columns=num_columns, options=ALL, config=config, alone=alone)


@interpreted
@pytest.mark.parametrize(
    "warpgroups, slots, max_lines",
    [(2, 8, 8), *(pytest.param(*c, marks=full) for c in ((1, 3, 8), (2, 2, 4), (4, 2, 4)))],
)
def test_all_configurations_in_float32(warpgroups, slots, max_lines):
    args = make_args(6, NUM_COLUMNS, F32, bias=True)
    options = dataclasses.replace(ALL, logit_softcap=None)
    config = Config(warpgroups=warpgroups, slots=slots, max_lines=max_lines)
    check(args, options=options, config=config, alone=False)


@interpreted
@pytest.mark.parametrize(
    "num_tokens, alone",
    [
        (0, False),
        pytest.param(1, False, marks=full),
        pytest.param(2, False, marks=full),
        pytest.param(3, False, marks=full),
        pytest.param(3, True, marks=full),
    ],
)
def test_few_rows(num_tokens, alone):
    # A block has two places for partial statistics, and uses them in turn.
    args = make_args(num_tokens, 700)
    config = dataclasses.replace(BASE, warpgroups=2)
    check(args, num_columns=700, config=config, alone=alone)


@interpreted
@full
def test_the_default_configuration():
    check(make_args(2, 1000), num_columns=1000, config=None, alone=False)


# Values at the ends of the number range.


@interpreted
def test_a_coefficient_of_zero_gives_zeros():
    args = make_args(6, NUM_COLUMNS, bias=True)
    expected, gradient = run(args, options=ALL)
    rows, others = np.array([1, 2, 4, 5]), np.array([0, 3])
    values = jnp.array([0.0, np.nan, np.inf, -np.inf], BF16)
    found, got = run(
        args
        | {
            "coefficients": args["coefficients"].at[rows].set(0.0),
            "logits": args["logits"].at[rows].set(values[:, None]),
        },
        options=ALL,
    )
    np.testing.assert_array_equal(np.asarray(got[rows], F32), 0)
    np.testing.assert_array_equal(np.asarray(got[others], F32), np.asarray(gradient[others], F32))
    np.testing.assert_array_equal(found.lse[others], expected.lse[others])


@interpreted
def test_nan_stays_in_its_row():
    args = make_args(6, NUM_COLUMNS)
    expected, gradient = run(args)
    rows, others = np.array([1, 2, 4, 5]), np.array([0, 3])
    columns = np.array([0, 5, 700, NUM_COLUMNS - 1])
    found, got = run(args | {"logits": args["logits"].at[rows, columns].set(np.nan)})
    got, gradient = np.asarray(got, F32), np.asarray(gradient, F32)
    assert np.isnan(found.lse[rows]).all() and np.isnan(got[rows, :NUM_COLUMNS]).all()
    np.testing.assert_array_equal(got[others], gradient[others])
    np.testing.assert_array_equal(found.lse[others], expected.lse[others])


@interpreted
def test_a_coefficient_of_nan_is_a_gradient_of_nan():
    args = make_args(6, NUM_COLUMNS)
    _, expected = run(args)
    _, got = run(args | {"coefficients": args["coefficients"].at[2].set(np.nan)})
    got, expected = np.asarray(got, F32), np.asarray(expected, F32)
    assert np.isnan(got[2, :NUM_COLUMNS]).all()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(expected, 2, 0))


@interpreted
@pytest.mark.parametrize("scale", [1e4, pytest.param(1e-4, marks=full)])
def test_huge_and_tiny_logits(scale):
    args = make_args(6, NUM_COLUMNS, F32)
    check(args | {"logits": args["logits"] * scale}, alone=False)


@interpreted
@pytest.mark.parametrize("dtype", [BF16, pytest.param(F32, marks=full)], ids=jnp.dtype)
@pytest.mark.parametrize(
    "allowed", [slice(0, 1), slice(299, 300), slice(127, 129), slice(0, 0)], ids=str
)
def test_logits_of_minus_infinity(dtype, allowed):
    # The logits of all columns, or of all but a few, are -inf.
    args = make_args(6, 300, dtype)
    kept = np.zeros(args["logits"].shape, bool)
    kept[:, allowed] = True
    args["logits"] = jnp.where(kept, args["logits"], -jnp.inf)
    if allowed == slice(0, 0):
        found, nothing = run(args, "statistics", num_columns=300)
        assert nothing is None
        check_statistics(found, args, num_columns=300)
    else:
        check(args, num_columns=300, alone=False)


@interpreted
def test_very_negative_logits():
    # A kernel that read the padding as zeros would give it all of the probability.
    args = make_args(6, 300)
    args["logits"] = jnp.nan_to_num(args["logits"] - BF16(200))
    check(args, num_columns=300, alone=False)


@interpreted
@pytest.mark.parametrize(
    "columns", [(0, 1), (5, 133), (127, 128), (3, 1500, 600), (511, 512)], ids=str
)
def test_ties_with_the_label(columns):
    # The first of equal logits is the largest, so it matters which columns precede the label.
    logits = np.zeros((6, NUM_COLUMNS + -NUM_COLUMNS % LINE))
    logits[:, columns] = 0.5
    labels = np.resize(columns, 6)
    args = make_args(6, NUM_COLUMNS) | {
        "logits": jnp.asarray(logits, BF16),
        "labels": jnp.asarray(labels, jnp.int32),
    }
    found, _ = check(args, alone=False)
    np.testing.assert_array_equal(found.largest, found.label_logit)
    first = labels == min(columns)
    np.testing.assert_array_equal(found.largest_before < found.label_logit, first)
