"""Authority on which mutants a diagnosis is measured with, and which stage each of them is a fault of."""

import hashlib
from collections import Counter
from collections.abc import Mapping

from harness.mutants.catalogue import MUTANTS
from harness.mutants.mutant import KINDS, Mutant
from harness.mutants.signing import signable

COUNT = 20

# What a function of the staged route makes, alone or for others: stages of a trace, or results made of stages.
_PAIRS = ("A_qk", "A_kk")
_DECAYED = ("q_decayed", "k_decayed", "k_rest", "decay")
MAKES: Mapping[str, tuple[str, ...]] = {
    "kda_chunk_decay_fwd_kernel": _DECAYED,
    "kda_row_rstd_kernel": (*_DECAYED, *_PAIRS),
    "load_normalised": (*_DECAYED, *_PAIRS),
    "load_gate": (*_DECAYED, *_PAIRS),
    **dict.fromkeys(("kda_chunk_intra_fwd_kernel", "step_factors", "step_range", "step_region", "pairs"), _PAIRS),
    **dict.fromkeys(("half_span", "chunk_kda_staged"), _PAIRS),
    **dict.fromkeys(("kda_solve_blocks_kernel", "kda_join_blocks_kernel", "solve"), ("inverse",)),
    "kda_wy_fwd_kernel": ("w", "u"),
    "kda_chunk_state_fwd_kernel": ("states", "v_new", "ht"),
    "kda_chunk_output_fwd_kernel": ("o",),
    "_gradients": ("dA_qk", "dh", "dv_new", "dh0"),  # which takes the incoming gradients
    "kda_chunk_output_bwd_kernel": ("dA_qk", "dv_new", "dv"),
    "kda_chunk_state_bwd_kernel": ("dh", "dv_new", "dh0"),
    "kda_wy_bwd_kernel": ("z", "dA_kk"),
    "kda_chunk_intra_bwd_kernel": ("dq", "dk", "dg"),
    "kda_chunk_inter_bwd_kernel": ("dq", "dk", "dg", "dbeta"),
}


def chosen() -> tuple[Mutant, ...]:
    """Of every kind one, of a route that exposes its stages where there is one, by the hash of its id; then of the
    kinds with most mutants one more, of other routes first.
    """
    able = signable(MUTANTS)
    kinds = Counter(mutant.kind for mutant in able)
    picked = [
        min((m for m in able if m.kind == kind), key=lambda m: (not _staged(m), _lot(m)))
        for kind in KINDS
        if kinds[kind]
    ]
    for kind, _ in kinds.most_common(COUNT - len(picked)):
        rest = [mutant for mutant in able if mutant.kind == kind and mutant not in picked]
        picked.append(min(rest, key=lambda m: (_staged(m), _lot(m))))
    return tuple(picked)


def _staged(mutant: Mutant) -> bool:
    return mutant.route.startswith("chunk-")


def _lot(mutant: Mutant) -> str:
    return hashlib.sha256(mutant.id.encode()).hexdigest()
