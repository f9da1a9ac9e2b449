"""Authority on what tokens of one chunk do to each other: the products A_qk and A_kk, and operands decayed to the
chunk's borders.
"""

import triton
import triton.language as tl

from kda.chunk_tiles import (
    block_range,
    block_region,
    level_range,
    level_region,
    load_gate,
    load_normalised,
    operand,
    product,
    range_sums,
    split_three,
)

BLOCK = tl.constexpr(16)  # rows that share one anchor

# NOTE [Anchored block]
# With gates in [bound, 0] the pairs i > j of a block of 16 rows fit into one product: 2^(G_i - G_0 + c) scales row i
# and
# 2^(G_0 - G_j - c) row j, G_0 the cumulative gate of the block's first row and c half of the widest span, 15/2 |bound|
# log2(e).
# Both factors stay within 2^+-c, and both c and the anchor are known to every row before it is reached, so that no
# later row enters
# an earlier one's rounding. Rows i = j are computed apart: exactly, and without a gradient into the gate. In the
# gradient the
# scaled rows are rounded first and then used everywhere, so that what must cancel between G_i and G_j cancels to the
# last bits.


@triton.jit
def level_products(b_q, b_k, b_hi, b_mid, b_lo, o_i, o_j, i_l, INTRA: tl.constexpr):
    """q_i k_j and k_i k_j, decayed, for the pairs of one level; 0 elsewhere."""
    b_x = tl.exp2(range_sums(level_range(o_i, o_j, i_l), b_hi, b_mid, b_lo))
    b_kx = operand(b_k * b_x, INTRA)
    b_kT = tl.trans(b_kx)
    m = level_region(o_i, o_j, i_l)
    b_qk = tl.where(m, product(operand(b_q * b_x, INTRA), b_kT, INTRA), 0.0)
    b_kk = tl.where(m, product(b_kx, b_kT, INTRA), 0.0)
    return b_qk, b_kk


@triton.jit
def anchored_products(b_q, b_k, b_hi, b_mid, b_lo, half_span, o_i, o_j, INTRA: tl.constexpr):
    """q_i k_j and k_i k_j, decayed, for i > j of each block of 16 rows; 0 elsewhere. See NOTE [Anchored block]."""
    b_G = range_sums(block_range(o_i, o_j, BLOCK), b_hi, b_mid, b_lo)
    b_x = tl.exp2(b_G + half_span)
    b_kT = tl.trans(operand(b_k * tl.exp2(-b_G - half_span), INTRA))
    m = block_region(o_i, o_j, BLOCK)
    b_qk = tl.where(m, product(operand(b_q * b_x, INTRA), b_kT, INTRA), 0.0)
    b_kk = tl.where(m, product(operand(b_k * b_x, INTRA), b_kT, INTRA), 0.0)
    return b_qk, b_kk


@triton.jit(do_not_specialize=["H", "HV"])
def kda_chunk_intra_fwd_kernel(
    q,
    k,
    g,
    q_rstd,
    k_rstd,
    A_qk,
    A_kk,
    q_decayed,
    k_decayed,
    k_rest,
    decay,
    rows,
    counts,
    scale,
    half_span,
    H,
    HV,
    K,
    C: tl.constexpr,
    BK: tl.constexpr,
    LOWEST: tl.constexpr,
    LEVELS: tl.constexpr,
    ANCHORED: tl.constexpr,
    DOT: tl.constexpr,
    INTRA: tl.constexpr,
):
    """A_qk[i, j] = scale sum_k q_i k_j 2^(G_i - G_j), i >= j, and A_kk, the same of k and k without scale, i > j.

    Also q 2^G, k 2^G, k 2^(G_C - G) and 2^G_C, G the cumulative log2 gate of the chunk. One program per (chunk, value
    head). A_qk, A_kk
    `[rows, HV, C]`; q_decayed, k_decayed, k_rest `[rows, HV, K]`; decay `[slots, HV, K]`.
    """
    i_p = tl.program_id(0).to(tl.int64)
    i_hv = i_p % HV
    i_c = i_p // HV
    i_h = i_hv // (HV // H)
    count = tl.load(counts + i_c)
    if count == 0:
        return
    i_row = tl.load(rows + i_c)
    o_t = tl.arange(0, C)
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    m_t = o_t < count
    i_qk = (i_row * H + i_h) * K
    i_rv = i_row * HV + i_hv
    o_rstd = i_row * H + i_h + o_t * H
    b_qk = tl.zeros([C, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    b_diagonal = tl.zeros([C], tl.float32)
    for i_k in range(0, tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = o_k < K
        m = m_t[:, None] & m_k[None, :]
        o_qk = o_i * (H * K) + o_k[None, :]
        o_gk = o_i * (HV * K) + o_k[None, :]
        b_q = load_normalised(q + i_qk + o_qk, q_rstd, o_rstd, m, m_t)
        b_k = load_normalised(k + i_qk + o_qk, k_rstd, o_rstd, m, m_t)
        b_g = load_gate(g + i_rv * K + o_gk, m)
        tl.store(decay + (i_c * HV + i_hv) * K + o_k, tl.exp2(tl.sum(b_g, axis=0)), mask=m_k)
        b_hi, b_mid, b_lo = split_three(b_g)
        b_x = tl.exp2(range_sums(o_j <= o_i, b_hi, b_mid, b_lo))
        tl.store(q_decayed + i_rv * K + o_gk, operand(b_q * b_x, DOT), mask=m)
        tl.store(k_decayed + i_rv * K + o_gk, operand(b_k * b_x, DOT), mask=m)
        b_x = tl.exp2(range_sums(o_j > o_i, b_hi, b_mid, b_lo))
        tl.store(k_rest + i_rv * K + o_gk, operand(b_k * b_x, DOT), mask=m)
        b_diagonal += tl.sum(b_q * b_k, axis=1)
        for i_l in range(LOWEST, LEVELS):
            b_dqk, b_dkk = level_products(b_q, b_k, b_hi, b_mid, b_lo, o_i, o_j, i_l, INTRA)
            b_qk += b_dqk
            b_kk += b_dkk
        if ANCHORED:
            b_dqk, b_dkk = anchored_products(b_q, b_k, b_hi, b_mid, b_lo, half_span, o_i, o_j, INTRA)
            b_qk += b_dqk
            b_kk += b_dkk
    o_A = o_i * (HV * C) + o_j
    b_qk = tl.where(o_i == o_j, b_diagonal[:, None], b_qk) * scale
    tl.store(A_qk + i_rv * C + o_A, operand(b_qk, DOT), mask=m_t[:, None])
    tl.store(A_kk + i_rv * C + o_A, b_kk, mask=m_t[:, None])
