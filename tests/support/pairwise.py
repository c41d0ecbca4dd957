"""Crosses of parameters, reduced for the normal run to cases that cover every pair of values."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any], but: Sequence[Any] = ()) -> list[Any]:
    """The cross of the axes, for one `pytest.mark.parametrize` with a name for each axis.

    The cases without a mark cover every pair of values of two axes. The others have the mark
    `full`. The selection is greedy: each step takes the first of the cases with the most new pairs.

    Args:
      *axes: Values of each parameter.
      but: Cases with the mark `full` although they cover pairs, which other tests have, too.
    """
    cross = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cross}
    missing = set[Any]().union(*pairs.values())
    chosen = set()
    while missing:
        case = max(cross, key=lambda case: len(pairs[case] & missing))
        chosen.add(case)
        missing -= pairs[case]
    values = {case: tuple(axis[i] for axis, i in zip(axes, case, strict=True)) for case in cross}
    left_out = {case for case in chosen if values[case] in but}
    assert len(left_out) == len(but)
    return [
        pytest.param(
            *values[case],
            marks=() if case in chosen - left_out else pytest.mark.full,
        )
        for case in cross
    ]
