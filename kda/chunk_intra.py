"""Authority on what tokens of one chunk do to each other: A_qk and A_kk, and operands decayed to its borders."""

import triton
import triton.language as tl

from kda.chunk_tiles import load_gate, load_normalised, operand, product, range_sums, split_three

# NOTE [Anchored block]
# With gates in [bound, 0] all pairs i > j of a block of 16 rows fit into one product: 2^(G_i - G_0 + c) scales row i
# and 2^(G_0 - G_j - c) row j, G_0 the cumulative gate of the block's first row and c half of the widest span, 15/2
# |bound| log2(e), rounded so that 2^c is exact. Both factors stay within 2^+-c, and both c and the anchor are known
# to every row before it is reached, so that no later row enters an earlier one's rounding. Rows i = j are computed
# apart: exactly, and without a gradient into the gate.

# NOTE [Steps]
# Kernels go through the pairs of a chunk in steps: the halving levels from `lowest` up, and with bounded gates one
# step below them, for the pairs of each block of 2^lowest rows by its anchor. Steps differ in the range of a row, the
# factors and the region of pairs. The loop over them is one at run time: unrolled, the masks of all steps would be
# kept in registers at once.


@triton.jit
def step_range(o_i, o_j, i_l, lowest, ANCHORED: tl.constexpr):
    """m[i, j]: gate j is in the range of row i at step i_l.

    At a level: from the border of its pair of blocks of 2^i_l rows, up to row i of the odd block or behind row i of the
    even one. At the anchored step: behind the first row of the block of 2^lowest rows, up to row i.
    """
    size = 1 << i_l
    b_odd = (o_i >> i_l) & 1
    first = -1
    if ANCHORED:
        size = tl.where(i_l < lowest, 2 * size, size)
        b_odd = tl.where(i_l < lowest, 1, b_odd)
        first = tl.where(i_l < lowest, 0, first)
    return ((o_i ^ o_j) < size) & ((b_odd == 1) == (o_j <= o_i)) & ((o_j & (size - 1)) != first)


@triton.jit
def step_region(o_i, o_j, i_l, lowest, ANCHORED: tl.constexpr):
    """m[i, j]: i > j or j > i is a pair of step i_l.

    The highest bit in which two rows differ is the logarithm of the size of the blocks that part them.
    """
    least = 1 << i_l
    if ANCHORED:
        least = tl.where(i_l < lowest, 1, least)
    return ((o_i ^ o_j) >= least) & ((o_i ^ o_j) < (2 << i_l))


@triton.jit
def step_factors(b_G, i_l, lowest, half_span, ANCHORED: tl.constexpr):
    """What scales a row of step i_l as the later, and as the earlier token of a pair; b_G: the sums over its range."""
    b_later = tl.exp2(b_G)
    b_earlier = b_later
    if ANCHORED:
        b_later *= tl.where(i_l < lowest, half_span, 1.0)
        b_earlier = tl.where(i_l < lowest, tl.exp2(-b_G) * (1.0 / half_span), b_earlier)
    return b_later, b_earlier


