"""Authority on gating a subject in pytest: the tests that `harness.suite` is run for, and what a session has seen.

A session that has seen nothing of its subject, or not all that was asked for, has not passed.
"""

import time
from collections import Counter, defaultdict

import pytest

from harness.check import REPLAYED, Task, plan, replayed
from harness.fleet import Fleet
from harness.options import default_device
from harness.profiles import PROFILES
from harness.shares import compile_key, share
from harness.subject import load_subject
from harness.terminal import INCOMPLETE
from harness.words import words

FLEET = pytest.StashKey[Fleet]()
REPLAYS = "kda_replays"  # what workers are told to check first
ROUTE, NOT_RUN = "kda_route", "kda_not_run"  # properties of a test of the suite


def test_id(task: Task) -> str:
    return f"{task.route}-{task.family}-{words(task.problem)}"


def replays(config: pytest.Config) -> list[str]:
    """What failed before on the routes that this session asks for; the same for all of its workers."""
    told = getattr(config, "workerinput", {})
    if REPLAYS not in told and config.stash[FLEET].shared is not None:
        subject = load_subject(config.getoption("--kda-subject"))
        return config.stash[FLEET].replays(subject, config.getoption("--kda-routes"))
    return told.get(REPLAYS, [])


def tasks(config: pytest.Config) -> list[Task]:
    """What this session asks of its subject: what failed before, then problems of one compile key one after the other;
    nothing is wrong use.
    """
    option = config.getoption
    subject, profile = load_subject(option("--kda-subject")), PROFILES[option("--kda-profile")]
    device = option("--kda-device") or default_device()
    asked = plan(subject, profile, option("--kda-routes"), option("--kda-families"), device, option("--kda-seed"))
    asked = replayed(replays(config)) + asked
    mine = sorted(share(asked, option("--kda-shard")), key=lambda task: (task.family != REPLAYED, compile_key(task)))
    if not mine:
        selection = {name: option(f"--kda-{name}") for name in ("subject", "routes", "families", "shard")}
        raise pytest.Collector.CollectError(f"no problem for {selection}: nothing would be held against the oracle")
    return mine


class Gate:
    """A pytest plugin: time left for the suite, what it has seen of each route, and an exit status that says so."""

    def __init__(self, budget: float | None):
        self.deadline = None if budget is None else time.monotonic() + budget
        self.held: Counter[str] = Counter()
        self.not_run: defaultdict[str, Counter[str]] = defaultdict(Counter)

    def time_is_up(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        said = dict(report.user_properties)
        if report.when != "call" or ROUTE not in said:
            return
        if NOT_RUN in said:
            self.not_run[said[ROUTE]][said[NOT_RUN]] += 1
        else:
            self.held[said[ROUTE]] += 1

    def pytest_terminal_summary(self, terminalreporter) -> None:
        routes = sorted({*self.held, *self.not_run})
        if routes:
            terminalreporter.section("kda")
        for route in routes:
            others = "".join(f", {count} {why}" for why, count in sorted(self.not_run[route].items()))
            terminalreporter.line(f"{route}: {self.held[route]} problems held against the oracle{others}")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A session whose suite has seen nothing of a subject, or ran out of time, has not passed."""
        late = any("out of time" in reasons for reasons in self.not_run.values())
        if exitstatus == pytest.ExitCode.OK and self.not_run and (late or not self.held):
            session.exitstatus = INCOMPLETE
