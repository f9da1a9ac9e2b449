"""Authority on holding a route to the oracle inside a test, and on what pytest says when it does not hold."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import results
from harness.diagnose import diagnose
from harness.fleet import Fleet
from harness.problem import Problem
from harness.report import folder, step_summary
from harness.results import FAILURES, Finding, Report
from harness.runner import Runner
from harness.terminal import finding_lines
from harness.verdict import severity, worst

DIAGNOSIS_SECONDS = 8.0
REPORT, EXAMPLE, LINES = "kda_report", "kda_example", "kda_lines"  # JUnit properties of a failed test


class WrongResult(AssertionError):
    """A route does not hold on a problem; what there is to say about it is in `finding`."""

    def __init__(self, runner: Runner, finding: Finding, seed: int):
        super().__init__(f"{finding.route} {finding.message}\n{finding.problem!r}")
        self.runner, self.finding, self.seed = runner, finding, seed


class NotHeld(AssertionError):
    """Nothing of a problem was compared: no pass."""


def hold(runner: Runner, route: str, problem: Problem, seed: int = 0) -> None:
    """WrongResult unless the route is right on the problem, NotHeld unless anything was compared.

    Degrees are raised from lines of their own: Hypothesis tells failures apart by the line, and so does not shrink a
    gross one to a marginal one.
    """
    verdicts = runner.check(route, problem, repeat=True, seed=seed).verdicts
    if all(verdict.klass == "NOT_COVERED" for verdict in verdicts):
        raise NotHeld(f"{route} on {problem!r}: {verdicts[0].message if verdicts else 'nothing returned'}")
    verdict = worst(verdicts)
    if verdict.klass not in FAILURES:
        return
    wrong, degree = WrongResult(runner, Finding.of(route, verdict, problem), seed), severity(verdict.ratio)
    if verdict.klass == "NONDETERMINISTIC":
        raise wrong
    if degree == 2:
        raise wrong
    if degree == 1:
        raise wrong
    raise wrong


class Findings:
    """A pytest plugin: a failed `hold` becomes a report folder, five lines, an example to paste, JUnit properties."""

    def __init__(self, root: Path, fleet: Fleet):
        self.report, self.fleet = Report(root), fleet

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
        told = []
        if call.when == "call" and call.excinfo is not None:
            told = [self._told(item, wrong) for wrong in _wrong_results(call.excinfo.value)]
        made = yield
        made.sections += [("kda", text) for text in told]
        return made

    def _told(self, item: pytest.Item, wrong: WrongResult) -> str:
        self.fleet.add(wrong.runner.subject.name, wrong.finding)
        made = diagnose(wrong.runner, wrong.finding, wrong.seed, DIAGNOSIS_SECONDS)
        finding = folder.write(made, self.report, results.environment(wrong.runner.device))
        lines, example = "\n".join(finding_lines(finding)), f"@example({finding.problem!r})"
        where = str(Path(finding.path).parent) if finding.path else "not written"
        item.user_properties += [(REPORT, where), (EXAMPLE, example), (LINES, lines)]
        return f"{lines}\n{example}\n{where}"

    def pytest_terminal_summary(self, terminalreporter) -> None:
        """What failed, for the page of a GitHub run."""
        step_summary.append(map(_section, terminalreporter.stats.get("failed", [])))


def _section(report: pytest.TestReport) -> str:
    """A failed test; nothing for one that failed for another reason."""
    said = dict(report.user_properties)
    if LINES not in said:
        return ""
    return step_summary.section(report.nodeid, said[LINES], said[EXAMPLE], said[REPORT])


def _wrong_results(error: BaseException) -> Iterator[WrongResult]:
    """Those in an error, and in the group that Hypothesis raises for several distinct failures."""
    if isinstance(error, WrongResult):
        yield error
    for member in getattr(error, "exceptions", ()):
        yield from _wrong_results(member)