@triton.jit(do_not_specialize=["H", "HV"])
def kda_chunk_decay_fwd_kernel(
    q,
    k,
    g,
    q_rstd,
    k_rstd,
    q_decayed,
    k_decayed,
    k_rest,
    decay,
    rows,
    counts,
    H,
    HV,
    K,
    C: tl.constexpr,
    BK: tl.constexpr,
    DOT: tl.constexpr,
):
    """q 2^G, k 2^G, k 2^(G_C - G) `[rows, HV, K]` and 2^G_C `[slots, HV, K]`, G the cumulative log2 gate of the chunk.

    One program per (BK columns of K, chunk, value head).
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
    i_gk = (i_row * HV + i_hv) * K
    i_qk = (i_row * H + i_h) * K
    o_gk = o_i * (HV * K) + o_k[None, :]
    o_qk = o_i * (H * K) + o_k[None, :]
    o_rstd = i_row * H + i_h + o_t * H
    b_g = load_gate(g + i_gk + o_gk, m)
    tl.store(decay + (i_c * HV + i_hv) * K + o_k, tl.exp2(tl.sum(b_g, axis=0)), mask=o_k < K)
    b_hi, b_mid, b_lo = split_three(b_g)
    b_q = load_normalised(q + i_qk + o_qk, q_rstd, o_rstd, m, m_t)
    b_k = load_normalised(k + i_qk + o_qk, k_rstd, o_rstd, m, m_t)
    b_x = tl.exp2(range_sums(o_j <= o_i, b_hi, b_mid, b_lo))
    tl.store(q_decayed + i_gk + o_gk, operand(b_q * b_x, DOT), mask=m)
    tl.store(k_decayed + i_gk + o_gk, operand(b_k * b_x, DOT), mask=m)
    b_x = tl.exp2(range_sums(o_j > o_i, b_hi, b_mid, b_lo))
    tl.store(k_rest + i_gk + o_gk, operand(b_k * b_x, DOT), mask=m)


@triton.jit(do_not_specialize=["H", "HV", "lowest"])
def kda_chunk_intra_fwd_kernel(
    q,
    k,
    g,
    q_rstd,
    k_rstd,
    A_qk,
    A_kk,
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
    DOT: tl.constexpr,
    INTRA: tl.constexpr,
):
    """A_qk[i, j] = scale sum_k q_i k_j 2^(G_i - G_j), i >= j, and A_kk, the same of k and k without scale, i > j.

    One program per (chunk, value head). A_qk, A_kk `[rows, HV, C]`, undefined above the diagonal.
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
    i_rv = i_row * HV + i_hv
    q += (i_row * H + i_h) * K
    k += (i_row * H + i_h) * K
    g += i_rv * K
    A_qk += i_rv * C
    A_kk += i_rv * C
    o_A = o_i * (HV * C) + o_j
    o_rstd = i_row * H + i_h + o_t * H

    b_diagonal = tl.zeros([C], tl.float32)
    for i_k in range(0, tl.cdiv(K, BK)):
        o_k = i_k * BK + tl.arange(0, BK)
        m = m_t[:, None] & (o_k < K)[None, :]
        b_q = load_normalised(q + o_i * (H * K) + o_k[None, :], q_rstd, o_rstd, m, m_t)
        b_k = load_normalised(k + o_i * (H * K) + o_k[None, :], k_rstd, o_rstd, m, m_t)
        b_diagonal += tl.sum(b_q * b_k, axis=1)
    tl.store(A_qk + o_t * (HV * C + 1), operand(b_diagonal * scale, DOT), mask=m_t)

    for i_l in range(lowest - ANCHORED, LEVELS):
        b_qk = tl.zeros([C, C], tl.float32)
        b_kk = tl.zeros([C, C], tl.float32)
        for i_k in range(0, tl.cdiv(K, BK)):
            o_k = i_k * BK + tl.arange(0, BK)[None, :]
            m = m_t[:, None] & (o_k < K)
            b_hi, b_mid, b_lo = split_three(load_gate(g + o_i * (HV * K) + o_k, m))
            b_G = range_sums(step_range(o_i, o_j, i_l, lowest, ANCHORED), b_hi, b_mid, b_lo)
            b_later, b_earlier = step_factors(b_G, i_l, lowest, half_span, ANCHORED)
            b_k = load_normalised(k + o_i * (H * K) + o_k, k_rstd, o_rstd, m, m_t)
            b_kT = tl.trans(operand(b_earlier * b_k, INTRA))
            b_kk += product(operand(b_later * b_k, INTRA), b_kT, INTRA)
            b_q = load_normalised(q + o_i * (H * K) + o_k, q_rstd, o_rstd, m, m_t)
            b_qk += product(operand(b_later * b_q, INTRA), b_kT, INTRA)
        m_A = m_t[:, None] & (o_j < o_i) & step_region(o_i, o_j, i_l, lowest, ANCHORED)
        tl.store(A_qk + o_A, operand(b_qk * scale, DOT), mask=m_A)
        tl.store(A_kk + o_A, b_kk, mask=m_A)
