"""Authority on everything before the recurrence: gate activations, beta modes, q/k normalisation, and their adjoints in float64.

Tensors are token-major with a leading replica dimension: `[M, tokens, heads, D]`. Each function returns the value and a closure that
maps the gradient of that value to the gradients of what went in.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from oracle.rounding import Rounding

L2NORM_EPS = 1e-6


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


def l2norm(x: Tensor, site: str, rounding: Rounding) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """y = x / sqrt(sum x^2 + 1e-6) over the last axis; dx = (dy - y (y . dy)) / sqrt(...)."""
    squares = (x * x).sum(-1, keepdim=True)
    inverse = 1 / torch.sqrt(rounding.accumulate(f"{site}.squares", squares, squares) + L2NORM_EPS)
    inverse = inverse * rounding.constant(f"{site}.rsqrt", 2.0**-23, x)
    y = rounding.round(f"{site}.norm", x * inverse, "fp32")

    def adjoint(dy: Tensor) -> Tensor:
        along = rounding.accumulate(f"{site}.along", (y * dy).sum(-1, keepdim=True), (y * dy).abs().sum(-1, keepdim=True))
        return rounding.round(f"{site}.dx", inverse * (dy - rounding.round(f"{site}.tangent", y * along, "fp32")), "fp32")

    return y, adjoint


def activate_beta(
    beta: Tensor, use_sigmoid: bool, doubled: bool, rounding: Rounding
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """beta as it is, sigmoid(beta), or 2 sigmoid(beta)."""
    if not use_sigmoid:
        return beta, lambda dbeta: dbeta
    factor = 2.0 if doubled else 1.0
    y = factor * torch.sigmoid(beta)
    slope = factor * sigmoid_slope(beta)
    return (
        rounding.accumulate("beta.sigmoid", y, y, 22),
        lambda dbeta: rounding.accumulate("beta.slope", dbeta * slope, (dbeta * y).abs(), 22),
    )


def activate_gate(
    raw: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    lower_bound: float | None,
    rounding: Rounding,
    storage: str = "fp32",
) -> tuple[Tensor, Callable[[Tensor], dict[str, Tensor]]]:
    """The natural-log gate g of `raw` [M, tokens, HV, K] with A_log [HV] and dt_bias [HV * K], float64.

    Without `lower_bound`: g = -exp(A_log) softplus(z), z = raw + dt_bias. With it: g = lower_bound sigmoid(exp(A_log) z). The adjoint
    maps dg to {dg (of raw), dA_log, ddt_bias}, the last two summed over tokens. An fp32 kernel rounds z (which costs |z| 2^-24 of
    g where softplus is exponential) and evaluates the rest to a few ulp; a sigmoid slope formed as p (1 - p) cancels, so its error is
    measured against p.
    """
    heads, channels = raw.shape[-2:]
    A = torch.zeros(heads, 1, dtype=raw.dtype, device=raw.device) if A_log is None else A_log.view(heads, 1)
    bias = 0.0 if dt_bias is None else dt_bias.view(heads, channels)
    z = rounding.round("gate.z", raw + bias, "fp32")
    rate = torch.exp(A) * rounding.constant("gate.rate", 2.0**-23, raw)
    if lower_bound is None:
        # exp(A) softplus(z) for very negative z is exp(A + z): neither factor alone need be representable.
        exact = -torch.where(z < -40, torch.exp(A + z), rate * softplus(z))
        slope = -torch.where(z < -40, torch.exp(A + z), rate * torch.sigmoid(z))
        dA_factor, slope_error = exact, slope.abs()
    else:
        x = rounding.round("gate.x", rate * z, "fp32")
        exact = lower_bound * torch.sigmoid(x)
        steep = torch.where(x.abs() > 40, torch.exp(A - x.abs()), sigmoid_slope(x) * rate)
        slope = lower_bound * steep
        dA_factor = lower_bound * _product(sigmoid_slope(x), x)
        slope_error = abs(lower_bound) * _product(torch.sigmoid(x), rate.expand_as(x))
    finite = torch.isfinite(exact)
    activated = torch.where(finite, rounding.accumulate("gate.activation", exact.nan_to_num(), exact.abs().nan_to_num(), 21), exact)
    g = torch.where(finite, rounding.round("gate.store", activated.nan_to_num(), storage), exact)

    def adjoint(dg: Tensor) -> dict[str, Tensor]:
        draw = rounding.accumulate("gate.slope", _product(dg, slope), _product(dg, slope_error).abs(), 21)
        out = {"dg": draw}
        if A_log is not None:
            terms = _product(dg, dA_factor)
            out["dA_log"] = rounding.accumulate("gate.dA_log", terms.sum((-3, -1)), terms.abs().sum((-3, -1)), 21)
        if dt_bias is not None:
            out["ddt_bias"] = rounding.accumulate("gate.ddt_bias", draw.sum(-3), draw.abs().sum(-3), 21).flatten(-2)
        return out

    return g, adjoint
