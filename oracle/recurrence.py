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

import torch
from torch import Tensor

from oracle.rounding import EXACT, Rounding

LOG2E = math.log2(math.e)
REPLICA_GATE_FLOOR = -200.0  # e^-200 lies below every format's floor, and keeps |g| finite for the rounding model
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
# in. So their states are made in memory that is used again: one place for each intermediate of a token, and one for
# each token of a segment where the backward pass needs all of them. The exact pass takes fresh memory.
class _Room:
    """Places for the states of a segment of `tokens`; None, as `out=` has it, where memory is fresh."""

    def __init__(self, rows: Rows, tokens: int, reused: bool):
        self.shape, self.reused, self.tokens, self.like = rows.state.shape, reused, tokens, rows.state
        self.places: dict[str, Tensor] = {}

    def state(self, name: str) -> Tensor | None:
        """`[M, R, K, V]`."""
        return self._place(name, self.shape)

    def states(self, name: str, count: int | None = None) -> Tensor | None:
        """`[M, R, n, K, V]`, of `count` tokens."""
        place = self._place(name, (*self.shape[:2], self.tokens, *self.shape[2:]))
        return None if place is None else place[:, :, :count]

    def _place(self, name: str, shape: tuple[int, ...]) -> Tensor | None:
        if self.reused and name not in self.places:
            self.places[name] = self.like.new_empty(shape)
        return self.places.get(name)


class _Step:
    """The arithmetic of one token, with its rounding points."""

    def __init__(self, rows: Rows, scale: float, rounding: Rounding, stages: Stages, tokens: int = 1):
        self.rows, self.rounding, self.stages = rows, rounding, stages
        self.room = _Room(rows, tokens, bool(rounding.replicas))
        self.scale = scale * rounding.constant("recurrence.scale", 2.0**-24, rows.q)
        self.q = self.scale * rows.q
        self.decay = self._decay(rows.g)
        self.beta = rows.beta[..., None]
        self.q_size, self.k_size = (x.norm(dim=-1, keepdim=True) if rounding.replicas else x for x in (rows.q, rows.k))

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
        total = (x.unsqueeze(-2) @ state).squeeze(-2)
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
        k, spare = self.rows.k[:, :, t], self.room.state("spare")
        if t and self.stages.carried != "fp32":  # else it is rounded already
            state = self.round("carried", state, self.stages.carried)
        decayed = self.round_("decayed", torch.mul(self.decay[:, :, t, :, None], state, out=before))
        residual = self.round(
            "residual", self.rows.v[:, :, t] - self.contract("k_state", k, decayed, spare, self.k_size[:, :, t])
        )
        update = self.round("update", self.beta[:, :, t] * residual, self.stages.update)
        outer = self.round_("outer", torch.mul(k[..., None], update[..., None, :], out=spare))
        state = self.round_("state", torch.add(decayed, outer, out=after), self.stages.state)
        return decayed, residual, update, state

    def backward(
        self, t: int, do: Tensor, dstate: Tensor, total: Tensor | None, rest: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(D, w, D', dS_{t-1}) of token t; do `[M or 1, R, T, V]`; `total` and `rest`: places for D and D'."""
        k, spare = self.rows.k[:, :, t], self.room.state("spare")
        arriving = torch.mul(self.q[:, :, t, :, None], do[:, :, t, None, :], out=spare)
        arriving = self.round_("do_outer", arriving)
        total = self.round_("state_grad", torch.add(dstate, arriving, out=total), self.stages.state_grad)
        pull = self.contract("k_grad", k, total, spare, self.k_size[:, :, t])
        leaving = self.round("update_grad", self.beta[:, :, t] * pull, self.stages.update_grad)
        outer = self.round_("outer_grad", torch.mul(k[..., None], leaving[..., None, :], out=spare))
        rest = self.round_("rest_grad", torch.sub(total, outer, out=rest), self.stages.state_grad)
        dstate = torch.mul(self.decay[:, :, t, :, None], rest, out=self.room.state("dstate"))
        return total, pull, rest, self.round_("decayed_grad", dstate)


def segment_length(length: int) -> int:
    """Tokens between kept states: about sqrt(T), so that kept and recomputed states are equally many."""
    return max(1, math.isqrt(max(length - 1, 0)) + 1)


def forward(
    rows: Rows, scale: float, rounding: Rounding = EXACT, stages: Stages = FP32, keep_every: int | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(o `[M, R, T, V]`, final state `[M, R, K, V]`, the states before tokens 0, n, 2n, ... with n = `keep_every`)."""
    step = _Step(rows, scale, rounding, stages)
    room = step.room
    state, outputs, kept = rows.state, [], []
    for t in range(rows.length):
        if keep_every and t % keep_every == 0:
            kept.append(state.clone() if room.reused else state)
        *_, state = step.forward(t, state, room.state("before"), room.state("after"))
        outputs.append(step.contract("q_state", rows.q[:, :, t], state, room.state("spare"), step.q_size[:, :, t]))
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
    step = _Step(rows, scale, rounding, stages, every)
    segments = []
    for index in reversed(range(len(kept))):
        first = index * every
        span = range(first, min(first + every, rows.length))
        gradients, dstate = _segment_backward(step, span, kept[index], do, dstate)
        segments.append(gradients)
    names = segments[0] if segments else ()
    joined = {name: torch.cat([segment[name] for segment in reversed(segments)], 2) for name in names}
    return {**joined, "dstate": dstate}


def _segment_backward(
    step: _Step, span: range, state: Tensor, do: Tensor, dstate: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """The adjoint of the tokens in `span`, whose first state is `state`; reductions that need no order come last."""
    count, room = len(span), step.room
    before, after = _States(room.states("before", count)), _States(room.states("after", count))
    residuals, updates, pulls = [], [], []
    for i, t in enumerate(span):
        decayed, residual, update, state = step.forward(t, state, before.place(i), after.place(i))
        before.add(decayed)
        residuals.append(residual)
        updates.append(update)
        after.add(state)
    totals, rests = _States(room.states("totals", count)), _States(room.states("rests", count))
    for i, t in zip(reversed(range(count)), reversed(span)):
        total, pull, rest, dstate = step.backward(t, do, dstate, totals.place(i), rests.place(i))
        totals.add(total)
        pulls.append(pull)
        rests.add(rest)
    pulls.reverse()
    do = do[:, :, span.start : span.stop]
    pull = torch.stack(pulls, 2)
    leaving = step.beta[:, :, span.start : span.stop] * pull
    spare = room.states("products", count)
    turned = None if spare is None else spare.mT
    dq = step.scale * step.contract("dq", do, after.stacked().mT, turned)
    dk = step.contract("dk_update", torch.stack(updates, 2), totals.stacked(reverse=True).mT, turned)
    before = before.stacked()
    dk = dk - step.contract("dk_pull", leaving, before.mT, turned)
    dg = step.dot("dg", rests.stacked(reverse=True), before, spare)
    partial = step.stages.partial_grad
    return {
        "dq": step.round("dq.partial", dq, partial),
        "dk": step.round("dk.partial", dk, partial),
        "dv": leaving,
        "dg": step.round("dg.partial", dg, partial),
        "dbeta": step.dot("dbeta", pull, torch.stack(residuals, 2)),
    }, dstate


class _States:
    """States of consecutive tokens, each made at its place among `places` `[M, R, n, K, V]`, if there are any."""

    def __init__(self, places: Tensor | None):
        self.places, self.made = places, []

    def place(self, i: int) -> Tensor | None:
        return None if self.places is None else self.places[:, :, i]

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
