"""Authority on the last backward kernel of the fused route: gradients of q, k, g and beta from states."""

import triton
import triton.language as tl

from kda.chunk_intra import step_factors, step_range, step_region
from kda.chunk_tiles import split_three
from kda.fused_gate import fast_gate_adjoint, log2_gate, split_half
from kda.fused_prep import chunk_place

# NOTE [Chunks apart]
# Given S before and dS behind a chunk, y and dv of its rows, all else is the chunk's own, and chunks go in parallel:
#     N = scale do y^T, i >= j    M = -dv y^T, i > j    d_ij = 2^(G_i - G_j)
#     dq_i = 2^G_i scale S do_i + sum_j N_ij d_ij b_j k_j
#     dk_i = b_i w_i - 2^G_i S dv_i + sum_j M_ij d_ij b_j k_j
#     w_j = 2^(G_C - G_j) dS y_j + sum_i d_ij (N_ij q_i + M_ij k_i)    dbeta_j = k_j . w_j
# b is among the earlier keys, as it is in the forward pass, so that dbeta needs neither A_qk nor A_kk, and no division.
# A gate's gradient is the sum of q dq, k dk and b k w over the ranges that contain it, as in NOTE [Ranges of gates],
# and rowsum(S dS) over the whole chunk.

# NOTE [Channels as rows]
# Tiles of q, k, g and their gradients are held transposed, [K, C], as the states of the scans are: a tile of results is
# the left operand of the next product as it lies in registers, the right ones are [C, C], and what is summed or scaled
# by channel or token needs little or no exchange between threads. Every thread holds about a dozen tiles, so a chunk's
# registers set how many chunks a multiprocessor works on.
#
# On Hopper the products are warp-group ones, and asynchronous. Where all operands of one are buffers of a pipelined
# loop, Triton lets it run on into the next iteration; but buffers that something else reads too have no spare copy for
# that, and the next loads overwrite them. Selecting the rows of y, do and dv between load and product takes these
# operands through registers: then every product is waited for, and `harness.ahead` sees that it is.


@triton.jit
def store_gradient(p_x, b_dx, b_x, scale, unscale, b_rstd, m_t, NORMALISED: tl.constexpr):
    """Columns of the gradient of a row, from that of x, scale times it; NORMALISED: scale rstd times it, a unit row."""
    b_scale = scale + tl.zeros_like(b_rstd)
    if NORMALISED:
        b_dx -= b_x * (tl.sum(b_x * b_dx, axis=0) * unscale * unscale)[None, :]
        b_scale *= b_rstd
    tl.store(p_x, (b_dx * b_scale[None, :]).to(p_x.dtype.element_ty), mask=m_t[None, :])


@triton.jit
def range_exponents(b_hi, b_lo, m):
    """Column i: the sum of the columns j with m[j, i] of a tile that is split in two."""
    b_m = m.to(tl.float16)
    return tl.dot(b_hi, b_m, tl.dot(b_lo, b_m))


@triton.jit
def range_adjoint(b_dg, b_e, m):
    """Adds to column j the columns i with m[i, j]; nearly all digits count, since anchored pairs must cancel."""
    b_m = m.to(tl.bfloat16)
    b_hi, b_mid, b_lo = split_three(b_e)
    return tl.dot(b_hi, b_m, tl.dot(b_mid, b_m, tl.dot(b_lo, b_m, b_dg)))


