"""Authority on moving problems into a declared kernel's domain: the nearest one there, in its families' spirit."""

import contextlib
import math
from collections.abc import Callable, Collection
from dataclasses import replace

from harness import patterns
from harness.adapters.declare import Adapter
from harness.adapters.domain import IN_HALF, has_intermediates, is_unit, lacks
from harness.problem import Problem

# Raw gates, and the lower_bound and A_log, that do about what an activated pattern does; what is not here has none.
RAW_AND_BOUND = {
    **{"zeros": ("zeros", -1e-6), "slow": ("zeros", -2e-4), "dyadic": ("zeros", -2 * math.log(2))},
    **{"bound": ("raw_30", -5.0), "half_bound": ("raw_30", -5.0), "time_constants": ("gauss", -0.25)},
    **{"mild": ("gauss", -1.0), "bounded": ("gauss", -5.0)},
}
RAW_AND_A_LOG = {
    **{"zeros": ("zeros", "extreme_minus_80"), "mild": ("gauss", "zeros"), "bounded": ("gauss", "zeros")},
    **{"spikes_50": ("raw_100", "zeros"), "bound": ("raw_30", "zeros"), "half_bound": ("raw_30", "zeros")},
    "time_constants": ("gauss", "kimi"),
}
ACTIVATED = {"lower_bound": "bounded", "softplus": "mild"}
LOGITS = {"zeros": "zeros", "half": "zeros", "dyadic": "gauss", "uniform": "gauss"}  # the others are near 1


def nearest(adapter: Adapter) -> Callable[[Problem], Problem]:
    """The nearest problem inside the domain, as a function of one anywhere; of what cannot be had, as near as it gets:
    what is still lacking then is why.
    """
    outside = lacks(adapter)

    def moved(problem: Problem) -> Problem:
        if outside(problem) is None:
            return problem
        for changes in (_formats, _structure, _flags, _gates, _values):
            with contextlib.suppress(ValueError):  # no legal problem
                problem = replace(problem, **changes(adapter, problem))
        return problem

    return moved


def _formats(adapter: Adapter, problem: Problem) -> dict[str, object]:
    domain = adapter.domain
    menus = {"dtype": domain.dtypes, "gate_dtype": domain.gate_dtypes}
    moved = {name: menu[0] for name, menu in menus.items() if getattr(problem, name) not in menu}
    return {**moved, "precision": "ieee"}


def _structure(adapter: Adapter, problem: Problem) -> dict[str, object]:
    domain = adapter.domain
    sizes = {name: _size(getattr(problem, name), getattr(domain, name)) for name in ("K", "V")}
    sizes = dict.fromkeys(sizes, max(sizes.values())) if domain.square else sizes
    moved: dict[str, object] = {**sizes, "lengths": tuple(max(n, domain.shortest) for n in problem.lengths)}
    if problem.packed and not adapter.theirs("cu_seqlens"):
        moved |= {"packed": False, "tail": 0, "lengths": (max(moved["lengths"], default=1),)}
    if not sum(moved["lengths"]) and domain.tokens and moved["lengths"]:
        moved["lengths"] = (domain.tokens,) * len(moved["lengths"])
    moved |= {} if domain.grouped else {"group": 1}
    moved |= {} if domain.tail else {"tail": 0}
    moved |= {} if has_intermediates(adapter) else {"intermediates": False}
    moved |= {} if adapter.theirs("scale") else {"scale": None}
    if adapter.entry != "decode":
        return moved | ({} if adapter.theirs("initial_state") else {"initial_state": False})
    moved |= {} if adapter.theirs("num_accepted_tokens") else {"rejected": 0}
    return moved | ({} if problem.state_dtype in domain.pools else {"state_dtype": domain.pools[0]})


def _size(wanted: int, menu: Collection[int]) -> int:
    return min((n for n in menu if n >= wanted), default=max(menu))


def _flags(adapter: Adapter, problem: Problem) -> dict[str, object]:
    moved: dict[str, object] = {}
    if adapter.l2norm in ("always", "never"):
        moved["l2norm"] = adapter.l2norm == "always"
    if adapter.l2norm == "before" and adapter.differentiable and problem.l2norm and problem.gradients:
        moved |= {"l2norm": False} | {name: "unit" for name in ("q", "k") if not is_unit(problem, name)}
    if adapter.beta in ("always", "never") and problem.beta_sigmoid != (adapter.beta == "always"):
        logits = adapter.beta == "always"
        beta = LOGITS.get(problem.beta, "high") if logits else "uniform"
        moved |= {"beta_sigmoid": logits, "beta": beta, "neg_eigval": False}
    return moved | ({} if adapter.neg_eigval else {"neg_eigval": False})


def _gates(adapter: Adapter, problem: Problem) -> dict[str, object]:
    gate, moved = adapter.gate, {}
    if gate.activation == "never" and problem.gate != "pregated":
        return {"gate": "pregated", "lower_bound": None, "A_log": None, "dt_bias": None, "g": ACTIVATED[problem.gate]}
    if gate.activation == "always" and problem.gate == "pregated" and adapter.entry != "gate":
        if gate.bounds is None and problem.g in RAW_AND_A_LOG:
            g, A_log = RAW_AND_A_LOG[problem.g]
            moved = {"gate": "softplus", "g": g, "A_log": A_log}
        elif problem.g in RAW_AND_BOUND:
            g, bound = RAW_AND_BOUND[problem.g]
            moved = {"gate": "lower_bound", "g": g, "lower_bound": bound, "A_log": "zeros"}
    elif problem.gate == "lower_bound" and gate.bounds is None:
        moved = {"gate": "softplus", "lower_bound": None, "safe_gate": False, "A_log": problem.A_log or "zeros"}
    elif problem.gate != "pregated" and gate.bounds is not None:
        low, high = max(gate.bounds[0], gate.lowest), gate.bounds[1]
        if problem.gate == "softplus" and (not gate.softplus or low > -math.inf):
            moved = {"gate": "lower_bound", "lower_bound": max(low, patterns.BOUND)}
        elif problem.gate == "lower_bound" and not low <= problem.lower_bound < high:
            moved = {"lower_bound": max(low, patterns.BOUND)}
    if moved.get("gate", problem.gate) != "pregated":
        moved |= {name: "zeros" for name in gate.needs if moved.get(name, getattr(problem, name)) is None}
    return moved


def _values(adapter: Adapter, problem: Problem) -> dict[str, object]:
    moved: dict[str, object] = {}
    if problem.dtype in adapter.domain.unit and not problem.l2norm:
        moved = {name: "unit" for name in ("q", "k") if not is_unit(problem, name)}
    if adapter.states.dtype != "fp32" and problem.h0 not in IN_HALF:
        moved["h0"] = "dyadic"
    return moved
