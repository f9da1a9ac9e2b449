"""Authority on the chunk's output o = scale (q 2^G) S + A_qk v_new, and on the gradients through states and decayed
operands.
"""

import triton
import triton.language as tl

from kda.chunk_tiles import (
    load_betas,
    load_gate,
    load_normalised,
    operand,
    product,
    range_sums,
    split_product,
    split_three,
    store_column,
)


@triton.jit(do_not_specialize=["HV"])
def kda_chunk_output_fwd_kernel(
    q_decayed,
    A_qk,
    h,
    v_new,
    o,
    rows,
    counts,
    scale,
    HV,
    K,
    V,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """o = scale (q 2^G) S + A_qk v_new, one program per (BV columns of V, chunk, value head)."""
    i_p = tl.program_id(0).to(tl.int64)
    NV = tl.cdiv(V, BV)
    i_v = i_p % NV
    i_hv = (i_p // NV) % HV
    i_c = i_p // (NV * HV)
    count = tl.load(counts + i_c)
    if count == 0:
        return
    i_rv = tl.load(rows + i_c) * HV + i_hv
    h += (i_c * HV + i_hv) * K * V
    o_t = tl.arange(0, C)
    o_v = (i_v * BV + tl.arange(0, BV)).to(tl.int32)
    m_t = o_t < count
    m_v = m_t[:, None] & (o_v < V)[None, :]
    b_o = tl.zeros([C, BV], tl.float32)
    for i_k in range(0, tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m_k = m_t[:, None] & (o_k < K)[None, :]
        m_S = (o_k < K)[:, None] & (o_v < V)[None, :]
        o_S = o_v[None, :] * K + o_k[:, None] if V_FIRST else o_k[:, None] * V + o_v[None, :]
        b_q = tl.load(q_decayed + i_rv * K + (o_t[:, None] * (HV * K) + o_k[None, :]), mask=m_k, other=0.0)
        b_S = operand(tl.load(h + o_S, mask=m_S, other=0.0), DOT)
        b_o += product(b_q, b_S, DOT)
    m_A = m_t[:, None] & (o_t[:, None] >= o_t[None, :])
    b_A = tl.load(A_qk + i_rv * C + (o_t[:, None] * (HV * C) + o_t[None, :]), mask=m_A, other=0.0)
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    b_v = tl.load(v_new + i_rv * V + o_tv, mask=m_v, other=0.0)
    b_o = b_o * scale + product(b_A, b_v, DOT)
    tl.store(o + i_rv * V + o_tv, b_o.to(o.dtype.element_ty), mask=m_v)


@triton.jit(do_not_specialize=["HV"])
def kda_chunk_output_bwd_kernel(
    A_qk,
    v_new,
    do,
    dA_qk,
    dv_local,
    rows,
    counts,
    HV,
    V,
    C: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
):
    """dA_qk = do v_new^T on and below the diagonal, and mirrored above it; dv_local = A_qk^T do.

    One program per (chunk, value head).
    """
    i_p = tl.program_id(0).to(tl.int64)
    i_hv = i_p % HV
    i_c = i_p // HV
    count = tl.load(counts + i_c)
    if count == 0:
        return
    i_rv = tl.load(rows + i_c) * HV + i_hv
    o_t = tl.arange(0, C)
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    m_t = o_t < count
    m_AT = m_t[None, :] & (o_j >= o_i)
    b_AT = tl.load(A_qk + i_rv * C + (o_j * (HV * C) + o_i), mask=m_AT, other=0.0)
    b_dA = tl.zeros([C, C], tl.float32)
    for i_v in range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        o_tv = o_i * (HV * V) + o_v[None, :]
        m_tv = m_t[:, None] & (o_v < V)[None, :]
        b_do = operand(tl.load(do + i_rv * V + o_tv, mask=m_tv, other=0.0), DOT)
        b_vT = tl.load(
            v_new + i_rv * V + (o_j * (HV * V) + o_v[:, None]), mask=m_t[None, :] & (o_v < V)[:, None], other=0.0
        )
        b_dA += product(b_do, b_vT, DOT)
        tl.store(dv_local + i_rv * V + o_tv, product(b_AT, b_do, DOT), mask=m_tv)
    m_A = m_t[:, None] & (o_i >= o_j)
    tl.store(dA_qk + i_rv * C + (o_i * (HV * C) + o_j), b_dA, mask=m_A)
    tl.store(dA_qk + i_rv * C + (o_j * (HV * C) + o_i), b_dA, mask=m_A & (o_i > o_j))


@triton.jit(do_not_specialize=["H", "HV", "total"])
def kda_chunk_inter_bwd_kernel(
    q,
    k,
    g,
    beta,
    q_rstd,
    k_rstd,
    decay,
    do,
    z,
    v_new,
    h,
    dh,
    dq,
    dk,
    dg,
    dbeta,
    rows,
    counts,
    scale,
    beta_range,
    total,
    H,
    HV,
    K,
    V,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """dq, dk (of the normalised q, k), dg `[rows, HV, K]`, fp32, and a share of dbeta `[NK, rows, HV]`, through S and
    dS alone.

    d(q 2^G) = scale do S^T, d(k 2^G) = -beta z S^T, d(k 2^(G_C - G)) = v_new dS^T, d(2^G_C) = rowsum(S dS), with z as
    in `kda_wy_bwd_kernel`; dbeta = -rowsum(k 2^G z S^T). One program per (BK columns of K, chunk, value head).
    """
    i_p = tl.program_id(0).to(tl.int64)
    NK = tl.cdiv(K, BK)
    i_k = (i_p % NK).to(tl.int32)
    i_hv = (i_p // NK) % HV
    i_c = i_p // (NK * HV)
    i_h = i_hv // (HV // H)
    i_row = tl.load(rows + i_c)
    count = tl.load(counts + i_c)
    if count == 0:
        return
    o_t = tl.arange(0, C)
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    o_k = i_k * BK + tl.arange(0, BK)
    m_t = o_t < count
    m = m_t[:, None] & (o_k < K)[None, :]
    i_rv = i_row * HV + i_hv
    i_s = (i_c * HV + i_hv) * K
    b_do_S = tl.zeros([C, BK], tl.float32)
    b_z_S = tl.zeros([C, BK], tl.float32)
    b_v_dS = tl.zeros([C, BK], tl.float32)
    b_S_dS = tl.zeros([BK], tl.float32)
    for i_v in range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        m_v = m_t[:, None] & (o_v < V)[None, :]
        m_S = (o_v < V)[:, None] & (o_k < K)[None, :]
        o_tv = o_i * (HV * V) + o_v[None, :]
        o_S = o_v[:, None] * K + o_k[None, :] if V_FIRST else o_k[None, :] * V + o_v[:, None]
        b_S = tl.load(h + i_s * V + o_S, mask=m_S, other=0.0)
        b_dS = tl.load(dh + i_s * V + o_S, mask=m_S, other=0.0)
        b_S_dS += tl.sum(b_S * b_dS, axis=0)
        b_S = operand(b_S, DOT)
        b_do_S += product(operand(tl.load(do + i_rv * V + o_tv, mask=m_v, other=0.0), DOT), b_S, DOT)
        b_z_S += split_product(tl.load(z + i_rv * V + o_tv, mask=m_v, other=0.0), b_S, DOT)
        b_v_dS += product(tl.load(v_new + i_rv * V + o_tv, mask=m_v, other=0.0), operand(b_dS, DOT), DOT)

    i_qk = (i_row * H + i_h) * K
    o_rstd = i_row * H + i_h + o_t * H
    o_qk = o_i * (H * K) + o_k[None, :]
    o_gk = o_i * (HV * K) + o_k[None, :]
    b_q = load_normalised(q + i_qk + o_qk, q_rstd, o_rstd, m, m_t)
    b_k = load_normalised(k + i_qk + o_qk, k_rstd, o_rstd, m, m_t)
    b_beta = load_betas(beta + i_rv + o_t * HV, m_t, beta_range, BETA_SIGMOID)
    b_hi, b_mid, b_lo = split_three(load_gate(g + i_rv * K + o_gk, m))
    b_dg = tl.load(decay + i_s + o_k, mask=o_k < K, other=0.0) * b_S_dS
    b_x = tl.exp2(range_sums(o_j <= o_i, b_hi, b_mid, b_lo))
    b_z_S *= b_x
    o_column = tl.arange(0, BK)[None, :]
    store_column(dbeta + i_k * total + i_rv + o_t * HV, -tl.sum(b_k * b_z_S, axis=1), m_t, o_column)
    b_dq = scale * b_x * b_do_S
    b_dk = -b_beta[:, None] * b_z_S
    b_x = tl.exp2(range_sums(o_j > o_i, b_hi, b_mid, b_lo)) * b_v_dS
    b_hi, b_mid, b_lo = split_three(b_q * b_dq + b_k * b_dk)
    b_dgs = range_sums(o_i <= o_j, b_hi, b_mid, b_lo) + b_dg[None, :]
    b_hi, b_mid, b_lo = split_three(b_k * b_x)
    b_dgs += range_sums(o_i > o_j, b_hi, b_mid, b_lo)
    tl.store(dq + i_rv * K + o_gk, b_dq, mask=m)
    tl.store(dk + i_rv * K + o_gk, b_dk + b_x, mask=m)
    tl.store(dg + i_rv * K + o_gk, b_dgs, mask=m)
