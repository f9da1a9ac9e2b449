"""Authority on SGLang's chunk_kda as a subject: states in a pool that moves on, g and v written over.

Source: https://github.com/sgl-project/sglang, python/sglang/srt/layers/attention/fla/kda.py. A raw gate is one that
comes with A_log.
"""

from dataclasses import replace

from harness.adapters.declare import Adapter, Domain, Gate, States
from harness.adapters.routes import adapter_route
from harness.call import Route
from harness.foreign import foreign_specs

ADAPTER = Adapter(
    "sglang",
    "sglang.srt.layers.attention.fla.kda:chunk_kda",
    replace(foreign_specs()["chunk-unbounded"], chunk=64),
    arguments={"state_indices": "initial_state_indices"},
    without=("use_gate_in_kernel", "safe_gate", "chunk_size", "return_intermediate_states"),
    gate=Gate(needs=("A_log",)),
    beta="never",
    states=States(v_first=True, final="pool"),
    offsets="int64",
    results=("o",),
    mutates=("g", "v"),
    differentiable=False,
    domain=Domain(tokens=1),
)


def routes() -> tuple[Route, ...]:
    """Its chunk route. ValueError where it is not installed."""
    return (adapter_route(ADAPTER, f"{__name__}:ADAPTER"),)
