"""Authority on what a declared kernel takes: why a problem is not covered, and the nearest one that is."""

import contextlib
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from harness import patterns
from harness.adapters.declare import Adapter
from harness.problem import DTYPES, Problem

NORMALISED = frozenset({"zeros", "onehot", "alternating", "unit", "repeated", "near_repeated", "some_zero", "tiny"})
IN_HALF = frozenset({"zeros", "ones", "ramp", "onehot", "dyadic"})  # patterns that every format holds exactly

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


@dataclass(frozen=True)
class Restriction:
    """One thing that a kernel is documented to take, in words, and whether a problem is such."""

    text: str
    allows: Callable[[Problem], bool]


def lacks(adapter: Adapter) -> Callable[[Problem], str | None]:
    """Why a problem is outside what is documented, or None."""
    found = list(restrictions(adapter))
    return lambda problem: next((f"takes {one.text}" for one in found if not one.allows(problem)), None)


def limits(adapter: Adapter) -> tuple[str, ...]:
    """Everything that the kernel is documented to take only in part, in words."""
    return tuple(f"takes {one.text}" for one in restrictions(adapter))


def restrictions(adapter: Adapter) -> Iterator[Restriction]:
    """Of a declaration, those that restrict anything."""
    yield from _of_formats(adapter)
    if adapter.entry != "gate":
        yield from _of_shapes(adapter)
        yield from _of_states(adapter)
        yield from _of_flags(adapter)
    yield from _of_gates(adapter)


def _of_formats(adapter: Adapter) -> Iterator[Restriction]:
    domain = adapter.domain
    for name, said, menu in (("dtype", "q, k, v and beta", domain.dtypes), ("gate_dtype", "g", domain.gate_dtypes)):
        if set(DTYPES) - set(menu) and not (name == "dtype" and adapter.entry == "gate"):
            yield Restriction(f"{said} in {_either(menu)}", lambda p, name=name, menu=menu: getattr(p, name) in menu)
    if adapter.entry == "chunk":
        yield Restriction("the default precision of products", lambda p: p.precision == "ieee")


def _of_shapes(adapter: Adapter) -> Iterator[Restriction]:
    domain = adapter.domain
    for name in ("K", "V"):
        menu = getattr(domain, name)
        if not set(range(1, 257)) <= set(menu):
            yield Restriction(f"{name} = {_either(menu)}", lambda p, name=name, menu=menu: getattr(p, name) in menu)
    if domain.square:
        yield Restriction("K = V", lambda p: p.K == p.V)
    if not domain.grouped:
        yield Restriction("one value head to a query head", lambda p: p.group == 1)
    if domain.tokens:
        yield Restriction(f"at least {domain.tokens} tokens", lambda p: math.prod(p.batch) >= domain.tokens)
    if domain.shortest:
        yield Restriction(
            f"sequences of at least {domain.shortest} tokens", lambda p: min(p.lengths, default=0) >= domain.shortest
        )
    if not domain.tail:
        yield Restriction("no tokens behind the last offset", lambda p: not p.tail)
    if not adapter.theirs("cu_seqlens"):
        yield Restriction("dense batches", lambda p: not p.packed)
    if not adapter.theirs("scale"):
        yield Restriction("the default scale", lambda p: p.scale is None)
    if domain.unit:
        said = f"normalised q and k in {_either(domain.unit)}"
        yield Restriction(said, lambda p: p.dtype not in domain.unit or p.l2norm or (_unit(p, "q") and _unit(p, "k")))


def _of_states(adapter: Adapter) -> Iterator[Restriction]:
    states, has = adapter.states, adapter.theirs
    if adapter.entry == "decode":
        menu = adapter.domain.pools
        if len(menu) < 2:
            yield Restriction(f"states in {_either(menu)}", lambda p: p.state_dtype in menu)
        if not has("num_accepted_tokens"):
            yield Restriction("no drafts", lambda p: not p.rejected)
        return
    if not has("initial_state"):
        yield Restriction("no initial state", lambda p: not p.initial_state)
    elif states.dtype != "fp32":
        said = f"initial states in {states.dtype}, which not every pattern is exact in"
        yield Restriction(said, lambda p: not p.initial_state or (p.h0 in IN_HALF and not _edited(p, "h0")))
    if states.final == "returned" and "ht" not in adapter.results:
        yield Restriction("no final state", lambda p: not p.final_state)
    if adapter.entry == "chunk" and not (has("return_intermediate_states") and "h" in adapter.results):
        yield Restriction("no intermediate states", lambda p: not p.intermediates)


