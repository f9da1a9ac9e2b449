"""Authority on the last backward kernel of the fused route: gradients of q, k, g and beta from states."""

import triton
import triton.language as tl

from kda.chunk_intra import step_factors, step_range, step_region
from kda.chunk_tiles import load_betas, range_sums, split_three, store_column
from kda.fused_gate import log2_gate, range_sums_from, split_half
from kda.fused_prep import chunk_place
from kda.recurrent_kernels import L2NORM_EPS

# NOTE [Chunks apart]
# Given S before and dS behind a chunk, y and dv of its rows, all else is the chunk's own, and chunks go in parallel:
#     N = scale do y^T, i >= j    M = -dv y^T, i > j    d_ij = 2^(G_i - G_j)
#     dq_i = 2^G_i scale S do_i + sum_j N_ij d_ij b_j k_j
#     dk_i = b_i w_i - 2^G_i S dv_i + sum_j M_ij d_ij b_j k_j
#     w_j = 2^(G_C - G_j) dS y_j + sum_i d_ij (N_ij q_i + M_ij k_i)    dbeta_j = k_j . w_j
# b is among the earlier keys, as it is in the forward pass, so that dbeta needs neither A_qk nor A_kk, and no division.
# A gate's gradient is the sum of q dq, k dk and b k w over the ranges that contain it, as in NOTE [Ranges of gates],
# and rowsum(S dS) over the whole chunk.


@triton.jit
def normalise(b_x, L2NORM: tl.constexpr):
    """(x / n, 1 / n) of rows with n = sqrt(sum x^2 + 1e-6), or (x, 1)."""
    b_x = b_x.to(tl.float32)
    b_rstd = tl.full([b_x.shape[0]], 1.0, tl.float32)
    if L2NORM:
        b_rstd = tl.rsqrt(tl.sum(b_x * b_x, axis=1) + L2NORM_EPS)
        b_x *= b_rstd[:, None]
    return b_x, b_rstd


@triton.jit
def store_gradient(p_x, b_dx, b_x, b_rstd, m_t, NORMALISED: tl.constexpr):
    """Rows of dx, from those of the normalised x if it was."""
    if NORMALISED:
        b_dx = (b_dx - b_x * tl.sum(b_x * b_dx, axis=1)[:, None]) * b_rstd[:, None]
    tl.store(p_x, b_dx.to(p_x.dtype.element_ty), mask=m_t[:, None])


@triton.jit
def range_adjoint(m, b_e):
    """Row i: the sum of the rows j with m[i, j]; nearly all digits count, since anchored pairs must cancel."""
    b_hi, b_mid, b_lo = split_three(b_e)
    return range_sums(m, b_hi, b_mid, b_lo)


@triton.jit
def pairs_of_step(b_q, b_k, b_beta, b_N, b_M, b_hi, b_lo, half_span, i_l, lowest, ANCHORED: tl.constexpr):
    """What the pairs of a step of NOTE [Steps] add to dq, dk, w and dg.

    Factors enter dg as they were rounded for the products: what must cancel between the tokens of anchored pairs does.
    """
    C: tl.constexpr = b_q.shape[0]
    o_i = tl.arange(0, C)[:, None]
    o_j = tl.arange(0, C)[None, :]
    m_pair = step_region(o_i, o_j, i_l, lowest, ANCHORED)
    b_N = tl.where(m_pair, b_N, 0.0)
    b_M = tl.where(m_pair, b_M, 0.0)
    b_G = range_sums_from(0.0, step_range(o_i, o_j, i_l, lowest, ANCHORED), b_hi, b_lo)
    b_later, b_earlier = step_factors(b_G, i_l, lowest, half_span, ANCHORED)
    b_qx = (b_q * b_later).to(tl.bfloat16)
    if ANCHORED:
        b_kx = (b_k * b_later).to(tl.bfloat16)
        b_bk = (b_beta[:, None] * b_k * b_earlier).to(tl.bfloat16)
        b_dqx = tl.dot(b_N, b_bk)
        b_dkx = tl.dot(b_M, b_bk)
        b_w = tl.dot(tl.trans(b_N), b_qx) + tl.dot(tl.trans(b_M), b_kx)
        b_e = b_qx.to(tl.float32) * b_dqx + b_kx.to(tl.float32) * b_dkx - b_bk.to(tl.float32) * b_w
        b_dk = b_later * b_dkx
        b_w *= b_earlier
    else:
        # One tile: the odd blocks hold the later rows, the even ones the earlier, with their b.
        m_later = (((o_i >> i_l) & 1) == 1) & (tl.zeros_like(b_k) == 0.0)
        b_kx = (tl.where(m_later, b_k, b_beta[:, None] * b_k) * b_later).to(tl.bfloat16)
        b_dqx = tl.dot(b_N, b_kx)
        b_dkx = tl.dot(b_M + tl.trans(b_M), b_kx) + tl.dot(tl.trans(b_N), b_qx)
        b_e = b_qx.to(tl.float32) * b_dqx + b_kx.to(tl.float32) * b_dkx
        b_dkx *= b_later
        b_dk = tl.where(m_later, b_dkx, 0.0)
        b_w = tl.where(m_later, 0.0, b_dkx)
    b_dg = range_adjoint(step_range(o_j, o_i, i_l, lowest, ANCHORED), b_e)
    return b_later * b_dqx, b_dk, b_w, b_dg


