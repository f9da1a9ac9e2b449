"""Authority on report.html: one file that asks for nothing else, read from the top in ten seconds."""

import json
from collections.abc import Iterable, Mapping
from html import escape
from importlib import resources

import torch

from harness.diagnose import Diagnosis
from harness.problem import Case
from harness.report.call_text import call_lines, form_lines, shape_lines
from harness.report.figures import MOST_CELLS, panels
from harness.report.numbers import Table, explicit, place, short
from harness.results import FAILURES

SHOWN = 12  # worst elements, and values of an axis in the census
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
LEGEND = ("to 1/4", "to 1/2", "to 1: inside", "to 3", "to 10", "to 100", "to 1e4", "beyond", "not finite")


def page(made: Diagnosis, case: Case, env: Mapping[str, object], scripted: bool = True) -> str:
    """The whole document. `scripted`: there is a reproduce.py beside it."""
    finding = made.finding
    title = f"{finding.quantity} of {finding.route}"
    body = [
        f'<h1><span class="badge">{escape(finding.klass)}</span>{escape(title)}</h1>',
        f'<p class="sub">{escape(made.subject)}, {escape(_setting(env))}</p>',
        _lines(made),
        _figure(made),
        '<div class="pair">',
        _worst(made),
        _call(made, case),
        "</div>",
        *_numbers(made, case),
        '<div class="pair">',
        _census(made),
        _trials(made),
        _likes(made),
        _stages(made),
        _quantities(made),
        "</div>",
        _again(made, scripted),
        _environment(env),
    ]
    drawn = _panels(made)
    return document(f"{finding.klass}: {title}", "\n".join(body), drawn)


def document(title: str, body: str, drawn: list[dict[str, object]] | None = None) -> str:
    """A self-contained page: style and script inside, and a policy that forbids every request."""
    read = lambda name: resources.files("harness.report").joinpath(name).read_text()  # noqa: E731
    script = ""
    if drawn:
        data = json.dumps(drawn, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
        script = f'<script type="application/json" id="panels">{data}</script>\n<script>\n{read("page.js")}</script>\n'
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{read('page.css')}</style>\n</head>\n<body>\n<main>\n"
        f"{body}\n</main>\n{script}</body>\n</html>\n"
    )


