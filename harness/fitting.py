"""Authority on problems for routes that take a part of the operator: the nearest problem that such a route takes."""

from collections.abc import Callable
from dataclasses import replace

from harness.problem import STATE_DTYPES, Problem

FUSED_WIDTHS = (64, 128, 256)
SCHEDULES = ((3, 1), (8, 0), (1, 0), (2, 3), (1, 7))  # tokens of a call, and drafts after them ...
LONG, SPARING = 70, (7, 1)  # ... and for longer sequences, since each call is a launch


def for_bounded_gates(problem: Problem) -> Problem | None:
    """With the promise that the gates are bounded; None where they are not."""
    return replace(problem, safe_gate=True) if problem.bounded else None


def for_any_gates(problem: Problem) -> Problem:
    return replace(problem, safe_gate=False)


def for_fused(problem: Problem) -> Problem | None:
    """In bf16, K and V raised to a size that has tiles; None for what cannot be had at all."""
    if problem.intermediates:
        return None
    wider = {name: min(n for n in FUSED_WIDTHS if n >= getattr(problem, name)) for name in ("K", "V")}
    return replace(problem, dtype="bf16", precision="ieee", **wider)


# One after the other; the two paths of a chunk route each get what its gates allow, with the flag that asks for it.
FITS: dict[str, tuple[Callable[[Problem], Problem | None], ...]] = {
    "chunk-safe_gate": (for_bounded_gates,),
    "chunk-unbounded": (for_any_gates,),
    "fused-safe_gate": (for_fused, for_bounded_gates),
    "fused-unbounded": (for_fused, for_any_gates),
    "segment_parallel-safe_gate": (for_fused, for_bounded_gates),
    "segment_parallel-unbounded": (for_fused, for_any_gates),
}


def fit(route_id: str, problem: Problem) -> Problem | None:
    """The nearest problem that a route takes, or None; the problem itself for one that takes everything."""
    nearest: Problem | None = problem
    for step in FITS.get(route_id, ()):
        nearest = None if nearest is None else step(nearest)
    return nearest


def for_decoding(problem: Problem) -> Problem:
    """Decoded call by call; how many tokens a call, how many drafts and in which pool goes by the problem."""
    turn = sum(problem.lengths) + problem.seed
    short = max(problem.lengths, default=0) <= LONG
    (step, rejected), states = SCHEDULES[turn % len(SCHEDULES)] if short else SPARING, STATE_DTYPES[turn // 2 % 2]
    state = {"initial_state": True, "final_state": True, "h0": problem.h0 if problem.initial_state else "zeros"}
    calls = {"step": step, "rejected": rejected, "state_dtype": states}
    return replace(problem, entry="decode", loss="none", **state, **calls)


def drawn_for(entry: str) -> str:
    """The entry that problems are drawn for: whole sequences are decoded as they are written for the recurrent one."""
    return "recurrent" if entry == "decode" else entry


def fitted(problem: Problem, route_id: str, entry: str) -> Problem | None:
    """A problem for a route that can take it; one written for the recurrent entry goes to chunk and decode too."""
    if problem.entry != entry:
        if problem.entry != "recurrent" or entry not in ("chunk", "decode"):
            return None
        problem = replace(problem, entry="chunk") if entry == "chunk" else for_decoding(problem)
    return fit(route_id, problem)


def lacks_fused(problem: Problem) -> str | None:
    """Why the fused routes cannot take a problem as it is, or None; its gates apart."""
    nearest = for_fused(problem)
    return None if nearest == problem else f"takes {nearest or 'nothing like it'} instead"
