"""Authority on the `torch` route: the operator in plain PyTorch, for tensors no kernel takes; gradients by autograd."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from kda import record, registry
from kda.contract import DIFFERENTIABLE, Call, DecodeCall, GateCall
from kda.once import once_differentiable
from kda.precision import OUTPUTS, PrecisionSpec
from kda.recurrent_kernels import L2NORM_EPS

ROUTE = "torch"
PRECISION = PrecisionSpec(algorithm="recurrent", stages=OUTPUTS)
LARGE_NEGATIVE = -40.0  # below it softplus(z) = e^z to the last bit of fp32


def _working(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


class _Dense(torch.autograd.Function):
    """x and its gradient without gaps: on a CPU the exponential of a vector is not to the bit that of its elements."""

    @staticmethod
    def forward(ctx, x):
        return x.contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, grad):
        return grad.contiguous()


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
    def backward(ctx, saved, grad):
        a, decayed = saved
        return (grad * decayed).sum(-1), torch.where(a == 0, 0.0, a * grad)


def _softplus(z: Tensor) -> Tensor:
    return z.clamp(min=0) + torch.log1p(torch.exp(-z.abs()))


class _Sigmoid(torch.autograd.Function):
    """sigmoid(x); the slope is e^-|x| / (1 + e^-|x|)^2, where y (1 - y) is 0 from x = 17 on."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.sigmoid(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, grad):
        (x,) = saved
        e = torch.exp(-x.abs())
        return grad * (e / (1 + e).square())


class _SoftplusGate(torch.autograd.Function):
    """-exp(A) softplus(z), with the exponents added where either factor alone would leave the format."""

    @staticmethod
    def forward(ctx, z, A):
        ctx.save_for_backward(z, A)
        return -torch.where(z < LARGE_NEGATIVE, torch.exp(A + z), torch.exp(A) * _softplus(z))

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, grad):
        z, A = saved
        far, near = torch.exp(A + z), torch.exp(A)
        is_far = z < LARGE_NEGATIVE
        dz = torch.where(grad == 0, 0.0, -grad * torch.where(is_far, far, near * torch.sigmoid(z)))
        # exp(A) times the sum, not the sum of products: single terms may overflow where their sum does not.
        scaled = torch.where(is_far | (grad == 0), 0.0, -grad * _softplus(z)).sum_to_size(A.shape)
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
    def backward(ctx, saved, grad):
        z, A = saved
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


