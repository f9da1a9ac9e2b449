"""Authority on problems that rounding leaves nearly exact, and on what may be off there: almost nothing."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from harness.census import Census, Verdict, Wrong
from harness.part import Call
from oracle.envelope import FLOOR, output_unit, rms
from oracle.rounding import FORMAT_OF_DTYPE, ToFormat

# NOTE [Nearly exact]
# On small multiples of powers of two with one key channel at a time the intermediates of every route fit its formats,
# and random grids, which know nothing of powers of two, allow far too much. The declared rounding itself is run instead
# (operands, stages, not the output): where it moves no element of a quantity by more than `certified`, a kernel may be
# off by `near_exact`, and a fault of one part in a million shows through bf16.


class _Declared(ToFormat):
    """The declared rounding, and sums in fp32 that keep what fits beside the largest of their terms: dyadic ones do."""

    def accumulate(self, site: str, value: Tensor, magnitude: Tensor, bits: int = 23) -> Tensor:
        pitch = torch.exp2(torch.floor(torch.log2(magnitude.clamp(min=FLOOR["fp32"]))) - bits)
        return value + (torch.round(value.detach() / pitch) * pitch - value.detach())


def nearly_exact(
    call: Call, inputs: Mapping[str, Tensor | None], exact: Mapping[str, Tensor], got: Mapping[str, Tensor]
) -> dict[str, Verdict]:
    """The verdict on each quantity that the route's declared rounding leaves nearly exact; the others are left out."""
    emulated = call.evaluator(inputs)(_Declared(), call.spec.algorithm)
    found = {}
    for name, y in got.items():
        truth, fmt = exact[name], FORMAT_OF_DTYPE[y.dtype]
        if not truth.numel() or not bool(torch.isfinite(truth).all()):
            continue
        scale = torch.maximum(truth.abs().amax(-1, keepdim=True), rms(truth.flatten()))
        moved = (emulated[name][0] - truth).abs()
        if not bool((moved <= call.limits.certified * scale).all()):
            continue
        error = (y.double() - truth).abs() - output_unit(fmt) * truth.abs() * 1.001 - FLOOR[fmt]
        share = (error / (scale + FLOOR["fp32"]) / call.limits.near_exact).nan_to_num(nan=math.inf)
        ratio, over = float(share.max()), int((share > 1).sum())
        at = tuple(map(int, torch.unravel_index(share.argmax(), share.shape)))
        worst = Wrong(
            at, float(y[at]), float(truth[at]), float(scale.expand_as(truth)[at]) * call.limits.near_exact, ratio
        )
        census = Census(y.numel(), over, int((~torch.isfinite(y)).sum()), (worst,) if over else ())
        found[name] = Verdict(name, "BUG" if over else "OK", max(ratio, 0.0), "near_exact", census=census)
    return found
