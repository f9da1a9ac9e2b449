"""Authority on the scan of the fused route: the states, chunk after chunk, and with them the outputs."""

import triton
import triton.language as tl

# NOTE [Scan in registers]
# The state is held transposed, [BV, K] in fp32: it is the left operand of its products and comes from registers, as x
# and y do, so that a chunk is three dependent products, [S k | S q], R x and the update of S. Everything
# else a step reads can be in flight long before, by TMA where the machine has it, which brings v as well. The loop runs
# over full chunks, all of whose rows belong to the sequence; what is left of it is one more step with masks. Values
# past the end are selected away, never multiplied by 0, since they may be NaN.


@triton.jit
def sequence_place(i_n, cu_seqlens, T, C: tl.constexpr):
    """(first row, first slot, tokens) of a sequence; offsets are clamped into the batch, whatever they are."""
    if cu_seqlens is not None:
        i_row = clamped_offset(cu_seqlens + i_n, T)
        length = tl.maximum(clamped_offset(cu_seqlens + i_n + 1, T) - i_row, 0)
        i_slot = i_row // C + i_n
    else:
        i_row = i_n * T
        length = tl.zeros([], tl.int64) + T
        i_slot = i_n * tl.cdiv(T, C)
    return i_row, i_slot, length


@triton.jit
def clamped_offset(p_offset, T):
    return tl.minimum(tl.maximum(tl.load(p_offset).to(tl.int64), 0), T)


