"""Authority on the recurrence: the five lines in float64, their adjoint, and where a kernel that runs them rounds.

    S' = diag(exp g_t) S_{t-1};  u_t = beta_t (v_t - S'^T k_t);  S_t = S' + k_t u_t^T;  o_t = scale S_t^T q_t

Adjoint, with dS the gradient of S_t from later tokens and do_t that of o_t:

    D = dS + scale q_t do_t^T;  w = D^T k_t;  D' = D - k_t (beta_t w)^T;  dS_{t-1} = diag(exp g_t) D'
    dq_t = scale S_t do_t;  dk_t = D u_t - S' (beta_t w);  dv_t = beta_t w;  dbeta_t = w . r_t;  dg_t = rowsum(D' * S')

where r_t = v_t - S'^T k_t. A state is kept every sqrt(T) tokens and the states in between are recomputed, segment by
segment. exp(-inf) = 0 resets a row: its S' is 0, and so is its dg.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from oracle.rounding import EXACT, Rounding

LOG2E = math.log2(math.e)
REPLICA_GATE_FLOOR = -200.0  # e^-200 lies below every format's floor, and keeps |g| finite for the rounding model
KEPT_BYTES = 2**26  # of states of all tokens, up to which replicas keep them from the forward to the backward pass
LIVE_STATES = 8  # states of a segment that the adjoint holds at once, kept ones and temporaries included


@dataclass(frozen=True)
class Rows:
    """One dense batch of R rows = (sequence, value head).

    q, k, g `[M, R, T, K]`, v `[M, R, T, V]`, beta `[M, R, T]`, state `[M, R, K, V]`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[2]

    def some(self, first: int, last: int) -> "Rows":
        """The replicas `first`..`last` - 1."""
        return Rows(*(getattr(self, name)[first:last] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Stages:
    """Formats of a recurrent kernel's rounding points. `update`: of u and the state where they enter a reduction;
    `carried`: of a state as the next token finds it, after its own token's output has read it.
    """

    decay: str = "fp32"
    state: str = "fp32"
    carried: str = "fp32"
    update: str = "fp32"
    state_grad: str = "fp32"
    update_grad: str = "fp32"
    partial_grad: str = "fp32"

    @classmethod
    def of(cls, formats: Mapping[str, str]) -> "Stages":
        """The stages that `formats` names; the others are fp32, `update_grad` like `update`."""
        named = {stage: formats[stage] for stage in cls.__dataclass_fields__ if stage in formats}
        return cls(**{"update_grad": named.get("update", "fp32"), **named})


FP32 = Stages()


# NOTE [Room]
# Replicas do much with every state, and on a CPU fresh memory costs more than the arithmetic: pages have to be mapped
# in. So their states are made in memory that is used again, by replicas after others too: one place for each
# intermediate of a token, and one for each token whose states the backward pass needs. Where those of all tokens fit,
# nothing is made twice. The exact pass takes fresh memory.
class Room:
    """Places for states by name; None, as `out=` has it, where memory is fresh."""

    def __init__(self, reused: bool):
        self.reused = reused
        self.places: dict[tuple, Tensor] = {}

    def state(self, name: str, like: Tensor) -> Tensor | None:
        """Like a state `[M, R, K, V]`."""
        return self._place(name, like, like.shape)

    def states(self, name: str, like: Tensor, count: int) -> "_States":
        """Like `count` of them, `[M, R, n, K, V]`."""
        return _States(self._place(name, like, (*like.shape[:2], count, *like.shape[2:])))

    def _place(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor | None:
        if self.reused and (name, shape) not in self.places:
            self.places[name, shape] = like.new_empty(shape)
        return self.places.get((name, shape))


class _Step:
    """The arithmetic of one token, with its rounding points."""

    def __init__(self, rows: Rows, scale: float, rounding: Rounding, stages: Stages, room: Room | None = None):
        self.rows, self.rounding, self.stages = rows, rounding, stages
        self.room = Room(bool(rounding.replicas)) if room is None else room
        self.scale = scale * rounding.constant("recurrence.scale", 2.0**-24, rows.q)
        self.beta = rows.beta[..., None]
        q_size, k_size = (x.norm(dim=-1, keepdim=True) if rounding.replicas else x for x in (rows.q, rows.k))
        self.q_size = q_size
        # By token: slices cost, of which each token takes many.
        rest = (rows.k, rows.v, self.beta, self._decay(rows.g)[..., None], (self.scale * rows.q)[..., None], k_size)
        self.k, self.v, self.beta_t, self.decay, self.q, self.k_size = (x.unbind(2) for x in rest)

    def _decay(self, g: Tensor) -> Tensor:
        if not self.rounding.replicas:
            return torch.exp(g)
        constant = self.rounding.constant
        exponent = g.clamp(min=REPLICA_GATE_FLOOR) * LOG2E * constant("recurrence.log2e", 2.0**-24, g)
        decay = torch.exp2(self.round("exponent", exponent)) * constant("recurrence.exp2", 2.0**-23, g)
        return self.round("decay", decay, self.stages.decay)

    def round(self, site: str, x: Tensor, fmt: str = "fp32") -> Tensor:
        return self.rounding.round(f"recurrence.{site}", x, fmt)

    def round_(self, site: str, x: Tensor, fmt: str = "fp32") -> Tensor:
        return self.rounding.round_(f"recurrence.{site}", x, fmt)

    def contract(
        self, site: str, x: Tensor, state: Tensor, spare: Tensor | None = None, size: Tensor | None = None
    ) -> Tensor:
        """x^T S over the first state axis: x `[.., K]`, S `[.., K, V]` to `[.., V]`.

        fp32 accumulation counts, unless operands in a lower format hide it. `spare`: a place for something like S;
        `size`: the norm of x, if it is known.
        """
        if self.stages.update != "fp32":
            state = self.round(f"{site}.operand", state, self.stages.update)
        total = _applied(x, state)
        if not self.rounding.replicas or self.stages.update != "fp32":
            return total
        # torch's norm over an axis that is not the last takes five times as long.
        column = torch.mul(state, state, out=spare).sum(-2).sqrt_()
        size = x.norm(dim=-1, keepdim=True) if size is None else size
        return self.rounding.accumulate(f"recurrence.{site}", total, column.mul_(size))

    def dot(self, site: str, x: Tensor, y: Tensor, spare: Tensor | None = None) -> Tensor:
        """x . y over the last axis, accumulated in fp32. `spare`: a place for something like them."""
        total = torch.mul(x, y, out=spare).sum(-1)
        if not self.rounding.replicas:
            return total
        return self.rounding.accumulate(f"recurrence.{site}", total, x.norm(dim=-1) * y.norm(dim=-1))

    def forward(
        self, t: int, state: Tensor, before: Tensor | None, after: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(S', r, u, S_t) of token t; `before` and `after`: places for S' and S_t."""
        k, spare = self.k[t], self.room.state("spare", self.rows.state)
        if t and self.stages.carried != "fp32":  # else it is rounded already
            state = self.round("carried", state, self.stages.carried)
        decayed = self.round_("decayed", torch.mul(self.decay[t], state, out=before))
        residual = self.round("residual", self.v[t] - self.contract("k_state", k, decayed, spare, self.k_size[t]))
        update = self.round("update", self.beta_t[t] * residual, self.stages.update)
        outer = self.round_("outer", torch.mul(k[..., None], update[..., None, :], out=spare))
        state = self.round_("state", torch.add(decayed, outer, out=after), self.stages.state)
        return decayed, residual, update, state

    def output(self, t: int, state: Tensor, spare: Tensor | None) -> Tensor:
        """o_t but for the scale."""
        return self.contract("q_state", self.rows.q[:, :, t], state, spare, self.q_size[:, :, t])

    def outputs(self, span: range, after: "_States") -> Tensor:
        """Those of a segment whose states have places, `[M, R, n, V]`."""
        if self.stages.update != "fp32":  # rounding a state goes by its shape
            return torch.stack([self.output(t, after.place(i), None) for i, t in enumerate(span)], 2)
        part, products = slice(span.start, span.stop), self.products(len(span))
        return self.contract("q_state", self.rows.q[:, :, part], after.places, products, self.q_size[:, :, part])

    def products(self, count: int) -> Tensor | None:
        """A place for something like the states of so many tokens."""
        return self.room.states("products", self.rows.state, count).places

    def turned(self, count: int) -> Tensor | None:
        """`products` by value channels first."""
        products = self.products(count)
        return None if products is None else products.mT

    def backward(
        self, t: int, do: Tensor, dstate: Tensor, total: Tensor | None, rest: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(D, w, D', dS_{t-1}) of token t; do `[M or 1, R, T, V]`; `total` and `rest`: places for D and D'."""
        k, spare = self.k[t], self.room.state("spare", self.rows.state)
        arriving = torch.mul(self.q[t], do[:, :, t, None, :], out=spare)
        arriving = self.round_("do_outer", arriving)
        total = self.round_("state_grad", torch.add(dstate, arriving, out=total), self.stages.state_grad)
        pull = self.contract("k_grad", k, total, spare, self.k_size[t])
        leaving = self.round("update_grad", self.beta_t[t] * pull, self.stages.update_grad)
        outer = self.round_("outer_grad", torch.mul(k[..., None], leaving[..., None, :], out=spare))
        rest = self.round_("rest_grad", torch.sub(total, outer, out=rest), self.stages.state_grad)
        dstate = torch.mul(self.decay[t], rest, out=self.room.state("dstate", self.rows.state))
        return total, pull, rest, self.round_("decayed_grad", dstate)


def _applied(x: Tensor, state: Tensor) -> Tensor:
    """x^T S: x `[.., K]`, of every replica or of all, S `[.., K, V]` to `[.., V]`."""
    shape = state.shape
    x = x if x.shape == shape[:-1] else x.expand(shape[:-1])
    return torch.bmm(x.reshape(-1, 1, shape[-2]), state.flatten(0, -3)).view(*shape[:-2], shape[-1])


def segment_length(length: int) -> int:
    """Tokens between kept states: about sqrt(T), so that kept and recomputed states are equally many."""
    return max(1, math.isqrt(max(length - 1, 0)) + 1)


def keeps_all(rows: Rows) -> bool:
    """Whether the states of all tokens are few enough for `both`."""
    return 8 * rows.length * rows.state.numel() <= KEPT_BYTES


def forward(
    rows: Rows, scale: float, rounding: Rounding = EXACT, stages: Stages = FP32, keep_every: int | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(o `[M, R, T, V]`, final state `[M, R, K, V]`, the states before tokens 0, n, 2n, ... with n = `keep_every`)."""
    step = _Step(rows, scale, rounding, stages)
    place = lambda name: step.room.state(name, rows.state)  # noqa: E731
    state, outputs, kept = rows.state, [], []
    for t in range(rows.length):
        if keep_every and t % keep_every == 0:
            kept.append(state.clone() if step.room.reused else state)
        *_, state = step.forward(t, state, place("before"), place("after"))
        outputs.append(step.output(t, state, place("spare")))
    o = step.scale * torch.stack(outputs, 2) if outputs else rows.v
    return o, state, kept


def backward(
    rows: Rows,
    kept: list[Tensor],
    every: int,
    do: Tensor,
    dstate: Tensor,
    scale: float,
    rounding: Rounding = EXACT,
    stages: Stages = FP32,
) -> dict[str, Tensor]:
    """Gradients {dq, dk, dv, dg, dbeta, dstate} of sum(o do) + sum(S_T dstate), laid out as `rows`.

    `kept`: the states before tokens 0, `every`, 2 `every`, ... of the forward pass.
    """
    step = _Step(rows, scale, rounding, stages)
    segments = []
    for span, state in reversed([*zip(_spans(rows.length, every), kept)]):
        before, after = (step.room.states(name, state, len(span)) for name in ("before", "after"))
        made, _ = _segment_forward(step, span, state, do, before, after)
        gradients, dstate = _segment_backward(step, made, do, dstate)
        segments.append(gradients)
    return {**_joined(segments), "dstate": dstate}


def both(
    rows: Rows,
    scale: float,
    do: Tensor,
    dstate: Tensor,
    rounding: Rounding,
    stages: Stages = FP32,
    every: int | None = None,
    keep: bool = False,
    room: Room | None = None,
) -> tuple[Tensor, Tensor, list[Tensor], dict[str, Tensor]]:
    """`forward` and `backward` by states of all tokens, which go to `room`: the same numbers, none made twice. States
    before tokens 0, n, 2n, ... with n = `every` are kept if wanted.
    """
    every = every or segment_length(rows.length)
    step, state, kept, segments, outputs = _Step(rows, scale, rounding, stages, room), rows.state, [], [], []
    everywhere = step.room.states("before everywhere", state, rows.length).parts(every)
    for span, before in zip(_spans(rows.length, every), everywhere):
        kept += [state.clone()] if keep else []
        after = step.room.states("after", state, len(span))
        made, state = _segment_forward(step, span, state, do, before, after)
        outputs.append(step.outputs(span, after))
        segments.append(made)
    gradients = []
    for made in reversed(segments):
        found, dstate = _segment_backward(step, made, do, dstate)
        gradients.append(found)
    ends = [x.clone() if step.room.reused else x for x in (state, dstate)]
    return step.scale * torch.cat(outputs, 2), ends[0], kept, {**_joined(gradients), "dstate": ends[1]}


def _spans(length: int, every: int) -> list[range]:
    """The tokens in segments of `every`."""
    return [range(first, min(first + every, length)) for first in range(0, length, every)]


def _joined(segments: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Gradients of segments, the last one first, token by token."""
    names = segments[0] if segments else ()
    return {name: torch.cat([segment[name] for segment in reversed(segments)], 2) for name in names}


@dataclass(frozen=True)
class _Segment:
    """What the forward pass made of the tokens in `span`: S', r and u of each, and dq, for which S_t was needed."""

    span: range
    before: "_States"
    residual: Tensor
    update: Tensor
    dq: Tensor


def _segment_forward(
    step: _Step, span: range, state: Tensor, do: Tensor, before: "_States", after: "_States"
) -> tuple[_Segment, Tensor]:
    """(what is made of the tokens in `span`, whose first state is `state`; the last state)."""
    residuals, updates = [], []
    for i, t in enumerate(span):
        decayed, residual, update, state = step.forward(t, state, before.place(i), after.place(i))
        before.add(decayed)
        residuals.append(residual)
        updates.append(update)
        after.add(state)
    dq = step.scale * step.contract("dq", do[:, :, span.start : span.stop], after.stacked().mT, step.turned(len(span)))
    return _Segment(span, before, torch.stack(residuals, 2), torch.stack(updates, 2), dq), state


def _segment_backward(step: _Step, made: _Segment, do: Tensor, dstate: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """The adjoint of the tokens of a segment; reductions that need no order come last."""
    span, count, pulls = made.span, len(made.span), []
    totals, rests = (step.room.states(name, step.rows.state, count) for name in ("totals", "rests"))
    for i, t in zip(reversed(range(count)), reversed(span)):
        total, pull, rest, dstate = step.backward(t, do, dstate, totals.place(i), rests.place(i))
        totals.add(total)
        pulls.append(pull)
        rests.add(rest)
    pulls.reverse()
    pull = torch.stack(pulls, 2)
    leaving = step.beta[:, :, span.start : span.stop] * pull
    turned = step.turned(count)
    dk = step.contract("dk_update", made.update, totals.stacked(reverse=True).mT, turned)
    before = made.before.stacked()
    dk = dk - step.contract("dk_pull", leaving, before.mT, turned)
    dg = step.dot("dg", rests.stacked(reverse=True), before, step.products(count))
    partial = step.stages.partial_grad
    return {
        "dq": step.round("dq.partial", made.dq, partial),
        "dk": step.round("dk.partial", dk, partial),
        "dv": leaving,
        "dg": step.round("dg.partial", dg, partial),
        "dbeta": step.dot("dbeta", pull, made.residual),
    }, dstate


class _States:
    """States of consecutive tokens, each made at its place among `places` `[M, R, n, K, V]`, if there are any."""

    def __init__(self, places: Tensor | None):
        self.places, self.made = places, []

    @cached_property
    def each(self) -> tuple[Tensor, ...]:
        return self.places.unbind(2)

    def parts(self, count: int) -> list["_States"]:
        """The places in runs of so many."""
        return [_States(places) for places in self.places.split(count, 2)]

    def place(self, i: int) -> Tensor | None:
        return None if self.places is None else self.each[i]

    def add(self, state: Tensor) -> None:
        if self.places is None:
            self.made.append(state)

    def stacked(self, reverse: bool = False) -> Tensor:
        """`[M, R, n, K, V]`; of what was not made in place the list is emptied, states being what fills memory."""
        if self.places is not None:
            return self.places
        stacked = torch.stack(self.made[::-1] if reverse else self.made, 2)
        self.made.clear()
        return stacked
