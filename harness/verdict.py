"""Authority on verdicts: a kernel's outputs against the oracle, a ratio and a class for every quantity, and a census of what is wrong."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from harness.rows import Block, blocks_of, heads_of, slice_heads, slice_output, tail_of
from kda.precision import PrecisionSpec
from oracle.envelope import FLOOR, LIMITS, Limits, Statistics, rms, statistics
from oracle.operator import Options, evaluate, evaluate_gate
from oracle.packing import Layout
from oracle.recurrence import LOG2E
from oracle.rounding import EXACT, FORMAT_OF_DTYPE, LARGEST, PRECISION_BITS, RandomGrids, Rounding
from oracle.stages import ChunkModel, chunk_core

SEVERITY = ("OK", "UNINFORMATIVE", "NOT_COVERED", "UNSTABLE", "SUSPECT", "NONDETERMINISTIC", "HANG", "CRASH", "BUG")
WORST_SHOWN = 5
STATE_STEPS = {"cpu": 4e9, "cuda": 2e10}  # replicas x tokens x heads x K x V judged element by element; further heads coarsely
REAL_SPAN = 126.0  # log2 range that fp32 factors of an anchored tile may span
RESOLVED_SUM = 1.8e5  # an fp32 cumulative gate beyond this no longer resolves 1/64 nat


@dataclass(frozen=True)
class Wrong:
    """One element: its index in the caller's layout, what came and what should have come, and how many sigmas apart."""

    index: tuple[int, ...]
    got: float
    expected: float
    sigma: float
    z: float


@dataclass(frozen=True)
class Census:
    """How much of a tensor is wrong: counts, and the worst elements."""

    elements: int = 0
    over: int = 0
    nonfinite: int = 0
    worst: tuple[Wrong, ...] = ()

    def __add__(self, other: "Census") -> "Census":
        worst = sorted(self.worst + other.worst, key=lambda wrong: -wrong.z)[:WORST_SHOWN]
        return Census(
            self.elements + other.elements, self.over + other.over, self.nonfinite + other.nonfinite, tuple(worst)
        )


@dataclass(frozen=True)
class Verdict:
    """The judgement of one quantity: class of INTERFACES, the worst statistic over its limit (<= 1 is inside), and the census."""

    quantity: str
    klass: str
    ratio: float
    statistic: str = ""
    message: str = ""
    census: Census = field(default_factory=Census)

    def __str__(self) -> str:
        head = f"{self.quantity}: {self.klass}, {self.statistic} at {self.ratio:.3g} of its limit"
        counts = f"; {self.census.over} of {self.census.elements} elements over, {self.census.nonfinite} non-finite"
        return head + (counts if self.census.elements else "") + (f"; {self.message}" if self.message else "")


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
) -> list[Verdict]:
    """A verdict for every one of `quantities`, or for all that the oracle knows for this call.

    `inputs` are the tensors as the kernel got them, with `do` and `dht`; `outputs` what it returned, by quantity name.
    """
    device = torch.device(device) if device is not None else inputs["g"].device
    inputs = {name: None if x is None else x.detach().to(device) for name, x in inputs.items()}
    gradients = quantities is None or any(name.startswith("d") for name in quantities)
    exact = _evaluator(inputs, options, entry, spec, gradients)(EXACT)
    exact = {name: x for name, x in exact.items() if quantities is None or name in quantities}
    verdicts, comparable = [], []
    for name, truth in exact.items():
        problem = _form_problem(name, truth, outputs.get(name), inputs, spec)
        if problem is None:
            comparable.append(name)
        else:
            verdicts.append(problem)
    case = _Case(inputs, options, entry, spec, gradients, limits, exact, comparable)
    outputs = {name: outputs[name].detach().to(device) for name in comparable}
    verdicts += [verdict for verdict in (case.tail(name, outputs[name]) for name in comparable) if verdict]
    found = case.look(outputs, limits.screen, seed, comparable)
    suspects = [name for name in comparable if found[name].klass == "BUG"]
    if suspects:  # a bug is what fresh, independent replicas call one too
        found |= case.look(outputs, limits.confirm, seed + 1_000_000, suspects)
    return verdicts + list(found.values())


