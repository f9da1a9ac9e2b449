"""Authority on the diagnosis of a finding: five lines that say what is wrong, where, how, its needs, which stage."""

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness import necessity, repeats
from harness.agreement import between
from harness.call import Route
from harness.field import Field, form, measure
from harness.likeness.book import Like
from harness.likeness.looking import looks_like, said
from harness.localise import Location, locate
from harness.necessity import Trial
from harness.problem import Problem, materialise
from harness.repeats import Spread
from harness.results import FAILURES, Finding, form_of
from harness.rows import PER_QUERY_HEAD
from harness.runner import Checked, Runner
from harness.stage_line import Traced, line, traced
from harness.stage_trace import StageRatio
from harness.variants import VARIANTS, WATCHED, applicable
from harness.verdict import Verdict

MEASURED_STEPS = 5e7  # replicas of a field: tokens x heads x K x V; beyond it only the heads of the worst elements
SHARE_OF_TRIALS = 0.5  # of the time of a diagnosis, at most


@dataclass(frozen=True)
class Diagnosis:
    """Everything that is known of one finding; `lines` are its five lines, (label, text)."""

    finding: Finding
    subject: str
    route: Route
    device: str
    verdicts: tuple[Verdict, ...]
    fields: Mapping[str, Field]  # against the oracle; that of a finding about another form, against the call itself
    form: tuple[list[int], torch.dtype | None] | None  # that the failing quantity must have
    results: tuple[Tensor, Tensor] | None  # the failing quantity by the call itself, and in another form that has it
    location: Location | None
    trials: tuple[Trial, ...]
    traced: Traced
    spreads: tuple[Spread, ...]
    lines: tuple[tuple[str, str], ...]
    seen: bool = True  # the failure was there again when this was made
    cause: str = ""  # what the sanitizer says of a failure that comes and goes
    likes: tuple[Like, ...] = ()  # known faults of our kernels that answer the probes as this route does ...
    like: str = ""  # ... in words, for a report, which has room for them beside the five lines

    @property
    def stages(self) -> tuple[StageRatio, ...]:
        """Every stage that was traced, in the order of computation."""
        return self.traced.stages

    @property
    def said(self) -> tuple[tuple[str, str], ...]:
        """The five lines, and what the failure looks like where that is known."""
        return (*self.lines, ("like", self.like)) if self.like else self.lines

    @property
    def field(self) -> Field | None:
        """That of the failing quantity; None where there are no numbers to compare."""
        return self.fields.get(self.finding.quantity)


def diagnose(runner: Runner, finding: Finding, seed: int = 0, seconds: float = 20.0) -> Diagnosis:
    """Look at a finding from every side, within about `seconds`; a later look is left out, never the ones before."""
    deadline = time.monotonic() + seconds
    problem, route = finding.problem, runner.subject.route(finding.route, finding.problem.entry)
    lost = finding.klass == "HANG" or runner.poisoned  # another call would cost the watchdog's time, or mean nothing
    checked = (
        Checked(problem, route.id)
        if lost
        else runner.check(route.id, problem, repeat=True, seed=seed, forms=(finding.variant,))
    )
    sought = (finding.quantity, finding.klass, finding.variant)
    mine = [v for v in checked.verdicts if (v.quantity, v.klass, form_of(v)) == sought]
    if mine:
        finding = replace(finding, ratio=mine[0].ratio, message=str(mine[0]))
    stages = Traced(untraced="no stages after a crash" if lost else "no time for a stage trace")
    if not lost and time.monotonic() < deadline:
        stages = traced(runner, route, finding, seed)
    fields = _fields(runner, route, finding, checked, mine[0] if mine else None, seed)
    spreads = _spreads(runner, route, finding, checked, deadline)
    seen = bool(mine) or lost
    location = _location(finding, fields, checked) if seen else None

    def fails(candidate: Problem) -> bool | None:
        verdict = runner.verdict_like(finding, candidate, seed)
        failed = verdict is not None and verdict.klass in FAILURES
        # What is right on a call without tokens says nothing.
        return None if verdict is None or not (failed or sum(candidate.lengths)) else failed

    left = min(SHARE_OF_TRIALS * seconds, deadline - time.monotonic())
    trials = [] if lost else necessity.trials(problem, fails, left)
    made = Diagnosis(
        finding=finding,
        subject=runner.subject.title,
        route=route,
        device=runner.device,
        verdicts=tuple(checked.verdicts),
        fields=fields,
        form=None if lost else _form(runner, route, finding),
        results=_both(finding, checked),
        location=location,
        trials=tuple(trials),
        traced=stages,
        spreads=tuple(spreads),
        lines=(),
        seen=seen,
        cause="" if seen and not spreads else _watched(runner, route, problem, seed),
    )
    likes = () if lost else looks_like(runner, route, finding, seed, deadline)
    return replace(made, lines=_lines(made), likes=likes, like=said(likes, runner.subject.foreign))


