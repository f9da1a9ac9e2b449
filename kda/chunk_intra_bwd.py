"""Authority on the adjoint of what tokens of one chunk do to each other: gradients through A_qk and A_kk."""

import triton
import triton.language as tl

from kda.chunk_intra import BLOCK
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


@triton.jit
def load_pairs(p_dA_qk, p_dA_kk, o_A, o_AT, m, m_T, scale, INTRA: tl.constexpr):
    """Operands scale dA_qk and its transpose, dA_kk and its transpose, in the regions m and m_T alone."""
    b_P = operand(scale * tl.load(p_dA_qk + o_A, mask=m, other=0.0), INTRA)
    b_PT = operand(scale * tl.load(p_dA_qk + o_AT, mask=m_T, other=0.0), INTRA)
    b_A = tl.load(p_dA_kk + o_A, mask=m, other=0.0)
    b_AT = tl.load(p_dA_kk + o_AT, mask=m_T, other=0.0)
    return b_P, b_PT, operand(b_A, INTRA), operand(b_AT, INTRA)


@triton.jit(do_not_specialize=["H", "HV"])
def kda_chunk_intra_bwd_kernel(
    q,
    k,
    g,
    q_rstd,
    k_rstd,
    dA_qk,
    dA_kk,
    dg_state,
    dq,
    dk,
    dg,
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
    INTRA: tl.constexpr,
):
    """Adds to dq, dk (of the normalised q, k) and dg `[rows, HV, K]` what comes through the chunk's A_qk and A_kk.

    With P = scale dA_qk, A = dA_kk and d_ij = 2^(G_i - G_j): dq_i = sum_j P_ij d_ij k_j, dk_i = sum_j A_ij
    d_ij k_j + sum_j
    (A_ji k_j + P_ji q_j) d_ji, and a gate's gradient is the sum over the pairs whose range it is in, as in
    NOTE [Ranges of gates]. One
    program per (BK columns of K, chunk, value head). dg_state and what dq and dk hold on entry came through the states.
    """
    i_p = tl.program_id(0).to(tl.int64)
    NK = tl.cdiv(K, BK)
    i_k = (i_p % NK).to(tl.int32)
    i_hv = (i_p // NK) % HV
    i_c = i_p // (NK * HV)
    i_h = i_hv // (HV // H)
    count = tl.load(counts + i_c)
    if count == 0:
        return
    i_row = tl.load(rows + i_c)
    o_t = tl.arange(0, C)
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = o_t < count
    m = m_t[:, None] & (o_k < K)[None, :]
    i_rv = i_row * HV + i_hv
    i_qk = (i_row * H + i_h) * K
    o_rstd = i_row * H + i_h + o_t * H
    o_qk = o_i * (H * K) + o_k[None, :]
    o_gk = o_i * (HV * K) + o_k[None, :]
    b_q = load_normalised(q + i_qk + o_qk, q_rstd, o_rstd, m, m_t)
    b_k = load_normalised(k + i_qk + o_qk, k_rstd, o_rstd, m, m_t)
    b_hi, b_mid, b_lo = split_three(load_gate(g + i_rv * K + o_gk, m))
    b_dq = tl.load(dq + i_rv * K + o_gk, mask=m, other=0.0)
    b_dk = tl.load(dk + i_rv * K + o_gk, mask=m, other=0.0)
    b_dg = tl.load(dg_state + i_rv * K + o_gk, mask=m, other=0.0)
    dA_qk += i_rv * C
    dA_kk += i_rv * C
    o_A = o_i * (HV * C) + o_j
    o_AT = o_j * (HV * C) + o_i
    m_A = m_t[:, None] & m_t[None, :]
    b_diagonal = scale * tl.load(dA_qk + o_t * (HV * C + 1), mask=m_t, other=0.0)[:, None]
    b_dq += b_diagonal * b_k
    b_dk += b_diagonal * b_q
    for i_l in range(LOWEST, LEVELS):
        b_x = tl.exp2(range_sums(level_range(o_i, o_j, i_l), b_hi, b_mid, b_lo))
        b_kx = b_k * b_x
        b_qx = b_q * b_x
        b_ko = operand(b_kx, INTRA)
        m_l = m_A & level_region(o_i, o_j, i_l)
        m_lT = m_A & level_region(o_j, o_i, i_l)
        b_P, b_PT, b_A, b_AT = load_pairs(dA_qk, dA_kk, o_A, o_AT, m_l, m_lT, scale, INTRA)
        b_dqx = product(b_P, b_ko, INTRA)
        b_dkx = product(b_A + b_AT, b_ko, INTRA)  # one of the two is 0
        b_dkx += product(b_PT, operand(b_qx, INTRA), INTRA)
        b_dq += b_x * b_dqx
        b_dk += b_x * b_dkx
        b_1, b_2, b_3 = split_three(b_qx * b_dqx + b_kx * b_dkx)
        b_dg += range_sums(level_range(o_j, o_i, i_l), b_1, b_2, b_3)
    if ANCHORED:
        # Rounded once and used everywhere: what must cancel between rows and columns cancels to the last bits.
        b_G = range_sums(block_range(o_i, o_j, BLOCK), b_hi, b_mid, b_lo)
        b_x = tl.exp2(b_G + half_span)
        b_y = tl.exp2(-b_G - half_span)
        b_qx = operand(b_q * b_x, INTRA)
        b_kx = operand(b_k * b_x, INTRA)
        b_ky = operand(b_k * b_y, INTRA)
        m_b = m_A & block_region(o_i, o_j, BLOCK)
        m_bT = m_A & block_region(o_j, o_i, BLOCK)
        b_P, b_PT, b_A, b_AT = load_pairs(dA_qk, dA_kk, o_A, o_AT, m_b, m_bT, scale, INTRA)
        b_dqx = product(b_P, b_ky, INTRA)
        b_dkx = product(b_A, b_ky, INTRA)
        b_dky = product(b_AT, b_kx, INTRA) + product(b_PT, b_qx, INTRA)
        b_dq += b_x * b_dqx
        b_dk += b_x * b_dkx + b_y * b_dky
        b_1, b_2, b_3 = split_three(
            b_qx.to(tl.float32) * b_dqx + b_kx.to(tl.float32) * b_dkx - b_ky.to(tl.float32) * b_dky
        )
        b_dg += range_sums(block_range(o_j, o_i, BLOCK), b_1, b_2, b_3)
    tl.store(dq + i_rv * K + o_gk, b_dq, mask=m)
    tl.store(dk + i_rv * K + o_gk, b_dk, mask=m)
    tl.store(dg + i_rv * K + o_gk, b_dg.to(dg.dtype.element_ty), mask=m)
