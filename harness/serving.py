"""Authority on decoding whole sequences as an engine does: call after call on one pool, some drafts rejected."""

from collections.abc import Callable
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
    gap: int = GAP
    memory: Tensor = field(init=False)
    table: Tensor = field(init=False)

    def __post_init__(self):
        N, *state = self.initial.shape
        slots, size = N * self.columns + SPARE_SLOTS, self.initial[:1].numel() if N else 1
        generator = torch.Generator().manual_seed(slots)
        order = torch.randperm(slots, generator=generator).to(self.initial.device, self.index_dtype)
        self.table = order[: N * self.columns].view(N, self.columns)
        self.memory = self.initial.new_full((slots, size + self.gap), torch.nan)
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
        changed[self.table.flatten().long(), : changed.shape[1] - self.gap] = False
        if bool(changed.any()):
            slots = changed.any(1).nonzero().flatten().tolist()
            raise SlotsTouched(f"memory of no sequence's state changed, in or behind slots {slots} of state_pool")


@dataclass(frozen=True)
class Served:
    """`serve` with one implementation of `kda_decode`, as a function of whole sequences."""

    decode: Callable[..., Tensor]

    def __call__(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return serve(self.decode, *args, **kwargs)


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
    longest = max(layout.lengths, default=0)
    for done in range(0, longest if cu_seqlens is None else max(1, longest), step):
        counts = [max(0, min(step, length - done)) for length in layout.lengths]
        rows = [[layout.starts[n] + done + t for t in range(count)] for n, count in enumerate(counts)]
        drafts = [_drafts(row, rejected, layout) for row in rows]
        nan_row = [len(tokens["q"]) - 1] * (PADDING_TOKENS if cu_seqlens is not None else counts[0] + rejected)
        table = torch.cat([torch.full_like(pool.table[:1], -1), pool.table])
        taken = [nan_row, *(a + b for a, b in zip(rows, drafts))]
        call = _arguments(tokens, table, [0, *accepted], taken, cu_seqlens)
        made = decode(**call, state_pool=pool.states, **options).flatten(0, 1)
        padding, *outputs = made.split([len(row) for row in taken])
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


def _arguments(
    tokens: dict[str, Tensor], table: Tensor, accepted: list[int], rows: list[list[int]], cu_seqlens: Tensor | None
) -> dict[str, Tensor]:
    """Of one call but for the pool: the tokens in these rows, one list to a sequence, and where states are."""
    index = torch.tensor([i for row in rows for i in row], dtype=torch.int64, device=table.device)
    shape = (1, -1) if cu_seqlens is not None else (len(rows), -1)
    call = {name: x[index].unflatten(0, shape) for name, x in tokens.items()}
    call["slots"] = table if table.shape[1] > 1 else table[:, 0]
    if table.shape[1] > 1:
        call["num_accepted_tokens"] = torch.tensor(accepted, dtype=table.dtype, device=table.device)
    if cu_seqlens is not None:
        ends = torch.tensor([len(row) for row in rows]).cumsum(0)
        call["cu_seqlens"] = torch.nn.functional.pad(ends, (1, 0)).to(cu_seqlens)
    return call


def one_call(
    decode: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor,
    cu_seqlens: None = None,
    step: int = 1,
    rejected: int = 0,
    index_dtype: torch.dtype = torch.int64,
    **options: object,
) -> Callable[[], Tensor]:
    """The call that `serve` would begin with, without padding, on a dense pool; to be made again and again."""
    tokens = {name: x.flatten(0, 1) for name, x in zip(TOKENS, (q, k, v, g, beta))}
    layout = Layout.of(*q.shape[:2], None)
    rows = [[start + t for t in range(step)] for start in layout.starts]
    pool = Pool(initial_state, step + rejected if rejected else 1, index_dtype, gap=0)
    taken = [row + _drafts(row, rejected, layout) for row in rows]
    call = _arguments(tokens, pool.table, [1] * len(rows), taken, None)
    return lambda: decode(**call, state_pool=pool.states, **options)
