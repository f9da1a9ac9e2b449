"""Authority on repeated calls: whether a route gives the same bits every time, and if not, how its results differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.bits import as_bytes

RUNS = 5


@dataclass(frozen=True)
class Spread:
    """How one quantity varies over several calls: distinct results, elements that vary, and the widest of them."""

    quantity: str
    runs: int
    distinct: int
    varying: int
    elements: int
    widest: float
    at: tuple[int, ...]

    def __str__(self) -> str:
        place = "".join(f"[{i}]" for i in self.at)
        return (
            f"{self.quantity}: {self.distinct} different results in {self.runs} calls, "
            f"{self.varying} of {self.elements} elements vary, most at {place} by {self.widest:.3g}"
        )


def spreads(runs: Sequence[Mapping[str, Tensor]]) -> list[Spread]:
    """The quantities of which two calls of the same problem returned different bits."""
    found = []
    for name, first in runs[0].items():
        several = [run[name] for run in runs if name in run and run[name].shape == first.shape]
        distinct = len({as_bytes(x).cpu().numpy().tobytes() for x in several})
        if distinct < 2:
            continue
        stacked = torch.stack([x.double() for x in several])
        same = (stacked == stacked[0]) | (stacked.isnan() & stacked[0].isnan())
        width = (stacked.amax(0) - stacked.amin(0)).nan_to_num(nan=torch.inf)
        width = torch.where(same.all(0), 0.0, width)
        place = tuple(int(i) for i in torch.unravel_index(width.argmax(), first.shape)) if first.dim() else ()
        varying = int((~same.all(0)).sum())
        found.append(Spread(name, len(several), distinct, varying, first.numel(), float(width.max()), place))
    return found
