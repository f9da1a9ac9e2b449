"""Authority on natural sizes: how large the terms are that make up each element of a result, whatever then cancels.

See NOTE [Natural size].
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oracle.envelope import rms
from oracle.recurrence import Rows

CHUNK = 64  # tokens of a chunk of the usual kernels

# NOTE [Natural size]
# Where keys repeat, the delta rule erases what it wrote before: the exact state along such a key, or its gradient, may
# be 1e-5 of what it was a few tokens ago. The recurrence multiplies its way down to that and keeps every digit; a
# chunkwise kernel subtracts, and keeps digits relative to what it subtracted. Both are right to an operand's roundoff
# of the terms, and nobody can use the digits below. So a row counts as lost only against its terms: N_t, the size of
# the state if nothing were erased or added up, is the larger of its decayed self and the last update; M_t likewise for
# the gradient of the state, from the end. The gradient of a gate is summed over the pairs of tokens of a chunk with the
# gate between them: its terms are as large as the largest of the chunk. An upper bound is not wanted: a size that grew
# with the number of repeated keys would excuse an unstable inverse.


def _carried(start: Tensor, decay: Tensor, update: Tensor, backwards: bool) -> Tensor:
    """x_t = max(decay_t x_{t-1}, update_t) along the last axis `[M, R, T]`; backwards x_t = max(update_t, decay_{t+1}
    x_{t+1}).
    """
    sizes, size = [], start
    for t in reversed(range(update.shape[-1])) if backwards else range(update.shape[-1]):
        size = torch.maximum(size, update[..., t]) if backwards else torch.maximum(decay[..., t] * size, update[..., t])
        sizes.append(size)
        size = decay[..., t] * size if backwards else size
    return torch.stack(sizes[::-1] if backwards else sizes, -1)


def _largest_of_chunk(x: Tensor) -> Tensor:
    """Every token's size `[M, R, T]` as the largest of its CHUNK tokens."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % CHUNK)).unflatten(-1, (-1, CHUNK))
    return padded.amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., : x.shape[-1]]


@dataclass(frozen=True)
class _Norms:
    """Sizes of one call's rows `[M, R, T]`: norms over K, root mean squares over V."""

    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor

    @classmethod
    def of(cls, rows: Rows, scale: float) -> "_Norms":
        decay = torch.exp(rows.g).amax(-1)
        return cls(abs(scale) * rows.q.norm(dim=-1), rows.k.norm(dim=-1), rms(rows.v), decay, rows.beta.abs())


def natural_core(
    rows: Rows, scale: float, do: Tensor | None, dstate: Tensor | None, chunk: int | None
) -> dict[str, Tensor]:
    """A core of `operator.evaluate` that returns natural sizes instead of results, in the same layout."""
    n, (K, V) = _Norms.of(rows, scale), rows.state.shape[-2:]
    root_K, root_V = math.sqrt(K), math.sqrt(V)
    flat = lambda state: rms(state, (-1, -2))  # noqa: E731
    wide = lambda x, width: x[..., None].expand(*x.shape, width)  # noqa: E731
    whole = lambda x: x[..., None, None].expand(*x.shape, K, V)  # noqa: E731
    N = _carried(flat(rows.state), n.decay, n.beta * n.k * n.v / root_K, backwards=False)
    before = torch.cat([flat(rows.state)[..., None], N], -1)[..., :-1]
    out = {"o": wide(n.q * N, V), "state": whole(N[..., -1])}
    if chunk:
        out["h"] = whole(before[..., ::chunk])
    if do is not None:
        arriving = rms(do)
        M = _carried(flat(dstate).expand_as(N[..., 0]), n.decay, n.q * arriving / root_K, backwards=True)
        decayed = n.decay * before
        residual, pull = n.v + n.k * decayed, n.k * M
        products = root_V * n.beta * (residual * M + pull * decayed)
        later = torch.cat([n.decay[..., 1:] * M[..., 1:], torch.zeros_like(M[..., :1])], -1)
        # k dk and q dq as far as they come from other tokens: what the gradients of gates are summed from.
        pairs = root_V * torch.maximum(n.k * n.beta * (residual * later + pull * decayed), n.q * arriving * decayed)
        out |= {
            "dq": wide(abs(scale) * root_V * arriving * N, K),
            "dk": wide(products, K),
            "dv": wide(n.beta * pull, V),
            "dg": wide(_largest_of_chunk(torch.maximum(root_V * M * decayed, pairs)), K),
            "dbeta": root_V * pull * residual,
            "dstate": whole(n.decay[..., 0] * M[..., 0]),
        }
    return out
