"""Authority on report.md: the finding as the body of a GitHub issue."""

from collections.abc import Mapping

from harness.diagnose import Diagnosis
from harness.problem import Case
from harness.report.call_text import call_lines, form_lines, shape_lines
from harness.report.numbers import Table, explicit, place, short

MOST_CHARACTERS = 60_000  # GitHub refuses a body of 65 536
WORST = 5
SCRIPT = "`python reproduce.py` needs torch and the kernel's package; it exits 1 while the fault lasts."
NO_SCRIPT = "`kda replay problem.json --subject NAME` runs it again, and exits 1 while the fault lasts."


def markdown(made: Diagnosis, case: Case, env: Mapping[str, object], scripted: bool = True) -> str:
    """The diagnosis, the call, the worst elements, every number where they are few; what does not fit is left out.

    `scripted`: there is a reproduce.py beside it.
    """
    finding = made.finding
    parts = [
        f"## {finding.klass}: {finding.quantity} of {finding.route}\n",
        "\n".join(f"- **{label}**: {text}" for label, text in made.said) + "\n",
        "\n".join(form_lines(finding)) + "\n" if finding.variant else "",
        _fenced("\n".join([*shape_lines(case), "", *call_lines(case, made.route)]), "python"),
        _worst(made),
        *(_table(one) for one in explicit(case, made.field)),
        f"{SCRIPT if scripted else NO_SCRIPT}\n",
        _fenced(f"@example({finding.problem!r})", "python"),
        ", ".join(f"{name} {value}" for name, value in env.items()) + "\n",
    ]
    text = ""
    for part in filter(None, parts):
        if len(text) + len(part) < MOST_CHARACTERS:
            text += part + "\n"
    return text


def _fenced(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```\n"


def _rows(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    safe = lambda cells: " | ".join(cell.replace("|", "\\|") for cell in cells)  # noqa: E731
    lines = [f"| {safe(header)} |", "|" + " --- |" * len(header), *(f"| {safe(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def _worst(made: Diagnosis) -> str:
    verdict = next((v for v in made.verdicts if v.quantity == made.finding.quantity and not made.finding.variant), None)
    if verdict is None or not verdict.census.worst:
        return ""
    rows = [
        (place(verdict.quantity, w.index), short(w.got, 9), short(w.expected, 9), short(w.z, 3))
        for w in verdict.census.worst[:WORST]
    ]
    return _rows(("element", "got", "expected", "sigmas"), rows)


def _table(one: Table) -> str:
    return f"{one.title}\n\n{_rows(one.header, list(one.rows))}"