@triton.jit(do_not_specialize=["N", "T", "slots", "steps"])
def kda_fused_index_kernel(cu_seqlens, rows, counts, N, T, slots, steps, C: tl.constexpr, BLOCK: tl.constexpr):
    """First row and tokens of every slot, int64 `[slots]`; sequence n starts at slot offset // C + n, which leaves room
    for its chunks without a sum over the sequences before it.

    The sequence of a slot is found by halving [0, N) `steps` times. A slot that no chunk fills has 0 tokens.
    """
    o_s = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_low = tl.zeros([BLOCK], tl.int64)
    b_high = b_low + N
    for _ in range(0, steps):
        b_mid = (b_low + b_high) // 2
        m_low = clamped_offset(cu_seqlens + b_mid, T) // C + b_mid <= o_s
        b_low = tl.where(m_low, b_mid, b_low)
        b_high = tl.where(m_low, b_high, b_mid)
    b_start = clamped_offset(cu_seqlens + b_low, T)
    b_row = b_start + (o_s - (b_start // C + b_low)) * C
    b_count = clamped_offset(cu_seqlens + b_low + 1, T) - b_row
    b_count = tl.minimum(tl.maximum(b_count, 0), C)
    tl.store(rows + o_s, b_row, mask=o_s < slots)
    tl.store(counts + o_s, b_count, mask=o_s < slots)


@triton.jit
def halves(b_x, M: tl.constexpr, C: tl.constexpr):
    """The left and the right C columns of `[M, 2 C]`."""
    return tl.split(tl.permute(tl.reshape(b_x, (M, 2, C)), (0, 2, 1)))


@triton.jit
def scan_step(
    b_S,
    b_kq,
    b_R,
    b_R_rest,
    b_AR,
    b_rest,
    b_decay,
    b_v,
    unshift,
    BV: tl.constexpr,
    C: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """NOTE [Chunk as an operator]: (the state `[BV, K]` after the chunk, its outputs, if wanted, and y, `[BV, C]`)."""
    b_Skq = tl.dot(b_S.to(tl.bfloat16), tl.trans(b_kq))
    b_Sk = b_Skq
    if OUTPUTS:
        b_Sk, b_Sq = halves(b_Skq, BV, C)
    b_x = (tl.trans(b_v).to(tl.float32) - unshift * b_Sk).to(tl.bfloat16)
    b_y = tl.dot(b_x, tl.trans(b_R), tl.dot(b_x, tl.trans(b_R_rest)))
    b_o = b_y
    if OUTPUTS:
        b_o = tl.dot(b_x, tl.trans(b_AR), unshift * b_Sq)
    b_S = tl.dot(b_y.to(tl.bfloat16), b_rest, b_S * b_decay[None, :])
    return b_S, b_o, b_y


@triton.jit
def store_values(x, blocks, i_row, i_t, i_hv, b_x, o_tv, m, HV, V: tl.constexpr):
    """Rows of `[B, T, HV, V]`, i_t behind the first one of a sequence, through the descriptor if there is one, if they
    are wanted.
    """
    if x is not None:
        b_x = tl.trans(b_x.to(tl.bfloat16))
        if blocks is not None:
            blocks.store([(i_row + i_t).to(tl.int32), i_hv], b_x)
        else:
            tl.store(x + i_t * HV.to(tl.int64) * V + o_tv, b_x, mask=m)


@triton.jit
def store_state(states, blocks, i_state, i_v, b_S, V: tl.constexpr):
    """BV rows of a state `[V, K]` in bf16, through the descriptor if there is one, if states are wanted."""
    BV: tl.constexpr = b_S.shape[0]
    K: tl.constexpr = b_S.shape[1]
    b_S = b_S.to(tl.bfloat16)
    if blocks is not None:
        blocks.store([(i_state * V + i_v).to(tl.int32), 0], b_S)
    elif states is not None:
        o_S = (i_v + tl.arange(0, BV))[:, None] * K + tl.arange(0, K)[None, :]
        tl.store(states + i_state * (V * K) + o_S, b_S)


@triton.jit(do_not_specialize=["N", "T", "HV"])
def kda_fused_scan_kernel(
    v,
    o,
    y,
    kq_decayed,
    k_rest,
    response,
    decay,
    initial_state,
    final_state,
    states,
    cu_seqlens,
    v_blocks,
    o_blocks,
    y_blocks,
    kq_blocks,
    rest_blocks,
    response_blocks,
    state_blocks,
    unshift,
    N,
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
    """o `[B, T, HV, V]` and the final states from the tiles of `kda_fused_prep_kernel`.

    One program per (BV columns of V, value head, sequence). `*_blocks` are tensor descriptors of the same memory, rows
    by columns, or all None. unshift: 2^-shift. Packed: rows after the last sequence get o = 0. For the backward pass y
    `[B, T, HV, V]` and states `[slots, HV, V, K]` bf16, S before every chunk. Any of o, y, states and the final states
    may be None; v None: values of 0. TILES: of a chunk's response.
    """
    OUTPUTS: tl.constexpr = o is not None
    ROWS: tl.constexpr = 2 * C if OUTPUTS else C
    i_p = tl.program_id(0).to(tl.int64)
    i_v = (i_p % (V // BV)).to(tl.int32) * BV
    i_hv = (i_p // (V // BV) % HV).to(tl.int32)
    i_n = i_p // ((V // BV) * HV)
    i_row, i_slot, length = sequence_place(i_n, cu_seqlens, T, C)
    o_t = tl.arange(0, C)
    o_k = tl.arange(0, K)
    o_v = i_v + tl.arange(0, BV)
    o_kq = tl.arange(0, ROWS)[:, None] * K + o_k[None, :]
    o_tt = o_t[:, None] * C + o_t[None, :]
    o_rest = o_t[:, None] * K + o_k[None, :]
    o_tv = o_t[:, None] * (HV * V) + o_v[None, :]
    o_S = o_v[:, None] * K + o_k[None, :] if V_FIRST else o_k[None, :] * V + o_v[:, None]
    o_S += (i_n * HV + i_hv) * (K * V)
    i_tile = i_slot * HV + i_hv
    if v is not None:
        v += (i_row * HV + i_hv) * V
    if OUTPUTS:
        o += (i_row * HV + i_hv) * V
    if y is not None:
        y += (i_row * HV + i_hv) * V
    b_S = tl.load(initial_state + o_S) if initial_state is not None else tl.zeros([BV, K], tl.float32)

    full = (length // C).to(tl.int32)
    for i_t in tl.range(0, full, num_stages=STAGES):
        i_w = i_tile + i_t * HV.to(tl.int64)
        b_v = tl.zeros([C, BV], tl.bfloat16)
        if rest_blocks is not None:
            b_kq = kq_blocks.load([(i_w * (2 * C)).to(tl.int32), 0])
            b_R = response_blocks.load([(i_w * (TILES * C)).to(tl.int32), 0])
            b_R_rest = response_blocks.load([(i_w * (TILES * C) + C).to(tl.int32), 0])
            b_AR = response_blocks.load([(i_w * (TILES * C) + 2 * C).to(tl.int32), 0]) if OUTPUTS else b_R
            b_rest = rest_blocks.load([(i_w * C).to(tl.int32), 0])
            if v is not None:
                b_v = v_blocks.load([(i_row + i_t * C).to(tl.int32), i_hv * V + i_v])
        else:
            b_kq = tl.load(kq_decayed + i_w * (2 * C * K) + o_kq)
            b_R = tl.load(response + i_w * (TILES * C * C) + o_tt)
            b_R_rest = tl.load(response + i_w * (TILES * C * C) + C * C + o_tt)
            b_AR = tl.load(response + i_w * (TILES * C * C) + 2 * C * C + o_tt) if OUTPUTS else b_R
            b_rest = tl.load(k_rest + i_w * (C * K) + o_rest)
            if v is not None:
                b_v = tl.load(v + i_t * C * HV.to(tl.int64) * V + o_tv)
        b_decay = tl.load(decay + i_w * K + o_k)
        store_state(states, state_blocks, i_w, i_v, b_S, V)
        b_S, b_o, b_y = scan_step(b_S, b_kq, b_R, b_R_rest, b_AR, b_rest, b_decay, b_v, unshift, BV, C, OUTPUTS)
        store_values(o, o_blocks, i_row, i_t * C, i_hv * V + i_v, b_o, o_tv, None, HV, V)
        store_values(y, y_blocks, i_row, i_t * C, i_hv * V + i_v, b_y, o_tv, None, HV, V)

    rest = (length - full * C).to(tl.int32)
    if rest > 0:
        i_w = i_tile + full * HV.to(tl.int64)
        i_o = full * C * HV.to(tl.int64) * V
        m_t = (o_t < rest)[:, None]
        b_kq = tl.load(kq_decayed + i_w * (2 * C * K) + o_kq)
        b_R = tl.load(response + i_w * (TILES * C * C) + o_tt)
        b_R_rest = tl.load(response + i_w * (TILES * C * C) + C * C + o_tt)
        b_AR = tl.load(response + i_w * (TILES * C * C) + 2 * C * C + o_tt) if OUTPUTS else b_R
        b_rest = tl.load(k_rest + i_w * (C * K) + o_rest)
        b_decay = tl.load(decay + i_w * K + o_k)
        b_v = tl.zeros([C, BV], tl.bfloat16)
        if v is not None:
            b_v = tl.load(v + i_o + o_tv, mask=m_t, other=0.0)
        store_state(states, state_blocks, i_w, i_v, b_S, V)
        b_S, b_o, b_y = scan_step(b_S, b_kq, b_R, b_R_rest, b_AR, b_rest, b_decay, b_v, unshift, BV, C, OUTPUTS)
        store_values(o, None, i_row, full * C, i_hv * V + i_v, b_o, o_tv, m_t, HV, V)
        store_values(y, None, i_row, full * C, i_hv * V + i_v, b_y, o_tv, m_t, HV, V)
    if final_state is not None:
        tl.store(final_state + o_S, b_S)
    if OUTPUTS and cu_seqlens is not None and i_n == N - 1:
        unused = (T - i_row - length).to(tl.int32)
        i_o = length * HV * V
        for i_t in range(0, unused, C):
            b_0 = tl.zeros([C, BV], tl.bfloat16)
            tl.store(o + i_o + i_t * HV.to(tl.int64) * V + o_tv, b_0, mask=(o_t < unused - i_t)[:, None])
