"""Authority on the recurrence over chunks: the fp32 state from each chunk to the next, and its gradient back."""

import triton
import triton.language as tl

from kda.chunk_tiles import operand, product
from kda.recurrent_kernels import decay_state

# NOTE [Halves of a state]
# A state of more than 128 rows is two tiles of BK rows, b_S and b_S1. As one tile of 256 rows its products had 16 steps
# each; with 16 or 32 columns Triton 3.6 and its ptxas made kernels of that, with 4 and with 8 warps, whose warp-group
# products read beyond the shared memory of an H200: memcheck shows it, at offsets that no address of the PTX has. What
# has 128 rows is the same code as for K = 128.


@triton.jit
def second_half(o_S, o_k, m_v, K, V, BK: tl.constexpr, V_FIRST: tl.constexpr):
    """Rows of K, which of them there are, and mask and offsets of the second tile of a state."""
    o_k1 = BK + o_k
    m_k1 = o_k1 < K
    return o_k1, m_k1, m_k1[:, None] & m_v[None, :], o_S + (BK if V_FIRST else BK * V)


@triton.jit
def load_state(p_S, o_S, m_S):
    """A tile of a state, fp32; 0 where there is none."""
    return tl.load(p_S + o_S, mask=m_S, other=0.0).to(tl.float32)


@triton.jit
def times_state(p_x, o_tk, m_tk, b_S, DOT: tl.constexpr):
    """x S of rows x `[C, BK]`."""
    return product(tl.load(p_x + o_tk, mask=m_tk, other=0.0), operand(b_S, DOT), DOT)


@triton.jit
def next_state(b_S, b_v, p_k, p_a, o_kt, m_kt, o_k, m_k, DOT: tl.constexpr):
    """a S + k^T v of rows k `[C, BK]`, read as columns."""
    b_k = tl.load(p_k + o_kt, mask=m_kt, other=0.0)
    return decay_state(b_S, tl.load(p_a + o_k, mask=m_k, other=0.0)) + product(b_k, b_v, DOT)


@triton.jit
def earlier_state(b_dS, b_do, b_dv, p_q, p_w, p_a, scale, o_kt, m_kt, o_k, m_k, DOT: tl.constexpr):
    """a dS + scale q^T do - w^T dv of rows q and w `[C, BK]`, read as columns."""
    b_q = tl.load(p_q + o_kt, mask=m_kt, other=0.0)
    b_w = tl.load(p_w + o_kt, mask=m_kt, other=0.0)
    b_a = tl.load(p_a + o_k, mask=m_k, other=0.0)
    return decay_state(b_dS, b_a) + scale * product(b_q, b_do, DOT) - product(b_w, b_dv, DOT)


@triton.jit(do_not_specialize=["HV"])
def kda_chunk_state_fwd_kernel(
    w,
    u,
    k_rest,
    decay,
    h0,
    h,
    v_new,
    ht,
    offsets,
    slots_of,
    HV,
    K,
    V,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    V_FIRST: tl.constexpr,
    HALVES: tl.constexpr,
):
    """v_new = u - w S;  S <- 2^G_C S + (k 2^(G_C - G))^T v_new, chunk after chunk.

    One program per (sequence, value head, BV columns of V). h `[slots, HV, K, V]`: S before each chunk, fp32; v_new
    `[rows, HV, V]`, an operand from here on; h0 and ht `[N, HV, K, V]` may be None; K and V are swapped with V_FIRST.
    HALVES: see NOTE [Halves of a state].
    """
    NV = tl.cdiv(V, BV)
    i_p = tl.program_id(0).to(tl.int64)
    i_v = i_p % NV
    i_hv = (i_p // NV) % HV
    i_n = i_p // (NV * HV)
    i_bos = tl.load(offsets + i_n)
    length = tl.load(offsets + i_n + 1) - i_bos
    i_slot = tl.load(slots_of + i_n)
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV)).to(tl.int32)
    m_k = o_k < K
    m_v = o_v < V
    m_S = m_k[:, None] & m_v[None, :]
    o_S = o_v[None, :] * K + o_k[:, None] if V_FIRST else o_k[:, None] * V + o_v[None, :]
    o_tk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_kt = o_t[None, :] * (HV * K) + o_k[:, None]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    b_S = tl.zeros([BK, BV], tl.float32)
    i_S = (i_n * HV + i_hv) * K * V
    if HALVES:
        o_k1, m_k1, m_S1, o_S1 = second_half(o_S, o_k, m_v, K, V, BK, V_FIRST)
        b_S1 = tl.zeros([BK, BV], tl.float32)
    if h0 is not None:
        b_S += load_state(h0 + i_S, o_S, m_S)
        if HALVES:
            b_S1 += load_state(h0 + i_S, o_S1, m_S1)
    for i_c in range(0, tl.cdiv(length, C)):
        m_t = o_t < length - i_c * C
        m_tv = m_t[:, None] & m_v[None, :]
        i_rv = (i_bos + i_c * C) * HV + i_hv
        i_sv = (i_slot + i_c) * HV + i_hv
        b_u = tl.load(u + i_rv * V + o_tv, mask=m_tv, other=0.0)
        b_wS = times_state(w + i_rv * K, o_tk, m_t[:, None] & m_k[None, :], b_S, DOT)
        tl.store(h + i_sv * K * V + o_S, b_S, mask=m_S)
        if HALVES:
            b_wS += times_state(w + i_rv * K + BK, o_tk, m_t[:, None] & m_k1[None, :], b_S1, DOT)
            tl.store(h + i_sv * K * V + o_S1, b_S1, mask=m_S1)
        b_v = operand(b_u - b_wS, DOT)
        tl.store(v_new + i_rv * V + o_tv, b_v, mask=m_tv)
        m_kt = m_t[None, :] & m_k[:, None]
        b_S = next_state(b_S, b_v, k_rest + i_rv * K, decay + i_sv * K, o_kt, m_kt, o_k, m_k, DOT)
        if HALVES:
            m_kt = m_t[None, :] & m_k1[:, None]
            b_S1 = next_state(b_S1, b_v, k_rest + i_rv * K + BK, decay + i_sv * K, o_kt, m_kt, o_k1, m_k1, DOT)
    if ht is not None:
        tl.store(ht + i_S + o_S, b_S, mask=m_S)
        if HALVES:
            tl.store(ht + i_S + o_S1, b_S1, mask=m_S1)


