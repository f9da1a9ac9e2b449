"""Authority on the forward pass of the fused chunk routes: its plan, the order of its kernels, and their workspace."""

import functools
import math
import os
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kda import fused_stages, trace
from kda.adjoints import allocate_tokens
from kda.chunk_fwd import BLOCK, anchored, launch
from kda.contract import SAFE_BOUND, Call
from kda.fused_prep import kda_fused_prep_kernel
from kda.fused_scan import kda_fused_index_kernel, kda_fused_scan_kernel
from kda.gate import dense
from kda.relaunch import descriptor
from kda.segments import identities

SAFE_GATE, UNBOUNDED = "fused-safe_gate", "fused-unbounded"
WIDTHS = (64, 128, 256)
INDEX_SLOTS = 128  # slots per program of the index kernel
TMA_ARCH = 90


@dataclass(frozen=True)
class Tile:
    """How a scan of states of K rows is cut and pipelined, with TMA and without."""

    BV: int
    num_warps: int
    tma_stages: int
    stages: int


# Configurations go by K and the gates' bound alone, so that no result depends on a batch or a length, and nothing is
# tuned.
SCAN = {64: Tile(64, 4, 6, 3), 128: Tile(64, 4, 6, 3), 256: Tile(32, 4, 3, 2)}
# Columns of K at a time: as many as leave three chunks, of one warp each, to a scheduler's registers, or four where
# gates are unbounded and every level takes a tile.
PREP = {"BK": 32, "num_warps": 1}
PREP_ADJOINT = {**PREP, "maxnreg": 168}  # uncapped 207, and a fifth slower on an H200
PREP_LEVELS = {"BK": 16, "num_warps": 1, "maxnreg": 128}


@functools.cache
def arch(device: torch.device) -> int:
    """Compute capability times ten; 0 where kernels are interpreted."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def has_tma(device: torch.device) -> bool:
    """Whether kernels may use tensor descriptors there; KDA_TMA=0 says no, with the same results."""
    return arch(device) >= TMA_ARCH and os.environ.get("KDA_TMA") != "0"


def slots_of(call: Call) -> int:
    """Places for chunks: their number in a dense batch, and no fewer in a packed one."""
    B, T = call.q.shape[:2]
    return B * -(-T // BLOCK) if call.cu_seqlens is None else T // BLOCK + call.sequences


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
        _, T, _, HV, _, V = call.shape
        # Unit keys and beta in [0, 2] keep the entries of A_qk and R below 2; nothing else is known to fit into fp16.
        small = call.use_qk_l2norm_in_kernel and call.use_beta_sigmoid_in_kernel
        tma = has_tma(call.q.device) and T * call.sequences > 0
        return cls._of(route, call.lower_bound, call.use_gate_in_kernel, small, slots_of(call), HV, V, tma)

    @classmethod
    @functools.lru_cache(maxsize=256)
    def _of(
        cls, route: str, lower_bound: float | None, raw: bool, small: bool, slots: int, HV: int, V: int, tma: bool
    ) -> "FusedPlan":
        bound = SAFE_BOUND if lower_bound is None else lower_bound
        activation = "softplus" if lower_bound is None else "bounded"
        return cls(
            route=route,
            shift=round(BLOCK / 2 * abs(bound) * math.log2(math.e)) if anchored(route) else 0,
            slots=slots,
            gate=activation if raw else "none",
            solved="fp16" if small else "tf32",
            tma=tma and max(3 * BLOCK, V) * slots * HV < 2**31,
        )


@dataclass(frozen=True)
class Workspace:
    """What the scan needs of each chunk, by slot and value head: see `kda_fused_prep_kernel`.

    `tables`: (first row, tokens) of every slot, int64; Nones for a dense batch, which needs none. `factors`: what the
    last kernel of the backward pass needs too, `[B, T, HV, 4]` fp32, or None.
    """

    kq_decayed: Tensor
    k_rest: Tensor
    response: Tensor
    decay: Tensor
    factors: Tensor | None
    tables: tuple[Tensor | None, Tensor | None]

    @classmethod
    def of(cls, call: Call, plan: FusedPlan, forward: bool, adjoint: bool) -> "Workspace":
        B, T, _, HV, K, _ = call.shape
        slots, operand = plan.slots, {"dtype": torch.bfloat16, "device": call.q.device}
        return cls(
            torch.empty((slots, HV, 2 * BLOCK, K), **operand),
            torch.empty((slots, HV, BLOCK, K), **operand),
            torch.empty((slots, HV, (2 + forward + adjoint) * BLOCK, BLOCK), **operand),
            torch.empty((slots, HV, K), dtype=torch.float32, device=call.q.device),
            allocate_tokens(call, B, T, HV, 4) if adjoint else None,
            chunk_tables(call, plan),
        )

    @property
    def tiles(self) -> int:
        """Of a chunk's response."""
        return self.response.shape[2] // BLOCK

    def tensors(self) -> tuple[Tensor, ...]:
        return self.kq_decayed, self.k_rest, self.response, self.decay

    def descriptors(self, rows: int) -> tuple[TensorDescriptor, ...]:
        """Of kq_decayed, by that many rows at a time, k_rest and response."""
        K = self.decay.shape[-1]
        keys = descriptor(self.kq_decayed, K, (rows, K)), descriptor(self.k_rest, K, (BLOCK, K))
        return *keys, descriptor(self.response, BLOCK, (BLOCK, BLOCK))


