"""Stand-ins for other people's kernels, in plain PyTorch: their arguments, layouts and habits, and our arithmetic."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F

LN2 = math.log(2)
CHUNK = 64


def sequences(x, cu_seqlens):
    """(first row, last row + 1) of every sequence of `[B, T, ...]`, in the flattened batch."""
    B, T = x.shape[:2]
    ends = [T * b for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    return list(pairwise(ends))


def recurrence(q, k, v, g, beta, scale, state, cu_seqlens=None):
    """(o like v, `[N, HV, K, V]`) by the five lines, g natural, in fp32."""
    group = v.shape[2] // q.shape[2]
    rows = [x.float().flatten(0, 1) for x in (q, k, v, g, beta)]
    wide = [x.repeat_interleave(group, 1) for x in rows[:2]] + rows[2:]
    outputs, states = torch.zeros_like(wide[2]), []
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for n, (first, last) in enumerate(sequences(v, cu_seqlens)):
        S, tokens = state[n].float(), []
        for t in range(first, last):
            q_t, k_t, v_t, g_t, b_t = (x[t] for x in wide)
            S = g_t.exp()[..., None] * S
            u = b_t[:, None] * (v_t - (k_t[..., None] * S).sum(-2))
            S = S + k_t[..., None] * u[:, None, :]
            tokens.append(scale * (q_t[..., None] * S).sum(-2))
        states.append(S)
        if tokens:
            outputs = torch.cat([outputs[:first], torch.stack(tokens), outputs[last:]])
    made = torch.stack(states) if states else state.float()
    return outputs.view(v.shape).to(v.dtype), made


def normalised(x):
    return x.float() * torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)


def no_state(q, v, cu_seqlens):
    N = len(sequences(v, cu_seqlens))
    return torch.zeros(N, v.shape[2], q.shape[-1], v.shape[-1])


# attention-gym: log2 gates, summed up within every 64 tokens; K-first states in fp32; int32 offsets


def gym_chunk_kda(q, k, v, cumulative_gate, beta, initial_state=None, *, cu_seqlens=None, output_final_state=False):
    if cu_seqlens is not None and cu_seqlens.dtype != torch.int32:
        raise ValueError("cu_seqlens must be int32")
    parts = []
    rows = cumulative_gate.flatten(0, 1)
    spans = sequences(v, cu_seqlens)
    for first, last in spans:
        for start in range(first, last, CHUNK):
            chunk = rows[start : min(start + CHUNK, last)]
            parts.append(torch.diff(chunk, dim=0, prepend=torch.zeros_like(chunk[:1])))
    parts.append(rows[spans[-1][1] if spans else 0 :])
    g = torch.cat(parts).view(cumulative_gate.shape) * LN2
    state = no_state(q, v, cu_seqlens) if initial_state is None else initial_state
    o, state = recurrence(q, k, v, g, beta, None, state, cu_seqlens)
    return o, state if output_final_state else None


def gym_natural_kda(q, k, v, gate, beta, initial_state=None, *, cu_seqlens=None, scale=None, output_final_state=False):
    """As it is by now: natural gates of single tokens, V-first states."""
    state = no_state(q, v, cu_seqlens) if initial_state is None else initial_state.mT
    o, state = recurrence(q, k, v, gate, beta, scale, state, cu_seqlens)
    return o, state.mT if output_final_state else None


# vLLM: V-first states, activated natural gates, o written over v, an initial state needed, unknown keywords swallowed


def vllm_chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, output_final_state=False,
                   use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs):  # fmt: skip
    q, k = (normalised(q), normalised(k)) if use_qk_l2norm_in_kernel else (q, k)
    o, state = recurrence(q, k, v, g, beta, scale, initial_state.mT.contiguous(), cu_seqlens)
    with torch.no_grad():
        v.copy_(o)
    return v, state.mT.contiguous() if output_final_state else None


# SGLang: a pool of V-first states that moves on, g summed up and o written where g and v were


def sglang_chunk_kda(q, k, v, g, beta, scale=None, initial_state=None, initial_state_indices=None,
                     use_qk_l2norm_in_kernel=False, cu_seqlens=None, A_log=None, dt_bias=None, lower_bound=None,
                     **kwargs):  # fmt: skip
    natural = g.float()
    if A_log is not None:
        z = g.float() if dt_bias is None else g.float() + dt_bias.view(g.shape[-2:])
        rate = A_log.exp()[:, None]
        natural = -rate * F.softplus(z) if lower_bound is None else lower_bound * torch.sigmoid(rate * z)
    q, k = (normalised(q), normalised(k)) if use_qk_l2norm_in_kernel else (q, k)
    slots = initial_state_indices.long()
    o, state = recurrence(q, k, v, natural, beta, scale, initial_state[slots].mT, cu_seqlens)
    initial_state[slots] = state.mT.to(initial_state.dtype)
    g.copy_(natural.cumsum(1))
    v.copy_(o)
    return v


# FlashKDA: everything in place, chunks of 16 stored in bf16 at every step, an inverse by an fp16 series


def bf16(x):
    return x.bfloat16().float()


def fp16(x):
    return x.half().float()


def tanh_sigmoid(x):
    """A sigmoid by a tanh that is right to 11 bits, as the GPU's instruction is."""
    t = torch.tanh(x.float() / 2)
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent) / 2 + 0.5


