"""Authority on saying what a finding is like: the probes put to its route, and the known faults that answer alike."""

import weakref
from collections.abc import Sequence

from harness.call import Route
from harness.likeness.book import Like, likest
from harness.likeness.signature import Signature, sign
from harness.results import Finding
from harness.runner import Runner

SHOWN = 3
# Findings of one route share its answers: what a runner's routes have said so far, by (route, entry, seed).
_ASKED: weakref.WeakKeyDictionary[Runner, dict[tuple[str, str, int], Signature]] = weakref.WeakKeyDictionary()


def asked(runner: Runner, route: Route, seed: int, deadline: float) -> Signature:
    """The answers of a route to the probes, as many as there is time for; those that are known are not asked again."""
    known = _ASKED.setdefault(runner, {})
    key = (route.id, route.entry, seed)
    known[key] = sign(runner, route, seed, deadline, known.get(key))
    return known[key]


def looks_like(runner: Runner, route: Route, finding: Finding, seed: int, deadline: float) -> tuple[Like, ...]:
    """The known faults that the failure is likest to, the best first; none where no probe is answered wrong."""
    if finding.klass == "CRASH" and runner.child is None and runner.device != "cpu":
        return ()  # another such call would cost this process its GPU
    found = likest(asked(runner, route, seed, deadline), route.id, route.entry, finding.quantity)
    return tuple(found[:SHOWN])


def said(likes: Sequence[Like], foreign: bool) -> str:
    """Them in a line: by name for our own kernels, for others the kind of fault and an example; "" for none."""
    if foreign:
        return "; ".join(f"kind {one.known.kind} {one.score:.2f}, as where {one.known.fault}" for one in likes)
    return "; ".join(map(str, likes))
