"""Authority on vLLM's chunk_kda as a subject: V-first states, activated gates, o written over v.

Source: https://github.com/vllm-project/vllm, vllm/model_executor/layers/fla/ops/kda.py.
"""

from dataclasses import replace

from harness.adapters.declare import Adapter, Domain, Gate, States
from harness.adapters.routes import adapter_route
from harness.call import Route
from harness.foreign import foreign_specs

ADAPTER = Adapter(
    "vllm",
    "vllm.model_executor.layers.fla.ops.kda:chunk_kda",
    replace(foreign_specs()["chunk-unbounded"], chunk=64),
    without=("safe_gate", "chunk_size", "return_intermediate_states"),
    gate=Gate(activation="never"),
    beta="never",
    states=States(v_first=True, required=True),
    offsets="int64",
    mutates=("v",),
    differentiable=False,
    domain=Domain(grouped=False, tokens=1),
)


def routes() -> tuple[Route, ...]:
    """Its chunk route. ValueError where it is not installed."""
    return (adapter_route(ADAPTER, f"{__name__}:ADAPTER"),)
