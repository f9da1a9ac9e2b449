"""Authority on the fused chunk routes: which calls they take, the order of their kernels, and their gradients."""

import functools
import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kda import chunk_bwd, chunk_fwd, registry
from kda.chunk_fwd import BLOCK, Plan, launch
from kda.contract import SAFE_BOUND, Call
from kda.fused_prep import kda_fused_prep_kernel
from kda.fused_scan import kda_fused_index_kernel, kda_fused_scan_kernel
from kda.gate import dense
from kda.once import once_differentiable
from kda.precision import OUTPUTS, PrecisionSpec

SAFE_GATE, UNBOUNDED = "fused-safe_gate", "fused-unbounded"
WIDTHS = (64, 128, 256)
INDEX_SLOTS = 128  # slots per program of the index kernel
FIRST_ARCH, TMA_ARCH = 80, 90


@dataclass(frozen=True)
class Tile:
    """How a scan of states of K rows is cut and pipelined, with TMA and without."""

    BV: int
    num_warps: int
    tma_stages: int
    stages: int


# Configurations go by K and the route alone, so that no result depends on a batch or a length, and nothing is tuned.
SCAN = {64: Tile(64, 4, 6, 3), 128: Tile(64, 4, 6, 3), 256: Tile(64, 8, 3, 2)}
# Columns of K at a time: as many as leave three chunks, of one warp each, to a scheduler's registers.
PREP = {
    SAFE_GATE: {"BK": 32, "num_warps": 1},
    UNBOUNDED: {"BK": 32, "num_warps": 1, "maxnreg": 168},  # uncapped, a fifth slower on an H200
}


