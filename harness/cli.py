"""Authority on the `kda` command: its subcommands, what they print, and their exit status.

0: everything asked for was exercised and is right. 1: a finding. 2: wrong use. 3: nothing, or less than asked for.
"""

import argparse
import fnmatch
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness import check, doctor, interpreter, options, profiles, results
from harness.mutants import command as mutants_command
from harness.problem import Problem
from harness.results import FAILURES, Report, StorageError
from harness.runner import Runner
from harness.subject import Subject, load_subject
from harness.variants import VARIANTS
from harness.verdict import SEVERITY, worst

OK, FINDING, USAGE, INCOMPLETE = 0, 1, 2, 3
DETAIL_LINES = 6  # of a crash on the terminal; problem.json has the rest


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    arguments = _parser().parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        return arguments.run(arguments, console)
    except (ValueError, StorageError) as error:
        print(f"kda: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return INCOMPLETE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kda", description="Hold KDA kernels against the oracle.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, help: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=help, description=help)
        sub.set_defaults(run=run)
        return sub

    options.add_to_parser(command("check", _check, "hold every route of a subject against the oracle"))
    replay = command("replay", _replay, "run one counterexample again, on any subject")
    replay.add_argument("path", type=Path, help="a problem.json")
    options.add_to_parser(replay, "subject", "routes", "device", "seed", "report")
    mutants = command("mutants", mutants_command.run, "hold copies of our own sources with faults in them")
    mutants.add_argument("--mutants", default="*", metavar="GLOB", help="only mutants whose id or kind matches")
    mutants.add_argument("--jobs", type=options.jobs, default=os.cpu_count() or 1, metavar="N", help="at a time")
    mutants.add_argument("--problems", type=options.count, default=200, metavar="N", help="at most, to a mutant")
    options.add_to_parser(mutants, "device", "seed", "json")
    options.add_to_parser(command("routes", _routes, "list the routes of a subject"), "subject")
    options.add_to_parser(command("doctor", _doctor, "say what this machine has, and what is missing"), "report")
    return parser


def _prepared(arguments: argparse.Namespace) -> tuple[Subject, str]:
    device = arguments.device or options.default_device()
    if device == "cpu":
        interpreter.install()
    return load_subject(arguments.subject), device


def _check(arguments: argparse.Namespace, console: Console) -> int:
    subject, device = _prepared(arguments)
    profile = profiles.PROFILES[arguments.profile]
    tasks = check.plan(subject, profile, arguments.routes, arguments.families, device, arguments.seed, arguments.shape)
    if not tasks:
        print(
            f"kda: no route matches {arguments.routes!r} with a family that matches {arguments.families!r}",
            file=sys.stderr,
        )
        return INCOMPLETE
    report = Report(arguments.report)
    report.prepare()
    console.print(_setting(results.environment(device)), markup=False, highlight=False)
    budget = arguments.budget or profile.budget
    checks = check.run(
        subject,
        tasks,
        report,
        device=device,
        budget=budget,
        seed=arguments.seed,
        shrink_seconds=min(profile.shrink_seconds, budget / 4),
        console=console,
        pin_autotune=arguments.pin_autotune,
        shape=arguments.shape,
        jobs=arguments.jobs,
    )
    _print_checks(checks, subject, console)
    status = checks.exit_status()
    try:
        report.finish(check.summary(checks, subject, device, arguments.seed), arguments.json)
    except StorageError as error:
        print(f"kda: {error}", file=sys.stderr)
        status = status or INCOMPLETE
    console.print(_verdict_line(checks, status))
    return status


def _setting(env: dict) -> str:
    how = "interpreted" if env["interpreter"] else "compiled"
    return f"{env['device']}, kernels {how}, torch {env['torch']}, triton {env['triton']}, python {env['python']}"


def _print_checks(checks: check.Checks, subject: Subject, console: Console) -> None:
    table = Table(title=f"{subject.name} {subject.version}".strip(), title_justify="left")
    for column in ("route", "quantity", "problems", "uninformative", "worst ratio", "class"):
        table.add_column(column, justify="left" if column in ("route", "quantity", "class") else "right")
    merged: dict[tuple[str, str], list] = {}
    for row in checks.rows.values():
        merged.setdefault((row.route, row.quantity), []).append(row)
    for (route, quantity), rows in sorted(merged.items()):
        ratio = max(row.worst_ratio for row in rows)
        # What says nothing is counted beside the class of what does.
        vague = sum(row.uninformative for row in rows)
        problems = sum(row.problems for row in rows)
        klass = max((row.klass for row in rows), key=SEVERITY.index)
        klass = "OK" if klass == "UNINFORMATIVE" and vague < problems else klass
        style = "red" if klass in FAILURES else None
        table.add_row(route, quantity, str(problems), str(vague or ""), f"{ratio:.3g}", klass, style=style)
    console.print(table)
    times = Table(title="seconds and reach", title_justify="left")
    for column in ("route", "problems", "longest sequence", "compile", "kernel", "oracle", "peak GiB"):
        times.add_column(column, justify="left" if column == "route" else "right")
    for route, spent in sorted(checks.seconds.items()):
        seconds = [f"{spent[name]:.1f}" for name in ("compile", "kernel", "oracle")]
        peak = checks.peak_bytes.get(route, 0)
        times.add_row(
            route,
            str(checks.problems[route]),
            str(checks.tokens[route]),
            *seconds,
            f"{peak / 2**30:.2f}" if peak else "-",
        )
    console.print(times)
    for where, reason in checks.not_covered.items():
        console.print(f"not covered: {where}: {reason}", style="yellow", markup=False, highlight=False)
    for finding in checks.findings.values():
        summary, *details = finding.message.splitlines()
        console.print(f"{finding.klass} {finding.route} {summary}", style="red", markup=False, highlight=False)
        console.print(f"    {finding.problem!r}", markup=False, highlight=False, soft_wrap=True)
        for line in details[:DETAIL_LINES]:
            console.print(f"    | {line}", markup=False, highlight=False)
        if finding.path:
            console.print(f"    kda replay {finding.path}", markup=False, highlight=False, soft_wrap=True)


def _verdict_line(checks: check.Checks, status: int) -> str:
    done = f"{checks.done - checks.skipped} of {checks.planned} problems"
    if status == OK:
        return f"OK: {done} checked, everything right"
    if status == FINDING:
        return f"{len(checks.findings)} findings in {done}"
    lost = f"; {checks.unproven[0]}" if checks.unproven else ""
    return f"INCOMPLETE: {done} checked, {checks.required_left} required ones left{lost}"


def _replay(arguments: argparse.Namespace, console: Console) -> int:
    if not arguments.path.is_file():
        raise ValueError(f"path is {str(arguments.path)!r}; it must be an existing problem.json")
    problem = Problem.load(arguments.path)
    subject, device = _prepared(arguments)
    routes = [r for r in subject.routes if r.entry == problem.entry and fnmatch.fnmatch(r.id, arguments.routes)]
    runner = Runner(subject, device, arguments.report / "replay", pin_autotune=arguments.pin_autotune)
    console.print(repr(problem), markup=False, soft_wrap=True)
    status = INCOMPLETE
    try:
        for route in routes:
            verdicts = runner.check(route.id, problem, repeat=True, seed=arguments.seed, forms=VARIANTS).verdicts
            failed = worst(verdicts).klass in FAILURES
            if failed or (status == INCOMPLETE and not all(v.klass == "NOT_COVERED" for v in verdicts)):
                status = FINDING if failed or status == FINDING else OK
            for verdict in verdicts:
                console.print(
                    f"{route.id} {verdict}",
                    style="red" if verdict.klass in FAILURES else None,
                    markup=False,
                    highlight=False,
                )
                for wrong in verdict.census.worst if verdict.klass in FAILURES else ():
                    place = "".join(f"[{i}]" for i in wrong.index)
                    console.print(
                        f"    {place} got {wrong.got:.9g}, expected {wrong.expected:.9g}, {wrong.z:.3g} sigma",
                        markup=False,
                    )
    finally:
        runner.close()
    return status


def _routes(arguments: argparse.Namespace, console: Console) -> int:
    subject = load_subject(arguments.subject)
    table = Table(title=f"{subject.name} {subject.version}".strip(), title_justify="left")
    for column in ("route", "entry", "gradients", "rounding points"):
        table.add_column(column)
    for route in subject.routes:
        stages = ", ".join(f"{stage} {fmt}" for stage, fmt in route.spec.stages.items())
        table.add_row(route.id, route.entry, "yes" if route.differentiable else "no", stages)
    console.print(table)
    return OK if subject.routes else INCOMPLETE


def _doctor(arguments: argparse.Namespace, console: Console) -> int:
    facts = doctor.examine(arguments.report)
    for fact in facts:
        console.print(
            f"{'ok  ' if fact.ok else 'FAIL'} {fact.name}: {fact.value}",
            style=None if fact.ok else "red",
            markup=False,
            highlight=False,
        )
    return OK if all(fact.ok for fact in facts) else INCOMPLETE
