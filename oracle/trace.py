"""Authority on every stage of a whole chunkwise call, forward and backward: what a stage trace is held to."""

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import Tensor

from oracle.chunk_model import ChunkModel
from oracle.operator import Formats, Inputs, Options, evaluate
from oracle.packing import Layout
from oracle.recurrence import Rows
from oracle.rounding import EXACT, Rounding
from oracle.stages import ChunkedRows, Traced

# In the order of computation. Of places, exact whole numbers; of pieces, where a route cuts sequences.
PLACES = ("offsets", "chunk_offsets", "chunk_rows", "chunk_counts")
PREPARED = ("q_decayed", "k_decayed", "k_rest", "decay", "A_qk", "A_kk", "inverse", "w", "u")
FUSED = ("k_update", "response", "A_qk_beta")  # of the forms 'residual' and 'solved', which keep no w and u
FORWARD = (*PREPARED, *FUSED, "piece_states", "states", "v_new")
BACKWARD = ("dA_qk", "dA_qk_above", "piece_gradients", "dh", "dv_new", "z", "dA_kk", "dA_kk_above")
WITHOUT_TOKENS = ("decay", "states", "dh")
LOWER = {"A_qk": 0, "A_kk": -1, "inverse": 0, "response": 0, "A_qk_beta": 0, "dA_qk": 0, "dA_kk": -1}
ABOVE = {"dA_qk_above": "dA_qk", "dA_kk_above": "dA_kk"}  # those below the diagonal, kept a second time above it
OF_PIECES = {"piece_states": "states", "piece_gradients": "dh"}


def trace_stages(
    inputs: Inputs,
    options: Options,
    model: ChunkModel,
    *,
    gradients: bool,
    rounding: Rounding = EXACT,
    formats: Formats | None = None,
) -> dict[str, Tensor]:
    """Every stage by name, float64, by chunk slot and value head, with a leading replica axis if the rounding has one.

    A_qk, A_kk, inverse `[slots, HV, C, C]`, their lower triangles; q_decayed, k_decayed, k_rest, w `[slots, HV, C, K]`;
    u, v_new `[slots, HV, C, V]`; decay `[slots, HV, K]`; states, before each chunk, `[slots, HV, K, V]` (V-first
    swaps). With `gradients` those of sum(o do) + sum(ht dht) by the stages: dA_qk, dA_kk, dv_new, z = inverse^T dv_new,
    and dh, by the state behind each chunk; dA_qk_above and dA_kk_above, once more what is below the diagonals. Slots
    are those of one sequence after the other; rows past the end of a sequence are 0. A model with another form has its
    own: response = A_qk b R, or A_qk_beta = A_qk b, `[slots, HV, C, C]`, and k_update = b k_rest; of gradients by
    stages dh alone. One with a `segment` has piece_states before and piece_gradients behind every piece of as many
    tokens, `[pieces, HV, K, V]`.
    """
    recorder = _Recorder(model, rounding, gradients)
    options = replace(options, intermediates=False)
    evaluate(inputs, options, gradients=gradients, rounding=rounding, formats=formats, core=recorder)
    layout = Layout.of(*inputs["q"].shape[:2], inputs.get("cu_seqlens"))
    stages = recorder.by_slot(layout, inputs["v"].shape[2], inputs["q"].device)
    stages |= {above: torch.tril(stages[name], -1) for above, name in ABOVE.items() if name in stages}
    stages |= _of_pieces(stages, layout, model) if model.segment else {}
    for name in ("states", "dh", *OF_PIECES) if options.state_v_first else ():
        if name in stages:
            stages[name] = stages[name].mT
    return stages if rounding.replicas else {name: x[0] for name, x in stages.items()}


def places(inputs: Inputs, chunk: int) -> dict[str, Tensor]:
    """Where sequences and chunks are, int64: offsets, the first row of every sequence and the end, chunk_offsets, its
    first slot and their number, `[N + 1]`; chunk_rows and chunk_counts, first row and tokens of each chunk, `[chunks]`.
    """
    layout = Layout.of(*inputs["g"].shape[:2], inputs.get("cu_seqlens"))
    starts = [(a, i, length) for a, length in zip(layout.starts, layout.lengths) for i in range(0, length, chunk)]
    found = {
        "offsets": [*layout.starts, layout.used],
        "chunk_offsets": layout.chunk_slots(chunk),
        "chunk_rows": [a + i for a, i, _ in starts],
        "chunk_counts": [min(chunk, length - i) for _, i, length in starts],
    }
    return {name: torch.tensor(x, dtype=torch.int64) for name, x in found.items()}


