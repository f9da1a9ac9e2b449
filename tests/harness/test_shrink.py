"""Shrinking: to the smallest problem of the same failure, whatever the fault, and never past what is legal."""

from harness.families import FAMILIES, family
from harness.problem import Problem
from harness.shrink import Attempts, shrink

BIG = next(p for p in family("ragged").examples if p.gate == "softplus")  # packed, V-first, l2norm, logits, a tail


def test_a_fault_that_is_everywhere_shrinks_to_the_simplest_problem():
    small = shrink(BIG, lambda problem: True, seconds=20)
    assert (small.lengths, small.packed, small.K, small.V, small.heads, small.group) == ((0,), False, 1, 1, 1, 1)
    assert (small.gate, small.loss, small.dtype, small.q, small.v) == ("pregated", "none", "fp32", "zeros", "zeros")


def test_what_the_fault_needs_stays():
    needs = lambda p: p.v_first and sum(p.lengths) >= 7 and p.K >= 3 and p.gate == "softplus"  # noqa: E731
    small = shrink(BIG, needs, seconds=20)
    assert needs(small)
    assert (sum(small.lengths), small.K, small.V, small.v_first, small.tail) == (7, 3, 1, True, 0)
    assert not (small.l2norm or small.beta_sigmoid or small.initial_state)


def test_a_compile_key_can_be_kept():
    small = shrink(BIG, lambda problem: True, seconds=20, keep_shape=True)
    assert (small.K, small.V, small.heads, small.dtype) == (BIG.K, BIG.V, BIG.heads, BIG.dtype)
    assert sum(small.lengths) == 0


def test_every_candidate_is_legal_and_none_is_tried_twice():
    for member in FAMILIES:
        tried: list[Problem] = []
        shrink(member.examples[0], lambda problem, tried=tried: tried.append(problem) or False, seconds=20)
        assert len(tried) == len(set(tried)) > 0


def test_time_is_a_limit():
    assert shrink(BIG, lambda problem: True, seconds=0) == BIG


def test_no_step_leads_back():
    """A step that is no simplification would let two problems take turns until the time is up."""
    for member in FAMILIES:
        tried: list[Problem] = []
        small = shrink(member.examples[0], lambda problem: True, seconds=20)
        shrink(small, lambda problem, tried=tried: tried.append(problem) or True, seconds=20)
        assert tried == [], member.name


def test_a_number_of_attempts_ends_a_search_at_the_same_problem():
    asked = []
    large = Problem(lengths=(40,), heads=2, K=8, V=8)

    def fails(problem):
        asked.append(problem)
        return True

    found = {shrink(large, Attempts(fails, 5), seconds=60.0) for _ in range(2)}
    assert len(found) == 1 and found != {large}
    assert len(asked) == 2 * 5
