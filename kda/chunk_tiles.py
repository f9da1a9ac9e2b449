"""Authority on the tile arithmetic of the chunk kernels: operands of products, sums over ranges, halving levels."""

import triton
import triton.language as tl

from kda.fp32_math import LOG2E, sigmoid

GATE_FLOOR = tl.constexpr(-1e4)  # log2 units; 2^x is 0 long before, and finite sums stay finite

# NOTE [Ranges of gates]
# Every decay between two tokens is 2^(sum of the log2 gates over a contiguous range), and every exponent is such a sum,
# added up as it stands: a product of a 0/1 matrix with the gates. Nothing is ever the difference of two cumulative
# sums, so a reset of -1e6 cannot eat the -0.05 after it, no exponent is above 0, and no token enters the rounding of an
# earlier one. The gradient of a gate is the sum over the ranges that contain it: the transposed product, with nothing
# to cancel. The products run on tensor cores and are exact, because three bf16 numbers hold all bits of an fp32 one;
# only the accumulation rounds.

# NOTE [Halving levels]
# At each level blocks of 1, 2, 4, .. rows come in pairs. A row i of the odd block and a row j of the even one decay by
# the gates from the border to i, and from behind j to the border: 2^(first) scales row i, 2^(second) scales row j, both
# exponents <= 0. The two kinds of row never meet, so one tile serves as row and as column operand. Every i > j is in
# exactly one level.


@triton.jit
def operand(b_x, DOT: tl.constexpr):
    """x as an operand of a product: the nearest bf16, fp16 or tf32 (hardware would truncate), or fp32 as it is."""
    if DOT == "bf16":
        b_y = b_x.to(tl.bfloat16)
    elif DOT == "fp16":
        b_y = b_x.to(tl.float16)
    elif DOT == "tf32":
        b_bits = b_x.to(tl.float32).to(tl.int32, bitcast=True)
        m_finite = (b_bits & 0x7F800000) != 0x7F800000
        b_bits = tl.where(m_finite, (b_bits + 0x1000) & -0x2000, b_bits)
        b_y = b_bits.to(tl.float32, bitcast=True)
    else:
        b_y = b_x.to(tl.float32)
    return b_y


@triton.jit
def product(b_a, b_b, DOT: tl.constexpr):
    """a b of two operands, accumulated in fp32; fp32 ones go through tensor cores in three bf16 parts each."""
    if DOT == "bf16" or DOT == "fp16":
        b_c = tl.dot(b_a, b_b)
    else:
        b_c = tl.dot(b_a, b_b, input_precision="bf16x6" if DOT == "fp32" else DOT)
    return b_c


@triton.jit
def split_product(b_a, b_b, DOT: tl.constexpr):
    """a b with a in two operands, its rounding and the rest: only b is rounded."""
    b_hi = operand(b_a, DOT)
    b_c = product(b_hi, b_b, DOT)
    if DOT != "fp32":
        b_c += product(operand(b_a - b_hi.to(tl.float32), DOT), b_b, DOT)
    return b_c


@triton.jit
def split_products(b_a, b_b, DOT: tl.constexpr):
    """a b with both in two operands; the product of the two rests is below what fp32 holds."""
    b_hi = operand(b_b, DOT)
    b_c = split_product(b_a, b_hi, DOT)
    if DOT != "fp32":
        b_c += product(operand(b_a, DOT), operand(b_b - b_hi.to(tl.float32), DOT), DOT)
    return b_c


@triton.jit
def split_three(b_x):
    """Three bf16 tiles whose sum is x, all 24 bits of it: 8 bits at a time, cut off: cheaper than rounding."""
    b_hi, b_rest = cut_off(b_x)
    b_mid, b_rest = cut_off(b_rest)
    return b_hi, b_mid, b_rest.to(tl.bfloat16)


@triton.jit
def cut_off(b_x):
    """(the first 8 bits of x as bf16, the rest)."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    b_hi = (b_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return b_hi, b_x - (b_bits & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def range_sums(m, b_hi, b_mid, b_lo):
    """Row i: the sum of the rows j with m[i, j] of a tile that is split in three."""
    b_m = m.to(tl.bfloat16)
    return tl.dot(b_m, b_hi, tl.dot(b_m, b_mid, tl.dot(b_m, b_lo)))


@triton.jit
def load_gate(p_g, m):
    """Log2 gates from natural-log ones, resets clamped to a finite number; 0 outside."""
    b_g = tl.load(p_g, mask=m, other=0.0).to(tl.float32) * LOG2E
    return tl.where(b_g < GATE_FLOOR, GATE_FLOOR, b_g)


@triton.jit
def load_normalised(p_x, rstd, o_rstd, m, m_t):
    """Rows of q or k, times 1 / norm where there is one."""
    b_x = tl.load(p_x, mask=m, other=0.0).to(tl.float32)
    if rstd is not None:
        b_x = b_x * tl.load(rstd + o_rstd, mask=m_t, other=0.0)[:, None]
    return b_x


@triton.jit
def store_column(p_x, b_x, m_t, o_j):
    """A number per row, written by whoever holds column 0 of the rows' tile, whose columns are `o_j` `[1, N]`.

    As a vector it would go through shared memory first, written there by every thread that holds a copy.
    """
    b_x = tl.broadcast_to(b_x[:, None], b_x.shape[0], o_j.shape[1])
    tl.store(p_x[:, None] + 0 * o_j, b_x, mask=m_t[:, None] & (o_j == 0))


@triton.jit
def load_betas(p_beta, m, beta_range, BETA_SIGMOID: tl.constexpr):
    """beta, or beta_range sigmoid(beta); 0 outside."""
    b_beta = tl.load(p_beta, mask=m, other=0.0).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = tl.where(m, beta_range * sigmoid(b_beta), 0.0)
    return b_beta
