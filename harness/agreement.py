"""Authority on what a call and another form of it must have in common, element by element."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.census import Verdict
from harness.field import Field
from harness.problem import Case
from harness.variants import Variant
from oracle.envelope import floor_of
from oracle.rounding import FORMAT_OF_DTYPE


@dataclass(frozen=True)
class Pair:
    """What came of another form of a call beside what must come, in one shape.

    `places`: the flat index of each element in the call's own result, from 1; 0 where that has none. `allowed`: how far
    apart the two may be.
    """

    got: Tensor
    expected: Tensor
    places: Tensor
    allowed: float

    @property
    def same(self) -> Tensor:
        equal = (self.got == self.expected) | (self.got.isnan() & self.expected.isnan())
        if self.allowed:  # what was scaled may also have left the range of its format
            finite = torch.isfinite(self.got) & torch.isfinite(self.expected)
            equal |= ~finite | ((self.got.double() - self.expected.double()).abs() <= self.allowed)
        return equal


def expected_of(variant: Variant, case: Case, name: str, x: Tensor) -> tuple[Tensor, Tensor] | None:
    """(what must come of a quantity in that form, where that is in `x`: see `Pair`), from what it is, `x`, in the call
    itself.
    """
    selected = variant.expected(case, name, x)
    if selected is None:
        return None
    numbered = torch.arange(1, x.numel() + 1, dtype=torch.float64, device=x.device).view(x.shape)
    return selected * variant.factors.get(name, 1.0), variant.expected(case, name, numbered).long()


def allowed_between(variant: Variant, name: str, dtype: torch.dtype, diagonal: str | None) -> float:
    """How far apart two elements of a quantity may be; `diagonal` is that of the route's PrecisionSpec."""
    return floor_of(name, FORMAT_OF_DTYPE[dtype], diagonal) if variant.scaled else 0.0


def pairs(
    variant: Variant,
    case: Case,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    diagonal: str | None = None,
) -> Iterator[tuple[str, Pair | str]]:
    """Each quantity that the form says something about, or what is wrong with its shape."""
    for name, x in first.items():
        promised = expected_of(variant, case, name, x)
        if promised is None or name not in second:
            continue
        (expected, places), got = promised, variant.kept(case, name, second[name])
        if got.shape == expected.shape:
            yield name, Pair(got, expected, places, allowed_between(variant, name, got.dtype, diagonal))
        else:
            yield name, f"shape is {list(got.shape)}, must be {list(expected.shape)}"


def violations(
    variant: Variant,
    case: Case,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    diagonal: str | None = None,
) -> Iterator[Verdict]:
    """A verdict for every quantity of the changed call that is not what the call itself says it must be."""
    for name, pair in pairs(variant, case, first, second, diagonal):
        if isinstance(pair, Pair):
            count = int((~pair.same).sum())
            message = f"{count} of {pair.got.numel()} elements differ" if count else ""
        else:
            message = pair
        if message:
            yield Verdict(name, "BUG", math.inf, variant.name, f"{variant.promise}: {message}")


def between(
    variant: Variant,
    case: Case,
    name: str,
    first: Mapping[str, Tensor],
    second: Mapping[str, Tensor],
    diagonal: str | None = None,
) -> Field | None:
    """The difference where the call's own result has it: `expected` is what the call itself says, `got` the other form.

    None for a quantity that cannot be compared. What the form says nothing about is not measured.
    """
    pair = dict(pairs(variant, case, first, second, diagonal)).get(name)
    if not isinstance(pair, Pair):
        return None
    same, inside = pair.same, pair.places.flatten() > 0
    where = pair.places.flatten()[inside] - 1
    own = (first[name] * variant.factors.get(name, 1.0)).double()
    got, expected, tolerance = own.flatten().clone(), own.flatten(), torch.full((own.numel(),), torch.nan).double()
    tolerance = tolerance.to(own.device)
    tolerance[where] = pair.allowed
    got[where] = pair.got.double().flatten()[inside]
    agreed = where[same.flatten()[inside]]  # a NaN that must be there is no difference
    got[agreed] = expected[agreed] = expected[agreed].nan_to_num()
    return Field(name, *(x.view(own.shape).cpu() for x in (got, expected, tolerance)))
