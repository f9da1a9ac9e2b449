"""Authority on the backward pass of the staged chunk route, and on its autograd formula."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import attrgetter, is_not

import torch
import triton
from torch import Tensor

from kda import registry, trace
from kda.adjoints import allocate_tokens, beta_gradient, query_gradient
from kda.chunk_fwd import SAFE_GATE, UNBOUNDED, Plan, Stages, anchored, forward, launch, show
from kda.chunk_index import ChunkIndex
from kda.chunk_intra_bwd import kda_chunk_intra_bwd_kernel
from kda.chunk_output import kda_chunk_inter_bwd_kernel, kda_chunk_output_bwd_kernel
from kda.chunk_state import kda_chunk_state_bwd_kernel
from kda.contract import DIFFERENTIABLE, SAFE_BOUND, Call
from kda.gate import dense, gate_backward
from kda.once import once_differentiable
from kda.precision import OUTPUTS, PrecisionSpec
from kda.sums import sum_tiles
from kda.wy_fast import kda_wy_bwd_kernel


def backward(
    call: Call,
    plan: Plan,
    index: ChunkIndex,
    made: Stages,
    do: Tensor,
    dht: Tensor | None,
) -> dict[str, Tensor | None]:
    """Every gradient of a call, by the name of its argument."""
    B, T, H, HV, K, V = call.shape
    C, chunks = index.chunk, index.slots * HV
    empty = lambda *shape, dtype=plan.stored: torch.empty(*shape, dtype=dtype, device=call.q.device)  # noqa: E731
    # Tokens of no sequence get no gradient: what is returned for a packed batch starts at 0.
    blank = functools.partial(allocate_tokens, call)
    fp32 = {"dtype": torch.float32}
    where = (index.rows, index.counts)
    state = {"C": C, **plan.state_tile(call, backward=True)}

    dA_qk, dv_local = empty(B, T, HV, C, **fp32), empty(B, T, HV, V, **fp32)
    output = (made.A_qk, made.v_new, do, dA_qk, dv_local, *where, HV, V)
    launch(plan, kda_chunk_output_bwd_kernel, chunks, *output, C=C, BV=plan.BV, DOT=plan.DOT, num_warps=4)

    dh, dv_new = torch.empty_like(made.h), empty(B, T, HV, V, **fp32)
    dh0 = None if call.initial_state is None else torch.empty_like(call.initial_state)
    scan = (made.w, made.q_decayed, made.k_rest, made.decay, do, dv_local, dht, dh, dv_new, dh0)
    ends = (index.offsets, index.slots_of, call.scale, HV, K, V)
    launch(plan, kda_chunk_state_bwd_kernel, plan.scans(call), *scan, *ends, **state)

    NK = triton.cdiv(K, plan.BP)
    z, dv = empty(B, T, HV, V, **fp32), blank(B, T, HV, V, dtype=call.v.dtype)
    dA_kk, dbeta = empty(B, T, HV, C, **fp32), blank(NK + 1, B, T, HV)
    factors = (made.inverse, call.beta, made.A_kk, call.v, made.v_new, dv_new, z, dv, dA_kk, dbeta[NK])
    flags = {"DOT": plan.DOT, "BETA_SIGMOID": call.use_beta_sigmoid_in_kernel}
    sizes, tile = (*where, call.beta_range, HV, V), {"C": C, "BV": min(plan.BV, 32), "num_warps": 4}
    launch(plan, kda_wy_bwd_kernel, chunks, *factors, *sizes, **tile, **flags)

    dq, dk, dg_state = blank(B, T, HV, K), blank(B, T, HV, K), empty(B, T, HV, K, **fp32)
    inputs = (call.q, call.k, made.g, call.beta, made.q_rstd, made.k_rstd, made.decay)
    states = (do, z, made.v_new, made.h, dh, dq, dk, dg_state, dbeta)
    sizes = (*where, call.scale, call.beta_range, B * T * HV, H, HV, K, V)
    tiles = {"C": C, "BK": plan.BP, "BV": plan.BV, "V_FIRST": call.state_v_first, "num_warps": 4}
    launch(plan, kda_chunk_inter_bwd_kernel, chunks * NK, *inputs, *states, *sizes, **tiles, **flags)

    dg = blank(B, T, HV, K, dtype=torch.float32 if call.use_gate_in_kernel else call.g.dtype)
    inputs = (call.q, call.k, made.g, made.q_rstd, made.k_rstd, dA_qk, dA_kk, dg_state, dq, dk, dg)
    sizes = (*where, call.scale, plan.half_span, plan.lowest, H, HV, K)
    launch(plan, kda_chunk_intra_bwd_kernel, chunks * NK, *inputs, *sizes, **plan.pairs(C))

    if trace.is_open():
        above = {"dA_qk_above": dA_qk, "dA_kk_above": dA_kk}
        show(call, index, {"dA_qk": dA_qk, "dA_kk": dA_kk, "dv_new": dv_new, "z": z, "dh": dh, **above})
    dA_log = ddt_bias = None
    if call.use_gate_in_kernel:
        dg, dA_log, ddt_bias = gate_backward(call.g, call.A_log, call.dt_bias, call.lower_bound, dg, plan.route)
    return {
        "q": query_gradient(call, plan.route, dq[None], call.q),
        "k": query_gradient(call, plan.route, dk[None], call.k),
        "v": dv,
        "g": dg,
        "beta": beta_gradient(call, sum_tiles(dbeta)),
        "A_log": dA_log,
        "dt_bias": ddt_bias,
        "initial_state": dh0,
    }


_differentiable = attrgetter(*DIFFERENTIABLE)


def detached(call: Call) -> tuple[Call, list[Tensor | None], bool]:
    """(the call on dense tensors without gradients, those tensors with theirs, whether any gradient is wanted)."""
    given = _differentiable(call)
    tensors = [None if x is None else x.contiguous().resolve_neg() for x in given]  # `dense`, without its cost
    differentiable = any([x is not None and x.requires_grad for x in tensors])
    if differentiable or any(map(is_not, given, tensors)):  # spared where it would change nothing
        call = call.but(**dict(zip(DIFFERENTIABLE, [None if x is None else x.detach() for x in tensors])))
    return call, tensors, differentiable and torch.is_grad_enabled()


def keep(ctx, call: Call, plan: object, tensors: Sequence[Tensor | None], stages: Sequence[Tensor | None] = ()) -> None:
    """Save what `kept_gradients` needs: the inputs, and what else of the forward pass shall not be computed again."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, call.cu_seqlens, *stages)
    ctx.call, ctx.plan = call.but(**dict.fromkeys((*DIFFERENTIABLE, "cu_seqlens"))), plan


