"""Authority on the backward pass of the fused chunk routes: the order of its kernels, and what they keep."""

import functools
import math

import torch
from torch import Tensor

from kda import fused_stages, trace
from kda.adjoints import allocate_tokens, beta_gradient, query_gradient
from kda.chunk_fwd import BLOCK, anchored, half_span, launch
from kda.contract import Call
from kda.fused_chunk_bwd import kda_fused_chunk_bwd_kernel
from kda.fused_fwd import (
    FusedPlan,
    Tile,
    Workspace,
    options,
    prepare,
    run_scan,
    takes_tma,
)
from kda.fused_scan_bwd import kda_fused_scan_bwd_kernel
from kda.gate import dense
from kda.relaunch import descriptor
from kda.sums import sum_slots

# By K, as those of the forward pass.
REVERSE = {64: Tile(64, 4, 5, 3), 128: Tile(64, 4, 5, 3), 256: Tile(32, 4, 3, 2)}
CHUNK = {
    64: {"BV": 64, "num_warps": 4, "STAGES": 3},
    128: {"BV": 32, "num_warps": 4, "STAGES": 3},
    256: {"BV": 32, "num_warps": 8, "STAGES": 2},
}


def gradients(call: Call, plan: FusedPlan, do: Tensor | None, dht: Tensor | None) -> dict[str, Tensor | None]:
    """Every gradient of a call on dense tensors, by the name of its argument, from its inputs."""
    do, dht = torch.zeros_like(call.v) if do is None else dense(do), dense(dht)
    return gradients_from(call, plan, *prepare_adjoint(call, plan), do, dht)


def prepare_adjoint(call: Call, plan: FusedPlan) -> tuple[Workspace, Tensor]:
    """(every chunk as an operator, its factors as `prepare` has them)."""
    factors = torch.empty(*call.beta.shape, 3, dtype=torch.float32, device=call.q.device)
    return prepare(call, plan, factors), factors


def gradients_from(
    call: Call, plan: FusedPlan, made: Workspace, factors: Tensor, do: Tensor, dht: Tensor | None
) -> dict[str, Tensor | None]:
    """The same from chunks that are prepared."""
    y, states = _values_and_states(call, plan, made)
    dstates = _states(call, plan)
    dv, dh0 = reverse_scan(call, plan, made, do, dht, dstates)
    if trace.is_open():
        fused_stages.show_backward(call, made.tables, states, dstates)
    between = (y, do, dv, states, dstates)
    dq, dk, dg, dbeta, dA_log, ddt_bias = _chunks(call, plan, made.tables, factors, between)
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


def _states(call: Call, plan: FusedPlan) -> Tensor:
    """Room for a state of every chunk: bf16, as the last kernel multiplies them, V-first."""
    _, _, _, HV, K, V = call.shape
    return torch.empty(plan.slots, HV, V, K, dtype=torch.bfloat16, device=call.q.device)


def _values_and_states(call: Call, plan: FusedPlan, made: Workspace) -> tuple[Tensor, Tensor]:
    """(y, the states before the chunks): the forward scan again, without its outputs."""
    y, states = torch.empty_like(call.v), _states(call, plan)
    run_scan(call, plan, made, y, 1.0, states=states, values=True)
    return y, states


def reverse_scan(
    call: Call, plan: FusedPlan, made: Workspace, do: Tensor, dht: Tensor | None, states: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dv, dh0); `states` receives the gradients of the states behind the chunks."""
    _, T, _, HV, K, V = call.shape
    C, tile = BLOCK, REVERSE[K]
    dv = allocate_tokens(call, *call.v.shape, dtype=call.v.dtype)
    dh0 = None if call.initial_state is None else torch.empty_like(call.initial_state)
    blocks = (None,) * 6
    if takes_tma(plan, do):
        kept = None if states is None else descriptor(states, K, (tile.BV, K))
        blocks = (*(descriptor(x, HV * V, (C, tile.BV)) for x in (do, dv)), *made.descriptors(C), kept)
    arguments = (do, dv, *made.tensors(), dht, dh0, states, dense(call.cu_seqlens), *blocks)
    sizes = (2.0**plan.shift, 2.0**-plan.shift, T, HV)
    stages = tile.stages if blocks[0] is None else tile.tma_stages
    shape = {"K": K, "V": V, "C": C, "BV": tile.BV, "V_FIRST": call.state_v_first, "STAGES": stages}
    grid = call.sequences * HV * (V // tile.BV)
    launch(plan, kda_fused_scan_bwd_kernel, grid, *arguments, *sizes, **shape, num_warps=tile.num_warps)
    return dv, dh0


def _chunks(
    call: Call,
    plan: FusedPlan,
    tables: tuple[Tensor | None, Tensor | None],
    factors: Tensor,
    between: tuple[Tensor, ...],
) -> tuple[Tensor | None, ...]:
    """(dq, dk, dg, dbeta of the activated beta, dA_log, ddt_bias), from (y, do, dv, S, dS) as `between`."""
    B, T, H, HV, K, V = call.shape
    shared = HV > H
    # Tokens of no sequence get no gradient: what is returned for a packed batch starts at 0.
    blank = functools.partial(allocate_tokens, call, B, T, HV)
    dq, dk = (blank(K, dtype=torch.float32 if shared else call.q.dtype) for _ in range(2))
    dg, dbeta = blank(K, dtype=call.g.dtype), blank()
    partial = lambda x: None if x is None else allocate_tokens(call, plan.slots, HV, K)  # noqa: E731
    dA_log, ddt_bias = partial(call.A_log), partial(call.dt_bias)
    inputs = (call.q, call.k, call.g, factors, call.A_log, call.dt_bias)
    results = (dq, dk, dg, dbeta, dA_log, ddt_bias)
    sizes = (call.lower_bound or 0.0, half_span(call, plan.route), call.scale, T, H, HV)
    levels = int(math.log2(BLOCK))
    tile = {
        "K": K,
        "V": V,
        "C": BLOCK,
        "SHARED": shared,
        "LOWEST": levels if anchored(plan.route) else 0,
        "LEVELS": levels,
    }
    words = {**options(call, plan), **tile, **CHUNK[K]}
    programs = plan.slots * HV if call.sequences else 0
    launch(plan, kda_fused_chunk_bwd_kernel, programs, *inputs, *between, *results, *tables, *sizes, **words)
    if shared:
        dq, dk = (query_gradient(call, plan.route, part[None], x) for part, x in ((dq, call.q), (dk, call.k)))
    dA_log = None if dA_log is None else sum_slots(plan.route, dA_log, total=True).to(call.A_log.dtype)
    ddt_bias = None if ddt_bias is None else sum_slots(plan.route, ddt_bias).flatten().to(call.dt_bias.dtype)
    return dq, dk, dg, dbeta, dA_log, ddt_bias
