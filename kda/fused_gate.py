"""Authority on the gate inside the fused chunk kernels: log2 units, few instructions, every extreme finite."""

import triton
import triton.language as tl

from kda.chunk_tiles import GATE_FLOOR
from kda.fp32_math import LN2, LOG2E, exp

FP32_MAX = tl.constexpr(3.4028234663852886e38)

# NOTE [Fast gates]
# A gate per channel and token makes up most of the arithmetic of a chunk of 16 rows, so each activation is two or
# three special-function instructions and a short polynomial. It is within 2^-20 of its value, and within 2^-22 more
# for every unit of an exponent that it goes through; fp32_math is an order better and several times as long. The
# results go into fp16 pairs and bf16 operands, whose roundings are 2^-22 and 2^-9. Extremes are those of NOTE [Gate
# extremes]: exponents are added before anything overflows, and inf * 0 does not occur.


@triton.jit
def log1p_ratio(b_u):
    """log(1 + u) / u for u in [0, 1], relative error below 4e-7 in fp32: a minimax polynomial, exact at neither end."""
    b_p = -0.008539230562746525 * b_u + 0.04408971592783928
    b_p = b_p * b_u - 0.10768184810876846
    b_p = b_p * b_u + 0.17745251953601837
    b_p = b_p * b_u - 0.2449546754360199
    b_p = b_p * b_u + 0.33275482058525085
    b_p = b_p * b_u - 0.4999740421772003
    return b_p * b_u + 0.9999998211860657


@triton.jit
def fast_softplus_gate(b_z, b_A):
    """-exp(A_log) softplus(z) log2(e); softplus(z) = max(z, 0) + u P(u), u = e^-|z|, exp(A_log) u in one exponent."""
    b_t = tl.abs(b_z) * LOG2E
    b_far = tl.exp2(b_A * LOG2E - b_t) * log1p_ratio(tl.exp2(-b_t))
    return (exp(b_A) * tl.where(b_z > 0.0, b_z, 0.0) + b_far) * -LOG2E


@triton.jit
def steepness(b_A):
    """exp(A_log) log2(e), finite, so that it makes 0 of 0."""
    return tl.minimum(exp(b_A) * LOG2E, FP32_MAX)


@triton.jit
def fast_bounded_gate(b_z, b_A, lower_bound):
    """lower_bound sigmoid(exp(A_log) z) log2(e), with sigmoid(x) = rsqrt(1 + e^-x)^2: a NaN for a NaN only."""
    b_root = tl.rsqrt(1.0 + tl.exp2(-steepness(b_A) * b_z))
    return b_root * b_root * (lower_bound * LOG2E)


@triton.jit
def fast_softplus_adjoint(b_dg, b_z, b_A):
    """dz = -dg exp(A_log) sigmoid(z), and dA_log = dg g."""
    b_t = tl.abs(b_z) * LOG2E
    b_root = tl.rsqrt(1.0 + tl.exp2(-b_t))
    b_slope = tl.exp2(b_A * LOG2E - tl.where(b_z > 0.0, 0.0, b_t)) * (b_root * b_root)
    return -b_dg * b_slope, b_dg * (fast_softplus_gate(b_z, b_A) * LN2)


@triton.jit
def fast_bounded_adjoint(b_dg, b_z, b_A, lower_bound):
    """With x = exp(A_log) z: dz = dg lower_bound sigmoid'(x) exp(A_log), dA_log = dg lower_bound sigmoid'(x) x.

    sigmoid'(x) = e / (1 + e)^2 with e = e^-|x|, exp(A_log) e in one exponent.
    """
    b_x = steepness(b_A) * b_z
    b_e = tl.exp2(-tl.abs(b_x))
    b_root = tl.rsqrt(1.0 + b_e)
    b_root *= b_root
    b_dy = b_dg * lower_bound * (b_root * b_root)
    b_dA = tl.where(b_e == 0.0, 0.0, b_dy * (b_e * b_x * LN2))
    return b_dy * tl.exp2(b_A * LOG2E - tl.abs(b_x)), b_dA


@triton.jit
def fast_gate_adjoint(b_dg, b_z, b_A, lower_bound, GATE: tl.constexpr):
    """(dz, dA_log by token and channel) of the activation of z = g + dt_bias; both are 0 where dg is, as at resets."""
    if GATE == "softplus":
        b_dz, b_dA = fast_softplus_adjoint(b_dg, b_z, b_A)
    else:
        b_dz, b_dA = fast_bounded_adjoint(b_dg, b_z, b_A, lower_bound)
    return tl.where(b_dg == 0.0, 0.0, b_dz), tl.where(b_dg == 0.0, 0.0, b_dA)


@triton.jit
def log2_gate(b_g, m, b_bias, b_A, lower_bound, GATE: tl.constexpr):
    """Log2 gates, activated if they are raw; resets clamped; 0 where not m. m and b_bias broadcast to the tile."""
    b_g = b_g.to(tl.float32)
    if GATE == "softplus":
        b_g = fast_softplus_gate(b_g + b_bias, b_A)
    elif GATE == "bounded":
        b_g = fast_bounded_gate(b_g + b_bias, b_A, lower_bound)
    else:
        b_g = b_g * LOG2E
    b_g = tl.where(b_g < GATE_FLOOR, GATE_FLOOR, b_g)
    return tl.where(m, b_g, 0.0)


@triton.jit
def split_half(b_g):
    """Two fp16 tiles whose sum is a log2 gate in [-1e4, 0] to within |g| 2^-22 and 2^-25."""
    b_hi = b_g.to(tl.float16)
    return b_hi, (b_g - b_hi.to(tl.float32)).to(tl.float16)


@triton.jit
def range_sums_from(start, m, b_hi, b_lo):
    """Row i: start and the sum of the rows j with m[i, j] of a tile that is split in two."""
    b_m = m.to(tl.float16)
    return tl.dot(b_m, b_hi, tl.dot(b_m, b_lo, tl.zeros([m.shape[0], b_hi.shape[1]], tl.float32) + start))