def _prepared(call: Call, tokens: int) -> tuple[Tensor, ...]:
    """q, k, v, g, beta of the first `tokens` rows in the working precision, one per value head, options applied."""
    _, _, H, HV, _, _ = call.shape
    given = (getattr(call, name, None) for name in (*DIFFERENTIABLE, "state_pool"))
    double = any(x is not None and x.dtype == torch.float64 for x in given)
    work = lambda x: x[:, :tokens].to(torch.float64 if double else torch.float32)  # noqa: E731
    q, k, v, g, beta = (work(x) for x in (call.q, call.k, call.v, call.g, call.beta))
    if call.use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS.value) for x in (q, k))
    q, k = (x.repeat_interleave(HV // H, dim=2) for x in (q, k))
    if call.use_gate_in_kernel:
        g = _activate(g, call.A_log, call.dt_bias, call.lower_bound)
    if call.use_beta_sigmoid_in_kernel:
        beta = _Sigmoid.apply(beta) * call.beta_range
    return q * call.scale, k, v, g, beta


def _read(state: Tensor, row: Tensor) -> Tensor:
    """S^T x, `[B, HV, V]`: a product and a sum, which unlike a matrix product autocast leaves in their formats."""
    return (state * row[..., None]).sum(-2)


def _sequence(q, k, v, g, beta, state, chunk_size: int | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """One dense batch: (o `[B, L, HV, V]`, last state, the states at chunk starts), all of them new tensors."""
    if not q.shape[1]:
        return v.clone(), state.clone(), []
    outputs, starts = [], []
    for t in range(q.shape[1]):
        if chunk_size and t % chunk_size == 0:
            starts.append(state.detach())
        state = _Decay.apply(g[:, t], state)
        update = beta[:, t, :, None] * (v[:, t] - _read(state, k[:, t]))
        state = state + k[:, t, :, :, None] * update[:, :, None, :]
        outputs.append(_read(state, q[:, t]))
    return torch.stack(outputs, 1), state, starts


def _sequences(offsets: list[int], q, k, v, g, beta, states, chunk_size) -> tuple[Tensor, Tensor, list[Tensor]]:
    """A packed batch: the results of its sequences, one after the other."""
    parts = [
        _sequence(*(x[:, a:b] for x in (q, k, v, g, beta)), states[n : n + 1], chunk_size)
        for n, (a, b) in enumerate(itertools.pairwise(offsets))
    ]
    outputs, finals, starts = zip(*parts) if parts else ((), (), ())
    return torch.cat([v[:, :0], *outputs], 1), torch.cat([states[:0], *finals]), [h for each in starts for h in each]


def run(call: Call) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(o, final state or None, intermediate states or None) of a validated call."""
    record.note(ROUTE, "recurrence")
    _, T, _, HV, K, V = call.shape
    offsets = None if call.cu_seqlens is None else call.offsets().tolist()
    tensors = _prepared(call, T if offsets is None else offsets[-1])
    transpose = (lambda x: x.mT) if call.state_v_first else (lambda x: x)
    if call.initial_state is None:
        states = tensors[0].new_zeros(call.sequences, HV, K, V)
    else:
        states = transpose(call.initial_state).to(tensors[0].dtype)
    chunk = call.chunk_size if call.return_intermediate_states else None
    if offsets is None:
        o, final, starts = _sequence(*tensors, states, chunk)
    else:
        o, final, starts = _sequences(offsets, *tensors, states, chunk)
        o = F.pad(o, (0, 0, 0, 0, offsets[0], T - offsets[-1]))
    state_dtype = torch.float64 if call.q.dtype == torch.float64 else torch.float32
    stored = lambda x: transpose(x).to(state_dtype).contiguous()  # noqa: E731
    h = None
    if chunk:
        h = stored(torch.stack(starts, 1) if starts else states.new_zeros(call.q.shape[0], 0, HV, K, V))
    return o.to(call.q.dtype), stored(final) if call.output_final_state else None, h


@torch.no_grad()
def run_decode(call: DecodeCall) -> Tensor:
    """o of a validated call, whose pool is changed: rounded to its format after every token, as it would be stored.

    Token by token from the start: on a CPU the exponential of a vector is not to the bit that of its elements.
    """
    record.note(ROUTE, "decode")
    pool = call.state_pool.mT if call.state_v_first else call.state_pool
    rows = {name: getattr(call, name).flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
    o = torch.zeros_like(rows["v"], memory_format=torch.contiguous_format)
    table, first = call.slot_table().tolist(), call.first_slots().tolist()
    for n, (begin, end) in enumerate(itertools.pairwise(call.offsets().tolist())):
        if first[n] < 0:
            continue
        state = pool[first[n]].contiguous()[None]
        for t in range(begin, end):
            token = _prepared(replace(call, **{name: x[:, t : t + 1] for name, x in rows.items()}), 1)
            o[:, t : t + 1], state, _ = _sequence(*token, state.to(token[0].dtype), None)
            state = state.to(pool.dtype)
            slot = table[n][min(t - begin, call.columns - 1)]
            if slot >= 0 and (t == end - 1 or t - begin < call.columns - 1):
                with torch.inference_mode():  # outside of it PyTorch changes no pool that was made inside
                    pool[slot] = state[0]
    return o[0].unflatten(0, call.v.shape[:2])


def gradients(call: Call | GateCall, *grads: Tensor | None) -> dict[str, Tensor | None]:
    """Every gradient of a validated call by the name of its argument.

    A compiled backward pass runs this where autograd is switched off for the thread; another thread has its own state.
    """
    with ThreadPoolExecutor(1) as worker:
        return worker.submit(_gradients, call, grads).result()


def _gradients(call: Call | GateCall, grads: tuple[Tensor | None, ...]) -> dict[str, Tensor | None]:
    names = [name for name in DIFFERENTIABLE if getattr(call, name, None) is not None]
    leaves = [getattr(call, name).detach().requires_grad_() for name in names]
    with torch.enable_grad():
        made = _run(replace(call, **dict(zip(names, leaves))))
    pairs = [(y, dy) for y, dy in zip(made if isinstance(made, tuple) else (made,), grads) if dy is not None]
    outputs, incoming = zip(*pairs)
    return dict(zip(names, torch.autograd.grad(outputs, leaves, incoming, allow_unused=True, materialize_grads=True)))


def _run(call: Call | GateCall) -> Tensor | tuple[Tensor, Tensor | None, Tensor | None]:
    dense = lambda x: None if x is None else _Dense.apply(x)  # noqa: E731
    call = replace(call, **{name: dense(getattr(call, name)) for name in DIFFERENTIABLE if hasattr(call, name)})
    if isinstance(call, DecodeCall):
        return run_decode(call)
    return dense(run_gate(call)) if call.entry == "gate" else tuple(map(dense, run(call)))


def _verify(call: Call | GateCall) -> str | None:
    if call.g.device.type != "cpu" and registry.forced_route() != ROUTE:
        return f"one token at a time in PyTorch: serves tensors on {call.g.device} only when it is forced"
    return None


registry.register(
    registry.Route(
        id=ROUTE,
        entries=frozenset({"chunk", "recurrent", "gate", "decode"}),
        summary="plain PyTorch, every option and float64; for CPU tensors without the interpreter",
        verify=_verify,
        run=_run,
        gradients=gradients,
        precision=PRECISION,
        invariant=False,
    )
)
