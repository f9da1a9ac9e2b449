"""Authority on the `kda` command: its subcommands, what they print, and their exit status.

0: everything asked for was exercised and is right. 1: a finding. 2: wrong use. 3: nothing, or less than asked for.
"""

import argparse
import dataclasses
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness import (
    calibrate,
    calibration,
    check,
    counterexample,
    coverage,
    doctor,
    fleet,
    history,
    interrupts,
    journal,
    options,
    profiles,
    results,
    sanitizers,
    shares,
    terminal,
)
from harness.bench import command as bench_command
from harness.mutants import command as mutants_command
from harness.report import step_summary
from harness.results import FAILURES, Report, StorageError
from harness.subject import Subject, load_subject
from harness.terminal import FINDING, INCOMPLETE, OK, USAGE
from harness.verdict import SEVERITY

_ALL = options.Shard(1, 1)
PATH_HELP = "a problem.json, or the folder that holds it"


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
    replay = command("replay", counterexample.replayed, "run one counterexample again, on any subject")
    replay.add_argument("path", type=Path, help=PATH_HELP)
    replay.add_argument("--stage-trace", action="store_true", help="also hold every stage against its envelope")
    options.add_to_parser(replay, "subject", "routes", "device", "seed", "report")
    mutants = command("mutants", mutants_command.run, "hold copies of our own sources with faults in them")
    mutants.add_argument("--mutants", default="*", metavar="GLOB", help="only mutants whose id or kind matches")
    mutants.add_argument("--jobs", type=options.jobs, default=os.cpu_count() or 1, metavar="N", help="at a time")
    mutants.add_argument("--problems", type=options.count, default=200, metavar="N", help="at most, to a mutant")
    mutants.add_argument(
        "--signatures", type=Path, metavar="FILE", help="write what each answers to the probes of likeness, and no more"
    )
    options.add_to_parser(mutants, "device", "seed", "json")
    smaller = command(
        "minimise", counterexample.minimised, "make one counterexample as small as it gets, and report it"
    )
    smaller.add_argument("path", type=Path, help=PATH_HELP)
    options.add_to_parser(smaller, "subject", "routes", "device", "budget", "seed", "report")
    beside = command("compare", counterexample.compared, "run one counterexample on several subjects, side by side")
    beside.add_argument("path", type=Path, help=PATH_HELP)
    beside.add_argument("--subjects", required=True, metavar="NAME,NAME", help="subjects, as for --subject")
    options.add_to_parser(beside, "routes", "device", "seed", "report")
    calibrate.add_to_parser(
        command("calibrate", calibrate.run, "count false alarms of correct kernels, and how close they come to limits")
    )
    bench_command.add_to_parser(command("bench", bench_command.run, "time kernels side by side, each with its error"))
    history.add_to_parser(command("history", history.run, "what got better or worse from run to run, since when"))
    options.add_to_parser(command("routes", _routes, "list the routes of a subject"), "subject")
    options.add_to_parser(command("doctor", _doctor, "say what this machine has, and what is missing"), "report")
    return parser


def _resumed(arguments: argparse.Namespace) -> None:
    """Put what the run in --resume was asked for in the place of what this one is."""
    asked = {"replays": [], **journal.selection_of(arguments.resume)}
    forms = {"shape": options.Shape, "shard": options.Shard}
    for name, value in asked.items():
        setattr(arguments, name, forms[name](*value) if name in forms and value else value)


