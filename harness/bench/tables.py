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


def times(case: str, mode: str, rows: Sequence[Row], copy_rate: float, baseline: str | None) -> Table:
    """Times of one case. `copy`: the share of the copy rate at which what must move was moved, by the faster time.

    `x`: the same time over that of `baseline`, the contender named first.
    """
    columns = ("graph ms", "eager ms", "quartiles", "min", "host ms", "x", "copy", "peak GiB", "first s", "compile s")
    table = _table(f"{case}, {mode.replace('_', ' + ')}", ("contender",), columns)
    base = next((best(row) for row in rows if row.contender == baseline), None)
    for row in rows:
        reached = row.moved_bytes / (best(row) / 1e3) / copy_rate
        table.add_row(
            row.contender,
            f"{row.graph.median:.4f}" if row.graph else "-",
            f"{row.eager.median:.4f}",
            f"{row.eager.lower:.4f}..{row.eager.upper:.4f}",
            f"{row.eager.minimum:.4f}",
            f"{row.host.median:.4f}",
            f"{best(row) / base:.2f}" if base else "-",
            f"{100 * reached:.0f} %",
            f"{row.peak_bytes / 2**30:.2f}",
            f"{row.first_call_seconds:.1f}",
            f"{row.compile_seconds:.1f}",
        )
    return table


def best(row: Row) -> float:
    """The smaller median of the two ways to launch."""
    return min(row.eager.median, row.graph.median) if row.graph else row.eager.median


def fastest(rows: Iterable[Row], subject: str) -> str | None:
    """The contender of a subject with the smallest time."""
    own = [row for row in rows if row.contender.startswith(f"{subject} ")]
    return min(own, key=best).contender if own else None


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
    columns = ("K = V", "forward + backward ms", "verdict ms", "ratio", "at most", "class")
    table = _table("one verdict against one float64 forward + backward", ("route",), columns)
    for cost in costs:
        ratio, style = f"{cost.ratio:.2f}", "red" if cost.ratio > cost.target else None
        figures = (_spread(cost.reference), _spread(cost.verdict), ratio, f"{cost.target:g}", cost.klass)
        table.add_row(cost.route, str(cost.width), *figures, style=style)
    return table


def _spread(x: Summary) -> str:
    return f"{x.median:.2f} ({x.lower:.2f}..{x.upper:.2f})"
