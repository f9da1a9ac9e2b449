"""Authority on verdicts: a kernel's outputs against the oracle, a class and a ratio for every quantity."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from harness.census import SEVERITY, Census, Verdict, Wrong, severity, worst
from harness.exactness import nearly_exact
from harness.part import CONFIRMING, Call, Part, resolved
from harness.rows import PER_QUERY_HEAD, blocks_of, heads_of, slice_heads, slice_output, tail_of
from kda.precision import PrecisionSpec
from oracle.envelope import LIMITS, Limits, output_unit, rms
from oracle.operator import Options
from oracle.packing import Layout
from oracle.rounding import EXACT, FORMAT_OF_DTYPE, RandomGrids
from oracle.stages import BLOCK

__all__ = ["SEVERITY", "Census", "Verdict", "Wrong", "judge", "severity", "worst"]

STATE_STEPS = {"cpu": 4e9, "cuda": 2e9}  # replicas x tokens x heads x K x V that are judged; see NOTE [Heads judged]
PART_ELEMENTS = {"cpu": 2**22, "cuda": 2**27}  # replicas x tokens x heads x width of one part: bounds memory
FIRST_LOOK = {"cpu": 2**17, "cuda": 2**24}  # elements of the largest tensors of a screen from which a first look pays
# What the chunkwise algorithm, whose autograd keeps much of every chunk, takes in units of 160 bytes: for an element of
# a row, of a state, and of the pairwise decays of a block; in pieces so many times as much. Measured at K = V = 128, in
# kB for each token of a replica of a head: 89 and 211 at 64 tokens a chunk (anchored, and pairs), 151 and 300 at 16,
# 565 and 533 in pieces of those.
ROW_WEIGHT, STATE_WEIGHT, PAIR_WEIGHT, PIECES_WEIGHT = 4, 1, 0.5, 2.5
SUSPECTS = frozenset({"BUG", "UNSTABLE"})  # classes of a screen that are looked at again


def judge(
    inputs: Mapping[str, Tensor | None],
    options: Options,
    outputs: Mapping[str, Tensor],
    *,
    entry: str,
    spec: PrecisionSpec,
    quantities: frozenset[str] | None = None,
    seed: int = 0,
    device: torch.device | str | None = None,
    limits: Limits = LIMITS,
    near_exact: bool = False,
) -> list[Verdict]:
    """One verdict for every one of `quantities`, or for all that the oracle knows for this call.

    `inputs` are the tensors as the kernel got them, with `do` and `dht`; `outputs` what it returned, by quantity name.
    `entry` is 'gate' for the gate alone, anything else for the whole operator. Gradients go by `spec.gradients` if the
    route has one. `near_exact`: the declared rounding may turn out to move nothing on these inputs; then nearly nothing
    is allowed.
    """
    device = torch.device(device) if device is not None else inputs["g"].device
    inputs = {name: None if x is None else x.detach().to(device) for name, x in inputs.items()}
    layout = Layout.of(*inputs["g"].shape[:2], inputs.get("cu_seqlens"))
    by_spec = lambda own, grads: Call(options, entry, own, grads, limits, layout, heads_of(inputs, entry))  # noqa: E731
    exact = by_spec(spec, quantities is None or any(map(is_gradient, quantities))).evaluator(inputs)(EXACT)
    wanted = list(exact) if quantities is None else sorted(quantities)
    found = {name: _form_problem(name, exact.get(name), outputs.get(name), inputs, spec) for name in wanted}
    names = [name for name in wanted if found[name] is None]
    got = {name: outputs[name].detach().to(device) for name in names}
    grids = functools.cache(lambda replicas, seed: RandomGrids(replicas, seed, device))
    for own, mine in declared_by(spec, names):
        call = by_spec(own, any(map(is_gradient, mine)))
        truths, returned = ({name: results[name] for name in mine} for results in (exact, got))
        found |= _Case(call, inputs, truths, returned, seed, grids).judged()
        close = nearly_exact(call, inputs, truths, returned) if near_exact else {}
        found |= {name: worst((found[name], far)) for name, far in close.items()}
    return list(found.values())


def is_gradient(name: str) -> bool:
    return name.startswith("d")


def declared_by(spec: PrecisionSpec, names: Iterable[str]) -> Iterator[tuple[PrecisionSpec, list[str]]]:
    """Each declaration with those of the quantities that go by it: gradients by `spec.gradients` if there is one."""
    names = list(names)
    backward = [name for name in names if is_gradient(name) and spec.gradients is not None]
    forward = [name for name in names if name not in backward]
    yield from ((own, mine) for own, mine in ((spec, forward), (spec.gradients, backward)) if mine)


def declared_format(name: str, inputs: Mapping[str, Tensor | None], spec: PrecisionSpec) -> str | None:
    """The format an output must have, or None where the route declares nothing. fp32 is fp64 in a call in float64."""
    declared = spec.stages.get(name)
    if declared is None:
        return None
    io = inputs.get("q") if inputs.get("q") is not None else inputs["g"]
    if declared == "fp32" and io.dtype == torch.float64:
        return "fp64"
    return resolved(declared, inputs, spec.precision)


def _form_problem(name, truth, got, inputs, spec) -> Verdict | None:
    """What is wrong before any number is looked at: nothing returned, another shape, another dtype."""
    if truth is None:
        return Verdict(name, "NOT_COVERED", 0.0, message="the oracle has no such quantity for this call")
    if got is None:
        return Verdict(name, "NOT_COVERED", 0.0, message="not returned")
    if tuple(got.shape) != tuple(truth.shape):
        return Verdict(name, "BUG", math.inf, "shape", f"shape is {list(got.shape)}, must be {list(truth.shape)}")
    fmt = declared_format(name, inputs, spec)
    if got.dtype not in FORMAT_OF_DTYPE or (fmt is not None and FORMAT_OF_DTYPE[got.dtype] != fmt):
        return Verdict(
            name, "BUG", math.inf, "dtype", f"dtype is {got.dtype}, must be {fmt or 'a floating-point type'}"
        )
    return None


# NOTE [Heads judged]
# Every head is judged in full as long as the replicas fit a budget of state steps; beyond it evenly spaced heads are.
# The others get a coarse look (the error of each row beyond its output rounding, against the widest row of the heads
# that were judged), and those that stand out are judged in full too: the coarse look finds, it never condemns. A
# message says how many heads were judged. Heads go in parts that bound memory. Where replicas are dear, most of what is
# right is found to be so with some of them (NOTE [First look]), and the others are not run. A BUG or UNSTABLE of the
# screen is looked at again, in exactly the heads where it was seen, with fresh and more replicas, which decide.
@dataclass
class _Case:
    """One call with its exact results and the outputs that can be compared."""

    call: Call
    inputs: dict[str, Tensor | None]
    exact: dict[str, Tensor]
    got: dict[str, Tensor]
    seed: int
    grids: Callable[[int, int], RandomGrids]  # by (replicas, seed)

    def judged(self) -> dict[str, Verdict]:
        """The verdict on every quantity."""
        everything = self.call.heads.query
        queries = self._affordable(range(everything))
        found, share = self._in_full(queries)
        if len(queries) < everything:
            rest = sorted(set(range(everything)) - set(queries))
            far = self._outstanding(rest, share)
            if far:
                found = _merged(found, self._in_full(far)[0])
            said = f"{len(queries) + len(far)} of {everything} heads judged in full, the others coarsely"
            found = {
                name: replace(one, message="; ".join(filter(None, (one.message, said)))) for name, one in found.items()
            }
        return {name: self._with_tail(name, one) for name, one in found.items()}

    def _with_tail(self, name: str, verdict: Verdict) -> Verdict:
        """Tokens of no sequence must be exactly 0."""
        rest = tail_of(name, self.got[name], self.call.layout)
        count = 0 if rest is None else int((~(rest == 0)).sum())
        if not count:
            return verdict
        message = f"{count} elements after the last offset are not 0"
        return replace(verdict, klass="BUG", ratio=math.inf, statistic="tail", message=message)

    def _cost(self, replicas: int) -> tuple[float, float]:
        """(state steps, weighted elements of a tensor) of one query head."""
        x, tokens = self.inputs, replicas * sum(self.call.layout.lengths) * self.call.heads.group
        K, V = self.call.heads.K, 1 if self.call.entry == "gate" else x["v"].shape[-1]
        width, spec = max(K, V), self.call.spec
        if spec.algorithm == "chunk":
            width = ROW_WEIGHT * width + STATE_WEIGHT * K * V / (spec.chunk or self.call.options.chunk_size)
            width += 0 if (spec.diagonal or "pair").startswith("anchor") else PAIR_WEIGHT * BLOCK * K
            width *= PIECES_WEIGHT if spec.segment else 1
        return max(1.0, float(tokens * K * V)), max(1.0, float(tokens * width))

    def _budget(self, budgets: Mapping[str, float]) -> float:
        return budgets["cuda" if self.inputs["g"].is_cuda else "cpu"]

    def _affordable(self, queries: Iterable[int]) -> list[int]:
        """Evenly spaced ones of `queries` (all, if the budget allows), at least one."""
        queries = list(queries)
        steps, _ = self._cost(self.call.limits.screen)
        count = min(len(queries), max(1, int(self._budget(STATE_STEPS) / steps)))
        return sorted({queries[round(i * (len(queries) - 1) / max(count - 1, 1))] for i in range(count)})

    def _at_once(self, queries: int) -> int:
        """Replicas of so many heads that memory allows, at least one."""
        return max(1, int(self._budget(PART_ELEMENTS) / self._cost(1)[1] / queries))

    def _parts(self, queries: list[int], replicas: int) -> Iterable[list[int]]:
        """As many heads at a time as memory allows with so many replicas; with fewer, if it does not allow one."""
        size = max(1, int(self._budget(PART_ELEMENTS) / self._cost(replicas)[1]))
        return (queries[first : first + size] for first in range(0, len(queries), size))

    def _look(self, queries: list[int], names: list[str], replicas: int, seed: int) -> tuple[dict[str, Verdict], dict]:
        """Verdicts on `names` in these heads with replicas of their own, and the widest rows."""
        heads, limits = self.call.heads, self.call.limits
        mine = lambda tensors: {n: slice_output(n, tensors[n], queries, heads) for n in names}  # noqa: E731
        inputs, got = slice_heads(self.inputs, queries, self.call.entry), mine(self.got)
        first = limits.first if replicas == limits.screen and self._dear(len(queries)) else replicas
        grids, at_once = self.grids(replicas, seed), self._at_once(len(queries))
        part = Part(self.call, queries, inputs, mine(self.exact), grids, first, at_once)
        verdicts = {name: part.verdict(name, y) for name, y in got.items()}
        share, unclear = dict(part.share), [name for name in names if verdicts[name].klass == "SUSPECT"]
        if unclear:
            part.complete()
            verdicts |= {name: part.verdict(name, got[name]) for name in unclear}
        return verdicts, share | part.share

    def _dear(self, queries: int) -> bool:
        """Whether replicas of so many heads cost by the numbers in them, and not by the operation."""
        heads, x = self.call.heads, self.inputs
        width = 1 if self.call.entry == "gate" else x["v"].shape[-1]
        rows = queries * heads.group * len(self.call.layout.lengths)
        tokens = queries * heads.group * sum(self.call.layout.lengths)
        each = tokens * BLOCK * max(heads.K, width) if self.call.spec.algorithm == "chunk" else rows * heads.K * width
        return self.call.limits.screen * each >= self._budget(FIRST_LOOK)

    def _in_full(self, queries: list[int]) -> tuple[dict[str, Verdict], dict[str, float]]:
        """(verdicts on these heads, the largest share of a row's scale that rounding may take)."""
        limits, names = self.call.limits, list(self.got)
        found: dict[str, Verdict] = {}
        widest: dict[str, float] = {}
        confirmed: set[str] = set()
        for part in self._parts(queries, limits.screen):
            verdicts, share = self._look(part, names, limits.screen, self.seed)
            suspects = [name for name in names if verdicts[name].klass in SUSPECTS and name not in confirmed]
            if suspects:
                verdicts |= self._again(part, suspects)
                confirmed |= {name for name in suspects if verdicts[name].klass in SUSPECTS}
            found = _merged(found, verdicts)
            widest |= {name: max(value, widest.get(name, 0.0)) for name, value in share.items()}
        return found, widest

    def _again(self, queries: list[int], names: list[str]) -> dict[str, Verdict]:
        found: dict[str, Verdict] = {}
        for part in self._parts(queries, self.call.limits.confirm):
            verdicts, _ = self._look(part, names, self.call.limits.confirm, self.seed + CONFIRMING)
            found = _merged(found, verdicts)
        return found

    def _outstanding(self, queries: list[int], share: Mapping[str, float]) -> list[int]:
        """Those of `queries` whose rows stray further than any judged row may; the worst, as the budget allows."""
        heads, stray = self.call.heads, dict.fromkeys(queries, 0.0)
        for name, whole in self.got.items():
            got, truth = (slice_output(name, x, queries, heads) for x in (whole, self.exact[name]))
            allowed = self.call.limits.row * share.get(name, 0.0)
            for block in blocks_of(name, got, self.call.layout, heads):
                ratio = self._strayed(name, block.take(got), block.take(truth), allowed)
                members = 1 if name in PER_QUERY_HEAD else heads.group
                for query, value in zip(queries, ratio.view(-1, len(queries), members).amax((0, 2)).tolist()):
                    stray[query] = max(stray[query], value)
        far = sorted((query for query in queries if not stray[query] <= 1), key=lambda query: -stray[query])
        return sorted(far[: len(self._affordable(far))]) if far else []

    def _strayed(self, name: str, value: Tensor, exact: Tensor, allowed: float) -> Tensor:
        """`[N]`: the largest row error over what is allowed, beyond the rounding of the output; inf if not finite."""
        fmt = FORMAT_OF_DTYPE[value.dtype]
        floor = self.call.floor(name, fmt)
        scale = torch.maximum(rms(exact), rms(exact, (1, 2))[:, None] * self.call.limits.small_row) + floor
        excess = (value.double() - exact).abs() - output_unit(fmt) * exact.abs() * 1.001 - floor
        ratio = rms(excess.clamp(min=0)) / scale / max(allowed, output_unit("fp32"))
        return ratio.nan_to_num(nan=math.inf, posinf=math.inf).amax(1)


def _merged(found: Mapping[str, Verdict], others: Mapping[str, Verdict]) -> dict[str, Verdict]:
    """Verdicts on further heads joined to those on others: the worse one, with both censuses."""
    out = dict(found)
    for name, other in others.items():
        mine = out.get(name)
        out[name] = other if mine is None else replace(worst((mine, other)), census=mine.census + other.census)
    return out
