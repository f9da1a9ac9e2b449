"""Authority on the chunkwise algorithm: its stages in float64, with the rounding points that such a kernel declares.

Within a chunk of C tokens, G the inclusive cumulative log2 gate:

    A_qk[i, j] = scale sum_k q_i k_j 2^(G_i - G_j)  (i >= j)      L[i, j] = beta_i sum_k k_i k_j 2^(G_i - G_j)  (i > j)
    R = (I + L)^-1      w = R (beta k 2^G)      u = R (beta v)
    v_new = u - w S     o = scale (q 2^G) S + A_qk v_new     S <- 2^(G_C) S + (k 2^(G_C - G))^T v_new

The backward pass is autograd through these stages; operands and incoming gradients of every product are rounded alike.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.operator import Core, Formats, Inputs, Options, evaluate
from oracle.recurrence import LOG2E, REPLICA_GATE_FLOOR, Rows
from oracle.rounding import EXACT, Rounding

BLOCK = 16


@dataclass(frozen=True)
class ChunkModel:
    """Where a chunkwise kernel rounds.

    `operand`: the large products; `intra`: k.k and q.k; `merge`: block merges of the inverse; `stored_inverse`: R in
    memory; `state`: the carried state; `diagonal`: 'pair' (each exponent a difference of cumulative gates), 'halving'
    (each the sum over its own range, which a reset elsewhere cannot spoil) or 'anchor' (two factors around the block's
    first row); `apart`: i = j outside the anchored tile; `inverse`: 'substitution' or 'neumann' (a half-precision
    series).
    """

    chunk: int = 64
    operand: str = "bf16"
    intra: str = "tf32"
    merge: str = "tf32"
    stored_inverse: str = "bf16"
    state: str = "fp32"
    diagonal: str = "pair"
    apart: bool = False
    inverse: str = "substitution"

    @classmethod
    def of(
        cls, formats: Mapping[str, str], chunk: int | None, diagonal: str | None, inverse: str | None
    ) -> "ChunkModel":
        """The model of a PrecisionSpec, its formats resolved; diagonal 'anchor_apart' is 'anchor' with `apart`.

        ValueError for a chunk that is no multiple of 16, or an algorithm that has no model here.
        """
        chunk = 64 if chunk is None else chunk
        if chunk < BLOCK or chunk % BLOCK:
            raise ValueError(f"chunk is {chunk}, must be a positive multiple of {BLOCK}")
        if diagonal not in (None, "pair", "halving", "anchor", "anchor_apart"):
            raise ValueError(f"diagonal is {diagonal!r}, must be 'pair', 'halving', 'anchor' or 'anchor_apart'")
        if inverse not in (None, "substitution", "neumann"):
            raise ValueError(f"inverse is {inverse!r}, must be 'substitution' or 'neumann'")
        stages = ("operand", "intra", "merge", "stored_inverse", "state")
        named = {name: formats[name] for name in stages if name in formats}
        return cls(
            chunk=chunk,
            diagonal="anchor" if diagonal == "anchor_apart" else diagonal or "pair",
            apart=diagonal == "anchor_apart",
            inverse=inverse or "substitution",
            **named,
        )


class _Round(torch.autograd.Function):
    """Rounded forward ('fp64': unchanged); the gradient to `grad_fmt`, fp32 where it stays in registers."""

    @staticmethod
    def forward(ctx, x, rounding, site, fmt, grad_fmt="fp32"):
        ctx.rounding, ctx.site, ctx.grad_fmt = rounding, site, grad_fmt
        return rounding.round(site, x, fmt)

    @staticmethod
    def backward(ctx, grad):
        return ctx.rounding.round(f"{ctx.site}.grad", grad, ctx.grad_fmt), None, None, None, None


class _Product(torch.autograd.Function):
    """a @ b with operands in `fmt`, fp32 accumulation; so are the two products of its gradient."""

    @staticmethod
    def forward(ctx, a, b, rounding, site, fmt):
        a, b = rounding.round(f"{site}.a", a, fmt), rounding.round(f"{site}.b", b, fmt)
        ctx.save_for_backward(a, b)
        ctx.rounding, ctx.site, ctx.fmt = rounding, site, fmt
        return _accumulated(rounding, site, a, b, fmt)

    @staticmethod
    def backward(ctx, grad):
        (a, b), rounding, site = ctx.saved_tensors, ctx.rounding, ctx.site
        grad = rounding.round(f"{site}.grad", grad, ctx.fmt)
        da = _accumulated(rounding, f"{site}.da", grad, b.mT, ctx.fmt)
        db = _accumulated(rounding, f"{site}.db", a.mT, grad, ctx.fmt)
        return da, db, None, None, None


def _accumulated(rounding: Rounding, site: str, a: Tensor, b: Tensor, fmt: str) -> Tensor:
    """a @ b, accumulated in fp32; beside operands that were rounded further, that error does not count."""
    if not rounding.replicas or fmt != "fp32":
        return a @ b
    return rounding.accumulate(site, a @ b, a.norm(dim=-1, keepdim=True) * b.norm(dim=-2, keepdim=True), 22)


class _CumulativeGate(torch.autograd.Function):
    """Inclusive cumulative sum in log2 units, in fp32 unless `magnitude` is None; its adjoint is the reversed sum."""

    @staticmethod
    def forward(ctx, g, magnitude, rounding):
        ctx.rounding = rounding
        total = (g * LOG2E).cumsum(-2)
        if magnitude is None:
            return total
        return rounding.accumulate("chunk.cumsum", total, magnitude * math.sqrt(g.shape[-2] / 3))

    @staticmethod
    def backward(ctx, grad):
        reverse = lambda x: x.flip(-2).cumsum(-2).flip(-2) * LOG2E  # noqa: E731
        return ctx.rounding.accumulate("chunk.cumsum.grad", reverse(grad), reverse(grad.abs())), None, None


class _Inverse(torch.autograd.Function):
    """R = (I + L)^-1 for strictly lower L; adjoint -tril(R^T dR R^T)."""

    @staticmethod
    def forward(ctx, L, rounding, model):
        R = _neumann(L, rounding) if model.inverse == "neumann" else _substitution(L, rounding, model.merge)
        identity = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
        R = rounding.round("chunk.inverse.store", R - identity, model.stored_inverse) + identity
        ctx.save_for_backward(R)
        ctx.rounding, ctx.fmt = rounding, model.operand
        return R

    @staticmethod
    def backward(ctx, grad):
        (R,), round_ = ctx.saved_tensors, ctx.rounding.round
        inner = round_("chunk.inverse.inner", round_("chunk.inverse.grad", torch.tril(grad), ctx.fmt) @ R.mT, ctx.fmt)
        return -torch.tril(R.mT @ inner, -1), None, None


def _substitution(L: Tensor, rounding: Rounding, merge: str) -> Tensor:
    """Forward substitution in fp32 inside 16 x 16 blocks, then block merges with operands in `merge`."""
    count = L.shape[-1] // BLOCK
    span = [slice(BLOCK * i, BLOCK * (i + 1)) for i in range(count)]
    identity = torch.eye(BLOCK, dtype=L.dtype, device=L.device)
    diagonal = torch.stack([L[..., block, block] for block in span], -3)
    rows = [identity[0].expand(*diagonal.shape[:-2], BLOCK)]
    for i in range(1, BLOCK):
        row = identity[i] - (diagonal[..., i : i + 1, :i] @ torch.stack(rows, -2)).squeeze(-2)
        rows.append(rounding.round("chunk.inverse.row", row, "fp32"))
    solved, R, blocks = torch.stack(rows, -2), torch.zeros_like(L), {}
    operand = lambda name, x: rounding.round(f"chunk.inverse.{name}", x, merge)  # noqa: E731
    for i in range(count):
        R[..., span[i], span[i]] = blocks[i, i] = solved[..., i, :, :]
        for j in range(i - 1, -1, -1):
            inner = sum(operand("L", L[..., span[i], span[m]]) @ operand("R", blocks[m, j]) for m in range(j, i))
            R[..., span[i], span[j]] = blocks[i, j] = -(operand("outer", blocks[i, i]) @ operand("inner", inner))
    return R


def _neumann(L: Tensor, rounding: Rounding) -> Tensor:
    """The doubling series prod (I + (-L)^(2^n)) in fp16: not to be imitated, kept as a model of kernels that do it."""
    half = lambda name, x: rounding.round(f"chunk.neumann.{name}", x, "fp16")  # noqa: E731
    power = -half("L", L)
    R = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device) + power
    for _ in range(int(math.log2(L.shape[-1])) - 1):
        power = half("square", power @ power)
        R = half("sum", R + half("product", R @ power))
    return R


class _Chunked:
    """Rows in chunks `[M, R, chunks, C, D]` (a partial last chunk padded with inert tokens), and the stages on them.

    `gate`: what `rows.g` was before it was clamped; the error of its cumulative sum goes by its true size.
    """

    def __init__(self, rows: Rows, gate: Tensor, scale: float, model: ChunkModel, rounding: Rounding):
        self.model, self.rounding, self.length = model, rounding, rows.length
        self.scale = scale * rounding.constant("chunk.scale", 2.0**-24, rows.q[..., None])
        pad = -rows.length % model.chunk
        cut = lambda x: F.pad(x, (0, 0, 0, pad)).unflatten(2, (-1, model.chunk))  # noqa: E731
        self.q, self.k, self.v, self.beta = cut(rows.q), cut(rows.k), cut(rows.v), cut(rows.beta[..., None])
        g = cut(rows.g) * rounding.constant("chunk.log2e", 2.0**-23, rows.g[..., None])
        magnitude = cut(torch.where(gate == -math.inf, REPLICA_GATE_FLOOR, gate)).cumsum(-2).abs() * LOG2E
        self.G = _CumulativeGate.apply(g, None if model.diagonal == "halving" else magnitude, rounding)

    def product(self, site: str, a: Tensor, b: Tensor, fmt: str) -> Tensor:
        return _Product.apply(a, b, self.rounding, f"chunk.{site}", fmt)

    def kept(self, site: str, x: Tensor) -> Tensor:
        """x itself; its gradient, summed from several uses, is rounded to fp32."""
        return _Round.apply(x, self.rounding, f"chunk.{site}", "fp64")

    def exp2(self, site: str, exponent: Tensor, inside: Tensor | None = None) -> Tensor:
        """2^exponent, and 0 outside `inside`."""
        if self.model.diagonal == "halving":
            exponent = self.rounding.accumulate(f"chunk.{site}.range", exponent, exponent.abs(), 22)
        if inside is not None:
            exponent = torch.where(inside, exponent, -math.inf)
        grown = torch.exp2(self.kept(f"{site}.exponent", exponent))
        return _Round.apply(grown, self.rounding, f"chunk.{site}", "fp32")

    def intra(self) -> tuple[Tensor, Tensor]:
        """(A_qk without scale, A_kk without beta), `[.., C, C]`: diagonal blocks of 16 and the blocks left of them."""
        qk, kk = [], []
        for first in range(0, self.model.chunk, BLOCK):
            block = slice(first, first + BLOCK)
            G, k, q = self.G[..., block, :], self.k[..., block, :], self.q[..., block, :]
            row_q, row_k = (self._anchored if self.model.diagonal == "anchor" else self._paired)(q, k, G)
            if first:
                anchor = G[..., :1, :].detach()
                rise = self.exp2("left.row", G - anchor)
                columns = (self.k[..., :first, :] * self.exp2("left.column", anchor - self.G[..., :first, :])).mT
                row_k = torch.cat([self.product("left.kk", k * rise, columns, self.model.intra), row_k], -1)
                row_q = torch.cat([self.product("left.qk", q * rise, columns, self.model.intra), row_q], -1)
            rest = self.model.chunk - first - BLOCK
            qk.append(F.pad(row_q, (0, rest)))
            kk.append(F.pad(row_k, (0, rest)))
        return torch.cat(qk, -2), torch.cat(kk, -2)

    def _anchored(self, q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
        anchor = G[..., :1, :].detach()
        rise = self.exp2("anchor.row", (G - anchor).clamp(min=-900))
        columns = (k * self.exp2("anchor.column", (anchor - G).clamp(max=900))).mT
        kk = torch.tril(self.product("anchor.kk", k * rise, columns, self.model.intra))
        qk = torch.tril(self.product("anchor.qk", q * rise, columns, self.model.intra), -1 if self.model.apart else 0)
        if self.model.apart:
            exact = self.rounding.accumulate("chunk.apart", (q * k).sum(-1), q.norm(dim=-1) * k.norm(dim=-1))
            qk = qk + torch.diag_embed(exact)
        return qk, kk

    def _paired(self, q: Tensor, k: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
        lower = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=G.device).tril()[..., None]
        left, right = self.kept("pair.G_row", G), self.kept("pair.G_column", G)
        decayed = self.exp2("pair", left[..., :, None, :] - right[..., None, :, :], lower)
        decayed = decayed * self.kept("pair.k", k)[..., None, :, :]
        # Differences of sums are worked off in fp32, token by token; halved ranges are matrix products.
        tiles = self.model.intra if self.model.diagonal == "halving" else "fp64"
        decayed = _Round.apply(decayed, self.rounding, "chunk.pair.column", tiles)

        def total(site: str, x: Tensor) -> Tensor:
            row = _Round.apply(self.kept(f"pair.{site}.row", x), self.rounding, f"chunk.pair.{site}.operand", tiles)
            magnitude = x.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[..., None, :]
            terms = (row[..., :, None, :] * decayed).sum(-1)
            summed = self.rounding.accumulate(f"chunk.pair.{site}", terms, magnitude)
            return _Round.apply(summed, self.rounding, f"chunk.pair.{site}.sum", "fp64", tiles)

        return total("qk", q), total("kk", k)

    def run(self, state: Tensor) -> dict[str, Tensor]:
        """Every stage by name; `states` are those before each chunk."""
        model, operand = self.model, self.model.operand
        A_qk, A_kk = self.intra()
        A_qk, L = self.scale * A_qk, torch.tril(A_kk * self.beta, -1)
        R = _Inverse.apply(L, self.rounding, model)
        grown = self.exp2("grown", self.G)
        w = self.product("w", R, self.beta * self.k * grown, operand)
        u = _Round.apply(self.product("u", R, self.beta * self.v, operand), self.rounding, "chunk.u.store", operand)
        q_grown, k_rest = self.q * grown, self.k * self.exp2("rest", self.G[..., -1:, :] - self.G)
        decay = grown[..., -1, :]
        states, values, outputs = [], [], []
        for c in range(self.q.shape[2]):
            states.append(state)
            value = u[:, :, c] - self.product("w_state", w[:, :, c], state, operand)
            inter = self.product("q_state", q_grown[:, :, c], state, operand)
            scale = self.scale[:, :, 0] if isinstance(self.scale, Tensor) else self.scale
            outputs.append(scale * inter + self.product("A_value", A_qk[:, :, c], value, operand))
            grown_state = decay[:, :, c, :, None] * state + self.product("k_value", k_rest[:, :, c].mT, value, operand)
            state = _Round.apply(grown_state, self.rounding, "chunk.state", model.state)
            values.append(value)
        return {
            "G": self.G,
            "A_qk": A_qk,
            "A_kk": A_kk,
            "inverse": R,
            "w": w,
            "u": u,
            "states": torch.stack(states, 2),
            "v_new": torch.stack(values, 2),
            "o": torch.cat(outputs, 2)[:, :, : self.length],
            "state": state,
        }


def _finite_gate(g: Tensor, rounding: Rounding) -> Tensor:
    """g with resets that a cumulative sum can subtract again: exp(-200) is below every format's floor."""
    if rounding.replicas or bool((g == -math.inf).any()):
        return g.clamp(min=REPLICA_GATE_FLOOR)
    return g