def _fields(
    runner: Runner, route: Route, finding: Finding, checked: Checked, verdict: Verdict | None, seed: int
) -> Mapping[str, Field]:
    if not checked.runs:
        return {}
    problem = finding.problem
    case = materialise(problem, runner.oracle_device(problem))
    queries = None
    if sum(problem.lengths) * problem.value_heads * problem.K * problem.V > MEASURED_STEPS and verdict is not None:
        queries = sorted({_query_head(finding, wrong.index) for wrong in verdict.census.worst[:1]}) or [0]
    spec = route.judged_by(problem)
    measured = measure(
        case.inputs, case.options, checked.runs[0], entry=problem.entry, spec=spec, queries=queries, seed=seed
    )
    return measured | _between_forms(runner, route, finding, checked)


def _between_forms(runner: Runner, route: Route, finding: Finding, checked: Checked) -> Mapping[str, Field]:
    """The failing quantity in another form beside what the call itself says; empty for a failure of the call itself."""
    if _both(finding, checked) is None:
        return {}
    case, variant = materialise(finding.problem, "cpu" if runner.child else runner.device), VARIANTS[finding.variant]
    diagonal = route.judged_by(finding.problem).diagonal
    found = between(variant, case, finding.quantity, checked.runs[0], checked.varied[finding.variant], diagonal)
    return {} if found is None else {finding.quantity: found}


def _both(finding: Finding, checked: Checked) -> tuple[Tensor, Tensor] | None:
    results = (*checked.runs[:1], *(x for name, x in checked.varied.items() if name == finding.variant))
    both = tuple(x[finding.quantity].cpu() for x in results if finding.quantity in x)
    return both if len(both) == 2 else None


def _query_head(finding: Finding, index: tuple[int, ...]) -> int:
    """The query head of an element, by the caller's index of its quantity."""
    axis = {"ht": 1, "dh0": 1, "dA_log": 0}.get(finding.quantity, 2)
    head = index[0] // finding.problem.K if finding.quantity == "ddt_bias" else index[axis]
    return head if finding.quantity in PER_QUERY_HEAD else head // finding.problem.group


def _form(runner: Runner, route: Route, finding: Finding) -> tuple[list[int], torch.dtype | None] | None:
    problem = finding.problem
    if finding.quantity not in problem.quantities():
        return None
    case = materialise(problem, runner.oracle_device(problem))
    return form(case, finding.quantity, problem.entry, route.judged_by(problem))


def _watched(runner: Runner, route: Route, problem: Problem, seed: int) -> str:
    """The sanitizer's complaint about a call; "" where it has none, or kernels are compiled."""
    if runner.poisoned or VARIANTS[WATCHED] not in applicable(route, problem):
        return ""
    said = [v.message for v in runner.check(route.id, problem, seed=seed, forms=(WATCHED,), only="").verdicts]
    promise = f"{VARIANTS[WATCHED].promise}: "
    return next((one.removeprefix(promise).splitlines()[0] for one in said if one.startswith(promise)), "")


def _location(finding: Finding, fields: Mapping[str, Field], checked: Checked) -> Location | None:
    """Where the failing quantity is wrong; where two calls differ, if that is the failure."""
    name = finding.quantity
    if name not in fields or (finding.variant and finding.variant not in checked.varied):
        return None
    if finding.klass != "NONDETERMINISTIC":
        return locate(fields[name], finding.problem)
    first, second = (run[name].double().cpu() for run in checked.runs[:2])
    return locate(Field(name, second, first, torch.zeros_like(first)), finding.problem)


def _spreads(runner: Runner, route: Route, finding: Finding, checked: Checked, deadline: float) -> list[Spread]:
    """How calls differ, from more of them where the first two did."""
    runs = list(checked.runs)
    while runs and repeats.spreads(runs) and len(runs) < repeats.RUNS and time.monotonic() < deadline:
        again = runner.run(route, finding.problem)
        if again.status != "ran":
            break
        runs.append(again.outputs)
    return repeats.spreads(runs) if runs else []


