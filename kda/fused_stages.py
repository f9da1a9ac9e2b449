"""Authority on what the fused routes show of their chunks and pieces: NOTE [Shown stages]."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kda import trace
from kda.chunk_fwd import BLOCK
from kda.contract import Call
from kda.segments import Pieces

if TYPE_CHECKING:
    from kda.fused_fwd import Workspace


def show_workspace(call: Call, shift: int, made: "Workspace") -> None:
    """The tiles of `kda_fused_prep_kernel`, without the shift, and without the scale of the queries."""
    keys, queries = (x * 2.0**-shift for x in made.kq_decayed.float().split(BLOCK, 2))
    inverse, rest, *products = made.response.float().split(BLOCK, 2)
    shown = {"k_decayed": keys, "k_update": made.k_rest, "decay": made.decay, "inverse": inverse + rest}
    if call.scale:
        shown["q_decayed"] = queries / call.scale
    adjoint = made.factors is not None
    shown |= dict(zip((*["response"] * (len(products) > adjoint), "A_qk_beta"), products))
    _show(call, made.tables, shown)


def show_backward(call: Call, tables: tuple[Tensor | None, Tensor | None], states: Tensor, dstates: Tensor) -> None:
    """The states before the chunks and their gradients behind them, both given as `[slots, HV, V, K]`."""
    _show(call, tables, {"states": states.mT, "dh": dstates.mT})


def show_pieces(pieces: Pieces, name: str, states: Tensor, after: bool = False) -> None:
    """States before, or gradients behind, each piece of `[N, most + 1, HV, K, V]`."""
    trace.show({"offsets": torch.cat([pieces.offsets[pieces.first], pieces.offsets[-1:]])})
    there = torch.arange(pieces.most, device=states.device) < pieces.counts[:, None]
    trace.show({name: (states[:, 1:] if after else states[:, :-1])[there]})


def _show(call: Call, tables: tuple[Tensor | None, Tensor | None], stages: dict[str, Tensor]) -> None:
    """Stages by slot, those of slots that no chunk fills left out."""
    rows, counts = tables
    if rows is not None:
        trace.show({"chunk_rows": rows[counts > 0], "chunk_counts": counts[counts > 0]})
    else:
        T = call.q.shape[1]
        start = torch.arange(0, T, BLOCK, device=call.q.device).repeat(call.q.shape[0])
        counts = (T - start).clamp(max=BLOCK)
    filled = counts > 0
    for name, x in stages.items():
        trace.show({name: trace.by_chunk(name, x[: len(counts)][filled], counts[filled])})
