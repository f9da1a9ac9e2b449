"""Authority on what a declared kernel takes: why a problem is not covered."""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from harness import patterns
from harness.adapters.declare import Adapter
from harness.problem import DTYPES, Problem

NORMALISED = frozenset({"zeros", "onehot", "alternating", "unit", "repeated", "near_repeated", "some_zero", "tiny"})
IN_HALF = frozenset({"zeros", "ones", "ramp", "onehot", "dyadic"})  # patterns that every format holds exactly


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
        yield Restriction(
            said, lambda p: p.dtype not in domain.unit or p.l2norm or (is_unit(p, "q") and is_unit(p, "k"))
        )


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
    if adapter.entry == "chunk" and not has_intermediates(adapter):
        yield Restriction("no intermediate states", lambda p: not p.intermediates)


def has_intermediates(adapter: Adapter) -> bool:
    return adapter.theirs("return_intermediate_states") is not None and "h" in adapter.results


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


def is_unit(problem: Problem, stream: str) -> bool:
    """Whether the rows of q or k are known to be at most 1 in length."""
    return getattr(problem, stream) in NORMALISED and not _edited(problem, stream)


def _no_gate_below(problem: Problem, lowest: float) -> bool:
    """Whether no activated gate is known to be lower; of softplus gates nothing is known."""
    if problem.gate == "lower_bound":
        return problem.lower_bound >= lowest
    edits = [edit.value for edit in problem.edits if edit.tensor == "g"]
    low = patterns.BOUND if problem.g not in patterns.BELOW_BOUND else -math.inf
    return problem.gate == "pregated" and min([low, *edits]) >= lowest
