"""Authority on how another form of a call is written down for reproduce.py: what changes, and what must agree."""

from dataclasses import dataclass

import torch
from torch import Tensor

from harness.agreement import allowed_between, expected_of
from harness.bits import differing_bytes
from harness.diagnose import Diagnosis
from harness.problem import Case
from harness.report.call_text import TENSORS, given_keywords
from harness.variants import VARIANTS, WATCHED

# The script makes these of the call's own arguments; WATCHED only where it finds the harness, and else it says so.
BY_SCRIPT = frozenset({"strided", "nan_filled", WATCHED})


@dataclass(frozen=True)
class FormOfCall:
    """The arguments that differ from those of the call itself, None for what that has and this has not, and which
    elements must agree: `kept` of this result, and `itself` of the other, times `factor`; both from 1, 0 for none.
    """

    changed: dict[str, Tensor | None]
    keywords: dict[str, object]
    kept: Tensor | None
    itself: Tensor | None
    factor: float
    allowed: float

    def places(self) -> dict[str, Tensor | None]:
        """By the script's names; None for all of them in order."""
        return {"KEPT": self.kept, "ITSELF": self.itself}

    @property
    def size(self) -> int:
        tensors = (*self.changed.values(), self.kept, self.itself)
        return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def given_tensors(case: Case) -> dict[str, Tensor]:
    """Every tensor of a call and its backward pass, by name."""
    return {name: x for name in (*TENSORS, "do", "dht") if (x := case.inputs.get(name)) is not None}


def form_of_call(made: Diagnosis, case: Case) -> FormOfCall:
    """That of a finding about another form of the call."""
    variant = VARIANTS[made.finding.variant]
    other = case if variant.name in BY_SCRIPT else variant.change(case)
    mine, theirs = given_tensors(case), given_tensors(other)
    changed = {
        n: theirs.get(n)
        for n in (*mine, *(n for n in theirs if n not in mine))
        if n not in mine or n not in theirs or _differ(mine[n], theirs[n])
    }
    kept, itself = _places(made, case)
    quantity, diagonal = made.finding.quantity, made.route.judged_by(made.finding.problem).diagonal
    allowed = allowed_between(variant, quantity, made.results[0].dtype, diagonal) if made.results else 0.0
    factor = variant.factors.get(quantity, 1.0)
    return FormOfCall(changed, given_keywords(other, made.route), kept, itself, factor, allowed)


def _differ(a: Tensor, b: Tensor) -> bool:
    return a.shape != b.shape or a.dtype != b.dtype or bool(differing_bytes(a, b))


def _places(made: Diagnosis, case: Case) -> tuple[Tensor | None, Tensor | None]:
    """(elements of the form's result, those of the call's own that they are from), int32; None if all in order."""
    if made.results is None:
        return None, None
    name, variant = made.finding.quantity, VARIANTS[made.finding.variant]
    itself, other = (torch.arange(1, x.numel() + 1, dtype=torch.float64).view(x.shape) for x in made.results)
    kept, (_, numbers) = variant.kept(case, name, other), expected_of(variant, case, name, itself)
    if kept.shape == numbers.shape == itself.shape and kept.equal(itself) and numbers.equal(itself.long()):
        return None, None
    return kept.int(), numbers.int()
