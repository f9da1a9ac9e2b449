"""Authority on the forward pass of the staged chunk route: its plan, the order of its kernels, and what they leave in
memory.
"""

import math
from dataclasses import dataclass, fields

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda import record, relaunch, trace
from kda.adjoints import allocate_tokens
from kda.chunk_index import ChunkIndex
from kda.chunk_intra import kda_chunk_decay_fwd_kernel, kda_chunk_intra_fwd_kernel
from kda.chunk_output import kda_chunk_output_fwd_kernel
from kda.chunk_state import kda_chunk_state_fwd_kernel
from kda.chunk_tiles import store_column
from kda.contract import SAFE_BOUND, Call
from kda.gate import gate_forward
from kda.recurrent_kernels import L2NORM_EPS
from kda.wy_fast import kda_join_blocks_kernel, kda_solve_blocks_kernel, kda_wy_fwd_kernel

SAFE_GATE, UNBOUNDED = "chunk-safe_gate", "chunk-unbounded"
BLOCK = 16  # rows that are solved by substitution, and that share an anchor
NORM_ROWS = 16  # rows of a program that computes norms
STATE_ROWS = 128  # of K, in one tile of a state
SHOWN = ("A_qk", "A_kk", "inverse", "q_decayed", "k_decayed", "k_rest", "decay", "w", "u", "v_new")  # in a trace


@triton.jit
def kda_row_rstd_kernel(x, rstd, num_rows, K, BT: tl.constexpr, BK: tl.constexpr):
    """1 / sqrt(sum x^2 + 1e-6) of each row of x `[num_rows, K]`."""
    o_t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    o_k = tl.arange(0, BK)
    m = (o_t < num_rows)[:, None] & (o_k < K)[None, :]
    b_x = tl.load(x + o_t[:, None] * K + o_k[None, :], mask=m, other=0.0).to(tl.float32)
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) + L2NORM_EPS)
    store_column(rstd + o_t, b_rstd, o_t < num_rows, o_k[None, :])


def anchored(route: str) -> bool:
    """Whether a route counts on bounded gates, as its name says; a fused route's gradients are computed here too."""
    return route.endswith("safe_gate")


def half_span(call: Call, route: str) -> float:
    """2^c of NOTE [Anchored block]; 1 where blocks are not anchored."""
    bound = SAFE_BOUND if call.lower_bound is None else call.lower_bound
    return 2.0 ** round((BLOCK - 1) / 2 * abs(bound) * math.log2(math.e)) if anchored(route) else 1.0


