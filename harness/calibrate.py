"""Authority on `kda calibrate`: how it keeps what it has seen, and when it has seen enough."""

import argparse
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown

from harness import options
from harness.calibration import TABLE, Row, Seen, Table, platform
from harness.calibration_round import Choice, Task
from harness.counterexample import prepared
from harness.crew import Crew, Job, Settings, processes
from harness.results import FAILURES, Finding, Report
from harness.runner import Checked, Runner
from harness.terminal import FINDING, INCOMPLETE, OK, say
from harness.verdict import Verdict
from oracle.envelope import LIMITS

SAVE_EVERY = 20.0  # seconds, and a line of progress
IDLE_ROUNDS = 20  # in a row, after which what has too few elements will not get any
EVERY_REPLICA = replace(LIMITS, first=LIMITS.screen)  # z by all replicas of a screen, whatever the size


def elements(text: str) -> float:
    """A number of elements from 1, as 1e7 too."""
    if not re.fullmatch(r"\d+(?:\.\d+)?(?:e\d{1,2})?", text) or float(text) < 1:
        raise argparse.ArgumentTypeError(f"elements is {text!r}; it must be a number from 1, as in 1e7")
    return float(text)


def add_to_parser(parser: argparse.ArgumentParser) -> None:
    """The options of the subcommand."""
    parser.add_argument(
        "--elements", type=elements, default=1e7, metavar="N", help="to be judged for each route and dtype"
    )
    parser.add_argument(
        "--problems",
        type=options.count,
        default=0,
        metavar="N",
        help="to be judged in all (default: as many as it takes)",
    )
    parser.add_argument("--table", type=Path, default=TABLE, metavar="FILE", help="where what was seen is kept")
    options.add_to_parser(parser, "subject", "routes", "families", "device", "budget", "seed", "jobs", "report")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0: enough was judged, all of it right. 1: a finding. 3: less was judged than asked for."""
    subject, device = prepared(arguments, arguments.subject)
    report = Report(arguments.report)
    report.prepare()
    where = platform(device)
    table = Table(arguments.table)
    row = table.row(subject.name, where)
    table.save()  # fails now, not after the first round
    say(console, f"{subject.title} on {where}; {row.problems} problems so far, kept in {arguments.table}")
    chosen = Choice(subject, arguments.routes, arguments.families, device)
    run = Calibration(chosen, row, table, report, arguments.elements, arguments.problems, console)
    limits = {"pin_autotune": arguments.pin_autotune, "limits": EVERY_REPLICA}
    runner = Runner(subject, device, report.folder, **limits)
    settings = Settings(subject.name, device, report.folder, arguments.seed, **limits)
    crew = Crew(settings, processes(arguments.jobs, len(chosen.round(0, 0)), device, subject.foreign), runner)
    try:
        run.until(time.monotonic() + (arguments.budget or float("inf")), crew, runner, arguments.seed)
    except KeyboardInterrupt:
        say(console, "interrupted; what was seen is kept")
    finally:
        table.save()
        crew.close()
        runner.close()
    return run.conclude()


@dataclass
class Calibration:
    """One run of the command."""

    chosen: Choice
    row: Row
    table: Table
    report: Report
    elements: float  # wanted for each route and dtype
    problems: int  # wanted in all
    console: Console
    met: set[tuple[str, str]] = field(default_factory=set)
    unable: dict[str, str] = field(default_factory=dict)
    findings: int = 0

    def until(self, deadline: float, crew: Crew, runner: Runner, seed: int) -> None:
        """Round after round until there are elements of every route and dtype and problems enough, or no time left.

        Until there are problems enough, routes and dtypes that have their elements get small ones.
        """
        more = lambda: time.monotonic() < deadline and not runner.poisoned  # noqa: E731
        idle = 0
        while more() and idle < IDLE_ROUNDS:
            number = self.row.rounds.get(seed, 0)
            planned = self.chosen.round(number, seed)
            self.met |= {task.kind for task in planned}
            thin, few = self.thin(), self.few()
            if not thin and not few:
                return
            self.row.rounds[seed] = number + 1  # a round that is cut short is not drawn again
            asked = [task.widened() if task.kind in thin else task for task in planned if few or task.kind in thin]
            self._work(asked, crew, more, number)
            idle = idle + 1 if (self.thin(), self.few()) == (thin, few) else 0

    def judged(self) -> dict[tuple[str, str], int]:
        """Elements of every (route, dtype) that was planned."""
        counts = self.row.elements()
        return {kind: counts.get(kind, 0) for kind in sorted(self.met)}

    def thin(self) -> dict[tuple[str, str], int]:
        """Those with less than is wanted."""
        return {kind: count for kind, count in self.judged().items() if count < self.elements}

    def few(self) -> int:
        """How many problems are missing."""
        return max(0, self.problems - self.row.problems)

    def _work(self, tasks: list[Task], crew: Crew, more: Callable[[], bool], number: int) -> None:
        saved = time.monotonic()
        jobs = [Job(task.route, task.problem, repeat=False) for task in tasks]
        for place, checked in crew.finished(jobs, more):
            self.record(tasks[place], checked)
            if time.monotonic() - saved > SAVE_EVERY:
                self._save(number)
                saved = time.monotonic()
        self._save(number)

    def record(self, task: Task, checked: Checked) -> None:
        """What one problem adds to the row; a finding is on disk first."""
        refused = [v for v in checked.verdicts if v.klass == "NOT_COVERED" and v.quantity == "call"]
        if refused:
            self.unable[f"{task.route} {task.family}"] = refused[0].message
            return
        self.row.problems += 1
        for verdict in checked.verdicts:
            if verdict.klass in FAILURES:
                found = self.report.save(Finding.of(task.route, verdict, task.problem))
                self.findings += 1
                self.row.findings.append({"found": found.message, "route": task.route, "problem": repr(task.problem)})
            if counts(verdict):
                self.row.add((task.route, task.dtype, verdict.quantity), task.family, seen(verdict))

    def _save(self, number: int) -> None:
        self.table.save()
        counts = self.judged()
        least = min(counts, key=counts.get)
        wanted = f" of {self.problems}" if self.problems else ""
        said = f"round {number}: {self.row.problems}{wanted} problems, {len(self.row.findings)} findings"
        say(self.console, f"{said}; least: {' '.join(least)}, {counts[least]:.2g} of {self.elements:.2g} elements")

    def conclude(self) -> int:
        """Print what was seen; the exit status."""
        shown = Shown(title=f"the largest of {self.row.problems} problems", title_justify="left")
        for column in ("route", "dtype", "elements", "z", "of", "in", "ratio", "statistic"):
            shown.add_column(column, justify="right" if column in ("elements", "z", "ratio") else "left")
        counts = self.row.elements()
        for route, dtype in sorted(counts):
            mine = [
                (quantity, family, one)
                for (r, d, quantity), families in self.row.cells.items()
                if (r, d) == (route, dtype)
                for family, one in families.items()
            ]
            quantity, family, far = max(mine, key=lambda item: item[2].z)
            worst = max((one for *_, one in mine), key=lambda one: one.ratio)
            cells = (route, dtype, f"{counts[route, dtype]:.3g}", f"{far.z:.2f}", quantity, family)
            shown.add_row(*cells, f"{worst.ratio:.2f}", worst.statistic)
        self.console.print(shown)
        for place, reason in self.unable.items():
            say(self.console, f"not covered: {place}: {reason}", style="yellow")
        thin = self.thin()
        for (route, dtype), count in sorted(thin.items()):
            say(self.console, f"too few: {route} {dtype}: {count:.3g} elements")
        if self.few():
            say(self.console, f"too few: {self.row.problems} of {self.problems} problems")
        for found in self.row.findings[-self.findings :] if self.findings else ():
            say(self.console, f"FOUND  {found['route']} {found['found']}: {found['problem']}", style="red")
        if self.findings:
            return FINDING
        return INCOMPLETE if thin or self.few() or not self.met else OK


def counts(verdict: Verdict) -> bool:
    """Whether a verdict measured elements against an envelope."""
    return (
        verdict.klass in ("OK", "BUG", "UNSTABLE")
        and bool(verdict.census.elements)
        and verdict.statistic != "near_exact"
    )


def seen(verdict: Verdict) -> Seen:
    """What one verdict adds to its cell."""
    census = verdict.census
    z = max((wrong.z for wrong in census.worst), default=0.0)
    return Seen(z, verdict.ratio, verdict.statistic, census.elements, 1)