def chunk_tables(call: Call, plan: FusedPlan) -> tuple[Tensor | None, Tensor | None]:
    """Those of a workspace."""
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


def options(call: Call, plan: FusedPlan) -> dict[str, object]:
    """Constants of the kernels that read the inputs."""
    return {
        "GATE": plan.gate,
        "ANCHORED": anchored(plan.route),
        "L2NORM": call.use_qk_l2norm_in_kernel,
    }


def _prep_tile(route: str, adjoint: bool) -> dict[str, int]:
    if not anchored(route):
        return PREP_LEVELS
    return PREP_ADJOINT if adjoint else PREP


def prepare(call: Call, plan: FusedPlan, forward: bool = True, adjoint: bool = False) -> Workspace:
    """Every chunk as an operator, all of them at once, for the forward pass, its adjoint, or both."""
    _, T, H, HV, K, _ = call.shape
    made = Workspace.of(call, plan, forward, adjoint)
    inputs = (call.q, call.k, call.g, call.beta, call.A_log, call.dt_bias)
    sizes = (call.lower_bound or 0.0, call.beta_range, float(plan.shift), call.scale, T, H, HV)
    flags = {**options(call, plan), "BETA_SIGMOID": call.use_beta_sigmoid_in_kernel}
    flags |= {"SOLVED": plan.solved, "FORWARD": forward, "ADJOINT": adjoint}
    tile = {"K": K, "C": BLOCK, **_prep_tile(plan.route, adjoint)}
    programs = plan.slots * HV if call.sequences else 0
    between = (*made.tensors(), made.factors, *made.tables)
    launch(plan, kda_fused_prep_kernel, programs, *inputs, *between, *sizes, **flags, **tile)
    if trace.is_open():
        fused_stages.show_workspace(call, plan.shift, made)
    return made


def takes_tma(plan: FusedPlan, *tensors: Tensor) -> bool:
    """Whether a scan may address them by descriptors, for which they must start at multiples of 16 bytes."""
    return plan.tma and not any(x.data_ptr() % 16 for x in tensors)


def scan(
    call: Call, plan: FusedPlan, made: Workspace, y: Tensor | None = None, states: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(o, final state if asked for); `y` and `states` are filled too, if they are there."""
    o = (torch.empty if call.sequences else torch.zeros)(call.v.shape, dtype=call.v.dtype, device=call.v.device)
    ht = torch.empty(call.state_shape, dtype=torch.float32, device=o.device) if call.output_final_state else None
    run_scan(call, plan, made, o, y, ht, states)
    return o, ht


def run_scan(
    call: Call,
    plan: FusedPlan,
    made: Workspace,
    o: Tensor | None = None,
    y: Tensor | None = None,
    ht: Tensor | None = None,
    states: Tensor | None = None,
    blank: bool = False,
) -> None:
    """Fill what there is of o, y, the final state, and the states before every chunk.

    `blank`: nothing is written to the states, which have K columns.
    """
    _, T, _, HV, K, V = call.shape
    N, C, tile, V, v = call.sequences, BLOCK, SCAN[K], K if blank else V, None if blank else call.v
    blocks = (None,) * 7
    if takes_tma(plan, call.v):
        rows = C if o is None else 2 * C
        wide = lambda x: None if x is None else descriptor(x, HV * V, (C, tile.BV))  # noqa: E731
        kept = None if states is None else descriptor(states, K, (tile.BV, K))
        blocks = (wide(v), wide(o), wide(y), *made.descriptors(rows), kept)
    arguments = (v, o, y, *made.tensors(), call.initial_state, ht, states, dense(call.cu_seqlens), *blocks)
    sizes = (2.0**-plan.shift, N, T, HV)
    stages = tile.stages if blocks[3] is None else tile.tma_stages
    shape = {"K": K, "V": V, "C": C, "BV": tile.BV, "TILES": made.tiles, "V_FIRST": call.state_v_first}
    grid = N * HV * (V // tile.BV)
    launch(plan, kda_fused_scan_kernel, grid, *arguments, *sizes, **shape, STAGES=stages, num_warps=tile.num_warps)


def maps(call: Call, plan: FusedPlan, made: Workspace) -> tuple[Tensor, Tensor]:
    """(P `[N, HV, K, K]`, Q `[N, HV, K, V]`) of NOTE [Chain of states], of every sequence of a K-first call without an
    initial state: two scans without outputs.
    """
    HV, K = call.shape[3:5]
    units = identities(call.sequences, HV, K, call.q.device)
    P, Q = torch.empty_like(units), torch.empty(call.state_shape, dtype=torch.float32, device=call.q.device)
    run_scan(replace(call, initial_state=units), plan, made, ht=P, blank=True)
    run_scan(replace(call, initial_state=None), plan, made, ht=Q)
    return P, Q
