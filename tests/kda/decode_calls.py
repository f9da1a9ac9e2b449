"""Random calls of `kda_decode`, and what is wrong with how one ended: refused by name, or right in o and in every slot.

A pool is kept with the memory that it is cut from, so that a byte written between or behind its slots is seen.
"""

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from unittest import mock

import torch
import triton
from torch import Tensor

from harness import interpreter, verdict
from harness.bits import as_bytes
from kda import decode
from oracle.operator import Options

TOKENS = ("q", "k", "v", "g", "beta")
OPTIONS = tuple(name for name in Options.__dataclass_fields__ if name not in ("chunk_size", "intermediates"))
INTERPRETED = triton.knobs.runtime.interpret
MOST = 8  # tokens of a sequence in a call
STRAY_SLOTS = (-1, -2, -(2**31), 2**31 - 1)
STRAY_COUNTS = (0, -1, -(2**31), 2**31 - 1)
Arguments = dict[str, object]


def legal(draw: random.Random, generator: torch.Generator) -> Arguments:
    """A legal call, packed or not, with one slot a sequence or one a token; padding is full of NaN."""
    maybe = lambda: draw.random() < 0.5  # noqa: E731
    gauss = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    N, H, K, V = draw.choice((0, 1, 2, 2, 3)), draw.choice((1, 2)), draw.choice((1, 5, 8)), draw.choice((1, 3))
    HV, packed = H * draw.choice((1, 2)), maybe()
    longest = draw.choice((1, 1, 2, 3, MOST))
    lengths = [draw.randrange(longest + 1) if packed else longest for _ in range(N)]
    B, T = (1, sum(lengths) + draw.choice((0, 2))) if packed else (N, longest)
    q, k, v, g = gauss(B, T, H, K), gauss(B, T, H, K), gauss(B, T, HV, V), -gauss(B, T, HV, K).abs()
    dtype = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64))
    call: Arguments = {"q": q.to(dtype), "k": k.to(dtype), "v": v.to(dtype), "g": g, "beta": gauss(B, T, HV).sigmoid()}
    call |= {"use_qk_l2norm_in_kernel": True, "state_v_first": maybe(), "use_beta_sigmoid_in_kernel": maybe()}
    if maybe():
        call |= {"A_log": gauss(HV), "dt_bias": gauss(HV * K), "use_gate_in_kernel": True}
        call["lower_bound"] = draw.choice((None, -5.0))
    if packed:
        ends = [0, *itertools.accumulate(lengths)]
        call["cu_seqlens"] = torch.tensor(ends, dtype=draw.choice((torch.int32, torch.int64)))
    columns = draw.choice((0, draw.randrange(longest, MOST + 1)))  # 0: one slot a sequence
    call |= places(N, columns, draw)
    states = N * (columns or 1) + draw.randrange(3)
    memory = gauss(states, HV * K * V + draw.choice((0, 0, 3))).to(draw.choice((torch.float32, torch.bfloat16)))
    call["state_pool"] = memory[:, : HV * K * V].unflatten(1, (HV, V, K) if call["state_v_first"] else (HV, K, V))
    idle = [n for n, slot in enumerate(begins(call)) if slot < 0]
    for name, n in itertools.product(TOKENS, idle):
        call[name].view(B * T, *call[name].shape[2:])[sum(lengths[:n]) : sum(lengths[: n + 1])] = torch.nan
    return call


def places(N: int, columns: int, draw: random.Random) -> Arguments:
    """Slots `[N]` or `[N, columns]` in any order, some of them -1; for some tables how many tokens were accepted."""
    width, dtype = columns or 1, draw.choice((torch.int32, torch.int64))
    order = draw.sample(range(N * width), N * width)
    slots = torch.tensor([-1 if draw.random() < 0.15 else slot for slot in order], dtype=dtype).view(N, width)
    if not columns or draw.random() < 0.3:
        return {"slots": slots if columns else slots[:, 0]}
    counts = [draw.randrange(1, width + 1) for _ in range(N)]
    return {"slots": slots, "num_accepted_tokens": torch.tensor(counts, dtype=draw.choice((torch.int32, torch.int64)))}


