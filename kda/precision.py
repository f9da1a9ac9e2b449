"""Authority on how kernels declare where they round: changing a PrecisionSpec is a reviewed change of the numerics."""

from collections.abc import Mapping
from dataclasses import dataclass, field

# What every route of the operator returns, by quantity.
OUTPUTS: Mapping[str, str] = {
    **dict.fromkeys(("o", "dq", "dk", "dv"), "io"),
    **dict.fromkeys(("ht", "h", "dh0"), "fp32"),
    "dbeta": "beta",
    "dg": "g",
}


@dataclass(frozen=True)
class PrecisionSpec:
    """The rounding points of a route; the harness derives its tolerances from them.

    `stages` maps a stage or an output quantity to its format: fp32, tf32, bf16, fp16, `io` (the dtype of q, k, v),
    `dot` (that, but tf32 for fp32), `g`, `beta` (the dtype of that tensor). Stages that are not named are fp32.
    `excuses` names the domains in which the route may lose digits or overflow: `inf_gate`, `large_cumulative_gate`,
    `anchor_span`, `fp16_overflow`; our own routes excuse nothing.
    """

    algorithm: str  # recurrent | chunk | gate
    stages: Mapping[str, str] = field(default_factory=dict)
    accumulate: str = "fp32"
    exp: str = "exp2"
    chunk: int | None = None
    diagonal: str | None = None  # pair | anchor | halving
    inverse: str | None = None  # substitution | neumann
    excuses: tuple[str, ...] = ()
