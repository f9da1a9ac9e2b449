"""Authority on what rounding to a format means, and on the hook through which the oracle's algorithms round."""

import copy
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

# tf32 is truncated, 10 bits and a bias; tf32_rn is what a kernel that rounds to nearest first makes of it.
PRECISION_BITS = {"fp64": 53, "fp32": 24, "tf32_rn": 11, "tf32": 10, "fp16": 11, "bf16": 8}
LARGEST = {
    "fp64": 1.7e308,
    "fp32": 3.4028234663852886e38,
    "tf32": 3.4e38,
    "tf32_rn": 3.4e38,
    "fp16": 65504.0,
    "bf16": 3.3895313892515355e38,
}
EXPONENT_BITS = 0x7FF0000000000000  # of a float64
OUTPUT = "output"  # the site of results, which kernels may let overflow
OFFSETS = 65521  # offsets that a site has of its own; a prime, so that they repeat at no stride of a tensor
FORMAT_OF_DTYPE = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
DTYPE_OF_FORMAT = {fmt: dtype for dtype, fmt in FORMAT_OF_DTYPE.items()}


def round_to(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """float64 values rounded to the nearest even value of `fmt` (tf32: toward zero), still float64.

    Exponent range: fp16 has its subnormals and its infinity; the others keep float64's range.
    """
    if fmt == "fp64":
        return x
    if fmt == "tf32":
        return (x.contiguous().view(torch.int64) & -(2**42)).view(x.dtype)
    rounded = _to_grid(x, fmt)
    if fmt == "fp16":
        rounded = torch.where(rounded.abs() > LARGEST["fp16"], x * math.inf, rounded)
    return rounded


def _carry(fmt: str) -> float:
    """The factor after which subtracting what it has added leaves a number on the grid."""
    return 2.0 ** (53 - PRECISION_BITS[fmt]) + 1


def _to_grid(x: torch.Tensor, fmt: str, spare: Sequence[torch.Tensor | None] = (None, None)) -> torch.Tensor:
    """The nearest even value of the format's precision; of its subnormals where it is fp16. Not by a cast: torch takes
    float64 to fp16 through float32, and rounds twice."""
    carry = torch.mul(x, _carry(fmt), out=spare[0])
    rounded = carry.sub_(torch.sub(carry, x, out=spare[1]))
    if fmt == "fp16":
        shift = 1.5 * 2.0**28  # its last bit in float64 is 2^-24
        rounded = torch.where(x.abs() < 2.0**-14, (x + shift) - shift, rounded)
    return rounded


class Rounding:
    """The hook: every declared rounding point of an algorithm passes through one of these methods.

    The base class is exact: no replicas, nothing rounds. With `replicas` = M > 0 tensors have a leading dimension M and
    each replica rounds in its own way.
    """

    replicas = 0

    def some(self, first: int, last: int) -> "Rounding":
        """The replicas `first`..`last` - 1 of these, with the same functions as here."""
        return self

    def round(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        """`x` as it is after being stored in `fmt` at `site`; the same function of the value at every call."""
        return x

    def round_(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        """`round` in place of `x`."""
        rounded = self.round(site, x, fmt)
        return x if rounded is x else x.copy_(rounded)

    def accumulate(self, site: str, value: torch.Tensor, magnitude: torch.Tensor, bits: int = 23) -> torch.Tensor:
        """`value` as a sum accumulated on a grid whose pitch is about magnitude * 2^-bits."""
        return value

    def constant(self, site: str, eps: float, like: torch.Tensor) -> torch.Tensor | float:
        """A factor 1 + eps U(-1, 1), one per replica: the error of a constant (scale, log2 e) or of exp itself."""
        return 1.0


EXACT = Rounding()


@dataclass(frozen=True)
class _Grid:
    """The rounding functions of a site, [M, 1 or ..]: the factor into the grid, with each element's offset where it
    `dithers`, and the way back.
    """

    into: torch.Tensor
    back: torch.Tensor
    dithers: bool

    def round(
        self, x: torch.Tensor, fmt: str, spare: Sequence[torch.Tensor | None], out: torch.Tensor | None
    ) -> torch.Tensor:
        """x rounded, at `out` (x itself too) if it is given, with three more places to work in."""
        if self.dithers or fmt == "fp16":
            y = torch.mul(x, self.into, out=spare[0])
            return torch.addcmul(x, _to_grid(y, fmt, spare[1:]).sub_(y), self.back, out=out)
        # As `_to_grid` of x * into, in fewer passes over x.
        carry = torch.mul(x, self.into * _carry(fmt), out=spare[0])
        rest = torch.addcmul(carry, x, self.into, value=-1, out=spare[1])
        return torch.sub(carry, rest, out=out).mul_(self.back)


# NOTE [Random rounding functions]
# Real rounding is a function of the value: equal values get equal errors, so repeated tokens make coherent errors that
# independent noise would average away. A replica therefore rounds to a randomly scaled grid, rho(x) = RNE(x s) / s with
# one s per (replica, site). A scaled grid treats a cluster of nearly equal values alike, while the real grid may have
# an edge inside it (1 and 2 are edges, and repeated unit keys make clusters there). So half of the (replica, site)
# pairs, at random, dither: each element has an offset of its own, the same at every call. And every fourth replica uses
# the format's own grid at every site. Randomness is keyed by site, not by call order: recomputing from a checkpoint
# meets the same functions.
class RandomGrids(Rounding):
    """M replicas, each with its own random rounding function at every site. See NOTE [Random rounding functions].

    `overflowed`: whether any of them met an fp16 overflow, outputs apart.
    """

    def __init__(self, replicas: int, seed: int = 0, device: torch.device | str = "cpu"):
        self.replicas = replicas
        self.seed = seed
        self.device = torch.device(device)
        self._take(0, replicas)
        self._drawn = replicas  # of whatever is drawn for each, by them and by parts of them
        self._overflows: set[str] = set()
        self._uniform: dict[str, torch.Tensor] = {}
        self._offsets: dict[tuple, tuple[torch.Generator, torch.Tensor]] = {}
        self._grids: dict[tuple, _Grid] = {}
        self._memory: dict[torch.Size, list[torch.Tensor]] = {}

    def some(self, first: int, last: int) -> "RandomGrids":
        if not 0 <= first < last <= self.replicas:
            raise ValueError(f"replicas are {first}..{last}, must be some of 0..{self.replicas}")
        part = copy.copy(self)
        part._take(self._span.start + first, self._span.start + last)
        return part

    def _take(self, first: int, last: int) -> None:
        """Be the replicas `first`..`last` - 1. `_real` are those with the format's own grid."""
        self.replicas, self._span = last - first, slice(first, last)
        self._real = [replica % 4 == 0 for replica in range(first, last)]

    @property
    def overflowed(self) -> bool:
        return bool(self._overflows)

    def forget(self) -> None:
        """Have met no overflow."""
        self._overflows.clear()

    def _generator(self, site: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(site.encode()) * 1_000_003 + self.seed)

    def uniform(self, site: str, like: torch.Tensor) -> torch.Tensor:
        """U(0, 1), one per replica, the same at every call: `[M, 1, ...]` with as many dimensions as `like`."""
        if site not in self._uniform:
            drawn = torch.rand(self._drawn, generator=self._generator(site), dtype=torch.float64)
            self._uniform[site] = drawn.to(self.device)
        return self._uniform[site][self._span].view([-1] + [1] * (like.dim() - 1))

    def _grid(self, site: str, shape: torch.Size, fmt: str) -> "_Grid":
        key = (site, shape[1:], fmt, self._span.start, self._span.stop)
        if key not in self._grids:
            column = [-1] + [1] * (len(shape) - 1)
            uniform = torch.rand(self._drawn, generator=self._generator(site), dtype=torch.float64)[self._span]
            real = torch.tensor(self._real)
            scale = torch.exp2(torch.where(real, 0.0, (2 * uniform).frac()))
            dithers = (uniform < 0.5) & ~real
            into, mixed = scale.view(column).to(self.device), bool(dithers.any())
            if mixed:
                step = torch.where(dithers, 2.0 ** (1 - PRECISION_BITS[fmt]), 0.0)[:, None]
                into = self._dither(site, shape[1:], step).view(self.replicas, *shape[1:]).add_(1).mul_(into)
            self._grids[key] = _Grid(into, (1 / scale).view(column).to(self.device), mixed)
        return self._grids[key]

    def _dither(self, site: str, shape: torch.Size, step: torch.Tensor) -> torch.Tensor:
        """`[M, elements]`: an offset of every element in units of `step` `[M, 1]`, within half of it."""
        elements = shape.numel()
        if (site, shape) not in self._offsets:
            generator = self._generator(site)
            torch.rand(self._drawn, generator=generator, dtype=torch.float64)  # those of the scales
            self._offsets[site, shape] = generator, torch.empty(0, min(elements, OFFSETS), dtype=torch.float64)
        generator, known = self._offsets[site, shape]
        if len(known) < self._span.stop:
            more = (self._span.stop - len(known), known.shape[1])
            known = torch.cat([known, torch.rand(more, generator=generator, dtype=torch.float64)])
            self._offsets[site, shape] = generator, known
        noise = (known[self._span] - 0.5).mul_(step).to(self.device)
        times = -(-elements // OFFSETS)
        return noise if times <= 1 else noise.repeat(1, times)[:, :elements].contiguous()

    def round(self, site: str, x: torch.Tensor, fmt: str, out: torch.Tensor | None = None) -> torch.Tensor:
        if fmt == "fp64":
            return x
        if all(self._real) and fmt != "fp16":
            rounded = round_to(x, fmt)
        else:
            rounded = self._grid(site, x.shape, fmt).round(x, fmt, self._spare(x), out)
            if fmt == "tf32" and any(self._real):
                real = torch.tensor(self._real, device=self.device).view([-1] + [1] * (x.dim() - 1))
                rounded = torch.where(real, round_to(x, "tf32"), rounded)
        if fmt == "fp16" and site != OUTPUT and not self.overflowed and bool((x.abs() > LARGEST["fp16"]).any()):
            self._overflows.add(site)
        return rounded

    def round_(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        if fmt not in ("fp32", "bf16", "tf32_rn") or all(self._real):
            return super().round_(site, x, fmt)
        return self.round(site, x, fmt, x)  # of fp16 and tf32 something else is told from x afterwards

    def _spare(self, x: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Three places for something like x, until the next call; on a GPU, where memory is at hand, none."""
        if x.is_cuda:
            return (None, None, None)
        if x.shape not in self._memory:
            self._memory[x.shape] = [x.new_empty(x.shape) for _ in range(3)]
        return self._memory[x.shape]

    def accumulate(self, site: str, value: torch.Tensor, magnitude: torch.Tensor, bits: int = 23) -> torch.Tensor:
        # The pitch is a power of two times a constant. Were it proportional to the magnitude, sums proportional to
        # theirs (all terms of one sign: a cumulative gate) would share one relative error, which differences cancel.
        binade = magnitude.detach().contiguous().view(torch.int64) & EXPONENT_BITS
        pitch, plain = binade.view(value.dtype) * (1.42 * 2.0**-bits), value.detach()
        shift = self.uniform(site, value)
        steps = (plain / (pitch + 1e-300)).add_(shift).round_().sub_(shift)
        return value + steps.mul_(pitch).sub_(plain)

    def constant(self, site: str, eps: float, like: torch.Tensor) -> torch.Tensor:
        return 1 + eps * (2 * self.uniform(site, like) - 1)


class ToFormat(Rounding):
    """One replica that rounds as the hardware does: emulates the declared rounding points, accumulates exactly."""

    replicas = 1

    def round(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        return round_to(x, fmt)
