"""Crosses of parameters, of which the normal run takes a part that joins every two values."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest


def pairwise(*axes: Sequence[Any]) -> list[Any]:
    """The cross of the axes, for one `pytest.mark.parametrize` with a name for each axis.

    Every two values of two axes meet in at least one case without a mark; the others have `full`.
    Each case without a mark is the first of the cross in which the most pairs are new.

    Args:
      *axes: the values of each parameter.
    """
    cross = list(itertools.product(*(range(len(axis)) for axis in axes)))
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in cross}
    missing = set[Any]().union(*pairs.values())
    chosen = set()
    while missing:
        case = max(cross, key=lambda case: len(pairs[case] & missing))
        chosen.add(case)
        missing -= pairs[case]
    return [
        pytest.param(
            *(axis[i] for axis, i in zip(axes, case, strict=True)),
            marks=() if case in chosen else pytest.mark.full,
        )
        for case in cross
    ]
