"""Authority on the class of one part of a call, some heads with their replicas: which rule of the criterion decides."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from harness.census import WORST_SHOWN, Census, Verdict, Wrong, worst
from harness.rows import Block, Heads, blocks_of
from kda.precision import PRODUCTS, PrecisionSpec
from oracle.envelope import Limits, Statistics, floor_of, rms, statistics
from oracle.natural import natural_core
from oracle.operator import Options, evaluate, evaluate_gate
from oracle.packing import Layout
from oracle.recurrence import LOG2E
from oracle.rounding import FORMAT_OF_DTYPE, LARGEST, PRECISION_BITS, RandomGrids, Rounding
from oracle.stages import BLOCK, evaluate_chunk

REAL_SPAN = 126.0  # log2 range that fp32 factors of an anchored tile may span
RESOLVED_SUM = 1.8e5  # an fp32 cumulative gate beyond this no longer resolves 1/64 nat
CONFIRMING = 1_000_000  # added to the seed for the replicas that confirm a BUG
SOURCES = {
    "io": "q",
    "g": "g",
    "beta": "beta",
    "pool": "initial_state",
}  # formats that follow the dtype of a tensor of the call


def resolved(fmt: str, inputs: Mapping[str, Tensor | None], precision: str = "ieee") -> str:
    """The format that a PrecisionSpec means by `fmt` in a call with these tensors and this `precision`."""
    if fmt in PRODUCTS:
        own = FORMAT_OF_DTYPE[inputs["q"].dtype]
        return "fp64" if own == "fp64" else PRODUCTS[fmt][precision if own == "fp32" else own]
    return FORMAT_OF_DTYPE[inputs[SOURCES[fmt]].dtype] if fmt in SOURCES else fmt


def formats_of(spec: PrecisionSpec, inputs: Mapping[str, Tensor | None], options: Options) -> dict[str, str]:
    """The format of every stage that a PrecisionSpec declares, in a call with these tensors and options."""
    formats = {stage: resolved(fmt, inputs, spec.precision) for stage, fmt in spec.stages.items()}
    if options.use_beta_sigmoid_in_kernel:
        formats.pop("scaled_key", None)  # of a beta in fp32
    return formats


@dataclass(frozen=True)
class Call:
    """What was called, and by which rules it is judged."""

    options: Options
    entry: str
    spec: PrecisionSpec
    gradients: bool
    limits: Limits
    layout: Layout
    heads: Heads

    def floor(self, name: str, fmt: str) -> float:
        """Below which a quantity is not compared."""
        return floor_of(name, fmt, self.spec.diagonal)

    def evaluator(self, inputs: Mapping[str, Tensor | None]) -> Callable[..., dict[str, Tensor]]:
        """The oracle on `inputs`, as a function of the rounding and of the algorithm: recurrent, chunk, plain or gate.

        'plain' is the recurrence with the operand precision of the route: what any algorithm would lose on this input.
        """

        def run(rounding: Rounding, algorithm: str = "recurrent") -> dict[str, Tensor]:
            given = {"gradients": self.gradients, "rounding": rounding}
            if self.entry == "gate":
                return evaluate_gate(inputs, self.options, **given)
            spec = self.spec
            formats = formats_of(spec, inputs, self.options)
            if algorithm == "chunk":
                form = {name: getattr(spec, name) for name in ("chunk", "diagonal", "inverse", "form", "segment")}
                return evaluate_chunk(inputs, self.options, **given, formats=formats, **form)
            if algorithm == "plain":
                formats["update"] = formats.get("operand", "fp32")
                formats.pop("state", None)  # of a chunk: the recurrence would round it at every token
            return evaluate(inputs, self.options, **given, formats=formats)

        return run


@dataclass(frozen=True)
class Measured:
    """A block of a quantity, `[N, rows, channels]`; the error of what is not finite is 0."""

    value: Tensor
    exact: Tensor
    error: Tensor
    statistics: Statistics


@dataclass(frozen=True)
class RowErrors:
    """Rms of the error and of the sigmas of every row `[N, rows]`, which rows are not 0, and what that says of them."""

    error: Tensor
    sigma: Tensor
    alive: Tensor
    limits: Limits

    def lost(self, scale: Tensor) -> Tensor:
        """Rows of which too little is right, whatever their sigmas."""
        return self.error > self.limits.unstable_row * scale

    def vague(self, scale: Tensor) -> Tensor:
        """Rows whose sigmas allow nearly anything."""
        return (self.sigma > self.limits.uninformative * scale) & self.alive

    def say_nothing(self, rows: Tensor) -> bool:
        """Whether those are so many that the block proves nothing."""
        return float(rows.double().mean()) > self.limits.uninformative_rows

    def doubtful(self, scale: Tensor) -> bool:
        """Whether the block may be unstable or prove nothing: what the plain recurrence loses has to tell."""
        return bool(self.lost(scale).any()) or self.say_nothing(self.vague(scale))


class Part:
    """Some heads of a call: inputs, exact results, replicas, and what the judgements of several quantities share."""

    def __init__(
        self,
        call: Call,
        queries: list[int],
        inputs: Mapping[str, Tensor | None],
        exact: Mapping[str, Tensor],
        grids: RandomGrids,
        first: int | None = None,
        at_once: int | None = None,
    ):
        """`first`: begin with so many of the replicas of `grids`; `complete` goes on with the others. `at_once`: as
        many as memory allows in one run.
        """
        self.call, self.queries, self.inputs, self.exact, self.seed = call, queries, inputs, exact, grids.seed
        self.at_once = at_once or grids.replicas
        self.evaluator = call.evaluator(inputs)
        self.everything = grids
        grids.forget()
        self.replicas: dict[str, Tensor] = {}
        self.count = 0
        self._judge_by(first or grids.replicas)

    def _judge_by(self, count: int) -> None:
        """Judge by so many replicas; those that are missing are run."""
        runs = [self.replicas] if self.count else []
        for first in range(self.count, count, self.at_once):
            rounding = self.everything.some(first, min(first + self.at_once, count))
            runs.append(self.evaluator(rounding, self.call.spec.algorithm))
        self.replicas = {name: torch.cat([run[name] for run in runs]) for name in runs[0]}
        self.count = count
        self.of_limits = self.call.limits.share(count)
        self.first = self.of_limits < 1  # a first look, which says OK or SUSPECT; see NOTE [First look]
        self.overflowed = self.everything.overflowed
        self.share: dict[str, float] = {}  # quantity -> largest sigma of a row, in units of the row's scale

    def complete(self) -> None:
        """Judge by all replicas from now on."""
        if self.count < self.everything.replicas:
            self._judge_by(self.everything.replicas)

    @cached_property
    def plain(self) -> dict[str, Tensor]:
        if self.call.spec.algorithm != "chunk":
            return self.replicas
        return self.evaluator(RandomGrids(self.call.limits.plain, self.seed + 1, self.inputs["g"].device), "plain")

    def verdict(self, name: str, got: Tensor) -> Verdict:
        """The verdict on `got`, quantity `name` of these heads in the caller's layout."""
        verdicts = [self._block(name, block, got) for block in blocks_of(name, got, self.call.layout, self.call.heads)]
        if not verdicts:
            return Verdict(name, "OK", 0.0, "empty")
        census = sum((verdict.census for verdict in verdicts[1:]), verdicts[0].census)
        return replace(worst(verdicts), census=census)

    def measured(self, name: str, block: Block, got: Tensor) -> Measured | None:
        """The error of a block of `got` and its statistics; None where the algorithm in float64 is not finite."""
        fmt, exact = FORMAT_OF_DTYPE[got.dtype], block.take(self.exact[name])
        value, errors = block.take(got).double(), block.take(self.replicas[name]) - exact
        if not bool(torch.isfinite(errors).all()):
            return None
        error = torch.where(torch.isfinite(value), value - exact, 0.0)
        outputs = self.everything.some(0, self.count)
        how = (fmt, outputs, self.call.limits, self.call.floor(name, fmt))
        return Measured(value, exact, error, statistics(error, exact, errors, *how))

    def _block(self, name: str, block: Block, got: Tensor) -> Verdict:
        limits, fmt = self.call.limits, FORMAT_OF_DTYPE[got.dtype]
        measured = self.measured(name, block, got)
        if measured is None:
            return self._without_envelope(name, block.take(self.exact[name]), torch.isfinite(block.take(got)))
        value, exact, error, stats = measured.value, measured.exact, measured.error, measured.statistics
        finite = torch.isfinite(value)
        scale = torch.maximum(rms(exact), rms(exact, (1, 2))[:, None] * self._small_row()) + self.call.floor(name, fmt)
        widest = self.of_limits * float((rms(stats.sigma) / scale).max())
        self.share[name] = max(self.share.get(name, 0.0), widest)
        overflow = (exact.abs() + limits.element * stats.sigma > LARGEST[fmt]) & (value.sign() == exact.sign())
        lost = ~finite if self.first else ~(finite | overflow)
        if bool(lost.any()):
            klass, statistic, ratio = self._without_number(), "nonfinite", math.inf
        else:
            shares = {n: v / limit * self.of_limits for n, (v, limit) in stats.values.items()}
            over = {n: shares[n] for n, (v, limit) in stats.values.items() if not v <= limit}
            klass = self._class(name, block, error, exact, stats, over, scale)
            statistic = max(over or shares, key=(over or shares).get)
            ratio = shares[statistic]
        return Verdict(name, klass, ratio, statistic, census=self._census(block, value, exact, stats, lost))

    def _without_envelope(self, name: str, exact: Tensor, finite: Tensor) -> Verdict:
        """The algorithm in float64 is not finite: nothing to compare with, but no excuse for a result that is not."""
        lost = int((~finite & torch.isfinite(exact)).sum())
        klass = self._without_number() if lost or self.first else "UNINFORMATIVE"
        message = "the algorithm in float64 is not finite on this input"
        statistic = "nonfinite" if lost else "envelope"
        return Verdict(name, klass, math.inf, statistic, message, Census(finite.numel(), lost, lost))

    def _without_number(self) -> str:
        """The class of a result that is not finite, and should be."""
        if self.first:
            return "SUSPECT"
        return "UNSTABLE" if self._may_overflow else "BUG"

    @cached_property
    def natural(self) -> dict[str, Tensor]:
        return evaluate(self.inputs, self.call.options, gradients=self.call.gradients, core=natural_core)

    def _roundoff(self) -> float:
        """That of the coarsest operand of the route's products."""
        spec = self.call.spec
        named = [spec.stages.get(stage, "fp32") for stage in ("operand", "intra")]
        operands = [resolved(fmt, self.inputs, spec.precision) for fmt in named]
        return 2.0 ** -min(PRECISION_BITS[fmt] for fmt in operands)

    def _small_row(self) -> float:
        """An operand roundoff of the block's rms, in a small row, is no loss of digits."""
        return max(self.call.limits.small_row, self._roundoff() / self.call.limits.unstable_row)

    def _terms(self, name: str, block: Block) -> Tensor:
        """The scale of rows whose terms cancel: a few operand roundoffs of those. See NOTE [Natural size]."""
        if self.call.spec.algorithm != "chunk":
            return torch.zeros(())
        limits = self.call.limits
        return rms(block.take(self.natural[name])) * (limits.cancelled * self._roundoff() / limits.unstable_row)

    def _class(
        self,
        name: str,
        block: Block,
        error: Tensor,
        exact: Tensor,
        stats: Statistics,
        over: dict[str, float],
        scale: Tensor,
    ) -> str:
        limits = self.call.limits
        allowed = math.inf if self._sum_unresolved else limits.relaxed
        relaxed = bool(over) and all(ratio <= allowed for ratio in over.values())
        rows = RowErrors(rms(error), rms(stats.sigma) / self.of_limits, rms(exact) > 0, limits)
        if self.first:
            return "SUSPECT" if over or rows.doubtful(scale) else "OK"
        if not relaxed and not rows.doubtful(scale):
            return "BUG" if over else "OK"
        scale = torch.maximum(scale, self._terms(name, block))
        if not over and not rows.doubtful(scale):
            return "OK"
        plain = rms((block.take(self.plain[name]) - exact).square().mean(0).sqrt() + stats.rounding / 1.7)
        loses = (rows.sigma > limits.unstable_row / 10 * scale) & (rows.sigma > limits.unstable_factor / 2 * plain)
        if over and not (relaxed and (allowed == math.inf or bool(loses.any()))):
            return "BUG"
        if over or bool((rows.lost(scale) & (rows.error > limits.unstable_factor * plain)).any()):
            return "UNSTABLE"
        return "UNINFORMATIVE" if rows.say_nothing(rows.vague(scale) & (plain > limits.uninformative * scale)) else "OK"

    @cached_property
    def _gate(self) -> Tensor:
        """The natural-log gate of these heads, token-major `[B * T, HV, K]`, activated where the kernel does so."""
        g, options = self.inputs["g"], self.call.options
        if self.call.entry != "gate" and options.use_gate_in_kernel:
            g = evaluate_gate(self.inputs, options, gradients=False)["o"]
        return g.double().flatten(0, 1)

    def _largest_sum(self, tokens: int, first: int) -> float:
        """The largest sum of |g| over an aligned run of `tokens`, without its first `first`; resets count as 0."""
        largest = 0.0
        for group in self.call.layout.groups(self.inputs["g"].device):
            g = self._gate[group.tokens].abs().nan_to_num(posinf=0.0)
            if g.numel():
                pad = (0, 0, 0, 0, 0, -group.length % tokens)
                runs = torch.nn.functional.pad(g, pad).unflatten(1, (-1, tokens))
                largest = max(largest, float(runs[:, :, first:].sum(2).max()))
        return largest

    @cached_property
    def _may_overflow(self) -> bool:
        """Whether the route declares that it may produce a non-finite result on an input like this."""
        excuses = self.call.spec.excuses
        if "inf_gate" in excuses and bool((self._gate == -math.inf).any()):
            return True
        if "anchor_span" in excuses and self._largest_sum(BLOCK, 1) * LOG2E > REAL_SPAN:
            return True
        return "fp16_overflow" in excuses and self.overflowed

    @cached_property
    def _sum_unresolved(self) -> bool:
        excused = "large_cumulative_gate" in self.call.spec.excuses
        return excused and self._largest_sum(self.call.spec.chunk or 64, 0) > RESOLVED_SUM

    def _census(self, block: Block, value: Tensor, exact: Tensor, stats: Statistics, lost: Tensor) -> Census:
        z = torch.where(lost, math.inf, stats.z.nan_to_num(nan=math.inf, posinf=math.inf))
        wrong = []
        for flat in torch.topk(z.flatten(), min(WORST_SHOWN, z.numel())).indices.tolist():
            at = (flat // (z.shape[1] * z.shape[2]), flat // z.shape[2] % z.shape[1], flat % z.shape[2])
            if not float(z[at]) > 0:
                break
            index = block.index(*at, self.queries, self.call.heads)
            wrong.append(Wrong(index, float(value[at]), float(exact[at]), float(stats.sigma[at]), float(z[at])))
        over = int((~(z <= self.call.limits.element)).sum())
        return Census(z.numel(), over, int(lost.sum()), tuple(wrong))
