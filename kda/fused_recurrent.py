"""Authority on the recurrent route: `fused_recurrent_kda`, its launchers and its autograd formula."""

import math
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kda import contract, ops, record, registry, trace
from kda.adjoints import allocate_tokens, beta_gradient, query_gradient, sum_heads
from kda.contract import DIFFERENTIABLE, Call
from kda.gate import dense, gate_backward
from kda.once import once_differentiable
from kda.precision import OUTPUTS, PrecisionSpec
from kda.recurrent_kernels import kda_recurrent_bwd_kernel, kda_recurrent_fwd_kernel
from kda.sums import sum_tiles

ROUTE = "recurrent"
BACKWARD_PROGRAMS = 1024  # bounds the workspace: 64 states each

PRECISION = PrecisionSpec(
    algorithm="recurrent",
    stages={
        **OUTPUTS,
        "gate": "fp32",
        "decay": "fp32",
        "qk_norm": "fp32",
        "beta": "fp32",
        "state": "fp32",
        "update": "fp32",
        "state_grad": "fp32",
        "partial_grad": "fp32",
    },
)


@dataclass(frozen=True)
class Tile:
    """How a [K, V] state is cut: BK covers K, BV columns of V to a program."""

    BK: int
    BV: int
    num_warps: int


def forward_tile(K: int, V: int) -> Tile:
    """One warp holds the whole tile, so that no reduction crosses warps: about 32 values of state a thread."""
    BK = max(8, triton.next_power_of_2(K))
    return Tile(BK, min(max(8, 1024 // BK), max(8, triton.next_power_of_2(V))), 1)


def backward_tile(K: int, V: int) -> Tile:
    """Wider tiles than the forward's, since every tile writes its own partial dq, dk and dg."""
    BK = max(8, triton.next_power_of_2(K))
    return Tile(BK, min(32, max(8, triton.next_power_of_2(V))), max(2, min(BK // 16, 8)))


def constants(call: Call, tile: Tile) -> dict[str, object]:
    """What every recurrent kernel is compiled for."""
    return {
        "BK": tile.BK,
        "BV": tile.BV,
        "GATE_IN_KERNEL": call.use_gate_in_kernel,
        "IS_BOUNDED": call.lower_bound is not None,
        "BETA_SIGMOID": call.use_beta_sigmoid_in_kernel,
        "L2NORM": call.use_qk_l2norm_in_kernel,
        "V_FIRST": call.state_v_first,
        "num_warps": tile.num_warps,
    }


def _recurrent_forward(call: Call, keep_states: bool) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """o, the final state if asked for, and the states before every `chunk_size`-th token (in `chunk_bound` slots)."""
    _, _, H, HV, K, V = call.shape
    o = allocate_tokens(call, *call.v.shape, dtype=call.q.dtype)
    new_state = lambda n: torch.empty(n, *call.state_shape[1:], dtype=torch.float32, device=call.q.device)  # noqa: E731
    ht = new_state(call.sequences) if call.output_final_state else None
    h = new_state(call.chunk_bound()) if keep_states else None
    tile = forward_tile(K, V)
    offsets, chunk_offsets = call.offsets(), call.chunk_offsets() if keep_states else None
    _show(offsets, chunk_offsets)
    grid = (call.sequences * HV * triton.cdiv(V, tile.BV),)
    if grid[0]:
        record.note(ROUTE, "kda_recurrent_fwd_kernel", **vars(tile))
        kda_recurrent_fwd_kernel[grid](
            call.q,
            call.k,
            call.v,
            call.g,
            call.beta,
            call.A_log,
            call.dt_bias,
            call.initial_state,
            o,
            ht,
            h,
            offsets,
            chunk_offsets,
            call.scale,
            call.lower_bound or 0.0,
            call.beta_range,
            H,
            HV,
            K,
            V,
            interval=call.chunk_size,
            **constants(call, tile),
        )
    return o, ht, h


def _recurrent_backward(call: Call, h: Tensor, do: Tensor, dht: Tensor | None) -> dict[str, Tensor | None]:
    """Every gradient of a call, by the name of its argument."""
    B, T, H, HV, K, V = call.shape
    tile = backward_tile(K, V)
    NV = triton.cdiv(V, tile.BV)
    partial = lambda *shape: allocate_tokens(call, NV, B, T, HV, *shape)  # noqa: E731
    dq, dk, dg, dbeta = partial(K), partial(K), partial(K), partial()
    dv = allocate_tokens(call, *call.v.shape, dtype=call.v.dtype)
    dh0 = None if call.initial_state is None else torch.empty_like(call.initial_state)
    # One compilation for every loss: a kernel without dht would be free to contract its sums in another way.
    dht = torch.zeros(call.state_shape, dtype=torch.float32, device=call.q.device) if dht is None else dht
    tiles = call.sequences * HV * NV
    offsets, chunk_offsets = call.offsets(), call.chunk_offsets()
    _show(offsets, chunk_offsets)
    if tiles:
        programs = min(tiles, BACKWARD_PROGRAMS)
        workspace = torch.empty(programs, call.chunk_size, tile.BK, tile.BV, dtype=torch.float32, device=call.q.device)
        record.note(ROUTE, "kda_recurrent_bwd_kernel", **vars(tile))
        kda_recurrent_bwd_kernel[(programs,)](
            call.q,
            call.k,
            call.v,
            call.g,
            call.beta,
            call.A_log,
            call.dt_bias,
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
            offsets,
            chunk_offsets,
            call.scale,
            call.lower_bound or 0.0,
            call.beta_range,
            B * T,
            tiles,
            H,
            HV,
            K,
            V,
            interval=call.chunk_size,
            **constants(call, tile),
        )
    out = {
        "q": query_gradient(call, ROUTE, dq, call.q),
        "k": query_gradient(call, ROUTE, dk, call.k),
        "v": dv,
        "beta": beta_gradient(call, sum_tiles(dbeta)),
        "initial_state": dh0,
        "A_log": None,
        "dt_bias": None,
    }
    dtype = torch.float32 if call.use_gate_in_kernel else call.g.dtype
    dg = sum_heads(ROUTE, dg, torch.empty_like(call.g, dtype=dtype))
    if call.use_gate_in_kernel:
        dg, out["A_log"], out["dt_bias"] = gate_backward(call.g, call.A_log, call.dt_bias, call.lower_bound, dg, ROUTE)
    return {**out, "g": dg}


def _show(offsets: Tensor, chunk_offsets: Tensor | None) -> None:
    """Where the kernels look for sequences: what a trace sees of a route whose only stages are in registers."""
    if trace.is_open():
        trace.show({"offsets": offsets} | ({} if chunk_offsets is None else {"chunk_offsets": chunk_offsets}))


class _RecurrentFunction(torch.autograd.Function):
    """Keeps the inputs and a state every `chunk_size` tokens; everything else is recomputed."""

    @staticmethod
    def forward(ctx, call: Call, training: bool, *tensors: Tensor | None):
        o, ht, h = _recurrent_forward(call, training or call.return_intermediate_states)
        ctx.set_materialize_grads(False)
        if training:
            ctx.save_for_backward(*tensors, call.cu_seqlens, h)
            ctx.call = replace_tensors(call, dict.fromkeys((*DIFFERENTIABLE, "cu_seqlens")))
        if not call.return_intermediate_states:
            h = None
        else:
            rows = (call.q.shape[0], call.chunks_per_row())
            h = h[: math.prod(rows)].unflatten(0, rows)
            ctx.mark_non_differentiable(h)
        return o, ht, h

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, do, dht, _):
        *tensors, cu_seqlens, h = saved
        call = replace_tensors(ctx.call, dict(zip(DIFFERENTIABLE, tensors), cu_seqlens=cu_seqlens))
        do = torch.zeros_like(call.v) if do is None else do
        gradients = _recurrent_backward(call, h, dense(do), dense(dht))
        wanted = zip(DIFFERENTIABLE, ctx.needs_input_grad[2:])
        return None, None, *(gradients[name] if needed else None for name, needed in wanted)


def run(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final state or None, intermediate states or None) of a validated call."""
    tensors = [dense(getattr(call, name)) for name in DIFFERENTIABLE]
    call = replace_tensors(call, dict(zip(DIFFERENTIABLE, (None if x is None else x.detach() for x in tensors))))
    training = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    return _RecurrentFunction.apply(call, training, *tensors)


def gradients(call: Call, do: Tensor | None, dht: Tensor | None) -> dict[str, Tensor | None]:
    """Every gradient of a validated call by the name of its argument; the states between are computed again."""
    call = replace_tensors(call, {name: dense(getattr(call, name)) for name in DIFFERENTIABLE})
    h = _recurrent_forward(call, True)[2]
    return _recurrent_backward(call, h, torch.zeros_like(call.v) if do is None else dense(do), dense(dht))


def replace_tensors(call: Call, tensors: dict[str, Tensor | None]) -> Call:
    """The same call with other tensors."""
    return replace(call, **tensors)


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """KDA token by token: (o `[B, T, HV, V]` in q's dtype, final state fp32 or None), with gradients for every tensor.

    q, k `[B, T, H, K]`; v `[B, T, HV, V]`, HV a multiple of H; g `[B, T, HV, K]`, natural-log decay <= 0 (-inf resets),
    or the raw gate with `use_gate_in_kernel` (see `fused_kda_gate` for A_log, dt_bias, lower_bound); beta `[B, T, HV]`,
    logits with `use_beta_sigmoid_in_kernel` (sigmoid, doubled by `allow_neg_eigval`); `use_qk_l2norm_in_kernel` divides
    rows of q and k by sqrt(sum x^2 + 1e-6); states `[N, HV, K, V]`, or `[N, HV, V, K]` with `state_v_first`; cu_seqlens
    `[N + 1]` packs N sequences into a batch of one, and rows after the last of them give zeros. bf16, fp16 or fp32; K,
    V in 1..256; scale defaults to K^-1/2. Raises ValueError or TypeError naming the argument, before any kernel runs.
    """
    call = Call(
        entry="recurrent",
        q=q,
        k=k,
        v=v,
        g=g,
        beta=beta,
        A_log=A_log,
        dt_bias=dt_bias,
        scale=contract.default_scale(q, scale),
        initial_state=initial_state,
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        use_gate_in_kernel=use_gate_in_kernel,
        use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
        allow_neg_eigval=allow_neg_eigval,
        lower_bound=lower_bound,
        state_v_first=state_v_first,
        cu_seqlens=cu_seqlens,
    )
    return ops.serve(call)[:2]


registry.register(
    registry.Route(
        id=ROUTE,
        entries=frozenset({"recurrent", "chunk"}),
        summary="token by token in Triton, forward and backward, every option",
        verify=lambda call: registry.needs_kernels(*(getattr(call, name) for name in DIFFERENTIABLE)),
        run=run,
        gradients=gradients,
        precision=PRECISION,
    )
)