@functools.cache
def _arch(device: torch.device) -> int:
    """Compute capability times ten; 0 where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@dataclass(frozen=True)
class FusedPlan:
    """How a call is computed. `shift` is c of NOTE [Shifted rows]; `slots` are those of the workspace."""

    route: str
    shift: int
    slots: int
    gate: str
    solved: str
    tma: bool

    @classmethod
    def of(cls, call: Call, route: str) -> "FusedPlan":
        B, T, _, HV, _, _ = call.shape
        bound = SAFE_BOUND if call.lower_bound is None else call.lower_bound
        activation = "softplus" if call.lower_bound is None else "bounded"
        slots = B * -(-T // BLOCK) if call.cu_seqlens is None else T // BLOCK + call.sequences
        # Unit keys and beta in [0, 2] keep the entries of A_qk and R below 2; nothing else is known to fit into fp16.
        small = call.use_qk_l2norm_in_kernel and call.use_beta_sigmoid_in_kernel
        return cls(
            route=route,
            shift=round(BLOCK / 2 * abs(bound) * math.log2(math.e)) if route == SAFE_GATE else 0,
            slots=slots,
            gate=activation if call.use_gate_in_kernel else "none",
            solved="fp16" if small else "tf32",
            tma=_arch(call.q.device) >= TMA_ARCH and T * call.sequences > 0 and 2 * BLOCK * slots * HV < 2**31,
        )


@dataclass(frozen=True)
class Workspace:
    """What the scan needs of each chunk, by slot and value head: see `kda_fused_prep_kernel`."""

    kq_decayed: Tensor
    k_rest: Tensor
    response: Tensor
    decay: Tensor

    @classmethod
    def of(cls, call: Call, plan: FusedPlan) -> "Workspace":
        _, _, _, HV, K, _ = call.shape
        empty = functools.partial(torch.empty, device=call.q.device)
        operands = functools.partial(empty, dtype=torch.bfloat16)
        lead = (plan.slots, HV)
        return cls(
            operands(*lead, 2 * BLOCK, K),
            operands(*lead, BLOCK, K),
            operands(*lead, 2 * BLOCK, BLOCK),
            empty(*lead, K, dtype=torch.float32),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        return self.kq_decayed, self.k_rest, self.response, self.decay


def chunk_tables(call: Call, plan: FusedPlan) -> tuple[Tensor | None, Tensor | None]:
    """(first row, tokens) of every slot, int64; a dense batch needs none."""
    if call.cu_seqlens is None:
        return None, None
    rows, counts = torch.empty(2, plan.slots, dtype=torch.int64, device=call.q.device)
    N, T = call.sequences, call.q.shape[1]
    if N:
        sizes = (N, T, plan.slots, N.bit_length())
        tile = {"C": BLOCK, "BLOCK": INDEX_SLOTS, "num_warps": 4}
        programs = triton.cdiv(plan.slots, INDEX_SLOTS)
        launch(plan, kda_fused_index_kernel, programs, dense(call.cu_seqlens), rows, counts, *sizes, **tile)
    return rows, counts


def prepare(call: Call, plan: FusedPlan) -> Workspace:
    """Every chunk as an operator, all of them at once."""
    _, T, H, HV, K, _ = call.shape
    made = Workspace.of(call, plan)
    inputs = (call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias)
    sizes = (call.lower_bound or 0.0, call.beta_range, float(plan.shift), T, H, HV)
    flags = {
        "GATE": plan.gate,
        "ANCHORED": plan.route == SAFE_GATE,
        "L2NORM": call.use_qk_l2norm_in_kernel,
        "BETA_SIGMOID": call.use_beta_sigmoid_in_kernel,
        "SOLVED": plan.solved,
    }
    tile = {"K": K, "C": BLOCK, **PREP[plan.route]}
    programs = plan.slots * HV if call.sequences else 0
    tables = chunk_tables(call, plan)
    launch(plan, kda_fused_prep_kernel, programs, *inputs, *made.tensors(), *tables, *sizes, **flags, **tile)
    return made


def _blocks(plan: FusedPlan, tile: Tile, v: Tensor, o: Tensor, made: Workspace) -> tuple[TensorDescriptor | None, ...]:
    """Descriptors of v, o and the workspace for TMA, whose addresses must be multiples of 16 bytes."""
    if not plan.tma or v.data_ptr() % 16:
        return (None,) * 5
    HV, V = v.shape[2:]
    C, K = made.k_rest.shape[2:]
    cut = lambda x, width, *block: TensorDescriptor.from_tensor(x.view(-1, width), list(block))  # noqa: E731
    values = (cut(x, HV * V, C, tile.BV) for x in (v, o))
    return *values, cut(made.kq_decayed, K, 2 * C, K), cut(made.k_rest, K, C, K), cut(made.response, C, 2 * C, C)


def scan(call: Call, plan: FusedPlan, made: Workspace) -> tuple[Tensor, Tensor | None]:
    """(o, final state if asked for)."""
    _, T, _, HV, K, V = call.shape
    N, tile = call.sequences, SCAN[K]
    o = (torch.empty if N else torch.zeros)(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    ht = torch.empty(call.state_shape, dtype=torch.float32, device=o.device) if call.output_final_state else None
    blocks = _blocks(plan, tile, call.v, o, made)
    arguments = (call.v, o, *made.tensors(), call.initial_state, ht, dense(call.cu_seqlens), *blocks)
    sizes = (call.scale, 2.0**-plan.shift, N, T, HV)
    stages = tile.stages if blocks[0] is None else tile.tma_stages
    cut = {"K": K, "V": V, "C": BLOCK, "BV": tile.BV, "V_FIRST": call.state_v_first, "STAGES": stages}
    launch(plan, kda_fused_scan_kernel, N * HV * (V // tile.BV), *arguments, *sizes, **cut, num_warps=tile.num_warps)
    return o, ht


class _FusedFunction(torch.autograd.Function):
    """Keeps the inputs; the backward pass is that of the staged route, which computes its own forward stages."""

    @staticmethod
    def forward(ctx, call: Call, plan: FusedPlan, *tensors: Tensor | None):
        chunk_bwd.keep(ctx, call, Plan.of(call, plan.route), tensors)
        return scan(call, plan, prepare(call, plan))

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, do, dht):
        return None, None, *chunk_bwd.kept_gradients(ctx, saved, do, dht)


def chunk_kda_fused(call: Call, route: str) -> tuple[Tensor, Tensor | None, None]:
    """(o, final state or None, no intermediate states) of a validated call that the route takes."""
    call, tensors, training = chunk_bwd.detached(call)
    plan = FusedPlan.of(call, route)
    o, ht = _FusedFunction.apply(call, plan, *tensors) if training else scan(call, plan, prepare(call, plan))
    return o, ht, None


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
    if call.q.is_cuda and _arch(call.q.device) < FIRST_ARCH:
        return f"needs bf16 tensor cores: sm_{FIRST_ARCH} or newer, not sm_{_arch(call.q.device)}"
    return chunk_bwd.refusal(call, route)


def _precision(diagonal: str, gradients: PrecisionSpec) -> PrecisionSpec:
    stages = {"operand": "bf16", "intra": "bf16", "merge": "tf32_rn", "stored_inverse": "bf16", "state": "fp32"}
    form = {"chunk": BLOCK, "diagonal": diagonal, "inverse": "substitution", "form": "residual"}
    return PrecisionSpec("chunk", {**OUTPUTS, **stages}, **form, gradients=gradients)


PRECISION = {
    SAFE_GATE: _precision("anchor_apart", chunk_bwd.PRECISION[chunk_fwd.SAFE_GATE]),
    UNBOUNDED: _precision("halving", chunk_bwd.PRECISION[chunk_fwd.UNBOUNDED]),
}
SUMMARY = {
    SAFE_GATE: "two kernels in bf16 for gates in [-5, 0]; gradients by the staged kernels",
    UNBOUNDED: "two kernels in bf16 for any gate <= 0; gradients by the staged kernels",
}

for _route, _spec in PRECISION.items():
    registry.register(
        registry.Route(
            id=_route,
            entries=frozenset({"chunk"}),
            summary=SUMMARY[_route],
            verify=functools.partial(refusal, route=_route),
            run=functools.partial(chunk_kda_fused, route=_route),
            gradients=functools.partial(chunk_bwd.gradients, route=_route),
            precision=_spec,
        )
    )
