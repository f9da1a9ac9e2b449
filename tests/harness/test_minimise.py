"""The tensor minimiser: what is not needed goes, from the middle too, what is needed stays, and all of it is legal."""

from dataclasses import replace

import numpy as np
import pytest

from harness.minimise import Table, minimise
from harness.problem import Edit, Problem, streams, values_of

RANDOM = {"q": "gauss", "k": "unit", "v": "gauss", "g": "mild", "beta": "uniform", "h0": "gauss", "do": "gauss"}
BIG = Problem(
    entry="chunk", lengths=(5, 9), packed=True, tail=2, heads=2, group=2, K=3, V=4, initial_state=True, **RANDOM
)


def large_v(problem: Problem) -> bool:
    """A fault of one large value, wherever it lies."""
    return bool((np.abs(values_of(problem, "v")) > 2.5).any())


def test_one_value_is_all_that_stays():
    small = minimise(BIG, large_v, seconds=20)
    assert (sum(small.lengths), small.value_heads, small.V, small.K) == (1, 1, 1, 1)
    assert [edit for edit in small.edits if edit.tensor == "v"] != []
    assert abs(values_of(small, "v")).max() in (3.0, 2.6)
    others = {name: np.abs(values_of(small, name)).max() for name in streams(small) if name not in ("v", "beta")}
    assert set(others.values()) == {0.0}


def test_places_go_from_the_middle():
    """The fault needs its first and its last token of sequence 1: the tokens between them go."""
    first, last = values_of(BIG, "q")[5, 0, 0], values_of(BIG, "q")[13, 0, 0]
    has_both = lambda p: {first, last} <= set(values_of(p, "q").flatten().tolist())  # noqa: E731
    small = minimise(BIG, has_both, seconds=20)
    assert sum(small.lengths) == 2 and small.K == 1
    assert values_of(small, "q").flatten().tolist() == [first, last]


def test_a_relation_between_values_survives():
    needs = lambda p: p.K >= 2 and values_of(p, "g").min() < -0.4 and sum(p.lengths) >= 3  # noqa: E731
    small = minimise(BIG, needs, seconds=20)
    assert needs(small) and (sum(small.lengths), small.K, small.V) == (3, 2, 1)
    assert sorted(set(values_of(small, "g").flatten().tolist()))[0] in (-1.0, -0.5)


@pytest.mark.parametrize("safe", [False, True], ids=["unbounded", "safe_gate"])
def test_every_candidate_keeps_the_promises_of_the_problem(safe):
    problem, seen = replace(BIG, safe_gate=safe, g="bounded"), []
    minimise(problem, lambda p: seen.append(p) or False, seconds=2)
    assert len(seen) == len(set(seen)) > 20
    for candidate in seen:
        g, beta = values_of(candidate, "g"), values_of(candidate, "beta")
        assert not g.size or (g.max() <= 0 and (not candidate.safe_gate or g.min() >= -5))
        assert not beta.size or beta.min() >= 0


def test_the_same_problem_every_time():
    assert minimise(BIG, large_v, seconds=20) == minimise(BIG, large_v, seconds=20)


def test_time_is_a_limit():
    assert minimise(BIG, lambda problem: True, seconds=0) == BIG


def test_values_are_written_as_the_nearest_pattern_and_edits():
    problem = Problem(lengths=(2,), K=2, V=2, edits=(Edit("v", (1, 0, 0), 3.0),), v="zeros")
    table = Table.of(problem)
    table.values["v"][:] = 1
    table.values["v"][0, 0, 1] = 7
    written = table.written()
    assert (written.v, written.edits) == ("ones", (Edit("v", (0, 0, 1), 7.0),))
    assert Table.of(written).values["v"].tolist() == table.values["v"].tolist()


def test_too_many_values_to_write_stay_as_they_are():
    problem = Problem(lengths=(2000,), K=4, V=4, v="gauss", seed=1)
    table = Table.of(problem)
    table.values["v"] += 1
    assert table.written() is None


def test_a_problem_of_too_many_numbers_is_left_alone():
    problem = Problem(lengths=(8192,), heads=96, K=128, V=128)
    assert minimise(problem, lambda candidate: pytest.fail("tried"), seconds=20) is problem


def test_patterns_say_more_than_a_thousand_edits():
    """Every value of v is needed, and each is its own: named, not written out."""
    values = set(values_of(BIG, "v").flatten().tolist())
    small = minimise(BIG, lambda p: values <= set(values_of(p, "v").flatten().tolist()), seconds=20)
    assert len(small.edits) <= 64 and small.v == "gauss" and (small.q, small.k, small.g) == ("zeros", "zeros", "zeros")
