"""Authority on the gate: the two activations, their adjoints, and `fused_kda_gate`."""

import torch
import triton
import triton.language as tl

from kda import contract, ops, record, registry
from kda.fp32_math import exp, log1p_exp_neg, sigmoid
from kda.once import once_differentiable
from kda.precision import PrecisionSpec
from kda.sums import sum_slots

BLOCK_TOKENS = 32  # tokens per partial sum of dA_log and ddt_bias; part of the numerics, so it never depends on sizes

PRECISION = PrecisionSpec(
    algorithm="gate",
    stages={"gate": "fp32", "reduce": "fp32", "dg": "g"},
)

# NOTE [Gate extremes]
# exp(A_log) may be as large as 1e38 while the factor beside it is below the smallest fp32 number: their product is then
# an ordinary number that neither factor can express. Wherever a factor exp(-y) is about to leave the normal range (y >
# 80) the two exponents are added first: exp(A_log - y). Where a factor is exactly 0 the other may be inf: the product
# is selected to be 0, as the limit is, never computed.


@triton.jit
def softplus(b_z):
    """log(1 + e^z)."""
    return tl.where(b_z > 0.0, b_z, 0.0) + log1p_exp_neg(b_z)


@triton.jit
def softplus_gate(b_z, b_A):
    """g = -exp(A_log) softplus(z), natural log, <= 0."""
    return -tl.where(b_z < -80.0, exp(b_A + b_z), exp(b_A) * softplus(b_z))


@triton.jit
def bounded_gate(b_z, b_A, lower_bound):
    """g = lower_bound sigmoid(exp(A_log) z), natural log, in [lower_bound, 0]."""
    return lower_bound * sigmoid(exp(b_A) * b_z)


@triton.jit
def activate_gate(b_g, b_bias, b_A, lower_bound, IS_BOUNDED: tl.constexpr):
    """The natural-log gate of raw g: one of the two activations of z = g + dt_bias."""
    b_z = b_g + b_bias
    if IS_BOUNDED:
        b_a = bounded_gate(b_z, b_A, lower_bound)
    else:
        b_a = softplus_gate(b_z, b_A)
    return b_a


@triton.jit
def softplus_gate_adjoint(b_dg, b_z, b_A):
    """dz = -dg exp(A_log) sigmoid(z), and dA_log = dg g as two terms: exp(A_log) times the first, plus the second.

    The factor is applied to the sum over all tokens: single terms may overflow where their sum does not.
    """
    m_far = b_z < -80.0
    b_far = exp(b_A + b_z)
    b_dz = -b_dg * tl.where(m_far, b_far, exp(b_A) * sigmoid(b_z))
    b_scaled = tl.where(m_far | (b_dg == 0.0), 0.0, -b_dg * softplus(b_z))
    b_plain = tl.where(m_far, -b_dg * b_far, 0.0)
    return tl.where(b_dg == 0.0, 0.0, b_dz), b_scaled, tl.where(b_dg == 0.0, 0.0, b_plain)


@triton.jit
def bounded_gate_adjoint(b_dg, b_z, b_A, lower_bound):
    """With x = exp(A_log) z: dz = dg lower_bound sigmoid'(x) exp(A_log), dA_log = dg lower_bound sigmoid'(x) x."""
    b_ea = exp(b_A)
    b_x = b_ea * b_z
    b_e = exp(-tl.abs(b_x))
    b_slope = b_e / ((1.0 + b_e) * (1.0 + b_e))
    b_dy = b_dg * lower_bound
    b_steep = tl.where(tl.abs(b_x) > 80.0, exp(b_A - tl.abs(b_x)), b_slope * b_ea)
    b_dz = tl.where(b_dy == 0.0, 0.0, b_dy * b_steep)
    b_dA = tl.where((b_dy == 0.0) | (b_slope == 0.0), 0.0, b_dy * (b_slope * b_x))
    return b_dz, b_dA


