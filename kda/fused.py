"""Authority on the fused chunk routes: which calls they take, what they keep for gradients, and where they round."""

from dataclasses import replace

import torch
from torch import Tensor

from kda import chunk_bwd, fused_bwd, fused_fwd, registry
from kda.chunk_fwd import BLOCK
from kda.contract import DIFFERENTIABLE, Call
from kda.fused_fwd import SAFE_GATE, UNBOUNDED, WIDTHS, FusedPlan, prepare, scan
from kda.gate import dense
from kda.once import once_differentiable
from kda.precision import OUTPUTS, PrecisionSpec

FIRST_ARCH = 80


class _FusedFunction(torch.autograd.Function):
    """Keeps the inputs; with `disable_recompute` what is made of them too, which is otherwise made again."""

    @staticmethod
    def forward(ctx, call: Call, plan: FusedPlan, *tensors: Tensor | None):
        if not call.disable_recompute:
            chunk_bwd.keep(ctx, call, plan, tensors)
            return scan(call, plan, prepare(call, plan))
        o, ht, kept = fused_bwd.keeping(call, plan)
        chunk_bwd.keep(ctx, call, plan, tensors, kept.tensors())
        return o, ht

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, do, dht):
        return None, None, *chunk_bwd.kept_gradients(ctx, saved, fused_bwd.gradients, do, dht)


def chunk_kda_fused(call: Call, route: str) -> tuple[Tensor, Tensor | None, None]:
    """(o, final state or None, no intermediate states) of a validated call that the route takes."""
    call, tensors, training = chunk_bwd.detached(call)
    plan = FusedPlan.of(call, route)
    o, ht = _FusedFunction.apply(call, plan, *tensors) if training else scan(call, plan, prepare(call, plan))
    return o, ht, None


def gradients(call: Call, do: Tensor | None, dht: Tensor | None, route: str) -> dict[str, Tensor | None]:
    """Every gradient of a validated call by the name of its argument, from its inputs alone."""
    call = replace(call, **{name: dense(getattr(call, name)) for name in DIFFERENTIABLE})
    return fused_bwd.gradients(call, FusedPlan.of(call, route), do, dht)


def refusal(call: Call, route: str) -> str | None:
    """Why a fused route cannot take a validated call, or None."""
    K, V = call.shape[4:]
    if call.q.dtype != torch.bfloat16:
        return f"its operands are bf16, and q, k, v are {str(call.q.dtype).removeprefix('torch.')}"
    if K not in WIDTHS or V not in WIDTHS:
        return f"has tiles for K and V in {WIDTHS}, not K = {K}, V = {V}"
    if call.return_intermediate_states:
        return "keeps states in registers, and has no intermediate ones to return"
    if torch.version.hip and call.q.is_cuda:
        return "exchanges numbers within a warp in a way only proven on NVIDIA GPUs"
    if call.q.is_cuda and fused_fwd.arch(call.q.device) < FIRST_ARCH:
        return f"needs bf16 tensor cores: sm_{FIRST_ARCH} or newer, not sm_{fused_fwd.arch(call.q.device)}"
    return chunk_bwd.refusal(call, route)


def _precision(diagonal: str, **stages: str) -> PrecisionSpec:
    """In bf16, but for A_kk and R: see NOTE [Chunk as an operator]."""
    common = {"operand": "bf16", "intra": "tf32_rn", "merge": "tf32_rn", "stored_inverse": "fp32", "state": "fp32"}
    form = {"chunk": BLOCK, "diagonal": diagonal, "inverse": "substitution", "form": "residual"}
    return PrecisionSpec("chunk", {**OUTPUTS, **common, **stages}, **form)


def _precisions(diagonal: str) -> PrecisionSpec:
    gradients = replace(_precision(diagonal, pairs="bf16", kept="bf16"), form="solved")
    return replace(_precision(diagonal), gradients=gradients)


PRECISION = {SAFE_GATE: _precisions("anchor_apart"), UNBOUNDED: _precisions("halving")}
SUMMARY = {
    SAFE_GATE: "two kernels in bf16 for gates in [-5, 0], four for gradients",
    UNBOUNDED: "two kernels in bf16 for any gate <= 0, four for gradients",
}

registry.register_chunk(PRECISION, SUMMARY, refusal, chunk_kda_fused, gradients)