def table_of(call: Mapping[str, object]) -> list[list[int]]:
    """The slots of each sequence; what is none of the pool is -1."""
    slots, pool = call["slots"], call["state_pool"]
    rows = slots[:, None].tolist() if slots.dim() == 1 else slots.tolist()
    known = len(pool) if isinstance(pool, Tensor) else 2**63
    return [[slot if 0 <= slot < known else -1 for slot in row] for row in rows]


def begins(call: Mapping[str, object]) -> list[int]:
    """The slot that each sequence begins in, -1 for padding."""
    table, counts = table_of({"state_pool": None, **call}), call.get("num_accepted_tokens")
    counts = [1] * len(table) if counts is None else counts.tolist()
    return [row[count - 1] if 1 <= count <= len(row) else -1 for row, count in zip(table, counts)]


def with_value(x: object, choices: tuple[int, ...], draw: random.Random) -> object:
    """The indices with one of them changed."""
    if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or not x.numel() or x.is_meta:
        return x
    x = x.clone()
    x.view(-1)[draw.randrange(x.numel())] = draw.choice(choices)
    return x


def of_pool_memory(call: Arguments, draw: random.Random) -> Arguments:
    """One argument in the memory of the pool, with the values that it had if it fits."""
    pool = call["state_pool"]
    fitting = [
        name
        for name, x in call.items()
        if isinstance(x, Tensor) and x is not pool and x.dtype == pool.dtype and x.numel() <= pool.numel()
    ]
    if not fitting or not pool.is_contiguous():
        return call
    name = draw.choice(fitting)
    return {**call, name: pool.detach().view(-1)[: call[name].numel()].view(call[name].shape)}


def negated(x: Tensor) -> Tensor:
    """The same values by a view whose memory holds the opposite."""
    return torch._neg_view(-x)


