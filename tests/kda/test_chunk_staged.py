"""The staged chunk routes against the oracle: forward, state and gradients, family by family."""

import itertools
from collections.abc import Iterator

import pytest

import kda
from harness.families import FAMILIES
from harness.fitting import fitted
from harness.problem import Problem, materialise
from kda.chunk_bwd import PRECISION

FAST = ("generic", "ragged", "intermediates", "gate_bound", "spikes_resets", "repeated_keys", "reported")


def cases() -> Iterator[tuple[str, str, Problem]]:
    """The examples of every family that is fast, on each path that their gates allow."""
    for family in (family for family in FAMILIES if family.name in FAST):
        for example, route in itertools.product(family.examples, PRECISION):
            problem = fitted(example, route, "chunk")
            if problem is not None:
                yield route, family.name, problem


@pytest.mark.parametrize("route, family, problem", list(cases()))
def test_staged_chunk_forward_state_and_gradients(route, family, problem, judge):
    verdicts = judge(route, problem)
    assert set(verdicts) == problem.quantities()
    assert [str(v) for v in verdicts.values() if v.klass not in ("OK", "UNINFORMATIVE")] == []


@pytest.mark.parametrize("route", PRECISION)
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_staged_chunk_is_bitwise_causal(route, chunk_size, device):
    """Only the last gate changes: nothing before it moves by a bit, and something after it does."""
    unit = dict.fromkeys(("q", "k"), "unit")
    problem = Problem(entry="chunk", lengths=(70,), K=8, V=8, **unit, v="gauss", g="mild", beta="uniform", loss="none")
    inputs = materialise(problem, device).inputs
    arguments = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    with kda.force_route(route):
        before = kda.chunk_kda(*arguments, safe_gate=True, chunk_size=chunk_size)[0]
        arguments[3] = arguments[3].clone()
        arguments[3][:, 69] = -3.0
        after = kda.chunk_kda(*arguments, safe_gate=True, chunk_size=chunk_size)[0]
    assert before[:, :69].equal(after[:, :69])
    assert not before[:, 69].equal(after[:, 69])
