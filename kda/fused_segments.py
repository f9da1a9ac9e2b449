"""Authority on the segment-parallel routes: long sequences of few heads in pieces, by the kernels of the fused ones."""

import functools
from dataclasses import replace

import torch
import triton
from torch import Tensor

from kda import chunk_bwd, fused, fused_bwd, registry
from kda.chunk_fwd import BLOCK, anchored
from kda.contract import DIFFERENTIABLE, Call
from kda.fused_fwd import SCAN, FusedPlan, Workspace, prepare, run_scan, scan
from kda.gate import dense
from kda.once import once_differentiable
from kda.precision import PrecisionSpec
from kda.segments import Pieces, chain, chain_back, identities

SAFE_GATE, UNBOUNDED = "segment_parallel-safe_gate", "segment_parallel-unbounded"
PROGRAMS = 256  # of a scan over all pieces of a call, about: two for a multiprocessor
# Where it pays, by an estimate that is to be measured: three scans over pieces instead of one over whole sequences gain
# where that one leaves most multiprocessors idle, and for longer than the chain takes.
IDLE_FACTOR = 4  # multiprocessors for each program of the scan over whole sequences
LEAST_TOKENS = 16384  # of a sequence


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def scan_programs(heads: int, K: int, V: int) -> int:
    """Programs of the scan of one sequence."""
    return heads * (V // SCAN[K].BV)


def segment_tokens(rows: int, heads: int, K: int, V: int) -> int:
    """Tokens of a piece, for a call of that many rows in all: a power of two, whole chunks."""
    return max(BLOCK, triton.next_power_of_2(-(-rows * scan_programs(heads, K, V) // PROGRAMS)))


def cut(call: Call) -> Pieces | None:
    """The pieces of a call on dense tensors; None where no sequence has two."""
    B, T, _, HV, K, V = call.shape
    tokens = segment_tokens(B * T, HV, K, V)
    return Pieces.of(call, tokens) if tokens < T and call.sequences else None


def _maps(call: Call, plan: FusedPlan, made: Workspace, adjoint: bool) -> tuple[Tensor, Tensor]:
    """(P `[slots, HV, K, K]`, Q `[slots, HV, K, V]`) of every piece: the scan without outputs, from two states."""
    HV, K = call.shape[3:5]
    units = identities(call.sequences, HV, K, call.q.device)
    P, Q = torch.empty_like(units), torch.empty(call.state_shape, dtype=torch.float32, device=call.q.device)
    run_scan(replace(call, initial_state=units), plan, made, None, 1.0, ht=P, values=adjoint, blank=True)
    run_scan(call, plan, made, None, 1.0, ht=Q, values=adjoint)
    return P, Q


def _k_first(call: Call, state: Tensor | None) -> Tensor:
    """A state of every sequence, `[N, HV, K, V]`; zeros for none."""
    if state is None:
        shape = (call.sequences, call.shape[3], *call.shape[4:])
        return torch.zeros(shape, dtype=torch.float32, device=call.q.device)
    return dense(state.mT) if call.state_v_first else dense(state)


def _of_caller(call: Call, state: Tensor) -> Tensor:
    return dense(state.mT) if call.state_v_first else state


def _states(call: Call, pieces: Pieces, maps: tuple[Tensor, Tensor]) -> Tensor:
    """The state before each piece, `[slots, HV, K, V]`."""
    P, Q = maps
    between = chain(*_by_sequence(pieces, P, Q), _k_first(call, call.initial_state))
    return dense(pieces.by_slot(between))


def _by_sequence(pieces: Pieces, P: Tensor, Q: Tensor) -> tuple[Tensor, Tensor]:
    """Both by sequence; where a sequence has no further piece, what leaves a state as it is."""
    unit = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
    return pieces.by_sequence(P, unit), pieces.by_sequence(Q, Q.new_zeros(()))


def forward(call: Call, route: str) -> tuple[Tensor, Tensor | None]:
    """(o, final state if asked for) of a call on dense tensors."""
    pieces = cut(call)
    if pieces is None:
        plan = FusedPlan.of(call, route)
        return scan(call, plan, prepare(call, plan))
    packed = pieces.packed(call)
    plan = FusedPlan.of(packed, route)
    made = prepare(packed, plan)
    packed = replace(packed, initial_state=_states(call, pieces, _maps(packed, plan, made, adjoint=False)))
    o, ht = scan(packed, plan, made)
    if ht is not None:
        ht = _of_caller(call, pieces.last(ht, _k_first(call, call.initial_state)))
    return o.view(call.v.shape), ht


def gradients(call: Call, do: Tensor | None, dht: Tensor | None, route: str) -> dict[str, Tensor | None]:
    """Every gradient of a validated call by the name of its argument, from its inputs alone."""
    call = replace(call, **{name: dense(getattr(call, name)) for name in DIFFERENTIABLE})
    pieces = cut(call)
    if pieces is None:
        return fused_bwd.gradients(call, FusedPlan.of(call, route), do, dht)
    packed = pieces.packed(call)
    plan = FusedPlan.of(packed, route)
    made, factors = fused_bwd.prepare_adjoint(packed, plan)
    maps = _maps(packed, plan, made, adjoint=True)
    packed = replace(packed, initial_state=_states(call, pieces, maps))
    do = torch.zeros_like(packed.v) if do is None else dense(do).view(packed.v.shape)
    arriving = _arriving(call, pieces, maps[0], fused_bwd.reverse_scan(packed, plan, made, do, None)[1], dht)
    found = fused_bwd.gradients_from(packed, plan, made, factors, do, dense(pieces.by_slot(arriving, after=True)))
    dh0 = found.pop("initial_state")
    if call.initial_state is not None:
        empty = (pieces.counts == 0).view(-1, 1, 1, 1)
        dh0 = torch.where(empty, arriving[:, 0], dh0[pieces.first.clamp(max=len(dh0) - 1)])
        found["initial_state"] = _of_caller(call, dh0)
    shaped = {name: found[name].view(getattr(call, name).shape) for name in ("q", "k", "v", "g", "beta")}
    return {"initial_state": None, **found, **shaped}


def _arriving(call: Call, pieces: Pieces, P: Tensor, own: Tensor, dht: Tensor | None) -> Tensor:
    """The gradients that arrive before and behind each piece, `[N, most + 1, HV, K, V]`."""
    return chain_back(*_by_sequence(pieces, P, own), _k_first(call, dht))


class _SegmentsFunction(torch.autograd.Function):
    """Keeps the inputs; the backward pass computes the states again."""

    @staticmethod
    def forward(ctx, call: Call, route: str, *tensors: Tensor | None):
        chunk_bwd.keep(ctx, call, route, tensors)
        return forward(call, route)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, do, dht):
        formula = lambda call, route, do, dht, _: gradients(call, do, dht, route)  # noqa: E731
        return None, None, *chunk_bwd.kept_gradients(ctx, saved, formula, do, dht)


def run(call: Call, route: str) -> tuple[Tensor, Tensor | None, None]:
    """(o, final state or None, no intermediate states) of a validated call that the route takes."""
    call, tensors, training = chunk_bwd.detached(call)
    o, ht = _SegmentsFunction.apply(call, route, *tensors) if training else forward(call, route)
    return o, ht, None


def refusal(call: Call, route: str) -> str | None:
    """Why a route cannot take a validated call, or should not; None if it may."""
    reason = fused.refusal(call, route)
    return _waste(call) if reason is None and registry.forced_route() != route else reason


def _waste(call: Call) -> str | None:
    """Why pieces do not pay; only a forced route takes such a call."""
    (B, T, _, HV, K, V), N = call.shape, call.sequences
    if B * T // max(N, 1) < LEAST_TOKENS:
        return f"pays from {LEAST_TOKENS} tokens a sequence on, unless it is forced"
    if not call.q.is_cuda:
        return f"pays on GPUs, not on {call.q.device}, unless it is forced"
    programs, most = N * scan_programs(HV, K, V), multiprocessors(call.q.device) // IDLE_FACTOR
    if programs > most:
        return f"pays where {most} programs scan whole sequences, not {programs}, unless it is forced"
    return None


def _precision(route: str) -> PrecisionSpec:
    spec = fused.PRECISION[fused.SAFE_GATE if anchored(route) else fused.UNBOUNDED]
    return replace(spec, segment=BLOCK, gradients=replace(spec.gradients, segment=BLOCK))


PRECISION = {route: _precision(route) for route in (SAFE_GATE, UNBOUNDED)}
SUMMARY = {
    SAFE_GATE: "the fused kernels on pieces of few long sequences, for gates in [-5, 0]",
    UNBOUNDED: "the fused kernels on pieces of few long sequences, for any gate <= 0",
}

for _route, _spec in PRECISION.items():
    registry.register(
        registry.Route(
            id=_route,
            entries=frozenset({"chunk"}),
            summary=SUMMARY[_route],
            verify=functools.partial(refusal, route=_route),
            run=functools.partial(run, route=_route),
            gradients=functools.partial(gradients, route=_route),
            precision=_spec,
            invariant=False,
        )
    )
