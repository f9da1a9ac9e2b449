"""Authority on what precedes the recurrence: gate activations, beta modes, q/k normalisation, and their adjoints.

All in float64, token-major with a leading replica dimension: `[M, tokens, heads, D]`. Each function returns the value
and a closure that maps the gradient of that value to the gradients of what went in.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.rounding import Rounding

L2NORM_EPS = 1e-6
TAIL = 40.0  # beyond it softplus(-y) and sigmoid(-y) are exp(-y) to the last bit of float64
TANH_APPROX = "tanh_approx"  # of a stage `sigmoid`: (1 + tanh(x / 2)) / 2 by the GPU's instruction
TANH_BITS = 10  # tanh.approx.f32 is documented to be right to a relative 2^-11


def softplus(z: Tensor) -> Tensor:
    """log(1 + e^z), right at both ends."""
    return z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))


def sigmoid_slope(x: Tensor) -> Tensor:
    """sigmoid'(x) = e^-|x| / (1 + e^-|x|)^2, which does not cancel."""
    e = torch.exp(-x.abs())
    return e / (1 + e) ** 2


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a * b where 0 * inf is 0: a gradient that is exactly 0 stays 0 through a reset."""
    return torch.where((a == 0) | (b == 0), 0.0, a * b)


def _round(rounding: Rounding, site: str, x: Tensor, fmt: str = "fp32") -> Tensor:
    """x rounded at `site` where it is finite; infinities stay."""
    finite = torch.isfinite(x)
    return torch.where(finite, rounding.round(site, torch.where(finite, x, 0.0), fmt), x)


def l2norm(
    x: Tensor, site: str, rounding: Rounding, storage: str = "fp32"
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """y = x / sqrt(sum x^2 + 1e-6) over the last axis; dx = (dy - y (y . dy)) / sqrt(...). y is kept in `storage`."""
    squares = (x * x).sum(-1, keepdim=True)
    inverse = 1 / torch.sqrt(rounding.accumulate(f"{site}.squares", squares, squares) + L2NORM_EPS)
    inverse = inverse * rounding.constant(f"{site}.rsqrt", 2.0**-23, x)
    y = rounding.round(f"{site}.norm", x * inverse, storage)

    def adjoint(dy: Tensor) -> Tensor:
        terms = y * dy
        along = rounding.accumulate(f"{site}.along", terms.sum(-1, keepdim=True), terms.abs().sum(-1, keepdim=True))
        across = dy - rounding.round(f"{site}.tangent", y * along, "fp32")
        return rounding.round(f"{site}.dx", inverse * across, "fp32")

    return y, adjoint


def activate_beta(
    beta: Tensor, use_sigmoid: bool, doubled: bool, rounding: Rounding, storage: str = "fp32", sigmoid: str = "fp32"
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """beta as it is, sigmoid(beta), or 2 sigmoid(beta). A slope formed as p (1 - p) errs as in `_bounded_curve`."""
    if not use_sigmoid:
        return beta, lambda dbeta: dbeta
    factor = 2.0 if doubled else 1.0
    y = factor * _stored_sigmoid(torch.sigmoid(beta), rounding, "beta.tanh", sigmoid)
    slope = factor * sigmoid_slope(beta)

    def adjoint(dbeta: Tensor) -> Tensor:
        magnitude = dbeta.abs() * torch.minimum(y, slope * 2.0**22)
        return rounding.accumulate("beta.slope", dbeta * slope, magnitude, 22)

    return rounding.round("beta.store", rounding.accumulate("beta.sigmoid", y, y, 22), storage), adjoint


def _stored_sigmoid(p: Tensor, rounding: Rounding, site: str, sigmoid: str) -> Tensor:
    """sigmoid(x) = p as a kernel has it. An approximate tanh errs by a share of itself, and saturates: never past 1."""
    if sigmoid != TANH_APPROX:
        return p
    t = 2 * p - 1
    error = rounding.accumulate(site, t, t.abs(), TANH_BITS) - t
    room = 2 * torch.minimum(p, 1 - p)
    return p + error.clamp(-room, room) / 2


@dataclass(frozen=True)
class _Curve:
    """An activation and its derivatives: `g`, dg/dz, dg/dA_log, like z."""

    g: Tensor
    dz: Tensor
    dA: Tensor


def _softplus_curve(z: Tensor, A: Tensor, rate: Tensor, rounding: Rounding) -> _Curve:
    """g = -e^A softplus(z). Far down it is -e^(A + z), of which neither factor need be representable."""
    far = z < -TAIL
    small = torch.exp(_round(rounding, "gate.exponent", A + z))
    g = -torch.where(far, small, rate * softplus(z))
    return _Curve(g, -torch.where(far, small, rate * torch.sigmoid(z)), g)


def _bounded_curve(z: Tensor, A: Tensor, rate: Tensor, bound: float, rounding: Rounding, sigmoid: str) -> _Curve:
    """g = bound sigmoid(e^A z). A slope formed as p (1 - p) cancels: it errs by roundoffs of p, or is 0 for p = 1."""
    x = _round(rounding, "gate.x", _product(rate, z))
    p, slope = torch.sigmoid(x), sigmoid_slope(x)
    error = rounding.accumulate("gate.cancellation", slope, torch.minimum(p, slope * 2.0**21), 21) - slope
    steep = torch.where(x.abs() > TAIL, torch.exp(A - x.abs()), slope * rate) + _product(error, rate)
    return _Curve(
        bound * _stored_sigmoid(p, rounding, "gate.tanh", sigmoid), bound * steep, bound * _product(slope + error, x)
    )


def activate_gate(
    raw: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    rounding: Rounding,
    storage: str = "fp32",
    sigmoid: str = "fp32",
) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
    """The natural-log gate g of `raw` [M, tokens, HV, K] with A_log [HV] and dt_bias [HV * K], float64.

    Without `lower_bound`: g = -exp(A_log) softplus(z), z = raw + dt_bias. With it: g = lower_bound sigmoid(exp(A_log)
    z), where no A_log is A_log = 0. The adjoint maps dg to {dg (of raw), dA_log, ddt_bias}, the last two summed over
    tokens. An fp32 kernel rounds z, which alone costs |z| 2^-24 of g where g is exponential, and evaluates the rest to
    a few ulp; the result is kept in `storage`. `sigmoid`: fp32, or TANH_APPROX.
    """
    heads, channels = raw.shape[-2:]
    A = torch.zeros(heads, 1, dtype=raw.dtype, device=raw.device) if A_log is None else A_log.view(heads, 1)
    z = raw if dt_bias is None else raw + dt_bias.view(heads, channels)
    z = _round(rounding, "gate.z", z)
    rate = torch.exp(A) * rounding.constant("gate.rate", 2.0**-23, raw)
    if lower_bound is None:
        curve = _softplus_curve(z, A, rate, rounding)
    else:
        curve = _bounded_curve(z, A, rate.expand_as(z), lower_bound, rounding, sigmoid)
    finite = torch.isfinite(curve.g)
    g = torch.where(finite, curve.g, 0.0)
    g = rounding.round("gate.store", rounding.accumulate("gate.activation", g, g.abs(), 21), storage)

    def adjoint(dg: Tensor) -> dict[str, Tensor]:
        draw = _product(dg, curve.dz)
        draw = rounding.accumulate("gate.slope", draw, draw.abs(), 21)
        out = {"dg": draw}
        if A_log is not None:
            terms = _product(dg, curve.dA)
            out["dA_log"] = rounding.accumulate("gate.dA_log", terms.sum((-3, -1)), terms.abs().sum((-3, -1)), 21)
        if dt_bias is not None:
            out["ddt_bias"] = rounding.accumulate("gate.ddt_bias", draw.sum(-3), draw.abs().sum(-3), 21).flatten(-2)
        return out

    return torch.where(finite, g, curve.g), adjoint