def kept_gradients(
    ctx, saved: Sequence[Tensor | None], formula: Callable[..., dict[str, Tensor | None]], *grads: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that were kept, which are the last arguments of the autograd function.

    `formula(call, plan, *grads, kept)` has them by name.
    """
    count = len(DIFFERENTIABLE)
    tensors, (cu_seqlens, *kept) = saved[:count], saved[count:]
    call = ctx.call.but(**dict(zip(DIFFERENTIABLE, tensors)), cu_seqlens=cu_seqlens)
    made = formula(call, ctx.plan, *grads, kept)
    wanted = zip(DIFFERENTIABLE, ctx.needs_input_grad[-count:])
    return tuple(made[name] if needed else None for name, needed in wanted)


def _gradients(
    call: Call, plan: Plan, do: Tensor | None, dht: Tensor | None, kept: Sequence[Tensor | None] = ()
) -> dict[str, Tensor | None]:
    """Every gradient of a call on dense tensors; the forward pass runs again unless its stages were kept."""
    index = ChunkIndex.of(call)
    made = Stages(*kept) if kept else forward(replace(call, output_final_state=False), plan, index)[2]
    do = torch.zeros_like(call.v) if do is None else do
    return backward(call, plan, index, made, dense(do), dense(dht))


def gradients(call: Call, do: Tensor | None, dht: Tensor | None, route: str) -> dict[str, Tensor | None]:
    """Every gradient of a validated call by the name of its argument, from its inputs alone."""
    call = replace(call, **{name: dense(getattr(call, name)) for name in DIFFERENTIABLE})
    return _gradients(call, Plan.of(call, route), do, dht)


class _ChunkFunction(torch.autograd.Function):
    """Keeps the inputs; with `disable_recompute` the stages of the forward pass too, which otherwise runs again."""

    @staticmethod
    def forward(ctx, call: Call, plan: Plan, training: bool, *tensors: Tensor | None):
        o, ht, made = forward(call, plan, ChunkIndex.of(call))
        if training:
            keep(ctx, call, plan, tensors, replace(made, u=None).tensors() if call.disable_recompute else ())
        h = None
        if call.return_intermediate_states:
            batch, chunks = call.q.shape[0], call.chunks_per_row()
            h = made.h[: batch * chunks].unflatten(0, (batch, chunks))
            ctx.mark_non_differentiable(h)
        return o, ht, h

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, do, dht, _):
        return None, None, None, *kept_gradients(ctx, saved, _gradients, do, dht)


def chunk_kda_staged(call: Call, route: str) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final state or None, intermediate states or None) of a validated call.

    `route` is 'chunk-safe_gate' (gates in [-5, 0], or in [lower_bound, 0]) or 'chunk-unbounded' (any gate <= 0).
    """
    call, tensors, training = detached(call)
    return _ChunkFunction.apply(call, Plan.of(call, route), training, *tensors)


def refusal(call: Call, route: str) -> str | None:
    """Why a route cannot take a validated call, or None."""
    bounded = call.safe_gate or (call.use_gate_in_kernel and (call.lower_bound or -math.inf) >= SAFE_BOUND)
    if anchored(route) and not bounded:
        return f"needs gates known to be in [{SAFE_BOUND:g}, 0]: safe_gate or such a lower_bound"
    return registry.needs_kernels(*(getattr(call, name) for name in DIFFERENTIABLE))


def _precision(diagonal: str) -> PrecisionSpec:
    stages = {"operand": "product", "intra": "wide", "merge": "fp32", "stored_inverse": "fp32", "state": "fp32"}
    return PrecisionSpec("chunk", {**OUTPUTS, **stages}, diagonal=diagonal, inverse="substitution")


PRECISION = {SAFE_GATE: _precision("anchor_apart"), UNBOUNDED: _precision("halving")}
SUMMARIES = {
    SAFE_GATE: "staged chunk kernels for gates in [-5, 0]: diagonal blocks anchored on their first row",
    UNBOUNDED: "staged chunk kernels for any gate <= 0, -inf included: diagonal blocks by halving levels",
}
registry.register_chunk(PRECISION, SUMMARIES, refusal, chunk_kda_staged, gradients)
