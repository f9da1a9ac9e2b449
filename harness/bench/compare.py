"""Authority on two bench runs side by side: ratios, and which of them are more than noise."""

from collections.abc import Iterator
from dataclasses import dataclass

from harness.bench.document import Document, Row
from harness.bench.timing import Summary

NOISE = 0.03  # by which medians of the same code on the same GPU differ from process to process


@dataclass(frozen=True)
class Change:
    """A contender in both runs: B over A, in time and in error; None where one of them has none."""

    case: str
    mode: str
    contender: str
    eager: float
    graph: float | None
    worst_error: float | None
    verdict: str  # slower | faster | ""


def changes(a: Document, b: Document) -> Iterator[Change]:
    """Every row that both runs have, in the order of the first."""
    later = {row.key: row for row in b.rows}
    for row in a.rows:
        if row.key in later:
            yield _change(row, later[row.key])


def _change(a: Row, b: Row) -> Change:
    graph = b.graph.median / a.graph.median if a.graph and b.graph else None
    # Graph times say what the kernels do; eager ones stand in where a run has none.
    judged = (a.graph, b.graph) if a.graph and b.graph else (a.eager, b.eager)
    errors = [b.errors[name] / error for name, error in a.errors.items() if name in b.errors and error > 0]
    eager, worst = b.eager.median / a.eager.median, max(errors, default=None)
    return Change(*a.key, eager, graph, worst, direction(*judged))


def direction(a: Summary, b: Summary) -> str:
    """'slower' or 'faster' where the quartiles lie apart and the medians too, by more than NOISE; else ''."""
    if b.lower > a.upper and b.median > a.median * (1 + NOISE):
        return "slower"
    if b.upper < a.lower and b.median < a.median / (1 + NOISE):
        return "faster"
    return ""
