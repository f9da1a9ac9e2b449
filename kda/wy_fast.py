"""Authority on the triangular system of a chunk, R = (I + beta A_kk)^-1, w = R (beta k 2^G), u = R (beta v)."""

import triton
import triton.language as tl

from kda.chunk_tiles import load_betas, operand, split_product, split_products, store_column

# NOTE [Inverse in fp64]
# Repeated keys with beta near 2 and slow decay make R's entries alternate without shrinking, and its products with k
# cancel: there every rounding of R costs, and a series in half precision costs everything. Blocks of 16 rows are
# solved by forward substitution, then pairs of blocks are joined, [[R0, 0], [-R1 L R0, R1]], all in fp64, which is
# affordable since the joins touch only the blocks that they need. R is stored in fp32 and enters products as two
# operands, its rounding and the rest.


@triton.jit(do_not_specialize=["HV"])
def kda_solve_blocks_kernel(
    A_kk,
    beta,
    R,
    rows,
    counts,
    beta_range,
    HV,
    C: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
):
    """The 16 x 16 diagonal blocks of R = (I + diag(beta) A_kk)^-1 `[rows, HV, C]`, one program per (chunk, value head).

    Row by row: R_i = e_i - sum_{j < i} beta_i A_ij R_j.
    """
    i_p = tl.program_id(0).to(tl.int64)
    i_c = i_p // HV
    i_hv = i_p % HV
    count = tl.load(counts + i_c)
    if count == 0:
        return
    i_rv = tl.load(rows + i_c) * HV + i_hv
    A_kk += i_rv * C
    beta += i_rv
    o_b = tl.arange(0, C // 16) * 16
    o_i = tl.arange(0, 16)
    o_col = o_b[:, None] + o_i[None, :]
    b_R = tl.zeros([C // 16, 16, 16], tl.float64) + tl.where(o_i[:, None] == o_i[None, :], 1.0, 0.0)[None, :, :]
    for i in tl.static_range(1, 16):
        o_t = o_b + i
        m_t = o_t < count
        b_L = tl.load(A_kk + o_t[:, None] * (HV * C) + o_col, mask=m_t[:, None] & (o_i < i)[None, :], other=0.0)
        b_L = b_L * load_betas(beta + o_t * HV, m_t, beta_range, BETA_SIGMOID)[:, None]
        b_row = tl.sum(b_L.to(tl.float64)[:, :, None] * b_R, axis=1)
        b_R = tl.where((o_i == i)[None, :, None], b_R - b_row[:, None, :], b_R)
    o_t = o_b[:, None] + o_i[None, :]
    o_R = o_t[:, :, None] * (HV * C) + o_col[:, None, :]
    tl.store(R + i_rv * C + o_R, b_R.to(tl.float32), mask=(o_t < count)[:, :, None])


@triton.jit(do_not_specialize=["HV"])
def kda_join_blocks_kernel(
    A_kk,
    beta,
    R,
    rows,
    counts,
    beta_range,
    HV,
    C: tl.constexpr,
    S: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
):
    """The block left of the second of two diagonal blocks of S rows: R10 = -R11 (diag(beta) A_kk)10 R00.

    One program per (pair, chunk, value head).
    """
    PAIRS: tl.constexpr = C // (2 * S)
    i_p = tl.program_id(0).to(tl.int64)
    i_first = (i_p % PAIRS) * (2 * S)
    i_hv = (i_p // PAIRS) % HV
    i_c = i_p // (PAIRS * HV)
    count = tl.load(counts + i_c) - i_first - S
    if count <= 0:
        return
    i_rv = (tl.load(rows + i_c) + i_first) * HV + i_hv
    o_t = tl.arange(0, S)
    m_t = o_t < count
    i_second = S * HV * C
    R += i_rv * C + i_first
    A_kk += i_rv * C + i_first
    b_beta = load_betas(beta + i_rv + (S + o_t) * HV, m_t, beta_range, BETA_SIGMOID)
    b_LR = tl.zeros([S, S], tl.float64)
    for i in range(0, S):
        b_L = b_beta * tl.load(A_kk + i_second + o_t * (HV * C) + i, mask=m_t, other=0.0)
        b_0 = tl.load(R + i * (HV * C) + o_t, mask=o_t <= i, other=0.0)
        b_LR += b_L.to(tl.float64)[:, None] * b_0.to(tl.float64)[None, :]
    b_R = tl.zeros([S, S], tl.float64)
    for i in range(0, S):
        b_1 = tl.load(R + i_second + S + o_t * (HV * C) + i, mask=m_t & (o_t >= i), other=0.0)
        b_row = tl.sum(tl.where(o_t[:, None] == i, b_LR, 0.0), axis=0)
        b_R -= b_1.to(tl.float64)[:, None] * b_row[None, :]
    tl.store(R + i_second + o_t[:, None] * (HV * C) + o_t[None, :], b_R.to(tl.float32), mask=m_t[:, None])


@triton.jit(do_not_specialize=["HV"])
def kda_wy_fwd_kernel(
    R,
    beta,
    k_decayed,
    v,
    w,
    u,
    rows,
    counts,
    beta_range,
    HV,
    K,
    V,
    C: tl.constexpr,
    BD: tl.constexpr,
    DOT: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
):
    """w = R (beta k 2^G) `[rows, HV, K]`, u = R (beta v) `[rows, HV, V]`; beta is applied to R's columns, in fp32.

    One program per (chunk, value head).
    """
    i_p = tl.program_id(0).to(tl.int64)
    i_c = i_p // HV
    i_hv = i_p % HV
    count = tl.load(counts + i_c)
    if count == 0:
        return
    i_rv = tl.load(rows + i_c) * HV + i_hv
    o_t = tl.arange(0, C)
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    m_t = o_t < count
    m_i = m_t[:, None]
    b_R = tl.load(R + i_rv * C + o_i * (HV * C) + o_j, mask=m_i & (o_i >= o_j), other=0.0)
    b_R = b_R * load_betas(beta + i_rv + o_t * HV, m_t, beta_range, BETA_SIGMOID)[None, :]
    for i_k in range(0, tl.cdiv(K, BD)):
        o_k = i_k * BD + tl.arange(0, BD)[None, :]
        m = m_i & (o_k < K)
        b_k = tl.load(k_decayed + i_rv * K + (o_i * (HV * K) + o_k), mask=m, other=0.0)
        tl.store(w + i_rv * K + (o_i * (HV * K) + o_k), operand(split_product(b_R, b_k, DOT), DOT), mask=m)
    for i_v in range(0, tl.cdiv(V, BD)):
        o_v = i_v * BD + tl.arange(0, BD)[None, :]
        m = m_i & (o_v < V)
        b_v = operand(tl.load(v + i_rv * V + (o_i * (HV * V) + o_v), mask=m, other=0.0), DOT)
        tl.store(u + i_rv * V + (o_i * (HV * V) + o_v), split_product(b_R, b_v, DOT), mask=m)


@triton.jit(do_not_specialize=["HV"])
def kda_wy_bwd_kernel(
    R,
    beta,
    A_kk,
    v,
    v_new,
    dv_new,
    z,
    dv,
    dA_kk,
    dbeta,
    rows,
    counts,
    beta_range,
    HV,
    V,
    C: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
):
    """z = R^T dv_new, dv = beta z, dA_kk = -beta z v_new^T below the diagonal and mirrored above it, a share of dbeta.

    One program per (chunk, value head). The gradient of beta_i is z_i (v - k 2^G S - A_kk v_new)_i, without a division
    by beta; the middle term is the share of `kda_chunk_inter_bwd_kernel`. z `[rows, HV, V]` is fp32, and the same
    number in all three: they cancel.
    """
    i_p = tl.program_id(0).to(tl.int64)
    i_c = i_p // HV
    i_hv = i_p % HV
    count = tl.load(counts + i_c)
    if count == 0:
        return
    i_rv = tl.load(rows + i_c) * HV + i_hv
    o_t = tl.arange(0, C)
    o_i = o_t[:, None]
    o_j = o_t[None, :]
    m_t = o_t < count
    b_RT = tl.load(R + i_rv * C + o_j * (HV * C) + o_i, mask=m_t[None, :] & (o_i <= o_j), other=0.0)
    b_beta = load_betas(beta + i_rv + o_t * HV, m_t, beta_range, BETA_SIGMOID)
    b_zv = tl.zeros([C, C], tl.float32)
    b_dbeta = tl.zeros([C], tl.float32)
    for i_v in range(0, tl.cdiv(V, BV)):
        o_v = i_v * BV + tl.arange(0, BV)
        o_vt = o_i * (HV * V) + o_v[None, :]
        o_tv = o_j * (HV * V) + o_v[:, None]
        m = m_t[:, None] & (o_v < V)[None, :]
        m_T = m_t[None, :] & (o_v < V)[:, None]
        b_dv = tl.load(dv_new + i_rv * V + o_vt, mask=m, other=0.0)
        b_v = tl.load(v + i_rv * V + o_vt, mask=m, other=0.0).to(tl.float32)
        b_vT = tl.load(v_new + i_rv * V + o_tv, mask=m_T, other=0.0)
        b_z = split_products(b_RT, b_dv, DOT)
        b_zv += split_product(b_z, b_vT, DOT)
        tl.store(z + i_rv * V + o_vt, b_z, mask=m)
        b_dbeta += tl.sum(b_z * b_v, axis=1)
        tl.store(dv + i_rv * V + o_vt, (b_beta[:, None] * b_z).to(dv.dtype.element_ty), mask=m)
    o_A = i_rv * C + o_i * (HV * C) + o_j
    m_A = m_t[:, None] & (o_i > o_j)
    b_A = tl.load(A_kk + o_A, mask=m_A, other=0.0)
    b_dbeta -= tl.sum(tl.where(m_A, b_A * b_zv, 0.0), axis=1)
    store_column(dbeta + i_rv + o_t * HV, b_dbeta, m_t, o_j)
    b_dA = -b_beta[:, None] * b_zv
    tl.store(dA_kk + o_A, b_dA, mask=m_A)
    tl.store(dA_kk + i_rv * C + o_j * (HV * C) + o_i, b_dA, mask=m_A)