def _lines(made: Diagnosis) -> tuple[tuple[str, str], ...]:
    return (
        ("what", _what(made)),
        ("where", _where(made)),
        ("how", _how(made)),
        ("needs", necessity.summary(list(made.trials))),
        ("stage", line(made.finding, made.traced, made.verdicts, made.cause)),
    )


def _what(made: Diagnosis) -> str:
    finding, place = made.finding, made.location
    head = f"{finding.klass}: {finding.quantity} of {finding.route} ({made.subject})"
    head += f", in another form of the call ({finding.variant})" if finding.variant else ""
    if not made.seen:
        return f"{head}: seen once, and not again: {finding.message.splitlines()[0]}"
    if finding.klass in ("CRASH", "HANG") or place is None:
        summary = finding.message.splitlines()[0]
        return f"{head}: {summary.partition('; ')[2] or summary}"
    if finding.klass == "NONDETERMINISTIC":
        return f"{head} differs from call to call"
    if finding.variant:
        return f"{head}: {place.wrong} of {place.elements} elements differ from the call itself"
    far = f"{finding.ratio:.3g} x its limit"
    if math.isinf(finding.ratio):
        far = f"{place.nonfinite} not finite" if place.nonfinite else "where no error is allowed"
    if place.alone:
        return f"{head}: {place.wrong} of {place.elements} elements wrong, {far}"
    if _statistic(finding) == "near exact":
        return f"{head}: {far}, where the declared rounding moves nothing"
    return f"{head}: no element alone is out, together they are ({_statistic(finding)}, {far})"


def _statistic(finding: Finding) -> str:
    found = re.search(r", (\w+) at ", finding.message)
    return found[1].replace("_", " ") if found else "their sum"


def _where(made: Diagnosis) -> str:
    place = made.location
    if place is None and made.finding.variant and made.finding.klass != "CRASH":
        return "nowhere that the call itself has a result"
    if place is None:
        return _crashed_at(made.finding.message) or "no numbers to look at"
    index = "".join(f"[{i}]" for i in place.first)
    at = ", ".join(f"{axis} {value}" for axis, value in place.first_at.items() if len(place.counts[axis]) > 1)
    return f"{place.where}; first at {made.finding.quantity}{index}" + (f" ({at})" if at else "")


def _crashed_at(message: str) -> str:
    """The innermost place of a traceback, or of a fatal error, which lists that one first; "" where there is none."""
    raised = re.findall(r'File "([^"]+)", line (\d+), in (\S+)', message)
    died = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', message)
    file, line, name = (raised[-1:] or died[:1] or [("", "", "")])[0]
    return f"{file}:{line} in {name}" if file else ""


def _how(made: Diagnosis) -> str:
    if made.cause:
        return f"{made.spreads[0]}; {made.cause}" if made.spreads else made.cause
    if not made.seen and not made.spreads:
        return "the same call was right when it was made again: memory that nobody wrote, or a race"
    if made.spreads:
        return str(made.spreads[0])
    if made.finding.variant:
        return _how_the_form_differs(made)
    if made.finding.quantity == "inputs":
        return "its bits after the call are not those before it"
    if made.finding.quantity in ("bands", "process", "memory"):
        return made.finding.message.partition("; ")[2]
    if made.location is None:
        lines = made.finding.message.strip().splitlines()
        fatal = next((line for line in lines if line.startswith("Fatal Python error: ")), None)
        return fatal or (lines[-1] if len(lines) > 1 else "the call returned nothing to compare")
    return f"{made.location.relation}; first: {_first(made)}"


def _how_the_form_differs(made: Diagnosis) -> str:
    """The promise that was broken, and by how much."""
    promise, field = VARIANTS[made.finding.variant].promise, made.field
    if made.location is None:
        return made.finding.message.partition("; ")[2]
    got, itself = (float(x[made.location.first]) for x in (field.got, field.expected))
    return f"{promise}; first: {got:.9g} in that form, and by the call itself it must be {itself:.9g}"


def _first(made: Diagnosis) -> str:
    field, at = made.field, made.location.first
    got, expected, allowed = (float(x[at]) for x in (field.got, field.expected, field.tolerance))
    return f"got {got:.6g}, expected {expected:.6g} +- {allowed:.2g}"
