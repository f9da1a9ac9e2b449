"""Authority on making the tensors of a failing problem small enough to read: what can go goes, what stays is rounded.

Works on explicit values, and so can do what named patterns cannot: drop a token or a channel from the middle, set
single elements to 0, round the others. The result is a problem of simple patterns and a few edits.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from harness.patterns import BOUND
from harness.problem import MAX_EDITS, Edit, Problem, pattern_values, streams, values_of
from harness.shrink import shrink

Fails = Callable[[Problem], bool]
# What the axes of a stream's values are: rows of the batch, sequences, query heads, value heads, K and V channels.
AXES = {
    **dict.fromkeys(("q", "k"), ("row", "query", "K")),
    **dict.fromkeys(("v", "do"), ("row", "value", "V")),
    **dict.fromkeys(("h0", "dht"), ("sequence", "value", "K", "V")),
    "g": ("row", "value", "K"),
    "beta": ("row", "value"),
    "A_log": ("value",),
    "dt_bias": ("value", "K"),
}
PLAIN = (0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0)  # numbers in the order in which they are easiest to read
DIGITS = (1, 2)
READABLE_EDITS = 64  # beyond it a named pattern says more
MOST_NUMBERS = 2**17  # of all tensors: beyond it even writing them down takes seconds


@dataclass(frozen=True)
class Table:
    """A problem with the values of its tensors beside it, float32, in the streams' own shapes."""

    problem: Problem
    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, problem: Problem) -> "Table":
        return cls(problem, {name: values_of(problem, name) for name in streams(problem)})

    def written(self) -> Problem | None:
        """The problem with these values, each stream as the pattern that needs fewest edits; None if it needs too many
        or is not legal.
        """
        names, edits = {}, []
        if not all(_legal(self.problem, name, values) for name, values in self.values.items()):
            return None
        try:
            plain = replace(self.problem, edits=())
            for stream, values in self.values.items():
                name, different = _nearest(plain, stream, values)
                names[stream] = name
                edits += [Edit(stream, tuple(map(int, at)), float(values[tuple(at)])) for at in different]
            return replace(plain, **names, edits=tuple(edits)) if len(edits) <= MAX_EDITS else None
        except ValueError:
            return None

    def without(self, kind: str, gone: Sequence[int], **structure: object) -> "Table | None":
        """Without these places of one kind of axis; `structure` is what becomes of the problem's own fields."""
        axes = AXES | ({"do": AXES["g"]} if self.problem.entry == "gate" else {})
        values = dict(self.values)
        for name in values:
            if kind in axes[name]:
                values[name] = np.delete(values[name], list(gone), axes[name].index(kind))
        try:
            return Table(replace(self.problem, edits=(), **structure), values)
        except ValueError:
            return None


def _legal(problem: Problem, stream: str, values: np.ndarray) -> bool:
    """Gates that are not raw are at most 0, and in range where that was promised; beta is not negative."""
    if stream == "g" and problem.gate == "pregated":
        lowest = BOUND if problem.safe_gate else -math.inf
        return bool(((values <= 0) & (values >= lowest)).all())
    return stream != "beta" or problem.beta_sigmoid or bool((values >= 0).all())


