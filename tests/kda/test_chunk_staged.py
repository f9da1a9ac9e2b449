"""The staged chunk kernels against the oracle, both paths, called by name: no entry point serves them yet."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from harness import verdict
from harness.call import Route, call
from harness.families import FAMILIES
from harness.problem import Problem, materialise
from kda import chunk, registry
from kda.chunk_bwd import PRECISION, chunk_kda_staged

RESETS = ("spikes_50", "spikes_500", "spikes_1e6", "resets")
FAST = ("generic", "ragged", "intermediates", "gate_bound", "spikes_resets", "repeated_keys", "reported")


def fits(route: str, problem: Problem) -> bool:
    """The safe path takes bounded gates only."""
    safe = problem.gate == "lower_bound" or (problem.gate == "pregated" and problem.g not in RESETS)
    return route == "chunk-unbounded" or safe


def cases() -> Iterator[pytest.param]:
    for family in FAMILIES:
        for index, problem in enumerate(family.examples if family.name in FAST else ()):
            for route in PRECISION:
                if fits(route, problem):
                    yield pytest.param(
                        route, replace(problem, entry="chunk"), id=f"{route}-{family.name}-{index}-{problem.dtype}"
                    )


@pytest.fixture
def staged(monkeypatch):
    """chunk_kda with every call sent to one staged path."""

    def run(route: str):
        monkeypatch.setattr(registry, "dispatch", lambda validated: chunk_kda_staged(validated, route))
        return chunk.chunk_kda

    return run


@pytest.mark.parametrize("route, problem", list(cases()))
def test_staged_chunk_forward_state_and_gradients(route, problem, staged, device):
    case = materialise(problem, device)
    spec = replace(PRECISION[route], chunk=problem.chunk_size)
    run = call(Route(route, "chunk", staged(route), spec), case)
    verdicts = verdict.judge(
        case.inputs, case.options, run.outputs, entry="chunk", spec=spec, quantities=problem.quantities()
    )
    assert {v.quantity for v in verdicts} == problem.quantities()
    assert [str(v) for v in verdicts if v.klass not in ("OK", "UNINFORMATIVE")] == []
    assert run.modified == ()


@pytest.mark.parametrize("route", PRECISION)
@pytest.mark.parametrize("chunk_size", [32, 64])
def test_staged_chunk_is_bitwise_causal(route, chunk_size, staged, device):
    """Only the last gate changes: nothing before it moves by a bit, and something after it does."""
    problem = Problem(
        entry="chunk",
        lengths=(70,),
        K=8,
        V=8,
        k="unit",
        q="unit",
        v="gauss",
        g="mild",
        beta="uniform",
        loss="none",
        chunk_size=chunk_size,
    )
    chunk_kda, inputs = staged(route), materialise(problem, device).inputs
    arguments = [inputs[name] for name in ("q", "k", "v", "g", "beta")]
    before = chunk_kda(*arguments, chunk_size=chunk_size)[0]
    arguments[3] = arguments[3].clone()
    arguments[3][:, 69] = -3.0
    after = chunk_kda(*arguments, chunk_size=chunk_size)[0]
    assert before[:, :69].equal(after[:, :69])
    assert not before[:, 69].equal(after[:, 69])
