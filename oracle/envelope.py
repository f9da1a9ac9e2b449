"""Authority on how far from the truth rounding may lead: statistics of an error and their limits, from replicas.

Tensors are `[N, T, D]` (N blocks: a sequence and a head), replicas `[M, N, T, D]`. See NOTE [Envelope].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.rounding import OUTPUT, PRECISION_BITS, Rounding

# NOTE [Envelope]
# Replicas run the route's own algorithm in float64 with random rounding functions at its declared rounding points;
# sigma is their root mean square distance from the exact result, per element. Rounding of the output itself is
# deterministic: half an ulp, kept apart. An element may be c sigma away: c = 9 covers 27 worst-case sites that all err
# the same way (sqrt(3 n) sigma). Many elements together say more than one: the rms of e / sigma over rows, columns and
# the block, and the projection of the error on the reference (a gain error), each against its own spread over replicas.

# NOTE [First look]
# A first look takes n of the M replicas of a screen, and can only find that something is right. Squares only add up:
# whatever the other replicas are, the mean square over M is at least n / M of that over n. So an error within
# sqrt(n / M) of a limit by n replicas is within it by M. Limits are smaller by that, and the spread of rows and blocks,
# which may raise theirs, is left out. What this does not cover: where sigma is raised to its row and column the bound
# holds as far as their mean squares do not depend on which replicas were taken, and a gain is weighed by the sigmas of
# the n.

# Flush to zero and subnormals: nothing below this is compared.
FLOOR = {"fp32": 2.0**-120, "tf32": 2.0**-120, "bf16": 2.0**-120, "fp16": 2.0**-24, "fp64": 0.0}

# NOTE [Underflow of anchored pairs]
# With gates in [-5, 0] the factors of an anchored pair lie within 2^+-58, and its gradient is multiplied by the small
# one before it is by the large one: what falls below 2^-149 in between, the last number of fp32, is gone for good, and
# would have been up to 2^-91. A row has 16 pairs. The rounding of replicas has no range of exponents and does not show
# it.
ANCHORED_FLOOR = 2.0**-87
OF_PAIRS = frozenset({"dq", "dk", "dg", "dbeta", "dA_log", "ddt_bias"})


def floor_of(name: str, fmt: str, diagonal: str | None = None) -> float:
    """Below which a quantity of that format is not compared; `diagonal` is that of the algorithm's PrecisionSpec."""
    anchored = name in OF_PAIRS and diagonal in ("anchor", "anchor_apart")
    return max(FLOOR[fmt], ANCHORED_FLOOR) if anchored else FLOOR[fmt]


@dataclass(frozen=True)
class Limits:
    """Every constant of the criterion; calibrated in the error-model study, changed only with a new calibration."""

    first: int = 4  # replicas of a first look, which only finds what is right; see NOTE [First look]
    screen: int = 8  # replicas by which anything else is judged
    confirm: int = 40  # fresh replicas before anything is called a bug
    plain: int = 3  # replicas of the plain recurrence, where a route loses digits
    element: float = 9.0
    row: float = 4.0
    block: float = 2.0
    spread: float = 8.0  # rows and blocks: 1 + spread * (the same statistic's spread over replicas), if that is more
    gain: float = 9.0
    pool_cap: float = 16.0
    unstable_row: float = 0.1  # a row lost: error above this share of its scale ...
    unstable_factor: float = 10.0  # ... and this much worse than the plain recurrence
    uninformative: float = 0.25  # the plain recurrence's sigma above this share of a row's scale says nothing
    uninformative_rows: float = 0.1
    relaxed: float = 4.0  # a route known to lose digits on an input may exceed limits by this, and be UNSTABLE
    cancelled: float = 8.0  # operand roundoffs of the terms that may be left where they cancel; at most 6.1 were seen
    certified: float = 2.0**-22  # a problem is nearly exact if declared rounding moves nothing by more of its scale,
    near_exact: float = 2.0**-20  # and a kernel may be off by this much, beyond its output's rounding
    clear: float = 5.0  # a failure this far over its limit is clear ...
    gross: float = 30.0  # ... and this far gross
    small_row: float = 1 / 128  # rows are measured against at least this share of the block's rms

    def share(self, replicas: int) -> float:
        """Of each limit, what so few replicas leave; 1 from those of a screen on."""
        return min(1.0, math.sqrt(replicas / self.screen))


