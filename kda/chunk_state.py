"""Authority on the recurrence over chunks: the fp32 state from each chunk to the next, and its gradient back."""

import triton
import triton.language as tl

from kda.chunk_tiles import operand, product
from kda.recurrent_kernels import decay_state


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
):
    """v_new = u - w S;  S <- 2^G_C S + (k 2^(G_C - G))^T v_new, chunk after chunk.

    One program per (sequence, value head, BV columns of V). h `[slots, HV, K, V]`: S before each chunk, fp32; v_new
    `[rows, HV, V]`, an operand from here on; h0 and ht `[N, HV, K, V]` may be None; K and V are swapped with V_FIRST.
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
    if h0 is not None:
        b_S += tl.load(h0 + (i_n * HV + i_hv) * K * V + o_S, mask=m_S, other=0.0)
    for i_c in range(0, tl.cdiv(length, C)):
        m_t = o_t < length - i_c * C
        i_rv = (i_bos + i_c * C) * HV + i_hv
        i_sv = (i_slot + i_c) * HV + i_hv
        b_w = tl.load(w + i_rv * K + o_tk, mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_u = tl.load(u + i_rv * V + o_tv, mask=m_t[:, None] & m_v[None, :], other=0.0)
        b_k = tl.load(k_rest + i_rv * K + o_kt, mask=m_t[None, :] & m_k[:, None], other=0.0)
        b_a = tl.load(decay + i_sv * K + o_k, mask=m_k, other=0.0)
        tl.store(h + i_sv * K * V + o_S, b_S, mask=m_S)
        b_v = operand(b_u - product(b_w, operand(b_S, DOT), DOT), DOT)
        tl.store(v_new + i_rv * V + o_tv, b_v, mask=m_t[:, None] & m_v[None, :])
        b_S = decay_state(b_S, b_a) + product(b_k, b_v, DOT)
    if ht is not None:
        tl.store(ht + (i_n * HV + i_hv) * K * V + o_S, b_S, mask=m_S)


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
):
    """dv_new = A_qk^T do + k 2^(G_C - G) dS;  dS <- 2^G_C dS + scale (q 2^G)^T do - w^T dv_new, chunk before chunk.

    One program per (sequence, value head, BV columns of V). dv_local is A_qk^T do; dv_new is
    kept in fp32; dh `[slots, HV, K, V]` receives dS behind each chunk, fp32; dht and dh0 may be None.
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
    if dht is not None:
        b_dS += tl.load(dht + (i_n * HV + i_hv) * K * V + o_S, mask=m_S, other=0.0).to(tl.float32)
    chunks = tl.cdiv(length, C)
    for i_b in range(0, chunks):
        i_c = chunks - 1 - i_b
        m_t = o_t < length - i_c * C
        m_tv = m_t[:, None] & m_v[None, :]
        m_kt = m_t[None, :] & m_k[:, None]
        i_rv = (i_bos + i_c * C) * HV + i_hv
        i_sv = (i_slot + i_c) * HV + i_hv
        b_k = tl.load(k_rest + i_rv * K + o_tk, mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_q = tl.load(q_decayed + i_rv * K + o_kt, mask=m_kt, other=0.0)
        b_w = tl.load(w + i_rv * K + o_kt, mask=m_kt, other=0.0)
        b_do = operand(tl.load(do + i_rv * V + o_tv, mask=m_tv, other=0.0), DOT)
        b_dv = tl.load(dv_local + i_rv * V + o_tv, mask=m_tv, other=0.0)
        b_a = tl.load(decay + i_sv * K + o_k, mask=m_k, other=0.0)
        tl.store(dh + i_sv * K * V + o_S, b_dS, mask=m_S)
        b_dv = b_dv + product(b_k, operand(b_dS, DOT), DOT)
        tl.store(dv_new + i_rv * V + o_tv, b_dv, mask=m_tv)
        b_dS = decay_state(b_dS, b_a) + scale * product(b_q, b_do, DOT) - product(b_w, operand(b_dv, DOT), DOT)
    if dh0 is not None:
        tl.store(dh0 + (i_n * HV + i_hv) * K * V + o_S, b_dS, mask=m_S)
