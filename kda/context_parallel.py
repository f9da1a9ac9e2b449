"""Authority on context parallelism: which tokens of a call each rank holds, and the states that pass between ranks."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from kda import chunk_bwd, contents, contract, fused_segments, registry
from kda.contract import Call, refuse
from kda.gate import dense
from kda.once import once_differentiable
from kda.segments import chain, chain_back, identities
from kda.sums import sum_tiles

# NOTE [States between ranks]
# Ranks hold the tokens of a batch one after the other, so that at most one sequence (or, unpacked, each row of the
# batch) comes to a rank from those before it, and at most one goes on. Every rank gathers what every other does to the
# state that passes: (P, Q) of NOTE [Chain of states] where a sequence comes and goes on, (0, its final state) where it
# begins, (1, 0) from a rank without tokens, (0, 0) where nothing goes on. A chain over the ranks before gives a rank
# its first state, and over the ranks after, in the backward pass, the gradient that arrives.


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """The share of this rank, as `build_cp_context` makes it.

    `offsets` `[n + 1]`: first row, among the rank's own, of each sequence that it holds a part of, and the end; None
    for a batch that is not packed. `sequences`: their places in the whole batch. `comes`: the first of them began on an
    earlier rank; `goes_on`: the last one ends on a later rank; unpacked, that is so of all.
    """

    group: dist.ProcessGroup | None
    rank: int
    ranks: int
    tokens: int | None = None
    offsets: tuple[int, ...] | None = None
    sequences: tuple[int, ...] = ()
    comes: bool = False
    goes_on: bool = False

    @property
    def passes(self) -> bool:
        """Whether what comes to this rank is what goes on."""
        return self.comes and self.goes_on and (self.offsets is None or len(self.offsets) == 2)

    def cu_seqlens(self, device: torch.device) -> Tensor | None:
        return None if self.offsets is None else _on_device(self.offsets, device)


@functools.lru_cache(maxsize=64)
def _on_device(offsets: tuple[int, ...], device: torch.device) -> Tensor:
    """Copied once, since a copy from pageable memory waits."""
    return torch.tensor(offsets, dtype=torch.int64, device=device)


def build_cp_context(
    cu_seqlens: Tensor | Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
    shards: Sequence[int] | None = None,
) -> ContextParallel:
    """What `chunk_kda(cp_context=...)` wants to know on this rank of `group` (None: all ranks); made alike on each.

    cu_seqlens `[N + 1]`: offsets of the whole packed batch, a tensor (which is read) or ints. shards: tokens that each
    rank holds, any number from 0, in the order of ranks; together the batch, with an unused tail if there is one; None
    cuts [0, cu_seqlens[-1]) as evenly as can be. Without cu_seqlens each row of a batch is one sequence, and ranks hold
    any number of its tokens. Raises ValueError or TypeError naming the argument.
    """
    if not (dist.is_available() and dist.is_initialized()):
        refuse("group", group, "a group of torch.distributed, which is not initialised")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        refuse("group", "one without this process", "a group of ranks that this process is among")
    if cu_seqlens is None:
        if shards is not None:
            refuse("shards", "given", "None unless cu_seqlens is given")
        return ContextParallel(group, rank, ranks, comes=rank > 0, goes_on=rank < ranks - 1)
    offsets = _integers("cu_seqlens", cu_seqlens, "offsets [N + 1]")
    if not offsets:
        refuse("cu_seqlens", "empty", "offsets [N + 1]")
    if shards is None:
        shards = [b - a for a, b in itertools.pairwise(offsets[-1] * r // ranks for r in range(ranks + 1))]
    shards = _integers("shards", shards, f"tokens of each rank, [{ranks}]")
    if len(shards) != ranks or min(shards) < 0:
        refuse("shards", shards, f"one number from 0 for each of {ranks} ranks")
    contents.check_offset_values("cu_seqlens", offsets, sum(shards))
    return ContextParallel(group, rank, ranks, **_share(offsets, shards, rank))


def _integers(name: str, x: object, must: str) -> list[int]:
    values = x.tolist() if isinstance(x, Tensor) else list(x) if isinstance(x, Sequence) else None
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        refuse(name, type(x).__name__, f"{must}: a tensor of int32 or int64, or ints", TypeError)
    return values


def _share(offsets: list[int], shards: list[int], rank: int) -> dict[str, object]:
    """The sequences that a rank holds a part of; one without tokens is on the rank of the token that follows it."""
    begin = sum(shards[:rank])
    end = begin + shards[rank]
    last = rank == len(shards) - 1
    spans = list(itertools.pairwise(offsets))
    held = [
        n
        for n, (a, b) in enumerate(spans)
        if max(a, begin) < min(b, end) or (a == b and (begin <= a < end or (last and a == sum(shards))))
    ]
    bounds = [max(spans[n][0], begin) - begin for n in held] + [min(spans[held[-1]][1], end) - begin if held else 0]
    return {
        "tokens": shards[rank],
        "offsets": tuple(bounds),
        "sequences": tuple(held),
        "comes": bool(held) and spans[held[0]][0] < begin,
        "goes_on": bool(held) and spans[held[-1]][1] > end,
    }


def check(call: Call, context: object) -> None:
    """Refuse what a call with a context cannot have."""
    if not isinstance(context, ContextParallel):
        refuse("cp_context", type(context).__name__, "None, or what build_cp_context returns", TypeError)
    for name in ("cu_seqlens", "cu_seqlens_cpu"):
        if getattr(call, name) is not None:
            refuse(name, "given", "None with cp_context, which knows the offsets of this rank")
    if call.return_intermediate_states is not False:
        refuse("return_intermediate_states", call.return_intermediate_states, "False with cp_context")


def chunk_kda_cp(call: Call, context: ContextParallel) -> tuple[Tensor, Tensor | None, None]:
    """(o, final state if asked for, no intermediate states) of this rank's tokens, by the route that takes them.

    Every rank of the group calls it, and every rank its backward pass.
    """
    check(call, context)
    if torch.compiler.is_compiling():
        refuse("cp_context", "given under torch.compile", "None there: ranks talk outside of graphs")
    if context.offsets is not None and isinstance(call.q, Tensor):
        if call.q.dim() == 4 and call.q.shape[:2] != (1, context.tokens):
            must = f"[1, T, H, K] with T = {context.tokens}, the tokens of rank {context.rank}"
            refuse("q.shape", list(call.q.shape), must)
        call = replace(call, cu_seqlens=context.cu_seqlens(call.q.device))
    call = contract.validate(call)
    contents.check(call)
    explanation = registry.choose(call)
    if registry.asked_to_explain():
        raise registry.Explained(explanation)
    if explanation.route is None:
        raise registry.NoRoute(f"no route takes this call\n{explanation}")
    call, tensors, training = chunk_bwd.detached(call)
    share = _Share(context, explanation.route)
    with torch.cuda.device_of(call.g):
        if training:
            o, ht, *_ = _ContextFunction.apply(call, share, *tensors)
        else:
            with torch.no_grad():
                o, ht, *_ = share.forward(call)
    return o, ht, None


class _ContextFunction(torch.autograd.Function):
    """Keeps the inputs, the first states, and what the ranks do to a state."""

    @staticmethod
    def forward(ctx, call: Call, share: "_Share", *tensors: Tensor | None):
        o, ht, states, transitions = share.forward(call)
        chunk_bwd.keep(ctx, call, share, tensors, (states, transitions))
        return o, ht

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, do, dht):
        formula = lambda call, share, do, dht, kept: share.gradients(call, do, dht, *kept)  # noqa: E731
        return None, None, *chunk_bwd.kept_gradients(ctx, saved, formula, do, dht)


@dataclass(frozen=True)
class _Share:
    """A rank's part of a call, computed by a route."""

    context: ContextParallel
    route: str

    def forward(self, call: Call) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        """(o, final state if asked for, the first states if there are any, what each rank does to the state)."""
        context, r = self.context, self.context.rank
        inner = _k_first(replace(call, output_final_state=True))
        result = None if context.comes else self._run(inner)
        transitions, additions = (self._gathered(x) for x in self._maps(inner, result))
        if result is None:
            states = _zero_states(inner) if inner.initial_state is None else inner.initial_state.clone()
            states[self._coming] = chain(transitions[:, :r], additions[:, :r], torch.zeros_like(additions[:, 0]))[:, r]
            inner = replace(inner, initial_state=states)
            result = self._run(inner)
        o, ht = result
        return o, _of_caller(call, ht) if call.output_final_state else None, inner.initial_state, transitions

    def gradients(
        self, call: Call, do: Tensor | None, dht: Tensor | None, states: Tensor | None, transitions: Tensor
    ) -> dict[str, Tensor | None]:
        """Every gradient by the name of its argument; those of A_log and dt_bias are summed over the ranks."""
        context, r = self.context, self.context.rank
        do = torch.zeros_like(call.v) if do is None else dense(do)
        dht = _zero_states(_k_first(call)) if dht is None else _transposed(call, dht)
        wider = {name: _wide(getattr(call, name)) for name in ("A_log", "dt_bias")}
        inner = replace(_k_first(call), **wider, initial_state=states, output_final_state=True)
        found = None if context.goes_on else self._gradients(inner, do, dht)
        own = torch.zeros_like(transitions[:, 0, ..., :1]).repeat(1, 1, 1, dht.shape[-1])
        if context.comes:
            own = found["initial_state"][self._coming] if found else self._state_gradient(inner, do, dht)
        own = self._gathered(own)
        if found is None:
            dht = dht.clone()
            dht[self._going] += chain_back(transitions[:, r + 1 :], own[:, r + 1 :], torch.zeros_like(own[:, 0]))[:, 0]
            found = self._gradients(inner, do, dht)
        for name in (name for name, x in wider.items() if x is not None):
            total = sum_tiles(self._gathered(found[name][None])[0])
            found[name] = total.to(getattr(call, name).dtype)
        if call.initial_state is None:
            return {**found, "initial_state": None}
        dh0 = found["initial_state"]
        if context.comes:
            dh0[self._coming] = 0
        return {**found, "initial_state": _of_caller(call, dh0)}

    @property
    def _coming(self) -> slice:
        """Of the rank's sequences: those that come from earlier ranks, where any do."""
        return slice(None) if self.context.offsets is None else slice(1)

    @property
    def _going(self) -> slice:
        return slice(None) if self.context.offsets is None else slice(-1, None)

    def _run(self, call: Call) -> tuple[Tensor, Tensor]:
        return registry.route_named(self.route).run(call)[:2]

    def _gradients(self, call: Call, do: Tensor, dht: Tensor) -> dict[str, Tensor | None]:
        return registry.route_named(self.route).gradients(call, do, dht)

    def _state_gradient(self, call: Call, do: Tensor, dht: Tensor) -> Tensor:
        """That of the states that come, by the rank's own results."""
        piece = self._piece(call, 0, do, dht)
        if self.route in fused_segments.KERNELS:
            return fused_segments.state_gradient(*piece, self.route)
        return self._gradients(*piece)["initial_state"]

    def _gathered(self, x: Tensor) -> Tensor:
        """`[S, ranks, ...]` of x `[S, ...]` on every rank."""
        if self.context.ranks == 1:
            return x[:, None]
        every = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.context.ranks)]
        dist.all_gather(every, x.contiguous(), group=self.context.group)
        return torch.stack(every, 1)

    def _maps(self, call: Call, result: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """(P `[S, HV, K, K]`, Q `[S, HV, K, V]`), see NOTE [States between ranks]; `result` where no state comes."""
        context, (B, T, _, HV, K, V) = self.context, call.shape
        S, dtype = B if context.offsets is None else 1, _state_dtype(call)
        unit = identities(S, HV, K, call.v.device).to(dtype)
        nothing = unit.new_zeros(S, HV, K, V)
        if context.passes:
            if self.route in fused_segments.KERNELS:
                return fused_segments.maps(call, self.route)
            bare = replace(call, v=call.v.new_zeros(B, T, HV, K), initial_state=unit.float())
            return self._run(bare)[1], self._run(replace(call, initial_state=None))[1]
        if context.goes_on:
            made = self._run(self._piece(call, -1)[0]) if result is None else result
            return torch.zeros_like(unit), made[1][self._going]
        return (unit if context.tokens == 0 else torch.zeros_like(unit)), nothing

    def _piece(self, call: Call, n: int, do: Tensor | None = None, dht: Tensor | None = None):
        """(the call, do, dht) of the first or last sequence (n = 0, -1) of a packed rank; all of one that is not."""
        if self.context.offsets is None:
            return call, do, dht
        begin, end = list(itertools.pairwise(self.context.offsets))[n]
        of_token = lambda x: None if x is None else x[:, begin:end]  # noqa: E731
        of_state = lambda x: None if x is None else x[n:][:1]  # noqa: E731
        tokens = {name: of_token(getattr(call, name)) for name in ("q", "k", "v", "g", "beta")}
        piece = replace(call, **tokens, cu_seqlens=None, initial_state=of_state(call.initial_state))
        return piece, of_token(do), of_state(dht)


def _state_dtype(call: Call) -> torch.dtype:
    return torch.float64 if call.q.dtype == torch.float64 else torch.float32


def _zero_states(call: Call) -> Tensor:
    return torch.zeros(call.state_shape, dtype=_state_dtype(call), device=call.q.device)


def _transposed(call: Call, state: Tensor) -> Tensor:
    return dense(state.mT if call.state_v_first else state)


def _k_first(call: Call) -> Call:
    state = None if call.initial_state is None else _transposed(call, call.initial_state)
    return replace(call, state_v_first=False, initial_state=state)


def _of_caller(call: Call, state: Tensor | None) -> Tensor | None:
    return None if state is None else _transposed(call, state)


def _wide(x: Tensor | None) -> Tensor | None:
    """A parameter whose gradients are to be summed before they are rounded."""
    return x if x is None or x.dtype == torch.float64 else x.float()