def _of_pieces(stages: dict[str, Tensor], layout: Layout, model: ChunkModel) -> dict[str, Tensor]:
    """The states of the first chunk of every piece, and their gradients behind the last one."""
    slots, step = layout.chunk_slots(model.chunk), model.segment // model.chunk
    spans = [(first, min(first + step, b)) for a, b in pairwise(slots) for first in range(a, b, step)]
    at = {"states": [a for a, _ in spans], "dh": [b - 1 for _, b in spans]}
    return {piece: stages[name][:, at[name]] for piece, name in OF_PIECES.items() if name in stages}


@dataclass
class _Recorder:
    """A core of `operator.evaluate` that keeps the stages of every group of sequences it is asked for."""

    model: ChunkModel
    rounding: Rounding
    gradients: bool
    groups: list[dict[str, Tensor]] = field(default_factory=list)

    def __call__(
        self, rows: Rows, scale: float, do: Tensor | None, dstate: Tensor | None, chunk: int | None
    ) -> dict[str, Tensor]:
        traced = Traced(rows, scale, self.model, self.rounding, self.gradients)
        stages = traced.run(rows.state)
        if self.gradients:
            stages |= self._backward(traced.chunks, stages, do, dstate)
        kept = (*FORWARD, *(BACKWARD if self.gradients else ()))
        self.groups.append({name: stages[name].detach() for name in kept if name in stages})
        return {"o": stages["o"].detach(), "state": stages["state"].detach()}

    def _backward(
        self, traced: ChunkedRows, stages: dict[str, Tensor], do: Tensor, dstate: Tensor
    ) -> dict[str, Tensor]:
        ends = [stages["o"], stages["state"]]
        arriving = [do.expand_as(ends[0]), dstate.expand_as(ends[1])]
        behind, values = traced.carried[1:], traced.values
        if self.model.form != "wy":  # in the others nothing is made of v_new, nor of what else has a gradient here
            found = torch.autograd.grad(ends, behind, arriving)
            return {"dh": torch.stack(found, 2)}
        wanted = [stages["A_qk"], stages["A_kk"], *behind, *values]
        dA_qk, dA_kk, *rest = torch.autograd.grad(ends, wanted, arriving)
        dv_new = torch.stack(rest[len(behind) :], 2)
        z = traced.product("z", stages["inverse"].mT, dv_new, self.model.operand)
        return {"dA_qk": dA_qk, "dA_kk": dA_kk, "dh": torch.stack(rest[: len(behind)], 2), "dv_new": dv_new, "z": z}

    def by_slot(self, layout: Layout, value_heads: int, device: torch.device) -> dict[str, Tensor]:
        slots, out = layout.chunk_slots(self.model.chunk), {}
        groups = [group for group in layout.groups(device) if group.length]
        if len(groups) != len(self.groups):
            raise ValueError(f"inputs have {layout.rows} rows, too many to trace: each length must fit one block")
        for group, stages in zip(groups, self.groups):
            counts = (group.length - torch.arange(0, group.length, self.model.chunk, device=device)).clamp(
                max=self.model.chunk
            )
            inside = torch.arange(self.model.chunk, device=device) < counts[:, None]
            for name, x in stages.items():
                x = x if name in WITHOUT_TOKENS else torch.where(inside[..., None], x, 0.0)
                x = torch.tril(x, LOWER[name]) if name in LOWER else x
                x = x.unflatten(1, (-1, value_heads)).transpose(2, 3)  # [M, sequences, chunks, HV, ..]
                out.setdefault(name, x.new_zeros(x.shape[0], slots[-1], *x.shape[3:]))
                for place, sequence in enumerate(group.sequences.tolist()):
                    out[name][:, slots[sequence] : slots[sequence + 1]] = x[:, place]
        return out
