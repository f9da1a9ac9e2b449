"""Authority on one case: first calls, errors, memory and times of every contender that takes it, in turns."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from harness.bench.cases import bytes_that_must_move, has_gradients
from harness.bench.contenders import Contender, conditions, refusal, timed_call
from harness.bench.document import Row, Skipped
from harness.bench.timing import Call, Clock, Summary, samples_in, take_turns
from harness.call import NotCovered, RouteDidNotRun, Run, call
from harness.isolate import context_is_lost
from harness.problem import Case
from harness.rows import Heads, heads_of, slice_heads, slice_output
from oracle.envelope import rms
from oracle.operator import evaluate


class ContextLost(Exception):
    """After an illegal access no later result of this process means anything; `contenders` may have made it."""

    def __init__(self, contenders: list[str], said: str):
        super().__init__(said)
        self.contenders = contenders


@dataclass(frozen=True)
class Settings:
    """How a case is measured. `round_ms`: of device time a contender gets in a round; `error_heads`: 0 for none."""

    rounds: int = 5
    round_ms: float = 20.0
    error_heads: int = 2


@dataclass(frozen=True)
class Truth:
    """The exact results of a case on some of its query heads."""

    queries: list[int]
    heads: Heads
    exact: Mapping[str, Tensor]

    @classmethod
    def of(cls, case: Case, count: int, gradients: bool) -> "Truth":
        """On `count` evenly spaced heads; nothing for 0."""
        heads = heads_of(case.inputs, case.problem.entry)
        queries = evenly_spaced(heads.query, count)
        inputs = slice_heads(case.inputs, queries, case.problem.entry)
        exact = evaluate(inputs, case.options, gradients=gradients) if queries else {}
        return cls(queries, heads, exact)

    def errors(self, outputs: Mapping[str, Tensor]) -> dict[str, float]:
        """Relative rms of every output on these heads; inf where one is not finite or should be all zeros."""
        return {
            name: relative_rms(slice_output(name, outputs[name], self.queries, self.heads), exact)
            for name, exact in self.exact.items()
            if name in outputs
        }


def evenly_spaced(heads: int, count: int) -> list[int]:
    """At most `count` of the heads, the first and the last among them if it is more than one."""
    count = min(count, heads)
    return [round(i * (heads - 1) / max(count - 1, 1)) for i in range(count)]


def relative_rms(got: Tensor, exact: Tensor) -> float:
    """rms of the error over rms of the truth."""
    error, size = (float(rms(x.flatten(), 0)) for x in (got.double() - exact, exact))
    ratio = error / size if size else math.inf * error if error else 0.0
    return ratio if math.isfinite(ratio) else math.inf


@dataclass(frozen=True)
class Ready:
    """A contender after its first calls."""

    contender: Contender
    first: Run
    errors: Mapping[str, float]
    peak_bytes: int
    seconds: float


def measure(
    name: str,
    case: Case,
    mode: str,
    entrants: Iterable[Contender],
    clock: Clock,
    settings: Settings,
    truth: Truth,
    going: Callable[[], bool] = lambda: True,
) -> tuple[list[Row], list[Skipped]]:
    """A row for every contender that takes the case, and the reasons of the others.

    `going` is asked before each first call, which may compile for minutes. Raises ContextLost.
    """
    case = case if has_gradients(mode) else _without_gradients(case)
    ready, skipped = [], []
    for contender in entrants:
        where = (name, mode, contender.name)
        reason = refusal(contender, case, mode)
        if reason is not None:
            skipped.append(Skipped(*where, reason))
        elif not going():
            skipped.append(Skipped(*where, "the budget is spent", "left"))
        elif isinstance(got := _first_calls(contender, case, truth), Ready):
            ready.append(got)
        else:
            skipped.append(Skipped(*where, got, "failed"))
    try:
        return _timed(name, case, mode, ready, clock, settings), skipped
    except Exception as error:
        names = [one.contender.name for one in ready]
        said = _said(error, case, names)
        return [], skipped + [Skipped(name, mode, contender, said, "failed") for contender in names]


def _without_gradients(case: Case) -> Case:
    inputs = {name: x for name, x in case.inputs.items() if name not in ("do", "dht")}
    return Case(replace(case.problem, loss="none"), inputs, case.options)


def _said(error: Exception, case: Case, contenders: list[str]) -> str:
    """The first line of an error; ContextLost if the device went with it."""
    said = _first_line(error)
    if case.inputs["g"].is_cuda and context_is_lost():
        raise ContextLost(contenders, said) from error
    return said


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _first_calls(contender: Contender, case: Case, truth: Truth) -> Ready | str:
    """Compiled and tuned, proved by the launch record, and held against float64; or what went wrong."""
    try:
        first = call(contender.route, case)
        errors = truth.errors(first.outputs)
        first = replace(first, outputs={})
        later = call(contender.route, case)
    except (NotCovered, RouteDidNotRun) as reason:
        return str(reason)
    except Exception as error:
        return _said(error, case, [contender.name])
    return Ready(contender, first, errors, later.peak_bytes, later.seconds)


Sample = Callable[[Call, int], list[float]]


@dataclass(frozen=True)
class _Turns:
    """The contenders that are ready, and how they take turns at being timed."""

    ready: list[Ready]
    mode: str
    settings: Settings

    def take(self, sample: Sample, calls: Mapping[str, Call]) -> dict[str, Summary]:
        """Times of `calls`, by contender."""
        taking = {one.contender.name: self._sampler(one, sample, calls) for one in self.ready}
        return take_turns({name: taking[name] for name in calls}, self.settings.rounds)

    def _sampler(self, one: Ready, sample: Sample, calls: Mapping[str, Call]) -> Callable[[], list[float]]:
        def take() -> list[float]:
            with conditions(one.contender, self.mode):
                return sample(calls[one.contender.name], samples_in(self.settings.round_ms, one.seconds))

        return take

    def replay(self, clock: Clock, calls: Mapping[str, Call]) -> tuple[dict[str, Summary], dict[str, str]]:
        """(times as CUDA graphs, why others have none); a failure leaves the other times alone."""
        graphs, reasons = {}, {}
        for one in self.ready:
            name = one.contender.name
            try:
                with conditions(one.contender, self.mode):
                    graphs[name] = clock.capture(calls[name], one.peak_bytes)
            except Exception as error:
                reasons[name] = _first_line(error)
        try:
            return self.take(clock.cold, graphs), reasons
        except Exception as error:
            return {}, reasons | dict.fromkeys(graphs, _first_line(error))


def _timed(name: str, case: Case, mode: str, ready: list[Ready], clock: Clock, settings: Settings) -> list[Row]:
    """Eager and host times of all, then graph times: captured graphs hold memory."""
    calls = {one.contender.name: timed_call(one.contender, case, mode) for one in ready}
    turns = _Turns(ready, mode, settings)
    eager, host = turns.take(clock.cold, calls), turns.take(clock.host, calls)
    replayed, reasons = turns.replay(clock, calls)
    moved = bytes_that_must_move(case, mode)
    return [
        Row(
            case=name,
            mode=mode,
            contender=one.contender.name,
            eager=eager[one.contender.name],
            host=host[one.contender.name],
            graph=replayed.get(one.contender.name),
            no_graph=reasons.get(one.contender.name, ""),
            first_call_seconds=one.first.seconds,
            compile_seconds=one.first.compile_seconds,
            peak_bytes=one.peak_bytes,
            moved_bytes=moved,
            errors=one.errors,
        )
        for one in ready
    ]
