"""Authority on the words that name a problem in test ids, in a fixed order, so that `-k` selects what it says."""

from harness.problem import Problem


def words(problem: Problem) -> str:
    """Layout, modes, dtype, KxV and the pattern of the gates."""
    ragged = problem.packed and (0 in problem.lengths or problem.tail > 0)
    layout = ("varlen-ragged" if ragged else "varlen") if problem.packed else "dense"
    flags = {
        "gva": problem.group > 1,
        problem.gate: True,
        "l2norm": problem.l2norm,
        "beta_sigmoid": problem.beta_sigmoid,
        "neg_eigval": problem.neg_eigval,
        "v_first": problem.v_first,
        "intermediates": problem.intermediates,
    }
    values = [problem.g, f"A_{problem.A_log}"] if problem.A_log else [problem.g]
    present = [word for word, there in flags.items() if there]
    dtype = problem.gate_dtype if problem.entry == "gate" else problem.dtype
    return "-".join([layout, *present, dtype, f"{problem.K}x{problem.V}", *values])
