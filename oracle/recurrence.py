"""Authority on the recurrence: the five lines in float64, their adjoint, and the rounding points of a kernel that runs them as they are.

    S' = diag(exp g_t) S_{t-1};  u_t = beta_t (v_t - S'^T k_t);  S_t = S' + k_t u_t^T;  o_t = scale S_t^T q_t

Adjoint, with dS the gradient of S_t from later tokens and do_t that of o_t:

    D = dS + scale q_t do_t^T;  w = D^T k_t;  D' = D - k_t (beta_t w)^T;  dS_{t-1} = diag(exp g_t) D'
    dq_t = scale S_t do_t;  dk_t = D u_t - S' (beta_t w);  dv_t = beta_t w;  dbeta_t = w . r_t;  dg_t = rowsum(D' * S')

where r_t = v_t - S'^T k_t. A state is kept every sqrt(T) tokens and the states in between are recomputed, segment by segment.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.rounding import EXACT, Rounding

LOG2E = math.log2(math.e)
REPLICA_GATE_FLOOR = -200.0  # e^-200 lies below every format's floor, and keeps |g| finite for the rounding model


@dataclass(frozen=True)
class Rows:
    """One dense batch: q, k, g `[M, R, T, K]`, v `[M, R, T, V]`, beta `[M, R, T]`, state `[M, R, K, V]`; R rows = (sequence, value head)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    state: Tensor

    @property
    def length(self) -> int:
        return self.q.shape[2]


class _Step:
    """The arithmetic of one token with its rounding sites; `operand` is the format of what enters the K and V reductions."""

    def __init__(self, rows: Rows, scale: float, rounding: Rounding, operand: str):
        self.rows, self.rounding, self.operand = rows, rounding, operand
        self.scale = scale * rounding.constant("recurrence.scale", 2.0**-24, rows.q)
        self.q = self.scale * rows.q
        g = rows.g if not rounding.replicas else rows.g.clamp(min=REPLICA_GATE_FLOOR)
        if rounding.replicas:
            exponent = rounding.round("recurrence.exponent", g * LOG2E * rounding.constant("recurrence.log2e", 2.0**-24, g), "fp32")
            decay = torch.exp2(exponent) * rounding.constant("recurrence.exp2", 2.0**-23, g)
            self.decay = rounding.round("recurrence.decay", decay, "fp32")
        else:
            self.decay = torch.exp(g)
        self.beta = rows.beta[..., None]

    def contract(self, site: str, x: Tensor, state: Tensor) -> Tensor:
        """x^T S over the first state axis, x `[M, R, n, K]`, state `[M, R, K, V]`."""
        if not self.rounding.replicas:
            return x @ state
        if self.operand != "fp32":
            return x @ self.rounding.round(f"{site}.operand", state, self.operand)
        return self.rounding.accumulate(site, x @ state, x.norm(dim=-1, keepdim=True) * state.norm(dim=-2, keepdim=True))

    def forward(self, t: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(S', r, u, S_t) of token t."""
        rows, rounding = self.rows, self.rounding
        decayed = rounding.round("recurrence.decayed", self.decay[:, :, t, :, None] * state, "fp32")
        k = rows.k[:, :, t, None, :]
        residual = rows.v[:, :, t] - self.contract("recurrence.k_state", k, decayed).squeeze(-2)
        residual = rounding.round("recurrence.residual", residual, "fp32")
        update = rounding.round("recurrence.update", self.beta[:, :, t] * residual, self.operand)
        outer = rounding.round("recurrence.outer", k.mT * update[..., None, :], "fp32")
        return decayed, residual, update, rounding.round("recurrence.state", decayed + outer, "fp32")


def segment_length(length: int) -> int:
    """Tokens between kept states: about sqrt(T), so that kept and recomputed states are equally many."""
    return max(1, math.isqrt(max(length - 1, 0)) + 1)


def forward(
    rows: Rows, scale: float, rounding: Rounding = EXACT, operand: str = "fp32", keep_every: int | None = None
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(o `[M, R, T, V]`, final state `[M, R, K, V]`, the states before tokens 0, n, 2n, ... with n = `keep_every`)."""
    step = _Step(rows, scale, rounding, operand)
    state, outputs, kept = rows.state, [], []
    for t in range(rows.length):
        if keep_every and t % keep_every == 0:
            kept.append(state)
        *_, state = step.forward(t, state)
        outputs.append(step.contract("recurrence.q_state", rows.q[:, :, t, None, :], state).squeeze(-2))
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
    operand: str = "fp32",
) -> dict[str, Tensor]:
    """Gradients {dq, dk, dv, dg, dbeta, dstate} of sum(o do) + sum(S_T dstate), laid out as `rows`."""
    step = _Step(rows, scale, rounding, operand)
    segments = []
    for index in reversed(range(len(kept))):
        first = index * every
        span = range(first, min(first + every, rows.length))
        gradients, dstate = _segment_backward(step, span, kept[index], do, dstate)
        segments.append(gradients)
    out = {name: torch.cat([segment[name] for segment in reversed(segments)], 2) for name in (segments[0] if segments else ())}
    return {**out, "dstate": dstate}


def _segment_backward(
    step: _Step, span: range, state: Tensor, do: Tensor, dstate: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    """The adjoint of the tokens in `span`, whose first state is `state`; all reductions that need no order are done at once."""
    rows, rounding = step.rows, step.rounding
    before, after, residuals, updates = [], [], [], []
    for t in span:
        decayed, residual, update, state = step.forward(t, state)
        before.append(decayed)
        after.append(state)
        residuals.append(residual)
        updates.append(update)
    totals, rests, pulls = [], [], []
    for t in reversed(span):
        arriving = rounding.round("recurrence.do_outer", step.q[:, :, t, :, None] * do[:, :, t, None, :], "fp32")
        total = rounding.round("recurrence.state_grad", dstate + arriving, "fp32")
        k = rows.k[:, :, t, None, :]
        pull = step.contract("recurrence.k_grad", k, total).squeeze(-2)
        leaving = rounding.round("recurrence.update_grad", step.beta[:, :, t] * pull, step.operand)
        outer = rounding.round("recurrence.outer_grad", k.mT * leaving[..., None, :], "fp32")
        rest = rounding.round("recurrence.rest_grad", total - outer, "fp32")
        dstate = rounding.round("recurrence.decayed_grad", step.decay[:, :, t, :, None] * rest, "fp32")
        totals.append(total)
        rests.append(rest)
        pulls.append(pull)
    stack = lambda parts: torch.stack(parts, 2)  # noqa: E731
    before, after, residuals, updates = stack(before), stack(after), stack(residuals), stack(updates)
    total, rest, pull = stack(totals[::-1]), stack(rests[::-1]), stack(pulls[::-1])
    here = slice(span.start, span.stop)
    leaving = step.beta[:, :, here] * pull
    over_v = lambda site, x, state: step.contract(site, x[..., None, :], state.mT).squeeze(-2)  # noqa: E731
    return {
        "dq": step.scale * over_v("recurrence.dq", do[:, :, here], after),
        "dk": over_v("recurrence.dk_update", updates, total) - over_v("recurrence.dk_pull", leaving, before),
        "dv": leaving,
        "dg": rounding.accumulate("recurrence.dg", (rest * before).sum(-1), rest.norm(dim=-1) * before.norm(dim=-1)),
        "dbeta": rounding.accumulate("recurrence.dbeta", (pull * residuals).sum(-1), pull.norm(dim=-1) * residuals.norm(dim=-1)),
    }, dstate
