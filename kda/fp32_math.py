"""Authority on elementary functions in fp32 inside kernels: right to a few ulp on every target, libdevice or not."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950216293335)  # log2(e) rounded to fp32 ...
LOG2E_LO = tl.constexpr(1.9259629911266175e-08)  # ... and what that left out
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(b_x):
    """exp(x) = 2^h (1 + l ln 2) with h + l = x log2(e); 0 at -inf, inf where it overflows, NaN for NaN."""
    # Beyond +-200 the result is 0 or inf anyway; without the clamp inf - inf would make l a NaN.
    b_x = tl.where(b_x < -200.0, -200.0, tl.where(b_x > 200.0, 200.0, b_x))
    b_h = b_x * LOG2E
    b_l = tl.fma(b_x, LOG2E, -b_h) + b_x * LOG2E_LO
    return tl.exp2(b_h) * (1.0 + b_l * LN2)


@triton.jit
def log1p_exp_neg(b_x):
    """log(1 + exp(-|x|)) = 2 atanh(u / (2 + u)), u = exp(-|x|).

    log(1 + u) would lose u's digits in the sum, and the hardware's log2 has an absolute error near 1.
    """
    b_u = exp(-tl.abs(b_x))
    b_s = b_u / (2.0 + b_u)
    b_t = b_s * b_s  # <= 1/9: eight terms reach 2^-29
    b_p = 1.0 / 15.0 + b_t * (1.0 / 17.0)
    b_p = 1.0 / 13.0 + b_t * b_p
    b_p = 1.0 / 11.0 + b_t * b_p
    b_p = 1.0 / 9.0 + b_t * b_p
    b_p = 1.0 / 7.0 + b_t * b_p
    b_p = 1.0 / 5.0 + b_t * b_p
    b_p = 1.0 / 3.0 + b_t * b_p
    return 2.0 * b_s * (1.0 + b_t * b_p)


@triton.jit
def sigmoid(b_x):
    """1 / (1 + exp(-x)), without overflow and with full relative accuracy for negative x."""
    b_e = exp(-tl.abs(b_x))
    return tl.where(b_x >= 0.0, 1.0, b_e) / (1.0 + b_e)


@triton.jit
def sigmoid_slope(b_x):
    """sigmoid'(x) = e / (1 + e)^2 with e = exp(-|x|): no difference cancels."""
    b_e = exp(-tl.abs(b_x))
    return b_e / ((1.0 + b_e) * (1.0 + b_e))
