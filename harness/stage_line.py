"""Authority on the stage of a fault: which calls are traced for it, and what is said of what they show."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from harness import stage_trace
from harness.call import Route
from harness.problem import Problem, materialise
from harness.results import FAILURES, Finding, form_of
from harness.runner import Runner
from harness.stage_trace import StageRatio
from harness.variants import VARIANTS, WATCHED
from harness.verdict import Verdict, is_gradient
from oracle.trace import PLACES

PLAIN = "nan_filled"  # how a call itself is traced: a stage that nobody wrote shows
UNWRITTEN = "uninitialised read"


@dataclass(frozen=True)
class Traced:
    """The stages of a call; of its other form, named by `form`, if only in that one is outside.

    `parted`: where neither has one outside, the first that is not in the form what the call itself says it must be.
    `untraced`: why there are no stages.
    """

    stages: tuple[StageRatio, ...] = ()
    untraced: str = ""
    form: str = ""
    parted: str = ""


def stages_of(runner: Runner, route: Route, problem: Problem, seed: int) -> tuple[list[StageRatio], str]:
    """(every stage of a call against its envelope, why there is none)."""
    found, reason = _run(runner, route, problem, PLAIN)
    return ([], reason) if found is None else (_held(runner, route, problem, PLAIN, found, seed), "")


def traced(runner: Runner, route: Route, finding: Finding, seed: int) -> Traced:
    """The stages of a failing call, and of the form in which it fails."""
    problem, form = finding.problem, finding.variant
    if finding.klass == "CRASH" and UNWRITTEN not in finding.message:
        return Traced(untraced="no stages after a crash")
    itself, reason = _run(runner, route, problem, PLAIN)
    if itself is None:
        return Traced(untraced=reason)
    stages = _held(runner, route, problem, PLAIN, itself, seed)
    if form in ("", PLAIN, WATCHED) or stage_trace.first_outside(stages):
        return Traced(tuple(stages))
    other, _ = _run(runner, route, problem, form)
    if other is None:
        return Traced(tuple(stages))
    in_form = _held(runner, route, problem, form, other, seed)
    if stage_trace.first_outside(in_form):
        return Traced(tuple(in_form), form=form)
    case, chunk = materialise(problem), stage_trace.chunk_of(route.judged_by(problem), problem)
    parted = next(stage_trace.differing(VARIANTS[form], case, itself, other, chunk), "")
    return Traced(tuple(stages), form=form, parted=parted)


def _run(runner: Runner, route: Route, problem: Problem, form: str) -> tuple[dict[str, Tensor] | None, str]:
    """(the stages of that form of a call, why there are none)."""
    outcome = runner.run(route, problem, VARIANTS[form], stages=True)
    if outcome.status != "ran":
        return None, outcome.message.splitlines()[0]
    return outcome.outputs, ""


def _held(
    runner: Runner, route: Route, problem: Problem, form: str, found: dict[str, Tensor], seed: int
) -> list[StageRatio]:
    case = VARIANTS[form].change(materialise(problem, runner.oracle_device(problem)))
    return stage_trace.hold(found, case, route.judged_by(problem), seed)


def line(finding: Finding, made: Traced, verdicts: Sequence[Verdict], cause: str) -> str:
    """What is known of the place of a fault; `cause`: what the sanitizer says of a failure that comes and goes."""
    complaint = f"{finding.message} {cause}"
    kernel = re.search(r"\bkernel (\w+), program", complaint)
    first = stage_trace.first_outside(list(made.stages))
    by_kernel = f"kernel {kernel[1]}, as the sanitizer says" if kernel else ""
    # Memory is read by the kernel at fault or by one behind it; what nobody wrote is NaN in the trace.
    if kernel and (first is None or UNWRITTEN not in complaint):
        return by_kernel
    if first is not None:
        return "; ".join(filter(None, (_outside(made, first), by_kernel)))
    if made.parted:
        return f"{made.parted} is the first that is not as the call itself has it; in both every stage is inside"
    other_route = re.search(r"the launch record shows (.+)", finding.message)
    if other_route:
        return f"route is what is wrong, not a stage: the launch record shows {other_route[1]}"
    if not made.stages:
        return f"not known: {made.untraced}{_direction(finding, verdicts)}"
    if all(stage.stage in PLACES for stage in made.stages):
        names = ", ".join(stage.stage for stage in made.stages)
        return f"not known: {names} are right, and it shows no more{_direction(finding, verdicts)}"
    named = finding.quantity in finding.problem.quantities()
    fault = f"what makes {finding.quantity} of them is at fault" if named else "the fault is around them"
    return f"every stage is inside its envelope: {fault}"


def _outside(made: Traced, first: StageRatio) -> str:
    names = [stage.stage for stage in made.stages]
    inside = [stage.stage for stage in made.stages[: names.index(first.stage)] if stage.ratio <= 1]
    before = f"; {', '.join(inside)} before it are inside" if inside else ", the first of all"
    far = "where no error is allowed" if first.stage in PLACES else f"{first.ratio:.3g} x its limit"
    form = f", in that form of the call ({made.form})" if made.form else ""
    return f"{first.stage} is the first outside its envelope ({far}){form}{before}"


def _direction(finding: Finding, verdicts: Sequence[Verdict]) -> str:
    """Which pass is at fault, by what it returns; "" where nothing is wrong with the call itself, or one had no say."""
    own = finding.problem.quantities()
    found = [v for v in verdicts if v.quantity in own and not form_of(v) and v.klass != "NOT_COVERED"]
    forward = [v.klass in FAILURES for v in found if not is_gradient(v.quantity)]
    backward = [v.klass in FAILURES for v in found if is_gradient(v.quantity)]
    if not forward or not backward or not any(forward + backward):
        return ""
    return "; the forward pass is wrong" if any(forward) else "; the forward pass is right, the backward pass is wrong"
