"""Authority on the decode kernel: a few tokens of every sequence on states that stay in a paged pool."""

import triton
import triton.language as tl

from kda.recurrent_kernels import (
    advance_state,
    load_beta,
    load_decay,
    load_gate_parameters,
    load_qk,
    state_offsets,
)


@triton.jit
def load_slot(p_slots, i_column, columns, num_slots):
    """The slot in a column; -1 for anything that is no slot of the pool, a column that there is not included."""
    i_slot = tl.load(p_slots + i_column, mask=(i_column >= 0) & (i_column < columns), other=-1).to(tl.int64)
    return tl.where(i_slot < num_slots, i_slot, -1)


# One binary for every number of tokens, columns and slots: what is decoded together has the bits of what is decoded
# one call at a time.
@triton.jit(do_not_specialize=["num_slots", "columns", "T", "H", "HV"])
def kda_decode_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    pool,
    slots,
    accepted,
    o,
    cu_seqlens,
    scale,
    lower_bound,
    beta_range,
    slot_stride,
    num_slots,
    columns,
    T,
    H,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE_IN_KERNEL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    L2NORM: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """S' = diag(exp g_t) S;  u = beta_t (v_t - S'^T k_t);  S = S' + k_t u^T;  o_t = scale S^T q_t;  S = round(S).

    One program per (sequence, value head, BV columns of V). slots `[N, columns]`: S begins as the state in slot
    [i_n, accepted[i_n] - 1] (column 0 without accepted); after token t it is in slot [i_n, t], and after the last token
    in the last column if there is no column for it. round is to the format of the pool. A sequence that begins in no
    slot of the pool has o = 0.
    """
    NV = tl.cdiv(V, BV)
    i_v = tl.program_id(0) % NV
    i_hv = (tl.program_id(0) // NV % HV).to(tl.int64)
    i_n = (tl.program_id(0) // NV // HV).to(tl.int64)
    i_h = i_hv // (HV // H)
    i_bos = i_n * T
    i_eos = i_bos + T
    if cu_seqlens is not None:
        i_bos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n).to(tl.int64), 0), T)
        i_eos = tl.minimum(tl.maximum(tl.load(cu_seqlens + i_n + 1).to(tl.int64), i_bos), T)

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V

    i_column = i_n * 0
    if accepted is not None:
        i_column = tl.load(accepted + i_n).to(tl.int64) - 1
    p_slots = slots + i_n * columns
    i_slot = load_slot(p_slots, i_column, columns, num_slots)
    if i_slot < 0:
        b_zero = tl.zeros([BV], o.dtype.element_ty)
        for i_row in range(i_bos, i_eos):
            tl.store(o + (i_row * HV + i_hv) * V + o_v, b_zero, mask=m_v)
        return

    m_S = m_k[:, None] & m_v[None, :]
    p_S = pool + i_hv * K * V + state_offsets(o_k, o_v, K, V, V_FIRST)
    b_S = tl.load(p_S + i_slot * slot_stride, mask=m_S, other=0.0).to(tl.float32)
    b_A, b_bias = load_gate_parameters(A_log, dt_bias, i_hv, o_k, m_k, K, BK)
    tokens = i_eos - i_bos
    for i_t in range(0, tokens):
        i_row = i_bos + i_t
        b_q = load_qk(q + (i_row * H + i_h) * K + o_k, m_k, L2NORM) * scale
        b_k = load_qk(k + (i_row * H + i_h) * K + o_k, m_k, L2NORM)
        b_v = tl.load(v + (i_row * HV + i_hv) * V + o_v, mask=m_v, other=0.0).to(tl.float32)
        b_beta = load_beta(beta + i_row * HV + i_hv, beta_range, BETA_SIGMOID)
        p_g = g + (i_row * HV + i_hv) * K + o_k
        b_a = load_decay(p_g, b_bias, b_A, lower_bound, m_k, GATE_IN_KERNEL, IS_BOUNDED)
        b_S = advance_state(b_S, b_k, b_v, b_beta, b_a)
        b_o = tl.sum(b_S * b_q[:, None], axis=0)
        tl.store(o + (i_row * HV + i_hv) * V + o_v, b_o.to(o.dtype.element_ty), mask=m_v)
        b_stored = b_S.to(pool.dtype.element_ty)
        if (i_t < columns - 1) | (i_t == tokens - 1):
            i_to = load_slot(p_slots, tl.minimum(i_t, columns - 1), columns, num_slots)
            if i_to >= 0:
                tl.store(p_S + i_to * slot_stride, b_stored, mask=m_S)
        b_S = b_stored.to(tl.float32)
