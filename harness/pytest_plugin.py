"""The harness inside pytest: its options, the repaired interpreter, Hypothesis profiles, a header that says what is
tested where, `kda_hold`, which holds a route to the oracle, and `kda_task`, all that is asked of a subject in turn.
"""

import datetime
import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import triton
from hypothesis import settings

from harness import expected, gating, holding, interpreter, options, profiles, workers
from harness.fleet import LOCAL, Fleet
from harness.problem import Problem
from harness.runner import Runner
from harness.subject import load_subject


def pytest_addoption(parser: pytest.Parser) -> None:
    options.add_to_pytest(parser.getgroup("kda", "KDA kernels against the oracle"))


def pytest_configure(config: pytest.Config) -> None:
    if triton.knobs.runtime.interpret:
        interpreter.install()
    try:
        shared = Fleet(config.getoption("--kda-report") / LOCAL, config.getoption("--kda-database"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[gating.FLEET] = shared
    profiles.register(shared.database if shared.shared else None)
    chosen = "ci" if os.environ.get("CI") else config.getoption("--kda-profile")
    settings.load_profile(chosen)
    config.pluginmanager.register(holding.Findings(config.getoption("--kda-report"), shared), "kda-findings")
    config.pluginmanager.register(gating.Gate(config.getoption("--kda-budget")), "kda-gate")
    workers.limit_memory()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        torch.set_num_threads(1)


def pytest_unconfigure(config: pytest.Config) -> None:
    if gating.FLEET in config.stash:
        config.stash[gating.FLEET].close()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Workers of xdist must all have the same tests, whatever becomes known meanwhile."""
    node.workerinput[gating.REPLAYS] = gating.replays(node.config)


def pytest_report_header(config: pytest.Config) -> str:
    where = "interpreter" if triton.knobs.runtime.interpret else torch.cuda.get_device_name()
    subject = config.getoption("--kda-subject") or os.environ.get("KDA_SUBJECT") or "kda"
    return f"kda: subject {subject}, {where}, torch {torch.__version__}, triton {triton.__version__}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`kda_task`: every route and problem that is asked of the subject."""
    if "kda_task" in metafunc.fixturenames:
        asked = gating.tasks(metafunc.config)
        metafunc.parametrize("kda_task", asked, ids=list(map(gating.test_id, asked)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the failures that --kda-xfail knows; before -k takes tests away, which would leave entries unmatched."""
    path = config.getoption("--kda-xfail")
    if path is None:
        return
    try:
        entries = expected.read(path)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    for wrong in expected.mark(items, entries, datetime.date.today()):
        if os.environ.get("PYTEST_XDIST_WORKER", "gw0") == "gw0":
            warnings.warn(pytest.PytestWarning(f"{path} {wrong}"), stacklevel=1)


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


@pytest.fixture(scope="session")
def kda_gate(request: pytest.FixtureRequest) -> gating.Gate:
    """The time that --kda-budget leaves."""
    return request.config.pluginmanager.get_plugin("kda-gate")
