"""Authority on which tokens belong to which sequence: dense and packed batches, empty sequences, unused tails."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True)
class Group:
    """Sequences of one length: `sequences` [n] are their indices, `tokens` [n, length] rows of the flattened batch."""

    length: int
    sequences: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """The sequences of a call. `starts`, `lengths`: one entry per sequence, in rows of the flattened batch."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    rows: int

    @classmethod
    def of(cls, batch: int, length: int, cu_seqlens: torch.Tensor | None) -> "Layout":
        """The layout of a `[B, T, ...]` call, packed by `cu_seqlens` [N + 1] or dense.

        ValueError unless a packed batch is 1 and its offsets rise from 0 to at most T.
        """
        if cu_seqlens is None:
            return cls(tuple(b * length for b in range(batch)), (length,) * batch, batch * length)
        offsets = [int(offset) for offset in cu_seqlens.tolist()]
        if batch != 1:
            raise ValueError(f"batch is {batch}, must be 1 with cu_seqlens")
        if not offsets or offsets[0] != 0 or offsets[-1] > length or any(b < a for a, b in pairwise(offsets)):
            raise ValueError(f"cu_seqlens is {offsets}, must start at 0, never fall, and end at {length} or before")
        return cls(tuple(offsets[:-1]), tuple(b - a for a, b in pairwise(offsets)), length)

    @property
    def used(self) -> int:
        """Rows before the unused tail."""
        return max((start + length for start, length in zip(self.starts, self.lengths)), default=0)

    def groups(self, device: torch.device) -> Iterator[Group]:
        """The sequences by length, so that each group is a dense batch without padding; empty ones are a group too."""
        members = defaultdict(list)
        for n, length in enumerate(self.lengths):
            members[length].append(n)
        for length in sorted(members):
            starts = torch.tensor([self.starts[n] for n in members[length]], device=device)
            tokens = starts[:, None] + torch.arange(length, device=device)[None, :]
            yield Group(length, torch.tensor(members[length], device=device), tokens)

    def chunk_slots(self, chunk_size: int) -> list[int]:
        """Index of each sequence's first chunk among all chunks, sequence after sequence; last, their number."""
        slots = [0]
        for length in self.lengths:
            slots.append(slots[-1] + -(-length // chunk_size))
        return slots
