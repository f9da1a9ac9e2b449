"""Authority on the stages of one call on a route that shows them: every intermediate by name, chunk by chunk."""

import torch
from torch import Tensor

from kda import registry, trace
from kda.chunk_fwd import SAFE_GATE, UNBOUNDED
from kda.contract import Call


def chunk_stages(
    call: Call,
    route: str | None = None,
    do: Tensor | None = None,
    dht: Tensor | None = None,
) -> dict[str, Tensor]:
    """What each stage of a validated call left, as NOTE [Shown stages] has it; with do `[B, T, HV, V]` those of the
    backward pass too.

    States and their gradients are V-first where the call's are. Also o, and every gradient by argument. Tensors may be
    strided. Without `route` that of the staged kernels for the call's gates.
    """
    served = registry.route_named(route or (SAFE_GATE if call.safe_gate else UNBOUNDED))
    with torch.no_grad(), trace.traced() as found:
        o, *_ = served.run(call)
        gradients = {} if do is None else served.gradients(call, do, dht)
    return in_layout(found, call.state_v_first) | {"o": o, **gradients}


def in_layout(stages: dict[str, Tensor], v_first: bool) -> dict[str, Tensor]:
    """Stages as they were shown, states in the layout of the call's own."""
    return {name: x.mT if v_first and name in trace.STATES else x for name, x in stages.items()}