@dataclass(frozen=True)
class Plan:
    """How a call is computed: operands of products with values and states are `DOT`, those of q k and k k `INTRA`."""

    route: str
    DOT: str  # bf16, tf32 or fp32
    INTRA: str  # tf32 or fp32
    half_span: float
    BP: int  # columns of K at a time, in kernels that go through pairs of tokens ...
    BK: int  # ... and in the others
    BV: int

    @classmethod
    def of(cls, call: Call, route: str) -> "Plan":
        """fp32 tensors go by the call's `precision`; fp16 ones by tf32, whose digits and larger range they fit."""
        full = "fp32" if call.precision == "ieee" else "tf32"
        return cls(
            route=route,
            DOT={torch.bfloat16: "bf16", torch.float16: "tf32"}.get(call.q.dtype, full),
            INTRA=full if call.q.dtype == torch.float32 else "tf32",
            half_span=half_span(call, route),
            BP=16,
            BK=_width(call.q.shape[-1]),
            BV=_width(call.v.shape[-1], 32 if call.q.dtype == torch.float32 else 64),
        )

    @property
    def lowest(self) -> int:
        """The first halving level, as a logarithm: blocks below it are anchored."""
        return int(math.log2(BLOCK)) if anchored(self.route) else 0

    @property
    def stored(self) -> torch.dtype:
        """How operands are kept in memory."""
        return torch.bfloat16 if self.DOT == "bf16" else torch.float32

    def pairs(self, chunk: int) -> dict[str, object]:
        """Constants of the kernels that go through pairs of tokens."""
        formats = {"ANCHORED": int(anchored(self.route)), "INTRA": self.INTRA}
        tile = {"C": chunk, "BK": self.BP, "LEVELS": int(math.log2(chunk))}
        return {**tile, **formats, "num_warps": chunk // 16, "num_stages": 1}

    def state_tile(self, call: Call, backward: bool = False) -> dict[str, object]:
        """Constants of the scans: K in one tile or two, and as many columns of V as leave the state in registers. The
        adjoint has one product more under way. See NOTE [Halves of a state].
        """
        BK = _width(call.shape[4], STATE_ROWS)
        halves = call.shape[4] > STATE_ROWS
        tile = {"BK": BK, "BV": _width(call.shape[5], 16 if halves or self.DOT == "fp32" else 32), "HALVES": halves}
        light = self.DOT == "bf16" and not halves
        cost = {"num_warps": 4 if BK < 128 or (light and not backward) else 8, "num_stages": 2 if light else 1}
        return {**tile, "DOT": self.DOT, "V_FIRST": call.state_v_first, **cost}

    def scans(self, call: Call) -> int:
        """Programs of a scan."""
        return call.sequences * call.shape[3] * triton.cdiv(call.shape[5], self.state_tile(call)["BV"])


def _width(size: int, most: int = 64) -> int:
    """A power of two that tensor cores take: `size` or more, or `most`."""
    return max(16, min(most, triton.next_power_of_2(size)))


@dataclass(frozen=True)
class Stages:
    """What the forward pass leaves for the backward, by the names of the oracle's stages where it has them.

    By token: g, the natural-log gate, q_decayed, k_decayed, k_rest, w `[B, T, HV, K]`; q_rstd, k_rstd `[B, T, H]`;
    A_qk, A_kk, inverse `[B, T, HV, C]`, undefined above the diagonal; u, v_new `[B, T, HV, V]`. By slot: decay `[slots,
    HV, K]`, h `[slots, HV, K, V]` (V-first swaps). Tokens of no sequence and slots of no chunk are undefined.
    """

    g: Tensor
    q_rstd: Tensor | None
    k_rstd: Tensor | None
    A_qk: Tensor
    A_kk: Tensor
    inverse: Tensor
    q_decayed: Tensor
    k_decayed: Tensor
    k_rest: Tensor
    decay: Tensor
    w: Tensor
    u: Tensor | None  # not needed by the backward pass
    h: Tensor
    v_new: Tensor

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))


def launch(plan: Plan, kernel, programs: int, *arguments: object, **constants: object) -> None:
    """Run a kernel on that many programs, and say so; none is fine."""
    if programs:
        if record.is_open():
            record.note(plan.route, kernel.__name__, **constants)
        relaunch.launch(kernel, programs, arguments, constants)


def row_rstd(x: Tensor, plan: Plan) -> Tensor:
    """1 / norm of the rows of x `[B, T, H, K]`, fp32 `[B, T, H]`."""
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    count, K = rstd.numel(), x.shape[-1]
    tile = {"BT": NORM_ROWS, "BK": triton.next_power_of_2(K), "num_warps": 4}
    launch(plan, kda_row_rstd_kernel, triton.cdiv(count, NORM_ROWS), x, rstd, count, K, **tile)
    return rstd


