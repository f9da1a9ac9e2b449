"""Authority on one check: a problem on a route of a subject, run, repeated, judged, and timed."""

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from harness import agreement, memory, variants
from harness.bits import differing_bytes
from harness.call import NotCovered, Route, RouteDidNotRun
from harness.isolate import DEATHS, Child, Outcome, context_is_lost, of_error
from harness.problem import Case, Problem, materialise
from harness.results import Finding, form_of
from harness.subject import Subject
from harness.variants import VARIANTS, WATCHED, Variant
from harness.verdict import Verdict, judge, severity, worst
from oracle.envelope import LIMITS, Limits

SMALL_STEPS = 2e7  # tokens x heads x K x V up to which the oracle is faster on the CPU than a launch per operation
# What a verdict speaks of, beside the quantities; none is a good one. See `harness.call.Offence`.
OF_THE_CALL = ("call", "inputs", "bands", "process", "memory")
OK_CALL = Verdict("call", "OK", 0.0)


@dataclass
class Checked:
    """The verdicts of one problem on one route, and where the time went."""

    problem: Problem
    route: str
    verdicts: list[Verdict] = field(default_factory=list)
    compile_seconds: float = 0.0
    kernel_seconds: float = 0.0
    oracle_seconds: float = 0.0
    peak_bytes: int = 0
    proven: bool = True
    runs: list[Mapping[str, Tensor]] = field(default_factory=list)  # what each call returned
    varied: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)  # and what each form of it did, by its name
    missing: frozenset[str] = frozenset()  # quantities of the problem that the route does not claim to have


