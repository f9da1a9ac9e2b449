"""Authority on the backward pass of the fused chunk routes: the order of its kernels, and what they keep."""

import functools
import math

import torch
from torch import Tensor

from kda.adjoints import allocate_tokens, beta_gradient, query_gradient
from kda.chunk_fwd import BLOCK, half_span, launch
from kda.contract import Call
from kda.fused_chunk_bwd import kda_fused_chunk_bwd_kernel
from kda.fused_fwd import (
    SAFE_GATE,
    FusedPlan,
    Tile,
    Workspace,
    chunk_tables,
    cut,
    options,
    prepare,
    run_scan,
    slots_of,
    takes_tma,
)
from kda.fused_scan_bwd import kda_fused_scan_bwd_kernel
from kda.gate import dense, gate_backward

# By K, as those of the forward pass.
REVERSE = {64: Tile(64, 4, 5, 3), 128: Tile(64, 4, 5, 3), 256: Tile(64, 8, 3, 2)}
EVERY = 1  # chunks of a scan to one of the last kernel, and to one state
CHUNK = {
    64: {"BV": 32, "num_warps": 4, "STAGES": 2},
    128: {"BV": 64, "num_warps": 8, "STAGES": 2},
    256: {"BV": 32, "num_warps": 8, "STAGES": 2},
}
CAPPED = {128: {"maxnreg": 128}}  # of bounded gates: uncapped, a quarter slower on an H200; halving levels spill at it


def gradients(call: Call, plan: FusedPlan, do: Tensor | None, dht: Tensor | None) -> dict[str, Tensor | None]:
    """Every gradient of a call on dense tensors, by the name of its argument, from its inputs."""
    do, dht = torch.zeros_like(call.v) if do is None else dense(do), dense(dht)
    made = prepare(call, plan, adjoint=True)
    y, states = _values_and_states(call, plan, made)
    dv, dstates, dh0 = _reverse(call, plan, made, do, dht)
    dq, dk, dg, dbeta = _chunks(call, plan, y, states, do, dv, dstates)
    dA_log = ddt_bias = None
    if call.use_gate_in_kernel:
        dg, dA_log, ddt_bias = gate_backward(call.g, call.A_log, call.dt_bias, call.lower_bound, dg, plan.route)
    return {
        "q": dq,
        "k": dk,
        "v": dv,
        "g": dg,
        "beta": beta_gradient(call, dbeta),
        "A_log": dA_log,
        "dt_bias": ddt_bias,
        "initial_state": dh0,
    }


def _states(call: Call) -> Tensor:
    """Room for a state in every slot of the last kernel: bf16, as it multiplies them, V-first."""
    _, _, _, HV, K, V = call.shape
    return torch.empty(slots_of(call, BLOCK * EVERY), HV, V, K, dtype=torch.bfloat16, device=call.q.device)


def _values_and_states(call: Call, plan: FusedPlan, made: Workspace) -> tuple[Tensor, Tensor]:
    """(y, the states before the chunks): the forward scan again, without its outputs."""
    y, states = torch.empty_like(call.v), _states(call)
    run_scan(call, plan, made, y, 1.0, states=states, every=EVERY, values=True)
    return y, states


def _reverse(
    call: Call, plan: FusedPlan, made: Workspace, do: Tensor, dht: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dv, the gradients of the states behind the chunks, dh0)."""
    _, T, _, HV, K, V = call.shape
    C, tile = BLOCK, REVERSE[K]
    dv, states = allocate_tokens(call, *call.v.shape, dtype=call.v.dtype), _states(call)
    dh0 = None if call.initial_state is None else torch.empty_like(call.initial_state)
    blocks = (None,) * 6
    if takes_tma(plan, do):
        operands = (cut(made.kq_decayed, K, C, K), cut(made.k_rest, K, C, K), cut(made.response, C, C, C))
        blocks = (*(cut(x, HV * V, C, tile.BV) for x in (do, dv)), *operands, cut(states, K, tile.BV, K))
    arguments = (do, dv, *made.tensors(), dht, dh0, states, dense(call.cu_seqlens), *blocks)
    sizes = (2.0**plan.shift, 2.0**-plan.shift, T, HV)
    stages = tile.stages if blocks[0] is None else tile.tma_stages
    shape = {"K": K, "V": V, "C": C, "BV": tile.BV, "V_FIRST": call.state_v_first, "EVERY": EVERY, "STAGES": stages}
    grid = call.sequences * HV * (V // tile.BV)
    launch(plan, kda_fused_scan_bwd_kernel, grid, *arguments, *sizes, **shape, num_warps=tile.num_warps)
    return dv, states, dh0


def _chunks(
    call: Call, plan: FusedPlan, y: Tensor, states: Tensor, do: Tensor, dv: Tensor, dstates: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dq, dk, dg of the activated gate, dbeta of the activated beta)."""
    B, T, H, HV, K, V = call.shape
    C, anchored, shared = BLOCK * EVERY, plan.route == SAFE_GATE, HV > H
    # Tokens of no sequence get no gradient: what is returned for a packed batch starts at 0.
    blank = functools.partial(allocate_tokens, call, B, T, HV)
    dq, dk = (blank(K, dtype=torch.float32 if shared else call.q.dtype) for _ in range(2))
    dg, dbeta = blank(K, dtype=torch.float32 if call.use_gate_in_kernel else call.g.dtype), blank()
    inputs = (call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias)
    between = (y, do, dv, states, dstates, dq, dk, dg, dbeta, *chunk_tables(call, plan, C))
    sizes = (call.lower_bound or 0.0, call.beta_range, half_span(call, plan.route), call.scale, T, H, HV)
    steps = {"LOWEST": int(math.log2(BLOCK)) if anchored else 0, "LEVELS": int(math.log2(C))}
    tile = {"K": K, "V": V, "C": C, "SHARED": shared, **steps, **CHUNK[K], **(CAPPED.get(K, {}) if anchored else {})}
    programs = slots_of(call, C) * HV if call.sequences else 0
    launch(plan, kda_fused_chunk_bwd_kernel, programs, *inputs, *between, *sizes, **options(call, plan), **tile)
    if shared:
        dq, dk = (query_gradient(call, plan.route, part[None], x) for part, x in ((dq, call.q), (dk, call.k)))
    return dq, dk, dg, dbeta
