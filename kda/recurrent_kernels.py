"""Authority on the recurrent kernels: token by token, state in registers, exact for every gate <= 0, -inf included."""

import triton
import triton.language as tl

from kda.fp32_math import exp, sigmoid
from kda.gate import activate_gate

L2NORM_EPS = tl.constexpr(1e-6)


@triton.jit
def load_qk(p_x, m_k, L2NORM: tl.constexpr):
    """A row of q or k, x / sqrt(sum x^2 + 1e-6) if normalised."""
    b_x = tl.load(p_x, mask=m_k, other=0.0).to(tl.float32)
    if L2NORM:
        b_x = b_x / tl.sqrt(tl.sum(b_x * b_x, axis=0) + L2NORM_EPS)
    return b_x


@triton.jit
def load_decay(p_g, b_bias, b_A, lower_bound, m_k, GATE_IN_KERNEL: tl.constexpr, IS_BOUNDED: tl.constexpr):
    """exp(g), the gate activated first if it is raw."""
    b_g = tl.load(p_g, mask=m_k, other=0.0).to(tl.float32)
    if GATE_IN_KERNEL:
        b_g = activate_gate(b_g, b_bias, b_A, lower_bound, IS_BOUNDED)
    return exp(b_g)


@triton.jit
def load_beta(p_beta, beta_range, BETA_SIGMOID: tl.constexpr):
    """beta, or beta_range sigmoid(beta)."""
    b_beta = tl.load(p_beta).to(tl.float32)
    if BETA_SIGMOID:
        b_beta = beta_range * sigmoid(b_beta)
    return b_beta


@triton.jit
def decay_state(b_S, b_a):
    """diag(a) S; a row whose decay is 0 is reset, whatever it held (0 * inf would be NaN)."""
    return tl.where(b_a[:, None] == 0.0, 0.0, b_a[:, None] * b_S)


@triton.jit
def advance_state(b_S, b_k, b_v, b_beta, b_a):
    """S' = diag(a) S;  S' + beta k (v - S'^T k)^T."""
    b_S = decay_state(b_S, b_a)
    b_u = b_beta * (b_v - tl.sum(b_S * b_k[:, None], axis=0))
    return b_S + b_k[:, None] * b_u[None, :]


@triton.jit
def load_gate_parameters(A_log, dt_bias, i_hv, o_k, m_k, K, BK: tl.constexpr):
    """A_log and dt_bias of a value head; 0 for what is None."""
    b_A = 0.0
    if A_log is not None:
        b_A = tl.load(A_log + i_hv).to(tl.float32)
    b_bias = tl.zeros([BK], tl.float32)
    if dt_bias is not None:
        b_bias += tl.load(dt_bias + i_hv * K + o_k, mask=m_k, other=0.0).to(tl.float32)
    return b_A, b_bias


@triton.jit
def state_offsets(o_k, o_v, K, V, V_FIRST: tl.constexpr):
    """Offsets `[BK, BV]` into a state `[K, V]`, or `[V, K]` V-first."""
    if V_FIRST:
        o_S = o_v[None, :] * K + o_k[:, None]
    else:
        o_S = o_k[:, None] * V + o_v[None, :]
    return o_S


