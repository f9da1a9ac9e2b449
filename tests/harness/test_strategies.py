"""Generated problems: legal, within their family, covering what they must, and shrinking to something readable."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, find, settings

from harness import check
from harness.families import FAMILIES, family
from harness.options import shape
from harness.problem import Problem
from harness.profiles import PROFILES
from harness.strategies import problems
from harness.subject import load_subject

SEARCH = settings(max_examples=1500, database=None, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("name", [f.name for f in FAMILIES if not f.gpu_only])
def test_drawn_problems_belong_to_their_family(name):
    member = family(name)
    for entry in member.entries:
        drawn = check.draw(member, entry, 12, seed=1, longest=34)
        assert drawn == check.draw(member, entry, 12, seed=1, longest=34), "the same seed draws the same problems"
        assert len(set(drawn)) > 6
        for problem in drawn:
            assert problem.entry == entry
            assert max(problem.lengths, default=0) <= 34
            for tensor in ("q", "k", "v", "h0", "do", "dht"):
                assert getattr(problem, tensor) in (*member.patterns.get(tensor, ()), "unit", "ramp", "gauss")


def smallest(condition, name="ragged", entry="chunk") -> Problem:
    return find(problems(family(name), entry), condition, settings=SEARCH)


def test_a_leak_between_sequences_shrinks_to_two_of_them():
    """The problem of a planted fault: state leaks where the previous length is a multiple of 4, in the second head."""

    def leaks(problem: Problem) -> bool:
        return problem.heads > 1 and any(a % 4 == 0 and a and b for a, b in zip(problem.lengths, problem.lengths[1:]))

    found = smallest(leaks)
    assert (found.heads, found.group, found.K, found.V, found.tail) == (2, 1, 1, 1, 0)
    assert len(found.lengths) == 2 and found.lengths[1] == 1
    assert (found.dtype, found.gate, found.loss, found.seed) == ("fp32", "pregated", "both", 0)
    assert not (found.initial_state or found.l2norm or found.beta_sigmoid or found.v_first)


def test_every_own_route_is_planned_enough():
    """What `kda check` promises on a CPU: 30 problems a route, one of 1000 tokens, states, and gradients where the
    route has kernels of its own for them.
    """
    subject = load_subject("kda")
    tasks = check.plan(subject, PROFILES["dev"], "*", "*", "cpu", seed=0)
    routes = {task.route for task in tasks}
    assert routes == {route.id for route in subject.routes}
    borrowed = {route.id for route in subject.routes if route.spec.gradients is not None}
    assert borrowed == {
        f"{kind}-{gates}" for kind in ("fused", "segment_parallel") for gates in ("safe_gate", "unbounded")
    }
    for route in routes:
        mine = [task.problem for task in tasks if task.route == route]
        assert len(set(mine)) >= 30
        assert max(max(problem.lengths, default=0) for problem in mine) >= 1000
        seen = frozenset().union(*(problem.quantities() for problem in mine))
        assert seen >= ({"o", "ht"} if route in borrowed | {"decode"} else {"o", "dg"})
    required = [task.required for task in tasks]
    assert required == sorted(required, reverse=True), "examples come before what is drawn"


CHUNKED = [route for route in load_subject("kda").routes if route.spec.algorithm == "chunk"]


@pytest.mark.parametrize("route", CHUNKED, ids=[route.id for route in CHUNKED])
def test_every_chunk_route_goes_through_64_chunks_once(route):
    """Of its own, or of the smallest chunk_size; what is longer is there for a route with larger ones."""
    tasks = check.plan(load_subject("kda"), PROFILES["ci"], route.id, "slow_decay", "cpu", seed=0)
    chunks = [sum(task.problem.lengths) / (route.spec.chunk or task.problem.chunk_size) for task in tasks]
    assert sum(count >= 64 for count in chunks) == 1


def test_boundaries_are_among_the_examples():
    seen = {length for example in family("ragged").examples for length in example.lengths}
    assert {0, 1, 15, 16, 17, 63, 64, 65, 100} <= seen
    assert any(example.lengths == (0, 0, 5) for example in family("ragged").examples)
    assert any(example.packed and sum(example.lengths) + example.tail == 128 for example in family("ragged").examples)


def test_shapes_can_be_held_to_one_compile_key():
    tasks = check.plan(load_subject("kda"), PROFILES["dev"], "recurrent", "shapes", "cpu", 0, shape("2x1x64x32"))
    assert {(t.problem.heads, t.problem.group, t.problem.K, t.problem.V) for t in tasks} == {(2, 1, 64, 32)}
    assert replace(tasks[0].problem, heads=3).heads == 3
