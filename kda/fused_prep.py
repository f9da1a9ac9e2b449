"""Authority on the first kernel of the fused route: what a chunk of 16 tokens does to any state and any values."""

import triton
import triton.language as tl

from kda.chunk_intra import step_range, step_region
from kda.chunk_tiles import load_betas, operand, product, store_column
from kda.fp32_math import sigmoid_slope
from kda.fused_gate import log2_gate, range_sums_from, split_half
from kda.recurrent_kernels import L2NORM_EPS

# NOTE [Chunk as an operator]
# With R = (I + A_kk diag(b))^-1 a chunk is
#     x = v - (k 2^G) S    y = R x    o = (scale q 2^G) S + (scale A_qk b R) x    S <- 2^G_C S + (b k 2^(G_C - G))^T y
# so that a scan over the chunks needs v and five small tiles: [k; scale q] 2^G, R, scale A_qk b R, b k 2^(G_C - G) and
# 2^G_C.
# Little rounds on the way: x is v itself, to the last bit, where the state says nothing; R has a diagonal of 1, so that
# y is x where tokens share nothing; and o sees neither the rounding of y nor those of A_qk, b and R apart, as it would
# through w and u. (b y is v_new of the staged route.) Chunks have 16 rows, one warp each: no barriers between warps,
# and no joins of inverses.
#
# Where keys repeat and beta is 2, R takes differences of what is alike, and a state that nothing forgets collects what
# is wrong with it: one key for 200 tokens cost half of the state with A_kk of bf16 products and R in bf16. So A_kk is
# of tf32 products, and R is stored in two bf16 numbers, 16 bits of it.
#
# The backward pass is the adjoint of the same form, with dv for what comes back to x:
#     dv = R^T ((scale A_qk b)^T do + (b k 2^(G_C - G)) dS)     dS <- 2^G_C dS + (scale q 2^G)^T do - (k 2^G)^T dv
# and wants scale A_qk b instead of scale A_qk b R; all else is the same.

# NOTE [Shifted rows]
# With gates in [bound, 0] all pairs i > j of 16 rows fit into one product: 2^(G_i + c) scales row i and 2^(-G_j - c)
# row j, c = 8 |bound| log2(e) rounded to an integer, so that both stay within 2^+-c. The shift is where the
# accumulation of G starts and costs nothing; [k; q] 2^(G + c) is stored as it is, and the scan takes 2^c out of its
# products with S. c is a constant, so that no later row enters an earlier one's rounding. Rows i = j are computed
# apart, exactly. Without a bound c = 0, and pairs go by NOTE [Halving levels].


