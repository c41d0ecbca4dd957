"""The selected cases are few and cover every pair of values."""

import itertools

import pytest

from support.pairwise import pairwise


@pytest.mark.parametrize("sizes, most", [((2, 3), 6), ((2, 2, 2), 4), ((3, 2, 2, 5), 16)])
def test_every_pair_of_values_is_in_a_case_without_a_mark(sizes, most):
    axes = [[f"{name}{i}" for i in range(n)] for name, n in zip("abcd", sizes, strict=False)]
    cases = pairwise(*axes)
    assert [case.values for case in cases] == list(itertools.product(*axes))
    assert {mark.name for case in cases for mark in case.marks} <= {"full"}
    unmarked = [case.values for case in cases if not case.marks]
    assert len(unmarked) <= most
    for one, other in itertools.combinations(range(len(axes)), 2):
        met = {(values[one], values[other]) for values in unmarked}
        assert met == set(itertools.product(axes[one], axes[other]))
    assert pairwise(*axes) == cases
