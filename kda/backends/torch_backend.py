"""Authority on the `torch` route: the operator in plain PyTorch, for tensors that no kernel can take; gradients by autograd."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from kda import record, registry
from kda.contract import Call, GateCall
from kda.precision import PrecisionSpec
from kda.recurrent_kernels import L2NORM_EPS

ROUTE = "torch"
PRECISION = PrecisionSpec(
    algorithm="recurrent",
    stages={"o": "io", "dq": "io", "dk": "io", "dv": "io", "dbeta": "beta", "dg": "g", "ht": "fp32", "h": "fp32", "dh0": "fp32"},
)
LARGE_NEGATIVE = -40.0  # below it softplus(z) = e^z to the last bit of fp32


def _working(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _Decay(torch.autograd.Function):
    """exp(g) S; where the decay is 0 the row is reset, and so is its gradient (inf * 0 and -inf * 0 never happen)."""

    @staticmethod
    def forward(ctx, g, state):
        a = g.exp()[..., None]
        decayed = torch.where(a == 0, 0.0, a * state)
        ctx.save_for_backward(a, decayed)
        return decayed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        a, decayed = ctx.saved_tensors
        return (grad * decayed).sum(-1), torch.where(a == 0, 0.0, a * grad)


def _softplus(z: Tensor) -> Tensor:
    return z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))


class _SoftplusGate(torch.autograd.Function):
    """-exp(A) softplus(z), with the exponents added where either factor alone would leave the format."""

    @staticmethod
    def forward(ctx, z, A):
        ctx.save_for_backward(z, A)
        return -torch.where(z < LARGE_NEGATIVE, torch.exp(A + z), torch.exp(A) * _softplus(z))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        z, A = ctx.saved_tensors
        far, near = torch.exp(A + z), torch.exp(A)
        is_far = z < LARGE_NEGATIVE
        dz = torch.where(grad == 0, 0.0, -grad * torch.where(is_far, far, near * torch.sigmoid(z)))
        # exp(A) times the sum, not the sum of products: single terms may overflow where their sum does not.
        scaled = torch.where(is_far, 0.0, -grad * _softplus(z)).sum_to_size(A.shape)
        plain = torch.where(is_far & (grad != 0), -grad * far, 0.0).sum_to_size(A.shape)
        return dz, near * scaled + plain


class _BoundedGate(torch.autograd.Function):
    """lower_bound sigmoid(exp(A) z); the slope is e^-|x| / (1 + e^-|x|)^2, which does not cancel."""

    @staticmethod
    def forward(ctx, z, A, lower_bound):
        x = torch.exp(A) * z
        ctx.save_for_backward(z, A)
        ctx.lower_bound = lower_bound
        return lower_bound * torch.sigmoid(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        z, A = ctx.saved_tensors
        x = torch.exp(A) * z
        e = torch.exp(-x.abs())
        slope = e / (1 + e).square()
        steep = torch.where(x.abs() > -LARGE_NEGATIVE, torch.exp(A - x.abs()), slope * torch.exp(A))
        dy = grad * ctx.lower_bound
        dz = torch.where(dy == 0, 0.0, dy * steep)
        dA = torch.where((dy == 0) | (slope == 0), 0.0, dy * (slope * x))
        return dz, dA.sum_to_size(A.shape), None


def _activate(g: Tensor, A_log: Tensor | None, dt_bias: Tensor | None, lower_bound: float | None) -> Tensor:
    HV, K = g.shape[2:]
    z = _working(g) if dt_bias is None else _working(g) + _working(dt_bias).view(HV, K)
    A = z.new_zeros(HV, 1) if A_log is None else _working(A_log).to(z.dtype).view(HV, 1)
    return _SoftplusGate.apply(z, A) if lower_bound is None else _BoundedGate.apply(z, A, lower_bound)


def run_gate(call: GateCall) -> Tensor:
    """The activated gate of a validated call."""
    record.note(ROUTE, "gate")
    return _activate(call.g, call.A_log, call.dt_bias, call.lower_bound).to(call.output_dtype)


def _prepared(call: Call) -> tuple[Tensor, ...]:
    """q, k, v, g, beta in the working precision, one per value head, options applied."""
    _, _, H, HV, _, _ = call.shape
    q, k = _working(call.q), _working(call.k)
    if call.use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS.value) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    g = _activate(call.g, call.A_log, call.dt_bias, call.lower_bound) if call.use_gate_in_kernel else _working(call.g)
    beta = _working(call.beta)
    if call.use_beta_sigmoid_in_kernel:
        beta = torch.sigmoid(beta) * call.beta_range
    return q * call.scale, k, _working(call.v), g, beta


def _sequence(q, k, v, g, beta, state, chunk_size: int | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One dense batch: (o `[B, L, HV, V]`, last state, the states at chunk starts)."""
    outputs, starts = [], []
    for t in range(q.shape[1]):
        if chunk_size and t % chunk_size == 0:
            starts.append(state.detach())
        state = _Decay.apply(g[:, t], state)
        update = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * update[:, :, None, :]
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(outputs, 1) if outputs else v, state, starts


def run(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final state or None, intermediate states or None) of a validated call."""
    record.note(ROUTE, "recurrence")
    _, T, _, HV, K, V = call.shape
    tensors = _prepared(call)
    state_dtype = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    transpose = (lambda x: x.mT) if call.state_v_first else (lambda x: x)
    if call.initial_state is None:
        states = tensors[0].new_zeros(call.sequences, HV, K, V, dtype=state_dtype)
    else:
        states = transpose(call.initial_state).to(state_dtype)
    chunk = call.chunk_size if call.return_intermediate_states else None
    if call.cu_seqlens is None:
        o, final, starts = _sequence(*tensors, states, chunk)
        h = torch.stack(starts, 1) if starts else None
    else:
        offsets = call.offsets().tolist()
        parts = [
            _sequence(*(x[:, a:b] for x in tensors), states[n : n + 1], chunk)
            for n, (a, b) in enumerate(zip(offsets, offsets[1:]))
        ]
        o = torch.cat([tensors[2][:, :0], *(part[0] for part in parts)], 1)
        o = F.pad(o, (0, 0, 0, 0, offsets[0], T - offsets[-1]))
        final = torch.cat([states[:0], *(part[1] for part in parts)])
        starts = [state for part in parts for state in part[2]]
        h = torch.stack(starts, 1) if starts else None
    if chunk:
        h = states.new_zeros(call.q.shape[0], 0, HV, K, V) if h is None else h
        h = transpose(h).contiguous()
    final = transpose(final).contiguous() if call.output_final_state else None
    return o.to(call.q.dtype), final, h


def _verify(call: Call | GateCall) -> str | None:
    if call.g.device.type != "cpu" and registry.forced_route() != ROUTE:
        return f"one token at a time in PyTorch: serves tensors on {call.g.device} only when it is forced"
    return None


registry.register(
    registry.Route(
        id=ROUTE,
        entries=frozenset({"chunk", "recurrent", "gate"}),
        summary="plain PyTorch, every option and float64; for CPU tensors without the interpreter",
        verify=_verify,
        run=lambda call: run_gate(call) if call.entry == "gate" else run(call),
        precision=PRECISION,
    )
)