@triton.jit(do_not_specialize=["T", "H", "HV"])
def kda_fused_chunk_bwd_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    y,
    do,
    dv,
    states,
    dstates,
    dq,
    dk,
    dg,
    dbeta,
    rows,
    counts,
    lower_bound,
    beta_range,
    half_span,
    scale,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    GATE: tl.constexpr,
    ANCHORED: tl.constexpr,
    LOWEST: tl.constexpr,
    LEVELS: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq, dk `[rows, HV, K]`, dg of the activated gate and dbeta: NOTE [Chunks apart]; one program per chunk and head.

    SHARED: several value heads share a query head, whose dq and dk are summed, and taken through l2norm, elsewhere.
    """
    i_p = tl.program_id(0).to(tl.int64)
    i_hv = (i_p % HV).to(tl.int32)
    i_h = i_hv // (HV // H)
    i_row, count = chunk_place(i_p // HV, rows, counts, T, C)
    if count == 0:
        return
    o_t = tl.arange(0, C)
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    o_k = tl.arange(0, K)
    m_t = o_t < count
    # Rows past the end repeat the last one, inert by beta = 0, gate = 0, y = 0, do = 0 and dv = 0.
    o_row = tl.minimum(o_t, count - 1)[:, None]
    o_qk = o_row * (H * K) + o_k[None, :]
    o_tv = o_i * (HV * V) + tl.arange(0, BV)[None, :]
    o_S = tl.arange(0, BV)[:, None] * K + o_k[None, :]
    i_rv = i_row * HV + i_hv
    q += (i_row * H + i_h) * K
    k += (i_row * H + i_h) * K
    g += i_rv * K
    b_g = tl.load(g + o_row * (HV * K) + o_k[None, :])
    b_q = tl.load(q + o_qk)
    b_k = tl.load(k + o_qk)

    b_N = tl.zeros([C, C], tl.float32)
    b_M = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([C, K], tl.float32)
    b_dk = tl.zeros([C, K], tl.float32)
    b_w = tl.zeros([C, K], tl.float32)
    b_SdS = tl.zeros([BV, K], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_y = tl.load(y + i_rv * V + i_v + o_tv, mask=m_t[:, None], other=0.0)
        b_do = tl.load(do + i_rv * V + i_v + o_tv, mask=m_t[:, None], other=0.0)
        b_dv = tl.load(dv + i_rv * V + i_v + o_tv, mask=m_t[:, None], other=0.0)
        b_S = tl.load(states + (i_p * V + i_v) * K + o_S)
        b_dS = tl.load(dstates + (i_p * V + i_v) * K + o_S)
        b_N += tl.dot(b_do, tl.trans(b_y))
        b_M += tl.dot(b_dv, tl.trans(b_y))
        b_dq += tl.dot(b_do, b_S)
        b_dk += tl.dot(b_dv, b_S)
        b_w += tl.dot(b_y, b_dS)
        b_SdS += b_S.to(tl.float32) * b_dS.to(tl.float32)

    b_A = tl.load(A_log + i_hv).to(tl.float32) if A_log is not None else 0.0
    b_bias = tl.load(dt_bias + i_hv * K + o_k).to(tl.float32) if dt_bias is not None else tl.zeros([K], tl.float32)
    b_g = log2_gate(b_g, m_t, b_bias, b_A, lower_bound, GATE)
    b_hi, b_lo = split_half(b_g)
    b_q, b_q_rstd = normalise(b_q, L2NORM)
    b_k, b_k_rstd = normalise(b_k, L2NORM)
    b_beta = load_betas(beta + i_rv + o_t * HV, m_t, beta_range, BETA_SIGMOID)

    b_x = tl.exp2(range_sums_from(0.0, o_j <= o_i, b_hi, b_lo))
    b_dq *= scale * b_x
    b_dk *= -b_x
    b_w *= tl.exp2(range_sums_from(0.0, o_j > o_i, b_hi, b_lo))
    b_dg = range_adjoint(o_i <= o_j, b_q * b_dq + b_k * b_dk)
    b_dg += range_adjoint(o_i > o_j, b_beta[:, None] * b_k * b_w)
    b_dg += (tl.exp2(tl.sum(b_g, axis=0)) * tl.sum(b_SdS, axis=0))[None, :]

    b_N *= scale
    b_diagonal = tl.sum(tl.where(o_i == o_j, b_N, 0.0), axis=1)[:, None]
    b_dq += b_diagonal * b_beta[:, None] * b_k
    b_w += b_diagonal * b_q
    b_N16 = tl.where(o_i > o_j, b_N, 0.0).to(tl.bfloat16)
    b_M16 = tl.where(o_i > o_j, -b_M, 0.0).to(tl.bfloat16)
    for i_l in tl.static_range(LOWEST - ANCHORED, LEVELS):
        b_dqs, b_dks, b_ws, b_dgs = pairs_of_step(
            b_q, b_k, b_beta, b_N16, b_M16, b_hi, b_lo, half_span, i_l, LOWEST, ANCHORED and i_l < LOWEST
        )
        b_dq += b_dqs
        b_dk += b_dks
        b_w += b_ws
        b_dg += b_dgs
    b_dk += b_beta[:, None] * b_w

    store_column(dbeta + i_rv + o_t * HV, tl.sum(b_k * b_w, axis=1), m_t, o_k[None, :])
    tl.store(dg + i_rv * K + o_i * (HV * K) + o_k[None, :], b_dg.to(dg.dtype.element_ty), mask=m_t[:, None])
    o_x = i_rv * K + o_i * (HV * K) + o_k[None, :]
    store_gradient(dq + o_x, b_dq, b_q, b_q_rstd, m_t, L2NORM and not SHARED)
    store_gradient(dk + o_x, b_dk, b_k, b_k_rstd, m_t, L2NORM and not SHARED)