def worst(verdicts: list[Verdict]) -> Verdict:
    """The most severe verdict, ties broken by ratio."""
    return max(verdicts, key=lambda verdict: (SEVERITY.index(verdict.klass), verdict.ratio))


def declared_format(name: str, inputs: Mapping[str, Tensor | None], spec: PrecisionSpec) -> str | None:
    """The format an output must have, or None where the route declares nothing."""
    declared = spec.stages.get(name)
    source = {"io": "q", "g": "g", "beta": "beta"}.get(declared or "")
    if source is None:
        return declared
    return FORMAT_OF_DTYPE[inputs[source].dtype]


def _form_problem(name, truth, got, inputs, spec) -> Verdict | None:
    """What is wrong before any number is looked at: nothing returned, another shape, another dtype."""
    if got is None:
        return Verdict(name, "NOT_COVERED", 0.0, message="not returned")
    if tuple(got.shape) != tuple(truth.shape):
        return Verdict(name, "BUG", math.inf, "shape", f"shape is {list(got.shape)}, must be {list(truth.shape)}")
    fmt = declared_format(name, inputs, spec)
    if fmt is not None and FORMAT_OF_DTYPE.get(got.dtype) != fmt:
        return Verdict(name, "BUG", math.inf, "dtype", f"dtype is {got.dtype}, must be {fmt}")
    return None


def _evaluator(inputs, options, entry, spec, gradients) -> Callable[..., dict[str, Tensor]]:
    """The oracle on this call, as a function of the rounding and of the algorithm."""

    def run(rounding: Rounding, algorithm: str = "recurrent") -> dict[str, Tensor]:
        if entry == "gate":
            return evaluate_gate(inputs, options, gradients=gradients, rounding=rounding)
        formats = {stage: _resolved(fmt, inputs) for stage, fmt in spec.stages.items()}
        core = None
        if algorithm == "chunk":
            core = chunk_core(ChunkModel.of(formats, spec.chunk or 64, spec.diagonal, spec.inverse), rounding)
        elif algorithm == "plain":
            formats["update"] = formats.get("operand", "fp32")
        return evaluate(inputs, options, gradients=gradients, rounding=rounding, formats=formats, core=core)

    return run


def _resolved(fmt: str, inputs) -> str:
    source = {"io": "q", "g": "g", "beta": "beta"}.get(fmt)
    return fmt if source is None else FORMAT_OF_DTYPE[inputs[source].dtype]


@dataclass
class _Case:
    """One call, judged."""

    inputs: dict[str, Tensor | None]
    options: Options
    entry: str
    spec: PrecisionSpec
    gradients: bool
    limits: Limits
    exact: dict[str, Tensor]
    names: list[str]

    def __post_init__(self):
        g = self.inputs["g"]
        self.layout = Layout.of(g.shape[0], g.shape[1], self.inputs.get("cu_seqlens"))
        self.heads = heads_of(self.inputs, self.entry)

    def tail(self, name: str, got: Tensor) -> Verdict | None:
        """Tokens of no sequence must be exactly 0."""
        rest = tail_of(name, got, self.layout)
        if rest is None or not rest.numel() or bool((rest == 0).all()):
            return None
        count = int((~(rest == 0)).sum())
        return Verdict(name, "BUG", math.inf, "tail", f"{count} elements after the last offset are not 0")

    def look(self, outputs: Mapping[str, Tensor], replicas: int, seed: int, names: list[str]) -> dict[str, Verdict]:
        """Judge `names` with fresh replicas: a share of the heads element by element, the rest against the widest of those rows."""
        sampled = self._sampled_heads(replicas)
        inputs = slice_heads(self.inputs, sampled, self.entry)
        part = _Part(
            self, inputs, {n: slice_output(n, self.exact[n], sampled, self.heads) for n in names}, replicas, seed
        )
        found = {n: part.verdict(n, slice_output(n, outputs[n], sampled, self.heads), sampled) for n in names}
        if len(sampled) < self.heads.query:
            for name in names:
                found[name] = self._coarse(name, outputs[name], part, found[name])
        return found

    def _sampled_heads(self, replicas: int) -> list[int]:
        g = self.inputs["g"]
        device = "cuda" if g.is_cuda else "cpu"
        V = self.inputs["v"].shape[-1] if self.entry != "gate" else 1
        tokens = sum(self.layout.lengths)
        cost = replicas * tokens * self.heads.group * g.shape[-1] * V
        count = min(self.heads.query, max(1, int(STATE_STEPS[device] / max(cost, 1))))
        return sorted({round(i * (self.heads.query - 1) / max(count - 1, 1)) for i in range(count)})

    def _coarse(self, name: str, got: Tensor, part: "_Part", fine: Verdict) -> Verdict:
        """Every head's row errors, in units of the row's scale, against the largest share that a sampled head was allowed."""
        if fine.klass != "OK" or part.share.get(name, 0.0) == 0.0:
            return fine
        limit = self.limits.row * part.share[name]
        ratio = 0.0
        for block in blocks_of(name, got, self.layout, self.heads):
            truth = block.take(self.exact[name])
            value = block.take(got).double()
            scale = torch.maximum(rms(truth), rms(truth, (1, 2))[:, None] * self.limits.small_row)
            share = rms(value - truth) / (scale + FLOOR["fp32"])
            ratio = max(ratio, float(share.max()) / limit if bool(torch.isfinite(share).all()) else math.inf)
        if not ratio <= 1:
            return replace(fine, klass="BUG", ratio=ratio, statistic="coarse", message="a head outside the sample")
        return fine


