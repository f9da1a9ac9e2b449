"""Authority on how a quantity falls into blocks, one per (sequence, head), and back to the caller's index."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.packing import Group, Layout

BY_TOKEN = frozenset({"o", "dq", "dk", "dv", "dg"})
BY_STATE = frozenset({"ht", "dh0"})
PER_QUERY_HEAD = frozenset({"dq", "dk", "q", "k"})


@dataclass(frozen=True)
class Heads:
    """Query heads of a call, value heads to each, and the width K of a gate."""

    query: int
    group: int
    K: int

    def values(self, queries: list[int]) -> list[int]:
        return [query * self.group + member for query in queries for member in range(self.group)]


def heads_of(inputs: Mapping[str, Tensor | None], entry: str) -> Heads:
    if entry == "gate":
        return Heads(inputs["g"].shape[2], 1, inputs["g"].shape[3])
    query = inputs["q"].shape[2]
    return Heads(query, inputs["v"].shape[2] // query, inputs["q"].shape[3])


def _slice(name: str, x: Tensor, queries: list[int], heads: Heads) -> Tensor:
    """The part of a tensor that belongs to these query heads and their value heads."""
    if len(queries) == heads.query:
        return x
    index = torch.tensor(queries if name in PER_QUERY_HEAD else heads.values(queries), device=x.device)
    if name in ("dt_bias", "ddt_bias"):
        return x.view(-1, heads.K)[index].flatten()
    axis = {"A_log": 0, "dA_log": 0, "initial_state": 1, "dht": 1, "ht": 1, "dh0": 1}.get(name, 2)
    return x.index_select(axis, index)


def slice_heads(inputs: Mapping[str, Tensor | None], queries: list[int], entry: str) -> dict[str, Tensor | None]:
    heads = heads_of(inputs, entry)
    whole = lambda name, x: x is None or name == "cu_seqlens"  # noqa: E731
    return {name: x if whole(name, x) else _slice(name, x, queries, heads) for name, x in inputs.items()}


def slice_output(name: str, x: Tensor, queries: list[int], heads: Heads) -> Tensor:
    return _slice(name, x, queries, heads)


@dataclass(frozen=True)
class Block:
    """Blocks of one shape: `take` turns the quantity, with or without a replica axis, into `[.., N, rows, channels]`.

    `length`: T of the batch for a quantity with tokens, chunks for `h`, else K. N counts heads fastest.
    """

    name: str
    group: Group | None
    dims: int
    length: int

    def take(self, x: Tensor) -> Tensor:
        lead = x.dim() - self.dims
        if self.name in BY_TOKEN or self.name == "dbeta":
            x = x.unsqueeze(-1) if self.name == "dbeta" else x
            x = x.flatten(lead, lead + 1).movedim(lead, 0)[self.group.tokens].movedim((0, 1), (lead, lead + 1))
            x = x.transpose(-3, -2).flatten(lead, lead + 1)
            return x.transpose(-2, -1) if self.name == "dbeta" else x
        if self.name in BY_STATE:
            return x.flatten(lead, lead + 1)
        if self.name == "h":
            return x.flatten(lead, lead + 2)
        if self.name == "dA_log":
            return x[..., None, None]
        return x.unflatten(-1, (-1, self.length))[..., None, :]  # ddt_bias: one row of K channels a head

    def index(self, n: int, t: int, d: int, queries: list[int], heads: Heads) -> tuple[int, ...]:
        """The caller's index of element (n, t, d) of a block taken from the heads `queries`."""
        owners = queries if self.name in PER_QUERY_HEAD else heads.values(queries)
        head = owners[n % len(owners)]
        if self.name == "dA_log":
            return (head,)
        if self.name == "ddt_bias":
            return (head * self.length + d,)
        if self.name in BY_STATE:
            return (n // len(owners), head, t, d)
        if self.name == "h":
            chunk = n // len(owners)
            return (chunk // self.length, chunk % self.length, head, t, d)
        token = d if self.name == "dbeta" else t
        row = int(self.group.tokens[n // len(owners), token])
        place = (row // self.length, row % self.length, head)
        return place if self.name == "dbeta" else (*place, d)


def blocks_of(name: str, x: Tensor, layout: Layout, heads: Heads) -> Iterator[Block]:
    """The blocks of quantity `name`, laid out like `x` (no replica axis)."""
    if not x.numel():
        return
    if name in BY_TOKEN or name == "dbeta":
        for group in layout.groups(x.device):
            if group.length:
                yield Block(name, group, x.dim(), x.shape[1])
        return
    yield Block(name, None, x.dim(), x.shape[1] if name == "h" else heads.K)


def tail_of(name: str, x: Tensor, layout: Layout) -> Tensor | None:
    """The tokens of no sequence, or None for a quantity that has none."""
    if name not in BY_TOKEN and name != "dbeta":
        return None
    end = max((start + length for start, length in zip(layout.starts, layout.lengths)), default=0)
    return x.flatten(0, 1)[end:]
