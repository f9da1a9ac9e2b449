"""Authority on the reverse scan of the fused route: gradients of the states, chunk before chunk, and with them dv."""

import triton
import triton.language as tl

from kda.chunk_tiles import split_product
from kda.fused_scan import sequence_place, store_state

# NOTE [Reverse scan]
# The mirror of NOTE [Scan in registers]: dS is held transposed, and a chunk is three dependent products, dS k, R^T dy
# and the update of dS; what do gives to dy and to dS waits for nothing. dy is the sum of many tokens' parts, which R^T
# takes the differences of where keys repeat: both enter that product in two operands, their rounding and the rest.
# Decayed keys and queries come shifted, so 2^shift dS is carried, and 2^-shift is taken out of its products.


@triton.jit
def reverse_step(b_dS, b_k, b_q, b_R, b_R_rest, b_A, b_rest, b_decay, b_do, unshift):
    """NOTE [Chunk as an operator]: (2^shift dS `[BV, K]` before the chunk, dv `[BV, C]`), from that behind it."""
    b_do = tl.trans(b_do)
    b_dy = unshift * tl.dot(b_dS.to(tl.bfloat16), tl.trans(b_rest)) + tl.dot(b_do, b_A)
    b_dS = tl.dot(b_do, b_q, b_dS * b_decay[None, :])
    b_dv = split_product(b_dy, b_R, "bf16") + tl.dot(b_dy.to(tl.bfloat16), b_R_rest)
    b_dv = b_dv.to(tl.bfloat16)
    return tl.dot(-b_dv, b_k, b_dS), b_dv


@triton.jit(do_not_specialize=["T", "HV"])
def kda_fused_scan_bwd_kernel(
    do,
    dv,
    kq_decayed,
    k_rest,
    response,
    decay,
    dht,
    dh0,
    states,
    cu_seqlens,
    do_blocks,
    dv_blocks,
    kq_blocks,
    rest_blocks,
    response_blocks,
    state_blocks,
    shift,
    unshift,
    T,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BV: tl.constexpr,
    TILES: tl.constexpr,
    V_FIRST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dv `[B, T, HV, V]` and dh0 from the tiles that `kda_fused_prep_kernel` makes with ADJOINT.

    One program per (BV columns of V, value head, sequence). states `[slots, HV, V, K]` bf16: dS
    behind the last chunk of each slot. `*_blocks` are tensor descriptors of the same memory, rows by columns, or all
    None. (un)shift: 2^(-)shift.
    """
    i_p = tl.program_id(0).to(tl.int64)
    i_v = (i_p % (V // BV)).to(tl.int32) * BV
    i_hv = (i_p // (V // BV) % HV).to(tl.int32)
    i_n = i_p // ((V // BV) * HV)
    i_row, i_slot, length = sequence_place(i_n, cu_seqlens, T, C)
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, K)
    o_v = i_v + tl.arange(0, BV)
    o_tt = o_t[:, None] * C + o_t[None, :]
    o_tk = o_t[:, None] * K + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_S = o_v[:, None] * K + o_k[None, :] if V_FIRST else o_k[None, :] * V + o_v[:, None]
    o_S += (i_n * HV + i_hv) * (K * V)
    i_tile = i_slot * HV + i_hv
    do += (i_row * HV + i_hv) * V
    dv += (i_row * HV + i_hv) * V
    b_dS = tl.zeros([BV, K], tl.float32)
    if dht is not None:
        b_dS = tl.load(dht + o_S).to(tl.float32) * shift

    full = (length // C).to(tl.int32)
    rest = (length - full * C).to(tl.int32)
    if rest > 0:
        i_w = i_tile + full * HV.to(tl.int64)
        i_o = full * C * HV.to(tl.int64) * V
        m_t = (o_t < rest)[:, None]
        b_k = tl.load(kq_decayed + i_w * (2 * C * K) + o_tk)
        b_q = tl.load(kq_decayed + i_w * (2 * C * K) + C * K + o_tk)
        b_R = tl.load(response + i_w * (TILES * C * C) + o_tt)
        b_R_rest = tl.load(response + i_w * (TILES * C * C) + C * C + o_tt)
        b_A = tl.load(response + i_w * (TILES * C * C) + (TILES - 1) * C * C + o_tt)
        b_rest = tl.load(k_rest + i_w * (C * K) + o_tk)
        b_decay = tl.load(decay + i_w * K + o_k)
        b_do = tl.load(do + i_o + o_tv, mask=m_t, other=0.0)
        store_state(states, state_blocks, i_w, i_v, unshift * b_dS, V)
        b_dS, b_dv = reverse_step(b_dS, b_k, b_q, b_R, b_R_rest, b_A, b_rest, b_decay, b_do, unshift)
        tl.store(dv + i_o + o_tv, tl.trans(b_dv), mask=m_t)

    for i_b in tl.range(0, full, num_stages=STAGES):
        i_t = full - 1 - i_b
        i_w = i_tile + i_t * HV.to(tl.int64)
        if do_blocks is not None:
            b_k = kq_blocks.load([(i_w * (2 * C)).to(tl.int32), 0])
            b_q = kq_blocks.load([(i_w * (2 * C) + C).to(tl.int32), 0])
            b_R = response_blocks.load([(i_w * (TILES * C)).to(tl.int32), 0])
            b_R_rest = response_blocks.load([(i_w * (TILES * C) + C).to(tl.int32), 0])
            b_A = response_blocks.load([(i_w * (TILES * C) + (TILES - 1) * C).to(tl.int32), 0])
            b_rest = rest_blocks.load([(i_w * C).to(tl.int32), 0])
            b_do = do_blocks.load([(i_row + i_t * C).to(tl.int32), i_hv * V + i_v])
        else:
            b_k = tl.load(kq_decayed + i_w * (2 * C * K) + o_tk)
            b_q = tl.load(kq_decayed + i_w * (2 * C * K) + C * K + o_tk)
            b_R = tl.load(response + i_w * (TILES * C * C) + o_tt)
            b_R_rest = tl.load(response + i_w * (TILES * C * C) + C * C + o_tt)
            b_A = tl.load(response + i_w * (TILES * C * C) + (TILES - 1) * C * C + o_tt)
            b_rest = tl.load(k_rest + i_w * (C * K) + o_tk)
            b_do = tl.load(do + i_t * C * HV.to(tl.int64) * V + o_tv)
        b_decay = tl.load(decay + i_w * K + o_k)
        store_state(states, state_blocks, i_w, i_v, unshift * b_dS, V)
        b_dS, b_dv = reverse_step(b_dS, b_k, b_q, b_R, b_R_rest, b_A, b_rest, b_decay, b_do, unshift)
        b_dv = tl.trans(b_dv)
        if do_blocks is not None:
            dv_blocks.store([(i_row + i_t * C).to(tl.int32), i_hv * V + i_v], b_dv)
        else:
            tl.store(dv + i_t * C * HV.to(tl.int64) * V + o_tv, b_dv)
    if dh0 is not None:
        tl.store(dh0 + o_S, unshift * b_dS)
