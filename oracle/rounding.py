"""Authority on what rounding to a format means, and on the hook through which the oracle's algorithms round."""

import copy
import functools
import itertools
import math
import zlib
from collections.abc import Sequence

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
TILE = 2**14  # elements that a CPU works off at once; see NOTE [Tiles]
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


def _to_grid(
    x: torch.Tensor,
    fmt: str,
    spare: Sequence[torch.Tensor | None] = (None, None),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The nearest even value of the format's precision; of its subnormals where it is fp16. Not by a cast: torch takes
    float64 to fp16 through float32, and rounds twice. At `out` (x itself too, unless it is fp16), or at `spare[0]`."""
    carry = torch.mul(x, _number(_carry(fmt)), out=spare[0])
    rest = torch.sub(carry, x, out=spare[1])
    rounded = torch.sub(carry, rest, out=carry if out is None else out)
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


@functools.cache
def _number(value: float) -> torch.Tensor:
    """As a tensor, of which torch makes less than of a Python number."""
    return torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def _to_sum(
    value: torch.Tensor,
    magnitude: torch.Tensor,
    shift: torch.Tensor,
    bits: int,
    spare: Sequence[torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """From `value` to where a sum of that magnitude, contiguous, puts it.

    The pitch is a power of two times a constant. Were it proportional to the magnitude, sums proportional to theirs
    (all terms of one sign: a cumulative gate) would share one relative error, which differences cancel.
    """
    place = None if spare[0] is None else spare[0].view(torch.int64)
    binade = torch.bitwise_and(magnitude.view(torch.int64), _number(EXPONENT_BITS), out=place)
    pitch = binade.view(value.dtype).mul_(_number(1.42 * 2.0**-bits))
    pitches = torch.addcdiv(shift, value, torch.add(pitch, _number(1e-300), out=spare[1]), out=spare[1])
    return pitches.round_().sub_(shift).mul_(pitch).sub_(value)


# NOTE [Tiles]
# A rounding takes several passes over its tensor, an accumulation more. On a CPU the larger tensors are worked off in
# tiles, so that what lies between two passes stays in the cache, and in memory that is used again. A tile is of one
# replica and within one run of OFFSETS, whose offsets are kept once and not for each element.
class _Grid:
    """The rounding functions of a site in one format: for each replica a factor into the grid and the way back, and
    offsets of its elements where any of the replicas dithers.
    """

    def __init__(self, scale: torch.Tensor, offsets: torch.Tensor | None, shape: torch.Size, fmt: str):
        """`scale` `[M]`; `offsets` `[M, elements or OFFSETS]`, a factor near 1 each; `shape`: of one replica's part."""
        column = [-1] + [1] * len(shape)
        self.shape, self.fmt, self.dithers = shape, fmt, offsets is not None
        self.back = (1 / scale).view(column)
        # Runs of elements, in which each replica has factors of its own: one, or one for each element.
        self.runs = scale[:, None] if offsets is None else offsets.mul_(scale[:, None])
        self._into: torch.Tensor | None = None
        self.steep = (scale * _carry(fmt)).view(column)

    @property
    def into(self) -> torch.Tensor:
        """The factors `[M, 1, ..]`, or those of every element."""
        if self._into is None:
            runs = self.runs
            if self.dithers and runs.shape[1] < self.shape.numel():
                runs = runs.repeat(1, -(-self.shape.numel() // OFFSETS))[:, : self.shape.numel()]
            self._into = runs.reshape(len(runs), *self.shape) if self.dithers else self.runs.view(self.back.shape)
        return self._into

    def round(self, x: torch.Tensor, spare: Sequence[torch.Tensor | None], out: torch.Tensor | None) -> torch.Tensor:
        """x rounded, at `out` (x itself too) if it is given, with three more places to work in."""
        return self._rounded(x, self.into, self.steep, self.back, spare, out)

    def _rounded(
        self,
        x: torch.Tensor,
        into: torch.Tensor,
        steep: torch.Tensor,
        back: torch.Tensor,
        spare: Sequence[torch.Tensor | None],
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        if self.dithers or self.fmt == "fp16":
            y = torch.mul(x, into, out=spare[0])
            return torch.addcmul(x, _to_grid(y, self.fmt, spare[1:]).sub_(y), back, out=out)
        # As `_to_grid` of x * into, in fewer passes over x.
        carry = torch.mul(x, steep, out=spare[0])
        rest = torch.addcmul(carry, x, into, value=-1, out=spare[1])
        return torch.sub(carry, rest, out=out).mul_(back)

    def round_tiles(self, x: torch.Tensor, spare: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """`round` of contiguous tensors in tiles, each in `spare`."""
        length = self.shape.numel()
        run = _tiles(min(length, OFFSETS))
        sizes = run * (length // OFFSETS) + _tiles(length % OFFSETS)
        places = {count: [each[:count] for each in spare] for count in {*sizes}}
        steep, back = self.steep.flatten(), self.back.flatten()
        for m, (rows, made) in enumerate(zip(x.view(-1, length), out.view(-1, length))):
            into = self.runs[m].split(run) if self.dithers else (self.runs[m],)
            for count, part, place, own in zip(sizes, rows.split(sizes), made.split(sizes), itertools.cycle(into)):
                own = own if len(own) in (1, count) else own[:count]
                self._rounded(part, own, steep[m], back[m], places[count], place)


def _tiles(elements: int) -> list[int]:
    """The sizes of the tiles of so many."""
    return [min(TILE, elements - first) for first in range(0, elements, TILE)]


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
        self._made: dict[tuple[int, int], tuple[dict, dict]] = {}  # for the replicas from the first to the last
        self._take(0, replicas)
        self._drawn = replicas  # of whatever is drawn for each, by them and by parts of them
        self._overflows: set[str] = set()
        self._draws: dict[str, tuple[torch.Generator, torch.Tensor]] = {}
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
        self._all_real = all(self._real)
        self._grids, self._uniform = self._made.setdefault((first, last), ({}, {}))

    @property
    def overflowed(self) -> bool:
        return bool(self._overflows)

    def forget(self) -> None:
        """Have met no overflow."""
        self._overflows.clear()

    def _draw(self, site: str, count: int) -> torch.Tensor:
        """The first `count` numbers of a site, U(0, 1): one for each replica, then those of its offsets."""
        if site not in self._draws:
            generator = torch.Generator().manual_seed(zlib.crc32(site.encode()) * 1_000_003 + self.seed)
            self._draws[site] = generator, torch.empty(0, dtype=torch.float64)
        generator, known = self._draws[site]
        if len(known) < count:
            more = torch.empty(count, dtype=torch.float64)
            more[: len(known)] = known
            more[len(known) :].uniform_(generator=generator)
            self._draws[site] = generator, (known := more)
        return known[:count]

    def uniform(self, site: str, like: torch.Tensor) -> torch.Tensor:
        """U(0, 1), one per replica, the same at every call: `[M, 1, ...]` with as many dimensions as `like`."""
        key = (site, like.dim())
        if key not in self._uniform:
            drawn = self._draw(site, self._drawn)[self._span].to(self.device)
            self._uniform[key] = drawn.view([-1] + [1] * (like.dim() - 1))
        return self._uniform[key]

    def _grid(self, site: str, shape: torch.Size, fmt: str) -> "_Grid":
        uniform = self._draw(site, self._drawn)[self._span]
        real = torch.tensor(self._real)
        scale = torch.exp2(torch.where(real, 0.0, (2 * uniform).frac()))
        dithers, offsets = (uniform < 0.5) & ~real, None
        if bool(dithers.any()):
            step = torch.where(dithers, 2.0 ** (1 - PRECISION_BITS[fmt]), 0.0)[:, None]
            offsets = self._offsets(site, shape[1:].numel(), step).to(self.device)
        return _Grid(scale.to(self.device), offsets, shape[1:], fmt)

    def _offsets(self, site: str, elements: int, step: torch.Tensor) -> torch.Tensor:
        """`[M, elements or OFFSETS]`: 1 and an offset in units of `step` `[M, 1]`, within half of it."""
        width, dithering = min(elements, OFFSETS), int(step.nonzero()[-1, 0]) + 1
        offsets, last = torch.empty(self.replicas, width, dtype=torch.float64), self._span.start + dithering
        drawn = self._draw(site, self._drawn + last * width)[self._drawn :].view(last, width)
        torch.sub(drawn[self._span.start :], 0.5, out=offsets[:dithering]).mul_(step[:dithering]).add_(1)
        offsets[dithering:] = 1
        return offsets

    def round(self, site: str, x: torch.Tensor, fmt: str, out: torch.Tensor | None = None) -> torch.Tensor:
        if fmt == "fp64":
            return x
        if self._all_real and fmt != "fp16":
            return round_to(x, fmt) if out is None else _to_grid(x, fmt, self._spare(x), out)
        key = (site, x.shape, fmt)
        grid = self._grids.get(key)
        if grid is None:
            grid = self._grids[key] = self._grid(*key)
        if self._at_once(x) or len(x) != self.replicas:
            rounded = grid.round(x, self._spare(x), out)
        else:
            rounded = self._in_tiles(grid, x, out)
        if fmt == "tf32":
            for replica in (replica for replica, real in enumerate(self._real) if real):
                rounded[replica] = round_to(x.expand_as(rounded)[replica], "tf32")
        if fmt == "fp16" and site != OUTPUT and not self.overflowed and bool((x.abs() > LARGEST["fp16"]).any()):
            self._overflows.add(site)
        return rounded

    def _at_once(self, x: torch.Tensor) -> bool:
        """Whether x is on a GPU, or too small for tiles."""
        return x.is_cuda or x.numel() < 2 * TILE * self.replicas

    def _in_tiles(self, grid: _Grid, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """x rounded in tiles, laid out as x."""
        made = torch.empty_like(x) if out is None else out
        whole = made if made.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)
        grid.round_tiles(x.contiguous(), self._spare(x.new_empty(TILE)), whole)
        return made if made is whole else made.copy_(whole)

    def round_(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        if fmt not in ("fp32", "bf16", "tf32_rn"):  # of fp16 and tf32 something else is told from x afterwards
            return super().round_(site, x, fmt)
        return self.round(site, x, fmt, x)

    def _spare(self, x: torch.Tensor) -> Sequence[torch.Tensor | None]:
        """Three places for something like x, until the next call; on a GPU, where memory is at hand, none."""
        if x.is_cuda:
            return (None, None, None)
        if x.shape not in self._memory:
            self._memory[x.shape] = [x.new_empty(x.shape) for _ in range(3)]
        return self._memory[x.shape]

    def accumulate(self, site: str, value: torch.Tensor, magnitude: torch.Tensor, bits: int = 23) -> torch.Tensor:
        traced = value.requires_grad
        plain = value.detach() if traced else value
        magnitude = (magnitude.detach() if magnitude.requires_grad else magnitude).contiguous()
        shift = self.uniform(site, value)
        if self._at_once(value) or value.shape != magnitude.shape or not value.is_contiguous():
            return value + _to_sum(plain, magnitude, shift, bits)
        away, spare = torch.empty_like(plain), self._spare(plain.new_empty(TILE))
        for own, *rows in zip(shift, *(x.view(self.replicas, -1) for x in (plain, magnitude, away))):
            for part, size, place in zip(*(row.split(TILE) for row in rows)):
                place.copy_(_to_sum(part, size, own.flatten(), bits, [each[: len(part)] for each in spare]))
        return value + away if traced else away.add_(value)

    def constant(self, site: str, eps: float, like: torch.Tensor) -> torch.Tensor:
        return 1 + eps * (2 * self.uniform(site, like) - 1)


class ToFormat(Rounding):
    """One replica that rounds as the hardware does: emulates the declared rounding points, accumulates exactly."""

    replicas = 1

    def round(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        return round_to(x, fmt)
