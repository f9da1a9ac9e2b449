"""Authority on the chunkwise algorithm: its stages in float64, with the rounding points that such a kernel declares.

Within a chunk of C tokens, G the inclusive cumulative log2 gate:

    A_qk[i, j] = scale sum_k q_i k_j 2^(G_i - G_j)  (i >= j)      L[i, j] = beta_i sum_k k_i k_j 2^(G_i - G_j)  (i > j)
    R = (I + L)^-1      w = R (beta k 2^G)      u = R (beta v)
    v_new = u - w S     o = scale (q 2^G) S + A_qk v_new     S <- 2^(G_C) S + (k 2^(G_C - G))^T v_new

The backward pass is autograd through these stages; operands and incoming gradients of every product are rounded alike.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from oracle.chunk_model import ChunkModel
from oracle.chunk_steps import BLOCK, CumulativeGate, Decayed, Inverse, PairSums, Product, Rounded, Solved
from oracle.operator import Core, Formats, Inputs, Options, evaluate
from oracle.recurrence import LOG2E, REPLICA_GATE_FLOOR, Rows
from oracle.rounding import EXACT, Rounding

ANCHOR_SHIFT = (BLOCK - 1) / 2 * 5 * LOG2E  # that a kernel may take for gates of -5: no power of two

# (chunk, state): what makes the intra-chunk o, v_new, the state's gain
Step = Callable[[int, Tensor], tuple[Callable[[], Tensor], Tensor, Tensor]]


class ChunkedRows:
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
        self.G = CumulativeGate.apply(g, None if model.diagonal == "halving" else magnitude, rounding)

    def product(self, site: str, a: Tensor, b: Tensor, fmt: str) -> Tensor:
        return Product.apply(a, b, self.rounding, f"chunk.{site}", fmt, fmt)

    def dots(self, site: str, a: Tensor, b: Tensor, other: Tensor | None = None) -> Tensor:
        """k.k or q.k of factored rows; `other` as for `Product`."""
        model = self.model
        return Product.apply(a, b, self.rounding, f"chunk.{site}", model.intra, model.pairs or model.intra, other)

    def _scaled_keys(self, block: slice) -> Tensor | None:
        """k as beta k was rounded, divided by beta; None where that is k."""
        if self.model.scaled_key == "fp64":
            return None
        k, beta = self.k[..., block, :].detach(), self.beta[..., block, :].detach()
        rounded = self.rounding.round("chunk.scaled_key", k * beta, self.model.scaled_key)
        return torch.where(beta == 0, k, rounded / beta)

    def kept(self, site: str, x: Tensor) -> Tensor:
        """x itself; its gradient, summed from several uses, is rounded to fp32."""
        return Rounded.apply(x, self.rounding, f"chunk.{site}", "fp64")

    def exp2(self, site: str, exponent: Tensor, inside: Tensor | None = None) -> Tensor:
        """2^exponent, and 0 outside `inside`."""
        if self.model.diagonal == "halving":
            exponent = self.rounding.accumulate(f"chunk.{site}.range", exponent, exponent.abs(), 22)
        if inside is not None:
            exponent = torch.where(inside, exponent, -math.inf)
        grown = torch.exp2(self.kept(f"{site}.exponent", exponent))
        return Rounded.apply(grown, self.rounding, f"chunk.{site}", "fp32")

    def intra(self) -> tuple[Tensor, Tensor]:
        """(A_qk without scale, A_kk without beta), `[.., C, C]`: diagonal blocks of 16 and the blocks left of them."""
        qk, kk = [], []
        for first in range(0, self.model.chunk, BLOCK):
            block = slice(first, first + BLOCK)
            G, k, q = self.G[..., block, :], self.k[..., block, :], self.q[..., block, :]
            scaled = self._scaled_keys(block)
            if self.model.diagonal == "anchor":
                row_q, row_k = self._anchored(q, k, G, scaled)
            else:
                row_q, row_k = self._paired(q, k, G)
            if first:
                anchor = G[..., :1, :].detach()
                rise = self.exp2("left.row", G - anchor)
                columns = (self.k[..., :first, :] * self.exp2("left.column", anchor - self.G[..., :first, :])).mT
                other = None if scaled is None else scaled * rise
                row_k = torch.cat([self.dots("left.kk", k * rise, columns, other), row_k], -1)
                row_q = torch.cat([self.dots("left.qk", q * rise, columns), row_q], -1)
            rest = self.model.chunk - first - BLOCK
            qk.append(F.pad(row_q, (0, rest)))
            kk.append(F.pad(row_k, (0, rest)))
        return torch.cat(qk, -2), torch.cat(kk, -2)

    def _anchored(self, q: Tensor, k: Tensor, G: Tensor, scaled: Tensor | None) -> tuple[Tensor, Tensor]:
        anchor = G[..., :1, :].detach() - (0.0 if self.model.apart else ANCHOR_SHIFT)
        rise = self.exp2("anchor.row", (G - anchor).clamp(min=-900))
        columns = (k * self.exp2("anchor.column", (anchor - G).clamp(max=900))).mT
        kk = torch.tril(self.dots("anchor.kk", k * rise, columns, None if scaled is None else scaled * rise))
        qk = torch.tril(self.dots("anchor.qk", q * rise, columns), -1 if self.model.apart else 0)
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
        halved = self.model.diagonal == "halving"
        formats = (self.model.intra, self.model.pairs or self.model.intra) if halved else ("fp64", "fp64")

        def total(site: str, x: Tensor) -> Tensor:
            row = self.kept(f"pair.{site}.row", x)
            magnitude = x.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[..., None, :]
            terms = PairSums.apply(row, decayed, self.rounding, site, *formats)
            return self.rounding.accumulate(f"chunk.pair.{site}", terms, magnitude)

        return total("qk", q), total("kk", k)

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """A_qk, A_kk, 2^G, and the decayed q, k and k for the state: what knows neither values nor states."""
        A_qk, A_kk = self.intra()
        A_qk, grown = self.scale * A_qk, self.exp2("grown", self.G)
        decayed = (self.q * grown, self.k * grown, self.k * self.exp2("rest", self.G[..., -1:, :] - self.G))
        return A_qk, A_kk, grown, decayed

    @cached_property
    def inverse(self) -> tuple[Tensor, Tensor]:
        """L, with b where the form has it, and (I + L)^-1."""
        L = torch.tril(self.matrices[1] * (self.beta if self.model.form == "wy" else self.beta.mT), -1)
        return L, Inverse.apply(L, self.rounding, self.model)

    def make_matrices(self) -> None:
        """Make now what copies share."""
        _ = self.inverse

    def widened(self, columns: int) -> "ChunkedRows":
        """The same rows with so many more columns of values, which are 0; what is made of keys is made once."""
        self.make_matrices()
        wide = copy.copy(self)
        wide.v = F.pad(self.v, (0, columns))
        return wide

    def run(self, state: Tensor) -> dict[str, Tensor]:
        """Every stage by name; `states` are those before each chunk.

        `carried` (the states) and `values` (v_new), one tensor per chunk, stay on the path of the gradients.
        """
        A_qk, A_kk, grown, decayed = self.matrices
        stages, step = self._form()
        scale, decay = self.scale[:, :, 0] if isinstance(self.scale, Tensor) else self.scale, grown[..., -1, :]
        self.carried, self.values, outputs = [state], [], []
        for c, (q, shrunk) in enumerate(zip(each(decayed[0]), each(decay))):
            inter = self.product("q_state", q, state, self.model.operand)
            intra, value, gained = step(c, state)
            outputs.append(scale * inter + intra())
            state = self._carried(shrunk, state, gained)
            self.carried.append(state)
            self.values.append(value)
        return {
            "G": self.G,
            **dict(zip(("q_decayed", "k_decayed", "k_rest"), decayed)),
            "decay": decay,
            "A_qk": A_qk,
            "A_kk": A_kk,
            **stages,
            "states": torch.stack(self.carried[:-1], 2),
            "v_new": torch.stack(self.values, 2),
            "o": torch.cat(outputs, 2)[:, :, : self.length],
            "state": state,
        }

    def last_state(self, state: Tensor) -> Tensor:
        """Of all stages only the state at the end."""
        _, _, grown, _ = self.matrices
        _, step = self._form()
        for c, shrunk in enumerate(each(grown[..., -1, :])):
            *_, gained = step(c, state)
            state = self._carried(shrunk, state, gained)
        return state

    def _form(self) -> tuple[dict[str, Tensor], Step]:
        A_qk, _, _, decayed = self.matrices
        forms = {"wy": self._wy, "residual": self._residual, "solved": self._solved}
        return forms[self.model.form](A_qk, *decayed)

    def _carried(self, shrunk: Tensor, state: Tensor, gained: Tensor) -> Tensor:
        """The next state."""
        kept = self.model.kept, self.model.kept_product
        grown_state = Decayed.apply(shrunk, state, self.rounding, *kept) + gained
        return Rounded.apply(grown_state, self.rounding, "chunk.state", self.model.state)

    def _wy(self, A_qk: Tensor, _, k_grown: Tensor, k_rest: Tensor) -> tuple[dict[str, Tensor], Step]:
        """(inverse, w and u; the step of a chunk): v_new = u - w S."""
        operand = self.model.operand
        _, R = self.inverse
        w = self.product("w", R, self.beta * k_grown, operand)
        u = Rounded.apply(self.product("u", R, self.beta * self.v, operand), self.rounding, "chunk.u.store", operand)
        of_w, of_u, of_A, of_rest = map(each, (w, u, A_qk, k_rest))

        def step(c: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            value = of_u[c] - self.product("w_state", of_w[c], state, operand)
            intra = lambda: self.product("A_value", of_A[c], value, operand)  # noqa: E731
            return intra, value, self.product("k_value", of_rest[c].mT, value, operand)

        return {"inverse": R, "w": w, "u": u}, step

    def _residual(self, A_qk: Tensor, _, k_grown: Tensor, k_rest: Tensor) -> tuple[dict[str, Tensor], Step]:
        """(inverse, k_update, response; the step of a chunk): x = v - (k 2^G) S, y = R x with R = (I + A_kk b)^-1, and
        A_qk b R at once.
        """
        operand, weight = self.model.operand, self.beta.mT
        _, R = self.inverse
        response = self.product("response", A_qk * weight, R, self.model.merge)
        response = Rounded.apply(response, self.rounding, "chunk.response.store", operand)
        of_v, of_k, of_R, of_response = map(each, (self.v, k_grown, R, response))
        shown = {"inverse": R, "k_update": self.beta * k_rest, "response": response}
        of_beta, of_rest = each(self.beta), each(shown["k_update"])

        def step(c: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x = of_v[c] - self.product("k_state", of_k[c], state, operand)
            x = Rounded.apply(x, self.rounding, "chunk.x", operand)
            y = of_R[c] @ x
            gained = self.product("k_value", of_rest[c].mT, y, operand)
            return lambda: of_response[c] @ x, of_beta[c] * y, gained

        return shown, step

    def _solved(self, A_qk: Tensor, _, k_grown: Tensor, k_rest: Tensor) -> tuple[dict[str, Tensor], Step]:
        """(inverse, k_update, A_qk_beta; the step of a chunk): y = R x as for 'residual', stored, and A_qk b applied to
        it.
        """
        operand, weight = self.model.operand, self.beta.mT
        L, R = self.inverse
        of_v, of_k, of_L, of_R = map(each, (self.v, k_grown, L, R.detach()))
        shown = {"inverse": R, "k_update": self.beta * k_rest, "A_qk_beta": A_qk * weight}
        of_beta, of_rest, of_A = map(each, (self.beta, shown["k_update"], shown["A_qk_beta"]))

        def step(c: int, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x = of_v[c] - self.product("k_state", of_k[c], state, operand)
            x = Rounded.apply(x, self.rounding, "chunk.x", operand)
            y = Solved.apply(of_L[c], of_R[c], x, self.rounding, operand)
            gained = self.product("k_value", of_rest[c].mT, y, operand)
            intra = lambda: self.product("A_value", of_A[c], y, operand)  # noqa: E731
            return intra, of_beta[c] * y, gained

        return shown, step


def each(x: Tensor) -> tuple[Tensor, ...]:
    """The chunks of `[M, R, chunks, ..]`, cut all at once: the gradient of a slice alone is as large as x."""
    return x.unbind(2)


def chunked(rows: Rows, gate: Tensor, scale: float, model: ChunkModel, rounding: Rounding) -> ChunkedRows:
    """The rows in the chunks of that model."""
    from oracle.stored_steps import StoredRows

    kind = StoredRows if model.form == "stored" else ChunkedRows
    return kind(rows, gate, scale, model, rounding)


def finite_gate(g: Tensor, rounding: Rounding) -> Tensor:
    """g with resets that a cumulative sum can subtract again: exp(-200) is below every format's floor."""
    if rounding.replicas or bool((g == -math.inf).any()):
        return g.clamp(min=REPLICA_GATE_FLOOR)
    return g


