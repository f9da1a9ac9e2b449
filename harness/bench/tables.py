"""Authority on what `kda bench` prints: tables of a run, of two runs compared, and of what verdicts cost."""

from collections.abc import Iterable, Mapping, Sequence

from rich.table import Table

from harness.bench.compare import Change
from harness.bench.document import Row
from harness.bench.oracle_cost import Cost
from harness.bench.timing import Summary

QUANTITIES = ("o", "ht", "dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")


def _table(title: str, names: Sequence[str], columns: Sequence[str]) -> Table:
    """A table whose first columns, `names`, are text and the others numbers."""
    table = Table(title=title, title_justify="left")
    for name in names:
        table.add_column(name)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def times(case: str, mode: str, rows: Sequence[Row], copy_rate: float) -> Table:
    """Times of one case. x: over the smallest of ours, launched in the same way.

    copy: the share of the copy rate at which the faster of the two moves what must move.
    """
    columns = ("graph ms", "x", "eager ms", "x", "quartiles", "min", "host ms", "copy", "peak GiB", "first s")
    table = _table(f"{case}, {mode.replace('_', ' + ')}", ("contender",), (*columns, "compile s"))
    graph, eager = smallest(rows, "graph"), smallest(rows, "eager")
    for row in rows:
        best = min(x.median for x in (row.eager, row.graph) if x)
        reached = row.moved_bytes / (best / 1e3) / copy_rate
        table.add_row(
            row.contender,
            f"{row.graph.median:.4f}" if row.graph else "-",
            f"{row.graph.median / graph:.2f}" if row.graph and graph else "-",
            f"{row.eager.median:.4f}",
            f"{row.eager.median / eager:.2f}" if eager else "-",
            f"{row.eager.lower:.4f}..{row.eager.upper:.4f}",
            f"{row.eager.minimum:.4f}",
            f"{row.host.median:.4f}",
            f"{100 * reached:.0f} %",
            f"{row.peak_bytes / 2**30:.2f}",
            f"{row.first_call_seconds:.1f}",
            f"{row.compile_seconds:.1f}",
        )
    return table


def smallest(rows: Iterable[Row], launch: str, subject: str = "kda") -> float | None:
    """The smallest median of a subject's contenders, of their 'graph' or 'eager' times; None if it has none."""
    own = (getattr(row, launch) for row in rows if row.contender.startswith(f"{subject} "))
    return min((x.median for x in own if x), default=None)


def errors(case: str, mode: str, rows: Sequence[Row], heads: int) -> Table:
    """Relative rms against float64 of each quantity on the heads looked at."""
    present = [name for name in QUANTITIES if any(name in row.errors for row in rows)]
    title = f"{case}, {mode.replace('_', ' + ')}: relative rms against float64 on {heads} heads"
    table = _table(title, ("contender",), present)
    for row in rows:
        table.add_row(row.contender, *(f"{row.errors[q]:.1e}" if q in row.errors else "-" for q in present))
    return table


def comparison(changes: Iterable[Change]) -> Table:
    columns = ("eager B/A", "graph B/A", "worst error B/A", "verdict")
    table = _table("B over A, below 1 is better", ("case", "mode", "contender"), columns)
    shown = lambda x: "-" if x is None else f"{x:.3f}"  # noqa: E731
    styles: Mapping[str, str] = {"slower": "red", "faster": "green"}
    for change in changes:
        ratios = (shown(x) for x in (change.eager, change.graph, change.worst_error))
        where = (change.case, change.mode, change.contender)
        table.add_row(*where, *ratios, change.verdict, style=styles.get(change.verdict))
    return table


def verdict_costs(costs: Iterable[Cost]) -> Table:
    columns = ("K = V", "forward + backward ms", "verdict ms", "ratio", "at most", "by all replicas", "class")
    table = _table("one verdict against one float64 forward + backward", ("route",), columns)
    for cost in costs:
        ratio, style = f"{cost.ratio:.2f}", "red" if cost.ratio > cost.target else None
        full = f"{cost.full_ratio:.2f}"
        figures = (_spread(cost.reference), _spread(cost.verdict), ratio, f"{cost.target:g}", full, cost.klass)
        table.add_row(cost.route, str(cost.width), *figures, style=style)
    return table


def _spread(x: Summary) -> str:
    return f"{x.median:.2f} ({x.lower:.2f}..{x.upper:.2f})"
