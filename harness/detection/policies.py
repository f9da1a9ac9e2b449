"""Authority on the criteria that are compared, ours and three in use elsewhere: which outputs each one flags."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from harness import variants
from harness.problem import Case, Problem, materialise
from harness.results import FAILURES
from harness.subject import own_subject
from harness.verdict import judge
from kda.precision import PrecisionSpec
from oracle.operator import evaluate
from oracle.rounding import FORMAT_OF_DTYPE, ToFormat, round_to

# fla's tests: rms of the error over rms of the reference, by quantity.
RMS_RATIO = {"o": 0.005, "ht": 0.005, "dq": 0.008, "dk": 0.008, "dv": 0.008, "dh0": 0.008, "dg": 0.02, "dbeta": 0.02}
REFERENCE_STAGES = ("decay", "gate", "qk_norm", "beta", "state", "update", "state_grad", "partial_grad")


@dataclass(frozen=True)
class Sample:
    """A problem on a route, with its exact results and right outputs of it."""

    problem: Problem
    route: str
    spec: PrecisionSpec

    @classmethod
    def of(cls, problem: Problem, route: str) -> "Sample":
        spec = own_subject().route(route, problem.entry).spec
        return cls(problem, route, spec.of_call(problem.chunk_size, problem.precision))

    @cached_property
    def case(self) -> Case:
        return materialise(self.problem)

    @cached_property
    def exact(self) -> dict[str, Tensor]:
        return evaluate(self.case.inputs, self.case.options)

    @cached_property
    def rounded(self) -> dict[str, Tensor]:
        """The exact results in the format of each output: the best that any kernel can return."""
        return {name: x.to(self.kernel[name].dtype) for name, x in self.exact.items()}

    @cached_property
    def kernel(self) -> dict[str, Tensor]:
        """What the route returns."""
        return variants.run(own_subject().route(self.route, self.problem.entry), self.case, None).outputs

    @cached_property
    def low_precision(self) -> dict[str, Tensor]:
        """The plain recurrence with everything rounded to the dtype of the inputs."""
        fmt = FORMAT_OF_DTYPE[self.case.inputs["q"].dtype]
        made = evaluate(
            self.case.inputs, self.case.options, formats=dict.fromkeys(REFERENCE_STAGES, fmt), rounding=ToFormat()
        )
        return {name: round_to(x[0].contiguous(), fmt) for name, x in made.items()}


Policy = Callable[[Sample, Mapping[str, Tensor]], set[str]]


def envelope(sample: Sample, outputs: Mapping[str, Tensor]) -> set[str]:
    """Ours: outside of what the route's declared rounding can do."""
    verdicts = judge(
        sample.case.inputs,
        sample.case.options,
        outputs,
        entry=sample.problem.entry,
        spec=sample.spec,
        near_exact=sample.problem.k == "onehot",
    )
    return {verdict.quantity for verdict in verdicts if verdict.klass in FAILURES}


def rms_ratio(sample: Sample, outputs: Mapping[str, Tensor]) -> set[str]:
    """fla's tests."""

    def ratio(name: str) -> float:
        exact = sample.exact[name]
        return float((outputs[name].double() - exact).square().mean().sqrt() / (exact.square().mean().sqrt() + 1e-8))

    return {name for name in outputs if not ratio(name) < RMS_RATIO[name]}


def assert_close(sample: Sample, outputs: Mapping[str, Tensor]) -> set[str]:
    """torch.testing.assert_close with its default tolerances for the dtype."""
    flagged = set()
    for name, got in outputs.items():
        try:
            torch.testing.assert_close(got, sample.exact[name].to(got.dtype))
        except AssertionError:
            flagged.add(name)
    return flagged


def twice_reference(sample: Sample, outputs: Mapping[str, Tensor]) -> set[str]:
    """flash-attention's: the largest error at most twice that of a reference implementation in the same dtype."""

    def largest(x: Tensor, name: str) -> float:
        return float((x.double() - sample.exact[name]).abs().max())

    return {
        name for name in outputs if not largest(outputs[name], name) <= 2 * largest(sample.low_precision[name], name)
    }


POLICIES: Mapping[str, Policy] = {
    "envelope": envelope,
    "rms ratio": rms_ratio,
    "assert_close": assert_close,
    "twice reference": twice_reference,
}