def _nearest(problem: Problem, stream: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """(the pattern that differs from the values in fewest places, those places), the most readable of equals."""
    best = None
    for name in problem.menus()[stream]:
        made = pattern_values(problem, stream, name)
        different = np.argwhere(~((made == values) | (np.isnan(made) & np.isnan(values))))
        if best is None or len(different) < len(best[1]):
            best = name, different
    return best


def minimise(problem: Problem, fails: Fails, seconds: float) -> Problem:
    """The most readable problem found within `seconds` that still fails.

    Deterministic apart from where the time runs out. A problem of too many numbers stays as it is, and so does one of
    which the time has not left few enough.
    """
    if sum(math.prod(problem.shape(stream)) for stream in streams(problem)) > MOST_NUMBERS:
        return problem
    search = _Search(problem, fails, time.monotonic() + seconds)
    while search.improved():
        pass
    few = max(READABLE_EDITS, len(problem.edits))
    return search.problem if len(search.problem.edits) <= few else problem


class _Search:
    """Tries smaller tables; keeps each that still fails."""

    def __init__(self, problem: Problem, fails: Fails, deadline: float):
        self.problem, self.fails, self.deadline = problem, fails, deadline
        self.table = Table.of(problem)
        self.ends = {problem}  # where rounds have ended
        self.known: dict[Problem, bool] = {problem: True}

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.deadline

    def improved(self) -> bool:
        """One round of everything; whether it got anywhere."""
        if self.over or self.table.written() is None:
            return False
        self._fewer_numbers(whole=True)  # the boldest first: what stays small is written down and tried faster
        self._fewer_places()
        self._fewer_numbers(whole=False)
        self._plainer_numbers()
        left = self.deadline - time.monotonic()
        if left > 0:
            self._take(shrink(self.problem, self._still_fails, left))
        here_before = self.problem in self.ends
        self.ends.add(self.problem)
        return not here_before

    def _still_fails(self, candidate: Problem) -> bool:
        if candidate not in self.known:
            self.known[candidate] = self.fails(candidate)
        return self.known[candidate]

    def _take(self, problem: Problem) -> None:
        """The problem, written as plainly as its values can be."""
        self.table = Table.of(problem)
        self.problem = self.table.written() or problem

    def attempt(self, table: Table | None) -> bool:
        """Keep the table if it is a legal problem that still fails."""
        candidate = None if table is None or self.over else table.written()
        if candidate is None or not self._still_fails(candidate):
            return False
        self.problem, self.table = candidate, table
        return True

    def _fewer_places(self) -> None:
        for kind in ("sequence", "row", "head", "member", "K", "V"):
            self._fewer(kind)

    def _fewer(self, kind: str) -> None:
        """Drop runs of places, long ones first, as long as that gets anywhere."""
        size = max(1, _count(self.table.problem, kind) // 2)
        while size:
            start = 0
            while start < _count(self.table.problem, kind) and not self.over:
                gone = range(start, min(start + size, _count(self.table.problem, kind)))
                if not self.attempt(_dropped(self.table, kind, gone)):
                    start += size
            size //= 2

    def _fewer_numbers(self, whole: bool) -> None:
        """Each stream to one plain value, 0 first; unless `whole`, then its parts, halving."""
        for stream in list(self.table.values):
            for value in PLAIN[:2]:
                self._set_parts(stream, value, whole)

    def _set_parts(self, stream: str, value: float, whole: bool) -> None:
        if stream not in self.table.values:
            return
        places = np.argwhere(self.table.values[stream] != value)
        worth = [at for at in places if _simplicity(value) < _simplicity(float(self.table.values[stream][tuple(at)]))]
        size = len(worth)
        while size and not self.over:
            start = 0
            while start < len(worth) and not self.over:
                part = worth[start : start + size]
                if self.attempt(self._with(stream, part, [value] * len(part))):
                    del worth[start : start + size]
                else:
                    start += size
            size = 0 if whole or size == 1 else (size + 1) // 2

    def _plainer_numbers(self) -> None:
        """All numbers of a stream rounded at once, then each by itself."""
        for stream in list(self.table.values):
            for rounding in (np.sign, *(lambda x, d=d: _digits(x, d) for d in DIGITS)):
                values = self.table.values[stream]
                if _total(rounding(values)) < _total(values):
                    self.attempt(Table(self.table.problem, {**self.table.values, stream: rounding(values)}))
            for at in np.argwhere(self.table.values[stream] != 0):
                current = float(self.table.values[stream][tuple(at)])
                for value in _plainer(current):
                    if self.over or self.attempt(self._with(stream, [at], [value])):
                        break

    def _with(self, stream: str, places: Sequence[np.ndarray], values: Sequence[float]) -> Table:
        changed = self.table.values[stream].copy()
        for at, value in zip(places, values):
            changed[tuple(at)] = value
        return Table(self.table.problem, {**self.table.values, stream: changed})


def _count(problem: Problem, kind: str) -> int:
    sizes = {"sequence": len(problem.lengths), "head": problem.heads, "member": problem.group}
    rows = problem.batch[1]  # a dense batch loses the same tokens of every sequence
    return (sizes | {"row": rows, "K": problem.K, "V": problem.V})[kind]


def _dropped(table: Table, kind: str, gone: range) -> Table | None:
    problem = table.problem
    if len(gone) >= _count(problem, kind) and kind != "row":
        return None
    if kind == "sequence":
        return _without_sequences(table, gone)
    if kind == "row":
        return _without_rows(table, gone)
    if kind == "head":
        members = [head * problem.group + member for head in gone for member in range(problem.group)]
        smaller = table.without("query", gone, heads=problem.heads - len(gone))
        return smaller and smaller.without("value", members)
    if kind == "member":
        members = [head * problem.group + member for head in range(problem.heads) for member in gone]
        return table.without("value", members, group=problem.group - len(gone))
    return table.without(kind, gone, **{kind: getattr(problem, kind) - len(gone)})


def _starts(problem: Problem) -> list[int]:
    starts = [0]
    for length in problem.lengths:
        starts.append(starts[-1] + length)
    return starts


def _without_sequences(table: Table, gone: range) -> Table | None:
    problem, starts = table.problem, _starts(table.problem)
    rows = [row for n in gone for row in range(starts[n], starts[n + 1])]
    lengths = tuple(length for n, length in enumerate(problem.lengths) if n not in gone)
    smaller = table.without("sequence", gone, lengths=lengths)
    return smaller and smaller.without("row", rows)


def _without_rows(table: Table, gone: range) -> Table | None:
    problem, starts = table.problem, _starts(table.problem)
    if not problem.packed:
        T = problem.lengths[0]
        rows = [b * T + t for b in range(len(problem.lengths)) for t in gone]
        return table.without("row", rows, lengths=(T - len(gone),) * len(problem.lengths))
    lost = [sum(start <= row < end for row in gone) for start, end in pairwise(starts)]
    lengths = tuple(length - fewer for length, fewer in zip(problem.lengths, lost))
    return table.without("row", gone, lengths=lengths, tail=problem.tail - sum(row >= starts[-1] for row in gone))


def _digits(x: np.ndarray, digits: int) -> np.ndarray:
    """x to so many decimal digits; what is not finite stays."""
    flat = [float(f"{value:.{digits}g}") for value in x.flatten().tolist()]
    return np.array(flat, np.float32).reshape(x.shape)


def _plainer(x: float) -> Iterator[float]:
    """Numbers that are easier to read than x and may do the same, of its sign first."""
    near = [value for value in PLAIN if value == 0 or (value > 0) == (x > 0)]
    rounded = [float(np.float32(f"{x:.{digits}g}")) for digits in DIGITS] if math.isfinite(x) else []
    for value in (*near, *rounded):
        if _simplicity(value) < _simplicity(x):
            yield value


def _simplicity(x: float) -> int:
    """How hard a number is to read: 0 for zero, then as in PLAIN, then by its digits."""
    if x in PLAIN:
        return PLAIN.index(x)
    if not math.isfinite(x):
        return len(PLAIN)
    return len(PLAIN) + len(f"{x:.9g}".strip("-0."))


def _total(values: np.ndarray) -> int:
    return sum(map(_simplicity, values.flatten().tolist()))