@triton.jit(do_not_specialize=["HV"])
def kda_chunk_state_bwd_kernel(
    w,
    q_decayed,
    k_rest,
    decay,
    do,
    dv_local,
    dht,
    dh,
    dv_new,
    dh0,
    offsets,
    slots_of,
    scale,
    HV,
    K,
    V,
    C: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    DOT: tl.constexpr,
    V_FIRST: tl.constexpr,
    HALVES: tl.constexpr,
):
    """dv_new = A_qk^T do + k 2^(G_C - G) dS;  dS <- 2^G_C dS + scale (q 2^G)^T do - w^T dv_new, chunk before chunk.

    One program per (sequence, value head, BV columns of V). dv_local is A_qk^T do; dv_new is
    kept in fp32; dh `[slots, HV, K, V]` receives dS behind each chunk, fp32; dht and dh0 may be None. HALVES as in the
    forward pass.
    """
    NV = tl.cdiv(V, BV)
    i_p = tl.program_id(0).to(tl.int64)
    i_v = i_p % NV
    i_hv = (i_p // NV) % HV
    i_n = i_p // (NV * HV)
    i_bos = tl.load(offsets + i_n)
    length = tl.load(offsets + i_n + 1) - i_bos
    i_slot = tl.load(slots_of + i_n)
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, BK)
    o_v = (i_v * BV + tl.arange(0, BV)).to(tl.int32)
    m_k = o_k < K
    m_v = o_v < V
    m_S = m_k[:, None] & m_v[None, :]
    o_S = o_v[None, :] * K + o_k[:, None] if V_FIRST else o_k[:, None] * V + o_v[None, :]
    o_tk = o_t[:, None] * (HV * K) + o_k[None, :]
    o_kt = o_t[None, :] * (HV * K) + o_k[:, None]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    b_dS = tl.zeros([BK, BV], tl.float32)
    i_S = (i_n * HV + i_hv) * K * V
    if HALVES:
        o_k1, m_k1, m_S1, o_S1 = second_half(o_S, o_k, m_v, K, V, BK, V_FIRST)
        b_dS1 = tl.zeros([BK, BV], tl.float32)
    if dht is not None:
        b_dS += load_state(dht + i_S, o_S, m_S)
        if HALVES:
            b_dS1 += load_state(dht + i_S, o_S1, m_S1)
    chunks = tl.cdiv(length, C)
    for i_b in range(0, chunks):
        i_c = chunks - 1 - i_b
        m_t = o_t < length - i_c * C
        m_tv = m_t[:, None] & m_v[None, :]
        i_rv = (i_bos + i_c * C) * HV + i_hv
        i_sv = (i_slot + i_c) * HV + i_hv
        p_k, p_q, p_w, p_a = k_rest + i_rv * K, q_decayed + i_rv * K, w + i_rv * K, decay + i_sv * K
        b_do = operand(tl.load(do + i_rv * V + o_tv, mask=m_tv, other=0.0), DOT)
        b_dv = tl.load(dv_local + i_rv * V + o_tv, mask=m_tv, other=0.0)
        b_kdS = times_state(p_k, o_tk, m_t[:, None] & m_k[None, :], b_dS, DOT)
        tl.store(dh + i_sv * K * V + o_S, b_dS, mask=m_S)
        if HALVES:
            b_kdS += times_state(p_k + BK, o_tk, m_t[:, None] & m_k1[None, :], b_dS1, DOT)
            tl.store(dh + i_sv * K * V + o_S1, b_dS1, mask=m_S1)
        b_dv = b_dv + b_kdS
        tl.store(dv_new + i_rv * V + o_tv, b_dv, mask=m_tv)
        b_dv = operand(b_dv, DOT)
        m_kt = m_t[None, :] & m_k[:, None]
        b_dS = earlier_state(b_dS, b_do, b_dv, p_q, p_w, p_a, scale, o_kt, m_kt, o_k, m_k, DOT)
        if HALVES:
            m_kt = m_t[None, :] & m_k1[:, None]
            b_dS1 = earlier_state(b_dS1, b_do, b_dv, p_q + BK, p_w + BK, p_a, scale, o_kt, m_kt, o_k1, m_k1, DOT)
    if dh0 is not None:
        tl.store(dh0 + i_S + o_S, b_dS, mask=m_S)
        if HALVES:
            tl.store(dh0 + i_S + o_S1, b_dS1, mask=m_S1)
