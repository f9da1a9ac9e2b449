"""Authority on what rounding to a format means, and on the hook through which the oracle's algorithms round."""

import math
import zlib

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


def _to_grid(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """The nearest even value of the format's precision; of its subnormals where it is fp16. Not by a cast: torch takes
    float64 to fp16 through float32, and rounds twice."""
    carry = x * (2.0 ** (53 - PRECISION_BITS[fmt]) + 1)
    rounded = carry - (carry - x)
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

    def round(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        """`x` as it is after being stored in `fmt` at `site`; the same function of the value at every call."""
        return x

    def accumulate(self, site: str, value: torch.Tensor, magnitude: torch.Tensor, bits: int = 23) -> torch.Tensor:
        """`value` as a sum accumulated on a grid whose pitch is about magnitude * 2^-bits."""
        return value

    def constant(self, site: str, eps: float, like: torch.Tensor) -> torch.Tensor | float:
        """A factor 1 + eps U(-1, 1), one per replica: the error of a constant (scale, log2 e) or of exp itself."""
        return 1.0


EXACT = Rounding()


# NOTE [Random rounding functions]
# Real rounding is a function of the value: equal values get equal errors, so repeated tokens make coherent errors that
# independent noise would average away. A replica therefore rounds to a randomly scaled grid, rho(x) = RNE(x s) / s with
# one s per (replica, site). A scaled grid treats a cluster of nearly equal values alike, while the real grid may have
# an edge inside it (1 and 2 are edges, and repeated unit keys make clusters there). So half of the (replica, site)
# pairs, at random, dither: each element has an offset of its own, the same at every call. And every fourth replica uses
# the format's own grid at every site. Randomness is keyed by site, not by call order: recomputing from a checkpoint
# meets the same functions.
class RandomGrids(Rounding):
    """M replicas, each with its own random rounding function at every site. See NOTE [Random rounding functions]."""

    def __init__(self, replicas: int, seed: int = 0, device: torch.device | str = "cpu"):
        self.replicas = replicas
        self.seed = seed
        self.device = torch.device(device)
        self.overflowed = False
        self._real = torch.arange(replicas) % 4 == 0
        self._uniform: dict[str, torch.Tensor] = {}
        self._grids: dict[tuple, tuple[torch.Tensor, torch.Tensor]] = {}

    def _generator(self, site: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(site.encode()) * 1_000_003 + self.seed)

    def uniform(self, site: str, like: torch.Tensor) -> torch.Tensor:
        """U(0, 1), one per replica, the same at every call: `[M, 1, ...]` with as many dimensions as `like`."""
        if site not in self._uniform:
            drawn = torch.rand(self.replicas, generator=self._generator(site), dtype=torch.float64)
            self._uniform[site] = drawn.to(self.device)
        return self._uniform[site].view([-1] + [1] * (like.dim() - 1))

    def _grid(self, site: str, shape: torch.Size, fmt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(s (1 + dither), 1 / s) of a site: the factor into the grid, with each element's offset, and the way back."""
        key = (site, shape[1:], fmt)
        if key not in self._grids:
            generator = self._generator(site)
            column = [-1] + [1] * (len(shape) - 1)
            uniform = torch.rand(self.replicas, generator=generator, dtype=torch.float64)
            scale = torch.exp2(torch.where(self._real, 0.0, (2 * uniform).frac()))
            dithers = (uniform < 0.5) & ~self._real
            factor = scale.view(column).to(self.device)
            if bool(dithers.any()):
                noise = torch.rand((self.replicas, *shape[1:]), generator=generator, dtype=torch.float64) - 0.5
                noise *= torch.where(dithers, 2.0 ** (1 - PRECISION_BITS[fmt]), 0.0).view(column)
                factor = factor * (1 + noise.to(self.device))
            self._grids[key] = factor, (1 / scale).view(column).to(self.device)
        return self._grids[key]

    def round(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        if fmt == "fp64":
            return x
        into, back = self._grid(site, x.shape, fmt)
        y = x * into
        rounded = torch.addcmul(x, _to_grid(y, fmt).sub_(y), back)
        if fmt == "tf32":
            real = self._real.to(self.device).view([-1] + [1] * (x.dim() - 1))
            rounded = torch.where(real, round_to(x, "tf32"), rounded)
        if fmt == "fp16":
            self.overflowed = self.overflowed or bool((x.abs() > LARGEST["fp16"]).any())
        return rounded

    def accumulate(self, site: str, value: torch.Tensor, magnitude: torch.Tensor, bits: int = 23) -> torch.Tensor:
        # The pitch is a power of two times a constant. Were it proportional to the magnitude, sums proportional to
        # theirs (all terms of one sign: a cumulative gate) would share one relative error, which differences cancel.
        binade = magnitude.detach().contiguous().view(torch.int64) & EXPONENT_BITS
        pitch, plain = binade.view(value.dtype) * (1.42 * 2.0**-bits), value.detach()
        shift = self.uniform(site, value)
        return value + ((torch.round(plain / (pitch + 1e-300) + shift) - shift) * pitch - plain)

    def constant(self, site: str, eps: float, like: torch.Tensor) -> torch.Tensor:
        return 1 + eps * (2 * self.uniform(site, like) - 1)


class ToFormat(Rounding):
    """One replica that rounds as the hardware does: emulates the declared rounding points, accumulates exactly."""

    replicas = 1

    def round(self, site: str, x: torch.Tensor, fmt: str) -> torch.Tensor:
        return round_to(x, fmt)
