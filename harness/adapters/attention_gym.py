"""Authority on attention-gym's KDA as a subject, with cumulative log2 gates as it had them, or natural ones of a token.

Source: https://github.com/meta-pytorch/attention-gym, attn_gym/linear/kda. Which of the two it is says the name of the
gate's argument.
"""

import inspect
from dataclasses import replace

from harness.adapters.declare import Adapter, Domain, Gate, States, imported
from harness.adapters.routes import adapter_route
from harness.call import Route
from harness.foreign import foreign_specs

OPTIONS = ("safe_gate", "chunk_size", "return_intermediate_states")
BEFORE = {"qk_norm": "io"}  # normalised q and k are handed over in their dtype
_SPECS = foreign_specs()
CHUNK = replace(_SPECS["chunk-safe_gate"], chunk=64, stages={**_SPECS["chunk-safe_gate"].stages, **BEFORE})
STEPS = replace(_SPECS["recurrent"], stages={**_SPECS["recurrent"].stages, **BEFORE})

CUMULATIVE = Adapter(
    "attention_gym",
    "attn_gym.linear.kda:chunk_kda",
    CHUNK,
    arguments={"g": "cumulative_gate"},
    without=("scale", *OPTIONS),
    gate=Gate(log="log2", cumulative=64, activation="before", lowest=-5.914),
    l2norm="before",
    beta="never",
    offsets="int32",
    domain=Domain(grouped=False, unit=("fp16",)),
)
NATURAL = replace(
    CUMULATIVE,
    arguments={"g": "gate"},
    without=OPTIONS,
    gate=Gate(activation="before", lowest=-5.914),
    states=States(v_first=True),
)
RECURRENT = replace(
    NATURAL,
    function="attn_gym.linear.kda:recurrent_kda",
    precision=STEPS,
    entry="recurrent",
    route="recurrent",
    without=(),
    gate=Gate(activation="before"),
    differentiable=False,
    domain=Domain(),
)


def routes() -> tuple[Route, ...]:
    """Those of the installed version. ValueError where it is not installed."""
    function = imported("attention_gym", NATURAL.function)
    if "cumulative_gate" in inspect.signature(function).parameters:
        return (adapter_route(CUMULATIVE, f"{__name__}:CUMULATIVE"),)
    own = {"NATURAL": NATURAL, "RECURRENT": RECURRENT}
    return tuple(adapter_route(made, f"{__name__}:{name}") for name, made in own.items())
