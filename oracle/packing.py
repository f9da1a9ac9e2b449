"""Authority on which tokens belong to which sequence: dense batches and packed ones, empty sequences and unused tails."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Group:
    """Sequences of one length: `sequences` [n] are their indices, `tokens` [n, length] rows of the flattened batch."""

    length: int
    sequences: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """The sequences of a call. `starts`, `lengths`: one entry per sequence, in rows of the flattened `[B * T]` batch."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, batch: int, length: int, cu_seqlens: torch.Tensor | None) -> "Layout":
        """The layout of a `[B, T, ...]` call, packed by `cu_seqlens` [N + 1] or dense."""
        if cu_seqlens is None:
            return cls(tuple(b * length for b in range(batch)), (length,) * batch, batch * length)
        offsets = [int(offset) for offset in cu_seqlens.tolist()]
        return cls(tuple(offsets[:-1]), tuple(b - a for a, b in zip(offsets, offsets[1:])), batch * length)

    def groups(self, device: torch.device) -> Iterator[Group]:
        """The sequences by length, so that each group is a dense batch; empty ones come as a group of length 0."""
        for length in sorted(set(self.lengths)):
            members = [n for n, other in enumerate(self.lengths) if other == length]
            starts = torch.tensor([self.starts[n] for n in members], device=device)
            tokens = starts[:, None] + torch.arange(length, device=device)[None, :]
            yield Group(length, torch.tensor(members, device=device), tokens)

    def chunk_slots(self, chunk_size: int) -> list[int]:
        """Index of each sequence's first chunk among all chunks, sequence after sequence."""
        slots, total = [], 0
        for length in self.lengths:
            slots.append(total)
            total += -(-length // chunk_size)
        return slots