@triton.jit(do_not_specialize=["num_tokens", "HV"])
def kda_gate_fwd_kernel(
    g,
    A_log,
    dt_bias,
    y,
    lower_bound,
    num_tokens,
    HV,
    K,
    BT: tl.constexpr,
    BK: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """y = activation(g + dt_bias); g, y [tokens, HV, K], one program per BT tokens of a head."""
    i_hv = tl.program_id(0) % HV
    i_t = (tl.program_id(0) // HV).to(tl.int64) * BT
    o_t = i_t + tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m = (o_t < num_tokens)[:, None] & (o_k < K)[None, :]
    o_g = (o_t[:, None] * HV + i_hv) * K + o_k[None, :]
    b_A = tl.load(A_log + i_hv).to(tl.float32) if HAS_A else 0.0
    b_bias = (
        tl.load(dt_bias + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        if HAS_BIAS
        else tl.zeros([BK], tl.float32)
    )
    b_g = tl.load(g + o_g, mask=m, other=0.0).to(tl.float32)
    b_y = activate_gate(b_g, b_bias[None, :], b_A, lower_bound, IS_BOUNDED)
    tl.store(y + o_g, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["num_tokens", "HV"])
def kda_gate_bwd_kernel(
    g,
    A_log,
    dt_bias,
    dy,
    dg,
    dA_partial,
    dbias_partial,
    lower_bound,
    num_tokens,
    HV,
    K,
    BT: tl.constexpr,
    BK: tl.constexpr,
    HAS_A: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    """dg = dy y'(g + dt_bias), and this block's sums of the unrounded terms of dA_log and ddt_bias.

    dA_partial `[blocks, HV, 2]` holds what exp(A_log) multiplies, and the rest; dbias_partial `[blocks, HV, K]`.
    """
    i_hv = tl.program_id(0) % HV
    i_b = (tl.program_id(0) // HV).to(tl.int64)
    o_t = i_b * BT + tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m = (o_t < num_tokens)[:, None] & (o_k < K)[None, :]
    o_g = (o_t[:, None] * HV + i_hv) * K + o_k[None, :]
    b_A = tl.load(A_log + i_hv).to(tl.float32) if HAS_A else 0.0
    b_bias = (
        tl.load(dt_bias + i_hv * K + o_k, mask=o_k < K, other=0.0).to(tl.float32)
        if HAS_BIAS
        else tl.zeros([BK], tl.float32)
    )
    b_z = tl.load(g + o_g, mask=m, other=0.0).to(tl.float32) + b_bias[None, :]
    b_dy = tl.load(dy + o_g, mask=m, other=0.0).to(tl.float32)
    if IS_BOUNDED:
        b_dz, b_plain = bounded_gate_adjoint(b_dy, b_z, b_A, lower_bound)
        b_scaled = tl.zeros_like(b_plain)
    else:
        b_dz, b_scaled, b_plain = softplus_gate_adjoint(b_dy, b_z, b_A)
    tl.store(dg + o_g, b_dz.to(dg.dtype.element_ty), mask=m)
    if HAS_A:
        p_dA = dA_partial + (i_b * HV + i_hv) * 2
        tl.store(p_dA, tl.sum(tl.sum(b_scaled, axis=1), axis=0))
        tl.store(p_dA + 1, tl.sum(tl.sum(b_plain, axis=1), axis=0))
    if HAS_BIAS:
        tl.store(dbias_partial + (i_b * HV + i_hv) * K + o_k, tl.sum(b_dz, axis=0), mask=o_k < K)


class _GateFunction(torch.autograd.Function):
    """Launches the two kernels; everything they need is recomputed from the raw gate."""

    @staticmethod
    def forward(ctx, g, A_log, dt_bias, lower_bound, output_dtype):
        ctx.save_for_backward(g, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        return gate_forward(g, A_log, dt_bias, lower_bound, output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy):
        g, A_log, dt_bias = saved
        return (*gate_backward(g, A_log, dt_bias, ctx.lower_bound, dy), None, None)


def dense(x: torch.Tensor | None) -> torch.Tensor | None:
    """Kernels address dense tensors; anything strided, expanded, offset or negated by its view is copied here."""
    return None if x is None else x.contiguous().resolve_neg()


def _geometry(g: torch.Tensor, A_log, dt_bias, lower_bound) -> tuple[tuple[int], dict]:
    B, T, HV, K = g.shape
    constants = {
        "BT": BLOCK_TOKENS,
        "BK": triton.next_power_of_2(K),
        "HAS_A": A_log is not None,
        "HAS_BIAS": dt_bias is not None,
        "IS_BOUNDED": lower_bound is not None,
        "num_warps": 8 if K > 128 else 4,
    }
    return (triton.cdiv(B * T, BLOCK_TOKENS) * HV,), constants


def gate_forward(g, A_log, dt_bias, lower_bound, output_dtype, route: str = "gate") -> torch.Tensor:
    """The activated gate `[B, T, HV, K]`, natural log, of raw g in any layout."""
    g, A_log, dt_bias = (dense(x) for x in (g, A_log, dt_bias))
    y = torch.empty(g.shape, dtype=output_dtype, device=g.device)
    if g.numel():
        grid, constants = _geometry(g, A_log, dt_bias, lower_bound)
        record.note(route, "kda_gate_fwd_kernel", BT=BLOCK_TOKENS, BK=constants["BK"])
        kda_gate_fwd_kernel[grid](
            g, A_log, dt_bias, y, lower_bound or 0.0, g.shape[0] * g.shape[1], *g.shape[2:], **constants
        )
    return y


def gate_backward(g, A_log, dt_bias, lower_bound, dy, route: str = "gate"):
    """(dg, dA_log, ddt_bias) for the gradient dy of the activated gate; None where there is no parameter."""
    g, A_log, dt_bias, dy = (dense(x) for x in (g, A_log, dt_bias, dy))
    B, T, HV, K = g.shape
    blocks = triton.cdiv(B * T, BLOCK_TOKENS)
    dg = torch.empty_like(g)
    partial = lambda x, *shape: None if x is None else torch.empty(blocks, *shape, dtype=torch.float32, device=g.device)  # noqa: E731
    dA, dbias = partial(A_log, HV, 2), partial(dt_bias, HV, K)
    if g.numel():
        grid, constants = _geometry(g, A_log, dt_bias, lower_bound)
        record.note(route, "kda_gate_bwd_kernel", BT=BLOCK_TOKENS, BK=constants["BK"])
        kda_gate_bwd_kernel[grid](g, A_log, dt_bias, dy, dg, dA, dbias, lower_bound or 0.0, B * T, HV, K, **constants)
    if A_log is not None:
        scaled, plain = sum_slots(route, dA).unbind(-1)
        dA = (A_log.float().exp() * scaled + plain).to(A_log.dtype)
    if dt_bias is not None:
        dbias = sum_slots(route, dbias).flatten().to(dt_bias.dtype)
    return dg, dA, dbias


def fused_kda_gate(
    g: torch.Tensor,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    output_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The natural-log decay (<= 0) of a raw gate, `[B, T, HV, K]`, differentiable in g, A_log and dt_bias.

    Without `lower_bound`: -exp(A_log) softplus(g + dt_bias), and A_log `[HV]` is required. With it (any number below 0
    that is finite in fp32): lower_bound sigmoid(exp(A_log) (g + dt_bias)), where A_log=None means a factor of 1; the
    result is in [lower_bound, 0], the bound rounded like the result. dt_bias is `[HV * K]`. g may be bf16, fp16 or
    fp32; the result has `output_dtype`. Raises ValueError or TypeError naming the argument, before any kernel runs.
    """
    return ops.dispatch(contract.validate_gate(contract.GateCall(g, A_log, dt_bias, lower_bound, output_dtype)))


def _gradients(call: contract.GateCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
    dg, dA_log, ddt_bias = gate_backward(call.g, call.A_log, call.dt_bias, call.lower_bound, dy)
    return {"g": dg, "A_log": dA_log, "dt_bias": ddt_bias}


def _verify(call: contract.GateCall) -> str | None:
    if call.output_dtype == torch.float64:
        return "computes in fp32, not float64"
    return registry.needs_kernels(call.g, call.A_log, call.dt_bias)


registry.register(
    registry.Route(
        id="gate",
        entries=frozenset({"gate"}),
        summary="fused_kda_gate in Triton, forward and backward",
        verify=_verify,
        run=lambda call: _GateFunction.apply(call.g, call.A_log, call.dt_bias, call.lower_bound, call.output_dtype),
        gradients=_gradients,
        precision=PRECISION,
    )
)
