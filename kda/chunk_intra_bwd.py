"""Authority on the adjoint of what tokens of one chunk do to each other: gradients through A_qk and A_kk."""

import triton
import triton.language as tl

from kda.chunk_intra import step_factors, step_range, step_region
from kda.chunk_tiles import load_gate, load_normalised, operand, product, range_sums, split_three


@triton.jit(do_not_specialize=["H", "HV", "lowest"])
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
    lowest,
    H,
    HV,
    K,
    C: tl.constexpr,
    BK: tl.constexpr,
    LEVELS: tl.constexpr,
    ANCHORED: tl.constexpr,
    INTRA: tl.constexpr,
):
    """Adds to dq, dk (of the normalised q, k) and dg `[rows, HV, K]` what comes through the chunk's A_qk and A_kk.

    With P = scale dA_qk, A = dA_kk (both mirrored above the diagonal) and d_ij = 2^(G_i - G_j), i > j: dq_i = sum_j
    P_ij d_ij k_j, dk_i = sum_j A_ij d_ij k_j, dk_j = sum_i d_ij (A_ij k_i + P_ij q_i), and a gate's gradient is the sum
    over the pairs whose range it is in, as in NOTE [Ranges of gates]. One program per (BK columns of K, chunk, value
    head). dg_state and what dq and dk hold on entry came through the states.
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
    m_A = m_t[:, None] & m_t[None, :]
    i_rv = i_row * HV + i_hv
    dA_qk += i_rv * C
    dA_kk += i_rv * C
    p_q = q + (i_row * H + i_h) * K + (o_i * (H * K) + o_k[None, :])
    p_k = k + (i_row * H + i_h) * K + (o_i * (H * K) + o_k[None, :])
    o_A = o_i * (HV * C) + o_j
    o_gk = o_i * (HV * K) + o_k[None, :]
    o_rstd = i_row * H + i_h + o_t * H
    b_diagonal = scale * tl.load(dA_qk + o_t * (HV * C + 1), mask=m_t, other=0.0)[:, None]
    b_dq = tl.load(dq + i_rv * K + o_gk, mask=m, other=0.0)
    b_dk = tl.load(dk + i_rv * K + o_gk, mask=m, other=0.0)
    b_dg = tl.load(dg_state + i_rv * K + o_gk, mask=m, other=0.0)
    b_dq += b_diagonal * load_normalised(p_k, k_rstd, o_rstd, m, m_t)
    b_dk += b_diagonal * load_normalised(p_q, q_rstd, o_rstd, m, m_t)
    for i_s in range(lowest - 2 * ANCHORED, LEVELS):
        # Two passes through the anchored pairs: with the rows as their earlier, then as their later token.
        i_l = tl.maximum(i_s, lowest - ANCHORED)
        b_hi, b_mid, b_lo = split_three(load_gate(g + i_rv * K + o_gk, m))
        b_G = range_sums(step_range(o_i, o_j, i_l, lowest, ANCHORED), b_hi, b_mid, b_lo)
        b_x, b_y = step_factors(b_G, i_l, lowest, half_span, ANCHORED)
        m_pair = m_A & step_region(o_i, o_j, i_l, lowest, ANCHORED)
        sign = 1.0
        if ANCHORED:
            m_pair = m_pair & (o_i - o_j <= tl.where(i_s == lowest - 2, 0, C))
            m_pair = m_pair & (o_i - o_j >= tl.where(i_s == lowest - 1, 0, -C))
            sign = tl.where(i_s == lowest - 2, -1.0, 1.0)
            b_later = b_x
            b_x = tl.where(i_s == lowest - 2, b_y, b_later)
            b_y = tl.where(i_s == lowest - 2, b_later, b_y)
        b_k = load_normalised(p_k, k_rstd, o_rstd, m, m_t)
        b_q = load_normalised(p_q, q_rstd, o_rstd, m, m_t)
        b_ky = operand(b_y * b_k, INTRA)
        b_dkx = product(operand(tl.load(dA_kk + o_A, mask=m_pair, other=0.0), INTRA), b_ky, INTRA)
        b_dP = operand(scale * tl.load(dA_qk + o_A, mask=m_pair & (o_j > o_i), other=0.0), INTRA)
        b_dkx += product(b_dP, operand(b_y * b_q, INTRA), INTRA)
        b_dP = operand(scale * tl.load(dA_qk + o_A, mask=m_pair & (o_j < o_i), other=0.0), INTRA)
        b_dqx = product(b_dP, b_ky, INTRA)
        b_dq += b_x * b_dqx
        b_dk += b_x * b_dkx
        # Factors as they were rounded for the products: what must cancel between the two passes then does.
        b_e = operand(b_x * b_q, INTRA).to(tl.float32) * b_dqx + operand(b_x * b_k, INTRA).to(tl.float32) * b_dkx
        b_hi, b_mid, b_lo = split_three(sign * b_e)
        b_dg += range_sums(step_range(o_j, o_i, i_l, lowest, ANCHORED), b_hi, b_mid, b_lo)
    tl.store(dq + i_rv * K + o_gk, b_dq, mask=m)
    tl.store(dk + i_rv * K + o_gk, b_dk, mask=m)
    tl.store(dg + i_rv * K + o_gk, b_dg.to(dg.dtype.element_ty), mask=m)