def forward_stages(rows: Rows, scale: float, model: ChunkModel, rounding: Rounding = EXACT) -> dict[str, Tensor]:
    """Every intermediate by name, float64, in chunks `[M, R, chunks, C, ..]`, without gradients.

    G (cumulative gate, log2), A_qk, A_kk, inverse, w, u, v_new; states `[M, R, chunks, K, V]` before each chunk, the
    last `state`, and o `[M, R, T, V]`.
    """
    with torch.no_grad():
        return _Chunked(replace(rows, g=_finite_gate(rows.g, rounding)), rows.g, scale, model, rounding).run(rows.state)


def chunk_core(model: ChunkModel, rounding: Rounding = EXACT) -> Core:
    """The chunkwise algorithm as a core of `operator.evaluate`; `h` must be asked for at the model's own chunk size."""

    def core(
        rows: Rows, scale: float, do: Tensor | None, dstate: Tensor | None, chunk: int | None
    ) -> dict[str, Tensor]:
        if chunk not in (None, model.chunk):
            raise ValueError(f"chunk_size is {chunk}, must be that of the algorithm: {model.chunk}")
        if do is None:
            stages, gradients = forward_stages(rows, scale, model, rounding), {}
        else:
            stages, gradients = _with_gradients(rows, scale, model, rounding, do, dstate)
        out = {"o": stages["o"].detach(), "state": stages["state"].detach(), **gradients}
        return out | ({"h": stages["states"].detach()} if chunk else {})

    return core


