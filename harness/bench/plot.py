"""Authority on the picture of a bench run: an SVG with one bar for each contender, grouped by case."""

from collections.abc import Iterator
from itertools import groupby
from xml.sax.saxutils import escape

from harness.bench.document import Document, Row

WIDTH, LABEL, ROW, PAD = 960, 250, 18, 12
BAR = WIDTH - LABEL - 230  # room for the figures behind the longest bar
COLOURS = ("#1b6ca8", "#c8553d", "#588157", "#8e6c8a", "#b08900", "#5c6b73")


def svg(document: Document) -> str:
    """Bars as long as the median graph time over the slowest of the case; eager where there is no graph."""
    groups = [(key, list(rows)) for key, rows in groupby(document.rows, key=lambda row: (row.case, row.mode))]
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(_subjects(document))}
    parts, y = [], PAD + ROW
    parts.append(_text(PAD, y, _title(document), weight="bold"))
    for (case, mode), rows in groups:
        y += ROW + PAD
        parts.append(_text(PAD, y, f"{case}, {mode.replace('_', ' + ')}", weight="bold"))
        slowest = max(_shown(row)[0] for row in rows)
        for row in sorted(rows, key=lambda row: _shown(row)[0]):
            y += ROW
            parts += _bar(y, row, slowest, colours[_subject(row)])
    height = y + 2 * PAD
    look = 'font-family="sans-serif" font-size="12"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" {look}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{height}" fill="white"/>', *parts, "</svg>"]) + "\n"


def _subject(row: Row) -> str:
    return row.contender.rpartition(" ")[0]


def _subjects(document: Document) -> list[str]:
    return list(dict.fromkeys(_subject(row) for row in document.rows))


def _title(document: Document) -> str:
    env = document.env
    return f"{env['device']}, torch {env['torch']}, triton {env['triton']}: median ms, cold L2, error of o"


def _shown(row: Row) -> tuple[float, str]:
    return (row.graph.median, "graph") if row.graph else (row.eager.median, "eager")


def _bar(y: int, row: Row, slowest: float, colour: str) -> Iterator[str]:
    length, kind = _shown(row)
    width = max(1.0, BAR * length / slowest)
    error = f", error {row.errors['o']:.1e}" if "o" in row.errors else ""
    yield _text(LABEL - 6, y, row.contender, anchor="end")
    yield f'<rect x="{LABEL}" y="{y - 11}" width="{width:.1f}" height="13" fill="{colour}"/>'
    yield _text(LABEL + round(width) + 6, y, f"{length:.4g} ({kind}){error}")


def _text(x: int, y: int, text: str, anchor: str = "start", weight: str = "normal") -> str:
    place = f'x="{x}" y="{y}" text-anchor="{anchor}" font-weight="{weight}"'
    return f"<text {place}>{escape(text)}</text>"
