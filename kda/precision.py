"""Authority on how kernels declare where they round: changing a PrecisionSpec is a reviewed change of the numerics."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# What every route of the operator returns, by quantity.
OUTPUTS: Mapping[str, str] = {
    **dict.fromkeys(("o", "dq", "dk", "dv"), "io"),
    **dict.fromkeys(("ht", "h", "dh0"), "fp32"),
    "dbeta": "beta",
    "dg": "g",
}

# Formats of matrix products, by the dtype of q, k and v; for fp32 tensors by the call's `precision` too.
PRODUCTS: Mapping[str, Mapping[str, str]] = {
    "dot": {"bf16": "bf16", "fp16": "fp16", "ieee": "tf32", "tf32": "tf32"},  # what hardware does to fp32, unasked
    "product": {"bf16": "bf16", "fp16": "tf32_rn", "ieee": "fp32", "tf32": "tf32_rn"},
    "wide": {"bf16": "tf32_rn", "fp16": "tf32_rn", "ieee": "fp32", "tf32": "tf32_rn"},
}


@dataclass(frozen=True)
class PrecisionSpec:
    """The rounding points of a route; the harness derives its tolerances from them.

    `stages` maps a stage or an output quantity to its format: fp32, tf32 (truncated), tf32_rn (to nearest), bf16, fp16,
    `io` (the dtype of q, k, v), `g`, `beta`, `pool` (the dtype of that tensor), or a row of PRODUCTS, which goes by
    `io` and, where that is fp32, by the call's `precision`. Stages that are not named are fp32. The stage `sigmoid` may
    be `tanh_approx`: activations by the GPU's approximate tanh.
    `excuses` names the domains in which the route may lose digits or overflow: `inf_gate`, `large_cumulative_gate`,
    `anchor_span`, `fp16_overflow`; our own routes excuse nothing.
    """

    algorithm: str  # recurrent | chunk | gate
    stages: Mapping[str, str] = field(default_factory=dict)
    accumulate: str = "fp32"
    exp: str = "exp2"
    chunk: int | None = None  # tokens of the algorithm's own chunk; None: the call's chunk_size
    diagonal: str | None = None  # pair | halving | anchor | anchor_apart
    inverse: str | None = None  # substitution | neumann
    form: str | None = None  # wy | residual | solved | stored
    excuses: tuple[str, ...] = ()
    precision: str = "ieee"  # of the products of fp32 tensors: ieee | tf32
    segment: int | None = None  # tokens of pieces whose states come from a chain of transitions; None: no pieces
    gradients: "PrecisionSpec | None" = None  # that of the backward pass, where it rounds at other points

    def of_call(self, chunk_size: int, precision: str, segment: int | None = None) -> "PrecisionSpec":
        """What is declared for a call with these arguments, and with pieces of that many tokens."""
        own_chunk = self.algorithm != "chunk" or self.chunk is not None
        gradients = None if self.gradients is None else self.gradients.of_call(chunk_size, precision, segment)
        chunk = self.chunk if own_chunk else chunk_size
        return replace(self, chunk=chunk, precision=precision, segment=segment or self.segment, gradients=gradients)