@triton.jit(do_not_specialize=["H", "HV"])
def kda_recurrent_fwd_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    h0,
    o,
    ht,
    h,
    cu_seqlens,
    h_offsets,
    scale,
    lower_bound,
    beta_range,
    H,
    HV,
    K,
    V,
    interval: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE_IN_KERNEL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    L2NORM: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """S' = diag(exp g_t) S;  u = beta_t (v_t - S'^T k_t);  S = S' + k_t u^T;  o_t = scale S^T q_t.

    One program per (sequence, value head, BV columns of V). h0, ht and h may be None; h `[slots, HV, K, V]` receives
    the state before every `interval`-th token, sequence i_n from slot h_offsets[i_n] on.
    """
    NV = tl.cdiv(V, BV)
    i_p = tl.program_id(0).to(tl.int64)
    i_v = i_p % NV
    i_hv = (i_p // NV) % HV
    i_n = i_p // (NV * HV)
    i_h = i_hv // (HV // H)
    i_bos = tl.load(cu_seqlens + i_n)
    length = tl.load(cu_seqlens + i_n + 1) - i_bos

    o_k = tl.arange(0, BK)
    o_v = i_v * BV + tl.arange(0, BV)
    m_k = o_k < K
    m_v = o_v < V
    m_S = m_k[:, None] & m_v[None, :]
    o_S = state_offsets(o_k, o_v, K, V, V_FIRST)
    b_A, b_bias = load_gate_parameters(A_log, dt_bias, i_hv, o_k, m_k, K, BK)

    b_S = tl.zeros([BK, BV], tl.float32)
    if h0 is not None:
        b_S += tl.load(h0 + (i_n * HV + i_hv) * K * V + o_S, mask=m_S, other=0.0)
    i_slot = i_n * 0
    if h is not None:
        i_slot = tl.load(h_offsets + i_n).to(tl.int64)
    p_q = q + (i_bos * H + i_h) * K + o_k
    p_k = k + (i_bos * H + i_h) * K + o_k
    p_v = v + (i_bos * HV + i_hv) * V + o_v
    p_o = o + (i_bos * HV + i_hv) * V + o_v
    p_g = g + (i_bos * HV + i_hv) * K + o_k
    p_beta = beta + i_bos * HV + i_hv
    for i_t in range(0, length):
        if h is not None:  # noqa: SIM102  a compile-time branch cannot be joined to one at run time
            if i_t % interval == 0:
                p_h = h + ((i_slot + i_t // interval) * HV + i_hv) * K * V + o_S
                tl.store(p_h, b_S, mask=m_S)
        b_q = load_qk(p_q, m_k, L2NORM) * scale
        b_k = load_qk(p_k, m_k, L2NORM)
        b_v = tl.load(p_v, mask=m_v, other=0.0).to(tl.float32)
        b_beta = load_beta(p_beta, beta_range, BETA_SIGMOID)
        b_a = load_decay(p_g, b_bias, b_A, lower_bound, m_k, GATE_IN_KERNEL, IS_BOUNDED)
        b_S = advance_state(b_S, b_k, b_v, b_beta, b_a)
        b_o = tl.sum(b_S * b_q[:, None], axis=0)
        tl.store(p_o, b_o.to(o.dtype.element_ty), mask=m_v)
        p_q += H * K
        p_k += H * K
        p_v += HV * V
        p_o += HV * V
        p_g += HV * K
        p_beta += HV
    if ht is not None:
        tl.store(ht + (i_n * HV + i_hv) * K * V + o_S, b_S, mask=m_S)


@triton.jit(do_not_specialize=["rows", "tiles", "H", "HV"])
def kda_recurrent_bwd_kernel(
    q,
    k,
    v,
    g,
    beta,
    A_log,
    dt_bias,
    do,
    dht,
    h,
    workspace,
    dq,
    dk,
    dv,
    dg,
    dbeta,
    dh0,
    cu_seqlens,
    h_offsets,
    scale,
    lower_bound,
    beta_range,
    rows,
    tiles,
    H,
    HV,
    K,
    V,
    interval: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    GATE_IN_KERNEL: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
    BETA_SIGMOID: tl.constexpr,
    L2NORM: tl.constexpr,
    V_FIRST: tl.constexpr,
):
    """D = dS + scale q do^T;  w = D^T k;  D' = D - k (beta w)^T;  dS = diag(exp g) D', from the last token back.

    dq = scale S do;  dk = D u - S' (beta w);  dv = beta w;  dbeta = w . r;  dg = rowsum(D' * S') of the activated gate
    g; r = v - S'^T k.

    Tiles (sequence, value head, BV columns) are dealt out to the programs in turn, so that the workspace stays bounded.
    The states S' of one segment of `interval` tokens are recomputed from the stored state h into `workspace`
    `[programs, interval, BK, BV]`. dq, dk, dg `[NV, rows, HV, K]` and dbeta `[NV, rows, HV]` are sums over one tile's
    BV columns only; dq and dk are per value head and with respect to the normalised rows.
    """
    NV = tl.cdiv(V, BV)
    for i_tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        i_p = tl.cast(i_tile, tl.int64)
        i_v = i_p % NV
        i_hv = (i_p // NV) % HV
        i_n = i_p // (NV * HV)
        i_h = i_hv // (HV // H)
        i_bos = tl.load(cu_seqlens + i_n)
        length = tl.load(cu_seqlens + i_n + 1) - i_bos

        o_k = tl.arange(0, BK)
        o_c = tl.arange(0, BV)
        o_v = i_v * BV + o_c
        m_k = o_k < K
        m_v = o_v < V
        m_S = m_k[:, None] & m_v[None, :]
        o_S = state_offsets(o_k, o_v, K, V, V_FIRST)
        b_A, b_bias = load_gate_parameters(A_log, dt_bias, i_hv, o_k, m_k, K, BK)

        b_dS = tl.load(dht + (i_n * HV + i_hv) * K * V + o_S, mask=m_S, other=0.0).to(tl.float32)
        i_slot = tl.load(h_offsets + i_n).to(tl.int64)
        p_w = workspace + tl.program_id(0).to(tl.int64) * interval * (BK * BV) + o_k[:, None] * BV + o_c[None, :]
        segments = (length + interval - 1) // interval
        for i_s in range(0, segments):
            i_first = (segments - 1 - i_s) * interval
            tokens = tl.minimum(interval, length - i_first)
            i_row = i_bos + i_first
            b_S = tl.load(h + ((i_slot + i_first // interval) * HV + i_hv) * K * V + o_S, mask=m_S, other=0.0)
            for i_t in range(0, tokens):
                i_r = i_row + i_t
                b_k = load_qk(k + (i_r * H + i_h) * K + o_k, m_k, L2NORM)
                b_v = tl.load(v + (i_r * HV + i_hv) * V + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_beta = load_beta(beta + i_r * HV + i_hv, beta_range, BETA_SIGMOID)
                b_a = load_decay(
                    g + (i_r * HV + i_hv) * K + o_k, b_bias, b_A, lower_bound, m_k, GATE_IN_KERNEL, IS_BOUNDED
                )
                b_S = decay_state(b_S, b_a)
                tl.store(p_w + i_t * (BK * BV), b_S)
                b_u = b_beta * (b_v - tl.sum(b_S * b_k[:, None], axis=0))
                b_S = b_S + b_k[:, None] * b_u[None, :]
            tl.debug_barrier()
            for i_b in range(0, tokens):
                i_t = tokens - 1 - i_b
                i_r = i_row + i_t
                i_rv = i_r * HV + i_hv
                b_S = tl.load(p_w + i_t * (BK * BV))
                b_q = load_qk(q + (i_r * H + i_h) * K + o_k, m_k, L2NORM) * scale
                b_k = load_qk(k + (i_r * H + i_h) * K + o_k, m_k, L2NORM)
                b_v = tl.load(v + i_rv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_do = tl.load(do + i_rv * V + o_v, mask=m_v, other=0.0).to(tl.float32)
                b_beta = load_beta(beta + i_rv, beta_range, BETA_SIGMOID)
                b_a = load_decay(g + i_rv * K + o_k, b_bias, b_A, lower_bound, m_k, GATE_IN_KERNEL, IS_BOUNDED)
                b_r = b_v - tl.sum(b_S * b_k[:, None], axis=0)
                b_u = b_beta * b_r
                b_dq = scale * (tl.sum(b_S * b_do[None, :], axis=1) + b_k * tl.sum(b_u * b_do, axis=0))
                b_dS = b_dS + b_q[:, None] * b_do[None, :]
                b_w = tl.sum(b_dS * b_k[:, None], axis=0)
                b_dv = b_beta * b_w
                b_dk = tl.sum(b_dS * b_u[None, :], axis=1) - tl.sum(b_S * b_dv[None, :], axis=1)
                b_dS = b_dS - b_k[:, None] * b_dv[None, :]
                i_part = i_v * rows * HV + i_rv
                tl.store(dq + i_part * K + o_k, b_dq, mask=m_k)
                tl.store(dk + i_part * K + o_k, b_dk, mask=m_k)
                tl.store(dg + i_part * K + o_k, tl.sum(b_dS * b_S, axis=1), mask=m_k)
                tl.store(dv + i_rv * V + o_v, b_dv.to(dv.dtype.element_ty), mask=m_v)
                tl.store(dbeta + i_part, tl.sum(b_w * b_r, axis=0))
                b_dS = decay_state(b_dS, b_a)
            tl.debug_barrier()
        if dh0 is not None:
            tl.store(dh0 + (i_n * HV + i_hv) * K * V + o_S, b_dS, mask=m_S)


@triton.jit(do_not_specialize=["rows", "H", "G", "NV"])
def kda_sum_heads_kernel(
    x,
    partial,
    dx,
    rows,
    H,
    G,
    K,
    NV,
    BT: tl.constexpr,
    BK: tl.constexpr,
    L2NORM: tl.constexpr,
):
    """dy = sum of partial `[NV, rows, H * G, K]` over NV and the G value heads of a query head; dx = dy.

    If x is normalised: dx = (dy - y (y . dy)) / n with n = sqrt(sum x^2 + 1e-6), y = x / n.
    """
    i_h = tl.program_id(0) % H
    rows = tl.cast(rows, tl.int64)
    o_t = (tl.program_id(0) // H).to(tl.int64) * BT + tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m = (o_t < rows)[:, None] & (o_k < K)[None, :]
    b_dy = tl.zeros([BT, BK], tl.float32)
    for i_v in range(0, NV):
        for i_g in range(0, G):
            o_p = ((i_v * rows + o_t[:, None]) * (H * G) + i_h * G + i_g) * K + o_k[None, :]
            b_dy += tl.load(partial + o_p, mask=m, other=0.0)
    o_x = (o_t[:, None] * H + i_h) * K + o_k[None, :]
    if L2NORM:
        b_x = tl.load(x + o_x, mask=m, other=0.0).to(tl.float32)
        b_n = tl.sqrt(tl.sum(b_x * b_x, axis=1) + L2NORM_EPS)[:, None]
        b_y = b_x / b_n
        # Rows of no sequence have no gradient, whatever they hold: 0 * NaN must not happen.
        m_live = tl.sum((b_dy != 0.0).to(tl.int32), axis=1)[:, None] > 0
        b_dy = tl.where(m_live, (b_dy - b_y * tl.sum(b_y * b_dy, axis=1)[:, None]) / b_n, 0.0)
    tl.store(dx + o_x, b_dy.to(dx.dtype.element_ty), mask=m)
