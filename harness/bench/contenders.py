"""Authority on who competes: the routes of each subject that take a case, why others do not, and the call to time."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

import kda
from harness.adapters.translate import Adapted
from harness.bench.cases import has_gradients
from harness.bench.document import Skipped
from harness.bench.timing import Call
from harness.call import DIFFERENTIABLE, Route, keywords
from harness.foreign import taken
from harness.globs import each, matches
from harness.problem import Case
from harness.serving import one_call
from harness.subject import Subject, load_subject

REFERENCE_ROUTE = "torch"  # no kernel, and minutes at these lengths: only where it is asked for by name
KEEPING = "disable_recompute"


@dataclass(frozen=True)
class Contender:
    """One route of a subject. `forced` is open around its timed calls, and costs them nothing."""

    name: str
    subject: Subject
    route: Route
    forced: Callable[[], AbstractContextManager] = contextlib.nullcontext


def subjects(names: str) -> tuple[list[Subject], list[Skipped]]:
    """The subjects of a comma-separated list, and why others cannot be had."""
    found, missing = [], []
    for name in filter(None, (part.strip() for part in names.split(","))):
        try:
            found.append(load_subject(name))
        except ValueError as error:
            missing.append(Skipped("", "", name, str(error), "missing"))
    return found, missing


def contenders(subjects: Iterable[Subject], routes: str, entry: str = "chunk") -> list[Contender]:
    """Every route of the subjects that serves `entry`; of our own those that match the glob `routes`."""
    made = []
    for subject in subjects:
        for route in subject.routes:
            own = not subject.foreign
            wanted = matches(route.id, routes) and (route.id != REFERENCE_ROUTE or REFERENCE_ROUTE in each(routes))
            if route.entry != entry or (own and not wanted):
                continue
            forced = (lambda route_id=route.id: kda.force_route(route_id)) if own else contextlib.nullcontext
            made.append(Contender(f"{subject.name} {route.id}", subject, route, forced))
    return made


def refusal(contender: Contender, case: Case, mode: str) -> str | None:
    """Why a contender cannot take a case, in its own words, or None."""
    route = contender.route
    if has_gradients(mode) and not route.differentiable:
        return "has no gradients"
    if mode == "kept" and KEEPING not in (taken(route.function) or ()):
        return f"has no {KEEPING}"
    reason = route.lacks(case.problem)
    if reason or contender.subject.foreign or route.entry == "decode":
        return reason
    with contender.forced():
        tensors = {name: case.inputs[name] for name in DIFFERENTIABLE if case.inputs.get(name) is not None}
        explanation = kda.explain(route.function, **tensors, **keywords(case, route.entry))
    return None if explanation.route == route.id else dict(explanation.reasons)[route.id]


def timed_call(contender: Contender, case: Case, mode: str) -> Call:
    """The call to time, its arguments made beforehand; gradients are those of the outputs that `do` and `dht` meet.

    Of decoding the first call, again and again on one pool. Of a forward pass by an adapter the kernel's own call.
    """
    gradients = has_gradients(mode)
    words, function = keywords(case, contender.route.entry), contender.route.function
    words |= {KEEPING: True} if mode == "kept" else {}
    tensors = {
        name: case.inputs[name].detach().requires_grad_(gradients)
        for name in DIFFERENTIABLE
        if case.inputs.get(name) is not None
    }
    if contender.route.entry == "decode":
        return one_call(function.decode, **tensors, **words)
    if not gradients and isinstance(function, Adapted):
        return function.prepared(**tensors, **words)
    arriving = [(i, case.inputs[name]) for i, name in enumerate(("do", "dht")) if case.inputs.get(name) is not None]
    leaves, upstream = list(tensors.values()), [x for _, x in arriving]

    def forward() -> object:
        return function(**tensors, **words)

    def forward_backward() -> object:
        returned = function(**tensors, **words)
        roots = [returned[i] for i, _ in arriving]
        return torch.autograd.grad(roots, leaves, upstream, allow_unused=True)

    return forward_backward if gradients else forward


@contextlib.contextmanager
def conditions(contender: Contender, mode: str) -> Iterator[None]:
    """What a timed call runs under: its own route, and autograd only where gradients are wanted."""
    with contender.forced(), torch.set_grad_enabled(has_gradients(mode)):
        yield