def _of_flags(adapter: Adapter) -> Iterator[Restriction]:
    for name, place, said in (
        ("l2norm", adapter.l2norm, "normalisation of q and k in the kernel"),
        ("beta_sigmoid", adapter.beta, "logits for beta"),
    ):
        if place in ("always", "never"):
            want = place == "always"
            yield Restriction(
                f"{'' if want else 'no '}{said}", lambda p, name=name, want=want: getattr(p, name) == want
            )
    if adapter.l2norm == "before" and adapter.differentiable:  # they would go through gradients rounded to q's dtype
        yield Restriction(
            "no gradients of q and k that are normalised before", lambda p: not (p.l2norm and p.gradients)
        )
    if not adapter.neg_eigval:
        yield Restriction("no allow_neg_eigval", lambda p: not p.neg_eigval)


def _of_gates(adapter: Adapter) -> Iterator[Restriction]:
    gate = adapter.gate
    if gate.activation == "always" and adapter.entry != "gate":
        yield Restriction("raw gates", lambda p: p.gate != "pregated")
    if gate.activation == "never":
        yield Restriction("activated gates", lambda p: p.gate == "pregated")
    else:
        yield from _of_raw_gates(adapter)
    if gate.lowest > -math.inf:
        yield Restriction(f"gates from {gate.lowest:g}", lambda p: _no_gate_below(p, gate.lowest))


def _of_raw_gates(adapter: Adapter) -> Iterator[Restriction]:
    gate = adapter.gate
    if not gate.softplus:
        yield Restriction("a lower_bound for raw gates", lambda p: p.gate != "softplus")
    if gate.bounds is None:
        yield Restriction("no lower_bound", lambda p: p.lower_bound is None)
    elif gate.bounds != (-math.inf, 0.0):
        low, high = gate.bounds
        yield Restriction(
            f"a lower_bound in [{low:g}, {high:g})", lambda p: p.lower_bound is None or low <= p.lower_bound < high
        )
    for name in gate.needs:
        yield Restriction(
            f"{name} with raw gates", lambda p, name=name: p.gate == "pregated" or getattr(p, name) is not None
        )


def _either(menu: Collection[object]) -> str:
    items = sorted(menu, key=lambda item: (str(type(item)), item))
    runs = len(items) > 3 and items == list(range(items[0], items[-1] + 1))
    return f"{items[0]}..{items[-1]}" if runs else " or ".join(map(str, items))


def _edited(problem: Problem, stream: str) -> bool:
    return any(edit.tensor == stream for edit in problem.edits)


def _unit(problem: Problem, stream: str) -> bool:
    return getattr(problem, stream) in NORMALISED and not _edited(problem, stream)


def _no_gate_below(problem: Problem, lowest: float) -> bool:
    """Whether no activated gate is known to be lower; of softplus gates nothing is known."""
    if problem.gate == "lower_bound":
        return problem.lower_bound >= lowest
    edits = [edit.value for edit in problem.edits if edit.tensor == "g"]
    low = patterns.BOUND if problem.g not in patterns.BELOW_BOUND else -math.inf
    return problem.gate == "pregated" and min([low, *edits]) >= lowest


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
        moved |= {"l2norm": False} | {name: "unit" for name in ("q", "k") if not _unit(problem, name)}
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
        moved = {name: "unit" for name in ("q", "k") if not _unit(problem, name)}
    if adapter.states.dtype != "fp32" and problem.h0 not in IN_HALF:
        moved["h0"] = "dyadic"
    return moved