def _check(arguments: argparse.Namespace, console: Console) -> int:
    if arguments.resume:
        _resumed(arguments)
    subject, device = counterexample.prepared(arguments, arguments.subject)
    if arguments.sanitizer:
        sanitizers.must_be_usable(arguments.sanitizer, device)
    profile = profiles.PROFILES[arguments.profile]
    known = fleet.Fleet(arguments.report / fleet.LOCAL, arguments.database)
    # A run that goes on has the problems that it began with.
    replays = arguments.replays if arguments.resume else known.replays(subject, arguments.routes)
    tasks = check.plan(subject, profile, arguments.routes, arguments.families, device, arguments.seed, arguments.shape)
    tasks = check.replayed(replays, arguments.shape) + tasks
    if not tasks:
        print(
            f"kda: no route matches {arguments.routes!r} with a family that matches {arguments.families!r}",
            file=sys.stderr,
        )
        return INCOMPLETE
    tasks = shares.share(tasks, arguments.shard)
    if not tasks:
        print("kda: nothing is left for this shard; there are fewer compile keys than shards", file=sys.stderr)
        return INCOMPLETE
    report = Report(arguments.report, arguments.resume, lambda finding: known.add(subject.name, finding))
    report.prepare()
    selection = {name: _plain(getattr(arguments, name)) for name in journal.SELECTION} | {"replays": replays}
    record = journal.Journal(report.folder, tasks, selection, device)
    if arguments.json:
        results.probe(arguments.json, "json")
    console.print(_setting(results.environment(device)), markup=False, highlight=False)
    uncalibrated = calibration.missing(device)
    if uncalibrated:
        terminal.say(console, uncalibrated, style="yellow")
    if replays:
        terminal.say(console, f"first, {len(replays)} problems that failed before")
    budget = arguments.budget or profile.budget
    # The machines of a fleet draw problems of their own.
    drawn = (profile, arguments.routes, arguments.families, device, arguments.seed + (arguments.shard or _ALL).index)
    with interrupts.handled() as stop:
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
            sanitizer=arguments.sanitizer,
            shape=arguments.shape,
            jobs=arguments.jobs,
            journal=record,
            drivers=check.searches(subject, *drawn, arguments.shape),
        )
        stop.finishing()
        known.close()
        _print_checks(checks, subject, console)
        if profile.name in ("sweep", "nightly"):
            _print_coverage(checks, tasks, console)
        return _finished(
            checks, report, check.summary(checks, subject, device, arguments.seed), arguments.json, console
        )


def _finished(
    checks: check.Checks, report: Report, document: dict[str, object], extra: Path | None, console: Console
) -> int:
    """Write the results of a run; its exit status."""
    status = checks.exit_status()
    try:
        report.finish(document, extra)
    except StorageError as error:
        print(f"kda: {error}", file=sys.stderr)
        status = status or INCOMPLETE
    step_summary.append(
        step_summary.section(f.id, "\n".join(terminal.finding_lines(f)), f"@example({f.problem!r})", f.path)
        for f in checks.findings.values()
    )
    console.print(_verdict_line(checks, status, report.folder), markup=False, highlight=False, soft_wrap=True)
    return status


def _plain(value: object) -> object:
    """An option as JSON has it."""
    return dataclasses.astuple(value) if dataclasses.is_dataclass(value) else value


def _setting(env: dict) -> str:
    how = "interpreted" if env["interpreter"] else "compiled"
    return f"{env['device']}, kernels {how}, torch {env['torch']}, triton {env['triton']}, python {env['python']}"


def _print_checks(checks: check.Checks, subject: Subject, console: Console) -> None:
    table = Table(title=subject.title, title_justify="left")
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
    for route in subject.routes:
        if subject.foreign and route.id in checks.problems and route.lacking:
            terminal.say(console, f"{route.id} ({route.entry}): {'; '.join(route.lacking)}")
    for finding in checks.findings.values():
        terminal.show_finding(finding, subject.name, console)
    if checks.index:
        console.print(f"report: {checks.index}", markup=False, highlight=False, soft_wrap=True)


def _print_coverage(checks: check.Checks, tasks: list[check.Task], console: Console) -> None:
    for route, counts in sorted(checks.met.items()):
        asked = coverage.everything(task.problem for task in tasks if task.route == route)
        for line in coverage.shown(counts, asked):
            terminal.say(console, f"met    {route}: {line}")


def _verdict_line(checks: check.Checks, status: int, folder: Path) -> str:
    done = f"{checks.done - checks.skipped} of {checks.planned} problems"
    again = f"; go on: kda check --resume {folder}" if checks.done < checks.planned else ""
    if status == OK:
        return f"OK: {done} checked, everything right{again}"
    if status == FINDING:
        return f"{len(checks.findings)} findings in {done}{again}"
    left = f", {checks.required_left} required ones left" if checks.required_left else ""
    lost = f"; {checks.unproven[0]}" if checks.unproven else ""
    return f"INCOMPLETE: {done} checked{left}{lost}{again}"


def _routes(arguments: argparse.Namespace, console: Console) -> int:
    subject = load_subject(arguments.subject)
    table = Table(title=subject.title, title_justify="left")
    for column in ("route", "entry", "gradients", "rounding points"):
        table.add_column(column)
    for route in subject.routes:
        stages = ", ".join(f"{stage} {fmt}" for stage, fmt in route.spec.stages.items())
        table.add_row(route.id, route.entry, "yes" if route.differentiable else "no", stages)
    console.print(table)
    for route in subject.routes:
        for lacking in route.lacking:
            terminal.say(console, f"{route.id} ({route.entry}): {lacking}")
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
