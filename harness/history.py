"""Authority on `kda history`: what got better or worse from run to run, and between which versions it did."""

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from harness import options
from harness.globs import matches
from harness.results import RESULTS
from harness.terminal import FINDING, INCOMPLETE, OK, say
from harness.verdict import SEVERITY

GROWTH = 1.5  # of a worst ratio that is news where the class is the same: other seeds alone stay below it
TELLING = 0.5  # a ratio below this is no news, whatever it was
VERSIONS = ("harness", "torch", "triton")
ROW = ("route", "quantity", "family", "class", "worst_ratio", "problems")


@dataclass(frozen=True)
class Run:
    """One line of results.jsonl: where it ran, of which versions, and its rows by (route, quantity, family)."""

    subject: str
    version: str
    place: str
    env: dict
    time: str
    rows: dict[tuple[str, str, str], dict]

    @classmethod
    def of(cls, document: object) -> "Run":
        """ValueError where that is no result document."""
        if not isinstance(document, dict) or document.get("schema") != 1:
            raise ValueError("it must be a result document of schema 1")
        env, title, rows = (document.get(name) for name in ("env", "subject", "routes"))
        if not isinstance(env, dict) or not isinstance(title, str) or not isinstance(rows, list):
            raise ValueError("it must have an env, a subject and routes")
        if not all(isinstance(row, dict) and row.keys() >= set(ROW) and row["class"] in SEVERITY for row in rows):
            raise ValueError(f"each of its routes must have {', '.join(ROW)}")
        subject, _, version = title.partition(" ")
        place = f"{env.get('device')}{', interpreted' if env.get('interpreter') else ''}"
        keyed = {(row["route"], row["quantity"], row["family"]): row for row in rows}
        return cls(subject, version, place, env, str(document.get("time", "")), keyed)

    @property
    def versions(self) -> str:
        own = f"{self.subject} {self.version}".strip()
        named = [f"{name} {self.env[name]}" for name in VERSIONS if name in self.env]
        return ", ".join([own, *named, *filter(None, [self.time])])


@dataclass(frozen=True)
class Change:
    """A row of the newest run that is not what it was: in `before`, the last run that had it otherwise, and in `since`,
    the first run of those since then.
    """

    key: tuple[str, str, str]
    verdict: str  # worse | better
    then: dict
    now: dict
    before: Run
    since: Run


def load(path: Path) -> tuple[list[Run], list[str]]:
    """(the runs of a results.jsonl, oldest first; what is wrong with other lines, as a kill leaves the last one)."""
    runs, wrong = [], []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"report has {str(path)!r}, which must be a file of results ({error})") from None
    for number, line in enumerate(lines, 1):
        try:
            runs.append(Run.of(json.loads(line)))
        except ValueError as error:
            wrong.append(f"{path}:{number} is left out: {error}")
    return runs, wrong


def changes(runs: list[Run]) -> Iterator[Change]:
    """What the newest of these runs, of one subject in one place, has that is not what it was."""
    for key, now in runs[-1].rows.items():
        having = [run for run in runs if key in run.rows]
        for before, since in reversed(list(itertools.pairwise(having))):
            verdict = _direction(before.rows[key], now)
            if verdict:
                yield Change(key, verdict, before.rows[key], now, before, since)
                break


def _direction(then: dict, now: dict) -> str:
    """'worse', 'better' or ''."""
    classes = [SEVERITY.index(row["class"]) for row in (then, now)]
    if classes[0] != classes[1]:
        return "worse" if classes[1] > classes[0] else "better"
    before, after = (float(row["worst_ratio"]) for row in (then, now))
    if after > GROWTH * before and after > TELLING:
        return "worse"
    return "better" if before > GROWTH * after and before > TELLING else ""


def by_place(runs: Iterable[Run]) -> dict[tuple[str, str], list[Run]]:
    """Runs that may be compared: of one subject on one device."""
    groups: defaultdict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in runs:
        groups[run.subject, run.place].append(run)
    return groups


def add_to_parser(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--subject", default="*", metavar="GLOB", help="only subjects whose name matches")
    options.add_to_parser(parser, "routes", "families", "report")


def run(arguments: argparse.Namespace, console: Console) -> int:
    """0: nothing in the newest runs is worse than it was. 1: something is. 3: no two runs to compare."""
    runs, wrong = load(arguments.report / RESULTS)
    for line in wrong:
        say(console, line, "yellow")
    compared, worse = 0, 0
    for (subject, place), group in by_place(runs).items():
        if not matches(subject, arguments.subject):
            continue
        found = [
            change
            for change in changes(group)
            if matches(change.key[0], arguments.routes) and matches(change.key[2], arguments.families)
        ]
        compared += len(group) > 1
        worse += sum(change.verdict == "worse" for change in found)
        say(console, f"{subject} on {place}: {len(group)} runs, the newest {group[-1].versions}")
        if found:
            console.print(_table(found))
    if not compared:
        say(console, "no two runs to compare")
        return INCOMPLETE
    say(console, f"{worse} worse" if worse else "nothing is worse than it was")
    return FINDING if worse else OK


def _table(found: list[Change]) -> Table:
    table = Table(title="what is not what it was", title_justify="left")
    for column in ("route", "quantity", "family", "was", "is", "last with", "first with"):
        table.add_column(column, overflow="fold")
    shown = lambda row: f"{row['class']} {float(row['worst_ratio']):.3g}"  # noqa: E731
    for change in sorted(found, key=lambda change: change.verdict, reverse=True):
        style = "red" if change.verdict == "worse" else "green"
        versions = (change.before.versions, change.since.versions)
        table.add_row(*change.key, shown(change.then), shown(change.now), *versions, style=style)
    return table
