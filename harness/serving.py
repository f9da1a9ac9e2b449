"""Authority on decoding whole sequences as an engine does: call after call on one pool, some drafts rejected."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from oracle.packing import Layout

SPARE_SLOTS = 3  # of the pool that belong to no sequence
GAP = 5  # numbers between two slots
PADDING_TOKENS = 2  # of the padding sequence of a packed call
TOKENS = ("q", "k", "v", "g", "beta")


class SlotsTouched(Exception):
    """Memory of the pool outside the slots of the table changed."""


@dataclass
class Pool:
    """States `[N, HV, K, V]` in random slots of a pool that is NaN elsewhere, `columns` slots to a sequence."""

    initial: Tensor
    columns: int
    index_dtype: torch.dtype = torch.int64
    memory: Tensor = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self):
        N, *state = self.initial.shape
        slots, size = N * self.columns + SPARE_SLOTS, self.initial[:1].numel() if N else 1
        generator = torch.Generator().manual_seed(slots)
        order = torch.randperm(slots, generator=generator).to(self.initial.device, self.index_dtype)
        self.table = order[: N * self.columns].view(N, self.columns)
        self.memory = self.initial.new_full((slots, size + GAP), torch.nan)
        self.states = self.memory[:, :size].unflatten(1, state) if N else self.initial.new_empty(slots, *state)
        self.states[self.table[:, 0].long()] = self.initial

    def held(self, columns: list[int]) -> Tensor:
        """The state of each sequence, in that column of its own."""
        rows = torch.arange(len(columns), device=self.table.device)
        slots = self.table[rows, torch.tensor(columns, dtype=torch.int64, device=self.table.device)]
        return self.states[slots.long()].clone()

    def check_outside(self) -> None:
        """Everything outside the slots of the table is the NaN that it was, bit by bit. Raises SlotsTouched."""
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[self.memory.element_size()]
        changed = self.memory.view(bits) != self.memory.new_full((), torch.nan).view(bits)
        changed[self.table.flatten().long(), : changed.shape[1] - GAP] = False
        if bool(changed.any()):
            slots = changed.any(1).nonzero().flatten().tolist()
            raise SlotsTouched(f"memory of no sequence's state changed, in or behind slots {slots} of state_pool")


def serve(
    decode: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: Tensor | None = None,
    step: int = 1,
    rejected: int = 0,
    index_dtype: torch.dtype = torch.int64,
    **options: object,
) -> tuple[Tensor, Tensor]:
    """(o, final states) of whole sequences by calls of `decode`, which has the arguments of `kda.kda_decode`.

    Each call takes up to `step` tokens of every sequence and `rejected` drafts after them, which the next call goes
    back on. The first sequence of every call is padding, its tokens NaN; in a packed batch its outputs are the tail's.
    Raises SlotsTouched.
    """
    layout = Layout.of(*q.shape[:2], cu_seqlens)
    tokens = {name: _with_nan_row(x) for name, x in zip(TOKENS, (q, k, v, g, beta))}
    pool = Pool(initial_state, step + rejected if rejected else 1, index_dtype)
    o = torch.zeros_like(v).flatten(0, 1)
    accepted = [1] * len(layout.lengths)
    for done in range(0, max(layout.lengths, default=0), step):
        counts = [max(0, min(step, length - done)) for length in layout.lengths]
        rows = [[layout.starts[n] + done + t for t in range(count)] for n, count in enumerate(counts)]
        drafts = [_drafts(row, rejected, layout) for row in rows]
        made = _call(decode, tokens, pool, accepted, [a + b for a, b in zip(rows, drafts)], cu_seqlens, options)
        padding, *outputs = made
        for row, got in zip(rows, outputs):
            o[row] = got[: len(row)]
        if cu_seqlens is not None:
            o[layout.used :][: len(padding)] = padding[: len(o) - layout.used]
        accepted = [count or before for count, before in zip(counts, accepted)]
    pool.check_outside()
    columns = [count - 1 if rejected else 0 for count in accepted]
    return o.unflatten(0, q.shape[:2]), pool.held(columns)


def _with_nan_row(x: Tensor) -> Tensor:
    """`[rows + 1, ...]`; the last row is NaN."""
    return torch.cat([x.flatten(0, 1), x.new_full((1, *x.shape[2:]), torch.nan)])


def _drafts(row: list[int], rejected: int, layout: Layout) -> list[int]:
    """Rows of other tokens, as good as any, after those of one sequence."""
    return [(row[-1] + 3 + t) % layout.used for t in range(rejected)] if row else []


def _call(
    decode: Callable[..., Tensor],
    tokens: dict[str, Tensor],
    pool: Pool,
    accepted: list[int],
    rows: list[list[int]],
    cu_seqlens: Tensor | None,
    options: dict[str, object],
) -> Iterator[Tensor]:
    """One call; o of the padding sequence, then of every other one."""
    device, nan_row = pool.table.device, len(tokens["q"]) - 1
    width = PADDING_TOKENS if cu_seqlens is not None else len(rows[0])
    rows = [[nan_row] * width, *rows]
    lengths = torch.tensor([len(row) for row in rows])
    index = torch.tensor([i for row in rows for i in row], dtype=torch.int64, device=device)
    shape = (1, -1) if cu_seqlens is not None else (len(rows), -1)
    table = torch.cat([torch.full_like(pool.table[:1], -1), pool.table])
    words: dict[str, object] = {"slots": table if pool.columns > 1 else table[:, 0]}
    if pool.columns > 1:
        words["num_accepted_tokens"] = torch.tensor([0, *accepted], dtype=pool.index_dtype, device=device)
    if cu_seqlens is not None:
        words["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(cu_seqlens)
    given = {name: x[index].unflatten(0, shape) for name, x in tokens.items()}
    o = decode(**given, state_pool=pool.states, **words, **options)
    yield from o.flatten(0, 1).split(lengths.tolist())