@triton.jit
def chunk_place(i_c, rows, counts, T, C: tl.constexpr):
    """(first row, tokens) of a chunk: from tables if the batch is packed."""
    if rows is not None:
        i_row = tl.load(rows + i_c)
        count = tl.load(counts + i_c).to(tl.int32)
    else:
        NT = tl.cdiv(T, C)
        i_t = (i_c % NT).to(tl.int32) * C
        i_row = (i_c // NT) * T + i_t
        count = tl.minimum(C, T - i_t)
    return i_row, count


@triton.jit
def diagonal_product(b_a, b_b):
    """Row sums of a b: the diagonal of a b^T, which tensor cores have at hand."""
    o_i = tl.arange(0, b_a.shape[0])
    return tl.sum(tl.where(o_i[:, None] == o_i[None, :], tl.dot(b_a, tl.trans(b_b)), 0.0), axis=1)


@triton.jit
def invert_unit_lower(p_scratch, b_L, C: tl.constexpr):
    """(I + L)^-1 of a strictly lower tile by forward substitution in fp32.

    One thread per column; rows of L reach all of them through C^2 fp32 numbers of scratch memory.
    """
    o_i = tl.arange(0, C)
    o_L = o_i[:, None] * C + o_i[None, :]
    p_L = p_scratch.to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(p_L + o_L, b_L)
    tl.debug_barrier()
    columns = ((o_i == 0).to(tl.float32),)
    for i in tl.static_range(1, C):
        b_row = (o_i == i).to(tl.float32)
        for j in tl.static_range(i):
            b_row -= tl.load(p_L + (i * C + j)) * columns[j]
        columns = columns + (b_row,)  # noqa: RUF005  Triton knows no starred expressions
    tl.debug_barrier()
    for i in tl.static_range(C):
        tl.store(p_L + (i * C + o_i), columns[i])
    tl.debug_barrier()
    b_R = tl.load(p_L + o_L)
    tl.debug_barrier()
    return b_R


@triton.jit(do_not_specialize=["T", "H", "HV"])
def kda_fused_prep_kernel(
    q,
    k,
    g,
    beta,
    A_log,
    dt_bias,
    kq_decayed,
    k_rest,
    response,
    decay,
    factors,
    rows,
    counts,
    lower_bound,
    beta_range,
    shift,
    scale,
    T,
    H,
    HV,
    K: tl.constexpr,
    C: tl.constexpr,
    BK: tl.constexpr,
    GATE: tl.constexpr,
    ANCHORED: tl.constexpr,
    L2NORM: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    SOLVED: tl.constexpr,
    FORWARD: tl.constexpr,
    ADJOINT: tl.constexpr,
):
    """The four tiles of NOTE [Chunk as an operator], by slot and value head; one program each.

    kq_decayed `[slots, HV, 2 C, K]`: k 2^(G + shift), then scale q 2^(G + shift); k_rest `[slots, HV, C, K]`:
    b k 2^(G_C - G); response `[slots, HV, TILES C, C]`: R, what its rounding left, scale A_qk b R if FORWARD, and
    scale A_qk b if ADJOINT; decay `[slots, HV, K]` fp32. factors `[B, T, HV, 4]` fp32, if ADJOINT: 1 / |q| and 1 / |k|,
    with L2NORM, beta, and its slope, with BETA_SIGMOID. GATE: none, softplus or bounded. SOLVED: the format of A_qk b
    and of R in their product, fp16 where both are known to be small.
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
    m_t = o_t < count
    # Rows past the end repeat the last one, inert by beta = 0 and gate = 0: nothing of another sequence is read.
    o_row = tl.minimum(o_t, count - 1)[:, None]
    q += (i_row * H + i_h) * K
    k += (i_row * H + i_h) * K
    g += (i_row * HV + i_hv) * K
    beta += i_row * HV + i_hv
    kq_decayed += i_p * (2 * C * K)
    k_rest += i_p * (C * K)
    TILES: tl.constexpr = 2 + FORWARD + ADJOINT
    response += i_p * (TILES * C * C)
    decay += i_p * K
    b_A = tl.load(A_log + i_hv).to(tl.float32) if A_log is not None else 0.0

    # Gates are read one step ahead, the first ones along with q and k: one wait for memory, not one per step.
    p_g = g + (o_row * (HV * K) + tl.arange(0, BK)[None, :])
    b_next = tl.load(p_g)
    o_full = o_row * (H * K) + tl.arange(0, K)[None, :]
    b_raw_k = tl.load(k + o_full, eviction_policy="evict_last")
    b_raw_q = tl.load(q + o_full, eviction_policy="evict_last")
    b_diagonal = diagonal_product(b_raw_q, b_raw_k)
    if L2NORM:
        b_k_rstd = tl.rsqrt(diagonal_product(b_raw_k, b_raw_k) + L2NORM_EPS)
        b_q_rstd = tl.rsqrt(diagonal_product(b_raw_q, b_raw_q) + L2NORM_EPS)
        b_diagonal *= b_q_rstd * b_k_rstd
    beta += tl.minimum(o_t, count - 1) * HV
    b_beta = load_betas(beta, m_t, beta_range, BETA_SIGMOID)
    if ADJOINT:
        factors += ((i_row + o_t) * HV + i_hv) * 4
        if L2NORM:
            store_column(factors, b_q_rstd, m_t, o_j)
            store_column(factors + 1, b_k_rstd, m_t, o_j)
        store_column(factors + 2, b_beta, m_t, o_j)
        if BETA_SIGMOID:
            store_column(factors + 3, beta_range * sigmoid_slope(tl.load(beta).to(tl.float32)), m_t, o_j)
    b_qk = tl.zeros([C, C], tl.float32)
    b_kk = tl.zeros([C, C], tl.float32)
    for i_k in tl.range(0, K // BK, num_stages=1):
        o_k = i_k * BK + tl.arange(0, BK)
        o_qk = o_row * (H * K) + o_k[None, :]
        b_bias = tl.load(dt_bias + i_hv * K + o_k).to(tl.float32) if dt_bias is not None else tl.zeros([BK], tl.float32)
        b_g = log2_gate(b_next, m_t[:, None], b_bias[None, :], b_A, lower_bound, GATE)
        p_g += BK
        b_next = tl.load(p_g, mask=i_k + 1 < K // BK, other=0.0)
        tl.store(decay + o_k, tl.exp2(tl.sum(b_g, axis=0)))
        b_hi, b_lo = split_half(b_g)
        b_k = tl.load(k + o_qk).to(tl.float32)
        b_q = tl.load(q + o_qk).to(tl.float32)
        if L2NORM:
            b_k *= b_k_rstd[:, None]
            b_q *= b_q_rstd[:, None]
        b_G = range_sums_from(shift, o_j <= o_i, b_hi, b_lo)
        b_x = tl.exp2(b_G)
        b_later_k = b_k * b_x
        b_later_q = b_q * b_x
        tl.store(kq_decayed + (o_i * K + o_k[None, :]), b_later_k.to(tl.bfloat16))
        tl.store(kq_decayed + ((C + o_i) * K + o_k[None, :]), (scale * b_later_q).to(tl.bfloat16))
        b_x = tl.exp2(range_sums_from(0.0, o_j > o_i, b_hi, b_lo))
        tl.store(k_rest + (o_i * K + o_k[None, :]), (b_beta[:, None] * b_k * b_x).to(tl.bfloat16))
        if ANCHORED:
            b_earlier = tl.trans(operand(b_k * tl.exp2(-b_G), "tf32"))
            b_kk += product(operand(b_later_k, "tf32"), b_earlier, "tf32")
            b_qk += product(operand(b_later_q, "tf32"), b_earlier, "tf32")
        else:
            for i_l in tl.static_range(4):
                m_l = step_region(o_i, o_j, i_l, 0, False)
                b_x = tl.exp2(range_sums_from(0.0, step_range(o_i, o_j, i_l, 0, False), b_hi, b_lo))
                b_level = operand(b_k * b_x, "tf32")
                b_kk += tl.where(m_l, product(b_level, tl.trans(b_level), "tf32"), 0.0)
                b_qk += tl.where(m_l, product(operand(b_q * b_x, "tf32"), tl.trans(b_level), "tf32"), 0.0)

    b_L = tl.where(o_i > o_j, b_kk * b_beta[None, :], 0.0)
    b_R = invert_unit_lower(response, b_L, C)
    b_qk = tl.where(o_i == o_j, b_diagonal[:, None], tl.where(o_i > o_j, b_qk, 0.0)) * b_beta[None, :]
    b_rounded = b_R.to(tl.bfloat16)
    tl.store(response + (o_i * C + o_j), b_rounded)
    tl.store(response + ((C + o_i) * C + o_j), (b_R - b_rounded.to(tl.float32)).to(tl.bfloat16))
    if FORWARD:
        b_qkR = product(operand(b_qk, SOLVED), operand(b_R, SOLVED), SOLVED)
        tl.store(response + ((2 * C + o_i) * C + o_j), (scale * b_qkR).to(tl.bfloat16))
    if ADJOINT:
        tl.store(response + (((TILES - 1) * C + o_i) * C + o_j), (scale * b_qk).to(tl.bfloat16))
