"""Authority on what a verdict costs: the time of one against that of one float64 forward and backward pass."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.bench.contenders import REFERENCE_ROUTE
from harness.bench.timing import Summary, take_turns
from harness.families import ORDINARY
from harness.fitting import fit
from harness.problem import Case, Problem, materialise
from harness.subject import own_subject
from harness.verdict import declared_format, judge
from kda.precision import PrecisionSpec
from oracle.envelope import LIMITS
from oracle.operator import evaluate
from oracle.rounding import DTYPE_OF_FORMAT

WIDTHS = (32, 128)
TARGET = {"chunk": 8.0, "recurrent": 10.0}  # times one forward and backward pass, by the algorithm of the route
RANDOM = Problem(entry="chunk", lengths=(64,), dtype="bf16", initial_state=True, **ORDINARY)


@dataclass(frozen=True)
class Cost:
    """A verdict on every quantity of one route, and the pass that it is measured by; milliseconds of one CPU thread."""

    route: str
    width: int
    reference: Summary
    verdict: Summary
    full: Summary  # the same verdict from all replicas of a screen, as where the first look does not say OK
    target: float
    klass: str  # of the worst verdict: anything but OK was judged twice

    @property
    def ratio(self) -> float:
        return self.verdict.median / self.reference.median

    @property
    def full_ratio(self) -> float:
        return self.full.median / self.reference.median


def right_outputs(case: Case, spec: PrecisionSpec) -> dict[str, Tensor]:
    """The exact results in the formats that a route declares."""
    exact = evaluate(case.inputs, case.options)
    formats = {name: declared_format(name, case.inputs, spec) or "fp32" for name in exact}
    return {name: x.to(DTYPE_OF_FORMAT[formats[name]]) for name, x in exact.items()}


def costs(seconds: float, tokens: int = 64, widths: tuple[int, ...] = WIDTHS) -> Iterator[Cost]:
    """One for every route of ours with kernels and every width K = V; `seconds` of repetitions to each."""
    for width in widths:
        problem = replace(RANDOM, lengths=(tokens,), K=width, V=width)
        for route in own_subject().routes:
            kernels = route.entry == "chunk" and route.id != REFERENCE_ROUTE
            fitted = fit(route.id, problem) if kernels else None
            if fitted is not None and (width, width) == (fitted.K, fitted.V):  # else it has no tiles of this width
                yield _cost(route.id, route.spec.of_call(fitted.chunk_size, fitted.precision), fitted, seconds)


def _cost(route: str, spec: PrecisionSpec, problem: Problem, seconds: float) -> Cost:
    case = materialise(problem)
    outputs = right_outputs(case, spec)
    judged = functools.partial(judge, case.inputs, case.options, outputs, entry="chunk", spec=spec)
    verdicts = judged()
    calls = {
        "reference": lambda: evaluate(case.inputs, case.options),
        "verdict": judged,
        "full": functools.partial(judged, limits=replace(LIMITS, first=LIMITS.screen)),
    }
    samplers = {name: lambda call=call: _milliseconds(call) for name, call in calls.items()}
    with _one_thread():
        rounds = int(seconds / sum(sample()[0] / 1e3 for sample in samplers.values()))
        times = take_turns(samplers, min(max(3, rounds), 50))
    klass = "OK" if all(one.klass == "OK" for one in verdicts) else "judged twice"
    return Cost(route, problem.K, **times, target=TARGET[spec.algorithm], klass=klass)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """On several threads a ratio would be that of how well each side uses them, and of what else the machine does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _milliseconds(call: Callable[[], object]) -> list[float]:
    """CPU time of this process, which other processes do not add to."""
    started = time.process_time()
    call()
    return [1e3 * (time.process_time() - started)]