def in_inference_mode(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(x)


POOLS: dict[str, Callable[[Tensor, random.Random], Tensor]] = {
    "one_slot_many_times": lambda x, draw: x[:1].expand_as(x) if len(x) else x,
    "overlapping_slots": lambda x, draw: x.as_strided(x.shape, (1, *x.stride()[1:])),
    "transposed": lambda x, draw: x.mT.contiguous().mT,
    "other_order": lambda x, draw: x.mT,
    "strided_heads": lambda x, draw: torch.stack([x, x], 2)[:, :, 0],
    "every_other_slot": lambda x, draw: torch.stack([x, x], 1)[:, 0],
    "fewer_slots": lambda x, draw: x[: draw.randrange(len(x) + 1)],
    "format": lambda x, draw: x.to(draw.choice((torch.float16, torch.float64, torch.bfloat16, torch.int32))),
    "leaf": lambda x, draw: x.clone().requires_grad_(),
    "inference": lambda x, draw: in_inference_mode(x),
    "parameter": lambda x, draw: torch.nn.Parameter(x.clone()),
    "negated": lambda x, draw: negated(x),
}


def recut(call: Arguments, draw: random.Random) -> Arguments:
    """Another number of tokens in everything that has tokens."""
    tokens, choose = draw.choice((0, 1, 2, MOST, MOST + 1)), draw.choice(("all", "one"))
    names = TOKENS if choose == "all" else (draw.choice(TOKENS),)
    longer = {n: x for n in names if isinstance(x := call.get(n), Tensor) and x.dim() > 2 and not x.is_sparse}
    return call | {name: torch.cat([x] * (MOST + 1), 1)[:, :tokens] for name, x in longer.items()}


def strayed_indices(call: Arguments, draw: random.Random) -> Arguments:
    """Another slot or another count of accepted tokens: what only the data shows."""
    pool, slots, counts = call.get("state_pool"), call.get("slots"), call.get("num_accepted_tokens")
    end = len(pool) if isinstance(pool, Tensor) and pool.dim() else 4
    kind = draw.choice(("slot", "slot", "share", "count", "count"))
    if kind == "count" and counts is not None:
        beyond = slots.shape[1] + 1 if isinstance(slots, Tensor) and slots.dim() == 2 else 2
        return {**call, "num_accepted_tokens": with_value(counts, (beyond, beyond, *STRAY_COUNTS), draw)}
    if kind == "share":
        return {**call, "slots": with_value(with_value(slots, (0,), draw), (0,), draw)}
    return {**call, "slots": with_value(slots, (end, end, end - 1, *STRAY_SLOTS), draw)}


def spoiled(call: Arguments, draw: random.Random) -> Arguments:
    """One thing changed that only this entry has, or that matters most to it."""
    pool, slots = call.get("state_pool"), call.get("slots")
    strided = isinstance(pool, Tensor) and pool.layout == torch.strided and not pool.is_meta and pool.dim() == 4
    floating = strided and pool.is_floating_point()
    kind = draw.choice(("indices", "indices", "pool", "pool", "alias", "tokens", "negated", "counts"))
    if kind == "indices":
        return strayed_indices(call, draw)
    if kind == "counts" and isinstance(slots, Tensor) and slots.dim():
        dtype = draw.choice((torch.int32, torch.int64, torch.int16, torch.float32))
        size = draw.choice((len(slots), len(slots), 1))
        return {**call, "num_accepted_tokens": torch.ones(size, dtype=dtype)}
    if kind == "pool" and floating:
        return {**call, "state_pool": POOLS[draw.choice(list(POOLS))](pool.detach(), draw)}
    if kind == "alias" and floating:
        return of_pool_memory(call, draw)
    if kind == "negated":
        name = draw.choice((*TOKENS, "A_log", "dt_bias"))
        x = call.get(name)
        is_dense = isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided
        return {**call, name: negated(x.detach())} if is_dense else call
    return recut(call, draw) if kind == "tokens" else call


@dataclass(frozen=True)
class Conditions:
    """`legal`: nothing is wrong with the call; `unread`: the host does not see indices, as on a GPU."""

    legal: bool
    unread: bool
    mode: type[contextlib.ContextDecorator]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Around the call: where nobody reads indices, the sanitizer sees what they lead to."""
        with self.mode(), contextlib.ExitStack() as stack:
            if self.unread:
                stack.enter_context(mock.patch("kda.contents._readable", lambda indices: False))
                stack.enter_context(interpreter.sanitize() if INTERPRETED else contextlib.nullcontext())
            yield


def memory_of(x: object) -> Tensor | None:
    """uint8: all the memory that a tensor on the CPU is cut from; None for any other."""
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
        return None
    storage = x.detach().untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage)


@dataclass
class Before:
    """A call as it was: its values in tensors of their own, and the memory of its pool."""

    call: Arguments
    memory: Tensor | None

    @classmethod
    def of(cls, call: Arguments) -> "Before":
        own = lambda x: x.detach().clone().resolve_neg() if memory_of(x) is not None else x  # noqa: E731
        memory = memory_of(call.get("state_pool"))
        return cls({name: own(x) for name, x in call.items()}, None if memory is None else memory.clone())

    def pool_changed(self, call: Arguments) -> bool:
        memory = memory_of(call.get("state_pool"))
        return memory is not None and not torch.equal(memory, self.memory)

    def offsets(self) -> list[int]:
        (B, T), packed = self.call["q"].shape[:2], self.call.get("cu_seqlens")
        return [n * T for n in range(B + 1)] if packed is None else packed.tolist()

    def written(self) -> dict[int, tuple[int, int]]:
        """The slots that the call should write: (sequence, tokens of it in that state) of each."""
        ends: dict[int, tuple[int, int]] = {}
        for n, (a, b) in enumerate(itertools.pairwise(self.offsets())):
            row = table_of(self.call)[n]
            if begins(self.call)[n] < 0:
                continue
            for t in range(b - a):
                slot = row[min(t, len(row) - 1)]
                if slot >= 0 and (t < len(row) - 1 or t == b - a - 1):
                    ends[slot] = (n, t + 1)
        return ends

    def is_defined(self) -> bool:
        """Whether the documentation says what comes out: offsets go up, and no slot is shared."""
        offsets, used = self.offsets(), [slot for row in table_of(self.call) for slot in row if slot >= 0]
        rising = offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= self.call["q"].shape[:2].numel()
        return rising and len(set(used)) == len(used)


def wrong_result(before: Before, call: Arguments, o: Tensor) -> str | None:
    """What is wrong with o and the pool that a call left, by the oracle; bytes of no written slot are as they were."""
    if not before.is_defined():
        used = {slot for row in table_of(before.call) for slot in row if slot >= 0}
        return strayed(before, call, used)
    return (
        strayed(before, call, set(before.written()))
        or wrong_outputs(before, o)
        or wrong_states(before, call["state_pool"].detach())
    )


def strayed(before: Before, call: Arguments, written: set[int]) -> str | None:
    """Bytes of the pool's memory outside of these slots that changed."""
    pool = call["state_pool"].detach()
    memory = memory_of(pool).clone()
    as_it_was = pool.new_empty(0).set_(
        before.memory.untyped_storage(), pool.storage_offset(), pool.shape, pool.stride()
    )
    after = pool.new_empty(0).set_(memory.untyped_storage(), pool.storage_offset(), pool.shape, pool.stride())
    for slot in written:
        after[slot] = as_it_was[slot]
    changed = (memory != before.memory).nonzero().flatten().tolist()
    return (
        f"bytes {changed[:8]} of state_pool's memory changed, which belong to no slot that is written"
        if changed
        else None
    )


def wrong_outputs(before: Before, o: Tensor) -> str | None:
    """Rows of padding and of no sequence are zeros; the others are judged."""
    live = [n for n, slot in enumerate(begins(before.call)) if slot >= 0]
    offsets = before.offsets()
    rows = [i for n in live for i in range(offsets[n], offsets[n + 1])]
    if tuple(o.shape) != tuple(before.call["v"].shape) or o.dtype != before.call["q"].dtype:
        return f"o is {o.dtype} {list(o.shape)}"
    flat = o.flatten(0, 1)
    idle = torch.ones(len(flat), dtype=torch.bool)
    idle[rows] = False
    if as_bytes(flat[idle]).any():
        return f"o is not zero in rows {idle.nonzero().flatten().tolist()} of padding"
    return judged(before, [(n, offsets[n + 1] - offsets[n]) for n in live], {"o": flat[rows][None]})


def wrong_states(before: Before, pool: Tensor) -> str | None:
    """The state in each written slot is that after its own tokens."""
    written = before.written()
    return judged(before, list(written.values()), {"ht": pool[list(written)]}) if written else None


def judged(before: Before, pieces: list[tuple[int, int]], got: dict[str, Tensor]) -> str | None:
    """Verdicts on results of these first tokens of sequences, packed as sequences of their own."""
    call, offsets, first = before.call, before.offsets(), begins(before.call)
    rows = [offsets[n] + t for n, length in pieces for t in range(length)]
    if not rows:
        return None
    inputs = {name: call[name].flatten(0, 1)[rows][None] for name in TOKENS}
    inputs |= {name: call.get(name) for name in ("A_log", "dt_bias")}
    inputs["initial_state"] = call["state_pool"][[first[n] for n, _ in pieces]]
    inputs["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(length for _, length in pieces)])
    options = Options(**{name: call[name] for name in OPTIONS if name in call})
    verdicts = verdict.judge(inputs, options, got, entry="decode", spec=decode.PRECISION, quantities=frozenset(got))
    return "; ".join(str(v) for v in verdicts if v.klass not in ("OK", "UNINFORMATIVE")) or None
