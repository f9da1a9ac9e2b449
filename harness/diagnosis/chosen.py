"""Authority on which mutants a diagnosis is measured with, and which stage each of them is a fault of."""

import hashlib
from collections import Counter
from collections.abc import Mapping

from harness.mutants.catalogue import MUTANTS
from harness.mutants.mutant import KINDS, Mutant
from harness.mutants.signing import signable
from oracle.trace import PLACES

COUNT = 20

# What a function (or that of a file) makes, alone or for others: stages of a trace, or results made of stages. Those
# that are not here are used by every kernel, or show nothing between their inputs and results.
_PAIRS = ("A_qk", "A_kk")
_DECAYED = ("q_decayed", "k_decayed", "k_rest", "decay")
_OF_FUSED = ("q_decayed", "k_decayed", "k_update", "inverse", "response", "A_qk_beta")
_OF_CHUNKS = ("dq", "dk", "dg", "dbeta", "dA_log", "ddt_bias")
_OF_PIECES = ("piece_states", "piece_gradients")
MAKES: Mapping[str, tuple[str, ...]] = {
    "kda_chunk_decay_fwd_kernel": _DECAYED,
    "kda_row_rstd_kernel": (*_DECAYED, *_PAIRS),
    "load_normalised": (*_DECAYED, *_PAIRS),
    "load_gate": (*_DECAYED, *_PAIRS),
    **dict.fromkeys(("kda_chunk_intra_fwd_kernel", "step_factors", "step_range", "step_region", "pairs"), _PAIRS),
    "half_span": _PAIRS,
    **dict.fromkeys(("chunk_kda_staged", "choose"), ("route",)),  # which kernels run at all
    **dict.fromkeys(("kda/chunk_tiles.py", "split_three", "range_sums"), (*_DECAYED, *_PAIRS)),
    "load_betas": ("inverse", "w", "u", "z", "dA_kk"),
    **dict.fromkeys(("offsets", "chunk_offsets"), ("offsets", "chunk_offsets")),
    "kda/chunk_index.py:of": PLACES,
    **dict.fromkeys(("kda_solve_blocks_kernel", "kda_join_blocks_kernel", "solve"), ("inverse",)),
    "kda_wy_fwd_kernel": ("w", "u"),
    **dict.fromkeys(("kda_chunk_state_fwd_kernel", "next_state"), ("states", "v_new", "ht")),
    "kda_chunk_output_fwd_kernel": ("o",),
    "_gradients": ("dA_qk", "dh", "dv_new", "dh0"),  # which takes the incoming gradients
    "kda_chunk_output_bwd_kernel": ("dA_qk", "dA_qk_above", "dv_new", "dv"),
    **dict.fromkeys(("kda_chunk_state_bwd_kernel", "earlier_state"), ("dh", "dv_new", "dh0")),
    **dict.fromkeys(("second_half", "load_state", "times_state"), ("states", "v_new", "ht", "dh", "dv_new", "dh0")),
    "kda_wy_bwd_kernel": ("z", "dA_kk", "dA_kk_above", "dv", "dbeta"),
    "kda_chunk_intra_bwd_kernel": ("dq", "dk", "dg"),
    "kda_chunk_inter_bwd_kernel": ("dq", "dk", "dg", "dbeta"),
    "kda/chunk_bwd.py:backward": ("dv", *_OF_CHUNKS),  # what becomes of the gradients that kernels left
    "kda_fused_index_kernel": ("chunk_rows", "chunk_counts"),
    **dict.fromkeys(("kda_fused_prep_kernel", "log2_gate"), (*_OF_FUSED, "decay")),
    "split_half": (*_OF_FUSED, "dg"),
    **dict.fromkeys(("invert_unit_lower", "kda/fused_fwd.py:_of"), ("inverse", "response")),
    **dict.fromkeys(("kda_fused_scan_kernel", "scan_step", "run_scan"), ("states", "o", "ht")),
    **dict.fromkeys(("kda_fused_scan_bwd_kernel", "reverse_step"), ("dh", "dv", "dh0")),
    "sequence_place": ("states", "o", "ht", "dh", "dv", "dh0"),
    **dict.fromkeys(("kda_fused_chunk_bwd_kernel", "range_adjoint", "pairs_of_step", "store_gradient"), _OF_CHUNKS),
    **dict.fromkeys(("fast_bounded_adjoint", "_chunks"), _OF_CHUNKS),
    "kda/segments.py:of": (*PLACES, *_OF_PIECES),
    **dict.fromkeys(("chain", "kda/fused_segments.py:maps", "kda/fused_fwd.py:maps"), _OF_PIECES),
    "chain_back": ("piece_gradients",),
    "kda/fused_segments.py:gradients": ("dh",),  # which takes the pieces' gradients to the reverse scan
    "last": ("ht",),
}


def made_by(place: str) -> tuple[str, ...]:
    """What `file:function` makes."""
    return MAKES.get(place, MAKES.get(place.rpartition(":")[2], ()))


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
