"""Authority on the error of every element: what came, what should have come, and how far apart they may be."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.part import CONFIRMING, Call, Part
from harness.problem import Case
from harness.rows import blocks_of, heads_of, slice_heads, slice_output, tail_of
from harness.verdict import declared_by, declared_format, is_gradient
from kda.precision import PrecisionSpec
from oracle.envelope import LIMITS, Limits
from oracle.operator import Options
from oracle.packing import Layout
from oracle.rounding import DTYPE_OF_FORMAT, EXACT, RandomGrids


@dataclass(frozen=True)
class Field:
    """One quantity element by element, float64 on the CPU, in the caller's layout.

    `tolerance`: the element-wise limit of the criterion, half an ulp and c sigma; NaN where nothing was measured.
    """

    quantity: str
    got: Tensor
    expected: Tensor
    tolerance: Tensor

    @property
    def ratio(self) -> Tensor:
        """|got - expected| over the tolerance: infinite where one is not finite, 0 where nothing was measured."""
        error = (self.got - self.expected).abs()
        ratio = torch.where(error > 0, error / self.tolerance, 0.0)
        ratio = torch.where(torch.isfinite(self.got) & torch.isfinite(self.expected), ratio, torch.inf)
        return torch.where(torch.isnan(self.tolerance), 0.0, ratio)

    @property
    def wrong(self) -> Tensor:
        return ~(self.ratio <= 1)


def measure(
    inputs: Mapping[str, Tensor | None],
    options: Options,
    outputs: Mapping[str, Tensor],
    *,
    entry: str,
    spec: PrecisionSpec,
    queries: list[int] | None = None,
    seed: int = 0,
    limits: Limits = LIMITS,
) -> dict[str, Field]:
    """The field of every output that has the shape the oracle gives it, from the replicas that confirm a verdict.

    `queries`: only these query heads are measured, and their value heads.
    """
    heads = heads_of(inputs, entry)
    layout = Layout.of(*inputs["g"].shape[:2], inputs.get("cu_seqlens"))
    by_spec = lambda own, grads: Call(options, entry, own, grads, limits, layout, heads)  # noqa: E731
    exact = by_spec(spec, any(map(is_gradient, outputs))).evaluator(inputs)(EXACT)
    got = {name: x for name, x in outputs.items() if name in exact and x.shape == exact[name].shape}
    queries = list(range(heads.query)) if queries is None else queries
    sliced = slice_heads(inputs, queries, entry)
    found = {}
    for own, names in declared_by(spec, got):
        call = by_spec(own, any(map(is_gradient, names)))
        mine = {name: slice_output(name, exact[name], queries, heads) for name in names}
        part = Part(call, queries, sliced, mine, RandomGrids(limits.confirm, seed + CONFIRMING, sliced["g"].device))
        found |= {name: _field(name, part, got[name].detach().to(exact[name].device), exact[name]) for name in names}
    return found


def form(case: Case, quantity: str, entry: str, spec: PrecisionSpec) -> tuple[list[int], torch.dtype | None] | None:
    """(shape, declared dtype or None) that a quantity of this call must have; None for what is no quantity."""
    inputs = case.inputs
    layout, heads = Layout.of(*inputs["g"].shape[:2], inputs.get("cu_seqlens")), heads_of(inputs, entry)
    call = Call(case.options, entry, spec, is_gradient(quantity), LIMITS, layout, heads)
    exact = call.evaluator(inputs)(EXACT).get(quantity)
    if exact is None:
        return None
    declared = declared_format(quantity, inputs, spec)
    return list(exact.shape), DTYPE_OF_FORMAT.get(declared)


def _field(name: str, part: Part, got: Tensor, exact: Tensor) -> Field:
    queries, heads = part.queries, part.call.heads
    tolerance = torch.full_like(exact, torch.nan).flatten()
    places = torch.arange(exact.numel(), device=exact.device).view(exact.shape)
    places, some = (slice_output(name, x, queries, heads) for x in (places, got))
    for block in blocks_of(name, some, part.call.layout, heads):
        measured = part.measured(name, block, some)
        if measured is not None:
            stats = measured.statistics
            allowed = stats.rounding + part.call.limits.element * stats.sigma
            tolerance[block.take(places).flatten()] = allowed.flatten()
    tolerance = tolerance.view(exact.shape)
    outside = _outside(name, exact, part.call.layout)
    if outside is not None:
        tolerance.flatten(0, 1)[outside:] = 0.0
    return Field(name, got.double().cpu(), exact.cpu(), tolerance.cpu())


def _outside(name: str, x: Tensor, layout: Layout) -> int | None:
    """The first row of no sequence, whose elements must be exactly 0; None for a quantity without tokens."""
    rest = tail_of(name, x, layout)
    return None if rest is None else layout.rows - rest.shape[0]
