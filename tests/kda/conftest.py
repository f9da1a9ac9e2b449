"""What the tests of kda share: problems judged once per route, and ids made of route and mode words."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.problem import Problem
from harness.runner import Runner
from harness.subject import own_subject
from harness.verdict import Verdict
from harness.words import words

Judge = Callable[[str, Problem], dict[str, Verdict]]


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
