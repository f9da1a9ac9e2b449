"""Authority on the backward pass of the fused chunk routes: the order of its kernels, and what they keep."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kda import fused_stages, trace
from kda.adjoints import allocate_tokens, query_gradient
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
    scan,
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


@dataclass(frozen=True)
class Kept:
    """What the backward pass reads of the forward one: chunks as operators, y and the states before the chunks."""

    made: Workspace
    y: Tensor
    states: Tensor

    @classmethod
    def room(cls, call: Call, plan: FusedPlan, made: Workspace) -> "Kept":
        """With a y and states that a scan has still to fill."""
        return cls(made, torch.empty_like(call.v), _states(call, plan))

    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self.made.tensors(), self.made.factors, *self.made.tables, self.y, self.states

    @classmethod
    def of(cls, tensors: Sequence[Tensor | None]) -> "Kept":
        """From what `tensors` gave."""
        *tiles, rows, counts, y, states = tensors
        return cls(Workspace(*tiles, (rows, counts)), y, states)


def keeping(call: Call, plan: FusedPlan) -> tuple[Tensor, Tensor | None, Kept]:
    """(o, final state if asked for, what the backward pass need not compute again)."""
    kept = Kept.room(call, plan, prepare(call, plan, adjoint=True))
    return *scan(call, plan, kept.made, kept.y, kept.states), kept


def gradients(
    call: Call, plan: FusedPlan, do: Tensor | None, dht: Tensor | None, kept: Sequence[Tensor | None] = ()
) -> dict[str, Tensor | None]:
    """Every gradient of a call on dense tensors, by the name of its argument, from its inputs, or from what was kept of
    the forward pass.
    """
    do, dht = torch.zeros_like(call.v) if do is None else dense(do), dense(dht)
    there = Kept.of(kept) if kept else values_and_states(call, plan, prepare_adjoint(call, plan))
    return gradients_from(call, plan, there, do, dht)


def prepare_adjoint(call: Call, plan: FusedPlan) -> Workspace:
    """Every chunk as an operator, for the backward pass alone."""
    return prepare(call, plan, forward=False, adjoint=True)


def values_and_states(call: Call, plan: FusedPlan, made: Workspace) -> Kept:
    """From chunks that are prepared: the forward scan again, without its outputs."""
    kept = Kept.room(call, plan, made)
    run_scan(call, plan, made, y=kept.y, states=kept.states)
    return kept


def gradients_from(call: Call, plan: FusedPlan, kept: Kept, do: Tensor, dht: Tensor | None) -> dict[str, Tensor | None]:
    """The same from what the forward pass, or its repetition, left."""
    made, y, states = kept.made, kept.y, kept.states
    dstates = _states(call, plan)
    dv, dh0 = reverse_scan(call, plan, made, do, dht, dstates)
    if trace.is_open():
        fused_stages.show_backward(call, made.tables, states, dstates)
    between = (y, do, dv, states, dstates)
    dq, dk, dg, dbeta, dA_log, ddt_bias = _chunks(call, plan, made.tables, made.factors, between)
    return {
        "q": dq,
        "k": dk,
        "v": dv,
        "g": dg,
        "beta": _beta_gradient(call, dbeta, made.factors),
        "A_log": dA_log,
        "dt_bias": ddt_bias,
        "initial_state": dh0,
    }


def _states(call: Call, plan: FusedPlan) -> Tensor:
    """Room for a state of every chunk: bf16, as the last kernel multiplies them, V-first."""
    _, _, _, HV, K, V = call.shape
    return torch.empty(plan.slots, HV, V, K, dtype=torch.bfloat16, device=call.q.device)


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
    shape = {"K": K, "V": V, "C": C, "BV": tile.BV, "TILES": made.tiles}
    shape |= {"V_FIRST": call.state_v_first, "STAGES": stages}
    grid = call.sequences * HV * (V // tile.BV)
    launch(plan, kda_fused_scan_bwd_kernel, grid, *arguments, *sizes, **shape, num_warps=tile.num_warps)
    return dv, dh0


def _beta_gradient(call: Call, dbeta: Tensor, factors: Tensor) -> Tensor:
    """Through beta's sigmoid if it is in the kernel, by the slopes that were made of it."""
    if not call.use_beta_sigmoid_in_kernel:
        return dbeta.to(call.beta.dtype)
    return torch.mul(dbeta, factors[..., 3], out=torch.empty_like(call.beta))


def _inverse(scale: float) -> float:
    """1 / scale, or 0 where there is none in fp32."""
    return 0.0 if abs(scale) < torch.finfo(torch.float32).tiny else 1.0 / scale


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
    sizes = (call.lower_bound or 0.0, half_span(call, plan.route), call.scale, _inverse(call.scale), T, H, HV)
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