def table(header: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """An HTML table; cells that are `Raw` are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ["".join(_cell(cell) for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


class Raw(str):
    """Text that is HTML already."""


def _cell(cell: object) -> str:
    if isinstance(cell, Raw):
        return f"<td>{cell}</td>"
    text = escape(str(cell))
    return f'<td class="num">{text}</td>'


def _card(title: str, *content: str) -> str:
    return f'<section class="card"><h3>{escape(title)}</h3>{"".join(content)}</section>'


def _setting(env: Mapping[str, object]) -> str:
    how = "kernels interpreted" if env["interpreter"] else "kernels compiled"
    return f"{env['device']}, {how}, torch {env['torch']}, triton {env['triton']}"


def _lines(made: Diagnosis) -> str:
    items = "".join(f"<dt>{escape(label)}</dt><dd>{escape(text)}</dd>" for label, text in made.lines)
    form = "".join(f"<p>{escape(text.replace('`', ''))}</p>" for text in form_lines(made.finding))
    return f'<section class="card"><dl class="lines">{items}</dl>{form}</section>'


def _likes(made: Diagnosis) -> str:
    if not made.likes:
        return ""
    rows = [
        (Raw(f"{escape(one.known.fault)}<br>{escape(one.known.place)}"), one.known.kind, f"{one.score:.2f}")
        for one in made.likes
    ]
    return _card("Known faults that look like this one", table(("fault of our own kernels", "kind", "likeness"), rows))


def _panels(made: Diagnosis) -> list[dict[str, object]]:
    """Those of the failing quantity, then the other failing ones, then what fits."""
    failing = [v.quantity for v in made.verdicts if v.klass in FAILURES]
    order = dict.fromkeys([made.finding.quantity, *failing, *made.fields])
    drawn: list[dict[str, object]] = []
    for name in order:
        left = MOST_CELLS - sum(len(panel["ratio"]) for panel in drawn)
        if name in made.fields and left > 0:
            drawn += panels(made.fields[name], made.finding.problem, left)
    return drawn


def _figure(made: Diagnosis) -> str:
    if not made.fields:
        return ""
    boxes = "".join(
        f'<span><svg viewBox="0 0 12 12"><rect class="c{i}" width="12" height="12"/></svg>{escape(text)}</span>'
        for i, text in enumerate(LEGEND)
    )
    return (
        '<section class="card"><h3>Error over tolerance</h3>'
        '<div class="tabs" id="quantities"></div><div class="tabs" id="planes"></div>'
        '<div class="figure scroll" id="figure"></div><p class="readout values" id="readout"></p>'
        f'<div class="legend">{boxes}</div></section>'
    )


def _worst(made: Diagnosis) -> str:
    field = made.field
    if field is None or not field.expected.numel():
        return ""
    ratio = field.ratio.flatten()
    rows = []
    for flat in torch.argsort(ratio, descending=True, stable=True)[: min(SHOWN, int((ratio > 0).sum()))].tolist():
        index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), field.expected.shape))
        values = [short(float(x.flatten()[flat])) for x in (field.got, field.expected)]
        far = float(ratio[flat])
        mark = Raw(f'<span class="{"bad" if not far <= 1 else "good"}">{escape(short(far, 3))}</span>')
        rows.append((place(field.quantity, index), mark, *values, short(float(field.tolerance.flatten()[flat]), 2)))
    return _card("The worst elements", table(("element", "ratio", "got", "expected", "tolerance"), rows))


def _call(made: Diagnosis, case: Case) -> str:
    shapes, lines = "\n".join(shape_lines(case)), "\n".join(call_lines(case, made.route))
    return _card("The call", f"<pre>{escape(shapes)}</pre><pre>{escape(lines)}</pre>")


def _numbers(made: Diagnosis, case: Case) -> list[str]:
    tables = explicit(case, made.field)
    if not tables:
        return []
    return [_card("Every number", *(_explicit(one) for one in tables))]


def _explicit(one: Table) -> str:
    return f'<p class="soft">{escape(one.title)}</p>{table(one.header, one.rows)}'


def _census(made: Diagnosis) -> str:
    if made.location is None:
        return ""
    rows = []
    for axis, values in made.location.counts.items():
        for value, (wrong, every) in values.items() if 1 < len(values) <= SHOWN else ():
            if not every:
                continue
            bar = f'<span class="bar" style="width:{round(60 * wrong / every)}px"></span>' if wrong else ""
            text = f"{wrong} of {every}" if wrong else '<span class="soft">none</span>'
            label = f"{axis} {value}" if value >= 0 else "unused tail"
            rows.append((label, Raw(f'<span class="whole">{bar}{text}</span>')))
    return _card("Wrong elements, by", table(("place", "wrong"), rows)) if rows else ""


def _trials(made: Diagnosis) -> str:
    if not made.trials:
        return ""
    cured = [(trial.change, Raw('<span class="good">right</span>')) for trial in made.trials if not trial.fails]
    others = ", ".join(trial.change for trial in made.trials if trial.fails)
    rest = (
        f'<p class="soft">Still wrong with each of: <span class="values">{escape(others)}</span></p>' if others else ""
    )
    return _card("With one change", table(("change", "result"), cured) if cured else "", rest)


def _stages(made: Diagnosis) -> str:
    if not made.stages:
        return ""
    rows = []
    for stage in made.stages:
        klass = "bad" if not stage.ratio <= 1 else "good"
        rows.append((stage.stage, Raw(f'<span class="{klass}">{escape(short(stage.ratio, 3))}</span>')))
    return _card("Stages, in the order of computation", table(("stage", "worst over its limit"), rows))


def _quantities(made: Diagnosis) -> str:
    rows = []
    for verdict in made.verdicts:
        klass = "bad" if verdict.klass in FAILURES else "good" if verdict.klass == "OK" else "soft"
        mark = Raw(f'<span class="{klass}">{escape(verdict.klass)}</span>')
        rows.append((verdict.quantity, mark, short(verdict.ratio, 3), verdict.statistic.replace("_", " ")))
    return _card("Everything that the call returned", table(("quantity", "class", "worst over its limit", "by"), rows))


def _again(made: Diagnosis, scripted: bool) -> str:
    finding = made.finding
    script = "python reproduce.py                       # needs torch and the kernel's package only"
    commands = [
        *([script] if scripted else []),
        "kda replay problem.json --subject NAME    # the same call on any subject",
        "kda compare problem.json --subjects kda,NAME",
    ]
    original = ""
    if finding.original != finding.problem:
        found = f"<pre>{escape(repr(finding.original))}</pre>"
        original = f"<details><summary>The problem it was found with</summary>{found}</details>"
    example = f"@example({finding.problem!r})"
    return _card("Again", f"<pre>{escape(chr(10).join(commands))}</pre><pre>{escape(example)}</pre>{original}")


def _environment(env: Mapping[str, object]) -> str:
    return _card("Environment", table(("", ""), ((name, value) for name, value in env.items())))
