"""The harness inside pytest: its options, the repaired interpreter, Hypothesis profiles, a header that says what is
tested where, and `kda_hold`, which holds a route to the oracle.
"""

import os
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
from hypothesis import settings

from harness import holding, interpreter, options, profiles
from harness.problem import Problem
from harness.runner import Runner
from harness.subject import load_subject


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_to_pytest(parser.getgroup("kda", "KDA kernels against the oracle"))


def pytest_configure(config: pytest.Config) -> None:
    if triton.knobs.runtime.interpret:
        interpreter.install()
    profiles.register()
    chosen = "ci" if os.environ.get("CI") else config.getoption("--kda-profile")
    settings.load_profile(chosen)
    config.pluginmanager.register(holding.Findings(config.getoption("--kda-report")), "kda-findings")
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def pytest_report_header(config: pytest.Config) -> str:
    where = "interpreter" if triton.knobs.runtime.interpret else torch.cuda.get_device_name()
    subject = config.getoption("--kda-subject") or os.environ.get("KDA_SUBJECT") or "kda"
    return f"kda: subject {subject}, {where}, torch {torch.__version__}, triton {triton.__version__}"


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    """Where tensors of a test live: --kda-device, else a GPU if there is one."""
    return request.config.getoption("--kda-device") or options.default_device()


@pytest.fixture(scope="session")
def kda_runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Runs problems on the subject of this session (--kda-subject)."""
    option = request.config.getoption
    where = option("--kda-device") or options.default_device()
    runner = Runner(load_subject(option("--kda-subject")), where, option("--kda-report") / "inflight")
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def kda_hold(kda_runner: Runner, request: pytest.FixtureRequest) -> Callable[[str, Problem], None]:
    """`kda_hold(route, problem)` fails the test with a diagnosis unless the route is right on the problem."""
    seed = request.config.getoption("--kda-seed")
    return lambda route, problem: holding.hold(kda_runner, route, problem, seed)