def forward_stages(rows: Rows, scale: float, model: ChunkModel, rounding: Rounding = EXACT) -> dict[str, Tensor]:
    """Every intermediate by name, float64, in chunks `[M, R, chunks, C, ..]`, without gradients.

    G (cumulative gate, log2), A_qk, A_kk, inverse, v_new, and w, u where the form has them; states `[M, R, chunks, K,
    V]` before each chunk, the last `state`, and o `[M, R, T, V]`.
    """
    return Traced(rows, scale, model, rounding, gradients=False).run(rows.state)


def chunk_core(model: ChunkModel, rounding: Rounding = EXACT) -> Core:
    """The chunkwise algorithm as a core of `operator.evaluate`; `h` must be asked for at the model's own chunk size."""

    def core(
        rows: Rows, scale: float, do: Tensor | None, dstate: Tensor | None, chunk: int | None
    ) -> dict[str, Tensor]:
        if chunk not in (None, model.chunk):
            raise ValueError(f"chunk_size is {chunk}, must be that of the algorithm: {model.chunk}")
        if model.segment and rows.length > model.segment:
            if chunk:
                raise ValueError(f"segment is {model.segment}, must be None where intermediate states are wanted")
            return _in_pieces(rows, scale, model, rounding, do, dstate)
        traced = Traced(rows, scale, model, rounding, do is not None)
        stages = traced.run(rows.state)
        gradients = {} if do is None else traced.gradients(do, dstate)
        out = {"o": stages["o"].detach(), "state": stages["state"].detach(), **gradients}
        return out | ({"h": stages["states"].detach()} if chunk else {})

    return core