def half_series(L):
    """(I + L)^-1 of strictly lower 16 x 16 tiles: products of I + L^(2^n), each in fp16."""
    inverse, power = torch.eye(L.shape[-1]) - L, L
    for _ in range(3):
        power = fp16(power @ power)
        inverse = fp16(inverse + fp16(inverse @ power))
    return inverse


def flash_kda_fwd(q, k, v, g, beta, scale, out, A_log, dt_bias, lower_bound, initial_state=None, final_state=None,
                  cu_seqlens=None):  # fmt: skip
    tensors = (q, k, v, g, beta, out)
    assert all(x.dtype == torch.bfloat16 and x.is_contiguous() for x in tensors)
    assert q.shape == v.shape and q.shape[-1] == 128 and dt_bias.shape == q.shape[-2:] and -5 <= lower_bound < 0
    assert cu_seqlens is None or cu_seqlens.dtype == torch.int64
    b_q, b_k = (bf16(normalised(x)).flatten(0, 1) for x in (q, k))
    gate = lower_bound * tanh_sigmoid(A_log.exp()[:, None] * (g.float() + dt_bias))
    gate, values, rate = gate.flatten(0, 1) / LN2, v.float().flatten(0, 1), tanh_sigmoid(beta).flatten(0, 1)
    for n, (first, last) in enumerate(sequences(v, cu_seqlens)):
        S = torch.zeros(v.shape[2], 128, 128) if initial_state is None else bf16(initial_state[n].float()).mT
        for start in range(first, last, 16):
            rows = slice(start, min(start + 16, last))
            o, S = flash_chunk(*(x[rows].transpose(0, 1) for x in (b_q, b_k, values, gate, rate[..., None])), scale, S)
            out.flatten(0, 1)[rows] = o.transpose(0, 1).bfloat16()
        if final_state is not None:
            final_state[n] = S.mT.to(final_state.dtype)


def flash_chunk(q, k, v, g, beta, scale, S):
    """(o, S) of one chunk of every head, `[H, C, .]`; g in log2."""
    missing = 16 - q.shape[1]
    q, k, v, g, beta = (F.pad(x, (0, 0, 0, missing)) for x in (q, k, v, g, beta))
    G = g.cumsum(1)
    grown, shrunk, total = bf16(G.exp2()), bf16((-G).exp2()), G[:, -1:].exp2()
    k_grown, column = bf16(k * grown), bf16(k * shrunk)
    q_grown, rest = bf16(bf16(q * grown) * bf16(torch.tensor(scale))), bf16(column * bf16(total))
    kk = torch.tril((k_grown @ column.mT).double(), -1).float()
    R = bf16(half_series(fp16(fp16(kk) * fp16(beta))))
    u = bf16(bf16(v - bf16(k_grown @ S)) * bf16(beta))
    y = bf16(R @ u)
    o = bf16(q_grown @ S) + bf16(bf16(torch.tril(q_grown @ column.mT)) @ y)
    return o[:, : 16 - missing], bf16(total.mT * S + rest.mT @ y)


# A decode function in log2, on a K-first pool


def log2_decode(q, k, v, log2_gate, beta, cache, where, scale=None):
    slots, rows = where.long(), where >= 0
    o = torch.zeros_like(v)
    if bool(rows.any()):
        mine = [x[rows] for x in (q, k, v, log2_gate.float() * LN2, beta)]
        o[rows], cache[slots[rows]] = recurrence(*mine, scale, cache[slots[rows]])
    return o
