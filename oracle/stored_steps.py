"""Authority on chunkwise kernels that store every step: where one with operands of one short format rounds."""

import torch
from torch import Tensor

from oracle.chunk_steps import Inverse, Rounded
from oracle.stages import ChunkedRows, each


class StoredRows(ChunkedRows):
    """The stages of chunks of one block, each step in the format of the large products before the next one uses it.

    Rows carry 2^G and 2^-G from the start of their chunk (a bounded gate keeps both representable), and the keys that
    the state gains are those columns times 2^(G_C); b is among the rows:

        A_qk = (q 2^G scale)(k 2^-G)^T    R = (I + b A_kk)^-1    y = R (b (v - (k 2^G) S))
        o = (q 2^G scale) S + A_qk y      S <- 2^(G_C) S + (k 2^-G 2^(G_C))^T y

    A_kk and its b are stored in `merge`, R in `stored_inverse`, the state (that which arrives too) in `state`.
    """

    def stored(self, site: str, x: Tensor, fmt: str | None = None) -> Tensor:
        return Rounded.apply(x, self.rounding, f"chunk.stored.{site}", fmt or self.model.operand)

    def factor(self, site: str, exponent: Tensor) -> Tensor:
        return self.stored(f"{site}.factor", self.exp2(f"stored.{site}", exponent))

    def make_matrices(self) -> None:
        """Nothing: every step is made in `run`."""

    def last_state(self, state: Tensor) -> Tensor:
        """Of all stages only the state at the end."""
        return self.run(state)["state"]

    def run(self, state: Tensor) -> dict[str, Tensor]:
        """Every stage by name, as `ChunkedRows.run`."""
        stored, merge, kept = self.stored, self.model.merge, self.model.state
        scale = stored("scale", self.scale * torch.ones_like(self.q[:, :1, :1, :1, :1]))
        q = stored("q", stored("q.grown", self.q * self.factor("row", self.G)) * scale)
        k = stored("k", self.k * self.factor("row", self.G))
        column = stored("column", self.k * self.factor("column", -self.G))
        rest = stored("rest", column * self.factor("total", self.G[..., -1:, :]))
        A_qk = stored("A_qk", torch.tril(q @ column.mT))
        A_kk = stored("A_kk", torch.tril(k @ column.mT, -1), merge)
        R = Inverse.apply(A_kk * stored("beta.inverse", self.beta, merge), self.rounding, self.model)
        beta, decay = stored("beta", self.beta), self.exp2("stored.decay", self.G[..., -1, :])
        state = Rounded.apply(state, self.rounding, "chunk.state.first", kept)
        self.carried, self.values, outputs = [state], [], []
        chunks = zip(*map(each, (self.v, q, k, R, beta, A_qk, decay[..., None], rest)))
        for v_c, q_c, k_c, R_c, beta_c, A_c, decay_c, rest_c in chunks:
            x = stored("x", v_c - stored("k_state", k_c @ state))
            y = stored("y", R_c @ stored("x.weighted", beta_c * x))
            outputs.append(stored("inter", q_c @ state) + stored("intra", A_c @ y))
            grown = decay_c * state + rest_c.mT @ y
            state = Rounded.apply(grown, self.rounding, "chunk.state", kept)
            self.carried.append(state)
            self.values.append(y)
        return {
            "G": self.G,
            **{"q_decayed": q, "k_decayed": k, "k_rest": rest, "decay": decay},
            **{"A_qk": A_qk, "A_kk": A_kk, "inverse": R},
            "states": torch.stack(self.carried[:-1], 2),
            "v_new": torch.stack(self.values, 2),
            "o": torch.cat(outputs, 2)[:, :, : self.length],
            "state": state,
        }
