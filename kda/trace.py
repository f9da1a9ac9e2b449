"""Authority on looking into a call: while somebody looks, routes show by name what their kernels leave each other."""

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from kda.record import listening

# NOTE [Shown stages]
# Names are those of the oracle's stages. By chunk slot, one sequence after the other, and value head, in fp32: A_qk,
# A_kk, inverse, response = A_qk b R, A_qk_beta = A_qk b, dA_qk, dA_kk `[slots, HV, C, C]`, 0 above the diagonal
# (inverse: 1 on it; A_kk, dA_kk: 0); dA_qk_above, dA_kk_above, what is kept of them above the diagonal for a product
# with the transposed, transposed; q_decayed, k_decayed, k_rest, k_update = b k_rest, w `[slots, HV, C, K]`; u,
# v_new, dv_new, z = R^T dv_new `[slots, HV, C, V]`; decay `[slots, HV, K]`; states before, and their gradients dh
# behind each chunk `[slots, HV, K, V]`. Rows past a chunk's end and slots of no chunk are 0. A_qk, response and
# A_qk_beta have the scale in them. By piece, for routes that cut sequences: piece_states before, piece_gradients
# behind each `[pieces, HV, K, V]`. By sequence, int64 `[N + 1]`: offsets, the first rows and the end; chunk_offsets,
# the first slots and their number. By chunk that has tokens, int64 `[chunks]`: chunk_rows, its first row in the
# flattened batch, and chunk_counts, its tokens.

LOWER = {"A_qk": 0, "A_kk": -1, "inverse": 0, "response": 0, "A_qk_beta": 0, "dA_qk": 0, "dA_kk": -1}
LOWER |= {"dA_qk_above": -1, "dA_kk_above": -1}
STATES = ("states", "dh", "piece_states", "piece_gradients")

# Not a context variable, for the reason that a launch record is none.
_open: list[dict[str, Tensor]] = []


@contextlib.contextmanager
def traced() -> Iterator[dict[str, Tensor]]:
    """The stages of the calls inside the block by name, states K-first whatever the call's; of each the last shown.

    Whoever opens it waits for the device.
    """
    with listening(_open, {}) as found:
        yield found


def is_open() -> bool:
    """Whether anybody looks."""
    return bool(_open)


def show(stages: Mapping[str, Tensor]) -> None:
    """Called by routes, while a trace is open, with tensors that they may go on to overwrite."""
    for found in _open:
        found.update({name: x.detach().clone() for name, x in stages.items()})


def by_chunk(name: str, x: Tensor, counts: Tensor) -> Tensor:
    """A stage `[slots, HV, ...]` in the form of NOTE [Shown stages]; `counts` `[slots]`: tokens of each."""
    x, spread = x.float(), [1] * (x.dim() - 2)
    if name in STATES or name == "decay":
        return torch.where((counts > 0).view(-1, 1, *spread), x, 0.0)
    inside = torch.arange(x.shape[2], device=x.device) < counts[:, None]
    x = torch.where(inside[:, None, :, None], x.mT if name.endswith("_above") else x, 0.0)
    return torch.tril(x, LOWER[name]) if name in LOWER else x


def by_token(name: str, x: Tensor, rows: Tensor, counts: Tensor, chunk: int) -> Tensor:
    """The same of a stage `[B, T, HV, D]`; `rows` `[slots]`: first row of each chunk in the flattened batch."""
    step = torch.arange(chunk, device=x.device)
    inside = step < counts[:, None]
    cut = x.new_zeros(*inside.shape, *x.shape[2:])
    cut[inside] = x.flatten(0, 1)[(rows[:, None] + step)[inside]]
    return by_chunk(name, cut.transpose(1, 2), counts)