def solve(call: Call, plan: Plan, index: ChunkIndex, A_kk: Tensor) -> Tensor:
    """R = (I + diag(beta) A_kk)^-1, its lower triangle, fp32 `[B, T, HV, C]`."""
    HV, C = A_kk.shape[-2:]
    inverse = torch.empty_like(A_kk)
    arguments = (A_kk, call.beta, inverse, index.rows, index.counts, call.beta_range, HV)
    flags = {"C": C, "BETA_SIGMOID": call.use_beta_sigmoid_in_kernel}
    launch(plan, kda_solve_blocks_kernel, index.slots * HV, *arguments, **flags, num_warps=1)
    size = BLOCK
    while size < C:
        pairs = index.slots * HV * (C // (2 * size))
        launch(plan, kda_join_blocks_kernel, pairs, *arguments, **flags, S=size, num_warps=size // 16)
        size *= 2
    return inverse


def forward(call: Call, plan: Plan, index: ChunkIndex) -> tuple[Tensor, Tensor | None, Stages]:
    """(o, final state if asked for, the stages)."""
    B, T, H, HV, K, V = call.shape
    C, slots = index.chunk, index.slots
    empty = lambda *shape, dtype=plan.stored: torch.empty(*shape, dtype=dtype, device=call.q.device)  # noqa: E731
    g, q_rstd, k_rstd, fp32 = call.g, None, None, {"dtype": torch.float32}
    if call.use_gate_in_kernel:
        g = gate_forward(g, call.A_log, call.dt_bias, call.lower_bound, torch.float32, plan.route)
    if call.use_qk_l2norm_in_kernel:
        q_rstd, k_rstd = row_rstd(call.q, plan), row_rstd(call.k, plan)

    A_qk, A_kk = empty(B, T, HV, C), empty(B, T, HV, C, **fp32)
    q_decayed, k_decayed, k_rest, w = (empty(B, T, HV, K) for _ in range(4))
    decay = empty(slots, HV, K, **fp32)
    operands = (call.q, call.k, g, q_rstd, k_rstd)
    decayed = (q_decayed, k_decayed, k_rest, decay, index.rows, index.counts, H, HV, K)
    tile = {"C": C, "BK": plan.BK, "DOT": plan.DOT, "num_warps": 4}
    launch(plan, kda_chunk_decay_fwd_kernel, slots * HV * triton.cdiv(K, plan.BK), *operands, *decayed, **tile)
    pairs = (A_qk, A_kk, index.rows, index.counts, call.scale, plan.half_span, plan.lowest, H, HV, K)
    launch(plan, kda_chunk_intra_fwd_kernel, slots * HV, *operands, *pairs, DOT=plan.DOT, **plan.pairs(C))

    inverse = solve(call, plan, index, A_kk)
    u, v_new = empty(B, T, HV, V, **fp32), empty(B, T, HV, V)
    factors = (inverse, call.beta, k_decayed, call.v, w, u, index.rows, index.counts, call.beta_range, HV, K, V)
    flags = {"DOT": plan.DOT, "BETA_SIGMOID": call.use_beta_sigmoid_in_kernel, "num_warps": 4}
    launch(plan, kda_wy_fwd_kernel, slots * HV, *factors, C=C, BD=64, **flags)

    h = empty(slots, HV, *call.state_shape[2:], **fp32)
    ht = empty(call.state_shape, **fp32) if call.output_final_state else None
    scan = (w, u, k_rest, decay, call.initial_state, h, v_new, ht, index.offsets, index.slots_of, HV, K, V)
    launch(plan, kda_chunk_state_fwd_kernel, plan.scans(call), *scan, C=C, **plan.state_tile(call))

    o = allocate_tokens(call, *call.v.shape, dtype=call.q.dtype)
    terms = (q_decayed, A_qk, h, v_new, o, index.rows, index.counts, call.scale, HV, K, V)
    tiles = {"BK": plan.BK, "BV": plan.BV, "DOT": plan.DOT, "V_FIRST": call.state_v_first, "num_warps": 4}
    launch(plan, kda_chunk_output_fwd_kernel, slots * HV * triton.cdiv(V, plan.BV), *terms, C=C, **tiles)
    stages = Stages(g, q_rstd, k_rstd, A_qk, A_kk, inverse, q_decayed, k_decayed, k_rest, decay, w, u, h, v_new)
    if trace.is_open():
        places = {"offsets": index.offsets, "chunk_offsets": index.slots_of}
        filled = index.counts > 0
        trace.show(places | {"chunk_rows": index.rows[filled], "chunk_counts": index.counts[filled]})
        show(call, index, {name: getattr(stages, name) for name in SHOWN} | {"states": h})
    return o, ht, stages


def show(call: Call, index: ChunkIndex, stages: dict[str, Tensor]) -> None:
    """Stages by slot or by token, as a trace has them."""
    for name, x in stages.items():
        if name in trace.STATES:
            x = x.mT if call.state_v_first else x
        if name in (*trace.STATES, "decay"):
            trace.show({name: trace.by_chunk(name, x, index.counts)})
        else:
            trace.show({name: trace.by_token(name, x, index.rows, index.counts, index.chunk)})
