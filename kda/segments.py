"""Authority on states between segments: where sequences are cut, and the chain of states through the pieces."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kda.contract import Call

# NOTE [Chain of states]
# Over a run of tokens the state changes by an affine map, S -> P S + Q: Q `[K, V]` is what a zero state becomes, and P
# `[K, K]` what the unit matrix becomes where no values are written, so that the kernels that carry states make both.
# All pieces make theirs at once, the chain S_{j+1} = P_j S_j + Q_j goes through the few that a sequence has, and then
# every piece runs from its true state. Gradients mirror it: dS_j = P_j^T dS_{j+1} + D_j, D_j being the gradient of the
# piece's first state by its own outputs alone. The chain is in float64, which neither a caller's choice of tf32 nor
# autocast reaches; what it takes and gives is fp32.


@dataclass(frozen=True)
class Pieces:
    """Every sequence of a call in pieces of `tokens` tokens, the last one shorter; made on the device, without a wait.

    Pieces are the sequences of a packed batch: `offsets` `[slots + 1]` as in `cu_seqlens`; those of sequence n come one
    after the other from slot `first[n]` on, which there is for one without tokens too; slots that no piece fills are
    empty sequences. `counts` `[N]`: pieces of each sequence; `most`: a bound of them; `owner`, `order` `[slots]`: the
    sequence of a slot, and its place there.
    """

    offsets: Tensor
    first: Tensor
    counts: Tensor
    owner: Tensor
    order: Tensor
    most: int

    @classmethod
    def of(cls, call: Call, tokens: int) -> "Pieces":
        T, N = call.q.shape[1], call.sequences
        offsets, device = call.offsets(), call.q.device
        lengths, most, sequences = offsets.diff(), -(-T // tokens), torch.arange(N, device=device)
        packed = call.cu_seqlens is not None
        slots = T // tokens + N if packed else N * most
        first = offsets[:-1].div(tokens, rounding_mode="floor") + sequences if packed else sequences * most
        slot = torch.arange(slots, device=device)
        owner = torch.searchsorted(first, slot, right=True) - 1
        order = slot - first[owner]
        starts = offsets[owner] + torch.minimum(order * tokens, lengths[owner])
        counts = (lengths + tokens - 1).div(tokens, rounding_mode="floor")
        return cls(torch.cat([starts, offsets[-1:]]), first, counts, owner, order.clamp(max=most), most)

    def packed(self, call: Call) -> Call:
        """The call with its pieces as sequences, K-first, without states."""
        tokens = {name: getattr(call, name).flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta")}
        offsets = {"cu_seqlens": self.offsets, "cu_seqlens_cpu": None}
        return replace(call, **tokens, **offsets, initial_state=None, state_v_first=False)

    def by_sequence(self, x: Tensor, missing: Tensor | float) -> Tensor:
        """`[N, most, ...]` of x `[slots, ...]`; `missing` where a sequence has fewer pieces."""
        place = torch.arange(self.most, device=x.device)
        filled = (place < self.counts[:, None]).view(-1, self.most, *[1] * (x.dim() - 1))
        slots = (self.first[:, None] + place).clamp(max=x.shape[0] - 1)
        return torch.where(filled, x[slots], missing)

    def by_slot(self, states: Tensor, after: bool = False) -> Tensor:
        """`[slots, ...]` of states `[N, most + 1, ...]` as `chain` returns them: before, or after, each piece."""
        return states[self.owner, (self.order + after).clamp(max=self.most)]

    def last(self, x: Tensor) -> Tensor:
        """`[N, ...]` of x `[slots, ...]`: that of the last piece, or of the empty one of a sequence without tokens."""
        return x[self.first + (self.counts - 1).clamp(min=0)]


def identities(slots: int, HV: int, K: int, device: torch.device) -> Tensor:
    """The state from which a run without values becomes its transition: `[slots, HV, K, K]` fp32."""
    return torch.eye(K, dtype=torch.float32, device=device).expand(slots, HV, K, K).contiguous()


@torch.no_grad()
def chain(transitions: Tensor, additions: Tensor, first: Tensor) -> Tensor:
    """States before each piece, and after the last: `[N, J + 1, HV, K, V]`, S_{j+1} = P_j S_j + Q_j.

    transitions P `[N, J, HV, K, K]`, additions Q `[N, J, HV, K, V]`, first S_0 `[N, HV, K, V]`, whose dtype (fp32, or
    float64) the result has.
    """
    N, J, HV, K, V = additions.shape
    in_order = lambda x: x.double().transpose(0, 1).reshape(J, N * HV, *x.shape[3:])  # noqa: E731
    P, Q = in_order(transitions), in_order(additions)
    states = Q.new_empty(J + 1, N * HV, K, V)
    states[0] = first.reshape(N * HV, K, V)
    for j in range(J):
        torch.baddbmm(Q[j], P[j], states[j], out=states[j + 1])
    return states.to(first.dtype).view(J + 1, N, HV, K, V).transpose(0, 1)


def chain_back(transitions: Tensor, additions: Tensor, last: Tensor) -> Tensor:
    """Gradients of the states that `chain` returns, in their places: dS_j = P_j^T dS_{j+1} + D_j, dS_J = `last`.

    additions D `[N, J, HV, K, V]`: the gradient of each piece's first state where none arrives behind the piece.
    """
    return chain(transitions.mT.flip(1), additions.flip(1), last).flip(1)
