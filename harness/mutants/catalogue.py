"""Authority on the catalogue: every mutant, by the part of the sources it is in."""

from harness.mutants import (
    chunk_faults,
    decode_faults,
    fused_bwd_faults,
    fused_faults,
    gate_faults,
    host_faults,
    recurrent_faults,
    segment_faults,
    state_faults,
)
from harness.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (
    *gate_faults.MUTANTS,
    *recurrent_faults.MUTANTS,
    *chunk_faults.MUTANTS,
    *state_faults.MUTANTS,
    *fused_faults.MUTANTS,
    *fused_bwd_faults.MUTANTS,
    *host_faults.MUTANTS,
    *decode_faults.MUTANTS,
    *segment_faults.MUTANTS,
)