@triton.jit
def pairs_of_step(
    b_dq, b_dk, b_w, b_dg, b_q, b_k, b_beta, b_N, b_M, b_hi, b_lo, half_span, i_l, lowest, ANCHORED: tl.constexpr
):
    """(dq, dk, w, dg) with what the pairs of a step of NOTE [Steps] add to them.

    Factors enter dg as they were rounded for the products: what must cancel between the tokens of anchored pairs does.
    """
    C: tl.constexpr = b_q.shape[1]
    o_i = tl.arange(0, C)[:, None]
    o_j = tl.arange(0, C)[None, :]
    m_pair = step_region(o_i, o_j, i_l, lowest, ANCHORED)
    b_N = tl.where(m_pair, b_N, 0.0)
    b_M = tl.where(m_pair, b_M, 0.0)
    b_G = range_exponents(b_hi, b_lo, step_range(o_j, o_i, i_l, lowest, ANCHORED))
    b_later, b_earlier = step_factors(b_G, i_l, lowest, half_span, ANCHORED)
    b_qx = (b_q * b_later).to(tl.bfloat16)
    if ANCHORED:
        b_kx = (b_k * b_later).to(tl.bfloat16)
        b_bk = (b_beta[None, :] * b_k * b_earlier).to(tl.bfloat16)
    else:
        # One tile: the odd blocks hold the later tokens, the even ones the earlier, with their b.
        b_kx = (tl.where(((o_j >> i_l) & 1) == 1, 1.0, b_beta[None, :]) * b_k * b_later).to(tl.bfloat16)
        b_bk = b_kx
    b_dx = tl.dot(b_bk, tl.trans(b_N))
    b_dq += b_later * b_dx
    b_e = b_qx.to(tl.float32) * b_dx
    b_dx = tl.dot(b_bk, tl.trans(b_M))
    b_dk += b_later * b_dx
    b_e += b_kx.to(tl.float32) * b_dx
    b_dx = tl.dot(b_qx, b_N, tl.dot(b_kx, b_M))
    b_w += b_earlier * b_dx
    b_dx *= b_bk.to(tl.float32)
    b_e = b_e - b_dx if ANCHORED else b_e + b_dx
    b_dg = range_adjoint(b_dg, b_e, step_range(o_i, o_j, i_l, lowest, ANCHORED))
    return b_dq, b_dk, b_w, b_dg


