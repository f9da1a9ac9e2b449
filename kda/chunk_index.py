"""Authority on where chunks are: tables of first rows and lengths, made on the device without waiting for it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kda.contract import Call


@dataclass(frozen=True)
class ChunkIndex:
    """The chunks of a call, those of one sequence after those of the one before.

    `rows` `[slots]`: first row of each chunk in the flattened batch; `counts` `[slots]`: its tokens, 0 for a slot
    without a chunk; `offsets`, `slots_of` `[N + 1]`: first row and first slot of each sequence. All int64.
    """

    rows: Tensor
    counts: Tensor
    offsets: Tensor
    slots_of: Tensor
    slots: int
    chunk: int

    @classmethod
    def of(cls, call: Call) -> "ChunkIndex":
        """Exact where the host knows the lengths; else with T // chunk + N slots, enough for every packing."""
        offsets, slots_of = call.offsets(), call.chunk_offsets()
        slots = call.chunk_bound() if call.cu_seqlens_cpu is None else call.chunks_per_row()
        slots = slots if call.sequences else 0
        i_slot = torch.arange(slots, device=offsets.device)
        sequence = torch.searchsorted(slots_of[1:], i_slot, right=True).clamp(max=max(call.sequences - 1, 0))
        rows = offsets[sequence] + (i_slot - slots_of[sequence]) * call.chunk_size
        counts = (offsets[sequence + 1] - rows).clamp(0, call.chunk_size)
        return cls(rows, counts, offsets, slots_of, slots, call.chunk_size)
