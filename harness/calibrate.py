"""Authority on `kda calibrate`: which problems it draws, how it keeps what it has seen, and when it has seen enough."""

import argparse
import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table as Shown

from harness import options
from harness.calibration import TABLE, Row, Seen, Table, platform
from harness.call import Route
from harness.check import draw
from harness.counterexample import prepared
from harness.crew import Crew, Job, Settings, processes
from harness.families import FAMILIES, Family
from harness.fitting import drawn_for, fitted
from harness.globs import matches
from harness.problem import Problem
from harness.results import FAILURES, Finding, Report
from harness.runner import Checked, Runner
from harness.subject import Subject
from harness.terminal import FINDING, INCOMPLETE, OK, say
from harness.verdict import Verdict
from oracle.envelope import LIMITS

DRAWN = 4  # generated problems to a route and a family in one round, besides one of its examples
LONGEST = 66  # about, of a generated problem
SEEDS = 100_003  # between two rounds: examples get seeds of their own in each
DTYPES = ("bf16", "fp32", "fp16")
WIDTHS = ((64, 64), (128, 128), (64, 64), (16, 16))  # K and V by turns on a GPU, where each has to be compiled
SAVE_EVERY = 10.0  # seconds
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
    chosen = _Choice(subject, arguments.routes, arguments.families, device)
    run = Calibration(chosen, row, table, report, arguments.elements, console)
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


@dataclass(frozen=True)
class Task:
    route: str
    family: str
    problem: Problem

    @property
    def dtype(self) -> str:
        """What a cell of the table goes by: of the gate where there is nothing else; products of fp32 apart."""
        if self.problem.entry == "gate":
            return self.problem.gate_dtype
        return self.problem.dtype + ("-tf32" if self.problem.precision == "tf32" else "")


@dataclass(frozen=True)
class _Choice:
    """The routes and families asked for, and the problems of each round."""

    subject: Subject
    routes: str
    families: str
    device: str
    _drawn: dict[tuple[str, str], list[Problem]] = field(default_factory=dict)  # of this round, for every route

    def round(self, number: int, seed: int) -> list[Task]:
        """Fresh problems for every route and family, the same ones for the same number and seed."""
        fresh = seed + SEEDS * (number + 1)
        self._drawn.clear()
        queues = [
            [Task(route.id, family.name, problem) for problem in self._problems(route, family, number, fresh)]
            for family in FAMILIES
            if matches(family.name, self.families) and not family.gpu_only
            for route in self.subject.routes
            if matches(route.id, self.routes) and drawn_for(route.entry) in family.entries
        ]
        # By turns, so that a round that is cut short has seen every family.
        return [task for turn in itertools.zip_longest(*queues) for task in turn if task is not None]

    def _problems(self, route: Route, family: Family, number: int, fresh: int) -> Iterator[Problem]:
        example = replace(family.examples[number % len(family.examples)], seed=fresh)
        turns = itertools.count(number)
        drawn = self._draw(family, drawn_for(route.entry), fresh)
        for problem in (example, *(_varied(problem, next(turns), self.device) for problem in drawn)):
            fit = fitted(problem, route.id, route.entry)
            if fit is not None and not route.lacks(fit):
                yield fit

    def _draw(self, family: Family, entry: str, fresh: int) -> list[Problem]:
        if (family.name, entry) not in self._drawn:
            longest = LONGEST if self.device != "cpu" else LONGEST // 2
            # The first that Hypothesis draws is the simplest there is, every time.
            self._drawn[family.name, entry] = draw(family, entry, DRAWN + 1, fresh, longest)[1:]
        return self._drawn[family.name, entry]


def _varied(problem: Problem, turn: int, device: str) -> Problem:
    """In the dtype whose turn it is, and on a GPU with widths and a dtype of the gates that many problems share."""
    dtype = DTYPES[turn % len(DTYPES)]
    precision = problem.precision if dtype == "fp32" else "ieee"
    problem = replace(problem, dtype=dtype, precision=precision)
    if device == "cpu":
        return problem
    K, V = WIDTHS[turn // len(DTYPES) % len(WIDTHS)]
    gates = dtype if problem.entry == "gate" or problem.seed % 2 else "fp32"
    return replace(problem, gate_dtype=gates, K=K, V=1 if problem.entry == "gate" else V)


@dataclass
class Calibration:
    """One run of the command."""

    chosen: _Choice
    row: Row
    table: Table
    report: Report
    wanted: float
    console: Console
    met: set[tuple[str, str]] = field(default_factory=set)
    unable: dict[str, str] = field(default_factory=dict)
    findings: int = 0

    def until(self, deadline: float, crew: Crew, runner: Runner, seed: int) -> None:
        """Round after round until there is enough of every route and dtype, or no time left."""
        more = lambda: time.monotonic() < deadline and not runner.poisoned  # noqa: E731
        idle = 0
        while more() and idle < IDLE_ROUNDS:
            number = self.row.rounds.get(seed, 0)
            planned = self.chosen.round(number, seed)
            self.met |= {(task.route, task.dtype) for task in planned}
            before = self.thin()
            if not before:
                return
            self.row.rounds[seed] = number + 1  # a round that is cut short is not drawn again
            self._work([task for task in planned if (task.route, task.dtype) in before], crew, more)
            self.table.save()
            self._say(number)
            idle = idle + 1 if self.thin() == before else 0

    def thin(self) -> dict[tuple[str, str], int]:
        """Elements of every (route, dtype) that has less than is wanted."""
        judged = self.row.elements()
        counts = {cell: judged.get(cell, 0) for cell in self.met}
        return {cell: count for cell, count in counts.items() if count < self.wanted}

    def _work(self, tasks: list[Task], crew: Crew, more: Callable[[], bool]) -> None:
        saved = time.monotonic()
        jobs = [Job(task.route, task.problem, repeat=False) for task in tasks]
        for task, checked in zip(tasks, crew.check(jobs, more)):
            self.record(task, checked)
            if time.monotonic() - saved > SAVE_EVERY:
                self.table.save()
                saved = time.monotonic()

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

    def _say(self, number: int) -> None:
        said = f"round {number}: {self.row.problems} problems, {len(self.row.findings)} findings"
        thin = self.thin()
        least = min(thin, key=thin.get, default=None)
        rest = f"least of {' '.join(least)}, {thin[least]:.2g} elements" if least else "enough of everything"
        say(self.console, f"{said}; {rest}")

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
        for found in self.row.findings[-self.findings :] if self.findings else ():
            say(self.console, f"FOUND  {found['route']} {found['found']}: {found['problem']}", style="red")
        if self.findings:
            return FINDING
        return INCOMPLETE if thin or not self.met else OK


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
