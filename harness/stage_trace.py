"""Authority on which stage of a chunkwise kernel is the first outside its envelope."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.part import CONFIRMING, resolved
from harness.problem import Case
from kda.precision import PrecisionSpec
from oracle.envelope import FLOOR, LIMITS, pooled_sigma, rms
from oracle.rounding import EXACT, PRECISION_BITS, RandomGrids
from oracle.stages import ChunkModel
from oracle.trace import BACKWARD, FORWARD, trace_stages

# Two pairs of stages take turns, chunk after chunk, the second pair backwards.
IN_TURN = {"states": ("v_new", 1), "dh": ("dv_new", -1)}  # stage -> the other one, and the direction of the scan
FROM_PAIRS = frozenset({"A_kk", "inverse", "decay"})  # rounded as declared for `intra`, the others as operands

# NOTE [Stages held]
# The envelope declares what a route may round on the way to its results, not in which of several equal ways it forms a
# stage (by pairs or by halves, stored rounded or rounded when used). So a stage is allowed, beside c sigma of the
# replicas, c roundoffs of its operands at the scale of its row: enough for every honest way, far below a wrong line.


@dataclass(frozen=True)
class StageRatio:
    """How far a stage is from the truth, its worst statistic over its limit, and the chunks in which it is outside."""

    stage: str
    ratio: float
    slots: tuple[int, ...]


def hold(got: Mapping[str, Tensor], case: Case, spec: PrecisionSpec, seed: int = 0) -> list[StageRatio]:
    """Every stage that a subject exposes (see `oracle.trace` for names and shapes), in the order of computation."""
    formats = {stage: resolved(fmt, case.inputs, spec.precision) for stage, fmt in spec.stages.items()}
    model = ChunkModel.of(formats, spec.chunk, spec.diagonal, spec.inverse, spec.form)
    gradients = any(name in BACKWARD for name in got)
    device = case.inputs["g"].device
    rounding = RandomGrids(LIMITS.screen, seed + CONFIRMING, device)
    run = lambda by: trace_stages(case.inputs, case.options, model, gradients=gradients, rounding=by, formats=formats)  # noqa: E731
    exact, replicas = run(EXACT), run(rounding)
    out = []
    for name in (*FORWARD, *BACKWARD):
        if name in got and name in exact:
            fmt = model.intra if name in FROM_PAIRS else model.operand
            out.append(_held(name, got[name].to(device)[: len(exact[name])], exact[name], replicas[name], fmt))
    return out


def _held(name: str, got: Tensor, exact: Tensor, replicas: Tensor, fmt: str) -> StageRatio:
    """See NOTE [Stages held]."""
    if got.shape != exact.shape:
        return StageRatio(name, math.inf, ())
    ratios = []
    for slot, truth in enumerate(exact.unbind()):
        rows = truth.unsqueeze(1) if truth.dim() == 2 else truth  # decay is one row a head
        error, several = (got[slot].double() - truth).view_as(rows), replicas[:, slot].reshape(-1, *rows.shape) - rows
        scale = torch.maximum(rms(rows, keepdim=True), rms(rows, (1, 2), keepdim=True) * LIMITS.small_row)
        sigma = pooled_sigma(several) + 2.0 ** -PRECISION_BITS[fmt] * scale
        ratio = (error.abs() / (LIMITS.element * sigma + FLOOR["fp32"])).nan_to_num(nan=math.inf, posinf=math.inf)
        ratios.append(float(ratio.max()) if ratio.numel() else 0.0)
    return StageRatio(name, max(ratios, default=0.0), tuple(slot for slot, x in enumerate(ratios) if not x <= 1))


def first_outside(held: list[StageRatio]) -> StageRatio | None:
    """The stage in which the fault is: the first one outside whose inputs are inside."""
    by_name = {stage.stage: stage for stage in held}
    for stage in held:
        if stage.ratio <= 1:
            continue
        other, direction = IN_TURN.get(stage.stage, ("", 1))
        other = by_name.get(other)
        if other and other.slots and stage.slots:
            begins = [min(slot * direction for slot in one.slots) for one in (other, stage)]
            return other if begins[0] < begins[1] else stage
        return stage
    return None