# NOTE [Pieces]
# A sequence in pieces of `segment` tokens: each runs from a zero state for Q, and without values from the unit matrix
# for P, both in one pass of V + K columns, since columns of values and states know nothing of each other. Then S <- P S
# + Q from piece to piece, and every piece from its true state. Gradients of states go from piece to piece by dS <- P^T
# dS + D, D by the piece's own outputs. The chain is exact but for the fp32 of what it takes and gives.
def _in_pieces(
    rows: Rows, scale: float, model: ChunkModel, rounding: Rounding, do: Tensor | None, dstate: Tensor | None
) -> dict[str, Tensor]:
    """What a core returns, of a sequence in pieces."""
    J, (M, R, T, V), K = -(-rows.length // model.segment), rows.v.shape, rows.k.shape[-1]
    padded = lambda x: F.pad(x, [0, 0] * (x.dim() - 3) + [0, J * model.segment - T])  # noqa: E731
    cut = lambda x: padded(x).unflatten(2, (J, model.segment)).flatten(1, 2)  # noqa: E731
    join = lambda x: x.unflatten(1, (R, J)).flatten(2, 3)[:, :, :T]  # noqa: E731
    apart = lambda x: x.unflatten(1, (R, J))  # noqa: E731
    stored = lambda x: rounding.round("chunk.pieces", x, "fp32")  # noqa: E731
    pieces = Rows(*(cut(x) for x in (rows.q, rows.k, rows.v, rows.g, rows.beta)), state=None)
    traced = Traced(pieces, scale, model, rounding, do is not None)
    unit = torch.eye(K, V + K, dtype=rows.v.dtype, device=rows.v.device).roll(V, 1)
    Q, P = apart(traced.last_state(unit.expand(M, R * J, K, V + K), K)).split((V, K), -1)
    states = [rows.state.expand(M, R, K, V)]
    for j in range(J - 1):
        states.append(stored(P[:, :, j] @ states[-1] + Q[:, :, j]))
    made = traced.run(torch.stack(states, 2).flatten(1, 2))
    out = {"o": join(made["o"].detach()), "state": apart(made["state"].detach())[:, :, -1]}
    if do is None:
        return out

    def arriving(own: Tensor) -> Tensor:
        behind = [dstate.expand(M, R, K, V)]
        for j in range(J - 1, 0, -1):
            behind.insert(0, stored(P[:, :, j].mT @ behind[0] + apart(own)[:, :, j]))
        return torch.stack(behind, 2).flatten(1, 2)

    found = traced.gradients(cut(do.expand(M, R, T, V)), arriving)
    out |= {name: join(x) for name, x in found.items() if name != "dstate"}
    return out | {"dstate": apart(found["dstate"])[:, :, 0]}


class Traced:
    """The stages of rows, with what their gradients need if those are wanted."""

    def __init__(self, rows: Rows, scale: float, model: ChunkModel, rounding: Rounding, gradients: bool):
        self.gate, self.rounding, self.tracing = rows.g, rounding, gradients
        names = ("q", "k", "v", "g", "beta")
        with torch.set_grad_enabled(gradients):
            plain = replace(rows, g=finite_gate(rows.g, rounding))
            self.leaves = {name: self._leaf(getattr(plain, name)) for name in names}
            self.chunks = chunked(Rows(**self.leaves, state=None), rows.g, scale, model, rounding)

    def _leaf(self, x: Tensor) -> Tensor:
        return x.detach().clone().requires_grad_() if self.tracing else x

    def last_state(self, state: Tensor, columns: int) -> Tensor:
        """From `state`, which has so many more columns than the values, without gradients."""
        with torch.set_grad_enabled(self.tracing):
            wide = self.chunks.widened(columns)
        with torch.no_grad():
            return wide.last_state(state)

    def run(self, state: Tensor) -> dict[str, Tensor]:
        """Every stage from that state on."""
        with torch.set_grad_enabled(self.tracing):
            self.leaves["state"] = self._leaf(state)
            self.stages = self.chunks.run(self.leaves["state"])
        return self.stages

    def gradients(self, do: Tensor, dstate: Tensor | Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        """The gradients of sum(o do) + sum(state dstate) by name; dstate, or what makes it of the gradient of the first
        state by do alone.
        """
        ends, leaves = [self.stages["o"], self.stages["state"]], list(self.leaves.values())
        do = do.expand_as(ends[0])
        if not isinstance(dstate, Tensor):
            dstate = dstate(torch.autograd.grad(ends[:1], leaves[-1:], [do], retain_graph=True)[0])
        found = dict(zip(self.leaves, torch.autograd.grad(ends, leaves, [do, dstate.expand_as(ends[1])])))
        if not self.rounding.replicas:
            found["g"] = found["g"].masked_fill(self.gate == -math.inf, 0.0)
        return {f"d{name}": gradient for name, gradient in found.items()}


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
    form: str | None = None,
    segment: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """`operator.evaluate` by the chunkwise algorithm: the same inputs, options, layouts and quantities.

    `formats`: stage -> format, resolved (see `ChunkModel`); `chunk`: a multiple of 16, default 64; `segment`: one of
    `chunk`.
    """
    core = chunk_core(ChunkModel.of(formats or {}, chunk, diagonal, inverse, form, segment), rounding)
    return evaluate(inputs, options, gradients=gradients, rounding=rounding, formats=formats, device=device, core=core)
