"""Authority on coverage: the modes and boundaries that the problems of a run have met, and those that none has."""

from collections import Counter
from collections.abc import Iterable

from harness.problem import Problem

EDGES = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65)  # lengths around the blocks and chunks that kernels have


def met(problem: Problem) -> set[str]:
    """What one problem meets, by name."""
    flags = ("l2norm", "beta_sigmoid", "neg_eigval", "v_first", "intermediates", "initial_state", "final_state")
    sizes = {"GVA": problem.group > 1, "heads": problem.heads > 1, "K != V": problem.K != problem.V}
    lengths = {f"length {n}" for n in problem.lengths if n in EDGES}
    layout = {
        "packed": problem.packed,
        "batch": not problem.packed and len(problem.lengths) > 1,
        "tail": problem.tail > 0,
        "no sequence": not problem.lengths,
        "over 1000 tokens": max(problem.lengths, default=0) > 1000,
        "int32 offsets": problem.packed and problem.offsets == "int32",
        "K not a power of two": problem.K & (problem.K - 1) != 0,
    }
    named = {name for name, there in {**sizes, **layout}.items() if there}
    values = {f"gate {problem.gate}", f"g {problem.g}", problem.dtype, f"loss {problem.loss}"}
    if problem.entry != "gate":
        values |= {f"k {problem.k}", f"beta {problem.beta}"}
    return named | lengths | values | {flag for flag in flags if getattr(problem, flag)}


def everything(problems: Iterable[Problem]) -> set[str]:
    """What a set of problems would meet if all of them were run."""
    return set().union(*map(met, problems))


def shown(counts: Counter[str], asked: set[str]) -> list[str]:
    """Lines for a reader: how often each was met, and what was asked for but not met."""
    lines = [", ".join(f"{name} {counts[name]}" for name in sorted(counts))] if counts else []
    unmet = sorted(asked - counts.keys())
    return lines + ([f"not met: {', '.join(unmet)}"] if unmet else [])
