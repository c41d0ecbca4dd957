"""The order of timed calls, and the summary of their times."""

import functools

import pytest

from benchmarks import timing


def test_every_call_walks_on_through_the_inputs_and_rounds_interleave():
    seen = []

    def case(name, num_sets):
        calls = [functools.partial(lambda *where: seen.append(where), name, i) for i in range(3)]
        return timing.Case(name, calls[:num_sets])

    def measure(calls):
        for call in calls:
            call()
        return 10.0 * len(calls)

    timings = timing.compare(
        [case("a", 3), case("b", 3)], rounds=2, calls_per_round=2, measure=measure
    )
    names = [name for name, _ in seen]
    assert len(names) == 12  # the first round is the warm-up
    for start in range(0, 12, 4):
        assert names[start : start + 4] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    assert [i for _, i in seen] == [i % 3 for i in range(12)]
    assert timings["a"].times_ms == [10.0, 10.0]  # per call


def test_the_order_changes_from_round_to_round_but_not_from_run_to_run():
    def order_of_rounds():
        seen = []
        cases = [timing.Case(name, [functools.partial(seen.append, name)]) for name in "abc"]
        timing.compare(cases, rounds=7, calls_per_round=1, measure=lambda calls: calls[0]() or 1.0)
        return ["".join(seen[i : i + 3]) for i in range(0, 24, 3)]

    orders = order_of_rounds()
    assert all(sorted(order) == ["a", "b", "c"] for order in orders)
    assert len(set(orders)) > 2
    assert order_of_rounds() == orders


def test_a_case_that_raises_is_out_and_keeps_its_message():
    attempts = []

    def fail():
        attempts.append(1)
        raise NotImplementedError("no such width\nand more")

    cases = [timing.Case("bad", [fail]), timing.Case("good", [lambda: None])]
    timings = timing.compare(cases, rounds=3, calls_per_round=1, measure=lambda calls: 2.0)
    assert timings["bad"].summary() == {"error": "NotImplementedError: no such width"}
    assert len(attempts) == 1
    assert timings["good"].times_ms == [2.0] * 3


def test_a_case_that_fails_later_has_no_figure():
    def measure(calls):
        raise RuntimeError("CUPTI saw no kernel")

    timings = timing.compare([timing.Case("a", [lambda: None])], rounds=2, measure=measure)
    assert timings["a"].summary() == {"error": "RuntimeError: CUPTI saw no kernel"}


def test_names_of_cases_are_unique():
    case = timing.Case("a", [lambda: None])
    with pytest.raises(ValueError, match="unique"):
        timing.compare([case, case], rounds=1)


def test_summary_is_median_and_range():
    summary = timing.Timing([3.0, 1.0, 2.0, 9.0]).summary()
    assert summary == {"median_ms": 2.5, "min_ms": 1.0, "max_ms": 9.0}


def test_rotation_exceeds_the_cache():
    assert timing.rotation(2**20) * 2**20 >= 4 * 126e6
    assert timing.rotation(2**31) == 1