class Runner:
    """Runs problems on one subject; a foreign one in a child process that is reused."""

    def __init__(
        self,
        subject: Subject,
        device: str,
        folder: Path,
        isolated: bool | None = None,
        timeouts: tuple[float, float] | None = None,
        pin_autotune: bool = False,
        overlay: Path | None = None,
        sanitizer: str | None = None,
        limits: Limits = LIMITS,
        memory_bytes: int | None = None,
    ):
        self.subject, self.device, self.folder, self.limits = subject, device, folder, limits
        self._made: tuple[tuple[Problem, str], Case] | None = None
        self.poisoned = False  # an illegal access in this process: no later result on the GPU means anything
        self.child = None
        if sanitizer or (subject.foreign if isolated is None else isolated):
            limits = {} if timeouts is None else {"first_call": timeouts[0], "later_calls": timeouts[1]}
            self.child = Child(
                subject.name,
                device,
                folder / "inflight",
                pin_autotune=pin_autotune,
                overlay=overlay,
                sanitizer=sanitizer,
                memory_bytes=memory_bytes,
                **limits,
            )

    def close(self) -> None:
        self._made = None
        if self.child:
            self.child.close()

    def _case(self, problem: Problem, device: str) -> Case:
        """The tensors of a problem; the last ones are kept, since a check makes several calls with them."""
        key = (problem, device)
        if self._made is None or self._made[0] != key:
            self._made = None  # before the next ones take their memory
            self._made = key, materialise(problem, device)
        return self._made[1]

    def check(
        self,
        route_id: str,
        problem: Problem,
        repeat: bool = False,
        seed: int = 0,
        forms: Collection[str] = (),
        only: str | None = None,
        limits: Limits | None = None,
    ) -> Checked:
        """Verdicts for every quantity of the problem, or for `only` one; with `repeat` two calls must agree bit by
        bit, and so must those of the variants named in `forms` that apply. `limits`: instead of the runner's own.
        """
        route = self.subject.route(route_id, problem.entry)
        checked = Checked(problem, route_id, missing=problem.quantities() - route.quantities(problem))
        outcome = self.run(route, problem)
        again = self.run(route, problem, again=True) if repeat and outcome.status == "ran" else None
        checked.compile_seconds = outcome.compile_seconds
        checked.kernel_seconds = outcome.seconds - outcome.compile_seconds
        checked.peak_bytes = outcome.peak_bytes
        checked.verdicts = _without_numbers(outcome) or []
        checked.runs = [one.outputs for one in (outcome, again) if one is not None and one.status == "ran"]
        if outcome.status == "ran":
            checked.verdicts += [
                Verdict("inputs", "BUG", math.inf, "modified", f"the call changed its argument {name}")
                for name in outcome.modified
            ]
            checked.verdicts += [
                Verdict("call", "CRASH", math.inf, self.child.watch.tool, fault) for fault in outcome.faults
            ]
            checked.verdicts += _offences(outcome, again)
            checked.verdicts += _differences(outcome, again)
            for variant in variants.applicable(route, problem):
                if variant.name in forms:
                    checked.verdicts += self._varied(checked, route, problem, variant, outcome)
            started = time.perf_counter()
            wanted = route.quantities(problem)
            wanted = wanted if only is None else wanted & {only}
            checked.verdicts += self._judge(route, problem, outcome, seed, wanted, limits) if wanted else []
            checked.oracle_seconds = time.perf_counter() - started
        elif WATCHED in forms and outcome.status in DEATHS and VARIANTS[WATCHED] in variants.applicable(route, problem):
            checked.verdicts += _stopped(VARIANTS[WATCHED], self.run(route, problem, VARIANTS[WATCHED]))
        checked.proven = outcome.status != "unproven"
        return checked

    def _varied(
        self, checked: Checked, route: Route, problem: Problem, variant: Variant, outcome: Outcome
    ) -> list[Verdict]:
        """What a variant of the call shows beside the call itself, which ran."""
        varied = self.run(route, problem, variant)
        if varied.status != "ran":
            return _stopped(variant, varied)
        checked.varied[variant.name] = varied.outputs
        checked.verdicts += [
            Verdict(one.quantity, "BUG", math.inf, variant.name, f"{variant.promise}: {one.message}")
            for one in varied.offences
            if (one.quantity, one.statistic) not in {(v.quantity, v.statistic) for v in checked.verdicts}
        ]
        case = self._case(problem, "cpu" if self.child else self.device)
        diagonal = route.judged_by(problem).diagonal
        return list(agreement.violations(variant, case, outcome.outputs, varied.outputs, diagonal))

    def verdict_like(
        self, finding: Finding, problem: Problem, seed: int = 0, limits: Limits | None = None
    ) -> Verdict | None:
        """The verdict on the quantity of a finding; None if the problem has none, or the route does not take it."""
        route = self.subject.route(finding.route, problem.entry)
        twice = finding.klass == "NONDETERMINISTIC" or finding.quantity == "memory"
        if finding.variant and VARIANTS[finding.variant] not in variants.applicable(route, problem):
            return None
        if (finding.variant, finding.klass) == (WATCHED, "CRASH"):  # the call itself may end the process, or be right
            outcome = self.run(route, problem, VARIANTS[WATCHED])
            stopped = _stopped(VARIANTS[WATCHED], outcome)
            return None if self.poisoned or outcome.status == "not_covered" else worst([*stopped, OK_CALL])
        forms, only = ((finding.variant,), "") if finding.variant else ((), finding.quantity)
        how = {"repeat": twice, "seed": seed, "forms": forms, "only": only, "limits": limits}
        verdicts = self.check(finding.route, problem, **how).verdicts
        if self.poisoned or any(v.klass == "NOT_COVERED" for v in verdicts):
            return None
        mine = [v for v in verdicts if v.quantity == finding.quantity and form_of(v) == finding.variant]
        if mine:
            return worst(mine)
        has_none = finding.quantity not in (*OF_THE_CALL, *route.quantities(problem))
        return None if has_none else Verdict(finding.quantity, "OK", 0.0)

    def fails_like(self, finding: Finding, problem: Problem, seed: int = 0) -> bool:
        """Whether the problem shows the same failure: quantity and class, and no milder a degree of it.

        A failure far beyond its limit needs no more replicas than a screen has.
        """
        clear = severity(finding.ratio) > 0
        limits = replace(self.limits, confirm=self.limits.screen) if clear else None
        verdict = self.verdict_like(finding, problem, seed, limits)
        if verdict is None or verdict.klass != finding.klass:
            return False
        return severity(verdict.ratio) >= severity(finding.ratio)

    def steadier(self, finding: Finding) -> Finding:
        """What the sanitizer says of a call that crashes, or does not give the same twice, both of which may depend on
        what lies in or beside its memory; else itself.
        """
        route = self.subject.route(finding.route, finding.problem.entry)
        watched = VARIANTS[WATCHED] in variants.applicable(route, finding.problem)
        crashed = (finding.quantity, finding.klass, finding.variant) == ("call", "CRASH", "")
        if not watched or not (crashed or finding.klass == "NONDETERMINISTIC"):
            return finding
        outcome = self.run(route, finding.problem, VARIANTS[WATCHED])
        if outcome.status in ("ran", "not_covered"):
            return finding
        return Finding.of(finding.route, _stopped(VARIANTS[WATCHED], outcome)[0], finding.problem)

    def run(
        self,
        route: Route,
        problem: Problem,
        variant: Variant | None = None,
        stages: bool = False,
        again: bool = False,
    ) -> Outcome:
        """One call, unjudged, in the form of a variant; with `stages` the intermediates instead of the outputs.

        `again`: the same call was the last one, so that this one should not need more memory.
        """
        if self.child:
            return self.child.run(route.id, problem, variant.name if variant else "", stages, again)
        try:
            case = self._case(problem, self.device)
            call = lambda: variants.run(route, case, variant)  # noqa: E731
            if stages:
                run = variants.stages(route, case, variant)
            else:
                run = memory.watched(call, self.device) if again else call()
        except NotCovered as reason:
            return Outcome("not_covered", message=str(reason))
        except RouteDidNotRun as reason:
            return Outcome("unproven", message=str(reason))
        except Exception as error:
            self._made = None  # who knows what became of them
            self.poisoned = self.device != "cpu" and context_is_lost()
            return of_error(f"{type(error).__name__}: {error}", lost=self.poisoned)
        return Outcome(
            "ran",
            run.outputs,
            run.seconds,
            run.compile_seconds,
            modified=run.modified,
            peak_bytes=run.peak_bytes,
            offences=run.offences,
        )

    def oracle_device(self, problem: Problem) -> str:
        """Where the oracle is fastest."""
        small = sum(problem.lengths) * problem.value_heads * problem.K * problem.V < SMALL_STEPS
        return "cpu" if small else self.device

    def _judge(
        self,
        route: Route,
        problem: Problem,
        outcome: Outcome,
        seed: int,
        wanted: frozenset[str],
        limits: Limits | None = None,
    ) -> list[Verdict]:
        case = self._case(problem, self.oracle_device(problem))
        return judge(
            case.inputs,
            case.options,
            outcome.outputs,
            entry=problem.entry,
            spec=route.judged_by(problem),
            quantities=wanted,
            seed=seed,
            limits=limits or self.limits,
            near_exact=problem.k == "onehot",
        )


