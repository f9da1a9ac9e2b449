"""Authority on commands that take one counterexample: run it again, make it smaller, hold several subjects to it."""

import argparse
import contextlib
import functools
import math
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness import interpreter, options, results
from harness.call import Route
from harness.diagnose import diagnose
from harness.globs import matches
from harness.minimise import minimise
from harness.problem import Problem, streams
from harness.report import folder
from harness.results import FAILURES, Finding, Report, form_of, load_found
from harness.runner import Checked, Runner
from harness.shrink import shrink
from harness.stage_line import stages_of
from harness.subject import Subject, load_subject
from harness.terminal import FINDING, INCOMPLETE, OK, say, show_finding, show_verdicts, stage_table
from harness.variants import VARIANTS, WATCHED
from harness.verdict import SEVERITY, Verdict, worst

MINIMISE_SECONDS = 60.0
COPIES = 4  # of every input, in fp32, that a check holds at least
SHARE_OF_DIAGNOSIS = 0.25  # of the time of `minimise`


def prepared(arguments: argparse.Namespace, name: str | None) -> tuple[Subject, str]:
    """The subject of this name and the device, which decides whether kernels are interpreted."""
    device = arguments.device or options.default_device()
    if device == "cpu":
        interpreter.install()
    return load_subject(name), device


def replayed(arguments: argparse.Namespace, console: Console) -> int:
    """`kda replay`: every route that takes the problem, judged anew."""
    problem = _load(arguments.path)
    say(console, repr(problem))
    subject, device = prepared(arguments, arguments.subject)
    results = []
    with _runner(arguments, subject, device, "replay") as runner:
        for route in _routes(arguments, subject, problem):
            checked = runner.check(route.id, problem, repeat=True, seed=arguments.seed, forms=VARIANTS)
            show_verdicts(route.id, checked.verdicts, console)
            results.append(checked)
            if arguments.stage_trace:
                _trace(runner, route, problem, arguments.seed, console)
    return _status(results)


def minimised(arguments: argparse.Namespace, console: Console) -> int:
    """`kda minimise`: the smallest problem of the same failure, with its own report folder."""
    problem, found = _load(arguments.path), load_found(_problem_path(arguments.path))
    subject, device = prepared(arguments, arguments.subject)
    seconds = arguments.budget or MINIMISE_SECONDS
    report = Report(arguments.report)
    report.prepare()
    with _runner(arguments, subject, device, "inflight") as runner:
        finding, covered = _failure(arguments, runner, problem, found)
        if finding is None:
            say(console, f"{subject.name} is right on this problem" if covered else f"{subject.name} does not take it")
            return OK if covered else INCOMPLETE
        still_fails = functools.partial(runner.fails_like, finding, seed=arguments.seed)
        searching = seconds * (1 - SHARE_OF_DIAGNOSIS) / 2
        smaller = minimise(shrink(problem, still_fails, searching), still_fails, searching)
        made = diagnose(runner, replace(finding, problem=smaller), arguments.seed, seconds * SHARE_OF_DIAGNOSIS)
        finding = folder.write(made, report, results.environment(device))
    show_finding(finding, subject.name, console)
    return FINDING


def compared(arguments: argparse.Namespace, console: Console) -> int:
    """`kda compare`: one table, a line for every route of every subject, the quantities as columns."""
    problem, found = _load(arguments.path), load_found(_problem_path(arguments.path))
    form = found[3] if found else ""
    names = [name for name in arguments.subjects.split(",") if name]
    if not names:
        raise ValueError(f"subjects is {arguments.subjects!r}; it must be names separated by commas")
    say(console, repr(problem))
    quantities = sorted(problem.quantities())
    title = f"ratio and class, by subject{f', in the form {form} too' if form else ''}"
    table = Table(title=title, title_justify="left")
    for column in ("subject", "route", *quantities):
        table.add_column(column, overflow="fold")
    results, left_out = [], []
    for name in names:
        subject, device = prepared(arguments, name)
        with _runner(arguments, subject, device, "inflight") as runner:
            for route in _routes(arguments, subject, problem):
                checked = runner.check(route.id, problem, repeat=True, seed=arguments.seed, forms=(form,))
                results.append(checked)
                reason = _not_covered(checked)
                if reason is None:
                    table.add_row(subject.name, route.id, *_cells(checked, quantities))
                else:
                    left_out.append(f"not covered: {subject.name} {route.id}: {reason}")
    if table.row_count:
        console.print(table)
    for line in left_out:
        say(console, line, "yellow")
    return _status(results)


