"""Authority on the segment-parallel routes: long sequences of few heads in pieces, by the kernels of the fused ones."""

import functools
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from kda import chunk_bwd, fused, fused_bwd, fused_fwd, fused_stages, registry, trace
from kda.chunk_fwd import BLOCK, anchored
from kda.contract import DIFFERENTIABLE, Call
from kda.fused_fwd import SCAN, FusedPlan, Workspace, prepare, scan
from kda.gate import dense
from kda.once import once_differentiable
from kda.precision import PrecisionSpec
from kda.segments import Pieces, chain, chain_back, identities

SAFE_GATE, UNBOUNDED = "segment_parallel-safe_gate", "segment_parallel-unbounded"
KERNELS = (*fused.PRECISION, SAFE_GATE, UNBOUNDED)  # routes whose kernels `maps` and `state_gradient` run
PROGRAMS = 256  # of a scan over all pieces of a call, about: two for a multiprocessor
# Where it pays: three scans over pieces instead of one over whole sequences gain where that one leaves half of the
# multiprocessors idle or more, and for longer than the chain takes. On an H200, times as fast as one scan, forward and
# with gradients: 65536 tokens of 32 heads 1.10 and 1.15, but 16384 tokens 0.77 and 1.01, of 8 heads 0.47 and 0.49.
IDLE_FACTOR = 2  # multiprocessors for each program of the scan over whole sequences
LEAST_TOKENS = 65536  # of a sequence


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


@dataclass(frozen=True)
class _Prepared:
    """A call on dense tensors whose chunks are prepared, in pieces: `packed` has them as its sequences."""

    call: Call
    pieces: Pieces
    packed: Call
    plan: FusedPlan
    made: Workspace

    @classmethod
    def of(cls, call: Call, pieces: Pieces, route: str, adjoint: bool = False) -> "_Prepared":
        packed = pieces.packed(call)
        plan = FusedPlan.of(packed, route)
        return cls(call, pieces, packed, plan, prepare(packed, plan, forward=not adjoint, adjoint=adjoint))

    def maps(self) -> tuple[Tensor, Tensor]:
        """(P `[N, most, HV, K, K]`, Q `[N, most, HV, K, V]`); where a sequence has no further piece, P is 1 and Q 0."""
        P, Q = fused_fwd.maps(self.packed, self.plan, self.made)
        unit = torch.eye(P.shape[-1], dtype=P.dtype, device=P.device)
        return self.pieces.by_sequence(P, unit), self.pieces.by_sequence(Q, 0.0)

    def from_states(self, states: Tensor) -> "_Prepared":
        """With a state before each piece, of `[N, most + 1, HV, K, V]`."""
        if trace.is_open():
            fused_stages.show_pieces(self.pieces, "piece_states", states)
        return replace(self, packed=replace(self.packed, initial_state=dense(self.pieces.by_slot(states))))

    def arriving(self, P: Tensor, do: Tensor, dht: Tensor) -> Tensor:
        """The gradients of the states before and behind each piece, `[N, most + 1, HV, K, V]`."""
        unread = torch.empty(self.packed.state_shape, dtype=torch.float32, device=do.device)
        bare = replace(self.packed, initial_state=unread)
        _, own = fused_bwd.reverse_scan(bare, self.plan, self.made, do, None)
        return chain_back(P, self.pieces.by_sequence(own, 0.0), dht)


def _k_first(call: Call, state: Tensor | None) -> Tensor:
    """A state of every sequence, `[N, HV, K, V]`; zeros for none."""
    if state is None:
        shape = (call.sequences, call.shape[3], *call.shape[4:])
        return torch.zeros(shape, dtype=torch.float32, device=call.q.device)
    return dense(state.mT) if call.state_v_first else dense(state)


def _of_caller(call: Call, state: Tensor) -> Tensor:
    return dense(state.mT) if call.state_v_first else state


def forward(call: Call, route: str) -> tuple[Tensor, Tensor | None]:
    """(o, final state if asked for) of a call on dense tensors."""
    pieces = cut(call)
    if pieces is None:
        plan = FusedPlan.of(call, route)
        return scan(call, plan, prepare(call, plan))
    first = _k_first(call, call.initial_state)
    cut_up = _Prepared.of(call, pieces, route)
    cut_up = cut_up.from_states(chain(*cut_up.maps(), first))
    o, ht = scan(cut_up.packed, cut_up.plan, cut_up.made)
    return o.view(call.v.shape), None if ht is None else _of_caller(call, pieces.last(ht))


def gradients(call: Call, do: Tensor | None, dht: Tensor | None, route: str) -> dict[str, Tensor | None]:
    """Every gradient of a validated call by the name of its argument, from its inputs alone."""
    call = replace(call, **{name: dense(getattr(call, name)) for name in DIFFERENTIABLE})
    pieces = cut(call)
    if pieces is None:
        return fused_bwd.gradients(call, FusedPlan.of(call, route), do, dht)
    cut_up = _Prepared.of(call, pieces, route, adjoint=True)
    P, Q = cut_up.maps()
    cut_up = cut_up.from_states(chain(P, Q, _k_first(call, call.initial_state)))
    do = torch.zeros_like(cut_up.packed.v) if do is None else dense(do).view(cut_up.packed.v.shape)
    arriving = cut_up.arriving(P, do, _k_first(call, dht))
    if trace.is_open():
        fused_stages.show_pieces(pieces, "piece_gradients", arriving, after=True)
    behind = dense(pieces.by_slot(arriving, after=True))
    kept = fused_bwd.values_and_states(cut_up.packed, cut_up.plan, cut_up.made)
    found = fused_bwd.gradients_from(cut_up.packed, cut_up.plan, kept, do, behind)
    dh0 = found.pop("initial_state")
    if call.initial_state is not None:
        found["initial_state"] = _of_caller(call, dh0[pieces.first])
    shaped = {name: found[name].view(getattr(call, name).shape) for name in ("q", "k", "v", "g", "beta")}
    return {"initial_state": None, **found, **shaped}


def maps(call: Call, route: str) -> tuple[Tensor, Tensor]:
    """(P `[N, HV, K, K]`, Q `[N, HV, K, V]`) of NOTE [Chain of states] of a validated K-first call: no output is made.

    `route` is one of KERNELS.
    """
    call = replace(call, **{name: dense(getattr(call, name)) for name in DIFFERENTIABLE})
    pieces, N, HV, K = cut(call), call.sequences, *call.shape[3:5]
    if pieces is None:
        plan = FusedPlan.of(call, route)
        return fused_fwd.maps(call, plan, prepare(call, plan))
    P, Q = _Prepared.of(call, pieces, route).maps()
    units = identities(N, HV, K, call.q.device)
    return chain(P, torch.zeros_like(P), units)[:, -1], chain(P, Q, _k_first(call, None))[:, -1]


def state_gradient(call: Call, do: Tensor, dht: Tensor, route: str) -> Tensor:
    """The gradient of the initial state, which is there, of a validated K-first call; as `maps`."""
    call = replace(call, **{name: dense(getattr(call, name)) for name in DIFFERENTIABLE})
    pieces, do = cut(call), dense(do)
    if pieces is None:
        plan = FusedPlan.of(call, route)
        return fused_bwd.reverse_scan(call, plan, fused_bwd.prepare_adjoint(call, plan), do, dense(dht))[1]
    cut_up = _Prepared.of(call, pieces, route, adjoint=True)
    return cut_up.arriving(cut_up.maps()[0], do.view(cut_up.packed.v.shape), _k_first(call, dht))[:, 0]


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

registry.register_chunk(PRECISION, SUMMARY, refusal, run, gradients, invariant=False)