def _with_gradients(rows: Rows, scale: float, model: ChunkModel, rounding: Rounding, do: Tensor, dstate: Tensor):
    """(the stages, the gradients of sum(o do) + sum(state dstate) by name)."""
    names = ("q", "k", "v", "g", "beta", "state")
    with torch.enable_grad():
        plain = replace(rows, g=_finite_gate(rows.g, rounding))
        leaves = [getattr(plain, name).detach().clone().requires_grad_() for name in names]
        stages = _Chunked(Rows(*leaves), rows.g, scale, model, rounding).run(leaves[-1])
        ends = [stages["o"], stages["state"]]
        arriving = [do.expand_as(stages["o"]), dstate.expand_as(stages["state"])]
        found = dict(zip(names, torch.autograd.grad(ends, leaves, arriving)))
    if not rounding.replicas:
        found["g"] = found["g"].masked_fill(rows.g == -math.inf, 0.0)
    return stages, {f"d{name}": gradient for name, gradient in found.items()}


def evaluate_chunk(
    inputs: Inputs,
    options: Options,
    *,
    gradients: bool = True,
    rounding: Rounding = EXACT,
    formats: Formats | None = None,
    chunk: int | None = None,
    diagonal: str | None = None,
    inverse: str | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """`operator.evaluate` by the chunkwise algorithm: the same inputs, options, layouts and quantities.

    `formats`: stage -> format, resolved (see `ChunkModel`); `chunk`: a multiple of 16, default 64.
    """
    core = chunk_core(ChunkModel.of(formats or {}, chunk, diagonal, inverse), rounding)
    return evaluate(inputs, options, gradients=gradients, rounding=rounding, formats=formats, device=device, core=core)