LIMITS = Limits()


def output_unit(fmt: str) -> float:
    """Half an ulp of an output format, relative."""
    return 2.0**-24 if fmt == "tf32" else 2.0 ** -PRECISION_BITS[fmt]


def rms(x: Tensor, dim: int | tuple[int, ...] = -1, keepdim: bool = False) -> Tensor:
    return x.square().mean(dim, keepdim=keepdim).sqrt()


def pooled_sigma(errors: Tensor, cap: float = LIMITS.pool_cap) -> Tensor:
    """sigma `[N, T, D]` of replica errors: per element, raised (never lowered) towards its row and column."""
    own = errors.square().mean(0)
    row, column, block = own.mean(-1, keepdim=True), own.mean(1, keepdim=True), own.mean((1, 2), keepdim=True)
    return torch.maximum(own, torch.minimum(torch.where(block > 0, row * column / block, 0.0), cap * own)).sqrt()


@dataclass(frozen=True)
class Statistics:
    """`values`: statistic -> (worst value, limit). `sigma`, `rounding` (output rounding and floor), `z` per element."""

    values: dict[str, tuple[float, float]]
    sigma: Tensor
    rounding: Tensor
    z: Tensor


def _worst(x: Tensor) -> float:
    return float(x.max()) if x.numel() else 0.0


def statistics(
    error: Tensor,
    exact: Tensor,
    errors: Tensor,
    fmt: str,
    rounding: Rounding,
    limits: Limits = LIMITS,
    floor: float | None = None,
) -> Statistics:
    """Every statistic of `error` against the replicas' `errors`; `fmt` is the format of the output, `floor` that of
    `floor_of` if it is not the format's own.

    Fewer replicas than a screen has are a first look: see NOTE [First look].
    """
    floor, share = FLOOR[fmt] if floor is None else floor, limits.share(len(errors))
    sigma = pooled_sigma(errors)
    half_ulp = output_unit(fmt) * (exact.abs() + share * limits.element * sigma) * 1.001 + floor
    excess = (error.abs() - half_ulp).clamp(min=0)
    z = torch.where(sigma > 0, excess / sigma, torch.where(error.abs() > half_ulp, torch.inf, 0.0))
    values = {"element": (_worst(z), share * limits.element)}

    rounds = fmt in ("bf16", "fp16")
    stored = rounding.round(OUTPUT, exact + errors, fmt).sub_(exact) if rounds else errors
    spread = ((pooled_sigma(stored) if rounds else sigma).square() + floor * floor).sqrt()
    scaled, replicas = error / spread, stored / spread
    weight = torch.where(spread > 10 * floor, exact / spread, 0.0)
    for name, dims, base in (("row", (2,), limits.row), ("column", (1,), limits.row), ("block", (1, 2), limits.block)):
        if name != "block" and error.shape[dims[0]] <= 3:
            continue
        limit = share * base if share < 1 else max(base, 1 + limits.spread * _deviation(replicas, dims))
        values[name] = (_worst(rms(scaled, dims)), limit)
    for name, dims in (("row_gain", (2,)), ("column_gain", (1,)), ("block_gain", (1, 2))):
        if any(error.shape[d] <= 1 for d in dims):
            continue
        projected = (scaled * weight).sum(dims, keepdim=True).abs()
        usual = pooled_sigma((replicas * weight).sum(tuple(d + 1 for d in dims), keepdim=True))
        values[name] = (_worst(torch.where(usual > 0, projected / usual, 0.0)), share * limits.gain)
    return Statistics(values, sigma, half_ulp, z)


def _deviation(replicas: Tensor, dims: tuple[int, ...]) -> float:
    """The spread of a root mean square over `dims`, over replicas and blocks."""
    expected = rms(replicas, tuple(d + 1 for d in dims))
    alive = expected[expected > 0]
    return float((alive - alive.mean()).square().mean().sqrt()) if alive.numel() else 0.0
