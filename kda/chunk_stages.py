"""Authority on looking into the staged route: every intermediate of a call by name, chunk by chunk."""

import torch
from torch import Tensor

from kda.chunk_bwd import backward
from kda.chunk_fwd import SAFE_GATE, UNBOUNDED, Plan, forward
from kda.chunk_index import ChunkIndex
from kda.contract import Call

LOWER = ("A_qk", "A_kk", "inverse", "dA_qk", "dA_kk")
TOKENWISE = ("q_decayed", "k_decayed", "k_rest", "w", "u", "v_new", "dv_new", "z")


def chunk_stages(
    call: Call,
    route: str | None = None,
    do: Tensor | None = None,
    dht: Tensor | None = None,
) -> dict[str, Tensor]:
    """What each stage of a validated call left, in fp32; with do `[B, T, HV, V]` those of the backward pass too.

    By chunk slot and value head: A_qk, A_kk, inverse `[slots, HV, C, C]`, 0 above the diagonal (inverse: 1 on it); w,
    q_decayed, k_decayed, k_rest `[slots, HV, C, K]`; u, v_new `[slots, HV, C, V]`; decay `[slots, HV, K]`; states,
    before each chunk, `[slots, HV, K, V]`. Backward: gradients dA_qk, dA_kk, dv_new, z = inverse^T dv_new in the same
    forms, and dh, behind each chunk. Rows past a chunk's end and slots of no chunk are 0. Also o, and every gradient by
    argument.
    """
    plan = Plan.of(call, route or (SAFE_GATE if call.safe_gate else UNBOUNDED))
    index = ChunkIndex.of(call)
    o, _, made = forward(call, plan, index)
    found = {name: getattr(made, name) for name in (*LOWER[:3], *TOKENWISE[:6], "decay")} | {"states": made.h}
    gradients = {}
    if do is not None:
        gradients = backward(call, plan, index, made, do, dht, found)
    return {name: _cut(name, x, index).float() for name, x in found.items()} | {"o": o, **gradients}


def _cut(name: str, x: Tensor, index: ChunkIndex) -> Tensor:
    """A tensor by token `[B, T, HV, D]` as `[slots, HV, C, D]`; everything outside of chunks as 0."""
    step = torch.arange(index.chunk, device=x.device)
    inside = step < index.counts[:, None]
    if name not in LOWER + TOKENWISE:
        return torch.where((index.counts > 0).view(-1, *[1] * (x.dim() - 1)), x, 0.0)
    rows = torch.where(inside, index.rows[:, None] + step, 0)
    cut = torch.where(inside[..., None, None], x.flatten(0, 1)[rows], 0.0).transpose(1, 2)
    return torch.tril(cut, -1 if name.endswith("_kk") else 0) if name in LOWER else cut
