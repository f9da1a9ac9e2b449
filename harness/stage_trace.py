"""Authority on which stage of a chunkwise kernel is the first outside its envelope."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from harness.agreement import Pair, pairs
from harness.part import CONFIRMING, formats_of
from harness.problem import Case, Problem
from harness.variants import Variant
from kda.precision import PrecisionSpec
from oracle.chunk_model import ChunkModel
from oracle.envelope import FLOOR, LIMITS, pooled_sigma, rms
from oracle.rounding import EXACT, PRECISION_BITS, RandomGrids
from oracle.trace import BACKWARD, FORWARD, OF_PIECES, PLACES, WITHOUT_TOKENS, places, trace_stages

# Two pairs of stages take turns, chunk after chunk, the second pair backwards.
IN_TURN = {"states": ("v_new", 1), "dh": ("dv_new", -1)}  # stage -> the other one, and the direction of the scan
AHEAD = ("k_rest", "k_update")  # of later tokens of the chunk too
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
    """Every stage that a subject exposes (see `oracle.trace` for names and shapes), in the order of computation.

    What is NaN in truth, because the case has NaN, is not measured.
    """
    where = places(case.inputs, chunk_of(spec, case.problem))
    out = [_found(name, got[name].cpu(), where[name]) for name in PLACES if name in got]
    if not got.keys() & {*FORWARD, *BACKWARD}:
        return out
    traces = [_traced(case, spec, False, seed)]
    if any(name in BACKWARD for name in got):
        traces.insert(0, _traced(case, spec.gradients or spec, True, seed))
    known = {name: one for trace in traces for name, one in trace.items()}
    device = case.inputs["g"].device
    for name in (*FORWARD, *BACKWARD):
        if name in got and name in known:
            exact, replicas, fmt = known[name]
            out.append(_held(name, got[name].to(device)[: len(exact)], exact, replicas, fmt))
    return out


def chunk_of(spec: PrecisionSpec, problem: Problem) -> int:
    """Tokens of the chunks by which a route shows its stages."""
    return spec.chunk or (problem.chunk_size if problem.entry == "chunk" else Problem.chunk_size)


def _traced(case: Case, spec: PrecisionSpec, gradients: bool, seed: int) -> dict[str, tuple[Tensor, Tensor, str]]:
    """By stage what is exact, the replicas, and the format of the operands."""
    formats = formats_of(spec, case.inputs, case.options)
    model = ChunkModel.of(formats, spec.chunk, spec.diagonal, spec.inverse, spec.form, spec.segment)
    rounding = RandomGrids(LIMITS.screen, seed + CONFIRMING, case.inputs["g"].device)
    run = lambda by: trace_stages(case.inputs, case.options, model, gradients=gradients, rounding=by, formats=formats)  # noqa: E731
    exact, replicas = run(EXACT), run(rounding)
    return {n: (exact[n], replicas[n], model.intra if n in FROM_PAIRS else model.operand) for n in exact}


def _found(name: str, got: Tensor, exact: Tensor) -> StageRatio:
    """Whole numbers, which are right or wrong."""
    return StageRatio(name, 0.0 if torch.equal(got, exact) else math.inf, ())


def _held(name: str, got: Tensor, exact: Tensor, replicas: Tensor, fmt: str) -> StageRatio:
    """See NOTE [Stages held]."""
    if got.shape != exact.shape:
        return StageRatio(name, math.inf, ())
    ratios = []
    for slot, truth in enumerate(exact.unbind()):
        rows = truth.unsqueeze(1) if truth.dim() == 2 else truth  # decay is one row a head
        unknown, rows = rows.isnan(), rows.nan_to_num()
        error = torch.where(unknown, 0.0, got[slot].double().view_as(rows) - rows)
        several = torch.where(unknown, 0.0, replicas[:, slot].reshape(-1, *rows.shape) - rows)
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


def differing(
    variant: Variant, case: Case, itself: Mapping[str, Tensor], other: Mapping[str, Tensor], chunk: int
) -> Iterator[str]:
    """The stages, in order, that another form of the call does not have as those of the call itself say: token by
    token, bit by bit. Nothing for a form that multiplies results, which it does to each stage in another way.
    """
    kinds = {**dict.fromkeys(FORWARD, "o"), **dict.fromkeys(BACKWARD, "dv")}  # a result by token and value head
    ahead = AHEAD if variant.name == "causal" else ()
    for name in () if variant.factors else (*FORWARD, *BACKWARD):
        if name not in itself or name not in other or name in (*WITHOUT_TOKENS, *OF_PIECES, *ahead):
            continue
        first, second = _by_token(case, itself[name], chunk), _by_token(variant.change(case), other[name], chunk)
        for _, pair in pairs(variant, case, {kinds[name]: first}, {kinds[name]: second}):
            if not isinstance(pair, Pair) or not bool(pair.same.all()):
                yield name


def _by_token(case: Case, x: Tensor, chunk: int) -> Tensor:
    """A stage `[slots, HV, C, D]` as `[B, T, HV, D]`, 0 outside of sequences."""
    where, (B, T) = places(case.inputs, chunk), case.inputs["g"].shape[:2]
    inside = torch.arange(chunk) < where["chunk_counts"][:, None]
    rows = where["chunk_rows"][:, None] + torch.arange(chunk)
    out = x.new_zeros(B * T, x.shape[1], x.shape[-1])
    out[rows[inside]] = x[: len(inside)].transpose(1, 2)[inside]
    return out.unflatten(0, (B, T))
