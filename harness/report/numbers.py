"""Authority on numbers as a reader sees them: short, exact where they can be; a problem's tensors as small tables."""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.field import Field
from harness.problem import Case
from harness.rows import BY_TOKEN, PER_QUERY_HEAD

MOST_ROWS, MOST_CHANNELS = 40, 8  # of a table that is still read


@dataclass(frozen=True)
class Table:
    """A title, a header and rows of text."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def short(x: float, digits: int = 6) -> str:
    """At most `digits` digits; integers without a point."""
    if not math.isfinite(x):
        return {math.inf: "inf", -math.inf: "-inf"}.get(x, "nan")
    return str(int(x)) if x == int(x) and abs(x) < 10**digits else f"{x:.{digits}g}"


def place(quantity: str, index: tuple[int, ...]) -> str:
    return quantity + "".join(f"[{i}]" for i in index)


def explicit(case: Case, field: Field | None) -> list[Table]:
    """Every number of a call, with the failing quantity beside it; nothing where that would be too much to read."""
    problem = case.problem
    rows = math.prod(problem.batch) * problem.value_heads
    if rows > MOST_ROWS or max(problem.K, problem.V) > MOST_CHANNELS:
        return []
    columns = dict(_by_token(case))
    if field is not None and (field.quantity in BY_TOKEN or field.quantity == "dbeta"):
        columns |= {f"{field.quantity} got": field.got, f"{field.quantity} expected": field.expected}
    tables = [_token_table(case, columns, field)]
    tables += [Table(name, ("", "v ->"), tuple(_state_rows(x))) for name, x in _states(case, field)]
    parameters = [(name, case.inputs.get(name)) for name in ("A_log", "dt_bias")]
    given = tuple((name, _vector(x)) for name, x in parameters if x is not None)
    return tables + ([Table("gate parameters", ("", "by value head"), given)] if given else [])


def _by_token(case: Case) -> Iterator[tuple[str, Tensor]]:
    for name in ("q", "k", "v", "g", "beta", "do"):
        if case.inputs.get(name) is not None:
            yield name, case.inputs[name]


def _token_table(case: Case, columns: Mapping[str, Tensor], field: Field | None) -> Table:
    problem = case.problem
    (B, T), HV = problem.batch, problem.value_heads
    rows = []
    for b, t, hv in itertools.product(range(B), range(T), range(HV)):
        cells = []
        for name, x in columns.items():
            per_query = name in ("q", "k") or (field is not None and name.split()[0] in PER_QUERY_HEAD)
            x = x[b, t, hv // problem.group if per_query else hv]
            cells.append(_vector(x))
        rows.append((_token_name(case, b, t), str(hv), *cells))
    return Table("by token and value head", ("token", "head", *columns), tuple(_runs(rows)))


def _runs(rows: list[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Rows of one after the other that say the same become one."""
    for same, group in itertools.groupby(rows, key=lambda row: row[1:]):
        names = [row[0] for row in group]
        yield (names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}", *same)


def _token_name(case: Case, b: int, t: int) -> str:
    if not case.problem.packed:
        return f"{t}" if case.problem.batch[0] == 1 else f"{b}, {t}"
    start = 0
    for n, length in enumerate(case.problem.lengths):
        if t < start + length:
            return f"{t - start} of sequence {n}"
        start += length
    return f"{t}, unused"


def _states(case: Case, field: Field | None) -> Iterator[tuple[str, Tensor]]:
    for name in ("initial_state", "dht"):
        if case.inputs.get(name) is not None:
            yield name, case.inputs[name]
    if field is not None and field.quantity in ("ht", "dh0"):
        yield f"{field.quantity} got", field.got
        yield f"{field.quantity} expected", field.expected


def _state_rows(x: Tensor) -> Iterator[tuple[str, str]]:
    for n, h, row in itertools.product(*map(range, x.shape[:3])):
        yield f"[{n}][{h}][{row}]", _vector(x[n, h, row])


def _vector(x: Tensor) -> str:
    return "  ".join(short(value) for value in torch.atleast_1d(x.double()).tolist())
