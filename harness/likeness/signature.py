"""Authority on signatures: what a route answers to the probes, and how alike two of them are."""

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from harness.call import Route
from harness.field import measure
from harness.likeness.cell import NINTHS, NO_PLACE, Cell, cell_of
from harness.likeness.probes import Probe, probes_of
from harness.problem import materialise
from harness.results import FAILURES
from harness.runner import Checked, Runner
from harness.variants import VARIANTS
from harness.verdict import judge
from oracle.envelope import LIMITS

COARSE = replace(LIMITS, confirm=LIMITS.screen)  # nothing is accused by a probe: as few replicas as a screen has
SIGNING = 1000  # the seed of stored signatures; a diagnosis asks with seeds below it


@dataclass(frozen=True)
class Signature:
    """What each probe that was asked has shown.

    `answers`: probe -> what was wrong: a quantity, "FORM quantity" or "call STATISTIC", with how it looks (None where
    there is nothing to measure); empty for a probe that was answered right.
    """

    answers: Mapping[str, Mapping[str, Cell | None]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, dict[str, str]]:
        """For JSON, in a stable order."""
        return {
            probe: {name: str(cell or "") for name, cell in sorted(wrong.items())}
            for probe, wrong in self.answers.items()
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Mapping[str, str]]) -> "Signature":
        read = lambda wrong: {name: Cell.parsed(text) if text else None for name, text in wrong.items()}  # noqa: E731
        return cls({probe: read(wrong) for probe, wrong in stored.items()})


def sign(
    runner: Runner, route: Route, seed: int, deadline: float = math.inf, known: Signature | None = None
) -> Signature:
    """Ask the probes, from where `known` has ended, until the time is up (of `time.monotonic`)."""
    answers = dict(known.answers) if known else {}
    probes = probes_of(route.id, route.entry)
    for probe in probes:
        if probe.name in answers:
            continue
        if time.monotonic() >= deadline or runner.poisoned:
            break
        wrong = _answer(runner, route, probe, seed)
        if wrong is not None:
            answers[probe.name] = wrong
    return Signature({probe.name: answers[probe.name] for probe in probes if probe.name in answers})


def _answer(runner: Runner, route: Route, probe: Probe, seed: int) -> dict[str, Cell | None] | None:
    """What is wrong in the answer to one probe; None where the subject does not take it."""
    problem = route.nearest(probe.fit(route.id, route.entry, seed))
    if route.lacks(problem):
        return None
    checked = runner.check(route.id, problem, seed=seed, forms=probe.forms, only="")
    if any(v.quantity == "call" and v.statistic == "not_covered" for v in checked.verdicts):
        return None
    wrong: dict[str, Cell | None] = {}
    for verdict in checked.verdicts:
        unproven = verdict.statistic == "unproven"
        if verdict.klass not in FAILURES and not unproven:
            continue
        if verdict.statistic in VARIANTS:
            wrong[f"{verdict.statistic} {verdict.quantity}"] = None
        else:
            wrong[f"{verdict.quantity} {verdict.statistic}"] = None
    return wrong | (_looks(checked, route, probe.judged, seed) if checked.runs else {})


def _looks(checked: Checked, route: Route, judged: bool, seed: int) -> dict[str, Cell | None]:
    """The failing quantities of a call and how they look."""
    problem, wanted = checked.problem, route.quantities(checked.problem)
    outputs = {name: x.cpu() for name, x in checked.runs[0].items() if name in wanted}
    case, spec = materialise(problem), route.judged_by(problem)
    how = {"entry": problem.entry, "spec": spec, "seed": seed}
    fields = measure(case.inputs, case.options, outputs, limits=COARSE, **how)
    ratios = {name: float(one.ratio.max()) for name, one in fields.items() if bool(one.wrong.any())}
    if judged:
        exact = problem.k == "onehot"
        verdicts = judge(case.inputs, case.options, outputs, quantities=wanted, near_exact=exact, **how)
        ratios |= {v.quantity: v.ratio for v in verdicts if v.klass in FAILURES}
    shapeless = {name: None for name in wanted - fields.keys()}
    return shapeless | {name: cell_of(fields[name], x, problem) for name, x in ratios.items() if name in fields}


def similarity(one: Signature, other: Signature) -> float:
    """How alike two signatures are, in [0, 1], by the probes that both were asked: 1 for the same, 0 where nothing is
    wrong in both.

    Of everything that is wrong in either the share that is wrong in both, weighed by how alike it looks.
    """
    alike = total = 0.0
    for probe in sorted(one.answers.keys() & other.answers.keys()):  # sorted: a sum has an order
        mine, theirs = one.answers[probe], other.answers[probe]
        names = sorted(mine.keys() | theirs.keys())
        if names:
            both = sum(_alike(mine[name], theirs[name]) for name in names if name in mine and name in theirs)
            # Each probe has a say of its own, that of many quantities too.
            weight = len(names) ** (WEIGHT.spread - 1)
            total += weight * len(names)
            alike += weight * both
    return alike / total if total else 0.0


@dataclass(frozen=True)
class Weights:
    """How much of a likeness each difference takes away; tuned as docs/diagnosis.md says."""

    places: float = 1.0
    far: float = 0.25  # for a decade
    size: float = 0.25  # for a decade
    gain: float = 0.5  # for a difference of one
    lost: float = 1.0
    spread: float = 0.5  # power of the number of wrong answers of a probe that its say grows with


WEIGHT = Weights()


def _alike(one: Cell | None, other: Cell | None) -> float:
    if one is None or other is None:
        return float(one is other)
    away = (
        WEIGHT.places * _apart(one.places, other.places)
        + WEIGHT.far * abs(one.far - other.far)
        + WEIGHT.size * abs(one.size - other.size)
        + WEIGHT.gain * min(1.0, abs(one.gain - other.gain))
        + WEIGHT.lost * abs(one.lost - other.lost) / NINTHS
    )
    return 2.0**-away


def _apart(one: str, other: str) -> float:
    """The mean difference of two rows of ninths, over the places that both have."""
    both = [(int(a), int(b)) for a, b in zip(one, other) if NO_PLACE not in (a, b)]
    return sum(abs(a - b) for a, b in both) / (NINTHS * len(both)) if both else 0.0