def _problem_path(path: Path) -> Path:
    path = path / "problem.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"path is {str(path)!r}; it must be an existing problem.json, or a folder that holds one")
    return path


def _load(path: Path) -> Problem:
    """The problem of a file that may be anybody's: read strictly, and refused if it does not fit this machine."""
    path = _problem_path(path)
    problem = Problem.load(path)
    needed = COPIES * sum(4 * math.prod(problem.shape(stream)) for stream in streams(problem))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise ValueError(f"{path} needs {needed / 2**30:.0f} GiB; this machine has {memory / 2**30:.0f}")
    return problem


@contextlib.contextmanager
def _runner(arguments: argparse.Namespace, subject: Subject, device: str, name: str) -> Iterator[Runner]:
    pinned = getattr(arguments, "pin_autotune", False)
    runner = Runner(subject, device, arguments.report / name, pin_autotune=pinned)
    try:
        yield runner
    finally:
        runner.close()


def _routes(arguments: argparse.Namespace, subject: Subject, problem: Problem) -> list[Route]:
    found = [r for r in subject.routes if r.entry == problem.entry and matches(r.id, arguments.routes)]
    if not found:
        there = ", ".join(r.id for r in subject.routes if r.entry == problem.entry) or "none"
        raise ValueError(
            f"routes is {arguments.routes!r}; it must match one of {subject.name}'s for {problem.entry}: {there}"
        )
    return found


def _status(results: list[Checked]) -> int:
    """1 if anything failed; 0 if something was compared and all of it is right; else 3."""
    if any(worst(checked.verdicts).klass in FAILURES for checked in results):
        return FINDING
    return OK if any(_not_covered(checked) is None for checked in results) else INCOMPLETE


def _not_covered(checked: Checked) -> str | None:
    """Why nothing of the problem was compared on this route, or None."""
    reasons = [v.message for v in checked.verdicts if v.klass == "NOT_COVERED"]
    return (reasons or ["nothing was returned"])[0] if len(reasons) == len(checked.verdicts) else None


def _trace(runner: Runner, route: Route, problem: Problem, seed: int, console: Console) -> None:
    stages, reason = stages_of(runner, route, problem, seed)
    if stages:
        console.print(stage_table(route.id, stages))
    else:
        say(console, f"{route.id}: no stage trace: {reason}")


def _failure(
    arguments: argparse.Namespace, runner: Runner, problem: Problem, found: tuple[str, str, str, str] | None
) -> tuple[Finding | None, bool]:
    """(the failure that the file names, else the worst one of any route, else None; whether anything was covered)."""
    failures: list[tuple[str, Verdict]] = []
    covered = False
    for route in _routes(arguments, runner.subject, problem):
        for verdict in runner.check(route.id, problem, repeat=True, seed=arguments.seed, forms=VARIANTS).verdicts:
            covered |= verdict.klass != "NOT_COVERED"
            failures += [(route.id, verdict)] if verdict.klass in FAILURES else []
    named = [(route, v) for route, v in failures if found == (route, v.quantity, v.klass, form_of(v))]
    # What the sanitizer says is the cause of whatever else memory that nobody wrote has done.
    gravity = lambda one: (form_of(one[1]) == WATCHED, SEVERITY.index(one[1].klass))  # noqa: E731
    ordered = named or sorted(failures, key=gravity, reverse=True)
    return (runner.steadier(Finding.of(*ordered[0], problem)) if ordered else None), covered


def _cells(checked: Checked, quantities: list[str]) -> Iterator[str]:
    by_name: dict[str, list[Verdict]] = {}
    for verdict in checked.verdicts:
        by_name.setdefault(verdict.quantity, []).append(verdict)
    whole = worst(by_name["call"]) if "call" in by_name else None
    for name in quantities:
        verdict = worst(by_name[name]) if name in by_name else whole
        if verdict is None:
            yield "-"
        elif verdict.klass in FAILURES:
            yield f"[red]{verdict.ratio:.3g} {verdict.klass}[/red]"
        else:
            yield f"{verdict.ratio:.3g} {verdict.klass}"