def _stopped(variant: Variant, outcome: Outcome) -> list[Verdict]:
    """The verdict on a form that did not run to its end; none on one that did, or that the subject does not take."""
    if outcome.status in ("ran", "not_covered"):
        return []
    return [Verdict("call", "CRASH", math.inf, variant.name, f"{variant.promise}: {outcome.message}")]


def _without_numbers(outcome: Outcome) -> list[Verdict] | None:
    """The verdict on a call that returned nothing to look at."""
    classes = {"hang": "HANG", "not_covered": "NOT_COVERED", "unproven": "NOT_COVERED"} | dict.fromkeys(DEATHS, "CRASH")
    klass = classes.get(outcome.status)
    if klass is None:
        return None
    ratio = 0.0 if klass == "NOT_COVERED" else math.inf
    return [Verdict("call", klass, ratio, outcome.status, outcome.message)]


def _offences(*calls: Outcome | None) -> list[Verdict]:
    """What the calls did beside returning results, each kind once."""
    found = {(o.quantity, o.statistic): o for one in calls if one is not None for o in one.offences}
    return [Verdict(one.quantity, "BUG", math.inf, one.statistic, one.message) for one in found.values()]


def _differences(first: Outcome, second: Outcome | None) -> list[Verdict]:
    if second is None:
        return []
    if second.status != "ran":
        message = f"the second call: {second.status}, {second.message}"
        return [Verdict("call", "NONDETERMINISTIC", math.inf, "repeat", message)]
    out = []
    for name, x in first.outputs.items():
        y = second.outputs[name]
        different = differing_bytes(x, y)
        if different:
            message = f"{different} bytes of {x.numel() * x.element_size()} differ between two calls"
            out.append(Verdict(name, "NONDETERMINISTIC", math.inf, "repeat", message))
    return out
