"""Authority on what a judgement says: the verdict on one quantity, and the census of its wrong elements."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from oracle.envelope import LIMITS, Limits

SEVERITY = ("OK", "UNINFORMATIVE", "NOT_COVERED", "UNSTABLE", "SUSPECT", "NONDETERMINISTIC", "HANG", "CRASH", "BUG")
WORST_SHOWN = 5


def severity(ratio: float, limits: Limits = LIMITS) -> int:
    """The degree of a failure: 2 gross, 1 clear, 0 marginal. Shrinking keeps it, or ends at a ratio of 1.00."""
    return sum(not ratio <= limit for limit in (limits.clear, limits.gross))


@dataclass(frozen=True)
class Wrong:
    """One element: its index in the caller's layout, what came and what should have come, and how many sigmas apart."""

    index: tuple[int, ...]
    got: float
    expected: float
    sigma: float
    z: float


@dataclass(frozen=True)
class Census:
    """How much of a tensor is wrong: counts, and the worst elements."""

    elements: int = 0
    over: int = 0
    nonfinite: int = 0
    worst: tuple[Wrong, ...] = ()

    def __add__(self, other: "Census") -> "Census":
        worst = sorted(self.worst + other.worst, key=lambda wrong: -wrong.z)[:WORST_SHOWN]
        return Census(
            self.elements + other.elements, self.over + other.over, self.nonfinite + other.nonfinite, tuple(worst)
        )


@dataclass(frozen=True)
class Verdict:
    """The judgement of one quantity: its class, the worst statistic over its limit (<= 1 is inside), and a census."""

    quantity: str
    klass: str
    ratio: float
    statistic: str = ""
    message: str = ""
    census: Census = field(default_factory=Census)

    def __str__(self) -> str:
        head = f"{self.quantity}: {self.klass}, {self.statistic} at {self.ratio:.3g} of its limit"
        counts = f"; {self.census.over} of {self.census.elements} elements over, {self.census.nonfinite} non-finite"
        return head + (counts if self.census.elements else "") + (f"; {self.message}" if self.message else "")


def worst(verdicts: Iterable[Verdict]) -> Verdict:
    """The most severe verdict, ties broken by ratio."""
    return max(verdicts, key=lambda verdict: (SEVERITY.index(verdict.klass), verdict.ratio))
