"""Authority on what the terminal says of findings, verdicts and stages, and on the exit status of the commands."""

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from harness.results import FAILURES, Finding
from harness.stage_trace import StageRatio
from harness.verdict import Verdict

OK, FINDING, USAGE, INCOMPLETE = 0, 1, 2, 3
DETAIL_LINES = 6  # of a crash on the terminal; problem.json has the rest


def say(console: Console, text: str, style: str | None = None) -> None:
    """One line as it is: no markup, no wrapping."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def finding_lines(finding: Finding) -> list[str]:
    """The five lines of a finding; of one without a diagnosis its message and its problem."""
    if finding.lines:
        return [f"{label:5}  {text}" for label, text in finding.lines]
    summary, *details = finding.message.splitlines()
    return [f"{finding.klass} {finding.route} {summary}", *(f"| {line}" for line in details[:DETAIL_LINES])]


def show_finding(finding: Finding, subject: str, console: Console) -> None:
    """Five lines, the problem, and where the rest is."""
    first, *rest = finding_lines(finding)
    console.print()
    say(console, first, "red")
    for line in rest:
        say(console, line)
    say(console, f"call   {finding.problem!r}")
    if finding.path:
        named = "" if subject == "kda" else f" --subject {subject}"
        say(console, f"again  kda replay {finding.path}{named}")


def show_verdicts(route: str, verdicts: Iterable[Verdict], console: Console) -> None:
    """A line for each verdict, and the worst elements of what failed."""
    for verdict in verdicts:
        failed = verdict.klass in FAILURES
        say(console, f"{route} {verdict}", "red" if failed else None)
        for wrong in verdict.census.worst if failed else ():
            place = "".join(f"[{i}]" for i in wrong.index)
            say(console, f"    {place} got {wrong.got:.9g}, expected {wrong.expected:.9g}, {wrong.z:.3g} sigma")


def stage_table(route: str, stages: Iterable[StageRatio]) -> Table:
    """Every stage with its worst element over its limit, in the order of computation."""
    table = Table(title=f"stages of {route}", title_justify="left")
    for column in ("stage", "worst over its limit", "chunks outside"):
        table.add_column(column, justify="right" if column.startswith("worst") else "left")
    for stage in stages:
        style = None if stage.ratio <= 1 else "red"
        table.add_row(stage.stage, f"{stage.ratio:.3g}", ", ".join(map(str, stage.slots)), style=style)
    return table