class _Part:
    """The sampled heads with their replicas; caches what several quantities share."""

    def __init__(self, case: _Case, inputs, exact: dict[str, Tensor], replicas: int, seed: int):
        self.case, self.inputs, self.exact, self.seed = case, inputs, exact, seed
        self.run = _evaluator(inputs, case.options, case.entry, case.spec, case.gradients)
        self.rounding = RandomGrids(replicas, seed, inputs["g"].device)
        self.replicas = self.run(self.rounding, case.spec.algorithm)
        self.share: dict[str, float] = {}
        self._plain: dict[str, Tensor] | None = None

    def plain(self, name: str) -> Tensor:
        """The plain recurrence at the route's operand precision: what any algorithm would lose on this input."""
        if self.case.spec.algorithm != "chunk":
            return self.replicas[name]
        if self._plain is None:
            grids = RandomGrids(self.case.limits.plain, self.seed + 1, self.inputs["g"].device)
            self._plain = self.run(grids, "plain")
        return self._plain[name]

    def verdict(self, name: str, got: Tensor, heads: list[int]) -> Verdict:
        fmt = FORMAT_OF_DTYPE[got.dtype]
        verdicts = []
        for block in blocks_of(name, got, self.case.layout, self.case.heads):
            judged, share = self._block(name, fmt, block, got, heads)
            verdicts.append(judged)
            self.share[name] = max(self.share.get(name, 0.0), share)
        if not verdicts:
            return Verdict(name, "OK", 0.0, "empty")
        census = sum((verdict.census for verdict in verdicts[1:]), verdicts[0].census)
        return replace(worst(verdicts), census=census)

    def _block(self, name: str, fmt: str, block: Block, got: Tensor, heads: list[int]) -> tuple[Verdict, float]:
        limits, exact = self.case.limits, block.take(self.exact[name])
        value, replicas = block.take(got).double(), block.take(self.replicas[name])
        errors = replicas - exact
        if not bool(torch.isfinite(errors).all()):
            klass = "UNINFORMATIVE" if bool(torch.isfinite(value).all()) else "UNSTABLE"
            return Verdict(name, klass, math.nan, "envelope", "the route's own algorithm leaves its formats here"), 0.0
        finite = torch.isfinite(value)
        error = torch.where(finite, value - exact, 0.0)
        stats = statistics(error, exact, errors, fmt, self.rounding, limits)
        over = {n: v / limit for n, (v, limit) in stats.values.items() if not v <= limit}
        overflow = (exact.abs() + limits.element * stats.sigma > LARGEST[fmt]) & (value.sign() == exact.sign())
        lost = ~(finite | overflow)
        floor = torch.maximum(rms(exact), rms(exact, (1, 2))[:, None] * self._small_row()) + FLOOR[fmt]
        share = float((rms(stats.sigma) / floor).max())
        if bool(lost.any()):
            klass, statistic, ratio = ("UNSTABLE" if self._may_overflow() else "BUG"), "nonfinite", math.inf
        else:
            klass = self._class(name, block, error, exact, stats, over, floor)
            shares = {n: v / limit for n, (v, limit) in stats.values.items()}
            statistic = max(over or shares, key=(over or shares).get)
            ratio = shares[statistic]
        census = self._census(block, value, exact, stats, lost, heads)
        return Verdict(name, klass, ratio, statistic, census=census), share

    def _small_row(self) -> float:
        """A few operand roundoffs of the block's rms, in a small row, are no loss of digits."""
        operands = [_resolved(self.case.spec.stages.get(s, "fp32"), self.inputs) for s in ("operand", "intra")]
        coarsest = min(PRECISION_BITS[fmt] for fmt in operands)
        return max(self.case.limits.small_row, 2.0**-coarsest / self.case.limits.unstable_row)

    def _class(self, name, block, error, exact, stats: Statistics, over: dict[str, float], scale: Tensor) -> str:
        limits = self.case.limits
        row_error, row_sigma, alive = rms(error), rms(stats.sigma), rms(exact) > 0
        allowed = math.inf if self._sum_unresolved() else limits.relaxed
        doubtful = (row_error > limits.unstable_row * scale).any() | (
            (row_sigma > limits.uninformative * scale) & alive
        ).any()
        if not bool(doubtful) and not (over and all(ratio <= allowed for ratio in over.values())):
            return "BUG" if over else "OK"
        plain = rms((block.take(self.plain(name)) - exact).square().mean(0).sqrt() + stats.rounding / 1.7)
        loses = (row_sigma > limits.unstable_row / 10 * scale) & (row_sigma > limits.unstable_factor / 2 * plain)
        known = allowed == math.inf or bool(loses.any())
        if over and not (known and all(ratio <= allowed for ratio in over.values())):
            return "BUG"
        lost = (row_error > limits.unstable_row * scale) & (row_error > limits.unstable_factor * plain)
        if over or bool(lost.any()):
            return "UNSTABLE"
        vague = ((plain > limits.uninformative * scale) & alive).double().mean()
        return "UNINFORMATIVE" if float(vague) > limits.uninformative_rows else "OK"

    def _largest_gate(self) -> float:
        """The largest |g| of the call, natural log: given, or bounded by the activation."""
        if self.case.entry == "gate":
            return 0.0
        if self.case.options.use_gate_in_kernel:
            return abs(self.case.options.lower_bound or 0.0)
        return float(self.inputs["g"].double().abs().max())

    def _may_overflow(self) -> bool:
        """Whether the route declares that it may produce a non-finite result on an input like this."""
        excuses, largest = self.case.spec.excuses, self._largest_gate()
        if "inf_gate" in excuses and largest == math.inf:
            return True
        if "anchor_span" in excuses and 15 * largest * LOG2E > REAL_SPAN:
            return True
        return "fp16_overflow" in excuses and self.rounding.overflowed

    def _sum_unresolved(self) -> bool:
        return "large_cumulative_gate" in self.case.spec.excuses and self._largest_gate() > RESOLVED_SUM

    def _census(self, block: Block, value, exact, stats: Statistics, lost, heads: list[int]) -> Census:
        z = torch.where(lost, math.inf, stats.z.nan_to_num(nan=math.inf))
        order = torch.topk(z.flatten(), min(WORST_SHOWN, z.numel())).indices.tolist() if z.numel() else []
        wrong = []
        for flat in order:
            n, t, d = flat // (z.shape[1] * z.shape[2]), flat // z.shape[2] % z.shape[1], flat % z.shape[2]
            at = (n, t, d)
            if not float(z[at]) > 0:
                continue
            index = block.index(n, t, d, heads, self.case.heads)
            wrong.append(Wrong(index, float(value[at]), float(exact[at]), float(stats.sigma[at]), float(z[at])))
        over = int((~(z <= self.case.limits.element)).sum())
        return Census(z.numel(), over, int(lost.sum()), tuple(wrong))