@triton.jit(do_not_specialize=["T", "H", "HV"])
def kda_fused_chunk_bwd_kernel(
    q,
    k,
    g,
    factors,
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
    dA_log,
    ddt_bias,
    rows,
    counts,
    lower_bound,
    half_span,
    scale,
    unscale,
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
    SHARED: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dq, dk, dg `[rows, HV, K]` and dbeta of the activated beta: NOTE [Chunks apart]; one program per chunk and head.

    factors: those of `kda_fused_prep_kernel`. dA_log, ddt_bias `[slots, HV, K]` fp32, or None: a chunk's part of the
    gradients of A_log, by channel, and of dt_bias. unscale: 1 / scale, or 0 where that is 0.
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
    o_row = tl.minimum(o_t, count - 1)[None, :]
    o_qk = o_k[:, None] + o_row * (H * K)
    i_rv = i_row * HV + i_hv
    o_tv = i_rv * V + tl.minimum(o_i, count - 1) * (HV * V) + tl.arange(0, BV)[None, :]
    o_S = tl.arange(0, BV)[:, None] * K + o_k[None, :]
    q += (i_row * H + i_h) * K
    k += (i_row * H + i_h) * K
    b_g = tl.load(g + i_rv * K + o_k[:, None] + o_row * (HV * K))
    b_q = tl.load(q + o_qk)
    b_k = tl.load(k + o_qk)
    factors += (i_rv + o_t * HV) * 4
    b_q_rstd = tl.load(factors, mask=m_t, other=0.0) if L2NORM else tl.full([C], 1.0, tl.float32)
    b_k_rstd = tl.load(factors + 1, mask=m_t, other=0.0) if L2NORM else tl.full([C], 1.0, tl.float32)
    b_beta = tl.load(factors + 2, mask=m_t, other=0.0)

    b_N = tl.zeros([C, C], tl.float32)
    b_M = tl.zeros([C, C], tl.float32)
    b_dq = tl.zeros([K, C], tl.float32)
    b_dk = tl.zeros([K, C], tl.float32)
    b_w = tl.zeros([K, C], tl.float32)
    b_SdS = tl.zeros([BV, K], tl.float32)
    for i_v in tl.range(0, V, BV, num_stages=STAGES):
        b_y = tl.where(m_t[:, None], tl.load(y + i_v + o_tv), 0.0)
        b_do = tl.where(m_t[:, None], tl.load(do + i_v + o_tv), 0.0)
        b_dv = tl.where(m_t[:, None], tl.load(dv + i_v + o_tv), 0.0)
        b_S = tl.load(states + (i_p * V + i_v) * K + o_S)
        b_dS = tl.load(dstates + (i_p * V + i_v) * K + o_S)
        b_N = tl.dot(b_do, tl.trans(b_y), b_N)
        b_M = tl.dot(b_dv, tl.trans(b_y), b_M)
        b_dq = tl.dot(tl.trans(b_S), tl.trans(b_do), b_dq)
        b_dk = tl.dot(tl.trans(b_S), tl.trans(b_dv), b_dk)
        b_w = tl.dot(tl.trans(b_dS), tl.trans(b_y), b_w)
        b_SdS += b_S.to(tl.float32) * b_dS.to(tl.float32)

    b_identity = (o_i == o_j).to(tl.bfloat16)
    b_A = tl.load(A_log + i_hv).to(tl.float32) if A_log is not None else 0.0
    b_bias = tl.load(dt_bias + i_hv * K + o_k).to(tl.float32) if dt_bias is not None else tl.zeros([K], tl.float32)
    b_hi, b_lo = split_half(log2_gate(b_g, m_t[None, :], b_bias[:, None], b_A, lower_bound, GATE))
    # A product with I leaves q and k as they are, and where the other products have their results.
    b_q = tl.dot(b_q, b_identity) * (scale * b_q_rstd)[None, :]
    b_k = tl.dot(b_k, b_identity) * b_k_rstd[None, :]

    b_x = tl.exp2(range_exponents(b_hi, b_lo, o_i <= o_j))
    b_dq *= b_x
    b_dk *= b_x * -1.0
    b_w *= tl.exp2(range_exponents(b_hi, b_lo, o_i > o_j))
    b_decay = tl.sum(tl.where(o_j == C - 1, b_x, 0.0), axis=1)
    b_dg = tl.zeros([K, C], tl.float32) + (b_decay * tl.sum(b_SdS, axis=0))[:, None]
    b_dg = range_adjoint(b_dg, b_q * b_dq + b_k * b_dk, o_i >= o_j)
    b_dg = range_adjoint(b_dg, b_beta[None, :] * b_k * b_w, o_i < o_j)

    b_diagonal = tl.sum(tl.where(o_i == o_j, b_N, 0.0), axis=0)
    b_dq += (b_diagonal * b_beta)[None, :] * b_k
    b_w += b_diagonal[None, :] * b_q
    b_N16 = tl.where(o_i > o_j, b_N, 0.0).to(tl.bfloat16)
    b_M16 = tl.where(o_i > o_j, -b_M, 0.0).to(tl.bfloat16)
    if ANCHORED:
        b_dq, b_dk, b_w, b_dg = pairs_of_step(
            b_dq, b_dk, b_w, b_dg, b_q, b_k, b_beta, b_N16, b_M16, b_hi, b_lo, half_span, LOWEST - 1, LOWEST, True
        )
    for i_l in range(LOWEST, LEVELS):
        b_dq, b_dk, b_w, b_dg = pairs_of_step(
            b_dq, b_dk, b_w, b_dg, b_q, b_k, b_beta, b_N16, b_M16, b_hi, b_lo, half_span, i_l, LOWEST, False
        )
    b_dk += b_beta[None, :] * b_w

    tl.store(dbeta + i_rv + o_t * HV, tl.sum(b_k * b_w, axis=0), mask=m_t)
    o_x = i_rv * K + o_k[:, None] + o_j * (HV * K)
    b_dg = tl.where(m_t[None, :], b_dg, 0.0)
    if GATE != "none":
        b_z = b_g.to(tl.float32) + b_bias[:, None]
        b_dg, b_dA = fast_gate_adjoint(b_dg, b_z, b_A, lower_bound, GATE)
        if dA_log is not None:
            tl.store(dA_log + i_p * K + o_k, tl.sum(b_dA, axis=1))
        if ddt_bias is not None:
            tl.store(ddt_bias + i_p * K + o_k, tl.sum(b_dg, axis=1))
    tl.store(dg + o_x, b_dg.to(dg.dtype.element_ty), mask=m_t[None, :])
    store_gradient(dq + o_x, b_dq, b_q, scale, unscale, b_q_rstd, m_t, L2NORM and not SHARED)
    store_gradient(dk + o_x, b_dk, b_k, 1.0, 1.0, b_k_rstd, m_t, L2NORM and not SHARED)
