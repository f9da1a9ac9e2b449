"""What the tests of kda share: problems judged once per route, and ids made of route and mode words."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.problem import Problem
from harness.runner import Runner
from harness.subject import own_subject
from harness.verdict import Verdict

Judge = Callable[[str, Problem], dict[str, Verdict]]


def words(problem: Problem) -> str:
    """The mode words of a problem, in a fixed order."""
    ragged = problem.packed and (0 in problem.lengths or problem.tail > 0)
    layout = ("varlen-ragged" if ragged else "varlen") if problem.packed else "dense"
    flags = {
        "gva": problem.group > 1,
        problem.gate: True,
        "l2norm": problem.l2norm,
        "beta_sigmoid": problem.beta_sigmoid,
        "neg_eigval": problem.neg_eigval,
        "v_first": problem.v_first,
        "intermediates": problem.intermediates,
    }
    values = [problem.g, f"A_{problem.A_log}"] if problem.A_log else [problem.g]
    present = [word for word, there in flags.items() if there]
    dtype = problem.gate_dtype if problem.entry == "gate" else problem.dtype
    return "-".join([layout, *present, dtype, f"{problem.K}x{problem.V}", *values])


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    return words(val) if isinstance(val, Problem) else None


@functools.cache
def _runner(device: str) -> Runner:
    return Runner(own_subject(), device, Path("no-child-no-folder"))


@functools.cache
def _verdicts(route: str, problem: Problem, device: str) -> dict[str, Verdict]:
    return {verdict.quantity: verdict for verdict in _runner(device).check(route, problem).verdicts}


@pytest.fixture
def judge(device: str) -> Judge:
    """Verdicts by quantity of a problem on one of our routes; each is run and judged once per process."""
    return functools.partial(_verdicts, device=device)
